"""Rule `rfactor`: a reduction along contiguous memory keeps a partial result in each vector lane."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tilewright.loops.schedule import Schedule
from tilewright.loops.schedule.nest import PlainStage, find_leaf
from tilewright.space.sketches import acts
from tilewright.space.sketches.analysis import (
    depends_on_data,
    has_reuse,
    is_contiguous,
    is_reduction,
    lanes_for,
    loads_in,
    loops_of,
    moves_along,
    stage_of,
)
from tilewright.space.sketches.placing import placed
from tilewright.space.sketches.rows import box_of
from tilewright.space.sketches.rules.row_reduction import framed_rows
from tilewright.space.sketches.sketch import Sketch


class ReductionFactorisation:
    """Reduce the innermost axis in lanes, and combine the lanes at the end.

    total[i] += x[i, k]     ->     total.rf[i, v] += x[i, k.o * 16 + v]
                                   total[i] += total.rf[i, v]                     (across the lanes)
    """

    name = "rfactor"
    alone = True

    def apply(self, sketch: Sketch) -> Sequence[Sketch]:
        name = sketch.stage
        if not is_reduction(sketch.start, name):
            return ()
        stage = stage_of(sketch.start, name)
        along = stage.reductions[-1].var
        lanes = lanes_for(sketch.work.machine, stage.leaf, along.extent)
        if (
            lanes < 2
            or depends_on_data(stage.leaf)
            or not _runs_along_memory(stage, sketch.start.nest.constants)
        ):
            return ()
        framed = framed_rows(sketch)
        if framed is None or framed.frame is None:
            return ()
        block_loop, box, partial = framed.frame.block_loop, box_of(framed, name), f"{name}.rf"

        def in_lanes(schedule: Schedule, stage: str) -> Schedule:
            """Combine each result right after its lanes."""
            around = acts.spatial_loops(schedule, stage)
            at = around[-1] if around else block_loop
            if at is not None:
                schedule = schedule.compute_at(partial, at)
            path, leaf = find_leaf(schedule.nest, partial)
            lane = acts.last_loop(schedule, partial)
            assert lane is not None
            schedule = schedule.reorder(*(loop.name for loop in path if loop.var in leaf.reduced), lane)
            schedule = schedule.vectorise(lane).set_scope(partial, "register")
            return schedule.vectorise(f"{along.name}.i.final")

        return [
            framed.visited(
                placed(framed, name, block_loop, box, in_lanes),
                name=self.name,
                start=framed.start.split(along.name, lanes, "guard").rfactor(f"{along.name}.i"),
                boxes={name: box, partial: lambda values: (*box(values), lanes)},
            )
        ]


def _runs_along_memory(stage: PlainStage, constants: Collection[str]) -> bool:
    """Whether the innermost reduction axis is contiguous in memory, and tiling along the result would not be
    better."""
    loads, along = loads_in(stage.leaf), stage.reductions[-1].var
    if not any(is_contiguous(load, along) for load in loads):
        return False
    if not has_reuse(stage) or not loops_of(stage):
        return True
    vector = loops_of(stage)[-1]
    transposed = [load for load in loads if moves_along(load, vector) and not is_contiguous(load, vector)]
    return any(load.source.name not in constants for load in transposed)
