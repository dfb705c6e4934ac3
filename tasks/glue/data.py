"""GLUE: what its tasks are, where their data is, and what of it can't be trained on or scored.

The data comes from the hub (nyu-mll/glue at a fixed commit), from a folder with the same columns (Parquet or TSV), or is
made of a pretrained artifact's held-out documents (probes). What is wrong with it is said with file and row, the first
row of data being row 1.
"""

import functools
import logging
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from model import InputError
from model.quantities import counted
from tasks.corpus import hub, local
from tasks.glue import probes
from tasks.store import Artifact

HUB_GLUE = hub.Source(
    "nyu-mll/glue", "bcdcba79d07bc864c1c254ccfcedcce55bcc9a8c", "",
    instead="set finetune.data to a directory with GLUE's files (see tasks/README.md, 'GLUE')",
)  # fmt: skip
HUB_SECONDS = 10  # for the hub to say that it is there
LABEL = "label"
MOST_CHARACTERS = 100_000  # of a sentence; the longest of GLUE has some 4,000
MOST_WITHOUT = 0.01  # of a split's rows; where more have no sentence, something else is wrong
FEW = 5  # rows that are named where many are meant
BLANK = r"^[\s\p{Z}\p{Cc}\p{Cf}]*$"  # white space, control and invisible characters, or nothing
NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"
Protocol = Literal["cramming", "modern"]
PROTOCOLS = get_args(Protocol)
MOST_EPOCHS = 5  # that the rules of the game allow
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Task:
    """A task: what its examples are, how they are scored, and how many there are in the official splits."""

    title: str  # as in papers
    columns: tuple[str, ...]  # the texts of an example
    labels: tuple[str, ...]  # names of the classes, by number, as on the hub; none: a score from 0 to 5
    metrics: tuple[str, ...]  # the first is the score
    train: int  # examples; 0 where there is no official split
    validation: dict[str, int]
    test: dict[str, int]

    @property
    def classes(self) -> int:
        """How many; 1 for a regression."""
        return len(self.labels) or 1


ONE, TWO, QUESTIONS = ("sentence",), ("sentence1", "sentence2"), ("question1", "question2")
ENTAILED = ("entailment", "not_entailment")
TASKS: dict[str, Task] = {
    "cola": Task(
        "CoLA", ONE, ("unacceptable", "acceptable"), ("matthews",), 8551, {"validation": 1043}, {"test": 1063}
    ),
    "sst2": Task("SST-2", ONE, ("negative", "positive"), ("accuracy",), 67349, {"validation": 872}, {"test": 1821}),
    "mrpc": Task(
        "MRPC", TWO, ("not_equivalent", "equivalent"), ("f1", "accuracy"), 3668, {"validation": 408}, {"test": 1725}
    ),
    "stsb": Task("STS-B", TWO, (), ("pearson", "spearman"), 5749, {"validation": 1500}, {"test": 1379}),
    "qqp": Task(
        "QQP",
        QUESTIONS,
        ("not_duplicate", "duplicate"),
        ("f1", "accuracy"),
        363846,
        {"validation": 40430},
        {"test": 390965},
    ),
    "mnli": Task(
        "MNLI",
        ("premise", "hypothesis"),
        ("entailment", "neutral", "contradiction"),
        ("accuracy",),
        392702,
        {"validation_matched": 9815, "validation_mismatched": 9832},
        {"test_matched": 9796, "test_mismatched": 9847},
    ),
    "qnli": Task(
        "QNLI", ("question", "sentence"), ENTAILED, ("accuracy",), 104743, {"validation": 5463}, {"test": 5463}
    ),
    "rte": Task("RTE", TWO, ENTAILED, ("accuracy",), 2490, {"validation": 277}, {"test": 3000}),
    "wnli": Task("WNLI", TWO, ENTAILED[::-1], ("accuracy",), 635, {"validation": 71}, {"test": 146}),
}
TASKS |= {
    name: Task(name, columns, probes.LABELS[name], ("accuracy",), 0, {"validation": 0}, {})
    for name, columns in probes.COLUMNS.items()
}
TaskName = Literal[
    "cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli", "word-order", "odd-word", "neighbours"
]
SYMMETRIC = ("mrpc", "stsb", "qqp")  # how alike two texts are doesn't depend on which comes first
PLACES = ("idx", "index")  # what the hub and GLUE's own files call the column that numbers the rows
GLUE = ("mnli", "sst2", "stsb", "rte", "qnli", "qqp", "mrpc", "cola")  # the order of the paper's tables


