"""Work over the parts of a corpus, in as many processes as the machine has cores, or on a Dask cluster.

Results depend on part boundaries, never on the number or the place of workers. The result of a finished part is kept in
a file, so that a rerun does not repeat it. CRAM_DASK names the scheduler of a cluster, which needs the package
`distributed`. Only the place of the work changes: the store is shared, so nothing but counts is sent.
"""

import asyncio
import ctypes
import fcntl
import functools
import hashlib
import json
import logging
import os
import pickle
import platform
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from model.errors import InputError, warn_once
from model.files import UNSUPPORTED
from model.wording import counted
from tasks.store.home import CODE
from tasks.store.locks import flock
from tasks.workers.processes import ONE_THREAD, Lost, Measured, Processes, reset_usage, usage, with_usage, workers
from tasks.workers.progress import Progress

if TYPE_CHECKING:
    from distributed import Client

SECONDS_BETWEEN_CHECKS = 2
Job = tuple[Any, ...]  # arguments of work
Result = TypeVar("Result")  # of work, plain JSON
libc = ctypes.CDLL(None, use_errno=True)
CONNECT_SECONDS = 10
PATIENCE_SECONDS = 60  # to wait for a worker where there is none
LIBRARIES = ("numpy", "orjson", "pyarrow", "tokenizers", "xxhash", "zstandard")  # that the bytes of a part depend on
SHARED = (
    "The store (CRAM_ARTIFACTS) must be on a file system that all machines share, at the same path; what `download` "
    "reads need not be, since this machine reads it."
)
log = logging.getLogger(__name__)


class Refused(InputError):
    """A worker can't do any part. `worker`: its address."""

    def __init__(self, reason: str, worker: str = "") -> None:
        super().__init__(reason)
        self.worker = worker


class Place:
    """Where work is done."""

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Measured]:
        """Have work(*arguments) done. The future may raise Refused."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise an error if there are no workers; called every few seconds."""

    def leave_out(self, refusal: Refused) -> None:
        """Do without the worker that has refused; raise the refusal if none is left."""
        raise refusal


@functools.cache  # in a worker: as of its import of this code, which may have been edited since
def edition() -> dict[str, str]:
    """What a part's bytes depend on besides its job: cram's code, and the versions of libraries."""
    code = sorted(path for folder in ("model", "tasks") for path in (CODE / folder).rglob("*.py"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in code)).hexdigest()[:12]
    python = ".".join(platform.python_version_tuple()[:2])
    return {"cram": digest, "python": python, **{name: metadata.version(name) for name in LIBRARIES}}


def connect(address: str) -> "Client":
    """A client of the scheduler at this address."""
    try:
        from distributed import Client, Security, comm
    except ImportError as error:
        raise InputError(
            f"CRAM_DASK is {address}, but the package `distributed` is missing. Install it with `pip install -e "
            "'.[dask]'`, or unset CRAM_DASK to use this machine's cores."
        ) from error

    async def greet() -> None:  # first, since a Client that fails to connect leaves threads behind
        security = Security().get_connection_args("client")
        connection = await comm.connect(address, timeout=CONNECT_SECONDS, **security)
        await connection.close()

    try:
        with ThreadPoolExecutor(1) as thread:  # this thread may have an event loop, as in a notebook
            thread.submit(asyncio.run, greet()).result()
        return Client(address, timeout=CONNECT_SECONDS, set_as_default=False)
    except Exception as error:  # of any kind: another program may answer there
        raise InputError(
            f"No Dask scheduler answers at CRAM_DASK={address} ({error}). Expected an address such as tcp://host:8786, "
            "where `dask scheduler` runs; or unset CRAM_DASK to use this machine's cores."
        ) from error


class Call:
    """Unpickling this calls `measure_there`.

    So the cluster runs `pickle.loads`: the scheduler does not need cram, and a worker without cram raises an error.
    """

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def __reduce__(self) -> tuple[Callable[..., Measured], tuple[object, ...]]:
        return measure_there, self.arguments


def measure_there(pickled: bytes, marker: str, expected: dict[str, str]) -> Measured:
    """Do and measure the pickled (work, *arguments). Raises Refused first if this worker can't.

    `marker` is a file in the store that the worker must see; `expected` the `edition` of the process that asks.
    """
    from distributed import get_worker

    worker = get_worker()
    reason = problem_of(worker.state.nthreads, Path(marker), expected)
    if reason:
        raise Refused(f"The Dask worker {worker.address} on {socket.gethostname()} {reason}", worker.address)
    os.environ.update(ONE_THREAD)
    reset_usage()
    return with_usage(*pickle.loads(pickled))


