"""The Hugging Face hub: the data sets that a recipe can name, and reading their files through the hub's own client.

A data set is always read at a fixed commit. Shards are streamed: only what is read of them is fetched. If a connection
drops, the client continues where it stopped. Any other data set, or a folder in the hub's layout, is streamed by
`datasets`, with its formats, configs and splits: slower (a quarter of the speed on .jsonl.zst, 0.6 of it on Parquet).
"""

import fcntl
import hashlib
import io
import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import pyarrow as pa

from model.errors import InputError, Unreachable
from tasks.corpus import local
from tasks.corpus.columns import Layout, drift, read_rows
from tasks.corpus.containers import Chunks, Stream
from tasks.corpus.kinds import Damage
from tasks.corpus.parts import Document
from tasks.corpus.rows import Loss, Row
from tasks.store import home, locks
from tasks.store.manifests import known_digest

if TYPE_CHECKING:
    from datasets import Features, IterableDataset

CHUNK = 1 << 18  # bytes requested from the client at once
BLOCK = 1 << 21  # bytes of one request where a file is not read in order
REVISIONS = ".revisions.json"  # in the store: the commits of data sets that are named without one
OWN_TEXT = "use local files (see tasks/README.md, 'Your own text')"
NOT_FOUND = 404
READING = 2  # raise it when the same data set gives other documents: it enters the keys of those that `datasets` reads
OF_DATA = ValueError | TypeError | KeyError | RuntimeError  # errors of `datasets` that no network or disk causes
COMMON_CRAWL = "ODC-BY, and the terms of Common Crawl"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """A data set on the hub, and how its files are read.

    `revision` is a commit, or a branch or tag, whose commit at first use is kept from then on; empty: the main branch.
    `pattern` matches the paths of the shards. If it has a group named `set`, that is the set of the shard's documents.
    """

    repository: str
    revision: str
    pattern: str
    text: str = "text"  # the field or column with the text
    mixed: bool = False  # read the shards in a fixed order that is unrelated to their names
    licence: str = ""
    instead: str = OWN_TEXT  # advice if the hub doesn't provide it

    @property
    def folder(self) -> str:
        """The folder of the shards, as far as the pattern names it; nothing else is listed."""
        return re.match(r"(([\w-]|\\\.)+/)*", self.pattern)[0].rstrip("/").replace("\\", "")


SOURCES = {
    "pile": Source(
        "monology/pile-uncopyrighted",
        "3be90335b66f24456a5d6659d9c8d208c0357119",
        r"train/\d+\.jsonl\.zst",
        licence="those of its parts; the parts under copyright were taken out",
    ),
    "pile-deduplicated": Source(
        "EleutherAI/the_pile_deduplicated",
        "fcbfcfde4222cbb1acd1d33bad0be250ee14b1bb",
        r"data/train-\d+-of-\d+-[0-9a-f]+\.parquet",
        licence="those of its parts, some of which are under copyright",
    ),
    "c4": Source(
        "allenai/c4", "1588ec454efa1a09f29cd18ddd04fe05fc8653a2", r"en/c4-train\..*\.json\.gz", licence=COMMON_CRAWL
    ),
    "oscar": Source(
        "oscar-corpus/OSCAR-2301",
        "",
        r"en_meta/en_meta_part_\d+\.jsonl\.zst",
        text="content",
        licence="CC0 for the packaging, and the terms of Common Crawl; access has to be asked for",
    ),
    "wikipedia": Source(
        "wikimedia/wikipedia",
        "b04c8d1ceb2f5cd4588862100d08de323dccfbaa",
        r"20231101\.en/train-\d+-of-\d+\.parquet",
        licence="CC-BY-SA-3.0 and GFDL",
    ),
    "books": Source(
        "emozilla/pg19",
        "c021754c8e01c5b1cc83a1f549c1f97fbbb756b8",
        r"data/train-\d+-of-\d+-[0-9a-f]+\.parquet",
        licence="public domain in the USA; the collection is Apache-2.0",
    ),
    "fineweb-edu": Source(
        "HuggingFaceFW/fineweb-edu",
        "87f09149ef4734204d70ed1d046ddc9ca3f2b8f9",
        r"sample/10BT/\d+_\d+\.parquet",
        licence=COMMON_CRAWL,
    ),
    "climbmix": Source(
        "karpathy/climbmix-400b-shuffle",
        "915333b4f8b8684f39aeaafea600fea6f43fb703",
        r"shard_\d+\.parquet",
        licence="MIT; the data set it was made from, nvidia/Nemotron-ClimbMix, is CC-BY-NC-4.0",
    ),
    "common-pile": Source(
        "common-pile/comma_v0.1_training_dataset",
        "5afc546db324e7f39f297ba757c9a60547151e7c",
        r"(?P<set>[^/]+)/[^/]+\.jsonl\.gz",
        mixed=True,
        licence="public domain or open licences only",
    ),
}


