"""What somebody's own text is: how its files are to be read, and how much text there is, of which kind.

Of a large text only a sample is read. Files that a run would refuse are refused here, by the same sentences.
"""

import io
import itertools
from collections import Counter
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pyarrow.parquet as pq
import xxhash

from model.errors import InputError
from tasks.corpus import texts
from tasks.corpus.columns import first_of, text_column
from tasks.corpus.containers import content_of, head_of, open_raw, reading
from tasks.corpus.documents import Found, Options, Records, read_file
from tasks.corpus.kinds import FORMATS, MARKUP, NO_TEXT, ROWS, TEXT, ending, family, form_of, unmarked_utf_16
from tasks.corpus.local import NAMED, Local, local_files
from tasks.corpus.losses import NOT_UTF8, NOTHING, UNREADABLE, Loss, Losses, Skipped
from tasks.corpus.profile import Profile, profiles_of, prose_in
from tasks.corpus.rows import records
from tasks.corpus.streams import Split
from tasks.corpus.survey import check_files

LOOKED_AT = 20_000_000  # characters of documents that are read
MOST_FILES = 2_000  # that are read, evenly spread over all of them
MOST_PAGES = 100  # of HTML or XML, whose text takes long to find
MAX_LOST = 0.01  # of files and records, as download.max_lost
SAMPLED_ROWS = 200  # of a table, that show which column has the text
SAMPLED_TABLES = 20
EXTRACTOR = "trafilatura"
GUESSED = "windows-1252"  # the usual encoding of Western Europe's text that isn't UTF-8
MOST_ACCENTS = 0.2  # of the letters; with more of them beyond ASCII, that guess is wrong
RIVAL = 0.5  # of the length of the chosen column, from which another column with prose may be meant
# Of a text file whose documents are to be found
HEAD = 1 << 20  # bytes that are looked at
FEW_FILES = 3  # text files, below which one may hold many documents although it isn't large
FEWEST_LINES = 50  # of a file with a document per line
BLANK_LINES = 0.01  # of the lines, from which blank lines divide a text
WRAPPED = 0.15  # of the lines, from which those that begin in small letters are parts of sentences


@dataclass(frozen=True)
class TextOverview:
    """What was found in a text. Shares and texts are those of the sample."""

    settings: dict  # of `download`, beside its files
    about: str  # the files in words
    files: int
    bytes: int  # of the files, as they are on the disk; 0 if nobody knows
    texts: list[str]  # the documents of the sample
    documents: float  # of all files; an estimate unless `is_all`
    characters: float  # likewise
    is_all: bool  # the sample is the whole text
    sources: Counter[str]  # documents of the sample, by format and column
    paths: list[Path] = field(default_factory=list)  # of the files
    column: str = ""  # with the text, in tables
    others: list[str] = field(default_factory=list)  # columns that may have it too
    doubts: list[str] = field(default_factory=list)

    @property
    def duplicates(self) -> int:
        """Documents of the sample that are the same as an earlier one."""
        return len(self.texts) - len({xxhash.xxh3_64_intdigest(text.strip().encode()) for text in self.texts})


@dataclass
class Sample:
    """What is read of some files."""

    left: float  # characters
    texts: list[str] = field(default_factory=list)
    sources: Counter[str] = field(default_factory=Counter)
    flaws: dict[str, Loss] = field(default_factory=dict)  # of whole files, by name
    losses: list[Loss] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    doubts: dict[str, list[str]] = field(default_factory=dict)  # files by why they may not be prose
    documents: float = 0  # of the files that were looked at, whole
    characters: float = 0
    is_all: bool = True

    def take(self, records: Records, most: float) -> float:
        """Read up to about `most` characters, at least two records; returns how many. Raises InputError as they do."""
        size = 0
        for number, record in enumerate(records):
            if isinstance(record, Found):
                self.take_document(record)
                size += len(record.text)
            elif isinstance(record, Skipped):
                self.skipped[record.kind] += 1
            elif record.line:
                self.losses.append(record)
            else:
                self.flaws[record.file] = record
            if size > most and number:
                self.is_all = False
                break
        return size

    def take_document(self, found: Found) -> None:
        """Take a document."""
        form, unit, doubt = found.layout
        self.texts.append(found.text)
        self.sources[f"{form}, {unit}"] += 1
        if doubt:
            files = self.doubts.setdefault(doubt, [])
            name = found.id.rpartition(":")[0]
            if name not in files:
                files.append(name)


# Looking


