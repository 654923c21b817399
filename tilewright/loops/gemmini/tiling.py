"""A tiling for a layer, without a search: of those that fit, the one with the fewest estimated cycles.

`codesign/` explores mappings; this is what `target="gemmini"` takes if no mapping was chosen. The estimate is a
closed form: all tilings of a layer are estimated at once, as arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from tilewright.errors import LayerFitError
from tilewright.hw.gemmini import GemminiMachine
from tilewright.loops.gemmini.layer import Layer, Tiling, span_of, starts
from tilewright.support.arith import ceil_div

_MAX_PARTS = 8  # into which an axis is cut evenly; beyond, tiles are powers of two
_POOLED = 255  # rows and columns of a tile that is pooled


@lru_cache(maxsize=1024)
def default_tiling(layer: Layer, machine: GemminiMachine) -> Tiling:
    """Raise LayerFitError if no tile of the layer fits the machine."""
    found = _Tilings.of(layer, machine)
    if not found.rows.size:
        raise LayerFitError(
            f"no tile of {layer} fits a scratchpad of {machine.scratchpad_rows} rows and an accumulator of"
            f" {machine.accumulator_rows}"
        )
    return found.at(int(np.argmin(_cycles(layer, found, machine))))


@lru_cache(maxsize=1024)
def loop_tiling(layer: Layer, machine: GemminiMachine) -> Tiling | None:
    """The tiling for `loop_ws`: all of K at once, with the least traffic from DRAM; None if nothing fits."""
    dim, pixels = machine.dim, layer.rows * layer.cols
    blocks, out_all = ceil_div(layer.in_channels, dim), ceil_div(layer.out_channels, dim)
    best: tuple[int, Tiling] | None = None
    for rows in _cuts(ceil_div(pixels, dim)):
        for out_blocks in _cuts(out_all):
            tile = dim * (rows + out_blocks)
            if blocks * tile > machine.scratchpad_rows or rows * dim * out_blocks > machine.accumulator_rows:
                continue
            data = pixels * layer.in_channels * ceil_div(out_all, out_blocks)
            weights = layer.in_channels * layer.out_channels * ceil_div(pixels, rows * dim)
            loaded = data + weights + tile * layer.in_channels  # the first tile is waited for
            if best is None or loaded < best[0]:
                best = loaded, Tiling(1, rows * dim, blocks, out_blocks, 1)
    return None if best is None else best[1]


def estimated_cycles(layer: Layer, tiling: Tiling, machine: GemminiMachine) -> float:
    """Array and bus overlap where there are two buffers, and follow each other where there is one."""
    return float(_cycles(layer, _Tilings.one(layer, tiling), machine)[0])


@dataclass(frozen=True)
class _Tilings:
    """Tilings as arrays. `pixels`: results of the largest tile; `data`: pixels of data under them."""

    rows: np.ndarray
    cols: np.ndarray
    in_blocks: np.ndarray
    out_blocks: np.ndarray
    buffers: np.ndarray
    pixels: np.ndarray
    data: np.ndarray

    @staticmethod
    def one(layer: Layer, tiling: Tiling) -> _Tilings:
        (row, row_data), (col, col_data) = (
            _largest(layer, axis, size) for axis, size in enumerate((tiling.rows, tiling.cols))
        )
        chosen = (tiling.rows, tiling.cols, tiling.in_blocks, tiling.out_blocks, tiling.buffers)
        return _Tilings(*(np.array([each]) for each in (*chosen, row * col, row_data * col_data)))

    @staticmethod
    def of(layer: Layer, machine: GemminiMachine) -> _Tilings:
        """The tilings that fit, those with two buffers first, then those with the largest tiles."""
        dim = machine.dim
        blocks = [_cuts(ceil_div(extent, dim)) for extent in (layer.out_channels, layer.in_channels)]
        along = [_cuts(extent) for extent in layer.stored]
        grid = np.meshgrid([2, 1], along[1], along[0], *blocks, indexing="ij")
        buffers, cols, rows, out_blocks, in_blocks = (axis.ravel() for axis in grid)
        pixels = np.ones_like(rows)
        data = np.ones_like(rows)
        for axis, sizes in ((0, rows), (1, cols)):
            known = {size: _largest(layer, axis, size) for size in along[axis]}
            table = np.array([known.get(size, (0, 0)) for size in range(max(known) + 1)])
            pixels, data = pixels * table[sizes, 0], data * table[sizes, 1]
        taps = layer.kernel[0] * layer.kernel[1]
        held = buffers * in_blocks * (data + taps * out_blocks * dim)
        fits = (held <= machine.scratchpad_rows) & (buffers * pixels * out_blocks <= machine.accumulator_rows)
        if layer.pooling:
            fits &= np.maximum(rows, cols) * layer.pooling.stride + layer.pooling.size <= _POOLED
        every = (rows, cols, in_blocks, out_blocks, buffers, pixels, data)
        return _Tilings(*(each[fits] for each in every))

    def at(self, index: int) -> Tiling:
        chosen = (self.rows, self.cols, self.in_blocks, self.out_blocks, self.buffers)
        return Tiling(*(int(each[index]) for each in chosen))


def _largest(layer: Layer, axis: int, size: int) -> tuple[int, int]:
    """Results and pixels of data along an axis, of the largest tile of so many stored ones."""
    spans = [span_of(layer, axis, *at) for at in starts(layer.stored[axis], size)]
    return max(span.count for span in spans), max(span.data_count for span in spans)


def _cuts(extent: int) -> list[int]:
    """Sizes of tiles along an axis, the largest first."""
    found = {ceil_div(extent, parts) for parts in range(1, _MAX_PARTS + 1)}
    size = 1
    while size < extent:
        found.add(size)
        size *= 2
    return sorted(found, reverse=True)


def _cycles(layer: Layer, tilings: _Tilings, machine: GemminiMachine) -> np.ndarray:
    dim, bus = machine.dim, machine.dram_bytes_per_cycle
    stored_rows, stored_cols = layer.stored
    tiles = _parts(stored_rows, tilings.rows) * _parts(stored_cols, tilings.cols)
    in_all, out_all = ceil_div(layer.in_channels, dim), ceil_div(layer.out_channels, dim)
    out_tiles, groups = _parts(out_all, tilings.out_blocks), _parts(in_all, tilings.in_blocks)
    taps = layer.kernel[0] * layer.kernel[1]

    lines = np.ones_like(tilings.rows) if layer.pointwise else tilings.rows
    row = _parts(tilings.pixels, lines)
    segments = lines * _parts(row, dim)
    first_rows = np.minimum(row, dim)
    product = np.maximum(dim, first_rows) + tilings.pixels - first_rows  # of one block of weights
    compute = tiles * taps * in_all * out_all * product
    issue = tiles * taps * in_all * out_all * 2 * segments
    width = np.minimum(layer.in_channels, tilings.in_blocks * dim)
    moved = tiles * out_tiles * groups * tilings.data * np.maximum(width, bus)
    moved = moved + tiles * taps * layer.in_channels * max(layer.out_channels, bus)
    moved += stored_rows * stored_cols * layer.out_channels * (4 if layer.full else 1)
    results = tiles * tilings.pixels * layer.out_channels
    moved += results * (4 * layer.bias + (layer.residual is not None))
    steps = tiles * out_tiles * groups
    array, on_bus = np.maximum(compute, issue), moved / bus
    both = np.maximum(array, on_bus) + on_bus / steps + 4 * steps
    found: np.ndarray = np.where(tilings.buffers == 2, both, array + on_bus + 100 * steps)
    return found


def _parts(extent: np.ndarray | int, size: np.ndarray | int) -> np.ndarray:
    return np.asarray(-(-extent // size))
