"""The primitive `prefetch`: loads issued before they are needed."""

from __future__ import annotations

import math
from dataclasses import replace

from tilewright import te
from tilewright.errors import ScheduleError
from tilewright.hw.cores import USUAL
from tilewright.loops.ir import Kind, Scope
from tilewright.loops.schedule.nest import (
    Fetch,
    Loop,
    Nest,
    Tile,
    find_loop,
    find_tile,
    flat,
    leaves,
    reads,
    replaced,
)
from tilewright.support.arith import ceil_div
from tilewright.te.index import linear, simplify


def prefetch(
    nest: Nest,
    loop: str,
    tensor: str,
    ahead: int = 1,
    level: int = 1,
    spread: str | None = None,
    line: int = USUAL.line_bytes,
) -> Nest:
    """Prefetch in each iteration what the iteration `ahead` of it reads first of an input.

        for k < 64:                    for k < 64:
          out += b[k, 0]         ->      prefetch b[k + 4, 0]
                                         out += b[k, 0]

    `level` is the target cache, 1 the nearest. With `spread`, an inner loop, it prefetches everything that the later
    iteration reads, in cache lines of `line` bytes, a few in each iteration of `spread`:

        for j < 4:                     for j < 4:
          for k < 64:            ->      for k < 64:
            out += b[j, k]                 prefetch b[j + 1, k]
                                           out += b[j, k]

    Needs: a load of the input inside the loop whose index depends on the loop, and neither loop is vectorised; with
    `spread`, the loaded region is contiguous. Results do not change; beyond the end, useless addresses are
    prefetched. Other names: prefetch (Halide).
    """
    target = find_loop(nest, loop)[-1]
    tile = find_tile(nest, tensor)
    if tile.scope is not Scope.GLOBAL or tile == nest.output:
        raise ScheduleError(f"prefetch: {tensor} is not an input")
    if target.kind is Kind.VECTOR:
        raise ScheduleError(f"prefetch: loop {loop} is a vector loop, which holds only stores")
    if ahead < 1 or level not in (1, 2, 3):
        raise ScheduleError(
            f"prefetch: {ahead} iterations ahead to level {level}; at least 1, and levels are 1 to 3"
        )
    read = [load for _, leaf in leaves(target.body) for load in reads(leaf, tile)]
    if any(te.loads(index) for load in read for index in load.indices):
        raise ScheduleError(f"prefetch: where {tensor} is read depends on data, which may not be there yet")
    if spread is not None:
        return _spread(nest, target, tile, ahead, level, spread, line)
    found: dict[tuple[te.Expr, ...], None] = {}
    for path, leaf in leaves(target.body):
        first: dict[te.Var, te.Expr] = {inner.var: te.as_index(0) for inner in path}
        later = {**first, target.var: target.var + ahead}
        for load in reads(leaf, tile):
            if any(target.var in te.variables(index) for index in load.indices):
                found[tuple(simplify(te.substitute(index, later)) for index in load.indices)] = None
    if not found:
        raise ScheduleError(
            f"prefetch: nothing inside loop {loop} reads {tensor} at a place that moves with the loop"
        )
    fetches = tuple(Fetch(tile, indices, level) for indices in found)
    return replace(nest, body=replaced(nest.body, target, (replace(target, body=(*fetches, *target.body)),)))


def _spread(nest: Nest, target: Loop, tile: Tile, ahead: int, level: int, spread: str, line: int) -> Nest:
    path = find_loop(nest, spread)
    if target not in path[:-1]:
        raise ScheduleError(f"prefetch: loop {spread} is not inside loop {target.name}")
    inside = path[-1]
    if inside.kind is Kind.VECTOR:
        raise ScheduleError(f"prefetch: loop {spread} is a vector loop, which holds only stores")
    read = {load.indices: inner for inner, leaf in leaves(target.body) for load in reads(leaf, tile)}
    if len(read) != 1:
        raise ScheduleError(
            f"prefetch: {tile.name} is read inside loop {target.name} at {len(read)} places, not at one"
        )
    ((indices, inner),) = read.items()
    form = linear(flat(tile, indices))
    moving = {loop.var for loop in inner}
    whole = all(isinstance(atom, te.Var) or not te.variables(atom) & moving for atom in form.terms)
    steps = {var: form.terms[var] for var in moving if var in form.terms}
    size = sum((var.extent - 1) * step for var, step in steps.items()) + 1
    read_once = math.prod(var.extent for var in steps)
    if not whole or min(steps.values(), default=1) < 1 or size != read_once:
        raise ScheduleError(
            f"prefetch: what loop {target.name} reads of {tile.name} is not contiguous in memory"
        )
    if target.var not in te.variables(flat(tile, indices)):
        raise ScheduleError(
            f"prefetch: nothing inside loop {target.name} reads {tile.name} at a place that moves with the loop"
        )
    first: dict[te.Var, te.Expr] = dict.fromkeys(moving, te.as_index(0))
    start = tuple(te.substitute(index, {**first, target.var: target.var + ahead}) for index in indices)
    between = [loop.var for loop in path[path.index(target) + 1 :]]
    count: te.Expr = te.as_index(0)
    for var in between:
        count = count * var.extent + var
    in_line = max(1, line // tile.dtype.bytes)
    lines = ceil_div(size, in_line)
    each = ceil_div(lines, math.prod(var.extent for var in between))
    fetches = tuple(
        Fetch(tile, (*map(simplify, start[:-1]), simplify(start[-1] + (count * each + n) * in_line)), level)
        for n in range(each)
    )
    return replace(nest, body=replaced(nest.body, inside, (replace(inside, body=(*fetches, *inside.body)),)))
