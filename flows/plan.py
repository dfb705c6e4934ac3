"""The stages that one or more runs need. Nothing starts before the plan is complete, so every key is known first."""

import logging
import os
import queue
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from inspect import signature
from itertools import chain, takewhile
from typing import Any, cast

from prefect.client.schemas.objects import State
from prefect.futures import PrefectFuture
from prefect.runtime import flow_run
from prefect.task_runners import ThreadPoolTaskRunner

from flows.logs import publish, running
from flows.summary import counts, relative
from model.errors import InputError
from model.wording import brief_duration, printable
from tasks.adopt import find_model
from tasks.stage import Params, StageTask
from tasks.store.artifacts import Artifact, is_hollow, read_manifest, to_fill
from tasks.store.errors import disk_errors_as_input_errors
from tasks.store.manifests import refuse_hollow, verify
from tasks.store.publish import refresh
from tasks.text.words import Normaliser
from tasks.workers import finetunes, processes, tracking

SEVERAL = "finetune"  # the stage with many runs, which don't wait for each other
READ_TASKS = ("decontaminate", SEVERAL)  # stages whose check reads the data of the tasks
# params of a stage that one before it reads too
READ_EARLIER = {
    "finetune": ("decontaminate", {"data", "tasks"}),
    "vocabulary": ("measure", set(Normaliser.model_fields)),
}
log = logging.getLogger(__name__)


@dataclass(eq=False)
class Step:
    """A stage to run with these params on the artifacts of other steps.

    `run`: where a plan has several runs, what distinguishes those that need the step, as ("15 %", "seed 0").
    """

    task: StageTask
    params: Any  # of its stage
    inputs: tuple["Step | list[Step]", ...]
    run: tuple[str, ...] = ()

    @property
    def stage(self) -> str:
        """The stage's name."""
        return self.task.name

    @property
    def title(self) -> str:
        """The stage's name, with the task and seed of a finetuning run, and the run that it belongs to."""
        run = f"[{', '.join(self.run)}]" if self.run else ""
        return " ".join(filter(None, (self.stage, self.params.label(), run)))

    @property
    def upstream(self) -> "set[Step]":
        """The steps whose artifacts it reads."""
        return {step for given in self.inputs for step in (given if isinstance(given, list) else [given])}


Problems = dict[Step, Exception]  # failed steps with their errors, and steps that need them, with the same errors


