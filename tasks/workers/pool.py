"""Worker processes of this machine, for parts of a corpus and for training runs.

They are forked from a server that has imported what they need. None outlives the process that uses them.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from types import ModuleType

from tqdm import tqdm

from model import InputError
from model.environment import whole_number
from model.signals import Deferred
from tasks.home import CODE
from tasks.workers.jobs import ONE_THREAD, Place, finish
from tasks.workers.usage import measured

# of glibc: returning memory after every array and taking it again cost workers up to a tenth of their time
KEPT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(128 << 20)}
# imported by the fork server, with their libraries; workers import other modules themselves
PRELOADED = [
    "tasks.decontaminate",
    "tasks.deduplicate",
    "tasks.filter",
    "tasks.measure",
    "tasks.tokenize",
    "tasks.vocabulary",
]
SECONDS_TO_SAVE = 300  # for a stopped run to write its checkpoint
starting = threading.Lock()  # starting a worker changes, for a moment, what it takes over from this process


def workers() -> int:
    """CRAM_WORKERS, or the cores that this process may use."""
    return whole_number("CRAM_WORKERS", "one per core") or len(os.sched_getaffinity(0))


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
    """Let tokenizers use as many threads of this process as there could be workers, which are idle meanwhile.

    It starts the threads at its first use and keeps their number. Results must not depend on that number.
    """
    several = "true" if workers() > 1 else "false"
    return environment_with({"RAYON_NUM_THREADS": str(workers()), "TOKENIZERS_PARALLELISM": several})


def one_library_thread() -> None:
    """Let tokenizers use one thread from here to the end of `library_threads`."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def ensure_fork_server() -> None:
    """Start the process that workers are forked from, if it isn't running. It imports once what all workers need.

    It has a single thread, so forking it is safe; forking this process is not. It ends with this process and the last
    worker.
    """
    searched = os.pathsep.join(filter(None, (str(CODE), os.environ.get("PYTHONPATH"))))
    # PYTHONSAFEPATH: cram's `tasks`, not a folder of that name in the working directory
    own = {"JE_ARROW_MALLOC_CONF": "background_thread:false", "PYTHONSAFEPATH": "1", "PYTHONPATH": searched}
    resource_tracker.ensure_running()  # first, since it unblocks the signal
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Ctrl-C is for this process to handle
    try:
        with environment_with(ONE_THREAD | KEPT_MEMORY | own):
            forkserver.set_forkserver_preload(PRELOADED)
            forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def prepare() -> None:
    """Start the fork server for the next stage: it imports for a second while this process has other work."""
    if workers() > 1 and not os.environ.get("CRAM_DASK"):
        with starting_workers():
            ensure_fork_server()


def start_worker(stop: Connection, environment: dict[str, str], set_up: Callable | None, arguments: tuple) -> None:
    """Begin as a worker: take over the environment, then call set_up(*arguments).

    Nothing is ever sent through `stop`. When its other end is closed, by the parent or by the parent's death, even by
    SIGKILL, this process ends; pretraining saves a checkpoint first.
    """

    def end_with_parent() -> None:
        wait([stop])
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(SECONDS_TO_SAVE)
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment | ONE_THREAD)
    # for torch's bars: tqdm's own lock is a semaphore, which such an end would leave behind
    tqdm.set_lock(threading.RLock())
    threading.Thread(target=end_with_parent, daemon=True).start()
    if set_up:
        set_up(*arguments)


@contextmanager
def without_main() -> Iterator[None]:
    """Keep workers from importing the script that was started, which would run it again in each of them."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextmanager
def starting_workers() -> Iterator[None]:
    """Start processes in one thread at a time, and without interruption: a half-started process prints a traceback."""
    with Deferred() as signals, starting, without_main(), signals.held():
        yield


class Workers:
    """At most `count` processes, each started when there is work for it. If one is killed, all of them end."""

    def __init__(self, count: int, set_up: Callable | None = None, *arguments: object) -> None:
        self.stop, self.lifeline = multiprocessing.Pipe(duplex=False)
        self.ending = threading.Lock()
        with starting_workers():
            ensure_fork_server()
            given = (self.stop, dict(os.environ), set_up, arguments)
        context = multiprocessing.get_context("forkserver")
        self.executor = ProcessPoolExecutor(count, mp_context=context, initializer=start_worker, initargs=given)

    def submit(self, work: Callable, *arguments: object) -> Future:
        """The future of work(*arguments). A killed worker raises BrokenProcessPool, here or there."""
        with starting_workers():
            return self.executor.submit(work, *arguments)

    def ask_to_end(self) -> None:
        """Begin to end all processes, without waiting for them."""
        with self.ending:
            self.lifeline.close()

    def end(self) -> None:
        """End all processes; unfinished work is given up."""
        with self.ending:
            self.lifeline.close()
            self.executor.shutdown(cancel_futures=True)
            self.stop.close()


@contextmanager
def processes(count: int, label: str) -> Iterator[Place]:
    """Up to `count` workers for the parts of a corpus. They end with the work."""
    group = Workers(count)
    try:
        yield (lambda *job: group.submit(measured, finish, *job)), (lambda: None)
    except BrokenProcessPool as error:
        raise InputError(
            f"A worker process of '{label}' was killed, most likely for lack of memory ({count} were running). "
            "Run again with CRAM_WORKERS=1; the finished parts are kept."
        ) from error
    finally:
        group.end()