@dataclass(frozen=True)
class Data:
    """A task's data, checked; and what is to be said of it."""

    tables: dict[str, pa.Table]  # by split, train first, then validation, then test; the task's texts and the label
    notes: list[str]
    left_out: dict[str, dict[str, int]]  # rows that are not in the tables, by split and reason
    shared: dict[str, int]  # by split, the training rows whose texts stand in it too (in either order, if SYMMETRIC)
    duplicates: int  # training rows whose texts stood in one before (likewise)


def read(data: str, task: str, test: bool = False, pretrained: Artifact | None = None) -> Data:
    """Bring, read and check a task's data; the test splits too if asked for. `pretrained`: what probes are made of.

    Raises InputError for what can't be trained on or scored.
    """
    tables, notes, left_out = {}, [], {}
    if data == "probes" and test:
        raise InputError("Probes have no test data. Leave finetune.test false.")
    if data == "probes":
        tables = probes.make(task, pretrained)
    else:
        for split, paths in find_splits(data, task, test).items():
            tables[split], counts, told = read_split(paths, task, split)
            left_out |= {split: counts} if counts else {}
            notes += told
    duplicates, shared, told = repeated(task, tables)
    return Data(tables, notes + told, left_out, shared, duplicates)


def identity(data: str, task: str, test: bool = False) -> dict:
    """What the data is, for a key: digests of local files, or the hub's revision, in place of where it is."""
    if data == "probes":
        return {"probes": probes.VERSION}
    if data == HUB_GLUE.repository:
        return {"repository": HUB_GLUE.repository, "revision": HUB_GLUE.revision}
    files = local_splits(Path(data).expanduser(), task, test)
    return {split: [local.file_digest(path) for path in paths] for split, paths in files.items()}


# Where the files are


def splits_of(task: str, test: bool) -> list[str]:
    """The names of a task's splits: train, validation, and test if asked for."""
    about = TASKS[task]
    return ["train", *about.validation, *(about.test if test else ())]


def evaluation_splits(task: str) -> list[str]:
    """The names of a task's validation and test splits."""
    return splits_of(task, test=True)[1:]


def find_splits(data: str, task: str, test: bool = False) -> dict[str, list[Path]]:
    """The files of each split of a task, brought from the hub if that is where they are."""
    if data == HUB_GLUE.repository:
        return hub_splits(task, test)
    return local_splits(Path(data).expanduser(), task, test)


def split_files(folder: Path, task: str, split: str) -> list[Path]:
    """The files of one split in a local GLUE folder: one, or Parquet shards. None where there are none.

    Raises InputError for shards that are not all there, where the split is there twice, and for what can't be looked into.
    """
    try:
        own = [path for name in (f"{split}.parquet", f"{split}.tsv") if (path := folder / task / name).is_file()]
        shards = sorted(path for path in (folder / task).glob(f"{split}-*.parquet") if path.is_file())
    except OSError as error:
        raise local.unreadable(folder / task, error) from error
    if len(own) + bool(shards) > 1:
        raise InputError(
            f"{folder / task} has {' and '.join(path.name for path in (*own, *shards[:1]))}. Expected {split} once, as one "
            "file or in Parquet shards; take the others away."
        )
    told = {int(found[1]) for path in shards if (found := re.search(r"-of-(\d+)$", path.stem))}
    if told and told != {len(shards)}:
        raise InputError(
            f"{folder / task} has {len(shards)} of {max(told)} shards of {split}, from {shards[0].name} to {shards[-1].name}. "
            "Expected as many as their names say; get them all, and no others."
        )
    return own or shards


