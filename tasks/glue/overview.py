"""What somebody's labelled data is: which columns have the text and the label, of which kind the label is, how many.

A sample of the rows shows the columns; then the task is read as a run reads it, which finds what it refuses.
"""

import itertools
import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from model.errors import InputError
from model.settings import Kind
from tasks.corpus.columns import list_names, value_at
from tasks.corpus.containers import head_of
from tasks.corpus.kinds import ending
from tasks.corpus.losses import NOT_UTF8, Loss
from tasks.corpus.overview import GUESSED, doubt_of_encoding, is_utf8
from tasks.corpus.profile import Profile, profiles_of, prose_in
from tasks.corpus.rows import records
from tasks.glue.classes import MOST_NUMBERS
from tasks.glue.conll import SPAN
from tasks.glue.data import CONLL, Files, splits_of
from tasks.glue.labels import is_list, is_written_list
from tasks.glue.lists import parse_list
from tasks.glue.own import FILE, RESERVED, Definition
from tasks.glue.pieces import TEXT, TOKENS, USUAL
from tasks.glue.reading import Data, read_files
from tasks.glue.table import LABEL

SAMPLED = 20_000  # rows that show what the columns hold
LARGEST = 500_000_000  # bytes of the files of a task that is read whole
MOST_CLASSES = 0.2  # different values, as a share of the rows, up to which words are classes
RARE_CLASSES = 0.5  # the same, where no column has so few
FEWEST_CLASSES = 10  # different values that may be classes however few rows there are, if some repeat
LONGEST_NAME = 60  # characters of the median name of a class
SEPARATORS = re.compile(r"\s*[,;|]\s*")  # between several labels in a string
SEPARATED = 0.3  # of the strings, from which those with a separator show that it divides labels
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
NUMBERED = re.compile(r"(.*?)[ _-]?([12ab])")  # the names of the two texts of a pair
PAIRS = (  # other names of such columns
    ("premise", "hypothesis"),
    ("question", "sentence"),
    ("question", "answer"),
    ("question", "passage"),
    ("query", "passage"),
    ("query", "document"),
)
HINTS = re.compile(  # of the name of a label's column, in some languages
    r"label|class|categ|kateg|klass|target|topic|thema|theme|tema|sentiment|tag|genre|intent|rating|stars|score|type"
    r"|emotion|urteil|bewertung",
    re.IGNORECASE,
)
# Numbers as Germans write 3,5 and 1.200,50, or with commas as in 1,200; perhaps with a unit. 1,2,3 is no number.
NUMBER = r"\d{1,3}(\.\d{3})+(,\d+)?|\d{1,3}(,\d{3})+(\.\d+)?|\d+([.,]\d+)?"
WITH_COMMA = re.compile(rf"[€$£]?\s*[+-]?({NUMBER})\s*[€$£%]?")
MOST_ACCENTS_IN_NAMES = 0.6  # of the letters of all classes; short words have many, but Cyrillic by a wrong guess more
FEWEST_WORDS = 3  # of a name that is rather a text than the name of a column
DATE = re.compile(r"\d{1,4}[-./]\d{1,2}[-./]\d{1,4}.*")


@dataclass(frozen=True)
class TaskOverview:
    """What was found in labelled data."""

    definition: Definition
    data: Data | None  # as a run reads it; None if it wasn't read
    train: list[Path] = field(default_factory=list)  # the files with the training rows
    others: dict[str, list[str]] = field(default_factory=dict)  # by field, columns that may be meant too
    doubts: list[str] = field(default_factory=list)
    is_readable: bool = True  # as text to train on, which tokens are not if their lists are written as text

    @property
    def texts(self) -> list[str]:
        """The texts of the training rows; both texts of a pair in one."""
        if self.data is None:
            return []
        table = self.data.tables["train"]
        columns = [table[name] for name in self.data.task.columns]
        return [" ".join(row) for row in zip(*columns, strict=True)]

    @property
    def classes(self) -> dict[str, int]:
        """The labelled rows by class, without those for testing; tags are counted by token. Empty for numbers."""
        if self.data is None or not self.data.task.labels:
            return {}
        counts = Counter(dict.fromkeys(self.data.task.labels, 0))
        for split, table in self.data.tables.items():
            if split != "test":
                for label in table[LABEL]:
                    counts.update(self.names_in(label))
        return dict(counts)

    def names_in(self, label: Any) -> list[str]:
        """The names of the classes in a label, which is a number, or a tuple with one for each token or class."""
        names = self.data.task.labels if self.data else ()
        if self.definition.kind == "multilabel":
            return [name for name, is_there in zip(names, label, strict=True) if is_there]
        places = label if self.definition.kind == "tokens" else [label]
        return [names[place] for place in places]


