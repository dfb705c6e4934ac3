"""Labels: values of any type to words, and words to the numbers of classes."""

import functools
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from model.errors import InputError
from model.settings import Kind
from model.wording import counted
from tasks.glue.lists import OPENING, is_clearly_list, parse_list
from tasks.glue.own import METRICS, Definition
from tasks.glue.table import Task
from tasks.glue.tags import as_bioes, mark_spans

if TYPE_CHECKING:
    import pandas as pd

FEW = 5  # rows or classes that are named where many are meant
MOST_NUMBERS = 50  # different numbers that are taken for classes; more are a measure
MOST_TAGS, TAGS_A_TOKEN = 300, 0.01  # different tags, as a number and as a share of the tokens; the larger one counts
INVISIBLE = re.compile(r"[\u00ad\u200b\u200e\u200f\u2060\ufeff]")  # not the joiners, which Persian and Hindi need
WHOLE = re.compile(r"-?\d+(\.0*)?")  # a whole number, as pandas writes it where a column has gaps: 3.0
NO_CLASS = "-1"  # in a test split whose labels are hidden
NO_NUMBER = {"nan", "na", "n/a", "#n/a", "null", "none"}  # of a regression, where spreadsheets have no value
EMPTY_CELL = ("",)  # of several labels, which may mean none of the classes, or none yet
SEPARATORS = str.maketrans(";|", ",,")  # between several labels in one string
MOST_SHOWN = 60  # characters of a value in a message
LARGEST = 1e38  # of a regression: the weights of a kept model are float32


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


@functools.lru_cache(maxsize=10_000)
def plain(text: str) -> str:
    """A name as it looks: in Unicode's NFC, with single blanks for white space of any kind, and nothing invisible."""
    return " ".join(INVISIBLE.sub("", unicodedata.normalize("NFC", text)).split())


def word(value: Any, names: Sequence[str]) -> str | None:
    """The name of a class: a string, a boolean, or a number, perhaps a place in `names`. None if there is none."""
    if isinstance(value, bool | np.bool_):
        return str(value).lower()
    is_name = isinstance(value, str) and (not names or plain(value) in names)
    if number(value).is_integer() and not is_name:
        place = int(number(value) if isinstance(value, str) else value)
        return names[place] if 0 <= place < len(names) else None if names and place == -1 else str(place)
    return None if value is None or value != value else plain(str(value)) or None


def to_words(given: "pd.Series", own: Definition, names: Sequence[str], where: str, notes: list[str]) -> "pd.Series":
    """The labels as words, as tuples of words, or as numbers for a regression; None where there is none.

    Adds to `notes`. Raises InputError for a list in place of one label or the other way round, for words in place of
    numbers, and for labels that a task of the table doesn't have.
    """
    what, help_ = "the label", f"correct it{own.advice('label or kind')}"
    if own.kind in ("tokens", "multilabel"):
        lists = read_labels(given, own, where, notes)
        note_names([one for label in lists.dropna() for one in label], where, notes)
        return map_values(lists, lambda label: words_of(label, own, names))
    refuse(given, what, where, lambda value: not is_nested(value), f"one label; {help_}")
    refuse(given, what, where, lambda value: not isinstance(value, bytes), f"text in UTF-8; {help_}")
    if own.kind == "classes":
        several = f"one label and no list (kind 'multilabel' reads these); {help_}"
        refuse(given, what, where, lambda value: not is_written_list(value), several)
        note_names(given, where, notes)
        words = map_values(given, lambda value: word(value, names))
    else:
        numbers = f"a number (with a point, not a comma), {LARGEST:g} at most; {help_}"
        refuse(given, what, where, lambda value: is_gap(value) or abs(number(value)) <= LARGEST, numbers)
        words = map_values(given, lambda value: None if is_gap(value) else number(value))
    if own.named:
        fits = words.isin(names) if names else words.astype(float).between(0, 5)
        known = " or ".join(f"{place} ({name})" for place, name in enumerate(names)) or "a number from 0 to 5"
        refuse(given, what, where, fits, f"{known} (-1 marks the unlabelled test split)")
    return words


def map_values(given: "pd.Series", of_value: Callable[[Any], Any]) -> "pd.Series":
    """The values of a function, where `map` would make nan of None."""
    return type(given)(list(map(of_value, given)), given.index, object)


def is_gap(value: Any) -> bool:
    """Whether a regression has no number there: an empty cell, or what programs write in place of one."""
    name = word(value, ())
    return name is None or name.lower() in NO_NUMBER


def is_written_list(value: Any) -> bool:
    """Whether a value is a list that a program wrote as text."""
    found = parse_list(value) if isinstance(value, str) else None
    return found is not None and is_clearly_list(value, found)


def read_labels(given: "pd.Series", own: Definition, where: str, notes: list[str]) -> "pd.Series":
    """The labels as lists, also of lists that are text; None where there is none. Adds to `notes`.

    Raises InputError for what can't be read as a list.
    """
    what, help_ = "the label", f"correct it{own.advice('label or kind')}"
    lists = read_lists(given, what, where, notes)
    if own.kind == "tokens":
        refuse(lists, what, where, lambda value: value is None or is_list(value), f"a list of tags; {help_}")
    else:
        whole = f"a list that is whole, or names with commas between them; {help_}"
        refuse(lists, what, where, lambda value: not (isinstance(value, str) and OPENING.match(value)), whole)
        lists = map_values(lists, split_at_commas)
    flat = f"one list with nothing in it but words or numbers; {help_}"
    refuse(lists, what, where, lambda value: value is None or not any(map(is_nested, value)), flat)
    return lists


