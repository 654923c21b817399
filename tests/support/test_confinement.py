"""A confined process: what it can no longer do, tried from inside it."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Iterator

import pytest

from tilewright.support.confinement import SECRETS, can_remove_network
from tilewright.support.process import Channel, Child, Dead

MEMORY = 256 << 20


def serve(channel: Channel) -> None:
    """In the process: tries what the message says, and answers what came of it."""
    while True:
        message, _ = channel.receive()
        word, _, rest = message.decode().partition(" ")
        try:
            if word == "connect":
                socket.create_connection(("127.0.0.1", int(rest)), timeout=5).close()
            elif word == "listen":
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", 0))
                    probe.listen()
                    socket.create_connection(probe.getsockname(), timeout=5).close()
            elif word == "variables":
                found = [name for name in rest.split() if name in os.environ]
                channel.send(" ".join(found).encode())
                continue
            elif word == "file":
                with tempfile.TemporaryFile() as file:
                    os.posix_fallocate(file.fileno(), 0, int(rest))
            elif word == "privileges":
                with open("/proc/self/status") as status:
                    line = next(line for line in status if line.startswith("NoNewPrivs"))
                channel.send(line.split()[1].encode())
                continue
            elif word == "eat":
                bytearray(int(rest))
        except (OSError, MemoryError) as error:
            channel.send(type(error).__name__.encode())
            continue
        channel.send(b"done")


def asked(child: Child, request: str) -> str:
    child.send(request.encode())
    return child.receive(20).decode()


@pytest.fixture(scope="module")
def children() -> Iterator[tuple[Child, Child]]:
    """One that is confined, and one that is not."""
    patch = pytest.MonkeyPatch()
    for name in SECRETS:
        patch.setenv(name, "0" * 64)
    both = tuple(Child(f"{__name__}:serve", MEMORY, confined=confined) for confined in (True, False))
    for child in both:
        child.start()
    patch.undo()
    yield both[0], both[1]
    for child in both:
        child.close()


@pytest.mark.skipif(not can_remove_network(), reason="this system has no namespaces, or forbids them")
def test_it_has_no_network(children: tuple[Child, Child]) -> None:
    confined, free = children
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        assert asked(free, f"connect {port}") == "done"
        assert asked(confined, f"connect {port}") == "OSError"
        assert asked(free, "listen") == "done"
        assert asked(confined, "listen") == "OSError"  # not even with itself


def test_it_has_no_secrets(children: tuple[Child, Child]) -> None:
    confined, free = children
    assert asked(free, f"variables {' '.join(SECRETS)}").split() == list(SECRETS)
    assert asked(confined, f"variables PATH {' '.join(SECRETS)}") == "PATH"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of Linux")
def test_it_gains_no_privileges(children: tuple[Child, Child]) -> None:
    confined, free = children
    assert (asked(free, "privileges"), asked(confined, "privileges")) == ("0", "1")


def test_its_files_and_its_memory_are_limited(children: tuple[Child, Child]) -> None:
    confined, _ = children
    assert asked(confined, f"file {MEMORY // 2}") == "done"
    assert asked(confined, f"file {2 * MEMORY}") == "OSError"
    assert asked(confined, f"eat {2 * MEMORY}") == "MemoryError"


def test_its_time_is_limited(children: tuple[Child, Child]) -> None:
    confined, _ = children
    with pytest.raises(Dead) as death:
        confined.receive(0.1)  # nothing was asked, so nothing comes
    assert death.value.kind == "timeout" and not confined.alive
