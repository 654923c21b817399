"""Column reductions: long reductions that are contiguous along the *output*, each element read once.

    for every block of columns c:                    (parallel)
      acc[c] = identity                              (in L1)
      for every few rows k:
        for vectors of c: acc[c] = combine(acc[c], x[k, c], x[k + 1, c], ...)
      out[c] = value(acc[c])

Accumulators in registers would cover only a few columns, and short runs of every row are the slowest access pattern.
Later rows are prefetched. A stride-based hardware prefetcher needs each load to follow its row line by line, and
software prefetches into L2, which allows more outstanding requests than L1. Short contiguous rows are read in order,
one at a time.

An argmax or argmin is expressed as a search for the known extreme. It is computed together with the extreme instead:

        better = x[k, c] > most[c]
        place[c], most[c] = (k, x[k, c]) if better else (place[c], most[c])
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tilewright import te
from tilewright.hw import CpuMachine
from tilewright.loops.formula import Formula, Reduction
from tilewright.loops.ir import Buffer, Kind, Prefetch, Program, Scope, Stmt, Store, block, nest, set_to
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
from tilewright.support.arith import ceil_div
from tilewright.te.index import coefficient, simplify

_AHEAD = 8  # rows prefetched ahead
_NARROWEST = 512  # minimum width of a block, in bytes of a row
_HELD = 4  # the accumulators may fill 1/_HELD of L1
_SHORT_ROW = 32  # vectors of a row that is processed as a whole


@dataclass(frozen=True)
class _Tile:
    """The rows and vectors that are combined before the accumulators are updated, and the cache level of prefetches."""

    rows: int
    vectors: int
    level: int


_PAGES_FOLLOWED, _LOADS_FOLLOWED = _Tile(4, 2, level=1), _Tile(8, 1, level=2)


def columns_program(formula: Formula, machine: CpuMachine, axis: te.Var) -> Program | None:
    """The program with vectors along `axis`; None if the formula does more than read and reduce."""
    load = _only_load(formula, axis)
    if load is None or columns_of(formula):
        return None
    reduction, others = formula.reductions[0], [a for a in formula.rows if a != axis]
    (k,) = reduction.axes
    results = [r.result for r in formula.reductions]
    # Results may be wider, but there are few of them.
    lanes = lanes_for(replace(formula, value=te.Load(results[0], ())), machine, axis.extent)
    tile = _tile(machine, axis, lanes, load, k, extent_of(others))
    size = lanes * tile.vectors
    width = _width(formula, machine, axis, load, extent_of(others), size)
    source, far = load.source, (coefficient(load.indices[0], k) or 0) >= width > 0
    assert isinstance(source, Buffer)
    large = source.size * load.dtype.bytes > machine.caches.l2_per_core
    if not far or not large or k.extent < _AHEAD:
        return None

    blocks = Tiles(axis, width)
    inside = Tiles(te.Var(f"{axis.name}_c", width), size)
    step, lane, row = te.Var("u", tile.vectors), te.Var("v", lanes), te.Var("r", tile.rows)
    coord = inside.start() + step * lanes + lane
    element, in_line = step * lanes + lane, machine.line_bytes // load.dtype.bytes
    line = te.Var("line", ceil_div(size, in_line))
    held = {
        r: te.Load(replace(r, name=f"held_{r.name}", size=width, scope=Scope.SCRATCH), (coord,))
        for r in results
    }
    kept = {r: te.Load(replace(r, name=f"acc_{r.name}", size=size), (element,)) for r in results}
    in_tile = [(step, Kind.UNROLL), (lane, Kind.VECTOR)]

    def along(body: Stmt) -> Stmt:
        return nest([(inside.var, Kind.SERIAL)], body)

    def taken(first: te.Expr, rows: te.Var) -> Stmt:
        at = {axis: blocks.start() + coord, k: first + rows}
        steps = [set_to(kept[r], te.substitute(value, at)) for r, value in _step(formula, kept)]
        ahead = {axis: blocks.start() + inside.start() + line * in_line, k: first + rows + _AHEAD}
        asked = Prefetch(source, te.substitute(load.indices[0], ahead), tile.level)
        return along(
            block(
                nest([(rows, Kind.UNROLL), (line, Kind.UNROLL)], asked),
                nest(in_tile, block(*(set_to(kept[r], held[r]) for r in results))),
                nest([(rows, Kind.UNROLL), *in_tile], block(*steps)),
                nest(in_tile, block(*(set_to(held[r], kept[r]) for r in results))),
            )
        )

    group = te.Var(f"{k.name}_g", k.extent // tile.rows)
    rest = te.Var(f"{k.name}_r", k.extent % tile.rows)
    stmts = [
        along(nest(in_tile, block(*(set_to(held[r], value) for r, value in _begin(formula))))),
        nest([(group, Kind.SERIAL)], taken(group * tile.rows, row)),
    ]
    if rest.extent:
        single = taken(rest + group.extent * tile.rows, te.Var("r", 1))
        stmts.append(nest([(rest, Kind.SERIAL)], single))
    position: dict[te.Var, te.Expr] = {axis: blocks.start() + coord}
    value = with_results(te.substitute(formula.value, position), held)
    stmts.append(along(nest(in_tile, Store(formula.output, te.substitute(formula.store, position), value))))
    body = parallel_nest([*others, blocks.var], width * k.extent, block(*stmts))
    found = " and its place" if len(results) > 1 else ""
    words = f"columns: {reduction.kind} of {k.extent}{found}, {width} of {axis.name} at a time"
    return Program(formula.name, (*formula.inputs, formula.output), with_values(body, {}), words)


def _begin(formula: Formula) -> list[tuple[Buffer, te.Expr]]:
    """The initial value of each result. If no element exceeds the initial extreme, its index is the first one."""
    first, *found = formula.reductions
    identity = te.reduce_identity(first.kind, first.result.dtype)
    return [(first.result, identity), *((r.result, te.const(0, r.result.dtype)) for r in found)]


def _step(formula: Formula, so_far: Mapping[Buffer, te.Expr]) -> list[tuple[Buffer, te.Expr]]:
    """The update of each result by one more row, in the order of the updates."""
    first, *found = formula.reductions
    most, element = so_far[first.result], first.body
    if not found:
        return [(first.result, updated(first, most, element))]
    worse = te.call("le", *((element, most) if first.kind == "max" else (most, element)))
    better = te.call("not", worse)
    if element.dtype.is_float:  # NaN exceeds everything except NaN
        better = te.call("and", better, te.call("eq", most, most))
    coord = found[0].result
    here = te.cast(first.axes[0], coord.dtype)
    return [
        (coord, te.select(better, here, so_far[coord])),
        (first.result, te.select(better, element, most)),
    ]


def _is_coord_of(found: Reduction, extreme: Reduction) -> bool:
    """Whether `found` is the first index of `extreme`, in the form of `argmax` and `argmin`."""
    if extreme.kind not in ("max", "min") or found.kind != "min" or len(found.axes) != 1:
        return False
    (k,), (along,) = extreme.axes, found.axes
    element = te.substitute(extreme.body, {k: along})
    here = te.call("eq", element, te.Load(extreme.result, ()))
    if element.dtype.is_float:
        here = te.call("or", here, te.call("ne", element, element))
    here_or_after = (te.cast(coord, found.result.dtype) for coord in (along, te.as_index(along.extent)))
    return simplify(found.body) == simplify(te.select(here, *here_or_after)) and k.extent == along.extent


def _only_load(formula: Formula, axis: te.Var) -> te.Load | None:
    """The load of the only reduction, over one axis, if it reads every element once, contiguous along `axis`."""
    reduction, *others = formula.reductions
    if len(reduction.axes) != 1 or len(others) > 1 or not all(_is_coord_of(r, reduction) for r in others):
        return None
    loads = set(te.loads(reduction.body))
    if len(loads) != 1 or coefficient(formula.store, axis) != 1:
        return None
    (load,) = loads
    moves = all(coefficient(load.indices[0], a) for a in (*formula.rows, *reduction.axes))
    guarded = any(isinstance(node, te.Select) for node in te.walk(reduction.body))
    return load if moves and not guarded and coefficient(load.indices[0], axis) == 1 else None


def _tile(machine: CpuMachine, axis: te.Var, lanes: int, load: te.Load, k: te.Var, others: int) -> _Tile:
    vectors, rest = divmod(axis.extent, lanes)
    dense = rest == 0 and coefficient(load.indices[0], k) == axis.extent
    whole_vectors = lanes * load.dtype.bytes == machine.vector_bytes
    if dense and whole_vectors and vectors <= _SHORT_ROW and others >= machine.cores:
        return _Tile(1, vectors, level=2)
    return _PAGES_FOLLOWED if machine.prefetches_by_page else _LOADS_FOLLOWED


def _width(formula: Formula, machine: CpuMachine, axis: te.Var, load: te.Load, others: int, size: int) -> int:
    """Columns of a block, a multiple of `size`: all of them, if every core still has work and they fit L1."""
    most = machine.caches.l1 // (_HELD * sum(r.result.dtype.bytes for r in formula.reductions))
    narrowest = max(size, _NARROWEST // load.dtype.bytes)
    wanted = max(ceil_div(machine.cores, others), ceil_div(axis.extent, most))
    width = max(ceil_div(axis.extent, wanted), narrowest)
    return min(ceil_div(width, size), axis.extent // size) * size
