"""Fetch: how files of the hub come here.

Whole files come several at a time, go on where they were interrupted and are checked against the hub's digest; of a
subset, only the beginning of a file comes.
"""

import concurrent.futures
import io
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from model import InputError
from tasks.corpus.hub import ATTEMPTS, File, Source, cached, commit, digest, error, wrong_digest

CHUNK = 1 << 18  # bytes handled at once
RETRIES = 5  # connections that may drop one after the other without a byte of progress
LONGEST_WAIT = 8  # seconds between them; the first is half a second, and each twice the last
log = logging.getLogger(__name__)


class Positioned(io.RawIOBase):
    """A stream of bytes to be read, which knows where it is."""

    position = 0  # of the next byte

    def readable(self) -> bool:
        """It can be read."""
        return True

    def seekable(self) -> bool:
        """It can be read from another place."""
        return True

    def tell(self) -> int:
        """Where the next byte is read."""
        return self.position


class Remote(Positioned):
    """A file on the hub, read as it comes; where a connection drops, the next one goes on."""

    def __init__(self, source: Source, file: File) -> None:
        from huggingface_hub import hf_hub_url

        self.repository, self.size = source.repository, file.bytes
        self.url = hf_hub_url(source.repository, file.name, repo_type="dataset", revision=commit(source))
        self.position, self.held = 0, memoryview(b"")
        self.connection, self.chunks = ExitStack(), None
        self.failures = 0

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Read from there on."""
        position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.size}[whence]
        if position != self.position:
            self._hang_up()
            self.position = position
        return position

    def readinto(self, buffer: bytearray | memoryview) -> int:
        """The next bytes, as many as are there; none at the end."""
        while not self.held and self.position < self.size:
            if self.chunks is None:
                self._connect()
            try:
                self.held = memoryview(next(self.chunks))
                self.failures = 0
            except Exception as problem:  # also the end of the stream: before the end of the file it is one too early
                self._hang_up()
                self._wait(problem)
        count = min(len(buffer), len(self.held))
        buffer[:count], self.held = self.held[:count], self.held[count:]
        self.position += count
        return count

    def _connect(self) -> None:
        from huggingface_hub import constants
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

        headers = {**build_hf_headers(), "Range": f"bytes={self.position}-", "Accept-Encoding": "identity"}
        try:  # tries again by itself when the hub is busy (5xx, 429) or can't be reached
            asked = http_stream_backoff("GET", self.url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT)
            response = self.connection.enter_context(asked)
            hf_raise_for_status(response)
        except Exception as problem:
            self._hang_up()
            raise error(self.repository, problem) from problem
        known = 0 if response.status_code == 206 else self.position  # one that knows no ranges sends all
        self.chunks = _after(known, response.iter_raw())  # as they come: a drop loses none

    def _wait(self, problem: Exception) -> None:
        self.failures += 1
        if self.failures > RETRIES:
            ended = isinstance(problem, StopIteration)
            raise error(self.repository, EOFError("it ends too early") if ended else problem) from problem
        time.sleep(min(2.0**self.failures / 4, LONGEST_WAIT))

    def _hang_up(self) -> None:
        self.chunks, self.held = None, memoryview(b"")
        self.connection.close()

    def close(self) -> None:
        """Hang up."""
        self._hang_up()
        super().close()


def _after(count: int, chunks: Iterator[bytes]) -> Iterator[bytes]:
    for chunk in chunks:
        if count < len(chunk):
            yield chunk[count:]
        count = max(0, count - len(chunk))


class Kept(Positioned):
    """A file on the hub that is kept as far as it was read, so that this much need not come twice."""

    def __init__(self, source: Source, file: File, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.remote, self.file = Remote(source, file), _begin(_partial(path), file)
        self.there, self.position = self.file.tell(), 0

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Read from there on; it must be kept."""
        position = offset + (self.position if whence == io.SEEK_CUR else 0)
        if whence == io.SEEK_END or position > self.there:
            raise io.UnsupportedOperation("what has not come yet can't be skipped")
        self.position = position
        return position

    def readinto(self, buffer: bytearray | memoryview) -> int:
        """The next bytes, from here or from there."""
        if self.position < self.there:
            self.file.seek(self.position)
            count = self.file.readinto(buffer)
        else:
            self.remote.seek(self.there)
            count = self.remote.readinto(buffer)
            self.file.write(memoryview(buffer)[:count])  # appends
            self.there += count
        self.position += count
        return count

    def close(self) -> None:
        """Hang up; what is kept stays."""
        self.remote.close()
        self.file.close()
        super().close()


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def _begin(partial: Path, file: File) -> BinaryIO:
    """What is there of a file, to be read and added to; it stands at its end."""
    out = partial.open("a+b")
    if out.seek(0, io.SEEK_END) > file.bytes:  # it can't be this file
        out.seek(out.truncate(0))
    return out


