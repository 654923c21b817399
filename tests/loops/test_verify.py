"""Each rule of the loop IR is enforced."""

from __future__ import annotations

import pytest

from tilewright import te
from tilewright.dtypes import DType
from tilewright.errors import VerificationError
from tilewright.loops.ir import Across, Block, Buffer, For, If, Kind, Prefetch, Program, Scope, Stmt, Store
from tilewright.loops.verify import verify_program

F32 = DType.F32
X, OUT = Buffer("x", F32, 64), Buffer("out", F32, 64)
ACC = Buffer("acc", F32, 16, Scope.REGISTER)
ONE = Buffer("one", F32, 1, Scope.SCRATCH)
A, V, U = te.Var("i", 8), te.Var("v", 8), te.Var("u", 2)
ZERO = te.const(0, F32)


def program(body: Stmt) -> Program:
    return Program("p", (X, OUT), body)


def copy(index: te.Expr) -> Store:
    return Store(OUT, index, te.Load(X, (index,)))


def test_a_legal_program_passes() -> None:
    verify_program(program(For(A, Kind.PARALLEL, For(V, Kind.VECTOR, copy(A * 8 + V)))))


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (For(A, Kind.SERIAL, For(V, Kind.PARALLEL, copy(A * 8 + V))), "only the outermost"),
        (For(V, Kind.VECTOR, For(A, Kind.SERIAL, copy(A * 8 + V))), "holds only stores"),
        (For(A, Kind.SERIAL, For(A, Kind.SERIAL, copy(A))), "bound twice"),
        (copy(te.as_index(64)), "accessed at 64..64"),
        (Prefetch(X, te.cast(te.Load(X, (te.as_index(64),)), DType.I64)), "accessed at 64..64"),
        (copy(A), "used outside of their loops"),
        (Store(X, te.as_index(0), ZERO), "is an input and is written"),
        (Store(OUT, te.as_index(0), te.const(1, DType.I32)), "which holds"),
        (Store(OUT, te.as_index(0), te.Load(OUT, (te.as_index(1),))), "the output is read"),
        (For(A, Kind.SERIAL, Store(ACC, A, ZERO)), "moves with a loop"),
        (For(V, Kind.VECTOR, Store(ACC, V * 2, ZERO)), "stride 2"),
        (
            Block((For(V, Kind.VECTOR, Store(ACC, V, ZERO)), Store(ACC, te.as_index(0), ZERO))),
            "vectors of 8 lanes that overlap",
        ),
        (Store(OUT, te.as_index(0), te.Load(ACC, (te.as_index(0),))), "acc.0. is read before"),
        (
            Block(
                (
                    For(U, Kind.UNROLL, Store(ACC, U, ZERO)),
                    Store(OUT, te.as_index(0), te.Load(ACC, (te.as_index(3),))),
                )
            ),
            "acc.3. is read before",
        ),
        (
            For(
                A,
                Kind.SERIAL,
                Block(
                    (
                        Store(OUT, A, te.Load(ACC, (te.as_index(0),))),
                        Store(ACC, te.as_index(0), ZERO),
                    )
                ),
            ),
            "acc.0. is read before",
        ),
        (
            For(
                A,
                Kind.SERIAL,
                If(te.call("lt", te.as_index(0), A), Store(OUT, A, te.Load(ACC, (te.as_index(0),)))),
            ),
            "acc.0. is read before",
        ),
        (
            For(
                V,
                Kind.VECTOR,
                Block((Store(ACC, V, ZERO), Store(ACC, V + 8, ZERO), Store(OUT, V, te.Load(ACC, (V + 1,))))),
            ),
            "vectors of 8 lanes that overlap",
        ),
        (Store(OUT, te.as_index(0), te.Load(ONE, (te.as_index(0),))), "scratch buffer one is read and never"),
        (Store(OUT, te.as_index(0), Across("sum", ACC, 0, 8)), "acc.0. is read before"),
        (Store(OUT, te.as_index(0), te.Reduce("sum", te.Load(X, (A,)), (A,))), "outside of their loops"),
        (Store(Buffer("other", F32, 4), te.as_index(0), ZERO), "not the output"),
        (Store(OUT.read_as(DType.I32), te.as_index(0), te.const(0, DType.I32)), "is a view and is written"),
        (
            Store(OUT, te.as_index(0), te.cast(te.Load(OUT.read_as(DType.I32), (te.as_index(0),)), F32)),
            "the output is read",
        ),
        (
            Store(OUT, te.as_index(0), te.cast(te.Load(ACC.read_as(DType.I32), (te.as_index(0),)), F32)),
            "is a view of registers",
        ),
        (
            Store(OUT, te.as_index(0), te.cast(te.Load(X.read_as(DType.I64), (te.as_index(32),)), F32)),
            "accessed at 32..32",
        ),
    ],
)
def test_an_illegal_program_is_named(body: Stmt, complaint: str) -> None:
    with pytest.raises(VerificationError, match=complaint):
        verify_program(program(body))


