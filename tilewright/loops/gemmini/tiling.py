"""A tiling for a layer: of all that fit, the one with the fewest estimated cycles.

The estimate is a closed form: all tilings of a layer are estimated at once, as arrays.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

import numpy as np

from tilewright.errors import LayerFitError
from tilewright.hw.gemmini import GemminiMachine
from tilewright.loops.gemmini.layer import (
    Buffers,
    Inner,
    Layer,
    Tiling,
    largest,
    multiplier_rows,
    needed_rows,
    weight_rows,
)
from tilewright.support.arith import ceil_div

_MAX_PARTS = 8  # into which an axis is cut evenly; beyond, tiles are powers of two
_POOLED = 255  # rows and columns of a tile that is pooled
_LATENCY = 50  # cycles from the array's last result to its next, where it waits for a load or a store
# Of data, weights and results: which may have only one.
_BUFFERS = [Buffers(*each) for each in product((2, 1), repeat=3)]


@lru_cache(maxsize=1024)
def default_tiling(layer: Layer, machine: GemminiMachine) -> Tiling:
    """Raise LayerFitError if no tile of the layer fits the machine."""
    found = _Tilings.of(layer, machine)
    if not found.rows.size:
        raise _too_small(layer, machine)
    return found.at(layer, int(np.argmin(_cycles(layer, found, machine))))


def _too_small(layer: Layer, machine: GemminiMachine) -> LayerFitError:
    least = Tiling(1, 1, taps=(1, 1), buffers=Buffers(1, 1, 1))
    scratchpad, accumulator = needed_rows(layer, least, machine.dim).held(least.buffers)
    return LayerFitError(
        f"{layer.text}: its smallest tile needs {scratchpad} rows of the scratchpad, which has"
        f" {machine.scratchpad_rows}, and {accumulator} of the accumulator, which has {machine.accumulator_rows}",
        remedy=f"give the accelerator more memory (a row of the scratchpad has {machine.dim} bytes, one of the"
        f" accumulator {4 * machine.dim}), or leave the layer to the host",
    )


def with_bias_stored(layer: Layer, machine: GemminiMachine) -> Layer:
    """The layer with its bias as rows of bytes, if it has such and that takes fewer cycles, or else as 32-bit values.
    Raise LayerFitError if no tile of either fits the machine."""
    of_words = replace(layer, bias_rows=0)
    if not 0 < layer.bias_rows <= machine.dim:  # the array reads one row of bytes from each of its rows
        default_tiling(of_words, machine)
        return of_words
    cycles = {}
    for each in (layer, of_words):
        try:
            cycles[each] = estimated_cycles(each, default_tiling(each, machine), machine)
        except LayerFitError:
            if each is of_words and not cycles:
                raise
    return min(cycles, key=cycles.__getitem__)


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
                best = loaded, Tiling(1, rows * dim, blocks, out_blocks, buffers=Buffers(1, 1, 1))
    return None if best is None else best[1]


def estimated_cycles(layer: Layer, tiling: Tiling, machine: GemminiMachine) -> float:
    """Array and bus overlap where there are two buffers; where there is one, the array waits."""
    return float(_cycles(layer, _Tilings.one(layer, tiling), machine)[0])


def instructions(layer: Layer, tiling: Tiling, machine: GemminiMachine) -> int:
    """How many preloads and computes a program has, about."""
    dim, (rows, cols) = machine.dim, layer.stored
    tiles = ceil_div(rows, tiling.rows) * ceil_div(cols, tiling.cols)
    blocks = (
        ceil_div(layer.in_channels, dim)
        * ceil_div(layer.out_channels, dim)
        * layer.kernel[0]
        * layer.kernel[1]
    )
    _, segments = _segments(layer, _Tilings.one(layer, tiling), dim)
    return 2 * tiles * blocks * int(segments[0])


@dataclass(frozen=True)
class _Tilings:
    """Tilings as arrays. `pixels`: results of the largest tile; `data`: pixels of data under them."""

    rows: np.ndarray
    cols: np.ndarray
    in_blocks: np.ndarray
    out_blocks: np.ndarray
    kernel_rows: np.ndarray  # of a step
    kernel_cols: np.ndarray
    stays: np.ndarray  # 1: data while output channels change; 0: weights while pixels do
    data_buffers: np.ndarray
    weights_buffers: np.ndarray
    result_buffers: np.ndarray
    pixels: np.ndarray
    data: np.ndarray

    @staticmethod
    def one(layer: Layer, tiling: Tiling) -> _Tilings:
        taps = tiling.kernel(layer)
        (row, row_data), (col, col_data) = (
            largest(layer, axis, size, taps[axis]) for axis, size in enumerate((tiling.rows, tiling.cols))
        )
        chosen = (tiling.rows, tiling.cols, tiling.in_blocks, tiling.out_blocks, *taps)
        stays = int(tiling.inner == "channels")
        counted = (row * col, row_data * col_data)
        return _Tilings(*(np.array([each]) for each in (*chosen, stays, *tiling.buffers, *counted)))

    @staticmethod
    def of(layer: Layer, machine: GemminiMachine) -> _Tilings:
        """The tilings that fit, those with more buffers first, then those with the largest tiles."""
        found = [_Tilings._with_taps(layer, machine, taps) for taps in _parts_of_kernel(layer)]
        return _Tilings(
            *(np.concatenate(each) for each in zip(*(vars(one).values() for one in found), strict=True))
        )

    @staticmethod
    def _with_taps(layer: Layer, machine: GemminiMachine, taps: tuple[int, int]) -> _Tilings:
        dim = machine.dim
        blocks = [_cuts(ceil_div(extent, dim)) for extent in (layer.out_channels, layer.in_channels)]
        along = [_cuts(extent) for extent in layer.stored]
        numbers = np.arange(len(_BUFFERS))
        grid = np.meshgrid(numbers, [0, 1], along[1], along[0], *blocks, indexing="ij")
        chosen, stays, cols, rows, out_blocks, in_blocks = (axis.ravel() for axis in grid)
        data_buffers, weights_buffers, result_buffers = np.array(_BUFFERS).T[:, chosen]
        pixels = np.ones_like(rows)
        data = np.ones_like(rows)
        for axis, sizes in ((0, rows), (1, cols)):
            known = {size: largest(layer, axis, size, taps[axis]) for size in along[axis]}
            table = np.array([known.get(size, (0, 0)) for size in range(max(known) + 1)])
            pixels, data = pixels * table[sizes, 0], data * table[sizes, 1]
        weights = taps[0] * taps[1] * out_blocks * weight_rows(layer, dim)
        weights = in_blocks * weights + out_blocks * layer.bias_rows
        held = data_buffers * in_blocks * data + weights_buffers * weights + multiplier_rows(layer, dim)
        fits = held <= machine.scratchpad_rows
        fits &= result_buffers * pixels * out_blocks <= machine.accumulator_rows
        if layer.pooling:
            fits &= np.maximum(rows, cols) * layer.pooling.stride + layer.pooling.size <= _POOLED
        kernel = (np.full_like(rows, taps[0]), np.full_like(rows, taps[1]))
        buffers = (data_buffers, weights_buffers, result_buffers)
        every = (rows, cols, in_blocks, out_blocks, *kernel, stays, *buffers, pixels, data)
        return _Tilings(*(each[fits] for each in every))

    def at(self, layer: Layer, index: int) -> Tiling:
        rows, cols, in_blocks, out_blocks, kernel_rows, kernel_cols, stays, *buffers = (
            int(each[index]) for each in list(vars(self).values())[:10]
        )
        taps = None if (kernel_rows, kernel_cols) == layer.kernel else (kernel_rows, kernel_cols)
        inner: Inner = "channels" if stays else "pixels"
        return Tiling(rows, cols, in_blocks, out_blocks, taps, inner, Buffers(*buffers))


def _parts_of_kernel(layer: Layer) -> list[tuple[int, int]]:
    """What a step may compute of the kernel: all of it, some rows, or one element."""
    rows, cols = layer.kernel
    return list(dict.fromkeys([*((part, cols) for part in _cuts(rows)), (1, 1)]))


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
    out_tiles = _parts(out_all, tilings.out_blocks)
    parts_of_kernel = _parts(layer.kernel[0], tilings.kernel_rows) * _parts(
        layer.kernel[1], tilings.kernel_cols
    )
    parts = _parts(in_all, tilings.in_blocks) * parts_of_kernel
    steps = tiles * out_tiles * parts
    taps = layer.kernel[0] * layer.kernel[1]

    row, segments = _segments(layer, tilings, dim)
    first_rows = np.minimum(row, dim)
    of_block = np.maximum(dim, first_rows) + tilings.pixels - first_rows  # of one block of weights
    blocks = tiles * out_all * (taps * in_all + (layer.bias_rows > 0))
    compute, issue = blocks * of_block, blocks * 2 * segments

    # A part stays if nothing else is loaded into its buffer before it is wanted again.
    of_data, of_weights = tiles * parts, out_tiles * parts
    stays = tilings.stays == 1
    data_once = (of_data <= tilings.data_buffers) | (stays & (parts <= tilings.data_buffers))
    weights_once = (of_weights <= tilings.weights_buffers) | (~stays & (parts <= tilings.weights_buffers))
    data_loads = np.where(data_once, of_data, steps)
    weights_loads = np.where(weights_once, of_weights, steps)
    width = np.minimum(layer.in_channels, tilings.in_blocks * dim)
    data = data_loads * tilings.data * np.maximum(width, bus)
    depth = taps * layer.in_channels + layer.bias_rows
    weights = np.where(weights_once, 1, tiles) * depth * max(layer.out_channels, bus)
    loaded = 4 * (layer.bias and not layer.bias_rows) + (layer.residual is not None)
    started = tiles * tilings.pixels * layer.out_channels * loaded
    stored = stored_rows * stored_cols * layer.out_channels * (4 if layer.full else 1)

    array, on_bus = np.maximum(compute, issue), (data + weights + started + stored) / bus
    # What has one buffer is loaded while the array waits.
    waits = np.zeros_like(on_bus)
    for loads, moved, buffers in (
        (data_loads, data, tilings.data_buffers),
        (weights_loads, weights, tilings.weights_buffers),
        (tiles * out_tiles, started, tilings.result_buffers),
    ):
        waits += np.where((buffers == 1) & (moved > 0), moved / bus + _LATENCY * loads, 0.0)
    waits += np.where(tilings.result_buffers == 1, _LATENCY * tiles * out_tiles, 0)
    found: np.ndarray = np.maximum(array + waits, on_bus) + on_bus / steps + 4 * steps
    return found


def _segments(layer: Layer, tilings: _Tilings, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Pixels of a row, and how many computes a tile's pixels are for each block of weights."""
    lines = np.ones_like(tilings.rows) if layer.pointwise else tilings.rows
    row = _parts(tilings.pixels, lines)
    return row, lines * _parts(row, dim)


def _parts(extent: np.ndarray | int, size: np.ndarray | int) -> np.ndarray:
    return np.asarray(-(-extent // size))