def problem_of(threads: int, marker: Path, expected: dict[str, str]) -> str:
    """Why a worker with that many threads can't do any part, after its name; empty if it can."""
    if threads > 1:
        return (
            f"runs {threads} parts at once in one process, where they slow each other down. Start workers as processes "
            f"of one thread each: `dask worker SCHEDULER --nworkers {threads} --nthreads 1`."
        )
    own = edition()
    wrong = [f"{what} {own[what]} (here {version})" for what, version in expected.items() if own[what] != version]
    if wrong:
        return (
            f"has {', '.join(wrong)}. The bytes of an artifact may depend on these: install the same versions and "
            "commit there, and restart the worker."
        )
    for path in (*reversed(marker.parents), marker):
        if not path.exists():
            return f"doesn't see {path}. {SHARED}"
    return ""


def explain(error: Exception, address: str, label: str) -> Exception:
    """An InputError for an error of the cluster; any other error unchanged."""
    from distributed import KilledWorker

    match error:
        case KilledWorker():
            reason = (
                f"A part of '{label}' lost every worker of the Dask cluster that tried it, most likely for lack of "
                "memory: start fewer workers per machine, or give them more (--memory-limit)."
            )
        case MemoryError():
            reason = f"A worker of the Dask cluster ran out of memory in '{label}': start fewer per machine."
        case CancelledError():
            reason = f"The connection to the Dask scheduler at {address} was lost during '{label}'."
        case ImportError():
            reason = (
                f"A worker of the Dask cluster lacks what cram needs: {error}. Install the same cram as here in the "
                "Python of every worker."
            )
        case FileNotFoundError():
            reason = f"A worker of the Dask cluster doesn't find {error.filename}. {SHARED}"
        case _:
            return error
    return InputError(f"{reason} Fix this and run again; the finished parts of '{label}' are kept.")


class Cluster(Place):
    """The workers of a Dask scheduler, those that join later too."""

    def __init__(self, address: str, label: str, marker: Path) -> None:
        self.address = address
        self.label = label
        self.marker = marker
        self.client = connect(address)
        self.pool = self.client.get_executor(pure=False)
        self.seen = time.monotonic()  # when there last was a worker
        self.refused: set[str] = set()  # addresses of workers
        self.others: dict[str, Any] = {}  # which workers may do the work

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Measured]:
        """Have work(*arguments) done."""
        call = Call(pickle.dumps((work, *arguments)), str(self.marker), edition())
        key = f"{self.label}-{uuid.uuid4().hex}"
        return self.pool.submit(pickle.loads, pickle.dumps(call), key=key, **self.others)

    def workers(self) -> list[str]:
        """The addresses of the workers that have not refused."""
        try:
            there = list(self.client.nthreads())
        except OSError as error:
            raise CancelledError from error
        left = [worker for worker in there if worker not in self.refused]
        if left:
            self.seen = time.monotonic()
        return left

    def check(self) -> None:
        """Raise InputError if there have been no workers for long."""
        if not self.workers() and time.monotonic() - self.seen > PATIENCE_SECONDS:
            raise InputError(
                f"The Dask scheduler at {self.address} has had no workers for {PATIENCE_SECONDS} s. Start some with "
                f"`dask worker {self.address} --nthreads 1`, and run again; the finished parts of '{self.label}' are "
                "kept."
            )

    def leave_out(self, refusal: Refused) -> None:
        """Do without the worker that has refused; raise the refusal if none is left."""
        self.refused.add(refusal.worker)
        left = self.workers()
        if not left:
            raise refusal
        warn_once(f"{refusal} It is left out.")
        # other workers only if none of these is there any more
        self.others = {"workers": left, "allow_other_workers": True}

    def close(self) -> None:
        """Leave the cluster."""
        self.pool.shutdown(wait=False)
        self.client.close()


@contextmanager
def cluster(address: str, label: str, done: Path) -> Iterator[Place]:
    """The workers of the scheduler at this address, those that join later too."""
    marker = done / f"{uuid.uuid4().hex}.shared"
    place = Cluster(address, label, marker)
    marker.touch()
    for name in ("distributed.client", "tornado.application"):  # they log tracebacks of what is lost or cancelled
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    try:
        workers = counted(len(place.client.nthreads()), "worker")
        log.info("%s: on %s of the Dask cluster at %s", label, workers, address)
        yield place
    except Exception as error:
        problem = explain(error, address, label)
        if problem is error:
            raise
        raise problem from error
    finally:
        place.close()
        marker.unlink(missing_ok=True)


def read_result(done: Path) -> Any:
    """The result of a finished part, or None."""
    try:
        return json.loads(done.read_bytes())
    except (FileNotFoundError, ValueError):  # a power cut can leave a damaged file
        return None


