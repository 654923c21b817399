"""Where buffers are in shared memory, and what becomes of small copies."""

from __future__ import annotations

from tilewright import te
from tilewright.codegen.cuda.emit import emit_program
from tilewright.codegen.cuda.shared import placed, shared_bytes
from tilewright.dtypes import DType
from tilewright.loops.ir import Await, Buffer, Commit, Copy, For, Kind, Program, Scope, Store, block

X, OUT = Buffer("x", DType.F16, 64), Buffer("out", DType.F16, 64)
FIRST, SECOND, THIRD = (Buffer(name, DType.F16, 64, Scope.SCRATCH) for name in ("first", "second", "third"))
T = te.Var("t", 64)


def moved(source: Buffer, target: Buffer) -> For:
    return For(T, Kind.THREAD, Store(target, T, te.Load(source, (T,))))


def test_buffers_that_are_not_in_use_at_once_have_one_position() -> None:
    body = block(moved(X, FIRST), moved(FIRST, SECOND), moved(SECOND, THIRD), moved(THIRD, OUT))
    program = Program("chain", (X, OUT), body)
    assert placed(program) == {FIRST: 0, SECOND: 128, THIRD: 0}
    assert shared_bytes(program) == 256
    assert emit_program(program, "chain").count("__syncthreads();") == 3 + emit_program(
        Program("none", (X, OUT), moved(X, OUT)), "none"
    ).count("__syncthreads();")


def test_single_halves_go_through_registers_until_they_are_committed() -> None:
    copy = For(T, Kind.THREAD, Copy(FIRST, T, X, T, 1, te.call("lt", T, 60)))
    program = Program("copied", (X, OUT), block(copy, Commit(), Await(0), moved(FIRST, OUT)))
    text = emit_program(program, "copied")
    kernel = text[text.index('extern "C"') :]
    assert (
        kernel.index("on_the_way[0] = *(x")
        < kernel.index("first[t] = on_the_way[0];")
        < kernel.index("commit_copies")
    )
