"""Documents of rows: which column or field of a record is the text, and which names its source."""

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from model.errors import InputError
from model.wording import printable
from tasks.corpus import rows
from tasks.corpus.kinds import TABLES
from tasks.corpus.parts import Document
from tasks.corpus.rows import SAMPLE, SURROGATE, TOO_LONG, Lenient, Loss, Row, Unreadable

USUAL = ("text", "content", "raw_content", "body", "document")  # columns with the text; the first one wins
SOURCES = ("meta.pile_set_name", "source")  # columns that name a source; the first is that of the Pile
SHOWN_FIELDS = 40  # that an error names
LONGEST_TYPE = 60  # characters that are shown of a column's type
LONGEST_NAME, OTHER = 256, "other"  # characters of a source's name; the name in place of a longer one
EMPTY, NOT_UTF8 = "empty text", "not UTF-8"  # reasons of losses
MISSING = object()


@dataclass
class Layout:
    """How to read a file; and what was found, which is valid while the file is read."""

    source: str  # of documents that name none
    column: str = ""  # with the text; empty: that of USUAL which is there
    source_column: str = ""  # empty: that of SOURCES which is there
    documents_by: str = ""  # of a text file: file, line or blank-line; empty: file, if it isn't large
    encoding: str = ""  # of text that isn't UTF-8
    extract: str = ""  # the package that takes the text out of HTML
    form: str = ""  # found: the format
    taken: str = ""  # found: the column with the text, or what a document of a text file is
    doubt: str = ""  # found: why a text file may be no prose


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
    if len(found) == 1 or (optional and not found):
        return found[0] if found else ""
    what = f"no column {shown_name(asked) if asked else 'named ' + ' or '.join(usual)}"
    if found:
        what = f"the columns {' and '.join(map(shown_name, found))}, and each may be meant"
    raise InputError(f"{where} has {what}. {advice} Its columns: {listed(columns) or 'none'}.")


def listed(names: Sequence[object]) -> str:
    """Names of columns for a sentence; only the first ones of many."""
    return first_of([shown_name(name) for name in names])


def first_of(names: Sequence[str]) -> str:
    """The first ones of many names, for a sentence."""
    return ", ".join(names[:SHOWN_FIELDS]) + ", …" * (len(names) > SHOWN_FIELDS)


def shown_name(name: object) -> str:
    """The name of a column for a message, in quotes if it has blanks or nothing else."""
    plain = printable(str(name))
    return plain if plain and not any(map(str.isspace, plain)) else f'"{plain}"'


def text_column(record: dict, name: str, layout: Layout, optional: bool = True) -> str:
    """The column with the text in the records of a file that are as this one; empty if there is none.

    Raises InputError if two may be it, or unless `optional` if there is none.
    """
    if not layout.column and USUAL[0] in record:
        return USUAL[0]
    advice = "Set download.column to the one with the text."
    return choose([record], layout.column, USUAL, name, advice, optional)


def as_record(fields: pa.Schema | pa.StructType) -> dict:
    """The names of columns, and those inside of them, in the form of a record."""
    return {f.name: as_record(f.type) if pa.types.is_struct(f.type) else None for f in fields}


def drift(expected: pa.Schema, found: pa.Schema) -> str:
    """How columns differ from those that were expected, in words; empty if they don't."""
    shared = [name for name in expected.names if name in found.names]
    types = {name: (expected.field(name).type, found.field(name).type) for name in shared}
    changes = {
        "without": [shown_name(name) for name in expected.names if name not in found.names],
        "also with": [shown_name(name) for name in found.names if name not in expected.names],
        "with other types of": [
            f"{shown_name(name)} ({short(now)}, not {short(before)})"
            for name, (before, now) in types.items()
            if before != now
        ],
    }
    return "; ".join(f"{what} {first_of(names)}" for what, names in changes.items() if names)


def short(kind: pa.DataType) -> str:
    """The name of a type; only its beginning if it is long."""
    return textwrap.shorten(str(kind), LONGEST_TYPE, placeholder=" …")


def columns_of(names: dict, name: str, layout: Layout) -> list[str]:
    """The columns of a table to read: the text's, which it finds, and sources. Raises InputError if one is missing."""
    layout.taken = text_column(names, name, layout, optional=False)
    if layout.source_column:
        choose([names], layout.source_column, (), name, "Set download.source_column to the one with the source.")
    sources = [layout.source_column] if layout.source_column else SOURCES
    return [layout.taken, *(c for c in sources if value_at(names, c) is not MISSING and c != layout.taken)]


def text_of(value: object) -> str:
    """The text that is the value of a field: bytes in UTF-8, a string, or a list of strings, which become lines.

    Raises Unreadable if it is none, or too long.
    """
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        value = "\n".join(value)
    if isinstance(value, str | bytes) and len(value) > rows.MOST_BYTES:
        raise Unreadable(TOO_LONG)
    if isinstance(value, bytes):
        try:
            value = value.decode()
        except UnicodeDecodeError as error:
            raise Unreadable(NOT_UTF8) from error
    if not isinstance(value, str):
        raise Unreadable(f"text is not a string but {type(value).__name__}")
    if not value or value.isspace():
        raise Unreadable(EMPTY)
    return value


def source_of(record: dict, layout: Layout) -> str:
    """The source that a record names in the column that is asked or else in SOURCES; the layout's if in none."""
    for column in [layout.source_column] if layout.source_column else SOURCES:
        value = value_at(record, column)
        if value != "" and isinstance(value, str | int if layout.source_column else str):
            return source_name(str(value))
    return layout.source


def source_name(name: str) -> str:
    """A source's name as it is stored: printable, and OTHER if it is longer than LONGEST_NAME."""
    return printable(name.encode(errors="replace").decode()) if len(name) <= LONGEST_NAME else OTHER


def text_in(record: object, name: str, layout: Layout) -> str:
    """The text of a record of the file `name`. Raises Unreadable if it has none."""
    if not isinstance(record, dict):
        raise Unreadable("not a JSON object")
    layout.taken = layout.taken or text_column(record, name, layout)
    value = value_at(record, layout.taken) if layout.taken else MISSING
    if value is MISSING:
        raise Unreadable(f"no field '{layout.column or layout.taken or USUAL[0]}'")
    text = text_of(value)
    if isinstance(record, Lenient) and SURROGATE.search(text):
        raise Unreadable("half a surrogate pair in the text")
    return text


def read_rows(rows: Iterable[Row | Loss], name: str, layout: Layout, table: bool = False) -> Iterator[Document | Loss]:
    """The documents in rows, and losses. All rows of a table have the same fields.

    Raises InputError if a table has no column with the text, or no record names its source in a column that is asked.
    """
    found, named = False, not layout.source_column
    for row in rows:
        if isinstance(row, Loss):
            yield row
            continue
        number, record = row
        if table and not layout.taken:
            columns_of(record, name, layout)
        try:
            text = text_in(record, name, layout)
        except Unreadable as reason:
            where = " in a table" if layout.form in TABLES.values() and str(reason) == NOT_UTF8 else ""
            yield Loss(name, number, f"{reason}{where}", SAMPLE.repr(record))
        else:
            found, named = True, named or value_at(record, layout.source_column) is not MISSING
            yield Document(f"{name}:{number}", source_of(record, layout), text)
    if found and not named:
        raise InputError(f"{name} has no field {layout.source_column}. Set download.source_column to another one.")
