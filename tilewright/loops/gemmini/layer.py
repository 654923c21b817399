"""Layers that Gemmini computes, as data: convolutions, and matmuls as convolutions of a 1x1 window over one long row;
tilings of them, and what of a layer lies under a tile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from tilewright.errors import LayerFitError

Inner = Literal["pixels", "channels"]


@dataclass(frozen=True)
class Pooling:
    """The maximum of square windows; what lies outside the results does not count."""

    size: int
    stride: int
    padding: int = 0

    def extent(self, results: int) -> int:
        return (results + 2 * self.padding - self.size) // self.stride + 1


@dataclass(frozen=True)
class Layer:
    """One image's convolution. `padding`: rows above, columns to the left, rows below, columns to the right."""

    height: int
    width: int
    in_channels: int
    out_channels: int
    kernel: tuple[int, int] = (1, 1)
    stride: int = 1
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    relu: bool = False
    scale: float = 1.0
    full: bool = False  # 32-bit results without scaling
    bias: bool = False  # 32-bit, one for each output channel
    bias_rows: int = (
        0  # of bytes that the array adds up to the bias; 0: 32-bit values are loaded for each result
    )
    residual: float | None = None  # the scale of an 8-bit tensor that is added to the sums
    pooling: Pooling | None = None

    def __post_init__(self) -> None:
        if min(self.height, self.width, self.in_channels, self.out_channels, self.stride, *self.kernel) < 1:
            raise LayerFitError(f"a layer's extents must be at least 1, got {self}")
        if min(self.rows, self.cols) < 1:
            raise LayerFitError(f"the window of {self.kernel} is larger than the padded data of {self}")
        if min(self.stored) < 1:
            raise LayerFitError(f"the pooling window of {self.pooling} is larger than the results of {self}")
        if self.pooling and (
            self.full or (self.residual is not None and self.pooling.padding >= self.pooling.size)
        ):
            raise LayerFitError("pooling requires 8-bit results")
        if self.bias_rows < 0 or (self.bias_rows and not self.bias):
            raise LayerFitError(f"bias_rows must be 0 without a bias, and at least 0, got {self.bias_rows}")

    @property
    def rows(self) -> int:
        """The number of rows of results, before pooling."""
        return (self.height + self.padding[0] + self.padding[2] - self.kernel[0]) // self.stride + 1

    @property
    def cols(self) -> int:
        return (self.width + self.padding[1] + self.padding[3] - self.kernel[1]) // self.stride + 1

    @property
    def stored(self) -> tuple[int, int]:
        """Rows and columns that are stored."""
        if self.pooling is None:
            return self.rows, self.cols
        return self.pooling.extent(self.rows), self.pooling.extent(self.cols)

    @property
    def pointwise(self) -> bool:
        return self.kernel == (1, 1) and self.padding == (0, 0, 0, 0)

    @property
    def data_step(self) -> int:
        """Rows of the scratchpad from one pixel of data under a window to the next."""
        return 1 if self.pointwise else self.stride

    @property
    def text(self) -> str:
        """For messages."""
        if self.pointwise and self.stride == 1:
            rows, channels = self.height * self.width, self.in_channels
            return f"a matmul of {rows}x{channels} by {channels}x{self.out_channels}"
        return (
            f"a {self.kernel[0]}x{self.kernel[1]} convolution with stride {self.stride} of"
            f" {self.height}x{self.width}x{self.in_channels} to {self.out_channels} channels"
        )

    @property
    def macs(self) -> int:
        taps = self.kernel[0] * self.kernel[1]
        return self.rows * self.cols * self.in_channels * self.out_channels * taps


def matmul(m: int, n: int, k: int, **epilogue: object) -> Layer:
    """[m, k] x [k, n] -> [m, n]."""
    return Layer(1, m, k, n, **epilogue)  # type: ignore[arg-type]


class Buffers(NamedTuple):
    """How many tiles of each tensor have memory: 2 where one is loaded or stored while another is computed with."""

    data: int = 2
    weights: int = 2
    results: int = 2


TWO_BUFFERS = Buffers()


