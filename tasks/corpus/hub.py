"""The Hugging Face hub: the data sets that a recipe can name, what files they have, and its own cache.

A data set is read at a fixed commit.
"""

import fcntl
import hashlib
import json
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from model import InputError
from tasks import store

ATTEMPTS = 2  # at a file that comes with a wrong digest
REVISIONS = ".revisions.json"  # in the store: commits of data sets that have none in the table below
log = logging.getLogger(__name__)


OWN_TEXT = "use files that lie here (see tasks/README.md, 'Your own text')"


@dataclass(frozen=True)
class Source:
    """A data set on the hub, and which of its files to read how.

    `revision` is a commit; empty, it is the newest when the source is first used here, and that one from then on.
    `pattern` matches the paths of its shards; what a group named `set` in it matches is where their text belongs.
    """

    repository: str
    revision: str
    pattern: str
    folder: str = ""  # that they lie in; nothing else is listed
    text: str = "text"  # the field or column with the text
    sets: tuple[str, ...] = ()  # keep what belongs to these only
    mixed: bool = False  # read the shards in an order that has nothing to do with their names
    licence: str = ""
    about: str = ""
    instead: str = OWN_TEXT  # advice for when the hub does not give it


SOURCES = {
    "pile": Source(
        "monology/pile-uncopyrighted",
        "3be90335b66f24456a5d6659d9c8d208c0357119",
        r"train/\d+\.jsonl\.zst",
        "train",
        licence="those of its parts; the parts under copyright were taken out",
        about="The Pile in its own layout, as far as the hub still has it.",
    ),
    "pile-deduplicated": Source(
        "EleutherAI/the_pile_deduplicated",
        "fcbfcfde4222cbb1acd1d33bad0be250ee14b1bb",
        r"data/train-\d+-of-\d+-[0-9a-f]+\.parquet",
        "data",
        licence="those of its parts, some of which are under copyright",
        about="The whole Pile without near duplicates, shuffled; it does not say what came from where.",
    ),
    "pile-natural": Source(
        "monology/pile-uncopyrighted",
        "3be90335b66f24456a5d6659d9c8d208c0357119",
        r"train/\d+\.jsonl\.zst",
        "train",
        sets=("Gutenberg (PG-19)", "Books3", "Wikipedia (en)"),
        licence="as the Pile",
        about="Books and encyclopedia of the Pile. Books3 is under copyright, so that the hub's copy has none of it.",
    ),
    "c4": Source(
        "allenai/c4",
        "1588ec454efa1a09f29cd18ddd04fe05fc8653a2",
        r"en/c4-train\..*\.json\.gz",
        "en",
        licence="ODC-BY, and the terms of Common Crawl",
        about="English web pages of 2019, cleaned by rules.",
    ),
    "oscar": Source(
        "oscar-corpus/OSCAR-2301",
        "",
        r"en_meta/en_meta_part_\d+\.jsonl\.zst",
        "en_meta",
        text="content",
        licence="CC0 for the packaging, and the terms of Common Crawl; access has to be asked for",
        about="English web pages of late 2022, not deduplicated. The commit is the newest when first used.",
    ),
    "wikipedia": Source(
        "wikimedia/wikipedia",
        "b04c8d1ceb2f5cd4588862100d08de323dccfbaa",
        r"20231101\.en/train-\d+-of-\d+\.parquet",
        "20231101.en",
        licence="CC-BY-SA-3.0 and GFDL",
        about="The articles of English Wikipedia in November 2023, without markup.",
    ),
    "books": Source(
        "emozilla/pg19",
        "c021754c8e01c5b1cc83a1f549c1f97fbbb756b8",
        r"data/train-\d+-of-\d+-[0-9a-f]+\.parquet",
        "data",
        licence="public domain in the USA; the collection is Apache-2.0",
        about="PG-19: 28,602 books of Project Gutenberg from before 1919, in place of BookCorpus, which is gone.",
    ),
    "fineweb-edu": Source(
        "HuggingFaceFW/fineweb-edu",
        "87f09149ef4734204d70ed1d046ddc9ca3f2b8f9",
        r"sample/10BT/\d+_\d+\.parquet",
        "sample/10BT",
        licence="ODC-BY, and the terms of Common Crawl",
        about="Web pages that a classifier found educational; the random sample of 10 billion tokens.",
    ),
    "climbmix": Source(
        "karpathy/climbmix-400b-shuffle",
        "915333b4f8b8684f39aeaafea600fea6f43fb703",
        r"shard_\d+\.parquet",
        licence="MIT; the data set it was made from, nvidia/Nemotron-ClimbMix, is CC-BY-NC-4.0",
        about="A mixture of web text chosen by training small models on clusters of it; 400 billion tokens, shuffled.",
    ),
    "common-pile": Source(
        "common-pile/comma_v0.1_training_dataset",
        "5afc546db324e7f39f297ba757c9a60547151e7c",
        r"(?P<set>[^/]+)/[^/]+\.jsonl\.gz",
        mixed=True,
        licence="public domain or open licences only",
        about="The Common Pile v0.1 as Comma was trained on it: 31 sets, from wikimedia to stackv2_edu, told by folder.",
    ),
}


