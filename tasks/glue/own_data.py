"""Labelled data: finding the files of the splits of one's own tasks, and reading and checking files of any task."""

import functools
import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from model import InputError, counted
from tasks.corpus import hub, local
from tasks.corpus.columns import MISSING, value_at
from tasks.corpus.parts import unit_hash
from tasks.corpus.rows import Loss, open_table, records
from tasks.glue import labels
from tasks.glue.own import Definition
from tasks.glue.tasks import HUB_GLUE, LABEL, TASKS, Task

if TYPE_CHECKING:
    import pandas as pd

VERSION = 2  # raise it when the same files give other tables: it enters the keys of their runs
TEXT, PAIR, TOKENS, TEST = "text", "pair", "tokens", "test"
USUAL = {  # the columns that are tried for a field without a name
    TEXT: ("text", "sentence", "content", "raw_content", "body", "document"),
    TOKENS: ("tokens", "words"),
    LABEL: ("label", "labels", "class", "category", "target", "score"),
    "tags": ("ner_tags", "tags", "labels"),
}
SPLITS = {"train": "train", "validation": "validation|valid|val|dev", TEST: "test|eval"}  # words in files' names
IN_LINES = re.compile(r"\.(csv|tsv|jsonl|ndjson)\b")  # where the number of a row is that of its line
HIDDEN = {None, "-1", "-1.0", -1.0}  # labels of a test split that has none
HELD_OUT = 3  # salt of the digests that choose the rows for validation
MOST_WITHOUT = 0.01  # of a split's rows; where more have no sentence, something else is wrong
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Data:
    """A task's checked data, with warnings and counts."""

    task: Task
    tables: "dict[str, pd.DataFrame]"  # by split, train first, then validation; the task's texts and the label
    notes: list[str]  # warnings
    left_out: dict[str, dict[str, int]]  # rows that are not in the tables, by split and reason
    shared: dict[str, int]  # training rows whose texts occur in another split too (in either order, if symmetric)
    duplicates: int  # training rows whose texts occur in an earlier training row (likewise)
    unlabelled: "dict[str, pd.DataFrame]" = field(default_factory=dict)  # texts of splits that can't be scored


# Finding the files


def splits_of(own: Definition) -> tuple[dict[str, list[Path]], dict]:
    """The files of each split, fetched if they are on the hub; and the features that the data set declares, if any.

    Raises InputError for a folder or data set without files that can be read.
    """
    path, repository = Path(own.data).expanduser(), own.repository()
    if not repository and not local.is_folder(path):
        return {"train": [path]}, {}
    conll = [] if repository else [p for p in sorted(path.iterdir()) if p.suffix.lower() in labels.CONLL[:-1]]
    if conll:  # which `datasets` doesn't know
        words = {split: re.compile(rf"(?<![a-z])({names})(?![a-z])") for split, names in SPLITS.items()}
        files = {split: [p for p in conll if name.search(p.stem.lower())] for split, name in words.items()}
        return {split: paths for split, paths in files.items() if paths}, {}
    from datasets import load_dataset_builder

    options = {"revision": hub.commit(own.source())} if repository else {}
    try:
        builder = load_dataset_builder(repository or str(path), own.config or None, **options)
        found = (builder.config.data_files or {}).items()
        files = {str(split): [fetched(own, str(file)) for file in of_split] for split, of_split in found}
    except Exception as problem:  # of `datasets`, of the hub's client, of httpx and of sockets
        raise refusal(own, problem) from problem
    return files, builder.info.features.to_dict() if builder.info.features else {}


def fetched(own: Definition, file: str) -> Path:
    """A file of a data set: a local one, or from the hub by way of its client's cache."""
    if not file.startswith("hf://"):
        return Path(file)
    from huggingface_hub import hf_hub_download

    commit, name = file.removeprefix(f"hf://datasets/{own.data}@").split("/", 1)
    return Path(hf_hub_download(own.data, name, repo_type="dataset", revision=commit))


def refusal(own: Definition, problem: Exception) -> InputError:
    """What to tell the user of a folder or data set that `datasets` refuses."""
    if own.repository() and not isinstance(problem, ValueError | RuntimeError):
        return hub.error(own.data, problem, own.source().instead)
    said = " ".join(str(problem).partition("Example of usage")[0].split())
    return InputError(
        f"{own.name}: {own.data} can't be read as a data set: {said.rstrip('.')}. Expected "
        "files for train, validation and test, without code; correct data, config or revision (finetune.tasks)."
    )


