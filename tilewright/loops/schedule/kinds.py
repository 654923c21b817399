"""Loop kinds: how iterations run. `rules.py` checks the requirements of each kind, now and after every step."""

from __future__ import annotations

from dataclasses import replace

from tilewright.errors import ScheduleError
from tilewright.loops.ir import Kind
from tilewright.loops.schedule.nest import Nest, find_loop, replaced


def vectorise(nest: Nest, loop: str) -> Nest:
    """Run the iterations in the lanes of a vector.

        for j < 8:                     vector j < 8:
          out[j] = a[j] + b[j]   ->      out[j] = a[j] + b[j]

    Needs: an innermost loop of 2, 4, ... 64 iterations that write distinct elements; no guard that depends on it. A
    reduction loop does not qualify, but `rfactor` makes one that does. The exception is combining the lanes that
    `rfactor` left in a register tile, which becomes a horizontal reduction. Other names: vectorize.
    """
    return _set_kind(nest, loop, Kind.VECTOR)


def unroll(nest: Nest, loop: str) -> Nest:
    """Repeat the body in the code, once per iteration.

        for i < 2:                     out[0] = a[0]
          out[i] = a[i]          ->    out[1] = a[1]

    Needs: no more than 1024 copies of any statement, all its unrolled loops together. Other names: unroll, unroll_loop.
    """
    return _set_kind(nest, loop, Kind.UNROLL)


def parallel(nest: Nest, loop: str) -> Nest:
    """Run the iterations on any thread, in any order.

        for i < 64:            parallel i < 64:
          ...            ->      ...

    Needs: the loop contains the whole program and is not a reduction loop. Local tiles are private to an iteration.
    Other names: parallel, parallelize_loop.
    """
    return _set_kind(nest, loop, Kind.PARALLEL)


def _set_kind(nest: Nest, name: str, kind: Kind) -> Nest:
    loop = find_loop(nest, name)[-1]
    if loop.kind is not Kind.SERIAL:
        raise ScheduleError(f"loop {name} is {loop.kind.value} already")
    return replace(nest, body=replaced(nest.body, loop, (replace(loop, kind=kind),)))
