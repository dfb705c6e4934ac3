"""Progress of long work: a bar on a terminal, lines in a log, and a progress artifact on the page of a Prefect run."""

import logging
import queue
import re
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from contextvars import Context, copy_context
from typing import Any, cast
from uuid import UUID

from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.runtime import task_run
from tqdm import tqdm

from model.signals import Stopped

SECONDS_BETWEEN_REPORTS = 10  # to Prefect, and to a log that is not a terminal
log = logging.getLogger(__name__)


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
    """Counts from 0 to `total` (None if unknown); a context manager. Without a unit, the count is a fraction of 1."""

    def __init__(self, label: str, total: float | None, unit: str = "") -> None:
        self.label = label
        self.total = total
        self.unit = unit
        self.count = 0.0
        self.note = ""
        self.reported = time.monotonic()
        self.shown = False  # on the page of a run
        self.artifact: UUID | None = None
        style: dict[str, Any] = {}
        if unit == "B":
            style["unit_scale"] = True
        if not unit:
            style["bar_format"] = "{l_bar}{bar}| [{elapsed}<{remaining}{postfix}]"
        self.bar = tqdm(total=total, desc=label, unit=unit, disable=not sys.stderr.isatty(), leave=False, **style)

    def __exit__(self, *_: object) -> None:
        self.bar.close()
        if self.shown:
            self._report()

    def update(self, amount: float = 1, note: str = "") -> None:
        """Add `amount` to the count; `note` is shown behind it."""
        self.count += amount
        self.note = note
        self.bar.update(amount)
        if note:
            self.bar.set_postfix_str(note, refresh=False)
        if time.monotonic() - self.reported > SECONDS_BETWEEN_REPORTS:
            self._report()

    def _report(self) -> None:
        self.reported = time.monotonic()
        percent = min(100.0, 100 * self.count / self.total) if self.total else 0.0
        if self.bar.disable:
            done = f"{percent:.0f} %" if self.total else f"{self.count:,.0f} {self.unit}"
            try:
                log.info("%s: %s %s", self.label, done, self.note)
            except Stopped:
                raise
            except SystemExit:  # of rich, if nobody reads the output any more: the work continues
                pass
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
