"""Pipelining on processors: programs compute the same, and only loads that need it are prefetched."""

from __future__ import annotations

import numpy as np
import pytest

from tests.codegen.llvm.native import run_program
from tests.loops import formulas
from tests.loops.schedule.examples import check_meaning
from tests.space.sketches.meaning import check_meaning as check_config
from tests.space.sketches.tasks import EXAMPLES
from tilewright import te
from tilewright.dtypes import DType
from tilewright.errors import PipelineError
from tilewright.graph.ir import Graph, TensorType, input_node
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.hw import host
from tilewright.loops.interpret import interpret_program
from tilewright.loops.ir import Await, Commit, Prefetch, Program, local_buffers, walk_stmts
from tilewright.loops.passes.cpu_pipeline import loads_ahead, prefetched
from tilewright.loops.schedule import Schedule
from tilewright.loops.text import print_program
from tilewright.loops.verify import verify_program
from tilewright.space.sketches import derive
from tilewright.space.sketches.applied import AHEAD, ITERATIONS
from tilewright.space.template import Work

F32, I64 = DType.F32, DType.I64


def bags(rows: int = 50, columns: int = 8, items: int = 12) -> Program:
    table, index = te.Tensor("table", (rows, columns), F32), te.Tensor("index", (3, items), I64)
    (r,) = te.reduce_axes([items])

    def element(i: te.Expr, j: te.Expr) -> te.Expr:
        row = te.call("min", te.call("max", index[i, r], 0), rows - 1)
        return te.reduce_over("sum", table[row, j], [r])

    out = te.compute("out", (3, columns), F32, element)
    schedule = Schedule.of(out, [table, index]).reorder("out.local.i0", "out.r0", "out.local.i1")
    return schedule.vectorise("out.local.i1").program()


def prefetches(program: Program) -> list[Prefetch]:
    return [stmt for stmt in walk_stmts(program.body) if isinstance(stmt, Prefetch)]


@pytest.mark.parametrize("ahead", [1, 4, 7])
def test_what_data_name_is_prefetched_from_where_the_data_end(ahead: int) -> None:
    program = bags()
    made = prefetched(program, ahead)
    verify_program(made)
    assert len(prefetches(made)) == 1
    assert f"min((out.r0 + {ahead}), 11)" in print_program(made), "indices are read, so they must exist"
    rng = np.random.default_rng(0)
    given = [rng.integers(-3, 4, (50, 8)).astype(np.float32), rng.integers(0, 50, (3, 12))]
    want = given[0][given[1]].sum(1).reshape(-1)
    np.testing.assert_array_equal(interpret_program(made, given), want)
    np.testing.assert_array_equal(run_program(made, given, numerics="strict"), want)


def ragged(items: int = 36) -> Program:
    """Rows of a table at data-dependent addresses, in blocks of eight of which the last is not whole."""
    table, index = te.Tensor("table", (50, 8), F32), te.Tensor("index", (items,), I64)
    (r,) = te.reduce_axes([items])
    row = te.call("min", te.call("max", index[r], 0), 49)
    out = te.compute("out", (8,), F32, lambda j: te.reduce_over("sum", table[row, j], [r]))
    schedule = Schedule.of(out, [table, index]).split("out.r0", 8, "guard")
    return schedule.reorder("out.r0.o", "out.r0.i", "out.local.i0").vectorise("out.local.i0").program()


@pytest.mark.parametrize("ahead", [1, 4, 7])
def test_an_index_beyond_the_end_is_not_read_ahead(ahead: int) -> None:
    """The branch around the load is around its prefetch, too."""
    made = prefetched(ragged(), ahead)
    verify_program(made)
    assert len(prefetches(made)) == 1
    rng = np.random.default_rng(0)
    given = [rng.integers(-3, 4, (50, 8)).astype(np.float32), rng.integers(0, 50, 36)]
    np.testing.assert_array_equal(run_program(made, given, numerics="strict"), given[0][given[1]].sum(0))


def test_an_index_that_a_condition_keeps_inside_is_not_read_ahead_without_it() -> None:
    """What a padded gather reads, it reads under a condition on the loop."""
    table, index = te.Tensor("table", (50, 8), F32), te.Tensor("index", (12,), I64)
    (r,) = te.reduce_axes([16])

    def element(j: te.Expr) -> te.Expr:
        inside = te.all_of([te.call("le", te.as_index(2), r), te.call("lt", r, te.as_index(14))])
        assert inside is not None
        row = te.call("min", te.call("max", index[r - 2], 0), 49)
        return te.reduce_over("sum", te.select(inside, table[row, j], te.const(0.0, F32)), [r])

    out = te.compute("out", (8,), F32, element)
    program = (
        Schedule.of(out, [table, index]).reorder("out.r0", "out.local.i0").vectorise("out.local.i0").program()
    )
    rng = np.random.default_rng(0)
    given = [rng.integers(-3, 4, (50, 8)).astype(np.float32), rng.integers(0, 50, 12)]
    for ahead in (1, 4):
        made = prefetched(program, ahead)
        verify_program(made)
        assert len(prefetches(made)) == 1
        got = run_program(made, given, numerics="strict")
        np.testing.assert_array_equal(got, given[0][given[1]].sum(0))


