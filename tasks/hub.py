"""The Hugging Face hub: the data sets that a recipe can name, and how their files come here.

A data set is read at a fixed commit. Whole files come several at a time, go on where they were interrupted and are
checked against the hub's digest; of a subset, only the beginning of a file comes.
"""

import concurrent.futures
import fcntl
import hashlib
import io
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from model import InputError
from tasks import stage

CHUNK = 1 << 18  # bytes handled at once
RETRIES = 5  # connections that may drop one after the other without a byte of progress
LONGEST_WAIT = 8  # seconds between them; the first is half a second, and each twice the last
ATTEMPTS = 2  # at a file that comes with a wrong digest
REVISIONS = ".revisions.json"  # in the store: commits of data sets that have none in the table below
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """A data set on the hub, and which of its files to read how.

    `revision` is a commit; empty, it is the newest when the source is first used here, and that one from then on.
    `pattern` matches the paths of its shards; what a group named `set` in it matches is where their text belongs.
    """

    repository: str
    revision: str
    pattern: str
    folder: str = ""  # that they lie in; nothing else is listed
    text: str = "text"  # the field or column with the text
    sets: tuple[str, ...] = ()  # keep what belongs to these only
    mixed: bool = False  # read the shards in an order that has nothing to do with their names
    licence: str = ""
    about: str = ""


SOURCES = {
    "pile": Source(
        "monology/pile-uncopyrighted",
        "3be90335b66f24456a5d6659d9c8d208c0357119",
        r"train/\d+\.jsonl\.zst",
        "train",
        licence="those of its parts; the parts under copyright were taken out",
        about="The Pile in its own layout, as far as the hub still has it.",
    ),
    "pile-deduplicated": Source(
        "EleutherAI/the_pile_deduplicated",
        "fcbfcfde4222cbb1acd1d33bad0be250ee14b1bb",
        r"data/train-\d+-of-\d+-[0-9a-f]+\.parquet",
        "data",
        licence="those of its parts, some of which are under copyright",
        about="The whole Pile without near duplicates, shuffled; it does not say what came from where.",
    ),
    "pile-natural": Source(
        "monology/pile-uncopyrighted",
        "3be90335b66f24456a5d6659d9c8d208c0357119",
        r"train/\d+\.jsonl\.zst",
        "train",
        sets=("Gutenberg (PG-19)", "Books3", "Wikipedia (en)"),
        licence="as the Pile",
        about="Books and encyclopedia of the Pile. Books3 is under copyright, so that the hub's copy has none of it.",
    ),
    "c4": Source(
        "allenai/c4",
        "1588ec454efa1a09f29cd18ddd04fe05fc8653a2",
        r"en/c4-train\..*\.json\.gz",
        "en",
        licence="ODC-BY, and the terms of Common Crawl",
        about="English web pages of 2019, cleaned by rules.",
    ),
    "oscar": Source(
        "oscar-corpus/OSCAR-2301",
        "",
        r"en_meta/en_meta_part_\d+\.jsonl\.zst",
        "en_meta",
        text="content",
        licence="CC0 for the packaging, and the terms of Common Crawl; access has to be asked for",
        about="English web pages of late 2022, not deduplicated. The commit is the newest when first used.",
    ),
    "wikipedia": Source(
        "wikimedia/wikipedia",
        "b04c8d1ceb2f5cd4588862100d08de323dccfbaa",
        r"20231101\.en/train-\d+-of-\d+\.parquet",
        "20231101.en",
        licence="CC-BY-SA-3.0 and GFDL",
        about="The articles of English Wikipedia in November 2023, without markup.",
    ),
    "books": Source(
        "emozilla/pg19",
        "c021754c8e01c5b1cc83a1f549c1f97fbbb756b8",
        r"data/train-\d+-of-\d+-[0-9a-f]+\.parquet",
        "data",
        licence="public domain in the USA; the collection is Apache-2.0",
        about="PG-19: 28,602 books of Project Gutenberg from before 1919, in place of BookCorpus, which is gone.",
    ),
    "fineweb-edu": Source(
        "HuggingFaceFW/fineweb-edu",
        "87f09149ef4734204d70ed1d046ddc9ca3f2b8f9",
        r"sample/10BT/\d+_\d+\.parquet",
        "sample/10BT",
        licence="ODC-BY, and the terms of Common Crawl",
        about="Web pages that a classifier found educational; the random sample of 10 billion tokens.",
    ),
    "climbmix": Source(
        "karpathy/climbmix-400b-shuffle",
        "915333b4f8b8684f39aeaafea600fea6f43fb703",
        r"shard_\d+\.parquet",
        licence="MIT; the data set it was made from, nvidia/Nemotron-ClimbMix, is CC-BY-NC-4.0",
        about="A mixture of web text chosen by training small models on clusters of it; 400 billion tokens, shuffled.",
    ),
    "common-pile": Source(
        "common-pile/comma_v0.1_training_dataset",
        "5afc546db324e7f39f297ba757c9a60547151e7c",
        r"(?P<set>[^/]+)/[^/]+\.jsonl\.gz",
        mixed=True,
        licence="public domain or open licences only",
        about="The Common Pile v0.1 as Comma was trained on it: 31 sets, from wikimedia to stackv2_edu, told by folder.",
    ),
}


