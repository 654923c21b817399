"""Move a stage: into the loop that needs it, or into the expression that reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tilewright import te
from tilewright.errors import ScheduleError
from tilewright.loops.ir import Scope
from tilewright.loops.schedule.nest import (
    Leaf,
    Loop,
    Nest,
    Tile,
    find_loop,
    identity,
    leaves,
    map_leaves,
    plain,
    reads,
    replaced,
    stage_nest,
    walk,
    with_loads,
)
from tilewright.loops.schedule.patches import Patches, patches_of
from tilewright.te.index import Linear, bounds, in_range, linear, simplify


def compute_at(nest: Nest, stage: str, loop: str) -> Nest:
    """Compute a stage inside a loop of its readers: only the part that one iteration reads.

        for i < 64: for j < 64: p[i, j] = ...          for io < 8:
        for io < 8:                                      for i < 8: for j < 64: p[i, j] = ... (io * 8 + i, j)
          for ii < 8: for j < 64:                ->      for ii < 8: for j < 64:
            out[io * 8 + ii, j] = p[io * 8 + ii, j]        out[io * 8 + ii, j] = p[ii, j]

    Needs: an unscheduled stage (so stages are placed from the last to the first) whose readers are all inside the
    loop. The region is a box derived from the bounds of the readers' indices, with the loop's iteration as its
    corner. Elements of the box outside the tensor are not computed; guards keep readers from using them. Elements
    read by several iterations are computed several times. Of a tile in registers, patches that are read at regular
    distances are kept without what is between them. Other names: compute_at.
    """
    found = plain(nest, stage)
    tile = found.leaf.target
    path = find_loop(nest, loop)
    target = path[-1]
    if path[0] is found.root:
        raise ScheduleError(f"compute_at: loop {loop} belongs to stage {stage} itself")
    _all_inside(nest, stage, tile, target)
    outer = {around.var for around in path}
    indices = [load.indices for _, leaf in leaves(target.body) for load in reads(leaf, tile)]
    if not indices:
        raise ScheduleError(f"compute_at: no stage reads {stage}")
    box = [
        _region([index[axis] for index in indices], outer, extent) for axis, extent in enumerate(tile.shape)
    ]
    if tile.scope is Scope.REGISTER:
        box = [_without_gaps(side, [index[axis] for index in indices]) for axis, side in enumerate(box)]
    smaller = replace(tile, shape=tuple(side.size for side in box))

    def value(positions: tuple[te.Expr, ...]) -> te.Expr:
        at = [simplify(side.at(position)) for side, position in zip(box, positions, strict=True)]
        inside = te.all_of(
            [c for i, n in zip(at, tile.shape, strict=True) if (c := in_range(i, n)) is not None]
        )
        element = found.value_at(at)
        return element if inside is None else te.select(inside, element, identity(found.leaf))

    def relative(index: tuple[te.Expr, ...]) -> te.Expr:
        return te.Load(smaller, tuple(side.position(i) for i, side in zip(index, box, strict=True)))

    new = stage_nest(stage, smaller, list(found.reductions), found.leaf.kind, value)
    body = with_loads(target.body, tile, relative)
    first = next(
        n for n, node in enumerate(body) if any(_reads(leaf, smaller) for _, leaf in leaves((node,)))
    )
    placed = replace(target, body=(*body[:first], *new, *body[first:]))
    without = replaced(nest.body, found.root, ())
    return replace(nest, body=replaced(without, _same(without, loop), (placed,)))


def store_at(nest: Nest, stage: str, loop: str, compute: str) -> Nest:
    """Keep what a stage computes in loop `compute` for all iterations of `loop` around it: each iteration computes only
    what the one before did not.

        for y < 6: p[y] = a[y] * 2                for y < 4:
        for y < 4:                                  for py < 3: if y == 0 or py == 2:
          out[y] = p[y] + p[y + 1] + p[y + 2]         p[y + py] = a[y + py] * 2
                                          ->        out[y] = p[y] + p[y + 1] + p[y + 2]

    The tile has room for what all iterations of `loop` read, so nothing in it moves. In the picture `compute` is y, and
    `loop` one around it. Needs: what `compute_at` needs; `compute` is inside `loop`; its next iteration reads some of
    the same elements, further along one axis of the stage. The loops from `loop` to `compute` then stay as they are,
    and those inside `loop` run in order; `loop` itself may be parallel. Other names: store_at with compute_at (Halide),
    a sliding window.
    """
    found = plain(nest, stage)
    tile = found.leaf.target
    path = find_loop(nest, compute)
    names = [around.name for around in path]
    if loop not in names[:-1]:
        find_loop(nest, loop)
        raise ScheduleError(f"store_at: loop {compute} is not inside loop {loop}")
    holder = names.index(loop)
    target = path[-1]
    placed = compute_at(nest, stage, compute)
    outside = {around.var for around in path[: holder + 1]}
    indices = [load.indices for _, leaf in leaves(target.body) for load in reads(leaf, tile)]
    now = [_region([i[axis] for i in indices], {a.var for a in path}, n) for axis, n in enumerate(tile.shape)]
    kept = [_region([i[axis] for i in indices], outside, n) for axis, n in enumerate(tile.shape)]
    steps = [side.start.terms.get(target.var, 0) for side in now]
    moving = [axis for axis, step in enumerate(steps) if step]
    if len(moving) != 1 or any(
        target.var in te.variables(atom)
        for side in now
        for atom in side.start.terms
        if not isinstance(atom, te.Var)
    ):
        raise ScheduleError(
            f"store_at: what stage {stage} computes moves along {len(moving)} axes with loop {compute}, not along one",
            remedy="compute_at another loop",
        )
    (axis,) = moving
    if not 0 < steps[axis] < now[axis].extent:
        raise ScheduleError(
            f"store_at: iterations of loop {compute} share no elements of stage {stage}, in the order they run in",
            remedy=f"compute_at for loop {compute}: there is nothing to keep",
        )
    small = next(leaf.target for _, leaf in leaves(placed.body) if leaf.stage == stage)
    large = replace(small, shape=tuple(side.extent for side in kept))
    shifts = [inner.start + outer.start.scaled(-1) for inner, outer in zip(now, kept, strict=True)]

    def moved(indices: tuple[te.Expr, ...]) -> tuple[te.Expr, ...]:
        return tuple((linear(i) + shift).expr() for i, shift in zip(indices, shifts, strict=True))

    def in_leaf(leaf: Leaf) -> Leaf:
        if leaf.stage != stage:
            return leaf
        new = te.call("le", te.as_index(now[axis].extent - steps[axis]), leaf.indices[axis])
        first = te.call("le", target.var, te.as_index(0))
        guards = (*leaf.guards, te.call("or", first, new))
        return replace(leaf, target=large, indices=moved(leaf.indices), guards=guards)

    body = with_loads(placed.body, small, lambda indices: te.Load(large, moved(indices)))
    between = (stage, tuple(names[holder:]))
    return replace(placed, body=map_leaves(body, in_leaf), kept=(*placed.kept, between))


@dataclass(frozen=True)
class _Side:
    start: Linear
    extent: int
    patches: Patches | None = None  # what of it is needed; None: all

    @property
    def size(self) -> int:
        """How many elements are needed."""
        return self.extent if self.patches is None else self.patches.size

    def at(self, position: te.Expr) -> te.Expr:
        """The index of the needed element at a position."""
        return self.start.expr() + (position if self.patches is None else self.patches.at(position))

    def position(self, index: te.Expr) -> te.Expr:
        form = linear(index) + self.start.scaled(-1)
        return (form if self.patches is None else self.patches.position(form)).expr()


def _without_gaps(side: _Side, indices: Sequence[te.Expr]) -> _Side:
    forms = [linear(index) + side.start.scaled(-1) for index in indices]
    found = patches_of(forms)
    # They must begin where the side does.
    return side if found is None or found.span != side.extent else replace(side, patches=found)


def _region(indices: Sequence[te.Expr], outer: set[te.Var], extent: int) -> _Side:
    """The interval of one axis that covers all `indices`: its start in terms of the variables `outer`, and its
    length."""
    whole = _Side(Linear({}, 0), extent)
    corner: dict[te.Expr, int] | None = None
    low: int | None = None
    high: int | None = None
    for index in indices:
        form = linear(index)
        fixed = {
            atom: c for atom, c in form.terms.items() if te.variables(atom) <= outer and not te.loads(atom)
        }
        rest = Linear({atom: c for atom, c in form.terms.items() if atom not in fixed}, form.constant)
        least, most = bounds(rest.expr())
        if least is None or most is None or (corner is not None and fixed != corner):
            return whole
        corner = fixed
        low = least if low is None else min(low, least)
        high = most if high is None else max(high, most)
    assert corner is not None and low is not None and high is not None
    length = high - low + 1
    return whole if length >= extent else _Side(Linear(corner, low), length)


def _all_inside(nest: Nest, stage: str, tile: Tile, loop: Loop) -> None:
    inside = {id(leaf) for _, leaf in leaves(loop.body)}
    for _, leaf in leaves(nest.body):
        if _reads(leaf, tile) and id(leaf) not in inside:
            raise ScheduleError(f"compute_at: stage {leaf.stage} reads {stage} outside of loop {loop.name}")


def _reads(leaf: Leaf, tile: Tile) -> bool:
    return bool(reads(leaf, tile))


def _same(nodes: Sequence[object], name: str) -> Loop:
    """The loop of this name in a tree that was rebuilt."""
    for _, node in walk(nodes):  # type: ignore[arg-type]
        if isinstance(node, Loop) and node.name == name:
            return node
    raise AssertionError(f"loop {name} was lost")


def inline(nest: Nest, stage: str) -> Nest:
    """Inline a stage into the expressions that read it.

        p[i] = a[i] + 1                out[i] = (a[i] + 1) * 2
        out[i] = p[i] * 2       ->

    Needs: an unscheduled stage that is neither a reduction nor the output. It is computed as often as it is read.
    Other names: compute_inline (TVM), inline (Halide, Exo).
    """
    found = plain(nest, stage)
    if found.leaf.kind is not None:
        raise ScheduleError(
            f"inline: stage {stage} is a reduction", remedy="compute_at places it inside a loop"
        )
    if found.leaf.target.scope is Scope.GLOBAL:
        raise ScheduleError(f"inline: stage {stage} is the output")
    body = replaced(nest.body, found.root, ())
    return replace(nest, body=with_loads(body, found.leaf.target, found.value_at))
