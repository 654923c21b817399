"""The primitives `pipeline` and `swizzle`: how a tile that copies fill is kept in shared memory."""

from __future__ import annotations

from dataclasses import replace

from tilewright import te
from tilewright.errors import PipelineError, ScheduleError
from tilewright.loops.ir import Kind, Scope
from tilewright.loops.schedule.boxes import box_of
from tilewright.loops.schedule.nest import (
    CHUNK_BYTES,
    Leaf,
    Loop,
    Nest,
    Path,
    Tile,
    find_leaf,
    identity,
    leaves,
    reads,
    with_tile,
)

COPIES = ("async", "bulk")


def pipeline(
    nest: Nest,
    tensor: str,
    stages: int,
    capacity: int | None = None,
    copy: str = "async",
    specialise: bool = False,
    cluster: int = 1,
) -> Nest:
    """Fill a tile for later iterations while the current one is used, in `stages` copies of it.

        for k < 8:                             for n < 2: t[n] = x[n, ..]
          t[..] = x[k, ..]                     for k < 8:
          ... t[..] ...                 ->       t[(k + 2) % 3] = x[k + 2, ..]     (asynchronously)
                                                 ... t[k % 3] ...

    A loop that only runs this one is counted with it: its next iteration is copied ahead, too.
    Needs: a stage that only copies (`cache_read`), inside a sequential loop that it is filled in again and again
    (`compute_at`), with at least `stages - 1` iterations, and `capacity` bytes of memory for all stages. Tiles of one
    loop and memory have the same number of stages. A computation belongs to where the tile is used, because a store
    that computes is not asynchronous. The transformation itself is `loops/passes/pipeline.py`; the register loops of an
    inner pipeline are written out.

    On a GPU with a tensor copy engine (sm_90 and later) `copy="bulk"` lets one instruction copy the whole tile, which
    waits in a slot with barriers of its own; how its loops are bound to threads does not matter then. With `specialise`
    additional threads do nothing but copy:

        for k < 8:                             producer:                     consumer:
          t[..] = x[k, ..]              ->       for k < 8:                    for k < 8:
          ... t[..] ...                            fill t[k % 3] <- x[k]         await k;  ... t[k % 3] ...;  release k

    With `cluster=2`, two blocks that are neighbours along block.x copy half of each tile that is the same for both, to
    both. Needs: the tile is a box of a matrix in memory, its rows have 32, 64 or 128 bytes and are swizzled, and the
    pipelined tiles of its loop are copied in the same way. Other names: software_pipeline (TVM), async (Halide),
    num_stages (Triton).
    """
    path, leaf = find_leaf(nest, tensor)
    tile = leaf.target
    if stages < 2:
        raise PipelineError(f"pipeline: {tensor}: {stages} stages; a pipeline has at least 2")
    if tile.scope is Scope.GLOBAL:
        raise PipelineError(f"pipeline: {tensor}: it is the output, which nothing reads")
    if copied(leaf) is None:
        raise PipelineError(
            f"pipeline: {tensor}: it is filled by a synchronous store, which a thread waits for",
            remedy="cache_read the operand itself, so that a copy fills the tile, and compute where it is used",
        )
    if copy not in COPIES:
        raise PipelineError(f"pipeline: {tensor}: copy must be one of {', '.join(COPIES)}, got {copy!r}")
    if specialise and copy != "bulk":
        raise PipelineError(
            f"pipeline: {tensor}: threads of their own copy for others by the copy engine alone",
            remedy='pipeline(..., copy="bulk", specialise=True)',
        )
    if cluster not in (1, 2) or (cluster > 1 and not specialise):
        raise PipelineError(
            f"pipeline: {tensor}: a cluster must be of 1 or 2 blocks, and of 2 with specialise, got {cluster}"
        )
    if copy == "bulk":
        box_of(nest, tensor)
    loop = _loop(nest, path, tile)
    if loop is None:
        raise PipelineError(
            f"pipeline: {tensor}: no sequential loop fills it again and again",
            remedy="compute_at places the copy inside the loop that uses it",
        )
    iterations = _iterations(path, loop)
    if stages > iterations + 1:
        raise PipelineError(
            f"pipeline: {tensor}: {stages} stages, and loop {loop.name} has {iterations} iterations to fill them"
        )
    for name, count in nest.stages:
        other_path, other = find_leaf(nest, name)
        if (
            other.target.scope is tile.scope
            and _loop(nest, other_path, other.target) is loop
            and count != stages
        ):
            raise PipelineError(
                f"pipeline: {tensor}: {name} of the same loop has {count} stages: their waits differ"
            )
        together = other.target.scope is tile.scope and _loop(nest, other_path, other.target) is loop
        if together and name != tensor and (name in nest.bulk) != (copy == "bulk"):
            raise PipelineError(
                f"pipeline: {tensor}: {name} of the same loop is copied otherwise: their waits differ",
                remedy=f"the same copy= for {name} and {tensor}",
            )
    others = tuple(each for each in nest.bulk if each != tensor)  # whose producer and cluster stay
    changed = replace(
        nest,
        stages=(*(each for each in nest.stages if each[0] != tensor), (tensor, stages)),
        bulk=(*others, tensor) if copy == "bulk" else others,
        specialised=specialise or (bool(others) and nest.specialised),
        cluster=max(cluster, nest.cluster if others else 1),
    )
    _check_capacity(changed, tensor, stages, capacity)
    return changed


