"""Child processes that may crash, hang or run out of memory: interpreters that answer messages, and are killed when
they must be.

They are not those of `multiprocessing`, which would run the caller's script again. A message is its length and its
bytes, on a pair of sockets; descriptors of shared memory may travel with one. A process ends by itself when the one who
started it does, even while it is busy.
"""

from __future__ import annotations

import array
import contextlib
import importlib
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from tilewright.errors import MeasurementError

_HEADER_BYTES = 8
_MAX_DESCRIPTORS = 4
TICK = 0.02  # seconds: how long one wait is at most
_START_SECONDS = 120.0  # to import what it needs
_KEPT_WORDS = 300  # characters of what a process said before it died

_PACKAGE_FOLDER = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

# What a new interpreter runs first. `python -c` puts the current folder first on its path (before 3.11 nothing keeps it
# from that), so nothing but `sys`, which is built in, may be imported before the path is replaced.
_SERVING = (
    "import sys; end = 2 + int(sys.argv[1]); sys.path[:] = sys.argv[2:end]; "
    "from tilewright.measure.process import main; main(*sys.argv[end:])"
)

# What libraries say when there is no memory left, on their way to an abort.
_OUT_OF_MEMORY = ("out of memory", "bad_alloc", "cannot allocate memory", "memoryerror", "failed to allocate")


class Failed(msgspec.Struct, frozen=True, tag=True):
    """What a candidate came to that has no time: a kind of space.outcome.FAILURES, and what happened. After one that
    went `corrupted` nothing in its process can be trusted."""

    kind: str
    message: str
    corrupted: bool = False


class Dead(Exception):
    """A process did not answer: it crashed, it ran out of memory, or it took too long and was killed."""

    def __init__(self, kind: str, message: str) -> None:
        self.failed = Failed(kind, message)
        super().__init__(message)


# -- on the side of who asks ------------------------------------------------------------------------------------------


class Child:
    """A process from the side of who asks. It starts when it is first sent something, and again after each death.

    `serve` is "module:function" of what runs in it: a function of a Channel. `memory`: bytes that it may have.
    """

    def __init__(self, serve: str, memory: int, environment: dict[str, str] | None = None) -> None:
        self._serve, self._memory, self._environment = serve, memory, environment or {}
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._words = -1  # what it writes to its standard error
        self.greeted = False  # it has started, and said so

    @property
    def alive(self) -> bool:
        return self._process is not None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def fileno(self) -> int:
        assert self._socket is not None
        return self._socket.fileno()

    def start(self) -> None:
        if self._process is not None:
            return
        if not sys.executable:
            raise MeasurementError(
                "this program embeds Python: there is no interpreter to start a process of"
            )
        ours, theirs = socket.socketpair()
        self._words, words = os.pipe()
        os.set_blocking(words, False)  # one who says too much loses words, and is not held up
        try:
            folders = import_folders()
            arguments = [str(len(folders)), *folders, self._serve, str(theirs.fileno()), str(self._memory)]
            self._process = subprocess.Popen(
                [sys.executable, "-c", _SERVING, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=words,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, "PYTHONSAFEPATH": "1", **self._environment},
                start_new_session=True,  # Ctrl-C is for the one who asks
            )
        except OSError as error:
            ours.close()
            os.close(self._words)
            raise MeasurementError(f"cannot start a process to measure in: {error}") from None
        finally:
            os.close(words)
            theirs.close()
        os.set_blocking(self._words, False)
        self._socket = ours

    def send(self, message: bytes, descriptors: Sequence[int] = ()) -> None:
        """A process that is dead already is noticed by `receive`."""
        self.start()
        assert self._socket is not None
        with contextlib.suppress(ConnectionError):
            _send(self._socket, message, descriptors)

    def greet(self) -> None:
        """Wait until it has started. MeasurementError if it does not: no candidate has come near it yet."""
        if self.greeted:
            return
        try:
            self._message(_START_SECONDS)
        except Dead as death:
            raise MeasurementError(f"a process to measure in does not start: {death}") from None
        self.greeted = True

    def receive(self, seconds: float) -> bytes:
        """Its next message. Raises Dead, and the process is gone then, if there is none within `seconds`."""
        self.greet()
        return self._message(seconds)

    def _message(self, seconds: float) -> bytes:
        assert self._socket is not None
        received = bytearray()
        wanted = _HEADER_BYTES
        while len(received) < wanted:
            while True:
                ready, waited = wait(self)
                if ready:
                    break
                seconds -= waited
                if seconds <= 0:
                    self.close()
                    raise Dead("timeout", "it took too long, and was ended")
            try:
                more = self._socket.recv(wanted - len(received))
            except ConnectionError:
                more = b""
            if not more:
                raise self._died()
            received += more
            if len(received) == wanted == _HEADER_BYTES:
                wanted += int.from_bytes(received, "little")
        return bytes(received[_HEADER_BYTES:])

    def close(self) -> None:
        """Kill it. The next `send` starts another."""
        process, self._process = self._process, None
        if process is None:
            return
        self.greeted = False
        process.kill()
        process.wait()
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        os.close(self._words)

    def _died(self) -> Dead:
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        code = self._process.returncode
        said = ""
        with contextlib.suppress(OSError):
            said = os.read(self._words, 1 << 16).decode(errors="replace").strip()
        self.close()
        starved = any(words in said.lower() for words in _OUT_OF_MEMORY)
        if starved or code == -signal.SIGKILL:  # not by us: what the system kills has taken too much memory
            return Dead("memory", "it ran out of memory")
        last_words = " ".join(said.splitlines()[-2:])[-_KEPT_WORDS:]
        how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        return Dead("crash", f"the process ended with {how}" + (f": {last_words}" if said else ""))


