"""Markdown, in which reports and cards are written: Jinja templates, with tables by pandas.

All that a template or a table inserts is escaped unless it is `Marked`, so that text from data is shown literally.
"""

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from model.quantities import budget, counted, duration, span
from tasks.text.printable import printable

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).with_name("templates")
SPECIAL = re.compile(r"([\\`*\[\]<>|~&!#]|(?<![^\W_])_|_(?![^\W_]))")  # an underscore within a word means nothing
NUMBER = re.compile(r"[-+–]?\d[\d.,]*( %)?|–")


class Marked(str):
    """Text that is Markdown already and is not escaped again."""

    __slots__ = ()

    def __html__(self) -> "Marked":  # by which Jinja knows text that needs no escaping
        return self


def escape(text: object) -> Marked:
    """Any text as Markdown that shows it literally, on one line."""
    if hasattr(text, "__html__"):
        return Marked(text)
    return Marked(SPECIAL.sub(r"\\\1", printable(" ".join(str(text).split()))))


def code(text: object) -> Marked:
    """Any text in the font of code; escaped text if it contains backticks."""
    if "`" in str(text):
        return escape(text)
    return Marked(f"`{printable(' '.join(str(text).split()))}`".replace("|", "\\|"))


def cell(value: object) -> Marked:
    """A value as tables and templates show it: two numbers as a range, None and NaN as a dash."""
    if value is None or value != value:
        return Marked("–")
    if isinstance(value, bool):
        return escape(value)
    if isinstance(value, int):
        return Marked(f"{value:,}")
    if isinstance(value, float):
        return Marked(f"{value:,.1f}")
    return escape(span(*value) if isinstance(value, list | tuple) else value)


def table(header: Sequence[object], rows: Iterable[Sequence[object]]) -> Marked:
    """A table with columns of numbers aligned right, the first excepted. Headers may be empty."""
    import pandas as pd

    cells = [[cell(value) for value in row] for row in rows]
    columns = list(zip(*cells, strict=True))
    align = ["right" if i and all(map(_is_number, column)) else "left" for i, column in enumerate(columns)]
    frame = pd.DataFrame(cells, columns=[cell(name) for name in header], dtype=object)
    return Marked(frame.to_markdown(index=False, disable_numparse=True, colalign=align or None))


def _is_number(text: str) -> bool:
    return bool(NUMBER.match(text.replace("\\", "").lstrip("*")))


def records(rows: Iterable[Mapping[str, object]], columns: Mapping[str, str] | None = None) -> Marked:
    """A table of rows by column; `columns`: the header of each column to show, otherwise all under their own names."""
    rows = list(rows)
    columns = columns or {name: name for name in rows[0]}
    return table(list(columns.values()), [[row.get(name) for name in columns] for row in rows])


def items(lines: Iterable[str]) -> Marked:
    """A list of lines that are Markdown."""
    return Marked("\n".join(f"- {line}" for line in lines))


def escaped_items(lines: Iterable[object]) -> Marked:
    """A list of texts."""
    return items(map(escape, lines))


@functools.cache
def _environment() -> "Environment":
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(  # `finalize` escapes for Markdown; of the escaping for HTML nothing is left to do then
        loader=FileSystemLoader(TEMPLATES), autoescape=True, finalize=cell, undefined=StrictUndefined
    )
    made.filters |= {"code": code, "items": escaped_items, "records": records}
    made.globals |= {"budget": budget, "counted": counted, "duration": duration, "span": span, "table": table}
    return made


def render(template: str, values: Mapping[str, object]) -> str:
    """The Markdown of a template; values are escaped, and empty lines between blocks are reduced to one."""
    text = _environment().get_template(f"{template}.md.j2").render(values)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"
