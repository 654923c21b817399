"""A tiling for a layer, without a search: of those that fit, the one with the fewest estimated cycles.

`codesign/` explores mappings; this is what `target="gemmini"` takes where nobody has chosen one.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from tilewright.errors import LayerFitError
from tilewright.hw.gemmini import GemminiMachine
from tilewright.loops.gemmini.layer import Layer, Tiling, needed_rows
from tilewright.support.arith import ceil_div

_MAX_PARTS = 8  # into which an axis is cut evenly; beyond, tiles are powers of two
_POOLED = 255  # rows and columns of a tile that is pooled


@lru_cache(maxsize=1024)
def default_tiling(layer: Layer, machine: GemminiMachine) -> Tiling:
    """Raise LayerFitError if no tile of the layer fits the machine."""
    best: tuple[float, Tiling] | None = None
    for tiling in _tilings(layer, machine):
        cycles = estimated_cycles(layer, tiling, machine)
        if best is None or cycles < best[0]:
            best = (cycles, tiling)
    if best is None:
        raise LayerFitError(
            f"no tile of {layer} fits a scratchpad of {machine.scratchpad_rows} rows and an accumulator of"
            f" {machine.accumulator_rows}"
        )
    return best[1]


def _cuts(extent: int) -> list[int]:
    """Sizes of tiles along an axis, the largest first."""
    found = {ceil_div(extent, parts) for parts in range(1, _MAX_PARTS + 1)}
    size = 1
    while size < extent:
        found.add(size)
        size *= 2
    return sorted(found, reverse=True)


def _tilings(layer: Layer, machine: GemminiMachine) -> Iterator[Tiling]:
    """For each size of columns and output channels: the largest rows and input channels that fit, and smaller ones."""
    dim = machine.dim
    in_all, out_all = ceil_div(layer.in_channels, dim), ceil_div(layer.out_channels, dim)
    taps = layer.kernel[0] * layer.kernel[1]
    for buffers in (2, 1):
        for cols in _cuts(layer.stored[1]):
            for rows in _cuts(layer.stored[0]):
                data, _, pixels = needed_rows(layer, Tiling(rows, cols, 1, 1, buffers))
                if layer.pooling and _too_large(layer, rows, cols):
                    continue
                for out_blocks in _cuts(out_all):
                    if buffers * pixels * out_blocks > machine.accumulator_rows:
                        continue
                    for in_blocks in _cuts(in_all):
                        weights = buffers * taps * in_blocks * out_blocks * dim
                        if data * in_blocks + weights <= machine.scratchpad_rows:
                            yield Tiling(rows, cols, in_blocks, out_blocks, buffers)


def _too_large(layer: Layer, rows: int, cols: int) -> bool:
    assert layer.pooling is not None
    return max(rows, cols) * layer.pooling.stride + layer.pooling.size > _POOLED


def estimated_cycles(layer: Layer, tiling: Tiling, machine: GemminiMachine) -> float:
    """Array and bus overlap where there are two buffers, and follow each other where there is one."""
    dim, bus = machine.dim, machine.dram_bytes_per_cycle
    stored_rows, stored_cols = layer.stored
    tiles = ceil_div(stored_rows, tiling.rows) * ceil_div(stored_cols, tiling.cols)
    in_all, out_all = ceil_div(layer.in_channels, dim), ceil_div(layer.out_channels, dim)
    out_tiles, groups = ceil_div(out_all, tiling.out_blocks), ceil_div(in_all, tiling.in_blocks)
    taps = layer.kernel[0] * layer.kernel[1]
    data, _, pixels = needed_rows(layer, Tiling(tiling.rows, tiling.cols, 1, 1, 1))

    lines = 1 if layer.pointwise else tiling.rows
    row = ceil_div(pixels, lines)
    segments = lines * ceil_div(row, dim)
    product = max(dim, min(row, dim)) + pixels - min(row, dim)  # of one block of weights
    compute = tiles * taps * in_all * out_all * product
    issue = tiles * taps * in_all * out_all * 2 * segments
    width = min(layer.in_channels, tiling.in_blocks * dim)
    moved = tiles * out_tiles * groups * data * max(width, bus)
    moved += tiles * taps * max(layer.in_channels, 1) * max(layer.out_channels, bus)
    element = 4 if layer.full else 1
    moved += stored_rows * stored_cols * layer.out_channels * element
    results = tiles * pixels * layer.out_channels
    moved += results * (4 * layer.bias + (layer.residual is not None))
    steps = tiles * out_tiles * groups
    first = moved / bus / steps
    if tiling.buffers == 2:
        return max(compute, issue, moved / bus) + first + 4 * steps
    return max(compute, issue) + moved / bus + 100 * steps
