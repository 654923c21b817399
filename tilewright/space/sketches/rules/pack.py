"""Operands of products in the order in which they are read: constants when the model is linked, others as a copy."""

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
from tilewright.space.sketches.product import Tiled
from tilewright.space.sketches.rules.stage import at_panel, product_that_reads
from tilewright.space.sketches.sketch import Move, Sketch, Values


class PackConstant:
    """

    b[k, j], constant     ->     b[panel, k, j in the panel], stored so before the first call
    """

    name = "pack"
    alone = True

    def apply(self, sketch: Sketch) -> Sequence[Sketch]:
        if sketch.stage not in sketch.start.nest.constants:
            return ()
        packing = _packing(sketch)
        if packing is None:
            return ()
        return [sketch.visited(Move(packing.act), name=self.name, operand="packed")]


class PackCopy:
    """

    for panels: ... b[k, j]     ->     for panels: { b.packed[k, j] = b[k, j]; ... b.packed[k, j in the panel] }

    A product that would read single elements for the lanes of a vector always gets one.
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
    """How the next input, walked in vectors by one product, is packed for it."""

    def __init__(self, sketch: Sketch, tiled: Tiled, axes: Sequence[te.Var | None]) -> None:
        self.name, self.tiled, self.axes = sketch.stage, tiled, axes
        self.loop, self.box = tiled.panel_loop, at_panel(sketch, tiled)

    def act(self, schedule: Schedule, values: Values) -> Schedule:
        """A block is what one panel takes of a piece of the sum; in it the axes of the sum in their order, then the
        vector's."""
        product = self.tiled.product
        taps = [loop.var for loop in product.stage.reductions]
        vector = product.own(product.axes.vector)
        width, piece = self.tiled.width(values), self.tiled.piece(values)
        blocks = [self._block(axis, taps, vector, width, piece) for axis in self.axes]
        places = sorted(
            (n for n, axis in enumerate(self.axes) if axis in taps),
            key=lambda n: taps.index(self.axes[n]),  # type: ignore[arg-type]
        )
        places += [n for n, axis in enumerate(self.axes) if axis not in taps and axis != vector]
        places += [n for n, axis in enumerate(self.axes) if axis == vector]
        order = [*(2 * n for n in range(len(blocks))), *(2 * n + 1 for n in places)]
        return schedule.pack(self.name, blocks, order)

    def _block(
        self, axis: te.Var | None, taps: Sequence[te.Var], vector: te.Var, width: int, piece: int
    ) -> int:
        if axis is None:
            return 1
        if axis == vector:
            return width
        if axis == taps[-1] and piece:
            return piece
        return axis.extent if axis in taps else 1


def _packing(sketch: Sketch) -> _Packing | None:
    if not is_input(sketch.start, sketch.stage):
        return None
    tiled = product_that_reads(sketch)
    if tiled is None:
        return None
    product = tiled.product
    loads = [load for load in loads_in(product.leaf_in(sketch.start)) if load.source.name == sketch.stage]
    vector = product.own(product.axes.vector)
    axes = walked_by(loads[0]) if len(loads) == 1 else None
    if axes is None or vector not in axes:
        return None
    return _Packing(sketch, tiled, axes)


def is_gathered(sketch: Sketch) -> bool:
    """Whether a product would read single elements of the next input for the lanes of a vector, and need not."""
    packing = _packing(sketch)
    if packing is None:
        return False
    product = packing.tiled.product
    loads = loads_in(product.leaf_in(sketch.start))
    return any(product.is_gathered(load) for load in loads if load.source.name == sketch.stage)
