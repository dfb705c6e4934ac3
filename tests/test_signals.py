import os
import signal
import threading

import pytest

from model.signals import Deferred


class Told(BaseException):
    """What a handler raises."""


@pytest.fixture(autouse=True)
def handlers():
    """The handlers of this process, put back."""
    before = {number: signal.getsignal(number) for number in Deferred.SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


def test_a_signal_waits_until_what_is_held_is_through():
    done = []

    def work() -> None:
        with deferred.held():
            send(signal.SIGINT)
            done.append("held")

    with Deferred() as deferred:
        with pytest.raises(KeyboardInterrupt):
            work()
        assert done == ["held"]
        assert not deferred.holding
        assert not deferred.broken


def test_elsewhere_a_signal_does_at_once_what_it_did_before():
    seen = []
    signal.signal(signal.SIGTERM, lambda *args: seen.append(args[0]))
    with Deferred() as deferred:
        send()
        assert seen == [signal.SIGTERM]
        with deferred.held():
            send()
            assert len(seen) == 1
        assert len(seen) == 2
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_handlers_are_restored_however_it_is_left():
    signal.signal(signal.SIGTERM, handler := lambda *args: None)
    before = [signal.getsignal(number) for number in Deferred.SIGNALS]
    with Deferred():
        assert not set(before) & {signal.getsignal(number) for number in Deferred.SIGNALS}
    assert [signal.getsignal(number) for number in Deferred.SIGNALS] == before
    with pytest.raises(Told), Deferred() as deferred, deferred.held():
        raise Told
    assert [signal.getsignal(number) for number in Deferred.SIGNALS] == before
    assert before[1] is handler


@pytest.mark.parametrize("number", Deferred.SIGNALS)
def test_the_default_is_to_end_with_the_shells_code(number):
    signal.signal(number, signal.SIG_DFL)
    with pytest.raises(SystemExit) as ended, Deferred():
        send(number)
    assert ended.value.code == 128 + number
    assert signal.getsignal(number) is signal.SIG_DFL


def test_what_was_ignored_is_ignored():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with Deferred() as deferred:
        send()
        with deferred.held():
            send()


def test_all_signals_that_wait_are_passed_on_in_order():
    seen = []
    for number in Deferred.SIGNALS:
        signal.signal(number, lambda number, frame: seen.append(number))
    with Deferred() as deferred:
        with deferred.held():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
                send(number)
            assert not seen
        assert seen == [signal.SIGTERM, signal.SIGINT, signal.SIGTERM]


def test_one_within_another_waits_for_both():
    done = []

    def work() -> None:
        with outer.held():
            with Deferred() as inner:
                with inner.held():
                    send()
                    done.append("inner held")
                done.append("outer held")
            done.append("inner left")

    with Deferred() as outer:
        with pytest.raises(SystemExit):
            work()
        assert done == ["inner held", "outer held", "inner left"]


def test_an_error_in_what_is_held_is_raised_and_remembered():
    def work() -> None:
        with deferred.held():
            send()
            raise Told

    with Deferred() as deferred:
        with pytest.raises(Told):
            work()
        assert deferred.broken
        assert not deferred.holding


def test_another_thread_holds_nothing_back_and_sets_no_handlers():
    before, seen = signal.getsignal(signal.SIGTERM), []

    def work() -> None:
        with Deferred() as deferred, deferred.held():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
