"""Present a finished sketch as a template: a space of configs, and the program of each."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, reduce
from operator import and_

from tilewright import te
from tilewright.errors import ScheduleError, SketchError
from tilewright.hw.gpu import GpuMachine
from tilewright.loops.ir import SCRATCH_LIMIT, Program
from tilewright.loops.passes.cpu_pipeline import prefetched
from tilewright.loops.schedule.nest import leaves
from tilewright.space.sketches.sketch import Sketch, Values
from tilewright.space.space import Config, Knob, Space
from tilewright.space.terms import Counted
from tilewright.support.batch import Truth

AHEAD = "ahead"  # a knob: how many iterations ahead data-dependent addresses are prefetched
ITERATIONS = (0, 4, 16)


def applied_sketch(name: str, sketch: Sketch) -> AppliedSketch:
    batched = getattr(sketch.frame, "batched", False) and not sketch.users
    return BatchedSketch(name, sketch) if batched else AppliedSketch(name, sketch)


class AppliedSketch:
    batched = False

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
        return Space(self.name, knobs, self._legal, together, self.batched)

    @cached_property
    def _gathers(self) -> bool:
        """Whether a processor loads from data-dependent addresses: no hardware prefetcher follows them, so a knob
        does."""
        if isinstance(self.sketch.work.machine, GpuMachine):
            return False
        found = [load for _, leaf in leaves(self.sketch.start.nest.body) for load in te.loads(leaf.value)]
        return any(te.loads(index) for load in found for index in load.indices)

    @cached_property
    def _cost(self) -> Callable[[Values], Counted] | None:
        frame = self.sketch.frame
        return None if frame is None else frame.terms(self.sketch)

    def _legal(self, values: Values) -> bool:
        moves = self.sketch.moves
        return all(move.legal(values) for move in moves) and (
            sum(move.scratch(values) for move in moves) <= self._capacity
        )

    @property
    def _capacity(self) -> int:
        """Bytes of scratch memory."""
        machine = self.sketch.work.machine
        return machine.shared_block if isinstance(machine, GpuMachine) else SCRATCH_LIMIT

    def terms(self, config: Config) -> Counted | None:
        if self._cost is not None:
            return self._cost(dict(config.values))
        work = self.sketch.work
        if not isinstance(work.machine, GpuMachine):
            return None
        from tilewright.space.templates.cuda.default import roofline

        return roofline(work, self.program(config))

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


class BatchedSketch(AppliedSketch):
    """A sketch whose legality and terms are also found of many configs at once."""

    batched = True

    def _legal(self, values: Values) -> Truth:
        return reduce(and_, (move.legal(values) for move in self.sketch.moves), True)

    def terms_of(self, values: Values) -> Counted:
        assert self._cost is not None, "a frame that counts many configs at once counts each"
        return self._cost(values)
