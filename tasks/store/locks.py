"""Locks of artifacts, and the drafts that runs work on or have left."""

import errno
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from stat import S_ISREG
from typing import IO, NamedTuple

from model.errors import InputError
from model.files import UNSUPPORTED
from tasks.store import home
from tasks.store.artifacts import Artifact, draft_of, input_artifacts
from tasks.store.manifests import verify

NO_LOCKS = (*UNSUPPORTED, errno.EBADF, errno.ENOLCK)
SECONDS_BETWEEN_TRIES = 0.5  # to lock what another process has locked
log = logging.getLogger(__name__)


class NoLocks(InputError):
    """The store's file system has no file locks."""


def flock(file: IO, kind: int) -> None:
    """`fcntl.flock` of a file in the store. Raises NoLocks where the file system has no locks."""
    try:
        fcntl.flock(file, kind)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        raise NoLocks(
            f"{home.root()} is on a file system without file locks ({error.strerror}), without which two runs could "
            "write the same artifact. Set CRAM_ARTIFACTS to a directory on a file system that has them; then run again."
        ) from error


@contextmanager
def lock_artifact(artifact: Artifact, shared: bool = False, wait: bool = True) -> Iterator[None]:
    """Be the only writer of the artifact, or a reader (`shared`). The kernel frees the lock of a killed process.

    Raises BlockingIOError if others use the artifact and `wait` is false, NoLocks where the store has no locks, and
    InputError in a thread of a run that is stopped as it waits.
    """
    path = home.root() / ".locks" / draft_of(artifact).name
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb+") as file:  # NFS has shared locks only of files that are open for reading
        try:
            flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                raise
            log.info("Another run is using %s; waiting until it has finished.", artifact.name)
            wait_for_lock(file, kind, artifact)
        yield


def wait_for_lock(file: IO, kind: int, artifact: Artifact) -> None:
    """Lock an artifact's file as soon as others free it. Raises InputError in a thread whose pool has ended meanwhile.

    It asks again and again, since a signal doesn't reach a thread that waits in the kernel: the process would not end.
    """
    from tasks.workers import finetunes  # loads Prefect

    while not finetunes.is_over():
        time.sleep(SECONDS_BETWEEN_TRIES)
        with suppress(BlockingIOError):
            flock(file, kind | fcntl.LOCK_NB)
            return
    raise InputError(f"This run was stopped while it waited for {artifact.name}, which another run uses. Run again.")


@contextmanager
def lock_for_reading(artifact: Artifact) -> Iterator[None]:
    """Keep an artifact from being discarded, where the store can be written and has locks."""
    with ExitStack() as stack:
        with suppress(OSError, NoLocks):
            stack.enter_context(lock_artifact(artifact, shared=True))
        yield


@contextmanager
def hold_inputs(inputs: dict) -> Iterator[None]:
    """Verify a stage's inputs, and keep them from being discarded while it reads them.

    Raises InputError for an input that is absent, or has a file that differs from its manifest.
    A process locks inputs before outputs and waits for nothing once it has its output's lock, so there is no deadlock.
    """
    given = input_artifacts(inputs)
    with ExitStack() as stack:
        for artifact in given:
            stack.enter_context(lock_artifact(artifact, shared=True))
        for artifact in given:
            verify(artifact)
        yield


class Draft(NamedTuple):
    """Unfinished work of a stage: in progress, or left by a run that ended."""

    name: str  # of its directory
    bytes: int
    written: str  # ISO date of the last change
    running: bool  # a process is working on it


def drafts(stage: str) -> list[Draft]:
    """The drafts in the store, of one stage or of all (empty), the most recently written last."""
    found = []
    for folder in (home.root() / ".partial").glob(f"{stage}*"):
        size = 0
        written = 0.0
        # unlike rglob, os.walk allows for a stage that deletes and publishes meanwhile
        for where, _, files in os.walk(folder):
            for path in (where, *(os.path.join(where, file) for file in files)):
                with suppress(OSError):
                    about = os.lstat(path)
                    written = max(written, about.st_mtime)
                    if S_ISREG(about.st_mode):
                        size += about.st_size
        if written:
            when = datetime.fromtimestamp(written, UTC).isoformat()
            is_running = is_locked(home.root() / ".locks" / folder.name)
            found.append(Draft(folder.name, size, when, is_running))
    return sorted(found, key=lambda draft: (draft.written, draft.name))


def is_locked(lock: Path, shared: bool = False) -> bool:
    """Whether a process holds this lock as the only one, or, if `shared`, in any way."""
    mode = "r+" if shared else "r"
    kind = fcntl.LOCK_EX if shared else fcntl.LOCK_SH
    try:
        with lock.open(mode, encoding="utf-8") as file:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError as error:  # any other error: there is no such lock, or it can't be read
        return isinstance(error, BlockingIOError)
    return False