@dataclass(frozen=True)
class Chosen:
    """The columns of a task, and what else may be meant."""

    text: str
    label: str
    kind: Kind
    pair: str = ""
    others: dict[str, list[str]] = field(default_factory=dict)
    unlabelled: float = 0.0  # share of the rows without a label
    codes: int = 0  # different whole numbers that are read as a measure, although they repeat

    @property
    def lacks_labels(self) -> bool:
        """Whether more rows have no label than a run accepts without being asked for."""
        most: float = Definition.model_fields["max_unlabelled"].default
        return self.unlabelled > most


def look_at_labels(data: str) -> TaskOverview:
    """What labelled data is: a file, a folder, or a data set of the hub. Raises InputError if it can't be used."""
    first = Definition(name=name_of(data), data=data)
    if first.repository():
        missing = f"There is no file or folder {data}"
        if not is_hub_name(data):
            raise InputError(f"{missing}. Correct the path, or name a data set of the hub as OWNER/NAME.")
        doubt = f"{missing}; if it is a data set of the hub, nobody has looked at it: set its text, label and kind."
        return TaskOverview(first, None, doubts=[doubt])
    files, _ = splits_of(first)
    if "train" not in files:
        read_files(first)  # which refuses it
    train = files["train"][0]
    encoding = encoding_of(train)
    if has_token_lines(train):
        refuse_without_sentences(train)
        definition = Definition(name=first.name, data=data, kind="tokens", encoding=encoding)
        overview = TaskOverview(definition, read_files(definition), files["train"])
        doubts = doubts_of_encoding(train, encoding, overview.texts, overview.classes)
        return replace(overview, doubts=doubts)
    return look_at_table(first, files, encoding)


def look_at_table(first: Definition, files: Files, encoding: str) -> TaskOverview:
    """What labelled data with a text and a label in each row is. `first`: its name and where it is."""
    paths = files["train"]
    train = paths[0]
    where = f"{first.name}/{train.name}"
    rows = sampled_rows(train, encoding)
    chosen = choose(rows, where)
    texts = [value_at(row, chosen.text) for row in rows]
    labels = [value_at(row, chosen.label) for row in rows]
    if ending(train.name) in (".csv", ".tsv"):
        refuse_without_names(chosen.label, rows, where)
    definition = Definition(name=first.name, data=first.data, **settings_of(chosen, encoding))
    doubts = doubts_of_encoding(train, encoding, map(str, texts), map(str, labels))
    doubts += doubts_of_labels(chosen)
    is_readable = chosen.kind != "tokens" or all(map(is_list, texts))
    size = bytes_of(files)
    if size > LARGEST:
        doubts.append(f"{first.data} has {size / 1e6:,.0f} MB; only its first {SAMPLED:,} rows were looked at.")
        return TaskOverview(definition, None, paths, chosen.others, doubts, is_readable)
    return TaskOverview(definition, read_files(definition), paths, chosen.others, doubts, is_readable)


def encoding_of(path: Path) -> str:
    """The encoding of a file of labelled data; empty for UTF-8, and where the format has its own."""
    return GUESSED if is_textual(path) and not is_utf8(path, path.name) else ""


def doubts_of_encoding(path: Path, encoding: str, texts: Iterable[str], labels: Iterable[str]) -> list[str]:
    """What to say of an encoding that was guessed; nothing of an empty one.

    Raises InputError if texts or labels, as they were read by it, show that the guess is wrong.
    """
    if not encoding:
        return []
    names = " ".join(dict.fromkeys(labels))  # in one text, since a short name may be half of accents
    doubt_of_encoding(list(texts), path.name)
    doubt_of_encoding([names], path.name, MOST_ACCENTS_IN_NAMES)
    return [f"{path.name} is not UTF-8 and is read as {encoding}, which is a guess; look at its accents."]


