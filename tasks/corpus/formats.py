"""Formats of shards: JSON lines, Parquet and plain text, compressed or not.

A file gives its documents in order, and losses in the places of what could not be read.
"""

import codecs
import json
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
from tasks.corpus.records import Damage, Layout, Loss, Unreadable, check, has_half_pair, source_of

CHUNK = 1 << 15  # bytes of a file read at once
# Compressed bytes unpacked at once: a zst block of 4 bytes can hold 128 KiB, so this is 64 MiB at most
MORSEL = 1 << 11
EXPECTED = {".zst": "zstd", ".gz": "gzip", ".parquet": "Parquet"}  # by suffix; other files are plain text
MAGIC = [  # the first bytes of formats
    (rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18", "zstd"),
    (rb"\x1f\x8b", "gzip"),
    (rb"PAR1", "Parquet"),
    (rb"BZh", "bzip2"),
    (rb"\xfd7zXZ\0", "xz"),
    (rb"PK\x03\x04", "zip"),
    (rb"\x04\x22\x4d\x18", "lz4"),
]
HEAD = 1 << 10  # first bytes of a file that show whether it is a JSON array
ARRAY = re.compile(rb"(\xef\xbb\xbf)?\s*\[\s*(\{|[\r\n])")  # the beginning of a file that is one JSON array


def expect_format(file: BinaryIO, name: str) -> None:
    """Raise Damage if a file does not begin as its name says."""
    expected, head = EXPECTED.get(suffix_of(name), ""), file.read(8)
    file.seek(0)
    _refuse_utf_16(head)
    actual = next((form for pattern, form in MAGIC if re.match(pattern, head)), "")
    if head and actual != expected:
        looks = actual or ("plain JSON" if head[:1] in b"{[" else "something else")
        raise Damage("mislabelled", f"it looks like {looks}, but its name says {expected or 'plain text'}", "Rename it")


def _refuse_utf_16(head: bytes) -> None:
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise Damage("UTF-16", "expected UTF-8", "Convert it (iconv -f UTF-16 -t UTF-8)")


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
    """The bytes of frames of zstd or members of gzip. `begin` makes a decompressor of one; `padding` may follow."""
    # zstandard's stream_reader accepts a truncated file, so the end of each frame is checked here.
    # `given` counts unpacked bytes, `checked` those of complete frames. An empty file lacks the end of its first frame.
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
        # zstd detects a broken block before it gives any of it. A wrong checksum may be due to any place in the frame,
        # and deflate gives wrong bytes for a while before it fails.
        located = isinstance(error, zstandard.ZstdError) and "checksum" not in str(error)
        raise Damage("corrupt", str(error), intact=given if located else checked) from error
    if frame is not None:
        raise Damage("truncated", "it ends in the middle of the compressed stream", intact=given)


def trusted(file: BinaryIO, name: str, layout: Layout) -> Iterator[bytes]:
    """As `unpacked`; but if damaged files are kept, reads twice and ends before anything that may be altered."""
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


def expect_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes. Raises Damage if they are one JSON array or UTF-16."""
    head = b""
    for chunk in chunks:
        if len(head) < HEAD:
            head += chunk[:HEAD]
            _refuse_utf_16(head)
            if ARRAY.match(head):
                raise Damage("a JSON array", "expected one object per line", "Convert it (jq -c '.[]')")
        yield chunk


def lines(chunks: Iterable[bytes], limit: int) -> Iterator[bytes | None]:
    """The lines of a file; None for one of more than `limit` bytes, which is not held in memory.

    Lines end with \\n; if the first one ends with \\r alone, with either. A line that Damage cuts off is not given.
    """
    end, held, size, carried = b"", [], 0, b""
    for chunk in chunks:
        if end != b"\n":
            chunk, carried = carried + chunk, b""
            if not end and (first_end := re.search(rb"\n|\r(?=.)", chunk, re.DOTALL)):
                end = b"\r" if re.match(rb"\r[^\n]", chunk[first_end.start() :]) else b"\n"
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


def parse(line: bytes, field: str) -> tuple[str, str]:
    """(source or "", text) of a line of JSON in the Pile's format. Raises Unreadable if it has no text."""
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        record = parse_leniently(line)
        if isinstance(record, dict) and has_half_pair(record.get(field)):
            raise Unreadable("half a surrogate pair in the text") from None
    if not isinstance(record, dict):
        raise Unreadable("not a JSON object")
    if field not in record:
        raise Unreadable(f"no field '{field}'")
    if reason := check(record[field]):
        raise Unreadable(reason)
    return source_of(record), record[field]


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


def read_lines(file: BinaryIO, name: str, layout: Layout) -> Iterator[Document | Loss]:
    """The documents of a file of JSON lines."""
    number = 0
    try:
        for number, line in enumerate(lines(expect_lines(trusted(file, name, layout)), layout.limit), 1):
            if line is None:
                yield Loss(name, number, layout.too_long)
            elif line and not line.isspace():
                try:
                    source, text = parse(line, layout.text)
                except Unreadable as reason:
                    yield Loss(name, number, str(reason), line[:200].decode(errors="replace"))
                else:
                    yield Document(f"{name}:{number}", source or layout.source, text)
    except Damage as damage:
        damage.line = number + 1
        raise


def read_text(file: BinaryIO, name: str, layout: Layout) -> Iterator[Document | Loss]:
    """A .txt file is one document."""
    data = file.read(layout.limit + 1)
    if len(data) > layout.limit:
        yield Loss(name, 1, layout.too_long)
        return
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line, sample = data[: error.start].count(b"\n") + 1, repr(data[error.start :][:40])
        yield Loss(name, line, "not UTF-8", sample)
        return
    reason = check(text)
    yield Loss(name, 1, reason) if reason else Document(f"{name}:1", layout.source, text)


def read_file(file: BinaryIO, name: str, layout: Layout) -> Iterator[Document | Loss]:
    """The documents and losses of any file that cram reads, by its suffix. The file must be at its beginning."""
    expect_format(file, name)
    reader = {".parquet": read_parquet, ".txt": read_text}.get(suffix_of(name), read_lines)
    yield from reader(file, name, layout)
