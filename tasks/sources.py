"""Where documents come from: local files, data sets on the Hugging Face hub, the documentation of installed packages.

A source yields documents in a fixed order and tells `losses` what it could not read: file, line and reason.
"""

import ast
import functools
import glob
import gzip
import hashlib
import io
import os
import re
import sysconfig
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import BinaryIO, NamedTuple

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from model import InputError
from tasks import stage

CHUNK = 1 << 15  # bytes of a file read at once; at a corrupt place the chunk around it is lost
JSON_LINES = (".jsonl", ".json", ".jsonl.zst", ".json.zst", ".jsonl.gz", ".json.gz")
SUFFIXES = (*JSON_LINES, ".parquet", ".txt")
SHORTEST_DOCSTRING = 80  # characters; shorter ones are seldom prose
UNTOLD = "unknown"  # the source of a document that names none


class Document(NamedTuple):
    """One text of the corpus: where it was read, which part of the corpus it belongs to, the text."""

    id: str
    source: str
    text: str


class Loss(NamedTuple):
    """Something that could not be read."""

    file: str
    line: int
    reason: str
    sample: str = ""


class Damage(Exception):
    """A shard ends early or does not decompress: all from `line` on is lost (0: not a file of lines)."""

    line = 0


Losses = Callable[[Loss], None]


@dataclass(frozen=True)
class HubSource:
    """A data set on the hub, at a fixed revision; `pattern` matches its shards."""

    repository: str
    revision: str
    pattern: str


# The Pile without its copyrighted parts is what is left of the Pile on the hub; it has the original layout.
HUB = {
    "pile": HubSource(
        "monology/pile-uncopyrighted", "3be90335b66f24456a5d6659d9c8d208c0357119", r"train/\d+\.jsonl\.zst"
    ),
    "c4": HubSource("allenai/c4", "1588ec454efa1a09f29cd18ddd04fe05fc8653a2", r"en/c4-train\..*\.json\.gz"),
}


def decompressed(file: BinaryIO, suffix: str) -> Iterator[bytes]:
    """The bytes of a .zst, .gz or plain file. Raises Damage where the file is corrupt or ends within a frame."""
    try:
        if suffix == ".zst":
            yield from _zstd_frames(file)
        elif suffix == ".gz":
            with gzip.GzipFile(fileobj=file) as plain:
                while chunk := plain.read1(CHUNK):  # `read` loses what it has gathered when the stream breaks off
                    yield chunk
            if file.tell() == 0:  # an empty file is no stream of no bytes
                raise EOFError
        else:
            while chunk := file.read(CHUNK):
                yield chunk
    except EOFError as error:
        raise Damage("truncated: it ends in the middle of the compressed stream") from error
    except (zstandard.ZstdError, gzip.BadGzipFile, zlib.error) as error:
        raise Damage(f"corrupt: {error}") from error


def _zstd_frames(file: BinaryIO) -> Iterator[bytes]:
    # zstandard's stream_reader takes a truncated file for a whole one, so the end of each frame is checked here
    begin = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj
    frame = begin()  # an empty file has no end of a frame either
    while chunk := file.read(CHUNK):
        while chunk:
            frame = frame or begin()
            if text := frame.decompress(chunk):
                yield text
            chunk, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame is not None:
        raise EOFError


def lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Split at newlines. A line that Damage cuts off is not yielded."""
    held: list[bytes] = []
    for chunk in chunks:
        first, *others = chunk.split(b"\n")
        held.append(first)
        if others:
            yield b"".join(held)
            yield from others[:-1]
            held = [others[-1]]
    if last := b"".join(held):
        yield last


def numbered(found: Iterator[bytes]) -> Iterator[tuple[int, bytes]]:
    """Count from 1, and tell Damage where it is."""
    number = 0
    try:
        for line in found:
            number += 1
            yield number, line
    except Damage as damage:
        damage.line = number + 1
        raise


def parse(line: bytes) -> tuple[str, str] | str:
    """(source, text) of a line of JSON in the Pile's format, or the reason why it is none."""
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        return "broken JSON"
    if not isinstance(record, dict):
        return "not a JSON object"
    if "text" not in record:
        return "no field 'text'"
    return check(record["text"]) or (source_of(record), record["text"])


