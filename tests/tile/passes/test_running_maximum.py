"""Sums beside a running maximum are rescaled once for several iterations, and are what the loop as written gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilewright
import tilewright.tile as tl
from tests.tile.kernels import cross_entropy
from tilewright.tile.interpret import interpret
from tilewright.tile.ir import For, TileProgram, walk
from tilewright.tile.kernel import tensor_argument
from tilewright.tile.passes import run_passes
from tilewright.tile.passes.running_maximum import grouped_rescaling
from tilewright.tile.passes.standard import simplified


@tilewright.kernel
def of_lanes(x, best_out, total_out, columns, BLOCK: tl.constexpr):
    """A maximum and a sum for each lane."""
    best = tl.full((BLOCK,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, columns, BLOCK):
        n = first + tl.arange(0, BLOCK)
        value = tl.load(x + n, mask=n < columns, other=-1e30)
        now = tl.maximum(value, best)
        total = tl.exp(value - now) + tl.exp(best - now) * total
        best = now
    tl.store(best_out + tl.arange(0, BLOCK), best)
    tl.store(total_out + tl.arange(0, BLOCK), total)


@tilewright.kernel
def of_row(x, best_out, total_out, columns, BLOCK: tl.constexpr):
    """One maximum and one sum."""
    best, total = -float("inf"), 0.0
    for first in range(0, columns, BLOCK):
        n = first + tl.arange(0, BLOCK)
        value = 2.0 * tl.load(x + n, mask=n < columns, other=-1e30)
        now = tl.maximum(best, tl.max(value, axis=0))
        total = total * tl.exp(best - now) + tl.sum(tl.exp(value - now), axis=0)
        best = now
    tl.store(best_out, best)
    tl.store(total_out, total)


@tilewright.kernel
def not_grouped(x, out, columns, step, WHICH: tl.constexpr, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, columns, step if WHICH == "unknown step" else BLOCK):
        value = tl.load(x + first + lanes, mask=first + lanes < columns, other=-1e30)
        if WHICH == "depends":
            value += best
        now = tl.maximum(best, value)
        if WHICH == "stores":
            tl.store(out + first + lanes, now, mask=first + lanes < columns)
        old = total if WHICH == "not rescaled" else total * tl.exp(best - now)
        total = old + tl.exp((value - now) * 2.0) if WHICH == "other sum" else old + tl.exp(value - now)
        best = now
    tl.store(out + lanes, total, mask=lanes < columns)


def interpreted(program: TileProgram, x: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    best, total = np.zeros(size, np.float32), np.zeros(size, np.float32)
    arrays = {"x": x, "best_out": best, "total_out": total}
    tensors = [tensor_argument(name, array) for name, array in arrays.items()]
    with np.errstate(all="ignore"):
        interpret(program, (1, 1, 1), tensors, {"columns": len(x)})
    return best, total


def loops(program: TileProgram) -> int:
    return sum(isinstance(node, For) for node in walk(program.body))


def data(columns: int, special: float | None) -> np.ndarray:
    x = np.random.default_rng(columns).normal(0, 20, columns).astype(np.float32)
    if special is not None:
        x[np.random.default_rng(1).random(columns) < 0.05] = special
    return x


@pytest.mark.parametrize("special", [None, -np.inf, np.inf, np.nan])
@pytest.mark.parametrize("columns", [0, 1, 16, 17, 32, 250, 272, 1000])
@pytest.mark.parametrize("kernel, size", [(of_lanes, 16), (of_row, 1)])
def test_the_sums_are_those_of_the_loop_as_written(
    kernel: Any, size: int, columns: int, special: float | None
) -> None:
    x = data(columns, special)
    shown = np.zeros(max(1, columns), np.float32)
    out = np.zeros(size, np.float32)
    program = simplified(kernel.program(shown, out, out, columns, BLOCK=16))
    grouped = run_passes(program, [grouped_rescaling])
    assert loops(program) == 1 and loops(grouped) == 4
    before, after = (interpreted(each, x, size) for each in (program, grouped))
    np.testing.assert_array_equal(after[0], before[0])
    np.testing.assert_allclose(after[1], before[1], rtol=1e-4)
    found = np.zeros(size, np.float32), np.zeros(size, np.float32)
    with np.errstate(all="ignore"):
        kernel[1](x, *found, columns, BLOCK=16)
    np.testing.assert_array_equal(found[0], before[0])
    np.testing.assert_allclose(found[1], before[1], rtol=1e-4)


def test_where_every_lane_begins_with_minus_infinity() -> None:
    x = data(500, None)
    x[:40] = -np.inf
    found = np.zeros(16, np.float32), np.zeros(16, np.float32)
    of_lanes[1](x, *found, 500, BLOCK=16)
    wanted = interpreted(of_lanes.program(x, *found, 500, BLOCK=16), x, 16)
    assert np.isnan(wanted[1]).all()  # of -inf - -inf, in the loop as written
    np.testing.assert_array_equal(found[1], wanted[1])


@pytest.mark.parametrize("which", ["unknown step", "depends", "stores", "other sum", "not rescaled"])
def test_other_loops_stay(which: str) -> None:
    x = np.zeros(64, np.float32)
    program = simplified(not_grouped.program(x, x, 64, 16, WHICH=which, BLOCK=16))
    assert grouped_rescaling(program) is program
    plain = simplified(not_grouped.program(x, x, 64, 16, WHICH="", BLOCK=16))
    assert grouped_rescaling(plain) is not plain


def test_large_tiles_stay() -> None:
    x, labels, loss = np.zeros((1, 64), np.float32), np.zeros(1, np.int64), np.zeros(1, np.float32)

    def grouped(block: int) -> bool:
        program = simplified(cross_entropy.program(x, labels, loss, 64, BLOCK=block))
        return grouped_rescaling(program) is not program

    assert grouped(1024) and not grouped(8192)
