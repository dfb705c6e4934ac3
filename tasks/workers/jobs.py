"""One job over a part: a call whose result is kept in a file, so that a rerun doesn't do it again."""

import ctypes
import fcntl
import json
import os
import resource
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

ONE_THREAD = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}  # of each library
libc = ctypes.CDLL(None, use_errno=True)
# submit(work, job, marker), whose future gives what `finish` does; and what to call now and then while waiting
Place = tuple[Callable[..., Future], Callable[[], None]]


def remembered(done: Path) -> dict | None:
    """The result of a finished part, or None."""
    try:
        return json.loads(done.read_bytes())
    except (FileNotFoundError, ValueError):
        return None


def finish(work: Callable[..., dict], job: tuple, done: Path) -> tuple[dict, float, float]:
    """The result of work(*job), kept in the file `done` for a rerun; CPU seconds that took; this process's peak memory, MiB.

    The part is locked: a worker of a cluster that was taken for lost may still be at it.
    """
    half, start = done.with_suffix(".half"), time.process_time()
    with half.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if (result := remembered(done)) is None:
            text = json.dumps(work(*job))
            file.truncate(0)
            file.write(text)
            file.flush()
            if libc.syncfs(file.fileno()):  # a marker that outlives a power cut vouches for files that do
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(half))
            half.replace(done)
            result = json.loads(text)  # the same as a rerun would read
    return result, time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
