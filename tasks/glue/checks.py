"""Checks of GLUE's rows: labels, sentences, order and repetitions.

Every problem is reported with its file and rows, the first row of data being row 1.
"""

from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from model import InputError
from model.quantities import counted
from tasks.glue.tasks import HUB_GLUE, LABEL, PLACES, SYMMETRIC, TASKS, Task

MOST_CHARACTERS = 100_000  # of a sentence; the longest of GLUE has some 4,000
MOST_WITHOUT = 0.01  # of a split's rows; where more have no sentence, something else is wrong
FEW = 5  # rows that are named where many are meant
BLANK = r"^[\s\p{Z}\p{Cc}\p{Cf}]*$"  # white space, control and invisible characters, or nothing
NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"


def named(rows: np.ndarray, word: str = "row", first: int = 1) -> str:
    """The rows where a mask is true, in words: "row 3", "rows 3, 8, 9, 11, 12 and 40 more"."""
    places = np.flatnonzero(rows)
    numbers = [f"{place + first:,}" for place in places[:FEW]]
    if len(places) == 1:
        return f"{word} {numbers[0]}"
    last = f"{len(places) - FEW:,} more" if len(places) > FEW else numbers.pop()
    return f"{word}s {', '.join(numbers)} and {last}"


def mask(answers: pa.ChunkedArray) -> np.ndarray:
    """Arrow's answer for every row, with False for null."""
    return pc.fill_null(answers, False).to_numpy()


def check_utf8(text: pa.ChunkedArray, name: str, where: str) -> None:
    """Raise InputError if a column is not UTF-8, which Arrow doesn't check when it reads."""
    try:
        text.validate(full=True)
    except pa.ArrowInvalid:  # it doesn't name the row
        for row, value in enumerate(text, 1):
            try:
                str(value.as_buffer() or b"", "utf-8")
            except UnicodeDecodeError as error:
                raise InputError(
                    f"{where}: {name} of row {row:,} is not UTF-8 ({error.reason}). Correct it."
                ) from error
        raise


def check_columns(names: list[str], needed: list[str], where: str) -> None:
    """Raise InputError unless a file has the needed columns, and each name once."""
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise InputError(f"{where} has the column {twice[0]} twice. Remove one of them.")
    if missing := [name for name in needed if name not in names]:
        raise InputError(
            f"{where} has no column {', '.join(missing)}; its columns are {', '.join(names)}. "
            f"Expected {', '.join(needed)}, as in {HUB_GLUE.repository}; correct it."
        )


def decoded(data: bytes, where: str) -> str:
    """The text of a TSV file with \\n as line end. Raises InputError if it is not UTF-8, naming the line."""
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(f"{where} is not UTF-8 (line {line}: {error.reason}). Write it as UTF-8.") from error


def split_fields(text: str, where: str) -> tuple[list[str], pa.Array]:
    """The names in the first line of a TSV file, and the fields of all further lines, one after the other.

    Raises InputError for lines with more or fewer fields than names.
    """
    header, _, body = text.partition("\n")
    names = [name.strip() for name in header.split("\t")]
    if not body:
        return names, pa.array([], pa.large_string())
    lines = pc.split_pattern(pa.array([body.removesuffix("\n")], pa.large_string()), "\n").flatten()
    fields = pc.split_pattern(lines, "\t")
    counts = pc.list_value_length(fields).to_numpy()
    wrong = counts != len(names)
    if wrong.any():
        raise InputError(
            f"{where}: {named(wrong, 'line', 2)} should have {len(names)} fields, as the first line "
            f"({', '.join(names)}), but the first of them has {counts[wrong][0]}. Correct them; a sentence can't have "
            "tabs or line ends."
        )
    return names, fields.flatten()


