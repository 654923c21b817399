"""The default program of any task: plain, sensible, chosen without measurement.

Three shapes of loop nest cover every formula:

- `elementwise`: no reduction; one vector axis, the rest outside.
- `tiled`: reductions whose loads are contiguous along an axis of the *output* (matrix products, convolutions,
  pooling, sums over leading axes). A tile of `rows x vectors` accumulators stays in registers while the reduction
  runs.
- `rowwise`: reductions that are contiguous along the *reduced* axis (softmax, norms, sums over the last axis). Lanes
  hold partial results, combined at the end of the row.

All of them share: the outermost loop is parallel, tiles at the end of an axis are shifted back to overlap instead of
having a tail loop, and the choice between shapes is made by counting accesses (`_vector_cost`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tilewright import te
from tilewright.hw import CpuMachine
from tilewright.loops.formula import Formula, Reduction
from tilewright.loops.ir import Across, Buffer, Kind, Program, Scope, Stmt, Store, block, nest
from tilewright.loops.tiling import (
    PackedOperand,
    Tiles,
    blocks_of,
    extent_of,
    lanes_for,
    load_offsets,
    pack_operand,
    parallel_nest,
    places_in,
    whole,
    with_values,
)
from tilewright.loops.transposed import transposed_program
from tilewright.te.index import coefficient

_UNROLLED_REDUCTION = 9  # a 3x3 window is written out
_UNROLLED_STATEMENTS = (
    108  # written out at most, window and register tile together: code size and compile time
)
_PACKING_WASTE = 1.25  # a packed constant may grow by this where the last tile overlaps its neighbour
_COMBINING_ACROSS = 8  # vector operations that combining lanes at the end of a row costs


def default_program(formula: Formula, machine: CpuMachine) -> Program:
    if not formula.reductions:
        return transposed_program(formula, machine) or _elementwise(formula, machine)
    spatial = _best_spatial_axis(formula, machine)
    if spatial is not None and spatial.cost <= _rowwise_cost(formula, machine):
        return _tiled(formula, machine, spatial.axis)
    return _rowwise(formula, machine)


# -- the choice of the vector axis ------------------------------------------------------------------------------------


def _vector_cost(offsets: Sequence[te.Expr], axis: te.Var, lanes: int) -> float:
    """Memory operations per element when `axis` is the vector axis: a contiguous or uniform access serves all lanes."""
    cost = 0.0
    for offset in offsets:
        cost += 1 if coefficient(offset, axis) in (0, 1) else lanes
    return (cost + 1) / lanes


@dataclass(frozen=True)
class _Spatial:
    axis: te.Var
    cost: float


def _columns(formula: Formula) -> tuple[te.Var, ...]:
    rows = set(formula.rows)
    return tuple(axis for axis in formula.axes if axis not in rows)


def _best_spatial_axis(formula: Formula, machine: CpuMachine) -> _Spatial | None:
    """The output axis along which the reductions vectorise best, with the cost per row."""
    best: _Spatial | None = None
    columns = extent_of(_columns(formula))
    for axis in reversed(formula.rows):
        lanes = lanes_for(formula, machine, axis.extent)
        cost = sum(r.length * _vector_cost(load_offsets(r.body), axis, lanes) for r in formula.reductions)
        cost += columns * _vector_cost([*load_offsets(formula.value), formula.store], axis, lanes)
        if best is None or cost < best.cost:
            best = _Spatial(axis, cost)
    return best


def _rowwise_cost(formula: Formula, machine: CpuMachine) -> float:
    cost = 0.0
    for reduction in formula.reductions:
        if not reduction.axes:
            return float("inf")
        axis = reduction.axes[-1]
        lanes = lanes_for(formula, machine, axis.extent)
        cost += reduction.length * _vector_cost(load_offsets(reduction.body), axis, lanes) + _COMBINING_ACROSS
    columns = _columns(formula)
    if columns:
        lanes = lanes_for(formula, machine, columns[-1].extent)
        cost += extent_of(columns) * _vector_cost(
            [*load_offsets(formula.value), formula.store], columns[-1], lanes
        )
    return cost


# -- elementwise ------------------------------------------------------------------------------------------------------


def _elementwise(formula: Formula, machine: CpuMachine) -> Program:
    if not formula.axes:
        return _program(formula, Store(formula.output, formula.store, formula.value), "scalar")
    offsets = [*load_offsets(formula.value), formula.store]
    costs = {
        axis: _vector_cost(offsets, axis, lanes_for(formula, machine, axis.extent))
        for axis in reversed(formula.axes)
    }
    axis = min(costs, key=lambda a: costs[a])
    lanes = lanes_for(formula, machine, axis.extent)
    unroll = next(u for u in (4, 2, 1) if u * lanes <= axis.extent or u == 1)
    tiles = Tiles(axis, lanes * unroll)
    lane, step = te.Var("v", lanes), te.Var("u", unroll)
    position = {axis: tiles.start() + step * lanes + lane}
    store = Store(
        formula.output, te.substitute(formula.store, position), te.substitute(formula.value, position)
    )
    body = nest([(step, Kind.UNROLL), (lane, Kind.VECTOR)], store)
    outer = [a for a in formula.axes if a != axis]
    nested = parallel_nest([*outer, tiles.var], tiles.size * len(offsets), body)
    return _program(formula, nested, f"elementwise: {axis.name} in vectors of {lanes} x {unroll}")


def _program(formula: Formula, body: Stmt, decisions: str) -> Program:
    body = with_values(body, {})
    return Program(formula.name, (*formula.inputs, formula.output), body, decisions)


# -- reductions -------------------------------------------------------------------------------------------------------


def _updated(reduction: Reduction, accumulator: te.Expr, body: te.Expr) -> te.Expr:
    """One step of a reduction: `accumulator` combined with `body`."""
    product = isinstance(body, te.Call) and body.op == "mul" and body.dtype.is_float
    if reduction.kind == "sum" and product:
        assert isinstance(body, te.Call)
        return te.call("fma", *body.args, accumulator)
    return te.call(te.REDUCE_COMBINERS[reduction.kind], accumulator, body)


def _with_results(expr: te.Expr, results: Mapping[Buffer, te.Expr]) -> te.Expr:
    """`expr` with reads of reductions' results replaced by where they are kept."""

    def rule(node: te.Expr) -> te.Expr | None:
        return results.get(node.source) if isinstance(node, te.Load) and not node.indices else None  # type: ignore[call-overload]

    return te.rewrite(expr, rule)