def below(index: te.Expr, limit: int) -> te.Expr:
    return te.call("lt", index, te.as_index(limit))


@pytest.mark.parametrize(
    ("condition", "index"),
    [
        (below(A, 4), A * 16),
        (te.call("le", te.as_index(4), A), (A - 4) * 16),
        (te.call("and", te.call("le", te.as_index(2), A), below(V, 4)), (A - 2) * 8 + V * 2),
        (te.call("eq", A, te.as_index(7)), A * 9 - 1),
        (below(A, 0), te.as_index(64)),  # never runs
    ],
)
def test_a_branch_bounds_what_it_guards(condition: te.Expr, index: te.Expr) -> None:
    body = If(condition, copy(index))
    verify_program(program(For(A, Kind.SERIAL, For(V, Kind.SERIAL, body))))
    with pytest.raises(VerificationError, match="is accessed at"):
        verify_program(program(For(A, Kind.SERIAL, For(V, Kind.SERIAL, copy(index)))))


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (If(below(A, 5), copy(A * 16)), "accessed at 0..64"),
        (If(below(A, 4), copy(A), copy(A * 16)), "accessed at 64..112"),
        (If(below(V, 1), copy(A * 16)), "accessed at 0..112"),
        (
            If(te.call("and", te.call("lt", te.as_index(0), A), below(A, 7)), copy(A), copy(A * 8 - 1)),
            "accessed at -1..55",
        ),
        (Store(OUT, A, te.select(below(A, 5), te.Load(X, (A * 16,)), ZERO)), "accessed at 0..64"),
        (If(below(A + V, 5), For(U, Kind.UNROLL, Store(ACC, U - 1, ZERO))), "accessed at -1..0"),
        (
            Store(OUT, A, te.select(below(A + V, 5), te.Load(ONE, (te.as_index(1),)), ZERO)),
            "accessed at 1..1",
        ),
    ],
)
def test_a_branch_that_does_not_bound_an_index_is_no_excuse(body: Stmt, complaint: str) -> None:
    with pytest.raises(VerificationError, match=complaint):
        verify_program(program(For(A, Kind.SERIAL, For(V, Kind.SERIAL, body))))


def test_a_comparison_of_data_guards_no_index() -> None:
    larger = te.call("lt", te.Load(X, (A,)), ZERO)
    guarded = te.select(larger, te.Load(X, (A * 16,)), ZERO)
    with pytest.raises(VerificationError, match="is accessed at"):
        verify_program(program(For(A, Kind.SERIAL, Store(OUT, A, guarded))))


def test_a_guarded_load_may_leave_its_buffer() -> None:
    guarded = te.select(te.call("lt", A, te.as_index(4)), te.Load(X, (A * 16,)), ZERO)
    verify_program(program(For(A, Kind.SERIAL, Store(OUT, A, guarded))))