class Plan:
    """The steps of one run, or of several that share steps.

    `until`: the last stage; `use`: keys of artifacts by stage, to take in place of running it; `again`: stages to
    run though they are cached.
    """

    def __init__(self, until: str, use: dict[str, str], again: list[str]) -> None:
        self.until, self.again = until, set(again)
        self.steps: list[Step] = []
        self.made: dict[Step, Artifact] = {}  # the artifact of each needed step, made or not
        self.anew: set[Step] = set()  # needed steps that run though they are cached
        self.problems: Problems = {}
        self.given = {
            stage: list(dict.fromkeys(find_model(key.strip(), stage) for key in keys.split(",")))
            for stage, keys in use.items()
        }
        if several := [stage for stage, artifacts in self.given.items() if len(artifacts) > 1 and stage != SEVERAL]:
            raise InputError(
                f"use names several artifacts of {several[0]}; expected one, since only finetune takes several."
            )

    def add(self, run: tuple[str, ...], task: StageTask, params: Params, *inputs: Step | list[Step]) -> Step:
        """Add a step; identical steps are shared between runs."""
        for step in self.steps:
            if (step.task, step.params, step.inputs) == (task, params, inputs):
                pairs = takewhile(lambda pair: pair[0] == pair[1], zip(step.run, run, strict=False))
                step.run = tuple(own for own, _ in pairs)
                return step
        self.steps.append(step := Step(task, params, inputs, run))
        return step

    def needed(self) -> list[Step]:
        """The steps that the last stage needs, in order.

        Raises InputError if `use` or `refresh` names a stage that this run doesn't reach.
        """
        needed: list[Step] = []
        reached = {self.until}
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

    def warn_of_unused(self, changed: dict[str, dict]) -> None:
        """Log a warning of overridden fields that this run doesn't read."""
        reached = {step.stage for step in self.needed()}
        unused = []
        for stage in changed.keys() - reached:
            reader, fields = READ_EARLIER.get(stage, ("", set()))
            read = fields if reader in reached else set()
            unused += [f"{stage}.{name}" for name in changed[stage].keys() - read]
        if unused:
            log.warning("This run doesn't reach %s; overrides of it have no effect.", ", ".join(sorted(unused)))

    def arguments(self, step: Step) -> list[Any]:
        """The params of a step and the artifacts that it reads, made by other steps or given in their place."""

        def read(given: Step | list[Step]) -> Artifact | list[Artifact]:
            if isinstance(given, list):
                return self.given.get(given[0].stage) or [self.made[each] for each in given]
            return self.given[given.stage][0] if given.stage in self.given else self.made[given]

        return [step.params, *map(read, step.inputs)]

    def is_made(self, step: Step) -> bool:
        """Whether a step has nothing to do."""
        return step not in self.anew and step.task.is_made(*self.arguments(step))

    def is_blocked(self, step: Step) -> bool:
        """Whether a step, or one that it needs, has failed."""
        if step not in self.problems and (failed := step.upstream & set(self.problems)):
            self.problems[step] = self.problems[failed.pop()]
        return step in self.problems

    def check(self, thoroughly: bool = True) -> Problems:
        """Find the artifact of every step, and each mistake that can be known before a stage runs.

        `thoroughly`: those too that are found by reading the data of the tasks and the files of given artifacts, which
        can take minutes. Raises InputError for a mistake that concerns all steps.
        """
        finetunes.finetunes()
        processes.workers()
        tracking.names()
        for artifact in chain.from_iterable(self.given.values()):
            verify(artifact) if thoroughly else refuse_hollow(artifact)
        for step in self.needed():
            try:
                if not self.is_blocked(step):
                    with disk_errors_as_input_errors(step.title):
                        self.prepare(step, thoroughly)
            except InputError as error:
                self.problems[step] = error
        self.fill()
        return self.problems

    def fill(self) -> None:
        """Have the hollow artifacts made again that steps with something to do read, and in turn what these read.

        One that would come out different, as a model does, is a problem instead, unless it is to run again anyway.
        """
        before = set(to_fill)
        for step in reversed(self.made):
            if self.is_blocked(step) or self.is_made(step):
                continue
            for each in (each for each in step.upstream & self.made.keys() - self.anew if is_hollow(self.made[each])):
                try:
                    if each.task.varies:
                        raise InputError(
                            f"{self.made[each].name} is hollow: its weights are not in this store, and {step.title} "
                            f"needs them. `cram pull {self.made[each].name}` brings the weights; --refresh {each.stage}"
                            " trains it again."
                        )
                    to_fill.add(self.made[each])
                    each.params.check()
                except InputError as error:
                    self.problems[each] = error
        if names := [artifact.name for artifact in self.made.values() if artifact in to_fill - before]:
            log.info("Hollow, and made again since a later stage reads them: %s.", ", ".join(dict.fromkeys(names)))

    def prepare(self, step: Step, thoroughly: bool = True) -> None:
        """Find a step's artifact, and check what the step needs if that is to be made."""
        self.made[step] = step.task.target(*self.arguments(step))
        if step.stage in self.again or self.anew & step.upstream:
            self.anew.add(step)
        if not self.is_made(step) and (thoroughly or step.stage not in READ_TASKS):
            step.params.check()
            if thoroughly:
                self.check_probes(step)

    def check_probes(self, step: Step) -> None:
        """Raise InputError if a step is to make a model, and its held-out text, if it is there, has too few probes."""
        readers = [each for each in self.steps if each.stage == SEVERAL and step in each.inputs]
        wanted = [each.params for each in readers if each.params.data == "probes" and self.until in (SEVERAL, "report")]
        _, tokens, *_ = self.arguments(step) if wanted else (None, None)
        if tokens and read_manifest(tokens) and not is_hollow(tokens):
            for params in wanted:
                params.check(tokens)

    def run(self) -> Problems:
        """Carry out what `check` found, stage by stage; if a step fails, those that don't need it go on."""
        if not flow_run.id:
            url = os.environ.get("PREFECT_API_URL")
            about = f"No Prefect server answers at {url}; this" if url else "Without a Prefect server, this"
            log.info("%s run goes on in its own process. `make up` starts one.", about)
        self.fill()  # again, since a `cram gc` may have come between
        for step, error in self.problems.items():
            if not step.upstream & set(self.problems):
                log.warning("%s is not possible: %s", step.title, error)
        for stage in dict.fromkeys(step.stage for step in self.made):
            steps = [step for step in self.made if step.stage == stage and not self.is_blocked(step)]
            left = [step for step in steps if not self.is_made(step)] if stage == SEVERAL else []
            count = self.at_once(left)
            for step in steps:
                if count == 1 or step not in left:
                    self.attempt(step, partial(self.carry_out, step), self.is_made(step))
            if count > 1:
                self.side_by_side(left, count)
        return self.problems

    def results(self) -> list[Artifact]:
        """The artifacts of the last stage. Raises one error if a step has failed."""
        if self.problems:
            raise self.error()
        if self.given:
            names = [artifact.name for artifacts in self.given.values() for artifact in artifacts]
            log.info("Existing artifacts used: %s", ", ".join(names))
        return self.given.get(self.until) or [made for step, made in self.made.items() if step.stage == self.until]

    def attempt(self, step: Step, work: Callable[[], Artifact], cached: bool) -> None:
        """Show the artifact that work() makes, if it is the planned one, or record the error."""
        try:
            artifact, planned = work(), self.made[step]
            show(step.task, step.title, artifact, cached)
            if artifact != planned:
                raise InputError(
                    f"The input files of {step.title} changed during this run: it made {artifact.name}, but "
                    f"{planned.name} was planned. Run again, and don't change the files before it ends."
                )
        except Exception as error:
            if step.run or step.stage == SEVERAL:  # at once, since others may go on for hours
                log.warning("%s failed: %s", step.title, error)
            self.problems[step] = error

    def carry_out(self, step: Step) -> Artifact:
        """A step's artifact, made unless it is cached."""
        if step in self.anew:
            refresh(self.made[step])
        if not self.is_made(step):
            self.check_probes(step)
        with running(step.title):
            return call(step.task, *self.arguments(step))

    def memory(self, steps: list[Step]) -> int:
        """Bytes that the largest of these finetuning runs takes."""
        from model import machine

        here = machine.detect()
        return max(step.params.memory(self.arguments(step)[1], here) for step in steps)

    def at_once(self, steps: list[Step]) -> int:
        """How many of these finetuning runs go on at a time."""
        return finetunes.at_once(len(steps), self.memory(steps)) if len(steps) > 1 else 1

    def side_by_side(self, steps: list[Step], count: int) -> None:
        """Carry out finetuning runs, `count` at a time: each in a process of its own, for which a thread waits.

        On Ctrl-C, `several` first ends the processes, so that the threads end at once.
        """
        done: queue.SimpleQueue = queue.SimpleQueue()
        total = sum(step.params.examples() for step in steps)
        with threads(count) as submit, finetunes.several(count, total, len(steps)), running(SEVERAL):
            futures = {}
            for step in steps:
                if step in self.anew:
                    refresh(self.made[step])
                futures[future := submit(step.task, *self.arguments(step))] = step
                future.add_done_callback(done.put)
            while futures:
                with suppress(queue.Empty):
                    future = done.get(timeout=1)  # s, as a signal right before an endless wait would not end it
                    self.attempt(futures.pop(future), future.result, cached=False)

    def error(self) -> Exception:
        """One error for all failed steps: the first bug, or else the sentences of user errors, each once."""
        for error in self.problems.values():
            if not isinstance(error, InputError):
                return error
        wanted = [step for step in self.made if step.stage == SEVERAL]
        failed = [step for step in wanted if step in self.problems]
        first, error = next(iter(self.problems.items()))
        if first.stage != SEVERAL or len(wanted) == 1:
            return error
        sentences = " ".join(dict.fromkeys(map(str, self.problems.values())))
        kept = "; the others are kept" if len(failed) < len(wanted) else ""
        return InputError(f"{len(failed)} of {len(wanted)} finetuning runs failed{kept}. {sentences}")


