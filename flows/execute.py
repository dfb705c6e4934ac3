"""Carry out a plan: stage by stage, and finetuning runs side by side."""

import logging
import os
import queue
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress

from prefect.futures import PrefectFuture
from prefect.runtime import flow_run
from prefect.task_runners import ThreadPoolTaskRunner

from flows.logs import running, show_in_prefect
from flows.plan import SEVERAL, Plan, Step
from flows.summary import counts, relative
from model.errors import InputError
from model.wording import brief_duration, printable
from tasks.store.artifacts import Artifact
from tasks.store.publish import refresh
from tasks.workers import finetunes
from tasks.workers.progress import labelled

log = logging.getLogger(__name__)


def execute(plan: Plan) -> None:
    """Make what the plan's last stage needs. If a step fails, others that don't need it run; see `Plan.problems`."""
    url = os.environ.get("PREFECT_API_URL")
    if url and not flow_run.id:
        log.info("No Prefect server answers at %s, so this run stays in its own process.", url)
    plan.refill_hollow()  # again, since a `cram gc` may have come between
    for step in plan.steps:
        if step.problem:
            log.warning("%s is not possible: %s", step.title, step.problem)
    for stage in dict.fromkeys(step.stage for step in plan.steps):  # of all runs, so that a mistake shows early
        execute_stage(plan, stage)
    if plan.given and not plan.problems:
        names = [artifact.name for artifacts in plan.given.values() for artifact in artifacts]
        log.info("Existing artifacts used: %s", ", ".join(names))


def execute_stage(plan: Plan, stage: str) -> None:
    """Carry out the steps of a stage that are possible."""
    steps = [step for step in plan.possible if step.stage == stage]
    if stage == SEVERAL:
        left = [step for step in steps if not step.is_made]
        count = count_at_once(left)
        if count > 1:
            for step in steps:
                if step not in left:
                    attempt(plan, step)
            run_side_by_side(left, count)
            return
    for step in steps:
        attempt(plan, step)


def attempt(plan: Plan, step: Step) -> None:
    """Make a step's artifact, unless it is cached; record why it fails."""
    try:
        if step.is_anew:
            refresh(step.artifact)
        if not step.is_made:
            plan.check_readers(step)
        carry_out(step)
    except Exception as error:
        record_failure(step, error)


def carry_out(step: Step) -> Artifact:
    """A step's artifact, made unless it is cached, and shown."""
    is_cached = step.is_made
    with running(step.title), labelled(step.run_in_brackets):
        artifact = step.task(*step.arguments, refill=step.refill)
    return finish(step, artifact, is_cached)


def finish(step: Step, artifact: Artifact, is_cached: bool) -> Artifact:
    """Show the artifact that a step made. Raises InputError if it is not the planned one."""
    show(step, artifact, is_cached)
    if artifact != step.artifact:
        raise InputError(
            f"The input files of {step.title} changed during this run: it made {artifact.name}, but "
            f"{step.artifact.name} was planned. Run again, and don't change the files before it ends."
        )
    step.artifact = artifact  # an equal one, but Prefect draws its graph by the identity of results
    return artifact


def record_failure(step: Step, error: Exception) -> None:
    """Remember why a step failed."""
    if step.run or step.stage == SEVERAL:  # at once, since others may run for hours
        log.warning("%s failed: %s", step.title, error)
    step.problem = error


def count_at_once(steps: list[Step]) -> int:
    """How many of these finetuning runs fit on this machine at a time, by the largest of them."""
    if len(steps) < 2:
        return 1
    from model import machine

    here = machine.detect()
    largest = max(step.params.memory(step.arguments[1], here) for step in steps)
    return finetunes.at_once(len(steps), largest)


def run_side_by_side(steps: list[Step], count: int) -> None:
    """Carry out finetuning runs, `count` at a time: each in its own process, for which a thread waits.

    On Ctrl-C, `several` first ends the processes, so that the threads end at once.
    """
    done: queue.SimpleQueue = queue.SimpleQueue()
    examples = sum(step.params.examples() for step in steps)
    with threads(count) as submit, finetunes.several(count, examples, len(steps)), running(SEVERAL):
        futures = {}
        for step in steps:
            if step.is_anew:
                refresh(step.artifact)
            future = submit(step)
            futures[future] = step
            future.add_done_callback(done.put)
        while futures:
            with suppress(queue.Empty):
                future = done.get(timeout=1)  # s, as a signal right before an endless wait would not end it
                finish_future(futures.pop(future), future)


def finish_future(step: Step, future: PrefectFuture | Future) -> None:
    """Show what a step made in a thread, or record why it failed."""
    try:
        finish(step, future.result(), is_cached=False)
    except Exception as error:
        record_failure(step, error)


@contextmanager
def threads(count: int) -> Iterator[Callable[[Step], PrefectFuture | Future]]:
    """A function that starts a step and returns a future, for up to `count` steps at a time."""
    if flow_run.id:

        def submit(step: Step) -> PrefectFuture:
            call = step.task.signature.bind(*step.arguments, refill=step.refill)
            return runner.submit(step.task, call.arguments)

        # not the flow's own task runner, since how many fit is known only now
        with ThreadPoolTaskRunner(max_workers=count) as runner:  # type: ignore[var-annotated]
            yield submit
    else:
        with ThreadPoolExecutor(count) as executor:
            try:
                yield lambda step: executor.submit(step.task.fn, *step.arguments, refill=step.refill)
            finally:
                executor.shutdown(wait=False, cancel_futures=True)


def show(step: Step, artifact: Artifact, is_cached: bool) -> None:
    """Log a stage's counts, seconds and path, and put its artifact on the page of the Prefect run."""
    about = artifact.manifest
    facts = [counts(about["stats"]), brief_duration(about["seconds"])]
    if is_cached:
        facts = ["cached", counts(about["stats"])]
    facts.append(str(relative(artifact.path)))
    log.info(printable(f"{step.title}: {', '.join(filter(None, facts))}"))
    if flow_run.id:
        show_in_prefect(artifact, str(step.task.description))
