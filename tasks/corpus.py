"""Download: any source, re-sharded into Parquet parts of fixed text size (columns id, source, text).

Reads   local files, the hub, or the documentation of installed packages.
Writes  part-00000.parquet …, lost.jsonl (file, line and reason of whatever could not be read).
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field, model_validator

from model import InputError
from tasks import sources
from tasks.progress import Progress
from tasks.sources import Document, Loss
from tasks.stage import Artifact, Params, stage

SCHEMA = pa.schema([("id", pa.string()), ("source", pa.string()), ("text", pa.large_string())])
ROW_GROUP_CHARACTERS = 4_000_000  # what a reader of a part holds in memory at once


class Download(Params):
    """Which text to train on. The default is what the paper's final run read: the first 8 million Pile entries."""

    source: Literal["pile", "c4", "python-docs", "files"] = Field(
        "pile", description="A hub data set, or where to look."
    )
    files: list[str] = Field([], description="For source 'files': paths, globs or directories.")
    shards: int = Field(0, ge=0, description="Read the first so many shards; 0: all.")
    documents: int = Field(8_000_000, ge=0, description="Stop after so many documents; 0: no limit.")
    megabytes: float = Field(0, ge=0, description="Stop after so much UTF-8 text, 10^6 bytes; 0: no limit.")
    part_megabytes: float = Field(32, gt=0, le=1024, description="Text in a part, 10^6 characters.")
    max_lost: float = Field(0.01, ge=0, le=1, description="Largest fraction of records that may be unreadable.")
    damaged: Literal["refuse", "keep"] = Field(
        "refuse", description="A truncated or corrupt shard: fail, or keep what stands before the damage."
    )

    @model_validator(mode="after")
    def _files_with_their_source(self) -> "Download":
        if (self.source == "files") != bool(self.files):
            raise ValueError(
                f"source is {self.source!r} and files is {self.files}: give files exactly when source is 'files'"
            )
        return self

    def identity(self) -> dict:
        """Names and digests of local files; repository and revision on the hub; versions of installed packages."""
        about = self.model_dump(mode="json", exclude={"files"})
        if self.source == "files":
            about["files"] = [[name, sources.file_digest(path)] for name, path in shards(self)]  # in their order
        elif self.source == "python-docs":
            about["packages"] = sources.packages_digest()
        else:
            hub = sources.HUB[self.source]
            about |= {"repository": hub.repository, "revision": hub.revision}
        return about


class Writer:
    """Writes documents as parts: a new part begins when the text of this one reaches its size."""

    def __init__(self, out: Path, part_characters: float) -> None:
        self.out, self.part_characters = out, part_characters
        self.parts, self.characters, self.waiting, self.waiting_characters = 0, 0, [], 0
        self.file: pq.ParquetWriter | None = None

    def write(self, document: Document) -> None:
        """Add a document."""
        self.waiting.append(document)
        self.waiting_characters += len(document.text)
        full = self.characters + self.waiting_characters >= self.part_characters
        if full or self.waiting_characters >= ROW_GROUP_CHARACTERS:
            self._flush()
        if full:
            self._end_part()

    def _flush(self) -> None:
        if self.file is None:
            self.file = pq.ParquetWriter(self.out / f"part-{self.parts:05d}.parquet", SCHEMA, compression="zstd")
            self.parts += 1
        self.file.write_table(table(self.waiting))
        self.characters += self.waiting_characters
        self.waiting, self.waiting_characters = [], 0

    def _end_part(self) -> None:
        if self.file is not None:
            self.file.close()
        self.file, self.characters = None, 0

    def close(self) -> None:
        """Write what is waiting and end the last part."""
        if self.waiting:
            self._flush()
        self._end_part()


def table(documents: list[Document]) -> pa.Table:
    """Documents as one Arrow table."""
    columns = list(zip(*documents, strict=True)) or [(), (), ()]
    return pa.table(
        [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)], schema=SCHEMA
    )


def parts(corpus: Artifact) -> list[Path]:
    """The parts of a corpus, in order."""
    return sorted(corpus.path.glob("part-*.parquet"))


def batches(part: Path) -> Iterator[list[Document]]:
    """The documents of a part, a few megabytes at a time."""
    try:
        file = pq.ParquetFile(part)
        for group in range(file.num_row_groups):
            columns = file.read_row_group(group, columns=SCHEMA.names).to_pydict()
            yield [Document(*row) for row in zip(*columns.values(), strict=True)]
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        name = "/".join(part.parts[-3:])
        raise InputError(f"{name} is damaged: {error}. Delete its artifact and run the stage again.") from error


def documents_of(corpus: Artifact) -> Iterator[Document]:
    """All documents of a corpus, in order."""
    for part in parts(corpus):
        for batch in batches(part):
            yield from batch


