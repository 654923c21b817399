"""Cooperative fetching: all threads of a block bring a tile of an operand from memory into scratch memory.

A tile has rows of what lies together in memory: of the summed axes, or, where it is `transposed`, of the others. Rows
below each other should not be in the same banks: either they are a little longer than what they hold, or, `swizzled`,
their chunks of 16 bytes change places, other ones in each of eight rows. Where copies are what a kernel waits for, that
is faster: a row stays within lines of 128 bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from tilewright import te
from tilewright.loops.gpu.thread_index import at_positions, guarded, index_at_positions, positions, under
from tilewright.loops.ir import Buffer, Copy, For, Kind, Scope, Stmt, Store, block, nest
from tilewright.loops.tiling import extent_of
from tilewright.space.sketches.cuda.contraction import Factor
from tilewright.te.index import divisor_of, simplify

_TURNS = 8  # rows that 16 bytes of each are read of at once
_BYTES, _MIN_BYTES = 16, 4  # that one copy moves, at most and at least


@dataclass(frozen=True)
class Summed:
    """What is summed over: the places of `outer`, and for each of them `k`, counted as one, in steps of `size`."""

    k: tuple[te.Var, ...]
    outer: tuple[te.Var, ...]
    size: int

    @property
    def extent(self) -> int:
        return extent_of(self.k)

    @property
    def steps(self) -> int:
        """For each place of `outer`."""
        return -(-self.extent // self.size)

    @property
    def total(self) -> int:
        return self.steps * extent_of(self.outer)


@dataclass(frozen=True)
class TileOperand:
    """A factor as a matrix: of the places of `walked` and those of `k`, each counted as one. `may_turn`: its tiles may
    have rows of either."""

    factor: Factor
    walked: tuple[te.Var, ...]
    k: tuple[te.Var, ...]
    may_turn: bool = True

    @cached_property
    def extent(self) -> int:
        return extent_of(self.walked)

    @cached_property
    def transposed(self) -> bool:
        """Whether rows are of the walked axes: where these lie together in memory, and what is summed does not."""
        along, across = self.factor.stride(self.k[-1]), self.factor.stride(self.walked[-1])
        return self.may_turn and along != 1 and across == 1

    @cached_property
    def is_across(self) -> bool:
        """Whether what lies together in memory lies below each other in a tile: neighbouring threads read it so."""
        return (
            not self.transposed
            and self.factor.stride(self.k[-1]) != 1
            and self.factor.stride(self.walked[-1]) == 1
        )

    @cached_property
    def most_lanes(self) -> int:
        return _BYTES // self.factor.dtype.bytes

    @cached_property
    def lanes(self) -> int:
        """Neighbours that one copy moves."""
        return self.factor.lanes((self.walked if self.transposed else self.k)[-1], self.most_lanes)

    @cached_property
    def is_gathered(self) -> bool:
        """Whether an element takes more than to be copied: its place divisions or conditions, or itself arithmetic."""
        plain = self.factor.guard is None and self.factor.value is None
        return not plain or any(
            self.factor.stride(outer) != self.factor.stride(inner) * inner.extent
            for axes in (self.walked, self.k)
            for outer, inner in pairwise(axes)
        )


@dataclass(frozen=True)
class Fetched:
    """Tiles of an operand: `size` places of its walked axes, by the steps of what is summed."""

    operand: TileOperand
    size: int
    summed: Summed
    stages: int
    name: str
    swizzled: bool = False

    @property
    def factor(self) -> Factor:
        return self.operand.factor

    @property
    def walked(self) -> tuple[te.Var, ...]:
        return self.operand.walked

    @property
    def extent(self) -> int:
        return self.operand.extent

    @property
    def transposed(self) -> bool:
        return self.operand.transposed

    @property
    def lanes(self) -> int:
        return self.operand.lanes

    @property
    def rows(self) -> int:
        return self.summed.size if self.transposed else self.size

    @property
    def columns(self) -> int:
        return self.size if self.transposed else self.summed.size

    @property
    def pitch(self) -> int:
        return self.columns if self.swizzled else self.columns + self.operand.most_lanes

    @property
    def buffer(self) -> Buffer:
        return Buffer(self.name, self.factor.dtype, self.stages * self.rows * self.pitch, Scope.SCRATCH)

    @property
    def bytes(self) -> int:
        return self.stages * self.rows * self.pitch * self.factor.dtype.bytes

    @property
    def is_small(self) -> bool:
        """Whether copies go through registers, since they are of too few bytes."""
        return self.lanes * self.factor.dtype.bytes < _MIN_BYTES

    def copy_count(self, threads: int) -> int:
        """Of a tile, that a thread copies at most."""
        return -(-self.rows * self.columns // (self.lanes * threads))

    def position(
        self, stage: te.Expr, walked: te.Expr, along_k: te.Expr, further: tuple[int, int] = (0, 0)
    ) -> te.Expr:
        """Where the element of a tile is in `buffer`; `further` along both, by numbers whose bits they never have."""
        at = ((walked, further[0]), (along_k, further[1]))
        (row, more_rows), (column, more_columns) = at[::-1] if self.transposed else at
        first = stage * (self.rows * self.pitch) + (row + more_rows) * self.pitch
        if not self.swizzled:
            return first + column + more_columns
        wide = self.operand.most_lanes
        chunk = te.call("xor", column // wide, self._turn(row))
        if more_columns:
            chunk = te.call("xor", chunk, more_columns // wide)
        step = math.gcd(divisor_of(column), wide)  # of the places within a chunk that there are
        return first + chunk * wide + column // step % (wide // step) * step

    def _turn(self, row: te.Expr) -> te.Expr:
        """What the numbers of a row's chunks differ by from their places."""
        chunks = self.columns // self.operand.most_lanes
        if chunks >= _TURNS:
            return row % _TURNS
        return row // (_TURNS // chunks) % chunks

    def copies(
        self,
        thread: te.Var,
        start: te.Expr,
        step: te.Expr,
        stage: te.Expr,
        last: int,
        part: int = 0,
        parts: int = 1,
    ) -> Stmt:
        """A part of the copies of tile `step`, whose walked axes begin at `start`; zeros where there is nothing.
        `last` is the highest value of `step`."""
        every = self.copy_count(thread.extent)
        first, end = every * part // parts, every * (part + 1) // parts
        made = [self._chunk(thread, number, start, step, stage, last) for number in range(first, end)]
        return For(thread, Kind.THREAD, block(*made)) if made else block()

    def _chunk(
        self, thread: te.Var, number: int, start: te.Expr, step: te.Expr, stage: te.Expr, last: int
    ) -> Stmt:
        flat = thread + number * thread.extent
        copy_count = self.rows * self.columns // self.lanes
        if self.operand.is_across:
            walked, along_k = flat % self.size, flat // self.size
        else:
            per_row = self.columns // self.lanes
            row, column = flat // per_row, flat % per_row * self.lanes
            walked, along_k = (column, row) if self.transposed else (row, column)
        at = start + walked
        within = step % self.summed.steps if self.summed.outer else step
        deep = within * self.summed.size + along_k
        conditions = []
        if self.extent % self.size:
            conditions.append(te.call("lt", at, self.extent))
        if self.summed.extent % self.summed.size:
            conditions.append(te.call("lt", deep, self.summed.extent))
        if last >= self.summed.total:
            conditions.append(te.call("lt", step, self.summed.total))
        around = positions(step // self.summed.steps, self.summed.outer)

        def placed(expr: te.Expr) -> te.Expr:
            expr = index_at_positions(index_at_positions(expr, self.walked, at), self.summed.k, deep)
            return simplify(te.substitute(expr, around))

        if self.factor.guard is not None:
            inside = {**positions(at, self.walked), **positions(deep, self.summed.k), **around}
            conditions.append(simplify(te.substitute(self.factor.guard, inside)))
        condition, position = te.all_of(conditions), self.position(stage, walked, along_k)
        brought: Stmt
        if self.factor.value is None:
            source, index = self.factor.buffer, placed(self.factor.load.indices[0])
            brought = Copy(self.buffer, simplify(position), source, index, self.lanes, condition)
        else:
            lane = te.Var("v", self.lanes)
            further = (at + lane, deep) if self.transposed else (at, deep + lane)
            value = at_positions(
                at_positions(self.factor.value, self.walked, further[0]), self.summed.k, further[1]
            )
            value = te.cast(simplify(te.substitute(value, around)), self.factor.dtype)
            if condition is not None:
                value = te.select(condition, value, te.const(0, value.dtype))
            brought = nest([(lane, Kind.VECTOR)], Store(self.buffer, simplify(position + lane), value))
        return under(guarded(flat, copy_count, (number + 1) * thread.extent), brought)
