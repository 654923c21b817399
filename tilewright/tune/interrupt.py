"""Handle Ctrl-C and SIGTERM during tuning: stop measuring, keep the results."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(KeyboardInterrupt):
    """Measuring was interrupted."""


class Shield:
    """A context that delays signals until it ends."""

    def __init__(self) -> None:
        self._up = False
        self._waiting: int | None = None

    @contextmanager
    def __call__(self, *, ignoring: bool = False) -> Iterator[None]:
        """Enter the context. `ignoring`: drop the delayed signals at its end."""
        self._up = True
        try:
            yield
        finally:
            self._up = False
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not ignoring:
            self.handle(waiting, None)

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self._up:
            self._waiting = number
        else:
            raise Interrupted(signal.Signals(number).name)


@contextmanager
def interruptible() -> Iterator[Shield]:
    """A context in which both signals raise Interrupted, unless the program handles them itself. Only the main thread
    receives signals; in other threads this does nothing."""
    shield = Shield()
    replaced = []
    if threading.current_thread() is threading.main_thread():
        for number, usual in (
            (signal.SIGINT, signal.default_int_handler),
            (signal.SIGTERM, signal.SIG_DFL),
        ):
            if signal.getsignal(number) is usual or signal.getsignal(number) == usual:
                replaced.append((number, signal.signal(number, shield.handle)))
    try:
        yield shield
    finally:
        for number, handler in replaced:
            signal.signal(number, handler)
