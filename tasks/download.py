"""Download: any source or mixture of them, re-sharded into Parquet parts of fixed text size (columns id, source, text).

Reads   local files, the hub, or the documentation of installed packages.
Writes  part-00000.parquet …, lost.jsonl (file, line and reason of whatever could not be read).
"""

import io
import json
import logging
import os
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from itertools import accumulate, islice
from pathlib import Path
from typing import Annotated, BinaryIO, Literal, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Discriminator, Field, Tag, model_validator

from model import InputError
from model.quantities import counted
from tasks.corpus import fetch, formats, hub, local, pydocs
from tasks.corpus.parts import ROW_GROUP_CHARACTERS, Document, Tally, in_order, table, writer
from tasks.corpus.records import OTHER, Damage, Layout, Loss, source_name
from tasks.stage import Params, stage
from tasks.store import WORK, draft_of, fsync
from tasks.text.printable import printable
from tasks.workers import pool
from tasks.workers.progress import Progress

DOCUMENTS_BETWEEN_REPORTS = 256
MOST_SOURCES = 1000  # every stage counts by source: names beyond so many, as of URLs, are one, OTHER
LOST, STATE = "lost.jsonl", "state.json"
log = logging.getLogger(__name__)

SourceName = Literal[
    "pile", "pile-deduplicated", "pile-natural", "c4", "oscar", "wikipedia", "books", "fineweb-edu", "climbmix",
    "common-pile", "python-docs", "files",
]  # fmt: skip
Mixture = Annotated[dict[SourceName, Annotated[float, Field(gt=0)]], Field(min_length=1)]
Sources = Annotated[
    Annotated[SourceName, Tag("name")] | Annotated[Mixture, Tag("mixture")],
    Discriminator(lambda given: "mixture" if isinstance(given, dict) else "name"),
]


class Download(Params):
    """Which text to train on. The default is what the paper's final run read: the first 8 million Pile entries."""

    source: Sources = Field(
        "pile",
        description="A data set of the hub, python-docs or files; or several with their share of the text, as {wikipedia: 3, books: 1}.",
    )
    files: list[str] = Field([], description="For source 'files': paths, globs or directories.")
    sets: list[str] = Field([], description="Keep documents of these sets only (as the Pile's 'Wikipedia (en)').")
    shards: int = Field(0, ge=0, description="Read the first so many shards of a source; 0: all.")
    documents: int = Field(8_000_000, ge=0, description="Stop after so many documents; 0: no limit.")
    megabytes: float = Field(0, ge=0, description="Stop after so much UTF-8 text, 10^6 bytes; 0: no limit.")
    part_megabytes: float = Field(32, gt=0, le=1024, description="Text in a part, 10^6 characters.")
    max_document_megabytes: float = Field(
        100, gt=0, le=1000, description="Longer lines and texts are lost, 10^6 bytes of UTF-8."
    )
    max_lost: float = Field(0.01, ge=0, le=1, description="Largest fraction of records that may be unreadable.")
    damaged: Literal["refuse", "keep"] = Field(
        "refuse", description="A truncated or corrupt shard: fail, or keep what stands before the damage."
    )

    @model_validator(mode="after")
    def _files_with_their_source(self) -> "Download":
        if ("files" in self.weights) != bool(self.files):
            raise ValueError(
                f"source is {self.source!r} and files is {self.files}: give files exactly when source is 'files'"
            )
        return self

    @model_validator(mode="after")
    def _sets_where_there_are_none(self) -> "Download":
        own = next((name for name in self.weights if self.sets and name in hub.SOURCES and hub.SOURCES[name].sets), "")
        if own:
            raise ValueError(
                f"source {own!r} stands for sets of its own ({', '.join(hub.SOURCES[own].sets)}), and sets is {self.sets}: "
                "leave sets out, or take another source, as 'pile'"
            )
        return self

    @property
    def weights(self) -> dict[str, float]:
        """The sources, in the order of their names, and their shares of the text in any unit."""
        return dict(sorted(self.source.items())) if isinstance(self.source, dict) else {self.source: 1.0}

    @property
    def limited(self) -> bool:
        """Whether a limit applies, so that the end of the source need not be fetched."""
        return bool(self.documents or self.megabytes)

    @classmethod
    def usual(cls) -> dict:
        """The defaults without what stands for the source's content, which the hub would have to say."""
        return cls().model_dump(mode="json")

    def identity(self) -> dict:
        """Names and digests of local files; repository and commit on the hub; versions of installed packages."""
        about = self.model_dump(mode="json", exclude={"files"})
        about["sources"] = {name: identity_of(name, self) for name in self.weights}
        return about


