"""The clock of a budget: it counts all seconds but those in which it is paused or the process stood still."""

import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar, Self

from model.wording import duration

BEAT_SECONDS = 0.1  # between two beats of a clock's thread
# A beat that comes so much later was held up. A busy machine delays one by fractions of a second, as the thread has
# next to nothing to do; so a slow step, a compiler, a slow disk or a lack of cores stay on the clock.
LATE_SECONDS = 5.0
# Either the whole process was stopped meanwhile, or some code kept Python's lock, such as one that loads a library. A
# thread that waits for the lock wakes 200 times a second (sys.getswitchinterval), a stopped one never.
WAKES_PER_SECOND = 20
PATIENCE_SECONDS = 60.0  # for a beat that is late, on a machine that has just woken up
NOTABLE = 0.1  # of the seconds on the clock
LONG_SECONDS = 5.0  # off the clock: fewer are not worth a line


class Clock:
    """Seconds spent on a budget: those `before` a restart, and those since, but none inside `paused`.

    As a context, it has a thread that beats. If the process was stopped (by a signal, in a paused container, on a
    machine that slept), the thread's beat is late; that time is taken off the clock and counted in `stopped`, which a
    resumed run continues to count.
    """

    beats: ClassVar = True  # False: of a timer that stands still when the process does

    @staticmethod
    def now() -> float:
        """The timer, in seconds. It runs while the machine sleeps, so that sleep is noticed and counted too."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    @staticmethod
    def wakes() -> int:
        """How often the calling thread has waited for something until now."""
        return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw

    def __init__(self, before: float = 0.0, stopped: float = 0.0) -> None:
        self.before = before
        self.stopped = stopped
        self.off = 0.0  # seconds of pauses since the start
        self.since = self.now()
        self.paused_at: float | None = None
        self.beaten = threading.Condition()  # held to read or change what follows
        self.last_beat: float | None = None  # None: there is no thread
        self.last_wakes = 0
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._beat_until_ended, name="clock", daemon=True)

    def __enter__(self) -> Self:
        if self.beats:
            self.last_beat = self.now()
            self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        if self.thread.is_alive():
            self.thread.join()
        self.last_beat = None

    def _beat_until_ended(self) -> None:
        self.last_wakes = self.wakes()
        while not self.ended.wait(BEAT_SECONDS):
            self.beat()

    def beat(self) -> None:
        """Note that the process runs; if it had been stopped, take that time off the clock."""
        with self.beaten:
            now = self.now()
            wakes = self.wakes()
            gap = 0.0 if self.last_beat is None else now - self.last_beat
            was_stopped = wakes - self.last_wakes < WAKES_PER_SECOND * gap
            if gap > LATE_SECONDS and was_stopped:
                self._stand_still(gap - BEAT_SECONDS)
            self.last_beat = now
            self.last_wakes = wakes
            self.beaten.notify_all()

    def _stand_still(self, seconds: float) -> None:
        self.stopped += seconds
        if self.paused_at is None:  # a pause takes all of its time off
            self.since += seconds

    def _after_beat(self) -> float:
        """The timer, once no beat is late: only the thread can find out why a beat is late. Hold `beaten`."""
        while True:
            now = self.now()
            is_late = self.last_beat is not None and now - self.last_beat > LATE_SECONDS
            if not is_late or not self.beaten.wait(PATIENCE_SECONDS):
                return now

    def seconds(self) -> float:
        """The seconds spent until now, or until the pause that this is in."""
        with self.beaten:
            now = self._after_beat() if self.paused_at is None else self.paused_at
            return self.before + now - self.since

    def stood_still(self) -> float:
        """The seconds until now in which the process stood still."""
        with self.beaten:
            self._after_beat()
            return self.stopped

    def agree(self, stopped: float) -> None:
        """Take the time off the clock for which another process stood still while this one waited.

        `stopped`: the other process's seconds of standing still.
        """
        with self.beaten:
            if stopped > self.stopped:
                self._stand_still(stopped - self.stopped)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock inside this context."""
        with self.beaten:
            self.paused_at = self._after_beat()
        try:
            yield
        finally:
            with self.beaten:
                pause = self._after_beat() - self.paused_at
                self.since += pause
                self.off += pause
                self.paused_at = None


def about_stops(stats: dict) -> str:
    """A sentence about training that stood still for more than a tenth of its time; empty for any other.

    `stats`: those of a stage.
    """
    stopped = stats.get("stopped_seconds", 0.0)
    seconds = stats.get("seconds_on_the_clock", stats.get("seconds_of_training", 0.0))
    if stopped <= NOTABLE * seconds:
        return ""
    return (
        f"Training stood still for {duration(stopped)} (a stop signal, a paused container or a sleeping machine). That "
        f"time is not part of the {duration(seconds)} on the clock."
    )


def about_pauses(seconds: float, during: float, after: float) -> str:
    """A sentence about measurements off the clock that took long, and more than a tenth of its time; else empty.

    `seconds`: on the clock; `during`, `after`: those that held-out losses took during training and after it.
    """
    if during + after <= max(NOTABLE * seconds, LONG_SECONDS):
        return ""
    return (
        f"Training took {duration(seconds)} on the clock; measuring held-out losses took {duration(during)} more "
        f"during it and {duration(after)} after it."
    )
