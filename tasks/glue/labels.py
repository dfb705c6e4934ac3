"""Labels: values of any type to words, and words to the numbers of classes."""

import functools
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from model.errors import InputError
from model.wording import counted
from tasks.glue.lists import OPENING, is_clearly_list, parse_list
from tasks.glue.own import Definition
from tasks.glue.table import Task
from tasks.glue.tags import as_bioes

if TYPE_CHECKING:
    import pandas as pd

THE_LABEL = "the label"  # in messages
FEW = 5  # rows or classes that are named where many are meant
INVISIBLE = re.compile(r"[\u00ad\u200b\u200e\u200f\u2060\ufeff]")  # not the joiners, which Persian and Hindi need
NO_CLASS = "-1"  # in a test split whose labels are hidden
NO_NUMBER = {"nan", "na", "n/a", "#n/a", "null", "none"}  # of a regression, where spreadsheets have no value
EMPTY_CELL = ("",)  # of several labels, which may mean none of the classes, or none yet
SEPARATORS = str.maketrans(";|", ",,")  # between several labels in one string
MOST_SHOWN = 60  # characters of a value in a message
LARGEST = 1e38  # of a regression: the weights of a kept model are float32
OfLabel = Callable[[Any], Any]


# Series of values


def rows_of(mask: "pd.Series") -> str:
    """The rows where a mask is true, in words: "row 3", "rows 3, 8, 9, 11, 12 and 40 more".

    They are counted, unless the index has numbers and its own name, such as "line".
    """
    what = mask.index.name or "row"
    numbers = mask.index if mask.index.name else np.arange(1, len(mask) + 1)
    places = numbers[mask]
    if len(places) == 1:
        return f"{what} {places[0]:,}"
    shown = [f"{place:,}" for place in places[:FEW]]
    last = f"{len(places) - FEW:,} more" if len(places) > FEW else shown.pop()
    return f"{what}s {', '.join(shown)} and {last}"


def refuse(given: "pd.Series", what: str, where: str, fits: "Callable[[Any], bool] | pd.Series", expected: str) -> None:
    """Raise InputError, which names the rows, unless all values fit."""
    right = (given.map(fits) if callable(fits) else fits).astype(bool)
    if right.all():
        return
    shown = shortened(repr(given[~right].iloc[0]))
    raise InputError(f"{where}: {what} of {rows_of(~right)} is {shown}; expected {expected}.")


def shortened(value: str) -> str:
    """A value for a message."""
    return value if len(value) <= MOST_SHOWN else value[:MOST_SHOWN] + "…"


def map_values(given: "pd.Series", of_value: OfLabel) -> "pd.Series":
    """The values of a function, where `map` would make nan of None."""
    return type(given)([of_value(value) for value in given], given.index, object)


# One value


def is_list(value: Any) -> bool:
    """Whether a value is a list, of JSON, Parquet or Arrow."""
    return isinstance(value, list | tuple | np.ndarray)


def is_nested(value: Any) -> bool:
    """Whether a value has others in it."""
    return is_list(value) or isinstance(value, dict)


def is_written_list(value: Any) -> bool:
    """Whether a value is a list that a program wrote as text."""
    if not isinstance(value, str):
        return False
    found = parse_list(value)
    return found is not None and is_clearly_list(value, found)


def is_gap(value: Any) -> bool:
    """Whether a regression has no number there: an empty cell, or what programs write in place of one."""
    name = word(value, ())
    return name is None or name.lower() in NO_NUMBER


def number(value: Any) -> float:
    """A value as a finite number; nan if it isn't one."""
    is_code = isinstance(value, str) and "_" in value  # 3_5, which Python would read as 35
    if is_code or isinstance(value, bool | np.bool_):
        return math.nan
    try:
        made = float(value)
    except (TypeError, ValueError):
        return math.nan
    return made if math.isfinite(made) else math.nan


@functools.lru_cache(maxsize=10_000)
def plain(text: str) -> str:
    """A name as it looks: in Unicode's NFC, with single blanks for white space of any kind, and nothing invisible."""
    visible = INVISIBLE.sub("", unicodedata.normalize("NFC", text))
    return " ".join(visible.split())


def word(value: Any, names: Sequence[str]) -> str | None:
    """The name of a class: a string, a boolean, or a number, perhaps a place in `names`. None if there is none."""
    if isinstance(value, bool | np.bool_):
        return str(value).lower()
    is_name = isinstance(value, str) and (not names or plain(value) in names)
    if is_name or not number(value).is_integer():
        is_missing = value is None or value != value  # as nan is
        return None if is_missing else plain(str(value)) or None
    place = int(number(value) if isinstance(value, str) else value)
    if 0 <= place < len(names):
        return names[place]
    return None if names and place == -1 else str(place)


def parts(given: Any) -> tuple:
    """The classes in a label."""
    return given if isinstance(given, tuple) else (given,)


# To words


