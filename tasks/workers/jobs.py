"""One job on a part of a corpus. Its result is kept in a file, so that a rerun does not repeat the job."""

import ctypes
import fcntl
import json
import os
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

ONE_THREAD = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}  # of each library
libc = ctypes.CDLL(None, use_errno=True)
# Two functions: submit(work, job, done), whose future gives what `usage.measured` returns of `finish`;
# and one to call every few seconds while waiting, which raises if the workers are gone.
Place = tuple[Callable[..., Future], Callable[[], None]]


def read_result(done: Path) -> dict | None:
    """The result of a finished part, or None."""
    try:
        return json.loads(done.read_bytes())
    except (FileNotFoundError, ValueError):  # a power cut can leave a damaged file
        return None


def finish(work: Callable[..., dict], job: tuple, done: Path) -> dict:
    """The result of work(*job), kept in the file `done`.

    The part is locked, since a cluster's worker that was taken for lost may still be working on it.
    """
    unfinished = done.with_suffix(".half")
    with unfinished.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if (result := read_result(done)) is not None:
            return result
        text = json.dumps(work(*job))
        file.truncate(0)
        file.write(text)
        file.flush()
        if libc.syncfs(file.fileno()):  # the result must not outlive a power cut that the files of the part do not
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(unfinished))
        unfinished.replace(done)
    return json.loads(text)  # as a rerun reads it
