"""Labelled data of any task, read and checked. Probes are made from the held-out documents of a pretrained artifact."""

import functools
import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import regex

from model.errors import InputError
from model.wording import counted
from tasks.corpus import columns
from tasks.corpus.columns import MISSING, choose, value_at
from tasks.corpus.containers import head_of
from tasks.corpus.kinds import ending
from tasks.corpus.losses import Loss
from tasks.corpus.parts import unit_hash
from tasks.corpus.rows import PLAIN_TSV, open_table, records
from tasks.glue import conll, labels, lists, probes
from tasks.glue.data import CONLL, SPLITS, identity, splits_of
from tasks.glue.labels import EMPTY_CELL, FEW, NO_CLASS, plain, rows_of
from tasks.glue.own import Definition
from tasks.glue.table import HUB_GLUE, LABEL, TASKS, Task, training_splits
from tasks.glue.tags import as_bioes
from tasks.store.artifacts import Artifact

if TYPE_CHECKING:
    import pandas as pd

TEXT, PAIR, TOKENS, TEST = "text", "pair", conll.TOKENS, "test"
USUAL = {  # the columns that are tried for a field without a name
    TEXT: (*columns.USUAL, "sentence"),
    TOKENS: ("tokens", "words"),
    LABEL: ("label", "labels", "class", "category", "target", "score"),
    "tags": ("ner_tags", "tags", "labels"),
}
IN_LINES = re.compile(r"\.(csv|tsv|jsonl|ndjson)\b")  # where the number of a row is that of its line
HIDDEN = {None, (), EMPTY_CELL, NO_CLASS, "-1.0", -1.0}  # labels of a test split that has none
HELD_OUT = 3  # salt of the digests that choose the rows for validation
BLANK = regex.compile(r"[\s\p{Z}\p{Cc}\p{Cf}]*")  # white space, control and invisible characters, or nothing
MOST_WITHOUT = 0.01  # of a split's rows; where more have no sentence, something else is wrong
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Data:
    """A task's checked data, with warnings and counts."""

    task: Task
    tables: "dict[str, pd.DataFrame]"  # by split, train first, then validation; the task's texts and the label
    notes: list[str]  # warnings
    left_out: int  # training rows without a text, which are not in the tables
    shared: dict[str, int]  # training rows whose texts occur in another split too (in either order, if symmetric)
    duplicates: int  # training rows whose texts occur in an earlier training row (likewise)
    skipped: dict[str, int] = field(default_factory=dict)  # rows without a label by split, which are not in the tables
    unlabelled: "dict[str, pd.DataFrame]" = field(default_factory=dict)  # texts of splits that can't be scored


class Piece(NamedTuple):
    """A file of a split."""

    split: str
    where: str  # its name in messages
    table: "pd.DataFrame"  # the texts, perhaps tokens; labels in words, None where there is none
    names: Sequence[str]  # of the classes, where the file has numbers for them
    labelled: bool  # False: a test split that hides its labels
    notes: list[str]  # warnings on how the labels are written


def columns_of(own: Definition, split: str, rows: list[dict], where: str) -> dict[str, str]:
    """The columns to read, by their names in the table, which those of GLUE keep.

    Raises InputError if one is missing or not clear.
    """

    def column(field: str, usual: str, optional: bool = False) -> str:
        advice = f"Set {field} of the task (finetune.tasks) to the one that is meant."
        advice = f"Expected those of {HUB_GLUE.repository}; correct it." if own.named else advice
        return choose(rows, getattr(own, field), USUAL[usual], where, advice, optional)

    text, label = (TOKENS, "tags") if own.kind == "tokens" else (TEXT, LABEL)
    names = TASKS[own.name].columns if own.named else (text, PAIR)
    taken = {names[0]: column(TEXT, text)}
    if own.pair:
        taken[names[1]] = column(PAIR, text)
    if split and (given := column(LABEL, label, optional=split == TEST)):
        taken[LABEL] = given
    return taken


def class_names(features: dict, path: Path, name: str) -> list[str]:
    """The names of a column's classes as `datasets` has them: declared, or in a Parquet or Arrow file."""
    if not features and path.suffix in (".parquet", ".arrow"):
        with path.open("rb") as file:
            about = open_table(file).schema.metadata or {}
        features = json.loads(about.get(b"huggingface", b"{}")).get("info", {}).get("features", {})
    feature = features.get(name, {})
    while "feature" in feature:  # of a list
        feature = feature["feature"]
    return feature.get("names", [])


