"""Compute a reduction without data reuse inside the output block that needs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewright.loops.schedule import Schedule
from tilewright.space.sketches import acts
from tilewright.space.sketches.analysis import has_reuse, is_reduction, needs, readers_of, stage_of
from tilewright.space.sketches.placing import placed
from tilewright.space.sketches.rows import RowBlocks, box_of, is_placeable
from tilewright.space.sketches.sketch import Sketch


class RowReduction:
    """Reduce a block, in vectors along the result.

    total[i] += x[k, i]                 for i.o:                                 (parallel)
    out[k, i] = x[k, i] / total[i]  ->    for k: vector i.i: total[i.i] += x[k, i.o * 16 + i.i]
                                          for k: vector i.i: out[..] = ...
    """

    name = "rows"
    alone = True

    def apply(self, sketch: Sketch) -> Sequence[Sketch]:
        if not is_reduction(sketch.start, sketch.stage):
            return ()
        framed = framed_rows(sketch)
        if framed is None or framed.frame is None or has_reuse(stage_of(sketch.start, sketch.stage)):
            return ()
        box = box_of(framed, sketch.stage)
        machine = sketch.work.machine

        def in_vectors(schedule: Schedule, stage: str) -> Schedule:
            return acts.reduction_in_vectors(schedule, stage, machine)

        move = placed(framed, sketch.stage, framed.frame.block_loop, box, in_vectors)
        return [framed.visited(move, name=self.name, boxes={sketch.stage: box})]


def framed_rows(sketch: Sketch) -> Sketch | None:
    """The sketch with a frame in which the next stage can be placed; None if there is none."""
    framed = sketch
    if sketch.frame is None:
        if sketch.output not in {leaf.stage for leaf in readers_of(sketch.start, sketch.stage)}:
            return None
        products = any(
            is_reduction(sketch.start, name) and has_reuse(stage_of(sketch.start, name))
            for name in needs(sketch.start, sketch.stage)
        )
        frame = RowBlocks.of(sketch, large=products)
        framed = replace(sketch, frame=frame, moves=(*sketch.moves, *frame.moves()))
    return framed if is_placeable(framed, sketch.stage) else None
