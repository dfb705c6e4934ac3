"""Download: any source or mixture of them, as Parquet parts of fixed text size (columns id, source, text).

Reads   local files, the hub, or the documentation of installed packages.
Writes  part-00000.parquet …, lost.jsonl (file, line and reason of every record that could not be read).
"""

import io
import json
import logging
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from model.errors import InputError
from model.wording import counted
from tasks.corpus import formats, hub, local, pydocs
from tasks.corpus.columns import OTHER, Layout, source_name
from tasks.corpus.containers import BUFFER, Encoding, head_of
from tasks.corpus.formats import Skipped, extractor
from tasks.corpus.kinds import (
    ARCHIVES,
    FORMATS,
    MAIL,
    MARKUP,
    SUBTITLES,
    TABLES,
    Damage,
    counted_kinds,
    ending,
    family,
    sniffed,
)
from tasks.corpus.losses import Losses
from tasks.corpus.parts import Document, PartWriter, Tally
from tasks.corpus.rows import Loss
from tasks.corpus.survey import check_files, check_records, flaws_of, warn_of_doubts
from tasks.stage import Params, stage
from tasks.store.artifacts import WORK, draft_of
from tasks.store.manifests import known_digest
from tasks.workers.progress import Progress

DOCUMENTS_BETWEEN_REPORTS = 256
MOST_SOURCES = 1000  # every stage counts by source; further names, for example of URLs, are counted as OTHER
LOST, STATE = "lost.jsonl", "state.json"
COLUMNS = ("column", "source_column")  # params on how rows are read
OWN_TEXT = (*COLUMNS, "documents_by", "encoding", "extract")  # params on how files are read
HUB = hub.Split._fields
OPTIONS = {"files": ("files", *OWN_TEXT), "hub": (*HUB, *COLUMNS)}  # params of a source; the first one is required
# the formats of archives enter a key since mail and subtitles in them are read
READ_ANEW = {*MAIL.values(), *SUBTITLES.values(), *ARCHIVES.values()}
MARKED_UP = {*MARKUP.values(), *MAIL.values()}
EFFECT = {  # the formats on which an option has an effect
    "documents_by": {"text"},
    "extract": MARKED_UP,
    "encoding": {*FORMATS.values(), "WikiExtractor"} - {*TABLES.values()},
}
log = logging.getLogger(__name__)

SourceName = Literal[
    "pile", "pile-deduplicated", "c4", "oscar", "wikipedia", "books", "fineweb-edu", "climbmix",
    "common-pile", "python-docs", "hub", "files",
]  # fmt: skip
Mixture = Annotated[dict[SourceName, Annotated[float, Field(gt=0)]], Field(min_length=1)]
Sources = Annotated[
    Annotated[SourceName, Tag("name")] | Annotated[Mixture, Tag("mixture")],
    Discriminator(lambda given: "mixture" if isinstance(given, dict) else "name"),
]


