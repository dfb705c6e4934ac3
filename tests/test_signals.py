import os
import signal
import threading
from contextlib import suppress

import pytest

from model.signals import Deferred


def handlers() -> list:
    return [signal.getsignal(number) for number in Deferred.SIGNALS]


@pytest.fixture(autouse=True)
def _put_back():
    before = handlers()
    yield
    for number, handler in zip(Deferred.SIGNALS, before, strict=True):
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


def test_handlers_are_restored_after_an_error_which_leaves_what_is_held_half_done():
    signal.signal(signal.SIGTERM, lambda *args: None)
    before = handlers()
    with suppress(KeyboardInterrupt), Deferred() as deferred, deferred.held():
        assert not set(before) & set(handlers())
        raise KeyboardInterrupt
    assert handlers() == before
    assert (deferred.broken, deferred.holding) == (True, False)


@pytest.mark.parametrize("number", Deferred.SIGNALS)
def test_the_default_is_to_end_with_the_shells_code(number):
    signal.signal(number, signal.SIG_DFL)
    with pytest.raises(SystemExit) as ended, Deferred():
        send(number)
    assert ended.value.code == 128 + number


def test_an_ignored_signal_stays_ignored():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with Deferred() as deferred, deferred.held():
        send()


def test_one_within_another_waits_for_both():
    done = []
    with suppress(SystemExit), Deferred() as outer:
        with outer.held():
            with Deferred() as inner:
                with inner.held():
                    send()
                    done.append("inner held")
                done.append("inner left")
            done.append("outer held")
        done.append("the signal was lost")
    assert done == ["inner held", "inner left", "outer held"]


def test_another_thread_sets_no_handlers():
    before, seen = handlers(), []

    def work() -> None:
        with Deferred() as deferred, deferred.held():
            seen.extend(handlers())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == before
