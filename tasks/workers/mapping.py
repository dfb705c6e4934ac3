"""Work over the parts of a corpus, in as many processes as the machine has cores, or on a Dask cluster.

Results depend on part boundaries, never on the number or the place of workers. Finished parts are not repeated.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, as_completed
from contextlib import AbstractContextManager
from pathlib import Path

from model import InputError
from tasks.workers import dask_cluster
from tasks.workers.jobs import Place, finish, read_result
from tasks.workers.pool import processes, workers
from tasks.workers.progress import Progress
from tasks.workers.usage import usage

SECONDS_BETWEEN_CHECKS = 2


def completed(futures: dict[Future, int], check: Callable[[], None]) -> Iterator[Future]:
    """Yield each future when it is done; call `check` every few seconds while waiting."""
    waiting = set(futures)
    while waiting:
        try:
            for future in as_completed(waiting, timeout=SECONDS_BETWEEN_CHECKS):
                waiting.discard(future)
                yield future
        except TimeoutError:
            check()


def place(count: int, label: str, done: Path) -> AbstractContextManager[Place]:
    """The workers for `count` parts."""
    if address := os.environ.get("CRAM_DASK"):
        return dask_cluster.cluster(address, label, done)
    return processes(min(workers(), count), label)


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
    alone = not os.environ.get("CRAM_DASK") and min(workers(), len(left)) <= 1
    try:
        with Progress(label, total=len(jobs), unit="part") as bar:
            bar.update(len(jobs) - len(left))
            if alone or not left:
                for i in left:
                    results[i] = finish(work, jobs[i], files[i])
                    bar.update()
                return results
            if work.__module__ == "__main__":
                raise InputError(
                    f"'{label}' runs in other processes, which can't import its function {work.__name__} from the "
                    "script or notebook that was started. Move it to a module of its own."
                )
            with place(len(left), label, done) as (submit, check):
                futures = {submit(work, jobs[i], files[i]): i for i in left}
                for future in completed(futures, check):
                    results[futures[future]], seconds, peak = future.result()
                    usage.add(seconds, peak)
                    bar.update()
    except MemoryError as error:
        raise InputError(
            f"'{label}' ran out of memory. Run again with fewer workers at once (CRAM_WORKERS=1) or smaller parts "
            "(download.part_megabytes); the finished parts are kept."
        ) from error
    return results
