"""Several training runs side by side, each in a process of its own: if one is killed, the others continue.

Small models leave most of a machine idle when they are trained one after the other: two processes of one thread each do
more than one process of two threads. A run's result depends on its seed and data; threads change it by rounding only.
"""

import contextvars
import gc
import logging
import multiprocessing
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from model import InputError
from model.environment import whole_number
from model.quantities import counted
from tasks.workers import pool
from tasks.workers.progress import Progress
from tasks.workers.usage import measured, usage

ON_A_GPU = 4  # finetuning runs at most: each has a CUDA context of its own
BYTES_A_RUN = 3 << 29  # of memory, without the model: measured at pocket size, where the model takes little
SECONDS_BETWEEN_REPORTS = 0.5  # from a worker to this process
log = logging.getLogger(__name__)
to_parent: Connection | None = None  # in a worker: for (amount, note)


class Kind(NamedTuple):
    """A kind of run."""

    stage: str
    noun: str
    unit: str  # of its progress; without one, each run amounts to 1
    cores: int  # of the CPU, for a run
    variable: str  # in the environment: how many at a time
    default: str  # how many without it
    again: str  # what an unfinished run does when it is started again

    def asked(self) -> int | None:
        """The variable, or None."""
        return whole_number(self.variable, self.default)


FINETUNE = Kind("finetune", "finetuning run", "ex", 1, "CRAM_FINETUNES", "as many as fit", "starts over")
PRETRAIN = Kind(
    "pretrain", "pretraining run", "", 4, "CRAM_TRAININGS", "one per GPU or four cores", "resumes from its checkpoint"
)
KINDS = {kind.stage: kind for kind in (FINETUNE, PRETRAIN)}