class Shard(NamedTuple):
    """What is read in one go: its name, and where it is (None: an installed package)."""

    name: str
    place: Path | hub.File | None

    @property
    def bytes(self) -> int:
        """Its size, where that is known before it is read."""
        if isinstance(self.place, Path):
            return self.place.stat().st_size
        return self.place.bytes if self.place else 0


def shards(name: str, params: Download) -> list[Shard]:
    """What of a source to read, in order."""
    if name == "files":
        found = [Shard(*file) for file in local.local_files(params.files).items()]
    elif name == "python-docs":
        found = [Shard(package, None) for package in pydocs.installed()]
    else:
        found = [Shard(file.name, file) for file in hub.files(hub.SOURCES[name], tuple(params.sets))]
    return found[: params.shards or None]


def identity_of(name: str, params: Download) -> dict:
    """What stands for the content of a source in a key."""
    if name == "files":
        return {"files": [[shard.name, local.file_digest(shard.place)] for shard in shards(name, params)]}
    if name == "python-docs":
        return {"packages": pydocs.packages_digest()}
    source = hub.SOURCES[name]
    about = {"repository": source.repository, "revision": hub.commit(source), "pattern": source.pattern}
    return about | {"text": source.text, "sets": list(source.sets), "mixed": source.mixed}


class Reader:
    """One source, read in order from where an earlier attempt stopped.

    `at`: how many shards are done with, and how many records of the next one, documents or losses.
    """

    def __init__(self, name: str, params: Download, work: Path, at: tuple[int, int] = (0, 0)) -> None:
        self.name, self.params, self.folder = name, params, work / "hub" / name
        self.hub = hub.SOURCES.get(name)
        self.shards = shards(name, params)
        self.starts = [0, *accumulate(shard.bytes for shard in self.shards)]  # of each, in bytes of all
        self.shard, self.records = at
        self.spent: list[Path] = []  # files of the hub that were read to their end
        self.file: BinaryIO | None = None
        self.digests = {s.name: local.file_digest(s.place) for s in self.shards if isinstance(s.place, Path)}
        self.opened_at = (0, 0)  # size and time of the file when it was opened
        self.note: Callable[[str], None] = lambda text: None  # is told what comes from the hub

    def __iter__(self) -> Iterator[Document | Loss]:
        with ExitStack() as stack:
            fetcher = None
            if self.hub and not self.params.limited:
                wanted = [shard.place for shard in self.shards]
                fetcher = stack.enter_context(fetch.Fetcher(self.hub, wanted, self.folder))
            while self.shard < len(self.shards):
                with closing(self.read(self.shards[self.shard], fetcher)) as records:
                    for record in islice(records, self.records, None):
                        self.records += 1
                        yield record
                if self.hub:
                    shard = self.shards[self.shard]
                    fetch.check_kept(self.hub, shard.place, self.folder / shard.name)
                    self.spent.append(self.folder / shard.name)
                self.shard, self.records = self.shard + 1, 0

    def read(self, shard: Shard, fetcher: fetch.Fetcher | None) -> Iterator[Document | Loss]:
        """The records of one shard."""
        name, place = shard
        if place is None:
            yield from pydocs.package_documents(name)
            return
        where = (place.set or self.name) if isinstance(place, hub.File) else local.shard_family(name)
        layout = Layout(
            where,
            round(1e6 * self.params.max_document_megabytes),
            self.hub.text if self.hub else "text",
            local=not self.hub or fetcher is not None,
            keep=self.params.damaged == "keep",
        )
        seen = 0
        with self.open(place, fetcher) as self.file:
            about = os.fstat(self.file.fileno()) if not self.hub else None
            self.opened_at = (about.st_size, about.st_mtime_ns) if about else (0, 0)
            self.check_unchanged()
            try:
                with closing(formats.read_file(self.file, name, layout)) as records:
                    for record in records:
                        seen += isinstance(record, Document)
                        yield record
            except Damage as damage:
                if self.hub:  # it may have been damaged on its way
                    fetch.forget(self.folder / name)
                if self.params.damaged == "refuse":
                    kept = "train on the documents before the damage" if seen else "go on without it"
                    raise InputError(
                        f"{name} is {damage}, after {counted(seen, 'document')}. {damage.cure}, or set "
                        f"download.damaged to 'keep' to {kept}."
                    ) from damage
                if damage.kind == "corrupt" and not layout.local:  # some of what was given may be altered
                    raise fetch.Tainted(
                        f"{name} is {damage}. It was read while it came from the hub, and nothing of it is kept. Run "
                        "again, or read whole shards (download.documents and megabytes 0), which are checked first."
                    ) from damage
                yield Loss(name, damage.line or seen + 1, f"{damage.kind} shard")
            self.check_unchanged()
        self.file = None

    def check_unchanged(self) -> None:
        """Raise fetch.Tainted if the local file that is being read is no longer the one whose digest is in the key."""
        if self.file is None or self.hub or self.shard >= len(self.shards):
            return
        name, place = self.shards[self.shard]
        about = os.fstat(self.file.fileno())
        same = (about.st_size, about.st_mtime_ns) == self.opened_at and local.file_digest(place) == self.digests[name]
        if not same:
            raise fetch.Tainted(
                f"{printable(str(place))} was changed while it was read. Nothing of this download is kept. Run again, "
                "and leave the file as it is until the stage has ended."
            )

    def open(self, place: Path | hub.File, fetcher: fetch.Fetcher | None) -> BinaryIO:
        """The file of a shard; of one on the hub, no more comes than is read, unless there is a fetcher."""
        if isinstance(place, Path):
            return place.open("rb")
        if fetcher:
            return fetcher.wait(self.shard, self.note).open("rb")
        if found := hub.cached(self.hub, place):
            return found.open("rb")
        if place.name.endswith(".parquet"):  # is not read from its beginning to its end
            return io.BufferedReader(fetch.Remote(self.hub, place), fetch.CHUNK)
        return io.BufferedReader(fetch.Kept(self.hub, place, self.folder / place.name), fetch.CHUNK)

    @property
    def ended(self) -> bool:
        """Whether the whole source has been read."""
        return self.shard == len(self.shards)

    @property
    def opened(self) -> int:
        """The number of shards opened so far."""
        return self.shard + bool(self.records)

    @property
    def bytes(self) -> int:
        """Approximate number of bytes read so far."""
        inside = 0
        with suppress(ValueError, AttributeError):  # between two files
            inside = self.file.tell()
        return min(self.starts[self.shard] + inside, self.starts[-1])