def doubts_of_labels(chosen: Chosen) -> list[str]:
    """What to say of rows without a label, if they are too many for a run, and of numbers that may be codes."""
    doubts = []
    if chosen.lacks_labels:
        doubts.append(f"{100 * chosen.unlabelled:.0f} % of the rows have no label; they are left out.")
    if chosen.codes:
        doubts.append(
            f"its labels are {chosen.codes:,} different whole numbers that repeat, and are read as numbers that "
            'measure something. If they are codes of classes, set kind to "classes".'
        )
    return doubts


def settings_of(chosen: Chosen, encoding: str) -> dict[str, Any]:
    """The settings of a task with these columns, beside its name and data; without those that are empty."""
    settings: dict[str, Any] = {
        "text": chosen.text,
        "pair": chosen.pair,
        "label": chosen.label,
        "kind": "" if chosen.kind == "classes" else chosen.kind,  # as in the recipe file: read_files tells them apart
        "encoding": encoding,
    }
    if chosen.lacks_labels:
        settings["max_unlabelled"] = min(0.99, round(chosen.unlabelled + 0.05, 2))
    return {name: value for name, value in settings.items() if value}


def bytes_of(files: Files) -> int:
    """The size of the files of all splits."""
    return sum(path.stat().st_size for paths in files.values() for path in paths)


def name_of(data: str) -> str:
    """A name for a task, from that of its file, folder or data set."""
    last = Path(data).expanduser().resolve().name if Path(data).expanduser().exists() else data.rsplit("/", 1)[-1]
    stem = last.split(".")[0] if FILE.fullmatch(last) else last
    plain = re.sub(r"[^\w.-]+", "-", stem).strip("-.")[:50] or "labels"
    return f"my-{plain}" if plain in RESERVED else plain


def is_textual(path: Path) -> bool:
    """Whether a file of labelled data is text."""
    return ending(path.name) not in (".parquet", ".arrow", ".feather")


def has_token_lines(path: Path) -> bool:
    """Whether a file has a token and its tag on each line."""
    if ending(path.name) in CONLL:
        return True
    if ending(path.name) != ".tsv":
        return False
    blocks = head_of(path).decode(errors="replace").replace("\r\n", "\n").strip().split("\n\n")
    last_fields = [line.rsplit("\t", 1)[-1] for block in blocks for line in block.split("\n")]
    return len(blocks) > 1 and any(map(SPAN.fullmatch, last_fields))


def refuse_without_sentences(path: Path) -> None:
    """Raise InputError for a file of text with labels that is no CoNLL, although its ending may be one of that."""
    lines = head_of(path).decode(errors="replace").strip().splitlines()
    if ending(path.name) == ".txt" and all(line.strip() for line in lines):
        raise InputError(
            f"{path.name} is read as CoNLL, which its ending may mean, but it has no blank lines between sentences. If "
            "it is a table, name it .tsv or .csv."
        )


def sampled_rows(path: Path, encoding: str) -> list[dict]:
    """The first rows of a file of labelled data. Raises InputError, as a run would, for one that can't be read."""
    rows = []
    for row in itertools.islice(records(path, path.name, encoding), SAMPLED):
        if isinstance(row, Loss):
            advice = " Set encoding of the task." if row.reason == NOT_UTF8 else ""
            raise InputError(f"{path.name}: line {row.line:,} can't be read: {row.reason}. Correct it.{advice}")
        rows.append(row[1])
    if not rows:
        raise InputError(f"{path.name} has no rows. Get it again.")
    return rows


# Columns


def choose(rows: list[dict], where: str) -> Chosen:
    """The columns of a task, by a sample of rows. Raises InputError if there is no text, or no label."""
    profiles = profiles_of(rows)
    tokens = tokens_and_tags(profiles)
    if tokens:
        return Chosen(*tokens, "tokens")
    texts = text_columns(profiles)
    if not texts:
        raise InputError(f"{where} has no column with texts. Its columns: {list_names(list(profiles))}.")
    text, pair = pair_in(texts) or (texts[0], "")
    kinds = labels_beside(profiles, text, pair, where)
    label = next(iter(kinds))
    refuse_commas(profiles[label], where)
    others = columns_beside((text, pair, label), texts, list(kinds))
    unlabelled = profiles[label].gaps / len(rows)
    codes = codes_in(profiles[label]) if kinds[label] == "regression" else 0
    return Chosen(text, label, kinds[label], pair, others, unlabelled, codes)


