"""Start and stop what `prefect deployment run cram/full` needs: server, work pool, deployment, worker."""

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
from urllib.parse import urlsplit

from flows.server import what_answers
from model import InputError
from tasks.home import CODE, IN_CHECKOUT, STATE

SERVER = "http://127.0.0.1:4200/api"  # as in pyproject.toml, which Prefect reads in this directory only
POOL = "local"
PREFECT = (sys.executable, "-m", "prefect")
PATIENCE = 120  # seconds for a service to start on a busy machine
SERVER_PATIENCE = 15  # seconds for the server to end
LISTENING = "0A"  # a state, in /proc/net/tcp
CHECKPOINT_PATIENCE = 120  # seconds for a run to save its checkpoint and end
SUBMITTED = re.compile(r"submitting flow run '([0-9a-f-]{36})'")  # in the worker's log


def server_answers(url: str) -> bool:
    """Whether a Prefect server is there."""
    return what_answers(url) == "prefect"


def running(name: str) -> int | None:
    """The process of a service that we started, if it lives."""
    try:
        pid = int((STATE / f"{name}.pid").read_text())
        return pid if b"prefect" in Path(f"/proc/{pid}/cmdline").read_bytes() else None
    except (OSError, ValueError):
        return None


def log_of(name: str) -> Path:
    """The log of a service."""
    return STATE / f"{name}.log"


def start(name: str, *command: str) -> None:
    """Start a service that outlives this process, and remember it."""
    STATE.mkdir(parents=True, exist_ok=True)
    with log_of(name).open("w") as file:
        process = subprocess.Popen(
            [*PREFECT, *command], cwd=CODE, stdout=file, stderr=file, stdin=subprocess.DEVNULL, start_new_session=True
        )
    (STATE / f"{name}.pid").write_text(str(process.pid))


def await_that(check: Callable[[], bool], name: str) -> None:
    """Wait until a service that we started is ready."""
    deadline, what, log = time.monotonic() + PATIENCE, f"The Prefect {name}", log_of(name)
    while not check():
        if ended(int((STATE / f"{name}.pid").read_text())):
            raise InputError(f"{what} ended while it started. See its log, {log}, then run again.")
        if time.monotonic() > deadline:
            raise InputError(f"{what} did not start within {PATIENCE} s. See its log, {log}, then run again.")
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


def listener(port: int) -> str:
    """The name and number of the process that listens on a port, in brackets after a space; empty if not known."""
    rows = [line.split() for table in ("tcp", "tcp6") for line in lines_of(f"/proc/net/{table}")[1:]]
    sockets = {f"socket:[{row[9]}]" for row in rows if row[3] == LISTENING and row[1].endswith(f":{port:04X}")}
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if os.readlink(link) in sockets:
                process = link.parents[1]
                return f" ({(process / 'comm').read_text().strip()}, process {process.name})"
    return ""


def lines_of(path: str | Path) -> list[str]:
    """The lines of a file; none where it can't be read."""
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def start_server(url: str) -> None:
    """Start a Prefect server at this address of this machine, and wait until it answers."""
    address = urlsplit(url)
    if address.hostname not in ("127.0.0.1", "localhost"):
        raise InputError(
            f"No Prefect server answers at {url} (PREFECT_API_URL). Start it there, or unset PREFECT_API_URL."
        )
    port = address.port or 4200
    setting = f"PREFECT_SERVER_API_PORT={port}"
    if ours := running("server"):  # it may still be starting
        if setting.encode() not in Path(f"/proc/{ours}/environ").read_bytes().split(b"\0"):
            raise InputError(
                f"The server of an earlier `make up` runs on another port (process {ours}). Run `make down`."
            )
    elif is_taken(port):
        raise InputError(
            f"Port {port} is taken by another program{listener(port)}, which does not answer as a Prefect server. "
            "End that program, or choose another port with PREFECT_API_URL: "
            f"PREFECT_API_URL=http://127.0.0.1:{port + 1}/api make up"
        )
    else:
        os.environ.update([setting.split("=")])
        start("server", "server", "start")
    await_that(lambda: server_answers(url), "server")


