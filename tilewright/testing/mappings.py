"""What a mapping costs on Gemmini, counted by running its loops over tiles.

It judges what searches find, which the model (`codesign/model.py`) guides. What it counts is its own: how often the
tiles of each memory change, and which words of the inputs are new. The sums over these counts are the model's: the same
parts of a roofline, and the same energies of accesses. tests/testing/test_mappings.py compares the counts with sets of
words, one word at a time.

Loops run one iteration at a time, and each tile is compared with the one before it: of weights and outputs a tile that
differs is moved as a whole. Of inputs only those words of a window are read that the window before it did not have, if
nothing but the innermost loop has moved: these are Timeloop's rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from tilewright.codesign.mapping import ACCUMULATOR, DRAM, REGISTERS, SCRATCHPAD, Mappings
from tilewright.codesign.network import Design
from tilewright.codesign.problem import RELEVANT, C, K, Layer, N, P, Q, R, S
from tilewright.hw.gemmini import KIB, GemminiMachine

_AT_ONCE = 1 << 16  # iterations of the innermost loops


class Cost(NamedTuple):
    cycles: float
    microjoules: float


class _Loop(NamedTuple):
    loop: int
    factor: int
    step: int  # iterations of the layer's loop that one of this one's is


def judged(design: Design) -> Cost:
    """The cost of the whole network."""
    costs = [
        cost(layer, design.mappings, row, design.machine) for row, layer in enumerate(design.network.layers)
    ]
    counts = design.network.counts
    return Cost(*(float(counts @ np.array(column)) for column in zip(*costs, strict=True)))


def cost(layer: Layer, mappings: Mappings, index: int, machine: GemminiMachine) -> Cost:
    """The cost of one run of a layer, by the mapping of that index."""
    factors = mappings.factors[index].astype(int)
    rows, columns = int(mappings.rows[index]), int(mappings.columns[index])
    macs = int(factors.prod()) * rows * columns
    fills = rows * columns * fetched(mappings, index, "weights", ACCUMULATOR)
    weights = _tile(mappings, index, "weights", SCRATCHPAD) * fetched(mappings, index, "weights", DRAM)
    inputs = fetched_inputs(layer, mappings, index)
    stored = _tile(mappings, index, "outputs", ACCUMULATOR) * fetched(mappings, index, "outputs", SCRATCHPAD)
    loaded = stored - int(mappings.padded()[index][list(RELEVANT["outputs"])].prod())
    accumulator = 2 * macs // rows + loaded
    scratchpad = fills + weights + macs // columns + inputs
    cycles = max(
        macs / (rows * columns),
        accumulator / (2 * columns),
        scratchpad / (2 * machine.dim),
        (weights + inputs + stored + loaded) / machine.dram_bytes_per_cycle,
    )
    energy, block = machine.energy, machine.dram_block
    column_kib = machine.accumulator_rows * GemminiMachine.ACCUMULATOR_BYTES / KIB
    picojoules = (
        macs * energy.mac
        + (macs + fills) * energy.register
        + accumulator * (energy.accumulator + energy.accumulator_kib * column_kib)
        + scratchpad * (energy.scratchpad + energy.scratchpad_kib * machine.scratchpad_words / KIB)
        + sum(math.ceil(words / block) * block for words in (weights, inputs, stored, loaded)) * energy.dram
    )
    return Cost(float(math.ceil(cycles)), picojoules * 1e-6)


def fetched(mappings: Mappings, index: int, tensor: str, level: int) -> int:
    """How often the tile below a level changes when the loops of this level and above run."""
    loops = _loops(mappings, index, level)
    relevant = [column for column, each in enumerate(loops) if each.loop in RELEVANT[tensor]]
    return _moved(loops, lambda steps: (steps[:, relevant] != 0).any(axis=1).astype(int), 1)


def fetched_inputs(layer: Layer, mappings: Mappings, index: int) -> int:
    """Words of inputs that come from DRAM."""
    loops = _loops(mappings, index, DRAM)
    tile = _sizes(mappings, index, SCRATCHPAD)
    extents, scales = [], []
    for axis, (out, kernel) in enumerate(((P, R), (Q, S))):
        stride, dilation = layer.stride[axis], layer.dilation[axis]
        extents.append((tile[out] - 1) * stride + (tile[kernel] - 1) * dilation + 1)
        scales.append([each.step * {out: stride, kernel: dilation}.get(each.loop, 0) for each in loops])
    channels = tile[C] * tile[N]
    others = [column for column, each in enumerate(loops) if each.loop in (C, N) or column + 1 < len(loops)]

    def new(steps: np.ndarray) -> np.ndarray:
        kept = np.where((steps[:, others] != 0).any(axis=1), 0, channels)
        for extent, scale in zip(extents, scales, strict=True):
            kept = kept * np.maximum(extent - np.abs(steps @ np.array(scale, int)), 0)
        return np.asarray(channels * extents[0] * extents[1] - kept)

    return _moved(loops, new, channels * extents[0] * extents[1])


def _moved(loops: Sequence[_Loop], new: Callable[[np.ndarray], np.ndarray], first: int) -> int:
    """The sum of what is new at each iteration. `new` takes by how much each loop's index changes, [iterations, loops].
    The innermost loops do the same in each iteration of the others."""
    split = len(loops)
    while split and math.prod(each.factor for each in loops[split - 1 :]) <= _AT_ONCE:
        split -= 1
    outer, inner = (_indices([each.factor for each in some]) for some in (loops[:split], loops[split:]))
    none = np.zeros((len(inner) - 1, split), int)
    within = new(np.concatenate([none, np.diff(inner, axis=0)], axis=1)).sum()
    back = np.broadcast_to(inner[0] - inner[-1], (len(outer) - 1, len(loops) - split))
    between = new(np.concatenate([np.diff(outer, axis=0), back], axis=1)).sum()
    return int(first + len(outer) * within + between)


def _indices(factors: Sequence[int]) -> np.ndarray:
    """[iterations, loops]"""
    return np.indices(tuple(factors)).reshape(len(factors), math.prod(factors)).T


def _loops(mappings: Mappings, index: int, level: int) -> list[_Loop]:
    """Those of a level and above that run more than once, the outermost first."""
    found = []
    for where in range(DRAM, level - 1, -1):
        below = _sizes(mappings, index, where - 1)
        for loop in mappings.order[index, where]:
            factor = int(mappings.factors[index, where, loop])
            if factor > 1:
                found.append(_Loop(int(loop), factor, below[loop]))
    return found


def _sizes(mappings: Mappings, index: int, level: int) -> list[int]:
    """Iterations of each loop in one tile of a level."""
    sizes = mappings.factors[index, REGISTERS : level + 1].prod(axis=0).astype(int)
    if level >= ACCUMULATOR:
        sizes[C] *= int(mappings.rows[index])
        sizes[K] *= int(mappings.columns[index])
    return [int(size) for size in sizes]


def _tile(mappings: Mappings, index: int, tensor: str, level: int) -> int:
    sizes = _sizes(mappings, index, level)
    return math.prod(sizes[loop] for loop in RELEVANT[tensor])
