from contextlib import suppress
from types import SimpleNamespace

import pytest

from model import clock
from model.clock import Clock, Pace


@pytest.fixture
def time(monkeypatch) -> SimpleNamespace:
    """A clock that is set by hand."""
    fake = SimpleNamespace(now=100.0)
    fake.perf_counter = lambda: fake.now
    monkeypatch.setattr(clock, "time", fake)
    return fake


def test_the_clock_counts_over_restarts_and_stands_still_where_it_is_paused(time):
    watch = Clock(before=7.0)
    time.now += 3
    with suppress(KeyError), watch.paused():
        time.now += 50
        raise KeyError
    time.now += 2
    assert watch.seconds() == 12


def test_queued_steps_end_one_after_the_other_at_the_pace_of_the_last():
    pace = Pace()
    assert pace.seconds_per_operation is None
    assert pace.end([], now=5.0) == 5.0
    pace.measure(queued=0.0, operations=10, now=20.0)  # 2 s an operation
    assert pace.end([], now=21.0) == 21.0
    assert pace.end([(3.0, 4)], now=20.5) == 28.0  # it began when the one before ended
    assert pace.end([(3.0, 4), (20.0, 1)], now=20.5) == 30.0
    assert pace.end([(22.0, 4)], now=22.0) == 30.0  # it began when it was queued
    assert pace.end([(3.0, 4)], now=31.0) == 31.0  # overdue
    pace.measure(queued=3.0, operations=4, now=24.0)  # 1 s an operation
    assert pace.end([(24.0, 4)], now=24.0) == 28.0
    pace.measure(queued=30.0, operations=4, now=42.0)  # nothing was queued from 24 to 30 s
    assert pace.seconds_per_operation == 3.0
