"""Labelled data of any task, read and checked. Probes are made from the held-out documents of a pretrained artifact."""

import functools
import hashlib
import json
import logging
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import regex

from model.errors import InputError
from model.wording import counted
from tasks.corpus.parts import Salt, unit_hash
from tasks.glue import labels, probes
from tasks.glue.classes import agree_on_names, drop_unlabelled, make_task, note_classes
from tasks.glue.data import SPLITS, identity, splits_of
from tasks.glue.labels import rows_of
from tasks.glue.own import Definition
from tasks.glue.pieces import TEST, Piece, read_piece
from tasks.glue.table import LABEL, TASKS, Task, training_splits
from tasks.store.artifacts import Artifact

if TYPE_CHECKING:
    import pandas as pd

Tables = dict[str, "pd.DataFrame"]  # by split
BLANK = regex.compile(r"[\s\p{Z}\p{Cc}\p{Cf}]*")  # white space, control and invisible characters, or nothing
MOST_WITHOUT = 0.01  # of a split's rows; where more have no sentence, something else is wrong
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Data:
    """A task's checked data, with warnings and counts."""

    task: Task
    tables: Tables  # train first, then validation; the task's texts and the label
    notes: list[str]  # warnings
    left_out: int  # training rows without a text, which are not in the tables
    shared: dict[str, int]  # training rows whose texts occur in another split too (in either order, if symmetric)
    duplicates: int  # training rows whose texts occur in an earlier training row (likewise)
    skipped: dict[str, int] = field(default_factory=dict)  # rows without a label by split, which are not in the tables
    unlabelled: Tables = field(default_factory=dict)  # texts of splits that can't be scored


def read(own: Definition, pretrained: Artifact | None = None) -> Data:
    """Fetch, read and check the data of a task, and log its warnings; once, unless it changes.

    Probes are made from `pretrained`. Raises InputError for data that can't be trained on or scored.
    """
    return _read(own, json.dumps(identity(own)), pretrained if own.data == "probes" else None)


@functools.lru_cache(maxsize=16)
def _read(own: Definition, _identity: str, pretrained: Artifact | None) -> Data:
    if pretrained:
        return with_counts(own.name, TASKS[own.name], probes.make(own.name, pretrained), [], 0)
    data = read_files(own)
    for note in data.notes:
        log.warning(note)
    return data


def read_files(own: Definition) -> Data:
    """Read and check the files of a task."""
    import pandas as pd

    files, features = splits_of(own)
    check_has_training(own, files)
    used = training_splits(own.name) if own.named else list(SPLITS)
    pieces = [read_piece(own, split, path, features) for split in used for path in files.get(split, ())]
    labelled = [piece for piece in pieces if piece.labelled]
    hidden = [piece.table for piece in pieces if not piece.labelled]

    unused = [split for split in files if split not in used]
    notes = notes_on_splits(own, unused, pieces, "validation" in files)
    if not own.named:
        labelled = agree_on_names(own, labelled, notes)
    labelled, skipped = drop_unlabelled(own, labelled, notes)
    task = make_task(own, labelled, notes)
    data = join_pieces(own, task, labelled, notes)
    unlabelled = {TEST: pd.concat(hidden)} if hidden else {}
    return replace(data, skipped=skipped, unlabelled=unlabelled)


def check_has_training(own: Definition, files: dict[str, list[Path]]) -> None:
    """Raise InputError unless there is a split for training among those of the files."""
    if "train" not in files:
        raise InputError(
            f"{own.name}: {own.data} has no split for training; it has {', '.join(files) or 'no files'}. Put train "
            "into the name of a file, or correct data (finetune.tasks)."
        )


def notes_on_splits(own: Definition, unused: list[str], pieces: list[Piece], has_validation: bool) -> list[str]:
    """Warnings of splits that are not read or not scored, and of how labels are written."""
    notes = [f"{own.name}: the split {split} is not used." for split in unused]
    if has_validation and "validation" in own.model_fields_set:
        notes.append(f"{own.name}: validation {own.validation:g} is not used, since there is a split for validation.")
    if not all(piece.labelled for piece in pieces):
        notes.append(f"{own.name}: the split {TEST} has no labels and is not scored.")
    for piece in pieces:
        if piece.labelled:
            notes += piece.notes
    return notes


def join_pieces(own: Definition, task: Task, pieces: list[Piece], notes: list[str]) -> Data:
    """The checked data of a task, of all files with labels. Without a split for validation, a part is held out."""
    of_splits: dict[str, list[Piece]] = {}
    for piece in pieces:
        of_splits.setdefault(piece.split, []).append(piece)
    tables = {split: check_split(own, task, split, of_split, notes) for split, of_split in of_splits.items()}
    left_out = sum(len(piece.table) for piece in of_splits["train"]) - len(tables["train"])
    if tables.keys() <= {"train", TEST}:
        tables = hold_out(own, task, tables, notes)
    return with_counts(own.name, task, tables, notes + note_classes(own.name, task, tables), left_out)


