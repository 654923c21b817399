"""The loop nest of Winograd's algorithm; the docstring of `winograd.py` shows the loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

from tilewright import te
from tilewright.dtypes import DType
from tilewright.loops.ir import (
    Across,
    Buffer,
    For,
    If,
    Kind,
    Prefetch,
    Program,
    Scope,
    Stmt,
    Store,
    block,
    nest,
)
from tilewright.loops.tiling import Tiles, with_values
from tilewright.runtime.packing import Packing
from tilewright.runtime.winograd import TAPS, WinogradWeights, matrices
from tilewright.space.space import Config
from tilewright.space.templates.cpu.straight_line import times_vector
from tilewright.space.templates.cpu.window import WindowConvolution
from tilewright.support.arith import ceil_div
from tilewright.support.batch import Number, Truth, select


@dataclass(frozen=True)
class WinogradTiling:
    """The numbers that follow from a config; of many configs, arrays of them."""

    outputs: Number  # of a tile along one axis: m
    tiles_y: Number
    tiles_x: Number
    images: int
    tiles: Number  # in a block
    rows: Number
    vectors: Number
    channels: Number  # in a block, padded to whole vectors
    channel_blocks: Number
    channel_lanes: int
    panels: Any  # of the output's channels
    share: Number  # panels in a parallel iteration
    in_registers: Truth  # whether a transform keeps its intermediate matrix in registers
    in_line: int  # elements of a cache line

    @property
    def side(self) -> Number:
        return self.outputs + TAPS - 1

    @property
    def elements(self) -> Number:
        return self.side**2

    @property
    def all_tiles(self) -> Number:
        return self.images * self.tiles_y * self.tiles_x

    @property
    def blocks(self) -> Number:
        return ceil_div(self.all_tiles, self.tiles)

    @property
    def panel_groups(self) -> Number:
        return ceil_div(self.panels.count, self.share)

    @property
    def row_tiles(self) -> Number:
        return ceil_div(self.tiles, self.rows)

    @property
    def kept_panels(self) -> Number:
        """Panels whose products are held at once."""
        return select(self.channel_blocks > 1, self.share, 1)

    @property
    def unroll(self) -> Number:
        return min(4, self.channel_lanes)

    @property
    def channel_vectors(self) -> Number:
        return self.channels // self.channel_lanes

    @property
    def stride(self) -> Number:
        """Vectors between consecutive tiles: an odd number, so that one element of many tiles spreads over all cache
        sets."""
        return self.elements | 1

    @property
    def seen_size(self) -> Number:
        return self.stride * self.tiles * self.channels

    @property
    def products_size(self) -> Number:
        return self.stride * self.row_tiles * self.rows * self.kept_panels * self.panels.size


class _Line:
    """Statements for the lanes of one vector, in order, with their values in registers."""

    def __init__(self, name: str, lane: te.Var) -> None:
        self.registers = Buffer(name, DType.F32, 64 * lane.extent, Scope.REGISTER)
        self.lane = lane
        self.stmts: list[Stmt] = []

    def keep(self, value: te.Expr) -> te.Expr:
        position = len(self.stmts) * self.lane.extent + self.lane
        self.stmts.append(Store(self.registers, position, value))
        return te.Load(self.registers, (position,))

    def store(self, buffer: Buffer, index: te.Expr, value: te.Expr) -> None:
        self.stmts.append(Store(buffer, index, value))

    def vector(self) -> Stmt:
        return nest([(self.lane, Kind.VECTOR)], block(*self.stmts))


@dataclass(frozen=True)
class _Middle:
    """The storage of a matrix after multiplication from one side."""

    buffer: Buffer
    position: Callable[[te.Expr, te.Expr], te.Expr]

    @staticmethod
    def in_registers(side: int, lane: te.Var) -> _Middle:
        buffer = Buffer(f"{lane.name}_middle", DType.F32, side * side * lane.extent, Scope.REGISTER)
        return _Middle(buffer, lambda i, j: (i * side + j) * lane.extent + lane)

    @property
    def loops(self) -> Kind:
        return Kind.UNROLL if self.buffer.scope is Scope.REGISTER else Kind.SERIAL


def _both_sides(
    matrix: Sequence[Sequence[Fraction]],
    lane: te.Var,
    read: Callable[[te.Expr, te.Expr], te.Expr],
    middle: _Middle,
    write: Callable[[te.Expr, _Line, Sequence[te.Expr]], Stmt],
) -> Stmt:
    """Compute matrix @ d @ matrix^T; `read` returns the elements of d, and `write` receives the rows of the result.

    for columns j: middle[:, j] = matrix @ d[:, j] for rows i: write(i, matrix @ middle[i, :])
    """
    rows, side = len(matrix), len(matrix[0])
    i, j = te.Var("i", rows), te.Var("j", side)
    line = _Line(f"{lane.name}_column", lane)
    column = [line.keep(read(te.as_index(n), j)) for n in range(side)]
    for n, value in enumerate(times_vector(matrix, column, line.keep)):
        line.store(middle.buffer, middle.position(te.as_index(n), j), value)
    along_columns = For(j, middle.loops, line.vector())

    line = _Line(f"{lane.name}_row", lane)
    row = [line.keep(te.Load(middle.buffer, (middle.position(i, te.as_index(n)),))) for n in range(side)]
    along_rows = For(i, middle.loops, write(i, line, times_vector(matrix, row, line.keep)))
    return block(along_columns, along_rows)


@dataclass(frozen=True)
class _InputTile:
    """The image of a tile, and the first of its rows and columns."""

    image: dict[te.Var, te.Expr]
    top: te.Expr
    left: te.Expr


class WinogradNest:
    """The loop nest of one config."""

    def __init__(self, convolution: WindowConvolution, shape: WinogradTiling) -> None:
        self.convolution, self.shape = convolution, shape
        self.lanes = shape.panels.size // shape.vectors
        self.at, _, self.bt = matrices(shape.outputs)
        self.share, self.tile_block = te.Var("share", shape.panel_groups), te.Var("block", shape.blocks)
        self.channel_block = te.Var("channels", shape.channel_blocks)
        self.panel, self.tile = te.Var("panel", shape.share), te.Var("tile", shape.tiles)
        self.element = te.Var("e", shape.elements)

        weight = convolution.gemm.weight_load.source
        assert isinstance(weight, Buffer)
        self.original = weight
        self.packing = Packing(
            (TAPS, TAPS, convolution.channel.extent, convolution.output.extent),
            (shape.side, shape.side, shape.channels, shape.panels.size),
            (0, 2, 6, 4, 1, 3, 5, 7),
            zero_filled=(2,),
            transforms=(WinogradWeights(shape.outputs),),
        )
        self.weight = Buffer(weight.name, weight.dtype, self.packing.size)
        self.flag = Buffer("flag", DType.F32, 1, Scope.REGISTER)
        self.watch = Buffer("watch", DType.F32, self.lanes, Scope.REGISTER)
        self.seen = Buffer("seen", DType.F32, shape.seen_size, Scope.SCRATCH)
        self.products = Buffer("products", DType.F32, shape.products_size, Scope.SCRATCH)

        # The panel's index: shares of panels, where the last share overlaps the one before it.
        first = Tiles(te.Var("panels", shape.panels.count), shape.share).start_of(self.share)
        self.which_panel = first + self.panel
        self.first_tile = Tiles(te.Var("tiles", shape.all_tiles), shape.tiles).start_of(self.tile_block)
        self.here = self._tile_at(self.first_tile + self.tile)

    def _tile_at(self, number: te.Expr) -> _InputTile:
        shape = self.shape
        per_image = shape.tiles_y * shape.tiles_x
        position = number % per_image
        image: dict[te.Var, te.Expr] = {}
        rest = number // per_image
        for axis in reversed(self.convolution.batch):
            image[axis] = rest % axis.extent
            rest = rest // axis.extent
        return _InputTile(
            image, position // shape.tiles_x * shape.outputs, position % shape.tiles_x * shape.outputs
        )

    def program(self, config: Config) -> Program:
        shape, formula = self.shape, self.convolution.gemm.formula
        see = nest([(self.tile, Kind.SERIAL)], self._see())
        if shape.channel_blocks > 1:
            multiply = nest([(self.panel, Kind.SERIAL)], self._multiply())
            finish = nest([(self.tile, Kind.SERIAL), (self.panel, Kind.SERIAL)], self._finish())
            body = block(nest([(self.channel_block, Kind.SERIAL)], block(see, multiply)), finish)
        else:
            finish = nest([(self.tile, Kind.SERIAL)], self._finish())
            body = block(see, nest([(self.panel, Kind.SERIAL)], block(self._multiply(), finish)))
        inputs = [self.weight if buffer == self.original else buffer for buffer in formula.inputs]
        packings = tuple(self.packing if buffer == self.original else None for buffer in formula.inputs)
        params = (*inputs, formula.output)
        return Program(formula.name, params, self._parallel(body), str(config), packings)

    def _parallel(self, body: Stmt) -> Stmt:
        shape = self.shape
        parallel = te.Var("p", shape.panel_groups * shape.blocks)
        values = {self.share: parallel // shape.blocks, self.tile_block: parallel % shape.blocks}
        return nest([(parallel, Kind.PARALLEL)], with_values(body, values))

    # -- Bt d B -----------------------------------------------------------------------------------------------------

    def _see(self) -> Stmt:
        """The transformed inputs of one tile."""
        shape = self.shape
        vector, lane = te.Var("cv", shape.channel_vectors), te.Var("c", shape.channel_lanes)
        channel = self.channel_block * shape.channels + vector * lane.extent + lane

        def transform(guarded: bool) -> Stmt:
            def position(i: te.Expr, j: te.Expr) -> te.Expr:
                return self._seen_at(self.tile, vector, i * shape.side + j) + lane

            def write(i: te.Expr, line: _Line, results: Sequence[te.Expr]) -> Stmt:
                for j, result in enumerate(results):
                    line.store(self.seen, position(i, te.as_index(j)), result)
                return line.vector()

            middle = self._middle(lane, self.seen, position)
            both = _both_sides(self.bt, lane, lambda i, j: self._data(i, j, channel, guarded), middle, write)
            return nest([(vector, Kind.SERIAL)], both)

        if self._inside is None:
            return transform(guarded=False)
        return If(self._all_inside(), transform(guarded=False), transform(guarded=True))

    def _middle(
        self, lane: te.Var, memory: Buffer, position: Callable[[te.Expr, te.Expr], te.Expr]
    ) -> _Middle:
        """Registers if there are enough, otherwise the memory that the matrix comes from or goes to."""
        if self.shape.in_registers:
            return _Middle.in_registers(self.shape.side, lane)
        return _Middle(memory, position)

    def _seen_at(self, tile: te.Expr, vector: te.Expr, element: te.Expr) -> te.Expr:
        shape = self.shape
        return ((tile * shape.channel_vectors + vector) * shape.stride + element) * shape.channel_lanes

    def _data(self, i: te.Expr, j: te.Expr, channel: te.Expr, guarded: bool) -> te.Expr:
        """The tile's input at (i, j). Channels beyond the last are zeros."""
        conv = self.convolution
        conditions = [self._inside] if guarded and self._inside is not None else []
        if self.shape.channels > conv.channel.extent:
            conditions.append(te.Call("lt", (conv.channel, te.as_index(conv.channel.extent)), DType.BOOL))
        inside = te.all_of(conditions)
        value = conv.data if inside is None else te.select(inside, conv.data, 0.0)
        return te.substitute(value, self._positions(self.here, i, j) | {conv.channel: channel})

    def _positions(self, tile: _InputTile, i: te.Expr, j: te.Expr) -> dict[te.Var, te.Expr]:
        """The index of element (i, j) of a tile's input."""
        conv = self.convolution
        return {**tile.image, conv.row: tile.top + i, conv.column: tile.left + j}

    @cached_property
    def _inside(self) -> te.Expr | None:
        """The conditions for an element to be inside the image and inside the padding. The last tiles may overhang."""
        conv, shape = self.convolution, self.shape
        conditions = [] if conv.inside is None else [conv.inside]
        for position, tiles in ((conv.row, shape.tiles_y), (conv.column, shape.tiles_x)):
            if tiles * shape.outputs + TAPS - 1 > position.extent:
                conditions.append(te.Call("lt", (position, te.as_index(position.extent)), DType.BOOL))
        return te.all_of(conditions)

    def _all_inside(self) -> te.Expr:
        assert self._inside is not None
        ends = (te.as_index(0), te.as_index(self.shape.side - 1))
        corners = [te.substitute(self._inside, self._positions(self.here, end, end)) for end in ends]
        both = te.all_of(corners)
        assert both is not None
        return both

    # -- the products -------------------------------------------------------------------------------------------------

    def _multiply(self) -> Stmt:
        """The products of the block's tiles with one panel, for all elements, over one block of channels."""
        shape, lanes = self.shape, self.lanes
        row, vec, lane = te.Var("r", shape.rows), te.Var("u", shape.vectors), te.Var("v", lanes)
        in_tile = [(row, Kind.UNROLL), (vec, Kind.UNROLL), (lane, Kind.VECTOR)]
        row_tiles = Tiles(te.Var("tiles", shape.tiles), shape.rows)
        row_tile = row_tiles.var
        vector = te.Var("cv", shape.channel_vectors)
        steps, step = te.Var("k", shape.channel_lanes // shape.unroll), te.Var("kk", shape.unroll)
        in_vector = steps * shape.unroll + step
        channel = vector * shape.channel_lanes + in_vector
        size = shape.panels.size
        accumulators = Buffer("acc", DType.F32, shape.rows * size, Scope.REGISTER)
        position = row * size + vec * lanes + lane
        kept = te.Load(accumulators, (position,))

        panel = (self.which_panel * shape.channel_blocks + self.channel_block) * shape.elements + self.element
        data = te.Load(self.seen, (self._seen_at(row_tiles.start() + row, vector, self.element) + in_vector,))
        weight = te.Load(self.weight, ((panel * shape.channels + channel) * size + vec * lanes + lane,))
        update = nest(
            [(step, Kind.UNROLL), *in_tile], Store(accumulators, position, te.call("fma", data, weight, kept))
        )

        lines = shape.channels * size // shape.in_line
        prefetched = ceil_div(lines, shape.channels // shape.unroll * row_tiles.count)
        number = ((row_tile * vector.extent + vector) * steps.extent + steps) * prefetched
        following = (panel + 1) * (shape.channels * size)
        fetch = [
            Prefetch(self.weight, following + (number + n) * shape.in_line, 2) for n in range(prefetched)
        ]

        partial = self._product_at(row_tile * shape.rows + row, vec, self.element) + lane
        put: Stmt = nest(in_tile, Store(self.products, partial, kept))
        if shape.channel_blocks > 1:
            # Sums of blocks are added, not continued: shorter chains round less.
            total = te.call("add", te.Load(self.products, (partial,)), kept)
            add = nest(in_tile, Store(self.products, partial, total))
            put = If(te.call("eq", self.channel_block, te.as_index(0)), put, add)
        tile = block(
            nest(in_tile, Store(accumulators, position, te.const(0, DType.F32))),
            nest([(vector, Kind.SERIAL), (steps, Kind.SERIAL)], block(update, *fetch)),
            put,
        )
        return nest([(self.element, Kind.SERIAL), (row_tile, Kind.SERIAL)], tile)

    def _product_at(self, row: te.Expr, vec: te.Expr, element: te.Expr) -> te.Expr:
        """The index in `products` of an element's vector of outputs for the current panel."""
        shape = self.shape
        panel = self.panel if shape.kept_panels > 1 else te.as_index(0)
        vector = (row * shape.kept_panels + panel) * shape.vectors + vec
        return (vector * shape.stride + element) * self.lanes

    # -- At m A -----------------------------------------------------------------------------------------------------

    def _finish(self) -> Stmt:
        """The outputs of one tile for one panel. If one of them is not finite, they are recomputed directly: the
        transforms spread a NaN or an infinity over the whole tile, and may overflow where the convolution does not.
        """
        shape, conv = self.shape, self.convolution
        vec, lane = te.Var("u", shape.vectors), te.Var("v", self.lanes)
        seen, zero = te.Load(self.watch, (lane,)), te.const(0.0, DType.F32)

        def position(i: te.Expr, j: te.Expr) -> te.Expr:
            return self._product_at(self._row_of_tile(), vec, i * shape.side + j) + lane

        def write(i: te.Expr, line: _Line, results: Sequence[te.Expr]) -> Stmt:
            kept = [line.keep(result) for result in results]
            for value in kept:  # times zero, a finite number adds nothing
                line.store(self.watch, lane, te.call("fma", value, zero, seen))
            stores = [self._write(i, j, vec, lane, value) for j, value in enumerate(kept)]
            row = block(line.vector(), *stores)
            if shape.tiles_y * shape.outputs == conv.y.extent:
                return row
            return If(te.call("lt", self.here.top + i, te.as_index(conv.y.extent)), row)

        middle = self._middle(lane, self.products, position)
        both = _both_sides(
            self.at, lane, lambda i, j: te.Load(self.products, (position(i, j),)), middle, write
        )
        spoilt = te.call("ne", te.Load(self.flag, (te.as_index(0),)), zero)
        stmts = block(
            nest([(lane, Kind.VECTOR)], Store(self.watch, lane, zero)),
            both,
            Store(self.flag, te.as_index(0), Across("sum", self.watch, 0, self.lanes)),
            If(spoilt, self._directly(vec, lane)),
        )
        return nest([(vec, Kind.SERIAL)], stmts)

    def _directly(self, vec: te.Var, lane: te.Var) -> Stmt:
        """The outputs of one tile for one vector of channels, product by product, with the original weights."""
        shape, conv = self.shape, self.convolution
        i, j = te.Var("i", shape.outputs), te.Var("j", shape.outputs)
        ky, kx, channel = te.Var("ky", TAPS), te.Var("kx", TAPS), te.Var("c", conv.channel.extent)
        total = Buffer("directly", DType.F32, self.lanes, Scope.REGISTER)
        positions = self._positions(self.here, i + ky, j + kx) | {conv.channel: channel}
        data = conv.data if self._inside is None else te.select(self._inside, conv.data, 0.0)
        column = shape.panels.start_of(self.which_panel) + vec * self.lanes + lane
        tap = ((ky * TAPS + kx) * conv.channel.extent + channel) * conv.output.extent
        weight = te.Load(self.weight, (tap + column + self.packing.begin_of(self.packing.transforms[0]),))
        kept = te.Load(total, (lane,))
        update = Store(total, lane, te.call("fma", te.substitute(data, positions), weight, kept))
        summed = block(
            nest([(lane, Kind.VECTOR)], Store(total, lane, te.const(0.0, DType.F32))),
            nest([*((axis, Kind.SERIAL) for axis in (ky, kx, channel)), (lane, Kind.VECTOR)], update),
            self._write(i, j, vec, lane, kept),
        )
        if shape.tiles_y * shape.outputs != conv.y.extent:
            summed = If(te.call("lt", self.here.top + i, te.as_index(conv.y.extent)), summed)
        return nest([(i, Kind.SERIAL), (j, Kind.SERIAL)], summed)

    def _row_of_tile(self) -> te.Expr:
        """The index of the current tile in `products`: the last register tile overlaps, but its products do not."""
        shape = self.shape
        before_last = (shape.row_tiles - 1) * shape.rows
        moved = shape.row_tiles * shape.rows - shape.tiles
        if not moved or not before_last:
            return self.tile
        return self.tile + self.tile // before_last * moved

    def _write(self, i: te.Expr, j: te.Expr | int, vec: te.Var, lane: te.Var, result: te.Expr) -> Stmt:
        conv, formula = self.convolution, self.convolution.gemm.formula
        source = conv.gemm.reduction.result
        values = {
            **self.here.image,
            conv.y: self.here.top + i,
            conv.x: self.here.left + j,
            conv.output: self.shape.panels.start_of(self.which_panel) + vec * self.lanes + lane,
        }
        value = te.rewrite(
            te.substitute(formula.value, values),
            lambda node: result if isinstance(node, te.Load) and node.source == source else None,
        )
        store = nest(
            [(lane, Kind.VECTOR)], Store(formula.output, te.substitute(formula.store, values), value)
        )
        if self.shape.tiles_x * self.shape.outputs == conv.x.extent:
            return store
        return If(te.call("lt", self.here.left + j, te.as_index(conv.x.extent)), store)
