"""The signals that ask a process to end, and how training ends between two steps."""

import signal
import threading
import time
from typing import Any

# Slurm sends SIGUSR1 or SIGUSR2 some time before it ends a job, if asked to (--signal=USR1@60)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# Until a second signal counts as one: `timeout` and some batch systems send one to a process and to its whole group.
AGAIN_SECONDS = 1.0


class Stopped(SystemExit):
    """A signal asked this process to end. Its status is the shell's, 128 and the signal's number."""

    is_said = False  # whether a sentence about it was printed

    def __init__(self, number: int) -> None:
        self.number = number
        self.status = 128 + number
        super().__init__(self.status)


class StopRequest:
    """In this context, the first signal that would end the process only sets `number`; a second one acts at once.

    A signal within a second of the first is the same request. With `waits`, every later signal is the same request too:
    for a process whose parent kills it if it doesn't end in time.

    `pass_on`, or else the end of the context, hands the signal to the handler that was set before, so none is lost.
    Ignored signals stay ignored. Only the main thread can set handlers; in other threads nothing changes.
    """

    def __init__(self, waits: bool = False) -> None:
        self.waits = waits
        self.number: int | None = None
        self.received_at = 0.0
        self.before: dict[int, Any] = {}  # handlers

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for each in SIGNALS:
                handler = signal.getsignal(each)
                # None: a handler that was not set by Python, which could not be put back
                if handler not in (signal.SIG_IGN, None):
                    self.before[each] = handler
        for number in self.before:
            signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()
        if self.number is not None:
            self.pass_on(self.number)

    def _restore(self) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: object) -> None:
        now = time.monotonic()
        if self.number is None:
            self.number = number
            self.received_at = now
        elif not self.waits and now - self.received_at >= AGAIN_SECONDS:
            self.pass_on(number)

    def pass_on(self, number: int) -> None:
        """Have the signal handled as before this context. Returns if its handler does.

        Where the default is to end the process at once, it raises Stopped, so that `finally` blocks run.
        """
        self.number = None
        self._restore()
        if signal.getsignal(number) is signal.SIG_DFL:
            raise Stopped(number)
        signal.raise_signal(number)
