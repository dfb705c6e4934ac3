"""Formats of shards: JSON lines, Parquet and plain text, compressed or not.

A source gives documents in a fixed order, and among them, in their place, what it could not read: file, line and reason.
"""

import codecs
import json
import logging
import re
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO

import orjson
import zstandard

from tasks.corpus.local import suffix_of
from tasks.corpus.parquet_shards import read_parquet
from tasks.corpus.parts import Document
from tasks.corpus.records import Damage, Layout, Loss, Reason, broken_in_half, check, source_of

CHUNK = 1 << 15  # bytes of a file read at once
# compressed bytes unpacked at once: a zst block of 4 bytes can hold 128 KiB, so this is 64 MiB at most
MORSEL = 1 << 11
EXPECTED = {".zst": "zstd", ".gz": "gzip", ".parquet": "Parquet"}  # by suffix; other files are plain text
MAGIC = [  # of formats by their first bytes
    (rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18", "zstd"),
    (rb"\x1f\x8b", "gzip"),
    (rb"PAR1", "Parquet"),
    (rb"BZh", "bzip2"),
    (rb"\xfd7zXZ\0", "xz"),
    (rb"PK\x03\x04", "zip"),
    (rb"\x04\x22\x4d\x18", "lz4"),
    (rb"\xff\xfe|\xfe\xff", "UTF-16"),
]
HEAD = 1 << 10  # bytes of a file by which it is known
ARRAY = re.compile(rb"(\xef\xbb\xbf)?\s*\[\s*(\{|[\r\n])")  # how a file begins that is one JSON array
log = logging.getLogger(__name__)


def expect_format(file: BinaryIO, name: str) -> None:
    """Raise Damage if a file begins as one of another format than its name says."""
    expected, head = EXPECTED.get(suffix_of(name), ""), file.read(8)
    file.seek(0)
    found = next((form for pattern, form in MAGIC if re.match(pattern, head)), "")
    if found == "UTF-16":
        raise utf_16()
    if head and found != expected:
        looks = found or ("plain JSON" if head[:1] in b"{[" else "something else")
        raise Damage("mislabelled", f"it looks like {looks}, but its name says {expected or 'plain text'}", "Rename it")


def utf_16() -> Damage:
    """What a file is that begins with the byte order mark of UTF-16."""
    return Damage("UTF-16", "expected UTF-8", "Convert it (iconv -f UTF-16 -t UTF-8)")


def unpacked(file: BinaryIO, name: str) -> Iterator[bytes]:
    """The bytes of a .zst, .gz or plain file. Raises Damage where it is corrupt or ends within a frame."""
    suffix = suffix_of(name)
    if suffix == ".zst":
        yield from _frames(file, zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj)
    elif suffix == ".gz":
        yield from _frames(file, lambda: zlib.decompressobj(wbits=31), padding=b"\0")
    else:
        while chunk := file.read(CHUNK):
            yield chunk


def _frames(file: BinaryIO, begin: Callable, padding: bytes = b"") -> Iterator[bytes]:
    """The bytes of frames of zstd, or members of gzip. `begin` makes a decompressor of one; `padding` may follow each."""
    # zstandard's stream_reader takes a truncated file for a whole one, so the end of each frame is checked here
    # `given`: bytes unpacked; `checked`: those of whole frames. An empty file has no end of a frame either
    frame, given, checked = begin(), 0, 0
    try:
        while chunk := file.read(CHUNK):
            for start in range(0, len(chunk), MORSEL):
                morsel = chunk[start : start + MORSEL]
                while morsel := morsel if frame else morsel.lstrip(padding):
                    frame = frame or begin()
                    text = frame.decompress(morsel)
                    given += len(text)
                    morsel, frame, checked = (frame.unused_data, None, given) if frame.eof else (b"", frame, checked)
                    if text:
                        yield text
    except (zstandard.ZstdError, zlib.error) as error:
        # zstd finds a broken block before it gives anything of it. A wrong checksum may be due to any place in its
        # frame, and deflate gives other bytes for a while before it notices.
        located = isinstance(error, zstandard.ZstdError) and "checksum" not in str(error)
        raise Damage("corrupt", str(error), intact=given if located else checked) from error
    if frame is not None:
        raise Damage("truncated", "it ends in the middle of the compressed stream", intact=given)


def trusted(file: BinaryIO, name: str, layout: Layout) -> Iterator[bytes]:
    """What `unpacked` gives; where damaged files are kept, it reads twice, and gives nothing that may be altered."""
    damage = None
    if layout.keep and layout.local and suffix_of(name) in (".zst", ".gz"):
        try:
            deque(unpacked(file, name), maxlen=0)
        except Damage as found:
            damage = found
        file.seek(0)
    left = damage.intact if damage else 0
    for chunk in unpacked(file, name):
        if damage and len(chunk) >= left:
            yield chunk[:left]
            raise damage
        left -= len(chunk)
        yield chunk


def of_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The bytes of a file of JSON lines. Raises Damage where it is one JSON array instead."""
    head = b""
    for chunk in chunks:
        if len(head) < HEAD:
            head += chunk[:HEAD]
            if ARRAY.match(head):
                raise Damage("a JSON array", "expected one object a line", "Convert it (jq -c '.[]')")
        yield chunk


def lines(chunks: Iterable[bytes], limit: int) -> Iterator[bytes | None]:
    """The lines of a file; None for one of more than `limit` bytes, which is not held in memory.

    They end with \\n; if the first one ends with \\r alone, with either. A line that Damage cuts off is not given.
    """
    end, held, size, carried = b"", [], 0, b""
    for chunk in chunks:
        if end != b"\n":
            chunk, carried = carried + chunk, b""
            if not end and (found := re.search(rb"\n|\r(?=.)", chunk, re.DOTALL)):
                end = b"\r" if re.match(rb"\r[^\n]", chunk[found.start() :]) else b"\n"
            if end != b"\n" and chunk.endswith(b"\r"):  # a \n may follow
                chunk, carried = chunk[:-1], b"\r"
            if end == b"\r":
                chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        first, *others = chunk.split(b"\n") if end else [chunk]
        size += len(first)
        if size <= limit:
            held.append(first)
        else:
            held.clear()
        for line in others:
            yield b"".join(held) if size <= limit else None
            held, size = [line], len(line)
    if size or carried:
        yield b"".join(held) if size <= limit else None


def numbered(found: Iterator[bytes | None]) -> Iterator[tuple[int, bytes | None]]:
    """Number the lines from 1, and record the line in a Damage that is raised."""
    number = 0
    try:
        for line in found:
            number += 1
            yield number, line
    except Damage as damage:
        damage.line = number + 1
        raise


def parse(line: bytes, field: str) -> tuple[str, str] | str:
    """(source or "", text) of a line of JSON in the Pile's format, or the reason why it is none."""
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        record = parse_leniently(line)
        if isinstance(record, Reason):
            return record
        if isinstance(record, dict) and broken_in_half(record.get(field)):
            return "half a surrogate pair in the text"
    if not isinstance(record, dict):
        return "not a JSON object"
    if field not in record:
        return f"no field '{field}'"
    return check(record[field]) or (source_of(record), record[field])


def parse_leniently(line: bytes) -> object:
    """A line of JSON that may hold NaN, integers of any length and half surrogate pairs; or the Reason why it is none."""
    try:
        return json.loads(line.decode("utf-8-sig"), parse_int=lambda digits: int(digits[:18]))
    except UnicodeDecodeError:
        return Reason("not UTF-8")
    except RecursionError:
        return Reason("nested too deeply")
    except json.JSONDecodeError as error:
        return Reason("more than one value in a line" if error.msg == "Extra data" else "broken JSON")


def read_lines(file: BinaryIO, name: str, layout: Layout) -> Iterator[Document | Loss]:
    """The documents of a file of JSON lines."""
    for number, line in numbered(lines(of_lines(trusted(file, name, layout)), layout.limit)):
        if line is None:
            yield Loss(name, number, layout.too_long)
        elif number == 1 and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise utf_16()
        elif line and not line.isspace():
            found = parse(line, layout.text)
            if isinstance(found, str):
                yield Loss(name, number, found, line[:200].decode(errors="replace"))
            else:
                yield Document(f"{name}:{number}", found[0] or layout.source, found[1])


def read_text(file: BinaryIO, name: str, layout: Layout) -> Iterator[Document | Loss]:
    """A .txt file is one document."""
    data = file.read(layout.limit + 1)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number, sample = data[: error.start].count(b"\n") + 1, repr(data[error.start :][:40])
        yield Loss(name, number, "not UTF-8", sample) if len(data) <= layout.limit else Loss(name, 1, layout.too_long)
        return
    if reason := layout.too_long if len(data) > layout.limit else check(text):
        yield Loss(name, 1, reason)
    else:
        yield Document(f"{name}:1", layout.source, text)


def read_file(file: BinaryIO, name: str, layout: Layout) -> Iterator[Document | Loss]:
    """The documents of any file that cram reads, by its suffix, and what of it is lost. It must be at its beginning."""
    expect_format(file, name)
    reader = {".parquet": read_parquet, ".txt": read_text}.get(suffix_of(name), read_lines)
    yield from reader(file, name, layout)