def finish(work: Callable[..., Result], job: Job, done: Path) -> Result:
    """The result of work(*job), kept in the file `done`.

    The part is locked, since a cluster's worker that was taken for lost may still be working on it.
    """
    unfinished = done.with_suffix(".half")
    with unfinished.open("a+", encoding="utf-8") as file:
        flock(file, fcntl.LOCK_EX)
        result = read_result(done)
        if result is not None:
            return result
        text = json.dumps(work(*job))
        file.truncate(0)
        file.write(text)
        file.flush()
        if libc.syncfs(file.fileno()):  # the result must not outlive a power cut that the files of the part do not
            number = ctypes.get_errno()
            if number not in UNSUPPORTED:
                raise OSError(number, os.strerror(number), str(unfinished))
            os.sync()
        unfinished.replace(done)
    return json.loads(text)  # as a rerun reads it


class Local(Place):
    """Processes of this machine, as many as the threads that wait for them."""

    def __init__(self, threads: ThreadPoolExecutor, pool: Processes) -> None:
        self.threads = threads
        self.pool = pool

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Measured]:
        """Have work(*arguments) done."""
        return self.threads.submit(self.pool.call, work, *arguments)


@contextmanager
def local(count: int, label: str) -> Iterator[Place]:
    """Up to `count` processes of this machine. They end with the work; if one is killed, all of them end."""
    with ThreadPoolExecutor(count) as threads, Processes() as pool:  # the pool ends first: no thread waits for work
        try:
            yield Local(threads, pool)
        except Lost as error:
            raise InputError(
                f"A worker process of '{label}' was killed, most likely for lack of memory ({count} were running). "
                "Run again with CRAM_WORKERS=1; the finished parts are kept."
            ) from error


def do_jobs(work: Callable[..., Any], jobs: dict[int, Job], place: Place) -> Iterator[tuple[int, Measured]]:
    """Have work(*job) done; yield the number and the result of each, and check every few seconds while waiting."""
    waiting = {place.submit(work, *job): number for number, job in jobs.items()}
    while waiting:
        done, _ = wait(waiting, SECONDS_BETWEEN_CHECKS, FIRST_COMPLETED)
        for future in done:
            number = waiting.pop(future)
            try:
                yield number, future.result()
            except Refused as refusal:
                place.leave_out(refusal)
                waiting[place.submit(work, *jobs[number])] = number
        if not done:
            place.check()


def finish_here(calls: dict[int, Job], bar: Progress) -> dict[int, Any]:
    """The results of finish(*call) by number, one call after the other in this process."""
    results = {}
    for number, call in calls.items():
        results[number] = finish(*call)
        bar.update()
    return results


def finish_at(place: Place, calls: dict[int, Job], bar: Progress) -> dict[int, Any]:
    """The results of finish(*call) by number, whose seconds and memory are added to this process's usage."""
    results = {}
    for number, (result, seconds, peak_mib) in do_jobs(finish, calls, place):
        results[number] = result
        usage.add(seconds, peak_mib)
        bar.update()
    return results


def elsewhere(work: Callable[..., object], count: int, done: Path, label: str) -> AbstractContextManager[Place]:
    """Where else this work is done: on the cluster that CRAM_DASK names, or in so many processes of this machine."""
    refuse_main(work, label)
    address = os.environ.get("CRAM_DASK")
    return cluster(address, label, done) if address else local(count, label)


def over_parts(work: Callable[..., Result], jobs: Sequence[Job], done: Path, label: str) -> list[Result]:
    """The results of work(*job), in the order of the jobs.

    `work` is a module-level function that writes files and returns counts as plain JSON. Its arguments are paths and
    params, because it may run in another process or on another machine. `done` is a directory in the stage's draft that
    keeps finished jobs over a crash; the stage deletes it at its end. An error in one job ends the others.
    """
    done.mkdir(parents=True, exist_ok=True)
    files = [done / f"{number:05d}.json" for number in range(len(jobs))]
    results = {number: read_result(file) for number, file in enumerate(files)}
    calls: dict[int, Job] = {}
    for number, job in enumerate(jobs):
        if results[number] is None:
            calls[number] = (work, job, files[number])
    count = min(workers(), len(calls))
    is_here = not calls or (count == 1 and not os.environ.get("CRAM_DASK"))
    try:
        with Progress(label, total=len(jobs), unit="part", done=len(jobs) - len(calls)) as bar:
            if is_here:
                results |= finish_here(calls, bar)
            else:
                with elsewhere(work, count, done, label) as place:
                    results |= finish_at(place, calls, bar)
    except MemoryError as error:
        raise InputError(
            f"'{label}' ran out of memory. Run again with fewer workers at once (CRAM_WORKERS=1) or smaller parts "
            "(download.part_megabytes); the finished parts are kept."
        ) from error
    return list(results.values())


def refuse_main(work: Callable[..., object], label: str) -> None:
    """Raise InputError if a function is one that other processes can't import."""
    if work.__module__ == "__main__":
        raise InputError(
            f"'{label}' runs in other processes, which can't import its function {work.__name__} from the script or "
            "notebook that was started. Move it to a separate module."
        )
