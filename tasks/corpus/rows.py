"""Rows of files: JSON in any layout, CSV, Parquet and Arrow, each row with its number.

JSON lines and tables are read in bounded memory, other JSON at once. What can't be read as a row is a Loss.
"""

import csv
import io
import json
import re
import reprlib
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from model.errors import InputError
from model.wording import printable
from tasks.corpus.containers import BUFFER, content_of, on_disk, reading
from tasks.corpus.kinds import LINES, ROWS, Damage, ending

MOST_BYTES = 100_000_000  # of a line or text; longer ones are lost
TOO_LONG = "longer than 100 MB"  # a reason of losses
MOST_JSON = 1_000_000_000  # characters of a JSON file that isn't one value per line
BATCH = 64  # rows of a table in memory
SEPARATOR = re.compile(r'\s*"?sep=([^\r\n])"?[;,\t]*(\r\n?|\n)')  # a first line that Excel writes and reads
SURROGATE = re.compile("[\ud800-\udfff]")  # which UTF-8 can't represent
SHOWN = 200  # bytes of a line in a sample
SAMPLE = reprlib.Repr()  # shows a record with its fields, but not what is in lists and objects
SAMPLE.maxlevel, SAMPLE.maxdict = 1, 40
DELIMITERS = ",\t;|"
PLAIN_TSV = {"delimiter": "\t", "quoting": csv.QUOTE_NONE}  # quotes are characters
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"  # of Arrow
STRINGS = (pa.string(), pa.large_string(), pa.string_view(), pa.binary())
# How JSON begins that isn't one value per line; of a file whose name says lines, a wrong first line is lost alone
ARRAY_OR_INDENTED = re.compile(rb"\s*(\[\s*(\{|[\r\n])|\{\s*[\r\n]\s*\")")
ANY_LAYOUT = re.compile(rb"\s*(\[|\{([^\r\n]*[{\[,:])?[ \t]*[\r\n]|\{[^\r\n]*\}[ \t]*\{\")")
GAP = re.compile(r"[\s,]*")  # between values
OPEN_QUOTE = re.compile(r'(?:^|\t)"(?!(?:[^"\t\n]|"")*"\s*(?:\t|$))', re.MULTILINE)  # of a field not ending so


class Loss(NamedTuple):
    """A record that could not be read."""

    file: str
    line: int
    reason: str
    sample: str = ""


class Row(NamedTuple):
    """A row: the number of its first line in JSON lines and CSV, else its place among the rows of the file, from 1."""

    number: int
    record: object


class Unreadable(Exception):
    """A record that holds no document; its message is the reason of the loss."""


class Lenient(dict):
    """An object of JSON that orjson refuses or wasn't asked. Its strings may hold half surrogate pairs."""


Rows = Iterator[Row | Loss]
Wraps = Callable[[dict, dict], bool]  # whether the first object holds rows as the second one, or is a row itself
Choice = Callable[[pa.Schema], list[str]]
DECODER = json.JSONDecoder(object_pairs_hook=Lenient, parse_int=lambda digits: int(digits[:18]))


def lines_of(file: io.BufferedReader) -> Iterator[tuple[int, bytes]]:
    r"""The lines of a file with their numbers; of one of more than MOST_BYTES its beginning without a line end.

    Lines end with \n, or if the first one ends with \r alone, with either.
    """
    number, readline = 0, file.readline
    if re.match(rb"[^\r\n]*\r[^\n]", file.peek()):
        text = io.TextIOWrapper(file, "latin-1", newline=None)

        def readline(size: int) -> bytes:
            return text.readline(size).encode("latin-1")

    while line := readline(MOST_BYTES + 1):
        number += 1
        yield number, line
        while not line.endswith(b"\n") and (line := readline(BUFFER)):
            pass


def json_lines(file: io.BufferedReader, name: str) -> Rows:
    """The values of a file with one per line."""
    for number, line in lines_of(file):
        if len(line) > MOST_BYTES and not line.endswith(b"\n"):
            yield Loss(name, number, TOO_LONG)
        elif not line.isspace():
            try:
                yield Row(number, parsed(line))
            except Unreadable as reason:
                yield Loss(name, number, str(reason), line.removesuffix(b"\n")[:SHOWN].decode(errors="replace"))


