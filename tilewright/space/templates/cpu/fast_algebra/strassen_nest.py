"""The loop nest of one config of `strassen.py`, which draws its picture."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from tilewright import te
from tilewright.dtypes import DType
from tilewright.hw import CpuMachine
from tilewright.loops.ir import (
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
    set_to,
)
from tilewright.loops.tiling import Tiles, extent_of, indices_of, power_of_two_below, row_major, with_values
from tilewright.space.space import Config
from tilewright.space.templates.cpu.contraction_nest import ContractionNest
from tilewright.space.templates.cpu.contraction_tail import tail
from tilewright.space.templates.cpu.gemm import Gemm
from tilewright.support.arith import ceil_div
from tilewright.te.index import coefficient

Quarter = tuple[int, int]
QUARTERS: tuple[Quarter, ...] = ((0, 0), (0, 1), (1, 0), (1, 1))  # of a matrix, by rows
ALONE: tuple[Quarter, ...] = ((0, 0), (0, 1), (1, 1))  # those of the data that are left operands themselves
PRODUCTS = 7
SUMS = 4  # of quarters of the data
DIFFERENCES = 2  # of quarters of the weight, those that are kept at a time


@dataclass(frozen=True)
class StrassenTiling:
    """The numbers that follow from a config."""

    rows: int
    vectors: int
    lanes: int
    unroll: int
    panels: Tiles  # of the columns
    per_chunk: int  # pairs of panels in a chunk
    chunks: int
    block: int  # rows
    blocks: int
    k_block: int  # steps of K of each half of a K block
    k_blocks: int
    rest: int  # steps of K after the last K block
    prefetch: int  # level of the cache where the weight is prefetched; 0: it is not
    in_line: int  # elements of a cache line

    @property
    def pairs(self) -> int:
        return self.panels.count // 2

    @property
    def single(self) -> bool:
        """Whether the number of panels is odd, so that the last one is computed alone."""
        return self.panels.count % 2 == 1

    @property
    def half(self) -> int:
        """Rows of each half of a block; of an odd number the one in the middle is in both."""
        return ceil_div(self.block, 2)

    @property
    def tiles(self) -> int:
        """Register tiles of a half."""
        return ceil_div(self.half, self.rows)

    @property
    def pitch(self) -> int:
        """Elements from one row of a sum to the next: an odd number of lines, which no cache puts into one place."""
        lines = ceil_div(self.k_block, self.in_line)
        return (lines + 1 - lines % 2) * self.in_line

    @property
    def kept(self) -> bool:
        """Whether results are kept from one K block to the next."""
        return self.k_blocks > 1 or self.rest > 0

    @property
    def lines_of_row(self) -> int:
        """Cache lines in which a row of a K block is: it may begin within one."""
        return ceil_div(2 * self.k_block, self.in_line) + 1

    @property
    def lines(self) -> int:
        """Cache lines in which the rows of a block are, of one K block."""
        return self.block * self.lines_of_row

    @property
    def sums_size(self) -> int:
        return SUMS * self.half * self.pitch

    @property
    def differences_size(self) -> int:
        return DIFFERENCES * self.k_block * self.panels.size

    @property
    def quarter_size(self) -> int:
        """Elements of the register tiles of a quarter of the results of a pair."""
        return self.tiles * self.rows * self.panels.size

    @property
    def single_k(self) -> int:
        """The length of a K block of a panel that has no partner; 0 means all of K."""
        return 2 * self.k_block if self.k_blocks > 1 else 0

    @property
    def scratch_bytes(self) -> int:
        kept = 4 * self.per_chunk * self.quarter_size if self.kept else 0
        single = 2 * self.quarter_size if self.single and self.single_k else 0
        size = self.sums_size + self.differences_size + 2 * self.quarter_size + kept + single
        return size * DType.F32.bytes


@dataclass(frozen=True)
class Factors:
    """One of the seven products: `left` times `right` is added to `begin`, and what is done with it are `ends`. A right
    operand that has a `position` is put there by the first register tile, after what it `copies`, and read there by the
    others."""

    left: te.Expr
    right: te.Expr
    position: te.Load | None
    begin: te.Expr
    ends: tuple[Stmt, ...]
    copies: tuple[Store, ...] = ()


class StrassenNest:
    def __init__(
        self, plain: ContractionNest, shape: StrassenTiling, machine: CpuMachine, row: te.Var | None = None
    ) -> None:
        self.plain, self.shape, self.machine = plain, shape, machine
        self.gemm, self.formula = plain.gemm, plain.formula
        self.row, (self.k,) = row or self.gemm.rows[0], self.gemm.k_axes
        self.chunk, self.block = te.Var("chunk", shape.chunks), te.Var("block", shape.blocks)
        self.pair, self.k_block = te.Var("pair", shape.per_chunk), te.Var("k_block", shape.k_blocks)
        pairs = Tiles(te.Var("pairs", shape.pairs), shape.per_chunk)
        self.which_pair = pairs.start_of(self.chunk) + self.pair
        self.row_tiles = Tiles(te.Var("row", shape.half), shape.rows)
        self.tile = self.row_tiles.var
        self.position = self.tile * plain.accumulator.size + plain.element

    # -- scratch memory -------------------------------------------------------------------------------------------

    @cached_property
    def sums(self) -> Buffer:
        return Buffer("sums", DType.F32, self.shape.sums_size, Scope.SCRATCH)

    @cached_property
    def differences(self) -> Buffer:
        return Buffer("differences", DType.F32, self.shape.differences_size, Scope.SCRATCH)

    @cached_property
    def right(self) -> Buffer:
        return Buffer("right", DType.F32, self.shape.panels.size, Scope.REGISTER)

    def between(self, number: int) -> te.Load:
        """The terms that several results have in common, at the current element of the register tile."""
        buffer = Buffer(f"between{number}", DType.F32, self.shape.quarter_size, Scope.SCRATCH)
        return te.Load(buffer, (self.position,))

    def kept(self, quarter: Quarter) -> te.Load:
        """What the K blocks before have left of a result."""
        size = 4 * self.shape.per_chunk * self.shape.quarter_size
        position = (self.pair * 4 + QUARTERS.index(quarter)) * self.shape.quarter_size + self.position
        return te.Load(Buffer("results", DType.F32, size, Scope.SCRATCH), (position,))

    # -- operands -------------------------------------------------------------------------------------------------

    @cached_property
    def block_start(self) -> te.Expr:
        blocks = Tiles(self.row, self.shape.block)
        return blocks.start_of(self.block) if self.shape.blocks > 1 else te.as_index(0)

    def _first_row(self, row_half: int) -> te.Expr:
        return self.block_start + row_half * (self.shape.block - self.shape.half)

    def _current_row(self, row_half: int) -> te.Expr:
        return self._first_row(row_half) + self.row_tiles.start() + self.plain.row

    def _first_k(self, k_half: int) -> te.Expr:
        return self.k_block * (2 * self.shape.k_block) + k_half * self.shape.k_block

    def _weight(self, panel: int, k: te.Expr) -> te.Expr:
        """The element of a panel of the pair that the current vector and lane read."""
        values = {
            self.plain.chunk: te.as_index(0),
            self.plain.panel: self.which_pair * 2 + panel,
            self.k: k,
        }
        return te.substitute(self.plain.weight_element(), values)

    def _right(self, panel: int, k: te.Expr) -> te.Expr:
        """The same, where a product finds it that is not the first to read it."""
        return self._weight(panel, k)

    def _values(self, quarter: Quarter) -> dict[te.Var, te.Expr]:
        """The formula's axes at the current element of a register tile of the results."""
        row_half, panel = quarter
        column = self.shape.panels.start_of(self.which_pair * 2 + panel) + self.plain.column
        return {self.row: self._current_row(row_half), self.gemm.vector: column}

    def _add_rows(self) -> Stmt:
        """The left operands that are not quarters of the block's data."""
        shape = self.shape
        row = te.Var("sr", shape.half)
        lanes = min(shape.lanes, power_of_two_below(shape.k_block))
        along, lane = Tiles(te.Var("st", shape.k_block), lanes), te.Var("sv", lanes)
        at = along.start() + lane

        def quarter(row_half: int, k_half: int) -> te.Expr:
            position = {self.row: self._first_row(row_half) + row, self.k: self._first_k(k_half) + at}
            return te.substitute(self.gemm.data, position)

        a11, a12, a21, a22 = (quarter(*halves) for halves in QUARTERS)
        lower = a21 + a22
        rest = lower - a11
        stores = [
            Store(self.sums, (row + number * shape.half) * shape.pitch + at, value)
            for number, value in enumerate((rest, a11 - a21, lower, a12 - rest))
        ]
        loops = [(row, Kind.SERIAL), (along.var, Kind.SERIAL), (lane, Kind.VECTOR)]
        return nest(loops, block(*stores))

    def _data(self, row_half: int, k_half: int, k: te.Expr) -> te.Expr:
        """A quarter of the data, at the current row of the register tile."""
        position = {self.row: self._current_row(row_half), self.k: self._first_k(k_half) + k}
        return te.substitute(self.gemm.data, position)

    def _sum(self, number: int, k: te.Expr) -> te.Load:
        row = self.row_tiles.start() + self.plain.row + number * self.shape.half
        return te.Load(self.sums, (row * self.shape.pitch + k,))

    def _difference(self, number: int, k: te.Expr) -> te.Load:
        position = (k + number * self.shape.k_block) * self.shape.panels.size + self.plain.column
        return te.Load(self.differences, (position,))

    # -- the products ---------------------------------------------------------------------------------------------

    def _products(self) -> Stmt:
        """The seven products, for a pair of panels and a block of K."""
        k = te.Var("t", self.shape.k_block)
        return block(*(self._product(number, k, each) for number, each in enumerate(self._factors(k))))

    def _factors(self, k: te.Var) -> tuple[Factors, ...]:
        a11, a12, a22 = (self._data(*halves, k) for halves in ALONE)
        without_upper, upper_to_lower, lower, corner = (self._sum(number, k) for number in range(SUMS))
        b11, b12, b21, b22 = (self._right(panel, self._first_k(k_half) + k) for k_half, panel in QUARTERS)
        rest, difference = (self._difference(number, k) for number in range(DIFFERENCES))
        common, other = self.between(0), self.between(1)
        zero, total = te.const(0.0, DType.F32), te.Load(self.plain.accumulator, (self.plain.element,))
        upper_left, upper_right, lower_left, lower_right = QUARTERS
        return (
            Factors(a11, b11, None, zero, (set_to(common, total),)),
            Factors(a12, b21, None, common, (self._result(upper_left, total),)),
            Factors(without_upper, b22 - b12 + b11, rest, common, (set_to(other, total),)),
            Factors(upper_to_lower, b22 - b12, difference, other, (set_to(common, total),)),
            Factors(a22, b21 - rest, difference, common, (self._result(lower_left, total),)),
            Factors(
                lower,
                b12 - b11,
                difference,
                zero,
                (self._result(lower_right, total + common), set_to(other, total + other)),
            ),
            Factors(corner, b22, None, other, (self._result(upper_right, total),)),
        )

    def _product(self, number: int, k: te.Var, factors: Factors) -> Stmt:
        """One of the seven, of all register tiles."""
        plain, position = self.plain, factors.position
        begin = nest(plain.in_tile, Store(plain.accumulator, plain.element, factors.begin))
        finish = [nest(plain.in_tile, end) if isinstance(end, Store) else end for end in factors.ends]

        def tile(step: Stmt, which: te.Expr) -> Stmt:
            stmts = block(begin, self._summed(number, k, step), *finish)
            return with_values(stmts, {self.tile: which})

        if position is None:
            return nest([(self.tile, Kind.SERIAL)], tile(self._step(factors.left, factors.right), self.tile))
        in_hand = te.Load(self.right, (plain.vec * self.shape.lanes + plain.lane,))
        across = [(plain.vec, Kind.UNROLL), (plain.lane, Kind.VECTOR)]
        put = block(
            *(nest(across, copy) for copy in factors.copies),
            nest(across, set_to(in_hand, factors.right)),
            nest(across, set_to(position, in_hand)),
        )
        first = tile(block(put, self._step(factors.left, in_hand)), te.as_index(0))
        if self.shape.tiles == 1:
            return first
        later = te.Var("later", self.shape.tiles - 1)
        others = tile(self._step(factors.left, position), later + 1)
        return block(first, nest([(later, Kind.SERIAL)], others))

    def _summed(self, number: int, k: te.Var, step: Stmt) -> Stmt:
        unroll = min(self.shape.unroll, k.extent)
        counter, copy = te.Var("tu", k.extent // unroll), te.Var("tc", unroll)
        main = nest([(copy, Kind.UNROLL)], with_values(step, {k: counter * unroll + copy}))
        main = block(main, *self._prefetches(number, counter))
        stmts: list[Stmt] = [
            For(counter, Kind.SERIAL, main)
            if counter.extent > 1
            else with_values(main, {counter: te.as_index(0)})
        ]
        if left_over := k.extent % unroll:
            last = te.Var("tr", left_over)
            stmts.append(nest([(last, Kind.UNROLL)], with_values(step, {k: last + (k.extent - left_over)})))
        return block(*stmts)

    def _step(self, left: te.Expr, right: te.Expr) -> Stmt:
        plain = self.plain
        total = te.Load(plain.accumulator, (plain.element,))
        return nest(
            plain.in_tile, Store(plain.accumulator, plain.element, te.call("fma", left, right, total))
        )

    def _prefetches(self, number: int, counter: te.Var) -> list[Stmt]:
        """Lines of what comes next, spread over the register tiles of all seven products."""
        loops = [self.tile, counter]
        step = row_major(loops) + number * extent_of(loops)
        steps = PRODUCTS * extent_of(loops)
        return [
            *(self._next_pair(step, steps) if self.shape.prefetch else ()),
            *(self._next_rows(step, steps) if prefetches_data(self.gemm, self.shape, self.machine) else ()),
        ]

    def _next_pair(self, step: te.Expr, steps: int) -> list[Stmt]:
        """Prefetch the next pair of panels, or the same pair's first lines in the next K block."""
        shape, packed = self.shape, self.plain.packed
        assert packed is not None
        weight = packed.load.source
        assert isinstance(weight, Buffer)
        panel = shape.panels.size * self.k.extent
        k_block = 2 * shape.k_block * shape.panels.size
        done = self.k_block * shape.per_chunk + self.pair + 1
        later_chunk = done // (shape.per_chunk * shape.k_blocks) * shape.per_chunk
        pair = self.which_pair - self.pair + done % shape.per_chunk + later_chunk
        first = pair * (2 * panel) + done // shape.per_chunk % shape.k_blocks * k_block
        each = ceil_div(k_block, shape.in_line * steps)
        return [
            Prefetch(weight, first + which * panel + (step * each + n) * shape.in_line, shape.prefetch)
            for which in (0, 1)
            for n in range(each)
        ]

    def _next_rows(self, step: te.Expr, steps: int) -> list[Stmt]:
        """The next K block of the block's rows; of the next block the first one."""
        data = self.gemm.data
        assert isinstance(data, te.Load) and isinstance(data.source, Buffer)
        shape = self.shape
        each = ceil_div(shape.lines, steps * shape.per_chunk)
        done = self.k_block + 1
        first_row = self.block_start + done // shape.k_blocks * shape.block
        first_k = done % shape.k_blocks * (2 * shape.k_block)
        lines = [(self.pair * steps + step) * each + n for n in range(each)]
        positions = [
            {
                self.row: first_row + line // shape.lines_of_row,
                self.k: first_k + line % shape.lines_of_row * shape.in_line,
            }
            for line in lines
        ]
        # Through L1: prefetched in the second alone, much of it came too late on Zen 4.
        return [Prefetch(data.source, te.substitute(data.indices[0], position), 1) for position in positions]

    # -- results --------------------------------------------------------------------------------------------------

    def _result(self, quarter: Quarter, value: te.Expr) -> Stmt:
        """The contribution of this K block to a quarter of the results; the last K block finishes it."""
        shape = self.shape
        if not shape.kept:
            return self._finished(quarter, value)
        before = self.kept(quarter)
        in_tile = self.plain.in_tile
        suspended = nest(in_tile, set_to(before, value))
        if shape.k_blocks == 1:
            return suspended
        total = value + before
        later = nest(in_tile, set_to(before, total))
        if not shape.rest:
            last = te.call("eq", self.k_block, te.as_index(shape.k_blocks - 1))
            later = If(last, self._finished(quarter, total), later)
        return If(te.call("eq", self.k_block, te.as_index(0)), suspended, later)

    def _finished(self, quarter: Quarter, value: te.Expr) -> Stmt:
        """A block that is moved back leaves the rows that the one before it has: pairs of rows differ between them,
        and so do the last bits."""
        plain, values = self.plain, self._values(quarter)
        result = te.substitute(plain.result_of(value), values)
        store = Store(self.formula.output, te.substitute(self.formula.store, values), result)
        if self.row.extent % self.shape.block == 0:
            return nest(plain.in_tile, store)
        own = te.call("le", self.block * self.shape.block, values[self.row])
        in_row = nest(plain.in_tile[1:], store)
        return nest(plain.in_tile[:1], If(own, in_row))

    def _finish_rest(self) -> Stmt:
        """K after the last K block, product by product."""
        shape, plain = self.shape, self.plain
        k = te.Var("t", shape.rest)
        after = k + (self.k.extent - shape.rest)
        total = te.Load(plain.accumulator, (plain.element,))
        stmts: list[Stmt] = []
        for quarter in QUARTERS:
            row_half, panel = quarter
            left = te.substitute(self.gemm.data, {self.row: self._current_row(row_half), self.k: after})
            kept = self.kept(quarter)
            resume = nest(plain.in_tile, Store(plain.accumulator, plain.element, kept))
            step = nest([(k, Kind.UNROLL)], self._step(left, self._weight(panel, after)))
            finish = self._finished(quarter, total)
            stmts.append(nest([(self.tile, Kind.SERIAL)], block(resume, step, finish)))
        return nest([(self.pair, Kind.SERIAL)], block(*stmts))

    # -- all of it ------------------------------------------------------------------------------------------------

    def program(self, config: Config) -> Program:
        shape = self.shape
        pair = nest([(self.pair, Kind.SERIAL)], self._products())
        stmts = [nest([(self.k_block, Kind.SERIAL)], block(self._add_rows(), pair))]
        if shape.rest:
            stmts.append(self._finish_rest())
        last = self._last_columns()
        if last:
            is_last = te.call("eq", self.chunk, te.as_index(shape.chunks - 1))
            stmts.append(If(is_last, block(*last)) if shape.chunks > 1 else block(*last))
        loops = [axis for axis in (self.chunk, self.block) if axis.extent > 1]
        parallel = te.Var("p", extent_of(loops))
        body = with_values(with_values(block(*stmts), {}), indices_of(parallel, loops))
        return self.plain.program_of(nest([(parallel, Kind.PARALLEL)], body), config)

    def _last_columns(self) -> list[Stmt]:
        """A panel without another, and columns that are in none: of the current block, product by product."""
        found: list[Stmt] = []
        if self.shape.single:
            tiles = (self.plain.last or self.plain).register_tiles(None)
            last = {
                self.plain.chunk: te.as_index(0),
                self.plain.panel: te.as_index(self.shape.panels.count - 1),
            }
            found.append(with_values(tiles, last))
        if self.plain.tail:
            found.append(tail(self.plain, self.plain.tail, self.machine.vector_registers))
        return found


def prefetches_data(gemm: Gemm, shape: StrassenTiling, machine: CpuMachine) -> bool:
    """Whether the rows of the next K block lie in runs, come from beyond L2, and are about as many lines as
    the steps in which one can be prefetched."""
    (k,) = gemm.k_axes
    far = extent_of(gemm.rows) * k.extent * DType.F32.bytes > machine.caches.l2_per_core
    steps = shape.per_chunk * PRODUCTS * shape.tiles * (shape.k_block // shape.unroll)
    return shape.blocks * shape.k_blocks > 1 and _in_runs(gemm) and far and 2 * shape.lines >= steps


def _in_runs(gemm: Gemm) -> bool:
    """Whether each row of the data lies in a run."""
    data = gemm.data
    return isinstance(data, te.Load) and coefficient(data.indices[0], gemm.k_axes[-1]) == 1
