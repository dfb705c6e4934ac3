"""Reading one source shard by shard, from the beginning or from where an earlier attempt stopped."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from itertools import accumulate, islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

from model import InputError
from model.quantities import counted
from tasks.corpus import fetch, formats, hub, local, pydocs
from tasks.corpus.parts import Document
from tasks.corpus.records import Damage, Layout, Loss
from tasks.text.printable import printable


class Shard(NamedTuple):
    """A file, or an installed package (whose place is None)."""

    name: str
    place: Path | hub.File | None

    @property
    def bytes(self) -> int:
        """Its size; 0 if unknown."""
        if isinstance(self.place, Path):
            return self.place.stat().st_size
        return self.place.bytes if self.place else 0


class Reader:
    """Reads the records of one source in order.

    `at` is where an earlier attempt stopped: the number of shards that were read completely, and the number of records
    (documents or losses) that were read of the next one. `whole`: the source is read to its end, so that whole shards
    are downloaded. `limit`: bytes of the longest document. `keep`: keep what precedes the damage of a damaged shard.
    """

    def __init__(
        self, name: str, shards: list[Shard], folder: Path, at: tuple[int, int], *, whole: bool, limit: int, keep: bool
    ) -> None:
        self.name, self.shards, self.folder = name, shards, folder
        self.shard, self.records = at
        self.whole, self.limit, self.keep = whole, limit, keep
        self.hub = hub.SOURCES.get(name)
        self.starts = [0, *accumulate(shard.bytes for shard in shards)]  # of each shard, in bytes of the source
        self.digests = {s.name: local.file_digest(s.place) for s in shards if isinstance(s.place, Path)}
        self.spent: list[Path] = []  # downloaded shards that were read to their end
        self.file: BinaryIO | None = None
        self.note: Callable[[str], None] = lambda text: None  # is called with the progress of downloads

    def __iter__(self) -> Iterator[Document | Loss]:
        with ExitStack() as stack:
            fetcher = None
            if self.hub and self.whole:
                files = [shard.place for shard in self.shards]
                fetcher = stack.enter_context(fetch.Fetcher(self.hub, files, self.folder))
            while not self.ended:
                shard = self.shards[self.shard]
                with closing(self._read(shard, fetcher)) as records:
                    for record in islice(records, self.records, None):
                        self.records += 1
                        yield record
                if fetcher:
                    self.spent.append(self.folder / shard.name)
                self.shard, self.records = self.shard + 1, 0

    def _read(self, shard: Shard, fetcher: fetch.Fetcher | None) -> Iterator[Document | Loss]:
        name, place = shard
        if place is None:
            yield from pydocs.package_documents(name)
            return
        path = self._path(place, fetcher)
        layout = Layout(
            (place.set or self.name) if isinstance(place, hub.File) else local.shard_family(name),
            self.limit,
            text=self.hub.text if self.hub else "text",
            local=path is not None,
            keep=self.keep,
        )
        documents = 0
        with path.open("rb") if path else fetch.opened(self.hub, place) as self.file:
            self.check_unchanged()
            try:
                with closing(formats.read_file(self.file, name, layout)) as records:
                    for record in records:
                        documents += isinstance(record, Document)
                        yield record
            except Damage as damage:
                yield self._loss(name, damage, documents, layout)
            self.check_unchanged()

    def _path(self, place: Path | hub.File, fetcher: fetch.Fetcher | None) -> Path | None:
        """Where a shard lies on this machine; None if it is read from the hub."""
        if isinstance(place, Path):
            return place
        return fetcher.wait(self.shard, self.note) if fetcher else hub.cached(self.hub, place)

    def _loss(self, name: str, damage: Damage, documents: int, layout: Layout) -> Loss:
        """The record of the damage, if a damaged shard may be kept; else raise InputError."""
        if damage.kind == "corrupt" and not layout.local:  # documents before the damage may be altered
            raise fetch.Tainted(
                f"{name} is {damage}. It was read during the download, and nothing of it is kept. Run again, or read "
                "whole shards (download.documents and megabytes 0), which are checked first."
            ) from damage
        if not self.keep:
            remedy = "train on the documents before the damage" if documents else "continue without it"
            raise InputError(
                f"{name} is {damage}, after {counted(documents, 'document')}. {damage.cure}, or set "
                f"download.damaged to 'keep' to {remedy}."
            ) from damage
        return Loss(name, damage.line or documents + 1, f"{damage.kind} shard")

    def check_unchanged(self) -> None:
        """Raise Tainted if the local file that is being read no longer has the digest that is in the key."""
        if self.ended:
            return
        name, place = self.shards[self.shard]
        if isinstance(place, Path) and local.file_digest(place) != self.digests[name]:
            raise fetch.Tainted(
                f"{printable(str(place))} changed while it was read. Nothing of this download is kept. Run again, and "
                "don't change the file until the stage has finished."
            )

    @property
    def ended(self) -> bool:
        """Whether the whole source has been read."""
        return self.shard == len(self.shards)

    @property
    def opened(self) -> int:
        """The number of shards opened so far."""
        return self.shard + bool(self.records)

    @property
    def bytes(self) -> int:
        """Approximate number of bytes read so far."""
        inside = 0
        with suppress(ValueError, AttributeError):  # between two files
            inside = self.file.tell()
        return min(self.starts[self.shard] + inside, self.starts[-1])
