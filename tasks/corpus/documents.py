"""Documents of files of any format, compressed or in archives. READERS has the formats.

Bytes become rows (containers, rows, texts, mail), and rows become documents, each with its place, source and text.
"""

import functools
import io
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from model.errors import InputError
from model.wording import printable
from tasks.corpus import mail, texts
from tasks.corpus.columns import (
    MISSING,
    SOURCES,
    USUAL,
    as_record,
    check_source_column,
    columns_to_read,
    text_column,
    value_at,
)
from tasks.corpus.containers import content_of, members_of, reading
from tasks.corpus.kinds import (
    ARCHIVES,
    FORMATS,
    MAIL,
    MARKUP,
    ROWS,
    TABLES,
    Damage,
    Mislabelled,
    ending,
    family,
    reason_to_skip,
    sniff,
)
from tasks.corpus.losses import NO_FIELD, NO_OBJECT, NOT_UTF8, NOTHING, UNREADABLE, Loss, Skipped, Unreadable
from tasks.corpus.rows import (
    SAMPLE,
    SURROGATE,
    Lenient,
    Row,
    Rows,
    csv_rows,
    json_rows,
    open_table,
    refuse_twice,
    table_rows,
    unwrap,
)
from tasks.corpus.texts import WIKI, text_of

LONGEST_NAME = 256  # characters of a source's name
OTHER = "other"  # the name in place of a longer one
NAMES = 4096  # of sources that are kept as they are stored
ROWS_WITH_COLUMNS = {*ROWS.values(), "datasets"}  # formats; the last is that of data sets of the hub
EFFECT = {  # the formats on which an option of that name has an effect
    "column": ROWS_WITH_COLUMNS,
    "source_column": ROWS_WITH_COLUMNS,
    "documents_by": {"text"},
    "extract": {*MARKUP.values(), *MAIL.values()},
    "encoding": {*FORMATS.values(), "WikiExtractor"} - {*TABLES.values()},
}


@dataclass(frozen=True)
class Options:
    """How files are read; the parameters of `download` by these names."""

    column: str = ""  # with the text; empty: that of USUAL which is there
    source_column: str = ""  # empty: that of SOURCES which is there
    documents_by: str = ""  # of a text file: file, line or blank-line; empty: file, if it isn't large
    encoding: str = ""  # of text that isn't UTF-8
    extract: str = ""  # the package that takes the text out of HTML


class Layout(NamedTuple):
    """What was found in a file."""

    form: str  # the format
    unit: str  # the column with the text, or what a document of a text file is
    doubt: str = ""  # why a text file may not be prose


class Found(NamedTuple):
    """A document as it was found in a file of this layout."""

    id: str
    source: str
    text: str
    layout: Layout


@dataclass(frozen=True)
class Origin:
    """What is known of a file, or a data set, whose rows are read."""

    form: str  # the format
    name: str  # in messages, and in front of the ids of documents
    source: str  # of documents that name none
    options: Options


Records = Generator[Found | Loss | Skipped, None, None]


def read_file(file: io.BufferedReader, name: str, source: str, options: Options) -> Records:
    """The documents and losses of a file, which must be at its beginning and is closed at the end.

    `source`: of documents that name none. Raises InputError if it can't be read.
    """
    with file, reading(name):
        form, content = content_of(file, name, options.encoding, options.extract)
        yield from READERS[form](content, Origin(form, name, source, options))


def read_json(file: io.BufferedReader, origin: Origin) -> Records:
    """The documents of a JSON file."""
    return documents_in(records_of_json(file, origin.name, origin.options.column), origin)


def records_of_json(file: io.BufferedReader, name: str, column: str) -> Rows:
    """The records of a JSON file; of one JSON object without text, those in its list. `column`: that is asked for."""
    wraps = functools.partial(is_wrapper, column, name)
    return unwrap(json_rows(file, name), wraps)


def is_wrapper(column: str, name: str, outer: dict, inner: dict) -> bool:
    """Whether the objects within an object have a text, and it has none itself. `column`: that is asked for."""
    return bool(not text_column(outer, column, name) and text_column(inner, column, name))


def read_csv(file: io.BufferedReader, origin: Origin) -> Records:
    """The documents of a CSV file. Raises InputError if it has no column with the text."""
    return documents_in(csv_rows(file, origin.name), origin, same_columns=True)


def read_table(file: io.BufferedReader, origin: Origin) -> Records:
    """The documents of a Parquet or Arrow file. Raises InputError if it has no column with the text."""
    table = open_table(file)
    refuse_twice(table.schema.names, origin.name)
    options = origin.options
    columns = columns_to_read(as_record(table.schema), options.column, options.source_column, origin.name)
    rows = table_rows(table, origin.name, columns, as_bytes=columns[0])
    return documents_in(rows, origin, text=columns[0])


def read_text(file: io.BufferedReader, origin: Origin) -> Records:
    """The documents of a text file: one, or one per line or paragraph. Raises InputError if one would be large."""
    head = file.peek()
    asked = origin.options.documents_by
    layout = Layout("text", asked or "file", texts.doubt_of(head, origin.name, bool(asked)))
    if WIKI.match(head) and not asked:
        layout = layout._replace(form="WikiExtractor", unit="doc")
    rows = texts.text_rows(file, origin.name, layout.unit, bool(asked))
    return documents_of_texts(rows, origin, layout)


def read_page(file: io.BufferedReader, origin: Origin) -> Records:
    """The text of an HTML or XML file."""
    rows = texts.page_rows(file, origin.name, origin.form)
    return documents_of_texts(rows, origin, Layout(origin.form, origin.options.extract))


