"""Expressions as keys of tables."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest

from tilewright import te
from tilewright.dtypes import DType

_I = te.Var("i", 8)
_SUM = te.call("add", te.call("mul", _I, 4), te.call("min", _I, 3))


@pytest.mark.parametrize(
    "expr", [_SUM, te.Select(te.call("lt", _I, 2), _SUM, _I), te.Cast(_SUM, te.Var.dtype)]
)
def test_equal_expressions_have_equal_hashes(expr: te.Expr) -> None:
    again = copy.deepcopy(expr)
    assert again is not expr and again == expr and hash(again) == hash(expr)
    assert te.variables(again) == {_I}


def test_a_hash_is_not_carried_into_another_process() -> None:
    """Where strings have other hashes."""
    hash(_SUM)
    program = (
        "import pickle, sys; from tilewright import te; i = te.Var('i', 8);"
        "there = te.call('add', te.call('mul', i, 4), te.call('min', i, 3));"
        "print(pickle.load(sys.stdin.buffer) in {there})"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], input=pickle.dumps(_SUM), capture_output=True, check=True
    )
    assert found.stdout.strip() == b"True"


def test_variables_of_an_expression_are_the_callers_own() -> None:
    te.variables(_SUM).clear()
    assert te.variables(_SUM) == {_I}


# -- shared and deep expressions ------------------------------------------------------------------------------------


def _squared(times: int, start: te.Expr = _I) -> te.Expr:
    """2^times occurrences of the start, in as many objects as there are squares."""
    for _ in range(times):
        start = te.call("mul", start, start)
    return start


def test_hashing_and_comparing_take_one_step_for_each_object() -> None:
    one, other = _squared(5000), _squared(5000)
    assert one is not other and one == other and hash(one) == hash(other)
    assert one != _squared(4999)
    assert one != _squared(5000, te.Var("i", 9))
    assert te.Cast(one, DType.F32) == te.Cast(other, DType.F32) != te.Cast(other, DType.F64)


def test_a_rewrite_keeps_what_is_shared() -> None:
    seen = []
    changed = te.rewrite(_squared(3000), lambda node: seen.append(node))
    assert len(seen) == 3001 and changed == _squared(3000)
    moved = te.substitute(_squared(3000), {_I: te.Var("j", 8)})
    assert isinstance(moved, te.Call) and moved.args[0] is moved.args[1]
    assert moved == _squared(3000, te.Var("j", 8))


def test_a_rewrite_goes_bottom_up_and_from_left_to_right() -> None:
    seen: list[te.Expr] = []
    te.rewrite(_SUM, lambda node: seen.append(node))
    assert [type(node).__name__ for node in seen] == ["Var", "Const", "Call", "Const", "Call", "Call"]


def test_equal_parts_become_one_object() -> None:
    apart = te.call("mul", te.call("add", _I, 1), te.call("add", _I, 1))
    together = te.shared(apart)
    assert isinstance(together, te.Call) and together == apart
    assert together.args[0] is together.args[1]


def test_stages_and_loads_of_long_chains() -> None:
    tensor = te.Tensor("x", (8,), DType.F32)
    last = tensor
    for number in range(3000):
        last = te.compute(f"s{number}", (8,), DType.F32, lambda i, before=last: before[i] + 1.0)
    found = te.stages(last)
    assert [stage.name for stage in found] == [f"s{number}" for number in range(3000)]
    deep: te.Expr = tensor[_I]
    for _ in range(3000):
        deep = te.select(te.call("lt", _I, 4), deep + 1.0, tensor[_I])
    assert te.unguarded_loads(deep) == [] and te.unguarded_loads(deep + tensor[_I]) == [tensor[_I]]


def test_zeros_of_both_signs_are_two_constants_and_nan_is_one() -> None:
    zero, negative = te.const(0.0, DType.F32), te.const(-0.0, DType.F32)
    assert zero != negative and zero == te.const(0.0, DType.F32)
    assert te.const(float("nan"), DType.F32) == te.const(float("nan"), DType.F32)
    assert te.const(0.0, DType.F32) != te.const(0.0, DType.F64)
