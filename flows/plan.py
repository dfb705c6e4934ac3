"""A plan: the stages that one run needs, or several. Nothing runs until it is complete, so none runs needlessly."""

import logging
from dataclasses import dataclass
from itertools import takewhile

from prefect import Task
from prefect.exceptions import UnfinishedRun
from prefect.futures import PrefectFuture, as_completed
from prefect.task_runners import ThreadPoolTaskRunner
from prefect.utilities.callables import get_call_parameters

from flows.logs import running
from flows.pages import show
from flows.summary import brief_duration, counts, relative
from model import InputError
from model.quantities import counted
from tasks.corpus.fetch import downloads
from tasks.glue import probes
from tasks.report import refuse_older
from tasks.stage import Params
from tasks.store import Artifact, find, read_manifest, refresh, verify
from tasks.text.printable import printable
from tasks.workers import pool, side_by_side

SEVERAL = "finetune"  # the stage with many runs, which don't wait for each other
log = logging.getLogger(__name__)


def as_list(given: "Step | list[Step]") -> "list[Step]":
    """One step or several as a list."""
    return given if isinstance(given, list) else [given]


@dataclass(eq=False)
class Step:
    """A stage to run with these params on the artifacts of other steps.

    `run`: where a plan has several runs, what distinguishes those that need the step, as ("15 %", "seed 0").
    """

    task: Task
    params: Params
    inputs: tuple["Step | list[Step]", ...]
    run: tuple[str, ...] = ()

    @property
    def stage(self) -> str:
        """The stage's name."""
        return self.task.name

    @property
    def title(self) -> str:
        """The stage's name, with the task and seed of a finetuning run, and the run that it belongs to."""
        return " ".join(filter(None, (self.stage, self.params.label(), self.run and f"[{', '.join(self.run)}]")))

    @property
    def upstream(self) -> "set[Step]":
        """The steps whose artifacts it reads."""
        return {step for given in self.inputs for step in as_list(given)}


Problems = dict[Step, Exception | None]  # failed steps with their errors; None for one that needs a failed one


