"""How a command ends when a signal asks it to: cleanly, with a sentence and the exit status that a shell expects."""

import math
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from model.signals import AGAIN_SECONDS, SIGNALS, Stopped

AGAIN = "Run the same command again."
CLEAR = "\r\x1b[2K"  # the terminal's current line


@contextmanager
def signals_as_sentences() -> Iterator[None]:
    """When a signal ends the process, print a sentence, unless one was printed, and set the shell's exit status."""
    try:
        with signals_as_exceptions():
            yield
    except Stopped as stop:
        if not stop.is_said:
            say_stopped(stop, AGAIN)
        raise
    except (KeyboardInterrupt, SystemExit) as end:
        interrupt = Stopped(signal.SIGINT)
        # typer turns a KeyboardInterrupt into a SystemExit with this status
        if isinstance(end, SystemExit) and end.code != interrupt.status:
            raise
        say_stopped(interrupt, AGAIN)
        raise interrupt from end


@contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """Raise Stopped for each signal but Ctrl-C, which Python raises itself.

    By their usual handling, they would leave child processes and half-written files.
    """
    last = -math.inf  # when a signal was received

    def stop(number: int, frame: object) -> None:
        nonlocal last
        now = time.monotonic()
        is_new = now - last >= AGAIN_SECONDS
        last = now
        if is_new:
            raise Stopped(number)

    handlers = {}
    for number in SIGNALS:
        handler = signal.getsignal(number)
        # nohup ignores SIGHUP; a handler that was not set by Python (None) could not be put back
        if number != signal.SIGINT and handler not in (signal.SIG_IGN, None):
            handlers[number] = handler
            signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def say_stopped(stop: Stopped, rest: str) -> None:
    """Print which signal stopped the command, followed by `rest`."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # little is left to do; another signal would change the exit status
    cause = "Ctrl-C" if stop.number == signal.SIGINT else signal.Signals(stop.number).name
    with suppress(OSError, ValueError):  # the terminal may be gone
        clear = CLEAR if sys.stderr.isatty() else ""  # of a bar, or the ^C that the terminal shows
        print(f"{clear}cram: Stopped by {cause}. {rest}", file=sys.stderr)
    stop.is_said = True
