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
from datetime import UTC, datetime
from importlib import metadata
from typing import Any, ClassVar

from prefect import Task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.runtime import task_run
from prefect.states import Completed
from pydantic import BaseModel

from model.errors import InputError, Unreachable
from model.limits import cores
from tasks.store import home
from tasks.store.artifacts import (
    STATS,
    Artifact,
    digests_of_contents,
    draft_of,
    is_made,
    read_manifest,
    result_files,
    to_fill,
    warn_of_damage,
)
from tasks.store.errors import disk_errors_as_input_errors
from tasks.store.home import CODE, IN_CHECKOUT
from tasks.store.locks import hold_inputs, lock_artifact
from tasks.store.publish import publish
from tasks.workers.processes import cpu_clock, peak_memory, reset_usage, usage

REPORTED_PACKAGES = ("cram", "prefect", "torch", "tokenizers", "numpy", "pyarrow", "scipy", "transformers")
SECONDS_BEFORE_A_RETRY = 60
log = logging.getLogger(__name__)


class Params(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """What a stage's output depends on, other than its input artifacts.

    `later`: fields that enter a key only where they differ from their default, so that keys from before they came stay.
    """

    later: ClassVar[tuple[str, ...]] = ()

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
    git, commit = ["git", "-C", str(CODE), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"], "unknown"
    with suppress(OSError, subprocess.CalledProcessError):  # no git on this machine
        if IN_CHECKOUT:
            commit = subprocess.run(git, capture_output=True, encoding="utf-8", check=True).stdout.strip()
    machine = {"system": platform.platform(), "cores": cores()}
    return {"python": platform.python_version(), "packages": packages, "machine": machine, "commit": commit}


def has_lost_connection(_task: Task, _task_run: TaskRun, state: State) -> bool:
    """Whether a stage failed for want of a network, which may come back."""
    return isinstance(state.result(raise_on_failure=False), ConnectionError | Unreachable)


class StageTask(Task):
    """A stage function(params, *inputs, out) -> stats as a Prefect task from (params, *inputs) to an Artifact."""

    def __init__(
        self, function: Callable[..., dict], name: str, version: int, resumes: bool, varies: bool, retries: int
    ) -> None:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Artifact | State:
            if task_run.id and self.is_made(*args, **kwargs):
                return Completed(name="Cached", message="Found in the store.", data=self.run(*args, **kwargs))
            return self.run(*args, **kwargs)

        def run_name() -> str:
            return "-".join(filter(None, (name, task_run.parameters["params"].label())))

        given = [p for p in inspect.signature(function).parameters.values() if p.name != "out"]
        self.signature = inspect.Signature(given, return_annotation=Artifact)
        run.__signature__ = self.signature  # type: ignore[attr-defined]
        super().__init__(
            run,
            name=name,
            task_run_name=run_name,
            cache_policy=NO_CACHE,  # the store is the cache, so Prefect keeps no results
            persist_result=False,
            retries=retries,
            retry_delay_seconds=SECONDS_BEFORE_A_RETRY,
            retry_condition_fn=has_lost_connection,
        )
        self.function, self.stage_version, self.resumes, self.varies = function, version, resumes, varies

    def planned(self, *args, **kwargs) -> tuple[Artifact, dict, Params, dict]:
        """The artifact for these arguments, all that determines its key, the params, and the inputs by name."""
        inputs = self.signature.bind(*args, **kwargs).arguments
        params = inputs.pop("params")
        names = {name: [a.name for a in of] if isinstance(of, list) else of.name for name, of in inputs.items()}
        head = {"stage": self.name, "version": self.stage_version}
        rest = {"params": params.identity(), "inputs": names}
        key = hashlib.sha256(json.dumps(head | rest, sort_keys=True).encode()).hexdigest()[:12]
        return Artifact(stage=self.name, key=key), {**head, "key": key, **rest}, params, inputs

    def target(self, *args, **kwargs) -> Artifact:
        """The artifact for these arguments, whether or not it exists."""
        return self.planned(*args, **kwargs)[0]

    def is_made(self, *args, **kwargs) -> bool:
        """Whether that artifact is complete and was made from the present contents of the inputs."""
        artifact, _, _, inputs = self.planned(*args, **kwargs)
        return is_made(artifact, inputs)

    def run(self, *args, **kwargs) -> Artifact:
        """The artifact for these arguments, made if it is absent."""
        with disk_errors_as_input_errors(self.name):
            artifact, about, params, inputs = self.planned(*args, **kwargs)
            if is_made(artifact, inputs):
                return artifact
            if home.is_frozen:
                raise InputError(
                    f"{artifact.name} would have to be made first, and a plan makes nothing. Run without --plan."
                )
            with hold_inputs(inputs), lock_artifact(artifact):
                if not is_made(artifact, inputs):  # another process may have made it while this one waited
                    warn_of_damage(artifact)
                    self.make(artifact, about, params, inputs)
            return artifact

    def make(self, artifact: Artifact, about: dict, params: Params, inputs: dict) -> None:
        """Call the function and publish what it wrote."""
        draft, start, before = draft_of(artifact), time.time(), read_manifest(artifact)
        if not self.resumes:
            shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True, exist_ok=True)
        about["varies"], about["made_from"] = self.varies, digests_of_contents(inputs)
        about["usual"] = params.usual()
        cpu_before = reset_usage()
        about["stats"] = self.function(params, **inputs, out=draft)
        (draft / STATS).write_text(json.dumps(about["stats"], indent=2) + "\n", encoding="utf-8")
        about["seconds"] = round(time.time() - start, 3)
        about["cpu_seconds"] = round(cpu_clock() - cpu_before + usage.cpu_seconds, 3)
        about["peak_memory_mib"] = peak_memory()
        about["started"] = datetime.fromtimestamp(start, UTC).isoformat(timespec="seconds")
        about["finished"] = datetime.now(UTC).isoformat(timespec="microseconds")  # orders artifacts
        about["environment"] = environment()
        publish(draft, artifact, about)
        if before and before.get("hollow"):
            to_fill.discard(artifact)
            compare(artifact.name, result_files(before), result_files(about))


def compare(name: str, before: set[tuple[str, str]], now: set[tuple[str, str]]) -> None:
    """Log whether an artifact that was hollow has its former result."""
    if before == now:
        log.info("%s was made again, with the same contents as before.", name)
    else:
        why = "most likely by another version of a library. What was made from the former contents stays"
        log.warning("%s was made again, but %s differs from before, %s.", name, min(before ^ now)[0], why)


def stage(
    version: int, resumes: bool = False, name: str = "", varies: bool = False, retries: int = 0
) -> Callable[[Callable], StageTask]:
    """Make fn(params, *inputs, out) -> stats a cached Prefect task from (params, *inputs) to an Artifact.

    `resumes`: the function continues from what a killed attempt left in `out`; otherwise `out` is emptied first.
    `varies`: two runs can write different files, as training does; a new run then also reruns the stages after it.
    `name`: that of the directory under artifacts/, if it is not the function's.
    `retries`: how often Prefect tries again after a lost connection.
    A plain call without Prefect is `fn.fn(params, *inputs)`.
    """

    def decorate(fn: Callable[..., dict]) -> StageTask:
        return StageTask(fn, name or fn.__name__, version, resumes, varies, retries)

    return decorate
