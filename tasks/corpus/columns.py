"""Columns of records: which one is the text, what a field inside of others is, and how columns of files differ."""

import textwrap
from collections.abc import Sequence

import pyarrow as pa

from model.errors import InputError
from model.wording import printable

USUAL = ("text", "content", "raw_content", "body", "document")  # columns with the text; the first one wins
SOURCES = ("meta.pile_set_name", "source")  # columns that name a source; the first is that of the Pile
SHOWN_FIELDS = 40  # that an error names
LONGEST_TYPE = 60  # characters that are shown of a column's type
MISSING = object()


def value_at(record: object, path: str) -> object:
    """The value of a field, or of one inside another as `doc.text`; MISSING if there is none."""
    if isinstance(record, dict) and path in record:
        return record[path]
    for name in path.split("."):
        if not isinstance(record, dict) or name not in record:
            return MISSING
        record = record[name]
    return record


def choose(
    records: Sequence[dict], asked: str, usual: Sequence[str], where: str, advice: str, optional: bool = False
) -> str:
    """The column that is asked for, if a record has it, or else the one with a usual name; perhaps none if `optional`.

    Raises InputError with the columns there are and `advice`, if there is none or several may be meant.
    """
    if asked and any(value_at(record, asked) is not MISSING for record in records):
        return asked
    columns = list(dict.fromkeys(name for record in records for name in record))
    found = [] if asked else [name for name in columns if name.lower() in usual]
    if len(found) == 1:
        return found[0]
    if optional and not found:
        return ""
    if found:
        what = f"the columns {' and '.join(map(shown_name, found))}, and any of them may be meant"
    elif asked:
        what = f"no column {shown_name(asked)}"
    else:
        what = f"none of the columns {', '.join(usual)}"
    raise InputError(f"{where} has {what}. {advice} Its columns: {list_names(columns) or 'none'}.")


def text_column(record: dict, asked: str, where: str, optional: bool = True) -> str:
    """The column with the text in the records of a file that are as this one; empty if there is none.

    Raises InputError if two may be it, or unless `optional` if there is none.
    """
    if not asked and USUAL[0] in record:
        return USUAL[0]
    return choose([record], asked, USUAL, where, "Set download.column to the one with the text.", optional)


def check_source_column(record: dict, asked: str, where: str) -> None:
    """Raise InputError if the records of a file are as this one, and lack the column that is to name their source."""
    if asked:
        choose([record], asked, (), where, "Set download.source_column to the one with the source.")


def columns_to_read(record: dict, column: str, source_column: str, where: str) -> list[str]:
    """The columns of a table to read: the text's, which comes first, and those of sources.

    `record`: its names, as in `as_record`; `column` and `source_column`: those that are asked for. Raises InputError
    if one is missing.
    """
    text = text_column(record, column, where, optional=False)
    check_source_column(record, source_column, where)
    sources = [source_column] if source_column else SOURCES
    return [text, *(name for name in sources if name != text and value_at(record, name) is not MISSING)]


def as_record(fields: pa.Schema | pa.StructType) -> dict:
    """The names of columns, and those inside of them, in the form of a record."""
    record: dict[str, dict | None] = {}
    for field in fields:
        record[field.name] = as_record(field.type) if pa.types.is_struct(field.type) else None
    return record


def list_names(names: Sequence[object]) -> str:
    """Names of columns for a sentence; only the first ones of many."""
    return first_of([shown_name(name) for name in names])


def first_of(names: Sequence[str], most: int = SHOWN_FIELDS) -> str:
    """The first ones of many names, for a sentence."""
    shown = ", ".join(names[:most])
    return f"{shown}, …" if len(names) > most else shown


def shown_name(name: object) -> str:
    """The name of a column for a message, in quotes if it has blanks or nothing else."""
    plain = printable(str(name))
    has_blanks = any(character.isspace() for character in plain)
    return f'"{plain}"' if has_blanks or not plain else plain


def drift(expected: pa.Schema, found: pa.Schema) -> str:
    """How columns differ from those that were expected, in words; empty if they don't."""
    without = [shown_name(name) for name in expected.names if name not in found.names]
    more = [shown_name(name) for name in found.names if name not in expected.names]
    other_types = []
    for name in expected.names:
        if name not in found.names:
            continue
        before = expected.field(name).type
        now = found.field(name).type
        if before != now:
            other_types.append(f"{shown_name(name)} ({shorten(now)}, not {shorten(before)})")
    changes = []
    if without:
        changes.append(f"without {first_of(without)}")
    if more:
        changes.append(f"also with {first_of(more)}")
    if other_types:
        changes.append(f"with other types of {first_of(other_types)}")
    return "; ".join(changes)


def shorten(kind: pa.DataType) -> str:
    """The name of a type; only its beginning if it is long."""
    return textwrap.shorten(str(kind), LONGEST_TYPE, placeholder=" …")
