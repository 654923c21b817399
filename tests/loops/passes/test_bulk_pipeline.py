"""Loops whose tiles the tensor copy engine brings: rings of slots, roles, and what is found or refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tilewright import te
from tilewright.dtypes import DType
from tilewright.errors import PipelineError, VerificationError
from tilewright.hw.bulk_copies import Box
from tilewright.loops.interpret import UnorderedAccess, interpret_program
from tilewright.loops.ir import (
    Await,
    Block,
    BoxCopy,
    Buffer,
    Combine,
    Commit,
    Copy,
    Fill,
    Filled,
    For,
    If,
    Kind,
    Program,
    Release,
    Roles,
    Scope,
    SourceMatrix,
    Stmt,
    Store,
    block,
    walk_stmts,
)
from tilewright.loops.passes.pipeline import pipeline
from tilewright.loops.text import print_program
from tilewright.loops.verify import verify_program

F32 = DType.F32
STEPS, ROWS, COLUMNS, THREADS = 5, 8, 32, 32
HEIGHT, WIDTH = STEPS * ROWS - 3, COLUMNS - 4  # the last boxes reach beyond the matrix

X = Buffer("x", F32, HEIGHT * WIDTH)
OUT = Buffer("out", F32, THREADS)
TILE = Buffer("tile", F32, ROWS * COLUMNS, Scope.SCRATCH)
ACC = Buffer("acc", F32, 1, Scope.REGISTER)
k, t, r = te.Var("k", STEPS), te.Var("t", THREADS), te.Var("r", ROWS)
FIRST = te.as_index(0)


def threads(stmt: Stmt) -> Stmt:
    return For(t, Kind.THREAD, stmt)


def box(row: te.Expr = k) -> BoxCopy:
    matrix = SourceMatrix(X, HEIGHT, WIDTH, WIDTH)
    return BoxCopy(TILE, FIRST, matrix, row * ROWS, FIRST, Box(F32, ROWS, COLUMNS))


def added() -> Stmt:
    """A thread adds up a column, which the chunks of a row hide in another place of each row."""
    at = r * COLUMNS + te.call("xor", t // 4, r) * 4 + t % 4
    total = te.call("add", te.Load(ACC, (FIRST,)), te.Load(TILE, (at,)))
    return threads(For(r, Kind.UNROLL, Store(ACC, FIRST, total)))


def cleared() -> Stmt:
    return threads(Store(ACC, FIRST, te.const(0.0, F32)))


def written() -> Stmt:
    return threads(Store(OUT, t, te.Load(ACC, (FIRST,))))


def sums(*around: te.Var, row: te.Expr = k) -> Program:
    body: Stmt = For(k, Kind.SERIAL, block(box(row), added()))
    for var in around:
        body = For(var, Kind.SERIAL, body)
    return Program("sums", (X, OUT), block(cleared(), body, written()))


def data() -> np.ndarray:
    return np.random.default_rng(0).integers(-8, 8, (HEIGHT, WIDTH)).astype(np.float32)


def checked(program: Program, times: int = 1) -> Program:
    verify_program(program)
    expected = np.zeros(THREADS, np.float32)
    expected[:WIDTH] = times * data().sum(0)
    np.testing.assert_array_equal(interpret_program(program, [data()]), expected)
    return program


# -- what it computes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("specialise", [False, True], ids=["one role", "roles"])
@pytest.mark.parametrize("stages", range(2, STEPS + 2))
def test_any_number_of_stages_computes_the_same(stages: int, specialise: bool) -> None:
    program = checked(pipeline(sums(), {"tile": stages}, specialise=specialise))
    assert any(isinstance(stmt, Roles) for stmt in walk_stmts(program.body)) == specialise


def test_the_loop_is_as_the_picture_shows() -> None:
    text = print_program(pipeline(sums(), {"tile": 3}))
    body = text[text.index("serial k") :]
    order = ["await k.ring, k", "fill k.ring[3], (k + 2)", "acc[", "release k.ring, k"]
    positions = [body.index(each) for each in order]
    assert positions == sorted(positions) and "(k + 2) < 5" in body
    assert text.count("fill") == 3, "the prologue fills two slots"
    assert "await all" not in text, "no barrier of all threads is in the loop"


def test_roles_are_as_the_picture_shows() -> None:
    text = print_program(pipeline(sums(), {"tile": 3}, specialise=True, registers=(40, 232)))
    producer, consumer = text[text.index("producer with 40") :].split("consumer with 232 registers:")
    assert "serial k < 5:\n      fill k.ring[3], k" in producer and "acc" not in producer
    assert "fill" not in consumer and consumer.index("acc[0] = 0.0") < consumer.index("await k.ring, k")


@pytest.mark.parametrize("specialise", [False, True], ids=["one role", "roles"])
def test_an_outer_loop_is_counted_with_it(specialise: bool) -> None:
    outer = te.Var("o", 3)
    program = pipeline(sums(outer, row=(k + outer) % STEPS), {"tile": 3}, specialise=specialise)
    checked(program, 3)


@pytest.mark.parametrize("specialise", [False, True], ids=["one role", "roles"])
def test_a_loop_that_begins_anew_counts_on(specialise: bool) -> None:
    """Barriers know parities: the second time, the loop's numbers begin where they ended."""
    outer = te.Var("o", 3)
    body = For(outer, Kind.SERIAL, block(sums().body.stmts[1], added_to_itself()))  # type: ignore[union-attr]
    program = replace(sums(), body=block(cleared(), body, written()))
    made = pipeline(program, {"tile": 3}, specialise=specialise)
    verify_program(made)
    assert "(o * 5)" in print_program(made)
    expected = np.zeros(THREADS, np.float32)
    for _ in range(3):
        expected[:WIDTH] = 2 * (expected[:WIDTH] + data().sum(0))
    np.testing.assert_array_equal(interpret_program(made, [data()]), expected)


