"""The Prefect server of a run: the one that is used, and the end of a temporary one."""

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
from flows.services import has_ended
from model import InputError

LONG = 600  # seconds for a server to end on a busy machine
HOME = Path(__file__).resolve().parents[1]
RUN = """
import time
from flows.server import Server
server = Server()
if {answers}:
    server.wait()
print(server.process.pid, server.url, flush=True)
time.sleep(600)
"""


@pytest.fixture
def other_program() -> Iterator[str]:
    """The address of a server of another program."""

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


def test_another_program_at_the_given_address_is_refused(other_program: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PREFECT_API_URL", other_program)
    with pytest.raises(InputError, match="PREFECT_API_URL"), prefect_server(""):
        pass
    assert what_answers("http://127.0.0.1:1/api") == "nothing"


@pytest.mark.parametrize("answers", [False, True], ids=["while it starts", "when it answers"])
def test_a_server_ignores_signals_that_end_its_run_and_ends_with_a_killed_one(tmp_path: Path, answers: bool):
    env = os.environ | ({} if answers else {"PREFECT_HOME": str(tmp_path / "new" / "home")})
    run = subprocess.Popen(
        [sys.executable, "-c", RUN.format(answers=answers)], env=env, cwd=HOME, stdout=subprocess.PIPE
    )
    pid, url = run.stdout.readline().decode().split()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(int(pid), number)
    assert not answers or what_answers(url) == "prefect"
    assert not has_ended(int(pid))
    run.kill()
    run.wait()
    deadline = time.monotonic() + LONG
    while not has_ended(int(pid)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_home_of_prefect_that_cannot_be_created_is_refused(tmp_path: Path):
    (tmp_path / "file").touch()
    below_a_file = temporary_settings({PREFECT_HOME: tmp_path / "file" / "home"})
    with below_a_file, pytest.raises(InputError, match="PREFECT_HOME"):
        Server()