def check_split(own: Definition, task: Task, split: str, pieces: list[Piece], notes: list[str]) -> "pd.DataFrame":
    """The rows of a split, those for training only if they have a text, with labels as numbers.

    Adds to `notes`. Raises InputError if too many rows have no text.
    """
    import pandas as pd

    is_train = split == "train"
    of_pieces = []
    said = []
    for piece in pieces:
        without = without_text(piece.table, task)
        of_pieces.append(without)
        if without.any():
            rows = rows_of(without)
            what = f"a text is empty in {rows}; these rows are still scored"
            if is_train:
                what = f"left out {rows}, without text"
            said.append(f"{piece.where}: {what}.")
    empty = np.concatenate(of_pieces)
    if empty.mean() > MOST_WITHOUT:
        raise InputError(
            f"{own.name}/{split}: {empty.sum():,} of {counted(len(empty), 'row')} without a text; expected at most "
            f"{MOST_WITHOUT:.0%}. Correct the file or download it again. {' '.join(said)}"
        )
    notes += said
    table = pd.concat([piece.table for piece in pieces], ignore_index=len(pieces) > 1)
    if is_train:
        table = table[~empty]
    return table.assign(**{LABEL: labels.to_numbers(table[LABEL], task)})


def without_text(table: "pd.DataFrame", task: Task) -> "pd.Series":
    """Whether each row has a text that is empty."""
    return table[list(task.columns)].map(lambda text: BLANK.fullmatch(text) is not None).any(axis=1)


def hold_out(own: Definition, task: Task, tables: Tables, notes: list[str]) -> Tables:
    """The tables with a part of the training rows for validation: those whose texts have a digest below the share.

    A text is in one split only. Classes that would have no training row left keep theirs.
    """
    train = tables["train"]
    others = {split: table for split, table in tables.items() if split != "train"}
    texts = texts_of(train, task)
    chosen = texts.map(lambda text: unit_hash(text, Salt.VALIDATE_TASK) < own.validation)
    if own.kind == "classes":
        stay = train[LABEL][~chosen]
        chosen &= ~texts.isin(texts[~train[LABEL].isin(stay)])
    if not chosen.any() or chosen.all():
        raise InputError(
            f"{own.name}: a share of {own.validation:g} of {counted(len(train), 'row')} leaves no row to score or none "
            "to train on. Add rows or a file for validation, or change validation (finetune.tasks)."
        )
    notes.append(
        f"{own.name}: there is no validation split; {chosen.sum():,} of {counted(len(train), 'row')} are held out, "
        f"chosen by a digest of their text (validation {own.validation:g})."
    )
    return {"train": train[~chosen], "validation": train[chosen], **others}


# Repetitions


def with_counts(name: str, task: Task, tables: Tables, notes: list[str], left_out: int) -> Data:
    """Data whose rows have been compared with each other: repeated ones are counted, and warned of."""
    keys = {split: texts_of(table, task) for split, table in tables.items()}
    train = keys.pop("train")
    notes = notes + conflict_notes(name, train, tables["train"])
    shared = {}
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
    return Data(task, tables, notes, left_out, shared, duplicates=int(train.duplicated().sum()))


def conflict_notes(name: str, texts: "pd.Series", train: "pd.DataFrame") -> list[str]:
    """A warning of training rows whose texts occur with another label too."""
    different = train[LABEL].groupby(texts).transform("nunique")
    several = int((different > 1).sum())
    if not several:
        return []
    return [f"{name}/train: {counted(several, 'row')} whose texts also occur with another label."]


def texts_of(table: "pd.DataFrame", task: Task) -> "pd.Series":
    """The texts of each row as one string, the same for a pair and its reverse if the task is symmetric.

    They are stripped; those of a task of your own are also the same whatever their capitals and blanks.
    """
    compared = []
    for name in task.columns:
        compared.append(table[name].map(folded) if task.own else table[name].str.strip())
    joined = []
    for texts in zip(*compared, strict=True):
        joined.append("\0".join(sorted(texts) if task.symmetric else texts))
    return table.assign(texts=joined)["texts"]


def folded(text: str) -> str:
    """A text as a model without capitals reads it, with single blanks for white space of any kind."""
    return " ".join(unicodedata.normalize("NFKC", text).split()).casefold()


# For decontamination


def texts_identity(own: Definition) -> dict | str:
    """What identifies the texts of `sentences` in a key: nothing else of the task concerns the corpus.

    Their SHA-256, or for a data set of the hub, which needn't be asked for again, its revision and how it is read.
    """
    if own.repository():
        return {name: value for name, value in identity(own).items() if name != "metric"}
    return hashlib.sha256(json.dumps([*sentences(own)]).encode()).hexdigest()


def sentences(own: Definition, files: dict[str, list[Path]] | None = None) -> Iterator[tuple[str, str, int, list[str]]]:
    """The texts of the splits for validation and test, for decontamination: split, column, row of the first, texts.

    `files`: those of a task of GLUE, of which only the texts are read. Raises InputError for files without them.
    """
    if files is None:
        data = read(own)
        columns = data.task.columns
        scored = data.tables | data.unlabelled
        found = ((split, table) for split, table in scored.items() if split != "train")
    else:
        columns = TASKS[own.name].columns
        paths = [(split, path) for split in files for path in files[split]]
        found = ((split, read_piece(own, "", path, {}).table) for split, path in paths)
    rows: Counter[str] = Counter()
    for split, table in found:
        for name in columns:
            yield split, name, rows[split], table[name].tolist()
        rows[split] += len(table)