def call(task: StageTask, *arguments: Params | Artifact | list[Artifact]) -> Artifact:
    """Run a stage: as a task of the Prefect run that this is part of, or without Prefect's engine."""
    # the result of the state, since a task that returns a state, as `Cached`, returns it as it is
    return cast(State, task(*arguments, return_state=True)).result() if flow_run.id else task.fn(*arguments)


@contextmanager
def threads(count: int) -> Iterator[Callable[..., PrefectFuture | Future]]:
    """A function like `call` that returns a future, for up to `count` calls at a time."""
    if flow_run.id:
        # not the flow's own task runner, since how many fit is known only now
        with ThreadPoolTaskRunner(max_workers=count) as runner:  # type: ignore[var-annotated]
            yield lambda task, *arguments: runner.submit(task, signature(task.fn).bind(*arguments).arguments)
    else:
        with ThreadPoolExecutor(count) as executor:
            try:
                yield lambda task, *arguments: executor.submit(task.fn, *arguments)
            finally:
                executor.shutdown(wait=False, cancel_futures=True)


def make(task: StageTask, params: Params, *inputs: Artifact | list[Artifact], title: str = "") -> Artifact:
    """The artifact of a stage that runs after a plan."""
    title, cached = title or task.name, task.is_made(params, *inputs)
    with running(title):
        artifact = call(task, params, *inputs)
    show(task, title, artifact, cached)
    return artifact


def show(task: StageTask, title: str, artifact: Artifact, cached: bool) -> None:
    """Log a stage's counts, seconds and path, and put its artifact on the page of the Prefect run."""
    about = artifact.manifest
    duration = "cached" if cached else brief_duration(about["seconds"])
    facts = [duration, counts(about["stats"])] if cached else [counts(about["stats"]), duration]
    log.info(printable(f"{title}: {', '.join(filter(None, [*facts, str(relative(artifact.path))]))}"))
    if flow_run.id:
        publish(artifact, str(task.description))
