"""Rows of files: JSON in any layout, CSV, Parquet and Arrow, each row with its number.

JSON lines and tables are read in bounded memory, other JSON at once. What can't be read as a row is a Loss.
"""

import csv
import io
import itertools
import json
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from model.errors import InputError
from model.wording import printable
from tasks.corpus.containers import BUFFER, content_of, on_disk, open_raw, reading
from tasks.corpus.kinds import LINES, ROWS, Damage, ending
from tasks.corpus.losses import NO_OBJECT, NOT_UTF8, TOO_LONG, Loss, Unreadable

MOST_BYTES = 100_000_000  # of a line or text; longer ones are lost
MOST_JSON = 1_000_000_000  # characters of a JSON file that isn't one value per line
BATCH = 64  # rows of a table in memory
SEPARATOR = re.compile(r'\s*"?sep=([^\r\n])"?[;,\t]*(\r\n?|\n)')  # a first line that Excel writes and reads
SURROGATE = re.compile("[\ud800-\udfff]")  # which UTF-8 can't represent
SHOWN = 200  # bytes of a line in a sample
SAMPLE = reprlib.Repr()  # shows a record with its fields, but not what is in lists and objects
SAMPLE.maxlevel = 1
SAMPLE.maxdict = 40
DELIMITERS = ",\t;|"
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"  # of Arrow
STRINGS = (pa.string(), pa.large_string(), pa.string_view(), pa.binary())
# How JSON begins that isn't one value per line; of a file whose name says lines, a wrong first line is lost alone
ARRAY_OR_INDENTED = re.compile(rb"\s*(\[\s*(\{|[\r\n])|\{\s*[\r\n]\s*\")")
ANY_LAYOUT = re.compile(rb"\s*(\[|\{([^\r\n]*[{\[,:])?[ \t]*[\r\n]|\{[^\r\n]*\}[ \t]*\{\")")
GAP = re.compile(r"[\s,]*")  # between values
OPEN_QUOTE = re.compile(r'(?:^|\t)"(?!(?:[^"\t\n]|"")*"\s*(?:\t|$))', re.MULTILINE)  # of a field not ending so


class Row(NamedTuple):
    """A row: the number of its first line in JSON lines and CSV, else its place among the rows of the file, from 1."""

    number: int
    record: object


class Lenient(dict):
    """A JSON object that orjson refuses, or that was parsed without it. Its strings may have half surrogate pairs."""


class Dialect(NamedTuple):
    """The form of a CSV file."""

    delimiter: str
    quoting: Literal[0, 3] = csv.QUOTE_MINIMAL  # or QUOTE_NONE


class Table(NamedTuple):
    """An opened Parquet or Arrow file: its schema, and what gives batches of a few rows with these columns.

    Batches of Arrow files have all columns.
    """

    schema: pa.Schema
    batches: Callable[[Sequence[str]], Iterator[pa.RecordBatch]]


Rows = Iterator[Row | Loss]
Wraps = Callable[[dict, dict], bool]  # whether the first object holds rows as the second one, or is a row itself
PLAIN_TSV = Dialect("\t", csv.QUOTE_NONE)  # quotes are characters
WITHOUT_DELIMITER = Dialect("\x1f")  # of one column, in whose text commas may be
DECODER = json.JSONDecoder(object_pairs_hook=Lenient, parse_int=lambda digits: int(digits[:18]))


def lines_of(file: io.BufferedReader) -> Iterator[tuple[int, bytes]]:
    r"""The lines of a file with their numbers; of one of more than MOST_BYTES its beginning without a line end.

    Lines end with \n, or if the first one ends with \r alone, with either.
    """
    readline: Callable[[int], bytes] = file.readline
    if re.match(rb"[^\r\n]*\r[^\n]", file.peek()):
        text = io.TextIOWrapper(file, "latin-1", newline=None)

        def readline(size: int) -> bytes:
            return text.readline(size).encode("latin-1")

    number = 0
    while True:
        line = readline(MOST_BYTES + 1)
        if not line:
            return
        number += 1
        yield number, line
        while line and not line.endswith(b"\n"):  # the rest of a line that is too long
            line = readline(BUFFER)


