"""Who may use a node now: one user after the other on a device, and no build beside a timing.

`FairTurns` shares one device between users inside its timer. `NodeGate` keeps builds and timings of one node apart,
across processes; the system releases what a process holds when it dies.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class FairTurns:
    """One at a time; of those who wait, users take turns, whoever has how many requests."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._waiting: OrderedDict[str, deque[object]] = OrderedDict()  # the user whose turn is next is first
        self._busy = False

    @contextmanager
    def turn(self, user: str) -> Iterator[None]:
        ticket = object()
        with self._condition:
            self._waiting.setdefault(user, deque()).append(ticket)
            self._condition.wait_for(lambda: not self._busy and self._next() is ticket)
            self._busy = True
            queue = self._waiting.pop(user)
            queue.popleft()
            if queue:
                self._waiting[user] = queue  # behind the other users
        try:
            yield
        finally:
            with self._condition:
                self._busy = False
                self._condition.notify_all()

    def _next(self) -> object:
        return next(iter(self._waiting.values()))[0]

    @property
    def waiting(self) -> int:
        with self._condition:
            return sum(map(len, self._waiting.values()))


class NodeGate:
    """Builds of a node run together, a timing runs alone. Who comes first enters first: a stream of builds does not
    keep a timing waiting."""

    def __init__(self, node: str, folder: Path | None = None) -> None:
        folder = folder or Path(tempfile.gettempdir()) / f"tilewright-pool-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        self._entrance, self._inside = (folder / f"{node}.{name}" for name in ("entrance", "inside"))

    @contextmanager
    def building(self) -> Iterator[None]:
        with self._held(fcntl.LOCK_SH):
            yield

    @contextmanager
    def timing(self) -> Iterator[None]:
        with self._held(fcntl.LOCK_EX):
            yield

    @contextmanager
    def _held(self, how: int) -> Iterator[None]:
        with open(self._inside, "w") as inside:
            with open(self._entrance, "w") as entrance:
                fcntl.flock(entrance, fcntl.LOCK_EX)
                fcntl.flock(inside, how)
            yield
