"""The clock of a budget: pauses, and time in which the process stood still."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from model.clock import BEAT_SECONDS, LATE_SECONDS, WAKES_PER_SECOND, Clock, about_pauses, about_stops

STOP_SECONDS = 2.0  # of a process that takes a beat for late after one
WORKING = """
import sys
from model import clock

clock.LATE_SECONDS = 1.0
with clock.Clock() as running:
    print("begun", flush=True)
    sys.stdin.readline()
    print(running.seconds(), running.stood_still())
"""


class Moved(Clock):
    """A clock whose time and wakes a test moves; beats are for the test too."""

    beats = False
    time = 100.0
    woken = 0

    def now(self) -> float:
        return self.time

    def wakes(self) -> int:
        return self.woken

    def pass_by(self, seconds: float, wakes: int = 1) -> None:
        """Beat after so long, and so many wakes."""
        self.time += seconds
        self.woken += wakes
        self.beat()


@pytest.fixture
def clock() -> Moved:
    made = Moved(before=40.0, stopped=7.0)
    made.beat()
    return made


def test_time_goes_on_from_that_before_a_restart(clock):
    clock.pass_by(BEAT_SECONDS)
    assert (clock.seconds(), clock.stood_still()) == pytest.approx((40.0 + BEAT_SECONDS, 7.0))


@pytest.mark.parametrize("wakes", [0, WAKES_PER_SECOND])
def test_a_beat_that_comes_late_in_a_stopped_process_is_off_the_clock_and_counted(clock, wakes):
    for _ in range(3):
        clock.pass_by(25.0, wakes)
        clock.pass_by(BEAT_SECONDS)
    assert clock.seconds() == pytest.approx(40.0 + 6 * BEAT_SECONDS)
    assert clock.stood_still() == pytest.approx(7.0 + 3 * (25.0 - BEAT_SECONDS))


def test_what_a_busy_machine_delays_and_code_that_keeps_pythons_lock_are_on_the_clock(clock):
    clock.pass_by(LATE_SECONDS)
    waiting = 1 / sys.getswitchinterval()  # wakes a second
    clock.pass_by(25.0, int(25 * waiting / 8))  # on a busy machine
    assert (clock.seconds(), clock.stood_still()) == (65.0 + LATE_SECONDS, 7.0)


@pytest.mark.parametrize("stop", [0.0, 25.0])
def test_a_pause_is_off_the_clock_once_with_a_stop_in_it_or_not(clock, stop):
    with clock.paused():
        clock.pass_by(3.0)
        clock.pass_by(stop)
        assert clock.seconds() == 40.0, "as at the beginning of the pause"
    assert clock.seconds() == 40.0
    assert clock.stood_still() == pytest.approx(7.0 + max(0.0, stop - BEAT_SECONDS))
    clock.pass_by(2.0)
    assert clock.seconds() == 42.0


def test_a_stop_of_another_process_is_off_the_clock_of_all_that_waited_for_it(clock):
    clock.pass_by(25.0, wakes=10_000)  # it waited
    clock.agree(7.0 + 24.0)
    assert (clock.seconds(), clock.stood_still()) == (41.0, 31.0)
    clock.agree(12.0)
    assert (clock.seconds(), clock.stood_still()) == (41.0, 31.0), "they stood still at the same time"


def test_whoever_reads_the_clock_before_the_late_beat_waits_for_it(monkeypatch):
    shift = [0.0]
    real = Clock.now
    monkeypatch.setattr(Clock, "now", staticmethod(lambda: real() + shift[0]))
    with Clock() as clock:
        for number in range(1, 4):
            shift[0] += 1000.0  # at once: no beat can have come between this and the next line
            assert clock.seconds() < 900.0
            assert clock.stood_still() == pytest.approx(1000.0 * number, abs=100.0)


def test_the_thread_beats_within_the_context_only():
    before = threading.active_count()
    with Clock() as clock:
        assert threading.active_count() == before + 1
        first = clock.last_beat
        deadline = time.monotonic() + 60
        while clock.last_beat == first:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert threading.active_count() == before
    first = clock.seconds()
    assert clock.seconds() >= first, "it can be read afterwards"


def test_a_real_stop_is_off_the_clock():
    home = Path(__file__).parents[1]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    began = time.monotonic()
    with subprocess.Popen([sys.executable, "-c", WORKING], cwd=home, **pipes) as child:
        try:
            assert child.stdout.readline() == "begun\n"
            child.send_signal(signal.SIGSTOP)
            time.sleep(STOP_SECONDS)
            child.send_signal(signal.SIGCONT)
            seconds, stopped = map(float, child.communicate("\n", timeout=600)[0].split())
        finally:
            child.kill()
    assert stopped > STOP_SECONDS - 1
    assert seconds + stopped < time.monotonic() - began


@pytest.mark.parametrize(
    ("stats", "said"),
    [
        ({"seconds_on_the_clock": 60.0, "stopped_seconds": 6.1}, True),
        ({"seconds_on_the_clock": 60.0, "stopped_seconds": 6.0}, False),
        ({"seconds_of_training": 60.0, "stopped_seconds": 25.0}, True),
        ({"seconds_on_the_clock": 60.0}, False),  # from before stops were counted
        ({"documents": 5}, False),
    ],
)
def test_stops_of_more_than_a_tenth_of_the_time_are_told(stats, said):
    sentence = about_stops(stats)
    assert bool(sentence) is said
    assert not said or f"{stats['stopped_seconds']:g} seconds" in sentence


def test_measuring_off_the_clock_is_told_if_it_takes_more_than_a_tenth_of_the_time_on_it():
    assert about_pauses(180, 9, 9) == ""
    assert about_pauses(10, 3, 2) == "", "seconds are not worth a line"
    assert about_pauses(180, 14, 8.58) == (
        "Training took 3 minutes on the clock; measuring held-out losses took 14 seconds more during it and 8.58 "
        "seconds after it."
    )