def at_once(kind: Kind, runs: int, each: int = BYTES_A_RUN) -> int:
    """How many of `runs` go on at a time: as asked, or as GPUs, cores and memory allow at `each` bytes a run."""
    if runs > 1:
        free_gpu()
    most = kind.asked()
    if kind is PRETRAIN and (whole_number("CRAM_GPUS", "one") or 1) > 1:  # a run has several processes already
        most = 1
    if most or runs <= 1:
        return min(most or 1, runs)
    import torch

    from model import machine

    if machine.detect().device.type != "cuda":
        return max(1, min(pool.workers() // kind.cores, runs, machine.available_memory() // each))
    if kind is PRETRAIN:
        return min(torch.cuda.device_count(), runs)
    return max(1, min(ON_A_GPU, runs, torch.cuda.mem_get_info()[0] // each))


def free_gpu() -> None:
    """Give back the GPU memory that this process keeps for itself, so that runs in other processes have it."""
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


def gpus(kind: Kind) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES for each GPU that gets runs of its own; [None] if runs use what this process uses."""
    if kind is not PRETRAIN:
        return [None]
    import torch

    from model import machine

    if machine.detect().device.type != "cuda":
        return [None]
    count, visible = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[:count] if visible else [str(number) for number in range(count)]


def set_up(reports: Connection, threads: int, gpu: str | None) -> None:
    """Prepare a new worker for training."""
    global to_parent
    to_parent = reports
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # torch reads it later
    # one, since other runs compile beside it; and it leaves no processes behind
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    import torch

    torch.set_num_threads(threads)


def reporting(work: Callable, arguments: tuple) -> tuple[Any, float, float]:
    """In a worker: what `measured` gives of work(*arguments, report), whose reports go to the parent."""
    last = float("-inf")

    def report(amount: float, note: str) -> None:
        nonlocal last
        if time.monotonic() - last > SECONDS_BETWEEN_REPORTS:
            last = time.monotonic()
            to_parent.send((amount, note))

    try:
        return measured(work, *arguments, report)
    except SystemExit:  # a signal stopped the run, which has saved a checkpoint
        os._exit(1)
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # the parent would take it for a killed process
            raise RuntimeError(traceback.format_exc()) from None
        raise


class Worker(pool.Workers):
    """A process that does one run after the other, and the end of the pipe that its reports come from."""

    def __init__(self, threads: int, gpu: str | None) -> None:
        self.reports, theirs = multiprocessing.Pipe(duplex=False)
        self.gpu = gpu
        super().__init__(1, set_up, theirs, threads, gpu)

    def begin(self, work: Callable, arguments: tuple) -> Future:
        """The future of a run."""
        return self.submit(reporting, work, arguments)

    def result(self, future: Future, report: Callable[[float, str], None]) -> tuple[Any, float, float]:
        """Wait for a run, passing on its reports."""
        while True:
            done = wait([future], SECONDS_BETWEEN_REPORTS).done
            while self.reports.poll():
                report(*self.reports.recv())
            if done:
                return future.result()


class RunPool:
    """Processes for up to `count` runs at a time, with the progress of all runs, `total`, in one bar."""

    def __init__(self, kind: Kind, count: int, total: float, runs: int) -> None:
        self.kind, self.gpus, self.threads = kind, gpus(kind), max(1, pool.workers() // count)
        self.workers: list[Worker] = []
        self.idle: list[Worker] = []
        self.lock, self.closed = threading.Lock(), False
        self.start, self.runs, self.done = time.monotonic(), runs, 0
        self.total, self.seen = total, {}
        self.bar = Progress(kind.stage, total=total, unit=kind.unit)

    def begin(self, work: Callable, arguments: tuple, label: str) -> tuple[Worker, Future]:
        """Begin a run in an idle process or in a new one."""
        with self.lock:
            if self.closed:
                raise self.cancelled(label)
            while self.idle:
                worker = self.idle.pop()
                with suppress(BrokenProcessPool):  # it died while it was idle
                    return worker, worker.begin(work, arguments)
                worker.end()
                self.workers.remove(worker)
            gpu = min(self.gpus, key=lambda gpu: sum(worker.gpu == gpu for worker in self.workers))
            self.workers.append(worker := Worker(self.threads, gpu))
            return worker, worker.begin(work, arguments)

    def run(self, work: Callable, arguments: tuple, amount: float, label: str) -> Any:
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
            raise self.cancelled(label) if self.closed else self.killed(label) from error
        usage.add(*used)
        with self.lock:
            self.idle.append(worker)
            self.done += 1
        self.show(label, amount)
        return result

    def show(self, label: str, amount: float, note: str = "") -> None:
        """Show how far a run is, and when all will be done."""
        with self.lock:
            self.seen[label] = max(amount, self.seen.get(label, 0))
            so_far, seconds = sum(self.seen.values()), time.monotonic() - self.start
            minutes = seconds * max(0, self.total / so_far - 1) / 60 if so_far else 0
            left = f" done, about {minutes:.0f} min left" if self.bar.bar.disable else ""  # a bar shows the time left
            note = f"; {label.removeprefix(f'{self.kind.stage} ')} {note}" if note else ""
            self.bar.update(so_far - self.bar.count, f"{self.done} of {counted(self.runs, 'run')}{left}{note}")

    def end(self) -> None:
        """End every process; unfinished runs are given up, and no run begins after this."""
        with self.lock:
            self.closed, workers = True, self.workers.copy()
        for worker in workers:
            worker.ask_to_end()  # all at the same time, as each may save a checkpoint
        for worker in workers:
            worker.end()
        self.bar.__exit__()

    def killed(self, label: str) -> InputError:
        """The error of a run whose process was killed."""
        return InputError(
            f"The process of '{label}' was killed, most likely for lack of memory. The other runs continue. Run again: "
            f"only this one {self.kind.again}; {self.kind.variable}=1 gives it all the memory."
        )

    def cancelled(self, label: str) -> InputError:
        """The error of a run that was given up at the end of its pool."""
        return InputError(
            f"'{label}' was cancelled before it finished. Run again: it {self.kind.again}, and finished runs are kept."
        )


current: contextvars.ContextVar[RunPool | None] = contextvars.ContextVar("current", default=None)
title: contextvars.ContextVar[str] = contextvars.ContextVar("title", default="")  # of the run in a context


@contextmanager
def several(kind: Kind, count: int, total: float, runs: int) -> Iterator[RunPool]:
    """In this context, `run` uses up to `count` processes, from threads that have the context; they end with it."""
    log.info("%s, %d at a time.", counted(runs, kind.noun), count)
    run_pool = RunPool(kind, count, total, runs)
    before = current.set(run_pool)
    try:
        yield run_pool
    finally:
        current.reset(before)
        run_pool.end()


@contextmanager
def titled(name: str) -> Iterator[None]:
    """In this context, and in the threads that it is copied to, a run in one of several processes has this name."""
    before = title.set(name)
    try:
        yield
    finally:
        title.reset(before)


def run(kind: Kind, work: Callable, arguments: tuple, amount: float, label: str) -> Any:
    """What work(*arguments, report) returns: in one of several processes, or else in this one."""
    if run_pool := current.get():
        return run_pool.run(work, arguments, amount, title.get() or label)
    with Progress(label, total=amount, unit=kind.unit) as bar:
        return work(*arguments, lambda seen, note: bar.update(seen - bar.count, note))