class File(NamedTuple):
    """A shard: a file on the hub, or a local one, which has a path; or an installed package, which has a name only."""

    name: str
    bytes: int = 0
    digest: str = ""  # SHA-256 of a file on the hub; empty for a small one in git, which isn't checked
    set: str = ""
    path: Path | None = None


def error(repository: str, problem: Exception, instead: str = OWN_TEXT) -> InputError:
    """What to tell the user if the hub can't be reached or refuses."""
    status = getattr(getattr(problem, "response", None), "status_code", None)
    if status in (401, 403):
        return InputError(
            f"The Hugging Face hub denies access to {repository} ({status}). Accept its terms at "
            f"https://huggingface.co/datasets/{repository}, create a token at https://huggingface.co/settings/tokens "
            f"and set HF_TOKEN to it; or {'use another source' if instead == OWN_TEXT else instead}."
        )
    reason = (str(problem).strip() or "no answer").splitlines()[0].rstrip(".:")
    kind = InputError if status == NOT_FOUND else Unreachable
    return kind(
        f"{repository} could not be read from the Hugging Face hub: {type(problem).__name__}: {reason}. "
        f"Check the network, HF_ENDPOINT and HF_TOKEN; or {instead}."
    )


@contextmanager
def asking(repository: str, instead: str = OWN_TEXT) -> Iterator[None]:
    """Raise `error` for what the hub's client raises: errors of its own, of httpx and of sockets."""
    try:
        yield
    except Exception as problem:
        raise error(repository, problem, instead) from problem


def commit(source: Source) -> str:
    """The commit at which the source is read: its own, or that of its branch at the first use with this store."""
    if re.fullmatch("[0-9a-f]{40}", source.revision):
        return source.revision
    path, lock = home.root() / REVISIONS, home.root() / ".locks" / "revisions"
    name = f"{source.repository}@{source.revision}".removesuffix("@")
    if home.is_frozen:
        return (json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}).get(name) or newest(source)
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("wb") as held:
        locks.flock(held, fcntl.LOCK_EX)
        commits = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if name not in commits:
            commits[name] = newest(source)
            half = path.with_suffix(".half")
            half.write_text(json.dumps(commits, indent=2) + "\n", encoding="utf-8")
            half.replace(path)
            log.info("From now on, %s is read at its newest commit, %s (%s).", name, commits[name][:12], path)
    return commits[name]


def newest(source: Source) -> str:
    """The newest commit of the source's branch, which the hub is asked for."""
    from huggingface_hub import HfApi

    with asking(source.repository, source.instead):
        return HfApi().dataset_info(source.repository, revision=source.revision or None).sha


def files(source: Source, sets: tuple[str, ...] = ()) -> list[File]:
    """The shards of a source in reading order; only those of `sets` if the paths of the shards name sets."""
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    options = {"repo_type": "dataset", "revision": commit(source), "recursive": True}
    with asking(source.repository, source.instead):
        tree = list(HfApi().list_repo_tree(source.repository, source.folder or None, **options))
    shards = [
        File(e.path, e.size, e.lfs.sha256 if e.lfs else "", match.groupdict().get("set", ""))
        for e in tree
        if isinstance(e, RepoFile) and (match := re.fullmatch(source.pattern, e.path))
    ]
    if not shards:
        raise InputError(f"{source.repository} has no file that matches {source.pattern}. Check HF_ENDPOINT.")
    known = sorted({shard.set for shard in shards if shard.set})
    if sets and known:
        shards = [shard for shard in shards if shard.set in sets]
        if not shards:
            raise InputError(f"{source.repository} has no set {', '.join(sets)}. Its sets: {', '.join(known)}.")
    return sorted(shards, key=lambda f: (hashlib.sha256(f.name.encode()).digest() if source.mixed else b"", f.name))


