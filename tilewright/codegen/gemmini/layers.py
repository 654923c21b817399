"""Layers as Gemmini's instructions: convolutions, and matmuls as convolutions of a 1x1 window over one long row.

Tensors are channels-last in DRAM: data [row, column, channel], weights [row, column, in, out], results [row, column,
channel]. A tile of results stays in the accumulator while input channels are summed:

    for each tile of results, output channels:
        accumulator = bias (+ residual, scaled)
        for each group of input channels:
            load the window of the data, load the weights
            for each tap, block of input channels, block of output channels:
                preload the weights; for each row of pixels: compute
        store, with ReLU, scaling and pooling on the way

With two buffers, the loads of a step are spread over the computes of the step before it. Trailing blocks are padded:
a load writes zeros in the rest of a row, and only the elements that exist are stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np

from tilewright.errors import InstructionError, LayerFitError
from tilewright.loops.gemmini.layer import (
    Layer,
    Pooling,
    Span,
    Tiling,
    matmul,
    needed_rows,
    span_of,
    starts,
)
from tilewright.runtime.gemmini.isa import (
    ACCUMULATE,
    ACCUMULATOR,
    FULL,
    MAX_BLOCKS,
    NONE,
    ONE,
    Array,
    Instruction,
    make,
    scale_bits,
)
from tilewright.runtime.gemmini.verify import verify
from tilewright.runtime.gemmini.words import EMPTY, decode, words
from tilewright.support.arith import ceil_div

__all__ = [
    "Layer",
    "Placement",
    "Pooling",
    "Tiling",
    "layer_loops",
    "layer_program",
    "layer_words",
    "matmul",
    "matmul_loops",
    "needed_rows",
]


@dataclass(frozen=True)
class Placement:
    """Addresses in DRAM, and the bytes from one pixel to the next (for weights: from one input channel); 0: packed."""

    data: int
    weights: int
    results: int
    bias: int = 0
    residual: int = 0
    data_pitch: int = 0
    weights_pitch: int = 0
    results_pitch: int = 0
    residual_pitch: int = 0


class _Program:
    def __init__(self, layer: Layer, tiling: Tiling, machine: Array, at: Placement) -> None:
        if min(tiling.rows, tiling.cols, tiling.in_blocks, tiling.out_blocks) < 1 or tiling.buffers not in (
            1,
            2,
        ):
            raise LayerFitError(f"a tiling's factors must be at least 1 and its buffers 1 or 2, got {tiling}")
        self.layer, self.tiling, self.at = layer, tiling, at
        self.dim = machine.dim
        stored_rows, stored_cols = layer.stored
        self.row_tiles, self.col_tiles = starts(stored_rows, tiling.rows), starts(stored_cols, tiling.cols)
        data, _, self.pixels = needed_rows(layer, tiling)
        self.data_rows = data // tiling.buffers
        taps = layer.kernel[0] * layer.kernel[1]
        self.weight_rows = taps * tiling.in_blocks * tiling.out_blocks * self.dim
        self.acc_rows = self.pixels * tiling.out_blocks
        self.first_weights = machine.scratchpad_rows - tiling.buffers * self.weight_rows
        if tiling.buffers * self.data_rows > self.first_weights:
            raise LayerFitError(
                f"a tile of {tiling} needs {tiling.buffers * self.data_rows} rows of data and"
                f" {tiling.buffers * self.weight_rows} of weights; the scratchpad has {machine.scratchpad_rows}"
            )
        if tiling.buffers * self.acc_rows > machine.accumulator_rows:
            raise LayerFitError(
                f"a tile of {tiling} needs {tiling.buffers * self.acc_rows} rows of results; the accumulator has"
                f" {machine.accumulator_rows}"
            )
        if (
            layer.pooling
            and max(*(span_of(layer, 0, *tile).count for tile in self.row_tiles), tiling.cols, 0) > 255
        ):
            raise LayerFitError(f"pooling requires tiles of at most 255 rows and columns, got {tiling}")
        self.data_pitch = at.data_pitch or layer.in_channels
        self.weights_pitch = at.weights_pitch or layer.out_channels
        element = 4 if layer.full else 1
        self.element = element
        self.results_pitch = at.results_pitch or layer.out_channels * element
        self.residual_pitch = at.residual_pitch or layer.out_channels
        self._computes = lru_cache(self._compute)  # those of tiles of one size are the same

    # -- steps ----------------------------------------------------------------------------------------------------

    def words(self) -> np.ndarray:
        layer = self.layer
        step_pixels = layer.stride if layer.pointwise else 1
        data_stride = self.data_pitch * step_pixels
        parts = [
            words("config_ex", a_stride=1 if layer.pointwise else layer.stride),
            words("config_ld", slot=0, stride=data_stride, scale=ONE, block_stride=self._block_stride()),
            words("config_ld", slot=1, stride=self.weights_pitch, scale=ONE, block_stride=self.dim),
        ]
        if layer.bias:
            parts.append(words("config_ld", slot=2, stride=0, scale=ONE))
        if layer.pooling is None:
            scale = scale_bits(layer.scale)
            parts.append(words("config_st", stride=self.results_pitch, scale=scale, relu=layer.relu))
        parts += self._pipelined()
        parts.append(words("fence"))
        return np.concatenate(parts)

    def _block_stride(self) -> int:
        return self.data_rows // self.tiling.in_blocks

    def _pipelined(self) -> Iterator[np.ndarray]:
        """Distribute the loads of a step over the computes of the previous step."""
        before = EMPTY
        for loads, computes in self._steps():
            if self.tiling.buffers == 1:
                yield loads
                yield computes
                continue
            yield _spread(before, loads)
            before = computes
        yield before

    def _steps(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        layer, tiling = self.layer, self.tiling
        in_blocks, out_blocks = ceil_div(layer.in_channels, self.dim), ceil_div(layer.out_channels, self.dim)
        step = tile = 0
        for out in starts(out_blocks, tiling.out_blocks):
            for row_tile, col_tile in product(self.row_tiles, self.col_tiles):
                rows, cols = span_of(layer, 0, *row_tile), span_of(layer, 1, *col_tile)
                acc = ACCUMULATOR | tile % tiling.buffers * self.acc_rows
                groups = starts(in_blocks, tiling.in_blocks)
                for at, group in enumerate(groups):
                    data = step % tiling.buffers * self.data_rows
                    weights = self.first_weights + step % tiling.buffers * self.weight_rows
                    loads = [
                        self._load_data(rows, cols, group, data),
                        self._load_weights(group, out, weights),
                    ]
                    if at == 0:
                        loads = [*self._load_start(rows, cols, out, acc), *loads]
                    sizes = (rows.count, cols.count, cols.data_count)
                    computes = [self._computes(sizes, group, out, data, weights, acc, at == 0)]
                    if at == len(groups) - 1:
                        computes += self._store(rows, cols, out, acc)
                    yield np.concatenate(loads), np.concatenate(computes)
                    step += 1
                tile += 1

    def _load_data(self, rows: Span, cols: Span, group: tuple[int, int], base: int) -> np.ndarray:
        layer, dim = self.layer, self.dim
        step = layer.stride if layer.pointwise else 1
        # Axes: blocks of channels, rows, segments of a row, and the parts of a segment: padding, pixels, padding.
        block, count = _starts(group[1], MAX_BLOCKS, 0)
        r = np.arange(rows.data_count)[:, None, None]
        c, n = _starts(cols.data_count, dim, 2)
        channel = (group[0] + block) * dim
        channels = np.minimum(count * dim, layer.in_channels - channel)
        row, first = rows.data + r * step, cols.data + c * step
        # The pixels of this segment that exist; a stride above 1 has no padding.
        left = np.minimum(n, np.maximum(0, -first))
        right = np.minimum(n, np.maximum(left, layer.width - first)) if step == 1 else n
        exists = (row >= 0) & (row < layer.height)
        left, right = np.where(exists, left, 0), np.where(exists, right, 0)
        n = np.broadcast_to(n, left.shape)
        bounds = np.concatenate([np.zeros_like(left), left, right, n], axis=2)
        start, length = bounds[..., :-1], np.diff(bounds, axis=2)
        dram = self.at.data + (row * layer.width + first + left) * self.data_pitch
        dram = dram[None] + channel[:, None, None, None]
        zero = np.zeros_like(dram)
        local = base + r * cols.data_count + c + start
        local = local[None] + (block * self._block_stride())[:, None, None, None]
        shape = local.shape
        dram = np.concatenate([zero, dram, zero], axis=3)
        wanted = np.broadcast_to(length > 0, shape)
        every = np.broadcast_to(channels[:, None, None, None], shape)
        size = np.broadcast_to(length, shape)
        return words("mvin", dram=dram[wanted], local=local[wanted], rows=size[wanted], cols=every[wanted])

    def _load_weights(self, group: tuple[int, int], out: tuple[int, int], base: int) -> np.ndarray:
        layer, dim = self.layer, self.dim
        tap = np.arange(layer.kernel[0] * layer.kernel[1])[:, None, None]
        block = np.arange(group[1])[:, None]
        first, count = _starts(out[1], MAX_BLOCKS, 0)
        channel, start = (group[0] + block) * dim, (out[0] + first) * dim
        return words(
            "mvin2",
            dram=self.at.weights + (tap * layer.in_channels + channel) * self.weights_pitch + start,
            local=self._weights(base, tap, block, first),
            rows=np.minimum(dim, layer.in_channels - channel),
            cols=np.minimum(count * dim, layer.out_channels - start),
        )

    def _weights(self, base: int, tap: np.ndarray, block: np.ndarray, out: np.ndarray) -> np.ndarray:
        return base + ((tap * self.tiling.in_blocks + block) * self.tiling.out_blocks + out) * self.dim

    def _load_start(self, rows: Span, cols: Span, out: tuple[int, int], acc: int) -> list[np.ndarray]:
        """Load the initial values of the sums."""
        layer = self.layer
        parts = []
        if layer.bias:
            block, start, channels = self._out_blocks(out, 1)
            pixel, n = _starts(rows.count * cols.count, self.dim, 0)
            local = acc + block * self.pixels + pixel
            parts.append(words("mvin3", dram=self.at.bias + start * 4, local=local, rows=n, cols=channels))
        if layer.residual is None:
            return parts
        scale = scale_bits(layer.residual)
        parts.append(words("config_ld", slot=2, stride=self.residual_pitch, scale=scale, shrunk=1))
        block, start, channels = self._out_blocks(out, 2)
        r = np.arange(rows.count)[:, None]
        c, n = _starts(cols.count, self.dim, 0)
        pixel = (rows.first + r) * layer.cols + cols.first + c
        local = acc + block * self.pixels + r * cols.count + c | (ACCUMULATE if layer.bias else 0)
        dram = self.at.residual + pixel * self.residual_pitch + start
        parts.append(words("mvin3", dram=dram, local=local, rows=n, cols=channels))
        if layer.bias:
            parts.append(words("config_ld", slot=2, stride=0, scale=ONE))
        return parts

    def _out_blocks(self, out: tuple[int, int], axes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The blocks of output channels in the tile: their numbers, first channels and sizes, with `axes` trailing axes
        of 1."""
        block = np.arange(out[1]).reshape(-1, *[1] * axes)
        start = (out[0] + block) * self.dim
        return block, start, np.minimum(self.dim, self.layer.out_channels - start)

    def _compute(
        self,
        sizes: tuple[int, int, int],
        group: tuple[int, int],
        out: tuple[int, int],
        data: int,
        weights: int,
        acc: int,
        first_group: bool,
    ) -> np.ndarray:
        layer, dim = self.layer, self.dim
        rows, cols, pitch = sizes
        started = layer.bias or layer.residual is not None or not first_group
        # Axes: taps, blocks of input channels, blocks of output channels, runs of pixels.
        tap = np.arange(layer.kernel[0] * layer.kernel[1])[:, None, None, None]
        kr, kc = np.divmod(tap, layer.kernel[1])
        block = np.arange(group[1])[:, None, None]
        number, _, channels = self._out_blocks(out, 1)
        if layer.pointwise:
            c, n = _starts(rows * cols, dim, 0)
            r = np.zeros_like(c)
        else:
            c, n = _starts(cols, dim, 0)
            r, c = (each.ravel() for each in np.meshgrid(np.arange(rows), c, indexing="ij"))
            n = np.tile(n, rows)
        depth = np.minimum(dim, layer.in_channels - (group[0] + block) * dim)
        first = np.arange(n.size) == 0
        b = np.where(first, self._weights(weights, tap, block, number), NONE)
        a = data + block * self._block_stride() + c
        if not layer.pointwise:
            a = data + block * self._block_stride() + kc + c * layer.stride + (r * layer.stride + kr) * pitch
        add = np.where(started | (tap > 0) | (block > 0), ACCUMULATE, 0)
        c_local = acc + number * self.pixels + r * cols + c | add
        preloads = words("preload", b=b, rows=depth, cols=channels, c=c_local, c_rows=n, c_cols=channels)
        fields = {"a": a, "rows": n, "cols": depth, "d": np.full(b.shape, NONE)}
        computes = words("compute_accumulated", **fields)
        further = np.broadcast_to(first, b.shape).ravel()
        computes[further, 0] = words("compute_preloaded")[0, 0]
        return np.stack([preloads, computes], axis=1).reshape(-1, 3)

    def _store(self, rows: Span, cols: Span, out: tuple[int, int], acc: int) -> list[np.ndarray]:
        layer, dim = self.layer, self.dim
        width = layer.stored[1]
        block, start, channels = self._out_blocks(out, 2)
        local = acc + block * self.pixels | (FULL if layer.full else 0)
        to = self.at.results + (rows.out * width + cols.out) * self.results_pitch + start * self.element
        if layer.pooling:
            config = words(
                "config_st",
                stride=self.results_pitch,
                scale=scale_bits(layer.scale),
                relu=layer.relu,
                pool_size=layer.pooling.size,
                pool_stride=layer.pooling.stride,
                pool_top=rows.hang,
                pool_left=cols.hang,
                pool_pitch=width,
                rows_in=rows.count,
                cols_in=cols.count,
                rows_out=rows.out_count,
                cols_out=cols.out_count,
            )
            return [config, words("mvout", dram=to, local=local, rows=1, cols=channels)]
        if cols.count == width:  # rows lie behind each other in DRAM
            r, (c, n) = np.zeros((1, 1), np.int64), _starts(rows.count * cols.count, dim, 0)
        else:
            r, (c, n) = np.arange(rows.count)[:, None], _starts(cols.count, dim, 0)
        dram = to + (r * width + c) * self.results_pitch
        return [words("mvout", dram=dram, local=local + r * cols.count + c, rows=n, cols=channels)]


