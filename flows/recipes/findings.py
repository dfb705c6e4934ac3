"""What was found in somebody's text and labels, in words: how much of what, and what may be wrong with it."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from model.wording import counted, number_in_words
from tasks.corpus.overview import TextOverview
from tasks.glue.overview import TaskOverview
from tasks.glue.reading import Data
from tasks.glue.table import LABEL
from tasks.text import words
from tasks.text.words import Normaliser
from tasks.text.writing import Writing, lost_of, writing_of

LITTLE = 1e6  # characters of text, which are too few for a good model
SHOWN_CLASSES = 12
SHOWN_COLUMNS = 5
FEW_ROWS = 10  # of a class
FEW_LABELS = 200  # rows
MOST_OF_ONE = 0.9  # of the rows in one class
REPEATED = 0.05  # of the documents, from which repetitions are said
LOST = 0.01  # of the labelled texts, from which it is said that ASCII deletes something
KNOWN = 0.6  # of the words in labelled texts, that should occur in the text
UNICODE = Normaliser(characters="unicode")
SHORT = 40  # characters, the median of documents that are hardly texts
WORDS = {"classes": "classes", "multilabel": "classes, several for a text", "tokens": "tags"}


@dataclass(frozen=True)
class Found:
    """What somebody brings."""

    text: TextOverview | None
    tasks: list[TaskOverview]
    files: list[str]  # with the text, as they were given
    start: str = ""  # a model to begin from
    has_gpu: bool = False
    warnings: list[str] = field(default_factory=list)  # of the readers

    @cached_property
    def texts(self) -> list[str]:
        """The documents that were looked at, or without any the labelled texts."""
        if self.text:
            return self.text.texts
        return [text for task in self.tasks for text in task.texts]

    @cached_property
    def characters(self) -> float:
        """How much text there is, by an estimate if it wasn't looked at whole."""
        return self.text.characters if self.text else sum(map(len, self.texts))

    @property
    def documents(self) -> float:
        """Likewise."""
        return self.text.documents if self.text else len(self.texts)

    @cached_property
    def writing(self) -> Writing:
        """How the texts are written."""
        return writing_of(self.texts)

    @cached_property
    def tasks_beyond_ascii(self) -> list[str]:
        """The tasks whose texts ASCII would spoil."""
        return [one.definition.name for one in self.tasks if writing_of(one.texts).needs_unicode_for_labels]

    @property
    def needs_unicode(self) -> bool:
        """Whether ASCII would spoil the text, or that of a task."""
        return self.writing.needs_unicode or bool(self.tasks_beyond_ascii)

    @property
    def only_finetunes(self) -> bool:
        """Whether there is nothing to pretrain on, but a model to finetune."""
        return bool(self.start) and self.text is None


def text_in_words(found: Found) -> list[str]:
    """How much text there is, and in which scripts, in one or two lines; none without text."""
    text = found.text
    if not found.texts:
        return []
    scripts = found.writing.in_words
    if text is None:
        return [f"The texts of the labelled rows: {counted(len(found.texts), 'text')}, {scripts}"]
    if text.is_all:
        return [f"{amount_of(text, '')}; {scripts}"]
    read = in_millions(sum(map(len, text.texts)))
    looked_at = f"Looked at: {counted(len(text.texts), 'document')} with {read} characters"
    return [f"{amount_of(text, 'about ')}; {scripts}", looked_at]


def amount_of(text: TextOverview, about: str) -> str:
    """The files with their documents and characters. `about`: the word in front of estimates."""
    if not text.files and not text.is_all:  # nobody knows how much there is on the hub
        return text.about
    size = f", {size_in_words(text.bytes)}" if text.bytes else ""
    documents = counted(rounded(text.documents, text.is_all), "document")
    return f"{text.about}{size}: {about}{documents} with {about}{in_millions(text.characters)} characters"


def task_in_words(task: TaskOverview) -> str:
    """What a task is: its rows by split, its columns, and its classes or numbers."""
    own = task.definition
    data = task.data
    if data is None:
        return f"{own.name}: not looked at"
    splits = []
    for split, table in (data.tables | data.unlabelled).items():
        splits.append(f"{len(table):,} for {'training' if split == 'train' else split}")
    unit = "sentences" if own.kind == "tokens" else "rows"
    columns = " and ".join(filter(None, [own.text, own.pair]))
    where = f"texts in {columns}, labels in {own.label}: " if own.label else ""
    return f"{own.name}: {rows_of(data):,} {unit} ({', '.join(splits)}); {where}{labels_in_words(task, data)}"


def rows_of(data: Data) -> int:
    """The number of labelled rows."""
    return sum(len(table) for table in data.tables.values())


def labels_in_words(task: TaskOverview, data: Data) -> str:
    """The classes with their counts, the most frequent first; of a regression the range."""
    if not task.classes:
        values = data.tables["train"][LABEL]
        return f"numbers from {number_in_words(values.min())} to {number_in_words(values.max())}"
    order = Counter(task.classes).most_common()
    shown = [f"{name} ({count:,})" for name, count in order[:SHOWN_CLASSES]]
    more = f" and {len(order) - SHOWN_CLASSES:,} more" if len(order) > SHOWN_CLASSES else ""
    return f"{len(order):,} {WORDS[task.definition.kind]}: {', '.join(shown)}{more}"


# Doubts


