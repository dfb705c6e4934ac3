"""Checks of GLUE's rows: labels, sentences and repetitions.

Every problem is reported with its file and rows, the first row of data being row 1.
"""

from collections.abc import Iterable

import numpy as np
import pandas as pd
import regex
from pandas.api.types import is_bool_dtype, is_string_dtype

from model import InputError, counted
from tasks.glue.tasks import LABEL, TASKS, Task

MOST_CHARACTERS = 100_000  # of a sentence; the longest of GLUE has some 4,000
MOST_WITHOUT = 0.01  # of a split's rows; where more have no sentence, something else is wrong
FEW = 5  # rows that are named where many are meant
BLANK = regex.compile(r"[\s\p{Z}\p{Cc}\p{Cf}]*")  # white space, control and invisible characters, or nothing


def rows_of(rows: Iterable[bool]) -> str:
    """The rows where a mask is true, in words: "row 3", "rows 3, 8, 9, 11, 12 and 40 more"."""
    places = np.flatnonzero(rows) + 1
    if len(places) == 1:
        return f"row {places[0]:,}"
    numbers = [f"{place:,}" for place in places[:FEW]]
    last = f"{len(places) - FEW:,} more" if len(places) > FEW else numbers.pop()
    return f"rows {', '.join(numbers)} and {last}"


def check_text(frame: pd.DataFrame, columns: Iterable[str], where: str) -> None:
    """Raise InputError unless these columns are text."""
    for name in columns:
        if not is_string_dtype(frame[name]):
            raise InputError(f"{where} has {frame[name].dtype} in the column {name}; expected text.")


def without_text(frame: pd.DataFrame, columns: list[str], where: str, train: bool) -> tuple[pd.Series, str]:
    """Why each row has no sentence ("null", "empty", or "" if it has one); and a warning if there are such rows.

    Raises InputError for sentences that are too long, and for null in rows that are scored.
    """
    for name in columns:
        sizes = frame[name].str.len()
        if (long := sizes > MOST_CHARACTERS).any():
            raise InputError(
                f"{where}: {name} is too long in {rows_of(long)}: the first has {sizes[long].iloc[0]:,.0f} characters; "
                f"expected at most {MOST_CHARACTERS:,}. Correct or remove these rows."
            )
    null = frame[columns].isna().any(axis=1)
    if null.any() and not train:
        raise InputError(
            f"{where} has no {' or '.join(columns)} (null) in {rows_of(null)}; "
            "expected text in every row that is scored. Correct it."
        )
    empty = frame[columns].fillna("").map(lambda text: BLANK.fullmatch(text) is not None).any(axis=1) & ~null
    reasons = pd.Series(np.select([null, empty], ["null", "empty"], ""), frame.index)
    if not (reasons != "").any():
        return reasons, ""
    if not train:
        return reasons, f"{where}: a sentence is empty in {rows_of(empty)}; these rows are still scored."
    counts = " and ".join(
        f"{rows.sum():,} {reason}" for reason, rows in (("null", null), ("empty", empty)) if any(rows)
    )
    return reasons, f"{where}: left out {rows_of(null | empty)}, without a sentence ({counts})."


def checked_labels(given: pd.Series, task: Task, where: str, tsv: bool) -> pd.Series:
    """The labels as numbers. Text may be names of classes and, in a TSV file, numbers. Raises InputError."""
    if is_string_dtype(given):
        given = given.str.strip().mask(lambda text: text == "")
        labels = given.map({label: float(number) for number, label in enumerate(task.labels)})
        labels = labels.fillna(pd.to_numeric(given, errors="coerce")) if tsv else labels
    elif is_bool_dtype(given):
        labels = pd.Series(np.nan, given.index)
    else:
        labels = pd.to_numeric(given, errors="coerce")
    allowed = labels.isin(range(task.classes)) if task.labels else labels.between(0, 5)
    if allowed.all():
        return labels.astype("int64" if task.labels else "float32")  # as on the hub
    if (missing := given.isna()).any():
        raise InputError(
            f"{where} has no label in {rows_of(missing)}; expected {expected(task)} in every row. Correct it."
        )
    first = given[~allowed].tolist()[0]
    hint = " Label -1 marks the unlabelled test split." if str(first) in ("-1", "-1.0") else ""
    raise InputError(
        f"{where}: the label of {rows_of(~allowed)} is {first!r}; expected {expected(task)}.{hint} Correct it."
    )


def expected(task: Task) -> str:
    """The allowed labels, in words."""
    numbers = [f"{number} ({label})" for number, label in enumerate(task.labels)]
    return f"{', '.join(numbers[:-1])} or {numbers[-1]}" if numbers else "a number from 0 to 5"


def check_split(reasons: pd.Series, notes: list[str], where: str) -> None:
    """Raise InputError if a split has no rows, or too many without a sentence; `notes` name these."""
    if reasons.empty:
        raise InputError(f"{where} has no rows. Get it again, or leave the task out of finetune.tasks.")
    if (without := int((reasons != "").sum())) > MOST_WITHOUT * len(reasons):
        raise InputError(
            f"{where}: {without:,} of {counted(len(reasons), 'row')} without a sentence; expected at most "
            f"{MOST_WITHOUT:.0%}. Correct the file or get it again. {' '.join(notes)}"
        )


def missing_classes(labels: pd.Series, task: Task, where: str) -> list[str]:
    """A warning about classes without an example. Raises InputError if all labels are the same."""
    found = set(labels)
    if len(found) == 1:
        raise InputError(
            f"{where}: every label is {found.pop()}; expected different ones, {expected(task)}. Get it again."
        )
    missing = [label for number, label in enumerate(task.labels) if number not in found]
    return [f"{where} has no example of {', '.join(missing)}."] if missing else []


def repeated(task: str, tables: dict[str, pd.DataFrame]) -> tuple[int, dict[str, int], list[str]]:
    """Count training rows that repeat an earlier one, and those that occur in each other split; with warnings."""
    keys = {split: texts_of(table, TASKS[task]) for split, table in tables.items()}
    train, notes, shared = keys.pop("train"), [], {}
    labels = tables["train"][LABEL].groupby(train).transform("nunique")
    if (several := int((labels > 1).sum())) > 0:
        notes.append(f"{task}/train: {counted(several, 'row')} whose texts also occur with another label.")
    for split, texts in keys.items():
        in_both = train.isin(texts)
        shared[split] = int(in_both.sum())
        if shared[split]:
            either = ", in either order" if TASKS[task].symmetric else ""
            notes.append(
                f"{task}: training rows that also occur in {split}{either}: {shared[split]:,} ({rows_of(in_both)}). "
                f"The model sees {int(texts.isin(train).sum()):,} of the {len(texts):,} rows of {split} in training, so "
                "the score is optimistic."
            )
    return int(train.duplicated().sum()), shared, notes


def texts_of(table: pd.DataFrame, task: Task) -> pd.Series:
    """The stripped texts of each row as one string, the same for a pair and its reverse if the task is symmetric."""
    pairs = zip(*(table[name].str.strip() for name in task.columns), strict=True)
    return pd.Series(["\0".join(sorted(texts) if task.symmetric else texts) for texts in pairs], table.index)