class File(NamedTuple):
    """A shard on the hub."""

    name: str
    bytes: int
    digest: str  # SHA-256 (64 hex digits), or of a small file git's own (40)
    set: str = ""


def error(repository: str, problem: Exception) -> InputError:
    """The sentence for a hub that can't be reached or doesn't give what is asked for."""
    status = getattr(getattr(problem, "response", None), "status_code", None)
    if status in (401, 403):
        return InputError(
            f"{repository} is not open to all on the Hugging Face hub ({status}). Accept its terms at "
            f"https://huggingface.co/datasets/{repository}, make a token at https://huggingface.co/settings/tokens and "
            "set HF_TOKEN to it; or use another source."
        )
    said = (str(problem).strip() or "no answer").splitlines()[0].rstrip(".:")
    return InputError(
        f"{repository} could not be read from the Hugging Face hub: {type(problem).__name__}: {said}. "
        "Check the network, HF_ENDPOINT and HF_TOKEN; or use files that lie here (see the README, 'Your own text')."
    )


def commit(source: Source) -> str:
    """The commit at which the source is read: its own, or the newest when it was first used with this store."""
    if source.revision:
        return source.revision
    path, lock = stage.ROOT / REVISIONS, stage.ROOT / ".locks" / "revisions"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        found = json.loads(path.read_text()) if path.exists() else {}
        if source.repository not in found:
            found[source.repository] = _newest(source.repository)
            half = path.with_suffix(".half")
            half.write_text(json.dumps(found, indent=2) + "\n")
            half.replace(path)
    return found[source.repository]


def _newest(repository: str) -> str:
    from huggingface_hub import HfApi

    try:
        sha = HfApi().dataset_info(repository).sha
    except Exception as problem:  # the hub's client raises its own, httpx's and the socket's errors
        raise error(repository, problem) from problem
    log.info("%s is read at its newest commit, %s, from now on (%s).", repository, sha, stage.ROOT / REVISIONS)
    return sha


def files(source: Source, sets: tuple[str, ...] = ()) -> list[File]:
    """The shards of a source, in the order in which they are read; only those of `sets` where it tells them by path."""
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    about = {"repo_type": "dataset", "revision": commit(source), "recursive": True}
    try:
        entries = [
            entry
            for entry in HfApi().list_repo_tree(source.repository, source.folder or None, **about)
            if isinstance(entry, RepoFile)
        ]
    except Exception as problem:
        raise error(source.repository, problem) from problem
    matches = [(entry, match) for entry in entries if (match := re.fullmatch(source.pattern, entry.path))]
    if not matches:
        others = ", ".join(sorted(entry.path for entry in entries)[:5])
        raise InputError(f"{source.repository} has no file like {source.pattern}, but {others or 'none at all'}.")
    found = [
        File(e.path, e.size, e.lfs.sha256 if e.lfs else e.blob_id, match.groupdict().get("set", ""))
        for e, match in matches
    ]
    told = sorted({file.set for file in found if file.set})
    if sets and told:
        found = [file for file in found if file.set in sets]
        if not found:
            raise InputError(f"{source.repository} has no set {', '.join(sets)}. Those it has: {', '.join(told)}.")
    return sorted(found, key=lambda f: (hashlib.sha256(f.name.encode()).digest() if source.mixed else b"", f.name))


