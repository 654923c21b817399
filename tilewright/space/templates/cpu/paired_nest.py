"""The loop nest of a product in pairs of taps, one config of `paired.py`, which draws its picture."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

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
from tilewright.loops.tiling import (
    PackedOperand,
    Tiles,
    blocks_of,
    extent_of,
    pack_operand,
    places_in,
    places_of,
    row_major,
    whole,
    with_values,
)
from tilewright.runtime.paired import GROUP, HALF
from tilewright.space.space import Config
from tilewright.space.templates.cpu.row_product import RowProduct

_LEAST_SQUARE, _MOST_SQUARE = 1e-36, 1e36  # mean squares of a row that are its own: 1 / its size is a number
_PER_LINE = 64 // DType.F32.bytes
_SQUARES = 4  # vectors that squares are summed in at a time


@dataclass(frozen=True)
class Shape:
    """The numbers that follow from a config."""

    rows: int
    lanes: int
    panels: Tiles  # of the columns, each as wide as a vector
    per_chunk: int  # panels in a chunk
    chunks: int
    block: int  # rows
    blocks: int
    groups: int  # of taps, the last one filled up with zeros
    last_pairs: int  # of the last group, those that are not zeros alone
    prefetch: int  # level of the cache where the next panel is asked for; 0: it is not
    streamed: bool  # whether rows come from beyond the second cache, one after the other

    @property
    def tiles(self) -> int:
        """Register tiles of a block."""
        return -(-self.block // self.rows)

    @property
    def pairs(self) -> int:
        return (self.groups - 1) * HALF + self.last_pairs

    @property
    def asks_data(self) -> bool:
        """Whether the next block's rows are asked for: there are about as many lines as steps to ask for one."""
        return self.streamed and self.blocks > 1 and self.per_chunk <= 2 * self.rows

    @property
    def asked_lines(self) -> int:
        """Of the next block, while a register tile passes a group of taps."""
        return -(-self.rows // self.per_chunk)

    @property
    def plain_rows(self) -> int:
        """Of a register tile, those that are summed product by product."""
        return sum(map(self.is_plain, range(self.rows)))

    def is_plain(self, row: int) -> bool:
        """A third of them: so additions and multiply-adds take equally long."""
        return row % 3 == 2 or (self.rows % 3 == 2 and row == self.rows - 1)

    @property
    def scratch_bytes(self) -> int:
        return self.tiles * self.rows * (self.groups * GROUP + 2) * DType.F32.bytes


def packed_weight(sums: RowProduct, panels: Tiles, panel: te.Expr, lane: te.Var) -> PackedOperand | None:
    """The weight in panels of whole groups of taps; None where it cannot be stored so."""
    load, run = sums.product.weight_load, sums.run
    expressions = sums.product.formula.expressions()
    readers = [x for e in expressions for x in te.loads(e) if x.source == load.source]
    if len(readers) > 1:
        return None
    groups = Tiles(run, GROUP)
    walk = [
        blocks_of(panels, panel),
        *map(whole, sums.outer),
        blocks_of(groups, run // GROUP),
        places_in(groups, run % GROUP),
        places_in(panels, lane),
    ]
    return pack_operand(load, walk, zero_filled=[run], paired=sums.product.taps)


class PairedNest:
    def __init__(self, sums: RowProduct, shape: Shape) -> None:
        self.sums, self.shape, self.formula = sums, shape, sums.product.formula
        self.row, self.run = sums.row, sums.run
        self.outer = [(tap, Kind.SERIAL) for tap in sums.outer]
        self.chunk, self.block = te.Var("chunk", shape.chunks), te.Var("block", shape.blocks)
        self.panel, self.lane = te.Var("panel", shape.per_chunk), te.Var("v", shape.lanes)
        all_panels = Tiles(te.Var("panels", shape.panels.count), shape.per_chunk)
        self.which_panel = all_panels.start_of(self.chunk) + self.panel
        self.row_tiles = Tiles(te.Var("row", shape.block), shape.rows)
        self.tile = self.row_tiles.var
        blocks = Tiles(self.row, shape.block)
        self.block_start = blocks.start_of(self.block) if shape.blocks > 1 else te.as_index(0)
        packed = packed_weight(sums, shape.panels, self.which_panel, self.lane)
        assert packed is not None
        self.packed = packed

    # -- scratch memory -------------------------------------------------------------------------------------------

    @cached_property
    def lines(self) -> Buffer:
        """The block's rows, scaled: of a register tile and a group of taps row by row."""
        size = self.shape.tiles * self.shape.groups * self.shape.rows * GROUP
        return Buffer("lines", DType.F32, size, Scope.SCRATCH)

    @cached_property
    def corrections(self) -> Buffer:
        return self._of_rows("corrections")

    @cached_property
    def sizes(self) -> Buffer:
        return self._of_rows("sizes")

    @property
    def _signs(self) -> int:
        """Where the pairs' signs begin in the weight, behind corrections and sizes."""
        return self.packed.packing.size - self.packed.packing.pairs

    def _of_rows(self, name: str) -> Buffer:
        return Buffer(name, DType.F32, self.shape.tiles * self.shape.rows, Scope.SCRATCH)

    @cached_property
    def accumulator(self) -> Buffer:
        return Buffer("acc", DType.F32, self.shape.rows * self.shape.lanes, Scope.REGISTER)

    def _line(self, row: te.Expr | int, group: te.Expr | int) -> te.Expr:
        """Where the line of a row of the current register tile begins."""
        return ((self.tile * self.shape.groups + group) * self.shape.rows + row) * GROUP

    # -- the block's rows -----------------------------------------------------------------------------------------

    def _scale_rows(self) -> Stmt:
        row = te.Var("sr", self.shape.rows)
        place = self.tile * self.shape.rows + row
        data = te.substitute(self.sums.data, {self.row: self.block_start + self.row_tiles.start() + row})
        scale = Buffer("scale", DType.F32, 1, Scope.REGISTER)
        stmts = block(
            *self._measured(data, place, scale),
            *self._scaled(data, row, place, te.Load(scale, (te.as_index(0),))),
        )
        return nest([(self.tile, Kind.SERIAL), (row, Kind.SERIAL)], stmts)

    def _at(self, data: te.Expr, tap: te.Expr, *, whole: bool) -> te.Expr:
        value = te.substitute(data, {self.run: tap})
        if whole:
            return value
        inside = te.call("lt", tap, te.as_index(self.run.extent))
        return te.Select(inside, value, te.const(0.0, DType.F32))

    def _measured(self, data: te.Expr, place: te.Expr, scale: Buffer) -> list[Stmt]:
        """Its size, the root of its mean square, and in `scale` the inverse of that. What is computed of a row of zeros
        is multiplied by zero."""
        lanes, zero = self.shape.lanes, te.const(0.0, DType.F32)
        steps = self.run.extent // lanes
        several = min(_SQUARES, steps)
        squares = Buffer("squares", DType.F32, several * lanes, Scope.REGISTER)
        lane, number = te.Var("v", lanes), te.Var("n", several)

        def add(into: te.Expr, first: te.Expr, *, whole: bool = True) -> Store:
            value = self._at(data, first + lane, whole=whole)
            kept = te.Load(squares, (into + lane,))
            return Store(squares, into + lane, te.call("fma", value, value, kept))

        each = [(number, Kind.UNROLL), (lane, Kind.VECTOR)]
        counter, left = te.Var("c", steps // several), te.Var("l", steps % several)
        along: list[Stmt] = [
            For(
                counter,
                Kind.SERIAL,
                nest(each, add(number * lanes, (counter * several + number) * lanes)),
            )
        ]
        if left.extent:
            first = (left + (steps - left.extent)) * lanes
            along.append(nest([(left, Kind.UNROLL), (lane, Kind.VECTOR)], add(left * lanes, first)))
        if self.run.extent % lanes:
            along.append(
                nest([(lane, Kind.VECTOR)], add(te.as_index(0), te.as_index(steps * lanes), whole=False))
            )
        stmts = [
            nest(each, Store(squares, number * lanes + lane, zero)),
            nest(self.outer, block(*along)),
        ]
        for other in range(1, several):
            total = te.Load(squares, (lane,)) + te.Load(squares, (lane + other * lanes,))
            stmts.append(nest([(lane, Kind.VECTOR)], Store(squares, lane, total)))
        mean = Buffer("mean", DType.F32, 1, Scope.REGISTER)
        first, one = te.as_index(0), te.const(1.0, DType.F32)
        square, size = te.Load(mean, (first,)), te.Load(scale, (first,))
        within = te.call("max", te.call("min", square, _MOST_SQUARE), _LEAST_SQUARE)
        total = Across("sum", squares, 0, lanes)
        stmts += [
            Store(mean, first, total * te.const(1.0 / self.sums.product.length, DType.F32)),
            Store(scale, first, te.call("sqrt", within)),
            Store(self.sizes, place, te.Select(te.call("eq", square, zero), zero, size)),
            Store(scale, first, one / size),
        ]
        return stmts

    def _scaled(self, data: te.Expr, row: te.Var, place: te.Expr, scale: te.Load) -> list[Stmt]:
        """Its lines, the second of each pair with the pair's sign, and what is to be subtracted for it."""
        lane, group = te.Var("v", HALF), te.Var("g", self.run.extent // GROUP)
        first_group = row_major(self.sums.outer) * -(-self.run.extent // GROUP)
        halves = Buffer("halves", DType.F32, GROUP, Scope.REGISTER)
        pairs = Buffer("pairs", DType.F32, HALF, Scope.REGISTER)
        first, second = (te.Load(halves, (lane + begin,)) for begin in (0, HALF))

        def line(number: te.Expr, *, whole: bool) -> Stmt:
            stmts: list[Stmt] = []
            sign = te.Load(self.packed.load.source, ((first_group + number) * HALF + lane + self._signs,))
            for half, factor in ((first, scale), (second, scale * sign)):
                begin = half.indices[0]
                value = self._at(data, number * GROUP + begin, whole=whole) * factor
                stmts.append(Store(halves, begin, value))
                stmts.append(Store(self.lines, self._line(row, first_group + number) + begin, half))
            total = te.call("fma", first, second, te.Load(pairs, (lane,)))
            return nest([(lane, Kind.VECTOR)], block(*stmts, Store(pairs, lane, total)))

        begin = Store(pairs, lane, te.const(0.0, DType.F32))
        along: list[Stmt] = [For(group, Kind.SERIAL, line(group, whole=True))]
        if self.run.extent % GROUP:
            along.append(line(te.as_index(group.extent), whole=False))
        stmts = [nest([(lane, Kind.VECTOR)], begin), nest(self.outer, block(*along))]
        return [*stmts, Store(self.corrections, place, Across("sum", pairs, 0, HALF))]

    # -- the register tile ----------------------------------------------------------------------------------------

    def _register_tile(self) -> Stmt:
        shape, lane = self.shape, self.lane
        row = te.Var("r", shape.rows)
        begin = nest(
            [(row, Kind.UNROLL), (lane, Kind.VECTOR)],
            Store(self.accumulator, row * shape.lanes + lane, te.const(0.0, DType.F32)),
        )
        group = te.Var("g", shape.groups - (shape.last_pairs < HALF))
        stmts = [begin, nest([(group, Kind.SERIAL)], self._group(group, HALF))]
        if shape.last_pairs < HALF:
            stmts.append(self._group(te.as_index(group.extent), shape.last_pairs))
        return block(*stmts, *(self._finished(number) for number in range(shape.rows)))

    def _group(self, group: te.Expr, pairs: int) -> Stmt:
        pair = te.Var("pair", pairs)
        products = nest([(pair, Kind.UNROLL)], self._pair(group, pair))
        return block(products, *self._next_panel(group), *self._next_block(group))

    def _next_panel(self, group: te.Expr) -> list[Stmt]:
        """Lines of it, spread over the register tiles of this one: behind all that reads, so that LLVM finds elements
        to read where they are used."""
        shape, weight = self.shape, self.packed.load.source
        assert isinstance(weight, Buffer)
        if not shape.prefetch:
            return []
        each = -(-GROUP // shape.tiles)
        panel = shape.groups * GROUP * shape.lanes
        first = (self.which_panel + 1) * panel + (self.tile * shape.groups + group) * (each * shape.lanes)
        return [Prefetch(weight, first + n * shape.lanes, shape.prefetch) for n in range(each)]

    def _next_block(self, group: te.Expr) -> list[Stmt]:
        """Lines of its rows, spread over all panels."""
        shape, data = self.shape, self.sums.data
        if not shape.asks_data:
            return []
        assert isinstance(data, te.Load) and isinstance(data.source, Buffer)
        step = (self.panel * shape.tiles + self.tile) * shape.groups + group
        row = {self.row: self.block_start + shape.block, self.run: te.as_index(0)}
        first = te.substitute(data.indices[0], row) + step * (shape.asked_lines * _PER_LINE)
        return [Prefetch(data.source, first + n * _PER_LINE, 2) for n in range(shape.asked_lines)]

    def _pair(self, group: te.Expr, pair: te.Var) -> Stmt:
        """Products of two taps, for all rows of the tile."""
        b1, b2 = (self._weight(group * GROUP + pair + begin) for begin in (0, HALF))
        stmts: list[Stmt] = []
        for row in range(self.shape.rows):
            line = self._line(row, group) + pair
            a1, a2 = (te.Load(self.lines, (line + begin,)) for begin in (0, HALF))
            place = self.lane + row * self.shape.lanes
            total: te.Expr = te.Load(self.accumulator, (place,))
            factors = [(a1, b1), (a2, b2)] if self.shape.is_plain(row) else [(a1 + b2, a2 + b1)]
            for left, right in factors:
                total = te.call("fma", left, right, total)
            stmts.append(nest([(self.lane, Kind.VECTOR)], Store(self.accumulator, place, total)))
        return block(*stmts)

    def _weight(self, tap: te.Expr) -> te.Load:
        shape = self.shape
        place = (self.which_panel * (shape.groups * GROUP) + tap) * shape.lanes + self.lane
        return te.Load(self.packed.load.source, (place,))

    def _finished(self, row: int) -> Stmt:
        """A block that is moved back leaves the rows that the one before it has: in which rows products are computed
        in pairs differs between them, and so do the last bits."""
        shape, product = self.shape, self.sums.product
        column = shape.panels.start_of(self.which_panel) + self.lane
        behind = self._signs - 2 * product.vector.extent
        weight, place = self.packed.load.source, self.tile * shape.rows + row
        total: te.Expr = te.Load(self.accumulator, (self.lane + row * shape.lanes,))
        if not shape.is_plain(row):
            own = te.Load(self.corrections, (place,))
            total = total - (own + te.Load(weight, (column + behind,)))
        size = te.Load(weight, (column + (behind + product.vector.extent),))
        total = total * (te.Load(self.sizes, (place,)) * size)
        values = {self.row: self.block_start + self.row_tiles.start() + row, product.vector: column}
        result = product.reduction.result
        value = te.rewrite(
            self.sums.value,
            lambda node: total if isinstance(node, te.Load) and node.source == result else None,
        )
        store = Store(
            self.formula.output, te.substitute(self.sums.store, values), te.substitute(value, values)
        )
        stored = nest([(self.lane, Kind.VECTOR)], store)
        if self.row.extent % shape.block == 0:
            return stored
        return If(te.call("le", self.block * shape.block, values[self.row]), stored)

    # -- all of it ------------------------------------------------------------------------------------------------

    def program(self, config: Config) -> Program:
        tiles = nest([(self.panel, Kind.SERIAL), (self.tile, Kind.SERIAL)], self._register_tile())
        loops = [axis for axis in (self.chunk, self.block) if axis.extent > 1]
        parallel = te.Var("p", extent_of(loops))
        body = with_values(with_values(block(self._scale_rows(), tiles), {}), places_of(parallel, loops))
        original, formula = self.packed.original, self.formula
        inputs = [self.packed.buffer if b == original else b for b in formula.inputs]
        packings = tuple(self.packed.packing if b == original else None for b in formula.inputs)
        return Program(
            formula.name,
            (*inputs, formula.output),
            nest([(parallel, Kind.PARALLEL)], body),
            str(config),
            packings,
        )
