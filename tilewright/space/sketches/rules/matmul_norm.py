"""Rule `matmul-norm`: a matmul and the softmax of its rows, or another norm, in one kernel of a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewright.dtypes import DType
from tilewright.hw.intrinsics import registered
from tilewright.hw.tensor_cores import multiply_add
from tilewright.loops.gpu.thread_index import VECTOR_BYTES
from tilewright.loops.schedule import Schedule
from tilewright.numerics import may_round_to_tf32
from tilewright.space.contraction import contraction_of
from tilewright.space.mapping import mappings
from tilewright.space.sketches import gpu_acts as acts
from tilewright.space.sketches.block_frames import Values
from tilewright.space.sketches.cuda.fetch import TileOperand
from tilewright.space.sketches.cuda.tensorised import DTYPES as HALVES
from tilewright.space.sketches.cuda.tensorised import AppliedTensorised
from tilewright.space.sketches.cuda.tiled import DTYPES, PART, AppliedTiled
from tilewright.space.sketches.matrices import LEFT, OUT, RIGHT, SUMS
from tilewright.space.sketches.normed import NormedFrame, NormedMatrices, normed_product
from tilewright.space.sketches.rules.blocks import pipelined
from tilewright.space.sketches.sketch import Move, Sketch

_ROWS, _COLUMNS = f"{OUT}.m", f"{OUT}.n"
_READER = acts.LOCAL  # the stage that reads what is loaded into registers


class MatmulNorm:
    """Compute a block of rows of a matmul, all columns, then the softmax of these rows, or another norm.

        sums[m, n] += left[m, k] * right[n, k]        for blocks of BM rows:
        top[m] = max of sums[m, n]                      for steps of BN columns: for steps of BK:
        total[m] = sum of exp(sums[m, n] - top[m])  ->    sums.local[BM, BN] += ...      (by warps, or by threads)
        out[m, n] = exp(sums - top) / total               sums = sums.local              (shared memory)
                                                        top, total                       (by all threads: `cross`)
                                                        out                              (vectors)

    Blocks need shared memory for BM whole rows of `sums` in fp32. `fetch` copies tiles of `left` and `right`.
    """

    name = "matmul-norm"
    alone = True
    kinds = ("cuda",)

    def apply(self, sketch: Sketch) -> Sequence[Sketch]:
        if sketch.stage == SUMS and isinstance(sketch.frame, NormedFrame):
            return [_multiplied(sketch, sketch.frame)]
        if sketch.stage != sketch.output or sketch.frame is not None or sketch.start.trace:
            return ()
        return [_in_rows(sketch, frame) for frame in _frames(sketch)]


def _frames(sketch: Sketch) -> list[NormedFrame]:
    """One on tensor cores if they compute the task, and one on ordinary units."""
    work = sketch.work
    found = normed_product(work) if work.machine.async_copy else None
    contraction = None if found is None else contraction_of(found.product.formula, DTYPES)
    if found is None or contraction is None:
        return []
    for mapping in mappings(contraction, multiply_add(contraction.dtype)):
        sides = ((mapping.left, mapping.m), (mapping.right, mapping.n))
        left, right = (TileOperand(factor, walked, mapping.k).transposed for factor, walked in sides)
        matrices = NormedMatrices(contraction, mapping, (left, right), found)
        if not matrices.has_whole_rows():
            continue
        frames = [NormedFrame(matrices, AppliedTiled(contraction, [mapping], work.machine), False)]
        rounded = contraction.dtype is DType.F32 and may_round_to_tf32(work.numerics)
        if contraction.dtype in HALVES or rounded:
            if rounded:  # what loads fragments transposes 16-bit elements only
                matrices = replace(matrices, transposed=(False, False))
            frames.insert(
                0, NormedFrame(matrices, AppliedTensorised(contraction, [mapping], work.machine), True)
            )
        return frames
    return []


def _in_rows(sketch: Sketch, frame: NormedFrame) -> Sketch:
    """The output in blocks of rows, which all threads write together."""
    matrices = frame.matrices
    lanes = VECTOR_BYTES // max(matrices.output.dtype.bytes, 4)  # results are computed in fp32
    lanes = next(n for n in (lanes, lanes // 2, 1) if matrices.columns % n == 0)
    reductions = [name for name in matrices.schedule.stages if name not in (LEFT, RIGHT, SUMS, OUT)]

    def arrange(schedule: Schedule, values: Values) -> Schedule:
        t = frame.sizes(values)
        schedule = acts.padded(schedule, t.bm, t.bn, t.bk).split(_ROWS, t.bm, "guard")
        rows, vectors, lane = f"{_ROWS}.i", _COLUMNS, []
        if lanes > 1:
            schedule = schedule.split(_COLUMNS, lanes).vectorise(f"{_COLUMNS}.i")
            vectors, lane = f"{_COLUMNS}.o", [f"{_COLUMNS}.i"]
        schedule = schedule.split(vectors, frame.threads(values).group, "guard")
        schedule = schedule.reorder(rows, f"{vectors}.i", f"{vectors}.o", *lane)
        return schedule.bind(rows, "thread.y").bind(f"{vectors}.i", "thread.x")

    def finish(schedule: Schedule, values: Values) -> Schedule:
        if matrices.batched:
            schedule = schedule.bind(f"{OUT}.b", "block.y")
        return pipelined(schedule.bind(frame.block_loop, "block.x"), frame, values, _READER)

    moves = (
        Move(arrange, frame.knobs, frame.legal, together=(tuple(knob.name for knob in frame.knobs),)),
        Move(finish, last=True),
    )
    made = sketch.visited(
        *moves, start=matrices.schedule, frame=frame, then=(*reversed(reductions), SUMS, LEFT, RIGHT)
    )
    names = (*sketch.names, MatmulNorm.name, "warps" if frame.by_warps else "threads")
    return replace(made, left=(*reversed(reductions), SUMS, LEFT, RIGHT), names=names)


def _multiplied(sketch: Sketch, frame: NormedFrame) -> Sketch:
    """The sums of a block, in steps of columns."""
    matrices = frame.matrices

    def act(schedule: Schedule, values: Values) -> Schedule:
        t = frame.sizes(values)
        if not frame.by_warps:
            sides = (t.vm, t.tm, t.rm), (t.vn, t.tn, t.rn)
            return acts.on_ordinary_units(
                schedule,
                sides,
                t.bk,
                PART,
                matrices.transposed,
                loop=frame.block_loop,
                columns_at_once=t.bn,
            )
        instruction = next((each for each in registered() if each.digest == t.instruction), None)
        return acts.on_tensor_cores(
            schedule,
            (t.wm, t.wn, t.bk, t.instruction_k),
            matrices.work.dtype,
            matrices.transposed,
            instruction,
            written_out=not t.prefetch,
            loop=frame.block_loop,
            columns_at_once=t.bn,
        )

    return sketch.visited(Move(act))
