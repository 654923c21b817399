"""Rule `matrices`: a contraction becomes a batch of matmuls, in one way for each mapping of its axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewright.hw.tensor_cores import multiply_add
from tilewright.space.contraction import contraction_of
from tilewright.space.mapping import mappings
from tilewright.space.sketches.block_frames import MatricesFrame
from tilewright.space.sketches.cuda.fetch import TileOperand
from tilewright.space.sketches.cuda.tiled import DTYPES
from tilewright.space.sketches.matrices import LEFT, RIGHT, SUMS, Matrices
from tilewright.space.sketches.sketch import Sketch

_MAX = 2  # mappings of a contraction


class AsMatrices:
    """Map the axes of a contraction to m, n and k by access matrices (`space/mapping.py`).

        out[n, y, x, f] = sum of x[n, y + r, x + s, c] * w[f, r, s, c]
            ->     left[m, k] = x[...]; right[n, k] = w[...]; sums[m, n] = sum of left[m, k] * right[n, k]; out = sums

    The stages that come before the contraction and after it are inlined into the factors and into `out`.
    """

    name = "matrices"
    alone = True
    kinds = ("cuda",)

    def apply(self, sketch: Sketch) -> Sequence[Sketch]:
        work = sketch.work
        if sketch.stage != sketch.output or sketch.frame is not None or sketch.start.trace:
            return ()
        if work.formula is None or not work.machine.async_copy:
            return ()
        found = contraction_of(work.formula, DTYPES)
        if found is None:
            return ()
        made = []
        for mapping in mappings(found, multiply_add(found.dtype))[:_MAX]:
            sides = ((mapping.left, mapping.m), (mapping.right, mapping.n))
            left, right = (TileOperand(factor, walked, mapping.k).transposed for factor, walked in sides)
            matrices = Matrices(found, mapping, (left, right))
            made.append(
                replace(
                    sketch,
                    start=matrices.schedule,
                    left=(SUMS, LEFT, RIGHT),
                    frame=MatricesFrame(matrices),
                )
            )
        return made