def json_rows(file: io.BufferedReader, name: str) -> Rows:
    """The values of a JSON file: one per line, or in any other layout."""
    begins_otherwise = ARRAY_OR_INDENTED if ending(name) in LINES else ANY_LAYOUT
    return json_values(file, name) if begins_otherwise.match(file.peek()) else json_lines(file, name)


def json_lines(file: io.BufferedReader, name: str) -> Rows:
    """The values of a file with one per line."""
    for number, line in lines_of(file):
        if len(line) > MOST_BYTES and not line.endswith(b"\n"):
            yield Loss(name, number, TOO_LONG)
            continue
        if line.isspace():
            continue
        try:
            try:
                record = orjson.loads(line)
            except orjson.JSONDecodeError:
                record = parse_leniently(line)
        except Unreadable as reason:
            sample = line.removesuffix(b"\n")[:SHOWN].decode(errors="replace")
            yield Loss(name, number, str(reason), sample)
        else:
            yield Row(number, record)


def parse_leniently(line: bytes) -> object:
    """Parse JSON that may hold NaN, integers of any length and half surrogate pairs. Raises Unreadable."""
    try:
        return DECODER.decode(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise Unreadable(NOT_UTF8) from None
    except RecursionError:
        raise Unreadable("nested too deeply") from None
    except json.JSONDecodeError as error:
        raise Unreadable("more than one value in a line" if error.msg == "Extra data" else "broken JSON") from None


def json_values(file: io.BufferedReader, name: str) -> Rows:
    """The elements of a JSON array, or values that follow each other in any layout; a string counts as {"text": …}.

    Raises EOFError or Damage if they break off.
    """
    text = io.TextIOWrapper(file, "utf-8", newline="").read(MOST_JSON + 1)
    if len(text) > MOST_JSON:
        raise Damage(f"{name} has more than {MOST_JSON / 1e9:g} GB. Save its JSON with one value per line, as .jsonl.")
    number = 0
    is_in_array = False
    at = end_of_gap(text, 0)
    while at < len(text):
        if text[at] == ("]" if is_in_array else "["):
            is_in_array = not is_in_array
            at += 1
        else:
            value, at = decode_value(text, at, name, number)
            number += 1
            yield Row(number, Lenient(text=value) if isinstance(value, str) else value)
        at = end_of_gap(text, at)
    if is_in_array:
        raise EOFError("it ends within an array")


def end_of_gap(text: str, at: int) -> int:
    """Where the next value begins, if there is one."""
    gap = GAP.match(text, at)
    return gap.end() if gap else at


def decode_value(text: str, at: int, name: str, number: int) -> tuple[object, int]:
    """The JSON value that begins there, and where it ends. `number`: of values before it. Raises Damage."""
    try:
        return DECODER.raw_decode(text, at)
    except RecursionError:
        raise Damage(f"{name} is nested too deeply after value {number:,}.") from None
    except json.JSONDecodeError as error:
        is_cut = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string")
        what = "truncated: it ends within a value" if is_cut else f"not JSON: {error.msg}"
        raise Damage(f"{name} is {what} in line {error.lineno:,}. Repair it, or get it again.") from None


def unwrap(rows: Rows, wraps: Wraps = lambda *_: True) -> Rows:
    """Rows; or those inside of the only one, as {"version": 1, "data": [{…}, …]}, if it wraps rows as its first."""
    first = next(rows, None)
    second = next(rows, None)
    if isinstance(first, Row) and second is None and isinstance(first.record, dict):
        lists = [value for value in first.record.values() if is_list_of_objects(value)]
        if len(lists) == 1 and wraps(first.record, lists[0][0]):
            return itertools.starmap(Row, enumerate(lists[0], 1))
    begun = [row for row in (first, second) if row is not None]
    return itertools.chain(begun, rows)


def is_list_of_objects(value: object) -> bool:
    """Whether a value of JSON may be rows."""
    return isinstance(value, list) and bool(value) and all(isinstance(element, dict) for element in value)


def csv_rows(file: io.BufferedReader, name: str, dialect: Dialect | None = None) -> Rows:
    """The rows of a CSV or TSV file by the names in its first line. Raises Damage if a quote isn't closed."""
    head = file.peek().decode(errors="replace").lstrip("\r\n")
    announced = None if dialect else SEPARATOR.match(head)
    if announced:
        dialect = dialect_of(head[announced.end() :], name)._replace(delimiter=announced[1])
    names: list[str] = []
    for found in csv_fields(file, name, dialect or dialect_of(head, name)):
        if isinstance(found, Loss):
            yield found
            continue
        number, fields = found
        if announced:  # its line
            announced = None
        elif not names:
            names = fields
            refuse_twice(names, name)
        elif len(fields) != len(names):
            yield Loss(name, number, "wrong number of fields", SAMPLE.repr(fields))
        elif any(map(SURROGATE.search, fields)):
            yield Loss(name, number, NOT_UTF8, SAMPLE.repr(fields))
        else:
            yield Row(number, dict(zip(names, fields, strict=True)))


def csv_fields(file: io.BufferedReader, name: str, dialect: Dialect) -> Iterator[tuple[int, list[str]] | Loss]:
    """The fields of each record of a CSV file, with the number of its first line; blank lines have none.

    Bytes that aren't UTF-8 are surrogates. Raises Damage if a quote isn't closed.
    """
    csv.field_size_limit(MOST_BYTES)
    text = io.TextIOWrapper(file, "utf-8", "surrogateescape", newline="")
    reader = csv.reader(limited_lines(text), delimiter=dialect.delimiter, quoting=dialect.quoting, strict=True)
    number = 1
    while True:
        try:
            fields = next(reader, None)
        except csv.Error as error:
            if "end of data" in str(error) or "larger" in str(error):
                what = f"an opening quote that isn't closed, or a field {TOO_LONG}"
                raise Damage(f"{name} has {what}, in line {number:,}. Correct the line.") from None
            yield Loss(name, number, "a quote within a quoted field")
        else:
            if fields is None:
                return
            if fields:
                yield number, fields
        number = reader.line_num + 1


def limited_lines(text: io.TextIOWrapper) -> Iterator[str]:
    """The lines of a text. Raises csv.Error for one that is longer than a field may be."""
    while True:
        line = text.readline(MOST_BYTES + 1)
        if not line:
            return
        if len(line) > MOST_BYTES:
            raise csv.Error("line larger than a field may be")
        yield line


def refuse_twice(columns: Sequence[str], name: str) -> None:
    """Raise InputError if a name of a column occurs twice."""
    for column in columns:
        if column and columns.count(column) > 1:
            raise InputError(f"{name} has several columns named {column}; expected one. Drop or rename the others.")


def dialect_of(head: str, name: str) -> Dialect:
    """The delimiter of a CSV file by its first line, and whether quotes are plain characters, as in many TSV files."""
    lines = [line for line in re.split(r"\r\n?|\n", head) if line.strip()]
    names = re.sub(r'"[^"]*"', "", lines[0]) if lines else ""  # without those that quotes enclose
    delimiter = max(DELIMITERS, key=names.count)
    if ending(name) == ".tsv" and "\t" in names:
        delimiter = "\t"
    if delimiter not in names:
        return WITHOUT_DELIMITER
    if delimiter == "\t" and has_open_quotes(lines):
        return PLAIN_TSV
    return Dialect(delimiter)


def has_open_quotes(lines: list[str]) -> bool:
    """Whether lines of a TSV file (the last may be cut) have equally many fields, and quotes that don't enclose one."""
    tabs = {line.count("\t") for line in lines[:-1]}
    return len(tabs) < 2 and OPEN_QUOTE.search("\n".join(lines)) is not None


def open_table(file: io.BufferedReader) -> Table:
    """A Parquet or Arrow file."""
    head = file.peek()[:6]
    whole = on_disk(file)
    if head.startswith(b"PAR1"):
        # `pre_buffer` may hold all of a file in memory
        table = pq.ParquetFile(whole, buffer_size=1 << 20, pre_buffer=False, page_checksum_verification=True)
        return Table(table.schema_arrow, lambda columns: table.iter_batches(BATCH, columns=list(columns)))
    if head == b"ARROW1":
        reader = pa.ipc.open_file(whole)
        return Table(reader.schema, lambda _: small_batches(map(reader.get_batch, range(reader.num_record_batches))))
    whole.seek(-len(END_OF_STREAM), io.SEEK_END)
    if whole.read() != END_OF_STREAM:  # pyarrow takes a stream that ends between two batches for a whole one
        raise EOFError("it ends without the mark of its end")
    whole.seek(0)
    stream = pa.ipc.open_stream(whole)
    return Table(stream.schema, lambda _: small_batches(stream))


def small_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Batches of an Arrow file, each found to be whole and divided into some of BATCH rows."""
    for batch in batches:
        batch.validate(full=True)
        for start in range(0, batch.num_rows, BATCH):
            yield batch.slice(start, BATCH)


def table_rows(table: Table, name: str, columns: Sequence[str], as_bytes: str = "") -> Rows:
    """The rows of a Parquet or Arrow file with these columns. `as_bytes`: one whose strings are to be bytes.

    Of bytes, one that is not UTF-8 spoils no other. Raises Damage if strings of another column aren't UTF-8.
    """
    number = 0
    for batch in table.batches(columns):
        try:
            values = [values_of(batch, column, column == as_bytes) for column in columns]
        except UnicodeDecodeError as error:
            what = f"strings that aren't UTF-8 in the columns {', '.join(columns)}: {error}"
            raise Damage(f"{name} has {what}. Write the table again from text that was decoded.") from None
        for row in zip(*values, strict=True):
            number += 1
            yield Row(number, dict(zip(columns, row, strict=True)))


def values_of(batch: pa.RecordBatch, path: str, as_bytes: bool) -> list:
    """The values of a column, or of a field in one as `doc.text`; strings can be read as bytes."""
    top, *rest = [path] if path in batch.schema.names else path.split(".")
    column = batch.column(top)
    if rest:
        column = pc.struct_field(column, rest)
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if as_bytes and column.type in STRINGS:
        column = column.cast(pa.large_binary())
    return column.to_pylist()


def rows_of(form: str, file: io.BufferedReader, name: str, dialect: Dialect | None) -> Rows:
    """The rows of a file in this format, one of ROWS, with all their columns."""
    if form == "JSON":
        return unwrap(json_rows(file, name))
    if form == "CSV":
        return csv_rows(file, name, dialect)
    table = open_table(file)
    refuse_twice(table.schema.names, name)
    return table_rows(table, name, table.schema.names)


def records(
    path: Path, name: str, encoding: str = "", dialect: Dialect | None = None
) -> Iterator[tuple[int, dict[str, object]] | Loss]:
    """The rows of a table or JSON file, compressed or not, each with its number (as in Row), and losses.

    `name` stands for the file in messages; its suffix names the format. Strings that are not Unicode, and whatever
    isn't an object, are losses. Values of CSV are strings; `dialect` is its form, if known. Raises InputError if the
    file is of another format or damaged.
    """
    if ending(name) not in ROWS:
        raise InputError(f"{printable(name)} is not a table. Expected a file that ends in {', '.join(ROWS)}.")
    with reading(name), open_raw(path) as raw:
        form, file = content_of(raw, name, encoding)
        for row in rows_of(form, file, name, dialect):
            if isinstance(row, Loss):
                yield row
                continue
            number, record = row
            if not isinstance(record, dict):
                yield Loss(name, number, NO_OBJECT, SAMPLE.repr(record))
            elif has_half_pairs(record):
                yield Loss(name, number, "half a surrogate pair", SAMPLE.repr(record))
            else:
                yield number, record


def gather(
    found: Iterable[tuple[int, dict[str, object]] | Loss], where: str, unit: str, advice: str
) -> tuple[list[int], list[dict[str, object]]]:
    """The numbers and the values of all rows, in order. Raises InputError for a row that can't be read.

    `unit`: what the numbers count, such as "row". `advice`: the end of the error's sentence if the encoding is wrong.
    """
    numbers = []
    rows = []
    for row in found:
        if isinstance(row, Loss):
            what_else = advice if row.reason.startswith("not UTF-8") else ""
            raise InputError(f"{where}: {unit} {row.line:,} can't be read: {row.reason}. Correct it{what_else}.")
        number, values = row
        numbers.append(number)
        rows.append(values)
    return numbers, rows


def has_half_pairs(record: dict) -> bool:
    """Whether a string of a record holds half a surrogate pair, which no Unicode text does."""
    return isinstance(record, Lenient) and SURROGATE.search(json.dumps(record, ensure_ascii=False)) is not None
