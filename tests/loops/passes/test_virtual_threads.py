"""Virtual threads: one stream computes the same, each token is needed, and loads are hidden."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.codegen.llvm.native import run_program
from tests.loops.schedule.examples import check_meaning
from tilewright import te
from tilewright.dtypes import DType
from tilewright.errors import ScheduleError, VerificationError
from tilewright.loops.interpret import interpret_program
from tilewright.loops.ir import Block, For, If, Kind, Pop, Program, Push, Stmt, local_buffers, walk_stmts
from tilewright.loops.passes.virtual_threads import virtual_threads
from tilewright.loops.schedule import Schedule, outer_product
from tilewright.loops.text import print_program
from tilewright.loops.units import Order, UnorderedUnits
from tilewright.loops.verify import verify_program

F32 = DType.F32


def matmul(m: int = 8, n: int = 8, k: int = 16) -> tuple[te.Tensor, list[te.Tensor]]:
    a, b = te.Tensor("a", (m, k), F32), te.Tensor("b", (k, n), F32)
    (r,) = te.reduce_axes([k])
    p = te.compute("p", (m, n), F32, lambda i, j: te.reduce_over("sum", a[i, r] * b[r, j], [r]))
    return te.compute("out", (m, n), F32, lambda i, j: te.call("max", p[i, j], 0.0)), [a, b]


TASK = matmul()


def plain(rows: int = 4, task: tuple[te.Tensor, list[te.Tensor]] = TASK) -> Schedule:
    """Loads, products and results, tile by tile."""
    schedule = Schedule.of(*task).split("out.i0", rows).compute_at("p", "out.i0.o").split("p.r0", 4)
    schedule = schedule.reorder("p.r0.o", "p.i0", "p.i1", "p.r0.i")
    for name in ("a", "b"):
        schedule = schedule.cache_read(name, "p").compute_at(f"{name}.of.p", "p.r0.o")
    return schedule


def threads(rows: int = 4) -> Schedule:
    return plain(rows).vthread("out.i0.o")


def inputs() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(-3, 4, tensor.shape).astype(np.float32) for tensor in TASK[1]]


def without(stmt: Stmt, queue: int) -> Stmt:
    """The statement without the tokens of a queue."""
    if isinstance(stmt, Block):
        kept = [each for each in stmt.stmts if not (isinstance(each, Push | Pop) and each.queue == queue)]
        return Block(tuple(without(each, queue) for each in kept))
    if isinstance(stmt, For):
        return replace(stmt, body=without(stmt.body, queue))
    if isinstance(stmt, If):
        return replace(stmt, then=without(stmt.then, queue))
    return stmt


def queues(program: Program) -> set[int]:
    return {stmt.queue for stmt in walk_stmts(program.body) if isinstance(stmt, Push)}


@pytest.mark.parametrize("rows", [2, 4])
def test_one_stream_computes_the_same(rows: int) -> None:
    program = check_meaning(threads(rows), TASK, native=True)
    names = {buffer.name for buffer in local_buffers(program)}
    assert names >= {f"a.of.p.{number}" for number in range(8 // rows)}, "each thread has a tile of its own"
    assert not any(isinstance(s, For) and s.kind is Kind.VIRTUAL for s in walk_stmts(program.body))


@pytest.mark.parametrize("rows", [2, 4])
def test_every_token_is_needed(rows: int) -> None:
    program = threads(rows).program()
    assert len(queues(program)) >= 3
    for queue in queues(program):
        with pytest.raises(UnorderedUnits, match="without waiting"):
            interpret_program(replace(program, body=without(program.body, queue)), inputs(), order=Order())


def test_the_stream_is_as_the_picture_shows() -> None:
    text = print_program(threads().program())
    loop = text[text.index("serial p.r0.o") :]
    order = ["pop execute -> load", "a.of.p.0[", "a.of.p.1[", "push load -> execute", "fma(a.of.p.0["]
    order += ["push execute -> load", "fma(a.of.p.1["]
    positions = [loop.index(each) for each in order]
    assert positions == sorted(positions)
    assert text.index("push execute -> load") < text.index("serial p.r0.o"), (
        "the first loads find free buffers"
    )


def cycles(program: Program, load: float, execute: float) -> float:
    order = Order({"load": load, "execute": execute, "store": load})
    interpret_program(program, inputs(), order=order)
    return order.timeline.cycles


@pytest.mark.parametrize(("load", "execute"), [(1.0, 1.0), (2.0, 1.0), (4.0, 1.0)])
def test_loads_of_one_thread_are_hidden_behind_the_other(load: float, execute: float) -> None:
    one = cycles(virtual_threads(plain().program()), load, execute)
    two = cycles(threads().program(), load, execute)
    assert two < one
    order = Order({"load": load, "execute": execute, "store": load})
    interpret_program(threads().program(), inputs(), order=order)
    assert two >= max(order.timeline.busy.values()), "no unit does two things at once"


def test_a_token_that_nobody_pushes_is_found() -> None:
    program = threads().program()
    pops = replace(program, body=Block((Pop(99, "load", "execute"), program.body)))
    with pytest.raises(UnorderedUnits, match="load never pushes"):
        interpret_program(pops, inputs())
    pushes = replace(program, body=Block((Push(99, "load", "execute"), program.body)))
    with pytest.raises(UnorderedUnits, match="tokens are left in queues"):
        interpret_program(pushes, inputs())


def test_a_processor_runs_the_stream_in_order() -> None:
    program = threads().program()
    given = inputs()
    np.testing.assert_array_equal(
        run_program(program, given, numerics="strict", pieces=1), interpret_program(program, given)
    )


def test_instructions_are_of_the_execute_unit() -> None:
    schedule = plain().split("p.i1", 4).split("p.i0", 2)
    schedule = schedule.reorder("p.i0.o", "p.i1.o", "p.r0.i", "p.i0.i", "p.i1.i")
    schedule = schedule.tensorise("p.i0.i", outer_product(2, 1, 4)).vthread("out.i0.o")
    check_meaning(schedule, TASK, native=True)


def test_a_virtual_loop_is_not_run_as_it_is() -> None:
    program = plain().program()
    loop = program.body
    assert isinstance(loop, For)
    with pytest.raises(VerificationError, match="virtual threads are interleaved by a pass"):
        verify_program(replace(program, body=For(loop.var, Kind.VIRTUAL, loop.body)))
    with pytest.raises(VerificationError, match="load waits for itself"):
        verify_program(replace(program, body=Block((Push(0, "load", "load"), loop))))


REFUSED = {
    "products of global memory": (
        lambda: (
            Schedule.of(*TASK).split("out.i0", 4).compute_at("p", "out.i0.o").vthread("out.i0.o").program()
        ),
        "p is computed from a, b in global memory, which the execute unit cannot access",
    ),
    "a prefetch": (
        lambda: threads().prefetch("p.r0.o", "b").program(),
        "vthread: Prefetch is not supported in decoupled units",
    ),
    "a reduction": (
        lambda: plain().vthread("p.r0.o"),
        "loop p.r0.o belongs to the reduction p: its threads all update the same elements",
    ),
    "threads in threads": (
        lambda: plain(2).split("out.i0.o", 2).vthread("out.i0.o.o").vthread("out.i0.o.i"),
        "loop out.i0.o.i is inside loop out.i0.o.o, which is one of virtual threads",
    ),
    "on a GPU": (
        lambda: threads().bind("a.of.p.i0", "thread.x"),
        "other loops are bound to a GPU, whose threads hide latency already",
    ),
    "pipelined too": (
        lambda: plain().pipeline("a.of.p", 2).vthread("out.i0.o"),
        "a.of.p is pipelined, which is another way to hide its loads",
    ),
    "a narrower tail": (
        lambda: Schedule.of(*TASK).split("out.i0", 3, "narrow").vthread("out.i0.o"),
        "loop out.i0.o has a narrower tail: threads would differ",
    ),
    "a vector": (
        lambda: Schedule.of(*TASK).vectorise("out.i1").vthread("out.i1"),
        "loop out.i1 is vector already",
    ),
    "too many": (
        lambda: Schedule.of(*matmul(2048, 2, 2)).vthread("out.i0"),
        "loops out.i0 make 2048 copies of stage out; at most 1024",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_with_the_reason(case: str) -> None:
    misuse, message = REFUSED[case]
    with pytest.raises(ScheduleError) as caught:
        misuse()
    assert message in caught.value.message
