"""Schedules the users of a machine: one at a time on a device, and no build during a timing.

`FairTurns` shares one device between users inside its timer. `DeviceGate` prevents builds and timings on one machine
from overlapping, across processes and nodes; the operating system releases the locks of a process that dies. `starting`
lets the processes of a machine start one after the other. `Requests` knows how long each request has been worked on.
"""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tilewright.errors import PoolError

_START_SECONDS = 60.0  # that a process waits for others to start: one that hangs does not hold up the rest
_TICK = 0.05


class FairTurns:
    """Admits one request at a time, and alternates between the users that wait, independent of their numbers of
    requests."""

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


class DeviceGate:
    """Admits the users of one device of this machine, whatever node of a pool they belong to. Builds run concurrently
    on the processor, and a timing runs alone on its device. Admission is in order of arrival, so a stream of builds
    does not delay a timing indefinitely. `gpu`: its number; None: the processor."""

    def __init__(self, gpu: int | None = None, folder: Path | None = None) -> None:
        folder = folder or _folder()
        device = "processor" if gpu is None else f"gpu-{_gpu_name(gpu)}"
        self._entrance, self._inside = (folder / f"{device}.{name}" for name in ("entrance", "inside"))

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
        with _lock_file(self._inside) as inside:
            with _lock_file(self._entrance) as entrance:
                fcntl.flock(entrance, fcntl.LOCK_EX)
                fcntl.flock(inside, how)
            yield


def _folder() -> Path:
    """A folder of this user for the locks of all nodes of this machine. Raises PoolError if others may write there."""
    folder = Path(tempfile.gettempdir()) / f"tilewright-pool-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PoolError(
            f"{folder}, where a pool's nodes keep their locks, is not a folder of this user alone",
            remedy=f"remove it, or make it yours: chmod 700 {folder}; or set TMPDIR to a folder of your own",
        )
    return folder


def _gpu_name(number: int) -> str:
    """The same for processes that see different GPUs."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return seen[number].strip() if number < len(seen) and seen[number] else str(number)


def _lock_file(path: Path) -> IO[bytes]:
    """Opened, and made if it does not exist; a link is not followed."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "r+b")


@contextmanager
def starting(folder: Path | None = None, patience: float = _START_SECONDS) -> Iterator[None]:
    """Start one process at a time on a machine; after `patience` seconds, start without waiting."""
    deadline = time.monotonic() + patience
    with _lock_file((folder or _folder()) / "starting") as file:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_TICK)
        yield


class Stopwatch:
    """Measures the seconds of work on a request, without pauses."""

    def __init__(self) -> None:
        self._worked, self._since, self._pauses = 0.0, time.monotonic(), 0

    @property
    def seconds(self) -> float:
        return self._worked + (0.0 if self._pauses else time.monotonic() - self._since)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause while the request waits for its turn, or for a process to start."""
        self._worked, self._pauses = self.seconds, self._pauses + 1
        try:
            yield
        finally:
            self._pauses, self._since = self._pauses - 1, time.monotonic()


class Requests:
    """The requests that a worker has, by name."""

    def __init__(self) -> None:
        self._watches: dict[str, Stopwatch] = {}
        self._lock = threading.Lock()

    @contextmanager
    def one(self, name: str) -> Iterator[Stopwatch]:
        watch = Stopwatch()
        with self._lock:
            self._watches[name] = watch  # the newest, if it was given again while an older one hangs
        try:
            yield watch
        finally:
            with self._lock:
                if self._watches.get(name) is watch:
                    del self._watches[name]

    @property
    def seconds(self) -> dict[str, float]:
        with self._lock:
            return {name: watch.seconds for name, watch in self._watches.items()}