def is_conll(own: Definition, path: Path) -> bool:
    """Whether a file has a token on each line: by its ending, or a .tsv without the tokens' column in its first line."""
    if ending(path.name) != ".tsv":
        return ending(path.name) in CONLL
    first = head_of(path).decode("utf-8-sig", errors="replace").partition("\n")[0]
    names = [name.strip('" \r') for name in first.split("\t")]
    return own.text not in names if own.text else not {name.lower() for name in names} & {*USUAL[TOKENS]}


def rows_in(own: Definition, path: Path, where: str) -> tuple[str, list[int], list[dict]]:
    """What the numbers of a file's rows count, such as "line"; these; the rows. Raises InputError for a broken one."""
    kind, numbers, rows = "line" if IN_LINES.search(path.name.lower()) else "row", [], []
    if own.kind == "tokens" and is_conll(own, path):
        kind, found = "sentence", conll.sentences(path, where, own.encoding, own.text, own.label)
    else:
        found = records(path, where, own.encoding, PLAIN_TSV if own.named else None)
    for row in found:
        if isinstance(row, Loss):
            advice = own.advice("encoding") if row.reason.startswith("not UTF-8") else ""
            raise InputError(f"{where}: {kind} {row.line:,} can't be read: {row.reason}. Correct it{advice}.")
        numbers.append(row[0])
        rows.append(row[1])
    if not rows:
        raise InputError(f"{where} has no rows. Get it again, or correct data (finetune.data or finetune.tasks).")
    return kind, numbers, rows


def value_in(row: dict, column: str) -> object:
    """The value of a column, None if there is none; of bytes in UTF-8, as which some programs write strings, the text."""
    value = value_at(row, column)
    if isinstance(value, bytes):
        with suppress(UnicodeDecodeError):
            return value.decode()
    return None if value is MISSING else value


def piece_of(own: Definition, split: str, path: Path, features: dict) -> Piece:
    """Read a file. Raises InputError for columns that are missing or not clear, broken rows, and no rows.

    `split` "": without labels.
    """
    import pandas as pd

    where, of_tokens, row = f"{own.name}/{path.name}", own.kind == "tokens", TASKS.get(own.name)
    kind, numbers, rows = rows_in(own, path, where)
    taken = columns_of(own, split, rows, where)
    what = ", ".join(f"{name} is {columns.shown_name(of_file)}" for name, of_file in taken.items())
    log.log(logging.DEBUG if own.named else logging.INFO, "%s: %s; %s.", where, counted(len(rows), "row"), what)
    values = {name: [value_in(one, key) for one in rows] for name, key in taken.items()}
    table = pd.DataFrame(values, numbers := pd.Index(numbers, name=kind), dtype=object)
    for name in taken:
        if name in (LABEL, TOKENS):
            continue
        is_text = table[name].map(lambda value: value is None or isinstance(value, str))
        labels.refuse(table[name], name, where, is_text, f"a string; correct it{own.advice(name)}")
        table[name] = table[name].fillna("")
    names = row.labels if row else class_names(features, path, taken[LABEL]) if LABEL in taken else ()
    names = names if row else [plain(name) for name in names]
    names = list(map(as_bioes, names)) if of_tokens else names
    notes: list[str] = []
    table[LABEL] = labels.to_words(table[LABEL], own, names, where, notes) if LABEL in taken else None
    if of_tokens:
        table[TOKENS] = labels.read_lists(table[TOKENS], "the tokens", where, notes)
        labels.refuse(table[TOKENS], "the tokens", where, labels.is_list, "a list of strings")
        table.insert(0, TEXT, table[TOKENS].map(lambda tokens: " ".join(map(str, tokens))))
        pairs = zip(table[TOKENS], table[LABEL], strict=True)
        sizes = pd.Series([(len(tokens), len(tokens if tags is None else tags)) for tokens, tags in pairs], numbers)
        labels.refuse(sizes, "the number of tokens and tags", where, lambda pair: pair[0] == pair[1], "as many tags")
    return Piece(split, where, table, names, split != TEST or not set(table[LABEL]) <= HIDDEN, notes)


def without_text(frame: "pd.DataFrame", columns: list[str], where: str, train: bool, notes: list[str]) -> "pd.Series":
    """Whether each row has a text that is empty. A warning of such rows is added to `notes`."""
    empty = frame[columns].map(lambda text: BLANK.fullmatch(text) is not None).any(axis=1)
    if empty.any():
        rows = rows_of(empty)
        what = f"left out {rows}, without text" if train else f"a text is empty in {rows}; these rows are still scored"
        notes.append(f"{where}: {what}.")
    return empty