class Writer:
    """Writes documents as parts, in a thread of its own; a context manager.

    A part ends when the caller says so. What the caller then gives as the state of the work is kept in a file, once the
    part is on disk, so that a rerun goes on from there.
    """

    def __init__(self, out: Path, state: Path, parts: int) -> None:
        self.out, self.state, self.parts = out, state, parts
        self.characters, self.waiting, self.waiting_characters = 0, [], 0
        self.file: pq.ParquetWriter | None = None
        self.pool, self.pending = ThreadPoolExecutor(1, thread_name_prefix="write"), deque()
        self.failed = False

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, failure: type | None, *_: object) -> None:
        self.pool.shutdown(cancel_futures=bool(failure))
        if self.file is not None:  # half a part, which a rerun writes anew
            with suppress(OSError):
                self.file.close()
            self.file.is_open = False  # else it tries again when it is collected

    def write(self, document: Document) -> None:
        """Add a document to the part."""
        self.waiting.append(document)
        self.characters += len(document.text)
        self.waiting_characters += len(document.text)
        if self.waiting_characters >= ROW_GROUP_CHARACTERS:
            self._flush()

    def end_part(self, state: dict, spent: list[Path]) -> None:
        """End the part, if it has anything; keep the state, and forget files of the hub that it is past."""
        self._flush()
        self.parts += bool(self.characters)
        self.characters = 0
        self._do(self._end, json.dumps(state | {"parts": self.parts}), spent)

    def wait(self) -> None:
        """Until all is written."""
        while self.pending:
            self.pending.popleft().result()

    def _flush(self) -> None:
        if self.waiting:
            self._do(self._write, self.out / f"part-{self.parts:05d}.parquet", table(self.waiting))
            self.waiting, self.waiting_characters = [], 0

    def _do(self, work: Callable, *given: object) -> None:
        self.pending.append(self.pool.submit(self._try, work, *given))
        while len(self.pending) > 2:  # row groups that wait are held in memory
            future: Future = self.pending.popleft()
            future.result()

    def _try(self, work: Callable, *given: object) -> None:
        if self.failed:  # what follows must not be taken for whole
            return
        try:
            work(*given)
        except BaseException:
            self.failed = True
            raise

    def _write(self, path: Path, rows: pa.Table) -> None:
        if self.file is None:
            self.file = writer(path)
        self.file.write_table(rows)

    def _end(self, state: str, spent: list[Path]) -> None:
        if self.file is not None:
            self.file.close()
            fsync(Path(self.file.where))
            self.file = None
        half = self.state.with_suffix(".half")
        half.write_text(state)
        fsync(self.out / LOST)
        fsync(half)
        half.replace(self.state)
        for path in spent:
            fetch.forget(path)


