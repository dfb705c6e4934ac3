"""Shared by the commands: names for help and completion, checks of arguments, and output that fits the terminal.

Importing flows.recipes.recipe takes seconds, so names for help and completion are found without it.
"""

import ast
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from flows.summary import OTHER_STAGES, check_name, relative, telling
from model.wording import printable

if TYPE_CHECKING:
    from tasks.store.artifacts import Artifact

PIPE_WIDTH = 160  # columns for output that isn't a terminal's
GAP = 2  # spaces between the columns of a table

console = Console(width=None if sys.stdout and sys.stdout.isatty() else PIPE_WIDTH)


# Names


def recipe_names() -> list[str]:
    """The recipes."""
    from flows.recipes.deltas import DELTAS

    return list(DELTAS)


def stage_names() -> list[str]:
    """The stages: the fields of Recipe, read from its source, which is 500 times as fast as importing it."""
    source = Path(__file__).parents[1] / "recipes" / "recipe.py"
    module = ast.parse(source.read_text(encoding="utf-8"))
    recipe = next(node for node in module.body if isinstance(node, ast.ClassDef) and node.name == "Recipe")
    fields = [node.target for node in recipe.body if isinstance(node, ast.AnnAssign)]
    return [field.id for field in fields if isinstance(field, ast.Name)]


def all_stage_names() -> list[str]:
    """The stages, and then those that belong to no recipe."""
    return [*stage_names(), *OTHER_STAGES]


def study_names() -> list[str]:
    """The studies."""
    from flows.recipes.studies import STUDIES

    return list(STUDIES)


def check_stages(names: list[str], others: bool = False) -> None:
    """Raise InputError for an unknown stage; `others`: accept stages that belong to no recipe too."""
    stages = all_stage_names() if others else stage_names()
    for name in names:
        check_name("stage", name, stages)


def find_artifact(name: str, damaged: bool = False) -> "Artifact":
    """The artifact an argument names, as `artifacts.find_by_name` does. Raises InputError for a misspelt stage too."""
    from tasks.store import artifacts
    from tasks.store.artifacts import KEY

    if not KEY.fullmatch(name):
        check_stages([name.partition("/")[0]], others=True)
    return artifacts.find_by_name(name, damaged)


# Output


def say(text: str) -> None:
    """Print text without markup and without line breaks of rich."""
    console.print(printable(text, lines=True), markup=False, highlight=False, soft_wrap=True)


def shorten(path: Path) -> str:
    """The path for `console.print`, relative if it is below the working directory, with markup escaped."""
    return escape(printable(relative(path)))


def print_table(columns: Sequence[Column], rows: Iterable[Sequence[str | Text]]) -> None:
    """Print rows of cells below their headers, without lines."""
    table = Table(*columns, box=None, header_style="bold", pad_edge=False, padding=(0, GAP, 0, 0))
    for row in rows:
        # a str would be parsed for markup
        table.add_row(*(Text(printable(cell)) if isinstance(cell, str) else cell for cell in row))
    console.print(table)


def print_listing(header: Sequence[str], rows: Iterable[Sequence[str]], details: Sequence[str] = ()) -> None:
    """Print rows of which all columns but the first and the last hold numbers.

    `details`: for each row, a text to print below its last column; by default there are none.
    """
    first, *middle, last = header
    columns = [
        Column(first, no_wrap=True),
        *(Column(name, justify="right", no_wrap=True) for name in middle),
        Column(last, overflow="fold"),
    ]
    lines: list[list[str | Text]] = [list(row) for row in rows]
    for line, detail in zip(lines, details, strict=False):
        if detail:
            line[-1] = Text(printable(line[-1])).append(f"\n{printable(detail)}", "dim")
    print_table(columns, lines)


def print_rows(rows: list[dict[str, Any]]) -> None:
    """Print rows as a table without usual and empty columns; a table wider than the terminal is split.

    Each part repeats the first column.
    """
    if not rows:
        return
    cells = {}  # of the columns to print, by name
    for name in telling(rows):
        if any(row[name] != "" for row in rows):
            cells[name] = [as_cell(row[name]) for row in rows]
    widest = 2 * console.width // 5  # longer cells are folded
    columns = {}
    for name, column in cells.items():
        header = printable(name)
        width = max(len(text) for text in [*column, *header.split()])
        is_number = isinstance(rows[0][name], int | float)
        columns[name] = Column(
            escape(header), justify="right" if is_number else "left", width=min(widest, width), overflow="fold"
        )
    for number, names in enumerate(split_columns(columns)):
        if number:
            console.print()
        print_table([columns[name] for name in names], zip(*(cells[name] for name in names), strict=True))


def split_columns(columns: dict[str, Column]) -> list[list[str]]:
    """The names of columns, divided into as many tables as fit the terminal; each begins with the first column."""
    first, *others = columns
    start = columns[first].width or 0
    tables = [[first]]
    used = start
    for name in others:
        needed = GAP + (columns[name].width or 0)
        if used + needed > console.width and len(tables[-1]) > 1:
            tables.append([first])
            used = start
        tables[-1].append(name)
        used += needed
    return tables


def as_cell(value: Any) -> str:
    """The text of a value in a table."""
    is_count = isinstance(value, int) and not isinstance(value, bool)
    return f"{value:,}" if is_count else printable(value)