class Download(Params):
    """Which text to train on. The default is that of the paper's final run: the first 8 million entries of the Pile."""

    source: Sources = Field(
        "pile",
        description="A data set by cram's name; hub for any other; python-docs or files; or several with their share "
        "of the text, as {wikipedia: 3, books: 1}.",
    )
    dataset: str = Field("", description="For source 'hub': a data set, as allenai/dolma, or a folder in its layout.")
    config: str = Field("", description="Of that data set; empty: its only one.")
    split: str = Field("train", min_length=1, description="Of that data set.")
    revision: str = Field("", description="Of that data set: a commit, branch or tag, kept from its first use on.")
    files: list[str] = Field([], description="For source 'files': paths, globs or directories.")
    column: str = Field(
        "",
        description="Column or field with the text, as body or doc.text; empty: text, content, raw_content, body or "
        "document. Lists of strings become lines.",
    )
    source_column: str = Field("", description="Column that names a document's source; empty: source, or the Pile's.")
    documents_by: Literal["", "file", "line", "blank-line"] = Field(
        "", description="What a document of a text file is; empty: a file of up to 1 MB, and larger ones are refused."
    )
    encoding: Encoding = Field("", description="Of text that isn't UTF-8, for example windows-1252.")
    extract: Literal["", "trafilatura"] = Field("", description="Package that takes the text out of .html and .xml.")
    sets: list[str] = Field([], description="Keep documents of these sets only (as the Pile's 'Wikipedia (en)').")
    documents: int = Field(8_000_000, ge=0, description="Stop after this many documents; 0: no limit.")
    megabytes: float = Field(0, ge=0, description="Stop after this much UTF-8 text, 10^6 bytes; 0: no limit.")
    part_megabytes: float = Field(32, gt=0, le=1024, description="Text per part, 10^6 characters.")
    max_lost: float = Field(0.01, ge=0, le=1, description="Largest fraction of records that may be unreadable.")
    later = OWN_TEXT

    @model_validator(mode="after")
    def _options_with_their_source(self) -> "Download":
        fields = type(self).model_fields
        given = [name for name in (*OPTIONS["files"], *HUB) if getattr(self, name) != fields[name].get_default()]
        for source in OPTIONS.keys() & self.weights.keys():
            if OPTIONS[source][0] not in given:
                raise ValueError(f"source is {self.source!r}: give {OPTIONS[source][0]}, which is empty")
        useful = {option for source in self.weights for option in OPTIONS.get(source, ())}
        if useless := [f"{name} {getattr(self, name)!r}" for name in given if name not in useful]:
            raise ValueError(f"source {self.source!r} has no use for {', '.join(useless)}: leave that out")
        return self

    @property
    def weights(self) -> dict[str, float]:
        """The sources by name, with their shares of the text in any unit."""
        return dict(sorted(self.source.items())) if isinstance(self.source, dict) else {self.source: 1.0}

    @property
    def of_dataset(self) -> hub.Split:
        """What is read for source 'hub'."""
        return hub.Split(*(getattr(self, name) for name in HUB))

    @property
    def options(self) -> dict[str, str]:
        """How files are read."""
        return {option: getattr(self, option) for option in OWN_TEXT}

    @property
    def is_limited(self) -> bool:
        """Whether a part of the source may be all that is read."""
        return bool(self.sets or self.documents or self.megabytes)

    def check(self) -> None:
        """Raise InputError if local files, or too many records in them, can't be read, as their beginnings tell."""
        found, _ = own_text(self)
        if self.source == "files" and not self.is_limited:
            check_records(found, self.options, self.max_lost, ", ".join(self.files))

    @classmethod
    def usual(cls) -> dict:
        """The defaults, without the identity of the source, for which the hub would be asked."""
        return cls().model_dump(mode="json")

    def identity(self) -> dict:
        """Names and digests of local files; repository and commit on the hub; versions of installed packages."""
        about = {name: value for name, value in super().identity().items() if name not in ("files", *HUB)}
        if self.extract:
            about["extract"] = extractor(self.extract)
        about["sources"] = {name: identity_of(name, self) for name in self.weights}
        return about


def identity_of(name: str, params: Download) -> dict:
    """What identifies the content of a source in a key."""
    if name == "files":
        files = local.local_files(params.files, params.extract).files
        return {"files": [[name, known_digest(path), *anew(name, path)] for name, path in files.items()]}
    if name == "python-docs":
        return {"packages": pydocs.packages_digest()}
    if name == "hub":
        return params.of_dataset.identity()
    source = hub.SOURCES[name]
    identity = {"repository": source.repository, "revision": hub.commit(source), "pattern": source.pattern}
    return identity | {"text": source.text, "sets": [], "mixed": source.mixed}


def anew(name: str, path: Path) -> list[str]:
    """What enters a key of a file that earlier versions read as plain text, or of which they skipped files."""
    form = FORMATS.get(ending(name), "")
    with suppress(InputError):  # which `flaws` tells
        form = form or sniffed(head_of(path))
    return [form] if form in READ_ANEW else []


def shards_of(source: str, sets: list[str], files: dict[str, Path]) -> list[hub.File]:
    """The shards of a source, in order. `files` are those of the source 'files'; `sets` choose shards on the hub."""
    if source == "files":
        return [hub.File(name, path=path) for name, path in files.items()]
    if source == "python-docs":
        return [hub.File(package) for package in pydocs.installed()]
    return hub.files(hub.SOURCES[source], tuple(sets))


