"""A stage is a function from typed params and input artifacts to one output artifact.

Keys follow params and inputs, not code: raise a stage's `version` whenever its code changes what it writes.
"""

import functools
import hashlib
import inspect
import json
import logging
import platform
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from prefect import Task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.runtime import flow_run, task_run
from prefect.states import Completed
from pydantic import BaseModel

from model.errors import InputError, Unreachable
from model.limits import cores
from tasks.store import home
from tasks.store.artifacts import (
    STATS,
    WORK,
    Artifact,
    digests_of_contents,
    draft_of,
    is_made,
    read_manifest,
    result_files,
    warn_of_damage,
)
from tasks.store.errors import disk_errors_as_input_errors
from tasks.store.home import CODE, IN_CHECKOUT
from tasks.store.locks import hold_inputs, lock_artifact
from tasks.store.publish import publish
from tasks.workers.processes import cpu_clock, peak_memory, reset_usage, usage

REPORTED_PACKAGES = ("cram", "prefect", "torch", "tokenizers", "numpy", "pyarrow", "scipy", "transformers")
SECONDS_BEFORE_A_RETRY = 60
ORIGIN = "made_from.json"  # in the work of a draft, where inputs can differ when they are rebuilt
# while a plan is made: takes the calls of stages, as the tracker of Prefect's `flow.visualize()` does
recording: ContextVar[Callable[["StageTask", "Params", tuple], Any] | None] = ContextVar("recording", default=None)
log = logging.getLogger(__name__)


