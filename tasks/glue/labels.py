"""Labels: values of any type to words, and words to the numbers of classes; and the files that only tasks have."""

import io
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from model import InputError, counted
from model.settings import Kind
from tasks.corpus.containers import BUFFER, content_of, reading
from tasks.glue.own import METRICS, Definition
from tasks.glue.tasks import Task

if TYPE_CHECKING:
    import pandas as pd

FEW = 5  # rows or classes that are named where many are meant
MOST_NUMBERS = 50  # different numbers that are taken for classes; more are a measure
COMMENT = re.compile(r"#(?: \w.*| ?\w+ ?)=")  # above a sentence of a CoNLL file, as `# id = 1`
SEPARATORS = str.maketrans(";|", ",,")  # between several labels in one string
MOST_SHOWN = 60  # characters of a value in a message
LARGEST = 1e38  # of a regression: the weights of a kept model are float32
SPANS = ("B-", "I-", "E-", "S-")  # beginnings of tags in IOB and BIOES
BILOU = {"L-": "E-", "U-": "S-"}  # other names for ends and single tokens of spans


def is_list(value: Any) -> bool:
    """Whether a value is a list, of JSON, Parquet or Arrow."""
    return isinstance(value, list | tuple | np.ndarray)


def rows_of(mask: "pd.Series") -> str:
    """The rows where a mask is true, in words: "row 3", "rows 3, 8, 9, 11, 12 and 40 more".

    They are counted, unless the index has numbers and a name of its own, such as "line".
    """
    what, places = mask.index.name or "row", (mask.index if mask.index.name else np.arange(1, len(mask) + 1))[mask]
    if len(places) == 1:
        return f"{what} {places[0]:,}"
    numbers = [f"{place:,}" for place in places[:FEW]]
    last = f"{len(places) - FEW:,} more" if len(places) > FEW else numbers.pop()
    return f"{what}s {', '.join(numbers)} and {last}"


def refuse(given: "pd.Series", what: str, where: str, fits: "Callable[[Any], bool] | pd.Series", expected: str) -> None:
    """Raise InputError, which names the rows, unless all values fit."""
    if not (right := (given.map(fits) if callable(fits) else fits).astype(bool)).all():
        first = repr(given[~right].iloc[0])
        shown = first if len(first) <= MOST_SHOWN else first[:MOST_SHOWN] + "…"
        raise InputError(f"{where}: {what} of {rows_of(~right)} is {shown}; expected {expected}.")


def number(value: Any) -> float:
    """A value as a finite number; nan if it is none."""
    try:
        made = math.nan if isinstance(value, bool | np.bool_) else float(value)
    except (TypeError, ValueError):
        made = math.nan
    return made if math.isfinite(made) else math.nan


def word(value: Any, names: Sequence[str]) -> str | None:
    """The name of a class: a string, a boolean, or a number, perhaps a place in `names`. None if there is none."""
    if isinstance(value, bool | np.bool_):
        return str(value).lower()
    is_name = isinstance(value, str) and (not names or value.strip() in names)
    if number(value).is_integer() and not is_name:
        place = int(number(value) if isinstance(value, str) else value)
        return names[place] if 0 <= place < len(names) else None if names and place == -1 else str(place)
    return None if value is None or value != value else str(value).strip() or None


def worded(given: "pd.Series", own: Definition, names: Sequence[str], where: str) -> "pd.Series":
    """The labels as words, as tuples of words, or as numbers for a regression; None where there is none.

    Raises InputError for a list in place of one label or the other way round, for words in place of numbers, and for
    labels that a task of the table doesn't have.
    """
    what, help_ = "the label", f"correct it{own.advice('label or kind')}"

    def made(of_value: Callable[[Any], Any], values: Iterable = given) -> "pd.Series":
        return type(given)(list(map(of_value, values)), given.index, object)  # `map` would make nan of None

    if own.kind == "tokens":
        refuse(given, what, where, lambda value: value is None or is_list(value), f"a list of tags; {help_}")
        return made(lambda tags: tags if tags is None else tuple(as_bioes(word(tag, names)) for tag in tags))
    if own.kind == "multilabel":
        several = made(lambda value: value.translate(SEPARATORS).split(",") if isinstance(value, str) else value)
        several = made(lambda value: value if value is None or is_list(value) else [value], several)
        return made(lambda v: v if v is None else tuple(filter(None, (word(one, names) for one in v))), several)
    refuse(given, what, where, lambda value: not (is_list(value) or isinstance(value, dict)), f"one label; {help_}")
    if own.kind == "classes":
        words = made(lambda value: word(value, names))
    else:
        numbers = f"a number (with a point, not a comma), {LARGEST:g} at most; {help_}"
        refuse(given, what, where, lambda value: not word(value, ()) or abs(number(value)) <= LARGEST, numbers)
        words = made(lambda value: number(value) if word(value, ()) else None)
    if own.named:
        fits = words.isin(names) if names else words.astype(float).between(0, 5)
        known = " or ".join(f"{place} ({name})" for place, name in enumerate(names)) or "a number from 0 to 5"
        refuse(given, what, where, fits, f"{known} (-1 marks the unlabelled test split)")
    return words