def settle_runs(url: str, say: Callable[[str], None]) -> None:
    """End the runs of this machine whose process is gone, so that they no longer hold up the next one."""
    from prefect.client.orchestration import SyncPrefectClient

    from flows.flow_runs import end_abandoned

    try:
        with SyncPrefectClient(api=url) as client:
            for line in end_abandoned(client, [] if running("worker") else submitted()):
                say(line)
    except Exception as error:  # must not keep services from being started or ended
        say(f"Runs whose process is gone could not be looked for: {error}")


def submitted() -> list[str]:
    """The ids of the flow runs that our last worker took on."""
    return [found[1] for line in lines_of(log_of("worker")) if (found := SUBMITTED.search(line))]


def installed(name: str) -> str:
    """The path of a program that is installed beside this Python, relative where that is shorter."""
    path = Path(sys.executable).parent / name
    return min(str(path), os.path.relpath(path), key=len)


def up(url: str, say: Callable[[str], None]) -> None:
    """Make `prefect deployment run cram/full` work."""
    if not IN_CHECKOUT:
        raise InputError(
            f"A deployment needs a checkout of cram, and {CODE} has no prefect.yaml. Clone the repository and run `make up` "
            "there. `cram run` needs no deployment."
        )
    os.environ["PREFECT_API_URL"] = url
    if server_answers(url):
        say(f"Server: answers at {url}")
    else:
        start_server(url)
        say(f"Server: started at {url}")
    settle_runs(url, say)
    prefect("work-pool", "create", POOL, "--type", "process", "--overwrite")
    prefect("--no-prompt", "deploy", "--all")
    say("Deployed: cram/full")
    if running("worker"):
        say("Worker: running")
    else:
        start("worker", "worker", "start", "--pool", POOL)
        await_that(lambda: "started!" in log_of("worker").read_text(), "worker")
        say("Worker: started")
    page, where = url.removesuffix("/api"), "" if url == SERVER else f"PREFECT_API_URL={url} "
    say(f"\nNow:  {where}{installed('prefect')} deployment run cram/full -p recipe=demo --watch")
    say(f"See:  {page}\nEnd:  {where}make down")


def ended(pid: int) -> bool:
    """Whether a process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def children(pid: int) -> list[int]:
    """The processes that a process has started and that live."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return [child for child in found if not ended(child)]


def stop(pids: list[int], patience: float) -> None:
    """End processes: asked first, then made to, with all of the groups that they lead."""
    for send, sign, seconds in ((os.kill, signal.SIGTERM, patience), (os.killpg, signal.SIGKILL, 5)):
        for pid in pids:
            if not ended(pid):
                with suppress(ProcessLookupError):
                    send(pid, sign)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not all(map(ended, pids)):
            time.sleep(0.2)


def stop_worker(pid: int, say: Callable[[str], None]) -> None:
    """End the worker, but first its runs: by itself it would kill them before they save a checkpoint."""
    os.kill(pid, signal.SIGSTOP)  # it must not start the next run meanwhile
    try:
        if runs := children(pid):
            say("Worker: waiting for its run to save a checkpoint")
            stop(runs, CHECKPOINT_PATIENCE)
    finally:
        os.killpg(pid, signal.SIGKILL)


def down(say: Callable[[str], None]) -> None:
    """End what `up` started, and nothing else."""
    url = os.environ.get("PREFECT_API_URL") or SERVER
    for name in ("worker", "server"):
        if pid := running(name):
            stop_worker(pid, say) if name == "worker" else stop([pid], SERVER_PATIENCE)
            say(f"{name.capitalize()}: ended")
        else:
            say(f"{name.capitalize()}: none that was started here")
        (STATE / f"{name}.pid").unlink(missing_ok=True)
        if name == "worker" and server_answers(url):
            settle_runs(url, say)
