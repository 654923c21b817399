"""Use registered intrinsics in the innermost tile: one sketch for each intrinsic that matches the task."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from random import Random

from tilewright.errors import ScheduleError
from tilewright.hw.intrinsics import Intrinsic, registered_intrinsics
from tilewright.space.sketches.acts import NativeTile
from tilewright.space.sketches.rules.elementwise import in_tiles_of_vectors
from tilewright.space.sketches.rules.tiling import tiled
from tilewright.space.sketches.sketch import Sketch
from tilewright.space.space import Space


class Tensorise:
    """Replace the innermost loops by an intrinsic of the registry (`hw/intrinsics.py`) that the machine has.

        for n < 8: c[n] += a * b[n]     ->     fma_8xf32(c, a, b)

    For reductions with data reuse, in the tiles of `tiling.py`, and for the output of a task without reductions. The
    sketch's name contains a digest of the declaration, because measurements of one declaration say nothing about
    another.
    """

    name = "tensorise"
    alone = False

    def apply(self, sketch: Sketch) -> Sequence[Sketch]:
        found: list[Sketch] = []
        for intrinsic in registered_intrinsics(sketch.work.machine):
            found += list(_offered(sketch, intrinsic))[:1]
        return found


def _offered(sketch: Sketch, intrinsic: Intrinsic) -> Iterator[Sketch]:
    """The sketches whose innermost loops match the intrinsic."""
    name = f"{intrinsic.name}@{intrinsic.digest}"
    if not intrinsic.accumulates:
        if len(intrinsic.stage.axes) == 1:
            yield from (
                made for made in in_tiles_of_vectors(sketch, name, intrinsic) if _matches(sketch, made)
            )
        return
    for native in _tiles(intrinsic):
        made = tiled(sketch, name, micro=True, native=native)
        yield from (each for each in made if _matches(sketch, each))


def _tiles(intrinsic: Intrinsic) -> Iterator[NativeTile]:
    """The axes that can be the vector axis, and those that can be the row axis."""
    extents = [axis.extent for axis in intrinsic.stage.axes]
    k_axes = [axis.extent for axis in intrinsic.reduced]
    if not 1 <= len(extents) <= 2 or len(k_axes) > 1:
        return
    for rows, lanes in dict.fromkeys(itertools.permutations([1, *extents][-2:])):
        if lanes > 1:
            yield NativeTile(intrinsic, rows, lanes, k_axes[0] if k_axes else 1)


def _matches(before: Sketch, made: Sketch) -> bool:
    """Whether the schedule primitives accept a config of the new sketch."""
    move = made.moves[len(before.moves)]
    config = Space("trial", move.knobs, move.legal, move.together).sample(Random(0))
    if config is None:
        return False
    try:
        move.act(made.start, dict(config.values))
    except ScheduleError:
        return False
    return True