class Plan:
    """Collects steps; `run` carries out those that the last stage needs, `run_each` those of several runs.

    `until`: the last stage; `use`: keys of artifacts by stage, to take in place of running it; `again`: stages to
    run though they are cached.
    """

    def __init__(self, until: str, use: dict[str, str], again: list[str]) -> None:
        self.until, self.again, self.steps, self.adding = until, set(again), [], ()
        self.made: dict[Step, Artifact] = {}  # the artifact of each needed step, made or not
        self.anew: set[Step] = set()  # needed steps that run though they are cached
        self.given = {
            stage: list(dict.fromkeys(find(stage, key.strip()) for key in keys.split(",")))
            for stage, keys in use.items()
        }
        if several := [stage for stage, artifacts in self.given.items() if len(artifacts) > 1 and stage != SEVERAL]:
            raise InputError(
                f"use names several artifacts of {several[0]}; expected one, since only finetune takes several."
            )

    def __call__(self, task: Task, params: Params, *inputs: "Step | list[Step]") -> Step:
        """Add a step for the run `adding`, unless another run has the same one, which then belongs to both."""
        for step in self.steps:
            if (step.task, step.params, step.inputs) == (task, params, inputs):
                pairs = takewhile(lambda pair: pair[0] == pair[1], zip(step.run, self.adding, strict=False))
                step.run = tuple(own for own, _ in pairs)
                return step
        step = Step(task, params, inputs, self.adding)
        self.steps.append(step)
        return step

    def warn_of_unused(self, changed: dict[str, dict]) -> None:
        """Log a warning if this run doesn't reach an overridden stage."""
        reached = {step.stage for step in self.needed()}
        unused = [stage for stage in changed if stage not in reached]
        if "decontaminate" in reached and set(changed.get("finetune", ())) <= {"data"}:  # which decontaminate reads
            unused = [stage for stage in unused if stage != "finetune"]
        if unused:
            log.warning("This run doesn't reach %s; overrides of it have no effect.", ", ".join(unused))

    def needed(self) -> list[Step]:
        """The steps that the last stage needs, in order.

        Raises InputError if `use` or `refresh` names a stage that this run doesn't reach.
        """
        needed, reached = [], {self.until}
        wanted = {step for step in self.steps if step.stage == self.until}
        for step in reversed(self.steps):
            if step in wanted:
                reached.add(step.stage)
                if step.stage not in self.given:
                    needed.insert(0, step)
                    wanted |= step.upstream
        for option, stages in (("use", set(self.given)), ("refresh", self.again)):
            if unreached := stages - reached:
                start = f" and starts from {', '.join(sorted(self.given))}" if self.given else ""
                raise InputError(
                    f"{option} names {', '.join(sorted(unreached))}, which this run doesn't reach: it ends after "
                    f"{self.until}{start}. Remove it from {option}."
                )
        if both := self.again & set(self.given):
            raise InputError(f"{', '.join(sorted(both))} is in both use and refresh. Choose one.")
        return needed

    def arguments(self, step: Step) -> list[Artifact | list[Artifact]]:
        """The artifacts that a step reads: those that other steps make, or those given in their place."""

        def resolved(given: "Step | list[Step]") -> Artifact | list[Artifact]:
            if isinstance(given, list):
                return self.given.get(given[0].stage) or [self.made[each] for each in given]
            return self.given[given.stage][0] if given.stage in self.given else self.made[given]

        return [resolved(given) for given in step.inputs]

    def check(self) -> None:
        """Raise InputError for every mistake that can be known before a stage runs, and not after a day of training."""
        if problems := self.check_each():
            raise next(iter(problems.values()))

    def check_each(self) -> Problems:
        """The steps with such a mistake, and those that need them; the others are ready to run."""
        for kind in side_by_side.KINDS.values():
            kind.asked()
        pool.workers()
        downloads()
        if self.until == "report":
            for artifact in self.given.get("pretrain", []):
                refuse_older(artifact.name, artifact.stats)
        problems: Problems = {}
        for step in self.needed():
            try:
                if not self.is_blocked(step, problems):
                    self.prepare(step)
            except InputError as error:
                problems[step] = error
        if any(step.stage == SEVERAL and not self.is_made(step) for step in self.made):
            from model import machine  # torch: not for every command line

            machine.detect()
        return problems

    def prepare(self, step: Step) -> None:
        """Find a step's artifact, and check what the step needs if that is to be made."""
        self.made[step] = step.task.target(step.params, *self.arguments(step))
        if step.stage in self.again or self.anew & step.upstream:
            self.anew.add(step)
        if not self.is_made(step):
            step.params.check()
        self.check_probes(step)

    def check_probes(self, step: Step) -> None:
        """Raise InputError if the step is to make a model, and its held-out text, if it is there, is too little."""
        readers = [each.params for each in self.steps if each.stage == SEVERAL and step in each.inputs]
        runs = [params for params in readers if params.data == "probes"]
        if not runs or self.is_made(step) or SEVERAL not in {each.stage for each in self.needed()}:
            return
        [tokens] = self.arguments(step)
        if read_manifest(tokens):
            from model.finetuning import steps_of  # torch: not for every command line

            for run in runs:
                steps_of(run.rows(probes.training_rows(run.task, tokens)), run.finetuning())

    def is_blocked(self, step: Step, problems: Problems) -> bool:
        """Whether a step needs a failed one; then it is entered into `problems` too."""
        if blocked := bool(step.upstream & set(problems)):
            problems[step] = None
        return blocked

    def is_made(self, step: Step) -> bool:
        """Whether a step has nothing to do."""
        return step not in self.anew and step.task.is_made(step.params, *self.arguments(step))

    def run(self) -> list[Artifact]:
        """Carry out what is needed; returns the artifacts of the last stage."""
        given = [artifact for artifacts in self.given.values() for artifact in artifacts]
        for artifact in given:
            verify(artifact)
        self.check()
        several = [step for step in self.made if step.stage == SEVERAL]
        for step in self.made:
            if step.stage != SEVERAL:
                self.carry_out(step)
            elif step is several[0]:  # the steps before it are done, and none of them needs the steps after it
                self.carry_out_several(several)
        if given:
            log.info("Existing artifacts used: %s", ", ".join(artifact.name for artifact in given))
        return self.given.get(self.until) or [a for step, a in self.made.items() if step.stage == self.until]

    def carry_out(self, step: Step) -> None:
        """Make a step's artifact, unless it is cached."""
        cached = self.is_made(step)
        if step in self.anew:
            refresh(self.made[step])
        with running(step.title):
            artifact = step.task(step.params, *self.arguments(step))
        self.settle(step, artifact, cached)

    def settle(self, step: Step, artifact: Artifact, cached: bool = False) -> None:
        """Log a step's result, check that it is the planned artifact, and show it on the page of the run."""
        log.info(result_line(step, artifact, cached))
        if artifact != (planned := self.made[step]):
            raise InputError(
                f"The input files of {step.title} changed during this run: it made {artifact.name}, but {planned.name} "
                "was planned. Run again, and don't change the files before it ends."
            )
        show(artifact)
        for reader in self.made:
            if step in reader.inputs:
                self.check_probes(reader)

    def run_each(self) -> Problems:
        """Carry out the steps of several runs, stage by stage. If one fails, those that don't need it go on."""
        problems = self.check_each()
        for step, error in problems.items():
            if error:
                failure(step, error)
        for stage in dict.fromkeys(step.stage for step in self.steps):
            steps = [step for step in self.made if step.stage == stage and step not in problems]
            problems |= self.attempt([step for step in steps if not self.is_blocked(step, problems)])
        return problems

    def carry_out_several(self, steps: list[Step]) -> None:
        """Carry out finetuning runs. Raises one error for all that failed, when the others have ended."""
        left = [step for step in steps if not self.is_made(step)]
        if problems := self.attempt(steps):
            raise failed(problems, len(left) or len(steps))

    def attempt(self, steps: list[Step]) -> Problems:
        """Carry out steps of a stage, training runs as many at a time as the machine has room for."""
        cached = [step for step in steps if self.is_made(step)]
        problems = self.one_by_one(cached)
        left = [step for step in steps if step not in cached]
        kind = side_by_side.KINDS.get(left[0].stage) if len(left) > 1 else None
        count = side_by_side.at_once(kind, len(left), self.memory(left)) if kind else 1
        return problems | (self.concurrently(kind, left, count) if count > 1 else self.one_by_one(left))

    def memory(self, steps: list[Step]) -> int:
        """Bytes that the largest of these training runs takes."""
        from model import machine

        here = machine.detect()
        return max(step.params.memory(self.arguments(step)[0], here) for step in steps)

    def one_by_one(self, steps: list[Step]) -> Problems:
        """Carry out steps in order; returns the failed ones."""
        problems: Problems = {}
        for step in steps:
            try:
                if not self.is_blocked(step, problems):
                    self.carry_out(step)
            except Exception as error:
                problems[step] = failure(step, error)
        return problems

    def concurrently(self, kind: side_by_side.Kind, steps: list[Step], count: int) -> Problems:
        """Carry out training runs, `count` at a time, in threads of Prefect's task runner.

        Returns the same as `one_by_one`. On Ctrl-C, `several` first ends the processes that do the work, so that the
        threads end at once.
        """
        problems, futures = {}, {}
        total = sum(step.params.examples() for step in steps) if kind is side_by_side.FINETUNE else len(steps)
        several = side_by_side.several(kind, count, total, len(steps))
        with ThreadPoolTaskRunner(count) as runner, several, running(kind.stage):
            # those that wait for others come last: a waiting one has a thread, too
            for step in sorted(steps, key=lambda step: bool(step.upstream & set(steps))):
                futures[step] = self.submit(step, runner, [futures[each] for each in step.upstream if each in futures])
            try:
                self.settle_each(futures, problems)
            finally:
                for future in futures.values():
                    future.wrapped_future.cancel()  # on Ctrl-C those that have not begun
        return problems

    def settle_each(self, futures: dict[Step, PrefectFuture], problems: Problems) -> None:
        """Settle steps as they end; put those that failed into `problems`."""
        steps = {future: step for step, future in futures.items()}
        for future in as_completed(list(steps)):
            step = steps[future]
            try:
                self.settle(step, future.result())
            except UnfinishedRun:  # another failed that it needs
                problems[step] = None
            except Exception as error:
                problems[step] = failure(step, error)

    def submit(self, step: Step, runner: ThreadPoolTaskRunner, upstream: list[PrefectFuture]) -> PrefectFuture:
        """Queue a step; Prefect does not begin it if one of these others fails."""
        if step in self.anew:
            refresh(self.made[step])
        parameters = get_call_parameters(step.task.fn, (step.params, *self.arguments(step)), {})
        with side_by_side.titled(step.title):
            return runner.submit(step.task, parameters, wait_for=upstream)


def failure(step: Step, error: Exception) -> Exception:
    """Log at once that a step has failed, since the others may go on for hours; returns the error."""
    log.warning("%s failed: %s", step.title, error)
    return error


def failed(problems: Problems, wanted: int) -> Exception:
    """One error for all failed runs: the first bug, or else the sentences of user errors, each once."""
    errors = [error for error in problems.values() if error]
    if bugs := [error for error in errors if not isinstance(error, InputError)]:
        return bugs[0]
    if wanted == 1:
        return errors[0]
    not_begun = len(problems) - len(errors)
    others = f", and {counted(not_begun, 'run')} depending on them did not start" if not_begun else ""
    sentences = " ".join(dict.fromkeys(map(str, errors)))
    return InputError(f"{len(errors)} of {wanted} finetuning runs failed{others}; the others are kept. {sentences}")


def result_line(step: Step, artifact: Artifact, cached: bool) -> str:
    """A stage's counts, seconds and path, for the log."""
    about = artifact.manifest
    duration = "cached" if cached else brief_duration(about["seconds"])
    facts = [duration, counts(about["stats"])] if cached else [counts(about["stats"]), duration]
    return printable(f"{step.title}: {', '.join(filter(None, [*facts, str(relative(artifact.path))]))}")