class Counts(Tally):
    """Counts what was read and lost, by source and in total, and knows when a limit is reached.

    `params` are those of `download`, `state` is what `state()` gave an earlier attempt, `lost` the list of losses.
    """

    def __init__(self, params: Download, lost: Path, state: dict) -> None:
        self.params = params
        self.documents, self.characters = Counter(state.get("documents")), Counter(state.get("characters"))
        self.read = Counter(state.get("read"))  # documents, by the name in download.source
        self.bytes = Counter(state.get("bytes"))  # the same
        self.other_sets = Counter(state.get("other_sets"))
        self.skipped = Counter(state.get("skipped"))  # files in archives, by kind
        self.formats = defaultdict(Counter, {form: Counter(by) for form, by in state.get("formats", {}).items()})
        self.lost = lost.open("a+", encoding="utf-8")
        self.lost.truncate(state.get("lost", 0))

    def state(self) -> dict:
        """All counts as JSON."""
        self.lost.flush()
        counters = ("documents", "characters", "read", "bytes", "other_sets", "skipped", "formats")
        return {name: getattr(self, name) for name in counters} | {"lost": self.lost.seek(0, io.SEEK_END)}

    def take(self, name: str, document: Document, layout: Layout) -> None:
        """Count a document of a source, which was found in a file of this layout."""
        self.add(document)
        self.formats[layout.form][layout.taken] += 1
        self.read[name] += 1
        self.bytes[name] += len(document.text) if document.text.isascii() else len(document.text.encode())

    @property
    def enough(self) -> bool:
        """Whether a limit is reached."""
        most, megabytes = self.params.documents, self.params.megabytes
        return bool((most and self.read.total() >= most) or (megabytes and self.bytes.total() >= 1e6 * megabytes))

    def stats(self, what: str) -> dict:
        """The counts. Raises InputError if no document was read, or if more was lost than `max_lost` allows."""
        counts = self.counts()
        with open(self.lost.name, encoding="utf-8") as file:
            lost = Losses(Loss(**json.loads(line)) for line in file)
        if not counts["documents"] and self.other_sets:
            sets = ", ".join(name for name, _ in self.other_sets.most_common(30))
            raise InputError(f"{what} has no documents from the requested sets. It has: {sets}. Correct download.sets.")
        documents = counts["documents"] and counts["documents"] + self.other_sets.total()
        lost.check(what, documents, self.params.max_lost, self.skipped, f"All are listed in {self.lost.name}.")
        return {
            **counts,
            "bytes": self.bytes.total(),
            "lost": dict(sorted(lost.reasons.items())),
            "formats": self.formats,
        }


class Reader:
    """Reads the records of one source in order.

    `at` is where an earlier attempt stopped: the number of shards that were read completely, and the number of records
    (documents, losses or skipped files) that were read of the next one. `options` is how its files are read, `flaws`
    are the files that can't be, and `layout` is what was found in the present one.
    """

    def __init__(
        self, name: str, shards: list[hub.File], at: tuple[int, int], options: dict[str, str], flaws: dict[str, Loss]
    ) -> None:
        self.name, self.shards, self.hub, self.flaws = name, shards, hub.SOURCES.get(name), flaws
        self.options = {"column": self.hub.text} if self.hub else options
        self.layout = Layout("", form="packages")
        self.shard, self.records = at

    def __iter__(self) -> Iterator[Document | Loss | Skipped]:
        """The records that are left. Raises Damage for a shard that can't be read."""
        while not self.ended:
            with closing(self._records(self.shards[self.shard])) as records:
                for record in islice(records, self.records, None):
                    self.records += 1
                    yield record
            self.shard, self.records = self.shard + 1, 0

    def _records(self, shard: hub.File) -> Iterator[Document | Loss | Skipped]:
        if self.name == "python-docs":
            yield from pydocs.package_documents(shard.name)
            return
        if shard.name in self.flaws:
            yield self.flaws[shard.name]
            return
        source = shard.set or (family(shard.name) if shard.path else self.name)
        self.layout = Layout(source, **self.options)
        with shard.path.open("rb", BUFFER) if shard.path else hub.opened(self.hub, shard) as file:
            yield from formats.read_file(file, shard.name, self.layout)

    @property
    def at(self) -> tuple[int, int]:
        """Where it stands."""
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
    name: str, params: Download, files: dict[str, Path], flaws: dict[str, Loss], at: Any
) -> Reader | hub.Rows:
    """The reader of a source, which begins where an earlier attempt stopped, or at the beginning if `at` is None.

    `files` are those of the source 'files', of which those in `flaws` can't be read.
    """
    if name == "hub":
        return hub.Rows(params.of_dataset, {column: getattr(params, column) for column in COLUMNS}, at)
    shards = shards_of(name, params.sets, files)
    if name != "files":
        return Reader(name, shards, at or (0, 0), params.options, {})
    gone = [hub.File(each) for each in flaws.keys() - files.keys()]
    return Reader(name, shards + sorted(gone, key=lambda file: file.name), at or (0, 0), params.options, flaws)


def counted_as(source: str, counts: Counter) -> str:
    """The name under which a source is counted: its own, or OTHER after the first MOST_SOURCES names."""
    return source if source in counts or len(counts) < MOST_SOURCES else OTHER


