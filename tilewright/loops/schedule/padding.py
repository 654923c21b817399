"""The primitives `pad` and `widen`: room at the end of a sum's axes, and of a tile's rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tilewright import te
from tilewright.errors import ScheduleError
from tilewright.loops.ir import Scope
from tilewright.loops.schedule.nest import (
    Leaf,
    Loop,
    Nest,
    PlainStage,
    Tile,
    find_leaf,
    find_tile,
    identity,
    leaves,
    plain,
    reads,
    replaced,
    stage_nest,
    with_loads,
    with_tile,
)


def pad(nest: Nest, stage: str, factors: Sequence[int], reduced: Sequence[int]) -> Nest:
    """Round the axes of a sum of products up, so that tiles divide them: its operands are zero beyond their ends.

        for i < 13: for k < 30:                     for i < 16: for k < 32:
          t[i, k] = x[i, k]                           t[i, k] = x[i, k] if i < 13 and k < 30 else 0
        for i < 13: for k < 30:            ->       for i < 16: for k < 32:
          p[i] += t[i, k] * w[i]                      p[i] += t[i, k] * w[i]

    `factors` has a number for each axis of the stage, `reduced` one for each of its reduction loops; the new extents
    are multiples of them. Needs: a sum of products, whose operands along these axes are stages that only it reads;
    nothing has been done to any of them. Readers of the stage read what they read before. Other names: pad_einsum
    (TVM).
    """
    found = plain(nest, stage)
    leaf = found.leaf
    if leaf.kind != "sum" or not (isinstance(leaf.value, te.Call) and leaf.value.op == "mul"):
        raise ScheduleError(f"pad: stage {stage} is not a sum of products: zeros would change it")
    if leaf.target.scope is Scope.GLOBAL:
        raise ScheduleError(
            f"pad: stage {stage} is the output", remedy="cache_write gives it a tile of its own"
        )
    for given, axes, what in (
        (factors, leaf.target.shape, "axes"),
        (reduced, found.reductions, "reduction loops"),
    ):
        if len(given) != len(axes) or any(factor < 1 for factor in given):
            raise ScheduleError(f"pad: stage {stage} has {len(axes)} {what}, got the factors {list(given)}")
    shape = tuple(_up(extent, factor) for extent, factor in zip(leaf.target.shape, factors, strict=True))
    loops = [
        Loop(te.Var(loop.name, _up(loop.var.extent, factor)), ())
        for loop, factor in zip(found.reductions, reduced, strict=True)
    ]
    extents = {axis: extent for axis, extent in zip(found.axes, shape, strict=True) if axis is not None}
    extents |= {old.var: new.var.extent for old, new in zip(found.reductions, loops, strict=True)}
    longer = {axis for axis, extent in extents.items() if extent > axis.extent}
    summed = {loop.var for loop in found.reductions} & longer
    operands: dict[Tile, dict[int, int]] = {}
    zero: set[te.Var] = set()
    for load in te.loads(leaf.value):
        moving = {axis for index in load.indices for axis in te.variables(index)} & longer
        if not moving:
            continue
        assert isinstance(load.source, Tile)
        sides = {
            number: extents[i]
            for number, i in enumerate(load.indices)
            if isinstance(i, te.Var) and i in moving
        }
        _check_operand(nest, stage, load, len(sides) == len(moving))
        if operands.setdefault(load.source, sides) != sides:
            raise ScheduleError(f"pad: stage {stage} reads {load.source.name} along different axes")
        if any(load == _unconverted(factor) for factor in leaf.value.args):
            zero |= moving
    if summed - zero:
        names = ", ".join(sorted(axis.name for axis in summed - zero))
        raise ScheduleError(
            f"pad: no factor of stage {stage} is an operand along {names}: its products are not zero"
        )
    for tile, sides in operands.items():
        nest = _padded_operand(nest, tile, sides)
    return _longer(nest, plain(nest, stage), shape, loops)


def widen(nest: Nest, tensor: str, gap: int) -> Nest:
    """Leave unused elements after each row of a tile.

        scratch t: f32[16, 32]     ->     scratch t: f32[16, 32], rows of 40

    The same column of neighbouring rows is then in different banks of a GPU's shared memory. Needs: a local tile in
    memory, of at least two axes, that is not swizzled. Other names: storage_align (TVM), padding (CUTLASS).
    """
    _, leaf = find_leaf(nest, tensor)
    tile = leaf.target
    if tile.scope in (Scope.GLOBAL, Scope.REGISTER) or len(tile.shape) < 2:
        raise ScheduleError(
            f"widen: {tensor} must be a tile of at least two axes in scratch or shared memory"
        )
    if tile.swizzled:
        raise ScheduleError(f"widen: {tensor} is swizzled, which keeps its rows in different banks already")
    if gap < 0:
        raise ScheduleError(f"widen: {tensor}: a gap of {gap} elements; at least 0")
    return with_tile(nest, tile, replace(tile, gap=gap))


def _unconverted(expr: te.Expr) -> te.Expr:
    while isinstance(expr, te.Cast):
        expr = expr.value
    return expr


def _up(extent: int, factor: int) -> int:
    return -(-extent // factor) * factor


def _check_operand(nest: Nest, stage: str, load: te.Load, plainly: bool) -> None:
    name = load.source.name
    if not plainly:
        raise ScheduleError(f"pad: stage {stage} reads {name} at an index that is not one of its axes")
    tile = find_tile(nest, name)
    if tile.scope is Scope.GLOBAL:
        raise ScheduleError(
            f"pad: stage {stage} reads {name}, which ends where it ends",
            remedy="cache_read gives it a copy to pad",
        )
    readers = [leaf.stage for _, leaf in leaves(nest.body) if reads(leaf, tile)]
    if readers != [stage]:
        raise ScheduleError(f"pad: {name} is read by {', '.join(readers)}, not by {stage} alone")


def _padded_operand(nest: Nest, tile: Tile, sides: Mapping[int, int]) -> Nest:
    """The nest with an operand of these extents along some axes, zero beyond its own."""
    found = plain(nest, tile.name)
    if found.leaf.kind is not None:
        raise ScheduleError(
            f"pad: the operand {tile.name} is a reduction", remedy="cache_read gives it a copy to pad"
        )
    shape = tuple(sides.get(axis, extent) for axis, extent in enumerate(tile.shape))

    def value(indices: tuple[te.Expr, ...]) -> te.Expr:
        conditions = [
            te.call("lt", indices[axis], te.as_index(tile.shape[axis]))
            for axis in sides
            if sides[axis] > tile.shape[axis]
        ]
        element, zero = found.value_at(indices), identity(found.leaf)
        if isinstance(element, te.Select) and element.other == zero:
            conditions.append(element.cond)
            element = element.then
        inside = te.all_of(conditions)
        return element if inside is None else te.select(inside, element, zero)

    return _replaced(nest, found, shape, [], value)


def _longer(nest: Nest, found: PlainStage, shape: tuple[int, ...], loops: list[Loop]) -> Nest:
    variables = dict(zip((loop.var for loop in found.reductions), (loop.var for loop in loops), strict=True))

    def value(indices: tuple[te.Expr, ...]) -> te.Expr:
        return te.substitute(found.value_at(indices), variables)

    return _replaced(nest, found, shape, loops, value)


def _replaced(
    nest: Nest,
    found: PlainStage,
    shape: tuple[int, ...],
    loops: list[Loop],
    value: Callable[[tuple[te.Expr, ...]], te.Expr],
) -> Nest:
    leaf: Leaf = found.leaf
    larger = replace(leaf.target, shape=shape)
    nodes = stage_nest(leaf.stage, larger, loops, leaf.kind, value)
    body = replaced(nest.body, found.root, nodes)
    return replace(nest, body=with_loads(body, leaf.target, lambda indices: te.Load(larger, indices)))
