"""What nvidia-smi says of the card while something runs: its clock, power, memory and temperature."""

import shutil
import statistics
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager

FIELDS = {  # of a result, and what nvidia-smi calls them
    "clock_mhz": "clocks.sm",
    "watts": "power.draw",
    "memory_mib": "memory.used",
    "celsius": "temperature.gpu",
}
COMMAND = ["nvidia-smi", f"--query-gpu={','.join(FIELDS.values())}", "--format=csv,noheader,nounits"]
SECONDS_BETWEEN = 10.0
PATIENCE = 10.0  # seconds for an answer


def now() -> dict[str, float | None]:
    """The first card's numbers. None for each that it doesn't report, and for all where there is no card."""
    if shutil.which(COMMAND[0]) is None:
        return dict.fromkeys(FIELDS)
    try:
        said = subprocess.run(COMMAND, capture_output=True, text=True, timeout=PATIENCE, check=True).stdout
    except subprocess.SubprocessError:
        return dict.fromkeys(FIELDS)
    values = said.splitlines()[0].split(",")
    return {name: number(value) for name, value in zip(FIELDS, values, strict=True)}


def number(text: str) -> float | None:
    """A number, or None for words such as [N/A]."""
    try:
        return float(text)
    except ValueError:
        return None


@contextmanager
def watched() -> Iterator[dict[str, float | None]]:
    """Gives numbers that are there when the context ends: the medians of what the card said in it, every ten seconds.

    A thread asks, so that the work doesn't wait.
    """
    seen: list[dict[str, float | None]] = []
    medians: dict[str, float | None] = dict.fromkeys(FIELDS)
    ended = threading.Event()

    def ask() -> None:
        seen.append(now())
        while not ended.wait(SECONDS_BETWEEN):
            seen.append(now())

    thread = threading.Thread(target=ask, name="card", daemon=True)
    if shutil.which(COMMAND[0]):
        thread.start()
    try:
        yield medians
    finally:
        ended.set()
        if thread.ident:
            thread.join()
        for name in FIELDS:
            values = [sample[name] for sample in seen if sample[name] is not None]
            medians[name] = statistics.median(values) if values else None
