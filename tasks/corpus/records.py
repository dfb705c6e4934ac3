"""What is read of a source, one record after another: documents, and what could not be read."""

import re
from typing import NamedTuple

from tasks.text.printable import printable

LONGEST_NAME, OTHER = 256, "other"  # characters of a source's name; what longer ones become


class Loss(NamedTuple):
    """Something that could not be read."""

    file: str
    line: int
    reason: str
    sample: str = ""


class Layout(NamedTuple):
    """How to read a file."""

    source: str  # of documents that name none
    limit: int  # bytes of the longest line or text that is taken
    text: str = "text"  # the field or column with the text
    local: bool = True  # it may be read more than once, and in any order
    keep: bool = False  # of a damaged file, give what stands before the damage, and nothing that it may have altered

    @property
    def too_long(self) -> str:
        """Why a line or text is lost that is longer."""
        return f"longer than {self.limit / 1e6:g} MB"


class Damage(Exception):
    """A shard that can't be read, or not from `line` on (0: not a file of lines): what is wrong, and what to do.

    `intact`: how many bytes of the unpacked text the damage can't have altered.
    """

    def __init__(self, kind: str, detail: str, cure: str = "Get it again", intact: int = 0) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind, self.cure, self.line, self.intact = kind, cure, 0, intact


class Reason(str):
    """Why a line is none of JSON."""


def source_of(record: dict) -> str:
    """meta.pile_set_name of a record, or else its source, or else nothing."""
    meta = record.get("meta")
    for name in (meta.get("pile_set_name") if isinstance(meta, dict) else None, record.get("source")):
        if isinstance(name, str) and name:
            return source_name(name)
    return ""


def source_name(name: str) -> str:
    """A source's name as it is kept: printable; OTHER if it is longer than LONGEST_NAME, since all stages count by it."""
    return printable(name.encode(errors="replace").decode()) if len(name) <= LONGEST_NAME else OTHER


def check(text: object) -> str | None:
    """Why this is no text of a document, or None."""
    if not isinstance(text, str):
        return "not UTF-8" if isinstance(text, bytes) else f"text is not a string but {type(text).__name__}"
    return "empty text" if not text or text.isspace() else None


def broken_in_half(text: object) -> bool:
    """Does it hold half a surrogate pair, which UTF-8 can't?"""
    return isinstance(text, str) and re.search("[\ud800-\udfff]", text) is not None


def exceeds(text: str, limit: int) -> bool:
    """Is it more than so many bytes of UTF-8?"""
    return len(text) > limit or (4 * len(text) > limit and len(text.encode()) > limit)