def _reduction_kinds(axes: Sequence[te.Var]) -> list[tuple[te.Var, Kind]]:
    """Loops over reduction axes: small windows are written out, of the rest a short innermost one."""
    if extent_of(axes) <= _UNROLLED_REDUCTION:
        return [(axis, Kind.UNROLL) for axis in axes]
    kinds = [(axis, Kind.SERIAL) for axis in axes]
    if axes[-1].extent <= 4:
        kinds[-1] = (axes[-1], Kind.UNROLL)
    return kinds


def _tiled(formula: Formula, machine: CpuMachine, axis: te.Var) -> Program:
    """Accumulators for `rows x (vectors * lanes)` output elements stay in registers while the reductions run.

    for every tile:                                  (parallel)
      acc[m, u, :] = identity
      for k: acc[m, u, :] = fma(a[m, k], b[k, u, :], acc[m, u, :])
      out[m, u, :] = epilogue(acc[m, u, :])
    """
    lanes = lanes_for(formula, machine, axis.extent)
    row_axis = _row_axis(formula, axis)
    rows, vectors = _register_tile(formula, machine, axis, row_axis, lanes)
    tiles = Tiles(axis, lanes * vectors)
    lane, step, row = te.Var("v", lanes), te.Var("u", vectors), te.Var("m", rows)
    position: dict[te.Var, te.Expr] = {axis: tiles.start() + step * lanes + lane}
    row_tiles = None
    if row_axis is not None:
        row_tiles = Tiles(row_axis, rows)
        position[row_axis] = row_tiles.start() + row
    element = row * tiles.size + step * lanes + lane
    in_tile = [(row, Kind.UNROLL), (step, Kind.UNROLL), (lane, Kind.VECTOR)]

    packed = _packed(formula, tiles, step * lanes + lane)
    results: dict[Buffer, te.Expr] = {}
    stmts: list[Stmt] = []
    for reduction in formula.reductions:
        kept = Buffer(
            f"acc_{reduction.result.name}", reduction.result.dtype, rows * tiles.size, Scope.REGISTER
        )
        accumulator = te.Load(kept, (element,))
        read = te.rewrite(reduction.body, lambda node: packed[node].load if node in packed else None)
        body = _with_results(te.substitute(read, position), results)
        update = nest(in_tile, Store(kept, element, _updated(reduction, accumulator, body)))
        stmts.append(nest(in_tile, Store(kept, element, te.reduce_identity(reduction.kind, kept.dtype))))
        stmts.append(nest(_reduction_kinds(reduction.axes), update))
        results[reduction.result] = accumulator
    value = _with_results(te.substitute(formula.value, position), results)
    write = nest(in_tile, Store(formula.output, te.substitute(formula.store, position), value))
    columns = _columns(formula)
    stmts.append(nest([(column, Kind.SERIAL) for column in columns], write))

    work = rows * tiles.size * (sum(2 * r.length for r in formula.reductions) + extent_of(columns))
    nested = parallel_nest(_tile_order(formula, tiles, row_tiles), work, block(*stmts))
    shape = f"{rows} x {vectors} x {lanes}"
    stored = {operand.original: operand for operand in packed.values()}
    names = ", packed " + ", ".join(buffer.name for buffer in stored) if stored else ""
    decisions = f"tiled: {shape} of ({row_axis.name if row_axis else '-'}, {axis.name}){names}"
    program = _program(formula, nested, decisions)
    inputs = [stored[b].buffer if b in stored else b for b in formula.inputs]
    packings = tuple(stored[b].packing if b in stored else None for b in formula.inputs)
    return replace(program, params=(*inputs, formula.output), packings=packings)


