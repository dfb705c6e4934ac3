"""Bytes of any file: compressions, archives and encodings of text are undone while the file is read."""

import bz2
import codecs
import gzip
import io
import lzma
import re
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from posixpath import normpath
from shutil import copyfileobj
from typing import Annotated, BinaryIO, NamedTuple, cast

import pyarrow as pa
import zstandard
from pydantic import AfterValidator

from model.errors import explain_errors
from model.wording import printable
from tasks.corpus import kinds
from tasks.corpus.kinds import Damage
from tasks.store.errors import written_in

BUFFER = 1 << 17  # bytes of a file in memory
# Compressed bytes unpacked at once: a zst block of 4 bytes can hold 128 KiB, so this is 64 MiB at most
MORSEL = 1 << 11
ENCRYPTED = 1  # a flag of a file in a zip
DAMAGE = (
    EOFError,
    OSError,
    zlib.error,
    lzma.LZMAError,
    zstandard.ZstdError,
    zipfile.BadZipFile,
    tarfile.TarError,
    pa.ArrowException,
)


def known_encoding(name: str) -> str:
    """The name of an encoding of text, or "" for none. Raises ValueError if Python has none of this name."""
    try:
        "".encode(name or "utf-8")
    except LookupError as error:
        raise ValueError(f"{error}: expected the name of an encoding, for example windows-1252") from error
    return name


Encoding = Annotated[str, AfterValidator(known_encoding)]


class Stream(io.BufferedReader):
    """A file that is unpacked as it is read, once and in order."""


def open_raw(path: Path) -> io.BufferedReader:
    """A local file, as its bytes are."""
    return cast(io.BufferedReader, path.open("rb", BUFFER))


def reading(name: str) -> AbstractContextManager[None]:
    """Raise Damage with the name of a file for what is raised while it is read, unless the disk is to blame."""

    def explain(error: BaseException) -> Damage | None:
        if isinstance(error, UnicodeError):
            return Damage(
                f"{name} can't be read as text: {error}. Set encoding (download.encoding, or that of the task) to the "
                "one that the file has, for example windows-1252 or utf-16-le."
            )
        if not isinstance(error, DAMAGE) or getattr(error, "errno", None):
            return None
        said = " ".join(str(error).split())
        is_cut = isinstance(error, EOFError) or re.search("(?i)truncated|unexpected end|end-of-stream", said)
        return Damage(f"{name} is {'truncated' if is_cut else 'corrupt'}: {said}. Get it again.")

    return explain_errors(explain)


class Chunks(io.RawIOBase):
    """A file of the chunks of bytes that an iterator yields."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self.chunks = chunks
        self.left = bytearray()

    def readable(self) -> bool:
        """It can be read."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # the base class takes any buffer
        """Fill the buffer, or read what is left."""
        while len(self.left) < len(buffer):
            chunk = next(self.chunks, None)
            if chunk is None:
                break
            self.left += chunk
        size = min(len(buffer), len(self.left))
        buffer[:size] = self.left[:size]
        del self.left[:size]
        return size


def frames(file: BinaryIO, begin: Callable, padding: bytes = b"") -> Iterator[bytes]:
    """The content of a file of any number of compressed frames. Raises EOFError if it ends within a frame.

    `begin`: makes a decompressor of a frame; `padding`: the byte that may fill the space after a frame.

    The libraries' own readers take a truncated zst for a whole one, and drop what follows a damaged header of bz2 or
    xz; that of Arrow refuses zst frames with a long window.
    """
    frame = begin()
    packed = file.read(MORSEL)
    while packed:
        if frame.eof:
            packed = packed.lstrip(padding)
            if not packed:
                packed = file.read(MORSEL)
                continue
            frame = begin()
        yield frame.decompress(packed)
        packed = frame.unused_data or file.read(MORSEL)
    if not frame.eof:
        raise EOFError("it ends in the middle of the compressed stream")


def unpack_zstd(file: BinaryIO) -> io.RawIOBase:
    """The content of a .zst file, with a window of up to 2 GiB."""
    return Chunks(frames(file, zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj))


def unpack_gzip(file: BinaryIO) -> io.RawIOBase:
    """The content of a .gz file."""
    return gzip.GzipFile(fileobj=file)  # type: ignore[return-value]  # in the stubs it isn't the RawIOBase that it is


def unpack_bzip2(file: BinaryIO) -> io.RawIOBase:
    """The content of a .bz2 file."""
    return Chunks(frames(file, bz2.BZ2Decompressor, padding=b"\0"))


def unpack_xz(file: BinaryIO) -> io.RawIOBase:
    """The content of a .xz file."""
    return Chunks(frames(file, lzma.LZMADecompressor, padding=b"\0"))


def unpack_lz4(file: BinaryIO) -> io.RawIOBase:
    """The content of a .lz4 file."""
    return pa.CompressedInputStream(pa.PythonFile(file, "r"), "lz4")


UNPACKERS: dict[str, Callable[[BinaryIO], io.RawIOBase]] = {
    "zstd": unpack_zstd,
    "gzip": unpack_gzip,
    "bzip2": unpack_bzip2,
    "xz": unpack_xz,
    "lz4": unpack_lz4,
}


