"""A task without reductions: vectorise the output and run it on all threads."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright import te
from tilewright.hw.intrinsics import Intrinsic
from tilewright.loops.schedule import Schedule
from tilewright.loops.schedule.nest import Leaf
from tilewright.space.sketches import acts
from tilewright.space.sketches.analysis import (
    is_contiguous,
    is_input,
    is_reduction,
    lanes_for,
    loads_in,
    loops_of,
    stage_of,
)
from tilewright.space.sketches.sketch import Move, Sketch, Values
from tilewright.space.space import Knob

_VECTORS = (1, 2, 4, 8)
_ROWS = (1, 4, 8, 16, 32)


class Elementwise:
    """Compute the output in tiles of vectors.

        for i: for j: out[i, j] = ...     ->     parallel i, j.o: unroll u: vector v: out[i, j.o * W + u * L + v] = ...

    If an operand is read along another axis than the output is written, that axis is tiled too.
    """

    name = "elementwise"
    alone = True

    def apply(self, sketch: Sketch) -> Sequence[Sketch]:
        return in_tiles_of_vectors(sketch, self.name)


def in_tiles_of_vectors(sketch: Sketch, name: str, intrinsic: Intrinsic | None = None) -> Sequence[Sketch]:
    """Compute the output in tiles of vectors; with an `intrinsic` of one axis, each vector by the intrinsic."""
    if sketch.stage != sketch.output:
        return ()
    producers = [each for each in sketch.start.stages if each != sketch.output]
    if any(is_reduction(sketch.start, each) for each in sketch.start.stages):
        return ()
    flat = sketch.start
    for producer in reversed(producers):  # including those that nothing reads any more
        flat = flat.inline(producer)
    left = tuple(each for each in sketch.left if is_input(sketch.start, each))
    inlined = Sketch(sketch.work, flat, (sketch.stage, *left))
    output = stage_of(flat, sketch.output)
    loops = loops_of(output)
    if not loops:
        return [inlined.visited(name=name)] if intrinsic is None else []
    vector = loops[-1]
    lanes = lanes_for(sketch.work.machine, output.leaf, vector.extent)
    if intrinsic is not None:
        lanes = intrinsic.stage.axes[0].extent
        if lanes > vector.extent:
            return ()
    widths = tuple(n for n in _VECTORS if n * lanes <= vector.extent)
    across = next((axis for axis in reversed(loops[:-1]) if _is_read_along(output.leaf, axis)), None)
    heights = tuple(n for n in _ROWS if across is not None and n <= across.extent) or (1,)
    outer = [axis.name for axis in loops if axis not in (vector, across)]
    parallel = [*outer, *([f"{across.name}.o"] if across is not None else []), f"{vector.name}.o"]

    def act(schedule: Schedule, values: Values) -> Schedule:
        schedule = schedule.split(vector.name, int(values["vectors"]) * lanes, "shift")
        inner = [f"{vector.name}.i"]
        if across is not None:
            schedule = schedule.split(across.name, int(values["rows"]), "shift")
            inner.insert(0, f"{across.name}.i")
        schedule = acts.in_vectors(schedule.reorder(*parallel, *inner), inner[-1], lanes)
        return schedule if intrinsic is None else schedule.tensorise(f"{inner[-1]}.i", intrinsic)

    arranged = Move(act, (Knob("vectors", widths), Knob("rows", heights)))
    fused = Knob("fused", tuple(range(1, len(parallel) + 1)), default=len(parallel))
    joined = Move(lambda s, v: acts.in_parallel(s, parallel[: int(v["fused"])]), (fused,), last=True)
    return [inlined.visited(arranged, joined, name=name)]


def _is_read_along(leaf: Leaf, axis: te.Var) -> bool:
    plain = [load for load in loads_in(leaf) if not any(te.loads(index) for index in load.indices)]
    return any(is_contiguous(load, axis) for load in plain)
