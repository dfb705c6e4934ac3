"""Work over parts on a Dask cluster: CRAM_DASK names its scheduler. Needs the package `distributed`.

Only where a part is worked on changes. The store is shared, so nothing but counts travels.
"""

import asyncio
import functools
import hashlib
import logging
import os
import pickle
import platform
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from model import InputError
from model.quantities import counted
from tasks.home import CODE
from tasks.workers.jobs import ONE_THREAD, Place, finish
from tasks.workers.usage import peak_memory, reset_usage

if TYPE_CHECKING:
    from distributed import Client

CONNECT_SECONDS = 10
PATIENCE_SECONDS = 60  # for a worker to come, where there is none
LIBRARIES = ("numpy", "orjson", "pyarrow", "tokenizers", "xxhash", "zstandard")  # that the bytes of a part depend on
log = logging.getLogger(__name__)


@functools.cache  # in a worker: as of when it imported this code, which may have been edited since
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
            f"CRAM_DASK is {address}, but the package `distributed` is missing. Install it with `pip install -e '.[dask]'`, or "
            "unset CRAM_DASK to use this machine's cores."
        ) from error

    async def greet() -> None:  # a Client that fails to start leaves threads behind
        security = Security().get_connection_args("client")
        await (await comm.connect(address, timeout=CONNECT_SECONDS, **security)).close()

    try:
        with ThreadPoolExecutor(1) as thread:  # this one may have an event loop, as in a notebook
            thread.submit(asyncio.run, greet()).result()
        return Client(address, timeout=CONNECT_SECONDS, set_as_default=False)
    except Exception as error:  # of any kind: something else may answer there
        raise InputError(
            f"No Dask scheduler answers at CRAM_DASK={address} ({error}). Expected an address as tcp://host:8786, where "
            "`dask scheduler` runs; or unset CRAM_DASK to use this machine's cores."
        ) from error


class Call:
    """A call of `finish_there` that is made by unpickling it.

    So `pickle.loads` is what the cluster runs: the scheduler needn't have cram, and a worker that lacks it says so.
    """

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def __reduce__(self) -> tuple:
        return finish_there, self.arguments


def finish_there(pickled: bytes, marker: str, expected: dict[str, str], done: str) -> tuple[dict, float, float]:
    """`finish`, in a worker of the cluster; says what is wrong with the worker, before it does anything.

    `marker` is a file in the store that must be seen from here.
    """
    from distributed import get_worker

    worker = get_worker()
    name = f"The Dask worker {worker.address} on {socket.gethostname()}"
    if worker.state.nthreads > 1:
        raise InputError(
            f"{name} runs {worker.state.nthreads} parts at once in one process, which would hold each other up. Start "
            f"workers as processes of one thread each: `dask worker SCHEDULER --nworkers {worker.state.nthreads} --nthreads 1`."
        )
    found = edition()
    if wrong := [
        f"{what} {found[what]} (here {version})" for what, version in expected.items() if found[what] != version
    ]:
        raise InputError(
            f"{name} has {', '.join(wrong)}. The bytes of an artifact may depend on these: install the same there, from the "
            "same commit, and start the worker again."
        )
    if not Path(marker).exists():
        raise InputError(
            f"{name} doesn't see {Path(marker).parent}. The store must be on a file system that all machines share, at the same "
            "path (CRAM_ARTIFACTS), and so must the text."
        )
    os.environ.update(ONE_THREAD)
    reset_usage()
    work, job = pickle.loads(pickled)
    result, seconds, _ = finish(work, job, Path(done))
    return result, seconds, peak_memory()["process"]


def told(error: Exception, address: str, label: str) -> Exception:
    """An error of the cluster as a sentence; any other as it is."""
    from distributed import KilledWorker

    kept = f"Fix this and run again; the finished parts of '{label}' are kept."
    if isinstance(error, KilledWorker):
        return InputError(
            f"A part of '{label}' lost every worker of the Dask cluster that tried it ({error.allowed_failures + 1}), most "
            f"likely for lack of memory: start fewer workers a machine, or give them more (--memory-limit). {kept}"
        )
    if isinstance(error, MemoryError):
        return InputError(f"A worker of the Dask cluster ran out of memory in '{label}': start fewer a machine. {kept}")
    if isinstance(error, CancelledError):
        return InputError(f"The Dask scheduler at {address} was lost in the midst of '{label}'. {kept}")
    if isinstance(error, ImportError):
        return InputError(
            f"A worker of the Dask cluster lacks what cram needs: {error}. Install cram, the same as here, in the Python of "
            f"every worker. {kept}"
        )
    if isinstance(error, FileNotFoundError):
        return InputError(
            f"A worker of the Dask cluster doesn't find {error.filename}. Store and text must be on a file system that all "
            f"machines share, at the same path. {kept}"
        )
    return error


@contextmanager
def quiet(*loggers: str) -> Iterator[None]:
    """Log nothing of theirs."""
    levels = {logging.getLogger(name): logging.getLogger(name).level for name in loggers}
    for logger in levels:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


@contextmanager
def cluster(address: str, label: str, done: Path) -> Iterator[Place]:
    """The workers of the scheduler at this address, whichever they are by then."""
    client, marker, seen = connect(address), done / f"{uuid.uuid4().hex}.shared", time.monotonic()
    marker.touch()
    pool = client.get_executor(pure=False)

    def submit(work: Callable[..., dict], job: tuple, file: Path) -> Future:
        call = Call(pickle.dumps((work, job)), str(marker), edition(), str(file))
        return pool.submit(pickle.loads, pickle.dumps(call), key=f"{label}-{file.stem}-{marker.stem}")

    def check() -> None:
        nonlocal seen
        try:
            count = len(client.nthreads())
        except OSError as error:
            raise CancelledError from error
        if count:
            seen = time.monotonic()
        elif time.monotonic() - seen > PATIENCE_SECONDS:
            raise InputError(
                f"The Dask scheduler at {address} has had no workers for {PATIENCE_SECONDS} s. Start some, `dask worker "
                f"{address} --nthreads 1`, and run again; the finished parts of '{label}' are kept."
            )

    with quiet("distributed.client", "tornado.application"):  # they tell of what is lost or cancelled by tracebacks
        try:
            log.info("%s: on %s of the Dask cluster at %s", label, counted(len(client.nthreads()), "worker"), address)
            yield submit, check
        except Exception as error:
            if (problem := told(error, address, label)) is error:
                raise
            raise problem from error
        finally:
            pool.shutdown(wait=False)
            client.close()
            marker.unlink(missing_ok=True)