def check_order(table: pa.Table, where: str, before: int) -> None:
    """Raise InputError if a file of a test split numbers its rows in another order than the leaderboard: 0, 1, 2 …

    `before`: the number of rows in the files before it.
    """
    for name in (name for name in PLACES if name in table.column_names):
        given = table[name]
        wrong = numbers(given).to_numpy() != np.arange(before, before + len(table))  # null: NaN, so wrong
        if wrong.any():
            row = int(np.argmax(wrong))
            raise InputError(
                f"{where} is not in the order in which the leaderboard counts: the {name} of row {row + 1:,} is "
                f"{given[row].as_py()!r}; expected {before + row}. Sort the rows by {name}, get the file again, "
                "or remove the column if it counts something else."
            )


def numbers(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column of numbers, or of text that says numbers, as float64; null where a value is no number."""
    kind = column.type
    if pa.types.is_large_string(kind):
        text = pc.utf8_trim_whitespace(column)
        number = pc.match_substring_regex(text, NUMBER)
        return pc.if_else(number, text, pa.scalar(None, kind)).cast(pa.float64())
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return column.cast(pa.float64(), safe=False)
    return pa.chunked_array([pa.nulls(len(column), pa.float64())])


def checked_texts(table: pa.Table, where: str, train: bool) -> tuple[pa.Table, dict[str, int], list[str]]:
    """The rows to use, the number of rows without a sentence by reason, and warnings.

    Only training rows are left out. Raises InputError for null in other splits, and for columns that aren't text.
    """
    texts = [name for name in table.column_names if name != LABEL]
    null, blank = np.zeros(len(table), dtype=bool), np.zeros(len(table), dtype=bool)
    for name in texts:
        column = table[name]
        if not pa.types.is_large_string(column.type):
            raise InputError(f"{where} has {column.type} in the column {name}; expected text.")
        sizes = pc.fill_null(pc.utf8_length(column), 0).to_numpy()
        if (long := sizes > MOST_CHARACTERS).any():
            raise InputError(
                f"{where}: {name} is too long in {named(long)}: the first has {sizes[long][0]:,} characters; expected "
                f"at most {MOST_CHARACTERS:,}. Correct or remove these rows."
            )
        null |= mask(pc.is_null(column))
        blank |= mask(pc.match_substring_regex(column, BLANK))
    blank &= ~null
    if null.any() and not train:
        raise InputError(
            f"{where} has no {' or '.join(texts)} (null) in {named(null)}; "
            "expected text in every row that is scored. Correct it."
        )
    without = null | blank
    if not without.any():
        return table, {}, []
    if not train:
        warning = f"{where}: a sentence is empty in {named(blank)}; these rows are still scored."
        return table, {"empty": int(blank.sum())}, [warning]
    counts = {reason: int(rows.sum()) for reason, rows in (("null", null), ("empty", blank)) if rows.any()}
    reasons = " and ".join(f"{count:,} {reason}" for reason, count in counts.items())
    warning = f"{where}: left out {named(without)}, without a sentence ({reasons})."
    return table.filter(pa.array(~without)), counts, [warning]


def check_share(counts: Counter, rows: int, where: str, notes: list[str]) -> None:
    """Raise InputError if too many rows of a split have no sentence. `counts`: by reason; `notes` name the rows."""
    if counts.total() > MOST_WITHOUT * rows:
        raise InputError(
            f"{where}: {counts.total():,} of {counted(rows, 'row')} without a sentence; expected at most "
            f"{MOST_WITHOUT:.0%}. Correct the file or get it again. {' '.join(notes)}"
        )


def checked_labels(column: pa.ChunkedArray, task: Task, where: str, tsv: bool) -> pa.ChunkedArray:
    """The labels as float64. Text may be names of classes and, in a TSV file, numbers."""
    kind, given = column.type, column
    if pa.types.is_large_string(kind) and (task.labels or tsv):
        column = pc.utf8_trim_whitespace(column)
        given = pc.if_else(pc.equal(column, ""), pa.scalar(None, kind), column)
        labels = pc.index_in(given, value_set=pa.array(task.labels, kind)).cast(pa.float64())
        labels = pc.coalesce(numbers(given), labels) if tsv else labels
    elif pa.types.is_integer(kind) or pa.types.is_floating(kind):
        labels = numbers(column)
    elif pa.types.is_decimal(kind):
        labels = given = numbers(column)
    else:
        what = "text" if pa.types.is_large_string(kind) else kind
        raise InputError(f"{where}: the labels are {what}; expected {expected(task)}. Write them as numbers.")
    values = labels.to_numpy()  # null: NaN
    allowed = np.isin(values, range(task.classes)) if task.labels else (values >= 0) & (values <= 5)
    if allowed.all():
        return labels
    missing = mask(pc.is_null(given, nan_is_null=True))
    if missing.any():
        raise InputError(
            f"{where} has no label in {named(missing)}; expected {expected(task)} in every row. Correct it."
        )
    first = given[int(np.argmin(allowed))].as_py()
    hint = " Label -1 marks the unlabelled test split." if str(first) in ("-1", "-1.0") else ""
    raise InputError(
        f"{where}: the label of {named(~allowed)} is {first!r}; expected {expected(task)}.{hint} Correct it."
    )


def expected(task: Task) -> str:
    """The allowed labels, in words."""
    numbers = [f"{number} ({label})" for number, label in enumerate(task.labels)]
    return f"{', '.join(numbers[:-1])} or {numbers[-1]}" if numbers else "a number from 0 to 5"


def checked_classes(table: pa.Table, name: str, split: str) -> list[str]:
    """Warnings about the classes and the size of a split. Raises InputError if all its labels are the same."""
    task, labels = TASKS[name], pc.unique(table[LABEL]).to_pylist()
    if split in task.test:
        if len(table) == task.test[split]:
            return []
        size = counted(len(table), "row")
        return [f"{name}/{split} has {size}, not the {task.test[split]:,} that the leaderboard takes."]
    if len(labels) == 1:
        raise InputError(
            f"{name}/{split}: every label is {labels[0]}; expected different ones, {expected(task)}. Get it again."
        )
    missing = [label for number, label in enumerate(task.labels) if number not in labels]
    return [f"{name}/{split} has no example of {', '.join(missing)}."] if missing else []


def repeated(task: str, tables: dict[str, pa.Table]) -> tuple[int, dict[str, int], list[str]]:
    """Count training rows whose texts occur in an earlier one, and in each other split; and the warnings about them."""
    texts = {split: joined(table, task in SYMMETRIC) for split, table in tables.items()}
    either = ", in either order" if task in SYMMETRIC else ""
    train, notes, shared = texts["train"], [], {}
    codes = train.dictionary_encode().indices.to_numpy().astype(np.int64)  # equal texts, equal codes
    values, labels = np.unique(tables["train"][LABEL].to_numpy(), return_inverse=True)
    several = np.bincount(np.unique(codes * len(values) + labels) // len(values)) > 1  # a code has several labels
    if several.any():
        rows = counted(int(several[codes].sum()), "row")
        notes.append(f"{task}/train: {rows} whose texts also occur with another label.")
    for split in list(tables)[1:]:
        in_both = pc.is_in(train, value_set=texts[split]).to_numpy(zero_copy_only=False)
        shared[split] = int(in_both.sum())
        if shared[split]:
            seen = pc.sum(pc.is_in(texts[split], value_set=train)).as_py()
            notes.append(
                f"{task}: training rows that also occur in {split}{either}: {shared[split]:,} ({named(in_both)}). The "
                f"model sees {seen:,} of the {len(tables[split]):,} rows of {split} in training, so the score is "
                "optimistic."
            )
    return len(codes) - len(several), shared, notes


def joined(table: pa.Table, symmetric: bool) -> pa.Array:
    """The stripped texts of each row as one string, the same for a pair and its reverse if `symmetric`."""
    texts = [table[name].cast(pa.large_string()) for name in table.column_names if name != LABEL]
    texts = [pc.utf8_trim_whitespace(text) for text in texts]
    if symmetric:
        texts = [pc.min_element_wise(*texts), pc.max_element_wise(*texts)]
    return pc.binary_join_element_wise(*texts, pa.scalar("\0", pa.large_string())).combine_chunks()