class File(NamedTuple):
    """A shard on the hub."""

    name: str
    bytes: int
    digest: str  # SHA-256 (64 hex digits), or of a small file git's own (40)
    set: str = ""


def error(repository: str, problem: Exception, instead: str = OWN_TEXT) -> InputError:
    """The sentence for a hub that can't be reached or doesn't give what is asked for."""
    status = getattr(getattr(problem, "response", None), "status_code", None)
    if status in (401, 403):
        return InputError(
            f"{repository} is not open to all on the Hugging Face hub ({status}). Accept its terms at "
            f"https://huggingface.co/datasets/{repository}, make a token at https://huggingface.co/settings/tokens and "
            f"set HF_TOKEN to it; or {'use another source' if instead == OWN_TEXT else instead}."
        )
    said = (str(problem).strip() or "no answer").splitlines()[0].rstrip(".:")
    return InputError(
        f"{repository} could not be read from the Hugging Face hub: {type(problem).__name__}: {said}. "
        f"Check the network, HF_ENDPOINT and HF_TOKEN; or {instead}."
    )


def commit(source: Source) -> str:
    """The commit at which the source is read: its own, or the newest when it was first used with this store."""
    if source.revision:
        return source.revision
    path, lock = store.ROOT / REVISIONS, store.ROOT / ".locks" / "revisions"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        found = json.loads(path.read_text()) if path.exists() else {}
        if source.repository not in found:
            found[source.repository] = _newest(source.repository)
            half = path.with_suffix(".half")
            half.write_text(json.dumps(found, indent=2) + "\n")
            half.replace(path)
    return found[source.repository]


def _newest(repository: str) -> str:
    from huggingface_hub import HfApi

    try:
        sha = HfApi().dataset_info(repository).sha
    except Exception as problem:  # the hub's client raises its own, httpx's and the socket's errors
        raise error(repository, problem) from problem
    log.info("%s is read at its newest commit, %s, from now on (%s).", repository, sha, store.ROOT / REVISIONS)
    return sha


def files(source: Source, sets: tuple[str, ...] = ()) -> list[File]:
    """The shards of a source, in the order in which they are read; only those of `sets` where it tells them by path."""
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    about = {"repo_type": "dataset", "revision": commit(source), "recursive": True}
    try:
        entries = [
            entry
            for entry in HfApi().list_repo_tree(source.repository, source.folder or None, **about)
            if isinstance(entry, RepoFile)
        ]
    except Exception as problem:
        raise error(source.repository, problem, source.instead) from problem
    matches = [(entry, match) for entry in entries if (match := re.fullmatch(source.pattern, entry.path))]
    if not matches:
        others = ", ".join(sorted(entry.path for entry in entries)[:5])
        raise InputError(f"{source.repository} has no file like {source.pattern}, but {others or 'none at all'}.")
    found = [
        File(e.path, e.size, e.lfs.sha256 if e.lfs else e.blob_id, match.groupdict().get("set", ""))
        for e, match in matches
    ]
    told = sorted({file.set for file in found if file.set})
    if sets and told:
        found = [file for file in found if file.set in sets]
        if not found:
            raise InputError(f"{source.repository} has no set {', '.join(sets)}. Those it has: {', '.join(told)}.")
    return sorted(found, key=lambda f: (hashlib.sha256(f.name.encode()).digest() if source.mixed else b"", f.name))


def digest(path: Path, like: str) -> str:
    """The digest of a file, of the kind of this one."""
    if len(like) == 64:
        return store.digest(path)
    data = path.read_bytes()  # a small file
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def cached(source: Source, file: File) -> Path | None:
    """The file in the cache of the hub's own client (as `hf download` leaves it), if it is there and whole."""
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(source.repository, file.name, revision=commit(source), repo_type="dataset")
    if not isinstance(path, str):
        return None
    if digest(Path(path), file.digest) == file.digest:
        return Path(path)
    log.warning("%s does not have the hub's digest; it comes anew.", path)
    return None


def bring(source: Source, file: File) -> Path:
    """The file in the cache of the hub's own client, brought there if need be; for what is small and used again."""
    from huggingface_hub import hf_hub_download

    about = {"repo_type": "dataset", "revision": commit(source)}
    for again in range(ATTEMPTS):
        try:
            path = Path(hf_hub_download(source.repository, file.name, force_download=bool(again), **about))
        except Exception as problem:
            raise error(source.repository, problem, source.instead) from problem
        if digest(path, file.digest) == file.digest:
            return path
    raise wrong_digest(source, file)


def wrong_digest(source: Source, file: File) -> InputError:
    """The sentence for a file that comes with a digest which is not the hub's, however often."""
    return InputError(
        f"{file.name} of {source.repository} came {ATTEMPTS} times with a digest that is not the hub's ({file.digest[:12]}…). "
        "Check HF_ENDPOINT and what lies between here and the hub, and run again."
    )
