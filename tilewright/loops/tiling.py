"""Building blocks of schedules: tiles of an axis, the parallel loop, operands in packed order."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from msgspec import structs

from tilewright import te
from tilewright.dtypes import DType
from tilewright.hw import CpuMachine
from tilewright.loops.formula import Formula, Reduction
from tilewright.loops.ir import Buffer, Kind, Stmt, block, map_exprs, nest
from tilewright.runtime.packing import AnyTransform, Packing, SeparateTail, dense_order
from tilewright.support.arith import ceil_div
from tilewright.support.frozen import quickly_made
from tilewright.te.index import Linear, coefficient, divisor_of, flat_index, linear, simplify

Values = Mapping[te.Var, te.Expr]

# A parallel iteration should be worth its overhead (about a microsecond), and there should be enough iterations to
# balance threads.
GRAIN = 16_384  # scalar operations
PARALLEL_ITERATIONS = 256

LONGEST_STRIDE = (
    4  # maximum stride for elements picked from whole vectors; with larger strides they are loaded one by one
)

_UNROLLED = 8  # vectors of a copied tile
_LOOP = 0.75  # cost of a loop iteration, in vectors
_MIN_STREAMED = 8  # minimum vectors of a row that outweigh its ends


@quickly_made
@dataclass(frozen=True)
class Tiles:
    """An axis cut into tiles of equal size; the last one overlaps if the size does not divide the extent."""

    axis: te.Var
    size: int

    @cached_property
    def count(self) -> int:
        return ceil_div(self.axis.extent, self.size)

    @property
    def var(self) -> te.Var:
        return te.Var(f"{self.axis.name}_t", self.count)

    def start(self) -> te.Expr:
        """The start of the tile as an expression of `var`."""
        return self.start_of(self.var)

    def start_of(self, tile: te.Expr) -> te.Expr:
        """The start of a tile; a tile beyond the end is the last one."""
        first = tile * self.size
        if self.axis.extent % self.size == 0:
            return first
        return te.call("min", first, self.axis.extent - self.size)

    @property
    def waste(self) -> float:
        """Work done relative to work needed."""
        return self.count * self.size / self.axis.extent


def extent_of(axes: Sequence[te.Var]) -> int:
    return math.prod(axis.extent for axis in axes)


def same_extents(axes: Sequence[te.Var], others: Sequence[te.Var]) -> bool:
    return [axis.extent for axis in axes] == [axis.extent for axis in others]


def row_major(axes: Sequence[te.Var]) -> te.Expr:
    """The row-major offset of an element over these axes: the number of earlier iterations of the nest."""
    return flat_index(axes, [axis.extent for axis in axes])


def indices_of(number: te.Expr, axes: Sequence[te.Var]) -> dict[te.Var, te.Expr]:
    """The axes' values in iteration `number` of the nest over them."""
    values: dict[te.Var, te.Expr] = {}
    for axis in reversed(axes[1:]):
        values[axis] = number % axis.extent
        number = number // axis.extent
    return values | dict.fromkeys(axes[:1], number)


def counted_by(number: te.Var, axes: Sequence[te.Var], expr: te.Expr) -> te.Expr:
    """`expr` in iteration `number` of the nest over `axes`. Offsets that are linear in the fused index need no
    division."""

    def walked(offset: te.Expr) -> te.Expr:
        form = linear(offset)
        steps = [form.terms.get(axis, 0) for axis in axes]
        as_one = all(a == b * axis.extent for a, b, axis in zip(steps, steps[1:], axes[1:], strict=False))
        if not as_one or not steps[-1]:
            return offset
        others = {atom: step for atom, step in form.terms.items() if atom not in axes}
        return Linear({**others, number: steps[-1]}, form.constant).expr()

    def rule(node: te.Expr) -> te.Expr | None:
        if not isinstance(node, te.Load) or not node.indices:
            return None
        return te.Load(node.source, (walked(node.indices[0]),))

    expr = walked(expr) if expr.dtype is DType.I64 else te.rewrite(expr, rule)
    return te.substitute(expr, indices_of(number, axes))


def with_values(stmt: Stmt, values: Values) -> Stmt:
    """`stmt` with variables replaced and indices simplified."""
    return map_exprs(stmt, lambda expr: simplify(te.substitute(expr, values)))


