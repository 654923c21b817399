"""Runs of bytes in the accesses of tile programs, and what they and the grid say about times."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilewright
import tilewright.tile as tl
from tests.tile import kernels
from tilewright.cost.gpu import seconds
from tilewright.cost.tile_accesses import LONG
from tilewright.cost.tiles import TileCounts, count_tiles, tile_terms
from tilewright.hw.gpu import H200
from tilewright.space.terms import StreamTerms


def counted(kernel: Any, grid: tuple[int, int, int], *arguments: Any, **knobs: Any) -> TileCounts:
    bound = kernel.bind(arguments, knobs)
    scalars = {name: value for name, value in bound.items() if isinstance(value, int) and name not in knobs}
    moved = sum(value.nbytes for value in bound.values() if isinstance(value, np.ndarray))
    return count_tiles(kernel.program(*arguments, **knobs), scalars, grid, moved)


@pytest.mark.parametrize(
    ("bm", "bn", "run"),
    [(4, 1024, LONG), (1, 1024, LONG), (4, 512, 2048), (8, 64, 256)],
    ids=["rows that go on", "one row an instance", "halves of rows", "short"],
)
def test_runs_of_blocks_of_rows(bm: int, bn: int, run: int) -> None:
    """Rows of 1000 elements: a block as wide as a row goes on in the next row, and in the next instance."""
    x, row = np.zeros((64, 1000), np.float32), np.zeros(1000, np.float32)
    counts = counted(kernels.add_row, (64 // bm, -(-1000 // bn), 1), x, row, x.copy(), 64, 1000, BM=bm, BN=bn)
    whole = 2 * bm * bn * 4  # of the two accesses to matrices; that of the row is one run
    shortest = min(run, LONG)
    assert counts.runs == pytest.approx(whole / shortest, abs=1.1)


@tilewright.kernel
def gathered(x, index, out, N: tl.constexpr):
    n = tl.arange(0, N)
    tl.store(out + n, tl.load(x + tl.load(index + n)))


def test_addresses_from_memory_are_not_known() -> None:
    x, index = np.zeros(64, np.float32), np.zeros(64, np.int32)
    counts = counted(gathered, (1, 1, 1), x, index, x.copy(), N=64)
    assert counts.runs == 3  # 256 bytes each: of the index, of the result, and what is assumed of the gather


def test_a_block_pointer_has_the_runs_of_its_strides() -> None:
    a, b, bias, out = (np.zeros(s, np.float32) for s in ((64, 64), (64, 128), (128,), (64, 128)))
    counts = counted(kernels.matmul_gelu, (2, 4, 1), a, b, bias, out, 64, 128, 64, BM=32, BN=32, BK=16)
    rows = 4 * (32 + 16) + 32 + 1  # of a and b in each of four steps, of the result, and the bias
    assert counts.runs == pytest.approx(rows, abs=1.1)


def test_rows_that_are_read_twice_should_stay_in_the_cache_of_a_gpu() -> None:
    """Blocks of few warps: so many rows are under way at once that L2 does not hold them until they are read again."""
    x = np.zeros((4096, 4096), np.float32)
    row = np.zeros(4096, np.float32)
    found = {}
    for warps in (1, 8):
        counts = counted(kernels.layer_norm, (4096, 1, 1), x, x, row, row, x.copy(), 4096, 1e-5, BLOCK=1024)
        terms = tile_terms(counts, H200, {"warps": warps})
        assert isinstance(terms, StreamTerms) and terms.loaded > 2 * 2 * 4096 * 4
        found[warps] = seconds(terms, H200)
    assert found[8] < found[1]


def test_a_tile_that_does_not_fit_into_registers_is_slow_on_a_gpu() -> None:
    x, row = np.zeros((1024, 4096), np.float32), np.zeros(4096, np.float32)
    counts = counted(kernels.layer_norm, (1024, 1, 1), x, x, row, row, x.copy(), 4096, 1e-5, BLOCK=4096)
    few, more = (seconds(tile_terms(counts, H200, {"warps": warps}), H200) for warps in (1, 8))
    assert more < few


def test_what_one_dot_gives_to_the_next_is_counted() -> None:
    q = np.zeros((1, 128, 64), np.float32)
    arguments = (q, q, q, q.copy(), 128, 0.125)
    knobs = {"D": 64, "BM": 64, "BN": 32, "CAUSAL": False}
    program = kernels.attention.program(*arguments, **knobs)
    counts = count_tiles(program, {"length": 128, "scale": 0.125}, (2, 1, 1), 4 * q.nbytes)
    assert counts.chained == 4 * (64 * 32 * 4)  # in each of four steps, the weights


def test_the_number_of_threads_counts() -> None:
    from tilewright.hw import host

    x = np.zeros((64, 1024), np.float32)
    counts = counted(kernels.softmax, (64, 1, 1), x, x.copy(), 1024, 1024, BLOCK=1024)
    assert tile_terms(counts, host(), {"threads": 1}).iterations == 1  # type: ignore[union-attr]
    assert tile_terms(counts, host(), {}).iterations == 64  # type: ignore[union-attr]
