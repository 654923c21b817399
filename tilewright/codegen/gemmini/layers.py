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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

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
from tilewright.support.arith import ceil_div

__all__ = [
    "Layer",
    "Placement",
    "Pooling",
    "Tiling",
    "layer_loops",
    "layer_program",
    "matmul",
    "matmul_loops",
    "needed_rows",
]


@dataclass(frozen=True)
class Placement:
    """Addresses in DRAM, and the bytes from one pixel (of the weights: input channel) to the next; 0: packed."""

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
            raise LayerFitError(f"pooling is of tiles of at most 255 rows and columns, got {tiling}")
        self.data_pitch = at.data_pitch or layer.in_channels
        self.weights_pitch = at.weights_pitch or layer.out_channels
        element = 4 if layer.full else 1
        self.element = element
        self.results_pitch = at.results_pitch or layer.out_channels * element
        self.residual_pitch = at.residual_pitch or layer.out_channels

    # -- steps ----------------------------------------------------------------------------------------------------

    def instructions(self) -> Iterator[Instruction]:
        layer = self.layer
        step_pixels = layer.stride if layer.pointwise else 1
        yield make("config_ex", a_stride=1 if layer.pointwise else layer.stride)
        data_stride = self.data_pitch * step_pixels
        yield make("config_ld", slot=0, stride=data_stride, scale=ONE, block_stride=self._block_stride())
        yield make("config_ld", slot=1, stride=self.weights_pitch, scale=ONE, block_stride=self.dim)
        if layer.bias:
            yield make("config_ld", slot=2, stride=0, scale=ONE)
        if layer.pooling is None:
            scale = scale_bits(layer.scale)
            yield make("config_st", stride=self.results_pitch, scale=scale, relu=layer.relu)
        yield from self._pipelined()
        yield make("fence")

    def _block_stride(self) -> int:
        return self.data_rows // self.tiling.in_blocks

    def _pipelined(self) -> Iterator[Instruction]:
        """The loads of a step, spread over the computes of the step before it."""
        before: list[Instruction] = []
        for loads, computes in self._steps():
            if self.tiling.buffers == 1:
                yield from loads
                yield from computes
                continue
            yield from _spread(before, loads)
            before = computes
        yield from before

    def _steps(self) -> Iterator[tuple[list[Instruction], list[Instruction]]]:
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
                        *self._load_data(rows, cols, group, data),
                        *self._load_weights(group, out, weights),
                    ]
                    if at == 0:
                        loads = [*self._load_start(rows, cols, out, acc), *loads]
                    computes = list(self._compute(rows, cols, group, out, data, weights, acc, at == 0))
                    if at == len(groups) - 1:
                        computes += self._store(rows, cols, out, acc)
                    yield loads, computes
                    step += 1
                tile += 1

    def _load_data(self, rows: Span, cols: Span, group: tuple[int, int], base: int) -> Iterator[Instruction]:
        layer, dim = self.layer, self.dim
        step = layer.stride if layer.pointwise else 1
        segments = [(r, c, n) for r in range(rows.data_count) for c, n in starts(cols.data_count, dim)]
        for block, count in starts(group[1], MAX_BLOCKS):
            channel = (group[0] + block) * dim
            channels = min(count * dim, layer.in_channels - channel)
            for r, c, n in segments:
                local = base + block * self._block_stride() + r * cols.data_count + c
                row = rows.data + r * step
                first = cols.data + c * step
                # The pixels of this segment that exist; a stride above 1 has no padding.
                left = min(n, max(0, -first))
                right = min(n, max(left, layer.width - first)) if step == 1 else n
                if not 0 <= row < layer.height:
                    left = right = 0
                dram = self.at.data + (row * layer.width + first + left) * self.data_pitch + channel
                for start, end, source in ((0, left, 0), (left, right, dram), (right, n, 0)):
                    if end > start:
                        yield make("mvin", dram=source, local=local + start, rows=end - start, cols=channels)

    def _load_weights(self, group: tuple[int, int], out: tuple[int, int], base: int) -> Iterator[Instruction]:
        layer, dim = self.layer, self.dim
        for tap in range(layer.kernel[0] * layer.kernel[1]):
            for block in range(group[1]):
                channel = (group[0] + block) * dim
                depth = min(dim, layer.in_channels - channel)
                for first, count in starts(out[1], MAX_BLOCKS):
                    start = (out[0] + first) * dim
                    cols = min(count * dim, layer.out_channels - start)
                    dram = self.at.weights + (tap * layer.in_channels + channel) * self.weights_pitch + start
                    yield make(
                        "mvin2",
                        dram=dram,
                        local=self._weights(base, tap, block, first),
                        rows=depth,
                        cols=cols,
                    )

    def _weights(self, base: int, tap: int, block: int, out: int) -> int:
        return base + ((tap * self.tiling.in_blocks + block) * self.tiling.out_blocks + out) * self.dim

    def _load_start(self, rows: Span, cols: Span, out: tuple[int, int], acc: int) -> Iterator[Instruction]:
        """What sums start from."""
        layer = self.layer
        if layer.bias:
            for block, start, channels in self._out_blocks(out):
                for pixel, n in starts(rows.count * cols.count, self.dim):
                    local = acc + block * self.pixels + pixel
                    yield make("mvin3", dram=self.at.bias + start * 4, local=local, rows=n, cols=channels)
        if layer.residual is None:
            return
        yield make(
            "config_ld", slot=2, stride=self.residual_pitch, scale=scale_bits(layer.residual), shrunk=1
        )
        add = ACCUMULATE if layer.bias else 0
        for block, start, channels in self._out_blocks(out):
            for r in range(rows.count):
                for c, n in starts(cols.count, self.dim):
                    pixel = (rows.first + r) * layer.cols + cols.first + c
                    local = acc + block * self.pixels + r * cols.count + c | add
                    dram = self.at.residual + pixel * self.residual_pitch + start
                    yield make("mvin3", dram=dram, local=local, rows=n, cols=channels)
        if layer.bias:
            yield make("config_ld", slot=2, stride=0, scale=ONE)

    def _out_blocks(self, out: tuple[int, int]) -> Iterator[tuple[int, int, int]]:
        """Number in the tile, first channel, channels."""
        for block in range(out[1]):
            start = (out[0] + block) * self.dim
            yield block, start, min(self.dim, self.layer.out_channels - start)

    def _compute(
        self,
        rows: Span,
        cols: Span,
        group: tuple[int, int],
        out: tuple[int, int],
        data: int,
        weights: int,
        acc: int,
        first_group: bool,
    ) -> Iterator[Instruction]:
        layer, dim = self.layer, self.dim
        started = layer.bias or layer.residual is not None or not first_group
        if layer.pointwise:
            segments = [(0, at, n) for at, n in starts(rows.count * cols.count, dim)]
        else:
            segments = [(r, c, n) for r in range(rows.count) for c, n in starts(cols.count, dim)]
        taps = list(product(range(layer.kernel[0]), range(layer.kernel[1])))
        for (tap, (kr, kc)), block in product(enumerate(taps), range(group[1])):
            depth = min(dim, layer.in_channels - (group[0] + block) * dim)
            for number, _, channels in self._out_blocks(out):
                add = ACCUMULATE if started or tap or block else 0
                b = self._weights(weights, tap, block, number)
                for at, (r, c, n) in enumerate(segments):
                    a = data + block * self._block_stride() + c
                    if not layer.pointwise:
                        a = data + block * self._block_stride() + kc + c * layer.stride
                        a += (r * layer.stride + kr) * cols.data_count
                    c_local = acc + number * self.pixels + r * cols.count + c | add
                    source = NONE if at else b
                    yield make(
                        "preload", b=source, rows=depth, cols=channels, c=c_local, c_rows=n, c_cols=channels
                    )
                    name = "compute_accumulated" if at else "compute_preloaded"
                    yield make(name, a=a, rows=n, cols=depth, d=NONE)

    def _store(self, rows: Span, cols: Span, out: tuple[int, int], acc: int) -> Iterator[Instruction]:
        layer, dim = self.layer, self.dim
        width = layer.stored[1]
        if layer.pooling:
            yield make(
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
        for block, start, channels in self._out_blocks(out):
            local = acc + block * self.pixels | (FULL if layer.full else 0)
            to = self.at.results + (rows.out * width + cols.out) * self.results_pitch + start * self.element
            if layer.pooling:
                yield make("mvout", dram=to, local=local, rows=1, cols=channels)
                continue
            whole = cols.count == width  # rows lie behind each other in DRAM
            lines = [(0, rows.count * cols.count)] if whole else [(r, cols.count) for r in range(rows.count)]
            for r, length in lines:
                for c, n in starts(length, dim):
                    dram = to + (r * width + c) * self.results_pitch
                    yield make("mvout", dram=dram, local=local + r * cols.count + c, rows=n, cols=channels)


def _spread(computes: Sequence[Instruction], loads: Sequence[Instruction]) -> Iterator[Instruction]:
    """Loads among computes, evenly; a preload stays with its compute."""
    taken = 0
    for at, instruction in enumerate(computes):
        if instruction.name == "preload":
            wanted = ceil_div((at + 1) * len(loads), len(computes))
            yield from loads[taken:wanted]
            taken = max(taken, wanted)
        yield instruction
    yield from loads[taken:]


def layer_program(layer: Layer, tiling: Tiling, machine: Array, at: Placement) -> list[Instruction]:
    """The primitive instructions of a layer; raises LayerFitError if a tile does not fit the machine."""
    return list(_Program(layer, tiling, machine, at).instructions())


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
