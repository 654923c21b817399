"""Rule `softmax`: a matmul and the softmax of its rows in one kernel. The matmul of a block of rows is a cached stage
inside the loops of the softmax."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.space.sketches.analysis import (
    has_reuse,
    is_reduction,
    readers_of,
    stage_of,
)
from tilewright.space.sketches.rules.cache_write import cached
from tilewright.space.sketches.sketch import Sketch


class MatmulSoftmax:
    """Compute the product of a block of rows, then its softmax, then the next block.

        scores = q @ k                           for blocks of rows:                      (parallel)
        top, total = max, sum over rows    ->      scores.local, in tiles of registers
        out = exp(scores - top) / total            top, total of the block
                                                   out of the block

    No tensor of the size of `scores` is written to memory. If another product follows, `out` is tiled, and all of
    this runs for each block of it.
    """

    name = "softmax"
    alone = True

    def apply(self, sketch: Sketch) -> Sequence[Sketch]:
        if not is_reduction(sketch.start, sketch.stage):
            return ()
        kinds = {leaf.kind for leaf in readers_of(sketch.start, sketch.stage)}
        if "max" not in kinds or not has_reuse(stage_of(sketch.start, sketch.stage)):
            return ()
        return cached(sketch, self.name)
