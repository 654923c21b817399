"""Each primitive does what its picture shows, and the result computes the same."""

from __future__ import annotations

from textwrap import dedent

import pytest

from tests.loops import formulas
from tests.loops.schedule.examples import Task, chain, check_meaning, conv2d, plain_sum
from tilewright import te
from tilewright.dtypes import DType
from tilewright.loops.ir import For, If, Kind, Prefetch, Store, walk_stmts
from tilewright.loops.schedule import Schedule
from tilewright.loops.text import print_program

F32 = DType.F32
MATMUL = formulas.matmul(6, 8, 4)
SUM = plain_sum(3, 8)
ODD = chain(5, 13)
CHAIN = chain(6, 8)


def of(task: Task, **options: object) -> Schedule:
    return Schedule.of(*task, **options)  # type: ignore[arg-type]


def shows(schedule: Schedule, task: Task, expected: str) -> None:
    assert str(schedule) == dedent(expected).lstrip("\n")
    check_meaning(schedule, task, native=True)


def only_out(task: Task = CHAIN) -> Schedule:
    return of(task).inline("moved").inline("scaled")


def test_the_beginning_is_one_nest_per_stage() -> None:
    shows(
        of(SUM),
        SUM,
        """
        scratch out.local: f32[3]
        serial out.local.i0 < 3:
          serial out.r0 < 8:
            out.local[out.local.i0] += x[out.local.i0, out.r0]
        serial out.i0 < 3:
          out[out.i0] = out.local[out.i0]
        """,
    )


def test_inline() -> None:
    shows(
        only_out(),
        CHAIN,
        """
        serial out.i0 < 6:
          serial out.i1 < 8:
            out[out.i0, out.i1] = max(((x[out.i0, out.i1] * y[out.i1]) + 1.0f32), (x[out.i0, out.i1] * y[out.i1]))
        """,
    )


@pytest.mark.parametrize("tail", ["exact", "guard", "shift"])
def test_split_where_the_factor_divides(tail: str) -> None:
    schedule = of(SUM).split("out.r0", 4, tail)
    assert "out.local[out.local.i0] += x[out.local.i0, ((out.r0.o * 4) + out.r0.i)]" in str(schedule)
    check_meaning(schedule, SUM)


def test_split_with_a_guard() -> None:
    schedule = only_out(ODD).split("out.i1", 4, "guard")
    assert "if (((out.i1.o * 4) + out.i1.i) < 13): out[" in str(schedule)
    program = check_meaning(schedule, ODD, native=True)
    assert any(isinstance(stmt, If) for stmt in walk_stmts(program.body))


def test_a_guard_is_asked_as_far_outside_as_it_goes() -> None:
    schedule = only_out(ODD).split("out.i0", 2, "guard")
    text = print_program(check_meaning(schedule, ODD))
    assert text.index("if ") < text.index("serial out.i1")


def test_split_with_a_tile_moved_back() -> None:
    schedule = only_out(ODD).split("out.i1", 4, "shift").vectorise("out.i1.i")
    assert "serial out.i1.o < 4, overlapping:" in str(schedule)
    assert "(out.i1.i + min((out.i1.o * 4), 9))" in str(schedule)
    check_meaning(schedule, ODD, native=True)


def test_split_with_a_narrower_tail() -> None:
    schedule = only_out(ODD).split("out.i1", 8, "narrow").vectorise("out.i1.i")
    assert "vector out.i1.i < 8, 5 at the end:" in str(schedule)
    program = check_meaning(schedule, ODD, native=True)
    vectors = [s.var.extent for s in walk_stmts(program.body) if isinstance(s, For) and s.kind is Kind.VECTOR]
    assert vectors == [8, 4] and not any(isinstance(stmt, If) for stmt in walk_stmts(program.body))
    outside = schedule.reorder("out.i1.o", "out.i0").parallel("out.i1.o")
    check_meaning(outside, ODD, native=True)


@pytest.mark.parametrize("order", [["r0", "i0", "i1.o", "i1.i"], ["i1.o", "r0", "i0", "i1.i"]])
def test_a_narrower_tail_of_a_sum_begins_it_once(order: list[str]) -> None:
    """The pair inside the reduction, and around it; and a pair that is the reduction."""
    task = formulas.matmul(6, 37, 21)
    schedule = of(task).split("product.i1", 8, "narrow").reorder(*(f"product.{name}" for name in order))
    check_meaning(schedule.vectorise("product.i1.i"), task, native=True)
    schedule = schedule.split("product.r0", 4, "narrow")
    text = print_program(check_meaning(schedule, task, native=True))
    assert text.count("= 0.0f32") == 2  # of the whole tiles, and of the narrower one


def test_a_maximum_may_be_shifted() -> None:
    """Combining an element twice changes a sum, but not a maximum."""
    task = formulas.window()
    schedule = of(task).split("best.r1", 2, "shift").split("best.r0", 2, "shift")
    check_meaning(schedule, task, native=True)


