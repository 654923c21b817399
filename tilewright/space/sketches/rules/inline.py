"""Inline a stage that is not a reduction into its readers."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.loops.schedule.nest import find_leaf
from tilewright.space.sketches.analysis import is_expensive, is_input, is_reduction, loads_in, readers_of
from tilewright.space.sketches.sketch import Sketch


class Inline:
    """Inline if it costs nothing: the stage is cheap, or is read once.

    p[i] = a[i] + 1; out[i] = p[i] * 2 -> out[i] = (a[i] + 1) * 2
    """

    name = "inline"
    alone = True

    def apply(self, sketch: Sketch) -> Sequence[Sketch]:
        if not can_inline(sketch) or feeds_gemm(sketch):
            return ()
        _, leaf = find_leaf(sketch.start.nest, sketch.stage)
        readers = readers_of(sketch.start, sketch.stage)
        if is_expensive(leaf) and (len(readers) > 1 or any(reader.kind for reader in readers)):
            return ()
        return [sketch.visited(start=sketch.start.inline(sketch.stage))]


class InlineAgain:
    """Inline although it is then computed several times: operands of products, and functions that several stages
    read."""

    name = "again"
    alone = False

    def apply(self, sketch: Sketch) -> Sequence[Sketch]:
        if not can_inline(sketch):
            return ()
        micro = any(tiled.gemm.micro for tiled in sketch.products if _reads(sketch, tiled.gemm.name))
        if micro:  # a micro-kernel reads its operands from memory
            return ()
        return [sketch.visited(name=self.name, start=sketch.start.inline(sketch.stage))]


def can_inline(sketch: Sketch) -> bool:
    name = sketch.stage
    if name == sketch.output or is_input(sketch.start, name) or is_reduction(sketch.start, name):
        return False
    return name not in sketch.boxes  # it is already placed


def feeds_gemm(sketch: Sketch) -> bool:
    """Whether a tiled product reads the next stage."""
    return any(_reads(sketch, tiled.gemm.name) for tiled in sketch.products)


def _reads(sketch: Sketch, gemm: str) -> bool:
    _, leaf = find_leaf(sketch.start.nest, gemm)
    return any(load.source.name == sketch.stage for load in loads_in(leaf))