def import_folders() -> list[str]:
    """The folders (and archives) that a process imports from: those of this one, but the current folder last.

    A file in the current folder that bears the name of an installed module is never imported in that module's place.
    The folder is there at all only if this process imports from it too: the user's own modules may lie there.
    """
    try:
        here = os.path.realpath(os.getcwd())
    except FileNotFoundError:  # it was removed: nothing is imported from it
        here = ""
    absolute = [os.path.abspath(f) for f in sys.path if isinstance(f, str) and (here or os.path.isabs(f))]
    absolute.append(_PACKAGE_FOLDER)  # wherever this package was found: by an import hook, perhaps
    current = [folder for folder in absolute if os.path.realpath(folder) == here]
    return list(dict.fromkeys([folder for folder in absolute if folder not in current] + current))


def wait(*children: Child) -> tuple[list[Child], float]:
    """Those that have something to say, after a tick at most; and the seconds that were waited. Those in which we were
    stopped ourselves do not count: they are no fault of others."""
    begin = time.monotonic()
    ready, _, _ = select.select(children, [], [], TICK)
    return ready, min(time.monotonic() - begin, 2 * TICK)


# -- on both sides ----------------------------------------------------------------------------------------------------


def _send(connection: socket.socket, message: bytes, descriptors: Sequence[int]) -> None:
    framed = len(message).to_bytes(_HEADER_BYTES, "little") + message
    sent = socket.send_fds(connection, [framed], list(descriptors)) if descriptors else 0
    connection.sendall(memoryview(framed)[sent:])


# -- in the process ---------------------------------------------------------------------------------------------------


class Channel:
    """The questions of whoever started this process, and the way to answer."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def receive(self) -> tuple[bytes, list[int]]:
        """A message and the descriptors that came with it. Ends the process where nobody asks any more."""
        descriptors: list[int] = []
        size = int.from_bytes(self._exactly(_HEADER_BYTES, descriptors), "little")
        return self._exactly(size, descriptors), descriptors

    def _exactly(self, size: int, descriptors: list[int]) -> bytes:
        received = bytearray()
        room = socket.CMSG_SPACE(_MAX_DESCRIPTORS * array.array("i").itemsize)
        while len(received) < size:
            data, ancillary, _, _ = self._socket.recvmsg(size - len(received), room)
            if not data:
                sys.exit(0)
            for level, kind, payload in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    numbers = array.array("i")
                    numbers.frombytes(payload[: len(payload) - len(payload) % numbers.itemsize])
                    descriptors.extend(numbers)
            received += data
        return bytes(received)

    def send(self, message: bytes) -> None:
        _send(self._socket, message, ())


def main(serve: str, descriptor: str, memory: str) -> None:
    """What a new interpreter runs."""
    connection = socket.socket(fileno=int(descriptor))
    threading.Thread(target=_end_with_the_other_side, args=(int(descriptor),), daemon=True).start()
    _limit(resource.RLIMIT_DATA, int(memory))
    _limit(resource.RLIMIT_CORE, 0)
    module, _, name = serve.partition(":")
    function: Callable[[Channel], None] = getattr(importlib.import_module(module), name)
    channel = Channel(connection)
    channel.send(b"")  # the greeting
    function(channel)


def _limit(which: int, most: int) -> None:
    _, hard = resource.getrlimit(which)
    with contextlib.suppress(ValueError, OSError):  # a system that does not let us: then it has its own way
        resource.setrlimit(which, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _end_with_the_other_side(descriptor: int) -> None:
    """A hanging kernel never asks for the next message, and would not see that nobody is there to send it."""
    poll = select.poll()
    poll.register(descriptor, 0)  # only that the other end was closed
    poll.poll()
    os._exit(1)