def test_fused_axes_are_walked_as_one() -> None:
    schedule = only_out().fuse("out.i0", "out.i1", into="f").split("f", 8)
    schedule = schedule.vectorise("f.i").parallel("f.o")
    text = print_program(check_meaning(schedule, CHAIN, native=True))
    assert "out[((f.o * 8) + f.i)]" in text


def test_reorder_leaves_the_others_where_they_are() -> None:
    schedule = of(MATMUL).reorder("product.r0", "product.i0")
    assert schedule.loops[:3] == ["product.r0", "product.i1", "product.i0"]
    check_meaning(schedule, MATMUL)


def test_the_beginning_of_a_reduction_moves_with_its_loops() -> None:
    schedule = of(MATMUL).reorder("product.i0", "product.r0", "product.i1").vectorise("product.i1")
    text = print_program(check_meaning(schedule, MATMUL, native=True))
    assert (
        "    vector product.i1 < 8:\n      product[((product.i0 * 8) + product.i1)] = 0.0f32\n"
        "    serial product.r0 < 4:\n" in text
    )


def test_tile() -> None:
    shows(
        only_out().tile(["out.i0", "out.i1"], [3, 4]),
        CHAIN,
        """
        serial out.i0.o < 2:
          serial out.i1.o < 2:
            serial out.i0.i < 3:
              serial out.i1.i < 4:
                out[((out.i0.o * 3) + out.i0.i), ((out.i1.o * 4) + out.i1.i)] = max(((x[((out.i0.o * 3) + out.i0.i), \
((out.i1.o * 4) + out.i1.i)] * y[((out.i1.o * 4) + out.i1.i)]) + 1.0f32), (x[((out.i0.o * 3) + out.i0.i), \
((out.i1.o * 4) + out.i1.i)] * y[((out.i1.o * 4) + out.i1.i)]))
        """,
    )


def test_compute_at_computes_what_one_iteration_reads() -> None:
    schedule = of(MATMUL).tile(["out.i0", "out.i1"], [2, 4]).compute_at("product", "out.i1.o")
    shows(
        schedule,
        MATMUL,
        """
        scratch product: f32[2, 4]
        serial out.i0.o < 3:
          serial out.i1.o < 2:
            serial product.i0 < 2:
              serial product.i1 < 4:
                serial product.r0 < 4:
                  product[product.i0, product.i1] += (a[((out.i0.o * 2) + product.i0), product.r0] \
* b[product.r0, ((out.i1.o * 4) + product.i1)])
            serial out.i0.i < 2:
              serial out.i1.i < 4:
                out[((out.i0.o * 2) + out.i0.i), ((out.i1.o * 4) + out.i1.i)] = max((product[out.i0.i, out.i1.i] \
+ bias[((out.i1.o * 4) + out.i1.i)]), 0.0f32)
        """,
    )


@pytest.mark.parametrize("stride", [1, 2])
def test_compute_at_covers_a_window(stride: int) -> None:
    """A tile of outputs reads a larger tile of the padded input: its border belongs to two tiles."""
    task = conv2d(8, 2, 4, stride)
    rows = 8 // stride // 2
    schedule = of(task).split("out.i0", rows).compute_at("conv", "out.i0.o").compute_at("padded", "out.i0.o")
    assert f"scratch padded: f32[2, {(rows - 1) * stride + 3}, {10 if stride == 1 else 9}]" in str(schedule)
    assert f"scratch conv: f32[{rows}, {8 // stride}, 4]" in str(schedule)
    check_meaning(schedule.parallel("out.i0.o"), task, native=True)


