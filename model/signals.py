"""Signals that end a run, delayed while a run must not be interrupted."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Deferred:
    """Delays signals within `held`; elsewhere in this context they are handled as before it."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.waiting: list[tuple] = []
        self.holding = False
        self.broken = False  # whether an error has left the work within `held` half done

    def __enter__(self) -> "Deferred":
        self.before = {}
        if threading.current_thread() is threading.main_thread():  # only it can set handlers
            self.before = {number: signal.signal(number, self._receive) for number in self.SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: object) -> None:
        self.waiting.append((number, frame))
        if not self.holding:
            self._pass_on()

    def _pass_on(self) -> None:
        while self.waiting:
            number, frame = self.waiting.pop(0)
            handler = self.before[number]
            if callable(handler):
                handler(number, frame)
            elif handler is signal.SIG_DFL:
                raise SystemExit(128 + number)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Handle signals at the end of this context."""
        self.holding = True
        try:
            yield
        except BaseException:
            self.broken = True
            raise
        finally:
            self.holding = False
        self._pass_on()
