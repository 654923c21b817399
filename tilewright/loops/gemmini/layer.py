"""Layers that Gemmini computes, as data: convolutions, and matmuls as convolutions of a 1x1 window over one long row;
tilings of them, and what of a layer lies under a tile."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.errors import LayerFitError


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
    def macs(self) -> int:
        taps = self.kernel[0] * self.kernel[1]
        return self.rows * self.cols * self.in_channels * self.out_channels * taps


def matmul(m: int, n: int, k: int, **epilogue: object) -> Layer:
    """[m, k] x [k, n] -> [m, n]."""
    return Layer(1, m, k, n, **epilogue)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Tiling:
    """A tile: rows and columns that are stored, and blocks of `dim` channels."""

    rows: int
    cols: int
    in_blocks: int = 1
    out_blocks: int = 1
    buffers: int = 2  # 2: a step is loaded while the step before it computes


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


def span_of(layer: Layer, axis: int, out: int, out_count: int) -> Span:
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
    start = first * layer.stride - layer.padding[axis]
    return Span(out, out_count, first, count, hang, start, (count - 1) * layer.stride + layer.kernel[axis])


def needed_rows(layer: Layer, tiling: Tiling) -> tuple[int, int, int]:
    """Rows of the scratchpad for data and for weights, and of the accumulator, of the largest tile, all buffers."""
    pixels = data = 0
    for at in starts(layer.stored[0], tiling.rows):
        for other in starts(layer.stored[1], tiling.cols):
            rows, cols = span_of(layer, 0, *at), span_of(layer, 1, *other)
            pixels = max(pixels, rows.count * cols.count)
            data = max(data, rows.data_count * cols.data_count)
    return tiling.buffers * data * tiling.in_blocks, tiling.buffers, pixels


def starts(extent: int, tile: int) -> list[tuple[int, int]]:
    return [(at, min(tile, extent - at)) for at in range(0, extent, tile)]
