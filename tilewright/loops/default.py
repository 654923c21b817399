"""The default program of any task, chosen without measuring.

Seven shapes of loop nest cover every formula:

- `elementwise`: no reduction; one vector axis, the rest outside (`elementwise.py`).
- `transposed`: the same, read along another axis than it is written along: tiles transposed in registers
  (`transposed.py`; `transpose_unaligned.py` if rows are not aligned to cache lines).
- `upsampled`: the same, a few results from the same neighbours (`upsample.py`).
- `tiled`: reductions whose loads are contiguous along an axis of the *output* (matmuls, convolutions,
  pooling, sums over leading axes). A tile of `rows x vectors` accumulators stays in registers while the reduction
  runs.
- `pooled`: the same if windows move along the vector axis: first over the window's rows, then over its columns
  (`pooling.py`).
- `columns`: the same if a long sum or an argmax reads every element once: accumulators are in L1 (`columns.py`).
- `rowwise`: reductions that are contiguous along the *reduced* axis (softmax, norms, sums over the last axis). Lanes
  hold partial results, combined at the end of the row (`rowwise.py`, as `row_plan.py` decides; `rowwise_streamed.py`
  if short rows end within a line).

In all of them, the outermost loop is parallel, the last tile of an axis overlaps its neighbour instead of having a
tail loop, an output much larger than the caches is written with non-temporal stores, and argmax indices are as narrow
as possible (`argreduce.py`). The choice between shapes counts memory accesses (`vector_cost`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tilewright import te
from tilewright.hw import CpuMachine
from tilewright.loops.argreduce import with_narrow_indices
from tilewright.loops.columns import columns_program
from tilewright.loops.elementwise import elementwise_program
from tilewright.loops.formula import Formula
from tilewright.loops.ir import Buffer, Kind, Program, Scope, Stmt, Store, block, nest
from tilewright.loops.pooling import pooled_program
from tilewright.loops.rowwise import rowwise_program
from tilewright.loops.rowwise_streamed import streamed_rows_program
from tilewright.loops.tiling import (
    PackedOperand,
    Tiles,
    blocks_of,
    columns_of,
    contiguous_last,
    extent_of,
    indices_in,
    is_streamed,
    lanes_for,
    load_offsets,
    pack_operand,
    parallel_nest,
    updated,
    vector_cost,
    whole,
    with_results,
    with_values,
)
from tilewright.loops.transposed import transposed_program
from tilewright.loops.upsample import upsample_program
from tilewright.te.index import coefficient

_UNROLLED_REDUCTION = 9  # a 3x3 window is unrolled
_UNROLLED_STATEMENTS = 108  # maximum unrolled, window times register tile: code size and compile time
_PACKING_WASTE = 1.25  # factor by which a packed constant may grow if the last tile overlaps
_COMBINING_ACROSS = 8  # vector operations to combine the lanes at the end of a row


def default_program(formula: Formula, machine: CpuMachine) -> Program:
    if not formula.reductions:
        moved = transposed_program(formula, machine) or upsample_program(formula, machine)
        return moved or elementwise_program(formula, machine)
    formula = with_narrow_indices(formula)
    pooled = pooled_program(formula, machine)
    if pooled is not None:
        return pooled
    spatial = _best_spatial_axis(formula, machine)
    if spatial is not None and spatial.cost <= _rowwise_cost(formula, machine):
        return columns_program(formula, machine, spatial.axis) or _tiled(formula, machine, spatial.axis)
    return streamed_rows_program(formula, machine) or rowwise_program(formula, machine)


# -- the choice of the vector axis ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Spatial:
    axis: te.Var
    cost: float


def _best_spatial_axis(formula: Formula, machine: CpuMachine) -> _Spatial | None:
    """The output axis along which the reductions vectorise best, and the cost per row."""
    best: _Spatial | None = None
    columns = extent_of(columns_of(formula))
    for axis in reversed(formula.rows):
        lanes = lanes_for(formula, machine, axis.extent)
        cost = sum(r.length * vector_cost(load_offsets(r.body), axis, lanes) for r in formula.reductions)
        cost += columns * vector_cost(load_offsets(formula.value), axis, lanes, [formula.store])
        if best is None or cost < best.cost:
            best = _Spatial(axis, cost)
    return best


def _rowwise_cost(formula: Formula, machine: CpuMachine) -> float:
    cost = 0.0
    for reduction in contiguous_last(formula).reductions:
        if not reduction.axes:
            return float("inf")
        axis = reduction.axes[-1]
        lanes = lanes_for(formula, machine, axis.extent)
        cost += reduction.length * vector_cost(load_offsets(reduction.body), axis, lanes) + _COMBINING_ACROSS
    columns = columns_of(formula)
    if columns:
        lanes = lanes_for(formula, machine, columns[-1].extent)
        cost += extent_of(columns) * vector_cost(
            load_offsets(formula.value), columns[-1], lanes, [formula.store]
        )
    return cost


# -- accumulators in registers ----------------------------------------------------------------------------------------


def _reduction_kinds(axes: Sequence[te.Var]) -> list[tuple[te.Var, Kind]]:
    """Loop kinds for reduction axes: small windows are unrolled, and otherwise a short innermost axis."""
    if extent_of(axes) <= _UNROLLED_REDUCTION:
        return [(axis, Kind.UNROLL) for axis in axes]
    kinds = [(axis, Kind.SERIAL) for axis in axes]
    if axes[-1].extent <= 4:
        kinds[-1] = (axes[-1], Kind.UNROLL)
    return kinds


def _tiled(formula: Formula, machine: CpuMachine, axis: te.Var) -> Program:
    """Keep accumulators for `rows x (vectors * lanes)` output elements in registers while the reductions run.

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
        body = with_results(te.substitute(read, position), results)
        update = nest(in_tile, Store(kept, element, updated(reduction, accumulator, body)))
        stmts.append(nest(in_tile, Store(kept, element, te.reduce_identity(reduction.kind, kept.dtype))))
        stmts.append(nest(_reduction_kinds(reduction.axes), update))
        results[reduction.result] = accumulator
    value = with_results(te.substitute(formula.value, position), results)
    coord = te.substitute(formula.store, position)
    write = nest(in_tile, Store(formula.output, coord, value, is_streamed(formula, machine)))
    columns = columns_of(formula)
    stmts.append(nest([(column, Kind.SERIAL) for column in columns], write))

    work = rows * tiles.size * (sum(2 * r.length for r in formula.reductions) + extent_of(columns))
    nested = parallel_nest(_tile_order(formula, tiles, row_tiles), work, block(*stmts))
    shape = f"{rows} x {vectors} x {lanes}"
    stored = {operand.original: operand for operand in packed.values()}
    names = ", packed " + ", ".join(buffer.name for buffer in stored) if stored else ""
    decisions = f"tiled: {shape} of ({row_axis.name if row_axis else '-'}, {axis.name}){names}"
    inputs = [stored[b].buffer if b in stored else b for b in formula.inputs]
    packings = tuple(stored[b].packing if b in stored else None for b in formula.inputs)
    return Program(formula.name, (*inputs, formula.output), with_values(nested, {}), decisions, packings)


