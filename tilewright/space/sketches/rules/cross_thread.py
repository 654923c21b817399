"""Rules for reductions to few results on a GPU: `blocks` places them in blocks of rows, and `cross` shares each among
the threads of a block."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tilewright import te
from tilewright.loops.schedule import Schedule
from tilewright.loops.schedule.nest import find_leaf
from tilewright.space.sketches import acts
from tilewright.space.sketches.analysis import (
    Extents,
    depends_on_data,
    is_contiguous,
    is_input,
    is_reduction,
    loads_in,
    loops_of,
    readers_of,
    stage_of,
)
from tilewright.space.sketches.cuda.block_reduction import AppliedBlockReduction, BlockReduction, Threads
from tilewright.space.sketches.normed import NormedFrame
from tilewright.space.sketches.sketch import Move, Sketch
from tilewright.space.space import Knob
from tilewright.space.template import GpuTerms
from tilewright.support.batch import Truth

Values = Mapping[str, Any]
_ROWS = "out.rows"
_RESULTS = (2, 4, 8, 16, 32)


@dataclass(frozen=True)
class RowsFrame:
    """The output in blocks of rows: `rows` are the axes that its reductions depend on, the last one in blocks."""

    applied: AppliedBlockReduction
    output: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    batched = True

    @property
    def block_loop(self) -> str | None:
        return f"{self.rows[-1]}.o"

    def at_block(self, values: Values) -> Extents:
        return (self.threads(values).results,)

    def threads(self, values: Values) -> Threads:
        return Threads(values["group"], values["results"], 1)

    def legal(self, values: Values) -> Truth:
        truth: Truth = self.applied.space.legal({**values, "lanes": 1})
        return truth

    def terms(self, sketch: object) -> Callable[[Values], GpuTerms]:
        return lambda values: self.applied.terms_of(
            {"group": values["group"], "results": values["results"], "lanes": 1}
        )


class GpuRows:
    """Compute the output in blocks of rows, the axes that its reductions depend on; inline all that is no reduction.

    total[i] = sum of x[i, k]                  for blocks: total of RESULTS rows
    out[i, j] = x[i, j] / total[i]      ->       for threads, RESULTS x GROUP: out of every GROUPth column
    """

    name = "blocks"
    alone = True
    kinds = ("cuda",)

    def apply(self, sketch: Sketch) -> Sequence[Sketch]:
        if sketch.stage != sketch.output or sketch.frame is not None:
            return ()
        applied = BlockReduction().apply(sketch.work)
        if not isinstance(applied, AppliedBlockReduction):
            return ()
        schedule = sketch.start
        for name in reversed(schedule.stages):
            if name != sketch.output and not is_reduction(schedule, name):
                schedule = schedule.inline(name)
        output = stage_of(schedule, sketch.output)
        reductions = [name for name in schedule.stages if is_reduction(schedule, name)]
        read = [load for load in loads_in(output.leaf) if load.source.name in reductions]
        rows = [axis for axis in loops_of(output) if any(axis in load.indices for load in read)]
        if (
            not rows
            or rows[-1].extent < min(_RESULTS)
            or any(set(te.variables(load)) != set(rows) for load in read)
        ):
            return ()
        columns = [axis for axis in loops_of(output) if axis not in rows]
        frame = RowsFrame(applied, sketch.output, tuple(acts.names(rows)), tuple(acts.names(columns)))
        knobs = (
            Knob("group", (16, 32, 64, 128, 256, 512)),
            Knob("results", tuple(n for n in _RESULTS if n <= rows[-1].extent)),
        )

        def arrange(schedule: Schedule, values: Values) -> Schedule:
            t, last = frame.threads(values), frame.rows[-1]
            schedule = schedule.split(last, t.results, "guard")
            schedule = schedule.reorder(*frame.rows[:-1], f"{last}.o", f"{last}.i", *frame.columns)
            if not frame.columns:
                return schedule
            schedule, column = _fused(schedule, frame.columns, "out.columns")
            schedule = schedule.split(column, t.group, "guard").reorder(f"{column}.i", f"{column}.o")
            return schedule.bind(f"{last}.i", "thread.y").bind(f"{column}.i", "thread.x")

        def bind(schedule: Schedule, values: Values) -> Schedule:
            if not frame.columns:  # a thread for each row
                schedule = _few(schedule, f"{frame.rows[-1]}.i", frame.threads(values))
            if frame.rows[:-1]:
                schedule, outer = _fused(schedule, frame.rows[:-1], _ROWS)
                schedule = schedule.bind(outer, "block.y")
            return schedule.bind(f"{frame.rows[-1]}.o", "block.x")

        moves = (Move(arrange, knobs, frame.legal, together=(("group", "results"),)), Move(bind, last=True))
        kept = (
            sketch.stage,
            *(name for name in sketch.left[1:] if name in schedule.stages or is_input(schedule, name)),
        )
        return [replace(sketch, left=kept).visited(*moves, start=schedule, frame=frame)]


class CrossThread:
    """The threads of a block share the terms of each result, and combine their partial results twice.

        total[i] += x[i, k]     ->     total.rf.rf.local[i, p, q] += x[i, k * GROUP + (p, q)]    (each thread)
                                       total.rf.rf = total.rf.rf.local                          (shared memory)
                                       total.rf[i, q] += total.rf.rf[i, p, q]                   (some threads)
                                       total[i] += total.rf[i, q]                               (a thread for each)

    Neighbouring threads have neighbouring terms, or neighbouring results where these are contiguous in memory.
    """

    name = "cross"
    alone = True
    kinds = ("cuda",)

    def apply(self, sketch: Sketch) -> Sequence[Sketch]:
        frame, name = sketch.frame, sketch.stage
        if not isinstance(frame, RowsFrame | NormedFrame) or not is_reduction(sketch.start, name):
            return ()
        stage = stage_of(sketch.start, name)
        placed = {sketch.output, *sketch.boxes}
        axis = next((n for n in reversed(range(len(stage.axes))) if stage.axes[n] is not None), None)
        if axis is None or {leaf.stage for leaf in readers_of(sketch.start, name)} - placed:
            return ()
        if depends_on_data(stage.leaf):
            return ()
        row = stage.axes[axis]
        assert row is not None
        along_rows = any(is_contiguous(load, row) for load in loads_in(stage.leaf))

        def act(schedule: Schedule, values: Values) -> Schedule:
            return _shared(schedule, name, axis, frame, frame.threads(values), along_rows)

        names = (self.name,) if self.name not in sketch.names else ()
        made = sketch.visited(Move(act), boxes={name: frame.at_block})
        return [replace(made, names=(*sketch.names, *names))]


def _shared(
    schedule: Schedule, stage: str, axis: int, frame: RowsFrame | NormedFrame, t: Threads, along_rows: bool
) -> Schedule:
    """Compute a reduction in each block by all of its threads; `axis`: that of the block's rows."""
    path, leaf = find_leaf(schedule.nest, stage)
    schedule, k = _fused(schedule, [loop.name for loop in path if loop.var in leaf.reduced], f"{stage}.k")
    few = int(t.parts)
    schedule = schedule.split(k, t.group, "guard").split(f"{k}.i", few)
    schedule = schedule.rfactor(f"{k}.i.i").rfactor(f"{k}.i.o")
    some, each = f"{stage}.rf", f"{stage}.rf.rf"
    local = f"{each}.local"
    schedule = schedule.cache_write(each, "register").set_scope(each, "shared").set_scope(some, "shared")
    at = frame.block_loop
    assert at is not None
    rank = len(leaf.target.shape)
    for name in (stage, some, each, local):
        schedule = schedule.compute_at(name, at)
    schedule = _few(schedule, f"{stage}.i{axis}", t)
    schedule = schedule.fuse(f"{some}.i{axis}", f"{some}.i{rank}", into=f"{some}.f")
    schedule = _few(schedule, f"{some}.f", t)
    for name in (each, local):
        parts, rows = [f"{name}.i{rank + 1}", f"{name}.i{rank}"], f"{name}.i{axis}"
        order = [*parts, rows] if along_rows else [rows, *parts]
        schedule = schedule.reorder(*order)
        for loop, letter in zip(order, "zyx", strict=True):
            schedule = schedule.bind(loop, f"thread.{letter}")
    return schedule


def _few(schedule: Schedule, loop: str, t: Threads) -> Schedule:
    """Bind a loop to the first of a block's threads."""
    return schedule.split(loop, t.all, "guard").bind(f"{loop}.i", "thread.x")


def _fused(schedule: Schedule, loops: Sequence[str], into: str) -> tuple[Schedule, str]:
    """Fuse perfectly nested loops; returns the name of what they become."""
    first, *others = loops
    for number, other in enumerate(others):
        name = into if number == len(others) - 1 else f"{into}.{number}"
        schedule, first = schedule.fuse(first, other, into=name), name
    return schedule, first
