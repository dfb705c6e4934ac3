"""Shared by the commands: names for help and completion, checks of arguments, and output that fits the terminal.

Help and completion read names without importing flows.recipes.recipe, which takes seconds.
"""

import ast
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from flows.summary import OTHER_STAGES, check_name, relative, telling
from model.wording import printable

if TYPE_CHECKING:
    from tasks.store.artifacts import Artifact

console = Console(width=None if sys.stdout and sys.stdout.isatty() else 160)  # a pipe has no width


def recipe_names() -> list[str]:
    """The recipes."""
    from flows.recipes.deltas import DELTAS

    return list(DELTAS)


def stage_names() -> list[str]:
    """The stages: the fields of Recipe, read from its source."""
    module = ast.parse(Path(__file__).parents[1].joinpath("recipes", "recipe.py").read_text(encoding="utf-8"))
    recipe = next(node for node in module.body if isinstance(node, ast.ClassDef) and node.name == "Recipe")
    return [node.target.id for node in recipe.body if isinstance(node, ast.AnnAssign)]


def study_names() -> list[str]:
    """The studies."""
    from flows.recipes.studies import STUDIES

    return list(STUDIES)


def check_stages(names: list[str], others: bool = False) -> None:
    """Raise InputError for an unknown stage; `others`: accept stages that belong to no recipe too."""
    for name in names:
        check_name("stage", name, (*stage_names(), *OTHER_STAGES * others))


def say(text: str) -> None:
    """Print text without markup and without line breaks of rich."""
    console.print(printable(text, lines=True), markup=False, highlight=False, soft_wrap=True)


def print_rows(rows: list[dict]) -> None:
    """Print rows as a table without usual and empty columns; a table wider than the terminal is split.

    Each part repeats the first column.
    """
    if not rows:
        return
    rows = [{printable(name): value for name, value in row.items()} for row in rows]
    cells = {name: [cell(row[name]) for row in rows] for name in telling(rows) if any(row[name] != "" for row in rows)}
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


def cell(value: Any) -> str:
    """The text of a value in a table."""
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else printable(value)


def print_listing(header: tuple[str, ...], rows: list[tuple[str, ...]], details: list[str]) -> None:
    """Print rows as a table, each with its details below the last column.

    All columns of a row but the first and the last hold numbers.
    """
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name in header[:-1]:
        table.add_column(name, justify="left" if name == header[0] else "right", no_wrap=True)
    table.add_column(header[-1], overflow="fold")
    for row, detail in zip(rows, details, strict=True):
        *numbers, last = (Text(printable(cell)) for cell in row)  # markup would be parsed, which takes time
        table.add_row(*numbers, last.append(f"\n{printable(detail)}", "dim") if detail else last)
    console.print(table)


def shorten(path: Path) -> str:
    """The path for `console.print`, relative if it is below the working directory, with markup escaped."""
    return escape(printable(relative(path)))


def called(name: str, damaged: bool = False) -> "Artifact":
    """The artifact that an argument names, as `artifacts.called` does. Raises InputError for a misspelt stage too."""
    from tasks.store import artifacts
    from tasks.store.artifacts import KEY

    if not KEY.fullmatch(name):
        check_stages([name.partition("/")[0]], others=True)
    return artifacts.find_by_name(name, damaged)
