"""Leave a stage unchanged: inputs, and the output, which the rules for its producers schedule."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.space.sketches.analysis import is_input
from tilewright.space.sketches.rules.pack import is_gathered
from tilewright.space.sketches.sketch import Sketch


class Skip:
    """Leave the stage unchanged.

    out[i, j] = max(product[i, j], 0) -> the same, for the rules that visit `gemm` to tile
    """

    name = "skip"
    alone = False
    kinds = ("cpu", "cuda")

    def apply(self, sketch: Sketch) -> Sequence[Sketch]:
        if sketch.stage == sketch.output:
            return [sketch.visited()]
        if not is_input(sketch.start, sketch.stage) or is_gathered(sketch):
            return ()
        return [sketch.visited()]
