"""Winograd's algorithm for 3x3 convolutions with stride 1.

An image is cut into tiles of m x m outputs, each from (m + 2) x (m + 2) inputs. Transformed, a tile's outputs are
products of single elements, summed over channels: (m + 2)^2 matmuls of tiles x channels by channels x outputs,
instead of 9 m^2.

    for every share of the weight's panels and block of tiles:      (parallel)
      for blocks of channels:                                       (if all of them do not fit)
        for every tile, vector of channels:
          seen[tile, channel, e] = Bt d B                           (d guarded at the image's edge alone)
        for every panel, element e of a transformed tile:
          for every `rows` tiles:
            acc[rows, vectors] = 0
            for channels, `unroll` written out: acc += seen[row, channel, e] * panel[e, channel, :]
              prefetch a line of the next element's panel
            products[row, :, e] = acc                               (or += from the second block of channels on)
      for every tile, vector of outputs:
        out = epilogue(At products A)                               (only what is inside the image)

The weight is transformed when the model is linked, and stored panel by panel in the order in which it is read. The
elements of a tile lie next to each other, vector by vector, because a transform writes (or reads) all of them at
once. If all channels fit, `products` holds one panel at a time, and its tiles are finished before the next panel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from tilewright import te
from tilewright.dtypes import DType
from tilewright.loops.ir import SCRATCH_LIMIT, Buffer, Program
from tilewright.loops.tiling import Tiles, extent_of, power_of_two_below
from tilewright.numerics import is_strict
from tilewright.runtime.winograd import POINTS, TAPS, matrices
from tilewright.space.space import Config, Knob, Space
from tilewright.space.template import Applied, Terms, Work
from tilewright.space.templates.cpu.contraction_terms import PanelCounts
from tilewright.space.templates.cpu.straight_line import operations
from tilewright.space.templates.cpu.window import WindowConvolution, convolution_of
from tilewright.space.templates.cpu.winograd_nest import WinogradNest, WinogradTiling
from tilewright.support.arith import ceil_div, round_up
from tilewright.support.batch import Number, Truth, least, most, root, select

NAME = "winograd"
# The relative error per square root of the number of products in a chain, measured on random data, and the share of
# the kernel's error bound that a config may use.
_ROUNDING = {2: 4e-8, 4: 2.3e-7, 6: 4.3e-7}
_MAX_ERROR = 7e-6
_MAX_WEIGHT = (
    32 << 20
)  # bytes of a transformed weight; above this, use the smallest transform, which grows it least
_MAX_TILES = 64  # maximum in a block
_MAX_ROWS = 10  # maximum of a register tile: more broadcasts wait for each other
_SPILLED = 1.25  # registers a transform may need, relative to those available, and still be unrolled
_HIDDEN_WEIGHT = 0.75  # share of the weight's memory time that prefetching hides
_UNHIDDEN = 4.0  # cycles for a line that a transform moves from or to L2
_UNHIDDEN_TWICE = 12.0  # cycles if it goes through memory between its two sides


class Winograd:
    name = NAME

    def apply(self, work: Work) -> Applied | None:
        if is_strict(work.numerics):
            return None
        convolution = convolution_of(work.formula)
        if convolution is None:
            return None
        applied = AppliedWinograd(work, convolution)
        return applied if next(applied.space.configs(), None) is not None else None


class AppliedWinograd:
    def __init__(self, work: Work, convolution: WindowConvolution) -> None:
        self.machine, self.convolution = work.machine, convolution
        self.lanes = min(work.machine.lanes(DType.F32), power_of_two_below(convolution.output.extent))

    @cached_property
    def space(self) -> Space:
        conv = self.convolution
        channels, panels = conv.channel.extent, ceil_div(conv.output.extent, self.lanes)
        cut = [n for n in (512, 384, 256, 192, 128, 96, 64, 32) if n < channels and channels % n == 0]
        padded = round_up(channels, self.machine.lanes(DType.F32))
        tiles = {1, 2, 4, 8, 12, 16, 20, 24, 30, 36, 48}
        for outputs in POINTS:  # all tiles in equal blocks
            every = (
                extent_of(conv.batch) * ceil_div(conv.y.extent, outputs) * ceil_div(conv.x.extent, outputs)
            )
            tiles |= {n for parts in (1, 2, 4, 8) if (n := ceil_div(every, parts)) <= _MAX_TILES}
        return Space(
            NAME,
            (
                Knob("outputs", tuple(POINTS)),
                Knob("tiles", tuple(sorted(tiles))),
                Knob("vectors", tuple(n for n in (1, 2, 3, 4) if n <= panels)),
                Knob("channels", (padded, *cut)),
                Knob("panel_groups", (1, 2, 4, 8, 16)),
            ),
            self._legal,
            together=(("outputs", "tiles", "vectors", "channels", "panel_groups"),),
            batched=True,
        )

    def _legal(self, values: Mapping[str, Number]) -> Truth:
        """Whether a config is legal; of many configs, which of them are."""
        shape = self.shape_of(values)
        legal = (shape.panels.size <= self.convolution.output.extent) & (shape.tiles <= shape.all_tiles)
        legal = legal & (shape.panel_groups == values["panel_groups"])
        error = _by_outputs(_ROUNDING.__getitem__, shape.outputs) * root(
            shape.channels + shape.channel_blocks
        )
        legal = legal & (error <= _MAX_ERROR)
        weight = shape.elements * self.convolution.channel.extent * self.convolution.output.extent * 4
        legal = legal & ((weight <= _MAX_WEIGHT) | (shape.outputs == min(POINTS)))
        return legal & ((shape.seen_size + shape.products_size) * 4 <= SCRATCH_LIMIT)

    def shape_of(self, values: Mapping[str, Number]) -> WinogradTiling:
        conv, outputs = self.convolution, values["outputs"]
        channels, vectors = values["channels"], values["vectors"]
        panels = self._panels(vectors)
        return WinogradTiling(
            outputs=outputs,
            tiles_y=ceil_div(conv.y.extent, outputs),
            tiles_x=ceil_div(conv.x.extent, outputs),
            images=extent_of(conv.batch),
            tiles=values["tiles"],
            rows=self._rows_of(values["tiles"], vectors),
            vectors=vectors,
            channels=channels,
            channel_blocks=ceil_div(conv.channel.extent, channels),
            channel_lanes=self.machine.lanes(DType.F32),
            panels=panels,
            share=ceil_div(panels.count, values["panel_groups"]),
            in_registers=(outputs + TAPS - 1) ** 2 <= _SPILLED * self.machine.vector_registers,
            in_line=self.machine.line_bytes // DType.F32.bytes,
        )

    def _panels(self, vectors: Number) -> Any:
        """The panels as `Tiles`; of many configs, their sizes and counts."""
        width = vectors * self.lanes
        if isinstance(width, np.ndarray):
            return PanelCounts(width, -(-self.convolution.output.extent // width))
        return Tiles(self.convolution.output, width)

    def _rows_of(self, tiles: Number, vectors: Number) -> Number:
        registers, chains = self.machine.vector_registers, self.machine.chains
        if not isinstance(tiles, np.ndarray) and not isinstance(vectors, np.ndarray):
            return _rows(tiles, vectors, registers, chains)
        widest = 1 + int(np.max(vectors))
        different, which = np.unique(tiles * widest + vectors, return_inverse=True)
        pairs = (divmod(code, widest) for code in different.tolist())
        return np.array([_rows(*pair, registers, chains) for pair in pairs])[which]

    def terms(self, config: Config) -> Terms:
        return self.terms_of(dict(config.values))

    def terms_of(self, values: Mapping[str, Number]) -> Terms:
        """The terms of the config with these values or, if some are arrays, of many configs."""
        shape, caches = self.shape_of(values), self.machine.caches
        iterations = shape.panel_groups * shape.blocks
        panels = iterations * shape.share  # panels times blocks of tiles
        every_channel = shape.channels * shape.channel_blocks

        # The transforms, in vectors of one tile.
        before = _by_outputs(lambda outputs: _transform_operations(outputs)[0], shape.outputs)
        after = _by_outputs(lambda outputs: _transform_operations(outputs)[1], shape.outputs)
        seen = 1.0 * (iterations * shape.tiles * every_channel // shape.channel_lanes)
        finished = 1.0 * (panels * shape.tiles * shape.vectors)
        moved_in, moved_out = seen * shape.elements, finished * shape.outputs**2
        transforms = seen * 2 * shape.side * before + finished * (shape.side + shape.outputs) * after
        between = select(shape.in_registers, 0.0, moved_in + finished * shape.side * shape.outputs)
        lines = moved_in + finished * shape.elements
        unhidden = lines * select(shape.in_registers, _UNHIDDEN, _UNHIDDEN_TWICE)

        # The products, in steps of a register tile.
        register_tiles = 1.0 * (panels * shape.channel_blocks * shape.elements * shape.row_tiles)
        steps = register_tiles * shape.channels
        each = shape.rows * shape.vectors
        partial = register_tiles * each

        # A panel is read once per register tile. It comes from memory for the first block of tiles. For later blocks
        # it may still be in L2, depending on how well a share of the weight and the scratch memory fit there.
        panel = shape.channels * shape.panels.size * 4
        weight_bytes = shape.elements * panel * shape.channel_blocks * shape.panels.count
        scratch = (shape.seen_size + shape.products_size) * 4
        crowding = (weight_bytes / shape.panel_groups + scratch) / caches.l2_per_core
        again = (shape.blocks - 1) * weight_bytes * least(1.0, most(0.0, 2 * crowding - 1.4))
        reads = select(panel <= caches.l1 // 2, 1, shape.row_tiles)
        data_bytes = shape.seen_size * shape.channel_blocks * 4.0
        from_scratch = data_bytes * (panels + 2 * iterations) + 3.0 * partial * self.machine.line_bytes
        beyond_l2 = most(0.0, 1 - caches.l2_per_core / 3 / scratch)
        # Data that the previous kernel left in this core's L2, and data that the next kernel finds there.
        readers = least(shape.panel_groups, self.machine.cores)
        touched = self._image_bytes * readers + self._output_bytes
        near = caches.keep(touched / self.machine.cores + scratch + weight_bytes / shape.panel_groups)
        others = self._image_bytes * select(near, readers - 1, shape.panel_groups)
        own = self._image_bytes * near + 2.0 * self._output_bytes
        return Terms(
            arithmetic=transforms + moved_out * self._epilogue + steps * most(each, self.machine.chains),
            loads=lines + between + moved_out + steps * (shape.rows + shape.vectors),
            stores=moved_in + between + moved_out + partial,
            branches=steps / shape.unroll + 3.0 * register_tiles,
            from_l2=from_scratch + weight_bytes * shape.blocks * reads + select(near, own, 0.0),
            from_l3=others + select(near, 0.0, own) + beyond_l2 * from_scratch + again,
            from_memory=1.0 * weight_bytes,
            prefetched=_HIDDEN_WEIGHT * weight_bytes,
            iterations=iterations,
            scalar=register_tiles * 12.0 + unhidden,
        )

    @cached_property
    def _epilogue(self) -> int:
        """Instructions for an output, after the transform."""
        return sum(isinstance(node, te.Call) for node in te.walk(self.convolution.gemm.formula.value))

    @cached_property
    def _image_bytes(self) -> int:
        sources = {load.source for load in te.loads(self.convolution.data)}
        return sum(source.size * source.dtype.bytes for source in sources if isinstance(source, Buffer))

    @cached_property
    def _output_bytes(self) -> int:
        output = self.convolution.gemm.formula.output
        return output.size * output.dtype.bytes

    def program(self, config: Config) -> Program:
        return WinogradNest(self.convolution, self.shape_of(dict(config.values))).program(config)


@lru_cache(maxsize=1024)
def _rows(tiles: int, vectors: int, registers: int, chains: float) -> int:
    """The register-tile height, for tiles `vectors` wide, that needs the fewest instructions for `tiles` rows.
    Accumulators, a vector of weights per column and one element of data must fit the registers."""
    most = max(1, (registers - 1) // vectors - 1)
    return min(
        range(min(tiles, most, _MAX_ROWS), 0, -1),
        key=lambda rows: ceil_div(tiles, rows) * (max(rows * vectors, chains) + 1),
    )


def _by_outputs(known: Callable[[int], float], outputs: Number) -> Number:
    """What is known of each number of outputs."""
    if not isinstance(outputs, np.ndarray):
        return known(outputs)
    return np.array([known(n) if n in POINTS else 0 for n in range(max(POINTS) + 1)])[outputs]


@lru_cache(maxsize=8)
def _transform_operations(outputs: int) -> tuple[int, int]:
    """Instructions for one line of Bt d and of At m."""
    at, _, bt = matrices(outputs)
    return operations(bt), operations(at)
