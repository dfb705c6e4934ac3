"""Formats of shards: JSON lines, Parquet and plain text, compressed or not.

A format is a function and its rows in FORMATS. The function gives the documents of a file in order, and losses in the
places of what could not be read.
"""

import codecs
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import zstandard

from model import InputError
from tasks import printable
from tasks.corpus.parts import Document

LONGEST_NAME, OTHER = 256, "other"  # characters of a source's name; the name in place of a longer one
MOST_BYTES = 100_000_000  # of a line or text; longer ones are lost
BUFFER = 1 << 17  # bytes of a file in memory
# Compressed bytes unpacked at once: a zst block of 4 bytes can hold 128 KiB, so this is 64 MiB at most
MORSEL = 1 << 11
ROWS = 64  # of a Parquet file in memory
SET = "meta.pile_set_name"  # the column that names a source in the Pile
MAGIC = [  # the first bytes of formats
    (rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18", "zstd"),
    (rb"\x1f\x8b", "gzip"),
    (rb"PAR1", "Parquet"),
    (rb"BZh", "bzip2"),
    (rb"\xfd7zXZ\0", "xz"),
    (rb"PK\x03\x04", "zip"),
    (rb"\x04\x22\x4d\x18", "lz4"),
]
NAMED = {".zst": "zstd", ".gz": "gzip", ".parquet": "Parquet"}  # by suffix; other files begin as none of MAGIC
# The end of a stem that numbers a shard; on the hub, a digest may follow
SHARD = re.compile(r"[-_. ]?\d+([-_. ]?of[-_. ]?\d+(-[0-9a-f]{16})?)?$")
ARRAY = re.compile(rb"(\xef\xbb\xbf)?\s*\[\s*(\{|[\r\n])")  # the beginning of a file that is one JSON array


class Loss(NamedTuple):
    """A record that could not be read."""

    file: str
    line: int
    reason: str
    sample: str = ""


class Layout(NamedTuple):
    """How to read a file."""

    source: str  # of documents that name none
    limit: int = MOST_BYTES
    text: str = "text"  # the field or column with the text

    @property
    def too_long(self) -> str:
        """The reason for losing a longer line or text."""
        return f"longer than {self.limit / 1e6:g} MB"


class Damage(InputError):
    """A shard is not what it should be. Nothing of it is used, and a rerun must not rely on what was read of it."""


class Unreadable(Exception):
    """A record that holds no document; its message is the reason of the loss."""


def text_of(value: object, layout: Layout) -> str:
    """The text that is the value of a field, bytes in UTF-8 or a string. Raises Unreadable if it is none."""
    if isinstance(value, bytes):
        if len(value) > layout.limit:
            raise Unreadable(layout.too_long)
        try:
            value = value.decode()
        except UnicodeDecodeError as error:
            raise Unreadable("not UTF-8") from error
    if not isinstance(value, str):
        raise Unreadable(f"text is not a string but {type(value).__name__}")
    if not value or value.isspace():
        raise Unreadable("empty text")
    return value


def source_of(record: dict) -> str:
    """The source that a record names in meta.pile_set_name or else in `source`; empty if in neither."""
    meta = record.get("meta")
    for name in (meta.get("pile_set_name") if isinstance(meta, dict) else None, record.get("source")):
        if isinstance(name, str) and name:
            return source_name(name)
    return ""


def source_name(name: str) -> str:
    """A source's name as it is stored: printable, and OTHER if it is longer than LONGEST_NAME."""
    return printable(name.encode(errors="replace").decode()) if len(name) <= LONGEST_NAME else OTHER


class ZstdFile(io.RawIOBase):
    """The text of a zst file of any number of frames. Raises EOFError if it ends within a frame.

    zstandard's own reader takes a truncated file for a whole one, and Arrow's refuses frames with a long window.
    """

    def __init__(self, file: io.BufferedReader) -> None:
        self.file, self.begin = file, zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj
        self.frame, self.packed, self.text = self.begin(), b"", bytearray()

    def readable(self) -> bool:
        """It can be read."""
        return True

    def readinto(self, buffer: memoryview) -> int:
        """Fill the buffer, or read what is left."""
        while len(self.text) < len(buffer) and (packed := self.packed or self.file.read(MORSEL)):
            if self.frame.eof:
                self.frame = self.begin()
            self.text += self.frame.decompress(packed)
            self.packed = self.frame.unused_data
        if not self.text and not self.frame.eof:
            raise EOFError("it ends in the middle of the compressed stream")
        size = min(len(buffer), len(self.text))
        buffer[:size] = self.text[:size]
        del self.text[:size]
        return size


def read_json_lines(file: io.BufferedReader, name: str, layout: Layout) -> Iterator[Document | Loss]:
    """The documents of a file with one JSON object per line."""
    readline, number = line_reader(file, name), 0
    while line := readline(layout.limit + 1):
        number += 1
        if len(line) > layout.limit and not line.endswith(b"\n"):
            while line and not line.endswith(b"\n"):
                line = readline(BUFFER)
            yield Loss(name, number, layout.too_long)
        elif not line.isspace():
            try:
                source, text = parse(line, layout)
            except Unreadable as reason:
                yield Loss(name, number, str(reason), line.removesuffix(b"\n")[:200].decode(errors="replace"))
            else:
                yield Document(f"{name}:{number}", source or layout.source, text)


def line_reader(file: io.BufferedReader, name: str) -> Callable[[int], bytes]:
    r"""The file's `readline`; lines end with \n, or if the first one ends with \r alone, with either."""
    head = file.peek()
    if ARRAY.match(head):
        raise Damage(f"{name} is a JSON array; expected one object per line. Convert it (jq -c '.[]').")
    first_end = re.search(rb"\n|\r(?=[^\n])", head)
    if not first_end or first_end[0] == b"\n":
        return file.readline
    text = io.TextIOWrapper(file, "latin-1", newline=None)
    return lambda size: text.readline(size).encode("latin-1")


def parse(line: bytes, layout: Layout) -> tuple[str, str]:
    """(source or "", text) of a line of JSON in the Pile's format. Raises Unreadable if it has no text."""
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        record = parse_leniently(line)
        text = record.get(layout.text) if isinstance(record, dict) else None
        if isinstance(text, str) and re.search("[\ud800-\udfff]", text):  # which UTF-8 can't represent
            raise Unreadable("half a surrogate pair in the text") from None
    if not isinstance(record, dict):
        raise Unreadable("not a JSON object")
    if layout.text not in record:
        raise Unreadable(f"no field '{layout.text}'")
    return source_of(record), text_of(record[layout.text], layout)


def parse_leniently(line: bytes) -> object:
    """Parse JSON that may hold NaN, integers of any length and half surrogate pairs. Raises Unreadable."""
    try:
        return json.loads(line.decode("utf-8-sig"), parse_int=lambda digits: int(digits[:18]))
    except UnicodeDecodeError:
        raise Unreadable("not UTF-8") from None
    except RecursionError:
        raise Unreadable("nested too deeply") from None
    except json.JSONDecodeError as error:
        raise Unreadable("more than one value in a line" if error.msg == "Extra data" else "broken JSON") from None


def read_text(file: io.BufferedReader, name: str, layout: Layout) -> Iterator[Document | Loss]:
    """A .txt file is one document."""
    data = file.read(len(codecs.BOM_UTF8) + layout.limit + 1).removeprefix(codecs.BOM_UTF8)
    try:
        yield Document(f"{name}:1", layout.source, text_of(data, layout))
    except Unreadable as reason:
        start = getattr(reason.__cause__, "start", 0)  # of what is not UTF-8
        yield Loss(name, data[:start].count(b"\n") + 1, str(reason), repr(data[start : start + 40]))


def read_parquet(file: io.BufferedReader, name: str, layout: Layout) -> Iterator[Document | Loss]:
    """The documents of a Parquet file: a column of texts, and `source` or meta.pile_set_name if present."""
    about = pq.read_metadata(file)
    columns, row = columns_of(about.schema.to_arrow_schema(), name, layout.text), 0
    # `pre_buffer` may hold all of a file in memory; names as dictionaries are held once, however many rows have them
    options = {"buffer_size": 1 << 20, "pre_buffer": False, "read_dictionary": columns[1:]}
    table = pq.ParquetFile(file, metadata=about, page_checksum_verification=True, **options)
    for batch in table.iter_batches(batch_size=ROWS, columns=columns):
        texts, none = batch.column(layout.text), [None] * batch.num_rows
        if pa.types.is_dictionary(texts.type):
            texts = texts.dictionary_decode()
        if texts.type in (pa.string(), pa.large_string(), pa.string_view(), pa.binary()):
            texts = texts.cast(pa.large_binary())  # of which one that is not UTF-8 spoils no other
        sources = names_in(batch.column("source")) if "source" in columns else none
        sets = names_in(pc.struct_field(batch.column("meta"), "pile_set_name")) if SET in columns else none
        for value, source, set_name in zip(texts.to_pylist(), sources, sets, strict=True):
            row += 1
            try:
                text = text_of(value, layout)
            except Unreadable as reason:
                yield Loss(name, row, str(reason), "" if str(reason) == layout.too_long else repr(value)[:200])
            else:
                found = source_of({"meta": {"pile_set_name": set_name}, "source": source})
                yield Document(f"{name}:{row}", found or layout.source, text)


def names_in(column: pa.Array) -> list:
    """The values of a column. Rows of a dictionary share them."""
    if not pa.types.is_dictionary(column.type):
        return column.to_pylist()
    indices = column.indices.to_pylist()
    shared = {i: column.dictionary[i].as_py() for i in set(indices) - {None}}
    return [shared.get(i) for i in indices]


def columns_of(schema: pa.Schema, name: str, text: str) -> list[str]:
    """The columns to read: text and source. Raises InputError if the text is missing or a name occurs twice."""
    if text not in schema.names:
        raise InputError(
            f"{name} has the columns {', '.join(map(printable, schema.names))}; expected one named {text}. Rename "
            "the column with the text."
        )
    if twice := [column for column in (text, "source", "meta") if schema.names.count(column) > 1]:
        raise InputError(f"{name} has several columns named {twice[0]}; expected one. Drop or rename the others.")
    meta = schema.field("meta").type if "meta" in schema.names else None
    of_meta = meta is not None and pa.types.is_struct(meta) and meta.get_field_index("pile_set_name") >= 0
    return [text, *(["source"] if "source" in schema.names else []), *([SET] if of_meta else [])]


FORMATS = {  # by the end of a file's name
    ".jsonl": read_json_lines,
    ".jsonl.zst": read_json_lines,
    ".jsonl.gz": read_json_lines,
    ".json": read_json_lines,
    ".json.zst": read_json_lines,
    ".json.gz": read_json_lines,
    ".parquet": read_parquet,
    ".txt": read_text,
}


def ending_of(name: str) -> str:
    """The key of FORMATS with which a file's name ends, in capitals or not; empty if cram does not read the file."""
    return next((ending for ending in FORMATS if name.lower().endswith(ending)), "")


def family(name: str) -> str:
    """A file's name without suffix and shard number, for example `train` for `train-00003-of-00010.jsonl.zst`."""
    whole = Path(name).name
    stem = whole[: len(whole) - len(ending_of(whole))]
    return SHARD.sub("", stem) or stem or whole


def expect_format(file: io.BufferedReader, name: str) -> None:
    """Raise Damage if a file does not begin as its name says."""
    expected, head = NAMED.get(Path(name).suffix.lower(), ""), file.peek()
    if expected and not head:
        raise Damage(f"{name} is truncated: it is empty. Get it again.")
    actual = next((form for pattern, form in MAGIC if re.match(pattern, head)), "")
    if head and actual != expected:
        looks = actual or ("plain JSON" if head[:1] in b"{[" else "something else")
        raise Damage(
            f"{name} is mislabelled: it looks like {looks}, but its name says {expected or 'plain text'}. Rename it."
        )


def read_file(file: io.BufferedReader, name: str, layout: Layout) -> Iterator[Document | Loss]:
    """The documents and losses of a file, which must be at its beginning. Raises Damage if it can't be read."""
    expect_format(file, name)
    if name.lower().endswith(".zst"):
        file = io.BufferedReader(ZstdFile(file), BUFFER)
    elif name.lower().endswith(".gz"):
        file = io.BufferedReader(gzip.GzipFile(fileobj=file), BUFFER)
    try:
        if file.peek().startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise Damage(f"{name} is UTF-16; expected UTF-8. Convert it (iconv -f UTF-16 -t UTF-8).")
        yield from FORMATS[ending_of(name)](file, name, layout)
    except (EOFError, OSError, UnicodeDecodeError, zlib.error, zstandard.ZstdError, pa.ArrowException) as error:
        if getattr(error, "errno", None):  # of the disk
            raise
        kind = "truncated" if isinstance(error, EOFError) else "corrupt"
        raise Damage(f"{name} is {kind}: {' '.join(str(error).split())}. Get it again.") from error
