"""Download: any source or mixture of them, as Parquet parts of fixed text size (columns id, source, text).

Reads   local files, the hub, or the documentation of installed packages.
Writes  part-00000.parquet …, lost.jsonl (file, line and reason of every record that could not be read).
"""

import io
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext, suppress
from itertools import accumulate, islice
from pathlib import Path
from typing import Annotated, BinaryIO, Literal, NamedTuple

from pydantic import Discriminator, Field, Tag, model_validator

from model import InputError, counted
from tasks import printable
from tasks.corpus import formats, hub, local, pydocs
from tasks.corpus.formats import OTHER, Damage, Layout, Loss, source_name
from tasks.corpus.parts import Document, PartWriter, Tally, in_order
from tasks.stage import Params, stage
from tasks.store import WORK, draft_of
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
    documents: int = Field(8_000_000, ge=0, description="Stop after this many documents; 0: no limit.")
    megabytes: float = Field(0, ge=0, description="Stop after this much UTF-8 text, 10^6 bytes; 0: no limit.")
    part_megabytes: float = Field(32, gt=0, le=1024, description="Text per part, 10^6 characters.")
    max_lost: float = Field(0.01, ge=0, le=1, description="Largest fraction of records that may be unreadable.")

    @model_validator(mode="after")
    def _files_with_their_source(self) -> "Download":
        if ("files" in self.weights) != bool(self.files):
            raise ValueError(
                f"source is {self.source!r} and files is {self.files}: give files if source is 'files', and only then"
            )
        return self

    @model_validator(mode="after")
    def _sets_given_twice(self) -> "Download":
        for name in self.weights:
            if self.sets and name in hub.SOURCES and (own := hub.SOURCES[name].sets):
                raise ValueError(
                    f"source {name!r} stands for sets of its own ({', '.join(own)}), and sets is {self.sets}: leave "
                    "sets out, or choose another source, for example 'pile'"
                )
        return self

    @property
    def weights(self) -> dict[str, float]:
        """The sources by name, with their shares of the text in any unit."""
        return dict(sorted(self.source.items())) if isinstance(self.source, dict) else {self.source: 1.0}

    @classmethod
    def usual(cls) -> dict:
        """The defaults, without the identity of the source, for which the hub would be asked."""
        return cls().model_dump(mode="json")

    def identity(self) -> dict:
        """Names and digests of local files; repository and commit on the hub; versions of installed packages."""
        about = self.model_dump(mode="json", exclude={"files"})
        about["sources"] = {name: identity_of(name, self.files) for name in self.weights}
        return about


def identity_of(name: str, files: list[str]) -> dict:
    """What identifies the content of a source in a key."""
    if name == "files":
        return {"files": [[name, local.file_digest(path)] for name, path in local.local_files(files).items()]}
    if name == "python-docs":
        return {"packages": pydocs.packages_digest()}
    source = hub.SOURCES[name]
    identity = {"repository": source.repository, "revision": hub.commit(source), "pattern": source.pattern}
    return identity | {"text": source.text, "sets": list(source.sets), "mixed": source.mixed}


class Shard(NamedTuple):
    """A file, or an installed package (whose place is None)."""

    name: str
    place: Path | hub.File | None

    @property
    def bytes(self) -> int:
        """Its size; 0 if unknown."""
        if isinstance(self.place, Path):
            return self.place.stat().st_size
        return self.place.bytes if self.place else 0


def shards_of(source: str, files: list[str], sets: list[str]) -> list[Shard]:
    """The shards of a source, in order. `files` are those of the source 'files'; `sets` choose shards on the hub."""
    if source == "files":
        return [Shard(*file) for file in local.local_files(files).items()]
    if source == "python-docs":
        return [Shard(package, None) for package in pydocs.installed()]
    return [Shard(file.name, file) for file in hub.files(hub.SOURCES[source], tuple(sets))]


