"""What a signal that asks for the end does to a command: it ends cleanly, with a sentence and the shell's code."""

import math
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from model.signals import AGAIN_SECONDS, SIGNALS, Stopped

AGAIN = "Run the same command again."


@contextmanager
def signals_as_sentences() -> Iterator[None]:
    """End the process with the shell's code and a sentence, unless one was printed, when a signal asks for it."""
    try:
        with signals_as_exceptions():
            yield
    except Stopped as stop:
        if not stop.is_said:
            say_stopped(stop, AGAIN)
        raise
    except (KeyboardInterrupt, SystemExit) as end:
        stop = Stopped(signal.SIGINT)
        if isinstance(end, SystemExit) and end.code != stop.status:  # which typer makes of a KeyboardInterrupt
            raise
        say_stopped(stop, AGAIN)
        raise stop from end


@contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """Raise Stopped on all signals but Ctrl-C, whose usual handling would leave child processes and halves of files."""
    last = -math.inf  # when one was received

    def stop(number: int, frame: object) -> None:
        nonlocal last
        before, last = last, time.monotonic()
        if last - before >= AGAIN_SECONDS:
            raise Stopped(number)

    handlers = {number: signal.getsignal(number) for number in SIGNALS if number != signal.SIGINT}
    # nohup ignores SIGHUP; a handler that was not set by Python (None) could not be put back
    handlers = {number: each for number, each in handlers.items() if each not in (signal.SIG_IGN, None)}
    for number in handlers:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def say_stopped(stop: Stopped, rest: str) -> None:
    """Print what has stopped the command, and the rest of the sentences."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # the rest is short; another one would change the exit code
    cause = "Ctrl-C" if stop.number == signal.SIGINT else signal.Signals(stop.number).name
    with suppress(OSError):  # the terminal may be gone
        print(f"cram: Stopped by {cause}. {rest}", file=sys.stderr)
    stop.is_said = True
