"""Several finetuning runs at once, each in a process of its own: one that is killed takes no other with it.

Small models leave most of a machine idle when one is trained after the other: two processes of one thread each do more than
one process of two threads. What a run gives depends on its seed and its data, not on what runs beside it.
"""

import multiprocessing
import os
import re
import resource
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from model import InputError
from tasks import parallel
from tasks.progress import Progress

ON_A_GPU = 4  # runs at most: each has a CUDA context of its own
BYTES_A_RUN = 3 << 30  # free memory for a run of a model of BERT's size: weights, AdamW's state, activations
SECONDS_BETWEEN_REPORTS = 0.5  # from a process to this one

Report = Callable[[int, str], None]  # of how many examples were trained on so far, and a note


def at_once(runs: int) -> int:
    """How many of so many runs go on at a time: CRAM_FINETUNES, or what cores and memory allow."""
    asked = os.environ.get("CRAM_FINETUNES", "")
    if asked and not (asked.isdecimal() and int(asked) > 0):
        raise InputError(f"CRAM_FINETUNES is {asked!r}; expected a positive whole number, or unset for as many as fit.")
    if asked or runs <= 1:
        return min(int(asked or 1), runs)
    import torch

    from model import machine

    if machine.detect().device.type == "cuda":
        return max(1, min(ON_A_GPU, runs, torch.cuda.mem_get_info()[0] // BYTES_A_RUN))
    return max(1, min(parallel.workers(), runs, available_memory() // BYTES_A_RUN))


def available_memory() -> int:
    """Bytes that can be had without swapping; many, where the kernel doesn't tell."""
    with suppress(OSError):
        if found := re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text()):
            return int(found[1]) * 1024
    return 1 << 50


def serve(pipe: Connection, stop: Connection, environment: dict[str, str], threads: int) -> None:
    """Do what comes through the pipe, until it is closed."""
    parallel.start_worker(stop, environment)
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
        except Exception:
            answer = ("error", traceback.format_exc())
        pipe.send(answer)


class Member:
    """A process that does one run after the other."""

    def __init__(self, threads: int) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        stop, self.stop = multiprocessing.Pipe(duplex=False)  # nothing is ever sent: closed, it ends the process
        with parallel.starting, parallel.without_main():
            parallel.ensure_fork_server()
            context = multiprocessing.get_context("forkserver")
            self.process = context.Process(target=serve, args=(theirs, stop, dict(os.environ), threads), daemon=True)
            self.process.start()
        self.given_up = False
        theirs.close()
        stop.close()

    def run(self, work: Callable, arguments: tuple, report: Report, label: str) -> tuple[Any, float, float]:
        """What work(*arguments, report) returns there, the CPU seconds that it took, and the process's peak memory, MiB."""
        try:
            self.pipe.send((work, arguments))
            while True:
                kind, about = self.pipe.recv()
                if kind == "report":
                    report(*about)
                else:
                    break
        except (EOFError, OSError) as error:
            self.process.join()
            if self.given_up:
                raise InputError(
                    f"'{label}' was given up. Run again: it is done anew, and what had ended is kept."
                ) from error
            raise InputError(
                f"The process of '{label}' was killed, most likely for lack of memory. What ran beside it goes on. Run again: "
                "only this is done anew; with CRAM_FINETUNES=1 it has the memory for itself."
            ) from error
        if kind == "input error":
            raise InputError(about)
        if kind == "error":
            raise RuntimeError(f"'{label}' failed in its process:\n{about}")
        return about

    def end(self) -> None:
        """Give up what it does. Who waits for that is told by the other end of the pipe."""
        self.given_up = True
        self.stop.close()
        self.process.join()


class Crew:
    """At most `count` runs at a time, with the progress of all of them in one bar."""

    def __init__(self, count: int, examples: int, runs: int) -> None:
        self.threads = max(1, parallel.workers() // count)
        self.idle: list[Member] = []
        self.members: list[Member] = []
        self.lock, self.start = threading.Lock(), time.monotonic()
        self.runs, self.done, self.examples, self.seen = runs, 0, examples, {}
        self.bar = Progress("finetune", total=examples, unit="ex")

    def run(self, work: Callable, arguments: tuple, examples: int, label: str) -> Any:
        """Have a process do it: an idle one, or else a new one."""
        with self.lock:
            member = self.idle.pop() if self.idle else None
        if member is None:
            member = Member(self.threads)
            with self.lock:
                self.members.append(member)
        result, seconds, peak = member.run(work, arguments, lambda n, note: self.tell(label, n, note), label)
        parallel.usage.add(seconds, peak)
        with self.lock:
            self.idle.append(member)
            self.done += 1
        self.tell(label, examples, "")
        return result

    def tell(self, label: str, examples: int, note: str) -> None:
        """Show how far a run is, and when all will be done."""
        with self.lock:
            more = max(0, examples - self.seen.get(label, 0))
            self.seen[label] = max(examples, self.seen.get(label, 0))
            so_far, spent = sum(self.seen.values()), time.monotonic() - self.start
            left = spent * max(0, self.examples - so_far) / so_far if so_far else 0.0
            about = f"{self.done} of {self.runs} runs done, about {left / 60:.0f} min left"
            self.bar.update(more, f"{about}; {label.removeprefix('finetune ')} {note}" if note else about)

    def end(self) -> None:
        """End every process; what they are at is given up."""
        for member in self.members:
            member.end()
        self.bar.__exit__()


crew: Crew | None = None  # of the flow that runs in this process


@contextmanager
def several(count: int, examples: int, runs: int) -> Iterator[None]:
    """In here, what is `run` from several threads goes on in processes, side by side."""
    global crew
    crew = Crew(count, examples, runs)
    try:
        yield
    finally:
        ended, crew = crew, None
        ended.end()


def run(work: Callable, arguments: tuple, examples: int, label: str) -> Any:
    """What work(*arguments, report) returns: from one of several processes, or alone from this one."""
    if crew is not None:
        return crew.run(work, arguments, examples, label)
    with Progress(label, total=examples, unit="ex") as bar:
        return work(*arguments, lambda seen, note: bar.update(seen - bar.count, note))
