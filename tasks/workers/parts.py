"""Work over the parts of a corpus, in as many processes as the machine has cores, or on a Dask cluster.

Results depend on part boundaries, never on the number or the place of workers. The result of a finished part is kept in
a file, so that a rerun does not repeat it.
"""

import ctypes
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

from model import InputError
from tasks.workers.dask_cluster import Place, Refused, cluster
from tasks.workers.processes import Lost, Measured, Processes, usage, workers
from tasks.workers.progress import Progress

SECONDS_BETWEEN_CHECKS = 2
libc = ctypes.CDLL(None, use_errno=True)


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


@contextmanager
def local(count: int, label: str) -> Iterator[Place]:
    """Up to `count` processes of this machine. They end with the work; if one is killed, all of them end."""
    with ThreadPoolExecutor(count) as threads, Processes() as pool:  # the pool ends first: no thread waits for work
        try:
            yield (lambda *call: threads.submit(pool.call, *call)), (lambda *_: None)
        except Lost as error:
            raise InputError(
                f"A worker process of '{label}' was killed, most likely for lack of memory ({count} were running). "
                "Run again with CRAM_WORKERS=1; the finished parts are kept."
            ) from error


def completed(jobs: dict[int, tuple], place: Place) -> Iterator[tuple[int, Measured]]:
    """Have the jobs done; yield the number and the result of each, and check every few seconds while waiting."""
    submit, check = place
    waiting = {submit(*job): number for number, job in jobs.items()}
    while waiting:
        done, _ = wait(waiting, SECONDS_BETWEEN_CHECKS, FIRST_COMPLETED)
        for future in done:
            number = waiting.pop(future)
            try:
                yield number, future.result()
            except Refused as refusal:
                check(refusal)
                waiting[submit(*jobs[number])] = number
        if not done:
            check()


def over_parts(work: Callable[..., dict], jobs: list[tuple], done: Path, label: str) -> list[dict]:
    """The results of work(*job), in the order of the jobs.

    `work` is a module-level function that writes files and returns counts as plain JSON. Its arguments are paths and
    params, because it may run in another process or on another machine. `done` is a directory in the stage's draft that
    keeps finished jobs over a crash; the stage deletes it at its end. An error in one job ends the others.
    """
    done.mkdir(parents=True, exist_ok=True)
    files = [done / f"{i:05d}.json" for i in range(len(jobs))]
    results = [read_result(file) for file in files]
    left = [i for i, result in enumerate(results) if result is None]
    address, count = os.environ.get("CRAM_DASK"), min(workers(), len(left))
    try:
        with Progress(label, total=len(jobs), unit="part") as bar:
            bar.update(len(jobs) - len(left))
            if not left or (count == 1 and not address):
                for i in left:
                    results[i] = finish(work, jobs[i], files[i])
                    bar.update()
                return results
            if work.__module__ == "__main__":
                raise InputError(
                    f"'{label}' runs in other processes, which can't import its function {work.__name__} from the "
                    "script or notebook that was started. Move it to a module of its own."
                )
            with cluster(address, label, done) if address else local(count, label) as place:
                calls = {i: (finish, work, jobs[i], files[i]) for i in left}
                for i, done_there in completed(calls, place):
                    results[i], *used = done_there
                    usage.add(*used)
                    bar.update()
    except MemoryError as error:
        raise InputError(
            f"'{label}' ran out of memory. Run again with fewer workers at once (CRAM_WORKERS=1) or smaller parts "
            "(download.part_megabytes); the finished parts are kept."
        ) from error
    return results
