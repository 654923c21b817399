"""Child processes that may crash, hang or run out of memory: interpreters that answer messages and can be killed.

They do not use `multiprocessing`, which would run the caller's script again. A message is its length and its bytes,
on a pair of sockets; it may carry descriptors of shared memory. A child ends when its parent does, even while it is
busy.
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
from collections.abc import Callable, Iterator, Sequence

from tilewright.errors import MeasurementError
from tilewright.support.confinement import SECRETS, confine

_HEADER_BYTES = 8
_MAX_DESCRIPTORS = 4
TICK = 0.02  # seconds: the maximum duration of one wait
_START_SECONDS = 120.0  # to import what it needs
_KEPT_WORDS = 300  # characters kept of a process's last output

_PACKAGE_FOLDER = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

# The first code of a new interpreter. `python -c` puts the current folder first on its path (unavoidable before
# 3.11), so only `sys`, which is built in, may be imported before the path is replaced.
_SERVING = (
    "import sys; end = 2 + int(sys.argv[1]); sys.path[:] = sys.argv[2:end]; "
    "from tilewright.support.process import main; main(*sys.argv[end:])"
)

# Messages of libraries that abort because memory ran out.
_OUT_OF_MEMORY = ("out of memory", "bad_alloc", "cannot allocate memory", "memoryerror", "failed to allocate")


class Dead(Exception):
    """A process did not answer: it crashed, ran out of memory, or took too long and was killed.

    `kind`: "crash", "memory" or "timeout"."""

    def __init__(self, kind: str, message: str) -> None:
        self.kind, self.message = kind, message
        super().__init__(message)


# -- in the parent
# ----------------------------------------------------------------------------------------------------


class Child:
    """A child process, seen from its parent. It starts with the first message, and again after each death.

    `serve` is "module:function", a function of a Channel that runs in it. `memory`: the bytes that it may use.
    `confined`: without a network, if the system can (`confinement.py`), and without the secrets of this process.
    """

    def __init__(
        self, serve: str, memory: int, environment: dict[str, str] | None = None, *, confined: bool = False
    ) -> None:
        self._serve, self._memory, self._environment = serve, memory, environment or {}
        self._confined = confined
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._words = -1  # its standard error
        self.greeted = False  # whether it has started

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
                "this program embeds Python, so it has no interpreter that could start a process"
            )
        ours, theirs = socket.socketpair()
        self._words, words = os.pipe()
        os.set_blocking(words, False)  # a child that writes too much loses output, and is not blocked
        try:
            folders = import_folders()
            arguments = [str(len(folders)), *folders, self._serve, str(theirs.fileno()), str(self._memory)]
            arguments += ["confined"] if self._confined else []
            inherited = {k: v for k, v in os.environ.items() if not self._confined or k not in SECRETS}
            self._process = subprocess.Popen(
                [sys.executable, "-c", _SERVING, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=words,
                pass_fds=(theirs.fileno(),),
                env={**inherited, "PYTHONSAFEPATH": "1", **self._environment},
                start_new_session=True,  # Ctrl-C is for the parent
            )
        except OSError as error:
            ours.close()
            os.close(self._words)
            raise MeasurementError(f"cannot start a worker process: {error}") from None
        finally:
            os.close(words)
            theirs.close()
        os.set_blocking(self._words, False)
        self._socket = ours

    def send(self, message: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send a message. `receive` notices if the process is already dead."""
        self.start()
        assert self._socket is not None
        with contextlib.suppress(ConnectionError):
            _send(self._socket, message, descriptors)

    def greet(self) -> None:
        """Wait until it has started. Raises MeasurementError if it does not, since no candidate is to blame yet."""
        if self.greeted:
            return
        try:
            self._message(_START_SECONDS)
        except Dead as death:
            raise MeasurementError(f"a worker process does not start: {death}") from None
        self.greeted = True

    def receive(self, seconds: float) -> bytes:
        """Its next message. Raises Dead, after killing the process, if there is none within `seconds`."""
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
        if starved or code == -signal.SIGKILL:  # killed by the system: it used too much memory
            return Dead("memory", "it ran out of memory")
        last_words = " ".join(said.splitlines()[-2:])[-_KEPT_WORDS:]
        how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        return Dead("crash", f"the process ended with {how}" + (f": {last_words}" if said else ""))


def import_folders() -> list[str]:
    """The import path of a child process: that of this one, with the current folder last.

    So a file in the current folder never shadows an installed module. The folder is on the path only if this process
    imports from it too, because the user's own modules may be there.
    """
    try:
        here = os.path.realpath(os.getcwd())
    except FileNotFoundError:  # the folder was removed
        here = ""
    absolute = [os.path.abspath(f) for f in sys.path if isinstance(f, str) and (here or os.path.isabs(f))]
    absolute.append(_PACKAGE_FOLDER)  # this package may have been found by an import hook
    current = [folder for folder in absolute if os.path.realpath(folder) == here]
    return list(dict.fromkeys([folder for folder in absolute if folder not in current] + current))


@contextlib.contextmanager
def safe_path() -> Iterator[None]:
    """Processes that others start meanwhile, as `multiprocessing` does, import nothing from the current folder first
    (from Python 3.11 on)."""
    name = "PYTHONSAFEPATH"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


def wait(*children: Child) -> tuple[list[Child], float]:
    """The children that have sent something, after at most one tick, and the seconds waited. Time in which this
    process was stopped does not count."""
    begin = time.monotonic()
    ready, _, _ = select.select(children, [], [], TICK)
    return ready, min(time.monotonic() - begin, 2 * TICK)


# -- on both sides
# ----------------------------------------------------------------------------------------------------


def _send(connection: socket.socket, message: bytes, descriptors: Sequence[int]) -> None:
    framed = len(message).to_bytes(_HEADER_BYTES, "little") + message
    sent = socket.send_fds(connection, [framed], list(descriptors)) if descriptors else 0
    connection.sendall(memoryview(framed)[sent:])


# -- in the child
# -----------------------------------------------------------------------------------------------------


class Channel:
    """The requests of the parent, and the way to answer them."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def receive(self) -> tuple[bytes, list[int]]:
        """A message and its descriptors. Ends the process if the parent is gone."""
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


def main(serve: str, descriptor: str, memory: str, confined: str = "") -> None:
    """The main function of a child process."""
    if confined:
        confine(int(memory))  # before there are threads
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
    with contextlib.suppress(ValueError, OSError):  # a system that does not allow it
        resource.setrlimit(which, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _end_with_the_other_side(descriptor: int) -> None:
    """End this process when the parent does: a hanging kernel never asks for the next message."""
    poll = select.poll()
    poll.register(descriptor, 0)  # only to learn that the other end was closed
    poll.poll()
    os._exit(1)