def source_of(record: dict) -> str:
    """meta.pile_set_name of a record, or else its source, or else UNTOLD."""
    meta = record.get("meta")
    named = [meta.get("pile_set_name") if isinstance(meta, dict) else None, record.get("source")]
    return next((name for name in named if isinstance(name, str) and name), UNTOLD)


def check(text: object) -> str | None:
    """Why this is no text of a document, or None."""
    if not isinstance(text, str):
        return f"text is not a string but {type(text).__name__}"
    return None if text.strip() else "empty text"


def read_lines(file: BinaryIO, name: str, default: str, losses: Losses) -> Iterator[Document]:
    """The documents of a file of JSON lines; `default` is the source of those that name none."""
    suffix = Path(name).suffix
    for number, line in numbered(lines(decompressed(file, suffix))):
        line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line  # a byte order mark
        if not line.strip():
            continue
        found = parse(line)
        if isinstance(found, str):
            losses(Loss(name, number, found, line[:200].decode(errors="replace")))
        else:
            source, text = found
            yield Document(f"{name}:{number}", default if source == UNTOLD else source, text)


def read_parquet(file: BinaryIO | Path, name: str, default: str, losses: Losses) -> Iterator[Document]:
    """The documents of a Parquet file: column text, and source or meta.pile_set_name where there is one."""
    try:
        table = pq.ParquetFile(file, page_checksum_verification=True)
        columns = table.schema_arrow.names
        if "text" not in columns:
            raise InputError(f"{name} has the columns {', '.join(columns)}; expected one named text. Rename yours.")
        used = [c for c in ("text", "source", "meta") if c in columns]
        row = 0
        for batch in table.iter_batches(batch_size=256, columns=used):
            for record in batch.to_pylist():
                row, source = row + 1, source_of(record)
                if reason := check(record["text"]):
                    losses(Loss(name, row, reason, repr(record["text"])[:200]))
                else:
                    yield Document(f"{name}:{row}", default if source == UNTOLD else source, record["text"])
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise Damage(f"corrupt: {error}") from error


def read_text(file: BinaryIO, name: str, default: str, losses: Losses) -> Iterator[Document]:
    """A .txt file is one document."""
    data = file.read()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        losses(Loss(name, data[: error.start].count(b"\n") + 1, "not UTF-8", repr(data[error.start :][:40])))
        return
    if reason := check(text):
        losses(Loss(name, 1, reason))
    else:
        yield Document(f"{name}:1", default, text)


def read_file(file: BinaryIO, name: str, losses: Losses) -> Iterator[Document]:
    """The documents of any file that cram reads, by its suffix."""
    reader = {".parquet": read_parquet, ".txt": read_text}.get(Path(name).suffix, read_lines)
    return reader(file, name, shard_family(name), losses)


def shard_family(name: str) -> str:
    """A file's name without its numbers and suffixes, `train` for `train-00003-of-00010.jsonl.zst`."""
    stem = Path(name).name.split(".")[0]
    return re.sub(r"([-_.]?\d+)?([-_.]?of[-_.]?\d+)?$", "", stem) or stem


def local_files(patterns: Iterable[str]) -> dict[str, Path]:
    """The files that paths, globs and directories mean, by a name that doesn't depend on where they lie."""
    found: list[Path] = []
    for pattern in patterns:
        named = os.path.expanduser(pattern)  # a file may have brackets in its name
        matches = [Path(m) for m in ([named] if os.path.exists(named) else sorted(glob.glob(named, recursive=True)))]
        inner = [p for m in matches if m.is_dir() for p in sorted(m.rglob("*")) if p.name.endswith(SUFFIXES)]
        files = [m for m in matches if m.is_file()] + [p for p in inner if p.is_file()]
        if not files:
            what = "matches nothing" if not matches else "holds no file that cram reads"
            raise InputError(
                f"{pattern!r} {what}. Expected files that end in {', '.join(SUFFIXES)}. Check download.files."
            )
        found += files
    if wrong := [p for p in found if not p.name.endswith(SUFFIXES)]:
        raise InputError(f"{wrong[0]} is of a kind that cram doesn't read. Expected {', '.join(SUFFIXES)}.")
    found = [Path(os.path.abspath(p)) for p in found]  # not what links point to: the hub's cache names that by digest
    base = Path(os.path.commonpath([p.parent for p in found]))
    return {str(p.relative_to(base)): p for p in found}