def local_splits(folder: Path, task: str, test: bool = False) -> dict[str, list[Path]]:
    """The files of each split of a task in a local GLUE folder. Raises InputError where one is missing."""
    found = {split: split_files(folder, task, split) for split in splits_of(task, test)}
    if missing := next((split for split, files in found.items() if not files), None):
        try:
            present = ", ".join(sorted(p.name for p in folder.iterdir() if p.is_dir())) if folder.is_dir() else ""
        except OSError as error:
            raise local.unreadable(folder, error) from error
        mend = "leave finetune.test false" if missing in TASKS[task].test else f"leave {task} out of finetune.tasks"
        raise InputError(
            f"{folder} has no {task}/{missing}.parquet, {task}/{missing}-*.parquet or {task}/{missing}.tsv (folders there: "
            f"{present or 'none'}). Expected the data of {HUB_GLUE.repository}; correct finetune.data, or {mend}."
        )
    return found


def hub_name(task: str, split: str) -> str:
    """The path on the hub of a split, which is one file at that commit."""
    return f"{task}/{split}-00000-of-00001.parquet"


def cached(task: str, split: str) -> Path | None:
    """A split's file in the cache of the hub's client, if it is there and whole: it is named by its digest."""
    from huggingface_hub import try_to_load_from_cache

    about = {"repo_type": "dataset", "revision": HUB_GLUE.revision}
    path = try_to_load_from_cache(HUB_GLUE.repository, hub_name(task, split), **about)
    digest = Path(path).resolve().name if isinstance(path, str) else None
    return Path(path) if digest and hub.digest(Path(path), digest) == digest else None


@functools.cache
def hub_problem() -> str:
    """Why the hub can't be asked for GLUE, empty if it can: one quick request, where its client would retry for 30 s."""
    from huggingface_hub import HfApi

    try:
        HfApi().dataset_info(HUB_GLUE.repository, revision=HUB_GLUE.revision, timeout=HUB_SECONDS)
    except Exception as problem:  # the hub's client raises its own, httpx's and the socket's errors
        return str(hub.error(HUB_GLUE.repository, problem, HUB_GLUE.instead))
    return ""


@functools.cache  # asked once before the model is trained, and not again by the runs a day later
def hub_splits(task: str, test: bool = False) -> dict[str, list[Path]]:
    """The files of each split of a task from the hub, brought here; what is in the cache needs no network."""
    found = {split: [path] for split in splits_of(task, test) if (path := cached(task, split))}
    for split in splits_of(task, test):
        if split not in found:
            if problem := hub_problem():
                raise InputError(problem)
            source = replace(HUB_GLUE, pattern=rf"{task}/{split}-\d+-of-\d+\.parquet", folder=task)
            found[split] = [hub.bring(source, file) for file in hub.files(source)]
    return {split: found[split] for split in splits_of(task, test)}


def evaluation_files(data: str, tasks: Iterable[str]) -> dict[str, dict[str, list[Path]]]:
    """The files at hand of the validation and test splits of GLUE tasks, by task and split.

    From the hub: all, or none where not all can be had. From a folder: those in it, where test splits
    and whole tasks may be missing. Raises InputError for a folder that has none.
    """
    folder, found = Path(data).expanduser(), {}
    for task in (name for name in TASKS if name in tasks):
        files = {
            split: hub_evaluation().get((task, split), [])
            if data == HUB_GLUE.repository
            else split_files(folder, task, split)
            for split in evaluation_splits(task)
        }
        if at_hand := {split: paths for split, paths in files.items() if paths}:
            found[task] = at_hand
    if not found and data != HUB_GLUE.repository:
        raise InputError(
            f"{folder} {'holds no' if folder.is_dir() else 'is no directory with'} <task>/validation.parquet or <task>/test.parquet "
            f"(or .tsv) of {', '.join(tasks)}. Expected the files of {HUB_GLUE.repository}; correct finetune.data (or decontaminate.data)."
        )
    return found


@functools.cache  # the answer enters a key, so it must stay the same while a run lasts
def hub_evaluation() -> dict[tuple[str, str], list[Path]]:
    """All validation and test splits from the hub, brought here if need be; none if not all can be, with a warning.

    Some of them would be a key of their own, and another one the next time. Where the hub can't be asked at all, the stages
    that need it say so (`hub_problem`).
    """
    wanted = [(task, split) for task in (*GLUE, "wnli") for split in evaluation_splits(task)]
    found = {about: [path] for about in wanted if (path := cached(*about))}
    if len(found) == len(wanted):
        return found
    if hub_problem():
        return {}
    names = {hub_name(*about): about for about in wanted}
    told = f"{HUB_GLUE.repository} on the hub lacks files."
    try:
        for file in hub.files(replace(HUB_GLUE, pattern="|".join(map(re.escape, names)))):
            found[names[file.name]] = [hub.bring(HUB_GLUE, file)]
    except InputError as problem:
        told = problem
    if len(found) == len(wanted):
        return found
    missing = [f"{task}/{split}" for task, split in wanted if (task, split) not in found] if found else ["all of it"]
    log.warning("%s Not at hand, so that no sentence of GLUE is looked for in the text: %s.", told, ", ".join(missing))
    return {}


