"""The Prefect server of a run: the one that is used, and the end of a temporary one."""

import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from prefect.settings import PREFECT_HOME, temporary_settings

from flows.server import Server, Stopped, prefect_server, signals_as_exceptions, what_answers
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


def test_another_program_at_the_given_address_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "api").mkdir()
    (tmp_path / "api" / "health").write_text("<html>hello</html>")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=tmp_path)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{server.server_port}/api")
        with pytest.raises(InputError, match="PREFECT_API_URL"), prefect_server(""):
            pass
        server.shutdown()
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_a_run_with_the_shells_code(number: int):
    before = signal.getsignal(number)
    with pytest.raises(Stopped) as stopped, signals_as_exceptions():
        signal.raise_signal(number)
    assert (stopped.value.code, signal.getsignal(number)) == (128 + number, before)
