"""Files as documents: whatever the format and whatever lies around it. See READ for the formats."""

import io
import re
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from typing import NamedTuple
from xml.etree import ElementTree

from model import InputError
from tasks import printable
from tasks.corpus import rows
from tasks.corpus.columns import EMPTY, Layout, as_record, columns_of, read_rows, text_column, text_of
from tasks.corpus.containers import content_of, members_of, reading
from tasks.corpus.kinds import ARCHIVES, FORMATS, MARKUP, ROWS, ending, family, sniffed, unread
from tasks.corpus.parts import Document
from tasks.corpus.rows import SHOWN, Loss, Unreadable, lines_of, rows_of

LARGE = 1_000_000  # bytes of a text file that is one document without being asked for
JSON_LINE = re.compile(rb'\s*\{\s*"\w+"\s*:')  # a text hardly begins so
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
    for path, member in members_of(file, layout.form):
        skip = unread(path, layout.extract)
        form = FORMATS.get(ending(path)) or sniffed(member.peek())
        if skip or form in ("", *ARCHIVES.values()):
            yield Skipped(skip or ("archive in an archive" if form else "no text"))
        else:
            layout.source = family(path)
            yield from read_file(member, f"{name}/{printable(path)}", layout)


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
        lines = data.splitlines()
        blank = sum(not line.strip() for line in lines)
        more = "more than " * (len(data) > rows.MOST_BYTES)
        raise InputError(
            f"{name} has {more}{len(data) / 1e6:.1f} MB of text in {len(lines):,} lines, {blank:,} of them blank. Set "
            "download.documents_by: `line` if each line is a document, `blank-line` if blank lines divide documents, "
            "or `file` if the whole file is one."
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
        return Loss(name, line + data[:start].count(b"\n"), str(reason), repr(data[start : start + 40]))


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


READ = {
    "text": read_text,
    **dict.fromkeys(ROWS.values(), read_records),
    **dict.fromkeys(MARKUP.values(), read_markup),
    **dict.fromkeys(ARCHIVES.values(), read_archive),
}
