"""Atomics on the emulated GPU: of tiles and of scalars, with and without masks, with results that are used or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilewright
import tilewright.tile as tl
from tests.codegen.cuda.tiles.emulated import launch, run
from tests.nvrtc import needs_nvrtc
from tests.tile.test_atomics_and_shapes import combined
from tilewright.codegen.cuda.tiles.executor import Executor
from tilewright.hw.gpu import H200
from tilewright.testing.emulator.run import COMPILER

EMULATED = pytest.mark.skipif(COMPILER is None, reason="no g++ here to compile the emulator with")

INTEGERS = (np.int32, np.int64, np.uint32, np.uint64)
FUNCTIONS = {
    "add": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


@EMULATED
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_tiles_are_combined(kind: str, tmp_path: Path) -> None:
    launches, wanted = [], []
    for n, dtype in enumerate(INTEGERS):
        x = np.random.default_rng(0).integers(-1000, 1000, 77).astype(dtype)
        bins, old = np.full(4, 5, dtype), np.zeros(77, dtype)
        warps = (1, 4, 2, 8)[n]
        launches.append(launch(combined, x, bins, old, 77, grid=(3, 1, 1), warps=warps, KIND=kind, BLOCK=32))
        wanted.append([FUNCTIONS[kind].reduce(np.array([5, *x[b::4]], dtype), dtype=dtype) for b in range(4)])
    for found, bins in zip(run(launches, tmp_path), wanted, strict=True):
        np.testing.assert_array_equal(found["bins"], bins)
        assert all(5 in found["old"][b::4] for b in range(4))  # one of each bin was first


@tilewright.kernel
def one_cell(cell, out, n):
    """Each atomic of scalars on a cell of its own; what was there before goes to `out`."""
    i = tl.program_id(0)
    at = out + i * 8
    tl.store(at, tl.atomic_add(cell, i))
    tl.store(at + 1, tl.atomic_max(cell + 1, i * n))
    tl.store(at + 2, tl.atomic_min(cell + 2, 0 - i, mask=i != 2))
    tl.store(at + 3, tl.atomic_and(cell + 3, 6))
    tl.store(at + 4, tl.atomic_or(cell + 4, i))
    tl.store(at + 5, tl.atomic_xor(cell + 5, i))
    tl.store(at + 6, tl.atomic_xchg(cell + 6, i))
    tl.store(at + 7, tl.atomic_cas(cell + 7, i, i + 1))


@EMULATED
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_scalars_are_combined(dtype: Any, tmp_path: Path) -> None:
    cell, out = np.array([10, 1, 0, 5, 8, 3, 9, 0], dtype), np.zeros((3, 8), dtype)
    (found,) = run([launch(one_cell, cell, out, 7, grid=(3, 1, 1), warps=2)], tmp_path)
    np.testing.assert_array_equal(found["cell"], [13, 14, -1, 4, 11, 0, 2, 3])
    wanted = [[10, 1, 0, 5, 8, 3, 9, 0], [10, 1, 0, 4, 8, 3, 0, 1], [11, 7, 0, 4, 9, 2, 1, 2]]
    wanted[2][2] = int(found["out"][2, 2])  # masked out: undefined
    np.testing.assert_array_equal(found["out"], wanted)


@tilewright.kernel
def exchanged(cell, out, value, N: tl.constexpr):
    n = tl.arange(0, N)
    tl.store(out + n, tl.atomic_xchg(cell + n % 4, value + n))


@EMULATED
@pytest.mark.parametrize("warps", [1, 4])
def test_exchange_loses_and_doubles_nothing(warps: int, tmp_path: Path) -> None:
    types = (*INTEGERS, np.float32, np.float64)
    launches = [
        launch(exchanged, np.arange(4).astype(each), np.zeros(64, each), 4, warps=warps, N=64)
        for each in types
    ]
    for found in run(launches, tmp_path):
        assert sorted([*found["out"], *found["cell"]]) == [*range(68)]


@tilewright.kernel
def claimed(cell, out, n, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.atomic_cas(cell + at % n, 0, at + 1))


@EMULATED
def test_compare_and_swap_has_one_winner(tmp_path: Path) -> None:
    launches = [launch(claimed, np.zeros(2, each), np.zeros(64, each), 2, N=64) for each in INTEGERS]
    for found in run(launches, tmp_path):
        for b in range(2):
            assert (found["out"][b::2] == 0).sum() == 1 and found["cell"][b] in np.arange(1, 65)[b::2]


@tilewright.kernel
def bits(words, N: tl.constexpr):
    n = tl.arange(0, N)
    tl.atomic_or(words + n // 32, 1 << (n % 32))
    tl.atomic_xchg(words + 2 + n % 2, n % 2 + 7)


@EMULATED
def test_an_atomic_whose_operands_are_index_arithmetic_and_whose_result_is_unused(tmp_path: Path) -> None:
    (found,) = run([launch(bits, np.zeros(4, np.int32), N=64)], tmp_path)
    np.testing.assert_array_equal(found["words"], [-1, -1, 7, 8])


@tilewright.kernel
def carried(cell, out, n):
    """Old values that only a branch and a loop take further."""
    before = 0
    if n > 2:
        before = tl.atomic_add(cell, n)
    tl.store(out + tl.arange(0, 64), before)
    last = 0
    for _ in range(2):
        last = tl.atomic_add(cell + 1, n)
    tl.store(out + 64 + tl.arange(0, 64), last)


@EMULATED
def test_the_old_value_reaches_all_threads_through_a_branch_or_a_loop(tmp_path: Path) -> None:
    (found,) = run([launch(carried, np.array([41, 10], np.int32), np.zeros(128, np.int32), 3)], tmp_path)
    np.testing.assert_array_equal(found["cell"], [44, 16])
    np.testing.assert_array_equal(found["out"], [41] * 64 + [13] * 64)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32, np.uint64, np.float32, np.float64])
def test_nvrtc_takes_it(dtype: Any) -> None:
    needs_nvrtc()
    launches = [launch(exchanged, np.zeros(4, dtype), np.zeros(64, dtype), 4, N=64)]
    if dtype in INTEGERS:
        launches.append(launch(one_cell, np.zeros(8, dtype), np.zeros(24, dtype), 7))
        launches.append(launch(claimed, np.zeros(2, dtype), np.zeros(64, dtype), 2, N=64))
    executor = Executor(H200)
    executor.cache = None
    for made in launches:
        _, compiled, symbol = executor.build(made.program, made.facts, {"warps": 4})
        assert symbol.encode() in compiled.cubin
