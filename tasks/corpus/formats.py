"""Files as documents: whatever the format and whatever lies around it. See READ for the formats."""

import io
import re
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from typing import NamedTuple
from xml.etree import ElementTree

from model.errors import InputError
from model.wording import counted, printable
from tasks.corpus import rows
from tasks.corpus.columns import EMPTY, Layout, as_record, columns_of, read_rows, text_column, text_of
from tasks.corpus.containers import content_of, members_of, reading
from tasks.corpus.kinds import (
    ARCHIVES,
    FORMATS,
    MARKUP,
    ROWS,
    Damage,
    Mislabelled,
    ending,
    family,
    looks_like_a_log,
    no_prose,
    sniffed,
    unread,
)
from tasks.corpus.losses import BREAK, NOTHING, UNREADABLE
from tasks.corpus.mail import CUE, HEADER, body_of, messages, spoken
from tasks.corpus.parts import Document
from tasks.corpus.rows import SHOWN, TOO_LONG, Loss, Unreadable, lines_of, rows_of

LARGE = 1_000_000  # bytes of a text file that is one document without being asked for
JSON_LINE = re.compile(rb'\s*\{\s*"\w+"\s*:')  # a text hardly begins so
UNITS = {"file": "file", "line": "line", "blank-line": "paragraph"}  # what a document is, in reasons of losses
WIKI = re.compile(rb"\s*<doc id=[^\n]*>\r?\n")  # what WikiExtractor writes around a page


class Skipped(NamedTuple):
    """A file in an archive that isn't read."""

    kind: str


Records = Iterator[Document | Loss | Skipped]


def read_file(file: io.BufferedReader, name: str, layout: Layout) -> Records:
    """The documents and losses of a file, which must be at its beginning. Raises InputError if it can't be read."""
    with reading(name):
        layout.taken = ""
        layout.form, file = content_of(file, name, layout.encoding, layout.extract)
        yield from READ[layout.form](file, name, layout)


def read_archive(file: io.BufferedReader, name: str, layout: Layout) -> Records:
    """The documents of the files in an archive, under its name and their paths in it. Archives in it are skipped."""
    for path, member in members_of(file, layout.form, name):
        skip = unread(path, layout.extract)
        form = FORMATS.get(ending(path)) or sniffed(member.peek())
        if skip or form in ("", *ARCHIVES.values()):
            yield Skipped(skip or ("archive in an archive" if form else "no text"))
        else:
            layout.source = family(path)
            yield from read_member(member, f"{name}/{printable(path)}", layout)


def read_member(file: io.BufferedReader, name: str, layout: Layout) -> Records:
    """The documents of a file in an archive. One that is a document, and can't be read, is lost alone.

    An empty one is counted with what is skipped.
    """
    try:
        for record in read_file(file, name, layout):
            yield Skipped(NOTHING) if is_empty_file(record, layout) else record
    except InputError as error:
        is_damaged = isinstance(error, Damage) and not isinstance(error, Mislabelled)
        if is_damaged or FORMATS.get(ending(name)) in ROWS.values():
            raise
        yield Loss(name, 1, UNREADABLE, str(error))


def is_empty_file(record: Document | Loss | Skipped, layout: Layout) -> bool:
    """Whether a record is all of a file that has no text."""
    is_whole = layout.form in ("text", "subtitles") and layout.taken == "file"
    return is_whole and isinstance(record, Loss) and record.reason == EMPTY


def read_records(file: io.BufferedReader, name: str, layout: Layout) -> Records:
    """The documents of a JSON, CSV, Parquet or Arrow file; of one JSON object without text, those in its list."""

    def wraps(outer: dict, inner: dict) -> bool:
        return bool(not text_column(outer, name, layout) and text_column(inner, name, layout))

    found = rows_of(layout.form, file, name, wraps, lambda schema: columns_of(as_record(schema), name, layout))
    return read_rows(found, name, layout, table=layout.form == "CSV")


def read_text(file: io.BufferedReader, name: str, layout: Layout) -> Iterator[Document | Loss]:
    """The documents of a text file: one, or one per line or paragraph. Raises InputError if one would be large.

    Line ends and blank lines around a document are no part of it, unless it is the whole file.
    """
    head, layout.taken = file.peek(), layout.documents_by or "file"
    what = no_prose(head)
    if what and not layout.documents_by:
        raise InputError(
            f"{name} {what}; expected prose. Leave it out, or save the text in it; if it is the text that you want, set "
            "download.documents_by to file or line."
        )
    layout.doubt = what or "has a date and a time in front of its lines, as a log has" * looks_like_a_log(head)
    if not layout.documents_by and WIKI.match(head):
        layout.form, layout.taken = "WikiExtractor", "doc"
    elif not layout.documents_by and JSON_LINE.match(head):
        raise InputError(
            f"{name} is JSON, and its name says text. Name it .jsonl; if it is text, set download.documents_by to file."
        )
    if layout.taken == "file":
        yield document(whole(file, name, layout), name, 1, layout)
        return
    for line, data in blocks(file, layout.taken):
        found = document(data, name, line, layout)
        if isinstance(found, Document) or found.reason != EMPTY:
            yield found