class Reading:
    """What has been read so far, of each source and in all, and whether that is enough."""

    def __init__(self, params: Download, lost: Path, state: dict) -> None:
        self.params, self.tally = params, Tally()
        self.tally.documents, self.tally.characters = (Counter(state.get(k)) for k in ("documents", "characters"))
        self.count = Counter(state.get("count"))  # of documents, by the name in download.source
        self.bytes = Counter(state.get("bytes"))
        self.other_sets = Counter(state.get("other_sets"))
        self.reasons = {reason: Counter(files) for reason, files in state.get("reasons", {}).items()}
        self.lost = lost.open("a")
        self.lost.truncate(state.get("lost", 0))

    def state(self) -> dict:
        """All of it as JSON."""
        self.lost.flush()
        return {
            "documents": self.tally.documents,
            "characters": self.tally.characters,
            "count": self.count,
            "bytes": self.bytes,
            "other_sets": self.other_sets,
            "reasons": self.reasons,
            "lost": self.lost.seek(0, io.SEEK_END),
        }

    def lose(self, loss: Loss) -> None:
        """Record what could not be read."""
        self.reasons.setdefault(loss.reason, Counter())[loss.file] += 1
        self.lost.write(json.dumps(loss._asdict()) + "\n")

    def take(self, name: str, document: Document) -> None:
        """Count a document of a source."""
        self.tally.add(document)
        self.count[name] += 1
        self.bytes[name] += len(document.text) if document.text.isascii() else len(document.text.encode())

    @property
    def enough(self) -> bool:
        """Whether a limit is reached."""
        limits = self.params
        return bool(
            (limits.documents and self.count.total() >= limits.documents)
            or (limits.megabytes and self.bytes.total() >= 1e6 * limits.megabytes)
        )

    def finish(self, what: str) -> dict:
        """The counts, once it is sure that what was lost is little."""
        counts = self.tally.counts()
        lost = {reason: files.total() for reason, files in sorted(self.reasons.items())}
        shown = "; ".join(f"{n:,} x {reason}" for reason, n in lost.items()) or "nothing"
        if not counts["documents"] and self.other_sets:
            sets = ", ".join(name for name, _ in self.other_sets.most_common(30))
            raise InputError(f"{what} has no documents from the requested sets. It has: {sets}. Correct download.sets.")
        if not counts["documents"]:
            raise InputError(
                f"{what} holds no document that cram can read (lost: {shown}). Check download.files or source."
            )
        total = sum(lost.values())
        seen = total + counts["documents"] + self.other_sets.total()
        if total > self.params.max_lost * seen:
            reason, files = max(self.reasons.items(), key=lambda item: item[1].total())
            raise InputError(
                f"{total:,} of {counted(seen, 'record')} in {what} are unreadable ({shown}), more than download.max_lost "
                f"allows ({self.params.max_lost:.1%}). Most of '{reason}' is in {files.most_common(1)[0][0]}. Repair the files, or "
                f"raise download.max_lost. All are listed in {self.lost.name}."
            )
        return {**counts, "bytes": self.bytes.total(), "lost": lost}


def in_turn(readers: dict[str, Reader], reading: Reading, weights: dict[str, float]) -> Iterator[tuple[str, Document]]:
    """The next document, each time of the source whose text is furthest behind its share, until all have ended.

    The caller counts each in `reading` before it asks for the next. Ties go to the first by name.
    """
    with ExitStack() as stack:
        left = {name: stack.enter_context(closing(kept(reader, reading))) for name, reader in readers.items()}
        while left:
            name = min(left, key=lambda source: reading.bytes[source] / weights[source])
            document = next(left[name], None)
            if document is not None:
                yield name, document
                continue
            del left[name]
            if left:
                log.warning("%s has ended; %s go on.", name, ", ".join(left))