def codes_in(labels: Profile) -> int:
    """The number of different labels, if they are whole numbers that repeat, as codes of classes do; else 0."""
    numbers = labels.numbers or [math.nan]
    is_whole = all(number.is_integer() for number in numbers)
    return labels.different if is_whole and repeats(labels, RARE_CLASSES) else 0


def labels_beside(profiles: dict[str, Profile], text: str, pair: str, where: str) -> dict[str, Kind]:
    """The columns that may have the label of texts, with its kind; the likeliest first. Raises InputError for none."""
    left = {name: profile for name, profile in profiles.items() if name not in (text, pair)}
    kinds = label_columns(left, MOST_CLASSES) or label_columns(left, RARE_CLASSES)
    if not kinds:
        raise InputError(
            f"{where} has no column with labels, which are a few words or whole numbers that repeat, numbers, or "
            f"lists. The text seems to be {text}; its columns: {list_names(list(profiles))}."
        )
    return kinds


def columns_beside(taken: Sequence[str], texts: Sequence[str], labels: Sequence[str]) -> dict[str, list[str]]:
    """By field, the columns that may be meant too: those that may have texts or labels, and were not taken."""
    return {
        TEXT: [name for name in texts if name not in taken],
        LABEL: [name for name in labels if name not in taken and name not in texts],
    }


def refuse_without_names(label: str, rows: list[dict], where: str) -> None:
    """Raise InputError if the first line of a table is a row, and not the names of its columns.

    Then the name of the label's column is one of the labels, and another name is a text or a value of its column too.
    """
    values = {name for row in rows for name in row if row[name] == name}  # names that are also values
    is_text = [len(name.split()) >= FEWEST_WORDS for name in rows[0] if name != label]
    if label in values and (len(values) > 1 or any(is_text)):
        raise InputError(
            f"{where} seems to begin with a row, since its first line has the label {label}; expected the names "
            "of the columns. Add a first line, such as: text,label"
        )


def refuse_commas(labels: Profile, where: str) -> None:
    """Raise InputError for numbers with a comma, which may stand for a point or between several numbers."""
    if have_commas(labels):
        shown = next(value for value in labels.strings if "," in value)
        raise InputError(
            f"{where}: the labels in {labels.name} are numbers with a comma, such as {shown}; expected a point. Write "
            "3.5 for 3,5 and 1200 for 1,200, without a unit; or, between several classes, a semicolon as in 3;5."
        )


def have_commas(profile: Profile) -> bool:
    """Whether all values are numbers, some of them with a comma."""
    is_text = profile.strings and len(profile.strings) == len(profile.values)
    stripped = [value.strip() for value in profile.strings]
    return bool(is_text) and all(map(WITH_COMMA.fullmatch, stripped)) and any("," in value for value in stripped)


def tokens_and_tags(profiles: dict[str, Profile]) -> tuple[str, str] | None:
    """The columns with the tokens and with their tags: lists that are equally long in all rows; None if there are none.

    Usual names come first; else the tokens are the column with more different values in its lists.
    """
    lists: dict[str, list[list]] = {}
    for name, profile in profiles.items():
        found = [as_list(value) for value in profile.values]
        if found and None not in found:
            lists[name] = [values for values in found if values is not None]
    for (name, values), (other, tags) in itertools.permutations(lists.items(), 2):
        same_lengths = list(map(len, values)) == list(map(len, tags))
        is_usual = name.lower() in USUAL[TOKENS] or other.lower() in USUAL["tags"]
        has_words = any(isinstance(value, str) for row in values for value in row)
        if same_lengths and has_words and (is_usual or vocabulary_of(values) > vocabulary_of(tags)):
            return name, other
    return None


def vocabulary_of(lists: Sequence[list]) -> int:
    """The number of different values in lists."""
    return len({str(value) for values in lists for value in values})


def as_list(value: object) -> list | None:
    """A list, or the one that a text stands for; None for all else."""
    if is_list(value):
        return list(value)  # type: ignore[call-overload]
    if isinstance(value, str) and is_written_list(value):
        return parse_list(value)
    return None


