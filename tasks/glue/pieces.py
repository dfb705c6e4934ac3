"""Files of labelled data, read one by one: which columns have the texts and the labels, and the rows as a table."""

import json
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from model.errors import InputError
from model.wording import counted
from tasks.corpus import columns
from tasks.corpus.columns import MISSING, choose, value_at
from tasks.corpus.containers import head_of
from tasks.corpus.kinds import ending
from tasks.corpus.losses import Loss
from tasks.corpus.rows import PLAIN_TSV, gather, open_table, records
from tasks.glue import conll, labels
from tasks.glue.data import CONLL
from tasks.glue.labels import EMPTY_CELL, NO_CLASS, plain
from tasks.glue.own import Definition
from tasks.glue.table import HUB_GLUE, LABEL, TASKS
from tasks.glue.tags import as_bioes

if TYPE_CHECKING:
    import pandas as pd

TEXT = "text"
PAIR = "pair"
TOKENS = conll.TOKENS
TEST = "test"
USUAL = {  # the columns that are tried for a field without a name
    TEXT: (*columns.USUAL, "sentence"),
    TOKENS: ("tokens", "words"),
    LABEL: ("label", "labels", "class", "category", "target", "score"),
    "tags": ("ner_tags", "tags", "labels"),
}
IN_LINES = re.compile(r"\.(csv|tsv|jsonl|ndjson)\b")  # where the number of a row is that of its line
HIDDEN = {None, (), EMPTY_CELL, NO_CLASS, "-1.0", -1.0}  # labels of a test split that has none
log = logging.getLogger(__name__)


class Piece(NamedTuple):
    """A file of a split."""

    split: str
    where: str  # its name in messages
    table: "pd.DataFrame"  # the texts, perhaps tokens; labels in words, None where there is none
    names: Sequence[str]  # of the classes, where the file has numbers for them
    labelled: bool  # False: a test split that hides its labels
    notes: list[str]  # warnings on how the labels are written


class Rows(NamedTuple):
    """The rows of a file, with numbers by which a reader finds them."""

    unit: str  # what the numbers count: "line", "row" or "sentence"
    numbers: list[int]
    values: list[dict]  # by column


def read_piece(own: Definition, split: str, path: Path, features: dict) -> Piece:
    """Read a file. Raises InputError for columns that are missing or not clear, broken rows, and no rows.

    `split` "": without labels.
    """
    where = f"{own.name}/{path.name}"
    table, chosen = read_table(own, split, path, where)
    for name in chosen:
        if name not in (LABEL, TOKENS):
            check_texts(table[name], name, where, own)
            table[name] = table[name].fillna("")
    names = names_for_numbers(own, path, features, chosen.get(LABEL))
    notes: list[str] = []
    if LABEL in chosen:
        table[LABEL] = labels.to_words(table[LABEL], own, names, where, notes)
    else:
        table[LABEL] = None
    if own.kind == "tokens":
        read_tokens(table, where, notes)
    hides_labels = split == TEST and set(table[LABEL]) <= HIDDEN
    return Piece(split, where, table, names, not hides_labels, notes)


def read_tokens(table: "pd.DataFrame", where: str, notes: list[str]) -> None:
    """Read the lists of tokens, also those that are text, and put a text of each in front. Adds to `notes`."""
    table[TOKENS] = labels.read_lists(table[TOKENS], "the tokens", where, notes)
    check_tags(table, where)
    texts = table[TOKENS].map(lambda tokens: " ".join(map(str, tokens)))
    table.insert(0, TEXT, texts)


def check_texts(given: "pd.Series", name: str, where: str, own: Definition) -> None:
    """Raise InputError unless a column has strings, or nothing."""
    is_text = given.map(lambda value: value is None or isinstance(value, str))
    labels.refuse(given, name, where, is_text, f"a string; correct it{own.advice(name)}")


def names_for_numbers(own: Definition, path: Path, features: dict, column: str | None) -> Sequence[str]:
    """The names of the classes that a column's numbers stand for; none if nothing declares them."""
    if own.named:
        return TASKS[own.name].labels
    if column is None:
        return ()
    names = [plain(name) for name in class_names(features, path, column)]
    if own.kind == "tokens":
        return [as_bioes(name) for name in names]
    return names