def added_to_itself() -> Stmt:
    held = te.Load(ACC, (FIRST,))
    return threads(Store(ACC, FIRST, te.call("add", held, held)))


# -- what is found ----------------------------------------------------------------------------------------------------


def without(stmt: Stmt, kind: type, change: Callable[[Stmt], Stmt] = lambda stmt: Block(())) -> Stmt:
    if isinstance(stmt, kind):
        return change(stmt)
    if isinstance(stmt, For):
        return For(stmt.var, stmt.kind, without(stmt.body, kind, change))
    if isinstance(stmt, Block):
        return Block(tuple(without(each, kind, change) for each in stmt.stmts))
    if isinstance(stmt, If):
        return If(stmt.cond, without(stmt.then, kind, change))
    if isinstance(stmt, Roles):
        return replace(
            stmt,
            producer=without(stmt.producer, kind, change),
            consumer=without(stmt.consumer, kind, change),
        )
    return stmt


def found(program: Program, why: str) -> None:
    with pytest.raises(UnorderedAccess, match=why):
        interpret_program(program, [data()])


@pytest.mark.parametrize("specialise", [False, True], ids=["one role", "roles"])
def test_a_missing_wait_or_release_is_found(specialise: bool) -> None:
    made = pipeline(sums(), {"tile": 3}, specialise=specialise)
    found(replace(made, body=without(made.body, Filled)), "before its copy was awaited")
    why = "the roles of a block wait for each other" if specialise else "a slot that was not released"
    found(replace(made, body=without(made.body, Release)), why)


def test_a_slot_that_is_released_before_it_is_read_is_found() -> None:
    made = pipeline(sums(), {"tile": 2}, specialise=True)

    def early(stmt: Stmt) -> Stmt:
        assert isinstance(stmt, Filled)
        return block(stmt, Release(stmt.ring, stmt.number))

    found(
        replace(made, body=without(without(made.body, Release), Filled, early)), "before its copy was awaited"
    )


def test_waits_out_of_order_are_found() -> None:
    made = pipeline(sums(), {"tile": 3}, specialise=True)
    later = without(made.body, Filled, lambda stmt: replace(stmt, number=stmt.number + 1))  # type: ignore[union-attr]
    found(replace(made, body=later), "iteration 1 of k.ring is awaited, and the next one is 0")
    early = without(made.body, Release, lambda stmt: replace(stmt, number=stmt.number + 1))  # type: ignore[union-attr]
    found(replace(made, body=early), "iteration 1 of k.ring is released, and the next one is 0")


def test_copies_that_nobody_waits_for_are_found() -> None:
    made = pipeline(sums(), {"tile": 3})
    extra = next(stmt for stmt in walk_stmts(made.body) if isinstance(stmt, Fill))
    more = replace(extra, number=te.as_index(STEPS))
    found(replace(made, body=block(made.body, more)), "nothing waits for the copies of iteration 5")


# -- refusals ---------------------------------------------------------------------------------------------------------


def refused(program: Program, why: str, stages: int = 2, **options: object) -> None:
    with pytest.raises(PipelineError, match=why):
        pipeline(program, {"tile": stages}, **options)  # type: ignore[arg-type]


