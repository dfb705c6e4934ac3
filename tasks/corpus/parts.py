"""The parts of a corpus: Parquet files with the columns id, source and text. All stages read and write them here.

A part is read a few megabytes at a time, as Arrow tables or as documents.
"""

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from enum import IntEnum
from itertools import chain, groupby, islice, pairwise
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from model.errors import InputError
from model.files import fsync
from tasks.store.artifacts import Artifact

SCHEMA = pa.schema([("id", pa.string()), ("source", pa.string()), ("text", pa.large_string())])
ROW_GROUP_CHARACTERS = 4_000_000  # a reader of a part holds one row group in memory
BATCH = 1 << 24  # bytes on disk that are worked on together; a part of 32 million characters has some 12 million
TOTAL = "all"  # the row of the total in tables by source
DIGEST_RANGE = 2**64
SAMPLES = 20  # documents
SAMPLE_CHARACTERS = 300  # that are shown of each


class Document(NamedTuple):
    """One text of a corpus: where it was read, the source under which it is counted, the text."""

    id: str
    source: str
    text: str


def table(documents: list[Document]) -> pa.Table:
    """Documents as one Arrow table."""
    arrays = []
    for place, field in enumerate(SCHEMA):
        arrays.append(pa.array([document[place] for document in documents], field.type))
    return pa.table(arrays, schema=SCHEMA)


def parts_of(corpus: Artifact) -> list[Path]:
    """The parts in a corpus's manifest, in order. Raises InputError if the corpus is absent or incomplete."""
    return sorted(corpus.path / file["path"] for file in corpus.manifest["files"] if is_part(file["path"]))


def is_part(name: str) -> bool:
    """Whether a file of an artifact is a part of its corpus."""
    return re.fullmatch(r"part-\d+\.parquet", name) is not None


def writer(out: Path) -> pq.ParquetWriter:
    """A writer of tables with the columns of SCHEMA to one part."""
    out.unlink(missing_ok=True)  # if an earlier attempt linked a part here, it is a published file too
    return pq.ParquetWriter(out, SCHEMA, compression="zstd", use_dictionary=["source"])


def link(part: Path, out: Path) -> None:
    """Take a part of another artifact as it is: as a second name of its file or, where that can't be, as a copy."""
    out.unlink(missing_ok=True)
    try:
        os.link(part, out)
    except OSError:  # a file system without such links, or somebody else's file
        shutil.copyfile(part, out)


class PartWriter(AbstractContextManager):
    """Writes documents as parts; a context manager.

    The caller decides where a part ends, and then passes the state of its work. The state is saved after the part and
    `log`, a file to which the caller appends, are on disk.
    """

    def __init__(self, out: Path, log: Path, state: Path, parts: int) -> None:
        self.out = out
        self.log = log
        self.state = state
        self.parts = parts
        self.characters = 0
        self.waiting: list[Document] = []  # for the next row group
        self.waiting_characters = 0
        self.file: pq.ParquetWriter | None = None
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="write")
        self.pending: Future = Future()
        self.pending.set_result(None)

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown()
        if self.file is not None:  # an incomplete part, which a rerun writes again
            with suppress(OSError):
                self.file.close()
            self.file.is_open = False  # or it would try again when it is garbage-collected

    def write(self, document: Document) -> None:
        """Add a document to the part."""
        size = len(document.text)
        self.waiting.append(document)
        self.characters += size
        self.waiting_characters += size
        if self.waiting_characters >= ROW_GROUP_CHARACTERS:
            self._flush()

    def end_part(self, state: dict) -> None:
        """End the part, unless it is empty, and save the state."""
        self._flush()
        self.parts += bool(self.characters)
        self.characters = 0
        self._submit(self._end, json.dumps(state | {"parts": self.parts}))

    def wait(self) -> None:
        """Wait until everything is written."""
        self.pending.result()

    def _flush(self) -> None:
        if self.waiting:
            self._submit(self._write, self.out / f"part-{self.parts:05d}.parquet", table(self.waiting))
            self.waiting = []
            self.waiting_characters = 0

    def _submit(self, work: Callable, *arguments: object) -> None:
        self.wait()  # after a failure nothing more is written: a part without a row group must not look complete
        self.pending = self.pool.submit(work, *arguments)

    def _write(self, path: Path, rows: pa.Table) -> None:
        if self.file is None:
            self.file = writer(path)
        self.file.write_table(rows)

    def _end(self, state: str) -> None:
        if self.file is not None:
            self.file.close()
            fsync(Path(self.file.where))
            self.file = None
        half = self.state.with_suffix(".half")
        half.write_text(state, encoding="utf-8")
        fsync(self.log)
        fsync(half)
        half.replace(self.state)


def tables(part: Path, columns: tuple[str, ...] = tuple(SCHEMA.names)) -> Iterator[pa.Table]:
    """The row groups of a part, a few megabytes each. Raises InputError if the file or its UTF-8 is damaged."""
    try:
        with pq.ParquetFile(part) as file:
            for group in range(file.num_row_groups):
                table = file.read_row_group(group, columns=list(columns), use_threads=False)
                table.validate(full=True)
                yield table
    except (pa.ArrowException, OSError) as error:
        name = "/".join(part.parts[-3:])
        raise InputError(f"{name} is damaged: {error}. Delete its artifact and run the stage again.") from error


