"""Progress of long work: a bar on a terminal, lines in a log, and a progress artifact on the page of a Prefect run."""

import logging
import os
import queue
import re
import sys
import threading
import time
from bisect import bisect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import Context, ContextVar, copy_context
from typing import cast
from uuid import UUID

from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.runtime import task_run
from rich.cells import cell_len, set_cell_size
from rich.filesize import decimal
from tqdm import tqdm

from model.signals import Stopped
from model.wording import duration

SECONDS_BETWEEN_REPORTS = 10  # to Prefect
# in a log that is not a terminal
MARKS = (0.1, 0.25, 0.5, 0.75, 0.9)  # fractions at which a line says how far the work is
LONG_SECONDS = 20.0  # work that takes less, at its pace so far, has no such lines
SECONDS_BETWEEN_LINES = 120.0  # at most, however long the work takes
USUAL_COLUMNS = 80
# on a bar
COUNTED = ("part", "doc", "B")  # units of which the amounts are shown; of others, only percents are
FREE = 3  # columns at the end of the line, for the ^C that a terminal shows: on another line it would stay
BESIDE_NOTE = 38  # columns for percents, times, and 10 or more of the bar itself
AMOUNTS = 20
run: ContextVar[str] = ContextVar("run", default="")  # of a study, which the work belongs to; in brackets
log = logging.getLogger(__name__)


@contextmanager
def labelled(name: str) -> Iterator[None]:
    """Show behind the label of all work in this context which run it belongs to; an empty name adds nothing."""
    token = run.set(name)
    try:
        yield
    finally:
        run.reset(token)


def shortened(text: str, columns: int) -> str:
    """The text without its middle, if it takes more columns of a terminal than these."""
    if cell_len(text) <= columns:
        return text
    room = max(0, columns - 1)
    end = text
    while cell_len(end) > room // 2:
        end = end[1:]
    return f"{set_cell_size(text, room - cell_len(end))}…{end}"


def beginning(text: str, columns: int) -> str:
    """The text without its end, if it takes more columns of a terminal than these."""
    if cell_len(text) <= columns:
        return text
    return f"{set_cell_size(text, max(0, columns - 1))}…"


def terminal_columns() -> int:
    """The width of the terminal at standard error; 80 if there is none."""
    with suppress(OSError, ValueError):  # of a stream that isn't a terminal, or not even a file
        return os.get_terminal_size(sys.stderr.fileno()).columns or USUAL_COLUMNS
    return USUAL_COLUMNS


class Messenger:
    """Makes calls to Prefect's server from a separate thread, so that no work ever waits for the server.

    Of the calls that wait only the newest is made, and one that fails is dropped: the next one knows more.
    """

    def __init__(self) -> None:
        self.calls: queue.Queue[tuple[Context, Callable[[], object]]] = queue.Queue(1)
        self.thread: threading.Thread | None = None

    def send(self, call: Callable[[], object]) -> None:
        """Make a call in the context of the caller, which knows the Prefect run; returns at once."""
        if self.thread is None or not self.thread.is_alive():  # not alive: this process is a fork
            self.thread = threading.Thread(target=self._work, daemon=True)
            self.thread.start()
        with suppress(queue.Empty):
            self.calls.get_nowait()  # an older one, which knows less
        with suppress(queue.Full):
            self.calls.put_nowait((copy_context(), call))

    def _work(self) -> None:
        while True:
            context, call = self.calls.get()
            try:
                context.run(call)
            except BaseException as error:  # signals of Prefect's, too: this thread must live on
                log.debug("Prefect's server did not take the progress: %s", error)


messenger = Messenger()


