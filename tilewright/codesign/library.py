"""The tiling that Gemmini's own software library chooses, as a mapping: what a user has without any search.

The library keeps two tiles in each memory, so that one is loaded while the other is used: a tile has half of it.
Matmuls begin with square tiles of outputs and grow, in whole blocks of the array's side; convolutions begin with the
whole layer and shrink the largest extent until it fits, then grow what still can. A window of inputs is reserved with
a whole stride for its last pixel, too. Reductions are DRAM's innermost loops. It is a re-implementation of
`tiled_matmul_auto` and `tiled_conv_auto` of Gemmini's header.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from tilewright.codesign.mapping import ACCUMULATOR, DRAM, INNER_ORDER, LEVELS, Mappings
from tilewright.codesign.problem import LOOPS, C, K, Layer, N, P, Q, R, S
from tilewright.hw.gemmini import GemminiMachine

_OUTER = (N, Q, P, K, S, R, C)
_SHRUNK = (N, Q, P, K, S, R, C)  # of equally large extents the first


@lru_cache(maxsize=4096)
def library_tile(layer: Layer, machine: GemminiMachine) -> tuple[int, ...]:
    """The iterations of each loop in one tile of Gemmini's library: of a matmul's, maybe more than the layer has."""
    if all(layer.extents[loop] == 1 for loop in (R, S, Q, N)) and layer.stride == (1, 1):
        return _matmul_tile(layer, machine)
    return _convolution_tile(layer, machine)


def library_mapping(layer: Layer, machine: GemminiMachine) -> Mappings:
    """The library's mapping of a layer, as one row."""
    tile = [min(pair) for pair in zip(library_tile(layer, machine), layer.extents, strict=True)]
    factors = np.ones((1, len(LEVELS), len(LOOPS)))
    spatial = {loop: min(machine.dim, tile[loop]) for loop in (C, K)}
    for loop, size in enumerate(tile):
        inner = math.ceil(size / spatial.get(loop, 1))
        factors[0, 0 if loop in (P, Q, N) else ACCUMULATOR, loop] = inner
        factors[0, DRAM, loop] = math.ceil(layer.extents[loop] / (inner * spatial.get(loop, 1)))
    order = np.array([[INNER_ORDER, INNER_ORDER, INNER_ORDER, _OUTER]], np.int8)
    return Mappings(factors, np.array([float(spatial[C])]), np.array([float(spatial[K])]), order)


def is_librarys(layer: Layer, mappings: Mappings, machine: GemminiMachine) -> np.ndarray:
    """Which of a layer's mappings are what the library would choose on this machine: [rows]."""
    its = library_mapping(layer, machine)
    same = (mappings.rows == its.rows) & (mappings.columns == its.columns)
    same &= (mappings.factors == its.factors).all(axis=(1, 2))
    return np.asarray(same & (mappings.order[:, DRAM] == its.order[:, DRAM]).all(axis=1))


def _matmul_tile(layer: Layer, machine: GemminiMachine) -> tuple[int, ...]:
    dim = machine.dim
    scratchpad, accumulator = machine.scratchpad_rows // 2 // dim, machine.accumulator_rows // 2 // dim
    blocks = [math.ceil(layer.extents[loop] / dim) for loop in (P, K, C)]
    side = max(1, math.isqrt(accumulator))
    rows, columns = min(blocks[0], side), min(blocks[1], side)
    depth = min(blocks[2], max(1, scratchpad // 2 // side))  # half of it for each operand

    def fits(rows: int, columns: int, depth: int) -> bool:
        return rows * columns <= accumulator and (rows + columns) * depth <= scratchpad

    grew = True
    while grew:
        grew = False
        if columns < blocks[1] and fits(rows, columns + 1, depth):
            columns, grew = columns + 1, True
        if rows < blocks[0] and fits(rows + 1, columns, depth):
            rows, grew = rows + 1, True
        if depth < blocks[2] and fits(rows, columns, depth + 1):
            depth, grew = depth + 1, True
    while depth > 1 and not fits(rows, columns, depth):
        depth -= 1
    tile = [1] * len(LOOPS)
    for loop, count in ((P, rows), (K, columns), (C, depth)):
        tile[loop] = count * dim
    return tuple(tile)


def _convolution_tile(layer: Layer, machine: GemminiMachine) -> tuple[int, ...]:
    dim = machine.dim
    scratchpad, accumulator = machine.scratchpad_rows // 2, machine.accumulator_rows // 2
    tile = list(layer.extents)

    def fits(tile: list[int]) -> bool:
        width, height = (
            tile[out] * layer.stride[axis] + (tile[tap] - 1) * layer.dilation[axis]
            for axis, (out, tap) in enumerate(((P, R), (Q, S)))
        )
        inputs = math.ceil(tile[C] / dim) * tile[N] * width * height
        weights = math.ceil(tile[K] / dim) * tile[R] * tile[S] * tile[C]
        outputs = math.ceil(tile[K] / dim) * tile[N] * tile[Q] * tile[P]
        return inputs + weights <= scratchpad and outputs <= accumulator

    def smaller(loop: int) -> int:
        if loop in (C, K) and tile[loop] > dim:
            return (tile[loop] - 1) // dim * dim
        return tile[loop] - 1

    while not fits(tile):
        # Rows of pixels shorter than the array waste it, as long as there are several of them.
        choices = [loop for loop in _SHRUNK if tile[loop] > 1]
        kept = [loop for loop in choices if not (loop == P and tile[P] <= dim and tile[Q] > 1)]
        loop = max(kept or choices, key=lambda loop: tile[loop])
        tile[loop] = smaller(loop)
    grew = True
    while grew:
        grew = False
        for loop in (P, *(loop for loop in _SHRUNK if loop != P)):
            larger = list(tile)
            larger[loop] = min(layer.extents[loop], tile[loop] + 1)
            if larger != tile and fits(larger):
                tile, grew = larger, True
    return tuple(tile)