# What is in them


def named(rows: np.ndarray, word: str = "row", first: int = 1) -> str:
    """Rows by number, where the mask has them: "row 3", "rows 3, 8, 9, 11, 12 and 40 more"."""
    found = np.flatnonzero(rows)
    told, more = [f"{i + first:,}" for i in found[:FEW]], len(found) - FEW
    if more > 0:
        return f"{word}s {', '.join(told)} and {more:,} more"
    return f"{word}s {', '.join(told[:-1])} and {told[-1]}" if len(told) > 1 else f"{word} {told[0]}"


def mask(found: pa.ChunkedArray) -> np.ndarray:
    """Arrow's answer for every row; where it has none, False."""
    return pc.fill_null(found, False).to_numpy()


def read_file(path: Path, where: str) -> pa.Table:
    """The columns of a Parquet or TSV file. Raises InputError for what is none; `where` is its name for people."""
    try:
        if not path.stat().st_size:
            raise InputError(f"{where} is empty. Get it again.")
        if path.suffix == ".tsv":
            return single(tsv_table(path.read_bytes(), where), where)
        with pq.ParquetFile(path) as file:
            table = file.read()
    except PermissionError as error:
        raise local.unreadable(path, error) from error
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        kind = "TSV" if path.suffix == ".tsv" else "Parquet"
        raise InputError(f"{where} is no {kind} file that can be read: {error}. Get it again.") from error
    for i, field in enumerate(table.schema):
        kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
            text = table.column(i).cast(pa.large_string())
            check_utf8(text, field.name, where)
            table = table.set_column(i, field.name, text)
    return single(table, where)


def check_utf8(text: pa.ChunkedArray, name: str, where: str) -> None:
    """Raise InputError unless all of a column is UTF-8, which Arrow takes on trust."""
    try:
        text.validate(full=True)
    except pa.ArrowInvalid as error:
        for row, value in enumerate(text, 1):
            try:
                str(value.as_buffer() or b"", "utf-8")
            except UnicodeDecodeError as problem:
                raise InputError(
                    f"{where}: {name} of row {row:,} is not UTF-8 ({problem.reason}). Write it as UTF-8."
                ) from error
        raise


def single(table: pa.Table, where: str) -> pa.Table:
    """The table, if no two of its columns have the same name. Raises InputError else."""
    if twice := [name for name, count in Counter(table.column_names).items() if count > 1]:
        raise InputError(f"{where} has the column {twice[0]} twice. Take one of them away.")
    return table


def tsv_table(data: bytes, where: str) -> pa.Table:
    """The columns of a TSV file, all of them text, named by its first line; quotes are characters like others.

    So an unbalanced quote eats no rows. Raises InputError for what is no such file, naming lines.
    """
    try:
        text = data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(f"{where} is not UTF-8 (line {line}: {error.reason}). Write it as UTF-8.") from error
    header, _, body = text.partition("\n")
    names = [name.strip() for name in header.split("\t")]
    if not body:
        return pa.Table.from_arrays([pa.array([], pa.large_string())] * len(names), names)
    lines = pc.split_pattern(pa.array([body.removesuffix("\n")], pa.large_string()), "\n").flatten()
    fields = pc.add(pc.count_substring(lines, "\t"), 1)
    wrong = pc.not_equal(fields, len(names)).to_numpy(zero_copy_only=False)
    if wrong.any():
        raise InputError(
            f"{where}: {named(wrong, 'line', 2)} should have {len(names)} fields, as the first line ({', '.join(names)}), but the "
            f"first of them has {fields[int(np.argmax(wrong))]}. Correct them; a sentence can't have tabs or line ends."
        )
    every = pc.split_pattern(lines, "\t").flatten()
    columns = [every.take(pa.array(np.arange(i, len(every), len(names)))) for i in range(len(names))]
    return pa.Table.from_arrays(columns, names)


