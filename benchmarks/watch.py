"""Where the time of a training step goes."""

import functools
import time
from collections.abc import Callable

import torch


class Watch:
    """Time within the parts of each step, on GPUs by their own clock, and CPU time."""

    def __init__(self, device: torch.device) -> None:
        self.cuda, self.steps, self.begun, self.ended = device.type == "cuda", [], [], 0.0

    def now(self) -> "float | torch.cuda.Event":
        """A point in time; on GPUs the one at which all that is queued is done."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        """Until the device has done all that is queued."""
        if self.cuda:
            torch.cuda.synchronize()

    def timed(self, part: str, work: Callable) -> Callable:
        """The same function, whose time in each step is noted."""

        @functools.wraps(work)
        def noted(*args: object, **kwargs: object) -> object:
            begin, result = self.now(), work(*args, **kwargs)
            if self.steps:  # they have begun
                self.steps[-1].append((part, begin, self.now()))
            return result

        return noted

    def step(self) -> None:
        """A step begins."""
        self.steps.append([])
        self.begun.append(time.process_time())

    def end(self) -> None:
        """A step has ended."""
        self.ended = time.process_time()

    def cpu_seconds(self, since: int) -> float:
        """The process's, from that step on."""
        return self.ended - self.begun[since]

    def seconds(self, part: str, since: int) -> float:
        """Spent in a part, from that step on."""
        spans = [(begin, end) for step in self.steps[since:] for name, begin, end in step if name == part]
        return sum(begin.elapsed_time(end) / 1000 if self.cuda else end - begin for begin, end in spans)
