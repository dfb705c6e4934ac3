"""The classes of a task of your own: names that mean the same in all its files, their order, and the metrics that fit.

What the labels of each file are by themselves is in labels.py.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from model.errors import InputError
from model.wording import counted
from tasks.glue import labels, lists
from tasks.glue.data import SPLITS
from tasks.glue.labels import EMPTY_CELL, FEW, NO_CLASS, NO_NUMBER, THE_LABEL, number, parts, rows_of
from tasks.glue.own import METRICS, Definition
from tasks.glue.pieces import PAIR, TEST, TEXT, Piece, relabel
from tasks.glue.table import LABEL, TASKS, Task
from tasks.glue.tags import mark_spans

if TYPE_CHECKING:
    import pandas as pd

MOST_NUMBERS = 50  # different numbers that are taken for classes; more are a measure
MOST_TAGS = 300  # different ones
TAGS_A_TOKEN = 0.01  # share of the tokens that may be different tags, where that is more than MOST_TAGS
WHOLE = re.compile(r"-?\d+(\.0*)?")  # a whole number, as pandas writes it where a column has gaps: 3.0


# Names


def agree_on_names(own: Definition, pieces: list[Piece], notes: list[str]) -> list[Piece]:
    """The pieces with names of classes that mean the same in all, where no file declares names. Adds to `notes`.

    Vectors of 0 and 1 become the classes of their places, and 3.0 becomes 3 if all are whole numbers. A -1 that
    only a test split has is not a label. Raises InputError for vectors of several lengths or with other numbers.
    """
    declared = any(piece.names for piece in pieces)
    if own.kind == "multilabel":
        size = 0 if declared else places_of_vectors(pieces)
        if size:
            return name_places(own, pieces, size, notes)
        pieces = [fill_empty(own, piece, notes) for piece in pieces]
    if declared or own.kind not in ("classes", "multilabel"):
        return pieces
    shorter = without_fractions(names_in(pieces))
    if own.kind == "multilabel":
        if shorter:
            pieces = [
                relabel(piece, lambda row: row and tuple(shorter.get(one, one) for one in row)) for piece in pieces
            ]
        return pieces
    if shorter:
        pieces = [relabel(piece, lambda name: shorter.get(name, name)) for piece in pieces]
    return hide_no_class(pieces)


def names_in(pieces: list[Piece]) -> set[str]:
    """All names of classes in the labels."""
    names: set[str] = set()
    for piece in pieces:
        for label in piece.table[LABEL]:
            names.update(one for one in parts(label) if one is not None)
    return names


def places_of_vectors(pieces: list[Piece]) -> int:
    """How many places the labels have, if all of them are vectors of 0 and 1; else 0.

    Raises InputError for labels that are nearly such vectors.
    """
    nothing = (None, (), EMPTY_CELL)
    rows = [label for piece in pieces for label in piece.table[LABEL] if label not in nothing]
    found = lists.find_vectors(rows)
    if found.expected:
        for piece in pieces:
            given = piece.table[LABEL]
            fits = labels.map_values(given, lambda row: row in nothing or found.fits(row))
            labels.refuse(given, THE_LABEL, piece.where, fits, f"{found.expected}; correct it")
    return found.size


def name_places(own: Definition, pieces: list[Piece], size: int, notes: list[str]) -> list[Piece]:
    """The pieces with the places of vectors as classes. Adds to `notes`."""
    names = tuple(map(str, range(size)))
    notes.append(
        f"{own.name}: the labels are vectors of 0 and 1, all of {size} places, and are read as the classes 0 "
        f"to {size - 1}, by place. For other names write lists of names."
    )
    return [relabel(piece, lists.as_classes)._replace(names=names) for piece in pieces]


def fill_empty(own: Definition, piece: Piece, notes: list[str]) -> Piece:
    """A piece where an empty cell means none of the classes. Adds to `notes`. Raises InputError if they are many."""
    empty = labels.map_values(piece.table[LABEL], lambda row: row == EMPTY_CELL).astype(bool)
    if not empty.any():
        return piece
    found = f"{piece.where}: {empty.sum():,} of {counted(len(empty), 'row')} have an empty label ({rows_of(empty)})"
    if empty.mean() > own.max_unlabelled:
        raise InputError(
            f"{found}, which may mean that none of the classes fits, or that they are not labelled; expected a share "
            f"of {own.max_unlabelled:g} at most. Write [] for none of the classes and delete the others, or raise "
            "max_unlabelled (finetune.tasks)."
        )
    notes.append(f"{found}, read as none of the classes. Delete these rows if they are not labelled.")
    return relabel(piece, lambda row: () if row == EMPTY_CELL else row)


def without_fractions(names: Iterable[str]) -> dict[str, str]:
    """New names of classes that are all whole numbers, some of them with a fraction of 0: 3 for 3.0."""
    every = list(names)
    if not all(map(WHOLE.fullmatch, every)):
        return {}
    return {name: name.partition(".")[0] for name in every if "." in name}


def hide_no_class(pieces: list[Piece]) -> list[Piece]:
    """The pieces of which those for test have no label where they have -1, unless it is a class of other splits."""
    for piece in pieces:
        if piece.split != TEST and (piece.table[LABEL] == NO_CLASS).any():
            return pieces
    hidden = []
    for piece in pieces:
        if piece.split == TEST:
            piece = relabel(piece, lambda name: None if name == NO_CLASS else name)
        hidden.append(piece)
    return hidden


def drop_unlabelled(own: Definition, pieces: list[Piece], notes: list[str]) -> tuple[list[Piece], dict[str, int]]:
    """The pieces without rows that have no label, and how many these are by split. Adds to `notes`.

    Raises InputError if a split has more of them than the definition allows; those of GLUE have none.
    """
    kept = []
    rows: Counter[str] = Counter()
    gaps: dict[str, list[Gap]] = {}  # by split
    for piece in pieces:
        without = labels.map_values(piece.table[LABEL], lambda label: label is None).astype(bool)
        rows[piece.split] += len(without)
        if without.any():
            gap = Gap(piece.where, int(without.sum()), len(without), rows_of(without))
            gaps.setdefault(piece.split, []).append(gap)
        if not without.all():
            kept.append(piece._replace(table=piece.table[~without]))
    skipped = {}
    for split, of_split in gaps.items():
        check_gaps(own, split, of_split, rows[split])
        skipped[split] = sum(gap.missing for gap in of_split)
        notes += [f"{gap.where}: left out {gap}." for gap in of_split]
    return kept, skipped


def check_gaps(own: Definition, split: str, gaps: "list[Gap]", rows: int) -> None:
    """Raise InputError if more rows of a split have no label than the definition allows. `rows`: those of the split."""
    missing = sum(gap.missing for gap in gaps)
    if missing > own.max_unlabelled * rows:
        files = " ".join(f"{gap.where}: {gap}." for gap in gaps)
        raise InputError(
            f"{own.name}/{split}: {missing:,} of {counted(rows, 'row')} have no label; expected a "
            f"share of {own.max_unlabelled:g} at most. Set label to another column, or raise max_unlabelled "
            f"(finetune.tasks). {files}"
        )


class Gap(NamedTuple):
    """Rows of a file that have no label."""

    where: str
    missing: int
    of: int
    rows: str  # which

    def __str__(self) -> str:
        return f"{self.missing:,} of {counted(self.of, 'row')} without a label ({self.rows})"


# The task


class Counts(NamedTuple):
    """How often each class occurs."""

    train: Counter[str]
    every: Counter[str]  # in all splits


def make_task(own: Definition, pieces: list[Piece], notes: list[str]) -> Task:
    """The row of the table of tasks, or one like those; notes on classes are added to `notes`.

    Raises InputError for tokens without a tag, a training split with one class only, and classes that it doesn't have.
    """
    first = pieces[0].where
    counts = count_labels(pieces)
    check_several(own, counts.train, first)
    if own.named:
        return TASKS[own.name]
    names: Sequence[str] = ()
    if own.kind != "regression":
        names = pieces[0].names or order_classes(counts.every, own, first)
        for piece in pieces:
            check_classes(own, piece, names, counts.train, notes)
    notes += case_notes(own.name, names)
    notes += gap_notes(own.name, names)
    notes += rare_notes(own.name, names, counts.train)
    metrics = choose_metrics(own, names, notes)
    positive = 1
    if own.metric == "f1":
        positive = rarer_class(own, names, counts.train, notes)
    return Task(
        title=own.name,
        columns=(TEXT, PAIR) if own.pair else (TEXT,),
        labels=tuple(names),
        metrics=metrics,
        sizes=dict.fromkeys(SPLITS, 0),
        kind=own.kind,
        own=True,
        positive=positive,
    )


def check_several(own: Definition, counts: Counter[str], where: str) -> None:
    """Raise InputError unless training has different labels. `counts`: of each class there."""
    if len(counts) > 1:
        return
    only = "there is no label"
    for name in counts:
        only = f"every label is {name}"
    raise InputError(f"{where}: {only}; expected different ones. Correct it{own.advice('label')}.")


def count_labels(pieces: list[Piece]) -> Counts:
    """Count the labels. Raises InputError for a label of tokens that lacks a tag."""
    counts = Counts(Counter(), Counter())
    for piece in pieces:
        given = piece.table[LABEL]
        labels.refuse(given, THE_LABEL, piece.where, lambda label: None not in parts(label), "one; correct it")
        found = Counter(one for label in given for one in parts(label))
        counts.every.update(found)
        if piece.split == "train":
            counts.train.update(found)
    return counts


def order_classes(counts: Counter[str], own: Definition, where: str) -> list[str]:
    """The classes in order: numbers by value, words by letters, whichever order the rows have.

    Raises InputError for what is rather a number or a text than a class.
    """
    values = {name: number(name) for name in counts}
    wanted = wanted_instead(list(values.values()), counts.total(), own)
    if wanted:
        rows = counted(counts.total(), "token" if own.kind == "tokens" else "row")
        many = f"{where} has {len(counts):,} different labels in {rows}, such as {next(iter(counts))}"
        raise InputError(f"{many}; expected {wanted}.")
    if any(map(math.isnan, values.values())):
        return sorted(counts)
    return sorted(counts, key=lambda name: (values[name], name))


def wanted_instead(values: list[float], rows: int, own: Definition) -> str:
    """What was expected instead of classes that are rather numbers or texts, and what to do; empty if they are classes.

    `values`: the classes as numbers, nan where they aren't. `rows`: how often they occur.
    """
    if own.kind == "tokens" and len(values) > max(MOST_TAGS, rows * TAGS_A_TOKEN):
        limit = f"up to {MOST_TAGS} tags, or {TAGS_A_TOKEN:.0%} of the tokens"
        return f"{limit}. Set label (and text) to other columns (finetune.tasks)"
    most_names = max(MOST_NUMBERS, rows / 2)
    if any(map(math.isnan, values)):
        return "classes. Set label to another column (finetune.tasks)" if len(values) > most_names else ""
    are_whole = all(value.is_integer() for value in values)
    is_asked = "kind" in own.model_fields_set  # then whole numbers may be the names of many classes
    most = most_names if is_asked else MOST_NUMBERS
    if own.kind == "classes" and (len(values) > most or not are_whole):
        wanted = f"up to {most:,.0f} whole numbers for classes"
        codes = ", or to 'classes' for codes" if are_whole and len(values) <= most_names else ""
        return f"{wanted}. Set kind to 'regression' (finetune.tasks) for numbers{codes}"
    return ""


def check_classes(own: Definition, piece: Piece, names: Sequence[str], counts: Counter[str], notes: list[str]) -> None:
    """Raise InputError for classes that the data doesn't declare, or that training lacks; tags are noted only.

    `counts`: of each class in training.
    """
    given = piece.table[LABEL]
    known = set(names)
    declared = f"a class that the data declares, such as {', '.join(names[:FEW])}; correct it"
    labels.refuse(given, THE_LABEL, piece.where, lambda label: known.issuperset(parts(label)), declared)
    new = given.map(lambda label: next((one for one in parts(label) if one not in counts), ""))
    if (new != "").any():
        found = f"{piece.where}: the label {new.max()} of {rows_of(new != '')} is in no training row"
        if own.kind != "tokens":
            raise InputError(f"{found}. Correct it, add rows with it to the training data, or leave these rows out.")
        notes.append(f"{found}, so no model can answer it.")


def choose_metrics(own: Definition, names: Sequence[str], notes: list[str]) -> tuple[str, ...]:
    """A task's metrics, the score first. Adds to `notes`. Raises InputError if its metric doesn't fit the classes."""
    usual = METRICS[own.kind]
    if own.kind == "tokens" and not mark_spans(names):
        usual = usual[1:]
        if own.metric is None:
            others = [tag for tag in names if not mark_spans([tag])]
            notes.append(
                f"{own.name}: the score is accuracy of single tokens, not F1 of spans, because some tags don't mark "
                f"spans: {', '.join(others[:FEW])} (expected such as B-PER, I-PER and O)."
            )
    needs_two = own.metric == "f1" and len(names) != 2
    if needs_two or own.metric not in (None, *usual):
        wanted = "two classes" if own.metric == "f1" else "tags such as B-PER, I-PER and O"
        shown = ", ".join(names[:FEW])
        raise InputError(f"{own.name}: metric {own.metric!r} needs {wanted}; found {shown}. Change it.")
    return tuple(dict.fromkeys([own.metric or usual[0], *usual[:2]]))


def rarer_class(own: Definition, names: Sequence[str], counts: Counter[str], notes: list[str]) -> int:
    """Of two classes, the one that is rarer in training, and the second if both are as frequent. Adds to `notes`."""
    rarer = 0 if counts[names[0]] < counts[names[1]] else 1
    share = f"{counts[names[rarer]]:,} of {counted(counts.total(), 'training label')}"
    notes.append(f"{own.name}: F1 is that of the class {names[rarer]}, which {share} have.")
    return rarer


# Notes


def case_notes(name: str, names: Iterable[str]) -> list[str]:
    """A warning of classes whose names differ in capital letters only; they stay different classes."""
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


def rare_notes(name: str, names: Iterable[str], counts: Counter[str]) -> list[str]:
    """A warning of classes with one training example only."""
    single = [one for one in names if counts[one] == 1]
    if not single:
        return []
    return [f"{name}: only one training example of {', '.join(single[:FEW])}; it can hardly be learned."]


def note_classes(name: str, task: Task, tables: "dict[str, pd.DataFrame]") -> list[str]:
    """Warnings of splits without some of the classes, and of several labels those that training or a split lacks."""
    notes = []
    for split, table in tables.items():
        where = f"{name}/{split}"
        if task.kind == "multilabel":
            notes += several_labels_notes(where, task, table, is_train=split == "train")
        elif task.kind == "classes":
            notes += one_label_notes(where, task, table)
    return notes


def several_labels_notes(where: str, task: Task, table: "pd.DataFrame", is_train: bool) -> list[str]:
    """Warnings of rows with none of the classes, and of classes that training lacks."""
    notes = []
    has_RL: np.ndarray = np.array(table[LABEL].tolist())
    none = int((~has_RL.any(axis=1)).sum())
    if none:
        notes.append(f"{where}: {none:,} of {counted(len(table), 'row')} have none of the classes.")
    counts_L = has_RL.sum(axis=0)
    without = [name for name, count in zip(task.labels, counts_L, strict=True) if count == 0]
    if without and is_train:
        notes.append(f"{where} has no example of {', '.join(without[:FEW])}.")
    return notes


def one_label_notes(where: str, task: Task, table: "pd.DataFrame") -> list[str]:
    """A warning of classes without an example."""
    found = set(table[LABEL])
    missing = [label for place, label in enumerate(task.labels) if place not in found]
    if len(missing) == len(task.labels) - 1:
        only = task.labels[table[LABEL].iloc[0]]
        return [f"{where}: every label is {only}, so its score says little."]
    if missing:
        return [f"{where} has no example of {', '.join(missing[:FEW])}."]
    return []
