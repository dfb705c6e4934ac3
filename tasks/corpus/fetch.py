"""Fetching shards from the hub through its own client.

Whole shards are downloaded several at a time and checked against the hub's digests. For a subset, only what is read of
a shard is fetched: in order, or for Parquet in blocks. If a connection drops, the client continues where it stopped.
"""

import concurrent.futures
import io
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import BinaryIO

from model import InputError
from model.environment import whole_number
from tasks.corpus.hub import File, Source, bring, cached, commit, error

CHUNK = 1 << 18  # bytes requested from the client at once
BLOCK = 1 << 21  # bytes of one request where a file is not read in order


class Tainted(InputError):
    """The bytes that were read are not those of the digest."""


class Remote(io.RawIOBase):
    """A file on the hub, fetched as it is read.

    If it is read in order, its digest is checked at the end. Raises InputError if the hub does not deliver it.
    """

    def __init__(self, source: Source, file: File, in_order: bool) -> None:
        from huggingface_hub import HfFileSystem

        self.source, self.about = source, file
        self.hasher = file.hasher() if in_order else None
        path = f"datasets/{source.repository}@{commit(source)}/{file.name}"
        try:
            self.remote = HfFileSystem().open(path, "rb", block_size=0 if in_order else BLOCK, size=file.bytes)
        except Exception as problem:  # the hub's client raises its own, httpx's and the socket's errors
            raise error(source.repository, problem) from problem

    def readable(self) -> bool:
        """It can be read."""
        return True

    def seekable(self) -> bool:
        """BufferedReader asks for it; if the file is read in order, it can only go back within its buffer."""
        return True

    def tell(self) -> int:
        """The position of the next byte."""
        return self.remote.tell()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Continue at another position."""
        return self.remote.seek(offset, whence)

    def readinto(self, buffer: memoryview) -> int:
        """Read the next bytes; 0 at the end."""
        try:
            data = self.remote.read(len(buffer))
        except Exception as problem:
            raise error(self.source.repository, problem) from problem
        buffer[: len(data)] = data
        if self.hasher:
            self.hasher.update(data)
            if not data:
                self._check()
        return len(data)

    def _check(self) -> None:
        name, digest = self.about.name, self.about.digest
        if self.tell() < self.about.bytes:
            raise error(self.source.repository, EOFError(f"{name} ended after {self.tell():,} bytes"))
        if self.hasher.hexdigest() != digest:
            raise Tainted(
                f"{name} of {self.source.repository}: checksum mismatch (the hub's digest is {digest[:12]}…). "
                "What was read of it is discarded. Run again."
            )

    def close(self) -> None:
        """Close the connection."""
        if not self.closed:
            self.remote.close()
        super().close()


def opened(source: Source, file: File) -> BinaryIO:
    """A file on the hub, of which only what is read is fetched."""
    return io.BufferedReader(Remote(source, file, in_order=not file.name.endswith(".parquet")), CHUNK)


def downloads() -> int:
    """CRAM_DOWNLOADS: how many shards are downloaded at once."""
    return whole_number("CRAM_DOWNLOADS", default="4") or 4


class Fetcher:
    """Downloads whole shards into a folder, several at a time, in the order in which they will be read.

    A context manager. It runs only `downloads()` shards ahead of the reader, so that the disk need not hold them all.
    The threads are daemons and check whether they are still needed: an interrupted run doesn't wait for them.
    """

    def __init__(self, source: Source, shards: list[File], folder: Path) -> None:
        self.source, self.shards, self.folder = source, shards, folder
        self.futures: dict[int, Future[Path]] = {}
        self.received: dict[str, int] = {}  # bytes of each shard
        self.stopped = False

    def __enter__(self) -> "Fetcher":
        for left in self.folder.rglob("*.incomplete"):  # by a run that was killed; the client can't resume them
            left.unlink()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped = True

    def __getitem__(self, i: int) -> Future[Path]:
        """The path of the i-th shard; it and the next ones begin to download."""
        for k in range(i, min(i + downloads(), len(self.shards))):
            if k not in self.futures:
                self.futures[k] = Future()
                threading.Thread(target=self._fetch, args=(self.shards[k], self.futures[k]), daemon=True).start()
        return self.futures[i]

    def _fetch(self, file: File, future: Future[Path]) -> None:
        try:
            path = cached(self.source, file)
            options = {"local_dir": self.folder, "tqdm_class": self._bar(file.name)}
            future.set_result(path or bring(self.source, file, **options))
        except BaseException as problem:
            future.set_exception(problem)

    def _bar(self, name: str) -> type:
        """A class of progress bars for the hub's client: it counts the bytes of a shard, and can stop its download."""
        from tqdm import tqdm

        fetcher = self

        class Bar(tqdm):
            def __init__(self, *_: object, **options: object) -> None:
                super().__init__(disable=True, initial=options.get("initial", 0), total=options.get("total"))

            def update(self, n: float = 1) -> None:
                self.n += n
                fetcher.received[name] = max(self.n, fetcher.received.get(name, 0))  # Xet has two bars for a file
                if fetcher.stopped:
                    raise InterruptedError(f"{name} is no longer needed")

        return Bar

    def wait(self, i: int, note: Callable[[str], None]) -> Path:
        """The path of the i-th shard once it is complete; meanwhile `note` gets the amount downloaded so far."""
        future = self[i]
        while not future.done():
            concurrent.futures.wait([future], timeout=1)
            note(f"{sum(self.received.values()) / 1e6:,.0f} MB fetched")
        return future.result()
