"""Times the parts of training steps."""

import functools
import time
from collections.abc import Callable

import torch


class Watch:
    """Time of the parts of each step, on GPUs by the GPU's clock, and CPU time."""

    def __init__(self, device: torch.device) -> None:
        self.cuda, self.steps, self.begun, self.ended = device.type == "cuda", [], [], 0.0

    def now(self) -> "float | torch.cuda.Event":
        """A point in time; on GPUs the one at which all queued work is done."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        """Wait until the device has done all queued work."""
        if self.cuda:
            torch.cuda.synchronize()

    def timed(self, part: str, work: Callable) -> Callable:
        """The same function; its time in each step is recorded."""

        @functools.wraps(work)
        def noted(*args: object, **kwargs: object) -> object:
            begin, result = self.now(), work(*args, **kwargs)
            if self.steps:  # none has begun while the model is built
                self.steps[-1].append((part, begin, self.now()))
            return result

        return noted

    def step(self) -> None:
        """Begin a step."""
        self.steps.append([])
        self.begun.append(time.process_time())

    def end(self) -> None:
        """End a step."""
        self.ended = time.process_time()

    def cpu_seconds(self, since: int) -> float:
        """CPU seconds of the process, from that step on."""
        return self.ended - self.begun[since]

    def seconds(self, part: str, since: int) -> float:
        """Seconds spent in a part, from that step on."""
        spans = [(begin, end) for step in self.steps[since:] for name, begin, end in step if name == part]
        return sum(begin.elapsed_time(end) / 1000 if self.cuda else end - begin for begin, end in spans)