def whole(file: io.BufferedReader, name: str, layout: Layout) -> bytes:
    """All of a text file, or more than MOST_BYTES of it. Raises InputError if it is large and no choice was made."""
    data = file.read(rows.MOST_BYTES + 1)
    if len(data) > LARGE and not layout.documents_by:
        lines = [line for _, line in lines_of(io.BufferedReader(io.BytesIO(data)))]
        blank = sum(not line.strip() for line in lines)
        is_cut = len(data) > rows.MOST_BYTES
        choices = ["`line` if each line is a document", "`blank-line` if blank lines divide documents"]
        choices += [] if is_cut else ["`file` if the whole file is one"]
        advice = f"Set download.documents_by: {', or '.join(choices)}."
        if is_cut and len(lines) == 1:
            advice = f"{BREAK}. Then set download.documents_by to line."
        raise InputError(
            f"{name} has {'more than ' * is_cut}{len(data) / 1e6:.1f} MB of text in {counted(len(lines), 'line')}, "
            f"{blank:,} of them blank. {advice}"
        )
    return data


def blocks(file: io.BufferedReader, by: str) -> Iterator[tuple[int, bytes]]:
    """Each line, run of lines between blank ones, or inside of a <doc>, with the number of its first line.

    Of one of more than MOST_BYTES, a beginning that is longer too.
    """
    block, size, start = [], 0, 1
    for number, line in lines_of(file):
        last = {"line": True, "blank-line": line.isspace(), "doc": line.startswith(b"</doc>")}[by]
        if by == "line" or not (last or line.startswith(b"<doc id=")):
            start = start if block else number
            if size <= rows.MOST_BYTES:
                block.append(line if len(line) > rows.MOST_BYTES else line.rstrip(b"\r\n"))
                size += len(block[-1]) + 1
        if last:
            yield start, b"\n".join(block).strip(b"\n" * (size <= rows.MOST_BYTES))
            block, size = [], 0
    if block and by == "doc":
        raise EOFError("it ends within a <doc>")
    yield start, b"\n".join(block)


def document(data: bytes, name: str, line: int, layout: Layout) -> Document | Loss:
    """The document that begins in a line of a file, or its loss."""
    try:
        return Document(f"{name}:{line}", layout.source, text_of(data))
    except Unreadable as reason:
        start = getattr(reason.__cause__, "start", 0)  # of what is not UTF-8
        said, breaks = str(reason), data[:start].count(b"\n")
        if said == TOO_LONG:
            unit = UNITS.get(layout.taken, "document") if b"\n" in data else "line"
            said = f"{unit} {said}"
        return Loss(name, line + breaks, said, repr(data[start : start + 40]))


def extractor(package: str) -> str:
    """A package that takes the text out of HTML, with its version. Raises InputError if it isn't installed."""
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError as error:
        what = f"download.extract needs the package {package}"
        raise InputError(f"{what}. Install it: pip install 'cram[html]'.") from error


def read_markup(file: io.BufferedReader, name: str, layout: Layout) -> Iterator[Document | Loss]:
    """The text of a page without menus and the like, or the text in all elements of an XML file, a piece per line."""
    import trafilatura

    found, layout.taken = document(file.read(rows.MOST_BYTES + 1), name, 1, layout), layout.extract
    if isinstance(found, Document):
        text = trafilatura.extract(found.text) if layout.form == "HTML" else text_of_xml(found.text)
        found = found._replace(text=text) if text else Loss(name, 1, "no text in the page", found.text[:SHOWN])
    yield found


def text_of_xml(page: str) -> str:
    """The text in all elements; empty if the XML is broken."""
    with suppress(ElementTree.ParseError):
        pieces = ElementTree.fromstring(re.sub(r"^<\?xml[^>]*\?>", "", page)).itertext()
        return "\n".join(piece.strip() for piece in pieces if piece.strip())
    return ""


def read_mail(file: io.BufferedReader, name: str, layout: Layout) -> Records:
    """The text of each message, without headers and attachments. Raises InputError if the file holds no message."""
    if file.peek() and not HEADER.match(file.peek()):  # an empty mailbox has no messages
        raise InputError(f"{name} is no mail: it begins with no header, as `From: …`. Rename it.")
    layout.taken = "message"
    for line, data in messages(file):
        try:
            if len(data) > rows.MOST_BYTES:
                raise Unreadable(f"message {TOO_LONG}")
            kind, text = body_of(data, layout.encoding)
            if kind == "text/html" and not layout.extract:
                raise Unreadable("mail in HTML only")
            text = text_of_page(text) if kind == "text/html" else text
        except Unreadable as reason:
            yield Loss(name, line, str(reason), repr(data[:40]))
        else:
            yield Document(f"{name}:{line}", layout.source, text) if text else Skipped("mail without text")


def text_of_page(page: str) -> str:
    """The text of a mail in HTML, which has no article that could be told from what surrounds it."""
    import trafilatura

    whole = page if "<html" in page.lower() else f"<html><body>{page}</body></html>"
    return trafilatura.extract(whole) or trafilatura.html2txt(whole)


def read_subtitles(file: io.BufferedReader, name: str, layout: Layout) -> Iterator[Document | Loss]:
    """What is said in a file of subtitles, as one document. Raises InputError if it has no times."""
    layout.taken = "file"
    found = document(file.read(rows.MOST_BYTES + 1), name, 1, layout)
    if isinstance(found, Document):
        if not CUE.search("\n".join(found.text.splitlines())):
            raise InputError(
                f"{name} is named as subtitles are, and no line has times, as 00:01,0 --> 00:02,5. Rename it."
            )
        text = spoken(found.text)
        found = found._replace(text=text) if text else Loss(name, 1, EMPTY, found.text[:SHOWN])
    yield found


READ = {
    "text": read_text,
    "mail": read_mail,
    "subtitles": read_subtitles,
    **dict.fromkeys(ROWS.values(), read_records),
    **dict.fromkeys(MARKUP.values(), read_markup),
    **dict.fromkeys(ARCHIVES.values(), read_archive),
}