def parsed(line: bytes) -> object:
    """Parse JSON that may hold NaN, integers of any length and half surrogate pairs. Raises Unreadable."""
    try:
        try:
            return orjson.loads(line)
        except orjson.JSONDecodeError:
            return DECODER.decode(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise Unreadable("not UTF-8") from None
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
    number, at, inside = 0, 0, False
    while (at := GAP.match(text, at).end()) < len(text):
        if text[at] == ("]" if inside else "["):
            inside, at = not inside, at + 1
            continue
        try:
            value, at = DECODER.raw_decode(text, at)
        except RecursionError:
            raise Damage(f"{name} is nested too deeply after value {number:,}.") from None
        except json.JSONDecodeError as error:
            cut = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string")
            what = "truncated: it ends within a value" if cut else f"no JSON: {error.msg}"
            raise Damage(f"{name} is {what} in line {error.lineno:,}. Repair it, or get it again.") from None
        number += 1
        yield Row(number, Lenient(text=value) if isinstance(value, str) else value)
    if inside:
        raise EOFError("it ends within an array")


def unwrapped(rows: Rows, wraps: Wraps) -> Rows:
    """Rows; or those inside of the only one, as {"version": 1, "data": [{…}, …]}, if it wraps rows as its first."""
    first, second = next(rows, None), next(rows, None)
    if isinstance(first, Row) and second is None and isinstance(first.record, dict):
        values = first.record.values()
        lists = [v for v in values if isinstance(v, list) and v and all(isinstance(e, dict) for e in v)]
        if len(lists) == 1 and wraps(first.record, lists[0][0]):
            return (Row(number, record) for number, record in enumerate(lists[0], 1))
    return chain(filter(None, (first, second)), rows)


def csv_rows(file: io.BufferedReader, name: str, dialect: dict | None = None) -> Rows:
    """The rows of a CSV or TSV file by the names in its first line. Raises Damage if a quote isn't closed."""
    head = file.peek().decode(errors="replace").lstrip("\r\n")
    announced = None if dialect else SEPARATOR.match(head)
    if announced:
        dialect = dialect_of(head[announced.end() :], name) | {"delimiter": announced[1]}
    dialect = dialect or dialect_of(head, name)
    csv.field_size_limit(MOST_BYTES)
    text = io.TextIOWrapper(file, "utf-8", "surrogateescape", newline="")

    def lines() -> Iterator[str]:
        while line := text.readline(MOST_BYTES + 1):
            if len(line) > MOST_BYTES:
                raise csv.Error("line larger than a field may be")
            yield line

    reader, names, last, row = csv.reader(lines(), strict=True, **dialect), [], 0, []
    while row is not None:
        number = last + 1
        try:
            row = next(reader, None)
        except csv.Error as error:
            if "end of data" in str(error) or "larger" in str(error):
                what = f"an opening quote that isn't closed, or a field {TOO_LONG}"
                raise Damage(f"{name} has {what}, in line {number:,}. Correct the line.") from None
            yield Loss(name, number, "a quote within a quoted field")
            row = []
        last = reader.line_num
        if announced and row:
            announced = None  # its line
        elif not names and row:
            names = row
            refuse_twice(names, name)
        elif row and len(row) != len(names):
            yield Loss(name, number, "wrong number of fields", SAMPLE.repr(row))
        elif row and any(map(SURROGATE.search, row)):
            yield Loss(name, number, "not UTF-8", SAMPLE.repr(row))
        elif row:
            yield Row(number, dict(zip(names, row, strict=True)))


def refuse_twice(columns: list[str], name: str) -> None:
    """Raise InputError if a name of a column occurs twice."""
    if twice := [column for column in columns if column and columns.count(column) > 1]:
        raise InputError(f"{name} has several columns named {twice[0]}; expected one. Drop or rename the others.")


def dialect_of(head: str, name: str) -> dict:
    """The delimiter of a CSV file by its first line, and whether quotes are plain characters, as in many TSV files."""
    lines = [line for line in re.split(r"\r\n?|\n", head) if line.strip()] or [""]
    names = re.sub(r'"[^"]*"', "", lines[0])  # without those that quotes enclose
    delimiter = "\t" if ending(name) == ".tsv" and "\t" in names else max(DELIMITERS, key=names.count)
    if delimiter not in names:  # then commas are text
        return {"delimiter": "\x1f"}
    whole = len({line.count(delimiter) for line in lines[:-1]}) < 2  # the last one may be cut
    plain = delimiter == "\t" and whole and OPEN_QUOTE.search("\n".join(lines))
    return {"delimiter": delimiter, "quoting": csv.QUOTE_NONE if plain else csv.QUOTE_MINIMAL}


def open_table(file: io.BufferedReader) -> tuple[pa.Schema, Callable[[list[str]], Iterator[pa.RecordBatch]]]:
    """The schema of a Parquet or Arrow file, and a function that gives batches of a few rows with these columns.

    Those of Arrow files have all columns.
    """
    head, file = file.peek()[:6], on_disk(file)
    if head.startswith(b"PAR1"):
        # `pre_buffer` may hold all of a file in memory
        table = pq.ParquetFile(file, buffer_size=1 << 20, pre_buffer=False, page_checksum_verification=True)
        return table.schema_arrow, lambda columns: table.iter_batches(BATCH, columns=columns)
    if head == b"ARROW1":
        reader = pa.ipc.open_file(file)
        read = map(reader.get_batch, range(reader.num_record_batches))
    else:
        file.seek(-len(END_OF_STREAM), io.SEEK_END)
        if file.read() != END_OF_STREAM:  # pyarrow takes a stream that ends between two batches for a whole one
            raise EOFError("it ends without the mark of its end")
        file.seek(0)
        read = reader = pa.ipc.open_stream(file)

    def arrow(_columns: list[str]) -> Iterator[pa.RecordBatch]:
        for batch in read:
            batch.validate(full=True)
            yield from (batch.slice(start, BATCH) for start in range(0, batch.num_rows, BATCH))

    return reader.schema, arrow


def table_rows(file: io.BufferedReader, name: str, choose: Choice | None = None) -> Rows:
    """The rows of a Parquet or Arrow file: with all columns, or those that are chosen, of which the first is text.

    Raises Damage if strings of another column aren't UTF-8.
    """
    schema, batches = open_table(file)
    refuse_twice(schema.names, name)
    columns, number = choose(schema) if choose else schema.names, 0
    for batch in batches(columns):
        try:
            values = [values_of(batch, column, bool(choose) and column == columns[0]) for column in columns]
        except UnicodeDecodeError as error:
            what = f"strings that aren't UTF-8 in the columns {', '.join(columns)}: {error}"
            raise Damage(f"{name} has {what}. Write the table again from text that was decoded.") from None
        for row in zip(*values, strict=True):
            number += 1
            yield Row(number, dict(zip(columns, row, strict=True)))


def values_of(batch: pa.RecordBatch, path: str, as_bytes: bool) -> list:
    """The values of a column, or of a field in one as `doc.text`.

    Strings may be had as bytes, of which one that is not UTF-8 spoils no other.
    """
    top, *rest = [path] if path in batch.schema.names else path.split(".")
    column = pc.struct_field(batch.column(top), rest) if rest else batch.column(top)
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return (column.cast(pa.large_binary()) if as_bytes and column.type in STRINGS else column).to_pylist()


def rows_of(
    form: str,
    file: io.BufferedReader,
    name: str,
    wraps: Wraps = lambda *_: True,
    choose: Choice | None = None,
    dialect: dict | None = None,
) -> Rows:
    """The rows of a file in this format, one of ROWS.

    `wraps` is for JSON (see `unwrapped`), `choose` for tables, `dialect` for CSV; without it, it is found.
    """
    if form == "JSON":
        together = (ARRAY_OR_INDENTED if ending(name) in LINES else ANY_LAYOUT).match(file.peek())
        return unwrapped((json_values if together else json_lines)(file, name), wraps)
    return csv_rows(file, name, dialect) if form == "CSV" else table_rows(file, name, choose)


def records(
    path: Path, name: str, encoding: str = "", dialect: dict | None = None
) -> Iterator[tuple[int, dict[str, object]] | Loss]:
    """The rows of a table or JSON file, compressed or not, each with its number (as in Row), and losses.

    `name` stands for the file in messages and tells its format. Strings that are not Unicode, and whatever isn't an
    object, are losses. Values of CSV are strings; `dialect` is its form, if known. Raises InputError if the file
    is of another format or damaged.
    """
    if ending(name) not in ROWS:
        raise InputError(f"{printable(name)} is no table. Expected a file that ends in {', '.join(ROWS)}.")
    with reading(name), path.open("rb", BUFFER) as raw:
        form, file = content_of(raw, name, encoding)
        for row in rows_of(form, file, name, dialect=dialect):
            if isinstance(row, Loss):
                yield row
            elif not isinstance(row.record, dict):
                yield Loss(name, row.number, "not a JSON object", SAMPLE.repr(row.record))
            elif isinstance(row.record, Lenient) and SURROGATE.search(json.dumps(row.record, ensure_ascii=False)):
                yield Loss(name, row.number, "half a surrogate pair", SAMPLE.repr(row.record))
            else:
                yield row.number, row.record
