"""Progress of long work: a bar on a terminal, lines in a log, and a progress artifact on the page of a Prefect run."""

import contextlib
import logging
import re
import sys
import time
from uuid import UUID

from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.context import TaskRunContext
from tqdm import tqdm

SECONDS_BETWEEN_REPORTS = 10  # to Prefect, and to a log that is not a terminal
log = logging.getLogger(__name__)


class Progress:
    """Counts from 0 to `total` (None when not known); a context manager. Reporting never stops the work."""

    def __init__(self, label: str, total: float | None, unit: str = "it") -> None:
        self.label, self.total, self.unit = label, total, unit
        self.count, self.note, self.reported = 0.0, "", time.monotonic()
        scale = {"unit_scale": True} if unit in ("B", "tok") else {}
        self.bar = tqdm(total=total, desc=label, unit=unit, disable=not sys.stderr.isatty(), leave=False, **scale)
        self.artifact: UUID | None = None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()
        if self.artifact:
            self._report()

    def update(self, amount: float = 1, note: str = "") -> None:
        """Go on by `amount`; `note` is shown behind the count."""
        self.count, self.note = self.count + amount, note
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
            log.info("%s: %s %s", self.label, done, self.note)
        if TaskRunContext.get() is None:
            return
        with contextlib.suppress(Exception):  # a server that is away must not stop a day of training
            if self.artifact is None:
                key = re.sub("[^a-z0-9]+", "-", self.label.lower()).strip("-")
                self.artifact = create_progress_artifact(progress=percent, key=key, description=self.label)
            else:
                update_progress_artifact(self.artifact, progress=percent)
