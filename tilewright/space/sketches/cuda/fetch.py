"""Cooperative fetching: all threads of a block copy a tile of an operand from global to shared memory.

The rows of a tile are contiguous in memory: they run along the reduction axes or, if `transposed`, along the others.
To avoid bank conflicts between rows, either rows are padded, or, if `swizzled`, the 16-byte chunks of each of eight
rows are permuted differently. Swizzling is faster if the kernel waits for copies, because a row stays within 128-byte
lines.
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
from tilewright.space.contraction import Factor
from tilewright.te.index import divisor_of, simplify

_MASKS = 8  # rows of which 16 bytes each are read at once
_BYTES, _MIN_BYTES = 16, 4  # maximum and minimum bytes of a copy


@dataclass(frozen=True)
class Summed:
    """The reduction axes: for each index of `outer`, the fused axis `k` in steps of `size`."""

    k: tuple[te.Var, ...]
    outer: tuple[te.Var, ...]
    size: int

    @property
    def extent(self) -> int:
        return extent_of(self.k)

    @property
    def steps(self) -> int:
        """Steps for each index of `outer`."""
        return -(-self.extent // self.size)

    @property
    def total(self) -> int:
        return self.steps * extent_of(self.outer)


@dataclass(frozen=True)
class TileOperand:
    """A factor as a matrix: the fused `walked` axes by the fused `k` axes. `may_transpose`: its tiles may be
    transposed."""

    factor: Factor
    walked: tuple[te.Var, ...]
    k: tuple[te.Var, ...]
    may_transpose: bool = True

    @cached_property
    def extent(self) -> int:
        return extent_of(self.walked)

    @cached_property
    def transposed(self) -> bool:
        """Whether rows run along the walked axes, because these are contiguous in memory and the reduction axes are
        not."""
        along, across = self.factor.stride(self.k[-1]), self.factor.stride(self.walked[-1])
        return self.may_transpose and along != 1 and across == 1

    @cached_property
    def is_across(self) -> bool:
        """Whether elements that are contiguous in memory are in one column of a tile; neighbouring threads then read
        them."""
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
        """Neighbours moved by one copy."""
        return self.factor.lanes((self.walked if self.transposed else self.k)[-1], self.most_lanes)

    @cached_property
    def is_gathered(self) -> bool:
        """Whether an element needs more than a copy: divisions or conditions for its index, or arithmetic for its
        value."""
        plain = self.factor.guard is None and self.factor.value is None
        return not plain or any(
            self.factor.stride(outer) != self.factor.stride(inner) * inner.extent
            for axes in (self.walked, self.k)
            for outer, inner in pairwise(axes)
        )


@dataclass(frozen=True)
class Fetched:
    """Tiles of an operand: `size` indices of its walked axes, by the steps of the reduction."""

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
        """One tile; the pass `loops/passes/pipeline.py` multiplies it by the stages."""
        return Buffer(self.name, self.factor.dtype, self.rows * self.pitch, Scope.SCRATCH)

    @property
    def bytes(self) -> int:
        """The bytes of all stages."""
        return self.stages * self.rows * self.pitch * self.factor.dtype.bytes

    @property
    def is_small(self) -> bool:
        """Whether copies are so small that they go through registers."""
        return self.lanes * self.factor.dtype.bytes < _MIN_BYTES

    def copy_count(self, threads: int) -> int:
        """The maximum number of copies of a tile per thread."""
        return -(-self.rows * self.columns // (self.lanes * threads))

    def position(
        self, walked: te.Expr, along_k: te.Expr, further: tuple[te.Expr | int, te.Expr | int] = (0, 0)
    ) -> te.Expr:
        """The index of a tile's element in `buffer`; `further` is added along both axes and shares no bits
        with them."""
        at = ((walked, further[0]), (along_k, further[1]))
        (row, more_rows), (column, more_columns) = at[::-1] if self.transposed else at
        first = (row + more_rows) * self.pitch
        if not self.swizzled:
            return first + column + more_columns
        wide = self.operand.most_lanes
        chunk = te.call("xor", column // wide, self._chunk_mask(row))
        chunk = te.call("xor", chunk, te.as_index(more_columns) // wide)
        step = math.gcd(divisor_of(column), wide)  # alignment of indices within a chunk
        return first + chunk * wide + column // step % (wide // step) * step

    def _chunk_mask(self, row: te.Expr) -> te.Expr:
        """The XOR mask between a row's chunk indices and their positions."""
        chunks = self.columns // self.operand.most_lanes
        if chunks >= _MASKS:
            return row % _MASKS
        return row // (_MASKS // chunks) % chunks

    def copies(self, thread: te.Var, start: te.Expr, step: te.Expr) -> Stmt:
        """The copies of tile `step`, whose walked axes begin at `start`; zeros beyond the edge."""
        count = self.copy_count(thread.extent)
        return For(
            thread, Kind.THREAD, block(*(self._chunk(thread, number, start, step) for number in range(count)))
        )

    def _chunk(self, thread: te.Var, number: int, start: te.Expr, step: te.Expr) -> Stmt:
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
        around = positions(step // self.summed.steps, self.summed.outer)

        def placed(expr: te.Expr) -> te.Expr:
            expr = index_at_positions(index_at_positions(expr, self.walked, at), self.summed.k, deep)
            return simplify(te.substitute(expr, around))

        if self.factor.guard is not None:
            inside = {**positions(at, self.walked), **positions(deep, self.summed.k), **around}
            conditions.append(simplify(te.substitute(self.factor.guard, inside)))
        condition, position = te.all_of(conditions), self.position(walked, along_k)
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
