"""Moves that compute a stage inside the loops of another (`compute_at`)."""

from __future__ import annotations

from collections.abc import Callable

from tilewright.loops.schedule import Schedule
from tilewright.space.sketches.analysis import bytes_of, tile_of
from tilewright.space.sketches.sketch import Box, Move, Sketch, Values

After = Callable[[Schedule, str], Schedule]


def placed(sketch: Sketch, name: str, loop: str | None, box: Box, after: After) -> Move:
    """Compute the stage in each iteration of `loop` (None: at the top level), then apply `after` to its loops."""
    tile = tile_of(sketch.start, name)

    def act(schedule: Schedule, values: Values) -> Schedule:
        if loop is not None:
            schedule = schedule.compute_at(name, loop)
        return after(schedule, name)

    return Move(act, scratch=lambda values: bytes_of(tile, box(values)))
