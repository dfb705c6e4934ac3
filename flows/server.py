"""The Prefect server of a run: the one that answers, or else a temporary one, which ends even with a killed run."""

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

START_SECONDS = 600  # limit for the start of the temporary server, which takes minutes on a busy machine
STOP_SECONDS = 5  # limit for its end, once its run is over
STATE_SECONDS = 10  # limit for sending the final state of a run
LATE_SECONDS = 2  # the same if the server did not answer before
DRAIN_SECONDS = 10  # limit for sending the remaining logs and events of a run
POLL_SECONDS = 0.1
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # a terminal or service sends them to all of its processes
TEMPORARY = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}
DEFAULTS = {  # the user's own settings come first
    "PREFECT_SERVER_LOGGING_LEVEL": "CRITICAL",  # else it logs that it is being stopped
    "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": "",  # as in pyproject.toml, which Prefect reads in the checkout only
    "PREFECT_SERVER_CSRF_PROTECTION_ENABLED": "1",
}
when_untaken: list[Callable[["State"], None]] = []  # called with a final state that the server did not accept
log = logging.getLogger(__name__)


class Stopped(SystemExit):
    """A signal asked the run to end."""


def what_answers(url: str) -> str:
    """What answers at the address of a Prefect API: `prefect`, `nothing`, or a description of another answer."""
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

    It ignores the signals that end a run, and ends when its standard input is closed, which the kernel does when the
    run's process is gone. So it receives the last reports of a stopped run, and never outlives a killed one. Prefect's
    own ephemeral server ends at the terminal's Ctrl-C, before its run does, and outlives a killed run.
    """

    def __init__(self) -> None:
        from prefect.settings import PREFECT_HOME, get_current_settings

        try:
            PREFECT_HOME.value().mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"The directory {PREFECT_HOME.value()} (PREFECT_HOME) can't be created: {error.strerror}. Set "
                "PREFECT_HOME to a directory that you can write."
            ) from error
        path = os.pathsep.join(filter(None, (str(CODE), os.environ.get("PYTHONPATH"))))
        settings = get_current_settings().to_environment_variables(exclude_unset=True)
        own = TEMPORARY | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
        with socket.create_server(("127.0.0.1", 0)) as listening:
            self.url = f"http://127.0.0.1:{listening.getsockname()[1]}/api"
            before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)  # inherited by the server
            try:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "flows.server", str(listening.fileno())],
                    env=DEFAULTS | os.environ | settings | own,
                    stdin=subprocess.PIPE,
                    pass_fds=[listening.fileno()],
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def wait(self) -> None:
        """Wait until it answers. Raises InputError if it ends, or does not answer in time."""
        deadline = time.monotonic() + START_SECONDS
        while what_answers(self.url) != "prefect":
            if self.has_ended() or time.monotonic() > deadline:
                problem = "ended" if self.has_ended() else "did not answer"
                raise InputError(
                    f"The temporary Prefect server {problem} within {START_SECONDS} s of its start. Use a running "
                    "server (set PREFECT_API_URL), or set PREFECT_HOME to an empty directory; then run again."
                )
            time.sleep(POLL_SECONDS)

    def has_ended(self) -> bool:
        """Whether its process is gone."""
        return self.process.poll() is not None

    def stop(self, patience: float = STOP_SECONDS) -> None:
        """End it; kill it if that takes longer than `patience` seconds."""
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
        os.read(0, 1)  # returns at the end of the input; nothing is ever sent
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
def prefect_server(default: str) -> Iterator[None]:
    """Have Prefect use the running server, or else a temporary one, for as long as a run takes.

    `default`: the server's address if PREFECT_API_URL is not set. Raises InputError if another program answers there.
    """
    url = find_server(default)
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from tasks.workers.progress import reporter

    server = None
    with signals_as_exceptions():
        try:
            if url is None:
                log.info("No Prefect server answers; starting a temporary one.")
                server = Server()
                server.wait()
            has_ended = server.has_ended if server else lambda: False
            with temporary_settings({PREFECT_API_URL: server.url if server else url}), reports_bounded(has_ended):
                yield
        except (KeyboardInterrupt, Stopped) as stop:
            say_stopped(stop)
            raise
        finally:
            if server:
                server.stop(STOP_SECONDS if reporter.answers else 0)


def find_server(default: str) -> str | None:
    """The address of the running Prefect server: PREFECT_API_URL, or else `default`; None if nothing answers there."""
    given = os.environ.get("PREFECT_API_URL")
    answer = what_answers(given or default)
    if given and answer not in ("prefect", "nothing"):
        raise InputError(
            f"PREFECT_API_URL is {given}, but what answers there is not a Prefect server: {answer}. Set it to the "
            "address of a Prefect server's API, such as http://127.0.0.1:4200/api, or unset it."
        )
    return (given or default) if answer == "prefect" else None


@contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """Raise Stopped on SIGTERM and SIGHUP, whose usual handling would leave checkpoints unwritten."""

    def stop(number: int, frame: object) -> NoReturn:
        raise Stopped(128 + number)

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        for number, handler in handlers.items():
            if handler is not signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, stop)
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def say_stopped(stop: KeyboardInterrupt | Stopped) -> None:
    """Print what has stopped the run, and how to resume it."""
    # The rest is short, and another interrupt would only change the exit code.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    cause = signal.Signals(stop.code - 128).name if isinstance(stop, Stopped) else "Ctrl-C"
    with suppress(OSError):  # the terminal may be gone
        print(f"cram: Stopped by {cause}. Run the same command to resume; finished stages are kept.", file=sys.stderr)


@contextmanager
def reports_bounded(has_ended: Callable[[], bool]) -> Iterator[None]:
    """Limit the time that Prefect waits for its server at the end of a run; it has no setting for that.

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
            for call in when_untaken:
                call(state)
            log.warning("Prefect's server did not accept the final state, %s; this run's page is outdated.", state.name)
            return state  # as if accepted: no result depends on it
        reporter.answers = True
        return answer.result()

    flow_engine.propose_state_sync = propose_in_time
    set_api_log_sink(reporter.send_log)
    # the reporter logs once that the server does not answer
    logging.getLogger("prefect.events.clients").setLevel(logging.ERROR)
    try:
        yield
    finally:
        flow_engine.propose_state_sync = propose
        set_api_log_sink(None)
        drain(DRAIN_SECONDS if reporter.answers and not has_ended() else 0)


def answer_in_time(call: Callable[[], Any], has_ended: Callable[[], bool], seconds: float) -> Future | None:
    """The future of call() in a thread of its own; None if there is no answer in time, or the server refused it."""
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
    refused = httpx.HTTPError | PrefectException  # such as for a run that was deleted
    return None if not answer.done() or isinstance(answer.exception(), refused) else answer


def drain(seconds: float) -> None:
    """Send the remaining logs and events to the server, within this time."""
    from prefect.events.worker import EventsWorker

    from tasks.workers.progress import reporter

    services = tuple(EventsWorker._instances.values())  # of all clients
    try:
        if reporter.flush(seconds):
            EventsWorker.drain_all(timeout=seconds)
    finally:
        for service in services:  # else Prefect waits for them again, without limit, when the interpreter ends
            service._loop.call_soon_threadsafe(service._done_event.set)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
