"""A plan: the stages that one or more runs need. It is complete before anything starts, so every key is known first.

A plan is made by calling `pipeline` (flows/cram.py) while calls of stages are recorded instead of run, as Prefect's own
`flow.visualize()` does. flows/execute.py carries it out.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, takewhile
from typing import Any, TypeAlias

from model.errors import InputError
from tasks.adopt import find_model
from tasks.stage import StageTask, recording
from tasks.store.artifacts import Artifact, is_hollow, read_manifest
from tasks.store.errors import disk_errors_as_input_errors
from tasks.store.manifests import refuse_hollow, verify
from tasks.workers import finetunes, processes, tracking

SEVERAL = "finetune"  # the stage with many runs, which don't wait for each other
log = logging.getLogger(__name__)
Source: TypeAlias = "Step | Artifact"


Input: TypeAlias = "Step | Artifact | Sequence[Step | Artifact]"  # a stage can read one artifact, or a list of them


def sources_in(given: Input) -> list[Source]:
    """The sources of an input."""
    return [given] if isinstance(given, (Step, Artifact)) else list(given)


@dataclass(eq=False)
class Step:
    """A call of a stage in a plan. Its inputs are other calls, or artifacts.

    `run`: where a plan has several runs, what distinguishes those that need the step, as ("15 %", "seed 0").
    """

    task: StageTask
    params: Any  # of its stage
    inputs: tuple[Input, ...]
    run: tuple[str, ...] = ()
    given: tuple[Artifact, ...] = ()  # artifacts to take in its place
    is_anew: bool = False  # it runs though it is cached
    refill: bool = False  # its artifact is hollow (`cram gc --hollow` dropped the data), and is to be rebuilt
    problem: Exception | None = None  # why it failed, or can't run

    @property
    def stage(self) -> str:
        """The stage's name."""
        return self.task.name

    @property
    def title(self) -> str:
        """The stage's name, with the task and seed of a finetuning run, and the run that it belongs to."""
        return " ".join(filter(None, (self.stage, self.params.label(), self.run_in_brackets)))

    @property
    def run_in_brackets(self) -> str:
        """The run that it belongs to; empty if the plan has only one, or if several share it."""
        return f"[{', '.join(self.run)}]" if self.run else ""

    @cached_property
    def upstream(self) -> list["Step"]:
        """The steps whose artifacts it reads, each once."""
        sources = chain.from_iterable(map(sources_in, self.inputs))
        return list(dict.fromkeys(source for source in sources if isinstance(source, Step)))

    @cached_property
    def artifact(self) -> Artifact:
        """What it makes, whether or not it exists.

        Raises InputError if the key can't be known, for example because an input file is gone.
        """
        return self.given[0] if self.given else self.task.target(*self.arguments)

    @property
    def key(self) -> str:
        """The key of its artifact; empty as long as it isn't known."""
        return self.artifact.key if "artifact" in vars(self) else ""

    @property
    def arguments(self) -> list[Any]:
        """The params, and the artifacts that it reads, whether or not they exist."""
        arguments: list[Any] = [self.params]
        for given in self.inputs:
            artifacts = artifacts_in(sources_in(given))
            arguments.append(artifacts if isinstance(given, list) else artifacts[0])
        return arguments

    @property
    def is_made(self) -> bool:
        """Whether it has nothing to do."""
        if self.given:
            return True
        return not self.is_anew and self.task.is_made(*self.arguments, refill=self.refill)

    @property
    def error(self) -> Exception | None:
        """Why it is not possible: its own problem, or that of a step that it needs."""
        if self.problem:
            return self.problem
        for step in self.upstream:
            error = step.error
            if error:
                return error
        return None

    def find_upstream(self, stage: str) -> "Step | None":
        """The step of this stage that it needs, or that it is."""
        if self.stage == stage:
            return self
        for step in self.upstream:
            found = step.find_upstream(stage)
            if found:
                return found
        return None

    def find_all(self, stages: Collection[str]) -> "list[Step]":
        """The steps of these stages that it needs, and itself if it is of one."""
        found = dict.fromkeys(chain.from_iterable(step.find_all(stages) for step in self.upstream))
        return [*found, self] if self.stage in stages else list(found)


