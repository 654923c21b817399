"""Reusable memory for large results.

Fresh memory costs a page fault for every page, together more than the kernel that fills it. So Tilewright allocates
result memory itself, behind an *owner* that everything sharing it keeps alive: arrays and their views, tensors and
their storages, and buffers. When the owner is collected, none of them is left, and the memory can be reused. Arrays
and tensors take no part in reference cycles, so an owner is collected as soon as the last of them is.

A model keeps at most two free blocks for each of its outputs, enough for a caller that holds one result while the
next is computed, and never more than were in use at once. They are freed with the model; results stay valid.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from typing import Any

import numpy as np

from tilewright.runtime.executor import aligned_empty

LARGE = 1 << 20  # bytes: the allocator caches smaller memory, without page faults
_KEPT = 2


class OutputMemory:
    """Memory for results of one size."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._owner_type = ctypes.c_uint8 * size
        # Used without a lock: an owner may be collected at any point in any thread, even inside `lend`.
        self._free: deque[np.ndarray] = deque(maxlen=_KEPT)

    def lend(self) -> Any:
        """An owner of `size` uninitialised bytes, which supports the buffer protocol."""
        try:
            memory = self._free.pop()  # the most recent one, most likely in a cache
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
