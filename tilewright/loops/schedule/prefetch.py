"""Memory asked for before it is needed."""

from __future__ import annotations

from dataclasses import replace

from tilewright import te
from tilewright.errors import ScheduleError
from tilewright.loops.ir import Kind, Scope
from tilewright.loops.schedule.nest import Fetch, Nest, find_loop, find_tile, leaves, reads, replaced
from tilewright.te.index import simplify


def prefetch(nest: Nest, loop: str, tensor: str, ahead: int = 1, level: int = 1) -> Nest:
    """Each iteration asks for what the iteration `ahead` of it reads first of an input.

        for k < 64:                    for k < 64:
          out += b[k, 0]         ->      prefetch b[k + 4, 0]
                                         out += b[k, 0]

    `level` is the cache that it is to reach, 1 the nearest. Needs: something inside the loop reads the input, at a
    place that moves with the loop, and the loop is not a vector's. Nothing is computed differently; beyond the end
    nothing is fetched that anyone reads. Elsewhere: prefetch (Halide).
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
    found: dict[tuple[te.Expr, ...], None] = {}
    for path, leaf in leaves(target.body):
        first: dict[te.Var, te.Expr] = {inner.var: te.as_index(0) for inner in path}
        later = {**first, target.var: target.var + ahead}
        for load in reads(leaf, tile):
            if any(te.loads(index) for index in load.indices):
                raise ScheduleError(
                    f"prefetch: where {tensor} is read depends on data, which may not be there yet"
                )
            if any(target.var in te.variables(index) for index in load.indices):
                found[tuple(simplify(te.substitute(index, later)) for index in load.indices)] = None
    if not found:
        raise ScheduleError(
            f"prefetch: nothing inside loop {loop} reads {tensor} at a place that moves with the loop"
        )
    fetches = tuple(Fetch(tile, indices, level) for indices in found)
    return replace(nest, body=replaced(nest.body, target, (replace(target, body=(*fetches, *target.body)),)))