def downloads() -> int:
    """CRAM_DOWNLOADS: how many files come at once."""
    asked = os.environ.get("CRAM_DOWNLOADS") or "4"
    if not (asked.isdecimal() and int(asked) > 0):
        raise InputError(f"CRAM_DOWNLOADS is {asked!r}; expected a positive whole number, or unset for 4.")
    return int(asked)


class Fetcher:
    """Brings whole files into a folder, several at a time, in the order in which they will be read.

    A context manager. No more come than are being read and fetched at once, so that the disk need not hold them all.
    """

    def __init__(self, source: Source, wanted: list[File], folder: Path) -> None:
        self.source, self.wanted, self.folder = source, wanted, folder
        self.pool = ThreadPoolExecutor(downloads(), thread_name_prefix="fetch")
        self.futures: dict[int, Future[Path]] = {}
        self.come: dict[str, int] = {}  # bytes of each file
        self.stopped = threading.Event()

    def __enter__(self) -> "Fetcher":
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        self.pool.shutdown(cancel_futures=True)

    def __getitem__(self, i: int) -> Future[Path]:
        """Where the i-th file will be; the ones behind it begin to come too."""
        for k in range(i, min(i + downloads(), len(self.wanted))):
            if k not in self.futures:
                self.futures[k] = self.pool.submit(self.fetch, self.wanted[k])
        return self.futures[i]

    def fetch(self, file: File) -> Path:
        """Bring one file: go on from what is there of it, and check it against the hub's digest."""
        path = self.folder / file.name
        if path.exists():  # fetched and checked by a run that was killed
            return path
        if found := cached(self.source, file):
            return found
        path.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(ATTEMPTS):
            self._complete(file, _partial(path))
            if digest(_partial(path), file.digest) == file.digest:
                return _partial(path).replace(path)
            log.warning("%s came with a wrong digest.", file.name)
            _partial(path).unlink()
        raise wrong_digest(self.source, file)

    def _complete(self, file: File, partial: Path) -> None:
        with Remote(self.source, file) as remote, _begin(partial, file) as out:
            remote.seek(out.tell())
            while chunk := remote.read(CHUNK):
                out.write(chunk)
                self.come[file.name] = remote.tell()
                if self.stopped.is_set():
                    raise InputError(f"{file.name} is no longer wanted.")

    def wait(self, i: int, note: Callable[[str], None]) -> Path:
        """Where the i-th file is, once it is; `note` is told meanwhile how much has come."""
        future = self[i]
        while not future.done():
            concurrent.futures.wait([future], timeout=1)
            note(f"{sum(self.come.values()) / 1e6:,.0f} MB fetched")
        return future.result()


class Tainted(InputError):
    """What was read of a file is not what its digest is of."""


def check_kept(source: Source, file: File, path: Path) -> None:
    """Raise Tainted if what Kept has left of a file is all of it, and not what the hub has."""
    partial = _partial(path)
    if partial.exists() and partial.stat().st_size == file.bytes and digest(partial, file.digest) != file.digest:
        partial.unlink()
        raise Tainted(
            f"{file.name} of {source.repository}: checksum mismatch (the hub's digest is {file.digest[:12]}…). "
            "The partial download was discarded. Run again."
        )


def forget(path: Path) -> None:
    """Delete what a Fetcher or Kept has left of a file."""
    for left in (path, _partial(path)):
        left.unlink(missing_ok=True)