@pytest.mark.parametrize("stride", [1, 2])
def test_store_at_computes_a_row_of_a_window_once(stride: int) -> None:
    task = conv2d(8, 2, 4, stride)
    schedule = of(task).split("out.i0", 8 // stride // 2).compute_at("conv", "out.i0.i")
    schedule = schedule.store_at("padded", "out.i0.o", "out.i0.i").parallel("out.i0.o")
    assert f"if ((out.i0.i <= 0) | ({3 - stride} <= padded.i1)): padded[" in str(schedule)
    check_meaning(schedule, task, native=True)


def test_store_at_in_a_parallel_loop() -> None:
    """Rows of a stencil: the first iteration of each part computes three, the others one."""
    x = formulas.tensor("x", 12, 20)
    rows = te.compute("rows", (12, 20), F32, lambda i, j: x[i, j] * 2.0)
    out = te.compute("out", (10, 20), F32, lambda i, j: rows[i, j] + rows[i + 1, j] + rows[i + 2, j])
    schedule = of((out, [x])).split("out.i0", 5).store_at("rows", "out.i0.o", "out.i0.i")
    schedule = schedule.parallel("out.i0.o")
    assert "scratch rows: f32[7, 20]" in str(schedule)
    assert "if ((out.i0.i <= 0) | (2 <= rows.i0)): rows[(out.i0.i + rows.i0), rows.i1] =" in str(schedule)
    check_meaning(schedule, (out, [x]), native=True)


def test_stream() -> None:
    schedule = only_out().vectorise("out.i1").stream("out")
    assert "out[out.i0, out.i1] <- max(" in str(schedule)
    program = check_meaning(schedule, CHAIN, native=True)
    assert [stmt.streamed for stmt in walk_stmts(program.body) if isinstance(stmt, Store)] == [True]


@pytest.mark.parametrize("side", [4, 8, 16])
def test_transpose(side: int) -> None:
    x = formulas.tensor("x", 2 * side, side)
    flipped = te.compute("flipped", (side, 2 * side), F32, lambda i, j: x[j, i])
    out = te.compute("out", (side, 2 * side), F32, lambda i, j: flipped[i, j] + 1.0)
    schedule = of((out, [x])).set_scope("flipped", "register").tile(["out.i0", "out.i1"], [side, side])
    schedule = (
        schedule.compute_at("flipped", "out.i1.o").transpose("flipped").reorder("flipped.i1", "flipped.i0")
    )
    schedule = schedule.vectorise("flipped.i0").unroll("flipped.i1").vectorise("out.i1.i").unroll("out.i0.i")
    assert f"x[((out.i1.o * {side}) + flipped.i1), flipped.i0], transposed" in str(schedule)
    text = print_program(check_meaning(schedule, (out, [x]), native=True))
    assert f"transpose flipped[{side}, {side}] in {side} lanes" in text


def test_compute_at_leaves_out_what_does_not_exist() -> None:
    """The box of the last, guarded tile leaves the tensor."""
    task = chain(5, 13)
    schedule = of(task).inline("moved").split("out.i1", 4, "guard").compute_at("scaled", "out.i1.o")
    assert "(((out.i1.o * 4) + scaled.i1) < 13)" in str(schedule)
    check_meaning(schedule, task, native=True)


def test_cache_read() -> None:
    schedule = only_out().split("out.i0", 2).cache_read("x", "out").compute_at("x.of.out", "out.i0.o")
    assert "scratch x.of.out: f32[2, 8]" in str(schedule)
    assert "x.of.out[x.of.out.i0, x.of.out.i1] = x[((out.i0.o * 2) + x.of.out.i0), x.of.out.i1]" in str(
        schedule
    )
    check_meaning(schedule, CHAIN, native=True)


def test_cache_write_into_registers() -> None:
    schedule = only_out().cache_write("out", scope="register")
    schedule = schedule.split("out.i1", 4).vectorise("out.i1.i").compute_at("out.local", "out.i1.o")
    schedule = schedule.vectorise("out.local.i1").parallel("out.i0")
    assert "register out.local: f32[1, 4]" in str(schedule)
    check_meaning(schedule, CHAIN, native=True)


def test_rfactor_then_vectorise_and_combine_across_lanes() -> None:
    schedule = of(SUM).split("out.r0", 4).rfactor("out.r0.i")
    assert "out.local.rf[out.local.rf.i0, out.local.rf.i1] += x[out.local.rf.i0, ((out.r0.o * 4)" in str(
        schedule
    )
    check_meaning(schedule, SUM)
    schedule = schedule.compute_at("out.local", "out.i0").compute_at("out.local.rf", "out.i0")
    schedule = schedule.set_scope("out.local.rf", "register").set_scope("out.local", "register")
    schedule = schedule.reorder("out.r0.o", "out.local.rf.i1").vectorise("out.local.rf.i1")
    schedule = schedule.vectorise("out.r0.i.final").parallel("out.i0")
    text = print_program(check_meaning(schedule, SUM, native=True))
    assert "across_sum(out.local.rf[0:4])" in text


def test_rfactor_of_a_guarded_reduction() -> None:
    task = plain_sum(3, 22)
    schedule = of(task).split("out.r0", 4, "guard").rfactor("out.r0.i")
    schedule = schedule.reorder("out.r0.o", "out.local.rf.i1").vectorise("out.local.rf.i1")
    check_meaning(schedule, task, native=True)


def test_rfactor_of_the_only_loop_leaves_nothing_to_reduce() -> None:
    """A reduction of one element is that element: it needs no beginning, and none stands in the way of a vector."""
    schedule = of(SUM).rfactor("out.r0").split("out.local.rf.i0", 2, "guard").vectorise("out.local.rf.i1")
    assert "out.local.rf[((out.local.rf.i0.o * 2) + out.local.rf.i0.i), out.local.rf.i1] = x[" in str(
        schedule
    )
    check_meaning(schedule, SUM, native=True)


@pytest.mark.parametrize("columns", [32, 37])
def test_a_constant_is_packed_when_the_model_is_linked(columns: int) -> None:
    task = formulas.matmul(6, columns, 5)
    schedule = of(task, constants=[1]).split("product.i1", 16, "shift")
    schedule = schedule.pack("b", [5, 16])
    program = check_meaning(schedule, task, native=True)
    packing = program.packings[1]
    assert packing is not None and packing.packed_shape == (1, -(-columns // 16), 5, 16)
    assert "b[(((product.i1.o * 80) + (product.r0 * 16)) + product.i1.i)]" in print_program(program)


def test_anything_else_is_packed_by_a_stage() -> None:
    task = formulas.matmul(6, 37, 5)
    schedule = of(task).tile(["out.i0", "out.i1"], [3, 16], "shift").reorder("out.i1.o", "out.i0.o")
    schedule = schedule.compute_at("product", "out.i0.o").pack("bias", [16])
    assert "bias.packed" in schedule.stages
    check_meaning(schedule, task, native=True)


def test_a_panel_is_packed_inside_the_loop_that_reads_it() -> None:
    task = formulas.matmul(6, 32, 5)
    schedule = of(task).tile(["out.i0", "out.i1"], [3, 16]).reorder("out.i1.o", "out.i0.o")
    schedule = schedule.compute_at("product", "out.i0.o").pack("b", [5, 16])
    schedule = schedule.compute_at("b.packed", "out.i1.o").parallel("out.i1.o")
    assert "scratch b.packed: f32[1, 1, 5, 16]" in str(schedule)
    check_meaning(schedule, task, native=True)


def test_packing_in_another_order() -> None:
    task = formulas.matmul(6, 32, 4)
    schedule = of(task, constants=[1]).pack("b", [2, 16], order=[2, 0, 3, 1])
    program = check_meaning(schedule, task)
    assert program.packings[1] is not None and program.packings[1].packed_shape == (2, 2, 16, 2)


def test_prefetch_of_all_that_comes_next() -> None:
    """The next block of `b`, a line in each step."""
    task = formulas.matmul(6, 32, 8)
    loops = ["product.i1.o", "product.i0", "product.r0", "product.i1.i"]
    schedule = of(task, constants=[1]).split("product.i1", 8).reorder(*loops).pack("b", [8, 8])
    schedule = schedule.prefetch("product.i1.o", "b", level=2, spread="product.r0")
    text = print_program(check_meaning(schedule, task, native=True))
    position = "((((product.i0 * 128) + (product.i1.o * 64)) + (product.r0 * 16)) + 64)"
    assert f"serial product.r0 < 8:\n        prefetch L2 b[{position}]\n" in text


@pytest.mark.parametrize(("line", "each"), [(64, 2), (128, 1)])
def test_prefetch_of_lines_as_long_as_the_machines(line: int, each: int) -> None:
    task = formulas.matmul(2, 64, 8)
    schedule = of(task).reorder("product.r0", "product.i0", "product.i1")
    schedule = schedule.prefetch("product.r0", "b", spread="product.i0", line=line)
    program = check_meaning(schedule, task)
    assert sum(isinstance(stmt, Prefetch) for stmt in walk_stmts(program.body)) == each
    assert ("line" in str(schedule.trace[-1])) == (line != 64)  # traces of 64-byte lines are as they were


def test_prefetch() -> None:
    schedule = of(MATMUL).reorder("product.r0", "product.i0", "product.i1").prefetch("product.r0", "b", 2)
    program = check_meaning(schedule, MATMUL, native=True)
    (fetch,) = [stmt for stmt in walk_stmts(program.body) if isinstance(stmt, Prefetch)]
    assert "prefetch L1 b[((product.r0 * 8) + 16)]" in print_program(program)
    assert fetch.level == 1


def test_unrolled_and_parallel_loops_reach_the_program() -> None:
    schedule = only_out().unroll("out.i1").parallel("out.i0")
    program = check_meaning(schedule, CHAIN, native=True)
    assert [stmt.kind for stmt in walk_stmts(program.body) if isinstance(stmt, For)] == [
        Kind.PARALLEL,
        Kind.UNROLL,
    ]
    assert program.parallel_extent == 6
    assert program.decisions == "scheduled: inline x 2, unroll, parallel"


def test_nothing_is_changed_in_position() -> None:
    start = of(MATMUL)
    before = str(start)
    changed = start.split("product.i0", 3)
    assert str(start) == before and start.trace == () and str(changed) != before


def test_two_stages_of_one_name_are_told_apart() -> None:
    x, inputs = chain()
    twice = formulas.tensor("x", 5)
    schedule = Schedule.of(x, [*inputs, twice])
    assert [tile.name for tile in schedule.nest.inputs] == ["x", "y", "x_2"]
