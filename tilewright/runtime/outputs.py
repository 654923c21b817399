"""Memory for large results, reused once nothing refers to it.

Memory fresh from the system costs a page fault for every page, together more than the kernel that fills it. A result
therefore lies in memory of ours, behind an *owner* that whatever shares it keeps alive: arrays and their views, tensors
and their storages, buffers taken of them. When the owner dies, none of them is left, and the memory is free for another
result. That is not found out by a search: arrays and tensors are no part of cycles that the garbage collector sees, so
an owner dies when the last of them does.

A model keeps at most two free pieces of memory for each of its outputs, enough for a caller that holds one result while
the next is computed, and never more than it had handed out at once. They go with the model; results stay.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from typing import Any

import numpy as np

from tilewright.runtime.executor import aligned_empty

LARGE = 1 << 20  # bytes: smaller memory comes from the allocator's own store, without a fault
_KEPT = 2


class OutputMemory:
    """Memory for results of one size."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._owner_type = ctypes.c_uint8 * size
        # Taken from and added to without a lock: an owner may die at any point of any thread, even inside `lend`.
        self._free: deque[np.ndarray] = deque(maxlen=_KEPT)

    def lend(self) -> Any:
        """An owner of `size` uninitialised bytes, which it gives as a buffer."""
        try:
            memory = self._free.pop()  # the most recent: the nearest to a cache
        except IndexError:
            memory = aligned_empty(self._size)
        owner = self._owner_type.from_buffer(memory.data)
        weakref.finalize(owner, _give_back, weakref.ref(self), memory).atexit = False
        return owner

    @property
    def kept_bytes(self) -> int:
        return self._size * len(self._free)


def _give_back(lender: weakref.ref[OutputMemory], memory: np.ndarray) -> None:
    alive = lender()
    if alive is not None:
        alive._free.append(memory)
