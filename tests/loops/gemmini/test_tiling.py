"""Tilings by the closed form: they fit, and their estimates are near the cycles of their programs."""

from __future__ import annotations

import pytest

from tilewright.codegen.gemmini.cycles import simulate
from tilewright.codegen.gemmini.layers import Placement, layer_words
from tilewright.errors import LayerFitError
from tilewright.hw.gemmini import KIB, GemminiMachine
from tilewright.loops.gemmini.layer import Buffers, Layer, Tiling, matmul, needed_rows
from tilewright.loops.gemmini.tiling import default_tiling, estimated_cycles

AT = Placement(data=64, weights=64, results=64, bias=64, residual=64)
LAYERS = [
    matmul(128, 96, 192),
    Layer(14, 14, 64, 64, (3, 3), padding=(1, 1, 1, 1)),
    Layer(14, 14, 48, 32, stride=2),
    Layer(20, 20, 3, 16, (7, 7), 2, (3, 3, 3, 3), bias=True),
    Layer(7, 7, 128, 64, (3, 3), padding=(1, 1, 1, 1), residual=1.0),
]
MACHINES = [
    GemminiMachine(),
    GemminiMachine(dim=32, scratchpad=40 * KIB, accumulator=8 * KIB),
    GemminiMachine(dim=38, scratchpad=64 * KIB, accumulator=17 * KIB),
]


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.text)
@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: str(machine.dim))
def test_the_estimate_is_near_the_simulated_cycles(layer: Layer, machine: GemminiMachine) -> None:
    tiling = default_tiling(layer, machine)
    scratchpad, accumulator = needed_rows(layer, tiling, machine.dim).held(tiling.buffers)
    assert scratchpad <= machine.scratchpad_rows and accumulator <= machine.accumulator_rows
    found = simulate(layer_words(layer, tiling, machine, AT), machine).total
    assert found / 2 < estimated_cycles(layer, tiling, machine) < found * 1.2


def test_data_stay_where_that_moves_less() -> None:
    """All weights do not fit, and a tile of the results has a seventh of their columns."""
    machine = GemminiMachine(dim=32, scratchpad=160 * KIB, accumulator=16 * KIB)
    layer = matmul(512, 768, 768)
    tiling = default_tiling(layer, machine)
    assert estimated_cycles(layer, tiling, machine) < 0.5 * estimated_cycles(
        layer, Tiling(1, 64, 24, 1), machine
    )


def test_nothing_fits() -> None:
    machine = GemminiMachine(dim=16, scratchpad=256, accumulator=1024)
    with pytest.raises(
        LayerFitError, match="17 rows of the scratchpad, which has 16, and 1 of the acc"
    ) as caught:
        default_tiling(Layer(8, 8, 32, 32, (3, 3)), machine)
    assert "a row of the scratchpad has 16 bytes" in str(caught.value.remedy)
    least = Tiling(1, 1, taps=(1, 1), buffers=Buffers(1, 1, 1))
    assert needed_rows(Layer(8, 8, 16, 16), least, 16).held(least.buffers) == (17, 1)