def identity(own: Definition) -> dict:
    """What identifies the data in a key, wherever it lies: its digests or revision, and how it is read."""
    about = own.model_dump(
        include={"text", "pair", "label", "kind", "metric", "validation", "encoding"}, exclude_defaults=True
    )
    if repository := own.repository():
        place = {"repository": repository, "revision": hub.commit(own.source()), "config": own.config}
    else:
        files, features = splits_of(own)
        digests = {split: [local.file_digest(path) + path.suffix for path in paths] for split, paths in files.items()}
        place = {"splits": digests} | ({"features": features} if features else {})
    return {"own": VERSION} | about | place


# Reading them


class Piece(NamedTuple):
    """A file of a split."""

    split: str
    where: str  # its name in messages
    table: "pd.DataFrame"  # the texts, perhaps tokens; labels in words, None where there is none
    names: Sequence[str]  # of the classes, where the file has numbers for them
    labelled: bool  # False: a test split that hides its labels


def column(given: str, usual: str, columns: Sequence[str], where: str) -> str:
    """The name of a column. Raises InputError unless it is there, or else one of the usual ones."""
    field = {"tags": LABEL, TOKENS: TEXT}.get(usual, usual)
    found = [name for name in columns if (name == given if given else name.lower() in USUAL[usual])]
    if len(found) == 1 or given.split(".")[0] in columns:  # a field within another, as doc.text
        return given or found[0]
    advice = f"Set {field} of the task (finetune.tasks) to the column that is meant."
    if found:
        raise InputError(f"{where} has the columns {' and '.join(found)}, which could both be {field}. {advice}")
    what = f"column {given}" if given else f"column for {field}, as {', '.join(USUAL[usual])}"
    meant = [f"Did you mean {name}? " for name in columns if given and name.strip().lower() == given.strip().lower()]
    raise InputError(f"{where} has no {what}; its columns are {', '.join(columns) or 'none'}. {''.join(meant)}{advice}")


def columns_of(own: Definition, split: str, columns: Sequence[str], where: str) -> dict[str, str]:
    """The columns to read, by their names in the table. Raises InputError if one is missing or not clear."""
    if row := TASKS.get(own.name):
        fixed = (*row.columns, LABEL) if split else row.columns
        if missing := [name for name in fixed if name not in columns]:
            raise InputError(
                f"{where} has no column {', '.join(missing)}; its columns are {', '.join(columns)}. Expected "
                f"{', '.join(fixed)}, as in {HUB_GLUE.repository}; correct it."
            )
        return {name: name for name in fixed}
    text, label = (TOKENS, "tags") if own.kind == "tokens" else (TEXT, LABEL)
    taken = {text: column(own.text, text, columns, where)}
    taken |= {PAIR: column(own.pair, PAIR, columns, where)} if own.pair else {}
    if split != TEST or own.label in columns or {name.lower() for name in columns} & {*USUAL[label]}:
        taken[LABEL] = column(own.label, label, columns, where)
    return taken


def class_names(features: dict, path: Path, name: str) -> list[str]:
    """The names of a column's classes as `datasets` has them: declared, or in a Parquet or Arrow file."""
    if not features and path.suffix in (".parquet", ".arrow"):
        with path.open("rb") as file:
            about = open_table(file, path.name)[0].metadata or {}
        features = json.loads(about.get(b"huggingface", b"{}")).get("info", {}).get("features", {})
    feature = features.get(name, {})
    while "feature" in feature:  # of a list
        feature = feature["feature"]
    return feature.get("names", [])


def rows_in(own: Definition, path: Path, where: str) -> "tuple[pd.Index, list[dict]]":
    """The rows of a file, and their numbers or those of their lines. Raises InputError if any can't be read."""
    import pandas as pd

    kind, numbers, rows = "line" if IN_LINES.search(path.name.lower()) else "row", [], []
    if own.kind == "tokens" and path.suffix.lower() in labels.CONLL:
        found = labels.sentences(path, where)
    else:
        plain = own.name in TASKS and path.suffix == ".tsv"
        found = labels.lines(path, where) if plain else records(path, where, own.encoding)
    try:
        for row in found:
            if isinstance(row, Loss):
                is_own = own.name not in TASKS and row.reason.startswith("not UTF-8")
                help_ = "Correct it, or set encoding of the task (finetune.tasks)." if is_own else "Correct it."
                raise InputError(f"{where}: {kind} {row.line:,} can't be read: {row.reason}. {help_}")
            numbers.append(row[0])
            rows.append(row[1])
    except OSError as error:
        raise local.unreadable(path, error) from error
    except InputError as error:
        if isinstance(error.__cause__, UnicodeDecodeError) and path.suffix == ".parquet":
            from tasks.glue.checks import refuse_bytes

            refuse_bytes(path, where)
        raise
    if not rows:
        raise InputError(f"{where} has no rows. Get it again, or correct data (finetune.data or finetune.tasks).")
    return pd.Index(numbers, name=kind), rows