def cached(source: Source, name: str, digest: str = "") -> Path | None:
    """The file in the cache of the hub's own client, where `hf download` puts it; None if absent or damaged.

    `digest`: "" is that by which the cache names it.
    """
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(source.repository, name, revision=commit(source), repo_type="dataset")
    if not isinstance(path, str):
        return None
    digest = digest or Path(path).resolve().name
    if len(digest) != 64 or known_digest(Path(path)) == digest:  # another name is no SHA-256
        return Path(path)
    log.warning("%s does not have the hub's digest; it is downloaded again.", path)
    return None


def checked(source: Source, file: File, remote: BinaryIO) -> Iterator[bytes]:
    """The bytes of a file on the hub, in order. Raises Damage at the end if its digest is another."""

    def read() -> bytes:
        with asking(source.repository):
            return remote.read(CHUNK)

    hasher, size = hashlib.sha256(), 0
    with remote:
        for data in iter(read, b""):
            hasher.update(data)
            size += len(data)
            yield data
    if size < file.bytes:
        raise error(source.repository, EOFError(f"{file.name} ended after {size:,} bytes"))
    if file.digest and hasher.hexdigest() != file.digest:
        raise Damage(
            f"{file.name} of {source.repository}: checksum mismatch (the hub's digest is {file.digest[:12]}…). "
            "What was read of it is discarded. Run again."
        )


def opened(source: Source, file: File) -> io.BufferedReader:
    """A file from the cache of the hub's own client, or from the hub, of which only what is read is fetched."""
    from huggingface_hub import HfFileSystem

    if path := cached(source, file.name, file.digest):
        return path.open("rb", CHUNK)
    in_order, path = not file.name.endswith(".parquet"), f"datasets/{source.repository}@{commit(source)}/{file.name}"
    with asking(source.repository):
        remote = HfFileSystem().open(path, "rb", block_size=0 if in_order else BLOCK, size=file.bytes)
    if in_order:
        return Stream(Chunks(checked(source, file, remote)), CHUNK)
    remote.cache.fetcher = asking(source.repository)(remote.cache.fetcher)
    return io.BufferedReader(remote, CHUNK)


class Split(NamedTuple):
    """Which rows are read; the parameters of `download` by these names."""

    dataset: str
    config: str
    split: str
    revision: str

    @property
    def folder(self) -> Path | None:
        """Where the data set lies on this machine; None if it is on the"""
        path = Path(self.dataset).expanduser()
        return path if path.is_dir() else None

    def identity(self) -> dict:
        """What identifies the content in a key: the commit on the hub, or the digests of a folder's files."""
        about, top = {"config": self.config, "split": self.split, "reading": READING}, self.folder
        if not top:
            newest = commit(Source(self.dataset, self.revision, ""))  # at first use
            return about | {"repository": self.dataset, "revision": newest}
        if self.revision:
            raise InputError(f"revision is {self.revision!r}, but {top} is a folder, which has none. Leave it out.")
        files = sorted(file for _, inner in local.walk(top, hidden=False) for file in inner)
        return about | {"files": [[str(file.relative_to(top)), known_digest(file)] for file in files]}

    def opened(self, commit: str | None) -> tuple["IterableDataset", list[str]]:
        """The rows, of which only what is read is fetched, and the files that they lie in, in order, if known.

        A row is a table of Arrow with the columns and types of its own file. Raises InputError if there are none.
        """
        from datasets import disable_progress_bars, load_dataset_builder, logging

        disable_progress_bars()
        logging.set_verbosity(logging.CRITICAL)  # its errors are raised too
        try:
            builder = load_dataset_builder(str(self.folder or self.dataset), self.config or None, revision=commit)
            rows = builder.as_streaming_dataset(split=self.split)
        except Exception as problem:  # `datasets` raises its own, the hub's client's and the file systems' errors
            raise self.refusal(problem) from problem
        # Otherwise all rows would be cast to the first file's columns: where the files differ, reading would end, or
        # numbers and objects in the place of texts would become texts.
        builder.info.features = rows.info.features = None
        files = (builder.config.data_files or {}).get(self.split, [])
        return rows.with_format("arrow"), [str(file) for file in files]

    def refusal(self, problem: Exception, instead: str = OWN_TEXT) -> InputError:
        """What to tell the user if `datasets` can't open it. `instead`: advice if the hub doesn't provide it."""
        if not self.folder and not isinstance(problem, OF_DATA):
            return error(self.dataset, problem, instead)
        if isinstance(problem, pa.ArrowException | UnicodeError):  # the files were found
            return self.unreadable(problem, "in its first file")
        return InputError(
            f"{self.dataset} can't be read by `datasets`: {told(problem)}. Expected files in the hub's layout, without "
            "code. Correct config, split or revision (of download, or of the task)."
        )

    def unreadable(self, problem: Exception, where: str) -> InputError:
        """What to tell the user of rows that `datasets` can't read."""
        if not self.folder and not isinstance(problem, OF_DATA):
            return error(self.dataset, problem)
        return InputError(f"{self.dataset} can't be read by `datasets` ({where}): {told(problem)}. {self.to_repair}.")

    @property
    def to_repair(self) -> str:
        """Advice on a file that can't be read."""
        if self.folder:
            return "Repair that file, or leave it out"
        return (
            "Copy the data set (`hf download --repo-type dataset`), name the folder of the copy in place of it, and "
            "repair that file there or leave it out"
        )