def read_lists(given: "pd.Series", what: str, where: str, notes: list[str]) -> "pd.Series":
    """The values, and in place of texts that stand for lists these. Adds to `notes`."""
    found = map_values(given, lambda value: parse_list(value) if isinstance(value, str) else None)
    as_text = found.map(is_list)
    if as_text.any():
        example = given[as_text].iloc[0]
        shown = example if len(example) <= MOST_SHOWN else example[:MOST_SHOWN] + "…"
        notes.append(
            f"{where}: text such as {shown} in {counted(as_text.sum(), 'row')}, in place of {what}, is read as a list."
        )
    return found.where(as_text, given)


def is_nested(value: Any) -> bool:
    """Whether a value has others in it."""
    return is_list(value) or isinstance(value, dict)


def split_at_commas(value: Any) -> Any:
    """The labels in one string; a label alone is one of them. None stays."""
    if isinstance(value, str):
        return value.translate(SEPARATORS).split(",")
    missing = value is None or (isinstance(value, float) and math.isnan(value))
    if missing or is_list(value):
        return None if missing else value
    return [value]


def words_of(label: Sequence | None, own: Definition, names: Sequence[str]) -> tuple | None:
    """The words of a list of labels: of tokens a word or None for each, or None if there is none at all."""
    if label is None:
        return None
    words = tuple(word(one, names) for one in label)
    if own.kind == "multilabel":
        empty = words and all(isinstance(one, str) and not plain(one) for one in label)
        return EMPTY_CELL if empty else tuple(filter(None, words))
    return None if words and not any(words) else tuple(word and as_bioes(word) for word in words)


def note_names(given: Iterable, where: str, notes: list[str]) -> None:
    """Add to `notes` the names that are not written as they look."""
    written = dict.fromkeys(name.strip(" ") for name in given if isinstance(name, str))
    if odd := list(dict.fromkeys(plain(name) for name in written if plain(name) not in ("", name))):
        notes.append(
            f"{where}: labels have another form of Unicode, no-break or repeated blanks or invisible characters, which "
            f"change no name: {', '.join(odd[:FEW])}{', …' if len(odd) > FEW else ''}."
        )


def case_notes(name: str, names: Iterable[str]) -> list[str]:
    """A warning of classes whose names differ in capital letters only, which stay classes of their own."""
    by_folded: dict[str, list[str]] = {}
    for one in names:
        by_folded.setdefault(one.casefold(), []).append(one)
    same = [" and ".join(several) for several in by_folded.values() if len(several) > 1]
    return [f"{name}: classes differ in capital letters only: {', '.join(same[:FEW])}."] if same else []


def gap_notes(name: str, names: Iterable[str]) -> list[str]:
    """A note of classes that are named as programs write a missing value, which stay classes."""
    odd = [one for one in names if one.lower() in NO_NUMBER or one == NO_CLASS]
    what = f"{name}: these names are classes: {', '.join(odd)}. If they stand for no label, leave their cells empty."
    return [what] if odd else []


def whole_numbers(names: Iterable[str]) -> dict[str, str]:
    """New names of classes that are all whole numbers, some of them with a fraction of 0: 3 for 3.0."""
    every = list(names)
    if not all(map(WHOLE.fullmatch, every)):
        return {}
    return {name: name.partition(".")[0] for name in every if "." in name}


def parts(given: Any) -> tuple:
    """The classes in a label."""
    return given if isinstance(given, tuple) else (given,)


def classes(counts: Counter, kind: Kind, where: str) -> list[str]:
    """The classes in order: numbers by value, words by letters, whichever order the rows have.

    Raises InputError for what is rather a number or a text than a class.
    """
    values, rows = {name: number(name) for name in counts}, counts.total()
    what = "token" if kind == "tokens" else "row"
    many = f"{where} has {len(counts):,} different labels in {counted(rows, what)}, such as {next(iter(counts))}"
    if kind == "tokens" and len(counts) > max(MOST_TAGS, rows * TAGS_A_TOKEN):
        limit = f"up to {MOST_TAGS} tags, or {TAGS_A_TOKEN:.0%} of the tokens"
        raise InputError(f"{many}; expected {limit}. Set label (and text) to other columns (finetune.tasks).")
    if any(map(math.isnan, values.values())):
        if len(counts) > max(MOST_NUMBERS, rows / 2):
            raise InputError(f"{many}; expected classes. Set label to another column (finetune.tasks).")
        return sorted(counts)
    if kind == "classes" and (len(counts) > MOST_NUMBERS or not all(value.is_integer() for value in values.values())):
        wanted = f"up to {MOST_NUMBERS} whole numbers for classes"
        raise InputError(f"{many}; expected {wanted}. Set kind to 'regression' (finetune.tasks) for numbers.")
    return sorted(counts, key=lambda name: (values[name], name))


def metrics_of(own: Definition, names: Sequence[str], counts: Counter, notes: list[str]) -> tuple[tuple[str, ...], int]:
    """A task's metrics, the score first, and its positive class: of two, the rarer in training. Adds to `notes`.

    Raises InputError for a metric that doesn't fit the classes.
    """
    usual, shown = METRICS[own.kind], ", ".join(names[:FEW])
    if own.kind == "tokens" and (others := [tag for tag in names if not mark_spans([tag])]):
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


def to_numbers(given: "pd.Series", task: Task) -> "pd.Series":
    """Labels as the numbers of their classes: one, a tuple with one for each token, or a tuple of 0 and 1."""
    places = {name: place for place, name in enumerate(task.labels)}
    if task.kind == "regression":
        return given.astype("float64" if task.own_scale else "float32")
    if task.kind == "classes":
        return given.map(places).astype("int64")
    if task.kind == "tokens":
        return given.map(lambda tags: tuple(places[tag] for tag in tags))
    return given.map(lambda several: tuple(float(name in several) for name in task.labels))