def test_what_is_not_legal_is_refused() -> None:
    branch = If(te.call("lt", k, te.as_index(3)), box())
    refused(
        replace(sums(), body=block(cleared(), For(k, Kind.SERIAL, block(branch, added())), written())),
        "only some iterations of loop k fill it",
    )
    outer = te.Var("o", 3)
    some = If(te.call("lt", outer, te.as_index(2)), For(k, Kind.SERIAL, block(box(), added())))
    refused(
        replace(sums(), body=block(cleared(), For(outer, Kind.SERIAL, some), written())),
        "a branch decides whether it is filled",
    )
    refused(
        replace(sums(), body=block(cleared(), For(k, Kind.SERIAL, block(box(), box(), added())), written())),
        "several statements fill it",
    )
    refused(sums(), "3 stages need 3072 bytes of scratch memory, of 2048", 3, capacity=2048)
    refused(sums(), "7 stages, and loop k has 5 iterations", 7)


def test_two_kinds_of_copies_in_one_loop_are_refused() -> None:
    other = Buffer("other", F32, THREADS, Scope.SCRATCH)
    copies = threads(Copy(other, t, X, k * THREADS + t, 1))
    use = threads(Store(ACC, FIRST, te.call("add", te.Load(ACC, (FIRST,)), te.Load(other, (t,)))))
    body = For(k, Kind.SERIAL, block(Await(0), copies, Commit(), box(), Await(0), added(), use))
    program = replace(sums(), body=block(cleared(), body, written()))
    with pytest.raises(PipelineError, match="by boxes and others by copies of threads"):
        pipeline(program, {"tile": 2, "other": 2})
    refused(program, "other is copied in the same loop and is not pipelined with it")


def test_a_producer_needs_boxes_and_no_barrier_of_the_block() -> None:
    from tests.loops.passes import programs as p

    with pytest.raises(PipelineError, match="needs buffers that the copy engine fills"):
        pipeline(p.sums(), {"tile": 2}, specialise=True)
    wide = te.Var("t", 64)

    def of_more(stmt: Stmt) -> Stmt:
        return For(wide, Kind.THREAD, stmt)

    load = of_more(Store(ACC, FIRST, te.Load(TILE, (wide,))))
    body = For(k, Kind.SERIAL, block(box(), load, Combine("sum", ACC, 0, 64)))
    out = of_more(Store(OUT, wide % THREADS, te.Load(ACC, (FIRST,))))
    refused(
        replace(sums(), body=block(body, out)),
        "combined over 64 threads, which meet at a barrier of the whole block",
        specialise=True,
    )


def verifier_fails(program: Program, why: str) -> None:
    with pytest.raises(VerificationError, match=why):
        verify_program(program)


def test_the_verifier_knows_rings() -> None:
    verifier_fails(sums(), "a box of x is copied outside of a fill")
    made = pipeline(sums(), {"tile": 2}, specialise=True)

    def boxes(change: Callable[[BoxCopy], BoxCopy]) -> Program:
        def changed(stmt: Stmt) -> Stmt:
            assert isinstance(stmt, Fill)
            return replace(stmt, copies=tuple(map(change, stmt.copies)))

        return replace(made, body=without(made.body, Fill, changed))

    verifier_fails(
        boxes(lambda c: replace(c, index=c.index + 4)), "does not begin at a multiple of 256 elements"
    )
    verifier_fails(boxes(lambda c: replace(c, index=c.index + 256)), "is accessed at")
    verifier_fails(boxes(lambda c: replace(c, box=Box(F32, 8, 12))), "a box of 8 rows of 48 bytes")
    wide = SourceMatrix(X, HEIGHT + 1, WIDTH, WIDTH)
    verifier_fails(boxes(lambda c: replace(c, source=wide)), "is no matrix of 38 x 28")
    assert isinstance(made.body, Roles)
    swapped = replace(made.body, producer=made.body.consumer, consumer=made.body.producer)
    verifier_fails(replace(made, body=swapped), "a producer is one thread")
    waits = Roles(made.body.consumer.stmts[1], made.body.consumer)  # type: ignore[union-attr]
    verifier_fails(replace(made, body=waits), "a producer only fills rings, and this is a Filled")
    verifier_fails(replace(made, body=block(made.body.consumer)), "awaited and nothing has filled it")
    verifier_fails(
        replace(made, body=For(te.Var("o", 2), Kind.SERIAL, made.body)), "the whole work of a block"
    )
