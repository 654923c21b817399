"""Rule `cache`: add a cache tile for a reduction that several stages read, or that is not read element by element."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewright.space.sketches.analysis import (
    consumer_of,
    depends_on_data,
    has_reuse,
    is_reduction,
    stage_of,
)
from tilewright.space.sketches.placing import placed
from tilewright.space.sketches.rows import RowBlocks, box_of, is_placeable
from tilewright.space.sketches.sketch import Sketch


class CacheWrite:
    """Reduce into a tile, and copy the tile to the result.

        p[i, j] += a[i, k] * b[k, j]     ->     p.local[i, j] += a[i, k] * b[k, j]
        out[i] = p[i, 0] + p[i, 1]              p[i, j] = p.local[i, j]; out[i] = p[i, 0] + p[i, 1]

    `p.local` then has one reader, and the rules for tiles apply to it.
    """

    name = "cache"
    alone = True

    def apply(self, sketch: Sketch) -> Sequence[Sketch]:
        if not is_reduction(sketch.start, sketch.stage):
            return ()
        stage = stage_of(sketch.start, sketch.stage)
        if not has_reuse(stage) or depends_on_data(stage.leaf):
            return ()
        consumer = consumer_of(sketch.start, sketch.stage)
        if consumer is not None and (sketch.frame is None or consumer.name in sketch.bare):
            return ()
        return cached(sketch, self.name)


def cached(sketch: Sketch, name: str) -> Sequence[Sketch]:
    """Compute the next stage into a tile of its own inside the block, and copy it from there."""
    framed = sketch
    if sketch.frame is None:
        frame = RowBlocks.of(sketch, large=True)
        framed = replace(sketch, frame=frame, moves=(*sketch.moves, *frame.moves()))
    if not is_placeable(framed, sketch.stage):
        return ()
    assert framed.frame is not None
    box = box_of(framed, sketch.stage)
    start = framed.start.cache_write(sketch.stage)
    move = placed(framed, sketch.stage, framed.frame.block_loop, box, lambda schedule, _: schedule)
    return [
        framed.visited(
            move,
            name=name,
            start=start,
            boxes={sketch.stage: box},
            bare=True,
            then=[f"{sketch.stage}.local"],
        )
    ]
