"""Compute the output in blocks of rows.

    for axes that the reductions depend on, the last one in blocks:      (parallel)
      the stages before the output, for this block
      for the rows of the block, and all other axes:
        out = ...

The data that the reductions of a block need is computed once and kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from tilewright import te
from tilewright.loops.schedule import Schedule
from tilewright.loops.schedule.nest import PlainStage
from tilewright.space.sketches import acts
from tilewright.space.sketches.analysis import (
    Extents,
    box_reader,
    lanes_for,
    largest,
    loads_in,
    loops_of,
    readers_of,
    stage_of,
    tile_of,
)
from tilewright.space.sketches.costs import Cost, stage_cost, together
from tilewright.space.sketches.gemm import other_costs
from tilewright.space.sketches.sketch import Box, Move, Sketch, Values
from tilewright.space.space import Knob
from tilewright.space.template import Terms, Work

_BLOCKS = (1, 2, 4, 8)
_LARGE_BLOCKS = (4, 8, 16, 32, 64, 128)
_VECTORS = (1, 2, 4)


@dataclass(frozen=True)
class RowBlocks:
    """`axes`: the output's axes that the reductions depend on, outermost first; the last one is cut into blocks."""

    work: Work
    stage: PlainStage  # the output
    axes: tuple[te.Var, ...]
    large: bool  # blocks for matmuls

    @staticmethod
    def of(sketch: Sketch, *, large: bool) -> RowBlocks:
        """The frame that suits the next stage, which the output reads."""
        output = stage_of(sketch.start, sketch.output)
        name = sketch.stage
        accesses = [load for load in loads_in(output.leaf) if load.source.name == name]
        plain = [{index for index in load.indices if isinstance(index, te.Var)} for load in accesses]
        axes = tuple(axis for axis in loops_of(output) if plain and all(axis in each for each in plain))
        return RowBlocks(sketch.work, output, axes, large)

    @property
    def row(self) -> te.Var | None:
        return self.axes[-1] if self.axes else None

    @property
    def vector(self) -> te.Var | None:
        loops = loops_of(self.stage)
        return loops[-1] if loops else None

    @property
    def lanes(self) -> int:
        assert self.vector is not None
        return lanes_for(self.work.machine, self.stage.leaf, self.vector.extent)

    @property
    def block_loop(self) -> str | None:
        return f"{self.row.name}.o" if self.row is not None else None

    @property
    def parallel_loops(self) -> list[str]:
        return [*acts.names(self.axes[:-1]), *([self.block_loop] if self.block_loop else [])]

    def block(self, values: Values) -> int:
        return int(values["block"]) * (self.lanes if self.row == self.vector else 1)

    def at_block(self, values: Values) -> Extents:
        sizes = {axis: axis.extent for axis in loops_of(self.stage)} | dict.fromkeys(self.axes, 1)
        if self.row is not None:
            sizes[self.row] = self.block(values)
        return tuple(1 if axis is None else sizes[axis] for axis in self.stage.axes)

    def iterations(self, values: Values) -> int:
        if self.row is None:
            return 1
        return math.prod(axis.extent for axis in self.axes[:-1]) * -(-self.row.extent // self.block(values))

    def terms(self, sketch: Sketch) -> Cost | None:
        output = stage_cost(sketch, sketch.output, self.at_block, self.iterations)
        costs = together([output, *other_costs(sketch, self.iterations)], self._parallel)
        moved = float(
            sum(
                tile.size * tile.dtype.bytes for tile in (*sketch.start.nest.inputs, sketch.start.nest.output)
            )
        )

        def cost(values: Values) -> Terms:
            return replace(costs(values), from_l3=moved)

        return cost

    def _parallel(self, values: Values) -> int:
        """Iterations that can run on different threads."""
        if not self.axes:
            return 1
        joined = int(values["fused"])
        extents = [*(axis.extent for axis in self.axes[:-1]), -(-self.axes[-1].extent // self.block(values))]
        return math.prod(extents[:joined])

    def moves(self) -> tuple[Move, ...]:
        knobs: list[Knob] = []
        if self.row is not None:
            unit = self.lanes if self.row == self.vector else 1
            sizes = _LARGE_BLOCKS if self.large else _BLOCKS
            fitting = tuple(n for n in sizes if n * unit <= self.row.extent)
            knobs.append(Knob("block", fitting or (self.row.extent // unit,)))
        if self.vector is not None and self.row != self.vector:
            knobs.append(Knob("vectors", _VECTORS))
        arranged = Move(self._arrange, tuple(knobs))
        if not self.axes:
            return (arranged,)
        fused = Knob("fused", tuple(range(1, len(self.axes) + 1)), default=len(self.axes))
        joined = Move(
            lambda s, values: acts.in_parallel(s, self.parallel_loops[: int(values["fused"])]),
            (fused,),
            last=True,
        )
        return arranged, joined

    def _arrange(self, schedule: Schedule, values: Values) -> Schedule:
        if self.vector is None:
            return schedule
        columns = [axis.name for axis in loops_of(self.stage) if axis not in self.axes]
        if self.row is None:
            return acts.run_in_vectors(schedule, self.vector.name, self.lanes, int(values["vectors"]))
        schedule = schedule.split(self.row.name, self.block(values), "shift")
        inner = f"{self.row.name}.i"
        if self.row == self.vector:
            schedule = schedule.reorder(*self.parallel_loops, *columns, inner)
            return acts.in_vectors(schedule, inner, self.lanes)
        schedule = schedule.reorder(*self.parallel_loops, inner, *columns)
        if self.vector in self.axes:
            return schedule
        return acts.run_in_vectors(schedule, self.vector.name, self.lanes, int(values["vectors"]))


def box_of(sketch: Sketch, name: str) -> Box:
    """How much of a stage or an input one iteration of the block loop needs."""
    assert sketch.frame is not None
    tile = tile_of(sketch.start, name)
    parts: list[tuple[Box, Callable[[Extents], Extents]]] = []
    for leaf in readers_of(sketch.start, name):
        of_reader = sketch.frame.at_block if leaf.stage == sketch.output else sketch.boxes[leaf.stage]
        parts.append((of_reader, box_reader(leaf, stage_of(sketch.start, leaf.stage).axes, tile)))
    return lambda values: largest([read(of_reader(values)) for of_reader, read in parts])


def is_placeable(sketch: Sketch, name: str) -> bool:
    """Whether all its readers are the output, or are already placed in its block."""
    readers = {leaf.stage for leaf in readers_of(sketch.start, name)}
    return sketch.frame is not None and bool(readers) and readers <= {sketch.output, *sketch.boxes}
