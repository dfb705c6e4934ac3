"""What a run shows: errors as one sentence and a line per stage in its log, artifacts on the page of a Prefect run."""

import base64
import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prefect.artifacts import create_image_artifact, create_markdown_artifact, create_table_artifact
from prefect.logging.handlers import PrefectConsoleHandler
from rich.console import Console
from tqdm import tqdm

from flows.summary import telling
from model.errors import InputError
from model.wording import printable
from tasks.reports.markdown import escape
from tasks.store.artifacts import Artifact
from tasks.workers.progress import shortened

CLEAR = "\r\x1b[2K"  # the terminal's current line
STYLES = {logging.WARNING: "yellow", logging.ERROR: "red", logging.CRITICAL: "red"}
COLUMNS = {  # to show of tables that are too wide for the page
    "measure": ("source", "documents", "removed", *(f"tokens_per_char, {q}" for q in ("5%", "50%", "95%"))),
    "filter": ("source", "documents", "kept", "kept, % of documents", "median tokens_per_char"),
}
MARKUP = re.compile(r"[\[<]")  # begins a picture, a link or HTML in Markdown
HEAD = re.compile(r"\A---\n.*?\n---\n+", re.DOTALL)  # YAML at the head of a model card, which Prefect would show


class OneSentence(logging.Filter):
    """Shows a user's error, or a lost server, as one sentence in the log; tracebacks are for bugs."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Drop what repeats an InputError, and its traceback or that of a lost connection."""
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, InputError):
            is_repeated = vars(error).get("is_logged", False)
            vars(error)["is_logged"] = True  # by the task; the flow fails with it too
            replace_message(record, str(error))
            return not is_repeated
        if is_of_httpx(error):  # the Prefect server is lost, as the command says last
            replace_message(record, "The Prefect server was lost: %r", error)
            return True
        record.msg = re.sub(r"(?s)(Finished in state \w+\().*InputError: .*", r"\1)", record.getMessage())
        record.args = ()
        return True


def replace_message(record: logging.LogRecord, message: str, *arguments: object) -> None:
    """Make a record one sentence about the user's error, without a traceback."""
    record.msg = message
    record.args = arguments
    record.exc_info = None
    record.input_error = True


def package_of(error: BaseException | None) -> str:
    """The package that defines an error."""
    return type(error).__module__.split(".")[0]


def is_of_httpx(error: BaseException | None) -> bool:
    """Whether the connection to the Prefect server made this error, or the one that Prefect has wrapped in it."""
    if error and package_of(error) == "prefect":
        error = error.__cause__
    return package_of(error) == "httpx"


def configure() -> None:
    """Set up the logs of a flow run, wherever it runs."""
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).addFilter(OneSentence())
    for name in ("flows", "tasks", "model"):  # Prefect's setting extra_loggers forwards them, but keeps their level
        logging.getLogger(name).setLevel(logging.INFO)


class Waiting(logging.Handler):
    """Keeps the lines that it is handed."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record."""
        self.records.append(record)


@contextmanager
def lines_later() -> Iterator[None]:
    """Write what is logged by tasks and the model in this context after it, so that another line comes first."""
    loggers = [logging.getLogger(name) for name in ("tasks", "model")]
    before = [(logger.handlers, logger.propagate) for logger in loggers]
    waiting = Waiting()
    for logger in loggers:
        logger.handlers = [waiting]
        logger.propagate = False
    try:
        yield
    finally:
        for logger, (handlers, propagate) in zip(loggers, before, strict=True):
            logger.handlers = handlers
            logger.propagate = propagate
        for record in waiting.records:
            record.created = time.time()
            logging.getLogger(record.name).handle(record)


