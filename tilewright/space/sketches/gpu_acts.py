"""Scheduling steps for GPUs: tiles of blocks, warps and threads, copies among all threads, and fragments.

Every function takes the schedule of `matrices.py` and returns it with some stages in their final form. Names of loops
are those that `split` gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.dtypes import DType
from tilewright.hw.intrinsics import Intrinsic
from tilewright.hw.tensor_cores import load_left, load_right, loaded_together, multiply
from tilewright.loops.schedule import Schedule
from tilewright.loops.schedule.nest import CHUNK_BYTES, find_leaf
from tilewright.space.sketches.acts import extent_of
from tilewright.space.sketches.matrices import LEFT, OUT, RIGHT, SUMS
from tilewright.te.index import coefficient

NEIGHBOURS = 8  # tiles along m of a group of blocks, which share columns of the right factor
_BLOCK_LOOPS = 3
_GAP = 8  # elements after each row of results in shared memory
_AT_ONCE = (
    4  # vectors of results per thread: other operands are loaded for all of them before the first is needed
)
LOCAL = f"{SUMS}.local"


def has_loop(schedule: Schedule, loop: str) -> bool:
    return loop in schedule.loops


def loops_named(schedule: Schedule, *loops: str) -> list[str]:
    """Those of the loops that there are: axes of one element have none."""
    return [loop for loop in loops if has_loop(schedule, loop)]


def padded(schedule: Schedule, bm: int, bn: int, bk: int) -> Schedule:
    """Whole tiles of results and of steps."""
    rank = len(find_leaf(schedule.nest, SUMS)[1].target.shape)
    outer = [1] if has_loop(schedule, f"{SUMS}.o") else []
    return schedule.pad(SUMS, [1] * (rank - 2) + [bm, bn], [*outer, bk])


def in_blocks(schedule: Schedule, rows: str, columns: str, inside: Sequence[str]) -> Schedule:
    """Put the loops over tiles of results outside. `rows`, `columns`: these loops,
    `inside`: those within a tile. Neighbouring blocks form groups of rows, which share data in L2."""
    count = extent_of(schedule, rows)
    near = max(n for n in range(1, NEIGHBOURS + 1) if count % n == 0)
    schedule = schedule.split(rows, near)
    batch = loops_named(schedule, f"{OUT}.b")
    schedule = schedule.reorder(*batch, f"{rows}.o", columns, f"{rows}.i", *inside)
    if batch:
        schedule = schedule.fuse(batch[0], f"{rows}.o", into=f"{OUT}.tiles")
    return schedule


def bound(schedule: Schedule) -> Schedule:
    """Bind the loops over tiles to blocks, once everything is inside them."""
    outer, columns, inner = schedule.loops[:_BLOCK_LOOPS]
    return schedule.bind(outer, "block.z").bind(columns, "block.y").bind(inner, "block.x")


@dataclass(frozen=True)
class AxisLoops:
    """The loops over one axis of a tile: blocks, virtual threads, threads, and a thread's neighbours."""

    blocks: str
    virtual: str
    threads: str
    neighbours: str


