"""Download: any source or mixture of them, as Parquet parts of fixed text size (columns id, source, text).

Reads   local files, the hub, or the documentation of installed packages.
Writes  part-00000.parquet …, lost.jsonl (file, line and reason of every record that could not be read).
"""

import io
import json
import logging
from collections import Counter, defaultdict
from collections.abc import Collection
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Discriminator, Field, Tag, model_validator

from model.errors import InputError
from model.wording import counted
from tasks.corpus import local, sources, streams
from tasks.corpus.columns import first_of
from tasks.corpus.containers import Encoding
from tasks.corpus.documents import EFFECT, OTHER, Found, Options, source_name
from tasks.corpus.kinds import Damage, counted_kinds
from tasks.corpus.losses import Loss, Losses, Skipped
from tasks.corpus.parts import Document, PartWriter, Tally
from tasks.corpus.survey import check_files, check_records, flaws_of, warn_of_doubts
from tasks.corpus.texts import extractor
from tasks.stage import Params, stage
from tasks.store.artifacts import WORK, draft_of
from tasks.workers.progress import Progress

DOCUMENTS_BETWEEN_REPORTS = 256
MOST_SOURCES = 1000  # every stage counts by source; further names, for example of URLs, are counted as OTHER
MOST_SETS = 30  # that an error names
LOST = "lost.jsonl"
STATE = "state.json"
COLUMNS = ("column", "source_column")  # params on how rows are read
OWN_TEXT = (*COLUMNS, "documents_by", "encoding", "extract")  # params on how files are read
HUB = streams.Split._fields
BLANK_LINES = 2  # raise it when other lines are blank: it enters the keys of text that these divide
OPTIONS = {"files": ("files", *OWN_TEXT), "hub": (*HUB, *COLUMNS)}  # params of a source; the first one is required
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
    words: int = Field(
        0,
        ge=0,
        description="Stop before the first document with which the text would have more words than this, counted "
        "between white space; 0: no limit.",
    )
    part_megabytes: float = Field(32, gt=0, le=1024, description="Text per part, 10^6 characters.")
    max_lost: float = Field(0.01, ge=0, le=1, description="Largest fraction of records that may be unreadable.")
    later = (*OWN_TEXT, "words")

    @model_validator(mode="after")
    def _options_with_their_source(self) -> "Download":
        fields = type(self).model_fields
        options = (*OPTIONS["files"], *HUB)
        given = [name for name in options if getattr(self, name) != fields[name].get_default()]
        useful: set[str] = set()
        for source in OPTIONS.keys() & self.weights.keys():
            required, *others = OPTIONS[source]
            if required not in given:
                raise ValueError(f"source is {source!r}: set {required}, which is empty")
            useful.update([required, *others])
        useless = [f"{name} {getattr(self, name)!r}" for name in given if name not in useful]
        if useless:
            raise ValueError(f"source {self.source!r} doesn't read {', '.join(useless)}; leave that out")
        return self

    @property
    def weights(self) -> dict[str, float]:
        """The sources by name, with their shares of the text in any unit."""
        return dict(sorted(self.source.items())) if isinstance(self.source, dict) else {self.source: 1.0}

    @property
    def what(self) -> str:
        """The sources, or files, in words."""
        return ", ".join(self.files) if self.source == "files" else " and ".join(self.weights)

    @property
    def of_dataset(self) -> streams.Split:
        """What is read for source 'hub'."""
        return streams.Split(*(getattr(self, name) for name in HUB))

    @property
    def options(self) -> Options:
        """How files are read."""
        return Options(**{option: getattr(self, option) for option in OWN_TEXT})

    @property
    def is_limited(self) -> bool:
        """Whether a part of the source may be all that is read."""
        return bool(self.sets or self.documents or self.megabytes or self.words)

    def check(self) -> None:
        """Raise InputError if beginnings of local files show that files, or too many records in them, can't be read."""
        own = read_own(self)
        if self.source == "files" and not self.is_limited:
            check_records(own.found, self.options, self.max_lost, self.what)

    @classmethod
    def usual(cls) -> dict:
        """The defaults, without the identity of the source, for which the hub would be asked."""
        return cls().model_dump(mode="json")

    def identity(self) -> dict:
        """Names and digests of local files; repository and commit on the hub; versions of installed packages."""
        about = {name: value for name, value in super().identity().items() if name not in ("files", *HUB)}
        if self.extract:
            about["extract"] = extractor(self.extract)
        if self.documents_by == "blank-line":
            about["blank_lines"] = BLANK_LINES
        about["sources"] = {name: self.identity_of(name) for name in self.weights}
        return about

    def identity_of(self, source: str) -> dict:
        """What identifies the content of a source."""
        if source == "hub":
            return self.of_dataset.identity()
        return sources.identity_of(source, self.files, self.extract)


