"""The command line: a function for each command, in order of `cram --help`."""

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from flows.cli.artifacts import diff, ls, show
from flows.cli.bench import bench
from flows.cli.common import recipe_names, say, stage_names
from flows.cli.ending import signals_as_sentences
from flows.cli.execution import ServerLost
from flows.cli.export import export, push
from flows.cli.init import init
from flows.cli.pairs import pairs
from flows.cli.predict import fill, predict
from flows.cli.remote import pull, push_artifact
from flows.cli.run import params, run
from flows.cli.server import bypass_proxies
from flows.cli.study import evaluate, study
from flows.cli.upkeep import gc, lineage, pin, verify
from model.environment import print_anything
from model.errors import InputError
from model.wording import printable
from tasks.store.home import STATE

SETTINGS = {  # of Prefect, which reads them when it is imported; a user's own values take precedence
    "PREFECT_LOGGING_EXTRA_LOGGERS": "flows,tasks,model",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    "PREFECT_LOGGING_INTERNAL_LEVEL": "CRITICAL",  # otherwise each event that can't be sent is printed whole
    "PREFECT_CLIENT_MAX_RETRIES": "2",  # each takes up to a minute if the server is lost
    "DO_NOT_TRACK": "1",
}
UNWRITABLE = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
ABOUT = "Pretrain a BERT-class encoder from scratch within a budget, from raw text to GLUE scores."
app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help=ABOUT)
STAGES_IN_ORDER = f"Stages, in order: {', '.join(stage_names())}."
ON_STAGES: tuple[Callable, ...] = (ls, show, diff, params, verify, lineage)
OTHERS: tuple[Callable, ...] = (gc, pin, push_artifact, pull, evaluate, pairs, predict, fill, export, push, bench)

app.command()(init)
app.command(epilog=f"Recipes: {', '.join(recipe_names())}.\n\n{STAGES_IN_ORDER}")(run)
app.command()(study)
for command in ON_STAGES:
    app.command(epilog=STAGES_IN_ORDER)(command)
for command in OTHERS:
    app.command()(command)


def print_versions(wanted: bool) -> None:
    """Print the versions of cram and of the packages that it computes with, then exit."""
    if not wanted:
        return
    from tasks.stage import environment

    about = environment()
    for name, found in about["packages"].items():
        say(f"{name} {found}")
    say(f"commit {about['commit']}")
    raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print versions and exit.", is_eager=True, callback=print_versions)
    ] = False,
) -> None:
    """Options of the program itself; `print_versions` handles the only one."""


@contextmanager
def output_checked() -> Iterator[None]:
    """Raise InputError if standard output can't be written, even if only its last flush fails."""
    if sys.stdout is None:
        raise InputError("Standard output is closed. Redirect it to a file or a pipe, or to /dev/null to discard it.")
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.filename or error.errno not in UNWRITABLE:  # the error isn't about standard output
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the flush at the interpreter's end would fail too
        if isinstance(error, BrokenPipeError):
            sys.exit(1)
        raise InputError(
            f"Standard output can't be written: {error.strerror}. Free some space or redirect the output, then "
            "run again."
        ) from error


@contextmanager
def disks_checked() -> Iterator[None]:
    """Turn errors of a disk that name a file into InputError; one without a name may be about standard output."""
    try:
        yield
    except OSError as error:
        from tasks.store.errors import NO_SCRATCH, disk_errors_as_input_errors

        if not error.filename and NO_SCRATCH not in str(error):
            raise
        with disk_errors_as_input_errors("cram"):
            raise


def main() -> None:
    """Run the command line; a user's errors are printed as one sentence."""
    if sys.flags.optimize > 1:  # that drops docstrings, which transformers reads, and from which help is made
        os.environ["PYTHONOPTIMIZE"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.argv])
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    bypass_proxies()
    os.environ["PREFECT_HOME"] = str(STATE)  # absolute: the worker runs in another directory
    print_anything()
    try:
        with signals_as_sentences(), output_checked(), disks_checked():
            app()
    except InputError as error:
        sentence = escape(printable(error, lines=True))
        Console(stderr=True).print(f"[red]cram:[/] {sentence}", soft_wrap=True, highlight=False)
        if isinstance(error, ServerLost):
            os._exit(1)
        sys.exit(1)


if __name__ == "__main__":
    main()
