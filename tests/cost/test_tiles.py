"""What is counted in a tile program."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.tile import kernels
from tilewright.cost.tiles import TileCounts, count_tiles, tile_terms
from tilewright.hw import host
from tilewright.space.terms import Terms


def counted(M: int, N: int, K: int, **knobs: Any) -> TileCounts:
    a, b, bias = (np.zeros(shape, np.float32) for shape in ((M, K), (K, N), (N,)))
    out = np.zeros((M, N), np.float32)
    program = kernels.matmul_gelu.program(a, b, bias, out, M, N, K, **knobs)
    grid = (-(-M // knobs["BM"]), -(-N // knobs["BN"]), 1)
    scalars = {"M": M, "N": N, "K": K}
    return count_tiles(program, scalars, grid, a.nbytes + b.nbytes + bias.nbytes + out.nbytes)


@pytest.mark.parametrize("knobs", [(16, 16, 16), (32, 16, 64), (8, 64, 32)])
def test_the_work_of_a_matmul_does_not_depend_on_its_tiles(knobs: tuple[int, int, int]) -> None:
    bm, bn, bk = knobs
    counts = counted(64, 128, 192, BM=bm, BN=bn, BK=bk)
    assert counts.instances * counts.fmas == 64 * 128 * 192
    assert counts.instances == (64 // bm) * (128 // bn)
    assert counts.sides == [bm, bn, bk]
    assert counts.instances * counts.stored == 64 * 128 * 4


def test_larger_tiles_load_less() -> None:
    small, large = (counted(128, 128, 128, BM=size, BN=size, BK=32) for size in (16, 64))
    assert small.instances * small.loaded > 3 * large.instances * large.loaded
    assert small.features().keys() == large.features().keys()


def test_terms_are_of_all_instances() -> None:
    terms = tile_terms(counted(64, 64, 64, BM=32, BN=32, BK=32), host(), {})
    assert isinstance(terms, Terms)
    assert terms.iterations == 4 and terms.arithmetic > 64**3 / 32


def test_a_loop_that_memory_decides_counts_once() -> None:
    a, b, out = np.zeros((8, 8), np.float32), np.zeros((2, 8, 8), np.float32), np.zeros((8, 8), np.float32)
    ends = np.array([4, 8], np.int32)
    program = kernels.grouped_matmul.program(a, b, out, ends, 2, 8, 8, BM=8, BN=8, BK=8)
    counts = count_tiles(program, {"groups": 2, "N": 8, "K": 8}, (1, 1, 1), 1024)
    assert counts.fmas == 2 * 8**3  # a group each, of which one tile is assumed
