"""`benchmarks/paired_tiles.py`: sizes are read, and each kernel computes what it is timed for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import paired_tiles
from tilewright.hw import host


def test_sizes_are_matmuls_and_convolutions() -> None:
    assert paired_tiles.task_of("20x64x32").output.shape == (20, 64)
    assert paired_tiles.task_of("conv3/2:16>32@9").output.shape == (1, 5, 5, 32)
    assert paired_tiles.task_of("conv1/1:16>32@9").output.shape == (1, 9, 9, 32)


@pytest.mark.skipif("avx512f" not in host().features, reason="the paired template wants 32 vectors")
def test_all_three_are_timed_and_a_size_without_offer_says_so() -> None:
    row = paired_tiles.measured("19x64x64", replace(host(), cpu="znver4"), turns=1)
    assert not row.offered
    assert min(row.plain, row.certified, row.uncertified) > 0
    assert row.computed > 1
    assert row.line().count("|") == 9 and row.line().endswith("| no |")
