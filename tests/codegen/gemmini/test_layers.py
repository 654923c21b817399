"""Programs of layers: parts of a kernel, and operands that stay in their buffers from tile to tile."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from tilewright.codegen.gemmini.cycles import simulate
from tilewright.codegen.gemmini.layers import (
    Buffers,
    Layer,
    Placement,
    Tiling,
    layer_loops,
    layer_program,
    matmul,
)
from tilewright.errors import LayerFitError
from tilewright.hw.gemmini import KIB, GemminiMachine
from tilewright.loops.gemmini.tiling import default_tiling
from tilewright.runtime.gemmini import Functional
from tilewright.testing.gemmini import layer_memory, layer_results

MACHINE = GemminiMachine(dim=4, scratchpad=4096, accumulator=2048)


def check(layer: Layer, tiling: Tiling, machine: GemminiMachine = MACHINE) -> int:
    """The cycles of the layer's program, after a comparison of its results with the layer's."""
    dram, at, size = layer_memory(layer, np.random.default_rng(0))
    program = layer_program(layer, tiling, machine, at)
    expected = layer_results(layer, dram, at)
    Functional(machine, dram).run(program)
    np.testing.assert_array_equal(dram[at.results : at.results + size], expected)
    return simulate(program, machine).total


def loaded(layer: Layer, tiling: Tiling) -> dict[str, int]:
    """How many elements each instruction loads."""
    program = layer_program(layer, tiling, MACHINE, Placement(data=64, weights=64, results=64))
    found = {"mvin": 0, "mvin2": 0}
    for each in program:
        if each.name in found:
            found[each.name] += each["rows"] * each["cols"]
    return found


def test_a_large_array_with_a_scratchpad_that_no_whole_kernel_fits() -> None:
    """Nine blocks of 128x128 weights are 144 KiB."""
    machine = GemminiMachine(dim=128, scratchpad=139 * KIB, accumulator=784 * KIB)
    layer = Layer(6, 6, 256, 256, (3, 3), padding=(1, 1, 1, 1), relu=True, scale=0.001)
    tiling = default_tiling(layer, machine)
    assert tiling.taps is not None
    check(layer, tiling, machine)
    with pytest.raises(LayerFitError, match="the scratchpad has 1112"):
        check(layer, replace(tiling, taps=None), machine)


@pytest.mark.parametrize("taps", [(1, 1), (2, 1), (1, 3), (2, 3)])
@pytest.mark.parametrize("stride", [1, 2])
def test_parts_of_a_kernel_add_up(taps: tuple[int, int], stride: int) -> None:
    layer = Layer(7, 6, 9, 5, (3, 3), stride, (1, 1, 1, 1), bias=True, scale=0.01)
    check(layer, Tiling(2, 3, 2, 1, taps))


@pytest.mark.parametrize("buffers", [Buffers(*each) for each in product((1, 2), repeat=3)])
@pytest.mark.parametrize("inner", ["pixels", "channels"])
def test_any_operand_may_have_one_buffer(buffers: Buffers, inner: str) -> None:
    layer = Layer(6, 6, 9, 10, (3, 3), 1, (1, 1, 1, 1), bias=True, residual=1.5, scale=0.01)
    check(layer, Tiling(2, 3, 2, 1, (3, 1), inner, buffers))  # type: ignore[arg-type]


def test_what_stays_is_loaded_once() -> None:
    layer = matmul(24, 20, 16)
    pixels, channels = Tiling(1, 8, 4, 1, inner="pixels"), Tiling(1, 8, 4, 1, inner="channels")
    assert loaded(layer, pixels) == {"mvin": 5 * 24 * 16, "mvin2": 16 * 20}
    assert loaded(layer, channels) == {"mvin": 24 * 16, "mvin2": 3 * 16 * 20}
    # Two groups of input channels stay in two buffers, three do not.
    assert loaded(layer, replace(pixels, in_blocks=2))["mvin2"] == 16 * 20
    assert loaded(layer, replace(pixels, in_blocks=1))["mvin2"] == 3 * 16 * 20
    one = Buffers(weights=1)
    assert loaded(layer, replace(pixels, in_blocks=2, buffers=one))["mvin2"] == 3 * 16 * 20


def test_a_single_channel_takes_a_single_row_of_weights() -> None:
    """The first layer of a network has few input channels."""
    machine = GemminiMachine(dim=16, scratchpad=6 * KIB)
    check(Layer(12, 12, 1, 16, (5, 5), scale=0.01), Tiling(4, 4), machine)
    with pytest.raises(LayerFitError, match="a 5x5 convolution with stride 1 of 12x12x16 to 16 channels"):
        check(Layer(12, 12, 16, 16, (5, 5), scale=0.01), Tiling(4, 4), machine)


@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("residual", [None, 2.5])
@pytest.mark.parametrize("layer", [matmul(13, 10, 9), Layer(7, 6, 9, 10, (3, 2), 2, (1, 1, 0, 1))])
def test_the_array_adds_a_bias_of_bytes(layer: Layer, rows: int, residual: float | None) -> None:
    layer = replace(layer, bias=True, bias_rows=rows, residual=residual, scale=0.01)
    for tiling in (
        Tiling(2, 3, 2, 2, (2, 1)),
        Tiling(1, 5, 1, 1, inner="channels", buffers=Buffers(1, 1, 1)),
    ):
        check(layer, tiling)


def test_a_bias_of_bytes_takes_fewer_cycles_where_the_bus_is_busy() -> None:
    machine = GemminiMachine()
    layer = Layer(28, 28, 64, 64, bias=True, scale=0.01)
    of_bytes = replace(layer, bias_rows=2)
    slow, fast = (check(each, default_tiling(each, machine), machine) for each in (layer, of_bytes))
    assert fast < 0.6 * slow


def test_loops_load_a_bias_of_32_bits() -> None:
    layer = replace(matmul(8, 8, 8), bias=True, bias_rows=2)
    with pytest.raises(LayerFitError, match="loop_ws is a matmul with a 32-bit bias"):
        layer_loops(layer, Tiling(1, 8), MACHINE, Placement(data=64, weights=128, results=256, bias=512))
    with pytest.raises(LayerFitError, match="bias_rows must be 0 without a bias"):
        replace(layer, bias=False)
