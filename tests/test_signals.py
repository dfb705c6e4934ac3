import os
import signal
import threading

import pytest

from model.signals import Deferred


class Stopped(BaseException):
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


def test_signals_wait_until_what_is_held_ends_and_are_handled_in_order():
    seen = []
    for number in Deferred.SIGNALS:
        signal.signal(number, lambda number, frame: seen.append(number))
    with Deferred() as deferred:
        send(signal.SIGHUP)
        assert seen == [signal.SIGHUP], "outside of held() it is handled at once"
        with deferred.held():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
                send(number)
            assert len(seen) == 1
        assert seen[1:] == [signal.SIGTERM, signal.SIGINT, signal.SIGTERM]
        assert not deferred.broken


def test_handlers_are_restored_after_errors_too():
    signal.signal(signal.SIGTERM, handler := lambda *args: None)
    before = [signal.getsignal(number) for number in Deferred.SIGNALS]
    with Deferred():
        assert not set(before) & {signal.getsignal(number) for number in Deferred.SIGNALS}
    assert [signal.getsignal(number) for number in Deferred.SIGNALS] == before
    with pytest.raises(Stopped), Deferred() as deferred, deferred.held():
        raise Stopped
    assert [signal.getsignal(number) for number in Deferred.SIGNALS] == before
    assert before[1] is handler
    assert deferred.broken, "what was held is half done"
    assert not deferred.holding


@pytest.mark.parametrize("number", Deferred.SIGNALS)
def test_the_default_is_to_end_with_the_shells_code(number):
    signal.signal(number, signal.SIG_DFL)
    with pytest.raises(SystemExit) as ended, Deferred():
        send(number)
    assert ended.value.code == 128 + number
    assert signal.getsignal(number) is signal.SIG_DFL


def test_an_ignored_signal_stays_ignored():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with Deferred() as deferred:
        send()
        with deferred.held():
            send()


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


def test_another_thread_holds_nothing_back_and_sets_no_handlers():
    before, seen = signal.getsignal(signal.SIGTERM), []

    def work() -> None:
        with Deferred() as deferred, deferred.held():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
