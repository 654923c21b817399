"""Expressions as keys of tables."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest

from tilewright import te

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
