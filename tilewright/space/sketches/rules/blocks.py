"""Rules `threads` and `warps`: multi-level tiling of matmuls on a GPU, on ordinary units or on tensor cores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewright.dtypes import DType
from tilewright.hw.intrinsics import registered
from tilewright.loops.schedule import Schedule
from tilewright.numerics import may_round_to_tf32
from tilewright.space.sketches import gpu_acts as acts
from tilewright.space.sketches.acts import extent_of
from tilewright.space.sketches.block_frames import STEP, BlockFrame, MatricesFrame, Values
from tilewright.space.sketches.cuda.pipeline import REGISTER_STAGES
from tilewright.space.sketches.cuda.results import Results
from tilewright.space.sketches.cuda.tensorised import DTYPES, AppliedTensorised
from tilewright.space.sketches.cuda.tiled import PART, AppliedTiled
from tilewright.space.sketches.matrices import LEFT, OUT, RIGHT, SUMS, Matrices
from tilewright.space.sketches.rules.fetch import FETCHED_AT
from tilewright.space.sketches.sketch import Move, Sketch

_ROWS, _COLUMNS = f"{OUT}.m.o", f"{OUT}.n.o"


class ThreadTiling:
    """Tile a matmul for ordinary units: blocks, virtual threads and threads, two levels of reduction tiles, registers.

        sums[m, n] += left[m, k] * right[n, k]     ->     for blocks, tiles of (VM TM RM) x (VN TN RN):
        out[...] = sums[m, n]                               for steps of BK: for threads, TM x TN:
                                                              for parts of a step: registers of left, right
                                                                sums[VM RM, VN RN] += left * right
                                                            for threads: out = sums

    `fetch` copies tiles of `left` and `right` into shared memory.
    """

    name = "threads"
    alone = False
    kinds = ("cuda",)

    def apply(self, sketch: Sketch) -> Sequence[Sketch]:
        found = matmuls(sketch)
        if found is None:
            return ()
        work = sketch.work
        applied = AppliedTiled(found.work, [found.mapping], work.machine)
        frame = BlockFrame(found, applied)

        def act(schedule: Schedule, values: Values) -> Schedule:
            t = frame.sizes(values)
            sides = (t.vm, t.tm, t.rm), (t.vn, t.tn, t.rn)
            schedule = acts.padded(schedule, t.bm, t.bn, t.bk)
            schedule, m = acts.out_side(schedule, f"{OUT}.m", t.bm, t.tm, t.rm)
            schedule, n = acts.out_side(schedule, f"{OUT}.n", t.bn, t.tn, t.rn)
            inner = [m.threads, n.threads, m.virtual, m.neighbours, n.virtual, n.neighbours]
            schedule = acts.in_blocks(schedule, m.blocks, n.blocks, inner)
            schedule = schedule.bind(m.threads, "thread.y").bind(n.threads, "thread.x")
            whole = n.neighbours == f"{OUT}.n.i" and acts.is_contiguous(schedule, n.neighbours)
            for name in inner[2:-1] if whole else inner[2:]:
                schedule = schedule.unroll(name)
            schedule = schedule.vectorise(n.neighbours) if whole else schedule
            return acts.on_ordinary_units(schedule, sides, t.bk, PART, found.transposed)

        return [_tiled(sketch, self.name, frame, act, SUMS)]


class WarpTiling:
    """Tile a matmul for tensor cores: blocks, warps, instructions; fragments in registers.

        sums[m, n] += left[m, k] * right[n, k]     ->     for blocks, tiles of BM x BN:
        out[...] = sums[m, n]                               for steps of BK: for warps, WM x WN:
                                                              for parts of a step: fragments of left, right
                                                                sums.local[WM, WN] += left * right  (instructions)
                                                            for warps: sums = sums.local             (shared memory)
                                                            for threads: out = sums                  (vectors)

    Registered instructions that compute the same are choices of a knob.
    """

    name = "warps"
    alone = False
    kinds = ("cuda",)

    def apply(self, sketch: Sketch) -> Sequence[Sketch]:
        found = matmuls(sketch)
        work = sketch.work
        if found is None:
            return ()
        rounded = found.work.dtype is DType.F32 and may_round_to_tf32(work.numerics)
        if found.work.dtype not in DTYPES and not rounded:
            return ()
        start = sketch.start
        if rounded:  # what loads fragments transposes 16-bit elements only
            found = replace(found, transposed=(False, False))
            start = found.schedule
        applied = AppliedTensorised(found.work, [found.mapping], work.machine)
        along_m = Results(found.work, found.mapping.m, found.mapping.n, 1, 1).along_m
        frame = BlockFrame(found, applied)

        def act(schedule: Schedule, values: Values) -> Schedule:
            t = frame.sizes(values)
            lanes = Results(found.work, found.mapping.m, found.mapping.n, t.bm, t.bn).lanes
            if lanes == extent_of(schedule, f"{OUT}.m" if along_m else f"{OUT}.n"):
                lanes = max(1, lanes // 2)  # a loop over one vector has no index that tiles could split
            schedule = acts.padded(schedule, t.bm, t.bn, t.bk)
            inside = []
            for axis, size, along in ((f"{OUT}.m", t.bm, along_m), (f"{OUT}.n", t.bn, not along_m)):
                if along:
                    schedule = schedule.split(axis, lanes).split(f"{axis}.o", size // lanes, "guard")
                    inside += [f"{axis}.o.i", f"{axis}.i"]
                else:
                    schedule = schedule.split(axis, size, "guard")
                    inside.append(f"{axis}.i")
            rows, columns = (f"{_ROWS}.o", _COLUMNS) if along_m else (_ROWS, f"{_COLUMNS}.o")
            order = [inside[2], *inside[:2]] if along_m else inside
            schedule = acts.in_blocks(schedule, rows, columns, order)
            schedule = acts.written_by_threads(schedule, order[0], order[1], order[2], lanes, t.threads)
            instruction = next((each for each in registered() if each.digest == t.instruction), None)
            return acts.on_tensor_cores(
                schedule,
                (t.wm, t.wn, t.bk, t.instruction_k),
                found.work.dtype,
                found.transposed,
                instruction,
                written_out=not t.prefetch,
            )

        return [_tiled(replace(sketch, start=start), self.name, frame, act, acts.LOCAL)]


def matmuls(sketch: Sketch) -> Matrices | None:
    """The matmuls whose sums are visited; None if something else is."""
    frame = sketch.frame
    if sketch.stage != SUMS or not isinstance(frame, MatricesFrame):
        return None
    return frame.matrices


def _tiled(sketch: Sketch, name: str, frame: BlockFrame, act: object, reader: str) -> Sketch:
    """The sketch with a matmul tiled by `act`, and its loads pipelined. `reader`: the stage that reads what is loaded
    into registers."""

    def finish(schedule: Schedule, values: Values) -> Schedule:
        return pipelined(acts.bound(schedule), frame, values, reader)

    moves = (
        Move(act, frame.knobs, frame.legal, together=(tuple(knob.name for knob in frame.knobs),)),  # type: ignore[arg-type]
        Move(finish, last=True),
    )
    return sketch.visited(*moves, name=name, frame=frame)


def pipelined(schedule: Schedule, frame: BlockFrame, values: Values, reader: str) -> Schedule:
    """Pipeline the loads of a matmul at each level, as the config says."""
    t = frame.sizes(values)
    for operand in (LEFT, RIGHT):
        if t.stages > 1 and values.get(FETCHED_AT[operand], STEP) == STEP:
            schedule = schedule.pipeline(operand, t.stages)
        if t.prefetch:
            schedule = schedule.pipeline(f"{operand}.of.{reader}", REGISTER_STAGES)
    return schedule
