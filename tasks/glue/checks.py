"""Checks of labelled rows: sentences, classes and repetitions. Problems are reported with file and rows."""

from typing import TYPE_CHECKING

import numpy as np
import regex

from model import counted
from tasks.glue.tasks import LABEL, Task

if TYPE_CHECKING:
    import pandas as pd

FEW = 5  # rows or classes that are named where many are meant
BLANK = regex.compile(r"[\s\p{Z}\p{Cc}\p{Cf}]*")  # white space, control and invisible characters, or nothing


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


def without_text(frame: "pd.DataFrame", columns: list[str], where: str, train: bool, notes: list[str]) -> "pd.Series":
    """Whether each row has a text that is empty. A warning of such rows is added to `notes`."""
    empty = frame[columns].map(lambda text: BLANK.fullmatch(text) is not None).any(axis=1)
    if empty.any():
        rows = rows_of(empty)
        what = f"left out {rows}, without text" if train else f"a text is empty in {rows}; these rows are still scored"
        notes.append(f"{where}: {what}.")
    return empty


def missing_classes(name: str, task: Task, tables: "dict[str, pd.DataFrame]") -> list[str]:
    """Warnings of splits without some of the classes."""
    notes = []
    for split, table in tables.items() if task.kind == "classes" else ():
        found = set(table[LABEL])
        missing = [label for place, label in enumerate(task.labels) if place not in found]
        if len(missing) == len(task.labels) - 1:
            only = task.labels[table[LABEL].iloc[0]]
            notes.append(f"{name}/{split}: every label is {only}, so its score says little.")
        elif missing:
            notes.append(f"{name}/{split} has no example of {', '.join(missing[:FEW])}.")
    return notes


def repeated(name: str, task: Task, tables: "dict[str, pd.DataFrame]") -> tuple[int, dict[str, int], list[str]]:
    """Count training rows that repeat an earlier one, and those that occur in each other split; with warnings."""
    keys = {split: texts_of(table, task) for split, table in tables.items()}
    train, notes, shared = keys.pop("train"), [], {}
    labels = tables["train"][LABEL].groupby(train).transform("nunique")
    if (several := int((labels > 1).sum())) > 0:
        notes.append(f"{name}/train: {counted(several, 'row')} whose texts also occur with another label.")
    for split, texts in keys.items():
        in_both = train.isin(texts)
        shared[split] = int(in_both.sum())
        if shared[split]:
            either = ", in either order" if task.symmetric else ""
            notes.append(
                f"{name}: training rows that also occur in {split}{either}: {shared[split]:,} ({rows_of(in_both)}). "
                f"The model sees {int(texts.isin(train).sum()):,} of the {len(texts):,} rows of {split} in training, "
                "so the score is optimistic."
            )
    return int(train.duplicated().sum()), shared, notes


def texts_of(table: "pd.DataFrame", task: Task) -> "pd.Series":
    """The stripped texts of each row as one string, the same for a pair and its reverse if the task is symmetric."""
    import pandas as pd

    pairs = zip(*(table[name].str.strip() for name in task.columns), strict=True)
    return pd.Series(["\0".join(sorted(texts) if task.symmetric else texts) for texts in pairs], table.index)
