"""Scheduling steps for moves: short sequences of primitives on loops whose sizes a config gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.hw import CpuMachine
from tilewright.hw.intrinsics import Intrinsic
from tilewright.loops.schedule import Schedule, outer_product
from tilewright.loops.schedule.nest import find_leaf, find_loop
from tilewright.loops.tiling import power_of_two_below
from tilewright.space.sketches.analysis import lanes_for
from tilewright.te import Select, Var

_WRITTEN_OUT = 8  # maximum vectors unrolled for a stage that is copied or computed element by element


def extent_of(schedule: Schedule, loop: str) -> int:
    return find_loop(schedule.nest, loop)[-1].var.extent


def axis_loop(schedule: Schedule, stage: str, axis: int) -> str | None:
    """The loop over an axis of a placed stage; None if the axis has one element."""
    name = f"{stage}.i{axis}"
    return name if name in schedule.loops else None


def last_loop(schedule: Schedule, stage: str) -> str | None:
    """The loop over the last axis of a placed stage that has a loop."""
    rank = len(find_leaf(schedule.nest, stage)[1].target.shape)
    found = (axis_loop(schedule, stage, axis) for axis in reversed(range(rank)))
    return next((loop for loop in found if loop is not None), None)


def spatial_loops(schedule: Schedule, stage: str) -> list[str]:
    rank = len(find_leaf(schedule.nest, stage)[1].target.shape)
    found = (axis_loop(schedule, stage, axis) for axis in range(rank))
    return [loop for loop in found if loop is not None]


def in_vectors(schedule: Schedule, loop: str, lanes: int) -> Schedule:
    """Vectorise a loop of whole vectors and unroll over the vectors."""
    schedule = schedule.split(loop, lanes)
    return schedule.unroll(f"{loop}.o").vectorise(f"{loop}.i")


def run_in_vectors(schedule: Schedule, loop: str, lanes: int, vectors: int) -> Schedule:
    """Tile a loop over independent elements by this many vectors; the last tile overlaps the one before it."""
    extent = extent_of(schedule, loop)
    lanes = min(lanes, power_of_two_below(extent))
    if lanes < 2:
        return schedule
    width = lanes * max(1, min(vectors, extent // lanes))
    return in_vectors(schedule.split(loop, width, "shift"), f"{loop}.i", lanes)


def stage_in_vectors(schedule: Schedule, stage: str, machine: CpuMachine) -> Schedule:
    """Vectorise a placed stage that is not a reduction, along its last axis."""
    loop = last_loop(schedule, stage)
    if loop is None:
        return schedule
    lanes = lanes_for(machine, find_leaf(schedule.nest, stage)[1], extent_of(schedule, loop))
    return run_in_vectors(schedule, loop, lanes, _WRITTEN_OUT)


def reduction_in_vectors(schedule: Schedule, stage: str, machine: CpuMachine) -> Schedule:
    """Vectorise a placed reduction along the last axis of its result, if that is a multiple of the vector length."""
    loop = last_loop(schedule, stage)
    path, leaf = find_leaf(schedule.nest, stage)
    reductions = [around.name for around in path if around.var in leaf.reduced]
    if loop is None:
        return schedule
    extent = extent_of(schedule, loop)
    lanes = min(lanes_for(machine, leaf, extent), extent & -extent)
    if lanes < 2:
        return schedule
    others = [name for name in spatial_loops(schedule, stage) if name != loop]
    schedule = schedule.reorder(*others, *reductions, loop)
    if extent // lanes > _WRITTEN_OUT:
        return schedule.split(loop, lanes).vectorise(f"{loop}.i")
    schedule = in_vectors(schedule, loop, lanes)
    return schedule if others else schedule.set_scope(stage, "register")


def register_tile(
    schedule: Schedule,
    stage: str,
    rows: int | None,
    vector: int,
    k_axes: Sequence[str],
    unroll: int,
    lanes: int,
    *,
    micro: bool,
    native: NativeTile | None = None,
) -> Schedule:
    """Keep a placed reduction in registers: its tile over the axes `rows` and `vector` is unrolled inside the
    reduction loops, and the innermost of these is unrolled `unroll` times."""
    down, across = (
        axis_loop(schedule, stage, rows) if rows is not None else None,
        axis_loop(schedule, stage, vector),
    )
    assert across is not None
    if native is not None and not isinstance(find_leaf(schedule.nest, stage)[1].value, Select):
        return _native_tile(schedule, stage, down, across, k_axes, unroll, native)
    inner = list(k_axes)
    if unroll > 1:
        schedule = schedule.split(inner[-1], unroll)
        inner[-1:] = [f"{inner[-1]}.o", f"{inner[-1]}.i"]
    schedule = schedule.reorder(*inner, *([down] if down else []), across).set_scope(stage, "register")
    if unroll > 1:
        schedule = schedule.unroll(inner[-1])
    width = extent_of(schedule, across)
    leaf = find_leaf(schedule.nest, stage)[1]
    # Elements beyond the tensor's edge in the last block are computed under a condition.
    if micro and down and not isinstance(leaf.value, Select):
        dtype = leaf.target.dtype
        return schedule.tensorise(
            down, outer_product(extent_of(schedule, down), width // lanes, lanes, dtype)
        )
    schedule = in_vectors(schedule, across, lanes)
    return schedule.unroll(down) if down else schedule


@dataclass(frozen=True)
class NativeTile:
    """The part of a register tile that one use of an intrinsic computes: its rows and lanes, and its steps along the
    innermost reduction axis."""

    intrinsic: Intrinsic
    rows: int
    lanes: int
    k_axes: int


def _native_tile(
    schedule: Schedule,
    stage: str,
    down: str | None,
    across: str,
    k_axes: Sequence[str],
    unroll: int,
    native: NativeTile,
) -> Schedule:
    """Compute the register tile by uses of an intrinsic, all unrolled."""
    outer, inside = list(k_axes), list[str]()
    if native.k_axes > 1:
        schedule = schedule.split(outer[-1], native.k_axes)
        inside, outer[-1] = [f"{outer[-1]}.i"], f"{outer[-1]}.o"
    if unroll > 1:
        schedule = schedule.split(outer[-1], unroll)
        outer[-1:] = [f"{outer[-1]}.o", f"{outer[-1]}.i"]
    copies = [down] if down else []
    if down and native.rows > 1:
        schedule = schedule.split(down, native.rows)
        copies, inside = [f"{down}.o"], [f"{down}.i", *inside]
    schedule = schedule.split(across, native.lanes)
    copies, inside = [*copies, f"{across}.o"], [*inside, f"{across}.i"]
    schedule = schedule.reorder(*outer, *copies, *inside).set_scope(stage, "register")
    written_out = [*(outer[-1:] if unroll > 1 else ()), *copies]
    written_out += [f"{down}.i"] if down and native.rows > 1 else []
    for loop in written_out:
        schedule = schedule.unroll(loop)
    return schedule.vectorise(inside[-1]).tensorise(inside[0], native.intrinsic)


def in_parallel(schedule: Schedule, loops: Sequence[str]) -> Schedule:
    """Fuse perfectly nested loops into one parallel loop."""
    joined, *others = loops
    for other in others:
        schedule = schedule.fuse(joined, other, into="p" if other == others[-1] else None)
        joined = "p" if other == others[-1] else f"{joined}+{other}"
    return schedule.parallel(joined)


def names(axes: Sequence[Var]) -> list[str]:
    return [axis.name for axis in axes]