def read_table(own: Definition, split: str, path: Path, where: str) -> tuple["pd.DataFrame", dict[str, str]]:
    """The columns of a file that a task needs, with the rows numbered; and the file's name for each column."""
    import pandas as pd

    unit, numbers, rows = read_rows(own, path, where)
    chosen = choose_columns(own, split, rows, where)
    what = ", ".join(f"{name} is {columns.shown_name(of_file)}" for name, of_file in chosen.items())
    level = logging.DEBUG if own.named else logging.INFO
    log.log(level, "%s: %s; %s.", where, counted(len(rows), "row"), what)
    values = {}
    for name, of_file in chosen.items():
        values[name] = [value_in(row, of_file) for row in rows]
    return pd.DataFrame(values, pd.Index(numbers, name=unit), dtype=object), chosen


def read_rows(own: Definition, path: Path, where: str) -> Rows:
    """All rows of a file. Raises InputError for a row that can't be read, and for a file without any."""
    unit = "line" if IN_LINES.search(path.name.lower()) else "row"
    found: Iterator[tuple[int, dict] | Loss]
    if own.kind == "tokens" and is_conll(own, path):
        unit = "sentence"
        found = conll.sentences(path, where, own.encoding, own.text, own.label)
    else:
        found = records(path, where, own.encoding, PLAIN_TSV if own.named else None)
    numbers, rows = gather(found, where, unit, own.advice("encoding"))
    if not rows:
        raise InputError(f"{where} has no rows. Download it again, or correct data (finetune.data or finetune.tasks).")
    return Rows(unit, numbers, rows)


def is_conll(own: Definition, path: Path) -> bool:
    """Whether a file has a token per line: by its ending, or a .tsv without the tokens' column in its first line."""
    if ending(path.name) != ".tsv":
        return ending(path.name) in CONLL
    first = head_of(path).decode("utf-8-sig", errors="replace").partition("\n")[0]
    names = [name.strip('" \r') for name in first.split("\t")]
    if own.text:
        return own.text not in names
    return not any(name.lower() in USUAL[TOKENS] for name in names)


def choose_columns(own: Definition, split: str, rows: list[dict], where: str) -> dict[str, str]:
    """The columns to read: their names in the table, which GLUE's columns keep, and in the file.

    Raises InputError if one is missing or not clear.
    """

    def column(field: str, usual: str, optional: bool = False) -> str:
        advice = f"Set {field} of the task (finetune.tasks) to the right one."
        if own.named:
            advice = f"Expected those of {HUB_GLUE.repository}; correct it."
        return choose(rows, getattr(own, field), USUAL[usual], where, advice, optional)

    text, label = (TOKENS, "tags") if own.kind == "tokens" else (TEXT, LABEL)
    first, *others = TASKS[own.name].columns if own.named else (text, PAIR)
    chosen = {first: column(TEXT, text)}
    if own.pair:
        chosen[others[0]] = column(PAIR, text)
    if split:
        of_file = column(LABEL, label, optional=split == TEST)
        if of_file:
            chosen[LABEL] = of_file
    return chosen


def class_names(features: dict, path: Path, name: str) -> list[str]:
    """The names of a column's classes as `datasets` has them: declared, or in a Parquet or Arrow file."""
    if not features and path.suffix in (".parquet", ".arrow"):
        with path.open("rb") as file:
            metadata = open_table(file).schema.metadata or {}
        about = json.loads(metadata.get(b"huggingface", b"{}"))
        features = about.get("info", {}).get("features", {})
    feature = features.get(name, {})
    while "feature" in feature:  # of a list
        feature = feature["feature"]
    return feature.get("names", [])


def value_in(row: dict, column: str) -> object:
    """A column's value, None if there is none; of bytes in UTF-8, as which some programs write strings, the text."""
    value = value_at(row, column)
    if isinstance(value, bytes):
        with suppress(UnicodeDecodeError):
            return value.decode()
    return None if value is MISSING else value


def check_tags(table: "pd.DataFrame", where: str) -> None:
    """Raise InputError unless each row has a list of tokens, with as many tags or none."""
    import pandas as pd

    labels.refuse(table[TOKENS], "the tokens", where, labels.is_list, "a list of strings")
    sizes = []
    for tokens, tags in zip(table[TOKENS], table[LABEL], strict=True):
        sizes.append((len(tokens), len(tokens if tags is None else tags)))
    pairs = pd.Series(sizes, table.index)
    labels.refuse(pairs, "the number of tokens and tags", where, lambda pair: pair[0] == pair[1], "as many tags")


def relabel(piece: Piece, of_label: labels.OfLabel) -> Piece:
    """A piece with other labels."""
    new = labels.map_values(piece.table[LABEL], of_label)
    return piece._replace(table=piece.table.assign(**{LABEL: new}))
