"""From a design to the programs that run on it: for each mapping the nearest tiling that the code generator can make,
and its cycles by the cycle-level simulator.

A mapping's tile in the accumulator is a tile's pixels and output channels, its tile in the scratchpad gives the input
channels and the part of the kernel that a step computes, and the loops over DRAM give what stays. A program needs a
second buffer where the analytical model assumes that transfers and computation overlap, so a mapping that fills a
memory becomes smaller tiles, or has one buffer. What `target="gemmini"` would take without the mapping is tried too.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from tilewright.codegen.gemmini.cycles import simulate
from tilewright.codegen.gemmini.layers import Placement, layer_words
from tilewright.codesign.mapping import ACCUMULATOR, DRAM, SCRATCHPAD, Mappings
from tilewright.codesign.network import Design
from tilewright.codesign.problem import C, K, N, P, Q, R, S
from tilewright.codesign.problem import Layer as Nest
from tilewright.errors import LayerFitError
from tilewright.hw.gemmini import GemminiMachine
from tilewright.loops.gemmini.chosen import fields_of, fits, shape_of
from tilewright.loops.gemmini.layer import Buffers, Inner, Layer, Tiling, matmul
from tilewright.loops.gemmini.tiling import default_tiling, estimated_cycles, instructions

_MAX_INSTRUCTIONS = 4_000_000  # of a layer that is simulated: some 20 s and 2 GB
_AT = Placement(data=64, weights=64, results=64)
_SHRUNK = ("rows", "cols", "in_blocks", "out_blocks")


@dataclass(frozen=True)
class LayerProgram:
    """How a layer runs. `cycles`: of one run of it, simulated; None if the program is too long for that. `mapped`:
    whether the tiling is its mapping's."""

    layer: Layer
    tiling: Tiling
    cycles: int | None
    mapped: bool

    @property
    def fields(self) -> dict[str, Any]:
        """The form in a file."""
        tiling = fields_of(self.tiling)
        return {"shape": shape_of(self.layer), "tiling": tiling, "cycles": self.cycles, "mapped": self.mapped}


def programs_of(design: Design) -> tuple[LayerProgram | None, ...]:
    """The program of each layer; None if no tile fits, or the accelerator has no such layer."""
    return tuple(
        program_of(nest, design.mappings.take(slice(index, index + 1)), design.machine)
        for index, nest in enumerate(design.network.layers)
    )


def program_of(nest: Nest, mapping: Mappings, machine: GemminiMachine) -> LayerProgram | None:
    layer = layer_of(nest)
    if layer is None:
        return None
    images = nest.extents[N]
    candidates = {}
    if (nearest := nearest_tiling(layer, mapping, machine)) is not None:
        candidates[nearest] = True
    with suppress(LayerFitError):
        candidates.setdefault(default_tiling(layer, machine), False)
    found = [
        LayerProgram(layer, tiling, _simulated(layer, tiling, machine, images), mapped)
        for tiling, mapped in candidates.items()
    ]
    return min(found, key=lambda each: math.inf if each.cycles is None else each.cycles, default=None)


def layer_of(nest: Nest) -> Layer | None:
    """One image of a loop nest as the accelerator's layer; None if it has no such layer."""
    kernel, (width, height) = (nest.extents[S], nest.extents[R]), (nest.extents[P], nest.extents[Q])
    channels, filters, step = nest.extents[C], nest.extents[K], nest.stride[0]
    if set(nest.dilation) != {1} or len(set(nest.stride)) > 1:
        return None
    if kernel == (1, 1) and (height, step) == (1, 1):
        return matmul(width, filters, channels)
    rows, cols = ((out - 1) * step + taps for out, taps in zip((height, width), kernel, strict=True))
    return Layer(rows, cols, channels, filters, kernel, step)


def nearest_tiling(layer: Layer, mapping: Mappings, machine: GemminiMachine) -> Tiling | None:
    """The tiling with the mapping's tiles; while it does not fit with any buffers, the largest extent is halved. None
    if not even the smallest fits."""
    scratchpad = mapping.factors[0, : SCRATCHPAD + 1].prod(axis=0)
    accumulator = mapping.factors[0, : ACCUMULATOR + 1].prod(axis=0)
    columns = accumulator[K] * mapping.columns[0]
    taps = min(int(scratchpad[S]), layer.kernel[0]), min(int(scratchpad[R]), layer.kernel[1])
    outer = [
        loop for loop in mapping.order[0, DRAM] if loop in (P, Q, K) and mapping.factors[0, DRAM, loop] > 1
    ]
    mapped: Inner = "channels" if outer and outer[-1] == K else "pixels"
    tiling = Tiling(
        rows=min(int(accumulator[Q]), layer.rows),
        cols=min(int(accumulator[P]), layer.cols),
        in_blocks=math.ceil(min(scratchpad[C] * mapping.rows[0], layer.in_channels) / machine.dim),
        out_blocks=math.ceil(min(columns, layer.out_channels) / machine.dim),
        taps=None if taps == layer.kernel else taps,
    )
    other: Inner = "pixels" if mapped == "channels" else "channels"
    while True:
        found = [
            each
            for inner, buffers in product((mapped, other), product((2, 1), repeat=3))
            if fits(layer, each := replace(tiling, inner=inner, buffers=Buffers(*buffers)), machine)
        ]
        if found:
            return min(found, key=lambda each: estimated_cycles(layer, each, machine))
        largest = max(_SHRUNK, key=lambda name: int(getattr(tiling, name)))
        if getattr(tiling, largest) > 1:
            tiling = replace(tiling, **{largest: math.ceil(getattr(tiling, largest) / 2)})
        elif tiling.kernel(layer) != (1, 1):
            tiling = replace(tiling, taps=(1, 1))
        else:
            return None


def total_cycles(design: Design, programs: tuple[LayerProgram | None, ...]) -> float | None:
    """The simulated cycles of the whole network; None if not every layer was simulated."""
    cycles = [None if program is None else program.cycles for program in programs]
    if None in cycles:
        return None
    return float(sum(count * each for count, each in zip(design.network.counts, cycles, strict=True) if each))


def _simulated(layer: Layer, tiling: Tiling, machine: GemminiMachine, images: int) -> int | None:
    if instructions(layer, tiling, machine) > _MAX_INSTRUCTIONS:
        return None
    return images * simulate(layer_words(layer, tiling, machine, _AT), machine).total
