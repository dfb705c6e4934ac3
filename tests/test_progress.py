"""Progress: no work waits for Prefect's server; bars and log lines share a terminal."""

import logging
import os
import pty
import re
import subprocess
import sys
import termios
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from tasks.workers import finetunes, progress
from tasks.workers.progress import Messenger, Progress

LONG = 60  # seconds: what is waited for comes at once, or the test fails
HOME = Path(__file__).resolve().parents[1]
LOGS_BESIDE_A_BAR = """
import logging
from flows.logs import configure, log_to_terminal
from tasks.workers.progress import Progress
configure()
log_to_terminal()
with Progress("pretrain", total=1.0) as bar:
    for i in range(4):
        bar.update(0.2101851766583347, "loss 3.2")
        bar.bar.refresh()
        logging.getLogger("tasks").info("line %d is whole", i)
"""


class Server:
    """What a messenger calls: it hangs while it is closed, and may refuse."""

    def __init__(self) -> None:
        self.said, self.threads, self.error = [], set(), None
        self.asked, self.open = threading.Semaphore(0), threading.Event()

    def call(self, what: object) -> None:
        self.threads.add(threading.current_thread())
        self.said.append(what)
        self.asked.release()
        assert self.open.wait(LONG)
        if self.error:
            raise self.error

    def wait_for_a_call(self) -> None:
        assert self.asked.acquire(timeout=LONG)


def test_the_caller_goes_on_while_the_server_hangs_and_then_the_newest_is_sent():
    server, messenger = Server(), Messenger()
    messenger.send(lambda: server.call(1))
    server.wait_for_a_call()
    for number in range(2, 100):
        messenger.send(lambda number=number: server.call(number))
    server.open.set()
    server.wait_for_a_call()
    assert server.said == [1, 99]
    assert len(server.threads) == 1
    assert threading.current_thread() not in server.threads


@pytest.mark.parametrize("error", [httpx.ConnectError("refused"), RuntimeError("a bug"), SystemExit(1)])
def test_a_call_that_fails_is_dropped_and_the_next_one_is_made(error: BaseException):
    server, messenger = Server(), Messenger()
    server.open.set()
    server.error = error
    for what in ("lost", "taken"):
        messenger.send(lambda what=what: server.call(what))
        server.wait_for_a_call()
    assert server.said == ["lost", "taken"]


def test_progress_of_a_task_run_is_created_and_then_updated(monkeypatch: pytest.MonkeyPatch):
    sent = []
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_REPORTS", -1)
    monkeypatch.setattr(progress, "task_run", SimpleNamespace(id="a task run"))
    monkeypatch.setattr(progress, "create_progress_artifact", lambda **given: sent.append(given) or 7)
    monkeypatch.setattr(progress, "update_progress_artifact", lambda key, **given: sent.append((key, given)))
    monkeypatch.setattr(progress.messenger, "send", lambda call: call())
    with Progress("Pre train", total=4) as bar:
        bar.update()
        bar.update(3)
    created = {"progress": 25.0, "key": "pre-train", "description": "Pre train"}
    assert sent == [created, (7, {"progress": 100.0}), (7, {"progress": 100.0})]


def test_work_goes_on_when_nobody_reads_its_log_any_more(monkeypatch: pytest.MonkeyPatch):
    class Closed(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise SystemExit(1)  # as rich does it

    monkeypatch.setattr(progress, "SECONDS_BETWEEN_REPORTS", -1)
    monkeypatch.setattr(progress.log, "handlers", [Closed()])
    monkeypatch.setattr(progress.log, "level", logging.INFO)
    with Progress("pretrain", total=2) as bar:
        bar.update()
        bar.update()
    assert bar.count == 2


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


def test_the_minutes_left_are_those_of_the_rest_at_the_pace_so_far(monkeypatch: pytest.MonkeyPatch):
    with finetunes.several(1, 100, 4) as pool:
        clock = SimpleNamespace(monotonic=lambda: pool.start + 120)
        monkeypatch.setattr(finetunes, "time", clock)
        assert [pool.minutes_left(so_far) for so_far in (0, 25, 80, 100, 125)] == pytest.approx([0, 6, 0.5, 0, 0])