class Reader:
    """Reads the records of one source in order.

    `at` is where an earlier attempt stopped: the number of shards that were read completely, and the number of records
    (documents or losses) that were read of the next one.
    """

    def __init__(self, name: str, shards: list[Shard], at: tuple[int, int]) -> None:
        self.name, self.shards, self.hub = name, shards, hub.SOURCES.get(name)
        self.shard, self.records = at
        self.starts = [0, *accumulate(shard.bytes for shard in shards)]  # of each shard, in bytes of the source
        self.digests = {s.name: local.file_digest(s.place) for s in shards if isinstance(s.place, Path)}
        self.file: BinaryIO | None = None

    def __iter__(self) -> Iterator[Document | Loss]:
        """The records that are left. Raises Damage for a shard that can't be read."""
        while not self.ended:
            name, place = self.shards[self.shard]
            with self._open(place) as self.file:
                if place is None:
                    records = pydocs.package_documents(name)
                else:
                    family = (place.set or self.name) if isinstance(place, hub.File) else formats.family(name)
                    layout = Layout(family, text=self.hub.text if self.hub else "text")
                    records = formats.read_file(self.file, name, layout)
                for record in islice(records, self.records, None):
                    self.records += 1
                    yield record
            self.check_unchanged()
            self.shard, self.records = self.shard + 1, 0

    def _open(self, place: Path | hub.File | None) -> AbstractContextManager[BinaryIO | None]:
        if place is None:
            return nullcontext()
        path = place if isinstance(place, Path) else hub.cached(self.hub, place)
        return path.open("rb", formats.BUFFER) if path else hub.opened(self.hub, place)

    def check_unchanged(self) -> None:
        """Raise Damage if the local file that is being read no longer has the digest that is in the key."""
        if self.ended:
            return
        name, place = self.shards[self.shard]
        if isinstance(place, Path) and local.file_digest(place) != self.digests[name]:
            raise Damage(
                f"{printable(str(place))} changed while it was read. Nothing of this download is kept. Run again, and "
                "don't change the file until the stage has finished."
            )

    @property
    def ended(self) -> bool:
        """Whether the whole source has been read."""
        return self.shard == len(self.shards)

    @property
    def bytes(self) -> int:
        """Approximate number of bytes read so far."""
        inside = 0
        with suppress(ValueError, AttributeError):  # between two files
            inside = self.file.tell()
        return min(self.starts[self.shard] + inside, self.starts[-1])


class Counts:
    """Counts what was read and lost, by source and in total, and knows when a limit is reached."""

    def __init__(self, params: Download, lost: Path, state: dict) -> None:
        self.params, self.tally = params, Tally()
        self.tally.documents, self.tally.characters = (Counter(state.get(k)) for k in ("documents", "characters"))
        self.read = Counter(state.get("read"))  # documents, by the name in download.source
        self.bytes = Counter(state.get("bytes"))  # the same
        self.other_sets = Counter(state.get("other_sets"))
        self.lost = lost.open("a+")
        self.lost.truncate(state.get("lost", 0))

    def state(self) -> dict:
        """All counts as JSON."""
        self.lost.flush()
        return {
            "documents": self.tally.documents,
            "characters": self.tally.characters,
            "read": self.read,
            "bytes": self.bytes,
            "other_sets": self.other_sets,
            "lost": self.lost.seek(0, io.SEEK_END),
        }

    def add(self, name: str, document: Document) -> None:
        """Count a document of a source."""
        self.tally.add(document)
        self.read[name] += 1
        self.bytes[name] += len(document.text) if document.text.isascii() else len(document.text.encode())

    @property
    def enough(self) -> bool:
        """Whether a limit is reached."""
        documents, megabytes = self.params.documents, self.params.megabytes
        return bool(
            (documents and self.read.total() >= documents) or (megabytes and self.bytes.total() >= 1e6 * megabytes)
        )

    def stats(self, what: str) -> dict:
        """The counts. Raises InputError if no document was read, or if more was lost than `max_lost` allows."""
        counts, reasons = self.tally.counts(), {}
        with open(self.lost.name) as file:
            for loss in map(json.loads, file):
                reasons.setdefault(loss["reason"], Counter())[loss["file"]] += 1
        lost = {reason: files.total() for reason, files in sorted(reasons.items())}
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
            reason, files = max(reasons.items(), key=lambda item: item[1].total())
            raise InputError(
                f"{total:,} of {counted(seen, 'record')} in {what} are unreadable ({shown}), more than "
                f"download.max_lost allows ({self.params.max_lost:.1%}). Most of '{reason}' is in "
                f"{files.most_common(1)[0][0]}. Repair the files, or raise download.max_lost. All are listed in "
                f"{self.lost.name}."
            )
        return {**counts, "bytes": self.bytes.total(), "lost": lost}


def counted_as(source: str, counts: Counter) -> str:
    """The name under which a source is counted: its own, or OTHER after the first MOST_SOURCES names."""
    return source if source in counts or len(counts) < MOST_SOURCES else OTHER