def _starts(extent: int, tile: int, axes: int) -> tuple[np.ndarray, np.ndarray]:
    """The start and length of each tile of an axis, with a trailing axis of 1 if `axes` is 2."""
    first = np.arange(0, extent, tile)
    length = np.minimum(tile, extent - first)
    return (first[:, None], length[:, None]) if axes else (first, length)


def _spread(computes: np.ndarray, loads: np.ndarray) -> np.ndarray:
    """Distribute loads evenly among computes; a preload stays with its compute."""
    if not len(computes) or not len(loads):
        return np.concatenate([computes, loads])
    preloads = np.flatnonzero(computes[:, 0] == words("preload")[0, 0])
    # Before each preload so many loads have been issued; a load goes before the first preload that wants it.
    wanted = -(-(preloads + 1) * len(loads) // len(computes))
    before = np.searchsorted(wanted, np.arange(len(loads)), side="right")
    positions = np.append(preloads, len(computes))[before]
    order = np.argsort(np.concatenate([2 * np.arange(len(computes)) + 1, 2 * positions]), kind="stable")
    return np.concatenate([computes, loads])[order]


def layer_words(layer: Layer, tiling: Tiling, machine: Array, at: Placement) -> np.ndarray:
    """The primitive instructions of a layer as words; raises LayerFitError if a tile does not fit the machine."""
    return _Program(layer, tiling, machine, at).words()


def layer_program(layer: Layer, tiling: Tiling, machine: Array, at: Placement) -> list[Instruction]:
    """The primitive instructions of a layer, decoded."""
    return decode(layer_words(layer, tiling, machine, at))


def layer_loops(layer: Layer, tiling: Tiling, machine: Array, at: Placement) -> list[Instruction]:
    """A layer by loop instructions, one for each tile of results, over all input channels."""
    if layer.pointwise and layer.stride == 1:
        return matmul_loops(layer, tiling, machine, at)
    if layer.pooling or layer.residual is not None:
        raise LayerFitError(f"loop_conv_ws is a convolution with a bias and ReLU, got {layer}")
    dim, width = machine.dim, layer.cols
    element = 4 if layer.full else 1
    data_pitch, weights_pitch = at.data_pitch or layer.in_channels, at.weights_pitch or layer.out_channels
    results_pitch = at.results_pitch or layer.out_channels * element
    program = []
    for out in starts(layer.out_channels, tiling.out_blocks * dim):
        for row_tile, col_tile in product(starts(layer.rows, tiling.rows), starts(width, tiling.cols)):
            (row, rows), (col, cols) = row_tile, col_tile
            first_row = row * layer.stride - layer.padding[0]
            first_col = col * layer.stride - layer.padding[1]
            top, left = max(0, -first_row), max(0, -first_col)
            data = at.data + ((first_row + top) * layer.width + first_col + left) * data_pitch
            to = at.results + (row * width + col) * results_pitch + out[0] * element
            program += [
                make(
                    "loop_conv_ws_image",
                    in_rows=layer.height - first_row - top,
                    in_cols=layer.width - first_col - left,
                    in_channels=layer.in_channels,
                    out_channels=out[1],
                ),
                make(
                    "loop_conv_ws_window",
                    out_rows=rows,
                    out_cols=cols,
                    kernel_rows=layer.kernel[0],
                    kernel_cols=layer.kernel[1],
                    stride=layer.stride,
                    top=top,
                    left=left,
                ),
                make("loop_conv_ws_operands", data=data, weights=at.weights + out[0]),
                make("loop_conv_ws_results", bias=at.bias + 4 * out[0] if layer.bias else 0, results=to),
                make(
                    "loop_conv_ws_pitches",
                    data=data_pitch,
                    data_row=data_pitch * layer.width,
                    results=results_pitch,
                    results_row=results_pitch * width,
                ),
                make(
                    "loop_conv_ws",
                    relu=layer.relu,
                    full=layer.full,
                    weights_pitch=weights_pitch,
                    scale=scale_bits(layer.scale),
                ),
            ]
    program.append(make("fence"))
    try:
        verify(program, machine)
    except InstructionError as error:
        raise LayerFitError(f"{layer} with {tiling}: {error.message}") from None
    return program


def matmul_loops(layer: Layer, tiling: Tiling, machine: Array, at: Placement) -> list[Instruction]:
    """A matmul by loop instructions: one for each tile of results, over all of K."""
    if not layer.pointwise or layer.stride != 1 or layer.pooling or layer.residual is not None:
        raise LayerFitError(f"loop_ws is a matmul with a bias and ReLU, got {layer}")
    dim, pixels = machine.dim, layer.rows * layer.cols
    tile_rows, tile_cols = ceil_div(tiling.rows * tiling.cols, dim) * dim, tiling.out_blocks * dim
    blocks = ceil_div(layer.in_channels, dim)
    needed = blocks * (tile_rows + tile_cols)
    if needed > machine.scratchpad_rows or tile_rows * tiling.out_blocks > machine.accumulator_rows:
        raise LayerFitError(
            f"loop_ws of {tile_rows} x {tile_cols} x {layer.in_channels} needs {needed} rows of the scratchpad's"
            f" {machine.scratchpad_rows} and {tile_rows * tiling.out_blocks} of the accumulator's"
            f" {machine.accumulator_rows}"
        )
    element = 4 if layer.full else 1
    data_pitch, weights_pitch = at.data_pitch or layer.in_channels, at.weights_pitch or layer.out_channels
    results_pitch = at.results_pitch or layer.out_channels * element
    program = []
    for (row, m), (col, n) in product(starts(pixels, tile_rows), starts(layer.out_channels, tile_cols)):
        i, j = ceil_div(m, dim), ceil_div(n, dim)
        pads = {"pad_i": i * dim - m, "pad_j": j * dim - n, "pad_k": blocks * dim - layer.in_channels}
        bias = at.bias + col * 4 if layer.bias else 0
        program += [
            make("loop_ws_bounds", i=i, j=j, k=blocks, **pads),
            make("loop_ws_addresses_ab", a=at.data + row * data_pitch, b=at.weights + col),
            make("loop_ws_addresses_dc", d=bias, c=at.results + row * results_pitch + col * element),
            make("loop_ws_strides_ab", a=data_pitch, b=weights_pitch),
            make("loop_ws_strides_dc", d=0, c=results_pitch),
            make("loop_ws", relu=layer.relu, full=layer.full, scale=scale_bits(layer.scale)),
        ]
    return [*program, make("fence")]
