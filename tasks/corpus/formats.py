"""Where documents come from: local files, and the documentation of installed packages.

A source gives documents in a fixed order, and among them, in their place, what it could not read: file, line and reason.
"""

import ast
import codecs
import errno
import fnmatch
import functools
import hashlib
import json
import logging
import os
import re
import stat
import sysconfig
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from email import message_from_string
from importlib import metadata
from pathlib import Path
from typing import BinaryIO, NamedTuple

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from model import InputError
from tasks import store
from tasks.corpus.parts import Document
from tasks.reports.markdown import printable

CHUNK = 1 << 15  # bytes of a file read at once
MORSEL = (
    1 << 11
)  # compressed bytes unpacked at once: a zst block of 4 bytes can hold 128 KiB, so this is 64 MiB at most
ROWS = 64  # of a Parquet file read at once, at most
UNPACKED = (
    1 << 28
)  # bytes that the values of these may take: a dictionary holds a value once, however many rows have it
NAMES = 1 << 24  # bytes of the names of sources in a row group, besides LONGEST_NAME a row
PARQUET = {
    "page_checksum_verification": True,
    "buffer_size": 1 << 20,
    "pre_buffer": False,
}  # never all of a file in memory
JSON_LINES = (".jsonl", ".json", ".jsonl.zst", ".json.zst", ".jsonl.gz", ".json.gz")
SUFFIXES = (*JSON_LINES, ".parquet", ".txt")
EXPECTED = {
    ".zst": "zstd",
    ".gz": "gzip",
    ".parquet": "Parquet",
}  # the format of files by their suffix; others are plain
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
# how the stem of a file ends that is one shard of several; those of the hub may have a digest too
SHARD = re.compile(r"[-_. ]?\d+([-_. ]?of[-_. ]?\d+(-[0-9a-f]{16})?)?$")
WILD = re.compile(r"[*?[]")  # what makes a glob of a path
NAMED = 3  # files that a warning names
LONGEST_NAME, OTHER = 256, "other"  # characters of a source's name; what longer ones become
SHORTEST_DOCSTRING = 80  # characters; shorter ones are seldom prose
log = logging.getLogger(__name__)


class Loss(NamedTuple):
    """Something that could not be read."""

    file: str
    line: int
    reason: str
    sample: str = ""


class Layout(NamedTuple):
    """How to read a file."""

    source: str  # of documents that name none
    limit: int  # bytes of the longest line or text that is taken
    text: str = "text"  # the field or column with the text
    local: bool = True  # it may be read more than once, and in any order
    keep: bool = False  # of a damaged file, give what stands before the damage, and nothing that it may have altered

    @property
    def too_long(self) -> str:
        """Why a line or text is lost that is longer."""
        return f"longer than {self.limit / 1e6:g} MB"


class Damage(Exception):
    """A shard that can't be read, or not from `line` on (0: not a file of lines): what is wrong, and what to do.

    `intact`: how many bytes of the unpacked text the damage can't have altered.
    """

    def __init__(self, kind: str, detail: str, cure: str = "Get it again", intact: int = 0) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind, self.cure, self.line, self.intact = kind, cure, 0, intact


def suffix_of(name: str) -> str:
    """How a file's name ends, in lower case: the last suffix alone."""
    return Path(name).suffix.lower()


def is_read(path: Path) -> bool:
    """Does its name end as those of files that cram reads, in capitals or not?"""
    return path.name.lower().endswith(SUFFIXES)


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
    frame, given, checked = (
        begin(),
        0,
        0,
    )  # an empty file has no end of a frame either; bytes unpacked, and of whole frames
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
    """Count from 1, and tell Damage where it is."""
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


class Reason(str):
    """Why a line is none of JSON."""


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


def source_of(record: dict) -> str:
    """meta.pile_set_name of a record, or else its source, or else nothing."""
    meta = record.get("meta")
    for name in (meta.get("pile_set_name") if isinstance(meta, dict) else None, record.get("source")):
        if isinstance(name, str) and name:
            return source_name(name)
    return ""