def look_at_files(patterns: Sequence[str]) -> TextOverview:
    """What the text of files, folders and globs is. Raises InputError if it can't be read."""
    found, options = find_files(patterns)
    chosen = chosen_files(found, options)
    options = with_layout(found, options, chosen)
    tables = columns_of_tables(found, options, chosen)
    column = common_column(tables)
    options = replace(options, column=column.setting)
    sample, options = read_decoded(found, options, chosen)
    what = ", ".join(patterns)
    doubts = [*doubts_of_columns(tables), *doubts_of_sample(sample, options, what)]
    check(found, sample, what)
    overview = overview_of(found, options, sample, len(chosen) / len(found.files))
    return replace(overview, column=column.name, others=list(column.others), doubts=doubts)


def with_layout(found: Local, options: Options, chosen: Sequence[str]) -> Options:
    """The options with what the beginnings of text files show: their encoding, and what a document is."""
    decoded = replace(options, encoding=encoding_of(found, chosen))
    return replace(decoded, documents_by=documents_in(found, decoded, chosen))


def overview_of(found: Local, options: Options, sample: Sample, share: float) -> TextOverview:
    """What files are, by a sample of them; without columns and doubts. `share`: of the files, that were looked at."""
    return TextOverview(
        settings={name: value for name, value in vars(options).items() if value},
        about=files_in_words(found),
        files=len(found.files),
        bytes=sum(path.stat().st_size for path in found.files.values()),
        texts=sample.texts,
        documents=sample.documents / share,
        characters=sample.characters / share,
        is_all=sample.is_all and share == 1,
        sources=sample.sources,
        paths=list(found.files.values()),
    )


def doubts_of_sample(sample: Sample, options: Options, what: str) -> list[str]:
    """What to say of how a sample was read. Raises InputError if its encoding can't be guessed. `what`: the files."""
    doubts = []
    if options.encoding == GUESSED:
        doubts.append(doubt_of_encoding(sample.texts, what))
    for doubt, names in sample.doubts.items():
        doubts.append(f"A text file {doubt}: {first_of(names, NAMED)}. Leave out what is not prose.")
    return doubts


def find_files(patterns: Sequence[str]) -> tuple[Local, Options]:
    """The files; pages of HTML and XML among them if the package that reads them is here, and little else is."""
    can_extract = find_spec(EXTRACTOR) is not None
    try:
        found = local_files(patterns)
    except InputError:
        if not can_extract:
            raise
        try:
            return local_files(patterns, EXTRACTOR), Options(extract=EXTRACTOR)
        except InputError:
            pass
        raise
    pages = sum(found.skipped[suffix] for suffix in MARKUP)
    if can_extract and pages > len(found.files):
        return local_files(patterns, EXTRACTOR), Options(extract=EXTRACTOR)
    return found, Options()


