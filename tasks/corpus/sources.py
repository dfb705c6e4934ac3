"""Sources of text: what identifies the content of each in a key, its shards, and reading them in order."""

from collections.abc import Sequence
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path
from typing import Protocol

from model.errors import InputError
from tasks.corpus import hub, local, pydocs
from tasks.corpus.containers import head_of, open_raw
from tasks.corpus.documents import Options, Records, read_file
from tasks.corpus.kinds import ARCHIVES, FORMATS, MAIL, SUBTITLES, ending, family, sniff
from tasks.corpus.losses import Loss
from tasks.store.manifests import known_digest

# The formats of archives enter a key since mail and subtitles in them are read
READ_ANEW = {*MAIL.values(), *SUBTITLES.values(), *ARCHIVES.values()}


def identity_of_files(patterns: Sequence[str], extract: str) -> dict:
    """What identifies local files in a key: their names and digests."""
    files = []
    for name, path in local.local_files(patterns, extract).files.items():
        files.append([name, known_digest(path), *forms_in_key(name, path)])
    return {"files": files}


def forms_in_key(name: str, path: Path) -> list[str]:
    """What enters a key of a file that earlier versions read as plain text, or of which they skipped files."""
    form = FORMATS.get(ending(name), "")
    if not form:
        with suppress(InputError):  # the survey reports it
            form = sniff(head_of(path))
    return [form] if form in READ_ANEW else []


def identity_of_hub(name: str) -> dict:
    """What identifies a data set on the hub in a key, which cram knows by this name."""
    source = hub.SOURCES[name]
    return {
        "repository": source.repository,
        "revision": hub.commit(source),
        "pattern": source.pattern,
        "text": source.text,
        "sets": [],
        "mixed": source.mixed,
    }


def identity_of(name: str, files: Sequence[str], extract: str) -> dict:
    """What identifies a source's content in a key. `files` and `extract`: parameters of `download`, for 'files'."""
    if name == "files":
        return identity_of_files(files, extract)
    if name == "python-docs":
        return {"packages": pydocs.packages_digest()}
    return identity_of_hub(name)


def shards_of(name: str, sets: Sequence[str], files: dict[str, Path], some: bool = False) -> list[hub.File]:
    """The shards of a source, in order. `files` are those of the source 'files'; `sets` choose shards on the hub.

    `some`: some of the sets may be those of other sources.
    """
    if name == "files":
        return [hub.File(file, path=path) for file, path in files.items()]
    if name == "python-docs":
        return [hub.File(package) for package in pydocs.installed()]
    return hub.files(hub.SOURCES[name], tuple(sets), some)


class SourceReader(Protocol):
    """What reads the records of a source, once and in order."""

    shard: int  # shards that were read completely
    records: int  # documents, losses and skipped files that were read of the next one

    @property
    def at(self) -> object:
        """Where it stands, as JSON."""

    @property
    def ended(self) -> bool:
        """Whether the whole source has been read."""

    def __iter__(self) -> Records:
        """The records that are left."""


class Reader:
    """Reads the records of one source in order.

    `at` is where an earlier attempt stopped, as the property of that name gave it; `options` is how local files are
    read; `flaws` are the files that can't be.
    """

    def __init__(
        self, name: str, shards: Sequence[hub.File], at: Sequence[int], options: Options, flaws: dict[str, Loss]
    ) -> None:
        self.name = name
        self.shards = shards
        self.hub = hub.SOURCES.get(name)
        self.options = Options(column=self.hub.text) if self.hub else options
        self.flaws = flaws
        self.shard, self.records = at

    def __iter__(self) -> Records:
        """The records that are left. Raises Damage for a shard that can't be read."""
        while not self.ended:
            with closing(self._open(self.shards[self.shard])) as records:
                for record in islice(records, self.records, None):
                    self.records += 1
                    yield record
            self.shard += 1
            self.records = 0

    def _open(self, shard: hub.File) -> Records:
        if self.name == "python-docs":
            return pydocs.package_documents(shard.name)
        if shard.name in self.flaws:
            return (flaw for flaw in [self.flaws[shard.name]])
        if shard.path:
            file = open_raw(shard.path)
            source = family(shard.name)
        else:
            assert self.hub, "other shards have paths"
            file = hub.open_file(self.hub, shard)
            source = self.name
        return read_file(file, shard.name, shard.set or source, self.options)

    @property
    def at(self) -> tuple[int, int]:
        """The number of shards that were read completely, and that of records that were read of the next one."""
        return self.shard, self.records

    @property
    def reached(self) -> list[str]:
        """The names of the shards that were read, if only in part."""
        return [shard.name for shard in self.shards[: self.shard + bool(self.records)]]

    @property
    def ended(self) -> bool:
        """Whether the whole source has been read."""
        return self.shard == len(self.shards)


def reader_of(
    name: str,
    sets: Sequence[str],
    files: dict[str, Path],
    flaws: dict[str, Loss],
    options: Options,
    at: Sequence[int] | None,
    some: bool = False,
) -> Reader:
    """The reader of a source, which begins where an earlier attempt stopped, or at the beginning if `at` is None.

    `files` are those of the source 'files', of which those in `flaws` can't be read, or aren't there; `sets` and `some`
    are as for `shards_of`.
    """
    shards = shards_of(name, sets, files, some)
    if name != "files":
        return Reader(name, shards, at or (0, 0), options, {})
    gone = sorted(flaws.keys() - files.keys())
    return Reader(name, [*shards, *map(hub.File, gone)], at or (0, 0), options, flaws)