def read_mail(file: io.BufferedReader, origin: Origin) -> Records:
    """The text of each message in a file of mail."""
    rows = mail.message_rows(file, origin.name, origin.options.encoding, origin.options.extract)
    return documents_of_texts(rows, origin, Layout("mail", "message"))


def read_subtitles(file: io.BufferedReader, origin: Origin) -> Records:
    """What is said in a file of subtitles."""
    rows = mail.subtitle_rows(file, origin.name)
    return documents_of_texts(rows, origin, Layout("subtitles", "file"))


def read_archive(file: io.BufferedReader, origin: Origin) -> Records:
    """The documents of the files in an archive, under its name and their paths in it. Archives in it are skipped."""
    extract = origin.options.extract
    for path, member in members_of(file, origin.form, origin.name):
        reason = reason_to_skip(path, extract)
        form = FORMATS.get(ending(path)) or sniff(member.peek())
        if reason:
            yield Skipped(reason)
        elif form in ARCHIVES.values():
            yield Skipped("archive in an archive")
        elif not form:
            yield Skipped("no text")
        else:
            name = f"{origin.name}/{printable(path)}"
            yield from read_member(member, replace(origin, name=name, source=family(path)))


def read_member(file: io.BufferedReader, origin: Origin) -> Records:
    """The documents of a file in an archive. A text file that can't be read is lost alone.

    An empty file is counted with those that are skipped.
    """
    try:
        for record in read_file(file, origin.name, origin.source, origin.options):
            yield Skipped(NOTHING) if isinstance(record, Loss) and record.reason == NOTHING else record
    except InputError as error:
        is_damaged = isinstance(error, Damage) and not isinstance(error, Mislabelled)
        if is_damaged or FORMATS.get(ending(origin.name)) in ROWS.values():
            raise
        yield Loss(origin.name, 1, UNREADABLE, str(error))


READERS: dict[str, Callable[[io.BufferedReader, Origin], Records]] = {
    "JSON": read_json,
    "CSV": read_csv,
    **dict.fromkeys(TABLES.values(), read_table),
    "text": read_text,
    **dict.fromkeys(MARKUP.values(), read_page),
    "mail": read_mail,
    "subtitles": read_subtitles,
    **dict.fromkeys(ARCHIVES.values(), read_archive),
}


def documents_of_texts(rows: Iterator[Row | Loss | Skipped], origin: Origin, layout: Layout) -> Records:
    """The documents of rows that are a text each."""
    for row in rows:
        if isinstance(row, Row):
            yield Found(f"{origin.name}:{row.number}", origin.source, str(row.record), layout)
        else:
            yield row


def documents_in(rows: Rows, origin: Origin, text: str = "", same_columns: bool = False) -> Records:
    """The documents in rows that are records, and losses.

    `text`: the column with the text, if it is known; or else it is that of the first record that has one.
    `same_columns`: all rows have the columns of the first. Raises InputError if these have no column with the text, or
    if no record names its source in the column that is asked for.
    """
    name = origin.name
    options = origin.options
    layout = Layout(origin.form, text)
    has_documents = False
    is_named = not options.source_column
    for row in rows:
        if isinstance(row, Loss):
            yield row
            continue
        number, record = row
        if not layout.unit and isinstance(record, dict):
            layout = layout._replace(unit=text_column(record, options.column, name, optional=not same_columns))
            if same_columns:
                check_source_column(record, options.source_column, name)
        try:
            document = text_in(record, layout, options.column)
        except Unreadable as reason:
            yield Loss(name, number, str(reason), SAMPLE.repr(record))
            continue
        has_documents = True
        is_named = is_named or value_at(record, options.source_column) is not MISSING
        source = source_of(record, options.source_column, origin.source)
        yield Found(f"{name}:{number}", source, document, layout)
    if has_documents and not is_named:
        raise InputError(f"{name} has no field {options.source_column}. Set download.source_column to another one.")


def text_in(record: object, layout: Layout, asked: str) -> str:
    """The text of a record. `asked`: the column that is asked for. Raises Unreadable if it has none."""
    if not isinstance(record, dict):
        raise Unreadable(NO_OBJECT)
    column = layout.unit
    value = record[column] if column in record else value_at(record, column)
    if value is MISSING or not column:
        raise Unreadable(f"{NO_FIELD} '{asked or column or USUAL[0]}'")
    try:
        text = text_of(value)
    except Unreadable as reason:
        if layout.form in TABLES.values() and str(reason) == NOT_UTF8:
            raise Unreadable(f"{reason} in a table") from None
        raise
    if isinstance(record, Lenient) and SURROGATE.search(text):
        raise Unreadable("half a surrogate pair in the text")
    return text


def source_of(record: object, asked: str, usual: str) -> str:
    """The source that a record names in the column that is asked or else in SOURCES; the usual one if in none."""
    for column in [asked] if asked else SOURCES:
        value = value_at(record, column)
        if isinstance(value, str) or (asked and isinstance(value, int)):
            name = str(value)
            if name:
                return source_name(name) if len(name) <= LONGEST_NAME else OTHER
    return usual


@functools.lru_cache(maxsize=NAMES)
def source_name(name: str) -> str:
    """A source's name as it is stored: printable, and OTHER if it is longer than LONGEST_NAME."""
    return printable(name.encode(errors="replace").decode()) if len(name) <= LONGEST_NAME else OTHER