def source_name(name: str) -> str:
    """A source's name as it is kept: printable; OTHER if it is longer than LONGEST_NAME, since all stages count by it."""
    return printable(name.encode(errors="replace").decode()) if len(name) <= LONGEST_NAME else OTHER


def check(text: object) -> str | None:
    """Why this is no text of a document, or None."""
    if not isinstance(text, str):
        return "not UTF-8" if isinstance(text, bytes) else f"text is not a string but {type(text).__name__}"
    return "empty text" if not text or text.isspace() else None


def broken_in_half(text: object) -> bool:
    """Does it hold half a surrogate pair, which UTF-8 can't?"""
    return isinstance(text, str) and re.search("[\ud800-\udfff]", text) is not None


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


def read_parquet(file: BinaryIO, name: str, layout: Layout) -> Iterator[Document | Loss]:
    """The documents of a Parquet file: a column of texts, and source or meta.pile_set_name where there is one."""
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
    """The columns to read: the text, and those that name a document's source. Raises InputError unless there is one text."""
    if text not in schema.names:
        raise InputError(
            f"{name} has the columns {', '.join(map(printable, schema.names))}; expected one named {text}. Rename "
            "yours."
        )
    if twice := [column for column in (text, "source", "meta") if schema.names.count(column) > 1]:
        raise InputError(
            f"{name} has {schema.names.count(twice[0])} columns named {twice[0]}; expected one. Drop or rename others."
        )
    meta = schema.field("meta").type if "meta" in schema.names else None
    of_meta = meta is not None and pa.types.is_struct(meta) and meta.get_field_index("pile_set_name") >= 0
    return [text, *(["source"] if "source" in schema.names else []), *(["meta.pile_set_name"] if of_meta else [])]


