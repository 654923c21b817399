"""Split, fuse, reorder and tile loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewright import te
from tilewright.errors import ScheduleError
from tilewright.loops.ir import Kind
from tilewright.loops.schedule.nest import (
    Leaf,
    Loop,
    Nest,
    find_loop,
    fresh,
    leaves,
    map_leaves,
    narrow_inside,
    nested,
    replaced,
    with_values,
)
from tilewright.support.arith import ceil_div
from tilewright.te.index import simplify

TAILS = ("exact", "guard", "shift", "narrow")


def split(nest: Nest, loop: str, factor: int, tail: str = "exact", into: Sequence[str] | None = None) -> Nest:
    """Split one loop into two, the inner one with `factor` iterations.

        for i < 12:              for i.o < 3:
          x[i] = ...      ->       for i.i < 4:
                                     x[i.o * 4 + i.i] = ...

    If the factor does not divide the loop, `tail` says what happens at the end:

        exact   it is refused
        guard   for i.o < 4: for i.i < 4: if i.o * 4 + i.i < 13: ...
        shift   for i.o < 4: for i.i < 4: ... min(i.o * 4, 9) + i.i ...
        narrow  for i.o < 3: for i.i < 4: ... i.o * 4 + i.i ...;  for i.i < 1: ... 12 + i.i ...

    A shifted tile repeats elements of its neighbour. That needs at least `factor` iterations, and nothing may be
    summed twice: the loop must not be a reduction loop (except of idempotent reductions such as a maximum), and must
    stay outside the reduction loops. A narrower last tile repeats and tests nothing, and may be of a sum; its code is
    there twice, the two loops stay as they are, the outer one outside, and a vector becomes several shorter ones.
    `into` names the new loops. Other names: split (Halide, TVM), divide_loop (Exo).
    """
    path = find_loop(nest, loop)
    found = path[-1]
    var, extent = found.var, found.var.extent
    _serial("split", nest, found)
    if factor < 1:
        raise ScheduleError(f"split: loop {loop} by {factor}: a factor is at least 1")
    if tail not in TAILS:
        raise ScheduleError(f"split: tail must be one of {', '.join(TAILS)}, got {tail!r}")
    divides = extent % factor == 0
    if tail == "exact" and not divides:
        raise ScheduleError(
            f"split: {factor} does not divide loop {loop}, which has {extent} iterations",
            remedy='another factor, or tail="guard" or tail="shift"',
        )
    if tail in ("shift", "narrow") and not divides and factor > extent:
        raise ScheduleError(f"split: loop {loop} has {extent} iterations, too few for a tile of {factor}")
    names = (f"{loop}.o", f"{loop}.i") if into is None else tuple(into)
    if len(names) != 2 or names[0] == names[1]:
        raise ScheduleError(f"split: loop {loop} becomes two loops, with two names; got {list(names)}")
    outer = te.Var(fresh(nest, names[0]), ceil_div(extent, factor))
    inner = te.Var(fresh(nest, names[1]), factor)
    shifted = tail == "shift" and not divides
    narrow = tail == "narrow" and not divides
    start: te.Expr = outer * factor
    position = (te.call("min", start, extent - factor) if shifted else start) + inner
    body = with_values(found.body, {var: position})
    guard = None if divides or shifted or narrow else simplify(te.call("lt", position, te.as_index(extent)))

    def adjust(leaf: Leaf) -> Leaf:
        if guard is not None:
            leaf = replace(leaf, guards=(*leaf.guards, guard))
        return _renamed(leaf, {var}, {outer, inner})

    body = map_leaves(body, adjust)
    tile = Loop(inner, body, rest=extent % factor, within=outer.name) if narrow else Loop(inner, body)
    pair = Loop(outer, (tile,), overlaps=found.overlaps or shifted)
    return replace(nest, body=replaced(nest.body, found, (pair,)))


def fuse(nest: Nest, outer: str, inner: str, into: str | None = None) -> Nest:
    """Fuse two loops into one.

        for i < 3:                   for i+j < 12:
          for j < 4:          ->       x[(i+j) // 4, (i+j) % 4] = ...
            x[i, j] = ...

    Needs: `outer` contains only `inner`, and for every stage inside, both are reduction loops or neither is.
    Other names: fuse (Halide, TVM), mult_loops (Exo).
    """
    path = find_loop(nest, inner)
    if len(path) < 2 or path[-2].name != outer:
        raise ScheduleError(f"fuse: loop {inner} is not directly inside loop {outer}")
    first, second = path[-2:]
    _serial("fuse", nest, first)
    _serial("fuse", nest, second)
    if len(first.body) != 1:
        raise ScheduleError(f"fuse: loop {outer} holds other statements than loop {inner}")
    for _, leaf in leaves(second.body):
        if (first.var in leaf.reduced) != (second.var in leaf.reduced):
            raise ScheduleError(f"fuse: of {outer} and {inner}, one is a loop of the reduction {leaf.stage}")
    both = te.Var(fresh(nest, into or f"{outer}+{inner}"), first.var.extent * second.var.extent)
    length = max(second.var.extent, 1)
    body = with_values(second.body, {first.var: both // length, second.var: both % length})
    body = map_leaves(body, lambda leaf: _renamed(leaf, {first.var, second.var}, {both}))
    fused = Loop(both, body, overlaps=first.overlaps or second.overlaps)
    return replace(nest, body=replaced(nest.body, first, (fused,)))


def reorder(nest: Nest, loops: Sequence[str]) -> Nest:
    """Reorder the loops, the first outermost; other loops between them stay in place.

        for i < 3:               for j < 4:
          for j < 4:      ->       for i < 3:
            ...                      ...

    Needs: the loops from the outermost to the innermost of them are perfectly nested. Loops carry no dependences
    except reductions, which may be reordered, including float sums. A loop with overlapping tiles must stay outside
    reduction loops, or elements would be added twice. Other names: reorder (Halide, TVM), reorder_loops (Exo).
    """
    if len(set(loops)) != len(loops) or not loops:
        raise ScheduleError(f"reorder: {list(loops)}: loops are named once each")
    paths = [find_loop(nest, name) for name in loops]
    deepest = max(paths, key=len)
    on_path = {loop.name for loop in deepest}
    for path in paths:
        if path[-1].name not in on_path:
            raise ScheduleError(
                f"reorder: loops {path[-1].name} and {deepest[-1].name} are not inside one another"
            )
    top = min(len(path) for path in paths) - 1
    chain = deepest[top:]
    for loop in chain[:-1]:
        if len(loop.body) != 1:
            raise ScheduleError(
                f"reorder: loop {loop.name} holds other statements than loop {chain[chain.index(loop) + 1].name}"
            )
    wanted = iter([path[-1] for path in paths])
    order = [next(wanted) if loop.name in loops else loop for loop in chain]
    return replace(nest, body=replaced(nest.body, chain[0], nested(order, chain[-1].body)))


def tile(nest: Nest, loops: Sequence[str], factors: Sequence[int], tail: str = "exact") -> Nest:
    """Tile nested loops: split each, and move the inner loops inside all outer ones.

        for i < 12:              for i.o < 3:
          for j < 16:     ->       for j.o < 2:
            ...                      for i.i < 4:
                                       for j.i < 8:
                                         ...

    Needs what `split` and `reorder` need. Other names: tile (Halide, TVM).
    """
    if len(loops) != len(factors):
        raise ScheduleError(f"tile: {len(loops)} loops and {len(factors)} factors")
    for loop, factor in zip(loops, factors, strict=True):
        nest = split(nest, loop, factor, tail)
    return reorder(nest, [*(f"{loop}.o" for loop in loops), *(f"{loop}.i" for loop in loops)])


def _renamed(leaf: Leaf, old: set[te.Var], new: set[te.Var]) -> Leaf:
    """The leaf after its loops `old` became `new`."""
    if not leaf.reduced & old:
        return leaf
    return replace(leaf, reduced=(leaf.reduced - old) | new)


def _serial(primitive: str, nest: Nest, loop: Loop) -> None:
    if loop.kind is not Kind.SERIAL:
        raise ScheduleError(f"{primitive}: loop {loop.name} is {loop.kind.value} already")
    if loop.rest or narrow_inside(loop) is not None:
        raise ScheduleError(
            f"{primitive}: loop {loop.name} belongs to a split with a narrower tail, and stays as it is",
            remedy=f"{primitive} before the split",
        )
