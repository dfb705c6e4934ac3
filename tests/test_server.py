"""The Prefect server of a run: which one is used, and that a temporary one ends with its run."""

import http.server
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.settings import PREFECT_HOME, temporary_settings

from flows.server import Server, prefect_server, what_answers
from model import InputError

LONG = 120  # seconds for a server to start or end on a busy machine
HOME = Path(__file__).resolve().parents[1]
RUN = """
import time
from flows.server import Server
server = Server()
if {waits}:
    server.wait()
print(server.process.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def other_program() -> Iterator[str]:
    """The address of a server that isn't Prefect's."""

    class Other(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>hello</html>")

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/api"
        server.shutdown()


def runs(pid: int) -> bool:
    """Whether a process lives."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_something_else_at_the_address_that_was_set_is_refused(other_program: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PREFECT_API_URL", other_program)
    with pytest.raises(InputError, match=r"^PREFECT_API_URL is .*hello"), prefect_server("", print):
        pass
    assert what_answers("http://127.0.0.1:1/api") == "nothing"


@pytest.mark.parametrize("waits", [False, True], ids=["at once", "when it answers"])
def test_the_server_of_a_killed_run_ends(tmp_path: Path, waits: bool):
    env = os.environ | {"PREFECT_HOME": str(tmp_path / "new" / "home")}
    run = subprocess.Popen([sys.executable, "-c", RUN.format(waits=waits)], env=env, cwd=HOME, stdout=subprocess.PIPE)
    server = int(run.stdout.readline())
    assert runs(server)
    run.kill()
    run.wait()
    deadline = time.monotonic() + LONG
    while runs(server):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_server_takes_no_signals_that_are_meant_for_its_run():
    server = Server()
    try:
        server.wait()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            server.process.send_signal(number)
        assert what_answers(server.url) == "prefect"
    finally:
        server.stop()
    assert server.has_ended()


def test_a_home_of_prefect_that_can_not_be_made_is_refused_by_its_name(tmp_path: Path):
    (tmp_path / "file").touch()
    with (
        temporary_settings({PREFECT_HOME: tmp_path / "file" / "home"}),
        pytest.raises(InputError, match="PREFECT_HOME"),
    ):
        Server()
