"""Run a flow from the command line: on the Prefect server that answers, or else in this process without Prefect."""

import gc
import os
import signal
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from flows.cli.common import GAP, console, print_table, say
from flows.cli.ending import say_stopped
from flows.cli.server import answers
from model.errors import InputError
from model.signals import Stopped

if TYPE_CHECKING:
    from prefect import Flow

    from flows.forecast import Forecast

WOULD_RUN = 3  # exit status of a plan by which something would run
SHORTEST_TITLE = 20  # columns for a stage's title


def in_a_hurry(plan: bool) -> bool:
    """For a plan, turn garbage collection off: it would take a fifth of the time of a process that ends so soon."""
    if plan:
        gc.disable()
    return plan


Planned = Annotated[
    bool,
    typer.Option(
        "--plan",
        callback=in_a_hurry,
        help="Run nothing: print what is cached, and about how much time and disk the rest would take. Exit status: 0 "
        "if everything is cached, 3 if something would run.",
    ),
]


class ServerLost(InputError):
    """The Prefect server no longer answers. At the interpreter's end, Prefect would wait for it for minutes."""


def execute(flow: "Flow", server: str | None, **parameters: Any) -> Any:
    """Run a flow on this server, or without a server as a plain function in this process. Returns its result."""
    from prefect.exceptions import ParameterTypeError
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from flows.logs import log_to_terminal, package_of

    log_to_terminal()
    same = "the same command"
    if parameters.get("refresh"):  # which would discard the draft, and what is finished
        same += " without --refresh"
    with temporary_settings({PREFECT_API_URL: server} if server else {}):
        try:
            if server is None:
                return flow.fn(**parameters)
            return flow(**parameters)
        except (KeyboardInterrupt, Stopped) as end:
            stop = end if isinstance(end, Stopped) else Stopped(signal.SIGINT)
            say_stopped(stop, f"Run {same} to resume; finished stages are kept.")
            if server and not answers(server):
                os._exit(stop.status)  # at the interpreter's end, Prefect would wait for the server
            raise stop from None
        except ParameterTypeError as error:  # of a flow run, which validates parameters before the flow begins
            raise InputError(str(error)) from error
        except Exception as error:
            if server and package_of(error) in ("httpx", "prefect") and not answers(server):
                raise ServerLost(
                    f"The connection to the Prefect server at {server} was lost during this run "
                    f"({type(error).__name__}). Finished stages are kept: run {same} again, with or without a server."
                ) from error
            raise


def find_forecast(kind: Literal["run", "study"], asked: dict[str, Any]) -> "Forecast":
    """What a run or a study would do."""
    if kind == "run":
        from flows.cram import forecast_run

        return forecast_run(**asked)
    from flows.study import forecast_study  # here, as a flow takes 0.1 s to define

    return forecast_study(**asked)


def print_forecast(rows: list[dict[str, str]]) -> None:
    """Print a line for each stage. In a narrow terminal, keys are left out and long titles shortened."""
    from rich.cells import cell_len
    from rich.table import Column

    from tasks.workers.progress import shortened

    widths: dict[str, int] = {}
    for name in rows[0]:
        widest = max(cell_len(row[name]) for row in rows)
        if widest:
            widths[name] = max(widest, len(name)) + GAP
    is_narrow = sum(widths.values()) > console.width
    if is_narrow:
        widths.pop("key", None)
    title, *others = widths
    room = max(SHORTEST_TITLE, console.width - GAP - sum(widths[name] for name in others))
    lines = [[shortened(row[title], room), *(row[name] for name in others)] for row in rows]
    print_table([Column(name, no_wrap=True) for name in widths], lines)
    if is_narrow:
        say("Keys are shown in a wider terminal.")


def print_plan(kind: Literal["run", "study"], **asked: Any) -> NoReturn:
    """Print what a run or a study would do, then exit. Raises the error that would stop it before it starts."""
    from flows.logs import log_to_terminal
    from tasks.store import home
    from tasks.store.errors import disk_errors_as_input_errors

    log_to_terminal()
    with home.read_only(), disk_errors_as_input_errors("The plan"):
        found = find_forecast(kind, asked)
        sentences = found.sentences()
    print_forecast([row.cells() for row in found.rows])
    for sentence in sentences:
        say(sentence)
    gc.freeze()  # no collection at the interpreter's end either, which would take 0.4 s
    if found.refusal:
        raise found.refusal
    raise typer.Exit(WOULD_RUN if found.would_run() else 0)
