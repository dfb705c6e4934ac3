"""Progress: no work waits for Prefect's server; bars and log lines share a terminal."""

import io
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
from rich.cells import cell_len

from tasks.workers import progress
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
        self.said = []
        self.threads = set()
        self.error = None
        self.asked = threading.Semaphore(0)
        self.open = threading.Event()

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
    server = Server()
    messenger = Messenger()
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
    server = Server()
    messenger = Messenger()
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

    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", -1)
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


class Pace:
    """A clock that a test moves, and what is logged of work that is told how far it is at some seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        self.now = 0.0
        self.caplog = caplog
        caplog.set_level(logging.INFO)
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)

    def lines(self, bar: Progress, counts: dict[float, float]) -> list[str]:
        """The lines of work, by its counts at these seconds."""
        self.caplog.clear()
        began = self.now
        with bar:
            for seconds, count in counts.items():
                self.now = began + seconds
                bar.update(count - bar.count, "a note")
        return self.caplog.messages


@pytest.fixture
def pace(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Pace:
    """A clock that stands still."""
    return Pace(monkeypatch, caplog)


def test_without_a_terminal_long_work_is_logged_at_five_marks_with_the_time_left(pace: Pace):
    every_percent = {1.8 * percent: percent / 100 for percent in range(101)}
    assert pace.lines(Progress("pretrain", total=1.0), every_percent) == [
        "pretrain: 10 %, about 2.7 minutes left; a note",
        "pretrain: 25 %, about 2.2 minutes left; a note",
        "pretrain: 50 %, about 1.5 minutes left; a note",
        "pretrain: 75 %, about 45 seconds left; a note",
        "pretrain: 90 %, about 18 seconds left; a note",
    ]


@pytest.mark.parametrize(
    ("total", "counts", "percents"),
    [
        (100, {seconds: 10 * seconds for seconds in range(11)}, []),  # 10 s of work
        (4, {60: 2, 120: 4}, [50]),  # one line for several marks, none at the end
        (1000, {60: 1, 130: 2, 200: 3, 260: 4}, [0, 0]),  # two minutes without a mark
    ],
    ids=["short", "few parts", "slow"],
)
def test_lines_are_as_few_as_the_work_is_short(pace: Pace, total: int, counts: dict, percents: list[int]):
    lines = pace.lines(Progress("filter", total, "part"), counts)
    assert [int(line.split()[1]) for line in lines] == percents


def test_work_of_unknown_size_is_logged_every_two_minutes_by_its_amount(pace: Pace):
    amounts = {100: 1e6, 130: 2e6, 200: 3e6, 260: 4e6}
    assert pace.lines(Progress("download", None, "B"), amounts) == [
        "download: 2.0 MB; a note",
        "download: 4.0 MB; a note",
    ]
    assert pace.lines(Progress("count", None, "doc"), {130: 2000}) == ["count: 2,000 doc; a note"]


def test_what_an_earlier_attempt_has_done_tells_nothing_about_the_pace(pace: Pace):
    counts = {0: 60, 40: 70, 80: 80, 160: 100}
    assert pace.lines(Progress("finetune", 100, "ex", done=60), counts) == [
        "finetune: 80 %, about 1.3 minutes left; a note"
    ]


def test_a_label_names_the_run_that_the_work_belongs_to():
    with progress.labelled("[a, seed 0]"), Progress("pretrain", total=1.0) as bar:
        assert bar.label == "pretrain [a, seed 0]"
    with Progress("pretrain", total=1.0) as bar:
        assert bar.label == "pretrain"


@pytest.mark.parametrize("text", ["finetune sst-2 [from scratch, seed 0]", "情感分析 [从头训练, seed 0]"])
@pytest.mark.parametrize("columns", [0, 1, 2, 10, 17, 36, 80])
def test_a_shortened_text_keeps_both_ends_and_fits(text: str, columns: int):
    short = progress.shortened(text, columns)
    assert cell_len(short) <= max(1, columns)
    if columns == 80:
        assert short == text
    if columns in (10, 17):
        assert short[:2] + short[-2:] == text[:2] + "0]"


@pytest.mark.parametrize("columns", [40, 80, 200])
@pytest.mark.parametrize("unit", ["", "part", "ex"])
def test_a_bar_takes_one_line_and_leaves_room_for_the_sign_of_an_interrupt(monkeypatch, unit: str, columns: int):
    screen = io.StringIO()
    screen.isatty = lambda: True
    monkeypatch.setattr(progress.sys, "stderr", screen)
    monkeypatch.setattr(progress, "terminal_columns", lambda: columns)
    with Progress("finetune sst-2 [corrupted tokens detected, seed 0]", 12_345, unit) as bar:
        bar.update(6000, "2 of 4 done; sst-2-0-untrained loss 0.5432, 1,234 examples/s")
        bar.bar.refresh()
    drawn = screen.getvalue().split("\r")
    assert max(cell_len(line) for line in drawn) <= columns - progress.FREE
    assert not drawn[-1].strip()
    assert any("finetune s" in line and " 49%" in line for line in drawn) or columns == 40
