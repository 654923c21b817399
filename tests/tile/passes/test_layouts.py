"""Layouts as sets of elements: every element is held, and operations on shapes move none to another thread."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from tilewright.tile.passes.axes import AxisInfo
from tilewright.tile.passes.coalesce import access_elements, memory_layout, run_bytes
from tilewright.tile.passes.layouts import (
    REPLICATED,
    Layout,
    bits_of,
    broadcast_bits,
    distributed,
    inverse,
    reduced_bits,
    transposed_bits,
)


def held(layout: Layout) -> np.ndarray:
    """The number of the element in each register, by thread."""
    threads, registers = 1 << len(layout.threads), layout.size
    found = np.zeros((threads, registers), int)
    for thread, register in itertools.product(range(threads), range(registers)):
        for n, bit in enumerate(layout.threads):
            found[thread, register] |= (thread >> n & 1) << bit if bit != REPLICATED else 0
        for n, bit in enumerate(layout.registers):
            found[thread, register] |= (register >> n & 1) << bit
    return found


def some_layout(seed: int, bits: int) -> Layout:
    chosen = random.Random(seed)
    order = list(range(bits))
    chosen.shuffle(order)
    return distributed(order, chosen.randint(0, 3), chosen.randint(0, 2))


@pytest.mark.parametrize("seed", range(20))
def test_every_element_is_held_and_replicas_agree(seed: int) -> None:
    bits = seed % 10
    layout = some_layout(seed, bits)
    found = held(layout)
    assert set(found.reshape(-1)) == set(range(1 << bits))
    for thread in range(len(found)):
        assert np.array_equal(found[thread], found[thread & ~layout.replicated])


@pytest.mark.parametrize("seed", range(20))
def test_views_move_no_element(seed: int) -> None:
    shape = ((8, 4, 16), (2, 32), (64,), (1, 8, 1))[seed % 4]
    layout, numbers = some_layout(seed, bits_of(shape)), np.arange(np.prod(shape)).reshape(shape)
    order = list(range(len(shape)))
    random.Random(seed).shuffle(order)
    moved = layout.mapped(transposed_bits(shape, order))
    assert np.array_equal(numbers.transpose(order).reshape(-1)[held(moved)], held(layout))
    wide = (4, *shape)
    stretched = np.broadcast_to(numbers, wide).reshape(-1)
    over = some_layout(seed + 1, bits_of(wide))
    inner = over.mapped(inverse(broadcast_bits(shape, wide)))
    kept = over.kept_registers(inverse(broadcast_bits(shape, wide)))
    index = [sum((r >> p & 1) << n for n, p in enumerate(kept)) for r in range(over.size)]
    assert np.array_equal(held(inner)[:, index], stretched[held(over)])


def test_a_reduction_leaves_what_each_thread_has_of_the_other_axes() -> None:
    shape = (8, 16)
    layout = distributed(range(7), 1, 1)
    kept = layout.mapped(reduced_bits(shape, 1))
    rows = {thread: set(held(layout)[thread] // 16) for thread in range(64)}
    assert all(set(held(kept)[thread]) == rows[thread] for thread in range(64))


@pytest.mark.parametrize("seed", range(20))
def test_holding_is_having_all_elements_of_the_other(seed: int) -> None:
    one, two = some_layout(seed, 6), some_layout(seed + 100, 6)
    if len(one.warps) != len(two.warps):
        return
    sets = [[set(row) for row in held(each)] for each in (one, two)]
    assert one.holds(two) == all(b <= a for a, b in zip(*sets, strict=True))


def test_lanes_access_neighbours_and_as_many_at_once_as_divisors_allow() -> None:
    shape = (16, 64)
    rows = AxisInfo((1, 64), (1, 1), (256, 256), unit=4)
    layout = memory_layout(shape, rows, None, 4, 2)
    assert layout.registers[:2] == (0, 1) and layout.lanes == (2, 3, 4, 5, 6)
    assert access_elements(layout, shape, rows, None, 4) == 4
    assert access_elements(layout, shape, rows, (16, 2), 4) == 2, "a mask that changes every two elements"
    assert run_bytes(layout, shape, rows, 4, 4) == 256
    columns = AxisInfo((16, 1), (1, 1), (4, 4), unit=4)
    transposed = memory_layout(shape, columns, None, 4, 2)
    assert transposed.lanes[:4] == (6, 7, 8, 9) and access_elements(transposed, shape, columns, None, 4) == 1


def test_small_tiles_spread_over_all_threads_before_vectors() -> None:
    info = AxisInfo((64,), (1,), (256,), unit=4)
    assert memory_layout((64,), info, None, 4, 2).registers == ()