def piece_of(own: Definition, split: str, path: Path, features: dict) -> Piece:
    """Read a file. Raises InputError for columns that are missing or not clear, broken rows, and no rows.

    `split` "" of a task of GLUE: without labels.
    """
    import pandas as pd

    where, of_tokens, row = f"{own.name}/{path.name}", own.kind == "tokens", TASKS.get(own.name)
    numbers, rows = rows_in(own, path, where)
    columns = list(dict.fromkeys(name for one in rows for name in one))
    taken = columns_of(own, split, columns, where)
    what = ", ".join(f"{name} is {of_file}" for name, of_file in taken.items())
    log.log(logging.DEBUG if row else logging.INFO, "%s: %s; %s.", where, counted(len(rows), "row"), what)
    values = {
        name: [None if (value := value_at(one, key)) is MISSING else value for one in rows]
        for name, key in taken.items()
    }
    table = pd.DataFrame(values, numbers, dtype=object)
    for name in taken:
        if name in (LABEL, TOKENS):
            continue
        help_ = "" if row else f", or set {name} of the task (finetune.tasks)"
        is_text = table[name].map(lambda value: value is None or isinstance(value, str))
        labels.refuse(table[name], name, where, is_text, f"a string; correct it{help_}")
    names = row.labels if row else class_names(features, path, taken[LABEL]) if LABEL in taken else ()
    names = list(map(labels.as_bioes, names)) if of_tokens else names
    if LABEL not in taken:
        table[LABEL] = None
    elif row:
        table[LABEL] = labels.of_row(table[LABEL], row, where, path.suffix == ".tsv")
    else:
        table[LABEL] = labels.worded(table[LABEL], own.kind, names, where)
    if of_tokens:
        labels.refuse(table[TOKENS], "the tokens", where, labels.is_list, "a list of strings")
        table.insert(0, TEXT, table[TOKENS].map(lambda tokens: " ".join(map(str, tokens))))
        pairs = zip(table[TOKENS], table[LABEL], strict=True)
        sizes = pd.Series([(len(tokens), len(tokens if tags is None else tags)) for tokens, tags in pairs], numbers)
        labels.refuse(sizes, "the number of tokens and tags", where, lambda pair: pair[0] == pair[1], "as many tags")
    return Piece(split, where, table, names, split != TEST or not set(table[LABEL]) <= HIDDEN)


def checked(name: str, task: Task, split: str, pieces: list[Piece]) -> "tuple[pd.DataFrame, dict[str, int], list[str]]":
    """The rows of a split with labels as numbers; how many are left out, by reason; and warnings.

    Training rows without a sentence are left out. Raises InputError if there are too many of them.
    """
    import pandas as pd

    from tasks.glue import checks

    train = split == "train"
    found = [checks.without_text(piece.table, list(task.columns), piece.where, train) for piece in pieces]
    why, notes = np.concatenate([reasons for reasons, _ in found]), [warning for _, warning in found if warning]
    counts = Counter(why[why != ""].tolist())
    if counts.total() > MOST_WITHOUT * len(why):
        raise InputError(
            f"{name}/{split}: {counts.total():,} of {counted(len(why), 'row')} without a sentence; expected at most "
            f"{MOST_WITHOUT:.0%}. Correct the file or get it again. {' '.join(notes)}"
        )
    table = pd.concat([piece.table for piece in pieces], ignore_index=len(pieces) > 1)
    table = table[why == ""] if train else table
    table = table.assign(**{LABEL: labels.numbered(table[LABEL], task)})
    notes += [] if task.own else checks.missing_classes(table[LABEL], task, f"{name}/{split}")
    return table, {reason: counts[reason] for reason in ("null", "empty") if train and reason in counts}, notes


def whole(name: str, task: Task, pieces: list[Piece], notes: list[str], own: Definition | None = None) -> Data:
    """The checked data of a task, of all files with labels. Without a split for validation, `own` tells the share."""
    from tasks.glue import checks

    tables, left_out = {}, {}
    for split in dict.fromkeys(piece.split for piece in pieces):
        of_split = [piece for piece in pieces if piece.split == split]
        tables[split], without, warnings = checked(name, task, split, of_split)
        left_out |= {split: without} if without else {}
        notes += warnings
    if own and "validation" not in tables:
        tables = hold_out(own, task, tables, notes)
    notes += checks.odd_labels(name, task, tables) if own else []
    return compared(name, task, tables, notes, left_out)


