"""The Prefect server of a run: one that answers, or else a temporary one that ends with the run, however the run ends."""

import http.client
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, NoReturn

from model import InputError
from tasks.home import CODE

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State

START_SECONDS = 120  # for the temporary server to start on a busy machine
STOP_SECONDS = 5  # for it to end once its run is over
STATE_SECONDS = 10  # for a server to take the final state of a run
LATE_SECONDS = 2  # for one that did not answer the reports before it
DRAIN_SECONDS = 10  # for it to take, at the end of a run, events that have not reached it yet
POLL_SECONDS = 0.1
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # sent to all processes of a terminal or service
TEMPORARY = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}
QUIET = {"PREFECT_SERVER_LOGGING_LEVEL": "CRITICAL"}  # it complains of being stopped
untaken: list[Callable[["State"], None]] = []  # called with a final state that the server did not take
log = logging.getLogger(__name__)


class Stopped(SystemExit):
    """A signal asked the run to end."""


def what_answers(url: str) -> str:
    """What answers at this address of a Prefect API: `prefect`, `nothing`, or what another program says."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=3) as answer:
            body = answer.read(20)
        return "prefect" if body == b"true" else f"GET /health returned {body!r}"
    except urllib.error.HTTPError as error:
        return f"GET /health returned status {error.code}"
    except http.client.HTTPException as error:
        return f"GET /health returned no HTTP ({type(error).__name__})"
    except (OSError, ValueError):
        return "nothing"


class Server:
    """A temporary Prefect server in a process of its own, on a free port.

    Signals that end a run do not reach it: it ends when its standard input is closed, which the kernel does if nobody else
    can, and so it takes the last reports of a run that is stopped and never outlives one that is killed.
    """

    def __init__(self) -> None:
        from prefect.settings import PREFECT_HOME, get_current_settings

        try:
            PREFECT_HOME.value().mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"The directory {PREFECT_HOME.value()} (PREFECT_HOME) can't be created: {error.strerror}. Set PREFECT_HOME "
                "to a directory that you can write."
            ) from error
        searched = os.pathsep.join(filter(None, (str(CODE), os.environ.get("PYTHONPATH"))))
        settings = get_current_settings().to_environment_variables(exclude_unset=True)
        own = TEMPORARY | {"PYTHONPATH": searched, "PYTHONSAFEPATH": "1"}
        with socket.create_server(("127.0.0.1", 0)) as listening:
            self.url = f"http://127.0.0.1:{listening.getsockname()[1]}/api"
            before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)  # the server inherits this
            try:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "flows.server", str(listening.fileno())],
                    env=QUIET | os.environ | settings | own,
                    stdin=subprocess.PIPE,
                    pass_fds=[listening.fileno()],
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def wait(self) -> None:
        """Wait until it answers."""
        deadline = time.monotonic() + START_SECONDS
        while what_answers(self.url) != "prefect":
            if self.has_ended() or time.monotonic() > deadline:
                raise InputError(
                    f"This run's own Prefect server {'ended' if self.has_ended() else 'did not answer'} within "
                    f"{START_SECONDS} s of its start. Use a running server (set PREFECT_API_URL), or set PREFECT_HOME to "
                    "an empty directory; then run again."
                )
            time.sleep(POLL_SECONDS)

    def has_ended(self) -> bool:
        """Whether its process is gone."""
        return self.process.poll() is not None

    def stop(self, patience: float = STOP_SECONDS) -> None:
        """End it: asked first, then made to."""
        self.process.stdin.close()
        try:
            self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def serve(listening: int) -> None:
    """Serve Prefect's API on this socket until standard input is closed."""
    server = None

    def watch() -> None:
        os.read(0, 1)  # nothing is ever sent
        if server:
            server.should_exit = True
            time.sleep(STOP_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    import uvicorn

    config = uvicorn.Config(
        "prefect.server.api.server:create_app",
        factory=True,
        lifespan="on",
        log_level="error",
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    server.run(sockets=[socket.socket(fileno=listening)])


@contextmanager
def prefect_server(default: str, say: Callable[[str], None]) -> Iterator[None]:
    """Have Prefect use the running server, or else a temporary one, for as long as a run takes.

    `default`: the address where one is looked for if PREFECT_API_URL is not set.
    """
    asked = os.environ.get("PREFECT_API_URL")
    found = what_answers(url := asked or default)
    if asked and found not in ("prefect", "nothing"):
        raise InputError(
            f"PREFECT_API_URL is {asked}, but what answers there is not a Prefect server: {found}. Set it to the address "
            "of a Prefect server's API, such as http://127.0.0.1:4200/api, or unset it."
        )
    from tasks.workers.progress import reporter

    server = None
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        for number, handler in handlers.items():
            if handler is not signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, leave)  # unhandled, they would leave checkpoints unwritten
        if found != "prefect":
            say(f"No Prefect server answers at {url}; this run uses one of its own.")
            server = Server()
            server.wait()
        from prefect.settings import PREFECT_API_URL, temporary_settings

        with (
            temporary_settings({PREFECT_API_URL: server.url if server else url}),
            reports_bounded(server.has_ended if server else lambda: False),
        ):
            yield
    except (KeyboardInterrupt, Stopped) as stop:
        # what is left is short; another interrupt would only change the exit code
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        cause = signal.Signals(stop.code - 128).name if isinstance(stop, Stopped) else "Ctrl-C"
        with suppress(OSError):  # the terminal may be gone
            print(
                f"cram: Stopped by {cause}. Run the same command to continue; finished stages are kept.",
                file=sys.stderr,
            )
        raise
    finally:
        if server:
            server.stop(STOP_SECONDS if reporter.answers else 0)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def leave(number: int, frame: object) -> NoReturn:
    """End as this signal would, but by way of what has to be closed."""
    raise Stopped(128 + number)


@contextmanager
def reports_bounded(has_ended: Callable[[], bool]) -> Iterator[None]:
    """Have Prefect wait for its server at the end of a run no longer than a bounded time.

    `has_ended`: whether the server is gone for good.
    """
    from prefect import flow_engine
    from prefect.logging.handlers import set_api_log_sink

    from tasks.workers.progress import reporter

    propose = flow_engine.propose_state_sync

    def propose_in_time(client: object, state: "State", *args: Any, **kwargs: Any) -> "State":
        if not state.is_final():
            return propose(client, state, *args, **kwargs)
        seconds = STATE_SECONDS if reporter.answers else LATE_SECONDS
        reporter.answers = False  # should the wait be interrupted
        answer = answer_in_time(lambda: propose(client, state, *args, **kwargs), has_ended, seconds)
        if answer is None:
            for keep in untaken:
                keep(state)
            log.warning(
                "Prefect's server did not take the final state of this run, %s. Its page does not show it.", state.name
            )
            return state  # as if accepted: no result depends on it
        reporter.answers = True
        return answer.result()

    flow_engine.propose_state_sync = propose_in_time
    set_api_log_sink(reporter.send_log)
    # that the server is away is said once, by the reporter
    logging.getLogger("prefect.events.clients").setLevel(logging.ERROR)
    try:
        yield
    finally:
        flow_engine.propose_state_sync = propose
        set_api_log_sink(None)
        drain(DRAIN_SECONDS if reporter.answers and not has_ended() else 0)


def answer_in_time(call: Callable[[], Any], has_ended: Callable[[], bool], seconds: float) -> Future | None:
    """What call() returns or raises, from a thread of its own; None if there is no answer in time."""
    import httpx
    from prefect.exceptions import PrefectException

    answer = Future()

    def work() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=copy_context().run, args=(work,), daemon=True).start()
    deadline = time.monotonic() + seconds
    while not answer.done() and not has_ended() and time.monotonic() < deadline:
        wait([answer], POLL_SECONDS)
    if not answer.done() or isinstance(
        answer.exception(), httpx.HTTPError | PrefectException
    ):  # or the run was deleted
        return None
    return answer


def drain(seconds: float) -> None:
    """Send the server what is left of logs and events, if it takes them in time."""
    from prefect.events.worker import EventsWorker

    from tasks.workers.progress import reporter

    services = tuple(EventsWorker._instances.values())  # of all kinds
    try:
        if reporter.flush(seconds):
            EventsWorker.drain_all(timeout=seconds)
    finally:
        for service in services:  # Prefect would wait for them again, without limit, when the interpreter ends
            service._loop.call_soon_threadsafe(service._done_event.set)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