def artifacts_in(sources: Iterable[Source]) -> list[Artifact]:
    """The artifacts of these sources, each once."""
    found: dict[Artifact, None] = {}
    for source in sources:
        if isinstance(source, Artifact):
            found[source] = None
        else:
            found |= dict.fromkeys(source.given or [source.artifact])
    return list(found)


class Plan:
    """The steps of one run, or of several that share steps.

    `until`: the last stage; `use`: keys of artifacts by stage, to take in place of running it; `refresh`: stages to run
    though they are cached.
    """

    def __init__(self, until: str, use: dict[str, str], refresh: list[str]) -> None:
        self.until = until
        self.refresh = set(refresh)
        self.recorded: list[Step] = []
        self.given: dict[str, list[Artifact]] = {}
        for stage, keys in use.items():
            artifacts = [find_model(key.strip(), stage) for key in keys.split(",")]
            self.given[stage] = list(dict.fromkeys(artifacts))
            if len(self.given[stage]) > 1 and stage != SEVERAL:
                raise InputError(
                    f"use names several artifacts of {stage}; expected one, since only {SEVERAL} takes several."
                )

    def trace(self, pipeline: Callable[..., Any], *arguments: Any, run: tuple[str, ...] = ()) -> Any:
        """Call `pipeline`, whose calls of stages are recorded, each as a step that stands for the artifact.

        Identical steps are shared between runs. `run`: if the plan has several runs, what distinguishes this one.
        """

        def record(task: StageTask, params: Any, inputs: tuple) -> Step:
            for step in self.recorded:
                if (step.task, step.params, step.inputs) == (task, params, inputs):
                    # shared by several runs: it keeps the labels that they have in common
                    same = takewhile(lambda pair: pair[0] == pair[1], zip(step.run, run, strict=False))
                    step.run = tuple(name for name, _ in same)
                    return step
            given = self.given.get(task.name, [])
            self.recorded.append(Step(task, params, inputs, run, tuple(given)))
            return self.recorded[-1]

        token = recording.set(record)
        try:
            return pipeline(*arguments)
        finally:
            recording.reset(token)

    @property
    def wanted(self) -> list[Step]:
        """The steps that the last stage needs, in order, and those in whose place artifacts are given."""
        wanted = {step for step in self.recorded if step.stage == self.until}
        for step in reversed(self.recorded):
            if step in wanted and not step.given:
                wanted.update(step.upstream)
        return [step for step in self.recorded if step in wanted]

    @property
    def steps(self) -> list[Step]:
        """The steps that the last stage needs, in order."""
        return [step for step in self.wanted if not step.given]

    @property
    def possible(self) -> list[Step]:
        """Those that can be made, as far as is known."""
        return [step for step in self.steps if not step.error]

    @property
    def problems(self) -> dict[Step, Exception]:
        """Those that can't be made, and why, the first first."""
        errors = ((step, step.error) for step in self.steps)
        return {step: error for step, error in errors if error}

    def find(self) -> None:
        """Find the artifact of every step, and which have something to do.

        A mistake in files that are read becomes the `problem` of its step; raises InputError for one that concerns all.
        """
        finetunes.finetunes()
        processes.workers()
        tracking.names()
        for artifact in chain.from_iterable(self.given.values()):
            refuse_hollow(artifact)
        self.check_names()
        for step in self.steps:
            if step.error:
                continue
            try:
                with disk_errors_as_input_errors(step.title):
                    step.artifact  # noqa: B018 - finds the key, or raises InputError
            except InputError as error:
                step.problem = error
            else:
                step.is_anew = step.stage in self.refresh or any(each.is_anew for each in step.upstream)

    def check(self, thoroughly: bool = True) -> None:
        """Find the artifact of every step, and each mistake that can be known before a stage runs.

        `thoroughly`: those too that are found by reading the data of the tasks and the files of given artifacts, which
        can take minutes. Mistakes become the `problem` of their steps; raises InputError for one that concerns all.
        """
        self.find()
        if thoroughly:
            for artifact in chain.from_iterable(self.given.values()):
                verify(artifact)
        for step in self.steps:
            if step.error:
                continue
            try:
                with disk_errors_as_input_errors(step.title):
                    self.prepare(step, thoroughly)
            except InputError as error:
                step.problem = error
        self.refill_hollow()

    def check_names(self) -> None:
        """Raise InputError if `use` or `refresh` names a stage that this run doesn't reach."""
        reached = {self.until, *(step.stage for step in self.wanted)}
        for option, stages in (("use", set(self.given)), ("refresh", self.refresh)):
            unreached = stages - reached
            if unreached:
                start = f" and starts from {', '.join(sorted(self.given))}" if self.given else ""
                raise InputError(
                    f"{option} names {', '.join(sorted(unreached))}, which this run doesn't reach: it ends after "
                    f"{self.until}{start}. Remove it from {option}."
                )
        both = self.refresh & set(self.given)
        if both:
            raise InputError(f"{', '.join(sorted(both))} is in both use and refresh. Choose one.")

    def prepare(self, step: Step, thoroughly: bool) -> None:
        """Check what a step needs if its artifact is to be made."""
        if step.is_made:
            return
        if thoroughly or not step.params.check_is_slow:
            step.params.check()
        if thoroughly:
            self.check_readers(step)

    def check_readers(self, step: Step) -> None:
        """Let the steps that read a step say whether they can use what it would make, if its own inputs are there.

        If one can't, a plan with one run is not possible. With several runs, only that reader isn't.
        """
        readers = [each for each in self.steps if step in each.upstream and not each.problem]
        sources = artifacts_in(chain.from_iterable(map(sources_in, step.inputs)))
        if not sources or not all(read_manifest(source) and not is_hollow(source) for source in sources):
            return
        for reader in readers:
            try:
                reader.params.check_sources(sources)
            except InputError as error:
                if not reader.run:
                    raise
                log.warning("%s is not possible: %s", reader.title, error)
                reader.problem = error

    def refill_hollow(self) -> None:
        """Mark hollow inputs of steps that will run, and their inputs, to be rebuilt.

        A stage whose result varies, such as a model, can't be rebuilt identically, so a hollow one is a problem unless
        it runs again anyway.
        """
        refilled = []
        for step in reversed(self.steps):
            if step.error or step.is_made:
                continue
            for source in step.upstream:
                if source.given or source.is_anew or source.refill or not is_hollow(source.artifact):
                    continue
                try:
                    refuse_variation(source, step)
                    source.refill = True
                    source.params.check()
                    refilled.append(source)
                except InputError as error:
                    source.problem = error
        names = dict.fromkeys(step.artifact.name for step in reversed(refilled))
        if names:
            log.info("Rebuilding dropped data that a later stage needs: %s.", ", ".join(names))

    def needed(self) -> list[Artifact]:
        """The artifacts that it reads or makes, whether or not they exist."""
        return [*artifacts_in(self.possible), *chain.from_iterable(self.given.values())]

    def results(self) -> list[Artifact]:
        """The artifacts of the last stage. Raises one error if a step has failed."""
        if self.problems:
            raise self.error()
        last = [step for step in self.steps if step.stage == self.until]
        return self.given.get(self.until) or artifacts_in(last)

    def error(self) -> Exception:
        """One error for all failed steps: the first bug, or else the sentences of user errors, each once."""
        problems = self.problems
        for error in problems.values():
            if not isinstance(error, InputError):
                return error
        first, error = next(iter(problems.items()))
        wanted = [step for step in self.steps if step.stage == SEVERAL]
        if first.stage != SEVERAL or len(wanted) == 1:
            return error
        failed = [step for step in wanted if step in problems]
        sentences = " ".join(dict.fromkeys(map(str, problems.values())))
        kept = "; the others are kept" if len(failed) < len(wanted) else ""
        return InputError(f"{len(failed)} of {len(wanted)} finetuning runs failed{kept}. {sentences}")


def refuse_variation(source: Step, step: Step) -> None:
    """Raise InputError if the hollow artifact of `source`, which `step` needs, would come out different."""
    if source.task.varies:
        name = source.artifact.name
        raise InputError(
            f"{name} is hollow: its weights are not in this store, and {step.title} needs them. `cram pull {name}` "
            f"fetches the weights; --refresh {source.stage} trains it again."
        )
