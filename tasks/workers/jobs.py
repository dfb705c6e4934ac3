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
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from model.errors import InputError, warn_once
from model.files import UNSUPPORTED
from model.wording import counted
from tasks.store.home import CODE
from tasks.store.locks import flock
from tasks.workers.processes import ONE_THREAD, Lost, Measured, Processes, measured, reset_usage, usage, workers
from tasks.workers.progress import Progress

if TYPE_CHECKING:
    from distributed import Client

SECONDS_BETWEEN_CHECKS = 2
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


# submit(work, *arguments), whose future gives `Measured`; and what raises when the workers are gone, to call in
# between, and with what a future raises as `Refused`, to leave that worker out
Place = tuple[Callable[..., Future], Callable[..., None]]


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
            f"CRAM_DASK is {address}, but the package `distributed` is missing. Install it with "
            "`pip install -e '.[dask]'`, or unset CRAM_DASK to use this machine's cores."
        ) from error

    async def greet() -> None:  # first, since a Client that fails to connect leaves threads behind
        security = Security().get_connection_args("client")
        await (await comm.connect(address, timeout=CONNECT_SECONDS, **security)).close()

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
    """Unpickling this calls `measured_there`.

    So the cluster runs `pickle.loads`: the scheduler does not need cram, and a worker without cram raises an error.
    """

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def __reduce__(self) -> tuple:
        return measured_there, self.arguments


def measured_there(pickled: bytes, marker: str, expected: dict[str, str]) -> Measured:
    """Do and measure the pickled (work, *arguments). Raises Refused first if this worker can't.

    `marker` is a file in the store that the worker must see; `expected` the `edition` of the process that asks.
    """
    from distributed import get_worker

    worker = get_worker()
    threads, own = worker.state.nthreads, edition()
    wrong = [f"{what} {own[what]} (here {version})" for what, version in expected.items() if own[what] != version]
    unseen = next((path for path in (*reversed(Path(marker).parents), Path(marker)) if not path.exists()), None)
    reasons = {
        f"runs {threads} parts at once in one process, where they slow each other down. Start workers as processes of "
        f"one thread each: `dask worker SCHEDULER --nworkers {threads} --nthreads 1`.": threads > 1,
        f"has {', '.join(wrong)}. The bytes of an artifact may depend on these: install the same versions and commit "
        "there, and restart the worker.": wrong,
        f"doesn't see {unseen}. {SHARED}": unseen,
    }
    if reason := next((reason for reason, holds in reasons.items() if holds), ""):
        raise Refused(f"The Dask worker {worker.address} on {socket.gethostname()} {reason}", worker.address)
    os.environ.update(ONE_THREAD)
    reset_usage()
    return measured(*pickle.loads(pickled))


def explained(error: Exception, address: str, label: str) -> Exception:
    """An InputError for an error of the cluster; any other error unchanged."""
    from distributed import KilledWorker

    reasons = {
        KilledWorker: f"A part of '{label}' lost every worker of the Dask cluster that tried it, most likely for lack "
        "of memory: start fewer workers per machine, or give them more (--memory-limit).",
        MemoryError: f"A worker of the Dask cluster ran out of memory in '{label}': start fewer per machine.",
        CancelledError: f"The connection to the Dask scheduler at {address} was lost during '{label}'.",
        ImportError: f"A worker of the Dask cluster lacks what cram needs: {error}. Install the same cram as here in "
        "the Python of every worker.",
        FileNotFoundError: f"A worker of the Dask cluster doesn't find {getattr(error, 'filename', '')}. {SHARED}",
    }
    for kind, reason in reasons.items():
        if isinstance(error, kind):
            return InputError(f"{reason} Fix this and run again; the finished parts of '{label}' are kept.")
    return error


@contextmanager
def cluster(address: str, label: str, done: Path) -> Iterator[Place]:
    """The workers of the scheduler at this address, those that join later too."""
    client, marker, seen = connect(address), done / f"{uuid.uuid4().hex}.shared", time.monotonic()
    marker.touch()
    pool, refused, others = client.get_executor(pure=False), set(), {}

    def submit(*call: object) -> Future:
        pickled = pickle.dumps(Call(pickle.dumps(call), str(marker), edition()))
        return pool.submit(pickle.loads, pickled, key=f"{label}-{uuid.uuid4().hex}", **others)

    def check(refusal: Refused | None = None) -> None:
        nonlocal seen
        if refusal:
            refused.add(refusal.worker)
        try:
            left = [worker for worker in client.nthreads() if worker not in refused]
        except OSError as error:
            raise CancelledError from error
        if refusal and not left:
            raise refusal
        if refusal:
            warn_once(f"{refusal} It is left out.")
            others.update(workers=left, allow_other_workers=True)  # other ones only if none of these is there any more
        if left:
            seen = time.monotonic()
        elif time.monotonic() - seen > PATIENCE_SECONDS:
            raise InputError(
                f"The Dask scheduler at {address} has had no workers for {PATIENCE_SECONDS} s. Start some with "
                f"`dask worker {address} --nthreads 1`, and run again; the finished parts of '{label}' are kept."
            )

    for name in ("distributed.client", "tornado.application"):  # they log tracebacks of what is lost or cancelled
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    try:
        log.info("%s: on %s of the Dask cluster at %s", label, counted(len(client.nthreads()), "worker"), address)
        yield submit, check
    except Exception as error:
        if (problem := explained(error, address, label)) is error:
            raise
        raise problem from error
    finally:
        pool.shutdown(wait=False)
        client.close()
        marker.unlink(missing_ok=True)


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
    with unfinished.open("a+", encoding="utf-8") as file:
        flock(file, fcntl.LOCK_EX)
        if (result := read_result(done)) is not None:
            return result
        text = json.dumps(work(*job))
        file.truncate(0)
        file.write(text)
        file.flush()
        if libc.syncfs(file.fileno()):  # the result must not outlive a power cut that the files of the part do not
            if (number := ctypes.get_errno()) not in UNSUPPORTED:
                raise OSError(number, os.strerror(number), str(unfinished))
            os.sync()
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
