"""The pass `pipeline`: programs compute the same, each wait is needed, and what is not legal is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tests.loops.passes import programs as p
from tests.loops.passes.programs import F32, LANES, ROWS, TILE, WIDTH, k, t, v
from tilewright import te
from tilewright.errors import PipelineError, ScheduleError
from tilewright.loops.interpret import UnorderedAccess, interpret_program
from tilewright.loops.ir import (
    Await,
    Block,
    Buffer,
    Commit,
    Copy,
    For,
    If,
    Kind,
    Program,
    Scope,
    Stmt,
    Store,
    block,
    local_buffers,
    walk_stmts,
)
from tilewright.loops.passes.load_and_use import LoadAndUse, load_and_use, pipelinable, pipelines
from tilewright.loops.passes.pipeline import pipeline
from tilewright.loops.text import print_program
from tilewright.loops.verify import verify_program

# -- what it computes -------------------------------------------------------------------------------------------------


def checked(program: Program) -> Program:
    verify_program(program)
    np.testing.assert_array_equal(interpret_program(program, [p.data()]), p.expected())
    return program


def test_what_is_pipelined_is_told_and_why_the_rest_is_not() -> None:
    unpipelined = pipelines(p.halves(), {})
    assert "not pipelined: tile, held (could be)" in unpipelined
    words = pipelines(p.halves(), {"tile": 3, "held": 1})
    assert words.startswith("pipelined: tile x 3; not pipelined: held (could be); not pipelined: acc (it is ")


@pytest.mark.parametrize("stages", range(1, ROWS + 2))
def test_any_number_of_stages_computes_the_same(stages: int) -> None:
    program = checked(pipeline(p.sums(), {"tile": stages}))
    assert next(b for b in local_buffers(program) if b.name == "tile").size == stages * WIDTH


def test_the_pipelined_loop_is_as_the_picture_shows() -> None:
    text = print_program(pipeline(p.sums(), {"tile": 3}))
    body = text[text.index("serial k") :]
    order = ["await all but 1", "copy tile", "acc[", "commit", "await all but 0"]
    positions = [body.index(each) for each in order]
    assert positions == sorted(positions)
    assert text.index("serial k") > text.index("commit"), "the prologue is before the loop"
    assert "(k + 2) < 5" in body and "(k + 2) % 3" in body and "(k % 3)" in body


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_two_levels_compute_the_same(stages: int, fused: bool) -> None:
    program = checked(pipeline(p.halves(), {"tile": stages, "held": 2}, fused=fused))
    text = print_program(program)
    inside = text[text.index("serial k") :]
    # Fused: the registers of the next tile are loaded inside the loop, so its first are loaded before the loop.
    before = text[: text.index("serial k")]
    assert ("held[" in before.split("parallel")[-1].split("acc[")[-1]) == (fused and stages > 1)
    assert "unroll i" not in inside, "registers have no addresses: the inner loop is written out"


def test_registers_of_a_long_loop_are_loaded_in_turns() -> None:
    """More iterations than are written out: the loop goes on in steps of the stages, and a rest follows."""
    rows = 71
    long = te.Var("k", rows)
    x = Buffer("x", F32, rows * WIDTH)
    load = Store(p.HELD, v, te.Load(x, (long * WIDTH + t * LANES + v,)))
    use = Store(p.ACC, v, te.call("add", te.Load(p.ACC, (v,)), te.Load(p.HELD, (v,))))
    body = For(long, Kind.SERIAL, block(p.lanes(load), p.lanes(use)))
    stmts = block(p.lanes(Store(p.ACC, v, te.const(0.0, F32))), body)
    program = Program("long", (x, p.OUT), block(p.threads(stmts), p.written()))
    values = np.random.default_rng(0).integers(-8, 8, (rows, WIDTH)).astype(np.float32)
    for stages in (2, 3, 4):
        made = pipeline(program, {"held": stages})
        verify_program(made)
        assert f"serial k < {rows // stages}" in print_program(made)
        np.testing.assert_array_equal(interpret_program(made, [values]), values.sum(0))


def test_a_loop_of_registers_in_another_loop_begins_anew() -> None:
    """Its prologue and its rest are written out for one loop: the outer one does not count with it."""
    for rows in (5, 71):
        outer, long = te.Var("o", 3), te.Var("k", rows)
        x = Buffer("x", F32, 3 * rows * WIDTH)
        load = Store(p.HELD, v, te.Load(x, ((outer * rows + long) * WIDTH + t * LANES + v,)))
        use = Store(p.ACC, v, te.call("add", te.Load(p.ACC, (v,)), te.Load(p.HELD, (v,))))
        body = For(outer, Kind.SERIAL, For(long, Kind.SERIAL, block(p.lanes(load), p.lanes(use))))
        stmts = block(p.lanes(Store(p.ACC, v, te.const(0.0, F32))), body)
        program = Program("nested", (x, p.OUT), block(p.threads(stmts), p.written()))
        values = np.random.default_rng(0).integers(-8, 8, (3 * rows, WIDTH)).astype(np.float32)
        for stages in (2, 3):
            made = pipeline(program, {"held": stages})
            verify_program(made)
            np.testing.assert_array_equal(interpret_program(made, [values]), values.sum(0))


def test_stages_of_one_change_nothing() -> None:
    assert pipeline(p.sums(), {"tile": 1}) == p.sums()


# -- outer loops ------------------------------------------------------------------------------------------------------


def loop_named(program: Program, name: str) -> For:
    return next(stmt for stmt in walk_stmts(program.body) if isinstance(stmt, For) and stmt.var.name == name)


def thrice(program: Program) -> Program:
    verify_program(program)
    np.testing.assert_array_equal(interpret_program(program, [p.data()]), 3 * p.expected())
    return program


@pytest.mark.parametrize("stages", [2, 3, 4, 7, 16])
def test_a_pipeline_goes_on_in_the_next_iteration_of_an_outer_loop(stages: int) -> None:
    """One prologue and one flush, outside of both loops; also with more stages than the inner loop has iterations."""
    program = thrice(pipeline(p.carried(), {"tile": stages}))
    waits = [stmt for stmt in walk_stmts(loop_named(program, "o").body) if isinstance(stmt, Await)]
    assert waits == [Await(stages - 2)], "it does not drain between two iterations of the outer loop"
    if stages < ROWS:
        assert f"((k + {stages - 1}) // 5)" in print_program(program), "the outer index carries"


def test_more_stages_than_iterations_of_both_loops() -> None:
    refused(p.carried(), "17 stages, and loop k has 15 iterations", 17)


def test_indices_carry_over_several_loops() -> None:
    """Rows of a matrix in three loops, of which the outer ones hold no other statement."""
    a, b, c = te.Var("a", 2), te.Var("b", 3), te.Var("c", 4)
    x = Buffer("x", F32, 24 * WIDTH)
    row = (a * 3 + b) * 4 + c
    copy = p.threads(Copy(TILE, t * LANES, x, row * WIDTH + t * LANES, LANES))
    inner: Stmt = block(Await(0), copy, Commit(), Await(0), p.added())
    for var in (c, b, a):
        inner = For(var, Kind.SERIAL, inner)
    program = Program("rows", (x, p.OUT), block(p.cleared(), inner, p.written()))
    values = np.random.default_rng(0).integers(-8, 8, (24, WIDTH)).astype(np.float32)
    for stages in (2, 3, 6, 9):
        made = pipeline(program, {"tile": stages})
        verify_program(made)
        np.testing.assert_array_equal(interpret_program(made, [values]), np.roll(values.sum(0), -LANES))


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_both_levels_are_counted_over_an_outer_loop(stages: int) -> None:
    inner = loop_named(p.halves(), "k")
    outer = For(p.OUTER, Kind.SERIAL, inner)
    program = p.program(p.cleared(), outer, p.written())
    made = thrice(pipeline(program, {"tile": stages, "held": 2}))
    before = print_program(made).partition("serial o")[0]
    assert "held[" in before, "the inner prologue is before both loops"


def test_a_loop_beside_other_statements_is_begun_anew() -> None:
    """The outer loop writes what the inner one copies: no copy may start before that."""
    source = Buffer("source", F32, WIDTH, Scope.SCRATCH)
    o = p.OUTER
    made_there = p.threads(p.lanes(Store(source, t * LANES + v, te.cast(o, F32))))
    fill = p.threads(p.lanes(Store(TILE, t * LANES + v, te.Load(source, (t * LANES + v,)))))
    inner = p.loop(Await(0), fill, Commit(), Await(0), p.added())
    program = p.program(p.cleared(), For(o, Kind.SERIAL, block(made_there, inner)), p.written())
    assert not load_and_use(program, "tile", synchronous=True).carried
    for stages in (2, 3):
        made = pipeline(program, {"tile": stages}, synchronous=["tile"])
        verify_program(made)
        assert Await(0) in walk_stmts(loop_named(made, "o").body), "it drains in each iteration"
        np.testing.assert_array_equal(interpret_program(made, [p.data()]), np.full(WIDTH, ROWS * (0 + 1 + 2)))


def test_a_pipeline_is_not_counted_over_a_loop_that_decides_whether_it_fills() -> None:
    o = p.OUTER
    some = te.call("lt", o, te.as_index(2))
    stmts = Await(0), If(some, p.copies()), Commit(), Await(0), If(some, p.added())
    program = p.program(p.cleared(), For(o, Kind.SERIAL, p.loop(*stmts)), p.written())
    assert not load_and_use(program, "tile").carried
    made = pipeline(program, {"tile": 3})
    verify_program(made)
    np.testing.assert_array_equal(interpret_program(made, [p.data()]), 2 * p.expected())


# -- the analysis -----------------------------------------------------------------------------------------------------


def test_the_loop_the_producers_and_the_consumers_are_found() -> None:
    found = load_and_use(p.halves(), "tile")
    assert found.loop.var == k and found.sources == {p.X} and not found.around
    assert found.producers == (1,) and found.consumers == (4,)
    inner = load_and_use(p.halves(), "held")
    assert inner.loop.var.name == "i" and inner.sources == {TILE} and inner.around == (found.loop,)


def test_every_buffer_has_a_loop_or_a_reason() -> None:
    found = pipelinable(p.halves())
    assert isinstance(found["tile"], LoadAndUse) and isinstance(found["held"], LoadAndUse)
    assert isinstance(found["acc"], PipelineError)


# -- waits ------------------------------------------------------------------------------------------------------------


def without_wait(stmt: Stmt, which: int) -> Stmt:
    count = iter(range(1000))

    def visit(each: Stmt) -> Stmt:
        if isinstance(each, For):
            return For(each.var, each.kind, visit(each.body))
        if isinstance(each, Block):
            return block(
                *(visit(s) for s in each.stmts if not (isinstance(s, Await) and next(count) == which))
            )
        return each

    return visit(stmt)


@pytest.mark.parametrize("made", [p.sums, p.halves], ids=["one level", "two levels"])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_missing_wait_is_found(made: Callable[[], Program], stages: int) -> None:
    """All waits but the flush, behind which nothing reads what is in flight."""
    names = {"tile": stages, **({"held": 2} if made is p.halves else {})}
    program = pipeline(made(), names)
    waits = sum(isinstance(stmt, Await) for stmt in walk_stmts(program.body))
    for which in range(waits - 1):
        broken = replace(program, body=without_wait(program.body, which))
        with pytest.raises(UnorderedAccess):
            interpret_program(broken, [p.data()])


def test_a_wait_for_too_little_is_found() -> None:
    program = pipeline(p.sums(), {"tile": 3})

    def weaker(stmt: Stmt) -> Stmt:
        if isinstance(stmt, For):
            return For(stmt.var, stmt.kind, weaker(stmt.body))
        if isinstance(stmt, Block):
            return Block(tuple(map(weaker, stmt.stmts)))
        return Await(2) if stmt == Await(1) else stmt

    with pytest.raises(UnorderedAccess, match="before its copy was awaited"):
        interpret_program(replace(program, body=weaker(program.body)), [p.data()])


# -- refusals ---------------------------------------------------------------------------------------------------------


def refused(program: Program, why: str, stages: int = 2, buffer: str = "tile", **options: int) -> None:
    with pytest.raises(PipelineError, match=why) as caught:
        pipeline(program, {buffer: stages}, **options)  # type: ignore[arg-type]
    assert isinstance(caught.value, ScheduleError) and buffer in str(caught.value)


def test_more_stages_than_memory_holds() -> None:
    refused(p.sums(), "3 stages need 384 bytes of scratch memory, of 300", 3, capacity=300)
    checked(pipeline(p.sums(), {"tile": 2}, capacity=300))


def test_more_stages_than_iterations() -> None:
    refused(p.sums(), "7 stages, and loop k has 5 iterations", 7)


def test_no_stage_at_all() -> None:
    refused(p.sums(), "0 stages", 0)


def test_a_synchronous_producer() -> None:
    doubled = te.call("mul", te.Load(p.X, (k * WIDTH + t * LANES + v,)), te.const(2.0, F32))
    fill = p.threads(p.lanes(Store(TILE, t * LANES + v, doubled)))
    program = p.program(p.cleared(), p.loop(Await(0), fill, Commit(), Await(0), p.added()), p.written())
    refused(program, "filled by a synchronous store")
    made = pipeline(program, {"tile": 3}, synchronous=["tile"])
    verify_program(made)
    np.testing.assert_array_equal(interpret_program(made, [p.data()]), 2 * p.expected())


def test_a_buffer_with_an_alias() -> None:
    view = TILE.read_as(te.const(0, p.DType.I32).dtype)
    index = te.cast(te.Load(view, (te.as_index(0),)), p.DType.I64)
    use = p.threads(p.lanes(Store(p.ACC, v, te.Load(TILE, (te.call("min", index, 3),)))))
    refused(
        p.program(p.cleared(), p.loop(Await(0), p.copies(), Commit(), Await(0), use), p.written()), "alias"
    )


def test_a_load_that_depends_on_the_iteration_before() -> None:
    """Which row is copied, the row before says."""
    row = Buffer("row", p.DType.I64, 1, Scope.REGISTER)
    said = te.call("min", te.call("max", te.Load(row, (te.as_index(0),)), 0), ROWS - 1)
    following = te.cast(te.Load(TILE, (te.as_index(0),)), p.DType.I64)
    read = p.threads(Store(row, te.as_index(0), following))
    begin = p.threads(Store(row, te.as_index(0), te.as_index(0)))
    body = p.loop(Await(0), p.copies(said), Commit(), Await(0), p.added(), read)
    refused(
        p.program(p.cleared(), begin, body, p.written()),
        "depend on row, which loop k wrote in the previous iteration",
    )


def test_data_of_the_iteration_before() -> None:
    body = p.loop(p.added(), Await(0), p.copies(), Commit(), Await(0))
    refused(p.program(p.cleared(), body, p.written()), "reads it before it fills it")


def test_a_buffer_that_is_filled_once() -> None:
    stmts = p.copies(te.as_index(0)), Commit(), Await(0), p.loop(p.added())
    refused(p.program(p.cleared(), *stmts, p.written()), "no sequential loop")


def test_a_buffer_that_is_read_behind_the_loop() -> None:
    body = p.loop(Await(0), p.copies(), Commit(), Await(0), p.added())
    refused(p.program(p.cleared(), body, p.added(), p.written()), "read outside of loop k")


def test_a_buffer_that_some_iterations_fill() -> None:
    some = p.threads(If(te.call("lt", k, 3), Copy(TILE, t * LANES, p.X, k * WIDTH + t * LANES, LANES)))
    refused(
        p.program(p.cleared(), p.loop(Await(0), some, Commit(), Await(0), p.added()), p.written()),
        "only some iterations",
    )


def test_a_loop_of_one_iteration() -> None:
    once = te.Var("k", 1)
    body = For(once, Kind.SERIAL, block(Await(0), p.copies(once), Commit(), Await(0), p.added()))
    refused(p.program(p.cleared(), body, p.written()), "one iteration")


OTHER = Buffer("other", F32, WIDTH, Scope.SCRATCH)


def two_buffers() -> Program:
    second = p.threads(Copy(OTHER, t * LANES, p.X, k * WIDTH + t * LANES, LANES))
    body = p.loop(Await(0), p.copies(), second, Commit(), Await(0), p.added(), p.added(OTHER))
    return p.program(p.cleared(), body, p.written())


def test_waits_that_differ() -> None:
    refused(two_buffers(), "other is copied in the same loop and is not pipelined with it")
    with pytest.raises(PipelineError, match="their waits differ"):
        pipeline(two_buffers(), {"tile": 2, "other": 3})
    made = pipeline(two_buffers(), {"tile": 3, "other": 3})
    verify_program(made)
    np.testing.assert_array_equal(interpret_program(made, [p.data()]), 2 * p.expected())


def test_copies_in_flight_when_the_loop_begins() -> None:
    early = p.threads(Copy(OTHER, t * LANES, p.X, t * LANES, LANES))
    body = p.loop(Await(0), p.copies(), Commit(), Await(0), p.added())
    late = p.added(OTHER)
    refused(p.program(p.cleared(), early, Commit(), body, late, p.written()), "copies to other are in flight")
    made = pipeline(p.program(p.cleared(), early, Commit(), Await(0), body, late, p.written()), {"tile": 3})
    verify_program(made)
    interpret_program(made, [p.data()])


def test_a_buffer_that_does_not_exist() -> None:
    with pytest.raises(PipelineError, match="the buffer must be one of acc, tile, got y"):
        pipeline(p.sums(), {"y": 2})


def test_two_loops_that_fill_one_buffer_are_refused() -> None:
    again = te.Var("again", ROWS)
    second = For(again, Kind.SERIAL, block(Await(0), p.copies(again), Commit(), Await(0), p.added()))
    first = p.loop(Await(0), p.copies(), Commit(), Await(0), p.added())
    refused(p.program(p.cleared(), first, second, p.written()), "two loops fill it")


def test_a_buffer_that_nothing_reads_is_refused() -> None:
    unread = p.program(p.cleared(), p.loop(Await(0), p.copies(), Commit(), Await(0)), p.written())
    refused(unread, "nothing reads it")


def test_a_wait_in_an_inner_loop_or_a_branch_is_refused() -> None:
    inner = For(te.Var("i", 2), Kind.SERIAL, block(Await(0), p.added()))
    branch = If(te.call("lt", k, 2), block(Await(0)))
    for waits in (inner, branch):
        made = p.program(p.cleared(), p.loop(p.copies(), Commit(), waits, Await(0), p.added()), p.written())
        refused(made, "a loop or branch inside loop k waits for copies")


def test_one_loop_fills_buffers_in_registers_or_in_memory() -> None:
    load = p.threads(p.lanes(Store(p.HELD, v, te.Load(p.X, (k * WIDTH + t * LANES + v,)))))
    body = (Await(0), p.copies(), Commit(), load, Await(0), p.added(), p.added(p.HELD, v))
    both = p.program(p.cleared(), p.loop(*body), p.written())
    with pytest.raises(PipelineError, match="loop k fills buffers in registers and in memory"):
        pipeline(both, {"tile": 2, "held": 2})
    for one in ("tile", "held"):
        made = pipeline(both, {one: 2})
        verify_program(made)
        np.testing.assert_array_equal(interpret_program(made, [p.data()]), p.expected() + p.data().sum(0))