class Progress(AbstractContextManager["Progress"]):
    """Counts from `done` to `total` (None if unknown); a context manager. Without a unit, the count is a fraction of 1.

    `done`: what an earlier attempt has done; it tells nothing about the pace.
    """

    def __init__(self, label: str, total: float | None, unit: str = "", done: float = 0.0) -> None:
        self.label = " ".join(filter(None, (label, run.get())))
        self.total = total
        self.unit = unit
        self.done = done
        self.count = done
        self.note = ""
        self.began = time.monotonic()
        self.reported = self.began
        self.logged = self.began
        self.passed = bisect(MARKS, self.fraction)  # of MARKS
        self.shown = False  # on the page of a run
        self.artifact: UUID | None = None
        self.bar = tqdm(
            total=total,
            desc=shortened(self.label, terminal_columns() // 3),
            unit=unit,
            unit_scale=unit == "B",
            initial=done,
            disable=not sys.stderr.isatty(),
            leave=False,
            ncols=terminal_columns() - FREE,
            bar_format=self._bar_format(),
        )

    def __exit__(self, *_: object) -> None:
        self.bar.close()
        if self.shown:
            self._report()

    def _bar_format(self) -> str | None:
        """The format of a bar; None for the usual one of work without a known total."""
        if not self.total:
            return None
        amounts = "{n_fmt}/{total_fmt} " if self.unit in COUNTED else ""
        return f"{{l_bar}}{{bar}}| {amounts}[{{elapsed}}<{{remaining}}{{postfix}}]"

    def _fit(self, note: str) -> None:
        """Show label and note on the bar as far as there is room for them, so that it stays on one line."""
        columns = terminal_columns() - FREE
        self.bar.ncols = columns  # the terminal may have been resized
        label = shortened(self.label, columns // 3)
        self.bar.set_description_str(f"{label}: ", refresh=False)
        amounts = AMOUNTS if self.unit in COUNTED else 0
        room = columns - cell_len(label) - BESIDE_NOTE - amounts
        self.bar.set_postfix_str(beginning(note, room), refresh=False)

    @property
    def fraction(self) -> float:
        """The fraction that is done; 0 if the total is unknown."""
        return min(1.0, self.count / self.total) if self.total else 0.0

    @property
    def seconds_left(self) -> float | None:
        """How long the rest takes at the pace so far; None if that can't be known."""
        counted = self.count - self.done
        if not self.total or counted <= 0:
            return None
        seconds = time.monotonic() - self.began
        return seconds * max(0.0, self.total - self.count) / counted

    def update(self, amount: float = 1, note: str = "") -> None:
        """Add `amount` to the count; `note` is shown behind it."""
        self.count += amount
        self.note = note
        if not self.bar.disable:
            self._fit(note)
            self.bar.update(amount)
        elif self._is_due():
            self._log()
        if time.monotonic() - self.reported > SECONDS_BETWEEN_REPORTS:
            self._report()

    def _is_due(self) -> bool:
        """Whether the log is to say how far the work is: at MARKS of long work, and otherwise after two minutes."""
        passed = bisect(MARKS, self.fraction)
        is_at_mark = passed > self.passed
        self.passed = passed
        if self.fraction == 1:  # what was made is logged next
            return False
        now = time.monotonic()
        left = self.seconds_left
        is_long = left is not None and now - self.began + left >= LONG_SECONDS
        return (is_at_mark and is_long) or now - self.logged >= SECONDS_BETWEEN_LINES

    def _log(self) -> None:
        self.logged = time.monotonic()
        how_far = decimal(int(self.count)) if self.unit == "B" else f"{self.count:,.0f} {self.unit}"
        left = self.seconds_left
        if self.total:
            how_far = f"{100 * self.fraction:.0f} %"
        if left is not None:
            how_far += f", about {duration(left, 2)} left"
        try:
            log.info("%s: %s", self.label, "; ".join(filter(None, (how_far, self.note))))
        except Stopped:
            raise
        except SystemExit:  # of rich, if nobody reads the output any more: the work continues
            pass

    def _report(self) -> None:
        self.reported = time.monotonic()
        percent = 100 * self.fraction
        if task_run.id:
            self.shown = True
            messenger.send(lambda: self._show(percent))

    def _show(self, percent: float) -> None:
        if self.artifact is None:
            key = re.sub("[^a-z0-9]+", "-", self.label.lower()).strip("-")
            made = create_progress_artifact(progress=percent, key=key, description=self.label)
            self.artifact = cast(UUID, made)  # no coroutine, outside of asynchronous code
        else:
            update_progress_artifact(self.artifact, progress=percent)
