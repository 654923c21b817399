"""Long reductions of what is contiguous along the *output*, each element read once: sums over leading axes.

    for every block of columns c:                    (parallel)
      acc[c] = identity                              (in the first cache)
      for every few rows k:
        for vectors of c: acc[c] = combine(acc[c], x[k, c], x[k + 1, c], ...)
      out[c] = value(acc[c])

Accumulators in registers would be a few columns wide, and a short run of every row is what memory is slowest at.
"""

from __future__ import annotations

from tilewright import te
from tilewright.hw import CpuMachine
from tilewright.loops.formula import Formula
from tilewright.loops.ir import Buffer, Kind, Prefetch, Program, Scope, Stmt, Store, block, nest
from tilewright.loops.tiling import (
    Tiles,
    columns_of,
    extent_of,
    lanes_for,
    parallel_nest,
    updated,
    with_results,
    with_values,
)
from tilewright.te.index import coefficient

_ROWS = 4  # combined before they meet the accumulators again
_VECTORS = 2
_AHEAD = 2 * _ROWS  # rows that are asked for before they are needed
_NARROWEST = 512  # bytes of a row that one block is wide
_HELD = 4  # the part of the first cache that the accumulators may take


def columns_program(formula: Formula, machine: CpuMachine, axis: te.Var) -> Program | None:
    """With vectors along `axis`; None where it is not all about reading."""
    load = _only_load(formula, axis)
    if load is None or columns_of(formula):
        return None
    (reduction,), others = formula.reductions, [a for a in formula.rows if a != axis]
    (k,) = reduction.axes
    lanes, result = lanes_for(formula, machine, axis.extent), reduction.result
    size = lanes * _VECTORS
    width = _width(formula, machine, axis, load, extent_of(others))
    source, far = load.source, (coefficient(load.indices[0], k) or 0) >= width > 0
    assert isinstance(source, Buffer)
    large = source.size * load.dtype.bytes > machine.caches.l2_per_core
    if not far or not large or k.extent < 2 * _ROWS:
        return None

    blocks = Tiles(axis, width)
    inside = Tiles(te.Var(f"{axis.name}_c", width), size)
    step, lane, row = te.Var("u", _VECTORS), te.Var("v", lanes), te.Var("r", _ROWS)
    place = inside.start() + step * lanes + lane
    held = Buffer("held", result.dtype, width, Scope.SCRATCH)
    kept = Buffer(f"acc_{result.name}", result.dtype, size, Scope.REGISTER)
    element = step * lanes + lane
    in_tile = [(step, Kind.UNROLL), (lane, Kind.VECTOR)]

    def along(body: Stmt) -> Stmt:
        return nest([(inside.var, Kind.SERIAL)], body)

    def taken(first: te.Expr, rows: te.Var) -> Stmt:
        at = {axis: blocks.start() + place, k: first + rows}
        accumulator = te.Load(kept, (element,))
        value = updated(reduction, accumulator, te.substitute(reduction.body, at))
        ahead = {axis: blocks.start() + inside.start() + step * lanes, k: first + rows + _AHEAD}
        asked = Prefetch(source, te.substitute(load.indices[0], ahead), level=1)
        return along(
            block(
                nest([(rows, Kind.UNROLL), (step, Kind.UNROLL)], asked),
                nest(in_tile, Store(kept, element, te.Load(held, (place,)))),
                nest([(rows, Kind.UNROLL), *in_tile], Store(kept, element, value)),
                nest(in_tile, Store(held, place, accumulator)),
            )
        )

    group, rest = te.Var(f"{k.name}_g", k.extent // _ROWS), te.Var(f"{k.name}_r", k.extent % _ROWS)
    stmts = [
        along(nest(in_tile, Store(held, place, te.reduce_identity(reduction.kind, held.dtype)))),
        nest([(group, Kind.SERIAL)], taken(group * _ROWS, row)),
    ]
    if rest.extent:
        single = taken(rest + group.extent * _ROWS, te.Var("r", 1))
        stmts.append(nest([(rest, Kind.SERIAL)], single))
    position: dict[te.Var, te.Expr] = {axis: blocks.start() + place}
    value = with_results(te.substitute(formula.value, position), {result: te.Load(held, (place,))})
    stmts.append(along(nest(in_tile, Store(formula.output, te.substitute(formula.store, position), value))))
    body = parallel_nest([*others, blocks.var], width * k.extent, block(*stmts))
    words = f"columns: {reduction.kind} of {k.extent}, {width} of {axis.name} at a time"
    return Program(formula.name, (*formula.inputs, formula.output), with_values(body, {}), words)


def _only_load(formula: Formula, axis: te.Var) -> te.Load | None:
    """What the only reduction, over one axis, reads: every element once, in order along `axis`."""
    if len(formula.reductions) != 1 or len(formula.reductions[0].axes) != 1:
        return None
    (reduction,) = formula.reductions
    loads = set(te.loads(reduction.body))
    if len(loads) != 1 or coefficient(formula.store, axis) != 1:
        return None
    (load,) = loads
    moves = all(coefficient(load.indices[0], a) for a in (*formula.rows, *reduction.axes))
    guarded = any(isinstance(node, te.Select) for node in te.walk(reduction.body))
    return load if moves and not guarded and coefficient(load.indices[0], axis) == 1 else None


def _width(formula: Formula, machine: CpuMachine, axis: te.Var, load: te.Load, others: int) -> int:
    """Columns of a block, whole tiles: all, where that leaves something for every core and fits the first cache."""
    size = _VECTORS * lanes_for(formula, machine, axis.extent)
    most = machine.caches.l1 // (_HELD * formula.reductions[0].result.dtype.bytes)
    narrowest = max(size, _NARROWEST // load.dtype.bytes)
    wanted = max(-(-machine.cores // others), -(-axis.extent // most))
    width = max(-(-axis.extent // wanted), narrowest)
    return min(-(-width // size), axis.extent // size) * size
