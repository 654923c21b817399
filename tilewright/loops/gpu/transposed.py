"""Formulas that read and write along different axes: tiles transposed in shared memory.

    for tiles:                                        (parallel)
      for threads: tile[b, a] = x[a, b]               (neighbours along a: as it is read)
      for threads: out[b, a] = value of tile[b, a]    (neighbours along b: as it is written)

Small elements are read and written in vectors; each written vector is gathered from several rows of the tile. The
vectors of a row are rotated by one position per vector of rows, so that threads that write neighbouring vectors read
from different banks. Larger elements use a tile whose rows are padded by one element.
"""

from __future__ import annotations

from tilewright import te
from tilewright.hw.gpu import GpuMachine
from tilewright.loops.formula import Formula
from tilewright.loops.gpu.thread_index import THREADS, positions, under, vector_lanes
from tilewright.loops.ir import Buffer, For, Kind, Program, Scope, Stmt, Store, block, nest
from tilewright.loops.tiling import extent_of, with_values
from tilewright.loops.transpose_pattern import loads_across, written_axis
from tilewright.support.arith import ceil_div
from tilewright.te.index import coefficient, simplify

_MIN = 8  # minimum elements along both axes for a tile
_MAX = 3  # maximum transposed loads


def transposed_program(formula: Formula, machine: GpuMachine) -> Program | None:
    """The program; None if nothing is transposed, or an access is not linear."""
    written = written_axis(formula)
    if written is None or written.extent < _MIN:
        return None
    across = loads_across(formula, written)
    read = _read_axis(formula, across, written)
    if read is None:
        return None
    transposed = [load for load in dict.fromkeys(across) if coefficient(load.indices[0], read) == 1]
    if not transposed or len(transposed) > _MAX or any(te.loads(load.indices[0]) for load in transposed):
        return None
    small = max(load.dtype.bytes for load in transposed) <= 2
    lanes = _lanes(formula, read, written, transposed) if small else 1
    return _program(formula, read, written, transposed, 64 if small else 32, lanes)


def _lanes(formula: Formula, read: te.Var, written: te.Var, transposed: list[te.Load]) -> int:
    """Neighbours that are read together along one axis and written together along the other."""
    loads = [(load.indices[0], load.dtype.bytes) for load in transposed]
    store = (formula.store, formula.output.dtype.bytes)
    return min(vector_lanes(loads, read), vector_lanes([store], written))


def _read_axis(formula: Formula, across: list[te.Load], written: te.Var) -> te.Var | None:
    """The axis along which most loads that are not contiguous along `written` are contiguous."""
    counts = {
        axis: sum(coefficient(load.indices[0], axis) == 1 for load in across)
        for axis in formula.axes
        if axis != written and axis.extent >= _MIN
    }
    best = max(counts, key=lambda axis: counts[axis], default=None)
    return best if best is not None and counts[best] else None


def _program(
    formula: Formula, read: te.Var, written: te.Var, transposed: list[te.Load], side: int, lanes: int
) -> Program:
    others = [axis for axis in formula.axes if axis not in (read, written)]
    tiles_read = te.Var(f"{read.name}_t", ceil_div(read.extent, side))
    tiles_written = te.Var(f"{written.name}_t", ceil_div(written.extent, side))
    grid = [*others, tiles_read, tiles_written]
    at, thread = te.Var("b", extent_of(grid)), te.Var("t", THREADS)
    step, lane = te.Var("u", side * side // lanes // THREADS), te.Var("v", lanes)
    base = positions(at, grid)
    number = step * THREADS + thread
    per_row = side // lanes  # vectors
    vector, row = number % per_row, number // per_row

    def coord(along_read: te.Expr, along_written: te.Expr) -> dict[te.Var, te.Expr]:
        return {
            **{axis: base[axis] for axis in others},
            read: base[tiles_read] * side + along_read,
            written: base[tiles_written] * side + along_written,
        }

    def inside(where: dict[te.Var, te.Expr]) -> te.Expr | None:
        limited = [axis for axis in (read, written) if axis.extent % side]
        return te.all_of([te.call("lt", where[axis], axis.extent) for axis in limited])

    def first(where: dict[te.Var, te.Expr]) -> dict[te.Var, te.Expr]:
        """The index of the first element of a vector."""
        return {axis: te.substitute(expr, {lane: te.as_index(0)}) for axis, expr in where.items()}

    def in_tile(along_written: te.Expr, along_read: te.Expr) -> te.Expr:
        if lanes == 1:
            return along_written * (side + 1) + along_read
        moved = (along_read // lanes + along_written // lanes) % per_row
        return simplify(along_written * side + moved * lanes + along_read % lanes)

    def vectors_of(stmt: Stmt) -> Stmt:
        return nest([(lane, Kind.VECTOR)], stmt) if lanes > 1 else stmt

    along = vector * lanes + lane if lanes > 1 else vector
    size = side * (side if lanes > 1 else side + 1)
    tiles: dict[te.Expr, Buffer] = {}
    fills: list[Stmt] = []
    where = coord(along, row)
    for load in transposed:
        tile = Buffer(f"tile{len(tiles)}", load.dtype, size, Scope.SCRATCH)
        tiles[load] = tile
        fills.append(vectors_of(Store(tile, in_tile(row, along), te.substitute(load, where))))
    held = {load: te.Load(tile, (in_tile(along, row),)) for load, tile in tiles.items()}
    value = te.rewrite(formula.value, held.get)
    target = coord(row, along)
    write = Store(
        formula.output, simplify(te.substitute(formula.store, target)), te.substitute(value, target)
    )
    filled = For(thread, Kind.THREAD, nest([(step, Kind.UNROLL)], under(inside(first(where)), block(*fills))))
    drained = For(
        thread, Kind.THREAD, nest([(step, Kind.UNROLL)], under(inside(first(target)), vectors_of(write)))
    )
    body = with_values(nest([(at, Kind.PARALLEL)], block(filled, drained)), {})
    words = f"transposed: tiles of {side} x {side} of ({read.name}, {written.name}), {THREADS} threads"
    if lanes > 1:
        words += f", {lanes} at once"
    return Program(formula.name, (*formula.inputs, formula.output), body, words)
