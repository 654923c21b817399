"""Ctrl-C and SIGTERM while tuning: they stop the measuring, and what was measured is kept."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(KeyboardInterrupt):
    """Raised where measuring was interrupted."""


class Shield:
    """Signals that come under it wait until its end."""

    def __init__(self) -> None:
        self._up = False
        self._waiting: int | None = None

    @contextmanager
    def __call__(self, *, ignoring: bool = False) -> Iterator[None]:
        """`ignoring`: at its end they are forgotten."""
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
    """Within it both signals raise Interrupted, but for one that the program handles in its own way. Only the main
    thread is told of signals; in another there is nothing to do."""
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
