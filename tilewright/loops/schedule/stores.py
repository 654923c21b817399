"""The primitives `stream` and `transpose`: how a stage stores its elements."""

from __future__ import annotations

from dataclasses import replace

from tilewright.errors import ScheduleError
from tilewright.loops.ir import Scope
from tilewright.loops.schedule.nest import Leaf, Nest, find_leaf, map_leaves

SIDES = (2, 4, 8, 16)  # of a square that vector registers hold


def stream(nest: Nest, stage: str) -> Nest:
    """Store a stage's elements around the caches, with non-temporal stores.

        for i < 4096:                    for i < 4096:
          out[i] = a[i] + 1      ->        out[i] <- a[i] + 1

    The processor then does not read each line before it writes it, and other data stay in the caches. It pays for an
    output that is larger than the last-level cache. Only whole, aligned vectors are stored so; everything else is
    stored as before. Needs: the stage is the output, which the program does not read again. Other names: non-temporal
    stores, the cache hint .cs (PTX).
    """
    _, leaf = find_leaf(nest, stage)
    if leaf.streamed:
        raise ScheduleError(f"stream: stage {stage} is streamed already")
    if leaf.target.scope is not Scope.GLOBAL:
        raise ScheduleError(
            f"stream: stage {stage} is local, and its elements are read soon",
            remedy="stream the stage that stores the output",
        )
    return _changed(nest, leaf, replace(leaf, streamed=True))


def transpose(nest: Nest, stage: str) -> Nest:
    """Fill a square tile in registers by columns, and transpose it there.

        for i < 4: for j < 4:                  for i < 4: for j < 4:
          t[i, j] = x[j, i]                      t[j, i] = x[j, i]
        ... t[i, j] ...                ->      transpose t[4, 4]
                                               ... t[i, j] ...

    With `reorder` and `vectorise`, the loop over i then loads vectors of neighbours instead of elements of many rows.
    Needs: a local tile of 2, 4, 8 or 16 elements along both of its axes, whose stage is not a reduction and has no
    guard; its loops hold nothing else. In the end the tile is in registers and accessed in vectors as long as its side,
    on a CPU. Other names: transpose (in-register shuffle).
    """
    _, leaf = find_leaf(nest, stage)
    tile = leaf.target
    if leaf.transposed:
        raise ScheduleError(f"transpose: stage {stage} is transposed already")
    if tile.scope is Scope.GLOBAL:
        raise ScheduleError(
            f"transpose: stage {stage} is the output, which is not in registers",
            remedy="cache_write gives it a tile of its own",
        )
    if leaf.kind is not None or leaf.guards:
        what = "is a reduction" if leaf.kind is not None else "is guarded"
        raise ScheduleError(f"transpose: stage {stage} {what}: each element must be stored once")
    sides = [extent for extent in tile.shape if extent != 1]
    if len(sides) != 2 or sides[0] != sides[1] or sides[0] not in SIDES:
        raise ScheduleError(
            f"transpose: {tile.name}{list(tile.shape)} is not a square of {', '.join(map(str, SIDES))} elements a side",
            remedy="compute_at makes a tile as small as what one iteration reads",
        )
    return _changed(nest, leaf, replace(leaf, transposed=True))


def _changed(nest: Nest, old: Leaf, new: Leaf) -> Nest:
    return replace(nest, body=map_leaves(nest.body, lambda leaf: new if leaf is old else leaf))