def in_batches(parts: list[Path]) -> list[list[Path]]:
    """Successive parts in lists of one, or of several with at most BATCH bytes, so that many cost as much as a few."""
    batches: list[list[Path]] = []
    total = 0
    for part in parts:
        size = part.stat().st_size
        total += size
        if total > BATCH or not batches:
            batches.append([])
            total = size
        batches[-1].append(part)
    return batches


def rewritten(batch: list[Path], out: Path) -> Iterator[tuple[pq.ParquetWriter, pa.Table]]:
    """The row groups of some parts, each with the writer of a part of the same name."""
    for part in batch:
        with writer(out / part.name) as file:
            for rows in tables(part):
                yield file, rows


def document_at(batch: list[Path], row: int) -> Document:
    """The document in this row of some parts."""
    for rows in chain.from_iterable(map(tables, batch)):
        if row < len(rows):
            return Document(**rows.slice(row, 1).to_pylist()[0])
        row -= len(rows)
    raise IndexError(f"{batch[0].parent} has no such row")


def strings(column: pa.ChunkedArray) -> tuple[np.ndarray, memoryview]:
    """The texts as consecutive UTF-8 bytes with their offsets: text i is `data[offsets[i]:offsets[i + 1]]`."""
    array = column.combine_chunks()
    if not len(array):
        return np.zeros(1, dtype=np.int64), memoryview(b"")
    _, offsets, data = array.buffers()
    start = array.offset
    own = np.frombuffer(offsets, dtype=np.int64)[start : start + len(array) + 1]
    return own, memoryview(data or b"")


def views(column: pa.ChunkedArray) -> Iterator[memoryview]:
    """The UTF-8 bytes of each text, without a copy."""
    offsets, data = strings(column)
    return (data[start:end] for start, end in pairwise(offsets.tolist()))


class Tally:
    """Documents and characters, in total and by source."""

    def __init__(self) -> None:
        self.documents: Counter[str] = Counter()
        self.characters: Counter[str] = Counter()

    def add(self, document: Document) -> None:
        """Count one document."""
        self.documents[document.source] += 1
        self.characters[document.source] += len(document.text)

    def counts(self) -> dict:
        """The counts as JSON, the largest source first."""
        sources = sorted(self.documents, key=lambda source: (-self.documents[source], source))
        return {
            "documents": self.documents.total(),
            "characters": self.characters.total(),
            "by_source": {
                source: {"documents": self.documents[source], "characters": self.characters[source]}
                for source in sources
            },
        }


def count(tally: Tally, table: pa.Table, characters: pa.ChunkedArray | None = None) -> None:
    """Add the documents of a table to a tally, with these numbers of characters instead of the whole lengths."""
    if characters is None:
        characters = pc.utf8_length(table["text"])
    lengths = pa.table({"source": table["source"], "characters": characters})
    by_source = lengths.group_by("source", use_threads=False)
    sums = by_source.aggregate([("characters", "count"), ("characters", "sum")])
    for row in sums.to_pylist():
        tally.documents[row["source"]] += row["characters_count"]
        tally.characters[row["source"]] += row["characters_sum"]


def add_up(results: list[dict]) -> dict:
    """The sum of several `Tally.counts`."""
    tally = Tally()
    for result in results:
        for source, counts in result["by_source"].items():
            tally.documents[source] += counts["documents"]
            tally.characters[source] += counts["characters"]
    return tally.counts()


def row_name(source: str) -> str:
    """The name of a source in tables by source: quoted if it is TOTAL or begins with a quote."""
    return json.dumps(source, ensure_ascii=False) if source == TOTAL or source.startswith('"') else source


def smallest(samples: list[tuple]) -> list[tuple]:
    """The SAMPLES samples with the smallest digests (their first field), in order; of equal digests the first one."""
    by_digest = {sample[0]: sample for sample in reversed(samples)}
    digests = sorted(by_digest)[:SAMPLES]
    return [by_digest[digest] for digest in digests]


def smallest_of_each(samples: Iterable[Sequence], kind: int, most: int) -> list[Sequence]:
    """Of each kind (equal in the first `kind` fields), the `most` samples with the smallest first three fields."""
    in_order = sorted(samples, key=itemgetter(0, 1, 2))
    smallest: list[Sequence] = []
    for _, of_kind in groupby(in_order, key=lambda sample: sample[:kind]):
        smallest += islice(of_kind, most)
    return smallest


class Salt(IntEnum):
    """What a text's hash decides: with another salt, independently of the others. The values decide who is chosen."""

    HOLD_OUT = 0  # documents of the corpus; also the order of those measured, and how counts of words are rounded
    TRAIN_VOCABULARY = 1  # the sample of documents
    VALIDATE_PROBES = 2  # the documents that probes of the validation split are made of
    VALIDATE_TASK = 3  # the rows of a task without a validation split


def unit_hash(text: str, salt: Salt = Salt.HOLD_OUT) -> float:
    """A number in [0, 1) that depends only on the text and is below p for a fraction p of all texts."""
    return xxhash.xxh3_64_intdigest(text.encode(errors="surrogatepass"), seed=salt) / DIGEST_RANGE
