"""Run a flow from the command line: on the Prefect server that answers, or else in this process without Prefect."""

import gc
import os
import signal
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from flows.cli.common import print_rows, say
from flows.cli.ending import say_stopped
from flows.cli.server import answers
from model.errors import InputError
from model.signals import Stopped

if TYPE_CHECKING:
    from prefect import Flow

WOULD_RUN = 3  # exit status of a plan by which something would run


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
    with temporary_settings({PREFECT_API_URL: server} if server else {}):
        try:
            if server is None:
                return flow.fn(**parameters)
            return flow(**parameters)
        except (KeyboardInterrupt, Stopped) as end:
            stop = end if isinstance(end, Stopped) else Stopped(signal.SIGINT)
            say_stopped(stop, "Run the same command to resume; finished stages are kept.")
            if server and not answers(server):
                os._exit(stop.status)  # at the interpreter's end, Prefect would wait for the server
            raise stop from None
        except ParameterTypeError as error:  # of a flow run, which validates parameters before the flow begins
            raise InputError(str(error)) from error
        except Exception as error:
            if server and package_of(error) in ("httpx", "prefect") and not answers(server):
                raise ServerLost(
                    f"The connection to the Prefect server at {server} was lost during this run "
                    f"({type(error).__name__}). Finished stages are kept: run the same command again, with or without "
                    "a server."
                ) from error
            raise


def print_plan(kind: Literal["run", "study"], **asked: Any) -> NoReturn:
    """Print what a run or a study would do, then exit. Raises the error that would stop it before it starts."""
    from flows import forecast
    from flows.logs import log_to_terminal
    from tasks.store import home
    from tasks.store.errors import disk_errors_as_input_errors

    log_to_terminal()
    with home.read_only(), disk_errors_as_input_errors("The plan"):
        forecast_of = forecast.of_run if kind == "run" else forecast.of_study
        found = forecast_of(**asked)
        sentences = found.sentences()
    print_rows([row.cells() for row in found.rows])
    for sentence in sentences:
        say(sentence)
    gc.freeze()  # no collection at the interpreter's end either, which would take 0.4 s
    if found.refusal:
        raise found.refusal
    raise typer.Exit(WOULD_RUN if found.would_run() else 0)