class OwnText(NamedTuple):
    """The local files, and the losses of those that can't be read."""

    found: local.Local
    flaws: dict[str, Loss]


def read_own(params: Download) -> OwnText:
    """The local files. Raises InputError if too many can't be read.

    With a limit it raises nothing, since it isn't known yet which files will be reached.
    """
    if not params.files:
        return OwnText(local.Local({}, Counter(), [], set()), {})
    found = local.local_files(params.files, params.extract)
    flaws = flaws_of(found, params.options)
    if not params.is_limited:
        total = len(found.files) + len(found.gone)
        check_files(flaws, found.given, total, params.max_lost)
    warn_of_doubts(found, params.options)
    return OwnText(found, flaws)


class Counts(Tally):
    """Counts what was read and lost, by source and in total, and knows when a limit is reached.

    `params` are those of `download`, `state` is what `state()` gave an earlier attempt, `lost` the list of losses.
    """

    def __init__(self, params: Download, lost: Path, state: dict[str, Any]) -> None:
        self.params = params
        self.weights = params.weights
        self.sets = set(map(source_name, params.sets))
        # Two sources may have like names
        self.prefixes = {name: f"{name}/" if len(self.weights) > 1 else "" for name in self.weights}
        self.documents = Counter(state.get("documents"))
        self.characters = Counter(state.get("characters"))
        self.read: Counter[str] = Counter(state.get("read"))  # documents, by the name in download.source
        self.bytes: Counter[str] = Counter(state.get("bytes"))  # the same
        self.words = state.get("words", 0)  # counted only if they are limited
        self.is_full = state.get("is_full", False)  # the next document would have exceeded the limit of words
        self.other_sets: Counter[str] = Counter(state.get("other_sets"))
        self.skipped: Counter[str] = Counter(state.get("skipped"))  # files in archives, by kind
        self.formats = formats_in(state)
        self.lost = lost.open("a+", encoding="utf-8")
        self.lost.truncate(state.get("lost", 0))

    def state(self) -> dict[str, Any]:
        """All counts as JSON."""
        self.lost.flush()
        return {
            "documents": self.documents,
            "characters": self.characters,
            "read": self.read,
            "bytes": self.bytes,
            "words": self.words,
            "is_full": self.is_full,
            "other_sets": self.other_sets,
            "skipped": self.skipped,
            "formats": self.formats,
            "lost": self.lost.seek(0, io.SEEK_END),
        }

    def take(self, name: str, found: Found) -> Document | None:
        """Count a document of a source, and return it as it is stored; None if it isn't taken.

        It is of a set that isn't asked for, or has more words than are left.
        """
        if self.sets and found.source not in self.sets:
            self.other_sets[name_in(self.other_sets, found.source)] += 1
            return None
        text = found.text
        if self.params.words:
            words = len(text.split())
            self.is_full = self.words + words > self.params.words
            if self.is_full:
                return None
            self.words += words
        document = Document(self.prefixes[name] + found.id, name_in(self.documents, found.source), text)
        self.add(document)
        layout = found.layout
        self.formats[layout.form][layout.unit] += 1
        self.read[name] += 1
        self.bytes[name] += len(text) if text.isascii() else len(text.encode())
        return document

    def leave_out(self, name: str, record: Loss | Skipped) -> None:
        """Count a file that is skipped, or list a loss."""
        if isinstance(record, Skipped):
            self.skipped[record.kind] += 1
        else:
            loss = record._replace(file=self.prefixes[name] + record.file)
            self.lost.write(json.dumps(loss._asdict()) + "\n")

    @property
    def is_enough(self) -> bool:
        """Whether a limit is reached."""
        if self.is_full:
            return True
        documents = self.params.documents
        if documents and self.read.total() >= documents:
            return True
        most_bytes = 1e6 * self.params.megabytes
        return bool(most_bytes) and self.bytes.total() >= most_bytes

    def furthest_behind(self, names: Collection[str]) -> str:
        """The source whose text is furthest behind its share; of equal ones the first."""
        if len(names) == 1:
            return next(iter(names))
        return min(names, key=lambda name: self.bytes[name] / self.weights[name])

    def stats(self) -> dict[str, Any]:
        """The counts. Raises InputError if no document was read, or if more was lost than `max_lost` allows."""
        what = self.params.what
        documents = self.documents.total()
        if not documents and self.other_sets:
            sets = ", ".join(name for name, _ in self.other_sets.most_common(MOST_SETS))
            raise InputError(f"{what} has no documents from the requested sets. It has: {sets}. Correct download.sets.")
        if not documents and self.is_full:
            raise InputError(
                f"The first document of {what} has more than {counted(self.params.words, 'word')}, which is all that "
                "download.words allows. Raise it, or give smaller documents (download.documents_by)."
            )
        if documents:
            documents += self.other_sets.total()
        with open(self.lost.name, encoding="utf-8") as file:
            lost = Losses(Loss(**json.loads(line)) for line in file)
        where = f"All are listed in {self.lost.name}."
        lost.check(what, documents, self.params.max_lost, self.skipped, where)
        limited = {"words": self.words} if self.params.words else {}
        return {
            **self.counts(),
            "bytes": self.bytes.total(),
            **limited,
            "lost": dict(sorted(lost.reasons.items())),
            "formats": self.formats,
        }

    def of_source(self, name: str, ended: bool) -> dict[str, object]:
        """What was read of a source. `ended`: it was all of it."""
        return {"documents": self.read[name], "bytes": self.bytes[name], "ended": ended}

    def log_findings(self) -> None:
        """Log what was found in files, what of archives was not read, and which options and sets had no effect."""
        if self.skipped:
            kinds = counted_kinds(self.skipped.elements())
            log.warning("Files in archives, or messages, that were not read: %s.", kinds)
        if {"files", "hub"} & set(self.params.weights):
            log.info("The documents by format and column: %s.", json.dumps(self.formats))
        for option, forms in EFFECT.items():
            if getattr(self.params, option) and not forms & set(self.formats):
                log.warning("download.%s had no effect: no document is from %s.", option, " or ".join(sorted(forms)))
        absent = [name for name in self.params.sets if source_name(name) not in self.documents]
        if absent:
            there = [name for name, _ in (self.documents + self.other_sets).most_common()]
            log.warning(
                "These of download.sets gave no document of the text: %s. There were documents from: %s.",
                ", ".join(absent),
                first_of(there, MOST_SETS),
            )