def rows_at_once(file: BinaryIO, about: pq.FileMetaData, name: str, columns: list[str]) -> int:
    """How many rows take little memory. Raises InputError where the names of sources would take much."""
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
                    f"{group.num_rows:,} rows; expected names of sources, of at most {LONGEST_NAME} characters. Drop or "
                    "rename the column."
                )
            largest = max(largest, held)
    return max(1, min(ROWS, UNPACKED // largest))


def dictionary_bytes(file: BinaryIO, chunk: pq.ColumnChunkMetaData) -> int:
    """The size of a dictionary once it is unpacked, which only the header of its page says (Thrift's compact protocol)."""
    file.seek(chunk.dictionary_page_offset or 0)
    head = file.read(16)
    numbers, number, shift = [], 0, 0
    for byte in head[1:]:  # a field's type, then its value: the kind of page, its size unpacked; seven bits a byte
        number, shift = number | (byte & 0x7F) << shift, shift + 7
        if byte < 0x80:
            numbers, number, shift = [*numbers, number >> 1], 0, 0
    return numbers[2] if len(numbers) > 2 else 0


def texts(column: pa.Array) -> Iterator[object]:
    """The values of a column of texts; bytes where one is not UTF-8."""
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


def exceeds(text: str, limit: int) -> bool:
    """Is it more than so many bytes of UTF-8?"""
    return len(text) > limit or (4 * len(text) > limit and len(text.encode()) > limit)


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


def shard_family(name: str) -> str:
    """A file's name without its suffix and the number of its shard, `train` for `train-00003-of-00010.jsonl.zst`."""
    whole = Path(name).name
    stem = next((whole[: -len(suffix)] for suffix in SUFFIXES if whole.lower().endswith(suffix)), whole)
    return SHARD.sub("", stem) or stem or whole


def status(path: Path) -> os.stat_result | None:
    """What the system says of a path or of what it leads to; None of a broken link. Raises InputError where it may not."""
    try:
        return path.stat()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return None
        raise unreadable(path, error) from error


def is_folder(path: Path) -> bool:
    """Is it a folder, or a link to one?"""
    about = status(path)
    return about is not None and stat.S_ISDIR(about.st_mode)


def is_there(path: str) -> bool:
    """Is there anything of this name, be it a broken link?"""
    try:
        os.lstat(path)
    except PermissionError as error:
        raise unreadable(Path(path), error) from error
    except (OSError, ValueError):
        return False
    return True


def listed(folder: Path) -> list[str]:
    """The names in a folder, in order."""
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise unreadable(folder, error) from error


def walk(top: Path, hidden: bool = True) -> Iterator[tuple[Path, list[Path]]]:
    """A folder and all below it, each once and with what it holds but folders.

    Links are followed after all that can be reached without them, so that they change no name and lead in no circle.
    """
    seen, folders, links = set(), [top], []
    while folders or links:
        folder = folders.pop() if folders else links.pop()
        if (real := os.path.realpath(folder)) in seen:
            continue
        seen.add(real)
        files = []
        for path in (folder / name for name in listed(folder)):
            if not is_folder(path):
                files.append(path)
            elif hidden or not path.name.startswith("."):
                (links if path.is_symlink() else folders).append(path)
        yield folder, files


def expand(pattern: str) -> list[str]:
    """What a glob matches, in order.

    As Python's glob, which is silent about folders that it may not read, and goes in circles with links.
    """
    found = ["/" if pattern.startswith("/") else ""]
    for part in pattern.lstrip("/").split("/"):
        if not WILD.search(part):
            found = [path for folder in found if is_there(path := os.path.join(folder, part))]
            continue
        folders = [folder for folder in found if is_folder(Path(folder))]
        if part == "**":
            found = [str(below) for folder in folders for below, _ in walk(Path(folder), hidden=False)]
        else:
            found = [
                os.path.join(folder, name)
                for folder in folders
                for name in fnmatch.filter(listed(Path(folder)), part)
                if part.startswith(".") or not name.startswith(".")
            ]
    return sorted(set(found))


def expect_file(path: Path) -> None:
    """Raise InputError for a broken link, a pipe or a device."""
    about = status(path)
    if about is None:
        raise InputError(
            f"{printable(str(path))} is a broken link, to {printable(os.readlink(path))}. Expected a file; correct the link or delete it."
        )
    if not stat.S_ISREG(about.st_mode):
        raise InputError(
            f"{printable(str(path))} is not a regular file (a pipe, socket or device?). Save its output to a file "
            "and give that file."
        )


@functools.cache
def warn_once(told: str) -> None:
    """Log a warning that was not given yet: the files are looked for when a run is planned, and when it reads them."""
    log.warning(told)


def local_files(patterns: Iterable[str]) -> dict[str, Path]:
    """The files that paths, globs and directories mean, by a name that doesn't depend on where they lie.

    What directories hold besides is warned of. Raises InputError for all that is named or lies in them and can't be read.
    """
    found: list[Path] = []
    ignored: set[Path] = set()
    for pattern in patterns:
        named = os.path.expanduser(pattern)  # a file may have brackets in its name
        matches = [Path(m) for m in ([named] if is_there(named) else expand(named))]
        folders = [m for m in matches if is_folder(m)]
        inner = [p for m in folders for p in sorted(p for _, files in walk(m) for p in files)]
        files = [m for m in matches if m not in folders] + [p for p in inner if is_read(p)]
        if not files:
            what = "matches nothing" if not matches else "holds no file that cram reads"
            raise InputError(
                f"{pattern!r} {what}. Expected files that end in {', '.join(SUFFIXES)}. Check download.files."
            )
        for path in files:
            expect_file(path)
        found += files
        ignored.update(p for p in inner if not is_read(p))
    if wrong := [p for p in found if not is_read(p)]:
        raise InputError(f"{wrong[0]} is of a kind that cram doesn't read. Expected {', '.join(SUFFIXES)}.")
    if ignored:
        some = ", ".join(printable(str(p)) for p in sorted(ignored)[:NAMED]) + ", …" * (len(ignored) > NAMED)
        warn_once(
            "Files in the directories of download.files that are not read, because of how their names end: "
            f"{len(ignored):,} ({some})."
        )
    real = functools.cache(os.path.realpath)
    once: dict[tuple[str, str], Path] = {}  # by folder and name: a link to a folder doesn't make two of its files
    for path in found:  # under its own name, not what links to files point to: the hub's cache names that by digest
        path = Path(os.path.abspath(path))
        once.setdefault((real(path.parent), path.name), path)
    found = list(once.values())
    base = Path(os.path.commonpath([p.parent for p in found]))
    named = {printable(str(p.relative_to(base))): p for p in found}
    if len(named) < len(set(found)):
        raise InputError(
            "Two of the files have names that differ only in characters that can't be printed. Rename one."
        )
    return named


@functools.cache
def _digest(path: Path, *_: int) -> str:
    return store.digest(path)


def unreadable(path: Path, error: OSError) -> InputError:
    """What to say of a file or folder that the system doesn't let us read."""
    return InputError(
        f"{printable(str(error.filename or path))} can't be read: {os.strerror(error.errno)}. Expected a file that you may read, in folders that you may "
        "enter; change their rights, or name another."
    )


def file_digest(path: Path) -> str:
    """The SHA-256 of a file; computed again only when its size, time or inode changes.

    Raises InputError where it can't be read.
    """
    try:
        about = path.stat()
        return _digest(path, about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino)
    except OSError as error:
        raise unreadable(path, error) from error


@functools.cache
def installed() -> dict[str, metadata.Distribution]:
    """The packages of this environment by normalised name, but for cram itself."""
    named = {
        re.sub(r"[-_.]+", "-", d.metadata["Name"]).lower(): d for d in metadata.distributions() if d.metadata["Name"]
    }
    return {name: named[name] for name in sorted(named) if name != "cram"}


def packages_digest() -> str:
    """What stands for the content of `python-docs` in a key: every package and its version, and Python's."""
    about = [f"{name}=={d.version}" for name, d in installed().items()] + [sysconfig.get_python_version()]
    return hashlib.sha256("\n".join(about).encode()).hexdigest()


def package_documents(name: str) -> Iterator[Document | Loss]:
    """Description, licences, text files and docstrings of one installed package."""
    distribution = installed()[name]
    # parsed here, since `distribution.metadata` moves the description where importlib_metadata has been imported
    about = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    if (description := str(message_from_string(about).get_payload() or "")).strip():
        yield Document(f"{name}/METADATA", "readmes", description)
    for file in sorted(distribution.files or [], key=str):
        label, path = f"{name}/{file}", Path(distribution.locate_file(file))
        if file.suffix not in (".py", ".md", ".rst", ".txt", "") or "tests" in file.parts or not path.is_file():
            continue
        if file.suffix == "" and not re.match("(LICEN[CS]E|COPYING|NOTICE|AUTHORS)", file.name, re.IGNORECASE):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            yield Loss(label, 1, "not UTF-8")
            continue
        if file.suffix == ".py":
            yield from docstrings(text, label)
        elif text.strip() and file.name not in ("RECORD", "top_level.txt", "entry_points.txt", "SOURCES.txt"):
            kind = "licences" if re.search("LICEN|COPYING|NOTICE", str(file), re.IGNORECASE) else "texts"
            yield Document(label, kind, text)


def docstrings(code: str, label: str) -> Iterator[Document | Loss]:
    """The docstrings of a module, its classes and functions, each a document."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's code
            tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError):
        yield Loss(label, 1, "not Python of this version")
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            with suppress(ValueError):
                text = ast.get_docstring(node)
                if text and len(text) >= SHORTEST_DOCSTRING:
                    whole = text.encode(errors="replace").decode()  # "\ud800" in code is half a character
                    yield Document(f"{label}:{getattr(node, 'lineno', 1)}", "docstrings", whole)