@functools.lru_cache(maxsize=4096)
def _digest(path: Path, *_: int) -> str:
    return stage.digest(path)


def file_digest(path: Path) -> str:
    """The SHA-256 of a file; computed again only when its size, time or inode changes."""
    about = path.stat()
    return _digest(path, about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino)


def hub_error(repository: str, error: Exception) -> InputError:
    """The sentence for a hub that can't be reached or doesn't have what is asked for."""
    return InputError(
        f"{repository} could not be read from the Hugging Face hub: {type(error).__name__}: {(str(error) or '.').splitlines()[0]} "
        "Check the network, HF_ENDPOINT and HF_TOKEN; or use files that lie here (see the README, 'Your own text')."
    )


def hub_files(source: HubSource) -> list[str]:
    """The shards of a data set on the hub at its revision, in order."""
    from huggingface_hub import HfApi

    try:
        names = HfApi().list_repo_files(source.repository, repo_type="dataset", revision=source.revision)
    except Exception as error:  # the hub client raises its own, httpx's and the socket's errors
        raise hub_error(source.repository, error) from error
    shards = sorted(n for n in names if re.fullmatch(source.pattern, n))
    if not shards:
        raise InputError(f"{source.repository} has no file like {source.pattern}, but {', '.join(names[:5])}.")
    return shards


class HubStream(io.RawIOBase):
    """A shard on the hub, read as it comes."""

    def __init__(self, repository: str, file: BinaryIO) -> None:
        self.repository, self.file = repository, file

    def read(self, size: int = -1) -> bytes:
        """The next so many bytes. The hub's client has tried again before this gives up."""
        try:
            return self.file.read(size)
        except Exception as error:
            raise hub_error(self.repository, error) from error

    def tell(self) -> int:
        """How many bytes were read."""
        return self.file.tell()

    def close(self) -> None:
        """Hang up."""
        self.file.close()
        super().close()


def open_hub(source: HubSource, name: str, whole: bool) -> BinaryIO:
    """A shard on the hub. `whole`: brought here first, resumed and verified by the hub's client; else streamed."""
    from huggingface_hub import HfFileSystem, hf_hub_download

    try:
        if whole:
            path = hf_hub_download(source.repository, name, repo_type="dataset", revision=source.revision)
            return open(path, "rb")
        remote = f"datasets/{source.repository}@{source.revision}/{name}"
        file = HfFileSystem().open(remote, "rb", block_size=0)  # no blocks: one request, read as it comes
        return HubStream(source.repository, file)
    except Exception as error:
        raise hub_error(source.repository, error) from error


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


def package_documents(name: str, losses: Losses) -> Iterator[Document]:
    """Description, licences, text files and docstrings of one installed package."""
    distribution = installed()[name]
    if (description := str(distribution.metadata.get_payload() or "")).strip():
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
            losses(Loss(label, 1, "not UTF-8"))
            continue
        if file.suffix == ".py":
            yield from docstrings(text, label, losses)
        elif text.strip() and file.name not in ("RECORD", "top_level.txt", "entry_points.txt", "SOURCES.txt"):
            kind = "licences" if re.search("LICEN|COPYING|NOTICE", str(file), re.IGNORECASE) else "texts"
            yield Document(label, kind, text)


def docstrings(code: str, label: str, losses: Losses) -> Iterator[Document]:
    """The docstrings of a module, its classes and functions, each a document."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's code
            tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError):
        losses(Loss(label, 1, "not Python of this version"))
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            with suppress(ValueError):
                text = ast.get_docstring(node)
                if text and len(text) >= SHORTEST_DOCSTRING:
                    whole = text.encode(errors="replace").decode()  # "\ud800" in code is half a character
                    yield Document(f"{label}:{getattr(node, 'lineno', 1)}", "docstrings", whole)