def load_offsets(expr: te.Expr) -> list[te.Expr]:
    return [load.indices[0] for load in te.loads(expr) if load.indices]


# -- lanes ------------------------------------------------------------------------------------------------------------


def power_of_two_below(limit: int) -> int:
    return 1 << (max(limit, 1).bit_length() - 1)


def lanes_for(formula: Formula, machine: CpuMachine, extent: int) -> int:
    """Lanes for a vector loop over an axis: the machine's for the widest type computed with, fewer on a short axis.
    Data that is only moved uses the storage type."""
    nodes = _computed(formula)
    widest = max((node.dtype for node in nodes), key=lambda dtype: dtype.compute.bytes)
    lanes = machine.lanes(widest)
    if not formula.reductions and not any(isinstance(node, te.Call | te.Cast) for node in nodes):
        lanes = machine.vector_bytes // max(node.dtype.bytes for node in nodes)
    return min(lanes, power_of_two_below(extent))


def _computed(formula: Formula) -> list[te.Expr]:
    """Expressions that hold tensor elements, without index arithmetic and conditions on indices."""

    def elements(expr: te.Expr) -> list[te.Expr]:
        if expr.dtype in (DType.I64, DType.BOOL) and not te.loads(expr):
            return []
        below = (
            [] if isinstance(expr, te.Load) else [e for child in te.children(expr) for e in elements(child)]
        )
        return [expr, *below]

    return [e for expr in formula.expressions() for e in elements(expr)] or [formula.value]


# -- what a formula does ----------------------------------------------------------------------------------------------


def vector_cost(loads: Sequence[te.Expr], axis: te.Var, lanes: int, stores: Sequence[te.Expr] = ()) -> float:
    """Memory operations per element if `axis` is the vector axis: a contiguous or uniform access serves all lanes."""
    cost = float(sum(1 if coefficient(offset, axis) in (0, 1) else lanes for offset in stores))
    for offset in loads:
        stride = coefficient(offset, axis)
        cost += lanes if stride is None else min(lanes, separate_accesses(stride))
    return (cost + 1) / lanes


def separate_accesses(stride: int) -> float:
    """Loads and shuffles for a vector of elements with this stride."""
    return max(1, 2 * stride - 1) if 0 <= stride <= LONGEST_STRIDE else math.inf


def columns_of(formula: Formula) -> tuple[te.Var, ...]:
    rows = set(formula.rows)
    return tuple(axis for axis in formula.axes if axis not in rows)


def columns_in_order(formula: Formula) -> tuple[te.Var, ...]:
    """The columns, the contiguous one in the output last."""
    return tuple(sorted(columns_of(formula), key=lambda axis: coefficient(formula.store, axis) == 1))


def contiguous_last(formula: Formula) -> Formula:
    """The same reductions, with the contiguous axis of each, if any, last."""

    def steps_by_one(reduction: Reduction, axis: te.Var) -> int:
        return sum(coefficient(offset, axis) == 1 for offset in load_offsets(reduction.body))

    reductions = tuple(
        replace(r, axes=tuple(sorted(r.axes, key=lambda axis, r=r: steps_by_one(r, axis))))  # type: ignore[misc]
        for r in formula.reductions
    )
    return replace(formula, reductions=reductions)


def updated(reduction: Reduction, accumulator: te.Expr, body: te.Expr) -> te.Expr:
    """One step of a reduction: `accumulator` combined with `body`."""
    product = isinstance(body, te.Call) and body.op == "mul" and body.dtype.is_float
    if reduction.kind == "sum" and product:
        assert isinstance(body, te.Call)
        return te.call("fma", *body.args, accumulator)
    return te.call(te.REDUCE_COMBINERS[reduction.kind], accumulator, body)


def with_results(expr: te.Expr, results: Mapping[Buffer, te.Expr]) -> te.Expr:
    """`expr` with reads of reduction results replaced by their storage."""

    def rule(node: te.Expr) -> te.Expr | None:
        return results.get(node.source) if isinstance(node, te.Load) and not node.indices else None  # type: ignore[call-overload]

    return te.rewrite(expr, rule)


# -- the output -------------------------------------------------------------------------------------------------------


