"""A user's module: importing it registers a rule."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.space.sketches import Move, Sketch, register

NAME = "columns of one's own"


class Columns:
    """An elementwise task, column by column."""

    name = NAME
    alone = False

    def apply(self, sketch: Sketch) -> Sequence[Sketch]:
        loops = [f"{sketch.output}.i1", f"{sketch.output}.i0"]
        if sketch.stage != sketch.output or sketch.start.loops != loops[::-1]:
            return ()
        turned = Move(lambda schedule, values: schedule.reorder(*loops).parallel(loops[0]))
        return [sketch.visited(turned, name=NAME)]


register(Columns())