def note_classes(name: str, task: Task, tables: "dict[str, pd.DataFrame]") -> list[str]:
    """Warnings of splits without some of the classes, and of several labels those that training or a split lacks."""
    notes = []
    for split, table in tables.items() if task.kind == "multilabel" else ():
        found = np.array(table[LABEL].tolist()).sum(axis=0)
        without = [label for label, count in zip(task.labels, found, strict=True) if count == 0]
        none = sum(not any(row) for row in table[LABEL])
        if none:
            notes.append(f"{name}/{split}: {none:,} of {counted(len(table), 'row')} have none of the classes.")
        if without and split == "train":
            notes.append(f"{name}/{split} has no example of {', '.join(without[:FEW])}.")
    for split, table in tables.items() if task.kind == "classes" else ():
        found = set(table[LABEL])
        missing = [label for place, label in enumerate(task.labels) if place not in found]
        if len(missing) == len(task.labels) - 1:
            only = task.labels[table[LABEL].iloc[0]]
            notes.append(f"{name}/{split}: every label is {only}, so its score says little.")
        elif missing:
            notes.append(f"{name}/{split} has no example of {', '.join(missing[:FEW])}.")
    return notes


def count_repeated(name: str, task: Task, tables: "dict[str, pd.DataFrame]") -> tuple[int, dict[str, int], list[str]]:
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
    pairs = zip(*(table[name].str.strip() for name in task.columns), strict=True)
    return table.assign(texts=["\0".join(sorted(texts) if task.symmetric else texts) for texts in pairs])["texts"]


def check_split(own: Definition, task: Task, split: str, pieces: list[Piece], notes: list[str]) -> "pd.DataFrame":
    """The rows of a split, those for training only if they have a text, with labels as numbers.

    Adds to `notes`. Raises InputError if too many rows have no text.
    """
    import pandas as pd

    train, said = split == "train", []
    of_pieces = [without_text(piece.table, list(task.columns), piece.where, train, said) for piece in pieces]
    empty = np.concatenate(of_pieces)
    if empty.mean() > MOST_WITHOUT:
        raise InputError(
            f"{own.name}/{split}: {empty.sum():,} of {counted(len(empty), 'row')} without a text; expected at most "
            f"{MOST_WITHOUT:.0%}. Correct the file or get it again. {' '.join(said)}"
        )
    notes += said
    table = pd.concat([piece.table for piece in pieces], ignore_index=len(pieces) > 1)
    table = table[~empty] if train else table
    return table.assign(**{LABEL: labels.to_numbers(table[LABEL], task)})


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


def with_counts(name: str, task: Task, tables: "dict[str, pd.DataFrame]", notes: list[str], left_out: int) -> Data:
    """Data whose rows have been compared with each other."""
    duplicates, shared, warnings = count_repeated(name, task, tables)
    return Data(task, tables, notes + warnings, left_out, shared, duplicates)


def read(own: Definition, pretrained: Artifact | None = None) -> Data:
    """Fetch, read and check the data of a task, and log its warnings; once, unless it changes.

    Probes are made from `pretrained`. Raises InputError for data that can't be trained on or scored.
    """
    return _read(own, json.dumps(identity(own)), pretrained if own.data == "probes" else None)


@functools.lru_cache(maxsize=16)
def _read(own: Definition, _identity: str, pretrained: Artifact | None) -> Data:
    import pandas as pd

    if pretrained:
        return with_counts(own.name, TASKS[own.name], probes.make(own.name, pretrained), [], 0)
    files, features = splits_of(own)
    if "train" not in files:
        raise InputError(
            f"{own.name}: {own.data} has no split for training; it has {', '.join(files) or 'no files'}. Name a file "
            "train, or correct data (finetune.tasks)."
        )
    used = training_splits(own.name) if own.named else list(SPLITS)
    notes = [f"{own.name}: the split {split} is not used." for split in files if split not in used]
    if "validation" in files and "validation" in own.model_fields_set:
        notes.append(f"{own.name}: validation {own.validation:g} is not used, since there is a split for validation.")
    pieces = [piece_of(own, split, path, features) for split in used for path in files.get(split, ())]
    hidden = [piece.table for piece in pieces if not piece.labelled]
    notes += [f"{own.name}: the split {TEST} has no labels and is not scored."] if hidden else []
    pieces = [piece for piece in pieces if piece.labelled]
    notes += [note for piece in pieces for note in piece.notes]
    if not own.named:
        pieces = agree_on_names(own, pieces, notes)
    pieces, skipped = drop_unlabelled(own, pieces, notes)
    data = join_pieces(own, make_task(own, pieces, notes), pieces, notes)
    for note in data.notes:
        log.warning(note)
    return replace(data, skipped=skipped, unlabelled={TEST: pd.concat(hidden)} if hidden else {})


