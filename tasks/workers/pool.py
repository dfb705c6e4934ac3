"""Worker processes of this machine. They are forked from a server that has imported what they need; none outlives cram."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from types import ModuleType

from tqdm import tqdm

from model import InputError
from model.signals import Deferred
from tasks.home import CODE
from tasks.workers.jobs import ONE_THREAD, Place, finish

# of glibc: to give memory back after every array, and take it again, cost workers up to a tenth of their time
KEPT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(128 << 20)}
# by the fork server, with the libraries that they import; workers import other modules themselves
PRELOADED = [
    "tasks.decontaminate",
    "tasks.deduplicate",
    "tasks.filter",
    "tasks.measure",
    "tasks.tokenize",
    "tasks.vocabulary",
]
starting = threading.Lock()  # while workers are started, what they take over from this process is changed


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