def digest(path: Path, like: str) -> str:
    """The digest of a file, of the kind of this one."""
    if len(like) == 64:
        return stage.digest(path)
    data = path.read_bytes()  # a small file
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def cached(source: Source, file: File) -> Path | None:
    """The file in the cache of the hub's own client (as `hf download` leaves it), if it is there and whole."""
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(source.repository, file.name, revision=commit(source), repo_type="dataset")
    if not isinstance(path, str):
        return None
    if digest(Path(path), file.digest) == file.digest:
        return Path(path)
    log.warning("%s does not have the hub's digest; it comes anew.", path)
    return None


def bring(source: Source, file: File) -> Path:
    """The file in the cache of the hub's own client, brought there if need be; for what is small and used again."""
    from huggingface_hub import hf_hub_download

    about = {"repo_type": "dataset", "revision": commit(source)}
    for again in range(ATTEMPTS):
        try:
            path = Path(hf_hub_download(source.repository, file.name, force_download=bool(again), **about))
        except Exception as problem:
            raise error(source.repository, problem) from problem
        if digest(path, file.digest) == file.digest:
            return path
    raise _wrong(source, file)


def _wrong(source: Source, file: File) -> InputError:
    return InputError(
        f"{file.name} of {source.repository} came {ATTEMPTS} times with a digest that is not the hub's ({file.digest[:12]}…). "
        "Check HF_ENDPOINT and what lies between here and the hub, and run again."
    )


class Remote(io.RawIOBase):
    """A file on the hub, read as it comes; where a connection drops, the next one goes on."""

    def __init__(self, source: Source, file: File) -> None:
        from huggingface_hub import hf_hub_url

        self.repository, self.size = source.repository, file.bytes
        self.url = hf_hub_url(source.repository, file.name, repo_type="dataset", revision=commit(source))
        self.position, self.held = 0, memoryview(b"")
        self.connection, self.chunks = ExitStack(), None
        self.failures = 0

    def readable(self) -> bool:
        """It can be read."""
        return True

    def seekable(self) -> bool:
        """It can be read from any place."""
        return True

    def tell(self) -> int:
        """Where the next byte is read."""
        return self.position

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


class Kept(io.RawIOBase):
    """A file on the hub that is kept as far as it was read, so that this much need not come twice."""

    def __init__(self, source: Source, file: File, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.remote, self.file = Remote(source, file), _begin(_partial(path), file)
        self.there, self.position = self.file.tell(), 0

    def readable(self) -> bool:
        """It can be read."""
        return True

    def seekable(self) -> bool:
        """Within what is kept."""
        return True

    def tell(self) -> int:
        """Where the next byte is read."""
        return self.position

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
    asked = os.environ.get("CRAM_DOWNLOADS", "4")
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
        raise _wrong(self.source, file)

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
    """What was read of a file is not what the hub has."""


def check_kept(source: Source, file: File, path: Path) -> None:
    """Raise Tainted if what Kept has left of a file is all of it, and not what the hub has."""
    partial = _partial(path)
    if partial.exists() and partial.stat().st_size == file.bytes and digest(partial, file.digest) != file.digest:
        partial.unlink()
        raise Tainted(
            f"{file.name} of {source.repository} was read as it came, and its digest is not the hub's ({file.digest[:12]}…). "
            "Run again: nothing of it is kept."
        )


def forget(path: Path) -> None:
    """Delete what a Fetcher or Kept has left of a file."""
    for left in (path, _partial(path)):
        left.unlink(missing_ok=True)
