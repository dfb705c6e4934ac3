"""Several finetuning runs at once, each in a process of its own: one that is killed takes no other with it.

Small models leave most of a machine idle when one is trained after the other: two processes of one thread each do more than
one process of two threads. What a run gives depends on its seed and its data, and on threads no more than rounding does.
"""

import contextvars
import errno
import gc
import logging
import multiprocessing
import os
import resource
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from model import InputError
from model.quantities import counted
from tasks.workers import pool
from tasks.workers.progress import Progress
from tasks.workers.usage import usage

ON_A_GPU = 4  # runs at most: each has a CUDA context of its own
BYTES_A_RUN = 3 << 29  # of memory, beside what the model takes: measured at pocket size, where that is little
SECONDS_BETWEEN_REPORTS = 0.5  # from a process to this one
log = logging.getLogger(__name__)

Report = Callable[[int, str], None]  # of how many examples were trained on so far, and a note


def asked() -> int | None:
    """CRAM_FINETUNES, if it is set."""
    found = os.environ.get("CRAM_FINETUNES", "")
    if found and not (found.isdecimal() and int(found) > 0):
        raise InputError(f"CRAM_FINETUNES is {found!r}; expected a positive whole number, or unset for as many as fit.")
    return int(found) if found else None


def at_once(runs: int, each: int = BYTES_A_RUN) -> int:
    """How many of so many runs of `each` bytes at most go on at a time: CRAM_FINETUNES, or what cores and memory allow."""
    told = asked()
    if told or runs <= 1:
        return min(told or 1, runs)
    import torch

    from model import machine

    if machine.detect().device.type != "cuda":
        return max(1, min(pool.workers(), runs, machine.available_memory() // each))
    gc.collect()  # what pretraining in this process has left
    torch.cuda.empty_cache()
    return max(1, min(ON_A_GPU, runs, torch.cuda.mem_get_info()[0] // each))


def serve(pipe: Connection, stop: Connection, environment: dict[str, str], threads: int) -> None:
    """Do what comes through the pipe, until it is closed."""
    pool.start_worker(stop, environment)
    # others compile beside it; and it leaves no pool behind
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    import torch

    torch.set_num_threads(threads)
    while True:
        try:
            work, arguments = pipe.recv()
        except EOFError:
            return
        told, start = 0.0, time.process_time()

        def report(examples: int, note: str) -> None:
            nonlocal told
            if time.monotonic() - told > SECONDS_BETWEEN_REPORTS:
                told = time.monotonic()
                pipe.send(("report", (examples, note)))

        try:
            result = work(*arguments, report)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            answer = ("result", (result, time.process_time() - start, peak))
        except InputError as error:
            answer = ("input error", str(error))
        except OSError as error:
            answer = ("os error", (error.errno or errno.EIO, error.strerror or str(error), error.filename))
        except Exception:
            answer = ("error", traceback.format_exc())
        pipe.send(answer)


class Member:
    """A process that does one run after the other."""

    def __init__(self, threads: int) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        stop, self.stop = multiprocessing.Pipe(duplex=False)  # nothing is ever sent: closed, it ends the process
        with pool.starting_workers():
            pool.ensure_fork_server()
            context = multiprocessing.get_context("forkserver")
            self.process = context.Process(target=serve, args=(theirs, stop, dict(os.environ), threads), daemon=True)
            self.process.start()
        self.given_up = False
        theirs.close()
        stop.close()

    def answers(self, work: Callable, arguments: tuple) -> Iterator[tuple[str, Any]]:
        """Its reports and its answer. Raises EOFError where it has died."""
        try:
            self.pipe.send((work, arguments))
            while True:
                kind, about = self.pipe.recv()
                yield kind, about
                if kind != "report":
                    return
        except OSError as error:
            raise EOFError from error

    def run(self, work: Callable, arguments: tuple, report: Report, label: str) -> tuple[Any, float, float]:
        """What work(*arguments, report) returns there, the CPU seconds that it took, and the process's peak memory, MiB."""
        try:
            for kind, about in self.answers(work, arguments):
                if kind == "report":
                    report(*about)
        except EOFError as error:
            if self.given_up:
                raise given_up(label) from error
            raise InputError(
                f"The process of '{label}' was killed, most likely for lack of memory. The other runs continue. Run "
                "again to repeat only this one; CRAM_FINETUNES=1 gives it all the memory."
            ) from error
        if kind == "input error":
            raise InputError(about)
        if kind == "os error":
            raise OSError(*about)
        if kind == "error":
            raise RuntimeError(f"'{label}' failed in its process:\n{about}")
        return about

    def end(self) -> None:
        """Give up what it does. Who waits for that is told by the other end of the pipe."""
        self.given_up = True
        self.stop.close()
        self.process.join()


def given_up(label: str) -> InputError:
    """What is said of a run that others' end has ended."""
    return InputError(
        f"'{label}' was cancelled before it finished. Run again: it starts over, and finished runs are kept."
    )


class Crew:
    """At most `count` runs at a time, with the progress of all of them in one bar."""

    def __init__(self, count: int, examples: int, runs: int) -> None:
        self.threads = max(1, pool.workers() // count)
        self.idle: list[Member] = []
        self.members: list[Member] = []
        self.lock, self.showing, self.closed = threading.Lock(), threading.Lock(), False
        self.start, self.runs, self.done = time.monotonic(), runs, 0
        self.examples, self.seen, self.shown = examples, {}, 0
        self.bar = Progress("finetune", total=examples, unit="ex")

    def member(self, label: str) -> Member:
        """An idle process, or else a new one."""
        with self.lock:
            while self.idle and not self.closed:
                if (found := self.idle.pop()).process.is_alive():
                    return found
        found = None if self.closed else Member(self.threads)
        with self.lock:
            if found and not self.closed:
                self.members.append(found)
                return found
        if found:  # the end came while it was made
            found.end()
        raise given_up(label)

    def run(self, work: Callable, arguments: tuple, examples: int, label: str) -> Any:
        """Have a process do it."""
        member = self.member(label)
        try:
            result, seconds, peak = member.run(work, arguments, lambda n, note: self.tell(label, n, note), label)
        except BaseException:
            member.end()  # with the memory that it still has
            with self.lock:
                self.members.remove(member)
                self.done += 1
            raise
        usage.add(seconds, peak)
        with self.lock:
            self.idle.append(member)
            self.done += 1
        self.tell(label, examples, "")
        return result

    def tell(self, label: str, examples: int, note: str) -> None:
        """Show how far a run is, and when all will be done."""
        with self.lock:
            self.seen[label] = max(examples, self.seen.get(label, 0))
        if self.showing.acquire(blocking=False):  # else another run is just being shown
            try:
                self.show(f"; {label.removeprefix('finetune ')} {note}" if note else "")
            finally:
                self.showing.release()

    def show(self, note: str = "") -> None:
        """Bring the bar to where the runs are."""
        so_far, spent = sum(self.seen.copy().values()), time.monotonic() - self.start
        minutes = spent * max(0, self.examples - so_far) / max(1, so_far) / 60
        left = f" done, about {minutes:.0f} min left" if self.bar.bar.disable else ""  # a bar on a terminal says when
        self.bar.update(so_far - self.shown, f"{self.done} of {counted(self.runs, 'run')}{left}{note}")
        self.shown = so_far

    def end(self) -> None:
        """End every process; what they are at is given up, and nothing more begins."""
        with self.lock:
            self.closed, members = True, self.members.copy()
        for member in members:
            member.end()
        with self.showing:
            self.show()
        self.bar.__exit__()


crew: contextvars.ContextVar[Crew | None] = contextvars.ContextVar("crew", default=None)


@contextmanager
def several(count: int, examples: int, runs: int) -> Iterator[Crew]:
    """In here, what is `run` from threads with this context goes on in processes, side by side; after it, in none."""
    log.info("%s, %d at a time.", counted(runs, "finetuning run"), count)
    ours = Crew(count, examples, runs)
    before = crew.set(ours)
    try:
        yield ours
    finally:
        crew.reset(before)
        ours.end()


def run(work: Callable, arguments: tuple, examples: int, label: str) -> Any:
    """What work(*arguments, report) returns: from one of several processes, or alone from this one."""
    if ours := crew.get():
        return ours.run(work, arguments, examples, label)
    with Progress(label, total=examples, unit="ex") as bar:
        return work(*arguments, lambda seen, note: bar.update(seen - bar.count, note))