def test_an_index_that_the_program_computes_is_not_read_ahead() -> None:
    """A later iteration has not stored it yet."""
    table, index = te.Tensor("table", (50, 8), F32), te.Tensor("index", (12,), I64)
    rows = te.compute("rows", (12,), I64, lambda i: te.call("min", te.call("max", index[i], 0), 49))
    (r,) = te.reduce_axes([12])
    out = te.compute("out", (8,), F32, lambda j: te.reduce_over("sum", table[rows[r], j], [r]))
    schedule = Schedule.of(out, [table, index]).reorder("out.r0", "out.local.i0").vectorise("out.local.i0")
    assert loads_ahead(schedule.inline("rows").program()) != []
    assert loads_ahead(schedule.compute_at("rows", "out.r0").program()) == []


def test_a_row_of_several_lines_is_prefetched_whole() -> None:
    made = prefetched(bags(columns=64), 4, line=64)
    assert len(prefetches(made)) == 4
    assert made.decisions.endswith("4 prefetches 4 iterations ahead")


def test_what_the_hardware_finds_is_left_to_it() -> None:
    near = Schedule.of(*formulas.matmul(6, 8, 4)).program()
    assert loads_ahead(near) == [] and prefetched(near, 4) is near
    columns = Schedule.of(*formulas.matmul(6, 512, 40)).split("product.i1", 8)
    columns = columns.reorder("product.i1.o", "product.i0", "product.r0", "product.i1.i")
    wide = columns.vectorise("product.i1.i").program()
    (found,) = loads_ahead(wide)
    assert found.load.source.name == "b" and found.loop.var.name == "product.r0" and not found.by_data
    assert prefetched(wide, 40) is wide, "the loop has no iteration so far ahead"


def test_what_somebody_prefetches_is_left_to_them() -> None:
    task = formulas.matmul(6, 512, 40)
    schedule = Schedule.of(*task).reorder("product.i0", "product.i1", "product.r0")
    assert loads_ahead(schedule.program()) != []
    assert loads_ahead(schedule.prefetch("product.r0", "b").program()) == []


@pytest.mark.parametrize("stages", [2, 3])
def test_a_tile_is_packed_ahead(stages: int) -> None:
    task = formulas.matmul(8, 16, 32)
    schedule = Schedule.of(*task).tile(["out.i0", "out.i1"], [4, 8]).compute_at("product", "out.i1.o")
    schedule = schedule.split("product.r0", 8).reorder(
        "product.r0.o", "product.i0", "product.i1", "product.r0.i"
    )
    schedule = schedule.cache_read("b", "product").compute_at("b.of.product", "product.r0.o")
    program = check_meaning(schedule.pipeline("b.of.product", stages), task, native=True)
    assert next(b for b in local_buffers(program) if b.name == "b.of.product").size == stages * 64
    assert not any(isinstance(stmt, Await | Commit) for stmt in walk_stmts(program.body))
    assert f"pipelined: b.of.product x {stages}; not pipelined: product (it is filled by" in program.decisions


def test_a_tile_that_is_filled_once_is_not_packed_ahead() -> None:
    task = formulas.matmul(8, 16, 32)
    schedule = Schedule.of(*task).cache_read("b", "product")
    with pytest.raises(PipelineError, match="no sequential loop fills it again and again"):
        schedule.pipeline("b.of.product", 2)


def gather_task() -> Task:
    table = input_node(0, TensorType((40, 16), DType.F32), "table")
    index = input_node(1, TensorType((6, 20), DType.I64), "index")
    rows = apply("take", table, index, axis=0)
    return Task(Graph((table, index), (apply("sum", rows, axes=(1,), keepdims=False),)))


def test_gathers_have_a_knob_and_other_tasks_have_none() -> None:
    found = derive(Work(gather_task(), host()))
    assert found
    for applied in found:
        (knob,) = [each for each in applied.space.knobs if each.name == AHEAD]
        assert knob.choices == ITERATIONS and applied.space.default()[AHEAD] == 0
    for applied in derive(Work(EXAMPLES[next(iter(EXAMPLES))](), host())):
        assert all(each.name != AHEAD for each in applied.space.knobs)


@pytest.mark.parametrize("ahead", ITERATIONS)
def test_every_choice_of_the_knob_computes_the_task(ahead: int) -> None:
    task = gather_task()
    for applied in derive(Work(task, host())):
        config = next(each for each in applied.space.configs() if each[AHEAD] == ahead)
        verify_program(applied.program(config))
        check_config(applied, config, task)
