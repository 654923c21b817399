"""Multi-level tiling with a micro-kernel as the innermost tile."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.space.sketches.rules.tiling import suits_micro_kernel, tiled
from tilewright.space.sketches.sketch import Sketch


class MicroKernel:
    """Compute the innermost tile by `outer_product`.

        for m: for n: c[m, n] += a[m, k] * b[k, n]     ->     outer_product_6x64(c, a[.., k], b[k, ..])

    For matmuls and convolutions whose elements need no conversion.
    """

    name = "micro"
    alone = False

    def apply(self, sketch: Sketch) -> Sequence[Sketch]:
        return [found for found in tiled(sketch, self.name, micro=True) if suits_micro_kernel(found)]
