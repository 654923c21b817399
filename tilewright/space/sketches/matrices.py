"""A contraction as a batch of matmuls: the schedule that rules for GPUs begin with.

    left[b, o, m, k], right[b, o, n, k] = the factors, zero where their guards are false
    sums[b, m, n] = sum over o, k of left[b, o, m, k] * right[b, o, n, k]
    out[...] = value(sums[b, m, n])

A mapping (`space/mapping.py`) says which axes of the task are fused into m, n and k, which are the batch b, and which
are the outer reduction axes o. Where a factor is contiguous along m or n rather than k, its stage has these two axes in
the other order, so that rows of a tile are rows of memory. Axes b and o of one element are left out; m, n and k
have at least two, the further ones zero.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from tilewright import te
from tilewright.hw.memory import Scope
from tilewright.loops.gpu.thread_index import at_positions, positions, walked
from tilewright.loops.ir import Buffer
from tilewright.loops.schedule import Schedule
from tilewright.loops.schedule.nest import Leaf, Loop, Nest, Node, Tile, nested, stage_nest
from tilewright.loops.tiling import extent_of, with_results
from tilewright.space.contraction import Factor, TwoFactorContraction
from tilewright.space.mapping import Mapping
from tilewright.te.index import simplify

LEFT, RIGHT, SUMS, OUT = "left", "right", "sums", "out"
STEPS = f"{SUMS}.k.o"  # the loop over steps of the reduction
_COPIED = 16  # bytes that a thread moves at once, at most
_MIN = 2  # of a matmul's axes: an axis of one element has no loop to split


@dataclass(frozen=True)
class Operand:
    """A factor as the stage `name`, whose axes before the last two are b and o."""

    name: str
    factor: Factor
    walked: tuple[te.Var, ...]
    k: tuple[te.Var, ...]
    transposed: bool
    lanes: int  # neighbours in memory along its last axis that are moved at once


@dataclass(frozen=True)
class Matrices:
    """`transposed`: for each factor, whether its stage has k before m or n."""

    work: TwoFactorContraction
    mapping: Mapping
    transposed: tuple[bool, bool]

    @property
    def batched(self) -> bool:
        return extent_of(self.mapping.batch) > 1

    @property
    def windowed(self) -> bool:
        return extent_of(self.mapping.outer) > 1

    @cached_property
    def operands(self) -> tuple[Operand, Operand]:
        mapping = self.mapping
        sides = (LEFT, mapping.left, mapping.m), (RIGHT, mapping.right, mapping.n)
        found = []
        for (name, factor, along), transposed in zip(sides, self.transposed, strict=True):
            inner = (along if transposed else mapping.k)[-1]
            lanes = factor.lanes(inner, _COPIED // factor.dtype.bytes)
            found.append(Operand(name, factor, along, mapping.k, transposed, lanes))
        return found[0], found[1]

    @cached_property
    def schedule(self) -> Schedule:
        sums = Tile(
            SUMS,
            self.work.reduction.result.dtype,
            (*self._batch(), *(max(_MIN, extent_of(axes)) for axes in (self.mapping.m, self.mapping.n))),
            Scope.SCRATCH,
        )
        tiles = [self._tile(operand) for operand in self.operands]
        body: list[Node] = []
        for operand, tile in zip(self.operands, tiles, strict=True):
            body += stage_nest(operand.name, tile, [], None, self._element(operand))
        loops = [Loop(te.Var(f"{SUMS}.k", self._depth), ())]
        if self.windowed:
            loops.insert(0, Loop(te.Var(f"{SUMS}.o", extent_of(self.mapping.outer)), ()))
        around = [loop.var for loop in loops]

        def product(indices: tuple[te.Expr, ...]) -> te.Expr:
            *batch, m, n = indices
            parts = []
            for operand, tile, along in zip(self.operands, tiles, (m, n), strict=True):
                last = (around[-1], along) if operand.transposed else (along, around[-1])
                parts.append(te.cast(te.Load(tile, (*batch, *around[:-1], *last)), sums.dtype))
            return te.call("mul", *parts)

        body += stage_nest(SUMS, sums, loops, "sum", product)
        inputs = tuple(_input(buffer) for buffer in self.inputs)
        out = Tile(OUT, self.output.dtype, (self.output.size,), Scope.GLOBAL)
        body += self._output(out, sums)
        constants = frozenset(buffer.name for buffer in self.constants)
        nest = Nest(self.work.formula.name, inputs, out, tuple(body), constants, (None,) * len(inputs))
        return Schedule(nest)

    @property
    def inputs(self) -> Sequence[Buffer]:
        """Those of the task, in order."""
        return self.work.formula.inputs

    @property
    def output(self) -> Buffer:
        return self.work.formula.output

    @property
    def constants(self) -> Collection[Buffer]:
        return self.work.formula.constants

    @property
    def _depth(self) -> int:
        return max(_MIN, extent_of(self.mapping.k))

    def _batch(self) -> tuple[int, ...]:
        return (extent_of(self.mapping.batch),) if self.batched else ()

    def _tile(self, operand: Operand) -> Tile:
        last = [max(_MIN, extent_of(operand.walked)), self._depth]
        outer = (extent_of(self.mapping.outer),) if self.windowed else ()
        shape = (*self._batch(), *outer, *(reversed(last) if operand.transposed else last))
        return Tile(operand.name, operand.factor.dtype, shape, Scope.SCRATCH)

    def _element(self, operand: Operand) -> _Element:
        return _Element(self, operand)

    def around(self, indices: Sequence[te.Expr]) -> dict[te.Var, te.Expr]:
        """The axes of b and o at these indices."""
        found = list(indices)
        values: dict[te.Var, te.Expr] = {}
        for present, axes in ((self.batched, self.mapping.batch), (self.windowed, self.mapping.outer)):
            index = found.pop(0) if present and found else te.as_index(0)
            values |= positions(index, axes)
        return values

    def _output(self, out: Tile, sums: Tile) -> tuple[Node, ...]:
        formula, mapping = self.work.formula, self.mapping
        loops = [te.Var(f"{OUT}.m", extent_of(mapping.m)), te.Var(f"{OUT}.n", extent_of(mapping.n))]
        m, n = loops
        batch = [te.Var(f"{OUT}.b", extent_of(mapping.batch))] if self.batched else []
        around = self.around(batch)
        total = te.Load(sums, (*batch, m, n))
        lanes = _COPIED // out.dtype.bytes
        value = at_vectors(at_vectors(formula.value, mapping.n, n, lanes), mapping.m, m, lanes)
        value = with_results(te.substitute(value, around), {self.work.reduction.result: total})
        store: te.Expr = te.Load(formula.output, (formula.store,))
        store = at_vectors(at_vectors(store, mapping.n, n, lanes), mapping.m, m, lanes)
        assert isinstance(store, te.Load)
        index = simplify(te.substitute(store.indices[0], around))
        leaf = Leaf(OUT, out, (index,), simplify(from_tiles(value)))
        return nested([Loop(var, ()) for var in (*batch, *loops)], (leaf,))


@dataclass(frozen=True)
class _Element:
    """The value of an operand's stage at an index."""

    matrices: Matrices
    operand: Operand

    def __call__(self, indices: tuple[te.Expr, ...]) -> te.Expr:
        operand, factor = self.operand, self.operand.factor
        *before, x, y = indices
        along, k = (y, x) if operand.transposed else (x, y)
        around = self.matrices.around(before)

        def placed(expr: te.Expr) -> te.Expr:
            lanes = (operand.lanes, 1) if operand.transposed else (1, operand.lanes)
            at = at_vectors(expr, operand.walked, along, lanes[0])
            at = at_vectors(at, operand.k, k, lanes[1])
            return simplify(te.substitute(at, around))

        value = factor.load if factor.value is None else te.cast(factor.value, factor.dtype)
        element = from_tiles(placed(value))
        conditions = [
            te.call("lt", index, te.as_index(1))
            for index, axes in ((along, operand.walked), (k, operand.k))
            if extent_of(axes) < _MIN
        ]
        if factor.guard is not None:
            conditions.append(placed(factor.guard))
        inside = te.all_of(conditions)
        return element if inside is None else te.select(inside, element, te.const(0, element.dtype))


def at_vectors(expr: te.Expr, axes: Sequence[te.Var], coord: te.Expr, lanes: int) -> te.Expr:
    """`expr` with the fused axes at `coord`. Where that takes divisions, they are of `coord // lanes`, so that an index
    stays contiguous over the lanes of a vector."""
    if lanes < 2 or len(axes) < 2 or axes[-1].extent % lanes:
        return at_positions(expr, axes, coord)
    vectors = te.Var("vectors", axes[-1].extent // lanes)
    values = positions(coord // lanes, (*axes[:-1], vectors))
    values[axes[-1]] = values.pop(vectors) * lanes + coord % lanes
    return te.substitute(walked(expr, axes, coord), values)


def _input(buffer: Buffer) -> Tile:
    return Tile(buffer.name, buffer.dtype, (buffer.size,), Scope.GLOBAL)


def from_tiles(expr: te.Expr) -> te.Expr:
    def rule(node: te.Expr) -> te.Expr | None:
        if isinstance(node, te.Load) and isinstance(node.source, Buffer) and node.indices:
            return te.Load(_input(node.source), node.indices)
        return None

    return te.rewrite(expr, rule)