def _packed(formula: Formula, tiles: Tiles, element: te.Expr) -> dict[te.Expr, PackedOperand]:
    """Constant operands that are read once, along the vector axis and reduction axes alone: packed, each tile streams
    through memory instead of touching one short piece of every row. `element` is the place in the tile."""
    if tiles.count == 1 or tiles.waste > _PACKING_WASTE:
        return {}
    found: dict[te.Expr, PackedOperand] = {}
    readers = Counter(load.source for expr in formula.expressions() for load in te.loads(expr))
    for reduction in formula.reductions:
        walk = [blocks_of(tiles), *map(whole, reduction.axes), places_in(tiles, element)]
        for load in te.loads(reduction.body):
            if load.source not in formula.constants or readers[load.source] > 1:
                continue
            operand = pack_operand(load, walk)
            if operand is not None and coefficient(load.indices[0], tiles.axis) == 1:
                found[load] = operand
    return found


def _row_axis(formula: Formula, vector_axis: te.Var) -> te.Var | None:
    """The axis that gives the register tile its rows: the one along which most loads stay where they are."""
    offsets = [offset for r in formula.reductions for offset in load_offsets(r.body)]
    best: tuple[int, te.Var] | None = None
    for axis in reversed(formula.rows):
        if axis == vector_axis:
            continue
        reused = sum(coefficient(offset, axis) == 0 for offset in offsets)
        if best is None or reused > best[0]:
            best = (reused, axis)
    return best[1] if best else None


