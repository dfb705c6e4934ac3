"""Reading Parquet shards in little memory, however much a page or a dictionary unpacks to."""

from collections.abc import Iterator
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from model import InputError
from tasks.corpus.parts import Document
from tasks.corpus.records import LONGEST_NAME, Damage, Layout, Loss, check, exceeds, source_of
from tasks.text.printable import printable

ROWS = 64  # rows read at once, at most
# Bytes that the values of these rows may take: a dictionary holds a value once, however many rows have it
UNPACKED = 1 << 28
NAMES = 1 << 24  # bytes of the source names in a row group, beyond LONGEST_NAME per row
PARQUET = {
    "page_checksum_verification": True,
    "buffer_size": 1 << 20,
    "pre_buffer": False,  # else it may hold all of a file in memory
}


def read_parquet(file: BinaryIO, name: str, layout: Layout) -> Iterator[Document | Loss]:
    """The documents of a Parquet file: a column of texts, and `source` or meta.pile_set_name if present."""
    row = 0
    try:
        table = pq.ParquetFile(file, **PARQUET)
        columns = names_of(table.schema_arrow, name, layout.text)
        rows = rows_at_once(file, table.metadata, name, columns) if layout.local else ROWS
        for batch in table.iter_batches(batch_size=rows, columns=columns):
            records = batch.drop_columns(layout.text).to_pylist() if columns[1:] else [{}] * batch.num_rows
            for text, record in zip(texts(batch.column(layout.text)), records, strict=True):
                row += 1
                if reason := check(text) or (layout.too_long if exceeds(text, layout.limit) else None):
                    yield Loss(name, row, reason, repr(text)[:200] if reason != layout.too_long else "")
                else:
                    yield Document(f"{name}:{row}", source_of(record) or layout.source, text)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        damage = Damage("corrupt", str(error))
        damage.line = row + 1
        raise damage from error


def names_of(schema: pa.Schema, name: str, text: str) -> list[str]:
    """The columns to read: text and source. Raises InputError if the text is missing or a name occurs twice."""
    if text not in schema.names:
        raise InputError(
            f"{name} has the columns {', '.join(map(printable, schema.names))}; expected one named {text}. Rename "
            "the column with the text."
        )
    if twice := [column for column in (text, "source", "meta") if schema.names.count(column) > 1]:
        raise InputError(
            f"{name} has {schema.names.count(twice[0])} columns named {twice[0]}; expected one. Drop or rename the "
            "others."
        )
    meta = schema.field("meta").type if "meta" in schema.names else None
    of_meta = meta is not None and pa.types.is_struct(meta) and meta.get_field_index("pile_set_name") >= 0
    return [text, *(["source"] if "source" in schema.names else []), *(["meta.pile_set_name"] if of_meta else [])]


def rows_at_once(file: BinaryIO, about: pq.FileMetaData, name: str, columns: list[str]) -> int:
    """How many rows can be read at once in little memory. Raises InputError if the source names alone need much."""
    largest = 1
    for group in map(about.row_group, range(about.num_row_groups)):
        for chunk in map(group.column, range(group.num_columns)):
            if chunk.path_in_schema not in columns:
                continue
            held = dictionary_bytes(file, chunk) if chunk.has_dictionary_page else 0
            beyond = max(held, chunk.total_uncompressed_size - LONGEST_NAME * chunk.num_values)
            if chunk.path_in_schema != columns[0] and beyond > NAMES:
                raise InputError(
                    f"The column {chunk.path_in_schema} of {name} holds {beyond / 1e6:,.0f} MB in a row group of "
                    f"{group.num_rows:,} rows; expected source names of at most {LONGEST_NAME} characters. Drop or "
                    "rename the column."
                )
            largest = max(largest, held)
    return max(1, min(ROWS, UNPACKED // largest))


def dictionary_bytes(file: BinaryIO, chunk: pq.ColumnChunkMetaData) -> int:
    """The unpacked size of a dictionary, which only the header of its page has (in Thrift's compact protocol)."""
    file.seek(chunk.dictionary_page_offset or 0)
    head = file.read(16)
    numbers, number, shift = [], 0, 0
    for byte in head[1:]:  # fields: type and value, 7 bits per byte; the 2nd is the unpacked size
        number, shift = number | (byte & 0x7F) << shift, shift + 7
        if byte < 0x80:
            numbers, number, shift = [*numbers, number >> 1], 0, 0
    return numbers[2] if len(numbers) > 2 else 0


def texts(column: pa.Array) -> Iterator[object]:
    """The values of a column of texts; a value that is not UTF-8 as bytes."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kinds = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_binary)
    if any(is_kind(column.type) for is_kind in kinds):
        column = column.cast(pa.large_binary())
    for value in column.to_pylist():
        try:
            yield value.decode() if isinstance(value, bytes) else value
        except UnicodeDecodeError:
            yield value
