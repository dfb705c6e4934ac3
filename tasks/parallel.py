"""Work over the parts of a corpus, in as many processes as the machine has cores.

Results depend on part boundaries, never on the number of workers, and a finished part is not done again.
"""

import json
import logging
import multiprocessing
import os
import resource
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path

from model import InputError
from tasks.progress import Progress

log = logging.getLogger(__name__)
peak_mib = 0.0  # the largest resident memory of any worker since it was last set to zero


def workers() -> int:
    """CRAM_WORKERS, or the cores that this process may use."""
    asked = os.environ.get("CRAM_WORKERS", "")
    if asked and not (asked.isdecimal() and int(asked) > 0):
        raise InputError(f"CRAM_WORKERS is {asked!r}; expected a positive whole number, or unset for one a core.")
    return int(asked or len(os.sched_getaffinity(0)))


def _start_worker() -> None:
    """Die with the parent, even when it is killed; leave the other cores to the other workers."""

    def watch() -> None:
        wait([multiprocessing.parent_process().sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    os.environ.update(RAYON_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")


@contextmanager
def executor(processes: int) -> Iterator[Executor]:
    """Where parts are worked on: processes started afresh, since a fork of a threaded process can hang."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_start_worker)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _finish(work: Callable[..., dict], job: tuple, done: Path) -> tuple[dict, float]:
    """The result of work(*job), kept in the file `done` for a rerun; and this process's peak memory, MiB."""
    if done.exists():
        return json.loads(done.read_text()), 0.0
    result = work(*job)
    half = done.with_suffix(".half")
    half.write_text(json.dumps(result))
    half.replace(done)
    return result, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def over_parts(work: Callable[..., dict], jobs: list[tuple], done: Path, label: str) -> list[dict]:
    """The results of work(*job), in the order of the jobs.

    `work` is a module-level function that writes its files and returns counts as plain JSON. `done` is a directory in
    the stage's draft that remembers finished jobs over a crash; the stage deletes it when it is through.
    """
    global peak_mib
    done.mkdir(parents=True, exist_ok=True)
    files = [done / f"{i:05d}.json" for i in range(len(jobs))]
    results: list[dict] = [{}] * len(jobs)
    processes = min(workers(), len(jobs))
    with Progress(label, total=len(jobs), unit="part") as bar:
        if processes <= 1:
            for i, job in enumerate(jobs):
                results[i], _ = _finish(work, job, files[i])
                bar.update()
            return results
        try:
            with executor(processes) as pool:
                futures = {pool.submit(_finish, work, job, files[i]): i for i, job in enumerate(jobs)}
                for future in as_completed(futures):
                    results[futures[future]], peak = future.result()
                    peak_mib = max(peak_mib, peak)
                    bar.update()
        except BrokenProcessPool as error:
            raise InputError(
                f"A worker process of '{label}' was killed, most likely for lack of memory ({processes} were running). "
                "Run again with CRAM_WORKERS=1; the finished parts are kept."
            ) from error
    return results
