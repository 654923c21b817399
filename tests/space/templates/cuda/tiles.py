"""Configs of the tensor-core templates that the tests try."""

from collections.abc import Sequence
from typing import Any

import pytest

from tilewright.hw.gpu import A100, H200, GpuMachine
from tilewright.loops.gpu.tensor import MatrixTiles

# What a kernel may spill: left to weigh registers against blocks, the compiler puts a few addresses on the stack rather
# than run one block less. Sums and fragments would be hundreds.
FEW_BYTES = 32

TILES = [
    MatrixTiles(64, 64, 32, 2, 2, 2),
    MatrixTiles(64, 128, 64, 1, 4, 3),
    MatrixTiles(128, 64, 64, 2, 2, 3),
    MatrixTiles(32, 64, 64, 2, 2, 4),
]
LARGE = [MatrixTiles(128, 128, 64, 2, 2, 3), MatrixTiles(128, 256, 32, 2, 4, 4)]
SPLIT = [MatrixTiles(64, 64, 32, 2, 2, 3, 4), MatrixTiles(16, 64, 64, 1, 2, 4, 2)]
PERSISTENT = [
    MatrixTiles(32, 32, 32, 1, 2, 3, persistent=True),
    MatrixTiles(64, 64, 64, 2, 2, 2, persistent=True),
]


def compiled(cases: Sequence[Any], quick: int) -> list[Any]:
    """(case, card, seed) of the configs that are compiled: of every `quick`th case one on one card, all else slow."""
    cards: list[GpuMachine] = [A100, H200]
    return [
        pytest.param(
            case, card, seed,
            marks=() if (number % quick, seed, card) == (0, 0, cards[number // quick % 2]) else pytest.mark.slow,
            id=f"{case.name}-{card.capability}-{seed}",
        )
        for number, case in enumerate(cases) for card in cards for seed in range(4)
    ]  # fmt: skip