class TerminalLog(logging.Handler):
    """A run's log on standard error. On a terminal, the name of the running stage or its bar stays below the lines."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
        self.console = Console(stderr=True, soft_wrap=True, markup=False, emoji=False, highlight=False)
        self.running = ""

    def filter(self, record: logging.LogRecord) -> bool:
        """Leave out Prefect's states and lost events, and errors that the command prints last."""
        if record.name.startswith("prefect"):
            states = ("Crash detected!", "Finished in state", "Unable to connect to 'ws")
            is_shown = record.levelno >= logging.WARNING and not record.getMessage().startswith(states)
            return is_shown and not hasattr(record, "input_error")
        return True

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record on a separate line, above the name of the running stage or the bars."""
        try:
            line = printable(self.format(record), lines=True)
            with tqdm.external_write_mode(self.console.file):
                self._write(CLEAR)
                self.console.print(line, style=STYLES.get(record.levelno))
                self._write(self.running)
        except Exception:
            self.handleError(record)

    def show_running(self, name: str) -> None:
        """Put the name of the running stage on the terminal's last line; an empty one clears the line."""
        self.acquire()
        try:
            room = self.console.width - len(" …") - 1  # a line that fills the terminal would begin another
            self.running = f"{shortened(name, room)} …" if name else ""
            self._write(CLEAR + self.running)
        finally:
            self.release()

    def _write(self, text: str) -> None:
        """Write to a terminal only."""
        if self.console.is_terminal:
            self.console.file.write(text)
            self.console.file.flush()


def log_to_terminal() -> None:
    """Show this process's log on standard error as lines of stages, in place of Prefect's format."""
    root = logging.getLogger()
    logging.raiseExceptions = False  # else each line that a lost server doesn't take is another error
    if not any(isinstance(handler, TerminalLog) for handler in root.handlers):
        for handler in root.handlers:
            if isinstance(handler, PrefectConsoleHandler):
                handler.addFilter(lambda record: False)  # Prefect configures the log again if its handler is gone
        root.addHandler(TerminalLog())


@contextmanager
def running(name: str) -> Iterator[None]:
    """Show on the terminal of a `cram run` that a stage is running."""
    terminals = [handler for handler in logging.getLogger().handlers if isinstance(handler, TerminalLog)]
    for terminal in terminals:
        terminal.show_running(name)
    try:
        yield
    finally:
        for terminal in terminals:
            terminal.show_running("")


def cell(value: object) -> str:
    """A value of a table, with separated thousands; text from data loads and links nothing."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return f"{value:,}"
    # Prefect's older pages read cells as Markdown; the newer ones would show escapes, so usual names have none
    return escape(value) if MARKUP.search(str(value)) else str(value)


def show_in_prefect(artifact: Artifact, what: str) -> None:
    """Put an artifact's table, pictures and texts on the page of the Prefect run that calls this, with what made it."""
    stage = artifact.stage
    description = f"{what} Details: cram show {artifact.name}"
    name = stage.replace("_", "-")  # Prefect's keys have no underscores
    rows = artifact.stats.get("table")
    if rows:
        columns = [column for column in COLUMNS.get(stage, ()) if column in rows[0]] or telling(rows)
        table = [{column: cell(row[column]) for column in columns} for row in rows]
        create_table_artifact(table, key=f"{name}-table", description=description)
    # stages don't read these files, so they are whatever a person made of them
    for path in files_of(artifact, "*.png"):
        image = base64.b64encode(path.read_bytes()).decode()
        create_image_artifact(f"data:image/png;base64,{image}", key=f"{name}-{path.stem}", description=description)
    if stage == "finetune":  # a run has many of these, so their texts are left out
        return
    for path in files_of(artifact, "*.md"):
        key = name if path.stem == stage else f"{name}-{path.stem.lower()}"
        text = HEAD.sub("", path.read_text(errors="replace", encoding="utf-8"))
        create_markdown_artifact(text, key=key, description=description)


def files_of(artifact: Artifact, pattern: str) -> list[Path]:
    """The files of an artifact whose names match, in order."""
    return [path for path in sorted(artifact.path.glob(pattern)) if path.is_file()]
