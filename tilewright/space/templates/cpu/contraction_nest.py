"""The loop nest of a matmul or direct convolution: one config of `contraction.py`, whose docstring shows the
loops."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from tilewright import te
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
)
from tilewright.loops.tiling import (
    PackedOperand,
    Tiles,
    blocks_of,
    extent_of,
    indices_in,
    indices_of,
    pack_operand,
    power_of_two_below,
    row_major,
    whole,
    with_values,
)
from tilewright.space.space import Config
from tilewright.space.templates.cpu.contraction_tail import tail
from tilewright.space.templates.cpu.gemm import (
    StagedOperand,
    run_of,
)
from tilewright.support.arith import ceil_div
from tilewright.te.index import simplify

if TYPE_CHECKING:
    from tilewright.space.templates.cpu.contraction import AppliedContraction
    from tilewright.space.templates.cpu.contraction_terms import ContractionTiling

_CHAIN = 256  # maximum products summed in one chain


class ContractionNest:
    """The loop nest of one config. Methods without a leading underscore are for templates that reuse a part of it."""

    def __init__(self, applied: AppliedContraction, shape: ContractionTiling, name: str = "") -> None:
        """`name` is appended to the names of its own buffers, for a program with several nests."""
        self.name = name
        self.shape, self.gemm, self.dims = shape, applied.gemm, applied.dims
        self.line_bytes = applied.machine.line_bytes
        self.partial_size = applied.partial_size(shape)
        self.staged_extents = applied.staged_extents(shape) if shape.staged else ()
        self.lanes = self.staging_lanes = applied.lanes
        gemm, formula = self.gemm, applied.gemm.formula

        self.chunk = te.Var("chunk", shape.chunks)
        self.block = te.Var("block", shape.blocks)
        self.panel = te.Var("panel", shape.per_chunk)
        self.row, self.vec, self.lane = (
            te.Var("r", shape.rows),
            te.Var("u", shape.vectors),
            te.Var("v", self.lanes),
        )
        self.k_axes = gemm.k_axes
        self.k_block_loops: list[te.Var] = []  # loops over K blocks of equal length
        self.rest = 0  # steps of K in one more, shorter K block
        if shape.k_block:
            cut = self.k_axes[gemm.cut]
            self.k_block_loops = [*self.k_axes[: gemm.cut], te.Var("k_block", cut.extent // shape.k_block)]
            self.rest = cut.extent % shape.k_block
        self.in_tile = [(self.row, Kind.UNROLL), (self.vec, Kind.UNROLL), (self.lane, Kind.VECTOR)]
        self.width = shape.vectors * self.lanes
        self.element = self.row * self.width + self.vec * self.lanes + self.lane
        # The last columns of a narrower panel; the columns before them are also in the previous panel.
        self.column = self.vec * self.lanes + self.lane + (shape.panels.size - self.width)

        self.straddling = applied.result_pitch % self.line_bytes != 0
        # If the result is larger than L2, its lines come from far away before they are written.
        self.prefetches_ahead = (
            formula.output.size * formula.output.dtype.bytes > applied.machine.caches.l2_per_core
        )
        self.vectors_separate = applied.vectors_separate
        # The panel's index: chunks of panels, where the last chunk overlaps the one before it.
        first = Tiles(te.Var("panels", shape.panels.count), shape.per_chunk).start_of(self.chunk)
        self.which_panel = first + self.panel
        self.values: dict[te.Var, te.Expr] = {
            gemm.vector: shape.panels.start_of(self.which_panel) + self.column
        }
        self.vectors = Tiles(gemm.vector, self.lanes)
        all_vectors = te.Var("vectors", self.vectors.count)
        self.which_vector = Tiles(all_vectors, shape.vectors).start_of(self.which_panel) + self.vec
        self.tail, self.registers = applied.tail, applied.machine.vector_registers
        self.overlapping = not self.tail and shape.panels.axis != gemm.vector
        if self.vectors_separate or self.overlapping:
            self.values[gemm.vector] = self.vectors.start_of(self.which_vector) + self.lane
        self.values |= gemm.parts(self._number(all_vectors), self.lane)
        self.row_loops: list[te.Var] = []
        self.block_start: te.Expr = te.as_index(0)
        self._position_rows()
        self.accumulator = Buffer(
            f"acc{shape.vectors}{name}", gemm.reduction.result.dtype, shape.rows * self.width, Scope.REGISTER
        )
        self.packed = self._packed_weight()
        self.copy = self._copied_panel() if shape.copied else None
        self.formula = formula
        self.last = ContractionNest(applied, shape.last, name) if shape.last is not None else None
        if self.last is not None:
            self.last.partial_size = self.partial_size

    def _number(self, all_vectors: te.Var) -> te.Expr:
        """The index of the vector along the vector axis, if all vectors are whole."""
        if self.vectors_separate:
            return self.which_vector
        size = self.shape.panels.size // self.lanes
        first = Tiles(all_vectors, size).start_of(self.which_panel)
        return first + self.vec + (size - self.shape.vectors)

    def _position_rows(self) -> None:
        """The loops over register tiles in a block, and the row axes' values in them."""
        rows, shape = self.gemm.rows, self.shape
        if not rows:
            return
        blocks = Tiles(rows[0], shape.block)
        self.block_start = blocks.start_of(self.block) if shape.blocks > 1 else te.as_index(0)
        if len(rows) == 1:
            in_block = te.Var("row", shape.block)
            tiles = Tiles(in_block, shape.rows)
            self.row_loops = [tiles.var]
            self.values[rows[0]] = self.block_start + tiles.start() + self.row
            return
        in_block = te.Var(rows[0].name + "_b", shape.block)
        tiles = Tiles(rows[-1], shape.rows)
        self.row_loops = [in_block, *rows[1:-1], tiles.var]
        self.values[rows[0]] = self.block_start + in_block
        self.values[rows[-1]] = tiles.start() + self.row

    def _packed_weight(self) -> PackedOperand | None:
        gemm, panels = self.gemm, self.shape.panels
        load = gemm.weight_load
        if not gemm.constant_weight:
            return None
        readers = [x for e in gemm.formula.expressions() for x in te.loads(e) if x.source == load.source]
        if len(readers) > 1:
            return None
        moving = te.variables(load.indices[0])
        outer = [whole(axis) for axis in gemm.shared if axis in moving]
        k_axes = [whole(axis) for axis in self.k_axes if axis in moving]
        if self.overlapping and not self.vectors_separate:
            vectors = blocks_of(self.vectors, self.vec), indices_in(self.vectors, self.lane)
            return pack_operand(load, [*outer, *k_axes, *vectors])
        if self.vectors_separate:
            first, last = blocks_of(self.vectors, self.which_vector), indices_in(self.vectors, self.lane)
        else:
            first, last = blocks_of(panels, self.which_panel), indices_in(panels, self.column)
        shortened = {panels.axis: gemm.vector} if self.tail else {}
        return pack_operand(load, [*outer, first, *k_axes, last], shortened=shortened)

    def _copied_panel(self) -> Buffer:
        size = self.shape.panels.size * self.gemm.length
        return Buffer("panel" + self.name, self.gemm.weight.dtype, size, Scope.SCRATCH)

    def program(self, config: Config) -> Program:
        return self.program_of(self._parallel(self.body()), config)

    def body(self) -> Stmt:
        """The loops inside the parallel one."""
        stmts: list[Stmt] = []
        staged = self._stage() if self.shape.staged else None
        if staged is not None:
            stmts.append(self._fill(staged, self.gemm.data))
        tiles = self.register_tiles(staged)
        if self.last is not None:
            is_last = te.call("eq", self.which_panel, te.as_index(self.shape.panels.count - 1))
            tiles = If(is_last, self.last.register_tiles(staged), tiles)
        panel = block(*self.before_tiles(), tiles, *self.after_tiles())
        stmts.append(nest([(self.panel, Kind.SERIAL)], panel))
        if self.tail:
            last_chunk = te.call("eq", self.chunk, te.as_index(self.shape.chunks - 1))
            columns = tail(self, self.tail, self.registers)
            stmts.append(If(last_chunk, columns) if self.shape.chunks > 1 else columns)
        return with_values(block(*stmts), {})

    def program_of(self, body: Stmt, config: Config) -> Program:
        """The program with the loops `body`, which reads the weight in its packed order."""
        formula = self.formula
        inputs = [
            self.packed.buffer if self.packed is not None and b == self.packed.original else b
            for b in formula.inputs
        ]
        packings = tuple(
            self.packed.packing if self.packed is not None and b == self.packed.original else None
            for b in formula.inputs
        )
        return Program(formula.name, (*inputs, formula.output), body, str(config), packings)

    def register_tiles(self, staged: StagedOperand | None) -> Stmt:
        """All register tiles of a panel in a block."""
        data, rows = self.gemm.data, [(loop, Kind.SERIAL) for loop in self.row_loops]
        if staged is not None:
            data = te.Load(staged.buffer, (self._position_in(staged),))
        k_blocks = [(loop, Kind.SERIAL) for loop in self.k_block_loops]
        stmts = [nest([*k_blocks, *rows], self._register_tile(data, self.weight_element(), short=False))]
        if self.rest:
            stmts.append(nest(rows, self._register_tile(data, self.weight_element(), short=True)))
        return block(*stmts)

    def weight_element(self) -> te.Expr:
        """The weight's element for the current step of K, vector and lane."""
        packed, load = self.packed, self.gemm.weight_load
        if self.copy is not None:
            return te.Load(self.copy, (row_major(self.k_axes) * self.shape.panels.size + self.column,))
        if packed is None:
            return self.gemm.weight
        return te.rewrite(self.gemm.weight, lambda node: packed.load if node == load else None)

    def before_tiles(self) -> list[Stmt]:
        """Statements that run once per panel."""
        if self.copy is None:
            return []
        position = row_major(self.k_axes) * self.shape.panels.size + self.column
        moved = Store(self.copy, position, te.substitute(self.gemm.weight, self.values))
        k_axes = [(axis, Kind.SERIAL) for axis in self.k_axes]
        return [nest([*k_axes, (self.vec, Kind.UNROLL), (self.lane, Kind.VECTOR)], moved)]

    def after_tiles(self) -> list[Stmt]:
        return []

    def _parallel(self, body: Stmt) -> Stmt:
        loops = [axis for axis in (*self.gemm.shared, self.chunk, self.block) if axis.extent > 1]
        parallel = te.Var("p", extent_of(loops))
        return nest([(parallel, Kind.PARALLEL)], with_values(body, indices_of(parallel, loops)))

    # -- staging ----------------------------------------------------------------------------------------------------

    def _stage(self) -> StagedOperand:
        assert self.dims is not None
        size = math.prod(self.staged_extents)
        buffer = Buffer("staged" + self.name, self.gemm.data.dtype, size, Scope.SCRATCH)
        return StagedOperand(buffer, self.dims, self.staged_extents)

    def _position_in(self, staged: StagedOperand) -> te.Expr:
        """The index of the element for the current row and step of K in the staged block."""
        return staged.offset(self._positions_in_block())

    def _positions_in_block(self) -> list[te.Expr]:
        """The current row and step of K as coordinates of the staged block."""
        assert self.dims is not None
        positions: list[te.Expr] = []
        for dim in self.dims:
            axis: te.Expr | None = None
            if dim.axis is not None:
                axis = self.values.get(dim.axis, dim.axis)
                if dim.axis == self.gemm.rows[0]:
                    axis = axis - self.block_start
            positions.append(dim.of(axis, dim.tap))
        return positions

    def _fill(self, staged: StagedOperand, data: te.Expr) -> Stmt:
        """Fill the block's data, dimension by dimension; trailing dimensions that are contiguous in memory are copied
        as one run."""
        positions = [te.Var(f"s{n}", extent) for n, extent in enumerate(staged.extents)]
        value = self._at_positions(data, staged, positions)
        if not positions:  # one element that every result reads
            return Store(staged.buffer, te.as_index(0), self._as_staged(value))
        run = run_of(value, positions)
        if run is None:
            return self._fill_vectors(staged, positions, value)
        outer, inner = positions[: run.first], extent_of(positions[run.first + 1 :])
        begin, end = run.begin * inner, run.end * inner
        start = staged.offset([*outer, *[te.as_index(0)] * (len(positions) - run.first)])
        source = te.substitute(run.load.indices[0], dict.fromkeys(positions[run.first :], te.as_index(0)))
        load = te.Load(run.load.source, (source,))

        def border(low: int, high: int) -> list[Stmt]:
            outside = self._as_staged(run.border)
            return self._along(low, high, lambda at: Store(staged.buffer, start + at, outside))

        def copied(at: te.Expr) -> Store:
            element = run.copied(te.Load(load.source, (source + at,)))
            return Store(staged.buffer, start + at, self._as_staged(element))

        whole_row = staged.extents[run.first] * inner
        filled = block(*border(0, begin), *self._along(begin, end, copied), *border(end, whole_row))
        if run.outer_guard is not None:
            filled = If(run.outer_guard, filled, block(*border(0, whole_row)))
        return nest([(var, Kind.SERIAL) for var in outer], filled)

    def _at_positions(self, data: te.Expr, staged: StagedOperand, positions: Sequence[te.Var]) -> te.Expr:
        """The data as a formula over indices in the staged block."""
        values: dict[te.Var, te.Expr] = {}
        for dim, position in zip(staged.coordinates, positions, strict=True):
            starts = self.gemm.rows and dim.axis == self.gemm.rows[0]
            values |= dim.at(position + self.block_start * dim.axis_step if starts else position)
        return simplify(te.substitute(data, values))

    def _along(self, low: int, high: int, store: Callable[[te.Expr], Store]) -> list[Stmt]:
        """Run `store` for every index in [low, high), in vectors."""
        if high <= low:
            return []
        lanes = min(self.staging_lanes, power_of_two_below(high - low))
        tiles, lane = Tiles(te.Var(f"a{low}", high - low), lanes), te.Var("sv", lanes)
        at = store(tiles.start() + lane + low)
        return [nest([(tiles.var, Kind.SERIAL), (lane, Kind.VECTOR)], at)]

    def _fill_vectors(self, staged: StagedOperand, positions: list[te.Var], value: te.Expr) -> Stmt:
        """Fill from any formula, in vectors along the last dimension."""
        last = positions[-1]
        lanes = min(self.lanes, power_of_two_below(last.extent))
        tiles, lane = Tiles(last, lanes), te.Var("sv", lanes)
        at = {last: tiles.start() + lane}
        element = self._as_staged(te.substitute(value, at))
        store = Store(staged.buffer, te.substitute(staged.offset(positions), at), element)
        loops = [
            *((var, Kind.SERIAL) for var in positions[:-1]),
            (tiles.var, Kind.SERIAL),
            (lane, Kind.VECTOR),
        ]
        return nest(loops, store)

    def _as_staged(self, value: te.Expr) -> te.Expr:
        """An element of the data in the type of scratch memory."""
        return value

    # -- the register tile ------------------------------------------------------------------------------------------

    def _register_tile(self, data: te.Expr, weight: te.Expr, *, short: bool) -> Stmt:
        """Sum over a block of K: the `short` one at the end, or any other."""
        kept = te.Load(self.accumulator, (self.element,))
        update = self._update(data, weight, kept)
        step = nest(self.in_tile, Store(self.accumulator, self.element, te.substitute(update, self.values)))
        zero = nest(self.in_tile, Store(self.accumulator, self.element, self._first_value()))
        ahead = self._prefetched_ahead()
        if extent_of(self.k_block_loops) == 1 and not self.rest:
            if not self._sums_in_chunks:
                return block(
                    *ahead, zero, self._k_loops(step, short), nest(self.in_tile, self._finished(kept))
                )
            total = te.Load(self.totals, (self.element,))
            begin = nest(self.in_tile, Store(self.totals, self.element, self._first_value()))
            summing = self._k_loops(step, short, before=zero, after=self._added_to(self.totals, self.element))
            return block(*ahead, begin, summing, nest(self.in_tile, self._finished(total)))

        summing = self._k_loops(step, short)
        partial = Buffer("partial" + self.name, self.accumulator.dtype, self.partial_size, Scope.SCRATCH)
        position = row_major(self.row_loops) * self.accumulator.size + self.element
        before = te.Load(partial, (position,))
        resume = nest(self.in_tile, Store(self.accumulator, self.element, before))
        suspend = nest(self.in_tile, Store(partial, position, kept))
        whole: te.Expr = kept
        again = suspend
        if kept.dtype.is_float:  # sums of K blocks are added, not continued: shorter chains round less
            resume, again, whole = zero, self._added_to(partial, position), before + kept
        finish = nest(self.in_tile, self._finished(whole))
        if short:
            return block(*ahead, resume, summing, finish)
        k_block = row_major(self.k_block_loops)
        first = te.call("eq", k_block, te.as_index(0))
        put = suspend if again is suspend else If(first, suspend, again)
        if self.rest:
            return block(zero if resume is zero else If(first, zero, resume), summing, put)
        last = te.call("eq", k_block, te.as_index(extent_of(self.k_block_loops) - 1))
        begin = If(first, zero, block(If(last, block(*ahead)), resume) if ahead else resume)
        return block(begin, summing, If(last, finish, put))

    @property
    def _sums_in_chunks(self) -> bool:
        """Whether a sum is so long that its rounding error comes mostly from large partial sums."""
        return self.accumulator.dtype.is_float and self.gemm.length > _CHAIN

    @cached_property
    def totals(self) -> Buffer:
        """The sums of all chunks so far, for a register tile."""
        return Buffer("totals" + self.name, self.accumulator.dtype, self.accumulator.size, Scope.SCRATCH)

    def _added_to(self, buffer: Buffer, position: te.Expr) -> Stmt:
        total = te.Load(buffer, (position,)) + te.Load(self.accumulator, (self.element,))
        return nest(self.in_tile, Store(buffer, position, total))

    def _prefetched_ahead(self) -> list[Stmt]:
        """Prefetch the lines of a register tile's results, so that they are in L1 when its sums are ready."""
        formula = self.formula
        if not self.prefetches_ahead:
            return []
        position = te.substitute(formula.store, self.values)
        begin, end = (
            Prefetch(formula.output, te.substitute(position, {self.lane: te.as_index(lane)}), 1, written=True)
            for lane in (0, self.lanes - 1)
        )
        prefetched = nest([(self.row, Kind.UNROLL), (self.vec, Kind.UNROLL)], begin)
        if not self.straddling:
            return [prefetched]
        last = with_values(end, {self.vec: te.as_index(self.shape.vectors - 1)})
        return [prefetched, nest([(self.row, Kind.UNROLL)], last)]

    def _finished(self, kept: te.Expr) -> Store:
        """Store a finished sum through the epilogue."""
        value, store = self.result_of(kept), self.formula.store
        return Store(
            self.formula.output, te.substitute(store, self.values), te.substitute(value, self.values)
        )

    def result_of(self, total: te.Expr) -> te.Expr:
        """The value of an element whose sum is `total`."""
        result = self.gemm.reduction.result
        return te.rewrite(
            self.formula.value,
            lambda node: total if isinstance(node, te.Load) and node.source == result else None,
        )

    def _update(self, data: te.Expr, weight: te.Expr, kept: te.Expr) -> te.Expr:
        if kept.dtype.is_float:
            return te.call("fma", data, weight, kept)
        return te.call("add", kept, te.call("mul", data, weight))

    def _first_value(self) -> te.Expr:
        """The initial value of an accumulator."""
        return te.const(0, self.accumulator.dtype)

    def _k_loops(
        self, step: Stmt, short: bool, before: Stmt | None = None, after: Stmt | None = None
    ) -> Stmt:
        """The loops over steps of K, the innermost `unroll` steps unrolled; a prefetch follows each step. `before`
        and `after` enclose each chunk of steps that is summed separately."""
        unroll, k_axes = self.shape.unroll, list(self.k_axes)
        if self.shape.prefetch and self.packed is None:
            step = block(step, self._next_panel())
        if self.shape.k_block:
            cut, *inner_k = k_axes[self.gemm.cut :]
            in_k_block = te.Var(cut.name + "_i", self.rest if short else self.shape.k_block)
            start = (
                te.as_index(cut.extent - self.rest) if short else self.k_block_loops[-1] * self.shape.k_block
            )
            step = with_values(step, {cut: start + in_k_block})
            k_axes = [in_k_block, *inner_k]
        written: list[te.Var] = []
        while len(k_axes) > 1 and k_axes[-1].extent <= unroll:
            written.insert(0, k_axes[-1])
            unroll //= k_axes.pop().extent
        last, outer = k_axes[-1], k_axes[:-1]
        unroll = max(1, min(unroll, last.extent))
        counter, copy = te.Var(last.name + "_u", last.extent // unroll), te.Var(last.name + "_c", unroll)
        inner = nest([(axis, Kind.UNROLL) for axis in written], step)
        main = nest([(copy, Kind.UNROLL)], with_values(inner, {last: counter * unroll + copy}))
        if self.shape.prefetch and self.packed is not None:
            main = block(main, *self._prefetches([*outer, counter], short))
        tail: list[Stmt] = []
        rest = last.extent - counter.extent * unroll
        if rest:
            left = te.Var(last.name + "_r", rest)
            tail = [nest([(left, Kind.UNROLL)], with_values(inner, {last: left + counter.extent * unroll}))]
        if before is None or after is None:
            loop = For(counter, Kind.SERIAL, main)
            whole = loop if counter.extent > 1 else with_values(main, {counter: te.as_index(0)})
            return nest([(axis, Kind.SERIAL) for axis in outer], block(whole, *tail))
        # A chunk contains as many of the outer loops as fit; a loop that is too long is split.
        inside, count = len(outer), last.extent * extent_of(written)
        while inside and count * outer[inside - 1].extent <= _CHAIN:
            inside -= 1
            count *= outer[inside].extent
        each = _chunk(counter.extent, max(1, _CHAIN // (unroll * extent_of(written))))
        chunk, within = te.Var(counter.name + "_k", counter.extent // each), te.Var(counter.name + "_w", each)
        done = chunk.extent * each
        if done < counter.extent:  # the remaining steps form the last chunk, with the tail
            some = te.Var(counter.name + "_l", counter.extent - done)
            tail = [For(some, Kind.SERIAL, with_values(main, {counter: some + done})), *tail]
        steps = For(within, Kind.SERIAL, with_values(main, {counter: chunk * each + within}))
        if chunk.extent == 1:
            whole = with_values(block(steps, *tail), {chunk: te.as_index(0)})
            stmts = [before, nest([(axis, Kind.SERIAL) for axis in outer[inside:]], whole), after]
        else:
            stmts = [For(chunk, Kind.SERIAL, block(before, steps, after))]
            stmts += [before, *tail, after] if tail else []
        return nest([(axis, Kind.SERIAL) for axis in outer[:inside]], block(*stmts))

    def _next_panel(self) -> Stmt:
        """Prefetch a line of the next panel in the unpacked weight, at the current step of K: each register tile
        prefetches another."""
        load, vector = self.gemm.weight_load, self.gemm.vector
        assert isinstance(load.source, Buffer)
        line = te.call("min", row_major(self.row_loops), te.as_index(self.shape.vectors - 1))
        first = self.shape.panels.start_of(self.which_panel) + self.shape.panels.size
        position = te.substitute(load.indices[0], {**self.values, vector: first + line * self.lanes})
        return Prefetch(load.source, position, self.shape.prefetch)

    def _prefetches(self, k_loops: list[te.Var], short: bool) -> list[Stmt]:
        """Prefetch the lines that follow this K block of the panel, spread evenly over its register tiles."""
        assert self.packed is not None
        weight = self.packed.load.source
        assert isinstance(weight, Buffer)
        size = weight.dtype.bytes
        k_size = self.shape.k_block * self.gemm.inner_k or self.gemm.length
        k_block_size = self.shape.panels.size * k_size
        panel_size = self.shape.panels.size * self.gemm.length
        loops = [*self.row_loops, *k_loops]
        lines = ceil_div(k_block_size * size, self.line_bytes)
        each = ceil_div(lines, extent_of(loops))
        after = te.as_index(panel_size) if short else (row_major(self.k_block_loops) + 1) * k_block_size
        following = self.which_panel * panel_size + after
        in_line = self.line_bytes // size
        first = following + row_major(loops) * (each * self.line_bytes // size)
        return [Prefetch(weight, first + n * in_line, self.shape.prefetch) for n in range(each)]


def _chunk(steps: int, most: int) -> int:
    """The number of steps summed at a time: a divisor of the total near `most`, if there is one."""
    if steps <= most:
        return steps
    least = max(1, most // 2)
    return next((count for count in range(most, least, -1) if steps % count == 0), most)
