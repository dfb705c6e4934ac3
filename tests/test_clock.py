import io
import json
from types import SimpleNamespace

import torch

from model.clock import Pace
from model.machine import Reading
from model.signals import Deferred
from model.steps import Step, StepQueue


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


def test_steps_that_are_collected_together_share_the_time_since_the_last():
    file, clock = io.StringIO(), SimpleNamespace(seconds=lambda: 8.0)
    queue = StepQueue(clock, 2.0, file, Deferred(), limit=1e9, scaled=False, ahead=0)
    for step in range(3):
        queue.pending.append(Step({"step": step}, Reading(torch.tensor([3.0, 1.0])), 0.0, 128, 1e6))
    queue.collect(everything=True)
    rows = [json.loads(line) for line in file.getvalue().splitlines()]
    assert [row["seconds"] for row in rows] == [4.0, 6.0, 8.0]
    assert [row["tokens_per_second"] for row in rows] == [64.0] * 3