def unpack(file: io.BufferedReader, name: str) -> io.BufferedReader:
    """The content of a file in the compressions that its name shows, or in one that an unusual name doesn't show.

    Raises Damage if the compression is another one, and InputError if cram doesn't read this kind of file.
    """
    kinds.refuse_foreign(file.peek(), name)
    for form in kinds.layers(name).compressions:
        kinds.expect(file.peek(), name, form)
        file = Stream(UNPACKERS[form](file), BUFFER)
    if kinds.ending(name) in kinds.FORMATS:
        return file
    hidden = kinds.sniff(file.peek())
    return Stream(UNPACKERS[hidden](file), BUFFER) if hidden in UNPACKERS else file


class Content(NamedTuple):
    """The format of a file, one of FORMATS, and its unpacked content; in UTF-8 if it is text."""

    form: str
    file: io.BufferedReader


def content_of(file: io.BufferedReader, name: str, encoding: str, extract: str = "") -> Content:
    """What a file holds. Raises InputError if it can't be read."""
    file = unpack(file, name)
    form = kinds.form_of(file.peek(), name, extract)
    kinds.expect(file.peek(), name, form)
    if form not in kinds.NO_TEXT:
        file = as_utf8(file, name, encoding)
    return Content(form, file)


def head_of(path: Path) -> bytes:
    """The first bytes of the content of a file. Raises InputError if it is damaged or foreign."""
    name = printable(str(path))
    with reading(name), open_raw(path) as file:
        head = unpack(file, name).peek()
    kinds.refuse_foreign(head, name)
    return head


def on_disk(file: io.BufferedReader) -> BinaryIO:
    """The file, or a copy in TMPDIR of one that can be read only once."""
    if not isinstance(file, Stream):
        return file
    copy = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as its reader
    with written_in(tempfile.gettempdir()):
        copyfileobj(file, copy, 1 << 20)
        copy.seek(0)
    return copy


class Member(tarfile.TarInfo):
    """A file in a tar. Raises EOFError where tarfile would take an archive that ends between two for a whole one."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "Member":
        """From the block that describes it."""
        if not buf:
            raise EOFError("it ends without the blocks that end an archive")
        return super().frombuf(buf, encoding, errors)


def members_of(file: io.BufferedReader, form: str, name: str) -> Iterator[tuple[str, io.BufferedReader]]:
    """The regular files of a zip or tar with their paths in it, a.txt for ./a.txt; each must be read before the next.

    `name`: that of the archive, for errors. Raises EOFError, and errors of zipfile and tarfile, if the archive is
    damaged; Damage if it is encrypted.
    """
    return members_of_zip(file, name) if form == "zip" else members_of_tar(file)


def members_of_zip(file: io.BufferedReader, name: str) -> Iterator[tuple[str, io.BufferedReader]]:
    """`members_of` a zip."""
    with zipfile.ZipFile(on_disk(file)) as archive:
        for member in archive.infolist():
            if member.is_dir():
                continue
            try:
                yield normpath(member.filename), Stream(archive.open(member), BUFFER)  # type: ignore[arg-type]
            except (RuntimeError, NotImplementedError) as error:
                inner = printable(member.filename)
                what = f"can't be unpacked: {inner} in it is packed in a way that cram doesn't read"
                if member.flag_bits & ENCRYPTED:
                    what = f"is encrypted: {inner} in it needs a password"
                raise Damage(f"{name} {what}. Unpack it, and pass the folder instead.") from error


def members_of_tar(file: io.BufferedReader) -> Iterator[tuple[str, io.BufferedReader]]:
    """`members_of` a tar, which is read in order."""
    with tarfile.open(fileobj=file, mode="r|", tarinfo=Member) as archive:
        for member in archive:
            archive.members.clear()  # type: ignore[attr-defined]  # or all of them are held
            content = archive.extractfile(member) if member.isfile() else None
            if content:
                yield normpath(member.name), Stream(content, BUFFER)  # type: ignore[arg-type]
    while file.read(BUFFER):  # to the checksum of its compression
        pass


def as_utf8(file: io.BufferedReader, name: str, encoding: str) -> io.BufferedReader:
    """A text file as UTF-8 without a byte order mark, from `encoding` or from what a mark says.

    A file that begins as UTF-8, and not as plain ASCII, is UTF-8. Raises Damage for UTF-16 without a mark if no
    encoding is set.
    """
    head = file.peek()
    mark = next((mark for mark in kinds.MARKS if head.startswith(mark)), b"")
    if mark:
        encoding = kinds.MARKS[mark]
        file.read(len(mark))
    elif encoding and not head.isascii() and begins_as_utf8(head):
        encoding = "utf-8"
    elif not encoding:
        unmarked = kinds.unmarked_utf_16(head)
        if unmarked:
            raise Damage(
                f"{name} has a NUL byte beside most of its spaces or letters, as UTF-16 has; expected UTF-8. Set "
                f"download.encoding to {unmarked}, or convert it (iconv -t UTF-8)."
            )
    if encoding in ("", "utf-8"):
        return file
    chunks = codecs.iterdecode(iter(lambda: file.read(BUFFER), b""), encoding)
    return Stream(Chunks(text.encode() for text in chunks), BUFFER)


def begins_as_utf8(head: bytes) -> bool:
    """Whether bytes are UTF-8, of which the last character may be cut."""
    with suppress(UnicodeDecodeError):
        codecs.utf_8_decode(head, "strict", False)
        return True
    return False
