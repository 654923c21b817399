"""Simplification keeps the value of an expression, for every assignment of its variables; bounds hold."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright import te
from tilewright.dtypes import DType
from tilewright.te.index import bounds, coefficient, in_range, linear, simplify
from tilewright.te.scalars import SCALARS

A, J, K = te.Var("i", 6), te.Var("j", 4), te.Var("k", 3)


def evaluate(expr: te.Expr, env: dict[te.Var, int]) -> int:
    if isinstance(expr, te.Const):
        return int(expr.value)
    if isinstance(expr, te.Var):
        return env[expr]
    if isinstance(expr, te.Select):
        return evaluate(expr.then if evaluate(expr.cond, env) else expr.other, env)
    assert isinstance(expr, te.Call)
    return int(SCALARS[expr.op].numpy(*(evaluate(arg, env) for arg in expr.args)))


def assignments():
    for i, j, k in itertools.product(range(6), range(4), range(3)):
        yield {A: i, J: j, K: k}


leaves = st.sampled_from([A, J, K]) | st.integers(-5, 9).map(te.as_index)


def _grown(children: st.SearchStrategy[te.Expr]) -> st.SearchStrategy[te.Expr]:
    pair = st.tuples(children, children)
    return st.one_of(
        pair.map(lambda p: p[0] + p[1]),
        pair.map(lambda p: p[0] - p[1]),
        st.tuples(children, st.integers(-4, 6)).map(lambda p: p[0] * p[1]),
        st.tuples(children, st.integers(1, 6)).map(lambda p: p[0] // p[1]),
        st.tuples(children, st.integers(1, 6)).map(lambda p: p[0] % p[1]),
        pair.map(lambda p: te.call("min", *p)),
        pair.map(lambda p: te.call("max", *p)),
        st.tuples(children, children, children, children).map(
            lambda p: te.select(te.call("lt", p[0], p[1]), p[2], p[3])
        ),
    )


expressions = st.recursive(leaves, _grown, max_leaves=8)


@settings(max_examples=200, deadline=None)
@given(expressions)
def test_simplify_keeps_the_value(expr: te.Expr) -> None:
    simple = simplify(expr)
    for env in assignments():
        assert evaluate(simple, env) == evaluate(expr, env)


@settings(max_examples=200, deadline=None)
@given(expressions)
def test_bounds_hold(expr: te.Expr) -> None:
    low, high = bounds(simplify(expr))
    for env in assignments():
        value = evaluate(expr, env)
        assert low is None or low <= value
        assert high is None or value <= high


@settings(max_examples=200, deadline=None)
@given(expressions)
def test_coefficient_is_the_step(expr: te.Expr) -> None:
    step = coefficient(expr, J)
    if step is None:
        return
    for env in assignments():
        if env[J] + 1 < J.extent:
            assert evaluate(expr, {**env, J: env[J] + 1}) - evaluate(expr, env) == step


@settings(max_examples=100, deadline=None)
@given(expressions, expressions, st.sampled_from(["lt", "le", "eq", "ne"]))
def test_decided_conditions_are_right(a: te.Expr, b: te.Expr, op: str) -> None:
    condition = te.call(op, a, b)
    decided = simplify(condition)
    for env in assignments():
        assert bool(evaluate(decided, env)) == bool(evaluate(condition, env))


def test_split_and_join_cancel() -> None:
    flat = A * 4 + J
    assert simplify(flat // 4) == A
    assert simplify(flat % 4) == J
    assert simplify((flat * 3 + K) // 3) == simplify(flat)


def test_equal_forms_print_alike() -> None:
    assert simplify(A + J * 2 + 3) == simplify(J + 3 + (A + J))


def test_a_variable_that_runs_once_is_zero() -> None:
    assert simplify(te.Var("once", 1) * 7 + A) == A


def test_nested_divisions_join() -> None:
    big = te.Var("b", 1000)
    assert simplify((big // 4) // 6) == simplify(big // 24)


@pytest.mark.parametrize(
    ("index", "extent", "always"), [(A, 6, True), (A, 5, False), (A - 1, 6, False), (A + J, 9, True)]
)
def test_in_range_asks_only_what_can_fail(index: te.Expr, extent: int, always: bool) -> None:
    assert (in_range(index, extent) is None) == always


def test_linear_of_a_load_is_an_atom() -> None:
    tensor = te.Tensor("t", (6,), DType.I64)
    form = linear(te.Load(tensor, (A,)) * 8 + J)
    assert sorted(form.terms.values()) == [1, 8]
