"""The loop nest of one config of `paired.py`, which draws its picture."""

from __future__ import annotations

from collections.abc import Sequence
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
    indices_in,
    indices_of,
    pack_operand,
    row_major,
    whole,
    with_values,
)
from tilewright.runtime.paired import CHUNK, GROUP, HALF, LARGEST_SIZE, PairedWeights
from tilewright.space.space import Config
from tilewright.space.templates.cpu.fast_algebra.row_gemm import RowGemm
from tilewright.support.arith import ceil_div
from tilewright.support.frozen import quickly_made

# Mean squares of rows that are scaled. Others run the plain loop, those with NaN and infinity too.
_MIN_SQUARE, _MAX_SQUARE = 4.0**-LARGEST_SIZE, 4.0**LARGEST_SIZE
_NEVER, _ALWAYS = -1.0, 2.0  # ratios of a row: no column's demand is met, or every one's
_CORRECTION, _SIZE, _RATIO = range(3)  # of columns, as they are stored after the weight
_SQUARES = 4  # vectors that squares are summed in at a time


@quickly_made
@dataclass(frozen=True)
class PairedTiling:
    """The numbers that follow from a config. If there are many configs, they are arrays."""

    rows: int
    lanes: int
    panels: Tiles  # of the columns, each as wide as a vector
    per_chunk: int  # panels in a chunk
    chunks: int
    block: int  # rows
    blocks: int
    groups: int  # of steps of K, the last one filled up with zeros
    last_pairs: int  # of the last group, those that are not zeros alone
    prefetch: int  # level of the cache where the next panel is prefetched; 0: it is not
    line: int  # elements of a cache line
    streamed: bool  # whether rows come from beyond L2, one after the other
    certified: bool  # whether tiles run in pairs only where their error is bounded for each element

    @property
    def tiles(self) -> int:
        """Register tiles of a block."""
        return ceil_div(self.block, self.rows)

    @property
    def pairs(self) -> int:
        return (self.groups - 1) * HALF + self.last_pairs

    @property
    def prefetches_data(self) -> bool:
        """Whether the next block's rows are prefetched: there are about as many lines as steps to ask for one."""
        return self.streamed and self.blocks > 1 and self.per_chunk * self.line <= 2 * self.rows * GROUP

    @property
    def prefetched_lines(self) -> int:
        """The lines of the next block that are prefetched while a register tile computes a group of K."""
        return ceil_div(self.rows * GROUP, self.per_chunk * self.line)

    @property
    def whole_groups(self) -> int:
        """Without the last one, where that holds pairs of zeros."""
        return self.groups - (self.last_pairs < HALF)

    @property
    def chunk(self) -> int:
        """Groups that are summed in registers before they are added to the totals: most of the rounding error of a
        long sum is that of its large partial sums."""
        most = CHUNK // HALF
        dividing = [count for count in range(most, most // 2, -1) if self.whole_groups % count == 0]
        return min(self.whole_groups, dividing[0] if dividing else most)

    @property
    def plain_rows(self) -> int:
        """The number of rows of a register tile that are summed product by product (`is_plain`)."""
        return self.rows // 3 + (self.rows % 3 == 2)

    def is_plain(self, row: int) -> bool:
        """A third of them: so additions and FMAs take equally long."""
        return row % 3 == 2 or (self.rows % 3 == 2 and row == self.rows - 1)

    @property
    def scratch_bytes(self) -> int:
        return (
            self.tiles * self.rows * (self.groups * GROUP + 2) * DType.F32.bytes
            + (self.rows * (self.lanes + 3) + self.tiles) * DType.F32.bytes
        )


def packed_weight(sums: RowGemm, panels: Tiles, panel: te.Expr, lane: te.Var) -> PackedOperand | None:
    """The weight in panels of whole groups of K; None where it cannot be stored so."""
    load, run = sums.gemm.weight_load, sums.run
    expressions = sums.gemm.formula.expressions()
    readers = [x for e in expressions for x in te.loads(e) if x.source == load.source]
    if len(readers) > 1:
        return None
    groups = Tiles(run, GROUP)
    walk = [
        blocks_of(panels, panel),
        *map(whole, sums.outer),
        blocks_of(groups, run // GROUP),
        indices_in(groups, run % GROUP),
        indices_in(panels, lane),
    ]
    packed = pack_operand(load, walk, zero_filled=[run])
    if packed is None:
        return None
    return packed.transformed(PairedWeights(tuple(map(packed.axes.index, sums.gemm.k_axes))))


class PairedNest:
    def __init__(self, sums: RowGemm, shape: PairedTiling) -> None:
        self.sums, self.shape, self.formula = sums, shape, sums.gemm.formula
        self.row, self.run = sums.row, sums.run
        self.outer = [(k, Kind.SERIAL) for k in sums.outer]
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
        """The block's rows, scaled: of a register tile and a group of K row by row."""
        size = self.shape.tiles * self.shape.groups * self.shape.rows * GROUP
        return Buffer("lines", DType.F32, size, Scope.SCRATCH)

    @cached_property
    def corrections(self) -> Buffer:
        return self._of_rows("corrections")

    @cached_property
    def sizes(self) -> Buffer:
        return self._of_rows("sizes")

    @cached_property
    def squares(self) -> Buffer:
        """The mean squares of a register tile's rows."""
        return self._of_a_tile("mean_squares")

    @cached_property
    def absolutes(self) -> Buffer:
        """The mean absolute values of a register tile's rows."""
        return self._of_a_tile("mean_absolutes")

    @cached_property
    def inverses(self) -> Buffer:
        """The inverses of the sizes of a register tile's rows."""
        return self._of_a_tile("inverses")

    @cached_property
    def ratios(self) -> Buffer:
        """The least |a|_1 / (sqrt(K) |a|_2) among the rows of each register tile."""
        return Buffer("ratios", DType.F32, self.shape.tiles, Scope.SCRATCH)

    @cached_property
    def demanded(self) -> Buffer:
        """The largest ratio that a column of the current panel demands of rows multiplied in pairs."""
        return Buffer("demanded", DType.F32, 1, Scope.REGISTER)

    @cached_property
    def totals(self) -> Buffer:
        """The sums of all chunks of a register tile so far."""
        return Buffer("totals", DType.F32, self.shape.rows * self.shape.lanes, Scope.SCRATCH)

    def _of_columns(self, number: int) -> te.Load:
        """The data after the weight for the current panel's columns: corrections, sizes, ratios."""
        column = self.shape.panels.start_of(self.which_panel) + self.lane
        begin = self._after + number * self.sums.gemm.vector.extent
        return te.Load(self.packed.load.source, (column + begin,))

    @property
    def _after(self) -> int:
        """The offset of the data after the weight."""
        packing = self.packed.packing
        return packing.begin_of(packing.transforms[-1])

    @property
    def _signs(self) -> int:
        """The offset of the pairs' signs, after all data for columns."""
        return self._after + 3 * self.sums.gemm.vector.extent

    def _of_a_tile(self, name: str) -> Buffer:
        return Buffer(name, DType.F32, self.shape.rows, Scope.SCRATCH)

    def _of_rows(self, name: str) -> Buffer:
        return Buffer(name, DType.F32, self.shape.tiles * self.shape.rows, Scope.SCRATCH)

    @cached_property
    def accumulator(self) -> Buffer:
        return Buffer("acc", DType.F32, self.shape.rows * self.shape.lanes, Scope.REGISTER)

    def _line(self, row: te.Expr | int, group: te.Expr | int) -> te.Expr:
        """The start of the line of a row of the current register tile."""
        return ((self.tile * self.shape.groups + group) * self.shape.rows + row) * GROUP

    # -- the block's rows -----------------------------------------------------------------------------------------

    def _scale_rows(self) -> Stmt:
        """A register tile's rows are measured, one after the other; then all their sizes are found at once, in vectors;
        then they are scaled. Row by row, each would wait for a square root and a division."""
        row = te.Var("sr", self.shape.rows)
        position = self.tile * self.shape.rows + row
        data = te.substitute(self.sums.data, {self.row: self.block_start + self.row_tiles.start() + row})
        inverse = te.Load(self.inverses, (row,))
        return nest(
            [(self.tile, Kind.SERIAL)],
            block(
                For(row, Kind.SERIAL, block(*self._measured(data, row))),
                *self._sizes_found(row, position),
                For(row, Kind.SERIAL, block(*self._scaled(data, row, position, inverse))),
            ),
        )

    def _at(self, data: te.Expr, k: te.Expr, *, whole: bool) -> te.Expr:
        value = te.substitute(data, {self.run: k})
        if whole:
            return value
        inside = te.call("lt", k, te.as_index(self.run.extent))
        return te.Select(inside, value, te.const(0.0, DType.F32))

    def _measured(self, data: te.Expr, row: te.Var) -> list[Stmt]:
        """The means of its squares and of its absolute values."""
        lanes, zero = self.shape.lanes, te.const(0.0, DType.F32)
        steps = self.run.extent // lanes
        several = min(_SQUARES, steps)
        squares = Buffer("squares", DType.F32, several * lanes, Scope.REGISTER)
        absolutes = Buffer("absolutes", DType.F32, several * lanes, Scope.REGISTER)
        lane, number = te.Var("v", lanes), te.Var("n", several)

        def add(into: te.Expr, first: te.Expr, *, whole: bool = True) -> Stmt:
            value, position = self._at(data, first + lane, whole=whole), into + lane
            square = te.call("fma", value, value, te.Load(squares, (position,)))
            absolute = te.Load(absolutes, (position,)) + te.call("abs", value)
            return block(Store(squares, position, square), Store(absolutes, position, absolute))

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
        begin = [Store(buffer, number * lanes + lane, zero) for buffer in (squares, absolutes)]
        stmts = [nest(each, block(*begin)), nest(self.outer, block(*along))]
        for other in range(1, several):
            stmts += [
                nest(
                    [(lane, Kind.VECTOR)],
                    Store(b, lane, te.Load(b, (lane,)) + te.Load(b, (lane + other * lanes,))),
                )
                for b in (squares, absolutes)
            ]
        share = te.const(1.0 / self.sums.gemm.length, DType.F32)
        return [
            *stmts,
            Store(self.squares, row, Across("sum", squares, 0, lanes) * share),
            Store(self.absolutes, row, Across("sum", absolutes, 0, lanes) * share),
        ]

    def _sizes_found(self, row: te.Var, position: te.Expr) -> list[Stmt]:
        """Store the size of each row of the tile (the power of two at or below the root of its mean square), its
        inverse, and the least ratio of the tile. The values of a row of zeros do not matter: they are multiplied by
        zero."""
        zero, one = (te.const(value, DType.F32) for value in (0.0, 1.0))
        square, absolute = te.Load(self.squares, (row,)), te.Load(self.absolutes, (row,))
        root = te.call("sqrt", square)
        usable = te.call("and", te.call("le", _MIN_SQUARE, square), te.call("le", square, _MAX_SQUARE))
        is_zero = te.call("eq", absolute, zero)
        # Columns are up to 2^24 times what they were: rows of large numbers are made as much smaller, or they overflow.
        unscaled = te.Select(te.call("le", absolute, one), one, te.const(2.0**LARGEST_SIZE, DType.F32))
        size = te.Select(usable, te.call("floor_pow2", root), unscaled)
        stmts = [
            Store(self.sizes, position, te.Select(is_zero, zero, size)),
            Store(self.inverses, row, one / size),
        ]
        if not self.shape.certified:
            return [nest([(row, Kind.VECTOR)], block(*stmts))]
        ratio = te.Select(usable, absolute / root, te.const(_NEVER, DType.F32))
        ratio = te.Select(is_zero, te.const(_ALWAYS, DType.F32), ratio)
        of_rows = Buffer("of_rows", DType.F32, self.shape.rows, Scope.REGISTER)
        return [
            nest([(row, Kind.VECTOR)], block(*stmts, Store(of_rows, row, ratio))),
            Store(self.ratios, self.tile, Across("min", of_rows, 0, self.shape.rows)),
        ]

    def _scaled(self, data: te.Expr, row: te.Var, position: te.Expr, scale: te.Load) -> list[Stmt]:
        """Its lines, the second of each pair with the pair's sign, and what is to be subtracted for it."""
        lane, group = te.Var("v", HALF), te.Var("g", self.run.extent // GROUP)
        first_group = row_major(self.sums.outer) * ceil_div(self.run.extent, GROUP)
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
        return [*stmts, Store(self.corrections, position, Across("sum", pairs, 0, HALF))]

    def _panel_begun(self) -> list[Stmt]:
        """The largest ratio that one of its columns demands."""
        if not self.shape.certified:
            return []
        ratios = Buffer("of_columns", DType.F32, self.shape.lanes, Scope.REGISTER)
        return [
            nest([(self.lane, Kind.VECTOR)], Store(ratios, self.lane, self._of_columns(_RATIO))),
            Store(self.demanded, te.as_index(0), Across("max", ratios, 0, self.shape.lanes)),
        ]

    # -- the register tile ----------------------------------------------------------------------------------------

    def _register_tile(self) -> Stmt:
        """Sums in pairs where the certificate allows it, else product by product; then what is made of the totals."""
        totals = self._summed(in_pairs=True)
        if self.shape.certified:
            first = te.as_index(0)
            least, demanded = te.Load(self.ratios, (self.tile,)), te.Load(self.demanded, (first,))
            totals = If(te.call("le", demanded, least), totals, self._summed(in_pairs=False))
        row = te.Var("r", self.shape.rows)
        return block(totals, nest([(row, Kind.UNROLL)], self._finished(row)))

    def _summed(self, *, in_pairs: bool) -> Stmt:
        """The totals of a register tile: chunks of groups are summed in registers, one after the other."""
        shape = self.shape
        chunk = te.Var("chunk_of_groups", shape.whole_groups // shape.chunk)
        done = chunk.extent * shape.chunk

        def groups(first: te.Expr | int, count: int) -> Stmt:
            group = te.Var("g", count)
            return nest([(group, Kind.SERIAL)], self._group(first + group, HALF, in_pairs))

        tail = [groups(done, shape.whole_groups - done)] if shape.whole_groups > done else []
        if shape.last_pairs < HALF:
            tail.append(self._group(te.as_index(shape.whole_groups), shape.last_pairs, in_pairs))
        stmts = [
            self._begun(in_pairs),
            For(chunk, Kind.SERIAL, self._chunk([groups(chunk * shape.chunk, shape.chunk)])),
        ]
        return block(*stmts, *([self._chunk(tail)] if tail else []))

    def _begun(self, in_pairs: bool) -> Stmt:
        """Totals of nothing: what is to be subtracted, where products are computed in pairs."""
        stmts: list[Stmt] = []
        for row in range(self.shape.rows):
            value: te.Expr = te.const(0.0, DType.F32)
            if in_pairs and not self.shape.is_plain(row):
                own = te.Load(self.corrections, (self.tile * self.shape.rows + row,))
                value = te.call("neg", own + self._of_columns(_CORRECTION))
            stmts.append(
                nest(
                    [(self.lane, Kind.VECTOR)], Store(self.totals, self.lane + row * self.shape.lanes, value)
                )
            )
        return block(*stmts)

    def _chunk(self, groups: Sequence[Stmt]) -> Stmt:
        """Sums of some groups, from zero, added to the totals."""
        row, lanes = te.Var("r", self.shape.rows), self.shape.lanes
        loops = [(row, Kind.UNROLL), (self.lane, Kind.VECTOR)]
        position = row * lanes + self.lane
        total = te.Load(self.totals, (position,)) + te.Load(self.accumulator, (position,))
        return block(
            nest(loops, Store(self.accumulator, position, te.const(0.0, DType.F32))),
            *groups,
            nest(loops, Store(self.totals, position, total)),
        )

    def _group(self, group: te.Expr, pairs: int, in_pairs: bool) -> Stmt:
        pair = te.Var("pair", pairs)
        products = nest([(pair, Kind.UNROLL)], self._pair(group, pair, in_pairs))
        return block(products, *self._next_panel(group), *self._next_block(group))

    def _next_panel(self, group: te.Expr) -> list[Stmt]:
        """Lines of it, spread over the register tiles of this one: after all that reads, so that LLVM finds elements
        to read where they are used."""
        shape, weight = self.shape, self.packed.load.source
        assert isinstance(weight, Buffer)
        if not shape.prefetch:
            return []
        each = ceil_div(GROUP, shape.tiles)
        panel = shape.groups * GROUP * shape.lanes
        first = (self.which_panel + 1) * panel + (self.tile * shape.groups + group) * (each * shape.lanes)
        return [Prefetch(weight, first + n * shape.lanes, shape.prefetch) for n in range(each)]

    def _next_block(self, group: te.Expr) -> list[Stmt]:
        """Lines of its rows, spread over all panels."""
        shape, data = self.shape, self.sums.data
        if not shape.prefetches_data:
            return []
        assert isinstance(data, te.Load) and isinstance(data.source, Buffer)
        step = (self.panel * shape.tiles + self.tile) * shape.groups + group
        row = {self.row: self.block_start + shape.block, self.run: te.as_index(0)}
        first = te.substitute(data.indices[0], row) + step * (shape.prefetched_lines * shape.line)
        return [Prefetch(data.source, first + n * shape.line, 2) for n in range(shape.prefetched_lines)]

    def _pair(self, group: te.Expr, pair: te.Var, in_pairs: bool) -> Stmt:
        """Products of two steps of K, for all rows of the tile."""
        b1, b2 = (self._weight(group * GROUP + pair + begin) for begin in (0, HALF))
        stmts: list[Stmt] = []
        for row in range(self.shape.rows):
            line = self._line(row, group) + pair
            a1, a2 = (te.Load(self.lines, (line + begin,)) for begin in (0, HALF))
            position = self.lane + row * self.shape.lanes
            total: te.Expr = te.Load(self.accumulator, (position,))
            plain = not in_pairs or self.shape.is_plain(row)
            factors = [(a1, b1), (a2, b2)] if plain else [(a1 + b2, a2 + b1)]
            for left, right in factors:
                total = te.call("fma", left, right, total)
            stmts.append(nest([(self.lane, Kind.VECTOR)], Store(self.accumulator, position, total)))
        return block(*stmts)

    def _weight(self, k: te.Expr) -> te.Load:
        shape = self.shape
        position = (self.which_panel * (shape.groups * GROUP) + k) * shape.lanes + self.lane
        return te.Load(self.packed.load.source, (position,))

    def _finished(self, row: te.Expr) -> Stmt:
        """A block that is moved back leaves the rows that the one before it has: in which rows products are computed
        in pairs differs between them, and so do the last bits."""
        shape, gemm = self.shape, self.sums.gemm
        column = shape.panels.start_of(self.which_panel) + self.lane
        total: te.Expr = te.Load(self.totals, (row * shape.lanes + self.lane,))
        size = te.Load(self.sizes, (self.tile * shape.rows + row,)) * self._of_columns(_SIZE)
        total = total * size
        values = {self.row: self.block_start + self.row_tiles.start() + row, gemm.vector: column}
        result = gemm.reduction.result
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
        tiles = nest(
            [(self.panel, Kind.SERIAL)],
            block(*self._panel_begun(), nest([(self.tile, Kind.SERIAL)], self._register_tile())),
        )
        loops = [axis for axis in (self.chunk, self.block) if axis.extent > 1]
        parallel = te.Var("p", extent_of(loops))
        body = with_values(with_values(block(self._scale_rows(), tiles), {}), indices_of(parallel, loops))
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
