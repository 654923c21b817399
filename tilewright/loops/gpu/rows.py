"""Row reductions on a GPU: a group of threads for each row, which stays in their registers.

    for blocks b:                                     (parallel)
      for threads t: row, g = the group's row, the place in the group
        kept[s, :] = x[row, (s * G + g) * lanes ...]  (s unrolled, in lanes)
        acc = combine of kept
      combine acc over the group                      (shuffles, and shared memory beyond a warp)
      ... the next reduction, on what is kept already
      for threads t: out[row, (s * G + g) * lanes ...] = value

Later passes find loaded values in registers, and also expensive intermediate values such as the exponentials of a
softmax. On GPUs with clusters, a long row is divided among the blocks of a cluster: several small blocks on a
multiprocessor overlap loading, computing and writing, while one large block does these in sequence. Longer rows are
processed in chunks and read again in each pass. The last block overlaps the one before it.

Unaligned rows of small elements cannot be accessed as vectors, but all rows of a block together can: they are copied
to shared memory, computed there, and the results copied back. Written per warp, each row would begin and end within a
memory sector, which would then be written twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tilewright import te
from tilewright.dtypes import DType
from tilewright.hw.gpu import WARP, GpuMachine
from tilewright.loops.formula import Formula, Reduction
from tilewright.loops.gpu.thread_index import THREADS, VECTOR_BYTES, positions, under, vector_lanes, walked
from tilewright.loops.ir import Buffer, Combine, For, If, Kind, Program, Scope, Stmt, Store, block, nest
from tilewright.loops.recompute import computable_anywhere
from tilewright.loops.tiling import (
    columns_in_order,
    contiguous_last,
    extent_of,
    load_offsets,
    updated,
    with_results,
    with_values,
)
from tilewright.support.arith import ceil_div, round_up
from tilewright.te.index import coefficient, simplify
from tilewright.te.scalars import EXPENSIVE_CALLS

_KEPT_ELEMENTS = 64  # maximum of a row in the registers of one thread
_CHUNK_VECTORS = 4  # of a longer row, between two loads
_ELEMENTS = 32  # of a row per thread before the row gets more than one warp
_MIN = 32  # minimum elements of a row for a group of threads
_FEW_ELEMENTS = 16  # per thread; below this, rows share a warp and the cost of its instructions
_MIN_TOGETHER = 16  # minimum elements that a group loads at once: at least a memory sector
_TILE_BYTES = 24 << 10  # of shared memory for the rows of a block
_BLOCK_THREADS = 512  # for a row; longer rows are divided among blocks
_CLUSTER_BLOCKS, _CLUSTER_THREADS = 8, 256  # maximum blocks of a cluster; minimum threads of its blocks


def is_rowwise(formula: Formula) -> bool:
    """Whether each reduction runs along contiguous memory and is long enough to share."""
    return all(
        reduction.length >= _MIN
        and any(coefficient(offset, reduction.axes[-1]) == 1 for offset in load_offsets(reduction.body))
        for reduction in contiguous_last(formula).reductions
    ) and not any(_reads_along(formula, axis) for axis in formula.rows)


def _reads_along(formula: Formula, axis: te.Var) -> bool:
    """Whether some reduction reads neighbours along an output axis, as an operand of a matmul does. Loads once per
    row, such as the index of a table lookup, do not count."""
    return any(
        coefficient(offset, axis) == 1
        for reduction in formula.reductions
        for offset in load_offsets(reduction.body)
        if te.variables(offset) & set(reduction.axes)
    )


def rows_program(formula: Formula, machine: GpuMachine) -> Program:
    return RowProgram(contiguous_last(formula), machine).program()


# Receives an element: its value, and its offset in the output.
Visit = Callable[[te.Expr, "te.Expr | None"], Stmt]


@dataclass(frozen=True)
class Spot:
    """A position in a row: a vector and a lane."""

    number: te.Expr
    lane: te.Var

    @property
    def flat(self) -> te.Expr:
        return self.number * self.lane.extent + self.lane

    def positions(self, axes: Sequence[te.Var]) -> dict[te.Var, te.Expr]:
        """The index along each axis; a vector covers only the last one."""
        *outer, inner = axes
        lanes = self.lane.extent
        if inner.extent % lanes:
            return positions(self.flat, axes)
        vectors = te.Var(inner.name, inner.extent // lanes)
        found = positions(self.number, [*outer, vectors])
        return {**{axis: found[axis] for axis in outer}, inner: found[vectors] * lanes + self.lane}


@dataclass(frozen=True)
class RowWalk:
    """One traversal of the row: the axes of a reduction, or the columns of the result."""

    axes: tuple[te.Var, ...]
    lanes: int
    vectors: int  # of the row
    steps: int  # vectors per thread


class RowProgram:
    def __init__(self, formula: Formula, machine: GpuMachine) -> None:
        self.formula = formula
        self.columns = columns_in_order(formula)
        longest = max(r.length for r in formula.reductions)
        lanes = max(vector_lanes(_accesses(r.body), r.axes[-1]) for r in formula.reductions)
        rows = extent_of(formula.rows)
        may_cluster = machine.clusters and all(r.result.dtype.bytes == 4 for r in formula.reductions)
        self.group = self._group(longest, lanes, rows, machine, may_cluster)
        long = may_cluster and self.group > _BLOCK_THREADS and longest > _ELEMENTS * _BLOCK_THREADS
        self.cluster = min(_CLUSTER_BLOCKS, self.group // _CLUSTER_THREADS) if long else 1
        self.threads = max(self.group, min(THREADS, 128 if rows < 4 * machine.sms else THREADS))
        self.rows_per_block = self.threads // self.group
        self.at = te.Var("b", ceil_div(rows, self.rows_per_block))
        self.thread = te.Var("t", self.threads)
        row = self.at * self.rows_per_block + self.thread // self.group
        if self.at.extent * self.rows_per_block > rows:
            row = te.call("min", row, rows - 1)
        self.coord = self.thread % self.group
        self.row_position = positions(row, formula.rows)
        self.tiles = self._tiles(rows, longest, lanes)  # of a block, in shared memory
        self.kept: dict[te.Expr, te.Load] = {}  # values in registers, by the load that they came from
        self.loaded = 0
        self.later: list[tuple[tuple[te.Var, ...], te.Expr]] = []  # the remaining passes
        self.results: dict[Buffer, te.Expr] = {}

    def _group(self, length: int, lanes: int, rows: int, machine: GpuMachine, may_cluster: bool) -> int:
        """Threads per row: a warp; more for long rows or if there are too few rows to fill the GPU; fewer for many
        short rows."""
        vectors = length // lanes
        group = max(min(WARP, _power_of_two_above(vectors)), _power_of_two_above(ceil_div(length, _ELEMENTS)))
        while group < 1_024 and rows * group < machine.sms * machine.threads_sm // 2 and group * 2 <= vectors:
            group *= 2
        while (
            group <= WARP
            and ceil_div(2 * vectors, group) * lanes <= _FEW_ELEMENTS
            and group // 2 * lanes >= _MIN_TOGETHER
            and rows * group // 2 >= machine.sms * machine.threads_sm
        ):
            group //= 2
        most = _BLOCK_THREADS * _CLUSTER_BLOCKS if may_cluster else 1_024
        return max(1, group if group <= most else 1_024)

    # -- rows in shared memory ----------------------------------------------------------------------------------------

    def _tiles(self, rows: int, length: int, lanes: int) -> dict[Buffer, Buffer]:
        """The rows of a block in shared memory, for each buffer of whole rows, including the output; none if rows are
        vectors themselves, or if a block is not a whole number of vectors."""
        formula, mine = self.formula, self.rows_per_block * length
        whole = [buffer for buffer in (*formula.inputs, formula.output) if buffer.size == rows * length]
        if lanes > 1 or rows % self.rows_per_block or formula.output not in whole:
            return {}
        sizes = {buffer.dtype.bytes for buffer in whole}
        if (
            max(sizes) > 2
            or mine * min(sizes) % VECTOR_BYTES
            or sum(mine * size for size in sizes) > _TILE_BYTES
        ):
            return {}
        operands = whole[:-1]
        tiles = {b: Buffer(f"tile_{b.name}", b.dtype, mine, Scope.SCRATCH) for b in operands}
        if not operands or not all(self._is_row_by_row(buffer) for buffer in whole):
            return {}
        direct = (tiles[b] for b in operands if b.dtype is formula.output.dtype and self._is_read_directly(b))
        own = Buffer("tile", formula.output.dtype, mine, Scope.SCRATCH)
        return {**tiles, formula.output: next(direct, own)}

    def _is_read_directly(self, buffer: Buffer) -> bool:
        """Whether an element of the result needs only the same element of this operand, besides reductions: one
        thread reads it, and then writes."""
        formula = self.formula
        return all(
            simplify(load.indices[0] - formula.store) == te.as_index(0)
            for load in te.loads(formula.value)
            if load.source == buffer
        )

    def _is_row_by_row(self, buffer: Buffer) -> bool:
        """Whether a block reads or writes only its own rows of the buffer."""
        formula = self.formula
        if buffer == formula.output:
            return self.at not in te.variables(
                self._in_tile(self._position(self.columns, formula.store), buffer)
            )
        passes = [*((r.axes, r.body) for r in formula.reductions), (self.columns, formula.value)]
        indices = [
            self._position(axes, load.indices[0])
            for axes, expr in passes
            for load in te.loads(expr)
            if load.source == buffer
        ]
        return all(self.at not in te.variables(self._in_tile(index, buffer)) for index in indices)

    def _position(self, axes: Sequence[te.Var], index: te.Expr) -> te.Expr:
        return te.substitute(
            index, {**self.row_position, **positions(te.Var("place", extent_of(axes)), axes)}
        )

    def _in_tile(self, index: te.Expr, buffer: Buffer) -> te.Expr:
        """The index in a block's tile of the element at `index`."""
        mine = buffer.size // self.at.extent
        return simplify(index - self.at * mine)

    def _copies(self, pairs: Sequence[tuple[Buffer, Buffer]], to_tile: bool) -> list[Stmt]:
        """Copy all rows of a block, in vectors."""
        stmts: list[Stmt] = []
        for buffer, tile in pairs:
            lanes = VECTOR_BYTES // buffer.dtype.bytes
            vectors = tile.size // lanes
            step, lane = te.Var("u", ceil_div(vectors, self.threads)), te.Var("v", lanes)
            number = step * self.threads + self.thread
            coord = number * lanes + lane
            outside = self.at * tile.size + coord
            copy = (
                Store(tile, coord, te.Load(buffer, (outside,)))
                if to_tile
                else Store(buffer, outside, te.Load(tile, (coord,)))
            )
            inside = te.call("lt", number, vectors) if vectors % self.threads else None
            stmts.append(nest([(step, Kind.UNROLL)], under(inside, nest([(lane, Kind.VECTOR)], copy))))
        return [For(self.thread, Kind.THREAD, block(*stmts))] if stmts else []

    def program(self) -> Program:
        formula = self.formula
        read = [(buffer, tile) for buffer, tile in self.tiles.items() if buffer != formula.output]
        written = [(buffer, tile) for buffer, tile in self.tiles.items() if buffer == formula.output]
        stmts: list[Stmt] = self._copies(read, to_tile=True)
        self.later = [(r.axes, r.body) for r in formula.reductions] + [(self.columns, formula.value)]
        for reduction in formula.reductions:
            self.later.pop(0)
            stmts += self._reduction(reduction)
        self.later = []
        stmts += [*self._write(), *self._copies(written, to_tile=False)]
        body = with_values(nest([(self.at, Kind.PARALLEL)], block(*stmts)), {})
        words = "rows: " + ", ".join(f"{r.kind} of {r.length}" for r in formula.reductions)
        words += f", {self.group} of {self.threads} threads each"
        if self.tiles:
            words += ", in shared memory"
        if self.cluster > 1:
            words += f" in {self.cluster} blocks"
        params = (*formula.inputs, formula.output)
        return Program(formula.name, params, body, words, cluster=self.cluster)

    # -- one walk along the row -------------------------------------------------------------------------------------

    def _pass(
        self, axes: Sequence[te.Var], expr: te.Expr, store: Sequence[tuple[te.Expr, int]] = ()
    ) -> RowWalk:
        lanes = vector_lanes([*_accesses(expr), *store], axes[-1])
        vectors = extent_of(axes) // lanes
        return RowWalk(tuple(axes), lanes, vectors, ceil_div(vectors, self.group))

    def _reduction(self, reduction: Reduction) -> list[Stmt]:
        walk = self._pass(reduction.axes, reduction.body)
        kept = Buffer(f"acc_{reduction.result.name}", reduction.result.dtype, 1, Scope.REGISTER)
        zero = te.as_index(0)
        accumulator = te.Load(kept, (zero,))

        def visit(body: te.Expr, _: te.Expr | None) -> Stmt:
            return Store(kept, zero, updated(reduction, accumulator, body))

        begin = Store(kept, zero, te.reduce_identity(reduction.kind, kept.dtype))
        walked = For(self.thread, Kind.THREAD, block(begin, self._walked(walk, reduction.body, None, visit)))
        self.results[reduction.result] = accumulator
        return [walked, Combine(reduction.kind, kept, 0, self.group)]

    def _write(self) -> list[Stmt]:
        formula = self.formula
        if not self.columns:
            value = with_results(te.substitute(formula.value, self.row_position), self.results)
            store = Store(formula.output, te.substitute(formula.store, self.row_position), value)
            first: Stmt = store if self.group == 1 else If(te.call("eq", self.coord, 0), store)
            return [For(self.thread, Kind.THREAD, first)]
        store_access = (formula.store, formula.output.dtype.bytes)
        walk = self._pass(self.columns, formula.value, [store_access])

        def visit(value: te.Expr, coord: te.Expr | None) -> Stmt:
            assert coord is not None
            tile = self.tiles.get(formula.output)
            if tile is not None:
                return Store(tile, self._in_tile(coord, formula.output), value)
            return Store(formula.output, coord, value)

        return [For(self.thread, Kind.THREAD, self._walked(walk, formula.value, formula.store, visit))]

    def _walked(self, walk: RowWalk, value: te.Expr, coord: te.Expr | None, visit: Visit) -> Stmt:
        """Call `visit` at each element of the row that this thread has."""
        if walk.steps * walk.lanes <= _KEPT_ELEMENTS:
            return self._chunk(walk, te.as_index(0), walk.steps, value, coord, visit, keep=True)
        return self._in_chunks(walk, value, coord, visit)

    def _in_chunks(self, walk: RowWalk, value: te.Expr, coord: te.Expr | None, visit: Visit) -> Stmt:
        """The same if nothing stays in registers."""
        chunks = te.Var("p", ceil_div(walk.steps, _CHUNK_VECTORS))
        body = self._chunk(walk, chunks * _CHUNK_VECTORS, _CHUNK_VECTORS, value, coord, visit, keep=False)
        return nest([(chunks, Kind.SERIAL)], body)

    def _chunk(
        self,
        walk: RowWalk,
        first: te.Expr,
        steps: int,
        value: te.Expr,
        coord: te.Expr | None,
        visit: Visit,
        *,
        keep: bool,
    ) -> Stmt:
        step, lane = te.Var("s", steps), te.Var("v", walk.lanes)
        element = step * walk.lanes + lane
        number = (first + step) * self.group + self.coord
        spot = Spot(number, lane)
        here = self._here(walk.axes, value, spot)
        inside = self._inside(walk, number, steps, keep)

        fills: list[Stmt] = []
        computed_first: list[Stmt] = []
        registers = dict(self.kept) if keep else {}
        for load in te.unguarded_loads(_replaced(here, registers)):
            if load in registers or not load.indices or not self._moves(load, lane, step):
                continue
            if not isinstance(load.source, Buffer) or load.source.scope is Scope.REGISTER:
                continue
            buffer = self._register(load.dtype, steps * walk.lanes)
            fills.append(nest([(lane, Kind.VECTOR)], Store(buffer, element, load)))
            registers[load] = te.Load(buffer, (element,))
        if keep:
            for expr in self._computed_again(walk, value, spot):
                buffer = self._register(expr.dtype, steps * walk.lanes)
                computed_first.append(Store(buffer, element, _replaced(expr, registers)))
                registers[expr] = te.Load(buffer, (element,))
            self.kept = registers

        loaded = under(inside, block(*fills)) if fills else None
        target = None
        if coord is not None:
            stored = self._located(walk.axes, te.Load(self.formula.output, (coord,)), spot)
            assert isinstance(stored, te.Load)
            target = stored.indices[0]
        kind = Kind.VECTOR if coord is not None else Kind.UNROLL
        visited = block(*computed_first, visit(_replaced(here, registers), target))
        used = under(inside, nest([(lane, kind)], visited))
        stmts = [] if loaded is None else [nest([(step, Kind.UNROLL)], loaded)]
        stmts.append(nest([(step, Kind.UNROLL)], used))
        return block(*stmts)

    def _located(self, axes: Sequence[te.Var], expr: te.Expr, spot: Spot) -> te.Expr:
        """The expression at one position of the row."""
        at = {**self.row_position, **spot.positions(axes)}
        return simplify(te.substitute(walked(expr, axes, spot.flat), at))

    def _here(self, axes: Sequence[te.Var], value: te.Expr, spot: Spot) -> te.Expr:
        """The value at one position of the row, with the results known so far."""
        here = self._located(axes, value, spot)

        def staged(node: te.Expr) -> te.Expr | None:
            if not isinstance(node, te.Load) or not isinstance(node.source, Buffer):
                return None
            tile = self.tiles.get(node.source)
            return None if tile is None else te.Load(tile, (self._in_tile(node.indices[0], node.source),))

        return with_results(te.rewrite(here, staged), self.results)

    def _computed_again(self, walk: RowWalk, value: te.Expr, spot: Spot) -> list[te.Expr]:
        """Expensive subexpressions that a later pass computes again."""
        needed = {
            node for axes, later in self.later if axes for node in te.walk(self._here(axes, later, spot))
        }
        slow = (
            part
            for part in computable_anywhere(value)
            if isinstance(part, te.Call) and part.op in EXPENSIVE_CALLS
        )
        found = dict.fromkeys(self._here(walk.axes, part, spot) for part in slow)
        return [part for part in found if part in needed and part not in self.kept]

    def _register(self, dtype: DType, size: int) -> Buffer:
        self.loaded += 1
        return Buffer(f"kept{self.loaded}", dtype, size, Scope.REGISTER)

    def _inside(self, walk: RowWalk, number: te.Expr, steps: int, keep: bool) -> te.Expr | None:
        most = (steps if keep else round_up(walk.steps, steps)) * self.group
        return te.call("lt", number, walk.vectors) if most > walk.vectors else None

    @staticmethod
    def _moves(load: te.Load, lane: te.Var, step: te.Var) -> bool:
        return bool(te.variables(load.indices[0]) & {lane, step}) and not te.loads(load.indices[0])


def _replaced(expr: te.Expr, registers: Mapping[te.Expr, te.Load]) -> te.Expr:
    """`expr` with values read from registers where possible, the largest subexpressions first."""
    if expr in registers:
        return registers[expr]
    return te.with_children(expr, tuple(_replaced(child, registers) for child in te.children(expr)))


def _accesses(expr: te.Expr) -> list[tuple[te.Expr, int]]:
    return [(load.indices[0], load.dtype.bytes) for load in te.unguarded_loads(expr) if load.indices]


def _power_of_two_above(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
