"""Start and stop what `prefect deployment run cram/full` needs: server, work pool, deployment, worker.

`prefect server start --background` would start the server too, but it keeps no log, and it refuses to start after the
machine went down with its server.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from flows.server import what_answers
from model import InputError
from tasks.home import CODE, IN_CHECKOUT, STATE

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

SERVER = "http://127.0.0.1:4200/api"  # as in pyproject.toml, which Prefect reads in this directory only
POOL = "local"
RUNS = 1  # at a time, of both deployments: one GPU. A limit of a deployment would end a run that loses its server
PREFECT = (sys.executable, "-m", "prefect")
START_SECONDS = 600  # limit for a service to start, which takes minutes on a busy machine
SERVER_SECONDS = 15  # limit for the server to end
CHECKPOINT_SECONDS = 120  # limit for a run to save its checkpoint and end
SUBMITTED = re.compile(r"submitting flow run '([0-9a-f-]{36})'")  # in the worker's log


def server_answers(url: str) -> bool:
    """Whether a Prefect server answers at this address."""
    return what_answers(url) == "prefect"


def running(name: str) -> int | None:
    """The process of a service that `up` started, if it lives."""
    try:
        pid = int((STATE / f"{name}.pid").read_text())
        return pid if b"prefect" in Path(f"/proc/{pid}/cmdline").read_bytes() else None
    except (OSError, ValueError):
        return None


def log_of(name: str) -> Path:
    """The log of a service."""
    return STATE / f"{name}.log"


def start(name: str, *command: str) -> None:
    """Start a service that outlives this process, and record its process."""
    STATE.mkdir(parents=True, exist_ok=True)
    with log_of(name).open("w") as file:
        process = subprocess.Popen(
            [*PREFECT, *command], cwd=CODE, stdout=file, stderr=file, stdin=subprocess.DEVNULL, start_new_session=True
        )
    (STATE / f"{name}.pid").write_text(str(process.pid))


def wait_until(ready: Callable[[], bool], name: str) -> None:
    """Wait until a service that was just started is ready. Raises InputError if it ends, or takes too long."""
    deadline, process = time.monotonic() + START_SECONDS, int((STATE / f"{name}.pid").read_text())
    while not ready():
        if has_ended(process) or time.monotonic() > deadline:
            problem = "ended while it started" if has_ended(process) else f"did not start within {START_SECONDS} s"
            raise InputError(f"The Prefect {name} {problem}. See its log, {log_of(name)}, then run again.")
        time.sleep(0.5)


def prefect(*command: str) -> None:
    """Run a Prefect command to its end."""
    done = subprocess.run([*PREFECT, *command], cwd=CODE, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise InputError(f"prefect {' '.join(command)} failed:\n{(done.stdout + done.stderr).strip()}")


def is_taken(port: int) -> bool:
    """Whether a program listens on this port of this machine."""
    with socket.socket() as probe:
        probe.settimeout(3)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def start_server(url: str) -> None:
    """Start a Prefect server at this address of this machine, and wait until it answers."""
    address = urlsplit(url)
    if address.hostname not in ("127.0.0.1", "localhost"):
        raise InputError(
            f"No Prefect server answers at {url} (PREFECT_API_URL). Start it there, or unset PREFECT_API_URL."
        )
    port = address.port or 4200
    setting = f"PREFECT_SERVER_API_PORT={port}"
    if process := running("server"):  # it may still be starting
        if setting.encode() not in Path(f"/proc/{process}/environ").read_bytes().split(b"\0"):
            raise InputError(
                f"The server of an earlier `make up` runs on another port (process {process}). Run `make down`."
            )
    elif is_taken(port):
        raise InputError(
            f"Port {port} is taken by another program, which does not answer as a Prefect server. End that program, or "
            f"choose another port with PREFECT_API_URL: PREFECT_API_URL=http://127.0.0.1:{port + 1}/api make up"
        )
    else:
        os.environ.update([setting.split("=")])
        start("server", "server", "start")
    wait_until(lambda: server_answers(url), "server")


def client_of(url: str) -> "SyncPrefectClient":
    """A client of the server at this address, with the user's settings, such as a password."""
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with temporary_settings({PREFECT_API_URL: url}):
        return get_client(sync_client=True)


