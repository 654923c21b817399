"""Invariants of a loop nest, checked after each primitive, so that a later one cannot undo what an earlier one
needed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tilewright import te
from tilewright.errors import ScheduleError
from tilewright.loops.ir import SCRATCH_LIMIT, Kind, Scope
from tilewright.loops.schedule.nest import (
    Leaf,
    Loop,
    Micro,
    Nest,
    Path,
    Tile,
    flat,
    identity,
    leaves,
    narrow_inside,
    reads,
    stored_at,
    walk,
)
from tilewright.loops.schedule.tensorise import match
from tilewright.te.index import coefficient, linear

MAX_COPIES = 1024  # maximum copies of a statement by unrolling: code size and compile time
MAX_LANES = 64
# Idempotent reductions: combining an element twice changes nothing.
IDEMPOTENT = ("max", "min", "any", "all")


def check(nest: Nest) -> None:
    """Raise ScheduleError, naming the loop, if a rule is broken."""
    for rule in RULES:
        rule(nest)


def check_complete(nest: Nest) -> None:
    """Additional rules for a finished schedule: registers at constant offsets, scratch memory within its limit. Of a
    schedule for a GPU, what `bound.py` makes of it is checked."""
    for _, leaf in leaves(nest.body):
        if leaf.transposed and leaf.target.scope is not Scope.REGISTER:
            raise ScheduleError(
                f"transpose: {leaf.target.name} is in {leaf.target.scope.value}, and registers are transposed",
                remedy=f'set_scope("{leaf.stage}", "register")',
            )
    _registers(nest)
    _scratch(nest)


def _parallel(nest: Nest) -> None:
    for path, node in walk(nest.body):
        if not (isinstance(node, Loop) and node.kind is Kind.PARALLEL):
            continue
        outside_blocks = [
            loop for loop in path if not (node.axis and loop.axis and loop.kind is Kind.PARALLEL)
        ]
        if outside_blocks:
            raise ScheduleError(
                f"parallel: loop {node.name} is inside loop {outside_blocks[-1].name}, not the outermost"
            )
        if any(loop.axis == node.axis != "" for loop in path):
            raise ScheduleError(f"bind: two loops are bound to {node.axis}")
        if len(nest.body) > 1 or any(len(loop.body) > 1 for loop in path):
            outside = [
                leaf.stage for around, leaf in leaves(nest.body) if all(loop is not node for loop in around)
            ]
            raise ScheduleError(
                f"parallel: loop {node.name} must hold everything; outside of it: {', '.join(outside)}",
                remedy="compute_at or inline for the stages outside",
            )
        for _, leaf in leaves(node.body):
            if node.var in leaf.reduced:
                raise ScheduleError(
                    f"parallel: loop {node.name} belongs to the reduction {leaf.stage}: its iterations all update"
                    " the same elements",
                    remedy="rfactor first",
                )


def _threads(nest: Nest) -> None:
    """Loops of threads, or of warps, are one chain; so a statement has one number of threads."""
    for path, node in walk(nest.body):
        if not (isinstance(node, Loop) and node.kind is Kind.THREAD):
            continue
        if any(loop.axis == node.axis for loop in path):
            raise ScheduleError(f"bind: two loops are bound to {node.axis}")
        around = [number for number, loop in enumerate(path) if loop.kind is Kind.THREAD]
        if around and (around[-1] != len(path) - 1 or len(path[-1].body) > 1 or not _alike(path[-1], node)):
            raise ScheduleError(
                f"bind: loop {node.name} is inside loop {path[around[-1]].name}, which is bound to"
                f" {path[around[-1]].axis}, but not directly",
                remedy="reorder, so that the loops of threads follow each other with nothing between them",
            )
        for _, leaf in leaves(node.body):
            if node.var in leaf.reduced:
                raise ScheduleError(
                    f"bind: loop {node.name} belongs to the reduction {leaf.stage}: its iterations all update the same"
                    " elements",
                    remedy="rfactor first, and bind the loop of the stage that it makes",
                )


def _alike(one: Loop, other: Loop) -> bool:
    """Whether both are bound to threads, or both to warps."""
    return one.axis.partition(".")[0] == other.axis.partition(".")[0]


def _vector(nest: Nest) -> None:
    for path, node in walk(nest.body):
        if isinstance(node, Loop) and node.kind is Kind.VECTOR:
            _vector_loop(node)
        if path and path[-1].kind is Kind.VECTOR and not isinstance(node, Leaf):
            raise ScheduleError(
                f"vectorise: loop {path[-1].name} is not innermost: a vector loop holds only stores"
            )


def _vector_loop(loop: Loop) -> None:
    lanes = loop.var.extent
    if lanes < 2 or lanes > MAX_LANES or lanes & (lanes - 1):
        raise ScheduleError(
            f"vectorise: loop {loop.name} has {lanes} iterations; lanes are 2, 4, 8, ... {MAX_LANES}",
            remedy="split it by the number of lanes first",
        )
    for node in loop.body:
        if not isinstance(node, Leaf):
            continue
        if any(loop.var in te.variables(guard) for guard in node.guards):
            raise ScheduleError(
                f"vectorise: stage {node.stage} is guarded by a condition on loop {loop.name}: lanes would differ",
                remedy='split with tail="shift" instead of "guard"',
            )
        if loop.var in node.reduced:
            if across(loop, node) is None:
                raise ScheduleError(
                    f"vectorise: loop {loop.name} belongs to the reduction {node.stage}: its lanes would all update"
                    " the same element",
                    remedy="rfactor first, and vectorise the loop of the stage that it makes",
                )
        elif not coefficient(flat(node.target, node.indices), loop.var):
            raise ScheduleError(
                f"vectorise: the lanes of loop {loop.name} do not each write an element of {node.target.name} that"
                " is a fixed step from the last"
            )


@dataclass(frozen=True)
class Lanes:
    """The operand of a horizontal reduction: neighbours in a register tile, or the identity where `inside` is
    false."""

    tile: Tile
    start: int
    inside: te.Expr | None = None


def across(loop: Loop, leaf: Leaf) -> Lanes | None:
    """The horizontal reduction of a loop; None if it does not combine all lanes of a register vector. Border
    conditions of `compute_at` are the same in every lane."""
    value, inside = leaf.value, None
    if isinstance(value, te.Select) and value.other == identity(leaf):
        if loop.var in te.variables(value.cond):
            return None
        inside, value = value.cond, value.then
    if not (isinstance(value, te.Load) and isinstance(value.source, Tile)):
        return None
    tile = value.source
    form = linear(flat(tile, value.indices))
    if tile.scope is not Scope.REGISTER or form.terms != {loop.var: 1} or leaf.guards:
        return None
    return Lanes(tile, form.constant, inside)


def _overlaps(nest: Nest) -> None:
    for path, leaf in leaves(nest.body):
        if leaf.kind is None or leaf.kind in IDEMPOTENT:
            continue
        reduction: Loop | None = None
        for loop in path:
            if loop.var in leaf.reduced:
                reduction = loop
            if loop.overlaps and reduction is not None:
                where = "is one" if reduction is loop else f"would be inside {reduction.name}, one"
                raise ScheduleError(
                    f"loop {loop.name} has overlapping tiles and {where} of the reduction {leaf.stage}: elements"
                    " would be combined twice",
                    remedy='split with tail="guard" instead of "shift"',
                )


def _copies(nest: Nest) -> None:
    for path, leaf in leaves(nest.body):
        unrolled = [loop for loop in path if loop.kind in (Kind.UNROLL, Kind.VIRTUAL)]
        copies = math.prod(loop.var.extent for loop in unrolled)
        if copies > MAX_COPIES:
            raise ScheduleError(
                f"unroll: loops {', '.join(loop.name for loop in unrolled)} make {copies} copies of stage {leaf.stage};"
                f" at most {MAX_COPIES}"
            )


def _intrinsics(nest: Nest) -> None:
    for _, node in walk(nest.body):
        if isinstance(node, Micro):
            match(node.loop, node.intrinsic)


def _narrow(nest: Nest) -> None:
    """The last iteration of a loop with a narrower tail is lowered by itself."""
    within = {
        id(inner) for _, node in walk(nest.body) if isinstance(node, Micro) for _, inner in walk((node.loop,))
    }
    for path, node in walk(nest.body):
        if not (isinstance(node, Loop) and node.rest):
            continue
        outer = next((loop for loop in path if loop.name == node.within), None)
        if outer is None:
            raise ScheduleError(
                f"split: loop {node.name} has a narrower tail and must stay inside loop {node.within}"
            )
        if id(node) in within:
            raise ScheduleError(
                f"tensorise: only {node.rest} iterations of loop {node.name} run at the end, and the intrinsic"
                f" computes all {node.var.extent}",
                remedy='split with tail="shift" or tail="guard" instead of "narrow"',
            )
        for loop in (outer, node):
            if loop.axis:
                raise ScheduleError(
                    f"bind: loop {loop.name} belongs to a split with a narrower tail: {loop.axis} would differ at the"
                    " end",
                    remedy='split with tail="shift" or tail="guard" instead of "narrow"',
                )
        for _, leaf in leaves(node.body):
            if leaf.stage in dict(nest.stages):
                raise ScheduleError(
                    f"pipeline: {leaf.stage}: loop {node.name} is narrower at the end, and copies would differ"
                )


def _virtual(nest: Nest) -> None:
    """Virtual threads are interleaved into one stream."""
    for path, node in walk(nest.body):
        if not (isinstance(node, Loop) and node.kind is Kind.VIRTUAL):
            continue
        for loop in path:
            if loop.kind is Kind.VIRTUAL:
                raise ScheduleError(
                    f"vthread: loop {node.name} is inside loop {loop.name}, which is one of virtual threads",
                    remedy="fuse them",
                )
        if any(isinstance(other, Loop) and other.axis for _, other in walk(nest.body)):
            raise ScheduleError(
                f"vthread: loop {node.name}: other loops are bound to a GPU, whose threads hide latency already"
            )
        if nest.stages:
            raise ScheduleError(
                f"vthread: loop {node.name}: {nest.stages[0][0]} is pipelined, which is another way to hide its loads"
            )
        if node.rest or narrow_inside(node) is not None:
            raise ScheduleError(f"vthread: loop {node.name} has a narrower tail: threads would differ")
        for _, leaf in leaves(node.body):
            if node.var in leaf.reduced:
                raise ScheduleError(
                    f"vthread: loop {node.name} belongs to the reduction {leaf.stage}: its threads all update the same"
                    " elements",
                    remedy="rfactor first",
                )


def _transposed(nest: Nest) -> None:
    for path, leaf in leaves(nest.body):
        if not leaf.transposed:
            continue
        moving = {var for index in leaf.indices for var in te.variables(index)}
        first = next(number for number, loop in enumerate(path) if loop.var in moving)
        for loop in path[first:]:
            if loop.var not in moving or len(loop.body) > 1:
                raise ScheduleError(
                    f"transpose: loop {loop.name} is among the loops that fill {leaf.target.name} and does more than"
                    " that",
                    remedy="place it outside of these loops",
                )
            if loop.axis:
                raise ScheduleError(
                    f"transpose: threads share the elements of {leaf.target.name}: loop {loop.name} is bound"
                )
            if loop.rest or narrow_inside(loop) is not None:
                raise ScheduleError(f"transpose: loop {loop.name} has a narrower tail")


def _kept(nest: Nest) -> None:
    """Check that results of earlier iterations are still available: the original loops run in order."""
    for stage, names in nest.kept:
        around = next(path for path, leaf in leaves(nest.body) if leaf.stage == stage)
        found = [loop for loop in around if loop.name in names]
        last = found[-1].name if found else names[-1]
        if tuple(loop.name for loop in found) != names or around.index(found[-1]) - around.index(
            found[0]
        ) + 1 != len(names):
            raise ScheduleError(
                f"store_at: stage {stage} keeps elements over the iterations of {', '.join(names)}: these loops stay"
                " as they are",
                remedy="split, fuse and reorder before store_at",
            )
        for loop in found[1:]:
            if loop.kind not in (Kind.SERIAL, Kind.UNROLL):
                raise ScheduleError(
                    f"store_at: loop {loop.name} is {loop.axis or loop.kind.value}, and its iterations need in order"
                    f" what stage {stage} keeps",
                    remedy=f"parallel for loop {names[0]}, or compute_at in place of store_at",
                )
        tile = next(leaf.target for _, leaf in leaves(nest.body) if leaf.stage == stage)
        for path, leaf in leaves(nest.body):
            if reads(leaf, tile) and all(loop.name != last for loop in path):
                raise ScheduleError(f"store_at: stage {leaf.stage} reads {tile.name} outside of loop {last}")


RULES: tuple[Callable[[Nest], None], ...] = (
    _parallel,
    _threads,
    _narrow,
    _virtual,
    _kept,
    _transposed,
    _vector,
    _overlaps,
    _copies,
    _intrinsics,
)


def _accesses(leaf: Leaf) -> list[tuple[Tile, te.Expr]]:
    found = [(leaf.target, stored_at(leaf))]
    for expr in leaf.expressions():
        for load in te.loads(expr):
            assert isinstance(load.source, Tile)
            found.append((load.source, flat(load.source, load.indices)))
    return found


def _registers(nest: Nest) -> None:
    """Only the program's verifier can check what an intrinsic does with registers."""
    widths: dict[Tile, tuple[int, str]] = {}
    inside = {
        leaf.stage for _, node in walk(nest.body) if isinstance(node, Micro) for _, leaf in leaves((node,))
    }
    for path, leaf in leaves(nest.body):
        if leaf.stage in inside:
            continue
        for tile, offset in _accesses(leaf):
            if tile.scope is not Scope.REGISTER:
                continue
            lanes = _register_lanes(path, leaf, tile, offset)
            before, stage = widths.setdefault(tile, (lanes, leaf.stage))
            if before != lanes and not any(
                loop.kind is Kind.THREAD for loop in path
            ):  # a GPU has no vector registers
                raise ScheduleError(
                    f"{tile.name} is in registers, and is accessed with {before} lanes by {stage} but with {lanes} by"
                    f" {leaf.stage}",
                    remedy="vectorise both in the same way, or keep it in scratch memory",
                )


