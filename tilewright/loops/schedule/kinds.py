"""How the iterations of a loop run. What each kind demands is checked by `rules.py`, now and after every step."""

from __future__ import annotations

from dataclasses import replace

from tilewright.errors import ScheduleError
from tilewright.loops.ir import Kind
from tilewright.loops.schedule.nest import Nest, find_loop, replaced


def vectorise(nest: Nest, loop: str) -> Nest:
    """The iterations run in the lanes of a vector.

        for j < 8:                     vector j < 8:
          out[j] = a[j] + b[j]   ->      out[j] = a[j] + b[j]

    Needs: an innermost loop of 2, 4, ... 64 iterations, each of which writes an element of its own; no guard that
    depends on it. A loop of a reduction is no such loop: `rfactor` makes one. The exception is the combination of what
    `rfactor` left in the lanes of a register tile, which becomes a reduction across lanes. Elsewhere: vectorize.
    """
    return _set_kind(nest, loop, Kind.VECTOR)


def unroll(nest: Nest, loop: str) -> Nest:
    """The iterations are written out one after another.

        for i < 2:                     out[0] = a[0]
          out[i] = a[i]          ->    out[1] = a[1]

    Needs: no more than 1024 copies of any statement, all its unrolled loops together. Elsewhere: unroll, unroll_loop.
    """
    return _set_kind(nest, loop, Kind.UNROLL)


def parallel(nest: Nest, loop: str) -> Nest:
    """The iterations run on any thread, in any order.

        for i < 64:            parallel i < 64:
          ...            ->      ...

    Needs: the loop holds the whole program, and is not one of a reduction. Local tiles are private to an iteration.
    Elsewhere: parallel, parallelize_loop.
    """
    return _set_kind(nest, loop, Kind.PARALLEL)


def _set_kind(nest: Nest, name: str, kind: Kind) -> Nest:
    loop = find_loop(nest, name)[-1]
    if loop.kind is not Kind.SERIAL:
        raise ScheduleError(f"loop {name} is {loop.kind.value} already")
    return replace(nest, body=replaced(nest.body, loop, (replace(loop, kind=kind),)))