def parts(given: Any) -> tuple:
    """The classes in a label."""
    return given if isinstance(given, tuple) else (given,)


def classes(counts: Counter, kind: Kind, where: str) -> list[str]:
    """The classes in order: numbers by value, words by letters, whichever order the rows have.

    Raises InputError for what is rather a number or a text than a class.
    """
    values, rows = {name: number(name) for name in counts}, counts.total()
    many = f"{where} has {len(counts):,} different labels in {counted(rows, 'row')}, such as {next(iter(counts))}"
    if any(map(math.isnan, values.values())):
        if len(counts) > max(MOST_NUMBERS, rows / 2):
            raise InputError(f"{many}; expected classes. Set label to another column (finetune.tasks).")
        return sorted(counts)
    if kind == "classes" and (len(counts) > MOST_NUMBERS or not all(value.is_integer() for value in values.values())):
        wanted = f"up to {MOST_NUMBERS} whole numbers for classes"
        raise InputError(f"{many}; expected {wanted}. Set kind to 'regression' (finetune.tasks) for numbers.")
    return sorted(counts, key=lambda name: (values[name], name))


def within_words(tags: Sequence[str]) -> np.ndarray:
    """By tag, that of further parts of the same word: `I-` after `B-`, `E-` after `S-`, else the same; as numbers."""
    later = [{"B-": "I-", "S-": "E-"}.get(tag[:2], tag[:2]) + tag[2:] for tag in tags]
    return np.array([tags.index(name) if name in tags else number for number, name in enumerate(later)])


def as_bioes(tag: str | None) -> str | None:
    """A tag by its name in BIOES, the scheme of which seqeval reads all prefixes."""
    return tag and BILOU.get(tag[:2], tag[:2]) + tag[2:]


def metrics_of(own: Definition, names: Sequence[str], counts: Counter, notes: list[str]) -> tuple[tuple[str, ...], int]:
    """A task's metrics, the score first, and its positive class: of two, the rarer in training. Adds to `notes`.

    Raises InputError for a metric that doesn't fit the classes.
    """
    usual, shown = METRICS[own.kind], ", ".join(names[:FEW])
    if own.kind == "tokens" and (others := [tag for tag in names if tag[:2] not in SPANS and tag != "O"]):
        usual = METRICS["tokens"][1:]
        if own.metric is None:
            notes.append(
                f"{own.name}: the score is accuracy of single tokens, not F1 of spans, because of tags that mark none: "
                f"{', '.join(others[:FEW])} (expected such as B-PER, I-PER and O)."
            )
    if own.metric not in (None, *usual) or (own.metric == "f1" and len(names) != 2):
        wanted = "two classes" if own.metric == "f1" else "tags such as B-PER, I-PER and O"
        raise InputError(f"{own.name}: metric {own.metric!r} needs {wanted}; found {shown}. Change it.")
    positive = min((1, 0), key=lambda place: counts[names[place]]) if own.metric == "f1" else 1
    if own.metric == "f1":
        share = f"{counts[names[positive]]:,} of {counted(counts.total(), 'training label')}"
        notes.append(f"{own.name}: F1 is that of the class {names[positive]}, which {share} are.")
    return tuple(dict.fromkeys([own.metric or usual[0], *usual[:2]])), positive


def numbered(given: "pd.Series", task: Task) -> "pd.Series":
    """Labels as the numbers of their classes: one, a tuple with one for each token, or a tuple of 0 and 1."""
    places = {name: place for place, name in enumerate(task.labels)}
    if task.kind == "regression":
        return given.astype("float64" if task.own_scale else "float32")
    if task.kind == "classes":
        return given.map(places).astype("int64")
    if task.kind == "tokens":
        return given.map(lambda tags: tuple(places[tag] for tag in tags))
    return given.map(lambda several: tuple(float(name in several) for name in task.labels))


def sentences(path: Path, where: str, encoding: str = "") -> Iterator[tuple[int, dict]]:
    """The sentences of a CoNLL file, as rows of tokens and tags: the first and the last field of each line.

    Blank lines end a sentence; lines with -DOCSTART- are left out, and before a sentence those such as `# id = 1`.
    Raises InputError for lines with one field.
    """
    with reading(where), path.open("rb", BUFFER) as file:
        text = io.TextIOWrapper(content_of(file, where, encoding)[1], "utf-8").read()
    row, pairs = 1, []
    for place, line in enumerate([*text.split("\n"), ""], 1):  # `splitlines` knows more ends
        fields = line.split("\t") if "\t" in line.strip("\t ") else list(filter(None, line.split(" ")))
        blank = line.startswith("-DOCSTART-") or not line.strip("\t ")
        if blank and pairs:
            yield row, dict(zip(("tokens", "tags"), map(list, zip(*pairs, strict=True)), strict=True))
            row, pairs = row + 1, []
        elif not pairs and COMMENT.match(line):
            continue
        elif not blank and len(fields) == 1:
            raise InputError(
                f"{where}: line {place:,} has one field, {fields[0][:MOST_SHOWN]!r}; expected a token and its tag on "
                "each line, and a blank line between sentences. Correct it, or set kind (finetune.tasks)."
            )
        elif not blank:
            pairs.append((fields[0].strip(" "), fields[-1].strip(" ")))
