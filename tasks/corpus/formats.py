"""Files as documents: whatever the format and whatever lies around it. See READ for the formats."""

import io
from collections.abc import Iterator
from typing import NamedTuple

from tasks import printable
from tasks.corpus.columns import Layout, columns_of, read_rows, text_column
from tasks.corpus.containers import content_of, members_of, reading
from tasks.corpus.kinds import ARCHIVES, FORMATS, MARKUP, ROWS, ending, family, sniffed, unread
from tasks.corpus.parts import Document
from tasks.corpus.plain import read_markup, read_text
from tasks.corpus.rows import Loss, rows_of


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

    rows = rows_of(layout.form, file, name, wraps, lambda schema: columns_of(schema, name, layout))
    return read_rows(rows, name, layout, table=layout.form == "CSV")


READ = {
    "text": read_text,
    **dict.fromkeys(ROWS.values(), read_records),
    **dict.fromkeys(MARKUP.values(), read_markup),
    **dict.fromkeys(ARCHIVES.values(), read_archive),
}
