"""The clock of a budget, and a prediction of when the steps queued on the device will be done."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class Clock:
    """Seconds spent, `before` a restart too, without the time in `paused`."""

    @staticmethod
    def now() -> float:
        """The timer, in seconds."""
        return time.perf_counter()

    def __init__(self, before: float) -> None:
        self.before, self.since = before, self.now()

    def seconds(self) -> float:
        """The seconds spent until now."""
        return self.before + self.now() - self.since

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock."""
        stopped = self.now()
        try:
            yield
        finally:
            self.since += self.now() - stopped


class Pace:
    """Predicts when queued steps will be done, from the time that the last finished step took for each operation.

    A step is known by the clock's seconds when it was queued and by its floating-point operations.
    """

    def __init__(self) -> None:
        self.finished = 0.0  # seconds on the clock at which the last step was done
        self.seconds_per_operation: float | None = None  # None: no step is done yet

    def measure(self, queued: float, operations: float, now: float) -> None:
        """Record that a step is done now. It began when it was queued or when the step before it was done."""
        self.seconds_per_operation = (now - max(queued, self.finished)) / operations
        self.finished = now

    def end(self, steps: Iterable[tuple[float, float]], now: float) -> float:
        """Seconds on the clock at which the device will have done these queued steps."""
        end = self.finished
        for queued, operations in steps:
            end = max(end, queued) + operations * (self.seconds_per_operation or 0.0)
        return max(now, end)