def formats_in(state: dict[str, Any]) -> defaultdict[str, Counter[str]]:
    """The documents by format and column, as an earlier attempt counted them."""
    formats: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for form, by_unit in state.get("formats", {}).items():
        formats[form].update(by_unit)
    return formats


def name_in(counts: Counter[str], source: str) -> str:
    """The name under which a source is counted: its own, or OTHER after the first MOST_SOURCES names."""
    return source if source in counts or len(counts) < MOST_SOURCES else OTHER


def reader_of(name: str, params: Download, own: OwnText, at: Any) -> sources.SourceReader:
    """The reader of a source, which begins where an earlier attempt stopped, or at the beginning if `at` is None."""
    if name == "hub":
        return streams.StreamReader(params.of_dataset, params.options, at)
    is_mixed = len(params.weights) > 1
    return sources.reader_of(name, params.sets, own.found.files, own.flaws, params.options, at, some=is_mixed)


def read_sources(readers: dict[str, sources.SourceReader], counts: Counts, parts: PartWriter) -> None:
    """Read until a limit or the end of all sources is reached, and write the documents as parts.

    The next document is always one of the source whose text is furthest behind its share; ties go to the first by name.
    """
    params = counts.params
    most_characters = 1e6 * params.part_megabytes
    total, unit = goal_of(params)
    with Progress("download", total, unit, done=amount_read(counts, unit)) as bar, ExitStack() as stack:
        left = {name: stack.enter_context(closing(iter(reader))) for name, reader in readers.items()}
        while left and not counts.is_enough:
            name = counts.furthest_behind(left)
            record = next(left[name], None)
            if record is None:
                del left[name]
                if left:
                    log.warning("%s is exhausted; continuing with %s.", name, ", ".join(left))
                continue
            if not isinstance(record, Found):
                counts.leave_out(name, record)
                continue
            document = counts.take(name, record)
            if document is None:
                continue
            parts.write(document)
            if parts.characters >= most_characters:
                end_part(parts, counts, readers)
            if not counts.read.total() % DOCUMENTS_BETWEEN_REPORTS:
                show(bar, counts)
        end_part(parts, counts, readers)
        parts.wait()
        show(bar, counts)


