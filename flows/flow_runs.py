"""The flow runs of a Prefect server: their names and tags, and which of them have lost their process.

A flow run locks a file of its own for as long as its process lives. The kernel frees the lock however the process ends,
so a free lock means that the process is gone, even if another one has its number. Runs of other machines have no file
here.
"""

import fcntl
import logging
import os
import signal
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

from flows.server import reports_bounded, when_untaken
from tasks.home import STATE

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun, State

LOCKS = STATE / "runs"
UNFINISHED = ("PENDING", "RUNNING", "CANCELLING")  # scheduled runs have no process yet
MOST_RUNS = 200  # in an answer of the server
SECONDS_BETWEEN_LOOKS = 5  # at the state of a deployed run
GONE = (
    "The process of this run is gone: it was killed, or the machine stopped. Start the run again with the same "
    "parameters; it continues from its last checkpoint."
)
CANCELLED = "The run was being cancelled, and its process is gone."
UNREPORTED = "The run ended while the server did not answer."
_held: list[IO] = []  # locked until this process ends
log = logging.getLogger(__name__)


def register() -> str:
    """Lock the file of the current flow run, tag the run, and return its name, which begins with its recipe's.

    Prefect calls this once, right before the run begins.
    """
    from prefect.context import FlowRunContext, SyncClientContext

    from tasks.workers.progress import reporter

    context = FlowRunContext.get()
    run, until = context.flow_run, context.parameters["until"]
    recipe = Path(context.parameters.get("study") or context.parameters["recipe"]).stem  # or the name of the study
    try:
        LOCKS.mkdir(parents=True, exist_ok=True)
        file = LOCKS.with_name(f"run-{run.id}").open("w")
        fcntl.lockf(file, fcntl.LOCK_EX)  # unlike flock's, not shared by forked processes
        Path(file.name).rename(LOCKS / str(run.id))  # so it is never there unlocked while the process lives
        _held.append(file)
        when_untaken.append(remember)
    except OSError as error:
        log.warning("The process of this run could not be recorded: %s", error)
    if run.deployment_id:  # `cram run` limits its reports itself
        for observer in ("Cancelling", "Suspending"):  # each prints a traceback when the server is gone
            logging.getLogger(f"prefect.FlowRun{observer}Observer").setLevel(logging.CRITICAL)
        stack = ExitStack()
        stack.enter_context(reports_bounded(lambda: False))
        threading._register_atexit(stack.close)  # before Prefect's own waits, which are unlimited
        stop_when_suspended(run)
    tags = {*run.tags, recipe, f"until {until}"}
    reporter.send("tags", lambda: SyncClientContext.get().client.update_flow_run(run.id, tags=tags))
    return run.name if run.name.startswith(f"{recipe}-") else f"{recipe}-{run.name}"


def stop_when_suspended(run: "FlowRun") -> None:
    """Have this process end as it does at SIGTERM, with a checkpoint, once its run is suspended.

    Prefect would let the stage train on to its end, though its server counts the run no more and may start the next
    one. The run stays suspended; when it is resumed, it continues from the checkpoint.
    """
    from prefect.client.orchestration import get_client
    from prefect.exceptions import Pause

    suspended, before = [], signal.getsignal(signal.SIGTERM)

    def stop(*received: object) -> None:
        if suspended:
            raise Pause(state=suspended[0])
        before(*received)

    def watch() -> None:
        with get_client(sync_client=True) as client:
            while not suspended:
                time.sleep(SECONDS_BETWEEN_LOOKS)
                with suppress(Exception):  # the server may be away
                    state = client.read_flow_run(run.id).state
                    suspended.extend([state] if state.is_paused() else [])
        if callable(signal.getsignal(signal.SIGTERM)):  # the flow has not ended meanwhile
            os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)
    threading.Thread(target=watch, daemon=True).start()


def remember(state: "State") -> None:
    """Write a final state that the server did not accept into the file of the run, for `end_abandoned`."""
    for file in _held:
        file.write(state.type.value)
        file.flush()


def is_free(path: Path) -> bool:
    """Whether no process holds the lock of this file."""
    with path.open("r+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def is_begun(run: "FlowRun") -> bool:
    """Whether the worker's process for this run lives, though it has not locked the run's file yet."""
    with suppress(OSError):
        return str(run.id).encode() in Path(f"/proc/{run.infrastructure_pid}/environ").read_bytes()
    return False


def abandoned(client: "SyncPrefectClient", submitted: list[str]) -> "list[FlowRun]":
    """The unfinished runs of this machine whose process is gone. Deletes the lock files of finished runs.

    `submitted`: ids of the runs that the last worker of this machine started, if it is gone.
    """
    from prefect.client.schemas.filters import FlowRunFilter

    is_free_by_id = {path.name: is_free(path) for path in LOCKS.glob("*")}
    free, lost = {name for name, freed in is_free_by_id.items() if freed}, []
    ids = sorted(free | {*submitted} - {*is_free_by_id})
    for start in range(0, len(ids), MOST_RUNS):
        chosen = FlowRunFilter(id={"any_": ids[start : start + MOST_RUNS]})
        for run in client.read_flow_runs(flow_run_filter=chosen):
            if run.state.is_final():
                (LOCKS / str(run.id)).unlink(missing_ok=True)
            elif run.state.type.value in UNFINISHED and (str(run.id) in free or not is_begun(run)):
                lost.append(run)
    return lost


def last_state(run: "FlowRun") -> "State":
    """The final state of a run whose process is gone: the one in its file, or else crashed or cancelled."""
    from prefect.states import Cancelled, Completed, Crashed, Failed

    with suppress(OSError, KeyError):
        kinds = {"COMPLETED": Completed, "FAILED": Failed, "CRASHED": Crashed, "CANCELLED": Cancelled}
        return kinds[(LOCKS / str(run.id)).read_text()](message=UNREPORTED)
    return Cancelled(message=CANCELLED) if run.state.is_cancelling() else Crashed(message=GONE)


def end_abandoned(client: "SyncPrefectClient", submitted: list[str]) -> list[str]:
    """Set the final state of runs whose process is gone, which frees the pool's slot; returns a line for each.

    `submitted`: as for `abandoned`.
    """
    lines = []
    for run in abandoned(client, submitted):
        state = last_state(run)
        client.set_flow_run_state(run.id, state, force=True)
        (LOCKS / str(run.id)).unlink(missing_ok=True)
        how = "ended while the server was away" if state.message == UNREPORTED else "its process is gone"
        lines.append(f"Run {run.name}: {how}; marked as {state.name.lower()}")
    return lines
