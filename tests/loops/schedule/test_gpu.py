"""Schedules for GPUs: they compute the same, interpreted and as CUDA text on the emulated GPU; what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest

from tests.loops.schedule.examples import chain
from tests.loops.schedule.gpu import F16, F32, matmul, operands, product_of, simt, tensorised
from tests.loops.schedule.test_tensorise import axpy
from tests.nvrtc import needs_nvrtc
from tilewright import te
from tilewright.codegen.cuda.build import build, source_of
from tilewright.dtypes import DType
from tilewright.errors import PipelineError, ScheduleError
from tilewright.hw.gpu import H200
from tilewright.hw.memory import Scope
from tilewright.hw.tensor_cores import load_left, multiply
from tilewright.loops.interpret import interpret_program
from tilewright.loops.ir import Await, Copy, For, Warp, local_buffers, walk_stmts
from tilewright.loops.schedule import Schedule, from_json, replay, to_json
from tilewright.testing.emulator.run import COMPILER, Emulated

SHAPE = (32, 32, 128)
Made = Callable[..., Schedule]
LEVELS = [(1, 1), (3, 1), (1, 2), (3, 2)]
KINDS: list[tuple[Made, DType]] = [(tensorised, F16), (simt, F32)]

# -- what it computes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stages", "registers"), LEVELS)
@pytest.mark.parametrize(("made", "dtype"), KINDS, ids=["tensor cores", "ordinary units"])
def test_a_matmul_with_every_level(made: Made, dtype: DType, stages: int, registers: int) -> None:
    shape = SHAPE if dtype is F16 else (16, 32, 48)  # interpreted element by element
    program = made(shape, stages=stages, registers=registers).program()
    arrays = operands(shape, dtype)
    got = interpret_program(program, arrays).reshape(shape[:2])
    np.testing.assert_array_equal(got.astype(np.float64), product_of(arrays))
    copies = any(isinstance(stmt, Copy) for stmt in walk_stmts(program.body))
    assert copies == (stages > 1), "tiles that are not pipelined are stored"
    # What it is compared with where its registers spill.
    plain = program.unpipelined
    assert (plain is None) == (stages == registers == 1)
    if plain is not None:
        assert sum(each.size for each in local_buffers(plain)) < sum(
            each.size for each in local_buffers(program)
        )
        got = interpret_program(plain, arrays).reshape(shape[:2])
        np.testing.assert_array_equal(got.astype(np.float64), product_of(arrays))
    assert any(isinstance(stmt, Warp) for stmt in walk_stmts(program.body)) == (dtype is F16)


@pytest.mark.skipif(COMPILER is None, reason="no g++ here to compile the emulator with")
@pytest.mark.parametrize(("made", "dtype"), KINDS, ids=["tensor cores", "ordinary units"])
def test_its_cuda_text_computes_the_same(made: Made, dtype: DType, tmp_path: Path) -> None:
    arrays = operands(SHAPE, dtype)
    (got,) = Emulated(source_of(made(SHAPE, stages=3, registers=2).program()), tmp_path)([arrays])
    np.testing.assert_array_equal(got.reshape(SHAPE[:2]).astype(np.float64), product_of(arrays))


def windows(stages: int, registers: int = 1) -> tuple[Schedule, np.ndarray, np.ndarray]:
    """Sums of two neighbouring rows, in two loops over the window and over steps of the columns."""
    x = te.Tensor("x", (17, 32), F32)
    w, c = te.reduce_axes([2, 32])
    total = te.compute("total", (16,), F32, lambda i: te.reduce_over("sum", x[i + w, c], [w, c]))
    s = Schedule.of(te.compute("out", (16,), F32, lambda i: total[i] + 1.0), [x])
    s = s.set_scope("total", "register").split("total.r1", 8)
    s = s.reorder("total.r0", "total.r1.o", "total.i0", "total.r1.i")
    s = s.cache_read("x", "total", "shared").compute_at("x.of.total", "total.r1.o")
    s = s.split("x.of.total.i1", 4).fuse("x.of.total.i0", "x.of.total.i1.o", into="x.of.total.f")
    s = s.split("x.of.total.f", 16).reorder("x.of.total.f.i", "x.of.total.f.o").unroll("x.of.total.f.o")
    s = s.vectorise("x.of.total.i1.i").bind("x.of.total.f.i", "thread.x")
    s = s.bind("total.i0", "thread.x").unroll("total.r1.i").bind("out.i0", "thread.x")
    data = np.random.default_rng(0).integers(-3, 4, (17, 32)).astype(np.float32)
    rows = data.sum(1)
    return s.pipeline("x.of.total", stages), data, rows[:-1] + rows[1:] + 1


@pytest.mark.parametrize("stages", [2, 3, 8])
def test_a_pipeline_is_counted_over_the_loops_of_a_window(stages: int) -> None:
    schedule, data, want = windows(stages)
    program = schedule.program()
    np.testing.assert_array_equal(interpret_program(program, [data]), want)
    loops = (stmt for stmt in walk_stmts(program.body) if isinstance(stmt, For))
    window = next(loop for loop in loops if loop.var.name == "total.r0")
    waits = [stmt for stmt in walk_stmts(window) if isinstance(stmt, Await)]
    assert waits == [Await(stages - 2)], "it does not drain within the window"
    refused(lambda: windows(10), "10 stages, and loop total.r1.o has 8 iterations", PipelineError)


@pytest.mark.skipif(COMPILER is None, reason="no g++ here to compile the emulator with")
def test_the_cuda_text_of_two_counted_loops_computes_the_same(tmp_path: Path) -> None:
    schedule, data, want = windows(3)
    (got,) = Emulated(source_of(schedule.program()), tmp_path)([[data]])
    np.testing.assert_array_equal(got, want)


def test_it_compiles_without_spills() -> None:
    needs_nvrtc()
    schedule = tensorised((512, 512, 512), (128, 64, 64), (32, 32), stages=3, registers=2)
    kernel = build(schedule.program(), H200, "fast", None)
    assert not kernel.resources.spilled_bytes and kernel.threads == 256 and kernel.blocks == 32
    assert kernel.shared_bytes == 3 * (128 + 64) * 64 * 2


def test_a_trace_can_be_replayed() -> None:
    schedule = tensorised(SHAPE, stages=2)
    start = Schedule.of(*matmul(*SHAPE))
    again = replay(from_json(to_json(schedule.trace)), start, schedule.intrinsics.values())
    assert str(again) == str(schedule)


# -- pictures ---------------------------------------------------------------------------------------------------------


def moved() -> Schedule:
    return Schedule.of(*chain(6, 32)).inline("moved").inline("scaled")


def test_bind() -> None:
    schedule = moved().bind("out.i0", "block.x").bind("out.i1", "thread.x")
    assert str(schedule) == dedent(
        """
        block.x out.i0 < 6:
          thread.x out.i1 < 32:
            out[out.i0, out.i1] = max(((x[out.i0, out.i1] * y[out.i1]) + 1.0f32), (x[out.i0, out.i1] * y[out.i1]))
        """
    ).lstrip("\n")


def test_the_last_axis_is_the_fastest() -> None:
    schedule = moved().split("out.i1", 4).bind("out.i0", "block.x")
    by_axis = schedule.bind("out.i1.o", "thread.y").bind("out.i1.i", "thread.x")
    x, y = np.ones((6, 32), np.float32), np.arange(32, dtype=np.float32)
    for made in (by_axis, schedule.bind("out.i1.o", "thread.x").bind("out.i1.i", "thread.y")):
        np.testing.assert_array_equal(interpret_program(made.program(), [x, y]).reshape(6, 32)[0], y + 1)


def test_pipeline_is_shown() -> None:
    text = str(tensorised(SHAPE, stages=3, registers=2))
    assert "scratch a.of.product: f16[32, 32], swizzled, 3 stages\n" in text
    assert "register a.of.product.of.product: f16[16, 16], 2 stages\n" in text


def test_a_scope_is_the_name_of_a_memory_or_one_that_a_target_declares() -> None:
    own = Scope("accumulator_of_a_test")
    schedule = Schedule.of(*chain()).set_scope("scaled", "shared").set_scope("moved", own.value)
    assert "scratch scaled" in str(schedule) and f"{own.value} moved" in str(schedule)
    with pytest.raises(ScheduleError, match="got 'nowhere'"):
        Schedule.of(*chain()).cache_read("x", "scaled", "nowhere")


# -- refusals of bind -------------------------------------------------------------------------------------------------


def refused(make: Callable[[], object], why: str, error: type[ScheduleError] = ScheduleError) -> None:
    with pytest.raises(error, match=why):
        make()


def test_bind_refuses() -> None:
    refused(lambda: moved().bind("out.i0", "core.x"), "got 'core.x'")
    refused(lambda: moved().bind("out.i0", "block.x").bind("out.i0", "thread.x"), "is block.x already")
    refused(lambda: moved().bind("out.i1", "block.x"), "not the outermost")
    refused(lambda: Schedule.of(*chain()).bind("out.i0", "block.x"), "outside of it: scaled, moved")
    refused(
        lambda: moved().bind("out.i0", "thread.x").bind("out.i1", "thread.x"),
        "two loops are bound to thread.x",
    )
    refused(
        lambda: moved().bind("out.i0", "block.x").bind("out.i1", "block.x"), "two loops are bound to block.x"
    )
    split = moved().split("out.i1", 4)
    refused(lambda: split.bind("out.i0", "thread.y").bind("out.i1.i", "thread.x"), "but not directly")
    refused(lambda: moved().bind("out.i0", "warp.x").bind("out.i1", "thread.x"), "but not directly")


def test_threads_do_not_share_a_sum() -> None:
    refused(
        lambda: Schedule.of(*matmul(4, 4, 8)).bind("product.r0", "thread.x"),
        "belongs to the reduction product",
    )


def test_every_stage_has_the_same_threads() -> None:
    schedule = moved().bind("out.i0", "block.x")
    refused(lambda: schedule.program(), "no loop of stage out is bound to threads")
    two = Schedule.of(*chain(6, 32)).inline("moved").compute_at("scaled", "out.i0")
    two = two.bind("out.i0", "block.x").bind("out.i1", "thread.x")
    refused(lambda: two.program(), "no loop of stage scaled is bound")
    two = two.split("scaled.i1", 16).bind("scaled.i1.i", "thread.x")
    refused(lambda: two.program(), "different numbers of threads: scaled by 16, out by 32")
    many = Schedule.of(*chain(2, 2048)).inline("moved").inline("scaled").bind("out.i1", "thread.x")
    refused(lambda: many.program(), "2048 threads in a block, of at most 1024")


def test_registers_are_a_threads_own() -> None:
    """`out` reads what another thread of `scaled` holds."""
    schedule = Schedule.of(*chain(8, 8)).inline("moved").compute_at("scaled", "out.i0")
    x, y = te.Tensor("x", (8, 8), F32), te.Tensor("y", (8,), F32)
    scaled = te.compute("scaled", (8, 8), F32, lambda i, j: x[i, j] * y[j])
    out = te.compute("out", (8, 8), F32, lambda i, j: scaled[j, i])
    schedule = Schedule.of(out, [x, y]).set_scope("scaled", "register")
    schedule = schedule.bind("scaled.i1", "thread.x").unroll("scaled.i0")
    schedule = schedule.bind("out.i1", "thread.x").unroll("out.i0")
    refused(lambda: schedule.program(), "divide it differently among threads")


def test_an_instruction_needs_its_operands_in_registers() -> None:
    """The fragments of `mma` are not loaded."""
    s = Schedule.of(*matmul(16, 8, 16)).set_scope("product", "register")
    s = s.split("product.i0", 16).tensorise("product.i0.i", multiply(16, F16)).bind("product.i0.o", "warp.x")
    s = s.split("out.i0", 16).bind("out.i0.o", "warp.x")
    refused(lambda: s.program(), "takes a from registers, and a is in global")


def test_a_stage_below_warps_uses_what_an_instruction_made() -> None:
    s = moved().split("out.i1", 8).bind("out.i0", "warp.x")
    refused(lambda: s.program(), "uses no result of an instruction")


def test_loops_over_fragments_are_whole() -> None:
    s = tensorised(SHAPE)
    trace = [step for step in s.trace if "out.i1.i.i" not in str(step) or step.primitive in ("reorder",)]
    start = Schedule.of(*matmul(*SHAPE))
    refused(lambda: replay(trace, start, s.intrinsics.values()).program(), "out.i1.i.i")


def test_instructions_agree_on_fragments() -> None:
    """What is loaded as a left operand is no right operand."""
    a = load_left(16, F16).fragments[0]
    b = multiply(16, F16).fragments[1]
    lanes = [(lane, n) for lane in range(32) for n in range(a.size)]
    assert [a.element(*at) for at in lanes] == [b.element(*at) for at in lanes]


def rows_of_a_chain(of: Callable[[te.Tensor, te.Expr, te.Expr], te.Expr]) -> Schedule:
    """`scaled` in registers, and `out` made of it."""
    x = te.Tensor("x", (8, 8), F32)
    scaled = te.compute("scaled", (8, 8), F32, lambda i, j: x[i, j] * 2.0)
    out = te.compute("out", (8, 8), F32, lambda i, j: of(scaled, i, j))
    return Schedule.of(out, [x]).set_scope("scaled", "register")


def test_registers_are_not_divided_by_a_fused_loop() -> None:
    s = rows_of_a_chain(lambda scaled, i, j: scaled[i, j] + 1.0)
    for stage in ("scaled", "out"):
        s = s.fuse(f"{stage}.i0", f"{stage}.i1", into=f"{stage}.f").bind(f"{stage}.f", "thread.x")
    refused(lambda: s.program(), "stage scaled divides it among threads by a fused loop")


def test_registers_are_accessed_within_bounds() -> None:
    """What is left of the first column, no thread holds."""
    zero = te.const(0.0, F32)
    s = rows_of_a_chain(lambda scaled, i, j: te.select(te.call("lt", j, 1), zero, scaled[i, j - 1]))
    for stage in ("scaled", "out"):
        s = s.bind(f"{stage}.i0", "thread.x").unroll(f"{stage}.i1")
    refused(lambda: s.program(), "scaled is in registers, and stage out accesses it out of bounds")


def multiplied(
    left: tuple[int, int], index: Callable[[te.Expr, te.Expr], tuple[te.Expr, te.Expr]]
) -> Schedule:
    """A matmul of 16 x 16 by 8 x 16 as one instruction of a warp; `index` of the left operand, from row and K."""
    a, b = te.Tensor("a", left, F16), te.Tensor("b", (8, 16), F16)
    (r,) = te.reduce_axes([16])
    product = te.compute(
        "product", (16, 8), F32, lambda i, j: te.reduce_over("sum", a[index(i, r)] * b[j, r], [r])
    )
    out = te.compute("out", (16, 8), F16, lambda i, j: te.cast(product[i, j], F16))
    s = Schedule.of(out, [a, b]).set_scope("product", "register")
    for name, rows in (("a", left[0]), ("b", 8)):
        tile = f"{name}.of.product"
        s = s.cache_read(name, "product", "register").split(f"{tile}.i0", rows).bind(f"{tile}.i0.o", "warp.x")
    s = s.split("product.i0", 16).tensorise("product.i0.i", multiply(16, F16)).bind("product.i0.o", "warp.x")
    return s.split("out.i0", 16).bind("out.i0.o", "warp.x")


def test_an_instruction_takes_rows_that_are_contiguous() -> None:
    s = multiplied((16, 16), lambda i, k: (k, i))
    refused(lambda: s.program(), "the rows of a.of.product are not contiguous")


def test_a_tile_of_an_instruction_is_of_whole_fragments() -> None:
    s = multiplied((17, 16), lambda i, k: (i, k))
    refused(lambda: s.program(), r"a.of.product\[17, 16\] is not made of whole fragments")


def test_a_warp_runs_instructions_of_a_whole_warp() -> None:
    x, y = te.Tensor("x", (3, 16), F32), te.Tensor("y", (16,), F32)
    out = te.compute("out", (3, 16), F32, lambda i, j: y[j] * x[i, j])
    s = Schedule.of(out, [x, y]).split("out.i1", 8).tensorise("out.i1.i", axpy(8)).bind("out.i0", "warp.x")
    refused(lambda: s.program(), "axpy must be an instruction of a whole warp")


# -- refusals of pipeline and swizzle ---------------------------------------------------------------------------------


def staged(k: int = 128) -> Schedule:
    """The tile of `a` is copied in a sequential loop."""
    s = Schedule.of(*matmul(32, 32, k)).split("product.r0", 32)
    s = s.reorder("product.r0.o", "product.i0", "product.i1")
    return s.cache_read("a", "product", "shared").compute_at("a.of.product", "product.r0.o")


def test_pipeline_refuses() -> None:
    def pipelined(stages: int, schedule: Schedule | None = None, **options: object) -> Callable[[], object]:
        return lambda: (schedule or staged()).pipeline("a.of.product", stages, **options)  # type: ignore[arg-type]

    refused(pipelined(1), "at least 2", PipelineError)
    refused(pipelined(6), "6 stages, and loop product.r0.o has 4 iterations", PipelineError)
    refused(lambda: staged().pipeline("out", 2), "it is the output", PipelineError)
    refused(lambda: staged().pipeline("product", 2), "synchronous store", PipelineError)
    unplaced = Schedule.of(*matmul(32, 32, 64)).cache_read("a", "product", "shared")
    refused(pipelined(2, unplaced), "no sequential loop", PipelineError)
    large = staged(32 * 200)
    refused(pipelined(150, large, machine=H200), "bytes of shared memory in all, of 232448", PipelineError)
    both = staged().cache_read("b", "product", "shared").compute_at("b.of.product", "product.r0.o")
    refused(
        lambda: both.pipeline("b.of.product", 3).pipeline("a.of.product", 2),
        "their waits differ",
        PipelineError,
    )


def test_computing_on_the_way_is_not_asynchronous() -> None:
    """relu(a) is inlined into the copy; computed at its use, the copy stays one."""
    x = te.Tensor("x", (32, 64), F32)
    positive = te.compute("positive", (32, 64), F32, lambda i, k: te.call("max", x[i, k], te.const(0.0, F32)))
    (r,) = te.reduce_axes([64])
    total = te.compute("total", (32,), F32, lambda i: te.reduce_over("sum", positive[i, r], [r]))
    out = te.compute("out", (32,), F32, lambda i: total[i] + 1.0)

    def in_loop(s: Schedule, stage: str) -> Schedule:
        return s.split("total.r0", 8).reorder("total.r0.o", "total.i0").compute_at(stage, "total.r0.o")

    into_copy = in_loop(Schedule.of(out, [x]).set_scope("positive", "shared"), "positive")
    refused(lambda: into_copy.pipeline("positive", 2), "synchronous store", PipelineError)
    at_use = in_loop(
        Schedule.of(out, [x]).inline("positive").cache_read("x", "total", "shared"), "x.of.total"
    )
    assert "2 stages" in str(at_use.pipeline("x.of.total", 2))


def test_lanes_of_a_copy_are_contiguous() -> None:
    s = staged().split("a.of.product.i0", 4).reorder("a.of.product.i1", "a.of.product.i0.i")
    # On threads of a GPU: a processor stores one by one what a copy cannot.
    s = s.split("product.i0", 4).split("out.i0", 4)
    for stage in ("a.of.product", "product", "out"):
        s = s.bind(f"{stage}.i0.o", "thread.x")
    refused(lambda: s.vectorise("a.of.product.i0.i").pipeline("a.of.product", 2).program(), "not contiguous")


def test_swizzle_refuses() -> None:
    refused(lambda: staged().swizzle("out"), "a tile of at least two axes in shared memory")
    narrow = Schedule.of(*matmul(32, 32, 48)).cache_read("a", "product", "shared")
    refused(lambda: narrow.swizzle("a.of.product"), "48 elements, not 2, 4, 8, ... chunks of 8")
