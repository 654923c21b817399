"""Rule `stage`: copy operands that are read often into local memory, one block or panel at a time."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.loops.schedule import Schedule
from tilewright.loops.schedule.nest import find_leaf
from tilewright.space.sketches import acts
from tilewright.space.sketches.analysis import (
    Extents,
    bytes_of,
    depends_on_data,
    is_input,
    is_reduction,
    loads_in,
    readers_of,
    tile_of,
)
from tilewright.space.sketches.gemm import Tiled, TiledOutput
from tilewright.space.sketches.placing import placed
from tilewright.space.sketches.rows import box_of, is_placeable
from tilewright.space.sketches.sketch import Box, Move, Sketch, Values

_STAGED_BYTES = 512 << 10


class StageOperand:
    """Compute a copy, or the stage itself, for each block.

        for blocks: for panels: ... a[i, k]     ->     for blocks: { copy[i, k] = a[i, k]; for panels: ... copy[i, k] }

    An input is copied. A stage that is not a reduction (zero padding, a conversion) is computed there.
    """

    name = "stage"
    alone = False

    def apply(self, sketch: Sketch) -> Sequence[Sketch]:
        if is_input(sketch.start, sketch.stage):
            return _copied(sketch, self.name)
        if sketch.stage == sketch.output or is_reduction(sketch.start, sketch.stage):
            return ()
        leaf = find_leaf(sketch.start.nest, sketch.stage)[1]
        if depends_on_data(leaf) or not is_placeable(sketch, sketch.stage):
            return ()
        assert sketch.frame is not None
        machine = sketch.work.machine
        loop, box = sketch.frame.block_loop, box_of(sketch, sketch.stage)
        needed = box
        tiled = gemm_that_reads(sketch)
        if tiled is not None and _is_walked(sketch, tiled):
            loop, needed = tiled.panel_loop, at_panel(sketch, tiled)
        move = placed(
            sketch, sketch.stage, loop, needed, lambda s, name: acts.stage_in_vectors(s, name, machine)
        )
        return [sketch.visited(move, name=self.name, boxes={sketch.stage: box}, operand="staged")]


def _copied(sketch: Sketch, name: str) -> Sequence[Sketch]:
    """Copy an input that a product does not read in vectors."""
    tiled = gemm_that_reads(sketch)
    if tiled is None or not isinstance(tiled, TiledOutput):
        return ()
    if _is_walked(sketch, tiled) or sketch.stage in sketch.start.nest.constants:
        return ()
    machine, tile = sketch.work.machine, tile_of(sketch.start, sketch.stage)
    read = tiled.gemm.operand_box(sketch.start, tile)

    def box(values: Values) -> Extents:
        return read(tiled.at_block(values))

    def act(schedule: Schedule, values: Values) -> Schedule:
        reader = f"{tiled.gemm.name}.rf" if int(values["k_block"]) else tiled.gemm.name
        made = f"{sketch.stage}.of.{reader}"
        schedule = schedule.cache_read(sketch.stage, reader).compute_at(made, tiled.block_loop)
        return acts.stage_in_vectors(schedule, made, machine)

    move = Move(
        act,
        legal=lambda values: bytes_of(tile, box(values)) <= _STAGED_BYTES,
        scratch=lambda values: bytes_of(tile, box(values)),
    )
    return [sketch.visited(move, name=name, operand="staged")]


def at_panel(sketch: Sketch, tiled: Tiled) -> Box:
    """How much of the next tensor a panel of the product needs."""
    read = tiled.gemm.operand_box(sketch.start, tile_of(sketch.start, sketch.stage))
    return lambda values: read(tiled.at_panel(values))


def _is_walked(sketch: Sketch, tiled: Tiled) -> bool:
    """Whether the product reads the next tensor in vectors."""
    loads = loads_in(tiled.gemm.leaf_in(sketch.start))
    return any(tiled.gemm.is_walked(load) for load in loads if load.source.name == sketch.stage)


def gemm_that_reads(sketch: Sketch) -> Tiled | None:
    """The product that is the only reader of the next input."""
    readers = {leaf.stage for leaf in readers_of(sketch.start, sketch.stage)}
    found = [tiled for tiled in sketch.products if readers == {tiled.gemm.name}]
    return found[0] if found else None
