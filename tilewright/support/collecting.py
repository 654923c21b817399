"""Garbage collection while much is allocated and little of it is garbage."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_NEVER = 1 << 30  # collections of the middle generation before the oldest is collected

_lock = threading.Lock()
_inside: list[tuple[int, int, int]] = []  # for everyone inside, the original thresholds


@contextmanager
def collecting_the_young() -> Iterator[None]:
    """Collect only young objects: one full collection with PyTorch imported takes a quarter of a second, and a
    compilation would have several. It may be nested, and used in several threads."""
    with _lock:
        _inside.append(_inside[0] if _inside else gc.get_threshold())
        gc.set_threshold(*_inside[0][:2], _NEVER)
    try:
        yield
    finally:
        with _lock:
            before = _inside.pop()
            if not _inside:
                gc.set_threshold(*before)
