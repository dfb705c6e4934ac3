"""Download: any source or mixture of them, as Parquet parts of fixed text size (columns id, source, text).

Reads   local files, the hub, or the documentation of installed packages.
Writes  part-00000.parquet …, lost.jsonl (file, line and reason of every record that could not be read).
"""

import io
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from model import InputError
from model.quantities import counted
from tasks.corpus import fetch, hub, local, pydocs
from tasks.corpus.part_writer import PartWriter
from tasks.corpus.parts import Document, Tally, in_order
from tasks.corpus.reader import Reader, Shard
from tasks.corpus.records import OTHER, Loss, source_name
from tasks.stage import Params, stage
from tasks.store import WORK, draft_of
from tasks.workers import pool
from tasks.workers.progress import Progress

DOCUMENTS_BETWEEN_REPORTS = 256
MOST_SOURCES = 1000  # every stage counts by source; further names, for example of URLs, are counted as OTHER
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
    """Which text to train on. The default is that of the paper's final run: the first 8 million entries of the Pile."""

    source: Sources = Field(
        "pile",
        description="A data set of the hub, python-docs or files; or several with their share of the text, "
        "as {wikipedia: 3, books: 1}.",
    )
    files: list[str] = Field([], description="For source 'files': paths, globs or directories.")
    sets: list[str] = Field([], description="Keep documents of these sets only (as the Pile's 'Wikipedia (en)').")
    shards: int = Field(0, ge=0, description="Number of shards to read of each source; 0: all.")
    documents: int = Field(8_000_000, ge=0, description="Stop after this many documents; 0: no limit.")
    megabytes: float = Field(0, ge=0, description="Stop after this much UTF-8 text, 10^6 bytes; 0: no limit.")
    part_megabytes: float = Field(32, gt=0, le=1024, description="Text per part, 10^6 characters.")
    max_document_megabytes: float = Field(
        100, gt=0, le=1000, description="Longer lines and texts are dropped, 10^6 bytes of UTF-8."
    )
    max_lost: float = Field(0.01, ge=0, le=1, description="Largest fraction of records that may be unreadable.")
    damaged: Literal["refuse", "keep"] = Field(
        "refuse", description="A truncated or corrupt shard: fail, or keep what precedes the damage."
    )

    @model_validator(mode="after")
    def _files_with_their_source(self) -> "Download":
        if ("files" in self.weights) != bool(self.files):
            raise ValueError(
                f"source is {self.source!r} and files is {self.files}: give files if source is 'files', and only then"
            )
        return self

    @model_validator(mode="after")
    def _sets_given_twice(self) -> "Download":
        fixed = {
            name: hub.SOURCES[name].sets for name in self.weights if name in hub.SOURCES and hub.SOURCES[name].sets
        }
        if self.sets and fixed:
            name, sets = next(iter(fixed.items()))
            raise ValueError(
                f"source {name!r} stands for sets of its own ({', '.join(sets)}), and sets is {self.sets}: leave sets "
                "out, or choose another source, for example 'pile'"
            )
        return self

    @property
    def weights(self) -> dict[str, float]:
        """The sources by name, with their shares of the text in any unit."""
        return dict(sorted(self.source.items())) if isinstance(self.source, dict) else {self.source: 1.0}

    @property
    def limited(self) -> bool:
        """Whether reading may stop before the end of a source."""
        return bool(self.documents or self.megabytes)

    @classmethod
    def usual(cls) -> dict:
        """The defaults, without the identity of the source, for which the hub would be asked."""
        return cls().model_dump(mode="json")

    def identity(self) -> dict:
        """Names and digests of local files; repository and commit on the hub; versions of installed packages."""
        about = self.model_dump(mode="json", exclude={"files"})
        about["sources"] = {name: identity_of(name, self) for name in self.weights}
        return about


def shards(name: str, params: Download) -> list[Shard]:
    """The shards of a source to read, in order."""
    if name == "files":
        found = [Shard(*file) for file in local.local_files(params.files).items()]
    elif name == "python-docs":
        found = [Shard(package, None) for package in pydocs.installed()]
    else:
        found = [Shard(file.name, file) for file in hub.files(hub.SOURCES[name], tuple(params.sets))]
    return found[: params.shards or None]


def identity_of(name: str, params: Download) -> dict:
    """What identifies the content of a source in a key."""
    if name == "files":
        return {"files": [[shard.name, local.file_digest(shard.place)] for shard in shards(name, params)]}
    if name == "python-docs":
        return {"packages": pydocs.packages_digest()}
    source = hub.SOURCES[name]
    identity = {"repository": source.repository, "revision": hub.commit(source), "pattern": source.pattern}
    return identity | {"text": source.text, "sets": list(source.sets), "mixed": source.mixed}


class Reading:
    """Counts what was read and lost, by source and in total, and knows when a limit is reached."""

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
        """All counts as JSON."""
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
        """Record something that could not be read."""
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
        documents, megabytes = self.params.documents, self.params.megabytes
        return bool(
            (documents and self.count.total() >= documents) or (megabytes and self.bytes.total() >= 1e6 * megabytes)
        )

    def finish(self, what: str) -> dict:
        """The counts. Raises InputError if no document was read, or if more was lost than `max_lost` allows."""
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
                f"{total:,} of {counted(seen, 'record')} in {what} are unreadable ({shown}), more than "
                f"download.max_lost allows ({self.params.max_lost:.1%}). Most of '{reason}' is in "
                f"{files.most_common(1)[0][0]}. Repair the files, or raise download.max_lost. All are listed in "
                f"{self.lost.name}."
            )
        return {**counts, "bytes": self.bytes.total(), "lost": lost}