def is_streamed(formula: Formula, machine: CpuMachine) -> bool:
    """Whether the output is so large that its next reader finds none of it in a cache. Then it can bypass the caches,
    which would read every line before writing it."""
    return formula.output.size * formula.output.dtype.bytes >= machine.caches.last


Writer = Callable[[te.Expr, te.Expr, bool], Stmt]  # (index in the row, output offset, streamed) -> its store


def streamed_run(
    row: te.Var,
    begin: te.Expr,
    lanes: int,
    write: Writer,
    *,
    rows: Sequence[tuple[te.Var, Kind]] = (),
    interleaved: Callable[[te.Expr, int], Sequence[Stmt]] = lambda start, vectors: (),
) -> Stmt | None:
    """Write a row of the output that begins at `begin`, with non-temporal stores for whole lines. Vectors at its
    ends, which may share a line with other rows, use ordinary stores. Returns None if vectors from the row's start
    are whole lines anyway, or if there are few. `rows` are loops inside those over vectors; `interleaved` runs with
    each group of vectors.

        out[begin : begin + lanes], out[end - 2 lanes : end] = ...
        for aligned tiles in between: out[tile] <- ...             (last, because streamed lines are not in a cache)
    """
    between = (row.extent - lanes + 1) // lanes  # vectors that are inside, wherever the row begins
    if divisor_of(begin) % lanes == 0 or between < _MIN_STREAMED:
        return None
    unroll = best_unroll(between, 1, _UNROLLED)
    tiles = Tiles(te.Var(f"{row.name}_s", between), unroll)
    step, lane = te.Var("u", unroll), te.Var("v", lanes)
    inside = (tiles.start() + step) * lanes + lane
    before = (te.as_index(0) - begin) % lanes
    first = (begin + (lanes - 1)) // lanes * lanes
    in_tile = [*rows, (step, Kind.UNROLL), (lane, Kind.VECTOR)]
    middle = nest(in_tile, write(before + inside, first + inside, True))
    middle = block(*interleaved(tiles.start() * lanes, unroll), middle)
    ends = [
        nest([*rows, (lane, Kind.VECTOR)], write(lane + start, begin + start + lane, False))
        for start in (0, row.extent - 2 * lanes, row.extent - lanes)
    ]
    return block(*ends, nest([(tiles.var, Kind.SERIAL)], middle))


def best_unroll(extent: int, lanes: int, most: int) -> int:
    """Vectors in a tile, at most `most`, that minimise repeated work and loop overhead."""
    choices = [n for n in range(1, most + 1) if n * lanes <= extent] or [1]
    return min(choices, key=lambda n: ceil_div(extent, n * lanes) * (n + _LOOP))


# -- the parallel loop ------------------------------------------------------------------------------------------------


