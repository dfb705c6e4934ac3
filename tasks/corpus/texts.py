"""Text files and pages: the pieces of prose in them, as rows with the number of their first line."""

import io
import re
import unicodedata
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from xml.etree import ElementTree

from model.errors import InputError
from model.wording import counted
from tasks.corpus import rows
from tasks.corpus.losses import BREAK, EMPTY, NOT_UTF8, NOTHING, TOO_LONG, Loss, Unreadable
from tasks.corpus.rows import SHOWN, Row, Rows, lines_of

LARGE = 1_000_000  # bytes of a text file that is one document without being asked for
JSON_LINE = re.compile(rb'\s*\{\s*"\w+"\s*:')  # a text hardly begins so
UNITS = {"file": "file", "line": "line", "blank-line": "paragraph"}  # what a document is, in reasons of losses
PAGE = b"<doc id="  # what WikiExtractor writes before a page
PAGE_END = b"</doc>"  # and behind it
WIKI = re.compile(rb"\s*<doc id=[^\n]*>\r?\n")
# The beginning of a text file shows what it has instead of prose. Of 59,655 documents of real text in seven languages,
# with code, laws and mathematics among them, four are refused: test vectors, and lists of addresses and of numbers.
SAMPLED = 1 << 16  # bytes
LEAST = 500  # visible characters, below which a table of numbers may be all that a document quotes
MOST_DUMPED = 0.5  # of visible characters; manuals link to pages whose address holds all of their content
MOST_DIGITS = 0.3  # of visible characters; a list of names and telephone numbers has half and half
FEWEST_LETTERS = 0.3  # likewise
# A line of base64 has capitals, small letters and digits, which a line of a genome has not; or a line of a hex dump
DUMP = re.compile(
    r"\s*((?=\S*[a-z])(?=\S*[A-Z])(?=\S*\d)[A-Za-z0-9+/_-]{40,}={0,2}"
    r"|(?=\S*\d)(0x)?([0-9a-f]{32,}|[0-9A-F]{32,})|[0-9A-Fa-f]{6,16}:?(\s+[0-9A-Fa-f]{2,4}){8,}\b.*)\s*"
)
LEAST_LINES = 20  # of a log
LOG = 0.8  # share of lines with a date and a time
STAMPED = 60  # characters in which these are
STAMP = re.compile(
    r"\d{2,4}[-./]([A-Z][a-z]{2}|\d\d)[-./]\d{2,4}\D{1,3}\d?\d:\d\d|[A-Z][a-z]{2} [ \d]\d (\d{4} )?\d\d:\d\d:\d\d"
)


def text_of(value: object) -> str:
    """The text that is the value of a field: bytes in UTF-8, a string, or a list of strings, which become lines.

    Raises Unreadable if it isn't text, or is too long.
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


def row_of(data: bytes, name: str, line: int, unit: str = "") -> Row | Loss:
    """The text that begins in a line of a file, or its loss. `unit`: what it is, one of UNITS."""
    try:
        return Row(line, text_of(data))
    except Unreadable as error:
        reason = str(error)
        start = getattr(error.__cause__, "start", 0)  # of what is not UTF-8
        line += data[:start].count(b"\n")
        if reason == TOO_LONG:
            what = UNITS.get(unit, "document") if b"\n" in data else "line"
            reason = f"{what} {reason}"
        return Loss(name, line, reason, repr(data[start : start + 40]))


def whole_file(data: bytes, name: str) -> Row | Loss:
    """A file that is one text, or its loss; of one without text, a loss of the whole file."""
    row = row_of(data, name, 1, "file")
    if isinstance(row, Loss) and row.reason == EMPTY:
        return Loss(name, 0, NOTHING)
    return row


def text_rows(file: io.BufferedReader, name: str, unit: str, asked: bool) -> Rows:
    """The texts of a text file: one, or one per line, paragraph or page of WikiExtractor, without empty ones.

    Line ends and blank lines around a text are not part of it, unless it is the whole file. `unit`: one of UNITS, or
    doc; `asked`: the user chose it. Raises InputError for a large file if the user didn't.
    """
    if unit == "file":
        data = file.read(rows.MOST_BYTES + 1)
        if len(data) > LARGE and not asked:
            raise InputError(refusal_of_large(data, name))
        yield whole_file(data, name)
        return
    for number, data in blocks(file, unit):
        row = row_of(data, name, number, unit)
        if isinstance(row, Row) or row.reason != EMPTY:
            yield row


def refusal_of_large(data: bytes, name: str) -> str:
    """The sentence about a large text file, if the user didn't choose what a document is."""
    lines = [line for _, line in lines_of(io.BufferedReader(io.BytesIO(data)))]  # type: ignore[arg-type]
    blank = sum(map(is_blank, lines))
    size = f"{len(data) / 1e6:.1f} MB"
    advice = (
        "Set download.documents_by: `line` if each line is a document, or `blank-line` if blank lines divide documents"
    )
    if len(data) <= rows.MOST_BYTES:
        advice = f"{advice}, or `file` if the whole file is one."
    elif len(lines) > 1:
        advice = f"{advice}."
        size = f"more than {size}"
    else:
        advice = f"{BREAK}. Then set download.documents_by to line."
        size = f"more than {size}"
    return f"{name} has {size} of text in {counted(len(lines), 'line')}, {blank:,} of them blank. {advice}"