def text_columns(profiles: dict[str, Profile]) -> list[str]:
    """The columns that may have the text: first those with usual names, then the longest; single words if no other."""
    prose = [profile.name for profile in prose_in(profiles) if not seems_listed(profile)]
    usual = [name for name in prose if name.lower() in USUAL[TEXT]]
    if prose:
        return list(dict.fromkeys([*usual, *prose]))
    words = []
    for profile in profiles.values():
        is_words = profile.strings and len(profile.strings) == len(profile.values) and profile.numbers is None
        is_words = is_words and not have_commas(profile)
        if is_words and profile.different > MOST_CLASSES * len(profile.values) and not seems_listed(profile):
            words.append(profile)
    words.sort(key=lambda profile: (profile.name.lower() not in USUAL[TEXT], -profile.different))
    return [profile.name for profile in words]


def pair_in(texts: Sequence[str]) -> tuple[str, str] | None:
    """The two columns of a pair of texts, by their names; None if there are none."""
    by_lower = {name.lower(): name for name in texts}
    for first, second in PAIRS:
        if first in by_lower and second in by_lower:
            return by_lower[first], by_lower[second]
    stems: dict[str, list[str]] = {}
    for name in sorted(texts):
        match = NUMBERED.fullmatch(name.lower())
        if match:
            stems.setdefault(match[1], []).append(name)
    for names in stems.values():
        if len(names) == 2:
            return names[0], names[1]
    return None


def label_columns(profiles: dict[str, Profile], most: float) -> dict[str, Kind]:
    """The columns that may have the label, with its kind: those with usual names first, classes before numbers."""
    found: dict[str, Kind] = {}
    for name, profile in profiles.items():
        kind = kind_of(profile, most)
        if kind:
            found[name] = kind
    order: list[Kind] = ["classes", "multilabel", "regression", "tokens"]

    def rank(name: str) -> tuple:
        lower = name.lower()
        place = USUAL[LABEL].index(lower) if lower in USUAL[LABEL] else len(USUAL[LABEL])
        is_words = profiles[name].numbers is None
        return place, HINTS.search(lower) is None, order.index(found[name]), not is_words, profiles[name].different

    return {name: found[name] for name in sorted(found, key=rank)}


def kind_of(profile: Profile, most: float) -> Kind | None:
    """What the labels in a column would be; None if it can't have labels, as with texts, names and indices.

    `most`: different values, as a share of the rows, up to which they are classes.
    """
    values = profile.values
    if not values or profile.different < 2:
        return None
    if all(as_list(value) is not None for value in values):
        return "multilabel"
    numbers = profile.numbers
    if numbers is not None:
        are_whole = all(number.is_integer() for number in numbers)
        if are_whole and profile.different <= MOST_NUMBERS and repeats(profile, most):
            return "classes"
        is_usual = profile.name.lower() in USUAL[LABEL]
        return None if profile.is_index and not is_usual else "regression"
    if have_commas(profile):
        return "regression"
    if seems_listed(profile):
        return "multilabel"
    if any(isinstance(value, dict | list) for value in values) or profile.length > LONGEST_NAME:
        return None
    if profile.strings and all(map(DATE.fullmatch, profile.strings)):
        return None
    return "classes" if repeats(profile, most) else None


def repeats(profile: Profile, most: float) -> bool:
    """Whether values repeat so often that they may be classes: up to `most` of them are different, or a few."""
    count = len(profile.values)
    few = max(most * count, min(FEWEST_CLASSES, count - 1))
    return profile.different <= few


def seems_listed(profile: Profile) -> bool:
    """Whether strings are names of several classes with a comma or the like between them, as in `billing, login`."""
    strings = profile.strings
    if not strings or len(strings) < len(profile.values) or profile.length > LONGEST_NAME:
        return False
    parts = [SEPARATORS.split(value.strip()) for value in strings]
    several = sum(len(row) > 1 for row in parts)
    if several < SEPARATED * len(strings):
        return False
    names = {name for row in parts for name in row}
    longest = statistics.median(len(name) for row in parts for name in row)
    total = sum(map(len, parts))
    return "" not in names and longest <= LONGEST_NAME / 2 and len(names) <= max(2, MOST_CLASSES * total)


def is_hub_name(name: str) -> bool:
    """Whether this may be the name of something on the hub, and is not a path of this machine, perhaps misspelt."""
    owner = Path(name).expanduser().parts[0] if name else ""
    return bool(HUB_NAME.fullmatch(name)) and not FILE.fullmatch(name) and not Path(owner).exists()