@dataclass(frozen=True)
class Tiling:
    """A tile: rows and columns that are stored, blocks of `dim` channels, and rows and columns of the kernel.

    Tiles of the results follow each other along `inner`: first all pixels with the weights that are there, or first all
    output channels with the data that are there."""

    rows: int
    cols: int
    in_blocks: int = 1
    out_blocks: int = 1
    taps: tuple[int, int] | None = None  # None: the whole kernel
    inner: Inner = "pixels"
    buffers: Buffers = TWO_BUFFERS

    def kernel(self, layer: Layer) -> tuple[int, int]:
        """Rows and columns of the kernel that a step computes at most."""
        taps = self.taps or layer.kernel
        return min(taps[0], layer.kernel[0]), min(taps[1], layer.kernel[1])


@dataclass(frozen=True)
class Span:
    """Pixels along one axis of a tile: stored ones, results under them, data under those."""

    out: int  # first stored
    out_count: int
    first: int  # first result
    count: int
    hang: int  # of the first pooling window, outside the results
    data: int  # first data pixel; negative in the padding
    data_count: int


def span_of(layer: Layer, axis: int, out: int, out_count: int, taps: tuple[int, int] | None = None) -> Span:
    """`taps`: the first one and how many, of the kernel along the axis; None: all."""
    results = (layer.rows, layer.cols)[axis]
    first, last, hang = out, out + out_count, 0
    if layer.pooling:
        pool = layer.pooling
        wanted = out * pool.stride - pool.padding
        first, hang = max(0, wanted), max(0, -wanted)
        last = min(results, (out + out_count - 1) * pool.stride - pool.padding + pool.size)
    count = last - first
    if layer.pointwise:  # data that no window reads is not loaded
        return Span(out, out_count, first, count, hang, first * layer.stride, count)
    tap, length = taps or (0, layer.kernel[axis])
    start = first * layer.stride - layer.padding[axis] + tap
    return Span(out, out_count, first, count, hang, start, (count - 1) * layer.stride + length)


@dataclass(frozen=True)
class Rows:
    """Rows that one buffer of each tensor takes of its memory, for the largest tile."""

    data: int
    weights: int
    results: int
    pixels: int  # of the results, in each block of output channels
    fixed: int = 0  # rows of the scratchpad that a program fills once

    def held(self, buffers: Buffers) -> tuple[int, int]:
        """Rows of the scratchpad and of the accumulator."""
        scratchpad = self.fixed + buffers.data * self.data + buffers.weights * self.weights
        return scratchpad, buffers.results * self.results


def needed_rows(layer: Layer, tiling: Tiling, dim: int) -> Rows:
    taps = tiling.kernel(layer)
    (rows, data_rows), (cols, data_cols) = (
        largest(layer, axis, size, taps[axis]) for axis, size in enumerate((tiling.rows, tiling.cols))
    )
    of_block = taps[0] * taps[1] * tiling.in_blocks * weight_rows(layer, dim)
    return Rows(
        data=data_rows * data_cols * tiling.in_blocks,
        weights=tiling.out_blocks * (of_block + layer.bias_rows),
        results=rows * cols * tiling.out_blocks,
        pixels=rows * cols,
        fixed=multiplier_rows(layer, dim),
    )


def weight_rows(layer: Layer, dim: int) -> int:
    """Rows that a block of weights takes of the scratchpad."""
    return min(dim, layer.in_channels)


def multiplier_rows(layer: Layer, dim: int) -> int:
    """Rows of the scratchpad with what rows of the bias are multiplied by, as far apart as the rows of data."""
    return (dim - 1) * layer.data_step + 1 if layer.bias_rows else 0


def largest(layer: Layer, axis: int, size: int, taps: int) -> tuple[int, int]:
    """Results and pixels of data along an axis, of the largest tile of so many stored ones."""
    spans = [span_of(layer, axis, *at, (0, taps)) for at in starts(layer.stored[axis], size)]
    return max(span.count for span in spans), max(span.data_count for span in spans)


def starts(extent: int, tile: int) -> list[tuple[int, int]]:
    return [(at, min(tile, extent - at)) for at in range(0, extent, tile)]