def compared(name: str, task: Task, tables: "dict[str, pd.DataFrame]", notes: list[str], left_out: dict) -> Data:
    """Data whose rows have been compared with each other."""
    from tasks.glue.checks import repeated

    duplicates, shared, warnings = repeated(name, task, tables)
    return Data(task, tables, notes + warnings, left_out, shared, duplicates)


def read(own: Definition) -> Data:
    """Read and check the data of a definition; once, unless it changes.

    Raises InputError for data that can't be trained on or scored.
    """
    return _read(own, json.dumps(identity(own)))


@functools.lru_cache(maxsize=16)
def _read(own: Definition, _identity: str) -> Data:
    import pandas as pd

    files, features = splits_of(own)
    if "train" not in files:
        raise InputError(
            f"{own.name}: {own.data} has no split for training; it has {', '.join(files) or 'no files'}. Name a file "
            "train, or correct data (finetune.tasks)."
        )
    notes = [f"{own.name}: the split {split} is not used." for split in files if split not in SPLITS]
    if "validation" in files and "validation" in own.model_fields_set:
        notes.append(f"{own.name}: validation {own.validation:g} is not used, since there is a split for validation.")
    pieces = [piece_of(own, split, path, features) for split in SPLITS for path in files.get(split, ())]
    hidden = [piece.table for piece in pieces if not piece.labelled]
    notes += [f"{own.name}: the split {TEST} has no labels and is not scored."] if hidden else []
    pieces = [piece for piece in pieces if piece.labelled]
    data = whole(own.name, row_of(own, pieces, notes), pieces, notes, own)
    return replace(data, unlabelled={TEST: pd.concat(hidden)} if hidden else {})


def row_of(own: Definition, pieces: list[Piece], notes: list[str]) -> Task:
    """The row of the table of tasks; notes on classes are added to `notes`.

    Raises InputError for rows without a label, a training split with one class only, and classes that it doesn't have.
    """
    from tasks.glue.checks import rows_of

    first, counts, every = pieces[0].where, Counter(), Counter()
    for piece in pieces:
        given = piece.table[LABEL]
        labels.refuse(given, "the label", piece.where, lambda label: None not in labels.parts(label), "one; correct it")
        every.update(found := Counter(one for label in given for one in labels.parts(label)))
        counts.update(found if piece.split == "train" else ())
    if len(counts) < 2:
        only = f"every label is {next(iter(counts))}" if counts else "there is no label"
        raise InputError(f"{first}: {only}; expected different ones. Set label to another column (finetune.tasks).")
    of_numbers = own.kind == "regression"
    names = [] if of_numbers else pieces[0].names or labels.classes(every, own.kind, first)
    for piece in [] if of_numbers else pieces:
        new = piece.table[LABEL].map(lambda label: next((one for one in labels.parts(label) if one not in counts), ""))
        if (new != "").any():
            found = f"{piece.where}: the label {new.max()} of {rows_of(new != '')} is in no training row"
            if own.kind != "tokens":
                raise InputError(f"{found}. Correct it, add such rows to the training data, or leave these out.")
            notes.append(f"{found}, so it is never answered.")
    if single := [name for name in names if counts[name] == 1][: labels.FEW]:
        notes.append(f"{own.name}: one training example only of {', '.join(single)}; it can hardly be learned.")
    metrics, positive = labels.metrics_of(own, names, counts, notes)
    columns = (TEXT, PAIR) if own.pair else (TEXT,)
    about = {"kind": own.kind, "own": True, "positive": positive}
    return Task(own.name, columns, tuple(names), metrics, dict.fromkeys(SPLITS, 0), **about)


def hold_out(own: Definition, task: Task, tables: dict, notes: list[str]) -> dict:
    """The tables with a part of the training rows for validation: those whose texts have a digest below the share.

    A text is in one split only. Classes that would have no training row left keep theirs.
    """
    from tasks.glue.checks import texts_of

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
        return {name: value for name, value in identity(own).items() if name not in ("label", "metric")}
    return hashlib.sha256(json.dumps([*sentences(own)]).encode()).hexdigest()


def sentences(own: Definition) -> Iterator[tuple[str, str, int, list[str]]]:
    """The texts of the splits for validation and test, for decontamination: split, column, row of the first, texts."""
    data = read(own)
    for split, table in (data.tables | data.unlabelled).items():
        for name in data.task.columns if split != "train" else ():
            yield split, name, 0, table[name].fillna("").tolist()