def swizzle(nest: Nest, tensor: str) -> Nest:
    """Permute the 16-byte chunks of a tile's rows, each of eight rows differently.

        t[i, j]     ->     t[i, (j // 8 ^ i % 8) * 8 + j % 8]     (16-bit elements)

    Threads that read the same columns of neighbouring rows then use different banks of shared memory. Needs: a local
    tile in memory, of at least two axes, with 2, 4, 8, ... chunks in a row. Other names: swizzled layout (CUTLASS).
    """
    _, leaf = find_leaf(nest, tensor)
    tile = leaf.target
    wide = CHUNK_BYTES // tile.dtype.bytes
    if tile.scope in (Scope.GLOBAL, Scope.REGISTER) or len(tile.shape) < 2:
        raise ScheduleError(f"swizzle: {tensor} must be a tile of at least two axes in shared memory")
    chunks = tile.shape[-1] // wide
    if tile.shape[-1] % wide or chunks & (chunks - 1) or chunks < 2:
        raise ScheduleError(
            f"swizzle: a row of {tensor} has {tile.shape[-1]} elements, not 2, 4, 8, ... chunks of {wide}"
        )
    if tile.gap:
        raise ScheduleError(
            f"swizzle: the rows of {tensor} are apart, which puts them in different banks already"
        )
    return with_tile(nest, tile, replace(tile, swizzled=True))


def copied(leaf: Leaf) -> te.Load | None:
    """The source of a stage that copies; beyond an edge it may store zeros. None if the stage computes."""
    value = leaf.value
    if isinstance(value, te.Select) and value.other == identity(leaf):
        value = value.then
    return value if leaf.kind is None and isinstance(value, te.Load) else None


def _loop(nest: Nest, path: Path, tile: Tile) -> Loop | None:
    """The innermost sequential loop around the tile's stage and its readers."""
    common = list(path)
    for around, leaf in leaves(nest.body):
        if reads(leaf, tile):
            common = [loop for loop in common if any(loop is other for other in around)]
    for loop in reversed(common):
        if loop.kind in (Kind.SERIAL, Kind.UNROLL):
            return loop
    return None


def _iterations(path: Path, loop: Loop) -> int:
    """The iterations that a pipeline of the loop is counted over: also those of loops that do nothing but run it."""
    found = loop.var.extent
    outer = path[: next(number for number, each in enumerate(path) if each is loop)]
    for each in reversed(outer):
        if each.kind is not Kind.SERIAL or len(each.body) > 1:
            break
        found *= each.var.extent
    return found


def _check_capacity(nest: Nest, tensor: str, stages: int, capacity: int | None) -> None:
    if capacity is None:
        return
    counts = dict(nest.stages)
    held = sum(
        leaf.target.size * leaf.target.dtype.bytes * counts.get(leaf.target.name, 1)
        for _, leaf in leaves(nest.body)
        if leaf.target.scope is Scope.SCRATCH
    )
    if held > capacity:
        raise PipelineError(
            f"pipeline: {tensor}: {stages} stages need {held} bytes of shared memory in all, of {capacity}",
            remedy="fewer stages, or a smaller tile",
        )