def out_side(
    schedule: Schedule, axis: str, size: int, threads: int, neighbours: int
) -> tuple[Schedule, AxisLoops]:
    """Split the results along an axis into tiles of `size`, these into patches of `neighbours` for each thread. Whole
    patches end where the results do, if their number allows it; a loop over one patch has no index to split."""
    extent = extent_of(schedule, axis)
    if 1 < neighbours < extent and extent % neighbours == 0:
        schedule = schedule.split(axis, neighbours).split(f"{axis}.o", size // neighbours, "guard")
        schedule = schedule.split(f"{axis}.o.i", threads)
        return schedule, AxisLoops(f"{axis}.o.o", f"{axis}.o.i.o", f"{axis}.o.i.i", f"{axis}.i")
    schedule = schedule.split(axis, size, "guard").split(f"{axis}.i", threads * neighbours)
    schedule = schedule.split(f"{axis}.i.i", neighbours)
    return schedule, AxisLoops(f"{axis}.o", f"{axis}.i.o", f"{axis}.i.i.o", f"{axis}.i.i.i")


def block_loop(schedule: Schedule) -> str:
    """The innermost loop over tiles of results."""
    return find_leaf(schedule.nest, OUT)[0][_BLOCK_LOOPS - 1].name


def axes_of(schedule: Schedule, stage: str) -> tuple[str, str]:
    """The loops over the last two axes of a stage."""
    rank = len(find_leaf(schedule.nest, stage)[1].target.shape)
    return f"{stage}.i{rank - 2}", f"{stage}.i{rank - 1}"


# -- copies -----------------------------------------------------------------------------------------------------------


def fetched(schedule: Schedule, tile: str, loop: str, threads: int, lanes: int, *, across: bool) -> Schedule:
    """Copy a tile in each iteration of a loop, all threads of a block together, `lanes` neighbours each. `across`:
    neighbouring threads copy elements of one column."""
    schedule = schedule.compute_at(tile, loop)
    rows, columns = axes_of(schedule, tile)
    schedule = in_banks(schedule, tile, lanes)
    if lanes > 1:
        schedule = schedule.split(columns, lanes).vectorise(f"{columns}.i")
        columns = f"{columns}.o"
    order = [columns, rows] if across else [rows, columns]
    vector = loops_named(schedule, f"{columns.removesuffix('.o')}.i") if lanes > 1 else []
    if across:
        schedule = schedule.reorder(*order, *vector)
    return among_threads(schedule, order, f"{tile}.f", threads, vector)


def among_threads(
    schedule: Schedule,
    loops: Sequence[str],
    into: str,
    threads: int,
    inside: Sequence[str],
    at_once: int | None = None,
) -> Schedule:
    """Divide nested loops among the threads of a block. `at_once`: elements per thread that are written out, None for
    all."""
    first, second = loops
    schedule = schedule.fuse(first, second, into=into)
    turns = -(-extent_of(schedule, into) // threads)
    schedule = schedule.split(into, threads, "guard")
    written_out = f"{into}.o"
    if at_once is not None:
        count = next(n for n in range(min(turns, at_once), 0, -1) if turns % n == 0)
        schedule = schedule.split(f"{into}.o", count).reorder(
            f"{into}.i", f"{into}.o.o", f"{into}.o.i", *inside
        )
        written_out = f"{into}.o.i"
    else:
        schedule = schedule.reorder(f"{into}.i", f"{into}.o", *inside)
    return schedule.unroll(written_out).bind(f"{into}.i", "thread.x")


def in_banks(schedule: Schedule, tile: str, lanes: int) -> Schedule:
    """Put the rows of a tile, which `lanes` neighbours are written to at once, in different banks: swizzled if its rows
    have 2, 4, 8, ... chunks, otherwise with a gap."""
    target = find_leaf(schedule.nest, tile)[1].target
    wide = CHUNK_BYTES // target.dtype.bytes
    chunks = target.shape[-1] // wide
    if target.shape[-1] % wide == 0 and chunks > 1 and not chunks & (chunks - 1) and lanes in (1, wide):
        return schedule.swizzle(tile)
    return schedule.widen(tile, wide)


# -- tensor cores -----------------------------------------------------------------------------------------------------


def in_fragments(
    schedule: Schedule, operand: str, loop: str, size: int, depth: int, dtype: DType, *, transposed: bool
) -> tuple[Schedule, str]:
    """Load an operand's fragments in each iteration of a loop, as many by one instruction as it can."""
    load, rows = (load_left, 16) if operand == LEFT else (load_right, 8)
    rank = len(find_leaf(schedule.nest, operand)[1].target.shape)
    order = [*range(rank - 2), rank - 1, rank - 2] if transposed else None
    schedule = schedule.cache_read(operand, LOCAL, "register", order)
    held = f"{operand}.of.{LOCAL}"
    schedule = schedule.compute_at(held, loop)
    most = loaded_together(depth, dtype, rows)
    together = next(n for n in (most, most // 2, 1) if n and size // rows % n == 0)
    down, _ = axes_of(schedule, held)
    schedule = schedule.split(down, rows * together).unroll(f"{down}.o")
    return schedule.tensorise(f"{down}.i", load(depth, dtype, together, transposed)), held


def in_column_steps(schedule: Schedule, loop: str, size: int | None) -> tuple[Schedule, str, str]:
    """Split the columns of a block's results, so that a step of `size` of them is computed at a time. Returns the loop
    in which tiles of results are summed, `loop` if the tile has all columns (None), and the loop over its columns."""
    _, columns = axes_of(schedule, SUMS)
    if size is None:
        return schedule, loop, columns
    return schedule.split(columns, size, "guard"), f"{columns}.o", f"{columns}.i"


def multiplied_by_warps(
    schedule: Schedule, stage: str, wm: int, wn: int, inside: Sequence[str] = (), columns: str | None = None
) -> tuple[Schedule, list[str]]:
    """Split a tile among warps, and a warp's part into fragments of results; returns the loops over fragments.
    `columns`: the loop over the tile's columns, if it is not that of the stage."""
    rows, all_columns = axes_of(schedule, stage)
    columns = columns or all_columns
    schedule = schedule.split(rows, wm).split(f"{rows}.i", 16).split(columns, wn).split(f"{columns}.i", 8)
    order = [
        f"{rows}.o",
        f"{columns}.o",
        *inside,
        f"{rows}.i.o",
        f"{columns}.i.o",
        f"{rows}.i.i",
        f"{columns}.i.i",
    ]
    return schedule, order


def on_tensor_cores(
    schedule: Schedule,
    tiles: tuple[int, int, int, int],
    dtype: DType,
    transposed: Sequence[bool],
    instruction: Intrinsic | None = None,
    *,
    written_out: bool,
    loop: str | None = None,
    columns_at_once: int | None = None,
) -> Schedule:
    """Sum a block's results in fragments. `tiles`: the rows and columns of a warp, the step and the depth of the
    instruction. `loop`: that over blocks, if it is not the innermost over tiles; `columns_at_once`: those that are in
    fragments at the same time, None for all."""
    wm, wn, bk, depth = tiles
    loop = loop or block_loop(schedule)
    schedule = schedule.cache_write(SUMS, "register").widen(SUMS, _GAP).compute_at(SUMS, loop)
    schedule, at, columns = in_column_steps(schedule, loop, columns_at_once)
    schedule, order = multiplied_by_warps(schedule, SUMS, wm, wn, columns=columns)
    first = [] if at == loop else [at]
    schedule = schedule.reorder(*first, *order).bind(order[0], "warp.y").bind(order[1], "warp.x")
    schedule = schedule.unroll(order[2]).unroll(order[3]).compute_at(LOCAL, at)
    k = f"{SUMS}.k"
    schedule = schedule.split(k, bk).split(f"{k}.i", depth)
    schedule, order = multiplied_by_warps(schedule, LOCAL, wm, wn, [f"{k}.i.o"])
    step = loops_named(schedule, f"{SUMS}.o", f"{k}.o")
    schedule = schedule.reorder(*step, *order, f"{k}.i.i")
    for operand, size, side in zip((LEFT, RIGHT), (wm, wn), transposed, strict=True):
        schedule, _ = in_fragments(schedule, operand, f"{k}.i.o", size, depth, dtype, transposed=side)
    schedule = schedule.bind(order[0], "warp.y").bind(order[1], "warp.x")
    schedule = schedule.unroll(order[3]).unroll(order[4])
    if written_out:
        schedule = schedule.unroll(f"{k}.i.o")
    return schedule.tensorise(order[5], instruction or multiply(depth, dtype))


# -- ordinary units ---------------------------------------------------------------------------------------------------


def on_ordinary_units(
    schedule: Schedule,
    sides: tuple[tuple[int, int, int], tuple[int, int, int]],
    bk: int,
    part: int,
    transposed: Sequence[bool],
    *,
    loop: str | None = None,
    columns_at_once: int | None = None,
) -> Schedule:
    """Sum a block's results in registers. `sides`: the virtual threads, threads and neighbours along m and n.
    `columns_at_once`: those that are in registers at the same time; each step of them is then kept in shared memory,
    for threads that share rows in `loop`. None for all, which a thread keeps for itself."""
    if columns_at_once is None:
        summed = SUMS
        schedule = schedule.set_scope(SUMS, "register").compute_at(SUMS, block_loop(schedule))
    else:
        assert loop is not None
        summed = LOCAL
        schedule = schedule.cache_write(SUMS, "register").widen(SUMS, _GAP).compute_at(SUMS, loop)
        schedule, at, columns = in_column_steps(schedule, loop, columns_at_once)
        rows, _ = axes_of(schedule, SUMS)
        schedule, (vm, tm, rm), (vn, tn, rn) = _among_threads_of(schedule, (rows, columns), sides)
        schedule = schedule.reorder(at, tm, tn, vm, rm, vn, rn).bind(tm, "thread.y").bind(tn, "thread.x")
        for name in (vm, rm, vn, rn):
            schedule = schedule.unroll(name)
        schedule = schedule.compute_at(LOCAL, at)
    k = f"{SUMS}.k"
    schedule = schedule.split(k, bk).split(f"{k}.i", part)
    schedule, (vm, tm, rm), (vn, tn, rn) = _among_threads_of(schedule, axes_of(schedule, summed), sides)
    step = loops_named(schedule, f"{SUMS}.o", f"{k}.o")
    inner = [f"{k}.i.i", vm, rm, vn, rn]
    schedule = schedule.reorder(*step, tm, tn, f"{k}.i.o", *inner)
    schedule = schedule.bind(tm, "thread.y").bind(tn, "thread.x")
    for name in inner:
        schedule = schedule.unroll(name)
    for operand, (_, _, neighbours), side in zip((LEFT, RIGHT), sides, transposed, strict=True):
        schedule = schedule.cache_read(operand, summed, "register")
        held = f"{operand}.of.{summed}"
        schedule = schedule.compute_at(held, f"{k}.i.o")
        rows, columns = axes_of(schedule, held)
        lanes = neighbours if side else part
        for loop in loops_named(schedule, rows):
            schedule = schedule.unroll(loop)
        for loop in loops_named(schedule, columns):
            schedule = schedule.split(loop, lanes).unroll(f"{loop}.o")
            schedule = schedule.vectorise(f"{loop}.i") if lanes > 1 else schedule.unroll(f"{loop}.i")
    return schedule


def _among_threads_of(
    schedule: Schedule,
    axes: tuple[str, str],
    sides: tuple[tuple[int, int, int], tuple[int, int, int]],
) -> tuple[Schedule, tuple[str, str, str], tuple[str, str, str]]:
    """Split a tile among threads; returns the loops over virtual threads, threads and neighbours of each axis."""
    loops = []
    for axis, (_, threads, neighbours) in zip(axes, sides, strict=True):
        schedule = schedule.split(axis, threads * neighbours).split(f"{axis}.i", neighbours)
        loops.append((f"{axis}.o", f"{axis}.i.o", f"{axis}.i.i"))
    return schedule, loops[0], loops[1]


def is_contiguous(schedule: Schedule, loop: str) -> bool:
    """Whether neighbouring iterations of a loop store neighbouring results."""
    path, leaf = find_leaf(schedule.nest, OUT)
    var = next(each.var for each in path if each.name == loop)
    return coefficient(leaf.indices[0], var) == 1


def written_by_threads(
    schedule: Schedule, rows: str, vectors: str, lane: str, lanes: int, threads: int
) -> Schedule:
    """Write a block's results, which are in shared memory, all threads together: `vectors` of so many `lanes`."""
    schedule = among_threads(schedule, [rows, vectors], f"{OUT}.f", threads, [lane], _AT_ONCE)
    return schedule.vectorise(lane) if lanes > 1 else schedule
