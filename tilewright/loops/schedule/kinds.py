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


def bind(nest: Nest, loop: str, axis: str) -> Nest:
    """Run the iterations on the blocks, warps or threads of a GPU.

        for i < 64:                    block.x i < 64:
          for j < 128:           ->      thread.x j < 128:
            out[i, j] = ...                out[i, j] = ...

    `axis` is block.x, .y or .z, and so on for thread, warp and warpgroup (four warps); .x is the fastest. Needs: loops
    of blocks are outermost and hold everything; loops of threads or warps follow each other with nothing between them;
    neither is a reduction loop. In the end every stage is computed by the same number of threads, a warp being 32; what
    is below loops of warps or warpgroups is for instructions that these carry out, and the registers that they fill. A
    tile in registers is divided among the threads that write it, and each reads only its own part. Other names: bind
    (TVM), gpu_blocks and gpu_threads (Halide).
    """
    if axis not in AXES:
        raise ScheduleError(f"bind: the axis must be one of {', '.join(AXES)}, got {axis!r}")
    kind = Kind.PARALLEL if axis in BLOCK_AXES else Kind.THREAD
    bound = _set_kind(nest, loop, kind)
    found = find_loop(bound, loop)[-1]
    return replace(bound, body=replaced(bound.body, found, (replace(found, axis=axis),)))


def vthread(nest: Nest, loop: str) -> Nest:
    """Run the iterations as virtual threads: interleaved into one stream for units that load, execute and store apart.

        for v < 2:                             virtual v < 2:                 load    |tile.0|tile.1|tile.0|tile.1|
          for k < 8:                             for k < 8:                   execute        |acc.0 |acc.1 |acc.0 |
            tile[..] = x[v, k, ..]      ->         tile[..] = x[v, k, ..]
            acc[..] += tile[..]                    acc[..] += tile[..]
          out[v, ..] = acc[..]                   out[v, ..] = acc[..]

    One unit then loads for a thread while another computes for the other. Each thread has buffers of its own, and
    tokens say when a unit may go on; `loops/passes/virtual_threads.py` has the stream. Needs: loads are stages that
    only copy (`cache_read`), and what is stored is local (`cache_write`); the loop is not a reduction's, and is in no
    other loop of virtual threads; no loop is bound to a GPU, and nothing is pipelined otherwise. For
    accelerators with decoupled units; a CPU runs the stream in order. Other names: vthread (TVM).
    """
    return _set_kind(nest, loop, Kind.VIRTUAL)


BLOCK_AXES, THREAD_AXES, WARP_AXES, WARPGROUP_AXES = (
    tuple(f"{unit}.{letter}" for letter in "zyx") for unit in ("block", "thread", "warp", "warpgroup")
)  # the slowest first
AXES = (*BLOCK_AXES, *THREAD_AXES, *WARP_AXES, *WARPGROUP_AXES)


def _set_kind(nest: Nest, name: str, kind: Kind) -> Nest:
    loop = find_loop(nest, name)[-1]
    if loop.kind is not Kind.SERIAL:
        raise ScheduleError(f"loop {name} is {loop.axis or loop.kind.value} already")
    return replace(nest, body=replaced(nest.body, loop, (replace(loop, kind=kind),)))