def doubts_on(found: Found) -> list[str]:
    """What may be wrong with text and labels, or with how they are read, each in a sentence."""
    doubts = list(found.warnings)
    if found.text:
        doubts += doubts_on_text(found, found.text)
    elif found.texts and not found.start:
        doubts.append(
            f"There is no text but that of the labelled rows, {in_millions(found.characters)} characters. Pass files "
            "with more text of its kind, or begin from a public encoder: --start google-bert/bert-base-uncased."
        )
    for task in found.tasks:
        name = task.definition.name
        doubts += [f"{name}: {doubt}" for doubt in [*task.doubts, *doubts_on_columns(task)]]
        if found.text:
            doubts += [f"{name}: {doubt}" for doubt in doubts_on_both(found.text, task)]
        if not found.start and not found.writing.needs_unicode:
            doubts += [f"{name}: {doubt}" for doubt in doubts_on_ascii(task.texts, found.needs_unicode)]
        if task.data:
            doubts += doubts_on_labels(task, task.data)
    return doubts


def doubts_on_text(found: Found, text: TextOverview) -> list[str]:
    """What may be wrong with the text."""
    doubts = list(text.doubts)
    if text.others:
        doubts.append(f"The text is taken from the column {text.column}; it could also be {first(text.others)}.")
    if text.is_all and found.characters < LITTLE:
        size = in_millions(found.characters)
        doubts.append(f"There is little text, {size} characters: enough to try cram, too little for a good model.")
    share = text.duplicates / max(1, len(text.texts))
    if share > REPEATED:
        doubts.append(f"{percent(share)} of the documents are the same as another one; cram keeps one of each.")
    median = sorted(map(len, text.texts))[len(text.texts) // 2]
    if median < SHORT:
        doubts.append(f"Half of the documents have fewer than {median + 1:,} characters; are they whole texts?")
    return doubts


def doubts_on_columns(task: TaskOverview) -> list[str]:
    """Which other columns may be meant."""
    doubts = []
    for name, chosen in (("text", task.definition.text), ("label", task.definition.label)):
        others = task.others.get(name, [])
        if others:
            doubts.append(f"the {name} is taken from the column {chosen}; it could also be {first(others)}.")
    return doubts


def doubts_on_both(text: TextOverview, task: TaskOverview) -> list[str]:
    """What may be wrong with labelled rows beside this text."""
    doubts = []
    if task.texts:
        known = share_of_known(text.texts, task.texts)
        if known < KNOWN:
            doubts.append(
                f"only {percent(known)} of the words in the labelled texts occur in the text that was looked at; does "
                "it have the same language and subject?"
            )
    own_files = {path.resolve() for path in task.train}
    if own_files & {path.resolve() for path in text.paths}:
        doubts.append(
            "its rows are also among the text. Those that are held out are taken out of the text, but for those of "
            "fewer than 13 words."
        )
    return doubts


def doubts_on_ascii(texts: list[str], has_unicode: bool) -> list[str]:
    """What ASCII would delete from labelled texts. `has_unicode`: the vocabulary reads Unicode because of that."""
    lost = lost_of(texts)
    if lost.share < LOST:
        return []
    where = f"from {percent(lost.share)} of the labelled texts, such as {lost.usual}"
    if has_unicode:
        return [f"ASCII would delete characters {where}, so the vocabulary reads Unicode."]
    return [f'ASCII deletes characters {where}; to keep them, set vocabulary.characters to "unicode".']


def share_of_known(texts: list[str], others: list[str]) -> float:
    """The share of the words in other texts that occur in texts."""
    known = set(words.count(texts, UNICODE)["word"].to_pylist())
    counts = words.count(others, UNICODE)
    total = found = 0
    for word, count in zip(counts["word"].to_pylist(), counts["count"].to_pylist(), strict=True):
        total += count
        found += count * (word in known)
    return found / max(1, total)


def doubts_on_labels(task: TaskOverview, data: Data) -> list[str]:
    """What may be wrong with labelled rows, also by the warnings of their reader."""
    name = task.definition.name
    doubts = []
    classes = Counter(task.classes)
    if classes and task.definition.kind != "tokens":
        rare = [f"{one} ({count:,})" for one, count in classes.items() if count < FEW_ROWS]
        if rare:
            doubts.append(f"{name}: these classes have few rows and can hardly be learned: {first(rare)}.")
        [(most, count)] = classes.most_common(1)
        if count > MOST_OF_ONE * classes.total():
            doubts.append(f"{name}: {percent(count / classes.total())} of the labels are {most}.")
    rows = rows_of(data)
    if rows < FEW_LABELS:
        doubts.append(f"{name}: {counted(rows, 'labelled row')} are few; the interval of the score will be wide.")
    return doubts + [note for note in data.notes if "there is no validation split" not in note]


# Numbers


def first(names: Iterable[str]) -> str:
    """The first of many names, for a sentence."""
    names = list(names)
    more = f" and {len(names) - SHOWN_COLUMNS:,} more" if len(names) > SHOWN_COLUMNS else ""
    return ", ".join(map(str, names[:SHOWN_COLUMNS])) + more


def percent(share: float) -> str:
    """A share in words: `12 %`, `0.4 %`, `less than 0.1 %`."""
    if 0 < share < 0.001:
        return "less than 0.1 %"
    return f"{100 * share:.0f} %" if share >= 0.0995 or not share else f"{100 * share:.1g} %"


def rounded(number: float, is_exact: bool) -> int:
    """A number as it is, or with two digits if it is an estimate."""
    if is_exact or number < 100:
        return round(number)
    digits = 1 - math.floor(math.log10(number))
    return int(round(number, digits))


def size_in_words(size: int) -> str:
    """A number of bytes: `8.1 MB`, `30 kB`."""
    return f"{size / 1e6:,.1f} MB" if size >= 1e6 else f"{max(1, round(size / 1e3)):,} kB"


def in_millions(number: float) -> str:
    """A number in words: `4,700`, `1.2 million`, `3.5 billion`."""
    if number >= 1e9:
        return f"{number / 1e9:,.1f} billion"
    if number >= 1e6:
        return f"{number / 1e6:,.1f} million"
    return f"{round(number):,}"
