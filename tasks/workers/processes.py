"""The worker processes of this machine, for parts of a corpus and for finetuning runs; CPU time and memory of a stage.

They are forked from a server that has imported what they need. None outlives the process that uses them.
"""

import ctypes
import functools
import multiprocessing
import os
import pickle
import resource
import signal
import stat
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

from tqdm import tqdm

from model.environment import print_anything, whole_number
from model.errors import InputError
from model.limits import cores
from model.signals import SIGNALS
from tasks.store.home import CODE

ONE_THREAD = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}  # of each library
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
LONGEST_SOCKET = 107  # bytes of a socket's path (sun_path in unix(7), without its end)
WITHIN_TMPDIR = "/pymp-12345678/listener-12345678"  # where multiprocessing puts its sockets: names of this length
starting = threading.Lock()  # starting a worker changes, for a moment, what it takes over from this process
to_parent: Connection | None = None  # in a worker
Measured = tuple[Any, float, float]  # a result, the CPU seconds it took, and the peak memory of its process, MiB


class Usage(threading.local):
    """What the workers of a stage used. Each thread runs a different stage."""

    peak_mib = 0.0  # the largest resident memory of any worker
    cpu_seconds = 0.0  # of all workers

    def add(self, seconds: float, peak_mib: float) -> None:
        """Add what one worker used for one piece of work."""
        self.cpu_seconds += seconds
        self.peak_mib = max(self.peak_mib, peak_mib)


usage = Usage()


def with_usage(work: Callable[..., Any], *arguments: Any) -> Measured:
    """The result of work(*arguments) in this process, and what it used."""
    start = time.process_time()
    result = work(*arguments)
    return result, time.process_time() - start, peak_memory()["process"]


def reset_usage() -> float:
    """Restart the peak of resident memory, where the kernel allows it (Linux); returns the CPU seconds so far.

    Memory that is no longer in use goes back to the system first, or the peak would be that of the stages before too.
    """
    arrow = sys.modules.get("pyarrow")
    if arrow:
        arrow.default_memory_pool().release_unused()
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    usage.peak_mib = 0.0
    usage.cpu_seconds = 0.0
    return cpu_clock()


def cpu_clock() -> float:
    """CPU seconds of this process, or of this thread if stages run in several threads."""
    if threading.current_thread() is threading.main_thread():
        return time.process_time()
    return time.thread_time()


def peak_memory() -> dict[str, int]:
    """Peak resident memory since the last reset, MiB: of this process, and of the largest worker."""
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # since the process began
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM"):
                kib = int(line.split()[1])
    return {"process": round(kib / 1024), "largest_worker": round(usage.peak_mib)}


class Lost(Exception):
    """The worker was killed, or its pool has ended."""


def workers() -> int:
    """CRAM_WORKERS, or the cores that this process can keep busy."""
    return whole_number("CRAM_WORKERS", "one per core") or cores()


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


@functools.cache  # multiprocessing keeps the directory until this process ends, and deletes it then
def place_sockets() -> None:
    """Have multiprocessing put its sockets where their paths are short enough, even if TMPDIR is long, as Slurm's is.

    It makes a directory there that only this user may enter. Raises InputError if there is no such place.
    """
    before = tempfile.tempdir
    tempfile.tempdir = place_for_sockets()
    try:
        util.get_temp_dir()
    finally:
        tempfile.tempdir = before


def place_for_sockets() -> str:
    """TMPDIR, or another directory whose path is short enough. Raises InputError if there is none."""
    longest = LONGEST_SOCKET - len(WITHIN_TMPDIR)
    usual = tempfile.gettempdir()
    for place in (usual, *socket_places()):
        if len(os.fsencode(place)) <= longest:
            return place
    raise InputError(
        f"TMPDIR is {usual!r}; expected at most {longest} bytes, since worker processes are reached by sockets in it, "
        "and neither XDG_RUNTIME_DIR nor /tmp can be written. Set TMPDIR to a shorter path."
    )


def socket_places() -> Iterator[str]:
    """Directories for sockets in place of TMPDIR: XDG_RUNTIME_DIR if it is the user's alone, and /tmp."""
    own = os.environ.get("XDG_RUNTIME_DIR", "")
    with suppress(OSError):
        about = os.stat(own)
        is_private = about.st_uid == os.getuid() and stat.S_IMODE(about.st_mode) == stat.S_IRWXU
        if is_private and stat.S_ISDIR(about.st_mode):
            yield own
    if os.access("/tmp", os.W_OK | os.X_OK):
        yield "/tmp"


