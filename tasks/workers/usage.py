"""CPU time and peak memory of a stage: of this process and of its workers."""

import resource
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any


class Usage(threading.local):
    """What the workers of a stage used. Each thread runs a stage of its own."""

    peak_mib = 0.0  # the largest resident memory of any worker
    cpu_seconds = 0.0  # of all workers

    def add(self, seconds: float, peak_mib: float) -> None:
        """Add what one worker used for one piece of work."""
        self.cpu_seconds, self.peak_mib = self.cpu_seconds + seconds, max(self.peak_mib, peak_mib)


usage = Usage()


def measured(work: Callable, *arguments: object) -> tuple[Any, float, float]:
    """The result of work(*arguments), the CPU seconds it took, and this process's peak memory, MiB."""
    start = time.process_time()
    result = work(*arguments)
    return result, time.process_time() - start, peak_memory()["process"]


def reset_usage() -> float:
    """Restart the peak of resident memory, where the kernel allows it (Linux); returns the CPU seconds so far."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    usage.peak_mib = usage.cpu_seconds = 0.0
    return cpu_clock()


def cpu_clock() -> float:
    """CPU seconds of this process, or of this thread if stages run in several threads."""
    return time.process_time() if threading.current_thread() is threading.main_thread() else time.thread_time()


def peak_memory() -> dict:
    """Peak resident memory since the last reset, MiB: of this process, and of the largest worker."""
    mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    with suppress(OSError):
        status = Path("/proc/self/status").read_text()
        mib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1024
    return {"process": round(mib), "largest_worker": round(usage.peak_mib)}