class Tally:
    """Documents and characters, in all and by source."""

    def __init__(self) -> None:
        self.documents, self.characters = Counter(), Counter()

    def add(self, document: Document) -> None:
        """Count one."""
        self.documents[document.source] += 1
        self.characters[document.source] += len(document.text)

    def counts(self) -> dict:
        """As JSON, the largest source first."""
        by_source = {s: {"documents": n, "characters": self.characters[s]} for s, n in self.documents.most_common()}
        return {
            "documents": self.documents.total(),
            "characters": self.characters.total(),
            "by_source": dict(sorted(by_source.items(), key=lambda item: (-item[1]["documents"], item[0]))),
        }


def add_up(results: list[dict]) -> dict:
    """The sum of several `Tally.counts`."""
    tally = Tally()
    for result in results:
        for source, counts in result["by_source"].items():
            tally.documents[source] += counts["documents"]
            tally.characters[source] += counts["characters"]
    return tally.counts()


class Reading:
    """What has been read so far, and whether that is enough."""

    def __init__(self, params: Download, lost: Path) -> None:
        self.params, self.tally, self.bytes, self.shards = params, Tally(), 0, 0
        self.reasons: dict[str, Counter] = defaultdict(Counter)
        self.lost = lost.open("w")

    def lose(self, loss: Loss) -> None:
        """Record what could not be read."""
        self.reasons[loss.reason][loss.file] += 1
        self.lost.write(json.dumps(loss._asdict()) + "\n")

    def take(self, document: Document) -> None:
        """Count a document."""
        self.tally.add(document)
        self.bytes += len(document.text.encode(errors="surrogatepass"))

    @property
    def fraction(self) -> float:
        """Of the asked-for subset; 1 ends the reading. 0 where there is no limit."""
        limits = [(self.params.documents, self.tally.documents.total()), (1e6 * self.params.megabytes, self.bytes)]
        return max((done / limit for limit, done in limits if limit), default=0.0)

    def finish(self, what: str) -> dict:
        """Close the record of losses and check that they are few."""
        self.lost.close()
        counts = self.tally.counts()
        lost = {reason: files.total() for reason, files in sorted(self.reasons.items())}
        shown = "; ".join(f"{n:,} x {reason}" for reason, n in lost.items()) or "nothing"
        if not counts["documents"]:
            raise InputError(
                f"{what} holds no document that cram can read (lost: {shown}). Check download.files or source."
            )
        total = sum(lost.values())
        if total > self.params.max_lost * (total + counts["documents"]):
            reason, files = max(self.reasons.items(), key=lambda item: item[1].total())
            raise InputError(
                f"{total:,} of {total + counts['documents']:,} records in {what} are unreadable ({shown}), more than the "
                f"allowed {self.params.max_lost:.1%}; '{reason}' mostly in {files.most_common(1)[0][0]}. Mend the files, or "
                f"raise download.max_lost. All are listed in {self.lost.name}."
            )
        return {**counts, "bytes": self.bytes, "lost": lost}


def shards(params: Download) -> list[tuple[str, Path | sources.HubSource | None]]:
    """What to read, in order: names, and where they are."""
    if params.source == "files":
        found = list(sources.local_files(params.files).items())
    elif params.source == "python-docs":
        found = [(name, None) for name in sources.installed()]
    else:
        hub = sources.HUB[params.source]
        found = [(name, hub) for name in sources.hub_files(hub)]
    return found[: params.shards or None]


def read(shard: tuple[str, Path | sources.HubSource | None], params: Download, reading: Reading) -> Iterator[Document]:
    """The documents of one shard."""
    name, place = shard
    if place is None:
        yield from sources.package_documents(name, reading.lose)
        return
    whole = not (params.documents or params.megabytes)  # a subset needs but the beginning of a shard
    with place.open("rb") if isinstance(place, Path) else sources.open_hub(place, name, whole) as file:
        seen = 0
        try:
            for document in sources.read_file(file, name, reading.lose):
                seen += 1
                yield document
        except sources.Damage as damage:
            if params.damaged == "refuse":
                raise InputError(
                    f"{name} is {damage}, after {seen:,} documents. Get it again, or set download.damaged to 'keep' to "
                    "train on the documents before the damage."
                ) from damage
            reading.lose(Loss(name, damage.line or seen + 1, str(damage).split(":")[0] + " shard"))


@stage(version=1)
def download(params: Download, out: Path) -> dict:
    """Read the source and write it as parts; count what was read and what was lost, and where."""
    found = shards(params)
    reading, writer = Reading(params, out / "lost.jsonl"), Writer(out, 1e6 * params.part_megabytes)
    limited = bool(params.documents or params.megabytes)
    with Progress("download", total=1.0 if limited else len(found), unit="of the text" if limited else "shard") as bar:
        for shard in found:
            reading.shards += 1
            for document in read(shard, params, reading):
                before = reading.fraction
                reading.take(document)
                writer.write(document)
                if limited:
                    bar.update(reading.fraction - before)
                if reading.fraction >= 1:
                    break
            if not limited:
                bar.update(note=f"{reading.tally.documents.total():,} documents")
            if reading.fraction >= 1:
                break
    writer.close()
    what = ", ".join(params.files) if params.source == "files" else params.source
    return {"shards": reading.shards, "parts": writer.parts, **reading.finish(what)}