def _packed(formula: Formula, tiles: Tiles, element: te.Expr) -> dict[te.Expr, PackedOperand]:
    """Pack constant operands that are read once, along the vector axis and the reduction axes only. Then each tile
    streams through memory instead of reading a short run of every row. `element` is the index in the tile."""
    if tiles.count == 1 or tiles.waste > _PACKING_WASTE:
        return {}
    found: dict[te.Expr, PackedOperand] = {}
    readers = Counter(load.source for expr in formula.expressions() for load in te.loads(expr))
    for reduction in formula.reductions:
        walk = [blocks_of(tiles), *map(whole, reduction.axes), indices_in(tiles, element)]
        for load in te.loads(reduction.body):
            if load.source not in formula.constants or readers[load.source] > 1:
                continue
            operand = pack_operand(load, walk)
            if operand is not None and coefficient(load.indices[0], tiles.axis) == 1:
                found[load] = operand
    return found


def _row_axis(formula: Formula, vector_axis: te.Var) -> te.Var | None:
    """The axis for the rows of the register tile: the one that most loads are independent of."""
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
    """(rows, vectors) of the accumulator tile with the least time per useful element, by counting arithmetic and
    loads.

    A step of the reduction costs rows * vectors FMAs (two ports) and rows broadcasts plus `vectors` loads (two
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
    if row_axis is not None and written_out > 1 and not _is_reused(formula, row_axis):
        row_limit = 1  # each additional row is another stream from memory
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


def _is_reused(formula: Formula, axis: te.Var) -> bool:
    """Whether some element is read for several indices along the axis."""
    for reduction in formula.reductions:
        for offset in load_offsets(reduction.body):
            step = coefficient(offset, axis)
            along = [(coefficient(offset, window) or 0, window.extent) for window in reduction.axes]
            if not step or any(0 < inside <= step < inside * extent for inside, extent in along):
                return True
    return False


def _tile_order(formula: Formula, tiles: Tiles, row_tiles: Tiles | None) -> list[te.Var]:
    """The order of loops over tiles, outermost first: axes that all operands share (batch), then the vector axis, so
    that one panel serves all rows, then the rows. If no operand serves several rows, the memory order is used."""
    offsets = [offset for r in formula.reductions for offset in load_offsets(r.body)]
    loops = {tiles.axis: tiles.var} | ({row_tiles.axis: row_tiles.var} if row_tiles else {})
    shared = [a for a in formula.rows if all(coefficient(offset, a) != 0 for offset in offsets)]
    if len(shared) == len(formula.rows):
        return [loops.get(axis, axis) for axis in formula.rows]
    others = [axis for axis in formula.rows if axis not in loops]
    rest = [axis for axis in others if axis not in shared]
    batch = [axis for axis in others if axis in shared]
    return [*batch, tiles.var, *rest, *([row_tiles.var] if row_tiles else [])]
