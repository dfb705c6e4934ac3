"""A plan: which stages a run needs. Nothing runs before the plan is whole, so a stage given makes others needless."""

import logging
from dataclasses import dataclass

from prefect import Task
from prefect.futures import PrefectFuture, as_completed

from flows.pages import show
from flows.summary import brief_duration, counts, relative
from model import InputError
from model.quantities import counted
from tasks.report import refuse_older
from tasks.stage import Params
from tasks.store import Artifact, find, refresh, verify
from tasks.text.printable import printable
from tasks.workers import finetunes, pool

SEVERAL = "finetune"  # the stage with many runs, that don't wait for each other
log = logging.getLogger(__name__)


def as_list(given: "Step | list[Step]") -> "list[Step]":
    """One step or several as several."""
    return given if isinstance(given, list) else [given]


@dataclass(frozen=True, eq=False)
class Step:
    """A stage to be run with these params on what other steps make."""

    task: Task
    params: Params
    inputs: tuple["Step | list[Step]", ...]

    @property
    def stage(self) -> str:
        """The stage's name."""
        return self.task.name


def before(step: Step) -> set[Step]:
    """What has to be made before a step."""
    return {each for given in step.inputs for each in as_list(given)}


class Plan:
    """Collects steps; `run` carries out those that the last stage needs."""

    def __init__(self, until: str, use: dict[str, str], again: list[str]) -> None:
        self.until, self.again, self.steps = until, set(again), []
        self.made: dict[Step, Artifact] = {}  # where what each needed step makes belongs
        self.anew: set[Step] = set()  # run again though cached
        self.given = {
            name: list(dict.fromkeys(find(name, key.strip()) for key in keys.split(","))) for name, keys in use.items()
        }
        if several := [name for name, found in self.given.items() if len(found) > 1 and name != "finetune"]:
            raise InputError(
                f"use names several artifacts of {several[0]}; expected one, since only finetune takes several."
            )

    def __call__(self, task: Task, params: Params, *inputs: "Step | list[Step]") -> Step:
        """Add a step."""
        step = Step(task, params, inputs)
        self.steps.append(step)
        return step

    def tell_unused(self, changed: dict[str, dict]) -> None:
        """Warn of overridden stages that this run doesn't reach."""
        reached = {step.stage for step in self.needed()}
        unused = [name for name in changed if name not in reached]
        if "decontaminate" in reached and set(changed.get("finetune", ())) <= {
            "data"
        }:  # it looks for what stands there
            unused = [name for name in unused if name != "finetune"]
        if unused:
            log.warning("This run doesn't reach %s; overrides of it have no effect.", ", ".join(unused))

    def needed(self) -> list[Step]:
        """The steps that have to be looked at, in order; fails if `use` or `again` names a stage that is not reached."""
        wanted = [step for step in self.steps if step.stage == self.until and self.until not in self.given]
        found, reached = [], {self.until}

        def visit(step: Step) -> None:
            reached.add(step.stage)
            if step in found or step.stage in self.given:
                return
            for given in step.inputs:
                for each in as_list(given):
                    visit(each)
            found.append(step)

        for step in wanted:
            visit(step)
        for what, names in (("use", set(self.given)), ("refresh", self.again)):
            if unreached := names - reached:
                raise InputError(
                    f"{what} names {', '.join(sorted(unreached))}, which this run doesn't reach: it ends after {self.until}"
                    f"{' and starts from ' + ', '.join(sorted(self.given)) if self.given else ''}. Remove it from {what}."
                )
        if both := self.again & set(self.given):
            raise InputError(f"{', '.join(sorted(both))} is in both use and refresh. Choose one.")
        return found

    def arguments(self, step: Step) -> list[Artifact | list[Artifact]]:
        """What the step is given: the artifacts that other steps make, or those given in their place."""

        def resolved(given: "Step | list[Step]") -> Artifact | list[Artifact]:
            if isinstance(given, list):
                return self.given.get(given[0].stage) or [self.made[each] for each in given]
            return self.given[given.stage][0] if given.stage in self.given else self.made[given]

        return [resolved(given) for given in step.inputs]

    def check(self) -> None:
        """Raise InputError for what can be known to be wrong before any stage runs: a day of training must not end at it."""
        finetunes.asked()
        pool.workers()
        left = set()
        if self.until == "report":
            for artifact in self.given.get("pretrain", []):
                refuse_older(artifact.name, artifact.stats)
        for step in self.needed():
            self.made[step] = step.task.target(step.params, *self.arguments(step))
            if step.stage in self.again or self.anew & before(step):
                self.anew.add(step)  # and what follows
            if not self.is_made(step):
                step.params.check()
                left.add(step.stage)
        if SEVERAL in left:
            from model import machine  # torch: not for every command line

            machine.detect()

    def is_made(self, step: Step) -> bool:
        """Whether there is nothing to do for a step."""
        return step not in self.anew and step.task.is_made(step.params, *self.arguments(step))

    def run(self) -> list[Artifact]:
        """Carry out what is needed; returns the artifacts of the last stage."""
        given = [artifact for found in self.given.values() for artifact in found]
        for artifact in given:
            verify(artifact)
        self.check()
        runs = [step for step in self.made if step.stage == SEVERAL]
        for step in self.made:
            if step.stage != SEVERAL:
                self.carry_out(step)
            elif step is runs[0]:  # all that they need was made before, and what needs them comes after
                self.carry_out_together(runs)
        if given:
            log.info("Existing artifacts used: %s", ", ".join(artifact.name for artifact in given))
        return self.given.get(self.until) or [a for step, a in self.made.items() if step.stage == self.until]

    def carry_out(self, step: Step) -> None:
        """Make what a step makes, unless it is there."""
        cached = self.is_made(step)
        if step in self.anew:
            refresh(self.made[step])
        self.settle(step, step.task(step.params, *self.arguments(step)), cached)

    def settle(self, step: Step, made: Artifact, cached: bool = False) -> None:
        """Log what a step made, check that it is what was planned, and show it on the page of the run."""
        log.info(result_line(step, made, cached))
        if made != (planned := self.made[step]):
            what = f"{step.stage}{f' of {step.params.label()}' if step.params.label() else ''}"
            raise InputError(
                f"The input files of {what} changed during this run: it made {made.name}, but {planned.name} was planned. "
                "Run again, and don't change the files before it ends."
            )
        show(made)

    def carry_out_together(self, steps: list[Step]) -> None:
        """The same of steps that may go on side by side, as many as the machine has room for. If one fails, the others don't."""
        cached = [step for step in steps if self.is_made(step)]
        left, problems = [step for step in steps if step not in cached], {}
        for step in cached:
            self.carry_out(step)
        wanted = len(left)
        count = finetunes.at_once(wanted, self.memory(left))
        if count > 1:
            with finetunes.several(count, sum(step.params.examples() for step in left), wanted):
                self.side_by_side(left, count, problems)
        else:
            while step := next((step for step in left if not before(step) & set(problems)), None):
                left.remove(step)
                try:
                    self.carry_out(step)
                except Exception as error:
                    problems[step] = error
        if problems:
            raise failed(list(problems.values()), wanted, len(left))

    def memory(self, runs: list[Step]) -> int:
        """Bytes that the largest of these finetuning runs takes."""
        if not runs:
            return 0
        from model import machine

        here = machine.detect()
        return max(step.params.memory(self.arguments(step)[0], here) for step in runs)

    def side_by_side(self, left: list[Step], count: int, problems: dict[Step, Exception]) -> None:
        """Carry out so many steps at a time; those that can't begin since another has failed stay in `left`."""
        running: dict[PrefectFuture, Step] = {}
        while True:
            ready = [step for step in left if not before(step) & {*left, *running.values(), *problems}]
            for step in ready[: count - len(running)]:
                left.remove(step)
                if step in self.anew:
                    refresh(self.made[step])
                running[step.task.submit(step.params, *self.arguments(step))] = step
            if not running:
                return
            ended = next(as_completed(list(running)))
            step = running.pop(ended)
            try:
                self.settle(step, ended.result())
            except Exception as error:
                problems[step] = error


def failed(problems: list[Exception], runs: int, left_out: int) -> Exception:
    """One error for all: the sentences of user errors, each once; or else the first bug."""
    if bugs := [problem for problem in problems if not isinstance(problem, InputError)]:
        return bugs[0]
    if runs == 1:
        return problems[0]
    others = f", and {counted(left_out, 'run')} that start from them were not begun" if left_out else ""
    sentences = " ".join(dict.fromkeys(map(str, problems)))
    return InputError(f"{len(problems)} of {runs} finetuning runs failed{others}; the others are kept. {sentences}")


def result_line(step: Step, made: Artifact, cached: bool) -> str:
    """A stage's counts, seconds and path, for the log."""
    about = made.manifest
    took = "cached" if cached else brief_duration(about["seconds"])
    facts = [took, counts(about["stats"])] if cached else [counts(about["stats"]), took]
    name = f"{step.stage} {step.params.label()}".strip()
    return printable(f"{name}: {', '.join(filter(None, [*facts, str(relative(made.path))]))}")
