"""`cram init`: looks at somebody's own text and labels, and writes a recipe file for them."""

import logging
import os
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli.common import console, say
from model.errors import InputError
from model.wording import printable

if TYPE_CHECKING:  # slow to import
    from flows.recipes.draft import Draft
    from tasks.corpus.overview import TextOverview
    from tasks.glue.overview import TaskOverview

USUAL_FILE = "my.toml"
USAGE = f"""\
`cram init TEXT --labels FILE` looks at your text (files or folders) and labels (a table), and writes {USUAL_FILE}.
For example: cram init my/letters --labels my/tickets.csv
Then `cram run {USUAL_FILE}` trains a language model on the text and a classifier on the labels."""


def init(
    text: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TEXT]...", help="Files, folders or globs with text; or a data set, OWNER/NAME."),
    ] = None,
    labels: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="Labelled rows: a table, a CoNLL file, or a folder. May be repeated."),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The recipe file to write.")] = Path(USUAL_FILE),
    start: Annotated[
        str, typer.Option(metavar="MODEL", help="Begin from this public encoder instead of from random weights.")
    ] = "",
    force: Annotated[bool, typer.Option("--force", help="Replace the recipe file if it exists.")] = False,
) -> None:
    """Write a recipe file for your own text and labels, after looking at them."""
    given = list(text or [])
    tables = list(labels or [])
    is_asking = not given and not tables
    if is_asking:
        refuse_without_terminal()
    check_out(out, force)
    if is_asking:
        given, tables = ask()
    made = look(given, tables, start, out.expanduser().absolute().parent)
    write(made.toml(shown(out)), out)
    print_findings(made, out)


def check_out(out: Path, force: bool) -> None:
    """Raise InputError if the recipe file can't be written, or is there already."""
    path = out.expanduser()
    if path.suffix.lower() != ".toml":
        raise InputError(f"--out is {str(out)!r}; expected the name of a TOML file, such as {USUAL_FILE}.")
    if path.is_dir():
        raise InputError(f"{out} is a folder. Name another file with --out.")
    if path.exists() and not force:
        raise InputError(f"{out} exists. Name another file with --out, or replace this one with --force.")
    if not path.absolute().parent.is_dir():
        raise InputError(f"There is no folder {path.absolute().parent}. Create it, or name another file with --out.")


def refuse_without_terminal() -> None:
    """Explain the command and end with status 2, unless there is a terminal to ask on."""
    if sys.stdin is None or not sys.stdin.isatty() or not sys.stdout.isatty():
        say(USAGE)
        raise typer.Exit(2)


def ask() -> tuple[list[str], list[str]]:
    """Ask for text and labels. Without an answer, explain the command and end with status 2."""
    text = ask_for("Text, a file or folder (Enter for none)")
    labels = ask_for("Labelled rows, such as a CSV file (Enter for none)")
    if not text and not labels:
        say(USAGE)
        raise typer.Exit(2)
    return text, labels


def ask_for(what: str) -> list[str]:
    """A path that is typed on the terminal, without quotes around it, as from a file manager; none if it is empty."""
    answer = typer.prompt(what, default="", show_default=False).strip()
    if len(answer) > 1 and answer[0] == answer[-1] and answer[0] in "'\"":
        answer = answer[1:-1]
    return [answer] if answer else []


def look(text: list[str], labels: list[str], start: str, folder: Path) -> "Draft":
    """A recipe file in this folder for text and labels. Raises InputError for what can't be read."""
    from flows.recipes.draft import Found, draft
    from model.machine import detect
    from tasks.glue.overview import look_at_labels

    for path in [*text, *labels]:
        check_name_of(path)
    with warnings_collected() as warnings:
        overview = look_at_text(text) if text else None
    tasks = [look_at_labels(path) for path in labels]
    names = [task.definition.name for task in tasks]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"Two files of labels would have the task {name!r}. Rename one of the files.")
    if overview is None:
        check_has_text([task.definition.data for task in tasks if not has_readable_text(task)], start)
    has_gpu = detect().device.type == "cuda"
    return draft(Found(overview, tasks, text, start, has_gpu, warnings), folder)


def check_name_of(path: str) -> None:
    """Raise InputError if a path can't be written into a file of UTF-8."""
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{printable(path)} is a name that is not UTF-8. Rename it.") from error


def has_readable_text(task: "TaskOverview") -> bool:
    """Whether the text of labelled rows can be text to train on: they are rows of a table on this machine.

    Tokens are text if they are lists, which are joined, but not if a program wrote lists as text.
    """
    return bool(task.definition.text) and task.is_readable and not task.definition.repository()


def check_has_text(without: list[str], start: str) -> None:
    """Raise InputError if there is no text but that of these labelled data, which isn't in tables of this machine."""
    if without and not start:
        raise InputError(
            f"The labels in {', '.join(without)} come without other text, and a model needs some. Pass files with text "
            "too (cram init TEXT --labels FILE), or begin from a public encoder (--start MODEL)."
        )


def look_at_text(text: list[str]) -> "TextOverview":
    """What the text is. Raises InputError if it can't be read, and for a data set of the hub beside anything else."""
    from tasks.corpus.overview import look_at_dataset, look_at_files
    from tasks.glue.overview import is_hub_name

    datasets = [name for name in text if is_hub_name(name)]
    if not datasets:
        return look_at_files(text)
    if len(text) > 1:
        raise InputError(
            f"{datasets[0]} is not here, so it would be a data set of the hub, which `cram init` takes alone. Correct "
            "the path, or pass the data set only."
        )
    try:
        return look_at_dataset(datasets[0])
    except InputError as error:
        raise type(error)(f"There is no file or folder {datasets[0]}, and as a data set of the hub: {error}") from error


class Collector(logging.Handler):
    """Keeps warnings instead of printing them."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.sentences: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a warning."""
        self.sentences.append(record.getMessage())


@contextmanager
def warnings_collected() -> Iterator[list[str]]:
    """Collect what cram's readers warn of while they look at text."""
    collector = Collector()
    loggers = [logging.getLogger(name) for name in ("tasks", "model")]
    before = [one.propagate for one in loggers]
    for one in loggers:
        one.addHandler(collector)
        one.propagate = False
    try:
        yield collector.sentences
    finally:
        for one, propagated in zip(loggers, before, strict=True):
            one.removeHandler(collector)
            one.propagate = propagated


def write(content: str, out: Path) -> None:
    """Write the recipe file, whole or not at all."""
    path = out.expanduser()
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(content, encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise InputError(f"{out} can't be written: {error.strerror}. Name another file with --out.") from error


def shown(out: Path) -> str:
    """The name of the recipe file for a command line."""
    name = str(out)
    return f"'{name}'" if " " in name else name


def print_findings(made: "Draft", out: Path) -> None:
    """Print what was found, what to look at, and the next command."""
    for name, lines in (("Text", made.text), ("Labels", made.labels)):
        for line in lines:
            say(fitted(f"{name}: {line}"))
    if made.doubts:
        say("\nPlease check:")
        for doubt in made.doubts:
            say(fitted(f"- {doubt}"))
    say(f"\nWrote {out}: recipe {made.recipe}, {made.budget} of training. Next:")
    say(f"    cram run {shown(out)}")


def fitted(text: str) -> str:
    """A text in lines that fit the terminal; elsewhere, in one line."""
    if not console.is_terminal:
        return text
    return textwrap.fill(text, console.width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