def _register_tile(
    formula: Formula, machine: CpuMachine, axis: te.Var, row_axis: te.Var | None, lanes: int
) -> tuple[int, int]:
    """(rows, vectors) of the accumulator tile: least time per useful element by counting arithmetic and loads.

    A step of the reduction costs rows * vectors multiply-adds (two ports) and rows broadcasts plus `vectors` loads (two
    ports); tiles that overhang the axis waste their share; all accumulators, the vectors of one operand and one
    broadcast must fit the registers.
    """
    per_register = max(
        1, max(r.result.dtype.bytes for r in formula.reductions) * lanes // machine.vector_bytes
    )
    available = machine.vector_registers // (per_register * len(formula.reductions))
    written_out = max(
        (r.length for r in formula.reductions if 0 < r.length <= _UNROLLED_REDUCTION), default=1
    )
    guarded = any(isinstance(node, te.Select) for r in formula.reductions for node in te.walk(r.body))
    most = _UNROLLED_STATEMENTS // (written_out * (3 if guarded else 1))
    row_limit = min(row_axis.extent, 14) if row_axis is not None else 1
    vector_limit = max(1, min(4, axis.extent // lanes))
    best, best_cost = (1, 1), float("inf")
    for vectors in range(1, vector_limit + 1):
        for rows in range(1, row_limit + 1):
            fits = rows * vectors + vectors + 1 <= available and rows * vectors <= most
            if not fits and (rows, vectors) != (1, 1):
                continue
            waste = Tiles(axis, lanes * vectors).waste
            if row_axis is not None:
                waste *= Tiles(row_axis, rows).waste
            arithmetic = max(rows * vectors, 8) / 2  # fewer than 8 chains do not fill the pipeline
            cost = max(arithmetic, (rows + vectors) / 2) + 0.1 * (rows + vectors)
            cost *= waste / (rows * vectors)
            if cost < best_cost:
                best, best_cost = (rows, vectors), cost
    return best


def _tile_order(formula: Formula, tiles: Tiles, row_tiles: Tiles | None) -> list[te.Var]:
    """Loops over tiles, outermost first: axes that all operands share (batch), then the vector axis, so that one panel
    of its operand serves all the rows before the next is read, then the rows."""
    offsets = [offset for r in formula.reductions for offset in load_offsets(r.body)]
    tiled = {tiles.axis} | ({row_tiles.axis} if row_tiles else set())
    others = [axis for axis in formula.rows if axis not in tiled]
    shared = [axis for axis in others if all(coefficient(offset, axis) != 0 for offset in offsets)]
    rest = [axis for axis in others if axis not in shared]
    return [*shared, tiles.var, *rest, *([row_tiles.var] if row_tiles else [])]


def _rowwise(formula: Formula, machine: CpuMachine) -> Program:
    """One row after another; lanes hold partial results of a reduction along the row.

    for every row:                                   (parallel)
      acc[u, :] = identity
      for k in blocks: acc[u, :] = combine(acc[u, :], x[k, u, :])
      result = combine(across lanes(acc), the rest)
      out[columns] = value(result)
    """
    results: dict[Buffer, te.Expr] = {}
    stmts: list[Stmt] = []
    for reduction in formula.reductions:
        lanes = lanes_for(formula, machine, reduction.axes[-1].extent)
        stmts.append(_row_reduction(reduction, results, lanes))
        results[reduction.result] = te.Load(reduction.result, (te.as_index(0),))
    columns = _columns(formula)
    value = _with_results(formula.value, results)
    if not columns:
        stmts.append(Store(formula.output, formula.store, value))
    else:
        axis = columns[-1]
        lanes = lanes_for(formula, machine, axis.extent)
        unroll = 2 if 2 * lanes <= axis.extent else 1
        tiles = Tiles(axis, lanes * unroll)
        lane, step = te.Var("v", lanes), te.Var("u", unroll)
        position = {axis: tiles.start() + step * lanes + lane}
        store = Store(formula.output, te.substitute(formula.store, position), te.substitute(value, position))
        inner = nest([(step, Kind.UNROLL), (lane, Kind.VECTOR)], store)
        stmts.append(nest([*((c, Kind.SERIAL) for c in columns[:-1]), (tiles.var, Kind.SERIAL)], inner))
    work = sum(2 * r.length for r in formula.reductions) + extent_of(columns)
    body = parallel_nest(formula.rows, work, block(*stmts))
    return _program(
        formula, body, "rowwise: " + ", ".join(f"{r.kind} of {r.length}" for r in formula.reductions)
    )


def _row_reduction(reduction: Reduction, results: Mapping[Buffer, te.Expr], lanes: int) -> Stmt:
    name, dtype = reduction.result.name, reduction.result.dtype
    axis = reduction.axes[-1]
    body = _with_results(reduction.body, results)
    identity = te.reduce_identity(reduction.kind, dtype)
    combine = te.REDUCE_COMBINERS[reduction.kind]
    result, zero = reduction.result, te.as_index(0)
    kept_rest = te.Load(result, (zero,))
    blocks = axis.extent // lanes
    unroll = 4 if blocks >= 4 else 1
    partial = Buffer(f"acc_{name}", dtype, unroll * lanes, Scope.REGISTER)
    lane, step = te.Var("v", lanes), te.Var("u", unroll)
    in_block = [(step, Kind.UNROLL), (lane, Kind.VECTOR)]

    def accumulate(element: te.Expr, position: te.Expr) -> Store:
        at = te.substitute(body, {axis: position})
        return Store(partial, element, _updated(reduction, te.Load(partial, (element,)), at))

    along: list[Stmt] = []
    if lanes > 1:
        wide = te.Var(f"{axis.name}_b", blocks // unroll)
        element = step * lanes + lane
        along.append(
            nest([(wide, Kind.SERIAL), *in_block], accumulate(element, wide * (lanes * unroll) + element))
        )
        done = wide.extent * unroll
        if blocks > done:
            narrow = te.Var(f"{axis.name}_n", blocks - done)
            along.append(
                nest(
                    [(narrow, Kind.SERIAL), (lane, Kind.VECTOR)],
                    accumulate(lane, (narrow + done) * lanes + lane),
                )
            )
    covered = blocks * lanes if lanes > 1 else 0
    if axis.extent > covered:
        tail = te.Var(f"{axis.name}_r", axis.extent - covered)
        at = te.substitute(body, {axis: tail + covered})
        along.append(nest([(tail, Kind.SERIAL)], Store(result, zero, _updated(reduction, kept_rest, at))))

    stmts: list[Stmt] = [Store(result, zero, identity)]
    if lanes > 1:
        stmts.append(nest(in_block, Store(partial, step * lanes + lane, identity)))
    stmts.append(nest([(outer, Kind.SERIAL) for outer in reduction.axes[:-1]], block(*along)))
    if lanes > 1:
        for other in range(1, unroll):
            both = te.call(combine, te.Load(partial, (lane,)), te.Load(partial, (lane + other * lanes,)))
            stmts.append(nest([(lane, Kind.VECTOR)], Store(partial, lane, both)))
        across = Across(reduction.kind, partial, 0, lanes)
        stmts.append(Store(result, zero, te.call(combine, kept_rest, across)))
    return block(*stmts)