def kept(reader: Reader, reading: Reading) -> Iterator[Document]:
    """The documents of a source that belong to the sets asked for; what is lost is recorded."""
    sets = set(map(source_name, reading.params.sets or (reader.hub.sets if reader.hub else ())))
    prefix = f"{reader.name}/" if len(reading.params.weights) > 1 else ""  # files of two sources may have one name
    with closing(iter(reader)) as records:
        for record in records:
            if isinstance(record, Loss):
                reading.lose(record._replace(file=prefix + record.file))
            elif sets and record.source not in sets:
                reading.other_sets[counted_as(record.source, reading.other_sets)] += 1
            else:
                yield record._replace(id=prefix + record.id, source=counted_as(record.source, reading.tally.documents))


def counted_as(source: str, counts: Counter) -> str:
    """The name that a source is counted by: its own, or OTHER where there are MOST_SOURCES others."""
    return source if source in counts or len(counts) < MOST_SOURCES else OTHER


def measure(params: Download, readers: dict[str, Reader], reading: Reading) -> tuple[Callable[[], float], float, str]:
    """How far the work is, what that is at its end, and in which unit: bytes wherever their number is known."""
    if params.megabytes:
        return lambda: reading.bytes.total(), 1e6 * params.megabytes, "B"
    if params.documents:
        return lambda: reading.count.total(), params.documents, "doc"
    if size := sum(reader.starts[-1] for reader in readers.values()):
        return lambda: sum(reader.bytes for reader in readers.values()), size, "B"
    return (
        lambda: sum(reader.shard for reader in readers.values()),
        sum(len(r.shards) for r in readers.values()),
        "package",
    )


def write_all(params: Download, readers: dict[str, Reader], reading: Reading, parts: Writer) -> None:
    """Read until it is enough, and write it."""

    def end_part() -> None:
        for reader in readers.values():
            reader.check_unchanged()  # before anything is kept for a rerun
        at = {name: (reader.shard, reader.records) for name, reader in readers.items()}
        spent = [path for reader in readers.values() for path in reader.spent]
        parts.end_part(reading.state() | {"at": at}, spent)
        for reader in readers.values():
            reader.spent.clear()

    done, total, unit = measure(params, readers, reading)
    with (
        closing(reading.lost),  # or what it holds back would be written after a rerun in this process has begun
        Progress("download", total, unit) as bar,
        parts,
        closing(in_turn(readers, reading, params.weights)) as documents,
    ):
        for reader in readers.values():
            reader.note = lambda text: bar.update(0, text)
        while not reading.enough and (found := next(documents, None)):
            reading.take(*found)
            parts.write(found[1])
            if parts.characters >= 1e6 * params.part_megabytes:
                end_part()
            if not reading.count.total() % DOCUMENTS_BETWEEN_REPORTS:
                bar.update(done() - bar.count, counted(reading.count.total(), "document"))
        end_part()
        parts.wait()
        bar.update(done() - bar.count, counted(reading.count.total(), "document"))


@stage(version=4, resumes=True)
def download(params: Download, out: Path) -> dict:
    """Read the source and write it as parts; count what was read and what was lost, and where."""
    pool.prepare()  # the stages that follow work on parts
    (out / WORK).mkdir(exist_ok=True)
    file = out / WORK / STATE
    state = json.loads(file.read_text()) if file.exists() else {"parts": 0, "at": {}}
    for part in in_order(out)[state["parts"] :]:  # written after the state was kept
        part.unlink()
    reading, writer = Reading(params, out / LOST, state), Writer(out, file, state["parts"])
    readers = {name: Reader(name, params, out / WORK, state["at"].get(name, (0, 0))) for name in params.weights}
    try:
        if draft_of(download.target(params)) != out:
            raise fetch.Tainted("The files in download.files were changed since this stage began. Run again.")
        write_all(params, readers, reading, writer)
    except fetch.Tainted:  # what was written of it must not stay
        file.unlink(missing_ok=True)
        raise
    what = ", ".join(params.files) if params.source == "files" else " and ".join(params.weights)
    stats = {"shards": sum(r.opened for r in readers.values()), "parts": writer.parts, **reading.finish(what)}
    if reading.other_sets:
        stats["other_sets"] = dict(reading.other_sets.most_common())
    if len(readers) > 1:
        stats["mixture"] = {name: share(reader, reading) for name, reader in readers.items()}
    return stats


def share(reader: Reader, reading: Reading) -> dict:
    """What became of one source of a mixture."""
    weights, name = reading.params.weights, reader.name
    return {
        "documents": reading.count[name],
        "bytes": reading.bytes[name],
        "share": round(reading.bytes[name] / max(1, reading.bytes.total()), 6),
        "asked_for": round(weights[name] / sum(weights.values()), 6),
        "ended": reader.ended,
    }