def read_split(paths: list[Path], name: str, split: str) -> tuple[pa.Table, dict[str, int], list[str]]:
    """Read and check a split: the task's texts and the label; the rows left out, by reason; and what is to be said.

    In training data, rows without a sentence are left out. Raises InputError for what can't be trained on or scored.
    """
    task, test, rows, tables, counts, notes = TASKS[name], split in TASKS[name].test, 0, [], Counter(), []
    for path in paths:
        where = f"{name}/{path.name}"
        table = read_file(path, where)
        wanted = task.columns if test else (*task.columns, LABEL)
        if missing := [column for column in wanted if column not in table.column_names]:
            raise InputError(
                f"{where} has no column {', '.join(missing)}; its columns are {', '.join(table.column_names)}. Expected "
                f"{', '.join(wanted)}, as in {HUB_GLUE.repository}; correct it."
            )
        if test:
            check_order(table, where, rows)
        labels = pa.repeat(-1, len(table)) if test else checked_labels(table[LABEL], task, where, path.suffix == ".tsv")
        kind = pa.int64() if task.labels else pa.float32()  # as on the hub
        table = table.select(task.columns).append_column(LABEL, labels.cast(kind))
        rows += len(table)
        kept, found, told = checked_texts(table, where, split == "train")
        tables.append(kept)
        counts.update(found)
        notes += told
    if not rows:
        raise InputError(f"{name}/{paths[0].name} has no rows. Get it again, or leave {name} out of finetune.tasks.")
    if counts.total() > MOST_WITHOUT * rows:
        raise InputError(
            f"{name}/{split}: {counts.total():,} of {counted(rows, 'row')} without a sentence; expected at most "
            f"{MOST_WITHOUT:.0%}. "
            f"Correct the file or get it again. {' '.join(notes)}"
        )
    whole = pa.concat_tables(tables)
    return whole, dict(counts) if split == "train" else {}, notes + checked_classes(whole, name, split)


def check_order(table: pa.Table, where: str, before: int) -> None:
    """Raise InputError unless a file of a test split numbers its rows, where it does, as the leaderboard: from 0, in order.

    `before`: the rows of the files before it.
    """
    for name in (name for name in PLACES if name in table.column_names):
        given = table[name]
        wrong = numbers(given).to_numpy() != np.arange(before, before + len(table))  # null: NaN, so wrong
        if wrong.any():
            row = int(np.argmax(wrong))
            raise InputError(
                f"{where} is not in the order in which the leaderboard counts: the {name} of row {row + 1:,} is "
                f"{given[row].as_py()!r}; expected {before + row}. Sort the rows by {name}, get the file again, or take the column "
                "away if it counts something else."
            )


