"""Present a finished sketch as a template: a space of configs, and the program of each."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from tilewright import te
from tilewright.errors import ScheduleError, SketchError
from tilewright.loops.ir import SCRATCH_LIMIT, Program
from tilewright.loops.passes.cpu_pipeline import prefetched
from tilewright.loops.schedule.nest import leaves
from tilewright.space.sketches.sketch import Sketch, Values
from tilewright.space.space import Config, Knob, Space
from tilewright.space.template import Terms

AHEAD = "ahead"  # a knob: how many iterations ahead data-dependent addresses are prefetched
ITERATIONS = (0, 4, 16)


class AppliedSketch:
    def __init__(self, name: str, sketch: Sketch) -> None:
        self.name = name
        self.sketch = sketch
        self._moves = [move for last in (False, True) for move in sketch.moves if move.last is last]

    @cached_property
    def space(self) -> Space:
        moves = self.sketch.moves
        knobs = tuple(knob for move in moves for knob in move.knobs)
        if self._gathers:
            knobs = (*knobs, Knob(AHEAD, ITERATIONS, default=0))
        together = tuple(names for move in moves for names in move.together)
        return Space(self.name, knobs, self._legal, together)

    @cached_property
    def _gathers(self) -> bool:
        """Whether it loads from data-dependent addresses: no hardware prefetcher follows them, so a knob does."""
        found = [load for _, leaf in leaves(self.sketch.start.nest.body) for load in te.loads(leaf.value)]
        return any(te.loads(index) for load in found for index in load.indices)

    @cached_property
    def _cost(self) -> Callable[[Values], Terms] | None:
        frame = self.sketch.frame
        return None if frame is None else frame.terms(self.sketch)

    def _legal(self, values: Values) -> bool:
        moves = self.sketch.moves
        return all(move.legal(values) for move in moves) and (
            sum(move.scratch(values) for move in moves) <= SCRATCH_LIMIT
        )

    def terms(self, config: Config) -> Terms | None:
        return None if self._cost is None else self._cost(dict(config.values))

    def program(self, config: Config) -> Program:
        values = dict(config.values)
        schedule = self.sketch.start
        for move in self._moves:
            try:
                schedule = move.act(schedule, values)
            except ScheduleError as error:
                raise SketchError(
                    f"rule {move.rule!r} cannot go on in {self.name} with {values}: {error.message}"
                ) from error
        program = schedule.program(str(config))
        return prefetched(program, int(values[AHEAD])) if values.get(AHEAD) else program