def told(problem: Exception) -> str:
    """The words of an error of `datasets`, on one line."""
    words = " ".join(str(problem).partition("Example of usage")[0].split()).rstrip(".")
    return words or type(problem).__name__


class Rows:
    """Reads the rows of a data set in order, as `Reader` of the stage does the files of the other sources.

    `at` is where an earlier attempt stopped, as the property of that name gave it.
    """

    def __init__(self, split: Split, columns: dict[str, str], at: dict | None) -> None:
        self.split, folder = split, split.folder
        title = "/".join(filter(None, (folder.name if folder else split.dataset, split.config, split.split)))
        self.layout = Layout(title, **columns, form="datasets")
        self.commit = split.identity().get("revision")
        self.rows, self.files = split.opened(self.commit)
        self.shard, self.records = 0, 0
        self.schema: pa.Schema | None = None  # of the last row
        self.encoded: Features | None = None  # its types, if values of it are encoded as JSON
        self.drifts = False  # whether files were found to differ
        if at:
            self.records = at["records"]
            self.rows.load_state_dict(at["state"])

    @property
    def at(self) -> dict:
        """Where it stands, as JSON."""
        return {"records": self.records, "state": self.rows.state_dict()}

    @property
    def ended(self) -> bool:
        """Whether the whole split has been read."""
        return self.shard == 1

    def __iter__(self) -> Iterator[Document | Loss]:
        """The records that are left. Raises InputError if the data set can't be read on."""
        yield from read_rows(self._rows(), self.layout.source, self.layout, table=True)
        self.shard = 1

    def _rows(self) -> Iterator[Row]:
        try:
            for table in self.rows:
                if table.schema != self.schema:
                    self._take_note(table.schema)
                [record] = table.to_pylist()
                self.records += 1
                yield Row(self.records, self.encoded.decode_example(record) if self.encoded else record)
        except InputError:
            raise
        except Exception as problem:  # as in `opened`
            raise self.split.unreadable(problem, self._place()) from problem

    def _take_note(self, schema: pa.Schema) -> None:
        """Of the columns and types from the next row on. Raises InputError if a column that is read is missing."""
        from datasets import Features

        before = self.schema
        self.schema = schema
        # `datasets` encodes a column whose values are of several types
        self.encoded = Features.from_arrow_schema(schema.remove_metadata()) if "arrow.json" in str(schema) else None
        differs = drift(before, schema) if before else ""
        if not differs:
            return
        text, source = (column.partition(".")[0] for column in (self.layout.taken, self.layout.source_column))
        if text in before.names and text not in schema.names:
            raise InputError(
                f"{self.split.dataset} has other columns {self._place()}, than before: {differs}. Expected the text in "
                f"the same column of every file. {self.split.to_repair}; or read the folder with download.source "
                "files, which finds the text of each file by itself."
            )
        read = [name for name in (text, source) if name in before.names]
        concerns = any(name not in schema.names or before.field(name).type != schema.field(name).type for name in read)
        if concerns or not self.drifts:
            level = logging.WARNING if concerns else logging.INFO
            log.log(level, "%s has other columns %s, than before: %s.", self.layout.source, self._place(), differs)
        self.drifts = True

    def _place(self) -> str:
        """Where reading stands: the file, as far as it is known, and the row."""
        state = self.rows.state_dict()
        while "examples_iterable" in state:
            state = state["examples_iterable"]
        number, row = state.get("shard_idx", len(self.files)), f"after row {self.records:,}"
        if number >= len(self.files):
            return row
        return f"in {self.files[number].removeprefix(f'hf://datasets/{self.split.dataset}@{self.commit}/')}, {row}"