def numbers(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The values of a column, or what its texts say, as float64; null where one is no number."""
    kind = column.type
    if pa.types.is_large_string(kind):
        text = pc.utf8_trim_whitespace(column)
        number = pc.match_substring_regex(text, NUMBER)
        return pc.if_else(number, text, pa.scalar(None, kind)).cast(pa.float64())
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return column.cast(pa.float64(), safe=False)
    return pa.chunked_array([pa.nulls(len(column), pa.float64())])


def checked_texts(table: pa.Table, where: str, train: bool) -> tuple[pa.Table, dict[str, int], list[str]]:
    """The rows that have sentences, how many have none, and the sentence that says so; all rows unless for training."""
    texts = [name for name in table.column_names if name != LABEL]
    null, blank = np.zeros(len(table), dtype=bool), np.zeros(len(table), dtype=bool)
    for name in texts:
        column = table[name]
        if not pa.types.is_large_string(column.type):
            raise InputError(f"{where} has {column.type} in the column {name}; expected text.")
        sizes = pc.fill_null(pc.utf8_length(column), 0).to_numpy()
        if (long := sizes > MOST_CHARACTERS).any():
            raise InputError(
                f"{where}: {name} of {named(long)} is no sentence: the first has {sizes[long][0]:,} characters; expected "
                f"{MOST_CHARACTERS:,} at most. Correct or drop it."
            )
        null |= mask(pc.is_null(column))
        blank |= mask(pc.match_substring_regex(column, BLANK))
    blank &= ~null
    if null.any() and not train:
        raise InputError(
            f"{where} has no {' or '.join(texts)} (null) in {named(null)}; expected text in every row that is scored. Correct it."
        )
    without = null | blank
    if not without.any():
        return table, {}, []
    if not train:
        told = f"{where}: a sentence is empty in {named(blank)}; no row that is scored is left out."
        return table, {"empty": int(blank.sum())}, [told]
    counts = {reason: int(rows.sum()) for reason, rows in (("null", null), ("empty", blank)) if rows.any()}
    told = " and ".join(f"{count:,} {reason}" for reason, count in counts.items())
    return (
        table.filter(pa.array(~without)),
        counts,
        [f"{where}: left out {named(without)}, without a sentence ({told})."],
    )


def checked_labels(column: pa.ChunkedArray, task: Task, where: str, tsv: bool) -> pa.ChunkedArray:
    """The labels as numbers, float64. In text the names of the classes are labels too; and numbers, if it is a TSV file's."""
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
    """What a label can be."""
    numbers = [f"{number} ({label})" for number, label in enumerate(task.labels)]
    return f"{', '.join(numbers[:-1])} or {numbers[-1]}" if numbers else "a number from 0 to 5"


def checked_classes(table: pa.Table, name: str, split: str) -> list[str]:
    """What is to be said of the classes and the size of a split. Raises InputError where all its labels are the same."""
    task, labels = TASKS[name], pc.unique(table[LABEL]).to_pylist()
    if split in task.test:
        if len(table) == task.test[split]:
            return []
        return [
            f"{name}/{split} has {counted(len(table), 'row')}, not the {task.test[split]:,} that the leaderboard takes."
        ]
    if len(labels) == 1:
        raise InputError(
            f"{name}/{split}: every label is {labels[0]}; expected different ones, {expected(task)}. Get it again."
        )
    missing = [label for number, label in enumerate(task.labels) if number not in labels]
    return [f"{name}/{split} has no example of {', '.join(missing)}."] if missing else []


def repeated(task: str, tables: dict[str, pa.Table]) -> tuple[int, dict[str, int], list[str]]:
    """Training rows that repeat an earlier one's texts; those that stand in each other split; and what is to be said."""
    texts = {split: joined(table, task in SYMMETRIC) for split, table in tables.items()}
    either = ", in either order" if task in SYMMETRIC else ""
    train, notes, shared = texts["train"], [], {}
    codes = train.dictionary_encode().indices.to_numpy().astype(np.int64)  # equal texts, equal codes
    values, labels = np.unique(tables["train"][LABEL].to_numpy(), return_inverse=True)
    several = np.bincount(np.unique(codes * len(values) + labels) // len(values)) > 1  # a code has several labels
    if several.any():
        notes.append(
            f"{task}/train: {counted(int(several[codes].sum()), 'row')} with texts that occur there with another "
            "label too."
        )
    for split in list(tables)[1:]:
        in_both = pc.is_in(train, value_set=texts[split]).to_numpy(zero_copy_only=False)
        shared[split] = int(in_both.sum())
        if shared[split]:
            seen = pc.sum(pc.is_in(texts[split], value_set=train)).as_py()
            notes.append(
                f"{task}: training rows that stand in {split} too{either}: {shared[split]:,} ({named(in_both)}); "
                f"{seen:,} of its "
                f"{counted(len(tables[split]), 'row')} seen in training, so the score is optimistic."
            )
    return len(codes) - len(several), shared, notes


def joined(table: pa.Table, symmetric: bool) -> pa.Array:
    """The texts of each row as one, without white space around them; a pair and its reverse as the same, if symmetric."""
    texts = [table[name].cast(pa.large_string()) for name in table.column_names if name != LABEL]
    texts = [pc.utf8_trim_whitespace(text) for text in texts]
    if symmetric:
        texts = [pc.min_element_wise(*texts), pc.max_element_wise(*texts)]
    return pc.binary_join_element_wise(*texts, pa.scalar("\0", pa.large_string())).combine_chunks()
