"""Checks of labelled rows: sentences, classes and repetitions. Problems are reported with file and rows."""

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import regex

from model import InputError, counted
from tasks.glue.tasks import LABEL, Task

MOST_CHARACTERS = 100_000  # of a sentence; the longest of GLUE has some 4,000
FEW = 5  # rows that are named where many are meant
BLANK = regex.compile(r"[\s\p{Z}\p{Cc}\p{Cf}]*")  # white space, control and invisible characters, or nothing


def rows_of(mask: pd.Series) -> str:
    """The rows where a mask is true, in words: "row 3", "rows 3, 8, 9, 11, 12 and 40 more".

    They are counted, unless the index has numbers and a name of its own, such as "line".
    """
    what, places = mask.index.name or "row", (mask.index if mask.index.name else np.arange(1, len(mask) + 1))[mask]
    if len(places) == 1:
        return f"{what} {places[0]:,}"
    numbers = [f"{place:,}" for place in places[:FEW]]
    last = f"{len(places) - FEW:,} more" if len(places) > FEW else numbers.pop()
    return f"{what}s {', '.join(numbers)} and {last}"


def refuse_bytes(path: Path, where: str) -> None:
    """Raise InputError, which names the row, for text of a Parquet file that is not UTF-8."""
    for column, texts in zip(pq.read_schema(path), pq.ParquetFile(path).read(), strict=True):
        if column.type in (pa.string(), pa.large_string()):
            for row, text in enumerate(texts.cast(pa.large_binary()).to_pylist(), 1):
                try:
                    (text or b"").decode()
                except UnicodeDecodeError as error:
                    raise InputError(f"{where}: {column.name} of row {row:,} is not UTF-8 ({error.reason}).") from error


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


def missing_classes(labels: pd.Series, task: Task, where: str) -> list[str]:
    """A warning about classes without an example. Raises InputError if all labels are the same."""
    found = set(labels)
    if len(found) == 1:
        raise InputError(
            f"{where}: every label is {found.pop()}; expected different ones, {task.expected}. Get it again."
        )
    missing = [label for number, label in enumerate(task.labels) if number not in found]
    return [f"{where} has no example of {', '.join(missing)}."] if missing else []


def odd_labels(name: str, task: Task, tables: dict[str, pd.DataFrame]) -> list[str]:
    """Warnings of splits with one class only, and of numbers that differ little for their size."""
    if task.own_scale:
        values = tables["train"][LABEL]
        step, spread = np.spacing(np.float32(values.abs().max())), values.std()
        about = f"answers in steps of {step:g} (float32), but the labels differ by {spread:g}"
        return [f"{name}: a kept model {about} only. Subtract a constant from them."] if step > spread / 100 else []
    alike = [split for split, table in tables.items() if task.kind == "classes" and table[LABEL].nunique() == 1]
    only = {split: task.labels[tables[split][LABEL].iloc[0]] for split in alike}
    return [f"{name}/{split}: every label is {label}, so its score says little." for split, label in only.items()]


def repeated(name: str, task: Task, tables: dict[str, pd.DataFrame]) -> tuple[int, dict[str, int], list[str]]:
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


def texts_of(table: pd.DataFrame, task: Task) -> pd.Series:
    """The stripped texts of each row as one string, the same for a pair and its reverse if the task is symmetric."""
    pairs = zip(*(table[name].str.strip() for name in task.columns), strict=True)
    return pd.Series(["\0".join(sorted(texts) if task.symmetric else texts) for texts in pairs], table.index)