def agree_on_names(own: Definition, pieces: list[Piece], notes: list[str]) -> list[Piece]:
    """The pieces with names of classes that mean the same in all of them, where no file declares names. Adds to `notes`.

    Vectors of 0 and 1 become the classes of their places, and 3.0 becomes 3 if all are whole numbers. What only a
    test split has as -1 is no label. Raises InputError for vectors of several lengths or with other numbers.
    """
    declared = any(piece.names for piece in pieces)
    given = [label for piece in pieces for label in piece.table[LABEL] if label not in (None, (), EMPTY_CELL)]
    found = lists.find_vectors(given) if own.kind == "multilabel" and not declared else lists.Vectors()
    for piece in pieces if found.expected else ():
        fits = labels.map_values(piece.table[LABEL], lambda row: row in (None, (), EMPTY_CELL) or found.fits(row))
        labels.refuse(piece.table[LABEL], "the label", piece.where, fits, f"{found.expected}; correct it")
    if found.size:
        names = tuple(map(str, range(found.size)))
        notes.append(
            f"{own.name}: the labels are vectors of 0 and 1, all of {found.size} places, and are read as the classes 0 "
            f"to {found.size - 1}, by place. For other names write lists of names."
        )
        return [relabel(piece, lists.as_classes)._replace(names=names) for piece in pieces]
    if own.kind == "multilabel":
        pieces = [fill_empty(own, piece, notes) for piece in pieces]
    if own.kind == "regression" or declared:
        return pieces
    shorter = labels.whole_numbers({one for label in given for one in labels.parts(label) if one is not None})
    if shorter and own.kind == "multilabel":
        pieces = [relabel(piece, lambda row: row and tuple(shorter.get(one, one) for one in row)) for piece in pieces]
    elif shorter and own.kind == "classes":
        pieces = [relabel(piece, lambda name: shorter.get(name, name)) for piece in pieces]
    of_others = [piece.table[LABEL] for piece in pieces if piece.split != TEST]
    if own.kind == "classes" and not any((given == NO_CLASS).any() for given in of_others):
        shown = {NO_CLASS: None}
        pieces = [relabel(p, lambda name: shown.get(name, name)) if p.split == TEST else p for p in pieces]
    return pieces


def fill_empty(own: Definition, piece: Piece, notes: list[str]) -> Piece:
    """A piece where an empty cell means none of the classes. Adds to `notes`. Raises InputError if they are many."""
    empty = labels.map_values(piece.table[LABEL], lambda row: row == EMPTY_CELL).astype(bool)
    if not empty.any():
        return piece
    found = f"{piece.where}: {empty.sum():,} of {counted(len(empty), 'row')} have an empty label ({rows_of(empty)})"
    if empty.mean() > own.max_unlabelled:
        raise InputError(
            f"{found}, which may mean that none of the classes fits, or that they are not labelled; expected a share of "
            f"{own.max_unlabelled:g} at most. Write [] for none of the classes and delete the others, or raise "
            "max_unlabelled (finetune.tasks)."
        )
    notes.append(f"{found}, read as none of the classes. Delete them if they are not labelled.")
    return relabel(piece, lambda row: () if row == EMPTY_CELL else row)


def relabel(piece: Piece, of_label: Callable) -> Piece:
    """A piece with other labels."""
    return piece._replace(table=piece.table.assign(**{LABEL: labels.map_values(piece.table[LABEL], of_label)}))


def drop_unlabelled(own: Definition, pieces: list[Piece], notes: list[str]) -> tuple[list[Piece], dict[str, int]]:
    """The pieces without rows that have no label, and how many these are by split. Adds to `notes`.

    Raises InputError if a split has more of them than the definition allows; those of GLUE have none.
    """
    kept, skipped, rows = [], Counter(), Counter()
    said: dict[str, list[tuple[str, str]]] = {}
    for piece in pieces:
        without = labels.map_values(piece.table[LABEL], lambda label: label is None).astype(bool)
        rows[piece.split] += len(without)
        if without.any():
            skipped[piece.split] += int(without.sum())
            these = f"{without.sum():,} of {counted(len(without), 'row')} without a label ({rows_of(without)})"
            said.setdefault(piece.split, []).append((piece.where, these))
        if not without.all():
            kept.append(piece._replace(table=piece.table[~without]))
    for split, count in skipped.items():
        if count > own.max_unlabelled * rows[split]:
            raise InputError(
                f"{own.name}/{split}: {count:,} of {counted(rows[split], 'row')} have no label; expected a share of "
                f"{own.max_unlabelled:g} at most. Set label to another column, or raise max_unlabelled (finetune.tasks). "
                f"{' '.join(f'{where}: {these}.' for where, these in said[split])}"
            )
        notes += [f"{where}: left out {these}." for where, these in said[split]]
    return kept, dict(skipped)