class Params(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """What a stage's output depends on, other than its input artifacts.

    `later`: fields that were added after artifacts existed. They enter the key only if changed from the default, so
    existing keys stay valid. `check_is_slow`: `check` reads data, which can take minutes.
    """

    later: ClassVar[tuple[str, ...]] = ()
    check_is_slow: ClassVar[bool] = False

    def identity(self) -> dict:
        """What enters the key. A stage that reads files replaces their paths with their digests."""
        fields = type(self).model_fields
        usual = {name for name in self.later if getattr(self, name) == fields[name].get_default()}
        return self.model_dump(mode="json", exclude=usual)

    @classmethod
    def usual(cls) -> dict:
        """The defaults in the form of `identity`, which a model card compares with. Empty if a field has none."""
        return {} if any(field.is_required() for field in cls.model_fields.values()) else cls().identity()

    def check(self) -> None:
        """Raise InputError for errors that can be detected before any stage of a run begins."""

    def check_sources(self, sources: list[Artifact]) -> None:
        """Raise InputError if this stage can't use an input that is about to be made from `sources`.

        All of these are complete. It is for errors that would otherwise show only after the input is made.
        """

    def label(self) -> str:
        """A suffix for the name of the task run in Prefect, for stages that run several times in one flow run."""
        return ""


@functools.cache
def environment() -> dict:
    """The software and the machine, for the manifest; nothing of it enters a key."""
    packages = {}
    for name in REPORTED_PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    machine = {"system": platform.platform(), "cores": cores()}
    return {"python": platform.python_version(), "packages": packages, "machine": machine, "commit": find_commit()}


def find_commit() -> str:
    """The commit of the code, with a mark if files differ from it; "unknown" without a checkout or without git."""
    if not IN_CHECKOUT:
        return "unknown"
    git = ["git", "-C", str(CODE), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(git, capture_output=True, encoding="utf-8", check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def has_lost_connection(_task: Task, _task_run: TaskRun, state: State) -> bool:
    """Whether a stage failed for want of a network, which may come back."""
    return isinstance(state.result(raise_on_failure=False), ConnectionError | Unreachable)


class Call(NamedTuple):
    """A call of a stage: the artifact that it makes, what determines that artifact's key, and the arguments."""

    artifact: Artifact
    about: dict[str, Any]
    params: Params
    inputs: dict[str, Artifact | list[Artifact]]
    refill: bool

    def is_made(self) -> bool:
        """Whether the artifact is complete and was made from the present contents of the inputs."""
        return is_made(self.artifact, self.inputs, self.refill)


class StageTask(Task):
    """A stage function(params, *inputs, out) -> stats as a Prefect task from (params, *inputs) to an Artifact.

    A class of its own, since a call of a `@task` can't be recorded for a plan, has no key before it runs, and starts a
    server where there is none. A call also takes `refill`: whether to rebuild an artifact that is hollow (of which
    `cram gc --hollow` dropped the data and kept the manifest).
    """

    def __init__(
        self, function: Callable[..., dict], name: str, version: int, resumes: bool, varies: bool, retries: int
    ) -> None:
        self.function = function
        self.stage_version = version
        self.resumes = resumes
        self.varies = varies
        parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "out"]
        parameters.append(inspect.Parameter("refill", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=bool))
        self.signature = inspect.Signature(parameters, return_annotation=Artifact)

        @functools.wraps(function)
        def as_task_run(*args: Any, **kwargs: Any) -> Artifact | State:
            is_cached = bool(task_run.id) and self.is_made(*args, **kwargs)
            artifact = self.make_if_absent(*args, **kwargs)
            if is_cached:
                return Completed(name="Cached", message="Found in the store.", data=artifact)
            return artifact

        def run_name() -> str:
            return "-".join(filter(None, (name, task_run.parameters["params"].label())))

        as_task_run.__signature__ = self.signature  # type: ignore[attr-defined]
        super().__init__(
            as_task_run,
            name=name,
            task_run_name=run_name,
            cache_policy=NO_CACHE,  # the store is the cache, so Prefect keeps no results
            persist_result=False,
            retries=retries,
            retry_delay_seconds=SECONDS_BEFORE_A_RETRY,
            retry_condition_fn=has_lost_connection,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Artifact:  # type: ignore[override]
        """The artifact, made if it is absent.

        While a plan is made, the call is only recorded, and what it returns stands for the artifact. Outside a Prefect
        run, the stage runs right here, without Prefect. In one, it is a task run.
        """
        record = recording.get()
        if record:
            params, *inputs = self.signature.bind(*args, **kwargs).arguments.values()
            return record(self, params, tuple(inputs))
        if not flow_run.id:
            return self.make_if_absent(*args, **kwargs)
        # the result of the state, since a task that returns a state, as `Cached`, returns it as it is
        return super().__call__(*args, return_state=True, **kwargs).result()

    def identify(self, *args: Any, **kwargs: Any) -> Call:
        """What a call with these arguments makes, and from what."""
        inputs = self.signature.bind(*args, **kwargs).arguments
        params = inputs.pop("params")
        refill = inputs.pop("refill", False)
        names: dict[str, str | list[str]] = {}
        for name, given in inputs.items():
            names[name] = [artifact.name for artifact in given] if isinstance(given, list) else given.name
        head = {"stage": self.name, "version": self.stage_version}
        rest = {"params": params.identity(), "inputs": names}
        key = hashlib.sha256(json.dumps(head | rest, sort_keys=True).encode()).hexdigest()[:12]
        return Call(Artifact(stage=self.name, key=key), {**head, "key": key, **rest}, params, inputs, refill)

    def target(self, *args: Any, **kwargs: Any) -> Artifact:
        """The artifact for these arguments, whether or not it exists."""
        return self.identify(*args, **kwargs).artifact

    def is_made(self, *args: Any, **kwargs: Any) -> bool:
        """Whether that artifact is complete and was made from the present contents of the inputs."""
        return self.identify(*args, **kwargs).is_made()

    def make_if_absent(self, *args: Any, **kwargs: Any) -> Artifact:
        """The artifact for these arguments, made in this process if it is absent."""
        with disk_errors_as_input_errors(self.name):
            call = self.identify(*args, **kwargs)
            if call.is_made():
                return call.artifact
            if home.is_read_only():
                raise InputError(
                    f"{call.artifact.name} would have to be made first, and a plan makes nothing. Run without --plan."
                )
            with hold_inputs(call.inputs), lock_artifact(call.artifact):
                if not call.is_made():  # another process may have made it while this one waited
                    warn_of_damage(call.artifact)
                    self.make(call)
            return call.artifact

    def make(self, call: Call) -> None:
        """Call the function and publish what it wrote."""
        draft = draft_of(call.artifact)
        made_from = digests_of_contents(call.inputs)
        if not self.resumes or read_origin(draft) != made_from:
            shutil.rmtree(draft, ignore_errors=True)
        is_resumed = (draft / WORK).exists()
        draft.mkdir(parents=True, exist_ok=True)
        if self.resumes and made_from:
            write_origin(draft, made_from)
        before = read_manifest(call.artifact)
        about = self.produce(call, draft, made_from)
        if is_resumed:  # its times are those of the last attempt
            about["resumed"] = True
        publish(draft, call.artifact, about)
        if before and before.get("hollow"):
            compare(call.artifact.name, result_files(before), result_files(about))

    def produce(self, call: Call, draft: Path, made_from: dict[str, str]) -> dict:
        """Call the function, which writes to `draft`. Returns the manifest, but for the list of files."""
        about = call.about | {
            "varies": self.varies,
            "made_from": made_from,
            "usual": call.params.usual(),
        }
        cpu_before = reset_usage()
        start = time.time()
        stats = self.function(call.params, **call.inputs, out=draft)
        (draft / STATS).write_text(json.dumps(stats, indent=2) + "\n", encoding="utf-8")
        return about | {
            "stats": stats,
            "seconds": round(time.time() - start, 3),
            "cpu_seconds": round(cpu_clock() - cpu_before + usage.cpu_seconds, 3),
            "peak_memory_mib": peak_memory(),
            "started": datetime.fromtimestamp(start, UTC).isoformat(timespec="seconds"),
            "finished": datetime.now(UTC).isoformat(timespec="microseconds"),  # orders artifacts
            "environment": environment(),
        }


def write_origin(draft: Path, made_from: dict[str, str]) -> None:
    """Note in a draft from which contents of its inputs it is made: the key stays when a model is trained again."""
    (draft / WORK).mkdir(exist_ok=True)
    (draft / WORK / ORIGIN).write_text(json.dumps(made_from), encoding="utf-8")


def read_origin(draft: Path) -> dict[str, str]:
    """What `write_origin` noted in a draft; empty if nothing."""
    with suppress(OSError, ValueError):
        return json.loads((draft / WORK / ORIGIN).read_text(encoding="utf-8"))
    return {}


def compare(name: str, before: set[tuple[str, str]], now: set[tuple[str, str]]) -> None:
    """Log whether an artifact that was hollow has its former result."""
    if before == now:
        log.info("%s was rebuilt, with the same contents as before.", name)
    else:
        log.warning(
            "%s was rebuilt, but %s differs from before, most likely because of another version of a library. What "
            "was made from the former contents stays.",
            name,
            min(before ^ now)[0],
        )


def stage(
    version: int, resumes: bool = False, name: str = "", varies: bool = False, retries: int = 0
) -> Callable[[Callable], StageTask]:
    """Make fn(params, *inputs, out) -> stats a cached Prefect task from (params, *inputs) to an Artifact.

    `resumes`: the function continues from what a killed attempt left in `out`, unless an input has other contents since
    then; otherwise `out` is emptied first.
    `varies`: two runs can write different files, as training does; a new run then also reruns the stages after it.
    `name`: that of the directory under artifacts/, if it is not the function's.
    `retries`: how often Prefect tries again after a lost connection.
    `fn(params, *inputs)` is a task run in a Prefect run, and runs here otherwise; `fn.fn(params, *inputs)` always runs
    here.
    """

    def decorate(fn: Callable[..., dict]) -> StageTask:
        return StageTask(fn, name or fn.__name__, version, resumes, varies, retries)

    return decorate
