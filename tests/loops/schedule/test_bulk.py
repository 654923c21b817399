"""Schedules whose tiles the tensor copy engine brings: they compute the same, interpreted and as CUDA text on the
emulated GPU; NVRTC takes them without spills; what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tests.loops.passes.test_bulk_pipeline import without
from tests.loops.schedule.gpu import (
    BF16,
    F16,
    F32,
    fetched,
    matmul,
    operands,
    padded,
    relu_of_matmul,
    tensorised,
    warpgroups,
)
from tests.nvrtc import needs_nvrtc
from tilewright import te
from tilewright.codegen.cuda.build import build, source_of
from tilewright.dtypes import DType
from tilewright.errors import PipelineError, ScheduleError
from tilewright.hw.gpu import A100, H200
from tilewright.hw.warpgroups import role_registers, warpgroup_multiply
from tilewright.loops.interpret import UnorderedAccess, interpret_program
from tilewright.loops.ir import Block, BoxCopy, Fill, Multiplied, Roles, Stmt, Warp, walk_stmts
from tilewright.loops.schedule import Schedule, from_json, replay, to_json
from tilewright.testing.emulator.run import COMPILER, Complaint, Emulated

EMULATED = pytest.mark.skipif(COMPILER is None, reason="no g++ here to compile the emulator with")
Shape = tuple[int, int, int]


def given(shape: Shape, dtype: DType = F16) -> list[np.ndarray]:
    bias = np.random.default_rng(1).integers(-3, 4, shape[1]).astype(dtype.numpy)
    return [*operands(shape, dtype), bias]


def expected(arrays: list[np.ndarray]) -> np.ndarray:
    a, b, bias = (array.astype(np.float32) for array in arrays)
    return np.maximum(a @ b.T + bias, 0).astype(arrays[0].dtype).astype(np.float32)


def same(got: np.ndarray, shape: Shape, arrays: list[np.ndarray]) -> None:
    np.testing.assert_array_equal(got.reshape(shape[:2]).astype(np.float32), expected(arrays))


# -- what it computes -------------------------------------------------------------------------------------------------

# Whole tiles; borders of all three axes; fewer rows than a tile; one step more than slots; odd columns.
SHAPES: list[tuple[Shape, Shape, int]] = [
    ((128, 64, 128), (128, 64, 64), 2),
    ((100, 70, 136), (128, 64, 64), 3),
    ((40, 24, 264), (64, 8, 64), 4),
    ((130, 33, 96), (128, 24, 32), 2),
]


@pytest.mark.parametrize("specialise", [False, True], ids=["one role", "roles"])
@pytest.mark.parametrize(("shape", "block", "stages"), SHAPES)
def test_a_matmul_by_warpgroups(shape: Shape, block: Shape, stages: int, specialise: bool) -> None:
    program = warpgroups(shape, block, stages, specialise=specialise).program()
    arrays = given(shape)
    same(interpret_program(program, arrays), shape, arrays)
    kinds = [type(stmt) for stmt in walk_stmts(program.body)]
    assert (Roles in kinds) == specialise and Fill in kinds and Multiplied in kinds
    assert all(stmt.running for stmt in walk_stmts(program.body) if isinstance(stmt, Warp))


@EMULATED
@pytest.mark.parametrize("specialise", [False, True], ids=["one role", "roles"])
@pytest.mark.parametrize(("shape", "block", "stages"), SHAPES)
def test_its_cuda_text_computes_the_same(
    shape: Shape, block: Shape, stages: int, specialise: bool, tmp_path: Path
) -> None:
    arrays = given(shape)
    source = source_of(warpgroups(shape, block, stages, specialise=specialise).program())
    assert source.threads == 128 * (block[0] // 64 + specialise) and len(source.maps) == 2
    (got,) = Emulated(source, tmp_path).in_both_orders([arrays])
    same(got, shape, arrays)


@EMULATED
@pytest.mark.parametrize("specialise", [False, True], ids=["one role", "roles"])
def test_a_block_computes_several_tiles_in_turn(specialise: bool, tmp_path: Path) -> None:
    """The loop of multiplications begins anew for each tile: each slot is released once."""
    shape = (64, 32, 200)
    program = warpgroups(shape, (64, 16, 64), 3, specialise=specialise, in_turn=True).program()
    assert program.parallel_extent == 1
    arrays = given(shape)
    same(interpret_program(program, arrays), shape, arrays)
    (got,) = Emulated(source_of(program), tmp_path).in_both_orders([arrays])
    same(got, shape, arrays)


@EMULATED
def test_two_blocks_copy_for_each_other(tmp_path: Path) -> None:
    """The tile of `a` is the same for neighbours along n: each block copies half of it to both."""
    shape = (200, 120, 264)
    program = warpgroups(shape, (128, 64, 64), 3, cluster=2).program()
    assert program.together == 2 and program.parallel_extent == 4
    shared = {s.buffer.name: s.shared for s in walk_stmts(program.body) if isinstance(s, BoxCopy)}
    assert shared == {"a.tile": True, "b.tile": False} and "for 2 blocks at once" in program.decisions
    arrays, source = given(shape), source_of(program)
    assert [each.box_rows for each in source.maps] == [64, 64]
    same(interpret_program(program, arrays), shape, arrays)
    (got,) = Emulated(source, tmp_path).in_both_orders([arrays])
    same(got, shape, arrays)


CLUSTER_MUTANTS = {
    "a block that does not wait for its neighbour's readers": (", 16);", ", 8);"),
    "no arrival at the other block": ("(threadIdx.x & 31) < 2", "(threadIdx.x & 31) < 1"),
    "a block that ends too early": ("  meet_blocks();\n}", "}"),
    "the half of the other block": ("+ (int)rank * 64", "+ (int)(1 - rank) * 64"),
    "a box for one block": (", 3);", ", 1);"),
}  # fmt: skip


@EMULATED
@pytest.mark.slow
@pytest.mark.parametrize("name", CLUSTER_MUTANTS)
def test_a_mutant_of_a_cluster_is_caught(name: str, tmp_path: Path) -> None:
    shape = (128, 128, 448)
    source = source_of(warpgroups(shape, (128, 64, 64), 3, cluster=2).program())
    begin = source.text.index('extern "C"')
    text = source.text[begin:]
    changes = CLUSTER_MUTANTS[name]
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert old in text
        text = text.replace(old, new)
    arrays = given(shape)
    try:
        (got,) = Emulated(source, tmp_path, source.text[:begin] + text).in_both_orders([arrays])
    except Complaint as complaint:
        assert "does not compile" not in str(complaint)
        return
    with pytest.raises(AssertionError):
        same(got, shape, arrays)


@EMULATED
def test_bf16_and_a_program_of_several_blocks(tmp_path: Path) -> None:
    shape = (192, 80, 200)
    arrays = given(shape, BF16)
    assert arrays[0].dtype == ml_dtypes.bfloat16
    program = warpgroups(shape, (64, 40, 64), 3, BF16).program()
    (got,) = Emulated(source_of(program), tmp_path).in_both_orders([arrays])
    same(got, shape, arrays)


@EMULATED
def test_a_tile_for_instructions_of_a_warp(tmp_path: Path) -> None:
    """The copy engine also brings what `ldmatrix` reads: the swizzle is the same."""
    shape = (32, 32, 256)
    made = tensorised(shape, (32, 16, 64)).pipeline("a.of.product", 3, copy="bulk")
    program = made.pipeline("b.of.product", 3, copy="bulk").program()
    arrays = operands(shape)
    for got in (interpret_program(program, arrays), *Emulated(source_of(program), tmp_path)([arrays])):
        np.testing.assert_array_equal(got.reshape(32, 32).astype(np.float32), arrays[0] @ arrays[1].T)


def column_sums(copy: str, count: int = 32) -> Schedule:
    """A loop that no template knows: means of the columns of a matrix, in steps of its rows; `count` threads have one
    each, which begin anew behind the last."""
    x = te.Tensor("x", (68, 32), F32)
    tile = padded(x, 72, 32)
    (r,) = te.reduce_axes([72])
    total = te.compute("total", (count,), F32, lambda j: te.reduce_over("sum", tile[r, j % 32], [r]))
    s = Schedule.of(te.compute("out", (count,), F32, lambda j: total[j] * (1 / 64)), [x])
    s = s.set_scope("total", "register").split("total.r0", 8).reorder("total.r0.o", "total.i0", "total.r0.i")
    s = s.set_scope("x.tile", "shared").compute_at("x.tile", "total.r0.o").swizzle("x.tile")
    if copy == "async":
        s = fetched(s, "x.tile", 32, 4)
    s = s.bind("total.i0", "thread.x").unroll("total.r0.i").bind("out.i0", "thread.x")
    return s.pipeline("x.tile", 3, H200, copy=copy, specialise=copy == "auto")


@EMULATED
@pytest.mark.parametrize("copy", ["auto", "async"])
def test_a_loop_without_tensor_cores(copy: str, tmp_path: Path) -> None:
    program = column_sums(copy).program()
    assert any(isinstance(stmt, Roles) for stmt in walk_stmts(program.body)) == (copy == "auto")
    data = np.random.default_rng(0).integers(-8, 8, (68, 32)).astype(np.float32)
    for got in (interpret_program(program, [data]), *Emulated(source_of(program), tmp_path)([[data]])):
        np.testing.assert_array_equal(got, data.sum(0) / 64)


def test_a_trace_can_be_replayed() -> None:
    schedule = warpgroups((128, 64, 128))
    start = Schedule.of(*relu_of_matmul((128, 64, 128), (128, 64, 64)))
    again = replay(from_json(to_json(schedule.trace)), start, schedule.intrinsics.values())
    assert str(again) == str(schedule)


# -- pictures and words -----------------------------------------------------------------------------------------------


def test_what_is_copied_in_bulk_is_told_and_why_the_rest_is_not() -> None:
    assert (
        "; in bulk: a.tile, b.tile; by a producer of its own"
        in warpgroups((128, 64, 128)).program().decisions
    )
    words = tensorised((32, 32, 128), (32, 16, 32), stages=3, swizzled=False).program().decisions
    assert "not in bulk: a.of.product (its rows have 64 bytes and are not swizzled" in words
    assert "in bulk" not in tensorised((32, 32, 128)).program().decisions
    text = str(warpgroups((128, 64, 128)))
    assert "3 stages, by the copy engine, which has threads of its own" in text


def test_the_copy_is_chosen_by_machine_and_buffer() -> None:
    plain = tensorised((32, 32, 256), (32, 16, 64))

    def chosen(schedule: Schedule, machine: object) -> bool:
        return bool(schedule.pipeline("a.of.product", 2, machine, copy="auto").nest.bulk)  # type: ignore[arg-type]

    assert chosen(plain, H200) and not chosen(plain, A100)
    assert not chosen(tensorised((32, 32, 256), (32, 16, 64), swizzled=False), H200)


def test_registers_of_roles_fit_a_multiprocessor() -> None:
    assert role_registers(1) is None and role_registers(2) == (40, 232)
    for consumers in range(2, 8):
        few, many = role_registers(consumers) or (0, 0)
        begun = (1 << 16) // (128 * (consumers + 1)) // 8 * 8
        assert few % 8 == many % 8 == 0 and few + consumers * many <= begun * (consumers + 1)
        assert few < begun <= many


def test_registers_are_divided_among_whole_warpgroups_only() -> None:
    def registers(threads: int) -> object:
        program = column_sums("auto", threads).program()
        return next(stmt.registers for stmt in walk_stmts(program.body) if isinstance(stmt, Roles))

    assert registers(256) == role_registers(2) and registers(320) is None


# -- machine code -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("specialise", [False, True], ids=["one role", "roles"])
@pytest.mark.parametrize(
    ("block", "stages"), [((128, 128, 64), 5), ((128, 256, 64), 4), ((128, 192, 64), 5), ((64, 256, 64), 3)]
)
def test_it_compiles_without_spills(block: Shape, stages: int, specialise: bool) -> None:
    """`build` also refuses what the compiler serialises."""
    needs_nvrtc()
    kernel = build(
        warpgroups((1024, 1024, 1024), block, stages, specialise=specialise).program(), H200, "fast", None
    )
    assert not kernel.resources.spilled_bytes and kernel.resources.registers <= 168
    assert kernel.shared_bytes == stages * (block[0] + block[1]) * block[2] * 2 + 16 * stages
    assert kernel.maps == source_of(warpgroups((1024, 1024, 1024), block, stages).program()).maps


def test_a_cluster_compiles_without_spills() -> None:
    needs_nvrtc()
    kernel = build(warpgroups((512, 512, 256), (128, 256, 64), 4, cluster=2).program(), H200, "fast", None)
    assert not kernel.resources.spilled_bytes and [each.box_rows for each in kernel.maps] == [64, 256]


def test_its_text_is_the_golden(golden: Callable[[str, str], None]) -> None:
    text = source_of(warpgroups((4096, 4096, 4096), (128, 256, 64), 4).program()).text
    golden("warpgroups.cu", text[text.index('extern "C"') :])


# -- mutants ----------------------------------------------------------------------------------------------------------

MUTANTS = {
    "no wait for data": ("await_phase(ring_0 + 8 * ((product_r0_o % 3)), ((product_r0_o / 3) % 2));", ""),
    "a wait of the other parity": ("(((product_r0_o / 3) + 1) % 2)", "((product_r0_o / 3) % 2)"),
    "no release": ("arrive(ring_0 + 8 * (((product_r0_o + 2) % 3)) + 24);", ";"),
    "a release of too few warps": ("(threadIdx.x & 31) == 0) arrive", "(threadIdx.x & 63) == 0) arrive"),
    "too few bytes": ("expect_bytes(ring_0 + 8 * ((product_r0_o % 3)), 24576)",
                      "expect_bytes(ring_0 + 8 * ((product_r0_o % 3)), 16384)"),
    "no wait for multiplications": ("await_multiplications_32(product);", ""),
    "multiplications that begin without a fence": ("begin_multiplications();", ""),
    "a slot that is released too early": ("(product_r0_o + 2) % 3", "product_r0_o % 3"),
    "a row too far": ("(int)(0), ring_0", "(int)(1), ring_0"),
}  # fmt: skip


OFTEN = {"no wait for data", "no release", "no wait for multiplications"}  # in every run


@EMULATED
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow) for name in MUTANTS]
)
def test_a_mutant_is_caught(name: str, tmp_path: Path) -> None:
    shape = (128, 64, 448)
    source = source_of(warpgroups(shape, stages=3).program())
    old, new = MUTANTS[name]
    begin = source.text.index('extern "C"')
    assert old in source.text[begin:]
    text = source.text[:begin] + source.text[begin:].replace(old, new)
    arrays = given(shape)
    try:
        (got,) = Emulated(source, tmp_path, text).in_both_orders([arrays])
    except Complaint as complaint:
        assert "does not compile" not in str(complaint)
        return
    with pytest.raises(AssertionError):
        same(got, shape, arrays)


def test_the_interpreter_finds_what_is_not_waited_for() -> None:
    shape = (64, 64, 128)
    program = warpgroups(shape, (64, 64, 64), 2).program()

    def found(body: Stmt, why: str) -> None:
        with pytest.raises(UnorderedAccess, match=why):
            interpret_program(replace(program, body=body), given(shape))

    def last(stmt: Stmt) -> Stmt:
        return Block(()) if stmt == Multiplied(0) else stmt

    found(
        without(program.body, Multiplied, last),
        "product is accessed while multiplications into it are under way",
    )


def test_the_interpreter_finds_a_release_before_the_multiplications_are_done() -> None:
    shape = (64, 64, 256)
    program = warpgroups(shape, (64, 64, 64), 2).program()

    def early(stmt: Stmt) -> Stmt:
        return Multiplied(2) if stmt == Multiplied(1) else stmt

    with pytest.raises(UnorderedAccess, match="is overwritten while multiplications read it"):
        interpret_program(replace(program, body=without(program.body, Multiplied, early)), given(shape))


# -- refusals ---------------------------------------------------------------------------------------------------------


def refused(make: Callable[[], object], why: str, error: type[ScheduleError] = PipelineError) -> None:
    with pytest.raises(error, match=why):
        make()


def staged(rows: int = 32, k: int = 128, step: int = 64) -> Schedule:
    """The tile of `a`, swizzled, is copied in a sequential loop."""
    s = Schedule.of(*matmul(rows, 32, k)).split("product.r0", step)
    s = s.reorder("product.r0.o", "product.i0", "product.i1")
    return s.cache_read("a", "product", "shared").compute_at("a.of.product", "product.r0.o")


def bulk(schedule: Schedule, tile: str = "a.of.product", **options: object) -> Callable[[], object]:
    return lambda: schedule.pipeline(tile, 2, **{"copy": "bulk", **options})  # type: ignore[arg-type]


def test_pipeline_refuses_what_is_no_box() -> None:
    swizzled = staged().swizzle("a.of.product")
    refused(bulk(staged()), "its rows have 128 bytes and are not swizzled")
    refused(bulk(staged(k=256, step=128).swizzle("a.of.product")), "its rows have 256 bytes and are swizzled")
    refused(bulk(staged(rows=12).swizzle("a.of.product")), "it has 12 rows")
    refused(bulk(staged(rows=264).swizzle("a.of.product")), "it has 264 rows, and a box 8, 16, 24, ... 256")
    refused(bulk(swizzled, copy="fast"), "copy must be one of async, bulk, got 'fast'")
    refused(bulk(swizzled, copy="async", specialise=True), "by the copy engine alone")
    refused(bulk(swizzled, machine=A100), "has no tensor copy engine")
    refused(lambda: swizzled.pipeline("a.of.product", 2, copy="bulk").program(), "no loop is bound to one")


def test_the_threads_of_a_block_are_whole_warps_with_room_for_a_producer() -> None:
    refused(column_sums("auto", 48).program, "48 threads in a block are not whole warps of 32")
    refused(
        column_sums("auto", 1024).program,
        "1152 threads in a block with those of a producer of its own, of at most 1024",
    )
    assert source_of(column_sums("auto", 896).program()).threads == 1024


def test_the_last_call_says_how_a_tile_is_copied() -> None:
    by_producer = column_sums("auto")
    alone = by_producer.pipeline("x.tile", 3, copy="bulk").program()
    assert not any(isinstance(stmt, Roles) for stmt in walk_stmts(alone.body))
    by_threads = column_sums("async")
    again = by_threads.pipeline("x.tile", 3, copy="bulk", specialise=True).pipeline("x.tile", 3)
    assert again.nest == by_threads.nest


def test_pipeline_refuses_clusters_that_share_nothing() -> None:
    refused(lambda: warpgroups((128, 64, 128), cluster=2).program(), "1 blocks are no clusters of 2")
    refused(lambda: warpgroups((128, 64, 128), cluster=3), "a cluster must be of 1 or 2 blocks")
    refused(
        lambda: warpgroups((128, 64, 128), cluster=2, specialise=False), "and of 2 with specialise, got 2"
    )
    # Two blocks along m, and a tile of `b` of 8 rows, which two blocks cannot divide.
    refused(lambda: warpgroups((256, 8, 128), (128, 8, 64), cluster=2).program(), "no tile is the same for 2")


def of_tile(shape: tuple[int, ...], tile: Callable[..., te.Expr], dtype: DType = F16) -> Schedule:
    """The sum over the rows of a computed tile of 32 x 128, in two steps."""
    x = te.Tensor("x", shape, dtype)
    made = te.compute("tile", (32, 128), dtype, lambda i, k: tile(x, i, k))
    (r,) = te.reduce_axes([128])
    total = te.compute("total", (32,), F32, lambda i: te.reduce_over("sum", te.cast(made[i, r], F32), [r]))
    s = Schedule.of(te.compute("out", (32,), F32, lambda i: total[i] + 1.0), [x])
    s = s.set_scope("tile", "shared").split("total.r0", 64).reorder("total.r0.o", "total.i0")
    return s.compute_at("tile", "total.r0.o").swizzle("tile")


def test_pipeline_says_which_access_is_no_box() -> None:
    zero = te.cast(te.const(0.0, F32), F16)
    refused(
        bulk(of_tile((128, 32), lambda x, i, k: te.Load(x, (k, i))), "tile"),
        "neighbours in it are not neighbours in x",
    )
    refused(
        bulk(of_tile((32, 256), lambda x, i, k: te.Load(x, (i, k * 2))), "tile"),
        "neighbours in it are not neighbours in x",
    )
    refused(
        bulk(of_tile((32, 132), lambda x, i, k: te.Load(x, (i, k))), "tile"),
        "begin at multiples of 264 bytes, not of 16",
    )
    refused(
        bulk(of_tile((4096,), lambda x, i, k: te.Load(x, (i * 128 + k,))), "tile"),
        r"x has the shape \[4096\]",
    )
    diagonal = of_tile((32, 128), lambda x, i, k: te.select(te.call("lt", i, k), te.Load(x, (i, k)), zero))
    refused(bulk(diagonal, "tile"), "a condition other than the edge of a matrix")
    beyond = of_tile(
        (2, 24, 128),
        lambda x, i, k: te.select(
            te.call("lt", i, te.as_index(24)), te.Load(x, (te.as_index(1), i, k)), zero
        ),
    )
    refused(bulk(beyond, "tile"), "elements past the end of its axis 1 belong to another part of x")
    bulk(
        of_tile((2, 32, 128), lambda x, i, k: te.Load(x, (te.as_index(1), i, k))), "tile"
    )()  # a part of the rows of one matrix


def test_tiles_of_one_loop_are_copied_in_the_same_way() -> None:
    both = staged().swizzle("a.of.product").cache_read("b", "product", "shared")
    both = both.compute_at("b.of.product", "product.r0.o").pipeline("b.of.product", 2)
    refused(bulk(both), "b.of.product of the same loop is copied otherwise")


def test_instructions_of_warpgroups_are_refused_elsewhere() -> None:
    by_threads = warpgroups((128, 64, 128), copy="async", specialise=False)
    by_threads = fetched(fetched(by_threads, "a.tile", 256, 8), "b.tile", 256, 8)
    refused(
        by_threads.program,
        r"wgmma.* reads a.tile beside the copy engine",
        ScheduleError,
    )
    s = Schedule.of(*matmul(64, 64, 64)).set_scope("product", "register").split("product.r0", 16)
    s = s.reorder("product.r0.o", "product.i0", "product.i1", "product.r0.i")
    by_warp = s.tensorise("product.i0", warpgroup_multiply(64, F16)).bind("out.i0", "thread.x")
    refused(by_warp.program, "no loop of stage product is bound", ScheduleError)
