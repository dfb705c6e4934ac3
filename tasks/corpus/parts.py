"""Parts as Arrow columns: read, counted, selected and written without making an object of every document."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from model import InputError
from tasks.corpus.formats import Document
from tasks.download import SCHEMA, Tally

SAMPLES, SAMPLE_CHARACTERS = 20, 300  # what is shown of many; of each


def tables(part: Path, columns: tuple[str, ...] = tuple(SCHEMA.names)) -> Iterator[pa.Table]:
    """The row groups of a part, a few megabytes each. Raises InputError where the file or its UTF-8 is damaged."""
    try:
        with pq.ParquetFile(part) as file:
            for group in range(file.num_row_groups):
                table = file.read_row_group(group, columns=list(columns), use_threads=False)
                table.validate(full=True)
                yield table
    except (pa.ArrowException, OSError) as error:
        name = "/".join(part.parts[-3:])
        raise InputError(f"{name} is damaged: {error}. Delete its artifact and run the stage again.") from error


def writer(out: Path) -> pq.ParquetWriter:
    """Writes tables with the columns of a corpus as a part."""
    return pq.ParquetWriter(out, SCHEMA, compression="zstd", use_dictionary=["source"])


def strings(column: pa.ChunkedArray) -> tuple[np.ndarray, memoryview]:
    """Texts as one run of UTF-8 bytes, and where they begin and end: text i is `data[offsets[i]:offsets[i + 1]]`."""
    array = column.combine_chunks()
    if not len(array):
        return np.zeros(1, dtype=np.int64), memoryview(b"")
    _, offsets, data = array.buffers()
    offsets = np.frombuffer(offsets, dtype=np.int64)[array.offset : array.offset + len(array) + 1]
    return offsets, memoryview(data or b"")


def views(column: pa.ChunkedArray) -> Iterator[memoryview]:
    """The UTF-8 bytes of each text, not copied."""
    offsets, data = strings(column)
    return (data[start:end] for start, end in pairwise(offsets.tolist()))


def count(tally: Tally, table: pa.Table, characters: pa.ChunkedArray | None = None) -> None:
    """Add the documents of a table to a tally, with these numbers of characters in place of all that they have."""
    characters = pc.utf8_length(table["text"]) if characters is None else characters
    grouped = pa.table({"source": table["source"], "characters": characters}).group_by("source", use_threads=False)
    sums = grouped.aggregate([("characters", "count"), ("characters", "sum")])
    rows = zip(*(sums[name].to_pylist() for name in ("source", "characters_count", "characters_sum")), strict=True)
    for source, documents, total in rows:
        tally.documents[source] += documents
        tally.characters[source] += total


def smallest(samples: list[tuple]) -> list[tuple]:
    """The few that begin with the smallest digests, one of each, the earlier where two have the same."""
    by_digest = {sample[0]: sample for sample in reversed(samples)}
    return [by_digest[digest] for digest in sorted(by_digest)[:SAMPLES]]


def documents_at(part: Path, rows: list[int]) -> list[Document]:
    """The documents in these rows of a part."""
    with pq.ParquetFile(part) as file:
        sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
        ends, found = np.cumsum(sizes), []
        for row in rows:
            group = int(np.searchsorted(ends, row, side="right"))
            table = file.read_row_group(group, columns=SCHEMA.names, use_threads=False)
            [document] = table.slice(row - ends[group] + sizes[group], 1).to_pylist()
            found.append(Document(**document))
        return found
