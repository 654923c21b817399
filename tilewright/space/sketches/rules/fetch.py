"""Rule `fetch`: cooperative fetching of an operand's tiles into shared memory, at a location that is a knob."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.loops.schedule import Schedule
from tilewright.space.sketches import gpu_acts as acts
from tilewright.space.sketches.block_frames import BLOCK, STEP, BlockFrame, Values, at
from tilewright.space.sketches.matrices import LEFT, RIGHT, STEPS
from tilewright.space.sketches.sketch import Move, Sketch
from tilewright.space.space import Knob

FETCHED_AT = {operand: at(operand) for operand in (LEFT, RIGHT)}


class SharedFetch:
    """All threads of a block copy a tile of an operand, in each step or once.

        for blocks: for steps: ... left[m, k]     ->     for blocks: for steps: for threads: left.tile = left[...]
                                                                                ... left.tile[m, k]

    A zero beyond an edge is part of the copy, so that the copy stays asynchronous; a computed operand is stored.
    """

    name = "fetch"
    alone = True
    kinds = ("cuda",)

    def apply(self, sketch: Sketch) -> Sequence[Sketch]:
        frame, name = sketch.frame, sketch.stage
        if not isinstance(frame, BlockFrame) or name not in FETCHED_AT:
            return ()
        read = frame.applied.read[0][0 if name == LEFT else 1]
        knob = Knob(FETCHED_AT[name], (STEP, BLOCK), ordered=False)

        def act(schedule: Schedule, values: Values) -> Schedule:
            loop = STEPS if values[knob.name] == STEP else frame.block_loop or acts.block_loop(schedule)
            threads = frame.sizes(values).threads
            return acts.fetched(schedule, name, loop, threads, read.lanes, across=read.is_across)

        return [sketch.visited(Move(act, (knob,)))]