def end_part(parts: PartWriter, counts: Counts, readers: dict[str, sources.SourceReader]) -> None:
    """End the part, and save where reading stands."""
    parts.end_part(counts.state() | {"at": {name: reader.at for name, reader in readers.items()}})


def goal_of(params: Download) -> tuple[float | None, str]:
    """How much is to be read, None if all is, and its unit."""
    if params.words:
        return params.words, "word"
    if params.documents and not params.megabytes:
        return params.documents, "doc"
    return 1e6 * params.megabytes or None, "B"


def amount_read(counts: Counts, unit: str) -> int:
    """How much was read, in a unit of `goal_of`."""
    if unit == "word":
        return counts.words
    read = counts.read if unit == "doc" else counts.bytes
    return read.total()


def show(bar: Progress, counts: Counts) -> None:
    """Show how much was read."""
    bar.update(amount_read(counts, bar.unit) - bar.count, counted(counts.read.total(), "document"))


def load_state(saved: Path, out: Path) -> dict[str, Any]:
    """Where an earlier attempt stopped. Parts that were written afterwards are deleted."""
    state: dict[str, Any] = {"parts": 0, "at": {}}
    if saved.exists():
        state = json.loads(saved.read_text(encoding="utf-8"))
    for part in sorted(out.glob("part-*.parquet"))[state["parts"] :]:
        part.unlink()
    return state


def check_reached(params: Download, own: OwnText, reader: sources.SourceReader) -> None:
    """Raise InputError if too many of the local files that were reached can't be read."""
    if isinstance(reader, sources.Reader):
        reached = reader.reached
        flaws = {name: own.flaws[name] for name in reached if name in own.flaws}
        check_files(flaws, own.found.given, len(reached), params.max_lost)


def check_unchanged(params: Download, out: Path) -> None:
    """Raise Damage if the files have other digests than those in the key."""
    if draft_of(download.target(params)) != out:
        raise Damage(
            "A file in download.files or download.dataset changed while it was read. Run again, and don't change it "
            "meanwhile."
        )


def statistics(counts: Counts, readers: dict[str, sources.SourceReader], parts: int, skipped: Counter[str]) -> dict:
    """What the stage returns. `skipped`: the files by kind that were not read as text."""
    shards = 0
    for reader in readers.values():
        is_begun = reader.records > 0 and not reader.ended
        shards += reader.shard + is_begun
    stats = {"shards": shards, "parts": parts, **counts.stats()}
    if skipped:
        stats["skipped"] = dict(skipped.most_common())
    if counts.other_sets:
        stats["other_sets"] = dict(counts.other_sets.most_common())
    if len(readers) > 1:
        stats["mixture"] = {name: counts.of_source(name, reader.ended) for name, reader in readers.items()}
    return stats


@stage(version=4, resumes=True, retries=3)
def download(params: Download, out: Path) -> dict:
    """Read the source and write it as parts; count what was read and what was lost, and where."""
    work = out / WORK
    work.mkdir(exist_ok=True)
    saved = work / STATE
    state = load_state(saved, out)
    counts = Counts(params, out / LOST, state)
    parts = PartWriter(out, out / LOST, saved, state["parts"])
    own = read_own(params)
    readers = {name: reader_of(name, params, own, state["at"].get(name)) for name in params.weights}
    try:
        # `lost` is closed, or its buffer would be written after a rerun in this process has begun
        with closing(counts.lost), parts:
            read_sources(readers, counts, parts)
        if own.flaws and params.is_limited:
            check_reached(params, own, readers["files"])
        check_unchanged(params, out)
    except Damage:  # a rerun must not resume from what was written
        saved.unlink(missing_ok=True)
        raise
    stats = statistics(counts, readers, parts.parts, counts.skipped + own.found.skipped)
    counts.log_findings()
    return stats