def make_task(own: Definition, pieces: list[Piece], notes: list[str]) -> Task:
    """The row of the table of tasks, or one like those; notes on classes are added to `notes`.

    Raises InputError for tokens without a tag, a training split with one class only, and classes that it doesn't have.
    """
    first, counts, every = pieces[0].where, Counter(), Counter()
    for piece in pieces:
        given = piece.table[LABEL]
        labels.refuse(given, "the label", piece.where, lambda label: None not in labels.parts(label), "one; correct it")
        every.update(found := Counter(one for label in given for one in labels.parts(label)))
        counts.update(found if piece.split == "train" else ())
    if len(counts) < 2:
        only = f"every label is {next(iter(counts))}" if counts else "there is no label"
        raise InputError(f"{first}: {only}; expected different ones. Correct it{own.advice('label')}.")
    if own.named:
        return TASKS[own.name]
    of_numbers = own.kind == "regression"
    names = [] if of_numbers else pieces[0].names or labels.classes(every, own.kind, first)
    for piece in [] if of_numbers else pieces:
        check_classes(own, piece, names, counts, notes)
    notes += labels.case_notes(own.name, names) + labels.gap_notes(own.name, names)
    if single := [name for name in names if counts[name] == 1][:FEW]:
        notes.append(f"{own.name}: one training example only of {', '.join(single)}; it can hardly be learned.")
    metrics, positive = labels.metrics_of(own, names, counts, notes)
    columns = (TEXT, PAIR) if own.pair else (TEXT,)
    about = {"kind": own.kind, "own": True, "positive": positive}
    return Task(own.name, columns, tuple(names), metrics, dict.fromkeys(SPLITS, 0), **about)


def check_classes(own: Definition, piece: Piece, names: Sequence[str], counts: Counter, notes: list[str]) -> None:
    """Raise InputError for classes that the data doesn't declare, or that training lacks; tags are noted only.

    `counts`: of each class in training.
    """
    given, known = piece.table[LABEL], set(names)
    declared = f"one of those that the data declares, such as {', '.join(names[:FEW])}; correct it"
    labels.refuse(given, "the label", piece.where, lambda label: known.issuperset(labels.parts(label)), declared)
    new = given.map(lambda label: next((one for one in labels.parts(label) if one not in counts), ""))
    if (new != "").any():
        found = f"{piece.where}: the label {new.max()} of {rows_of(new != '')} is in no training row"
        if own.kind != "tokens":
            raise InputError(f"{found}. Correct it, add such rows to the training data, or leave these out.")
        notes.append(f"{found}, so it is never answered.")


def hold_out(own: Definition, task: Task, tables: dict, notes: list[str]) -> dict:
    """The tables with a part of the training rows for validation: those whose texts have a digest below the share.

    A text is in one split only. Classes that would have no training row left keep theirs.
    """
    train = tables.pop("train")
    texts = texts_of(train, task)
    chosen = texts.map(lambda text: unit_hash(text, HELD_OUT) < own.validation)
    if own.kind == "classes":
        chosen &= ~texts.isin(texts[~train[LABEL].isin(train[LABEL][~chosen])])
    if not chosen.any() or chosen.all():
        raise InputError(
            f"{own.name}: a share of {own.validation:g} of {counted(len(train), 'row')} leaves none to score or to "
            "train on. Give more rows, a file for validation, or another validation (finetune.tasks)."
        )
    notes.append(
        f"{own.name}: there is no validation split; {chosen.sum():,} of {counted(len(train), 'row')} are held out, "
        f"chosen by a digest of their text (validation {own.validation:g})."
    )
    return {"train": train[~chosen], "validation": train[chosen], **tables}


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
        columns, scored = data.task.columns, data.tables | data.unlabelled
        found = ((split, table) for split, table in scored.items() if split != "train")
    else:
        columns, paths = TASKS[own.name].columns, ((split, path) for split in files for path in files[split])
        found = ((split, piece_of(own, "", path, {}).table) for split, path in paths)
    rows: Counter[str] = Counter()
    for split, table in found:
        for name in columns:
            yield split, name, rows[split], table[name].tolist()
        rows[split] += len(table)
