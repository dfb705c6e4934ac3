"""Output of commands: tables that fit the terminal, JSON, paths, and text without markup.

Tables are rich's where rows can be one line each. `cram ls` prints lines of its own, since a rich table can't continue
a row across its columns; and rich formats values as Python, not as JSON.
"""

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flows.summary import relative, telling
from tasks.text.printable import printable

LINE = 120  # characters of JSON on one line
ROOM = 40  # characters that ls needs for a column of differences; with fewer, differences are below each row
console = Console(width=None if sys.stdout and sys.stdout.isatty() else 160)  # a pipe has no width


def say(text: str) -> None:
    """Print text, without reading brackets as markup and without breaking lines."""
    console.print(printable(text, lines=True), markup=False, highlight=False, soft_wrap=True)


def print_rows(rows: list[dict]) -> None:
    """Print rows as a table, or as several that repeat the first column if one would be too wide for the terminal."""
    if not rows:
        return
    rows = [{printable(name): value for name, value in row.items()} for row in rows]
    cells = {name: [cell(row[name]) for row in rows] for name in rows[0] if any(row[name] != "" for row in rows)}
    most = 2 * console.width // 5  # the width of a column; longer cells are folded
    widths = {name: min(most, max(map(len, [*column, *name.split()]))) for name, column in cells.items()}
    first, *others = cells
    while True:
        chosen, room = [first], console.width - widths[first] - 2
        while others and (len(chosen) == 1 or widths[others[0]] + 2 <= room):
            room -= widths[others[0]] + 2
            chosen.append(others.pop(0))
        table = Table(box=None, header_style="bold")
        for name in chosen:
            justify = "right" if isinstance(rows[0][name], int | float) else "left"
            table.add_column(escape(name), justify=justify, width=widths[name], overflow="fold")
        for row in zip(*map(cells.get, chosen), strict=True):
            table.add_row(*map(escape, row))
        console.print(table)
        if not others:
            return
        console.print()


def print_scores(rows: list[dict]) -> None:
    """Print the scores of a report, without columns of usual values, and with the verdicts below."""
    names = telling(rows) if rows else []
    if "verdict" in names:
        rows = [row | {"verdict": "†" if row["verdict"] else "", "": row["verdict"]} for row in rows]
    print_rows([{name: row[name] for name in names} for row in rows])
    for verdict in dict.fromkeys(row[""] for row in rows if row.get("")):
        say(f"† {verdict}")


def cell(value: Any) -> str:
    """The text of a value in a table."""
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else printable(value)


def print_listing(header: tuple[str, ...], rows: list[tuple[str, ...]], details: list[str]) -> None:
    """Print aligned rows no wider than the console, with details in a last column or, if there is no room, below each.

    All columns of a row but the first and the last hold numbers.
    """
    rows = [tuple(map(printable, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    beside = console.width - sum(widths) - 2 * len(widths) >= ROOM
    title = "differences" if beside and any(details) else ""
    for row, detail, style in [(header, title, "bold"), *((*pair, "") for pair in zip(rows, details, strict=True))]:
        start = row[0].ljust(widths[0]) + "".join(
            f"  {cell.rjust(width)}" for cell, width in zip(row[1:-1], widths[1:-1], strict=True)
        )
        if beside and detail:
            print_hanging(f"{start}  {row[-1].ljust(widths[-1])}  ", detail, style)
        else:
            print_hanging(f"{start}  ", row[-1], style)
            print_hanging("    ", detail, "dim")


def print_hanging(start: str, text: str, style: str) -> None:
    """Print text after `start`, with a hanging indent; nothing if both are blank."""
    width, indent = max(console.width, len(start) + 20), " " * len(start)
    wrapped = textwrap.wrap(text, width, initial_indent=start, subsequent_indent=indent, break_on_hyphens=False)
    for line in wrapped or filter(str.strip, [start]):
        console.print(line, markup=False, highlight=False, soft_wrap=True, style=style)


def shorten(path: Path) -> str:
    """The path for `console.print`, relative if it is below the working directory, with markup escaped."""
    return escape(printable(relative(path)))


def laid_out(value: Any, indent: str = "") -> str:
    """JSON in which each value that is short enough is on one line."""
    line = json.dumps(value)
    if len(indent) + len(line) <= LINE or not value or not isinstance(value, dict | list):
        return line
    inner = indent + "  "
    if isinstance(value, dict):
        lines = [f"{inner}{json.dumps(name)}: {laid_out(item, inner)}" for name, item in value.items()]
    else:
        lines = [f"{inner}{laid_out(item, inner)}" for item in value]
    start, end = "{}" if isinstance(value, dict) else "[]"
    return "\n".join([start, ",\n".join(lines), indent + end])
