"""How a driver looks for the first node."""

from __future__ import annotations

import errno
import socket
from typing import Any

import pytest

from tilewright.measure.pool.workers import answers


def test_an_address_that_fails_at_once_is_not_tried_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[Any] = []

    def unreachable(address: Any, timeout: float) -> socket.socket:
        attempts.append(address)
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(socket, "create_connection", unreachable)
    assert not answers("192.0.2.1:6379", 0.3)
    assert 1 <= len(attempts) <= 5
