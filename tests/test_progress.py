"""Reports to Prefect: no work waits for its server; bars and log lines share a terminal."""

import logging
import os
import pty
import re
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from tasks.workers import progress
from tasks.workers.progress import Progress, Reporter

LONG = 60  # seconds: what is waited for comes at once, or the test fails
HOME = Path(__file__).resolve().parents[1]
LOGS_BESIDE_A_BAR = """
import logging, prefect
from tasks.workers.progress import Progress
from prefect.logging.configuration import setup_logging
setup_logging()
log = logging.getLogger("tasks")
log.setLevel(logging.INFO)
with Progress("pretrain", total=1.0) as bar:
    for i in range(4):
        bar.update(0.2101851766583347, "loss 3.2")
        bar.bar.refresh()
        log.info("line %d is whole", i)
"""


class FakeServer:
    """What a reporter calls in place of Prefect's client; it hangs, refuses or answers as the test says."""

    def __init__(self) -> None:
        self.said, self.threads, self.error = [], set(), None
        self.asked, self.open = threading.Semaphore(0), threading.Event()
        self.open.set()

    def call(self, what: object) -> None:
        self.threads.add(threading.current_thread())
        self.asked.release()
        assert self.open.wait(LONG)
        if self.error:
            raise self.error
        self.said.append(what)

    def create_logs(self, batch: list[dict]) -> None:
        self.call([record["message"] for record in batch])


@pytest.fixture
def server() -> Iterator[FakeServer]:
    made = FakeServer()
    yield made
    made.open.set()


@pytest.fixture
def reporter(monkeypatch: pytest.MonkeyPatch, server: FakeServer) -> Reporter:
    """One whose calls need no client, and that tries again at once."""
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_TRIES", 0.01)
    monkeypatch.setattr(Reporter, "_call", lambda self, call: call())
    monkeypatch.setattr(progress, "reporter", made := Reporter())
    made.session = "", None, SimpleNamespace(client=server)
    return made


def test_the_caller_goes_on_while_the_server_hangs_and_only_the_newest_is_sent(reporter: Reporter, server: FakeServer):
    server.open.clear()
    reporter.send("a", lambda: server.call("a 1"))
    assert server.asked.acquire(timeout=LONG)
    for i in range(2, 100):
        reporter.send("a", lambda i=i: server.call(f"a {i}"))
        reporter.send("b", lambda i=i: server.call(f"b {i}"))
    assert not reporter.flush(0.01)
    assert not reporter.answers
    server.open.set()
    assert reporter.flush(LONG)
    assert server.said == ["a 1", "a 99", "b 99"]
    assert threading.current_thread() not in server.threads
    assert len(server.threads) == 1


def answered(status: int) -> httpx.HTTPStatusError:
    return httpx.HTTPStatusError("refused", request=None, response=httpx.Response(status))


@pytest.mark.parametrize("error", [httpx.ConnectError("refused"), answered(500)], ids=["absent", "broken"])
def test_an_absent_server_is_logged_once_and_gets_the_newest_when_it_is_back(
    reporter: Reporter, server: FakeServer, caplog: pytest.LogCaptureFixture, error: Exception
):
    caplog.set_level(logging.INFO, "tasks")
    server.error = error
    reporter.send("a", lambda: server.call("old"))
    for _ in range(5):
        assert server.asked.acquire(timeout=LONG), "it is tried again"
    reporter.send("a", lambda: server.call("new"))
    assert not reporter.flush(LONG), "one more failure ends the wait"
    server.error = None
    assert reporter.flush(LONG) or reporter.flush(LONG), "a request may have been under way"
    assert server.said == ["new"]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_what_the_server_refuses_is_logged_and_holds_up_nothing(reporter: Reporter, server: FakeServer, caplog):
    server.error = answered(422)
    reporter.send("artifacts of filter/1", lambda: server.call("table"))
    assert reporter.flush(LONG)
    reporter.send_log({"message": "refused"})
    assert reporter.flush(LONG)
    assert reporter.answers
    assert ["artifacts of filter/1" in record.getMessage() for record in caplog.records] == [True, False]
    server.error = None
    reporter.send_log({"message": "taken"})
    assert reporter.flush(LONG)
    assert server.said == [["taken"]]


def test_log_records_wait_for_the_server_in_order(reporter: Reporter, server: FakeServer, monkeypatch):
    monkeypatch.setattr(progress, "LOG_BATCH", 2)
    server.error = httpx.ReadTimeout("no answer")
    for i in range(5):
        reporter.send_log({"message": i, "__payload_size__": 1})
    assert not reporter.flush(LONG)
    server.error = None
    reporter.send_log({"message": 5, "__payload_size__": 1})
    assert reporter.flush(LONG) or reporter.flush(LONG)
    assert [message for batch in server.said for message in batch] == list(range(6))
    assert max(map(len, server.said)) == 2


def test_progress_of_a_task_is_created_and_updated_on_the_reporters_thread(reporter, server, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_REPORTS", -1)
    monkeypatch.setattr(progress.TaskRunContext, "get", lambda: object())
    monkeypatch.setattr(progress, "create_progress_artifact", lambda **given: server.call(given) or 7)
    monkeypatch.setattr(progress, "update_progress_artifact", lambda key, **given: server.call((key, given)))
    server.open.clear()
    with Progress("Pre train", total=4) as bar:
        bar.update()
        assert server.asked.acquire(timeout=LONG)
        for _ in range(3):
            bar.update()
    assert server.said == []
    server.open.set()
    assert reporter.flush(LONG)
    created = {"progress": 25.0, "key": "pre-train", "description": "Pre train"}
    assert server.said == [created, (7, {"progress": 100.0})]
    assert threading.current_thread() not in server.threads


def shown(line: str) -> str:
    """What a terminal shows of a line: after each carriage return it is written over."""
    cells = ""
    for part in re.sub(r"\x1b\[[\d;]*[A-Za-z]", "", line).split("\r"):
        cells = part + cells[len(part) :]
    return cells.rstrip()


def test_a_bar_and_log_lines_leave_each_other_whole():
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (50, 100))
    env = os.environ | {"PREFECT_LOGGING_LEVEL": "INFO", "TERM": "xterm"}
    command = [sys.executable, "-c", LOGS_BESIDE_A_BAR]
    subprocess.run(command, env=env, cwd=HOME, stderr=theirs, check=True, timeout=LONG)
    os.close(theirs)
    sent = b""
    with suppress(OSError):  # all is read
        while True:
            sent += os.read(ours, 4096)
    os.close(ours)
    text = sent.decode()
    lines = [line for line in map(shown, text.split("\r\n")) if line]
    assert [re.fullmatch(r"\d\d:\d\d:\d\d.*line \d is whole", line) is not None for line in lines] == [True] * 4
    assert re.search(r"pretrain: +42%", text)
    assert not re.search(r"0\.\d{4}", text), "no fraction with all of its digits"
