"""Configs of the tensor-core templates that the tests try, and what they are held to."""

from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pytest

from tests.nvrtc import needs_nvrtc
from tests.rewrites.helpers import array
from tilewright.codegen.cuda.build import GpuKernel, GpuSource, build
from tilewright.codegen.cuda.tensor import tensor_source
from tilewright.graph.oracle import evaluate
from tilewright.graph.task import Task
from tilewright.hw.gpu import A100, H200, GpuMachine
from tilewright.loops.gpu.tensor import TABLE_BYTES, MatrixTiles
from tilewright.measure.check import relative_error
from tilewright.measure.gpu import GpuProgram
from tilewright.runtime.cuda import device
from tilewright.space.implementation import Implementation
from tilewright.space.space import Config
from tilewright.space.template import Applied
from tilewright.space.terms import GpuTerms

# What a kernel may spill. Left to weigh registers against blocks, the compiler would rather put a few addresses on the
# stack than run one block less; then it is told not to.
FEW_BYTES = 0

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


def arrays_of(task: Task) -> list[np.ndarray]:
    return [array(*n.shape, seed=i, dtype=n.dtype) for i, n in enumerate(task.graph.inputs)]


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


def check_it_compiles(applied: Applied, machine: GpuMachine, seed: int) -> None:
    """A random config: built by NVRTC, within the card's limits, without spills, and no more than was counted on."""
    needs_nvrtc()
    config = applied.space.sample(Random(seed))
    assert config is not None
    terms = applied.terms(config)
    assert isinstance(terms, GpuTerms)
    check_resources(build(_source(applied, config), machine, "fast", None), terms, machine)


def _source(applied: Applied, config: Config) -> GpuSource:
    made = applied.program(config)
    assert not isinstance(made, Implementation)
    return tensor_source(made)


def check_resources(kernel: GpuKernel, terms: GpuTerms, machine: GpuMachine) -> None:
    """What the assembler says alongside what the analytical model assumed: as much shared memory but for the table of a
    gathered operand, and at least half as many blocks on a multiprocessor."""
    used = kernel.resources
    assert used.spilled_bytes <= FEW_BYTES, kernel.decisions
    assert kernel.threads == terms.threads
    assert 0 <= kernel.shared_bytes - terms.shared_bytes <= TABLE_BYTES * 256
    fits = machine.resident_blocks(kernel.threads, used.registers, kernel.shared_bytes)
    assumed = machine.resident_blocks(terms.threads, terms.registers, terms.shared_bytes)
    assert fits >= 1 and 2 * fits >= assumed, (fits, assumed, kernel.decisions)


def check_on_a_card(
    applied: Applied, task: Task, arrays: list[np.ndarray], machine: GpuMachine, most: float
) -> None:
    """Random configs: the oracle's result, and the same bits each time."""
    (reference,) = evaluate(task.graph, arrays, precise=True)
    on, rng = device.Device(), Random(0)
    for _ in range(4):
        config = applied.space.sample(rng)
        assert config is not None
        kernel = GpuProgram(_source(applied, config), machine, on)
        results = [kernel.run(arrays) for _ in range(5)]
        kernel.close()
        assert all(result.tobytes() == results[0].tobytes() for result in results), config
        error = relative_error(results[0].astype(np.float64).reshape(reference.shape), reference)
        assert error < most, config
