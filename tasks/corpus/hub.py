"""The Hugging Face hub: the data sets that a recipe can name, and reading their files through the hub's own client.

A data set is always read at a fixed commit. Shards are streamed: only what is read of them is fetched. If a connection
drops, the client continues where it stopped.
"""

import fcntl
import hashlib
import io
import json
import logging
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from model.errors import InputError, Unreachable, explain_errors
from tasks.corpus.containers import Chunks, Stream
from tasks.corpus.kinds import Damage
from tasks.store import home, locks
from tasks.store.manifests import known_digest

CHUNK = 1 << 18  # bytes requested from the client at once
BLOCK = 1 << 21  # bytes of one request where a file is not read in order
REVISIONS = ".revisions.json"  # in the store: the commits of data sets that are named without one
OWN_TEXT = "use local files (see tasks/README.md, 'Your own text')"
NOT_FOUND = 404
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
        plain = re.match(r"(([\w-]|\\\.)+/)*", self.pattern)
        return plain[0].rstrip("/").replace("\\", "") if plain else ""


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


def error(repository: str, problem: Exception, instead: str = OWN_TEXT, room: str = "datasets/") -> InputError:
    """The error that the user sees if the hub can't be reached or refuses. `room`: of its address; models have none."""
    status = getattr(getattr(problem, "response", None), "status_code", None)
    if status in (401, 403):
        return InputError(
            f"The Hugging Face hub denies access to {repository} ({status}). Accept its terms at "
            f"https://huggingface.co/{room}{repository}, create a token at https://huggingface.co/settings/tokens "
            f"and set HF_TOKEN to it; or {'use another source' if instead == OWN_TEXT else instead}."
        )
    reason = (str(problem).strip() or "no answer").splitlines()[0].rstrip(".:")
    kind = InputError if status == NOT_FOUND else Unreachable
    return kind(
        f"{repository} could not be read from the Hugging Face hub: {type(problem).__name__}: {reason}. "
        f"Check the network, HF_ENDPOINT and HF_TOKEN; or {instead}."
    )


def asking(repository: str, instead: str = OWN_TEXT, room: str = "datasets/") -> AbstractContextManager[None]:
    """Raise `error` for what the hub's client raises: its own errors, those of httpx and of sockets."""

    def explain(problem: BaseException) -> InputError | None:
        return error(repository, problem, instead, room) if isinstance(problem, Exception) else None

    return explain_errors(explain)


def commit(source: Source) -> str:
    """The commit at which the source is read: its own, or that of its branch at the first use with this store."""
    if re.fullmatch("[0-9a-f]{40}", source.revision):
        return source.revision
    path = home.root() / REVISIONS
    name = f"{source.repository}@{source.revision}".removesuffix("@")
    if home.is_read_only():
        return read_commits(path).get(name) or newest_commit(source)
    lock = home.root() / ".locks" / "revisions"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("wb") as held:
        locks.flock(held, fcntl.LOCK_EX)
        commits = read_commits(path)
        if name not in commits:
            commits[name] = newest_commit(source)
            half = path.with_suffix(".half")
            half.write_text(json.dumps(commits, indent=2) + "\n", encoding="utf-8")
            half.replace(path)
            log.info("From now on, %s is read at its newest commit, %s (%s).", name, commits[name][:12], path)
    return commits[name]


def read_commits(path: Path) -> dict[str, str]:
    """The commits of data sets at their first use."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def newest_commit(source: Source) -> str:
    """The newest commit of the source's branch, which the hub is asked for."""
    from huggingface_hub import HfApi

    with asking(source.repository, source.instead):
        newest = HfApi().dataset_info(source.repository, revision=source.revision or None).sha
    return newest or ""


def files(source: Source, sets: tuple[str, ...] = (), some: bool = False) -> list[File]:
    """The shards of a source in reading order; only those of `sets` if the paths of the shards name sets.

    Raises InputError if one of these isn't there; if it suffices that `some` are, only if none is.
    """
    shards = shards_on_hub(source)
    if not shards:
        raise InputError(f"{source.repository} has no file that matches {source.pattern}. Check HF_ENDPOINT.")
    known = sorted({shard.set for shard in shards if shard.set})
    if sets and known:
        shards = [shard for shard in shards if shard.set in sets]
    absent = [name for name in sets if name not in known] if known else []
    if absent and not (some and shards):
        raise InputError(
            f"{source.repository} has no set {', '.join(absent)}. Its sets: {', '.join(known)}. Correct download.sets."
        )
    shards.sort(key=lambda shard: shard.name)
    if source.mixed:
        shards.sort(key=lambda shard: hashlib.sha256(shard.name.encode()).digest())
    return shards


def shards_on_hub(source: Source) -> list[File]:
    """The files of a source whose paths match its pattern, as the hub lists them."""
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    revision = commit(source)
    with asking(source.repository, source.instead):
        tree = HfApi().list_repo_tree(
            source.repository, source.folder or None, repo_type="dataset", revision=revision, recursive=True
        )
        entries = list(tree)
    shards = []
    for entry in entries:
        match = re.fullmatch(source.pattern, entry.path)
        if match and isinstance(entry, RepoFile):
            digest = entry.lfs.sha256 if entry.lfs else ""
            shards.append(File(entry.path, entry.size, digest, match.groupdict().get("set", "")))
    return shards


def find_cached(source: Source, name: str, digest: str = "") -> Path | None:
    """The file in the cache of the hub's own client, where `hf download` puts it; None if absent or damaged.

    `digest`: "" is that by which the cache names it.
    """
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(source.repository, name, revision=commit(source), repo_type="dataset")
    if not isinstance(found, str):
        return None
    path = Path(found)
    digest = digest or path.resolve().name
    if len(digest) != 64 or known_digest(path) == digest:  # another name is not a SHA-256
        return path
    log.warning("%s does not have the hub's digest; it is downloaded again.", path)
    return None


def read_checked(source: Source, file: File, remote: BinaryIO) -> Iterator[bytes]:
    """The bytes of a file on the hub, in order. Raises Damage at the end if its digest is another."""
    hasher = hashlib.sha256()
    size = 0
    with remote:
        while True:
            with asking(source.repository):
                data = remote.read(CHUNK)
            if not data:
                break
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


def open_file(source: Source, file: File) -> io.BufferedReader:
    """A file from the cache of the hub's own client, or from the hub, of which only what is read is fetched."""
    from huggingface_hub import HfFileSystem

    path = find_cached(source, file.name, file.digest)
    if path:
        return cast(io.BufferedReader, path.open("rb", CHUNK))
    address = f"datasets/{source.repository}@{commit(source)}/{file.name}"
    is_read_in_order = not file.name.endswith(".parquet")
    with asking(source.repository):
        remote = HfFileSystem().open(address, "rb", block_size=0 if is_read_in_order else BLOCK, size=file.bytes)
    if is_read_in_order:
        return Stream(Chunks(read_checked(source, file, remote)), CHUNK)
    fetch = remote.cache.fetcher

    def fetch_block(start: int, end: int) -> bytes:
        with asking(source.repository):
            return fetch(start, end)

    remote.cache.fetcher = fetch_block
    return io.BufferedReader(remote, CHUNK)
