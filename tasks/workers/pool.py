"""Work over the parts of a corpus, in as many processes as the machine has cores, or on a Dask cluster.

Results depend on part boundaries, never on the number of workers or where they are, and a finished part is not done again.
"""

import ctypes
import fcntl
import json
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType

from tqdm import tqdm

from model import InputError
from model.signals import Deferred
from tasks.home import CODE
from tasks.workers.progress import Progress

ONE_THREAD = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}  # of each library
# of glibc: to give memory back after every array, and take it again, cost workers up to a tenth of their time
KEPT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(128 << 20)}
# by the fork server, with the libraries that they import
PRELOADED = [
    "tasks.decontaminate",
    "tasks.deduplicate",
    "tasks.filter",
    "tasks.measure",
    "tasks.tokenize",
    "tasks.vocabulary",
]
SECONDS_BETWEEN_CHECKS = 2
libc = ctypes.CDLL(None, use_errno=True)
starting = threading.Lock()  # while workers are started, what they take over from this process is changed


class Usage(threading.local):
    """What the workers of a stage used; each thread runs a stage of its own."""

    peak_mib = 0.0  # the largest resident memory of any of them
    cpu_seconds = 0.0  # of all of them

    def add(self, seconds: float, peak_mib: float) -> None:
        """What one worker used for one piece of work."""
        self.cpu_seconds, self.peak_mib = self.cpu_seconds + seconds, max(self.peak_mib, peak_mib)


usage = Usage()

# submit(work, job, marker), whose future gives what `finish` does; and what to call now and then while waiting
Place = tuple[Callable[..., Future], Callable[[], None]]


def workers() -> int:
    """CRAM_WORKERS, or the cores that this process may use."""
    asked = os.environ.get("CRAM_WORKERS", "")
    if asked and not (asked.isdecimal() and int(asked) > 0):
        raise InputError(f"CRAM_WORKERS is {asked!r}; expected a positive whole number, or unset for one a core.")
    return int(asked or len(os.sched_getaffinity(0)))


@contextmanager
def environment_with(changes: dict[str, str]) -> Iterator[None]:
    """Change environment variables of this process for a while."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def library_threads() -> AbstractContextManager[None]:
    """Let tokenizers use as many threads of this process as there are workers, which have nothing to do meanwhile.

    It starts them when it first needs them, and keeps as many. Its results must not depend on their number.
    """
    several = "true" if workers() > 1 else "false"
    return environment_with({"RAYON_NUM_THREADS": str(workers()), "TOKENIZERS_PARALLELISM": several})


def one_library_thread() -> None:
    """Let tokenizers use no more threads until the end of `library_threads`."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def ensure_fork_server() -> None:
    """Start the process that workers are forked from, if it does not run: it imports once what they all need.

    It has a single thread, so a fork of it is safe, as one of this process is not. It ends with this process and
    the last worker.
    """
    searched = os.pathsep.join(filter(None, (str(CODE), os.environ.get("PYTHONPATH"))))
    # our own `tasks`, not a directory of that name where cram was started
    own = {"JE_ARROW_MALLOC_CONF": "background_thread:false", "PYTHONSAFEPATH": "1", "PYTHONPATH": searched}
    resource_tracker.ensure_running()  # which would end the blocking
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Ctrl-C is for this process to handle
    try:
        with environment_with(ONE_THREAD | KEPT_MEMORY | own):
            forkserver.set_forkserver_preload(PRELOADED)
            forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def prepare() -> None:
    """Have the fork server ready for the next stage: it imports for a second, while there is other work here."""
    if workers() > 1 and not os.environ.get("CRAM_DASK"):
        with starting_workers():
            ensure_fork_server()


def start_worker(stop: Connection, environment: dict[str, str]) -> None:
    """Take over the parent's environment; end when the parent dies, even if killed, or gives up the work."""

    def watch() -> None:
        wait([stop])  # nothing is ever sent; its other end is closed
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is for the parent to handle
    os.environ.clear()
    os.environ.update(environment | ONE_THREAD)
    tqdm.set_lock(threading.RLock())  # for torch's bars: tqdm's own is a semaphore, which such an end leaves behind
    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def without_main() -> Iterator[None]:
    """Have workers import the module of their work only: a script that was started would run once more in each."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextmanager
def starting_workers() -> Iterator[None]:
    """Start processes in here: one thread at a time, and uninterrupted, since a process that is half started says so."""
    with Deferred() as signals, starting, without_main(), signals.held():
        yield


@contextmanager
def processes(count: int, label: str) -> Iterator[Place]:
    """Workers on this machine, at most so many; they end with the work, and none outlives this process."""
    context = multiprocessing.get_context("forkserver")
    with starting_workers():
        ensure_fork_server()
    stop, held = multiprocessing.Pipe(duplex=False)
    given = (stop, dict(os.environ))
    pool = ProcessPoolExecutor(count, mp_context=context, initializer=start_worker, initargs=given)

    def submit(*task) -> Future:
        with starting_workers():
            return pool.submit(finish, *task)

    try:
        yield submit, lambda: None
    except BaseException as error:
        held.close()  # what the others are at, at most a part each, is given up
        if isinstance(error, BrokenProcessPool):
            raise InputError(
                f"A worker process of '{label}' was killed, most likely for lack of memory ({count} were running). "
                "Run again with CRAM_WORKERS=1; the finished parts are kept."
            ) from error
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        held.close()
        stop.close()


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


def completed(futures: dict[Future, int], check: Callable[[], None]) -> Iterator[Future]:
    """The futures, each when it is done; calls `check` every few seconds while waiting."""
    waiting = set(futures)
    while waiting:
        try:
            for future in as_completed(waiting, timeout=SECONDS_BETWEEN_CHECKS):
                waiting.discard(future)
                yield future
        except TimeoutError:
            check()


def place(count: int, label: str, done: Path) -> AbstractContextManager[Place]:
    """Where so many parts are worked on."""
    if address := os.environ.get("CRAM_DASK"):
        from tasks.workers.dask_cluster import cluster

        return cluster(address, label, done)
    return processes(min(workers(), count), label)


def over_parts(work: Callable[..., dict], jobs: list[tuple], done: Path, label: str) -> list[dict]:
    """The results of work(*job), in the order of the jobs.

    `work` is a module-level function that writes its files and returns counts as plain JSON. Its arguments are paths and
    params: it may run in another process or on another machine. `done` is a directory in the stage's draft that
    remembers finished jobs over a crash; the stage deletes it when it is through. An error in one job ends the others.
    """
    done.mkdir(parents=True, exist_ok=True)
    files = [done / f"{i:05d}.json" for i in range(len(jobs))]
    results = [remembered(file) for file in files]
    left = [i for i, result in enumerate(results) if result is None]
    alone = not os.environ.get("CRAM_DASK") and min(workers(), len(left)) <= 1
    try:
        with Progress(label, total=len(jobs), unit="part") as bar:
            bar.update(len(jobs) - len(left))
            if alone or not left:
                for i in left:
                    results[i], *_ = finish(work, jobs[i], files[i])
                    bar.update()
                return results
            if work.__module__ == "__main__":
                raise InputError(
                    f"'{label}' runs in other processes, which import its function {work.__name__} by name; it was defined "
                    "in the script or notebook that was started. Move it to a module of its own."
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
