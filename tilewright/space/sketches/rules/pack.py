"""Rule `pack`: store operands of GEMMs in the order they are read; constants are packed at link time, others are
copied."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright import te
from tilewright.loops.schedule import Schedule
from tilewright.space.sketches import acts
from tilewright.space.sketches.analysis import (
    bytes_of,
    is_input,
    loads_in,
    tile_of,
    walked_by,
)
from tilewright.space.sketches.gemm import Tiled, TiledOutput
from tilewright.space.sketches.rules.stage import at_panel, gemm_that_reads
from tilewright.space.sketches.sketch import Move, Sketch, Values
from tilewright.space.space import Knob


class PackConstant:
    """Pack a constant at link time, at no cost per call; the next panel may be prefetched.

    b[k, j], constant -> b[panel, k, j in the panel], packed before the first call
    """

    name = "pack"
    alone = True

    def apply(self, sketch: Sketch) -> Sequence[Sketch]:
        if sketch.stage not in sketch.start.nest.constants:
            return ()
        packing = _packing(sketch)
        if packing is None:
            return ()
        tiled = packing.tiled
        if not isinstance(tiled, TiledOutput):
            return [sketch.visited(Move(packing.act), name=self.name, operand="packed")]
        knob = sketch.unused("prefetch")

        def act(schedule: Schedule, values: Values) -> Schedule:
            schedule = packing.act(schedule, values)
            if not values.get(knob):
                return schedule
            loop, spread = tiled.prefetches(values)
            line = sketch.work.machine.line_bytes
            return schedule.prefetch(loop, packing.name, level=int(values[knob]), spread=spread, line=line)

        levels = (Knob(knob, (0, 1, 2)),) if packing.is_contiguous else ()
        move = Move(act, levels, lambda values: not values.get(knob) or tiled.prefetch_pays(values))
        return [sketch.visited(move, name=self.name, operand="packed")]


class PackCopy:
    """Copy each panel.

        for panels: ... b[k, j]     ->     for panels: { b.packed[k, j] = b[k, j]; ... b.packed[k, j in the panel] }

    A product that would otherwise gather the lanes of a vector always gets a copy.
    """

    name = "copy"
    alone = False

    def apply(self, sketch: Sketch) -> Sequence[Sketch]:
        if not is_input(sketch.start, sketch.stage) or sketch.stage in sketch.start.nest.constants:
            return ()
        packing = _packing(sketch)
        if packing is None:
            return ()
        tile, machine = tile_of(sketch.start, sketch.stage), sketch.work.machine
        copy = f"{sketch.stage}.packed"

        def act(schedule: Schedule, values: Values) -> Schedule:
            schedule = packing.act(schedule, values)
            if packing.loop is not None:
                schedule = schedule.compute_at(copy, packing.loop)
            return acts.stage_in_vectors(schedule, copy, machine)

        move = Move(act, scratch=lambda values: bytes_of(tile, packing.box(values)))
        return [sketch.visited(move, name=self.name, operand="copied")]


class _Packing:
    """The packing of the next input that one product reads in vectors."""

    def __init__(self, sketch: Sketch, tiled: Tiled, axes: Sequence[te.Var | None]) -> None:
        self.name, self.tiled, self.axes = sketch.stage, tiled, axes
        self.loop, self.box = tiled.panel_loop, at_panel(sketch, tiled)

    @property
    def is_contiguous(self) -> bool:
        """Whether a panel of it is contiguous: its only axes are the reduction's and the vector's."""
        gemm = self.tiled.gemm
        own = {gemm.own(gemm.axes.vector), *(loop.var for loop in gemm.stage.reductions)}
        return all(axis is None or axis in own for axis in self.axes)

    def act(self, schedule: Schedule, values: Values) -> Schedule:
        """A block is the part of a K block that one panel reads: the reduction axes in order, then the vector
        axis."""
        gemm = self.tiled.gemm
        k_axes = [loop.var for loop in gemm.stage.reductions]
        vector = gemm.own(gemm.axes.vector)
        width, k_block = self.tiled.width(values), self.tiled.k_block(values)
        blocks = [self._block(axis, k_axes, vector, width, k_block) for axis in self.axes]
        numbers = range(len(self.axes))
        across = [n for n in numbers if self.axes[n] == vector]
        along = [n for k in k_axes for n in numbers if self.axes[n] == k]
        others = [n for n in numbers if n not in across and n not in along]
        order = [
            *(2 * n for n in (*others, *across, *along)),
            *(2 * n + 1 for n in (*others, *along, *across)),
        ]
        return schedule.pack(self.name, blocks, order)

    def _block(
        self, axis: te.Var | None, k_axes: Sequence[te.Var], vector: te.Var, width: int, k_block: int
    ) -> int:
        if axis is None:
            return 1
        if axis == vector:
            return width
        if axis == k_axes[-1] and k_block:
            return k_block
        return axis.extent if axis in k_axes else 1


def _packing(sketch: Sketch) -> _Packing | None:
    if not is_input(sketch.start, sketch.stage):
        return None
    tiled = gemm_that_reads(sketch)
    if tiled is None:
        return None
    gemm = tiled.gemm
    loads = [load for load in loads_in(gemm.leaf_in(sketch.start)) if load.source.name == sketch.stage]
    vector = gemm.own(gemm.axes.vector)
    axes = walked_by(loads[0]) if len(loads) == 1 else None
    if axes is None or vector not in axes:
        return None
    return _Packing(sketch, tiled, axes)


def is_gathered(sketch: Sketch) -> bool:
    """Whether a product gathers the lanes of a vector from the next input and could avoid it."""
    packing = _packing(sketch)
    if packing is None:
        return False
    gemm = packing.tiled.gemm
    loads = loads_in(gemm.leaf_in(sketch.start))
    return any(gemm.is_gathered(load) for load in loads if load.source.name == sketch.stage)