def blocks(file: io.BufferedReader, unit: str) -> Iterator[tuple[int, bytes]]:
    """Each line, run of lines between blank ones, or inside of a <doc>, with the number of its first line.

    Of one of more than MOST_BYTES, a beginning that is longer too.
    """
    if unit == "line":
        for number, line in lines_of(file):
            yield number, line if len(line) > rows.MOST_BYTES else line.rstrip(b"\r\n")
        return
    block: list[bytes] = []
    size = 0
    start = 1
    for number, line in lines_of(file):
        is_end = line.startswith(PAGE_END) if unit == "doc" else is_blank(line)
        if is_end:
            text = b"\n".join(block)
            yield start, text.strip(b"\n") if size <= rows.MOST_BYTES else text
            block = []
            size = 0
        elif not line.startswith(PAGE):
            if not block:
                start = number
            if size <= rows.MOST_BYTES:
                block.append(line if len(line) > rows.MOST_BYTES else line.rstrip(b"\r\n"))
                size += len(block[-1]) + 1
    if block and unit == "doc":
        raise EOFError("it ends within a <doc>")
    yield start, b"\n".join(block)


def is_blank(line: bytes) -> bool:
    """Whether a line in UTF-8 has white space only, of any kind."""
    return line.decode(errors="replace").isspace()


def doubt_of(head: bytes, name: str, asked: bool) -> str:
    """Why a text file, in UTF-8, may not be prose, as the end of a sentence; empty if it looks like prose.

    `head`: its start; `asked`: the user chose what a document is. Raises InputError if it isn't prose, unless `asked`.
    """
    what = no_prose(head)
    if what and not asked:
        raise InputError(
            f"{name} {what}; expected prose. Leave it out, or save the text in it; if you want it as text, set "
            "download.documents_by to file or line."
        )
    if JSON_LINE.match(head) and not asked:
        raise InputError(
            f"{name} is JSON, but its name says text. Name it .jsonl; if it is text, set download.documents_by to file."
        )
    if not what and looks_like_a_log(head):
        what = "has a date and a time in front of its lines, as a log has"
    return what


def no_prose(head: bytes) -> str:
    """What the beginning of a text file, in UTF-8, has instead of prose, as the end of a sentence; empty if nothing."""
    lines = head[:SAMPLED].decode(errors="ignore").splitlines()
    visible = without_blanks("".join(lines))
    if len(visible) < LEAST:
        return ""
    dumped = sum(len(without_blanks(line)) for line in lines if DUMP.fullmatch(line)) / len(visible)
    if dumped > MOST_DUMPED:
        return f"has {dumped:.0%} of its characters in lines of base64 or hexadecimal numbers"
    digits = sum(map(visible.count, "0123456789")) / len(visible)
    if digits <= MOST_DIGITS:  # as nearly everywhere; to find letters of any script takes longer
        return ""
    letters = sum(unicodedata.category(character)[0] in "LM" for character in visible) / len(visible)
    if letters >= FEWEST_LETTERS:
        return ""
    return f"has {digits:.0%} digits and {letters:.0%} letters, as a table of numbers has"


def without_blanks(text: str) -> str:
    """The visible characters of a text."""
    return "".join(text.split())


def looks_like_a_log(head: bytes) -> bool:
    """Whether nearly all lines at the beginning of a text file, in UTF-8, have a date and a time in front."""
    whole_lines = head[:SAMPLED].decode(errors="ignore").splitlines()[:-1]
    lines = [line for line in whole_lines if line.strip()]
    dated = [line for line in lines if STAMP.search(line[:STAMPED])]
    return len(lines) >= LEAST_LINES and len(dated) >= LOG * len(lines)


def extractor(package: str) -> str:
    """A package that takes the text out of HTML, with its version. Raises InputError if it isn't installed."""
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError as error:
        what = f"download.extract needs the package {package}"
        raise InputError(f"{what}. Install it: pip install 'cram[html]'.") from error


def page_rows(file: io.BufferedReader, name: str, form: str) -> Rows:
    """The text of an HTML page without menus and the like, or that in all elements of an XML file, a piece per line."""
    import trafilatura

    row = row_of(file.read(rows.MOST_BYTES + 1), name, 1)
    if isinstance(row, Loss):
        yield row
        return
    page = str(row.record)
    text = trafilatura.extract(page) if form == "HTML" else text_of_xml(page)
    yield Row(1, text) if text else Loss(name, 1, "no text in the page", page[:SHOWN])


def text_of_xml(page: str) -> str:
    """The text in all elements; empty if the XML is broken."""
    without_declaration = re.sub(r"^<\?xml[^>]*\?>", "", page)
    with suppress(ElementTree.ParseError):
        pieces = [piece.strip() for piece in ElementTree.fromstring(without_declaration).itertext()]
        return "\n".join(filter(None, pieces))
    return ""
