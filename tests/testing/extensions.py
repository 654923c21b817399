"""Extensions as a user would write them: each in a module that a process which builds kernels can import."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright import te
from tilewright.cost.analytical import Analytical
from tilewright.graph.lower import lower_graph
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.loops.default import default_program
from tilewright.loops.ir import Program
from tilewright.loops.schedule import Schedule
from tilewright.search import Search
from tilewright.space.sketches import Move, Sketch
from tilewright.space.sketches.sketch import Values
from tilewright.space.space import Config, Knob, Space
from tilewright.space.template import Applied, CpuWork, GpuWork, Terms
from tilewright.space.terms import Roofline
from tilewright.testing.problems import Inputs


class Plain:
    """A template of a user's own: the default program, under another name, with a knob that changes nothing."""

    name = "plain"

    def apply(self, work: CpuWork) -> Applied | None:
        return None if work.formula is None else PlainApplied(work)


@dataclass(frozen=True)
class PlainApplied:
    work: CpuWork

    @property
    def space(self) -> Space:
        return Space("plain", (Knob("choice", (1, 2, 4)),), lambda values: True)

    def terms(self, config: Config) -> Terms | None:
        return None

    def program(self, config: Config) -> Program:
        assert self.work.formula is not None
        return default_program(self.work.formula, self.work.machine)


class Raises:
    """One that raises whenever it is asked."""

    name = "raises"

    def apply(self, work: CpuWork) -> Applied | None:
        raise ZeroDivisionError("a bug of its author's")


class RaisesLater(Plain):
    """One whose programs cannot be made."""

    name = "raises later"

    def apply(self, work: CpuWork) -> Applied | None:
        return None if work.formula is None else _RaisesLater(work)


@dataclass(frozen=True)
class _RaisesLater(PlainApplied):
    @property
    def space(self) -> Space:
        return Space("raises later", (Knob("choice", (1, 2)),), lambda values: True)

    def program(self, config: Config) -> Program:
        raise KeyError("a bug of its author's")

    def terms(self, config: Config) -> Terms | None:
        return Terms(arithmetic=1.0)  # and it lies about its cost


class Wrong(Plain):
    """One that promises to be the fastest and computes something else."""

    name = "wrong"

    def apply(self, work: CpuWork) -> Applied | None:
        return None if work.formula is None else _Wrong(work)


@dataclass(frozen=True)
class _Wrong(PlainApplied):
    @property
    def space(self) -> Space:
        return Space("wrong", (Knob("choice", (1, 2)),), lambda values: True)

    def terms(self, config: Config) -> Terms | None:
        return Terms(arithmetic=1.0)

    def program(self, config: Config) -> Program:
        from tests.faults.mutants import edits

        return edits(super().program(config))[0].made()


class FirstOnes(Search):
    """A search of a user's own: configs as they are listed."""

    def propose(self, count: int):  # type: ignore[no-untyped-def]
        return self.candidates.configs()


def optimist(candidates, threads, seed, experience):  # type: ignore[no-untyped-def]
    """A cost model of a user's own."""
    return Analytical(candidates, threads)


class Tiles2D:
    """A sketch rule of a user's own: tiles of an elementwise output of two axes, as in docs/06-tuning.md."""

    name = "tiles2d"
    alone = False

    def apply(self, sketch: Sketch) -> Sequence[Sketch]:
        loops = [f"{sketch.output}.i0", f"{sketch.output}.i1"]
        if sketch.stage != sketch.output or sketch.start.loops != loops:
            return ()
        knobs = (Knob("high", (2, 4)), Knob("wide", (8, 16)))

        def act(schedule: Schedule, values: Values) -> Schedule:
            schedule = schedule.tile(loops, [int(values["high"]), int(values["wide"])], tail="shift")
            return schedule.vectorise(f"{loops[1]}.i").parallel(f"{loops[0]}.o")

        return [sketch.visited(Move(act, knobs), name=self.name)]


def outer_product(rows: int, columns: int) -> Task:
    x = Inputs()
    return x.task(apply("mul", x(rows, 1), x(columns)))


class StripRule:
    """A sketch rule for GPUs of a user's own, as in docs/07-extending.md: elements by blocks of a few warps."""

    name = "by-rule"
    alone = True
    kinds = ("cuda",)

    def apply(self, sketch: Sketch) -> Sequence[Sketch]:
        schedule, loop = sketch.start, f"{sketch.output}.i0"
        formula = sketch.work.formula
        if sketch.stage != sketch.output:
            return [sketch.visited()] if self.name in sketch.names else ()
        if formula is None or formula.reductions or f"{sketch.output}.i1" in schedule.loops:
            return ()
        for stage in schedule.stages[:-1]:
            schedule = schedule.inline(stage)

        def split(schedule: Schedule, values: Values) -> Schedule:
            return schedule.split(loop, int(values["threads"]), "guard").bind(f"{loop}.i", "thread.x")

        def bind(schedule: Schedule, values: Values) -> Schedule:
            return schedule.bind(schedule.loops[0], "block.x")

        moves = Move(split, (Knob("threads", (32, 64, 128)),)), Move(bind, last=True)
        return [sketch.visited(*moves, name=self.name, start=schedule)]


class Strips:
    """A GPU sketch of a user's own, in schedule primitives: the elements of a task by blocks of a few warps."""

    name = "sketch:strips"

    def apply(self, work: GpuWork) -> Applied | None:
        output, inputs = lower_graph(work.task.graph)
        if not isinstance(output, te.Compute) or len(output.shape) != 1 or output.reduction is not None:
            return None
        schedule = Schedule.of(output, inputs)
        for stage in schedule.stages[:-1]:
            schedule = schedule.inline(stage)
        return StripsApplied(work, schedule)


@dataclass(frozen=True)
class StripsApplied:
    work: GpuWork
    schedule: Schedule
    name: str = Strips.name

    @property
    def space(self) -> Space:
        size = self.work.task.output.type.size
        return Space(self.name, (Knob("threads", (32, 64, 128)),), lambda v: size % v["threads"] == 0)

    def terms(self, config: Config) -> Roofline:
        return Roofline(self.work.task.flops, 0.9 * self.work.task.bytes)

    def program(self, config: Config) -> Program:
        (output,) = self.schedule.stages
        made = self.schedule.split(f"{output}.i0", config.int("threads"))
        return made.bind(f"{output}.i0.o", "block.x").bind(f"{output}.i0.i", "thread.x").program("strips")
