"""Start and stop what `prefect deployment run cram/full` needs: server, work pool, deployment, worker."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from model import InputError

HOME = Path(__file__).resolve().parents[1]
SERVER = "http://127.0.0.1:4200/api"  # as in pyproject.toml, which Prefect reads in this directory only
STATE = Path(os.environ.get("PREFECT_HOME") or HOME / ".prefect")
POOL = "local"
PREFECT = (sys.executable, "-m", "prefect")
PATIENCE = 120  # seconds for a service to start on a busy machine


def server_answers(url: str) -> bool:
    """Whether a Prefect server is there."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=3) as answer:
            return answer.status == 200
    except (OSError, ValueError):
        return False


def running(name: str) -> int | None:
    """The process of a service that we started, if it lives."""
    try:
        pid = int((STATE / f"{name}.pid").read_text())
        return pid if b"prefect" in Path(f"/proc/{pid}/cmdline").read_bytes() else None
    except (OSError, ValueError):
        return None


def start(name: str, *command: str) -> Path:
    """Start a service that outlives this process, and remember it; returns its log."""
    STATE.mkdir(parents=True, exist_ok=True)
    log = STATE / f"{name}.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [*PREFECT, *command], cwd=HOME, stdout=file, stderr=file, stdin=subprocess.DEVNULL, start_new_session=True
        )
    (STATE / f"{name}.pid").write_text(str(process.pid))
    return log


def await_that(check: Callable[[], bool], what: str, log: Path) -> None:
    """Wait until a service is ready."""
    deadline = time.monotonic() + PATIENCE
    while not check():
        if time.monotonic() > deadline:
            raise InputError(
                f"{what} did not start within {PATIENCE} s. Its log is {log}; mend what it says, then run again."
            )
        time.sleep(0.5)


def prefect(*command: str) -> None:
    """Run a Prefect command to its end."""
    done = subprocess.run([*PREFECT, *command], cwd=HOME, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise InputError(f"prefect {' '.join(command)} failed:\n{(done.stdout + done.stderr).strip()}")


def up(url: str, say: Callable[[str], None]) -> None:
    """Make `prefect deployment run cram/full` work."""
    os.environ["PREFECT_API_URL"] = url
    address = urlsplit(url)
    if server_answers(url):
        say(f"Server: answers at {url}")
    else:
        if address.hostname not in ("127.0.0.1", "localhost"):
            raise InputError(
                f"No Prefect server answers at {url} (PREFECT_API_URL). Start it there, or unset PREFECT_API_URL."
            )
        os.environ["PREFECT_SERVER_API_PORT"] = str(address.port or 4200)
        log = start("server", "server", "start")
        await_that(lambda: server_answers(url), "The Prefect server", log)
        say(f"Server: started at {url}")
    prefect("work-pool", "create", POOL, "--type", "process", "--overwrite")
    prefect("--no-prompt", "deploy", "--all")
    say("Deployed: cram/full")
    if running("worker"):
        say("Worker: running")
    else:
        log = start("worker", "worker", "start", "--pool", POOL)
        await_that(lambda: "started!" in log.read_text(), "The worker", log)
        say("Worker: started")
    page = url.removesuffix("/api")
    say(f"\nNow:  prefect deployment run cram/full -p recipe=demo --watch\nSee:  {page}\nEnd:  make down")


def stop(pid: int) -> None:
    """End a service and its children: asked first, then made to."""
    for sign, patience in ((signal.SIGTERM, 15), (signal.SIGKILL, 5)):
        try:
            os.killpg(pid, sign)
        except ProcessLookupError:
            return
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            if not Path(f"/proc/{pid}").exists() or Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
                return
            time.sleep(0.2)


def down(say: Callable[[str], None]) -> None:
    """End what `up` started, and nothing else."""
    for name in ("worker", "server"):
        if pid := running(name):
            stop(pid)
            say(f"{name.capitalize()}: ended")
        else:
            say(f"{name.capitalize()}: none that was started here")
        (STATE / f"{name}.pid").unlink(missing_ok=True)
