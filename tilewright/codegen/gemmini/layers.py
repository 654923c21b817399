"""Layers as Gemmini's instructions: convolutions, and matmuls as convolutions of a 1x1 window over one long row.

Tensors are channels-last in DRAM: data [row, column, channel], weights [row, column, in, out], results [row, column,
channel]. A tile of results stays in the accumulator while input channels are summed:

    for each tile of results, output channels:
        accumulator = bias (+ residual, scaled); of a bias of few rows of bytes, the array adds them up
        for each group of input channels, rows and columns of the kernel:
            load the window of the data and the weights, unless a buffer holds them
            for each tap, block of input channels, block of output channels:
                preload the weights; for each row of pixels: compute
        store, with ReLU, scaling and pooling on the way

So weights stay while only pixels change from tile to tile, and data while only output channels do. With two buffers,
the loads of a step are spread over the computes of the step before it. Trailing blocks are padded: a load writes zeros
in the rest of a row, and only the elements that exist are stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np

from tilewright.errors import InstructionError, LayerFitError
from tilewright.loops.gemmini.layer import (
    Buffers,
    Layer,
    Pooling,
    Span,
    Tiling,
    matmul,
    needed_rows,
    span_of,
    starts,
    weight_rows,
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
    "Buffers",
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


Part = tuple[int, int]  # of an axis: its start and length


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


class _Buffers:
    """The memory of one operand: what each of its buffers holds, the one that was used last at the end."""

    def __init__(self, count: int, first: int, rows: int) -> None:
        self._held: list[tuple[int, object]] = [(first + number * rows, None) for number in range(count)]

    def take(self, wanted: object) -> tuple[int, bool]:
        """The first row of a tile, and whether it must be loaded."""
        found = next((at for at, (_, tile) in enumerate(self._held) if tile == wanted), None)
        row, _ = self._held.pop(found or 0)
        self._held.append((row, wanted))
        return row, found is None


class _Program:
    def __init__(self, layer: Layer, tiling: Tiling, machine: Array, at: Placement) -> None:
        taps, buffers = tiling.kernel(layer), tiling.buffers
        factors = (tiling.rows, tiling.cols, tiling.in_blocks, tiling.out_blocks, *taps)
        if min(factors) < 1 or not set(buffers) <= {1, 2}:
            raise LayerFitError(f"a tiling's factors must be at least 1 and its buffers 1 or 2, got {tiling}")
        self.layer, self.tiling, self.at = layer, tiling, at
        self.dim = machine.dim
        stored_rows, stored_cols = layer.stored
        self.row_tiles, self.col_tiles = starts(stored_rows, tiling.rows), starts(stored_cols, tiling.cols)
        self.taps = taps
        self.needed = needed_rows(layer, tiling, self.dim)
        scratchpad, accumulator = self.needed.held(buffers)
        self.multipliers = machine.scratchpad_rows - self.needed.fixed
        self.first_weights = self.multipliers - buffers.weights * self.needed.weights
        for needed, memory, rows in (
            (scratchpad, "scratchpad", machine.scratchpad_rows),
            (accumulator, "accumulator", machine.accumulator_rows),
        ):
            if needed > rows:
                raise LayerFitError(
                    f"{layer.text} in tiles of {tiling}: {needed} rows; the {memory} has {rows}"
                )
        if (
            layer.pooling
            and max(*(span_of(layer, 0, *tile).count for tile in self.row_tiles), tiling.cols, 0) > 255
        ):
            raise LayerFitError(f"pooling requires tiles of at most 255 rows and columns, got {tiling}")
        self.data_pitch = at.data_pitch or layer.in_channels
        self.weights_pitch = at.weights_pitch or layer.out_channels
        if layer.bias_rows and self.weights_pitch != layer.out_channels:
            raise LayerFitError(
                f"{layer.text}: rows of a bias are loaded as dense weights are, got other weights"
            )
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
        depth = weight_rows(layer, self.dim)
        parts = [
            words("config_ex", a_stride=layer.data_step),
            words("config_ld", slot=0, stride=data_stride, scale=ONE, block_stride=self._block_stride()),
            words("config_ld", slot=1, stride=self.weights_pitch, scale=ONE, block_stride=depth),
        ]
        if layer.bias:
            parts.append(words("config_ld", slot=2, stride=0, scale=ONE))
        if layer.bias_rows:
            first, count = _starts(self.needed.fixed, self.dim, 0)
            local, cols = self.multipliers + first, layer.bias_rows
            parts.append(words("mvin3", dram=self.at.bias, local=local, rows=count, cols=cols))
        if layer.pooling is None:
            scale = scale_bits(layer.scale)
            parts.append(words("config_st", stride=self.results_pitch, scale=scale, relu=layer.relu))
        parts += self._pipelined()
        parts.append(words("fence"))
        return np.concatenate(parts)

    def _block_stride(self) -> int:
        return self.needed.data // self.tiling.in_blocks

    def _pipelined(self) -> Iterator[np.ndarray]:
        """Distribute the loads of a step over the computes of the previous step, where they have a second buffer."""
        before = EMPTY
        for early, late, computes in self._steps():
            yield _spread(before, early)
            yield late
            before = computes
        yield before

    def _tiles(self) -> Iterator[tuple[Part, tuple[Part, Part]]]:
        """Blocks of output channels; rows and columns."""
        outs = starts(ceil_div(self.layer.out_channels, self.dim), self.tiling.out_blocks)
        pixels = list(product(self.row_tiles, self.col_tiles))
        if self.tiling.inner == "pixels":
            yield from product(outs, pixels)
        else:
            yield from ((out, tile) for tile in pixels for out in outs)

    def _steps(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Of each step: loads into a second buffer, loads into the only one, and computes."""
        layer, tiling, needed = self.layer, self.tiling, self.needed
        data_held = _Buffers(tiling.buffers.data, 0, needed.data)
        weights_held = _Buffers(tiling.buffers.weights, self.first_weights, needed.weights)
        groups = starts(ceil_div(layer.in_channels, self.dim), tiling.in_blocks)
        taps = [starts(extent, size) for extent, size in zip(layer.kernel, self.taps, strict=True)]
        parts = list(product(groups, *taps))
        for tile, (out, (row_tile, col_tile)) in enumerate(self._tiles()):
            acc = ACCUMULATOR | tile % tiling.buffers.results * needed.results
            for number, (group, row_taps, col_taps) in enumerate(parts):
                rows = span_of(layer, 0, *row_tile, row_taps)
                cols = span_of(layer, 1, *col_tile, col_taps)
                early, late = [EMPTY], [EMPTY]
                if number == 0:
                    begins = late if tiling.buffers.results == 1 else early
                    begins += self._load_start(rows, cols, out, acc)
                data, missing = data_held.take((row_tile, col_tile, parts[number]))
                if missing:
                    loads = late if tiling.buffers.data == 1 else early
                    loads.append(self._load_data(rows, cols, group, data))
                weights, missing = weights_held.take((out, parts[number]))
                if missing:
                    loads = late if tiling.buffers.weights == 1 else early
                    loads.append(self._load_weights(group, row_taps, col_taps, out, weights))
                    if layer.bias_rows and number == 0:
                        loads.append(self._load_bias_rows(out, weights))
                sizes = (rows.count, cols.count, cols.data_count)
                kernel = (row_taps[1], col_taps[1])
                computes = [self._computes(sizes, kernel, group, out, data, weights, acc, number == 0)]
                if layer.bias_rows and number == 0:
                    computes.insert(0, self._add_bias(rows.count * cols.count, out, weights, acc))
                if number == len(parts) - 1:
                    computes += self._store(rows, cols, out, acc)
                yield np.concatenate(early), np.concatenate(late), np.concatenate(computes)

    def _load_data(self, rows: Span, cols: Span, group: Part, base: int) -> np.ndarray:
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

    def _load_weights(self, group: Part, row_taps: Part, col_taps: Part, out: Part, base: int) -> np.ndarray:
        layer, dim = self.layer, self.dim
        local = np.arange(row_taps[1] * col_taps[1])[:, None, None]
        row, col = np.divmod(local, col_taps[1])
        tap = (row_taps[0] + row) * layer.kernel[1] + col_taps[0] + col
        block = np.arange(group[1])[:, None]
        first, count = _starts(out[1], MAX_BLOCKS, 0)
        channel, start = (group[0] + block) * dim, (out[0] + first) * dim
        return words(
            "mvin2",
            dram=self.at.weights + (tap * layer.in_channels + channel) * self.weights_pitch + start,
            local=self._weights(base, local, block, first),
            rows=np.minimum(dim, layer.in_channels - channel),
            cols=np.minimum(count * dim, layer.out_channels - start),
        )

    def _weights(self, base: int, tap: np.ndarray, block: np.ndarray, out: np.ndarray) -> np.ndarray:
        number = (tap * self.tiling.in_blocks + block) * self.tiling.out_blocks + out
        return base + number * weight_rows(self.layer, self.dim)

    def _bias_rows(self, base: int, block: np.ndarray) -> np.ndarray:
        """Where they are of a block of output channels: behind the weights in their buffer."""
        layer, tiling = self.layer, self.tiling
        return base + self.needed.weights - (tiling.out_blocks - block) * layer.bias_rows

    def _load_bias_rows(self, out: Part, base: int) -> np.ndarray:
        rows = self.layer.bias_rows
        block, start, channels = self._out_blocks(out, 0)
        dram = self.at.bias + rows + start
        return words("mvin2", dram=dram, local=self._bias_rows(base, block), rows=rows, cols=channels)

    def _add_bias(self, pixels: int, out: Part, weights: int, acc: int) -> np.ndarray:
        rows = self.layer.bias_rows
        block, _, channels = self._out_blocks(out, 1)
        first, count = _starts(pixels, self.dim, 0)
        c = acc + block * self.needed.pixels + first | (0 if self.layer.residual is None else ACCUMULATE)
        b = self._bias_rows(weights, block)
        return _multiplied(b, c, rows, channels, np.full_like(first, self.multipliers), count)

    def _load_start(self, rows: Span, cols: Span, out: Part, acc: int) -> list[np.ndarray]:
        """Load the initial values of the sums."""
        layer = self.layer
        parts = []
        loads_bias = layer.bias and not layer.bias_rows
        if loads_bias:
            block, start, channels = self._out_blocks(out, 1)
            pixel, n = _starts(rows.count * cols.count, self.dim, 0)
            local = acc + block * self.needed.pixels + pixel
            parts.append(words("mvin3", dram=self.at.bias + start * 4, local=local, rows=n, cols=channels))
        if layer.residual is None:
            return parts
        scale = scale_bits(layer.residual)
        parts.append(words("config_ld", slot=2, stride=self.residual_pitch, scale=scale, shrunk=1))
        block, start, channels = self._out_blocks(out, 2)
        r = np.arange(rows.count)[:, None]
        c, n = _starts(cols.count, self.dim, 0)
        pixel = (rows.first + r) * layer.cols + cols.first + c
        local = acc + block * self.needed.pixels + r * cols.count + c | (ACCUMULATE if loads_bias else 0)
        dram = self.at.residual + pixel * self.residual_pitch + start
        parts.append(words("mvin3", dram=dram, local=local, rows=n, cols=channels))
        if loads_bias:
            parts.append(words("config_ld", slot=2, stride=0, scale=ONE))
        return parts

    def _out_blocks(self, out: Part, axes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The blocks of output channels in the tile: their numbers, first channels and sizes, with `axes` trailing axes
        of 1."""
        block = np.arange(out[1]).reshape(-1, *[1] * axes)
        start = (out[0] + block) * self.dim
        return block, start, np.minimum(self.dim, self.layer.out_channels - start)

    def _compute(
        self,
        sizes: tuple[int, int, int],
        kernel: tuple[int, int],
        group: Part,
        out: Part,
        data: int,
        weights: int,
        acc: int,
        first_part: bool,
    ) -> np.ndarray:
        layer, dim = self.layer, self.dim
        rows, cols, pitch = sizes
        started = layer.bias or layer.residual is not None or not first_part
        # Axes: taps, blocks of input channels, blocks of output channels, runs of pixels.
        tap = np.arange(kernel[0] * kernel[1])[:, None, None, None]
        kr, kc = np.divmod(tap, kernel[1])
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
        b = self._weights(weights, tap, block, number)
        a = data + block * self._block_stride() + c
        if not layer.pointwise:
            a = data + block * self._block_stride() + kc + c * layer.stride + (r * layer.stride + kr) * pitch
        add = np.where(started | (tap > 0) | (block > 0), ACCUMULATE, 0)
        c_local = acc + number * self.needed.pixels + r * cols + c | add
        return _multiplied(b, c_local, depth, channels, a, n)

    def _store(self, rows: Span, cols: Span, out: Part, acc: int) -> list[np.ndarray]:
        layer, dim = self.layer, self.dim
        width = layer.stored[1]
        block, start, channels = self._out_blocks(out, 2)
        local = acc + block * self.needed.pixels | (FULL if layer.full else 0)
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


def _multiplied(
    b: np.ndarray,
    c: np.ndarray,
    depth: np.ndarray | int,
    channels: np.ndarray,
    a: np.ndarray,
    count: np.ndarray,
) -> np.ndarray:
    """Pairs of a preload and a compute. The last axis is that of pixels: only the first of them needs weights."""
    first = np.arange(count.size) == 0
    b = np.where(first, b, NONE)
    preloads = words("preload", b=b, rows=depth, cols=channels, c=c, c_rows=count, c_cols=channels)
    none = np.full(np.broadcast_shapes(b.shape, c.shape), NONE)
    computes = words("compute_accumulated", a=a, rows=count, cols=depth, d=none)
    computes[np.broadcast_to(first, none.shape).ravel(), 0] = words("compute_preloaded")[0, 0]
    return np.stack([preloads, computes], axis=1).reshape(-1, 3)


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
    if layer.pooling or layer.residual is not None or layer.bias_rows:
        raise LayerFitError(f"loop_conv_ws is a convolution with a 32-bit bias and ReLU, got {layer}")
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
    is_matmul = layer.pointwise and layer.stride == 1
    if not is_matmul or layer.pooling or layer.residual is not None or layer.bias_rows:
        raise LayerFitError(f"loop_ws is a matmul with a 32-bit bias and ReLU, got {layer}")
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
