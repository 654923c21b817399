"""Tiles that a GPU's tensor copy engine can fill: those that are boxes of a matrix in memory.

for i < 64: for j < 64:                                          the box from (m0, k0) on, of the matrix x; what of
  tile[i, j] = x[m0 + i, k0 + j] if m0 + i < M else 0     ->     it is outside of x is zero
"""

from __future__ import annotations

from dataclasses import replace

from tilewright import te
from tilewright.dtypes import DType
from tilewright.errors import PipelineError
from tilewright.hw.bulk_copies import ALIGNMENT, MAX_BOX, Box
from tilewright.hw.gpu import GpuMachine
from tilewright.hw.warpgroups import ATOM_ROWS, ROW_BYTES
from tilewright.loops.ir import Scope
from tilewright.loops.schedule.nest import (
    BoxTransfer,
    Leaf,
    Loop,
    Nest,
    Node,
    Path,
    Tile,
    find_leaf,
    identity,
    leaves,
    replaced,
)
from tilewright.te.index import simplify

_TYPES = (DType.F16, DType.BF16, DType.F32)


class NoBox(PipelineError):
    """Why the copy engine cannot fill a tile."""


def box_of(nest: Nest, tensor: str) -> BoxTransfer:
    """The copy of a whole tile as a box. Raises NoBox with the reason if it is none."""
    path, leaf = find_leaf(nest, tensor)
    tile = leaf.target

    def no_box(why: str, remedy: str = 'copy="async" copies it by threads') -> NoBox:
        return NoBox(f"pipeline: {tensor}: it is no box of a matrix: {why}", remedy=remedy)

    load, conditions = _copied(leaf)
    if load is None:
        raise no_box("it is computed")
    source = load.source
    assert isinstance(source, Tile)
    if source.scope is not Scope.GLOBAL or tile.scope is not Scope.SCRATCH:
        raise no_box(f"it is copied from {source.scope.value} to {tile.scope.value} memory")
    if tile.dtype not in _TYPES:
        raise no_box(
            f"its elements are {tile.dtype.short}, and a box has {', '.join(t.short for t in _TYPES)}"
        )
    if len(tile.shape) < 2 or len(source.shape) < 2:
        raise no_box(f"{source.name} has the shape {list(source.shape)}, which is no matrix")
    *others, rows, columns = tile.shape
    row_bytes = columns * tile.dtype.bytes
    if any(extent != 1 for extent in others):
        raise no_box(f"the tile has the axes {list(tile.shape)}")
    if not tile.swizzled or row_bytes not in ROW_BYTES:
        raise no_box(
            f"its rows have {row_bytes} bytes and are {'' if tile.swizzled else 'not '}swizzled, and a box has rows of"
            f" {', '.join(map(str, sorted(ROW_BYTES)))} swizzled bytes",
            f"swizzle({tensor!r}), and split the loops that the tile is placed in so that its rows are as long",
        )
    if rows > MAX_BOX or rows % ATOM_ROWS:
        raise no_box(f"it has {rows} rows, and a box 8, 16, 24, ... {MAX_BOX}")
    moving = {var for index in leaf.indices for var in te.variables(index)}
    moved = [axis for axis, index in enumerate(load.indices) if te.variables(index) & moving]
    last = len(source.shape) - 1
    if moved not in ([last - 1, last], [last]) and not (len(moved) == 2 and moved[1] == last):
        raise no_box(
            f"its rows do not lie along the last axis of {source.name}, and its columns along another"
        )
    across = moved[0] if len(moved) == 2 else last - 1
    starts = {
        axis: simplify(load.indices[axis] - leaf.indices[at]) for axis, at in ((across, -2), (last, -1))
    }
    if any(te.variables(start) & moving for start in starts.values()):
        raise no_box(f"neighbours in it are not neighbours in {source.name}")
    strides = [1]
    for extent in reversed(source.shape[1:]):
        strides.insert(0, strides[0] * extent)
    stride = strides[across]
    if stride * tile.dtype.bytes % ALIGNMENT:
        raise no_box(f"its rows begin at multiples of {stride * tile.dtype.bytes} bytes, not of {ALIGNMENT}")
    row, column = starts[across], starts[last]
    for axis, index in enumerate(load.indices):
        if axis < across:
            row = row + index * (strides[axis] // stride)
        elif across < axis < last:
            column = column + index * strides[axis]
    height = source.size // stride
    joined = {across: height != source.shape[across], last: across != last - 1}
    for condition in conditions:
        edge = next(
            (axis for axis in starts if condition in _edges(load.indices[axis], source.shape[axis])), None
        )
        if edge is None:
            raise no_box("a condition other than the edge of a matrix decides what is zero")
        if joined[edge]:
            raise no_box(f"elements past the end of its axis {edge} belong to another part of {source.name}")
    inner = _loops_of_fill(path)
    if any(te.variables(start) & {loop.var for loop in inner} for start in (row, column)):
        raise no_box("the loops that fill it do not fill it once")
    width = source.shape[last] if not joined[last] else stride
    return BoxTransfer(tile, source, height, width, stride, simplify(row), simplify(column))


def why_not_bulk(nest: Nest, tensor: str, machine: GpuMachine | None = None) -> str | None:
    """Why the copy engine does not fill a tile, in a few words; None if it can."""
    if machine is not None and not machine.bulk_copy:
        return f"{machine.name} has no copy engine"
    try:
        box_of(nest, tensor)
    except NoBox as error:
        return error.message.partition("no box of a matrix: ")[2]
    return None


def box(transfer: BoxTransfer) -> Box:
    return Box(transfer.target.dtype, *transfer.target.shape[-2:])


def with_boxes(nest: Nest) -> Nest:
    """The nest in which a box replaces the loops that fill a tile, for each tile that the copy engine fills."""
    for name in nest.bulk:
        path, leaf = find_leaf(nest, name)
        inner = _loops_of_fill(path)
        root: Node = inner[0] if inner else leaf
        nest = replace(nest, body=replaced(nest.body, root, (box_of(nest, name),)))
    return nest


def _loops_of_fill(path: Path) -> tuple[Loop, ...]:
    """The loops around a stage that do nothing but run it."""
    for number, loop in enumerate(path):
        if len(leaves((loop,))) == 1:
            return path[number:]
    return ()


def _copied(leaf: Leaf) -> tuple[te.Load | None, list[te.Expr]]:
    """What a stage copies, and the conditions without which it is zero."""
    value = leaf.value
    conditions: list[te.Expr] = list(leaf.guards)
    if isinstance(value, te.Select) and value.other == identity(leaf):
        conditions += _parts(value.cond)
        value = value.then
    return (value if leaf.kind is None and isinstance(value, te.Load) else None), conditions


def _parts(condition: te.Expr) -> list[te.Expr]:
    if isinstance(condition, te.Call) and condition.op == "and":
        return [part for each in condition.args for part in _parts(each)]
    return [simplify(condition)]


def _edges(index: te.Expr, extent: int) -> tuple[te.Expr, te.Expr]:
    within = te.call("lt", index, te.as_index(extent)), te.call("le", te.as_index(0), index)
    return simplify(within[0]), simplify(within[1])
