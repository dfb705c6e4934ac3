"""Progress of long work: a bar on a terminal, log lines, and a progress artifact on the page of a Prefect run."""

import logging
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import Any, TextIO
from uuid import UUID

import httpx
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.context import SettingsContext, SyncClientContext, TaskRunContext
from prefect.logging.handlers import PrefectConsoleHandler
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from tqdm import tqdm

SECONDS_BETWEEN_REPORTS = 10  # to Prefect, and to a log that is not a terminal
SECONDS_BETWEEN_TRIES = 10  # while the server does not answer
SECONDS_AT_THE_END = 10  # that a run waits at most for unsent reports
LOG_RECORDS = 10_000  # the newest, kept while the server does not answer
LOG_BATCH = 200  # records in one request
TRY_AGAIN = (403, 408, 429)  # statuses, with all from SERVER_ERROR on; 403: an outdated CSRF token, replaced afterwards
SERVER_ERROR = 500
log = logging.getLogger(__name__)


def is_away(error: BaseException | None) -> bool:
    """Whether a request failed because the server does not answer, or not now."""
    status = error.response.status_code if isinstance(error, httpx.HTTPStatusError) else 0
    return isinstance(error, httpx.TransportError) or status in TRY_AGAIN or status >= SERVER_ERROR


class Reporter:
    """Sends reports to Prefect's server from its own thread, so that no work ever waits for the server.

    Of several reports under one name only the newest is kept. While the server does not answer, reports are kept, which
    is logged once; they are sent when it answers again.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.waiting: dict[str, tuple[Context, Callable[[], object]]] = {}
        self.logs: deque[dict[str, Any]] = deque(maxlen=LOG_RECORDS)
        self.session: tuple[str | None, SettingsContext, SyncClientContext] | None = None
        self.thread: threading.Thread | None = None
        self.sending, self.hurried, self.warned = False, False, False
        self.answers, self.failures = True, 0  # whether the last request was answered; how many were not

    def send(self, name: str, call: Callable[[], object]) -> None:
        """Make call() in the caller's context soon, instead of any waiting call of this name; returns at once."""
        with self.changed:
            self.waiting[name] = copy_context(), call
            if self.thread is None or not self.thread.is_alive():  # not alive: this process is a fork
                self.thread = threading.Thread(target=self._work, name="reporter", daemon=True)
                self.thread.start()
            self.changed.notify_all()

    def send_log(self, record: dict[str, Any]) -> None:
        """Send a log record in the form of Prefect's API, as its `set_api_log_sink` gives it."""
        record.pop("__payload_size__", None)
        self.logs.append(record)
        self.send("logs", self._send_logs)

    def flush(self, seconds: float) -> bool:
        """Wait until everything is sent, a request fails or `seconds` are over; whether everything was sent."""
        sent = False
        with self.changed:
            failures, self.hurried = self.failures, True
            self.changed.notify_all()
            try:
                self.changed.wait_for(lambda: self._idle() or self.failures > failures, seconds)
                sent = self._idle()
            finally:
                self.hurried, self.answers = False, self.answers and sent  # False too if the wait was interrupted
        if not sent:
            self._say("no answer in time")
        return sent

    def _idle(self) -> bool:
        return not self.waiting and not self.sending

    def _work(self) -> None:
        while True:
            with self.changed:
                while not self.waiting:
                    self.changed.wait()
                if not self.answers:
                    self.changed.wait_for(lambda: self.hurried, SECONDS_BETWEEN_TRIES)
                name = next(iter(self.waiting))
                context, call = self.waiting.pop(name)
                self.sending = True
            try:
                context.run(self._call, call)
                error = None
            except BaseException as caught:  # signals of Prefect's too: this thread must live on
                error = caught
            self._settle(name, (context, call), error)

    def _settle(self, name: str, report: tuple[Context, Callable[[], object]], error: Exception | None) -> None:
        """Record how a request ended. If the server did not answer, keep the report, unless there is a newer one."""
        away = is_away(error)
        self._say(f"{type(error).__name__}: {error}" if away else "")
        if error and not away:
            log.warning("Prefect's server refused %s for the page of this run: %s", name, error)
        with self.changed:
            self.answers = not away
            if away:
                self.failures += 1
                self.waiting.setdefault(name, report)
            self.sending = False
            self.changed.notify_all()

    def _say(self, problem: str) -> None:
        """Log once that the server does not answer, and once that it answers again."""
        if problem and not self.warned:
            log.warning(
                "Prefect's server does not answer (%s). The run continues; its page is updated when the server answers "
                "again.",
                problem,
            )
        elif self.warned and not problem:
            log.info("Prefect's server answers again.")
        self.warned = bool(problem)

    def _call(self, call: Callable[[], object]) -> None:
        """Make a call in its context, but with this thread's client, which does not retry."""
        url = PREFECT_API_URL.value()
        if self.session is None or self.session[0] != url:
            SyncClientContext.__var__.set(None)  # else the run's client would be used
            with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
                self.session = url, SettingsContext.get(), SyncClientContext()  # kept: making both takes 50 ms
        _, settings, client = self.session
        SettingsContext.__var__.set(settings)
        SyncClientContext.__var__.set(client)
        call()

    def _send_logs(self) -> None:
        while self.logs:
            batch = [self.logs.popleft() for _ in range(min(LOG_BATCH, len(self.logs)))]
            try:
                self.session[2].client.create_logs(batch)
            except Exception as error:
                if is_away(error):  # refused records are dropped, or they would hold up all that follow
                    self.logs.extendleft(reversed(batch[: LOG_RECORDS - len(self.logs)]))
                raise


reporter = Reporter()


class AboveBars:
    """A terminal for log lines: bars are cleared before each line and redrawn below it."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write lines of the log."""
        with tqdm.external_write_mode(self.stream):
            return self.stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def keep_logs_above_bars() -> None:
    """Keep Prefect's log lines and the bars on this terminal from overwriting each other."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, PrefectConsoleHandler) and not isinstance(handler.console.file, AboveBars):
            handler.console.file = AboveBars(handler.console.file)


class Progress:
    """Counts from 0 to `total` (None if unknown); a context manager. Without a unit, the count is a fraction of 1."""

    def __init__(self, label: str, total: float | None, unit: str = "") -> None:
        self.label, self.total, self.unit = label, total, unit
        self.count, self.note, self.reported = 0.0, "", time.monotonic()
        style = {"unit_scale": True} if unit == "B" else {}
        if not unit:
            style = {"bar_format": "{l_bar}{bar}| [{elapsed}<{remaining}{postfix}]"}
        self.bar = tqdm(total=total, desc=label, unit=unit, disable=not sys.stderr.isatty(), leave=False, **style)
        if not self.bar.disable:
            keep_logs_above_bars()
        self.shown = False  # on the page of a run
        self.artifact: UUID | None = None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()
        if self.shown:
            self._report()

    def update(self, amount: float = 1, note: str = "") -> None:
        """Add `amount` to the count; `note` is shown behind it."""
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
        if TaskRunContext.get() is not None:
            self.shown = True
            reporter.send(f"progress of {self.label}", lambda: self._show(percent))

    def _show(self, percent: float) -> None:
        if self.artifact is None:
            key = re.sub("[^a-z0-9]+", "-", self.label.lower()).strip("-")
            self.artifact = create_progress_artifact(progress=percent, key=key, description=self.label)
        else:
            update_progress_artifact(self.artifact, progress=percent)
