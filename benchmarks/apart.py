"""Work in a process of its own, which outlives the call that starts it, and which later calls wait for.

A lock on a file in the folder of results shows whether it still works: the kernel releases it when the process ends.
"""

import argparse
import fcntl
import json
import os
import subprocess
import time
from pathlib import Path

import card

from model.checkpoint import METRICS
from model.errors import InputError

LOCK = "apart.lock"
LOG = "apart.log"
LAST_LINES = 12
SHOWN = ("step", "fraction", "seconds", "loss", "tokens_per_second", "mfu")  # of the metrics


def start(folder: Path, command: list[str]) -> None:
    """Start the command in a process session of its own. Raises InputError if another one works in the folder."""
    with (folder / LOCK).open("a") as lock, (folder / LOG).open("ab") as log:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(f"A process works in {folder} already. Wait for it with `gpu.py wait`.") from error
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=[lock.fileno()],  # it keeps the lock
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
    print(f"Process {process.pid} works in {folder} and writes {LOG} there; `kill -INT {process.pid}` stops it.")


def works(folder: Path) -> bool:
    """Whether a process that was started works in the folder."""
    with (folder / LOCK).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def wait(given: argparse.Namespace) -> None:
    """Print how far the work in the folder is, every so many seconds, until it ends; then the last lines of its log.

    Raises InputError if none was started.
    """
    folder = given.folder
    if not (folder / LOG).exists():
        raise InputError(f"Nothing was started in {folder}. Start a part with --apart.")
    print_at = time.monotonic()
    while works(folder):
        if time.monotonic() >= print_at:
            print(progress(folder), flush=True)
            print_at += given.every
        time.sleep(min(given.every, 1.0))
    print(progress(folder))
    print("\n".join(log_of(folder)[-LAST_LINES:]))


def progress(folder: Path) -> str:
    """The last step of the run that wrote its metrics last, the card's numbers, and the last line of the log."""
    shown = [time.strftime("%H:%M:%S")]
    files = sorted(folder.rglob(METRICS), key=lambda path: path.stat().st_mtime)
    lines = files[-1].read_text(encoding="utf-8").splitlines() if files else []
    if lines:
        row = json.loads(lines[-1])
        shown.append(files[-1].parent.name)
        shown += [f"{name} {row[name]:,.4g}" for name in SHOWN]
    else:
        shown.append("no step yet")
    shown += [f"{name} {value:,.4g}" for name, value in card.now().items() if value is not None]
    last_lines = log_of(folder)[-1:]
    return "; ".join([", ".join(shown), *last_lines])


def log_of(folder: Path) -> list[str]:
    """The lines of the log."""
    return (folder / LOG).read_text(encoding="utf-8", errors="replace").splitlines()