def read_sources(readers: dict[str, Reader | hub.Rows], counts: Counts, parts: PartWriter) -> None:
    """Read until a limit or the end of all sources is reached, and write the documents as parts.

    The next document is always one of the source whose text is furthest behind its share; ties go to the first by name.
    """
    params, weights = counts.params, counts.params.weights
    prefixes = {name: f"{name}/" if len(readers) > 1 else "" for name in readers}  # two sources may have like names
    sets = set(map(source_name, params.sets))

    def end_part() -> None:
        parts.end_part(counts.state() | {"at": {name: reader.at for name, reader in readers.items()}})

    def report() -> None:
        bar.update(read.total() - bar.count, counted(counts.read.total(), "document"))

    read, total, unit = counts.bytes, 1e6 * params.megabytes or None, "B"
    if params.documents and not params.megabytes:
        read, total, unit = counts.read, params.documents, "doc"
    with Progress("download", total, unit) as bar, ExitStack() as stack:
        left = {name: stack.enter_context(closing(iter(reader))) for name, reader in readers.items()}
        while left and not counts.enough:
            name = min(left, key=lambda source: counts.bytes[source] / weights[source])
            record = next(left[name], None)
            if record is None:
                del left[name]
                if left:
                    log.warning("%s is exhausted; continuing with %s.", name, ", ".join(left))
            elif isinstance(record, Loss):
                counts.lost.write(json.dumps(record._replace(file=prefixes[name] + record.file)._asdict()) + "\n")
            elif isinstance(record, Skipped):
                counts.skipped[record.kind] += 1
            elif sets and record.source not in sets:
                counts.other_sets[counted_as(record.source, counts.other_sets)] += 1
            else:
                source = counted_as(record.source, counts.documents)
                document = Document(prefixes[name] + record.id, source, record.text)
                counts.take(name, document, readers[name].layout)
                parts.write(document)
                if parts.characters >= 1e6 * params.part_megabytes:
                    end_part()
                if not counts.read.total() % DOCUMENTS_BETWEEN_REPORTS:
                    report()
        end_part()
        parts.wait()
        report()


def own_text(params: Download) -> tuple[local.Local, dict[str, Loss]]:
    """The local files, and the losses of those that can't be read. Raises InputError if these are too many.

    If all may not be read, it raises nothing, since nobody knows yet which files will be reached.
    """
    if not params.files:
        return local.Local({}, Counter(), [], set()), {}
    found = local.local_files(params.files, params.extract)
    flaws = flaws_of(found, params.options)
    if not params.is_limited:
        check_files(flaws, found.given, len(found.files) + len(found.gone), params.max_lost)
    warn_of_doubts(found, params.options)
    return found, flaws


def tell(params: Download, counts: Counts) -> None:
    """Log what was found in files, what of archives was not read, and which options had no effect."""
    if counts.skipped:
        log.warning("Files in archives, or mails, that are not read: %s.", counted_kinds(counts.skipped.elements()))
    if {"files", "hub"} & set(params.weights):
        log.info("The documents by format and column: %s.", json.dumps(counts.formats))
    for option, forms in EFFECT.items():
        if getattr(params, option) and not forms & set(counts.formats):
            log.warning("download.%s had no effect: no document is from %s.", option, " or ".join(sorted(forms)))


@stage(version=4, resumes=True, retries=3)
def download(params: Download, out: Path) -> dict:
    """Read the source and write it as parts; count what was read and what was lost, and where."""
    work = out / WORK
    work.mkdir(exist_ok=True)
    saved = work / STATE
    state = json.loads(saved.read_text(encoding="utf-8")) if saved.exists() else {"parts": 0, "at": {}}
    for part in sorted(out.glob("part-*.parquet"))[state["parts"] :]:  # written after the state was saved
        part.unlink()
    counts, parts = Counts(params, out / LOST, state), PartWriter(out, out / LOST, saved, state["parts"])
    own, flaws = own_text(params)
    readers = {name: reader_of(name, params, own.files, flaws, state["at"].get(name)) for name in params.weights}
    try:
        # `lost` is closed, or its buffer would be written after a rerun in this process has begun
        with closing(counts.lost), parts:
            read_sources(readers, counts, parts)
        if flaws and params.is_limited:
            reached = readers["files"].reached
            check_files(
                {name: flaws[name] for name in reached if name in flaws}, own.given, len(reached), params.max_lost
            )
        if draft_of(download.target(params)) != out:  # the files have other digests than those in the key
            raise Damage(
                "A file in download.files or download.dataset changed while it was read. Run again, and leave it."
            )
    except Damage:  # a rerun must not resume from what was written
        saved.unlink(missing_ok=True)
        raise
    what = ", ".join(params.files) if params.source == "files" else " and ".join(params.weights)
    stats = {
        "shards": sum(r.shard + bool(r.records) for r in readers.values()),
        "parts": parts.parts,
        **counts.stats(what),
    }
    if counts.skipped + own.skipped:
        stats["skipped"] = dict((counts.skipped + own.skipped).most_common())
    tell(params, counts)
    if counts.other_sets:
        stats["other_sets"] = dict(counts.other_sets.most_common())
    if len(readers) > 1:
        stats["mixture"] = {
            name: {"documents": counts.read[name], "bytes": counts.bytes[name], "ended": reader.ended}
            for name, reader in readers.items()
        }
    return stats
