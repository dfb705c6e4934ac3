"""Several finetuning runs side by side, each in a process of its own: if one is killed, the others continue.

Small models leave most of a machine idle when they are trained one after the other: two processes of one thread each do
more than one process of two threads. A run's result depends on its seed and data; threads change it by rounding only.
"""

import contextvars
import gc
import logging
import multiprocessing
import os
import pickle
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

from model import InputError
from model.environment import whole_number
from model.quantities import counted
from tasks.workers import pool
from tasks.workers.progress import Progress
from tasks.workers.usage import measured, usage

ON_A_GPU = 4  # runs at most: each has a CUDA context of its own
BYTES_A_RUN = 3 << 29  # of memory, without the model: measured at pocket size, where the model takes little
SECONDS_BETWEEN_REPORTS = 0.5  # from a worker to this process
log = logging.getLogger(__name__)
to_parent: Connection | None = None  # in a worker: for (examples, note)


def asked() -> int | None:
    """CRAM_FINETUNES, or None."""
    return whole_number("CRAM_FINETUNES", "as many as fit")


def at_once(runs: int, each: int = BYTES_A_RUN) -> int:
    """How many of `runs` train at a time: CRAM_FINETUNES, or what cores and memory allow at `each` bytes a run."""
    most = asked()
    if most or runs <= 1:
        return min(most or 1, runs)
    import torch

    from model import machine

    if machine.detect().device.type != "cuda":
        return max(1, min(pool.workers(), runs, machine.available_memory() // each))
    gc.collect()  # free what pretraining in this process has left
    torch.cuda.empty_cache()
    return max(1, min(ON_A_GPU, runs, torch.cuda.mem_get_info()[0] // each))


def set_up(reports: Connection, threads: int) -> None:
    """Prepare a new worker for training."""
    global to_parent
    to_parent = reports
    # one, since other runs compile beside it; and it leaves no processes behind
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    import torch

    torch.set_num_threads(threads)


def reporting(work: Callable, arguments: tuple) -> tuple[Any, float, float]:
    """In a worker: what `measured` gives of work(*arguments, report), whose reports go to the parent."""
    last = float("-inf")

    def report(examples: int, note: str) -> None:
        nonlocal last
        if time.monotonic() - last > SECONDS_BETWEEN_REPORTS:
            last = time.monotonic()
            to_parent.send((examples, note))

    try:
        return measured(work, *arguments, report)
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # the parent would take it for a killed process
            raise RuntimeError(traceback.format_exc()) from None
        raise


class Worker(pool.Workers):
    """A process that does one run after the other, and the end of the pipe that its reports come from."""

    def __init__(self, threads: int) -> None:
        self.reports, theirs = multiprocessing.Pipe(duplex=False)
        super().__init__(1, set_up, theirs, threads)

    def begin(self, work: Callable, arguments: tuple) -> Future:
        """The future of a run."""
        return self.submit(reporting, work, arguments)

    def result(self, future: Future, report: Callable[[int, str], None]) -> tuple[Any, float, float]:
        """Wait for a run, passing on its reports."""
        while True:
            done = wait([future], SECONDS_BETWEEN_REPORTS).done
            while self.reports.poll():
                report(*self.reports.recv())
            if done:
                return future.result()


class RunPool:
    """Processes for up to `count` runs at a time, with the progress of all runs in one bar."""

    def __init__(self, count: int, examples: int, runs: int) -> None:
        self.threads = max(1, pool.workers() // count)
        self.workers: list[Worker] = []
        self.idle: list[Worker] = []
        self.lock, self.closed = threading.Lock(), False
        self.start, self.runs, self.done = time.monotonic(), runs, 0
        self.examples, self.seen = examples, {}
        self.bar = Progress("finetune", total=examples, unit="ex")

    def begin(self, work: Callable, arguments: tuple, label: str) -> tuple[Worker, Future]:
        """Begin a run in an idle process or in a new one."""
        with self.lock:
            if self.closed:
                raise cancelled(label)
            while self.idle:
                worker = self.idle.pop()
                with suppress(BrokenProcessPool):  # it died while it was idle
                    return worker, worker.begin(work, arguments)
                worker.end()
                self.workers.remove(worker)
            self.workers.append(worker := Worker(self.threads))
            return worker, worker.begin(work, arguments)

    def run(self, work: Callable, arguments: tuple, examples: int, label: str) -> Any:
        """What work(*arguments, report) returns in one of the processes."""
        worker, future = self.begin(work, arguments, label)
        try:
            result, *used = worker.result(future, lambda seen, note: self.show(label, seen, note))
        except BaseException as error:
            worker.end()  # also frees the memory of a run that has failed
            with self.lock:
                self.workers.remove(worker)
                self.done += 1
            if not isinstance(error, BrokenProcessPool):
                raise
            raise cancelled(label) if self.closed else killed(label) from error
        usage.add(*used)
        with self.lock:
            self.idle.append(worker)
            self.done += 1
        self.show(label, examples)
        return result

    def show(self, label: str, examples: int, note: str = "") -> None:
        """Show how far a run is, and when all will be done."""
        with self.lock:
            self.seen[label] = max(examples, self.seen.get(label, 0))
            so_far, seconds = sum(self.seen.values()), time.monotonic() - self.start
            minutes = seconds * max(0, self.examples - so_far) / max(1, so_far) / 60
            left = f" done, about {minutes:.0f} min left" if self.bar.bar.disable else ""  # a bar shows the time left
            note = f"; {label.removeprefix('finetune ')} {note}" if note else ""
            self.bar.update(so_far - self.bar.count, f"{self.done} of {counted(self.runs, 'run')}{left}{note}")

    def end(self) -> None:
        """End every process; unfinished runs are given up, and no run begins after this."""
        with self.lock:
            self.closed, workers = True, self.workers.copy()
        for worker in workers:
            worker.end()
        self.bar.__exit__()


def killed(label: str) -> InputError:
    """The error of a run whose process was killed."""
    return InputError(
        f"The process of '{label}' was killed, most likely for lack of memory. The other runs continue. Run again to "
        "repeat only this one; CRAM_FINETUNES=1 gives it all the memory."
    )


def cancelled(label: str) -> InputError:
    """The error of a run that was given up at the end of its pool."""
    return InputError(
        f"'{label}' was cancelled before it finished. Run again: it starts over, and finished runs are kept."
    )


current: contextvars.ContextVar[RunPool | None] = contextvars.ContextVar("current", default=None)


@contextmanager
def several(count: int, examples: int, runs: int) -> Iterator[RunPool]:
    """In this context, `run` uses up to `count` processes, from threads that have the context; they end with it."""
    log.info("%s, %d at a time.", counted(runs, "finetuning run"), count)
    run_pool = RunPool(count, examples, runs)
    before = current.set(run_pool)
    try:
        yield run_pool
    finally:
        current.reset(before)
        run_pool.end()


def run(work: Callable, arguments: tuple, examples: int, label: str) -> Any:
    """What work(*arguments, report) returns: in one of several processes, or else in this one."""
    if run_pool := current.get():
        return run_pool.run(work, arguments, examples, label)
    with Progress(label, total=examples, unit="ex") as bar:
        return work(*arguments, lambda seen, note: bar.update(seen - bar.count, note))