def parallel_nest(loops: Sequence[te.Var], work: int, body: Stmt) -> Stmt:
    """`body` in the loops over `loops` (outermost first), the outer ones fused into one parallel loop.

    `work` is the number of scalar operations in the body. The parallel loop gets as many iterations as are worth
    their overhead; a long axis is split, with a parallel outer part.
    """
    wanted = max(1, min(PARALLEL_ITERATIONS, extent_of(loops) * work // GRAIN))
    return parallel_chunks(loops, wanted, body)


def parallel_chunks(loops: Sequence[te.Var], wanted: int, body: Stmt) -> Stmt:
    """`body` in the loops over `loops`, the outer ones fused into one parallel loop of about `wanted` iterations."""
    outer: list[te.Var] = []
    values: dict[te.Var, te.Expr] = {}
    inner = [loop for loop in loops if loop.extent > 1]
    taken = 1
    while inner and taken < wanted:
        loop = inner.pop(0)
        if taken * loop.extent <= 2 * wanted:
            outer.append(loop)
            taken *= loop.extent
            continue
        chunks = Tiles(loop, _chunk(loop.extent, ceil_div(wanted, taken)))
        part = te.Var(f"{loop.name}_p", chunks.size)
        outer.append(chunks.var)
        taken *= chunks.count
        values[loop] = chunks.start() + part
        inner.insert(0, part)
        break
    parallel = te.Var("p", taken)
    rest: te.Expr = parallel
    for loop in reversed(outer):
        values[loop] = rest % loop.extent
        rest = rest // loop.extent
    # The value of a split loop contains its chunk variable, which is itself derived from the parallel one.
    decoded = {var: te.substitute(value, values) for var, value in values.items()}
    serial = nest([(loop, Kind.SERIAL) for loop in inner], with_values(body, decoded))
    return nest([(parallel, Kind.PARALLEL)], serial)


def _chunk(extent: int, chunks: int) -> int:
    """A chunk size that cuts `extent` into about `chunks`: an exact divisor if one is close."""
    size = max(1, ceil_div(extent, chunks))
    for candidate in range(size, max(size // 2, 1) - 1, -1):
        if extent % candidate == 0:
            return candidate
    return size


# -- packed operands --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Walked:
    """One axis of a packed operand in storage order: its blocks of `block` elements, or the indices in a block.
    `value` is the index that a load reads."""

    axis: te.Var
    block: int
    value: te.Expr
    positions: bool

    @property
    def extent(self) -> int:
        return self.block if self.positions else ceil_div(self.axis.extent, self.block)


def whole(axis: te.Var, value: te.Expr | None = None) -> Walked:
    """An axis that is stored unsplit."""
    return Walked(axis, axis.extent, axis if value is None else value, positions=True)


def blocks_of(tiles: Tiles, value: te.Expr | None = None) -> Walked:
    return Walked(tiles.axis, tiles.size, tiles.var if value is None else value, positions=False)


def indices_in(tiles: Tiles, value: te.Expr) -> Walked:
    return Walked(tiles.axis, tiles.size, value, positions=True)


@dataclass(frozen=True)
class PackedOperand:
    original: Buffer
    packing: Packing
    load: te.Load
    axes: tuple[te.Var, ...]  # of the packing's shape

    @property
    def buffer(self) -> Buffer:
        return replace(self.original, size=self.packing.size)

    def transformed(self, transform: AnyTransform) -> PackedOperand:
        """The packing with one more transform that keeps the shape, so that blocks keep their positions."""
        packing = structs.replace(self.packing, transforms=(*self.packing.transforms, transform))
        load = te.Load(replace(self.original, size=packing.size), self.load.indices)
        return replace(self, packing=packing, load=load)


def pack_operand(
    load: te.Load,
    walk: Sequence[Walked],
    zero_filled: Collection[te.Var] = (),
    shortened: Mapping[te.Var, te.Var] | None = None,
) -> PackedOperand | None:
    """The operand of `load` stored in the order of `walk`, outermost first, and the load from there. None if the load
    does not read its whole buffer exactly once.

    The last block of an axis overlaps if it is partial; for axes in `zero_filled` it is zero-padded. `shortened`: an
    axis of `walk`, and the load's axis that it is a prefix of; the rest is stored after everything else.
    """
    buffer = load.source
    assert isinstance(buffer, Buffer)
    form = linear(load.indices[0])
    shortened = shortened or {}
    axes = list(dict.fromkeys(shortened.get(item.axis, item.axis) for item in walk))
    if set(form.terms) != set(axes) or form.constant or extent_of(axes) != buffer.size:
        return None
    order = dense_order([axis.extent for axis in axes], [form.terms[axis] for axis in axes])
    if order is None:
        return None
    dense = [axes[number] for number in order]
    blocks = {shortened.get(item.axis, item.axis): item.block for item in walk}
    storage = [2 * dense.index(shortened.get(item.axis, item.axis)) + int(item.positions) for item in walk]
    tails = [SeparateTail(dense.index(axis), axis.extent - short.extent) for short, axis in shortened.items()]
    uncut = [number for number in range(2 * len(dense)) if number not in storage]  # of extent 1
    packing = Packing(
        tuple(axis.extent for axis in dense),
        tuple(blocks[axis] for axis in dense),
        (*uncut, *storage),
        tuple(sorted(dense.index(axis) for axis in zero_filled)),
        tuple(tails),
    )
    load = te.Load(replace(buffer, size=packing.size), (index_along(walk),))
    return PackedOperand(buffer, packing, load, tuple(dense))


def index_along(walk: Sequence[Walked]) -> te.Expr:
    """The position, in the order of `walk`, of the element at its values."""
    return flat_index([item.value for item in walk], [item.extent for item in walk])
