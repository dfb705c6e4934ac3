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

import httpx
import pytest
from prefect.settings import PREFECT_HOME, temporary_settings

from flows.server import Server, Stopped, prefect_server, signals_as_exceptions, what_answers
from flows.services import has_ended
from model import InputError

LONG = 600  # seconds for a server to end on a busy machine
OTHERS = ("http://127.0.0.1:1", "http://localhost:1", "https://example.org", "null")  # origins of other web pages
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


def may_post(browser: httpx.Client, origin: str) -> bool:
    """Whether a browser lets pages of this origin send JSON to a server: it asks the server first."""
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    answer = browser.options("/flows/", headers={"Origin": origin, **asked})
    return answer.is_success and answer.headers.get("Access-Control-Allow-Origin") in (origin, "*")


def check_only_own_pages_act(browser: httpx.Client) -> None:
    """Make the requests that a browser makes for pages of other origins, and those of the server's own page."""
    flow, token = '{"name": "made by a page"}', "/csrf-token?client=a-page"
    for origin in OTHERS:
        assert not may_post(browser, origin)
        answer = browser.get(token, headers={"Origin": origin})
        assert "Access-Control-Allow-Origin" not in answer.headers, "the browser keeps the answer from the page"
        for kind in ({"Content-Type": "text/plain"}, {}):  # which a browser sends without asking first
            assert browser.post("/flows/", content=flow, headers={"Origin": origin, **kind}).is_client_error
        assert browser.post("/flows/filter", headers={"Origin": origin}).is_client_error, "it has no token"
    own = {"Origin": str(browser.base_url.join("/")).rstrip("/"), "Content-Type": "application/json"}
    own |= {"Prefect-Csrf-Client": "a-page", "Prefect-Csrf-Token": browser.get(token, headers=own).json()["token"]}
    names = [each["name"] for each in browser.post("/flows/filter", content="{}", headers=own).json()]
    assert "made by a page" not in names
    assert browser.post("/flows/", content=flow, headers=own).is_success


def test_web_pages_cannot_act_through_a_temporary_server(tmp_path: Path):
    command, env = [sys.executable, "-c", RUN.format(answers=True)], os.environ | {"PYTHONPATH": str(HOME)}
    # in a directory where Prefect reads no settings of this project
    with subprocess.Popen(command, env=env, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as run:
        try:
            with httpx.Client(base_url=run.stdout.readline().split()[1]) as browser:
                check_only_own_pages_act(browser)
        finally:
            run.kill()


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
