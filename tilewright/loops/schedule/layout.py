"""The memory layout of an operand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewright import te
from tilewright.errors import ScheduleError
from tilewright.loops.ir import Scope
from tilewright.loops.schedule.nest import (
    Fetch,
    Nest,
    Tile,
    find_tile,
    fresh,
    leaves,
    plain,
    reads,
    replaced,
    stage_nest,
    walk,
    with_loads,
)
from tilewright.loops.text import print_expr
from tilewright.runtime.packing import Packing
from tilewright.te.index import bounds, linear, simplify


def pack(nest: Nest, tensor: str, blocks: Sequence[int], order: Sequence[int] | None = None) -> Nest:
    """Read a tensor from a copy that is stored block by block; `blocks` has the block size along each axis.

        b: f32[64, 48]                        b: f32[1, 3, 64, 16], packed when the model is linked
        out[..] += a[..] * b[k, jo * 16 + ji]   ->   out[..] += a[..] * b[0, jo, k, ji]

    By default the block indices are outermost, then the indices within a block, both in the order of the axes.
    `order` overrides this with a permutation of (blocks of axis 0, indices of axis 0, blocks of axis 1, ...),
    outermost first. If the size does not divide an axis, the last block overlaps, like a tile of a split with
    tail="shift".

    A constant input is stored in this order when the model is linked (`Program.packings`). For other tensors a new
    stage `tensor.packed` makes the copy; `compute_at` places it. Needs: an input, or a stage computed outside the
    loops of other stages. If a block does not divide its axis, every reader must already iterate over tiles of this
    size, made by a split with tail="shift". Other names: a packed layout in transform_layout (TVM).
    """
    tile = find_tile(nest, tensor)
    if len(blocks) != len(tile.shape):
        raise ScheduleError(f"pack: {tensor} has {len(tile.shape)} axes; got blocks for {len(blocks)}")
    for axis, (extent, block) in enumerate(zip(tile.shape, blocks, strict=True)):
        if not 1 <= block <= extent:
            raise ScheduleError(
                f"pack: axis {axis} of {tensor} has {extent} elements; a block has 1 to {extent}, not {block}"
            )
    rank = 2 * len(blocks)
    chosen = tuple(order) if order is not None else (*range(0, rank, 2), *range(1, rank, 2))
    if sorted(chosen) != list(range(rank)):
        raise ScheduleError(f"pack: {list(chosen)} is not an order of the {rank} axes of the packed {tensor}")
    if not any(reads(leaf, tile) for _, leaf in leaves(nest.body)):
        raise ScheduleError(f"pack: nothing reads {tensor}")
    packing = Packing(tile.shape, tuple(blocks), chosen)
    if tensor in nest.constants:
        return _packed_constant(nest, tile, packing)
    return _packed_copy(nest, tile, packing)


def _packed_constant(nest: Nest, tile: Tile, packing: Packing) -> Nest:
    number = nest.inputs.index(tile)
    if nest.packings[number] is not None:
        raise ScheduleError(f"pack: {tile.name} is packed already")
    if any(isinstance(node, Fetch) and node.tile == tile for _, node in walk(nest.body)):
        raise ScheduleError(f"pack: {tile.name} is already prefetched unpacked; pack it first")
    packed = replace(tile, shape=packing.packed_shape)
    return replace(
        nest,
        inputs=tuple(packed if other == tile else other for other in nest.inputs),
        packings=tuple(packing if n == number else other for n, other in enumerate(nest.packings)),
        body=with_loads(nest.body, tile, lambda indices: te.Load(packed, _position(tile, indices, packing))),
    )


def _packed_copy(nest: Nest, tile: Tile, packing: Packing) -> Nest:
    if tile.scope is not Scope.GLOBAL:
        plain(nest, tile.name)
    name = fresh(nest, f"{tile.name}.packed")
    packed = Tile(name, tile.dtype, packing.packed_shape, Scope.SCRATCH)

    def element(positions: tuple[te.Expr, ...]) -> te.Expr:
        part = dict(zip(packing.order, positions, strict=True))
        indices: list[te.Expr] = []
        for axis, (extent, block) in enumerate(zip(tile.shape, packing.blocks, strict=True)):
            start = part[2 * axis] * block
            if extent % block:
                start = te.call("min", start, extent - block)
            indices.append(simplify(start + part[2 * axis + 1]))
        return te.Load(tile, tuple(indices))

    body = with_loads(nest.body, tile, lambda indices: te.Load(packed, _position(tile, indices, packing)))
    first = next(node for node in body if any(reads(leaf, packed) for _, leaf in leaves((node,))))
    copy = stage_nest(name, packed, [], None, element)
    return replace(nest, body=replaced(body, first, (*copy, first)))


def _position(tile: Tile, indices: tuple[te.Expr, ...], packing: Packing) -> tuple[te.Expr, ...]:
    """The index of the element at `indices` in the packed tensor."""
    parts: list[te.Expr] = []
    for axis, (index, extent, block) in enumerate(zip(indices, tile.shape, packing.blocks, strict=True)):
        if block == extent:
            parts += [te.as_index(0), index]
        elif extent % block == 0:
            parts += [simplify(index // block), simplify(index % block)]
        else:
            parts += _in_shifted_tile(tile, axis, index, extent, block)
    return tuple(parts[part] for part in packing.order)


def _in_shifted_tile(tile: Tile, axis: int, index: te.Expr, extent: int, block: int) -> list[te.Expr]:
    """(block, index in it) of `min(x * block, extent - block) + position`."""
    form = linear(index)
    for atom, factor in form.terms.items():
        if not (isinstance(atom, te.Call) and atom.op == "min" and factor == 1):
            continue
        start, end = atom.args
        if end != te.as_index(extent - block):
            continue
        position = form + linear(atom).scaled(-1)
        low, high = bounds(position.expr())
        walked = linear(start)
        whole = not walked.constant % block and not any(c % block for c in walked.terms.values())
        if whole and low is not None and high is not None and low >= 0 and high < block:
            return [simplify(start // block), position.expr()]
    raise ScheduleError(
        f"pack: {tile.name} is read at {print_expr(index)} along axis {axis}, not in tiles of {block} of its {extent}"
        " elements",
        remedy=f'split the loop by {block} with tail="shift" before packing',
    )