def to_words(given: "pd.Series", own: Definition, names: Sequence[str], where: str, notes: list[str]) -> "pd.Series":
    """The labels as words, as tuples of words, or as numbers for a regression; None where there is none.

    Adds to `notes`. Raises InputError for a list in place of one label or the other way round, for words in place of
    numbers, and for labels that a task of the table doesn't have.
    """
    if own.kind in ("tokens", "multilabel"):
        lists = read_labels(given, own, where, notes)
        note_names(chain.from_iterable(lists.dropna()), where, notes)
        return map_values(lists, lambda label: words_of(label, own, names))
    advice = f"correct it{own.advice('label or kind')}"
    refuse(given, THE_LABEL, where, lambda value: not is_nested(value), f"one label; {advice}")
    refuse(given, THE_LABEL, where, lambda value: not isinstance(value, bytes), f"text in UTF-8; {advice}")
    if own.kind == "classes":
        several = f"one label, not a list (kind 'multilabel' reads lists); {advice}"
        refuse(given, THE_LABEL, where, lambda value: not is_written_list(value), several)
        note_names(given, where, notes)
        words = map_values(given, lambda value: word(value, names))
    else:
        numbers = f"a number (with a point, not a comma), {LARGEST:g} at most; {advice}"
        refuse(given, THE_LABEL, where, is_number_or_gap, numbers)
        words = map_values(given, number_or_none)
    if own.named:
        refuse_unknown(given, words, names, where)
    return words


def number_or_none(value: Any) -> float | None:
    """A label of a regression as a number; None where there is none."""
    return None if is_gap(value) else number(value)


def is_number_or_gap(value: Any) -> bool:
    """Whether a value is a label of a regression, or none."""
    return is_gap(value) or abs(number(value)) <= LARGEST


def refuse_unknown(given: "pd.Series", words: "pd.Series", names: Sequence[str], where: str) -> None:
    """Raise InputError for labels that a task of GLUE doesn't have: other `names`, or of a regression other numbers."""
    if names:
        fits = words.isin(names)
        known = " or ".join(f"{place} ({name})" for place, name in enumerate(names))
    else:
        fits = words.astype(float).between(0, 5)
        known = "a number from 0 to 5"
    refuse(given, THE_LABEL, where, fits, f"{known} (-1 marks the unlabelled test split)")


def read_labels(given: "pd.Series", own: Definition, where: str, notes: list[str]) -> "pd.Series":
    """The labels as lists, also of lists that are text; None where there is none. Adds to `notes`.

    Raises InputError for what can't be read as a list.
    """
    advice = f"correct it{own.advice('label or kind')}"
    lists = read_lists(given, THE_LABEL, where, notes)
    if own.kind == "tokens":
        refuse(lists, THE_LABEL, where, lambda value: value is None or is_list(value), f"a list of tags; {advice}")
    else:
        whole = f"a complete list, or names with commas between them; {advice}"
        refuse(lists, THE_LABEL, where, lambda value: not (isinstance(value, str) and OPENING.match(value)), whole)
        lists = map_values(lists, split_at_commas)
    flat = f"one list with nothing in it but words or numbers; {advice}"
    refuse(lists, THE_LABEL, where, lambda value: value is None or not any(map(is_nested, value)), flat)
    return lists


def read_lists(given: "pd.Series", what: str, where: str, notes: list[str]) -> "pd.Series":
    """The values, and in place of texts that stand for lists these. Adds to `notes`."""
    found = map_values(given, lambda value: parse_list(value) if isinstance(value, str) else None)
    as_text = found.map(is_list)
    if as_text.any():
        rows = counted(as_text.sum(), "row")
        # without an example: notes are published in cards, and tokens are somebody's text
        notes.append(f"{where}: lists written as text stand for {what} in {rows}, and are read as lists.")
    return found.where(as_text, given)


def split_at_commas(value: Any) -> Any:
    """The labels in one string; a label alone is one of them. None stays."""
    if isinstance(value, str):
        return value.translate(SEPARATORS).split(",")
    if value is None or is_list(value):
        return value
    is_missing = isinstance(value, float) and math.isnan(value)
    return None if is_missing else [value]


def words_of(label: Sequence | None, own: Definition, names: Sequence[str]) -> tuple | None:
    """The words of a list of labels: of tokens a word or None for each, or None if there is none at all."""
    if label is None:
        return None
    words = [word(one, names) for one in label]
    if own.kind == "multilabel":
        is_empty = bool(words) and all(isinstance(one, str) and not plain(one) for one in label)
        return EMPTY_CELL if is_empty else tuple(filter(None, words))
    if words and not any(words):
        return None
    return tuple(tag and as_bioes(tag) for tag in words)


def note_names(given: Iterable, where: str, notes: list[str]) -> None:
    """Add to `notes` the names that are not written as they look."""
    written = dict.fromkeys(name.strip(" ") for name in given if isinstance(name, str))
    odd = dict.fromkeys(plain(name) for name in written if plain(name) not in ("", name))
    if odd:
        more = ", …" if len(odd) > FEW else ""
        notes.append(
            f"{where}: labels have another form of Unicode, no-break or repeated blanks or invisible characters, which "
            f"don't change a name: {', '.join([*odd][:FEW])}{more}."
        )


# To numbers


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