def _register_lanes(path: Path, leaf: Leaf, tile: Tile, offset: te.Expr) -> int:
    """The number of lanes with which the leaf accesses a register tile."""
    fixed = {loop.var for loop in path if loop.kind in (Kind.UNROLL, Kind.VECTOR)}
    moving = sorted(var.name for var in te.variables(offset) - fixed)
    if moving:
        raise ScheduleError(
            f"{tile.name} is in registers, and stage {leaf.stage} accesses it at a place that moves with loop"
            f" {moving[0]}",
            remedy="unroll or vectorise that loop, or keep the tile in scratch memory",
        )
    lane = next((loop.var for loop in path if loop.kind is Kind.VECTOR), None)
    stride = coefficient(offset, lane) if lane is not None else 0
    if stride not in (0, 1):
        raise ScheduleError(
            f"{tile.name} is in registers, where the lanes of stage {leaf.stage} cannot be {stride} elements apart"
        )
    return lane.extent if lane is not None and stride == 1 else 1


def _scratch(nest: Nest) -> None:
    tiles = [leaf.target for _, leaf in leaves(nest.body) if leaf.target.scope is Scope.SCRATCH]
    held = {tile.name: tile.size * tile.dtype.bytes for tile in tiles}
    if sum(held.values()) > SCRATCH_LIMIT:
        largest = max(held, key=lambda name: held[name])
        raise ScheduleError(
            f"{sum(held.values())} bytes of scratch memory, of at most {SCRATCH_LIMIT}; most of it is {largest}",
            remedy="compute_at makes a tile as small as what one iteration reads; inline makes it disappear",
        )