def read_sources(readers: dict[str, Reader], counts: Counts, parts: PartWriter) -> None:
    """Read until a limit or the end of all sources is reached, and write the documents as parts.

    The next document is always one of the source whose text is furthest behind its share; ties go to the first by name.
    """
    params, weights = counts.params, counts.params.weights
    prefixes = {name: f"{name}/" if len(readers) > 1 else "" for name in readers}  # two sources may have like names
    sets = {name: set(map(source_name, params.sets or (r.hub.sets if r.hub else ()))) for name, r in readers.items()}

    def end_part() -> None:
        for reader in readers.values():
            reader.check_unchanged()  # before a rerun may rely on it
        at = {name: (reader.shard, reader.records) for name, reader in readers.items()}
        parts.end_part(counts.state() | {"at": at})

    def report() -> None:
        bar.update(done() - bar.count, counted(counts.read.total(), "document"))

    done, total, unit = goal(readers, counts)
    with Progress("download", total, unit) as bar, ExitStack() as stack:
        left = {name: stack.enter_context(closing(iter(reader))) for name, reader in readers.items()}
        while left and not counts.enough:
            name = min(left, key=lambda source: counts.bytes[source] / weights[source])
            record = next(left[name], None)
            if record is None:
                del left[name]
                if left:
                    log.warning("%s is exhausted; continuing with %s.", name, ", ".join(left))
            elif isinstance(record, Loss):
                counts.lost.write(json.dumps(record._replace(file=prefixes[name] + record.file)._asdict()) + "\n")
            elif sets[name] and record.source not in sets[name]:
                counts.other_sets[counted_as(record.source, counts.other_sets)] += 1
            else:
                source = counted_as(record.source, counts.tally.documents)
                document = Document(prefixes[name] + record.id, source, record.text)
                counts.add(name, document)
                parts.write(document)
                if parts.characters >= 1e6 * params.part_megabytes:
                    end_part()
                if not counts.read.total() % DOCUMENTS_BETWEEN_REPORTS:
                    report()
        end_part()
        parts.wait()
        report()


def goal(readers: dict[str, Reader], counts: Counts) -> tuple[Callable[[], float], float | None, str]:
    """The progress so far as a function, its total (None if unknown) and its unit."""
    if counts.params.megabytes:
        return counts.bytes.total, 1e6 * counts.params.megabytes, "B"
    if counts.params.documents:
        return counts.read.total, counts.params.documents, "doc"
    if size := sum(reader.starts[-1] for reader in readers.values()):
        return lambda: sum(reader.bytes for reader in readers.values()), size, "B"
    return counts.bytes.total, None, "B"  # of installed packages


@stage(version=4, resumes=True, retries=3)
def download(params: Download, out: Path) -> dict:
    """Read the source and write it as parts; count what was read and what was lost, and where."""
    work = out / WORK
    work.mkdir(exist_ok=True)
    saved = work / STATE
    state = json.loads(saved.read_text()) if saved.exists() else {"parts": 0, "at": {}}
    for part in in_order(out)[state["parts"] :]:  # written after the state was saved
        part.unlink()
    counts, parts = Counts(params, out / LOST, state), PartWriter(out, out / LOST, saved, state["parts"])
    readers = {}
    for name in params.weights:
        shards, at = shards_of(name, params.files, params.sets), state["at"].get(name, (0, 0))
        readers[name] = Reader(name, shards, at)
    try:
        if draft_of(download.target(params)) != out:
            raise Damage("The files in download.files changed after this stage began. Run again.")
        # `lost` is closed, or its buffer would be written after a rerun in this process has begun
        with closing(counts.lost), parts:
            read_sources(readers, counts, parts)
    except Damage:  # a rerun must not resume from what was written
        saved.unlink(missing_ok=True)
        raise
    what = ", ".join(params.files) if params.source == "files" else " and ".join(params.weights)
    stats = {
        "shards": sum(r.shard + bool(r.records) for r in readers.values()),
        "parts": parts.parts,
        **counts.stats(what),
    }
    if counts.other_sets:
        stats["other_sets"] = dict(counts.other_sets.most_common())
    if len(readers) > 1:
        stats["mixture"] = {name: share(reader, counts) for name, reader in readers.items()}
    return stats


def share(reader: Reader, counts: Counts) -> dict:
    """The statistics of one source of a mixture."""
    weights, name = counts.params.weights, reader.name
    return {
        "documents": counts.read[name],
        "bytes": counts.bytes[name],
        "share": round(counts.bytes[name] / max(1, counts.bytes.total()), 6),
        "asked_for": round(weights[name] / sum(weights.values()), 6),
        "ended": reader.ended,
    }