@contextmanager
def fork_server() -> Iterator[None]:
    """Have the server that workers are forked from, for one start at a time.

    The server has a single thread, so forking it is safe; forking this process is not. It imports once what all workers
    need, and ends with this process and the last worker. Workers don't import the script that was started, which would
    run it again.
    """
    searched = [str(CODE), os.environ.get("PYTHONPATH", "")]
    own = {
        "JE_ARROW_MALLOC_CONF": "background_thread:false",
        "PYTHONSAFEPATH": "1",  # cram's `tasks`, not a folder of that name in the working directory
        "PYTHONPATH": os.pathsep.join(filter(None, searched)),
    }
    with starting:
        place_sockets()
        # what is sent to the whole group, as Ctrl-C is, is for this process to handle
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            resource_tracker.ensure_running()
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # of which the tracker's start has unblocked some
            with environment_with(ONE_THREAD | KEPT_MEMORY | own):
                forkserver.set_forkserver_preload(PRELOADED)
                forkserver.ensure_running()
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            sys.modules["__main__"] = main


def serve(pipe: Connection, environment: dict[str, str]) -> None:
    """In a worker: do what comes through the pipe, one work after the other, until the parent ends this process."""

    def end_with_parent() -> None:  # also with one that was killed by SIGKILL
        parent = multiprocessing.parent_process()
        assert parent
        parent.join()
        os._exit(1)

    global to_parent
    print_anything()
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # the parent handles them, and kills this process
    os.environ.clear()
    os.environ.update(environment | ONE_THREAD)
    # for torch's bars: tqdm's lock is otherwise a semaphore, which such an end would leave behind
    tqdm.set_lock(threading.RLock())
    threading.Thread(target=end_with_parent, daemon=True).start()
    to_parent = pipe
    with suppress(EOFError, OSError):  # the parent has gone
        while True:
            work, arguments = pipe.recv()
            pipe.send(answer(work, arguments))


def answer(work: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[str, Any]:
    """In a worker: how work(*arguments) ended, as ("result", `Measured`) or ("error", exception)."""
    try:
        return "result", with_usage(work, *arguments)
    except Exception as error:
        printed = traceback.format_exc()
        error.add_note(f"In a worker process:\n{printed}")
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            return "error", RuntimeError(printed)
        return "error", error


def report(*what: object) -> None:
    """In a worker: have `Processes.call` in the parent pass this on."""
    assert to_parent
    to_parent.send(("report", what))


class Worker:
    """A process, and the pipe to it, which closes with the last reference."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        self.ending = threading.Lock()
        self.pipe, theirs = context.Pipe()
        with fork_server(), theirs:
            self.process = context.Process(target=serve, args=(theirs, dict(os.environ)), daemon=True)
            self.process.start()

    def call(self, work: Callable[..., Any], arguments: tuple[Any, ...], hear: Callable[..., None]) -> Measured:
        """See `Processes.call`."""
        try:
            self.pipe.send((work, arguments))
        except OSError as error:
            raise Lost from error
        while True:
            try:
                kind, value = self.pipe.recv()
            except (EOFError, OSError) as error:
                raise Lost from error
            if kind == "result":
                return value
            if kind == "error":
                raise value
            hear(*value)

    def end(self) -> None:
        """Kill the process and wait for its end."""
        with self.ending:
            self.process.kill()
            self.process.join()


class Processes(AbstractContextManager["Processes"]):
    """A pool of worker processes, as many as there are calls at a time. They end with its context, or by `end`.

    Call from threads other than the main one: an interrupt would leave a process half-started.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.ended = False
        self.workers: list[Worker] = []
        self.idle: list[Worker] = []

    def __exit__(self, *_: object) -> None:
        self.end()

    def call(self, work: Callable[..., Any], *arguments: Any, hear: Callable[..., None] = lambda *_: None) -> Measured:
        """What work(*arguments) returns in an idle process or a new one; each `report` there is a call of `hear` here.

        An error of the work is raised here. Raises Lost if the process is killed or the pool ends. After any error the
        process ends, which frees its memory; others continue.
        """
        worker = self._take()
        try:
            result = worker.call(work, arguments, hear)
        except BaseException:
            worker.end()
            with self.lock:
                self.workers.remove(worker)
            raise
        with self.lock:
            self.idle.append(worker)
        return result

    def _take(self) -> Worker:
        with self.lock:
            if self.ended:
                raise Lost
            while self.idle:
                worker = self.idle.pop()
                if not worker.pipe.poll():  # an idle worker sends nothing: the pipe of a dead one has ended
                    return worker
                self.workers.remove(worker)
            worker = Worker()
            self.workers.append(worker)
            return worker

    def end(self) -> None:
        """End all processes at once. Unfinished calls, and later ones, raise Lost."""
        self.ended = True
        ending = threading.Thread(target=self._end)  # which a second Ctrl-C doesn't interrupt
        ending.start()
        ending.join()

    def _end(self) -> None:
        with self.lock:
            left = self.workers.copy()
        for worker in left:
            worker.process.kill()
        for worker in left:
            worker.end()
