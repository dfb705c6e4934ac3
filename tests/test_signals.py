import os
import signal
import sys
import threading
from contextlib import suppress
from types import SimpleNamespace

import pytest

from flows.cli import start
from model import signals
from model.signals import SIGNALS, StopRequest


def handlers() -> list:
    return [signal.getsignal(number) for number in SIGNALS]


@pytest.fixture(autouse=True)
def seen() -> list:
    """The signals that were handled; then the handlers are as they were before the test."""
    before = handlers()
    seen = []
    for number in SIGNALS:
        signal.signal(number, lambda number, frame: seen.append(number))
    yield seen
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


def send(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", sorted({*SIGNALS, signal.SIGUSR1, signal.SIGUSR2}))  # the last two are Slurm's
def test_the_first_signal_waits_to_be_passed_on_and_the_second_acts_at_once(seen, number, monkeypatch):
    monkeypatch.setattr(signals, "AGAIN_SECONDS", 0.0)
    with StopRequest() as stop:
        send(number)
        assert (stop.number, seen) == (number, [])
        send()
        assert seen == [signal.SIGTERM]
        stop.pass_on(number)
        assert (stop.number, seen) == (None, [signal.SIGTERM, number])


@pytest.mark.parametrize(
    ("waits", "apart"), [(False, 3600.0), (True, 0.0)], ids=["at once", "later, a patient process"]
)
def test_a_signal_that_comes_twice_is_one_request(seen, monkeypatch, waits, apart):
    monkeypatch.setattr(signals, "AGAIN_SECONDS", apart)
    with StopRequest(waits) as stop:
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1):
            send(number)
            assert (stop.number, seen) == (signal.SIGUSR1, [])
    assert seen == [signal.SIGUSR1]


@pytest.mark.parametrize("problem", [None, ValueError])
def test_no_signal_is_lost_and_handlers_are_restored_at_the_end_of_the_context_and_after_an_error(seen, problem):
    before = handlers()
    with suppress(ValueError), StopRequest():
        assert not set(before) & set(handlers())
        send()
        if problem:
            raise problem
    assert seen == [signal.SIGTERM]
    assert handlers() == before


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_while_the_command_line_is_imported_ends_it_with_a_sentence_and_the_shells_code(
    monkeypatch, capsys, number
):
    def interrupted() -> None:
        send(number)
        send(number)  # as `timeout` does

    signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setitem(sys.modules, "flows.cli.main", SimpleNamespace(main=interrupted))
    with pytest.raises(SystemExit) as ended:
        start.main()
    assert ended.value.code == 128 + number
    named = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
    assert capsys.readouterr().err.startswith(f"cram: Stopped by {named}. ")


def test_an_ignored_signal_stays_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopRequest() as stop:
        send(signal.SIGHUP)
        assert stop.number is None


def test_one_within_another_passes_its_signal_to_the_other(seen):
    with StopRequest() as outer:
        with StopRequest():
            send()
            assert outer.number is None
        assert (outer.number, seen) == (signal.SIGTERM, [])
    assert seen == [signal.SIGTERM]


def test_another_thread_sets_no_handlers():
    before = handlers()
    found = []

    def work() -> None:
        with StopRequest():
            found.extend(handlers())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == before