def settle_runs(url: str, say: Callable[[str], None]) -> None:
    """Mark the runs of this machine whose process is gone as ended, so that they no longer block the next run."""
    from flows.flow_runs import end_abandoned

    try:
        with client_of(url) as client:
            for line in end_abandoned(client, [] if running("worker") else submitted()):
                say(line)
    except Exception as error:  # services start and end all the same
        say(f"Could not look for runs whose process is gone: {error}")


def create_pool(url: str) -> None:
    """Create the work pool, unless it is there, and set its limit, which also counts runs of a lost worker."""
    from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
    from prefect.exceptions import ObjectAlreadyExists

    with client_of(url) as client:
        try:
            client.create_work_pool(WorkPoolCreate(name=POOL, type="process", concurrency_limit=RUNS))
        except ObjectAlreadyExists:
            client.update_work_pool(POOL, WorkPoolUpdate(concurrency_limit=RUNS))


def submitted() -> list[str]:
    """The ids of the flow runs that the last worker of `up` started."""
    log = log_of("worker")
    return SUBMITTED.findall(log.read_text()) if log.exists() else []


def installed(name: str) -> str:
    """The path of a program that is installed with this Python; the relative one if it is shorter."""
    path = Path(sys.executable).parent / name
    return min(str(path), os.path.relpath(path), key=len)


def up(url: str, say: Callable[[str], None]) -> None:
    """Make `prefect deployment run cram/full` work."""
    if not IN_CHECKOUT:
        raise InputError(
            f"A deployment needs a checkout of cram, and {CODE} has no prefect.yaml. Clone the repository and run "
            "`make up` there. `cram run` needs no deployment."
        )
    os.environ["PREFECT_API_URL"] = url
    if server_answers(url):
        say(f"Server: answers at {url}")
    else:
        start_server(url)
        say(f"Server: started at {url}")
    settle_runs(url, say)
    create_pool(url)
    prefect("--no-prompt", "deploy", "--all")
    say("Deployed: cram/full, cram/study")
    if running("worker"):
        say("Worker: running")
    else:
        start("worker", "worker", "start", "--pool", POOL, "--limit", str(RUNS))
        wait_until(lambda: "started!" in log_of("worker").read_text(), "worker")
        say("Worker: started")
    page, where = url.removesuffix("/api"), "" if url == SERVER else f"PREFECT_API_URL={url} "
    say(f"\nNow:  {where}{installed('prefect')} deployment run cram/full -p recipe=demo --watch")
    say(f"See:  {page}\nStop: {where}make down")


def has_ended(pid: int) -> bool:
    """Whether a process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def children(pid: int) -> list[int]:
    """The processes that a process has started and that live."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):  # not every kernel has /proc/PID/task/*/children
        with suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return [child for child in found if not has_ended(child)]


def stop(pids: list[int], seconds: float) -> None:
    """End processes; after this time kill those that are left, with the groups that they lead."""
    for send, sign, limit in ((os.kill, signal.SIGTERM, seconds), (os.killpg, signal.SIGKILL, 5)):
        for pid in pids:
            if not has_ended(pid):
                with suppress(ProcessLookupError):
                    send(pid, sign)
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline and not all(map(has_ended, pids)):
            time.sleep(0.2)


def stop_worker(pid: int, say: Callable[[str], None]) -> None:
    """End the worker after its runs, which it would kill before they save a checkpoint."""
    os.kill(pid, signal.SIGSTOP)  # so that it does not start the next run
    try:
        if runs := children(pid):
            say("Worker: waiting for its run to save a checkpoint")
            stop(runs, CHECKPOINT_SECONDS)
    finally:
        os.killpg(pid, signal.SIGKILL)


def down(say: Callable[[str], None]) -> None:
    """Stop what `up` started, and nothing else."""
    url = os.environ.get("PREFECT_API_URL") or SERVER
    for name in ("worker", "server"):
        if pid := running(name):
            stop_worker(pid, say) if name == "worker" else stop([pid], SERVER_SECONDS)
            say(f"{name.capitalize()}: stopped")
        else:
            say(f"{name.capitalize()}: none that `up` started is running")
        (STATE / f"{name}.pid").unlink(missing_ok=True)
        if name == "worker" and server_answers(url):
            settle_runs(url, say)