def chosen_files(found: Local, options: Options) -> list[str]:
    """The names of the files that are looked at: all, or some that are spread evenly over them."""
    names = list(found.files)
    pages = sum(ending(name) in MARKUP for name in names)
    most = MOST_PAGES if options.extract and pages > MOST_PAGES else MOST_FILES
    step = max(1, -(-len(names) // most))
    given = [name for name in names if name in found.given]
    return list(dict.fromkeys([*names[::step], *given[:most]]))


def form_at(found: Local, name: str) -> str:
    """The format of a file; empty if it isn't known."""
    with suppress(InputError):
        return FORMATS.get(ending(name)) or form_of(head_of(found.files[name]), name)
    return ""


def read_decoded(found: Local, options: Options, chosen: Sequence[str]) -> tuple[Sample, Options]:
    """The sample, and the options that it was read with: its encoding is GUESSED if it is neither known nor UTF-8."""
    sample = read_sample(found, options, chosen)
    if options.encoding or not has_other_encoding(sample):
        return sample, options
    guessed = replace(options, encoding=GUESSED)
    return read_sample(found, guessed, chosen), guessed


def read_sample(found: Local, options: Options, chosen: Sequence[str]) -> Sample:
    """Some documents of each file: all of them, or of a large text a share for each file."""
    sample = Sample(LOOKED_AT)
    for number, name in enumerate(chosen):
        path = found.files[name]
        before = len(sample.texts)
        try:
            with open_raw(path) as raw, closing(read_file(raw, name, family(name), options)) as in_file:
                size = sample.take(in_file, sample.left / (len(chosen) - number))
                part = 1.0 if raw.closed else part_read(path, raw, len(sample.texts) - before)
        except InputError as error:
            sample.flaws[name] = Loss(name, 0, UNREADABLE, str(error))
            del sample.texts[before:]
            continue
        sample.left -= size
        sample.documents += (len(sample.texts) - before) / part
        sample.characters += size / part
    return sample


def part_read(path: Path, raw: io.BufferedReader, documents: int) -> float:
    """About which part of a file was read, above 0."""
    if ending(path.name) == ".parquet":
        with suppress(OSError, ValueError):
            return min(1.0, max(documents, 1) / max(1, pq.read_metadata(path).num_rows))
    return min(1.0, max(raw.tell(), 1) / max(1, path.stat().st_size))


def check(found: Local, sample: Sample, what: str) -> None:
    """Raise InputError, as a run would, if too many files or records can't be read."""
    gone = {name: Loss(name, 0, NOTHING) for name in found.gone}
    check_files(sample.flaws | gone, found.given, len(found.files) + len(found.gone), MAX_LOST)
    losses = Losses([*sample.flaws.values(), *sample.losses])
    losses.check(what, len(sample.texts), MAX_LOST, sample.skipped, "")


def files_in_words(found: Local) -> str:
    """The files by format: `3 text files, 1 CSV file`."""
    forms = Counter(form_at(found, name) or "other" for name in list(found.files)[:MOST_FILES])
    if len(found.files) > MOST_FILES:
        [(most, _)] = forms.most_common(1)
        return f"{len(found.files):,} files, most of them {most}"
    said = []
    for form, number in forms.most_common():
        said.append(f"{number:,} {form} file{'s' if number > 1 else ''}")
    return ", ".join(said)


# Encodings


def encoding_of(found: Local, names: Sequence[str]) -> str:
    """The encoding of text files, if one of them is UTF-16 without a mark; empty for UTF-8."""
    for name in names:
        if form_at(found, name) in NO_TEXT:
            continue
        with suppress(InputError):
            encoding = unmarked_utf_16(head_of(found.files[name]))
            if encoding:
                return encoding
    return ""


def has_other_encoding(sample: Sample) -> bool:
    """Whether text was lost because it isn't UTF-8."""
    return any(loss.reason == NOT_UTF8 for loss in [*sample.losses, *sample.flaws.values()])


def doubt_of_encoding(documents: Sequence[str], what: str, most: float = MOST_ACCENTS) -> str:
    """What to say of the guess that text is in GUESSED. Raises InputError if more letters than `most` are beyond ASCII.

    what: the files; most: a share of the letters.
    """
    letters = beyond = 0
    for text in documents:
        if text.isascii():
            continue
        here = [character for character in text if character.isalpha()]
        letters += len(here)
        beyond += sum(character > "\x7f" for character in here)
    if beyond > most * letters:
        raise InputError(
            f"{what}: some text is not UTF-8, and read as {GUESSED} it would have {100 * beyond / letters:.0f} % of "
            "letters beyond ASCII. Convert it, for example from Cyrillic: iconv -f windows-1251 -t UTF-8 FILE > NEW."
        )
    return f"Some text is not UTF-8 and is read as {GUESSED}, which is a guess; look whether its accents are right."


def is_utf8(path: Path, name: str) -> bool:
    """Whether a file of text, perhaps compressed, is UTF-8 or has a mark of another encoding."""
    with reading(name), open_raw(path) as raw:
        _, file = content_of(raw, name, "")
        try:
            for _ in io.TextIOWrapper(file, "utf-8"):
                pass
        except UnicodeDecodeError:
            return False
    return True


# Columns


class Column(NamedTuple):
    """A column with the text of tables."""

    name: str = ""  # empty: there are no tables, or their names differ
    is_usual: bool = True  # whether it is found without being asked for
    others: Sequence[str] = ()  # that may be meant too

    @property
    def setting(self) -> str:
        """What `download.column` is set to; empty if the column is found without it."""
        return "" if self.is_usual else self.name


def columns_of_tables(found: Local, options: Options, names: Sequence[str]) -> dict[str, list[Column]]:
    """The columns with the text in the tables among files, by their names: one column of each table."""
    by_name: dict[str, list[Column]] = {}
    tables = [name for name in names if form_at(found, name) in ROWS.values()]
    for name in tables[:SAMPLED_TABLES]:
        with suppress(InputError):  # the sample reports it
            column = column_in(sampled_rows(found.files[name], name, options.encoding), name)
            if column.name:
                by_name.setdefault(column.name, []).append(column)
    return by_name


def common_column(by_name: dict[str, list[Column]]) -> Column:
    """The column with the text in most tables.

    Empty if there are no tables, or if their columns differ but each is found without being asked for.
    """
    every = list(itertools.chain.from_iterable(by_name.values()))
    has_usual_names = all(column.is_usual for column in every)
    if not by_name or (len(by_name) > 1 and has_usual_names):
        return Column()
    chosen = max(by_name, key=lambda name: len(by_name[name]))
    is_usual = all(column.is_usual for column in by_name[chosen])
    names = dict.fromkeys(name for column in every for name in (column.name, *column.others))
    return Column(chosen, is_usual, [name for name in names if name != chosen])


def doubts_of_columns(by_name: dict[str, list[Column]]) -> list[str]:
    """What to say of tables whose text is in columns of several names."""
    if len(by_name) < 2:
        return []
    return [f"The tables have their text in different columns: {', '.join(by_name)}."]


def sampled_rows(path: Path, name: str, encoding: str) -> list[dict]:
    """The first rows of a table or JSON file."""
    if ending(name) not in ROWS:
        return []
    for code in (encoding, GUESSED):
        rows = itertools.islice(records(path, name, code), SAMPLED_ROWS)
        good = [row[1] for row in rows if not isinstance(row, Loss)]
        if good:
            return good
    return []


def column_in(rows: list[dict], where: str) -> Column:
    """The column with the text, by the first rows of a table.

    One with a usual name comes first, then that with the longest texts. Raises InputError if no column has prose.
    """
    if not rows:
        return Column()
    profiles = profiles_of(rows)
    prose = prose_in(profiles)
    usual = ""
    with suppress(InputError):  # two columns have usual names
        usual = text_column(rows[0], "", where)
    if usual:
        return Column(usual, True, rivals_of(usual, profiles, prose))
    if not prose:
        text_column(rows[0], "", where, optional=False)
    chosen = prose[0].name
    return Column(chosen, False, rivals_of(chosen, profiles, prose))


def rivals_of(chosen: str, profiles: dict[str, Profile], prose: Sequence[Profile]) -> list[str]:
    """The other columns whose texts are long enough to be meant."""
    least = RIVAL * profiles[chosen].length if chosen in profiles else 0
    return [profile.name for profile in prose if profile.name != chosen and profile.length >= least]


# Documents of text files


def documents_in(found: Local, options: Options, chosen: Sequence[str]) -> str:
    """What a document of the text files is, for download.documents_by; empty if each file is one."""
    plain = [name for name in chosen if form_at(found, name) in TEXT.values()]
    heads = {name: head_lines(found.files[name], name, options.encoding) for name in plain}
    large = [name for name in plain if is_large(heads[name])]
    if large:
        if 2 * len(large) < len(plain):  # the others would be divided too
            return "file"
        units = Counter(unit_of(heads[name]) for name in large)
        return max(units, key=lambda unit: units[unit])
    units = Counter(unit_of(lines) for lines in heads.values())
    if len(plain) <= FEW_FILES and units["line"] == len(plain) > 0:
        return "line"
    return "blank-line" if len(plain) == 1 == units["blank-line"] else ""


def head_lines(path: Path, name: str, encoding: str) -> list[bytes]:
    """The lines at the beginning of a text file, in UTF-8; none if it can't be read, or is WikiExtractor's."""
    with suppress(InputError), reading(name), open_raw(path) as raw:
        _, file = content_of(raw, name, encoding)
        head = file.read(HEAD)
        return [] if texts.WIKI.match(head) else head.splitlines()
    return []


def is_large(lines: Sequence[bytes]) -> bool:
    """Whether a file, of which these lines were read, is too large to be one document without being asked for."""
    return sum(map(len, lines)) + len(lines) > texts.LARGE


def unit_of(lines: Sequence[bytes]) -> str:
    """What a document of a text file is, by the lines at its beginning: a line, a paragraph, or the whole file."""
    full = [line for line in lines if line.strip()]
    if len(full) < FEWEST_LINES:
        return "file"
    if len(lines) - len(full) > BLANK_LINES * len(lines):
        return "blank-line"
    begins = [line.lstrip()[:4].decode(errors="ignore")[:1] for line in full]
    is_wrapped = sum(map(str.islower, begins)) > WRAPPED * len(full)
    return "file" if is_wrapped else "line"


# Data sets of the hub


def look_at_dataset(name: str) -> TextOverview:
    """What the beginning of a data set of the hub is. Raises InputError if it can't be read."""
    from tasks.corpus.streams import StreamReader

    split = Split(name, "", "train", "")
    rows, _ = split.stream()
    first: list[dict] = []
    for table in itertools.islice(rows, SAMPLED_ROWS):
        first += table.to_pylist()
    column = column_in(first, name)
    options = Options(column=column.setting)
    sample = Sample(LOOKED_AT / 10)
    with closing(iter(StreamReader(split, options, None))) as documents:
        size = sample.take(documents, sample.left)
    Losses(sample.losses).check(name, len(sample.texts), MAX_LOST, sample.skipped, "")
    settings = {"dataset": name} | ({"column": column.name} if options.column else {})
    return TextOverview(
        settings=settings,
        about=f"the data set {name} of the hub",
        files=0,
        bytes=0,
        texts=sample.texts,
        documents=len(sample.texts),
        characters=size,
        is_all=sample.is_all,
        sources=sample.sources,
        column=column.name,
        others=list(column.others),
    )
