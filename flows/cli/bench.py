"""`cram bench`: what bounds training on this machine."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column

from flows.cli.common import print_table, say
from flows.cli.fields import Override, Settings, recipes_and_files
from flows.cli.run import begin
from flows.summary import relative

if TYPE_CHECKING:
    from flows.recipes.recipe import Recipe
    from tasks.bench import Bench


def bench(
    recipe: Annotated[
        str,
        typer.Argument(help="Recipe, or recipe file, whose training is measured.", autocompletion=recipes_and_files),
    ] = "pocket-frontier",
    settings: Settings = None,
    override: Override = None,
    seconds: Annotated[
        float, typer.Option(min=1, help="About how long it takes; from 60 on, compilation is measured too.")
    ] = 120,
    folder: Annotated[Path, typer.Option(metavar="DIR", help="Where to write the page.")] = Path(),
) -> None:
    """Measure what bounds pretraining on this machine, by part, and what a budget buys.

    It prints tables and writes them as a page, bench-RECIPE.html and .md, to the current folder. Nothing is trained,
    and nothing enters the store.
    """
    from flows.recipes.recipe import merge, refuse_without_start, resolve
    from flows.recipes.typed import changes_of
    from tasks.bench import budget_rows, findings, part_rows, rate_rows, write_page
    from tasks.stage import environment

    begun = begin(recipe)
    changes = merge(begun.override, changes_of(override or [], settings or []))
    refuse_without_start(begun.recipe, changes)
    found = measure(Path(recipe).stem, changes, resolve(begun.recipe, changes), seconds)
    for rows in (part_rows(found), rate_rows(found), budget_rows(found)):
        print_numbers(rows)
        say("")
    for sentence in findings(found):
        say(sentence)
    page = write_page(found, environment(), folder)
    say(f"\nPage: {relative(page)}")


def measure(name: str, changes: dict, settings: "Recipe", seconds: float) -> "Bench":
    """Measure the training of a recipe; show what is being done."""
    from model import machine
    from model.bert import Bert
    from tasks import bench

    pretrain = settings.pretrain
    pretrain.check()
    here = machine.detect()
    bert = Bert(pretrain.architecture, settings.vocabulary.entries, settings.tokenize.length, pretrain.seed)
    with shown(seconds) as show:
        how = settings.vocabulary.normaliser()
        return bench.measure(name, changes, bert, pretrain.training(), how, here, seconds, show)


@contextmanager
def shown(seconds: float) -> Iterator[Callable[[str], None]]:
    """Show what is being done on standard error: a line that changes on a terminal, else a line for each."""
    errors = Console(stderr=True)
    started = time.monotonic()
    with errors.status(f"Measuring, about {seconds:.0f} s") as status:

        def show(name: str) -> None:
            elapsed = time.monotonic() - started
            line = f"Measuring {escape(name)} ({elapsed:.0f} s)"
            if errors.is_terminal:
                status.update(line)
            else:
                errors.print(line, highlight=False, soft_wrap=True)

        yield show


def print_numbers(rows: list[dict[str, str]]) -> None:
    """Print rows as a table whose columns are aligned right, except those of names and units."""
    columns = []
    for name, cell in rows[0].items():
        is_number = cell[0].isdigit() and name != "budget"
        columns.append(Column(name, justify="right" if is_number else "left", no_wrap=True))
    print_table(columns, [list(row.values()) for row in rows])
