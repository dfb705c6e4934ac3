"""Finetuning runs side by side, each in its own process: if one is killed, the others continue.

Small models leave most of a machine idle when they are trained one after the other: two processes of one thread each do
more than one process of two threads. A run's result depends on its seed and data; threads change it by rounding only.
"""

import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from model.environment import whole_number
from model.errors import InputError
from model.wording import counted
from tasks.workers import processes
from tasks.workers.processes import usage
from tasks.workers.progress import Progress

ON_A_GPU = 4  # finetuning runs at most: each has its own CUDA context
BYTES_A_RUN = 3 << 29  # of memory, without the model: measured at pocket size, where the model takes little
SECONDS_BETWEEN_REPORTS = 0.5  # from a worker to this process
log = logging.getLogger(__name__)
pool: "RunPool | None" = None  # of `several`


def finetunes() -> int | None:
    """CRAM_FINETUNES, or None."""
    return whole_number("CRAM_FINETUNES", "as many as fit")


def at_once(runs: int, bytes_each: int = BYTES_A_RUN) -> int:
    """How many of `runs` are trained at a time: CRAM_FINETUNES, or as many as cores, memory and GPU allow."""
    asked = finetunes()
    if runs <= 1:
        return runs
    give_back_memory()
    if asked:
        return min(asked, runs)
    import torch

    from model import limits, machine

    if machine.detect().device.type == "cuda":
        free = torch.cuda.mem_get_info()[0]
        most = ON_A_GPU
    else:
        free = limits.available_memory()
        most = processes.workers()
    return max(1, min(most, runs, free // bytes_each))


def give_back_memory() -> None:
    """Give back what this process keeps of a GPU's memory for itself: that is for the processes of the runs."""
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


def run_with_reports(work: Callable[..., Any], arguments: tuple[Any, ...], threads: int) -> Any:
    """In a worker: work(*arguments, report) with that many threads of torch; its reports go to the parent."""
    # one, since other runs compile beside it; and it leaves no processes behind
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    import torch

    torch.set_num_threads(threads)
    last = float("-inf")

    def report(amount: float, note: str) -> None:
        nonlocal last
        if time.monotonic() - last > SECONDS_BETWEEN_REPORTS:
            last = time.monotonic()
            processes.report(amount, note)

    return work(*arguments, report)


class RunPool:
    """Processes for up to `count` of `runs`, and their progress in one bar."""

    def __init__(self, count: int, runs: int, bar: Progress, own: processes.Processes) -> None:
        self.processes = own
        self.threads = max(1, processes.workers() // count)  # of each process
        self.bar = bar
        self.runs = runs
        self.opener = threading.current_thread()
        self.lock = threading.Lock()
        self.done = 0  # runs
        self.seen: dict[object, float] = {}  # the amount of each run so far

    def call(self, work: Callable[..., Any], arguments: tuple[Any, ...], amount: float, label: str) -> Any:
        """What work(*arguments, report) returns in one of the processes."""
        run = object()

        def hear(seen: float, note: str) -> None:
            self.show(run, seen, label, note)

        try:
            result, seconds, peak_mib = self.processes.call(run_with_reports, work, arguments, self.threads, hear=hear)
        except processes.Lost as error:
            if self.processes.ended:
                raise InputError(
                    f"'{label}' was cancelled before it finished. Run again: it starts over; finished runs are kept."
                ) from error
            raise InputError(
                f"The process of '{label}' was killed, most likely for lack of memory. The other runs continue. Run "
                "again: only this one starts over; with CRAM_FINETUNES=1 it has all the memory."
            ) from error
        finally:
            with self.lock:
                self.done += 1
        usage.add(seconds, peak_mib)
        self.show(run, amount)
        return result

    def show(self, run: object, amount: float, label: str = "", note: str = "") -> None:
        """Show how far a run is."""
        with self.lock:
            self.seen[run] = max(amount, self.seen.get(run, 0))
            so_far = sum(self.seen.values())
            shown = f"{self.done} of {self.runs:,} done"
            if note:
                shown += f"; {label.removeprefix('finetune ')} {note}"
            self.bar.update(so_far - self.bar.count, shown)


@contextmanager
def several(count: int, total: float, runs: int) -> Iterator[RunPool]:
    """Have `in_worker` use up to `count` processes, from as many threads. They end with the context.

    `total`: the sum of the amounts of all `runs`. After an error, unfinished runs are given up, and threads that have
    yet to begin one get an InputError.
    """
    global pool
    log.info("%s, %d at a time.", counted(runs, "finetuning run"), count)
    with Progress("finetune", total=total, unit="ex") as bar, processes.Processes() as own:
        pool = RunPool(count, runs, bar, own)
        yield pool
        pool = None  # not after an error: the threads may still be there


def is_over() -> bool:
    """Whether this is a thread of a pool that has ended, so that nothing waits for its result any more."""
    return bool(pool and pool.processes.ended and pool.opener is not threading.current_thread())


def in_worker(work: Callable[..., Any], arguments: tuple[Any, ...], amount: float, label: str) -> Any:
    """What work(*arguments, report) returns: within `several` in one of its processes, or else in this one.

    `work` calls report(amount so far, note).
    """
    if pool and (is_over() or not pool.processes.ended):
        return pool.call(work, arguments, amount, label)
    with Progress(label, total=amount, unit="ex") as bar:
        return work(*arguments, lambda seen, note: bar.update(seen - bar.count, note))
