"""The log of `cram run` on a terminal and in a pipe."""

import io
import logging

import pytest
from rich.console import Console
from tqdm import tqdm

from flows import logs
from model import InputError
from tasks.workers import progress


@pytest.fixture(params=[False, True], ids=["pipe", "terminal"])
def log(request: pytest.FixtureRequest) -> logs.TerminalLog:
    """A log that writes to a buffer, which may be a terminal."""
    handler, screen = logs.TerminalLog(), io.StringIO()
    handler.console = Console(file=screen, force_terminal=request.param, soft_wrap=True, color_system=None)
    return handler


def write(log: logs.TerminalLog, name: str, level: int, message: str, **about: object) -> None:
    record = logging.LogRecord(name, level, "", 0, message, (), None)
    record.__dict__.update(about)
    log.handle(record)


def screen(log: logs.TerminalLog) -> list[str]:
    """The lines as they stay on the screen, without times."""
    lines = [line.split("\x1b[2K")[-1] for line in log.console.file.getvalue().split("\n")]
    return [line[len("00:00:00 ") :] if line[:2].isdecimal() else line for line in lines]


def test_the_running_stage_stays_below_the_lines_of_a_terminal(log: logs.TerminalLog):
    log.show_running("filter")
    write(log, "tasks.filter", logging.WARNING, "\x1b[31m is escaped")
    below = "filter …" if log.console.is_terminal else ""
    assert screen(log) == ["\\u001b[31m is escaped", below]
    log.show_running("")
    write(log, "flows.plan", logging.INFO, "filter: 3 documents")
    assert screen(log)[1:] == ["filter: 3 documents", ""]


def test_a_line_is_written_above_a_bar(log: logs.TerminalLog):
    with tqdm(total=4, file=log.console.file, leave=False, mininterval=0) as bar:
        write(log, "tasks.filter", logging.WARNING, "none of it")
        bar.update()
    assert "1/4" in log.console.file.getvalue().split("none of it\n")[1]


@pytest.mark.parametrize(
    ("name", "level", "message", "about", "shown"),
    [
        ("flows.plan", logging.INFO, "a result", {}, True),
        ("prefect.flow_runs", logging.INFO, "Beginning flow run", {}, False),
        ("prefect.task_runs", logging.ERROR, "a bug", {}, True),
        ("prefect.task_runs", logging.ERROR, "Finished in state Failed()", {}, False),
        ("prefect.flow_runs", logging.ERROR, "Crash detected! Execution was aborted", {}, False),
        ("prefect.flow_runs", logging.ERROR, "gone.jsonl matches nothing", {"input_error": True}, False),
        ("tasks.workers.progress", logging.INFO, "%s: 3 %%", {"args": ("pretrain",)}, False),
        ("tasks.workers.progress", logging.WARNING, "the server does not answer", {}, True),
    ],
)
def test_results_warnings_and_bugs_are_shown(log: logs.TerminalLog, name, level, message, about, shown: bool):
    write(log, name, level, message, **about)
    assert bool(screen(log)[:-1]) == shown
    assert (message in log.console.file.getvalue()) == shown


def test_an_outage_of_the_server_and_its_end_are_shown(log: logs.TerminalLog, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(progress.log, "handle", log.handle)
    monkeypatch.setattr(progress.log, "level", logging.INFO)
    reporter = progress.Reporter()
    for problem in ("no answer in time", ""):
        reporter._say(problem)
    assert ["no answer in time" in line for line in screen(log)[:-1]] == [True, False]


def test_progress_is_shown_every_two_minutes(log: logs.TerminalLog, monkeypatch: pytest.MonkeyPatch):
    now = logs.time.monotonic()
    for seconds in (100, 130, 200, 260):
        monkeypatch.setattr(logs.time, "monotonic", lambda seconds=seconds: now + seconds)
        write(log, logs.PROGRESS, logging.INFO, "at %d s", args=(seconds,))
    assert screen(log)[:-1] == ["at 130 s", "at 260 s"]


def test_an_error_of_the_user_is_logged_once_without_its_traceback():
    error, sentence = InputError("no such file"), logs.OneSentence()
    records = [logging.LogRecord("x", logging.ERROR, "", 0, "failed", (), (InputError, error, None)) for _ in range(2)]
    assert [sentence.filter(record) for record in records] == [True, False]
    assert (records[0].getMessage(), records[0].exc_info) == ("no such file", None)
