"""The static memory planner: assign each intermediate buffer of a plan an offset in one arena.

Two buffers may share bytes only if their live ranges do not overlap. A live range is the closed interval of steps
from the one that writes the buffer to the last one that reads it; since both ends count, a step's output never
overlaps its inputs.

Finding the smallest arena is NP-hard (dynamic storage allocation). A greedy best fit is very good with the right
order of buffers, and no single order suits every network: by time suits chains, by the busiest step suits U-Nets with
their long-lived skip connections. So a few orders are tried; then the best is improved by moving the topmost buffer
to the front, until the lower bound is reached or nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tilewright.runtime.plan import MemoryReport, aligned

_MOVES = 60  # attempts to improve the best order; each costs one placement,
_WORK = 20_000  # whose time is proportional to the number of buffers: the total limit
_FOREVER = 1 << 62
_GOOD_ENOUGH = 1.01  # an arena this close to the lower bound is good enough


@dataclass(frozen=True)
class LiveBuffer:
    size: int  # bytes
    first_step: int  # the step that writes it
    last_step: int  # the last step that reads it


def plan_memory(buffers: Sequence[LiveBuffer], constant_bytes: int = 0) -> tuple[list[int], MemoryReport]:
    """Assign a 64-byte aligned offset to each buffer, and report the quality of the arena. Deterministic."""
    for buffer in buffers:
        if buffer.size < 0 or buffer.first_step > buffer.last_step:
            raise ValueError(f"a buffer that ends before it begins: {buffer}")
    sizes = np.array([aligned(buffer.size) for buffer in buffers], dtype=np.int64)
    first = np.array([buffer.first_step for buffer in buffers], dtype=np.int64)
    last = np.array([buffer.last_step for buffer in buffers], dtype=np.int64)
    bound = _lower_bound(sizes, first, last)
    offsets, arena = _best_placement(sizes, first, last, bound)
    report = MemoryReport(
        arena_bytes=arena,
        lower_bound=bound,
        no_reuse=int(sizes.sum()),
        constant_bytes=constant_bytes,
    )
    return offsets, report


def _lower_bound(sizes: np.ndarray, first: np.ndarray, last: np.ndarray) -> int:
    """The largest number of live bytes at one step; it is reached where some buffer begins."""
    return max(
        (int(sizes[(first <= step) & (step <= last)].sum()) for step in set(first.tolist())), default=0
    )


def _best_placement(
    sizes: np.ndarray, first: np.ndarray, last: np.ndarray, bound: int
) -> tuple[list[int], int]:
    best: tuple[int, list[int], list[int], int] | None = None  # arena, offsets, order, ceiling
    for make_order in _ORDERS:
        order = make_order(sizes, first, last)
        for ceiling in (bound, 0):
            offsets, arena = _place(order, sizes, first, last, ceiling)
            if best is None or arena < best[0]:
                best = arena, offsets, order, ceiling
            if best[0] == bound:
                return best[1], bound
    assert best is not None
    best_arena, best_offsets, order, ceiling = best
    offsets, arena = best_offsets, best_arena
    seen = {tuple(order)}
    for _ in range(min(_MOVES, _WORK // len(order))):
        if best_arena <= bound * _GOOD_ENOUGH:
            break
        # Place the topmost buffer before all others.
        top = next(index for index in order if offsets[index] + sizes[index] == arena)
        order = [top, *(index for index in order if index != top)]
        if tuple(order) in seen:
            break
        seen.add(tuple(order))
        offsets, arena = _place(order, sizes, first, last, ceiling)
        if arena < best_arena:
            best_offsets, best_arena = offsets, arena
    return best_offsets, best_arena


def _place(
    order: list[int], sizes: np.ndarray, first: np.ndarray, last: np.ndarray, ceiling: int = 0
) -> tuple[list[int], int]:
    """Put each buffer in turn into the tightest gap between placed buffers that are live at the same time.

    Without a ceiling it goes to the bottom of the gap. With one, it goes to the end whose neighbour outlives it, by the
    least if both do; floor and ceiling live until the end. So free space stays contiguous: a buffer never outlives its
    neighbour. In order of time, this reaches the lower bound on chains and residual networks.
    """
    count = len(order)
    offsets = [0] * count
    # The placed buffers, sorted by offset, as parallel arrays, so that the search for neighbours is vectorised.
    starts, ends = np.zeros(count, np.int64), np.zeros(count, np.int64)
    begin, end = np.zeros(count, np.int64), np.zeros(count, np.int64)
    placed, arena = 0, 0
    for index in order:
        size, death = int(sizes[index]), int(last[index])
        if size == 0:
            continue
        alive = (begin[:placed] <= death) & (end[:placed] >= first[index])
        neighbours = (array[:placed][alive].tolist() for array in (starts, ends, end))
        offset = _choose_offset(list(zip(*neighbours, strict=True)), size, death, ceiling)
        at = int(np.searchsorted(starts[:placed], offset))
        for array, value in ((starts, offset), (ends, offset + size), (begin, first[index]), (end, death)):
            array[at + 1 : placed + 1] = array[at:placed].copy()
            array[at] = value
        placed += 1
        offsets[index] = offset
        arena = max(arena, offset + size)
    return offsets, arena


def _choose_offset(neighbours: list[tuple[int, int, int]], size: int, death: int, ceiling: int) -> int:
    """The offset of a buffer among its live neighbours, each (start, end, last step), sorted by start."""
    cursor, below = 0, _FOREVER  # the end of the neighbours so far, and their last step
    best: tuple[int, int, int, int] | None = (
        None  # room, offset, last steps of the neighbours below and above
    )
    walls = [(ceiling, ceiling, _FOREVER)] if ceiling else []
    for start, end, life in (*neighbours, *walls):
        room = start - cursor
        if room >= size and (best is None or room < best[0]):
            best = room, cursor, below, life
        if end > cursor:
            cursor, below = end, life
    if best is None:  # no gap fits: on top of everything
        return max((end for _, end, _ in neighbours), default=0)
    room, offset, below, above = best
    leans_up = above >= death and (below < death or above < below)
    return offset + room - size if ceiling and leans_up else offset


# -- orders ----------------------------------------------------------------------------------------------------------

_Order = Callable[[np.ndarray, np.ndarray, np.ndarray], list[int]]


def _by_size(sizes: np.ndarray, first: np.ndarray, last: np.ndarray) -> list[int]:
    return sorted(range(len(sizes)), key=lambda i: (-sizes[i], first[i], i))


def _by_size_and_life(sizes: np.ndarray, first: np.ndarray, last: np.ndarray) -> list[int]:
    return sorted(range(len(sizes)), key=lambda i: (-sizes[i] * (last[i] - first[i] + 1), first[i], i))


def _by_life(sizes: np.ndarray, first: np.ndarray, last: np.ndarray) -> list[int]:
    return sorted(range(len(sizes)), key=lambda i: (first[i] - last[i], -sizes[i], i))


def _by_time(sizes: np.ndarray, first: np.ndarray, last: np.ndarray) -> list[int]:
    return sorted(range(len(sizes)), key=lambda i: (first[i], -last[i], -sizes[i], i))


def _by_busiest_step(sizes: np.ndarray, first: np.ndarray, last: np.ndarray) -> list[int]:
    """First the buffers that are live at the step with the most live bytes, largest first; then those at the next
    busiest; and so on."""
    steps = sorted(set(first.tolist()))
    alive = {step: (first <= step) & (step <= last) for step in steps}
    order: dict[int, None] = {}
    for step in sorted(steps, key=lambda step: (-int(sizes[alive[step]].sum()), step)):
        for index in sorted(np.flatnonzero(alive[step]).tolist(), key=lambda i: (-sizes[i], i)):
            order.setdefault(index)
    return list(order)


_ORDERS: tuple[_Order, ...] = (_by_time, _by_size, _by_busiest_step, _by_size_and_life, _by_life)