def in_turn(readers: dict[str, Reader], reading: Reading, weights: dict[str, float]) -> Iterator[tuple[str, Document]]:
    """Documents with their sources: always the next one of the source whose text is furthest behind its share.

    The caller counts each document in `reading` before it asks for the next. Ties go to the first source by name.
    """
    with ExitStack() as stack:
        left = {name: stack.enter_context(closing(wanted(reader, reading))) for name, reader in readers.items()}
        while left:
            name = min(left, key=lambda source: reading.bytes[source] / weights[source])
            document = next(left[name], None)
            if document is not None:
                yield name, document
                continue
            del left[name]
            if left:
                log.warning("%s is exhausted; continuing with %s.", name, ", ".join(left))


def wanted(reader: Reader, reading: Reading) -> Iterator[Document]:
    """The documents of a source that belong to the requested sets; losses and other sets are counted."""
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
    """The name under which a source is counted: its own, or OTHER after the first MOST_SOURCES names."""
    return source if source in counts or len(counts) < MOST_SOURCES else OTHER


def measure(params: Download, readers: dict[str, Reader], reading: Reading) -> tuple[Callable[[], float], float, str]:
    """The progress so far as a function, the total and the unit, which is bytes wherever their number is known."""
    if params.megabytes:
        return lambda: reading.bytes.total(), 1e6 * params.megabytes, "B"
    if params.documents:
        return lambda: reading.count.total(), params.documents, "doc"
    if size := sum(reader.starts[-1] for reader in readers.values()):
        return lambda: sum(reader.bytes for reader in readers.values()), size, "B"
    packages = sum(len(reader.shards) for reader in readers.values())
    return lambda: sum(reader.shard for reader in readers.values()), packages, "package"


def write_all(params: Download, readers: dict[str, Reader], reading: Reading, parts: PartWriter) -> None:
    """Read until a limit or the end is reached, and write the documents as parts."""

    def end_part() -> None:
        for reader in readers.values():
            reader.check_unchanged()  # before a rerun may rely on it
        at = {name: (reader.shard, reader.records) for name, reader in readers.items()}
        parts.end_part(reading.state() | {"at": at}, [path for reader in readers.values() for path in reader.spent])
        for reader in readers.values():
            reader.spent.clear()

    def report() -> None:
        bar.update(done() - bar.count, counted(reading.count.total(), "document"))

    done, total, unit = measure(params, readers, reading)
    with (
        closing(reading.lost),  # or its buffer would be written after a rerun in this process has begun
        Progress("download", total, unit) as bar,
        parts,
        closing(in_turn(readers, reading, params.weights)) as documents,
    ):
        for reader in readers.values():
            reader.note = lambda text: bar.update(0, text)
        while not reading.enough and (item := next(documents, None)):
            name, document = item
            reading.take(name, document)
            parts.write(document)
            if parts.characters >= 1e6 * params.part_megabytes:
                end_part()
            if not reading.count.total() % DOCUMENTS_BETWEEN_REPORTS:
                report()
        end_part()
        parts.wait()
        report()


@stage(version=4, resumes=True)
def download(params: Download, out: Path) -> dict:
    """Read the source and write it as parts; count what was read and what was lost, and where."""
    pool.prepare()  # the stages that follow work on parts
    work = out / WORK
    work.mkdir(exist_ok=True)
    saved = work / STATE
    state = json.loads(saved.read_text()) if saved.exists() else {"parts": 0, "at": {}}
    for part in in_order(out)[state["parts"] :]:  # written after the state was saved
        part.unlink()
    reading, parts = Reading(params, out / LOST, state), PartWriter(out, out / LOST, saved, state["parts"])
    options = {
        "whole": not params.limited,
        "limit": round(1e6 * params.max_document_megabytes),
        "keep": params.damaged == "keep",
    }
    readers = {
        name: Reader(name, shards(name, params), work / "hub" / name, state["at"].get(name, (0, 0)), **options)
        for name in params.weights
    }
    try:
        if draft_of(download.target(params)) != out:
            raise fetch.Tainted("The files in download.files changed after this stage began. Run again.")
        write_all(params, readers, reading, parts)
    except fetch.Tainted:  # a rerun must not resume from what was written
        saved.unlink(missing_ok=True)
        raise
    what = ", ".join(params.files) if params.source == "files" else " and ".join(params.weights)
    stats = {"shards": sum(r.opened for r in readers.values()), "parts": parts.parts, **reading.finish(what)}
    if reading.other_sets:
        stats["other_sets"] = dict(reading.other_sets.most_common())
    if len(readers) > 1:
        stats["mixture"] = {name: share(reader, reading) for name, reader in readers.items()}
    return stats


def share(reader: Reader, reading: Reading) -> dict:
    """The statistics of one source of a mixture."""
    weights, name = reading.params.weights, reader.name
    return {
        "documents": reading.count[name],
        "bytes": reading.bytes[name],
        "share": round(reading.bytes[name] / max(1, reading.bytes.total()), 6),
        "asked_for": round(weights[name] / sum(weights.values()), 6),
        "ended": reader.ended,
    }
