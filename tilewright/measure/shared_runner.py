"""A runner that the tunings of one process share, so that its processes start once and not for each kernel.

A tuning takes the idle runner of its kind, or starts one, and gives it back at its end; two at the same time have one
each. What was built and drawn for a kernel is dropped then, the processes stay. An idle runner ends after a while, and
with this process.
"""

from __future__ import annotations

import atexit
import os
import threading
from typing import Any

from tilewright import knobs
from tilewright.measure.runner import Runner
from tilewright.space.registration import registering_modules

_IDLE_SECONDS = 30.0

_Kind = tuple[Any, ...]


class SharedRunner(Runner):
    """Leaving its context gives it back; an exception there ends its processes."""

    def __init__(self, kind: _Kind, threads: int, device: int | None) -> None:
        super().__init__(threads, device=device)
        self.kind = kind

    def __exit__(self, *raised: object) -> None:
        if any(raised):
            self.close()
        else:
            self.forget()
            _RUNNERS.give_back(self)


class _Idle:
    """The idle runners of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runners: list[SharedRunner] = []
        self._expiry: threading.Timer | None = None

    def take(self, kind: _Kind) -> SharedRunner | None:
        with self._lock:
            found = next((runner for runner in self._runners if runner.kind == kind), None)
            if found is not None:
                self._runners.remove(found)
            return found

    def give_back(self, runner: SharedRunner) -> None:
        with self._lock:
            self._runners.append(runner)
            if self._expiry is not None:
                self._expiry.cancel()
            self._expiry = threading.Timer(_IDLE_SECONDS, self.end)
            self._expiry.daemon = True
            self._expiry.start()

    def end(self) -> None:
        with self._lock:
            ending, self._runners = self._runners, []
        for runner in ending:
            if runner.kind[0] == os.getpid():  # in a process that was forked, they are the parent's
                runner.close()


_RUNNERS = _Idle()
atexit.register(_RUNNERS.end)


def shared_runner(threads: int, device: int | None = None) -> SharedRunner:
    """An idle runner, or a new one. Its processes have the options of when they were started: these must be equal."""
    options = tuple((each.name, each.value) for each in knobs.table() if each.source != "default")
    kind = (os.getpid(), threads, device, options, tuple(registering_modules()))
    return _RUNNERS.take(kind) or SharedRunner(kind, threads, device)


def end_idle_runners() -> None:
    """End the processes of idle runners now."""
    _RUNNERS.end()
