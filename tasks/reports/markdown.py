"""Markdown: what reports and cards are written in. Whatever comes from data is escaped here."""

import re
from collections.abc import Iterable, Sequence

from tasks.text.printable import printable

SPECIAL = re.compile(r"([\\`*\[\]<>|~&!#]|(?<![^\W_])_|_(?![^\W_]))")  # within words _ means nothing
NUMBER = re.compile(r"[-+–]?\d[\d.,]*( %)?|–")


class Marked(str):
    """Text that is Markdown as it is; a cell of it is not escaped."""

    __slots__ = ()


def escape(text: object) -> Marked:
    """Text of whatever origin, so that it is shown as it is, on one line."""
    return text if isinstance(text, Marked) else Marked(SPECIAL.sub(r"\\\1", printable(" ".join(str(text).split()))))


def code(text: object) -> Marked:
    """The same as code, for a cell of a table."""
    return (
        escape(text) if "`" in str(text) else Marked(f"`{printable(' '.join(str(text).split()))}`".replace("|", "\\|"))
    )


def cell(value: object) -> str:
    """A value of a table; None is shown as a dash."""
    if value is None:
        return "–"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:.1f}" if isinstance(value, float) else escape(value)


def table(header: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    """A table, with columns of numbers to the right. A first line is needed, but may be of empty cells."""
    lines = [[cell(value) for value in line] for line in (header, *rows)]
    columns = list(zip(*lines[1:], strict=True)) or [()] * len(header)
    ruler = ["---:" if i and all(map(_is_number, column)) else "---" for i, column in enumerate(columns)]
    return "\n".join("| " + " | ".join(line) + " |" for line in (lines[0], ruler, *lines[1:]))


def _is_number(text: str) -> bool:
    return bool(NUMBER.match(text.replace("\\", "").lstrip("*")))


def items(lines: Iterable[str]) -> str:
    """A list."""
    return "\n".join(f"- {line}" for line in lines)
