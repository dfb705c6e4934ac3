"""Records of a source: documents, and losses, which are records that could not be read."""

import re
from typing import NamedTuple

from tasks.text.printable import printable

LONGEST_NAME, OTHER = 256, "other"  # characters of a source's name; the name in place of a longer one


class Loss(NamedTuple):
    """A record that could not be read."""

    file: str
    line: int
    reason: str
    sample: str = ""


class Layout(NamedTuple):
    """How to read a file."""

    source: str  # of documents that name none
    limit: int  # bytes of the longest line or text
    text: str = "text"  # the field or column with the text
    local: bool = True  # the file can be read more than once, and in any order
    keep: bool = False  # of a damaged file, give what precedes the damage, except for what it may have altered

    @property
    def too_long(self) -> str:
        """The reason for losing a longer line or text."""
        return f"longer than {self.limit / 1e6:g} MB"


class Damage(Exception):
    """A shard can't be read, or not from `line` on (0: unknown). `cure` says what the user can do.

    `intact` is the number of bytes of the unpacked text that the damage can't have altered.
    """

    def __init__(self, kind: str, detail: str, cure: str = "Get it again", intact: int = 0) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind, self.cure, self.line, self.intact = kind, cure, 0, intact


class Unreadable(Exception):
    """A line that holds no document; its message is the reason of the loss."""


def source_of(record: dict) -> str:
    """The source that a record names in meta.pile_set_name or else in `source`; empty if in neither."""
    meta = record.get("meta")
    for name in (meta.get("pile_set_name") if isinstance(meta, dict) else None, record.get("source")):
        if isinstance(name, str) and name:
            return source_name(name)
    return ""


def source_name(name: str) -> str:
    """A source's name as it is stored: printable, and OTHER if it is longer than LONGEST_NAME."""
    return printable(name.encode(errors="replace").decode()) if len(name) <= LONGEST_NAME else OTHER


def check(text: object) -> str | None:
    """Why a value can't be the text of a document, or None."""
    if not isinstance(text, str):
        return "not UTF-8" if isinstance(text, bytes) else f"text is not a string but {type(text).__name__}"
    return "empty text" if not text or text.isspace() else None


def has_half_pair(text: object) -> bool:
    """Whether a value is a string with half a surrogate pair, which UTF-8 can't represent."""
    return isinstance(text, str) and re.search("[\ud800-\udfff]", text) is not None


def exceeds(text: str, limit: int) -> bool:
    """Whether a text is longer than `limit` bytes of UTF-8."""
    return len(text) > limit or (4 * len(text) > limit and len(text.encode()) > limit)
