"""Training steps that the device may not have computed yet, and the rows of metrics that they become."""

import json
import math
from dataclasses import dataclass, field
from typing import IO, NamedTuple

from model.clock import Clock, Pace
from model.machine import Reading
from model.signals import Deferred


class NotFinite(Exception):
    """The loss or the gradient of a step, or the weights after it, are not finite."""

    def __init__(self, step: int, what: str) -> None:
        self.step = step
        super().__init__(f"At step {step} {what}; expected finite numbers")


class Step(NamedTuple):
    """A step that is queued on the device."""

    row: dict  # of metrics, without the numbers that are not known yet
    reading: Reading  # loss, detection loss if there is one, and gradient norm
    queued: float  # when, in seconds on the clock
    tokens: int
    operations: float  # floating-point operations


@dataclass
class StepQueue:
    """The queued steps, in order. `collect` waits for them and writes their metrics."""

    clock: Clock
    finished: float  # seconds on the clock at which the last step was finished
    metrics: IO[str] | None  # None in processes that don't write metrics
    deferred: Deferred
    limit: float  # operations per second of the machine's matrix products
    scaled: bool  # fp16 gradients, whose overflow only leaves the step out
    ahead: int  # steps that may stay queued while another is computed
    pending: list[Step] = field(default_factory=list)
    pace: Pace = field(default_factory=Pace)

    def collect(self, everything: bool) -> dict | None:
        """Write the row of each finished step; the last row, if there is one. Raises NotFinite.

        Waits for all steps but those that may stay queued, or for `everything`. The first step is always waited for,
        because the times of later ones are predicted from it.
        """
        stay = self.ahead if self.pace.seconds_per_operation and not everything else 0
        steps = self.pending[: max(0, len(self.pending) - stay)]
        if not steps:
            return None
        for step in steps:
            step.row["loss"], *detection, step.row["gradient_norm"] = step.reading.read()
            if detection:
                (step.row["detection_loss"],) = detection
        before, now = self.finished, self.clock.seconds()
        self.pace.measure(steps[0].queued, sum(step.operations for step in steps), now)
        for number, step in enumerate(steps, start=1):
            self.write(step, before + (now - before) * number / len(steps))  # as if all had taken the same time
        return steps[-1].row

    def write(self, step: Step, seconds: float) -> None:
        """Write the row of the first step in the queue, which was finished at `seconds`, and remove the step."""
        row = step.row
        loss = row["loss"] + row.get("detection_loss", 0.0)
        if not (math.isfinite(loss) and (self.scaled or math.isfinite(row["gradient_norm"]))):
            raise NotFinite(row["step"], f"the loss is {loss} and the gradient norm {row['gradient_norm']}")
        row["seconds"] = seconds
        row["tokens_per_second"] = step.tokens / (seconds - self.finished)
        row["mfu"] = step.operations / (seconds - self.finished) / self.limit
        with self.deferred.held():  # so that no row is lost or written twice
            if self.metrics:
                self.metrics.write(json.dumps(row) + "\n")
            self.pending.pop(0)
            self.finished = seconds

    def end(self) -> float:
        """Seconds on the clock at which the device will have computed all queued steps, as predicted."""
        return self.pace.end([(step.queued, step.operations) for step in self.pending], self.clock.seconds())
