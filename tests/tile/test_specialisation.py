"""Device functions, constants from outside of a kernel, and what a kernel is compiled again for."""

from __future__ import annotations

import types as python_types
from typing import Any

import numpy as np
import pytest

import tilewright
import tilewright.tile as tl
from tests.tile.kernels import value_of
from tilewright.errors import KernelTypeError

WIDTH = 8


def minmax(x, y):
    return tl.minimum(x, y), tl.maximum(x, y)


@tilewright.kernel
def clamp(x, low=0, HIGH: tl.constexpr = 9):
    if HIGH is None:
        return tl.maximum(x, low)
    return tl.minimum(tl.maximum(x, low), HIGH)


@tilewright.kernel
def calls(out, a, b):
    small, big = minmax(a, b)
    tl.store(out + 0, small)
    tl.store(out + 1, big)
    tl.store(out + 2, clamp(big))
    tl.store(out + 3, clamp(x=big, HIGH=None))


def twice(x):
    y = x
    return y, x


@tilewright.kernel
def aliases(out, a):
    p, q = twice(a + 1)
    tl.store(out, p * 10 + q)


def test_two_names_of_one_value() -> None:
    assert value_of(aliases, 2) == [33]
    assert "%y = add" in str(aliases.program(np.zeros(1), 2))


def test_device_functions() -> None:
    assert value_of(calls, 12, -3, size=4) == [-3, 12, 9, 12]


@tilewright.kernel
def uses_global(out):
    tl.store(out + tl.arange(0, WIDTH), tl.arange(0, WIDTH))


def test_a_constant_from_outside_that_changes_compiles_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert value_of(uses_global, size=8) == list(range(8))
    monkeypatch.setitem(globals(), "WIDTH", 4)
    assert value_of(uses_global, size=8) == [0, 1, 2, 3, 0, 0, 0, 0]


cfg = python_types.ModuleType("cfg")
cfg.SCALE = 2  # type: ignore[attr-defined]
cfg.inner = python_types.ModuleType("inner")  # type: ignore[attr-defined]
cfg.inner.of = lambda x: x  # type: ignore[attr-defined]


@tilewright.kernel
def uses_a_module(out):
    tl.store(out, tl.program_id(0) + cfg.SCALE)


def helper(x):
    return x + 1


@tilewright.kernel
def calls_helper(out):
    tl.store(out, helper(tl.program_id(0)))


@tilewright.kernel
def passes_helper(out):
    combine = helper
    tl.store(out, inner(combine, 5))


def inner(function, x):
    return function(x)


def other(x):
    return x + 10


@pytest.mark.parametrize("kernel", [calls_helper, passes_helper])
def test_a_device_function_that_is_defined_again_compiles_again(
    kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = value_of(kernel)[0], value_of(kernel)[0]
    monkeypatch.setitem(globals(), "helper", other)
    assert [value - before[0] for value in value_of(kernel)] == [9]
    monkeypatch.undo()
    assert value_of(kernel) == [before[0]] == [before[1]]


def test_an_attribute_of_a_module_that_changes_compiles_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert value_of(uses_a_module) == value_of(uses_a_module) == [2]
    monkeypatch.setattr(cfg, "SCALE", 7)
    assert value_of(uses_a_module) == [7]
    replaced = python_types.ModuleType("cfg")
    replaced.SCALE = 9  # type: ignore[attr-defined]
    monkeypatch.setitem(globals(), "cfg", replaced)
    assert value_of(uses_a_module) == [9]


@pytest.mark.parametrize(("old", "new"), [(2, 2.0), (1, True), ((2, 0), (2.0, 0)), (0.0, -0.0)])
def test_a_constant_that_is_equal_but_not_the_same_compiles_again(
    old: Any, new: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, out = of_tuple if isinstance(old, tuple) else of_number, np.zeros(1, np.float32)
    monkeypatch.setitem(globals(), "NUMBER", old)
    first = kernel.program(out)
    monkeypatch.setitem(globals(), "NUMBER", new)
    assert kernel.program(out) is not first


NUMBER: Any = 2


@tilewright.kernel
def of_number(out):
    tl.store(out, tl.program_id(0) + NUMBER)


@tilewright.kernel
def of_tuple(out):
    tl.store(out, tl.program_id(0) + NUMBER[0])


def test_what_stays_the_same_is_not_compiled_again() -> None:
    out = np.zeros(8, np.float32)
    for kernel in (calls, uses_a_module, passes_helper, of_number, uses_global):
        args = (1, 2) if kernel is calls else ()
        assert kernel.program(out, *args) is kernel.program(out, *args)


@tilewright.kernel
def types(out, n, x):
    tl.static_print(n.dtype, x.dtype, out.dtype.element_ty)
    tl.store(out, n)


def test_numbers_have_the_types_that_the_semantics_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert value_of(types, 2**40, 1.5, dtype=np.int64) == [2**40]
    assert value_of(types, 5, True, dtype=np.float32) == [5.0]
    assert value_of(types, 6, False, dtype=np.float32) == [6.0]
    assert capsys.readouterr().out.splitlines() == ["i64 f32 i64", "i32 bool f32"], (
        "compiled once for each type"
    )


@tilewright.kernel
def prints(out):
    tl.device_print("id", tl.program_id(0), tl.arange(0, 2))


def test_device_print(capsys: pytest.CaptureFixture[str]) -> None:
    prints[2](np.zeros(1))
    assert capsys.readouterr().out == "(0, 0, 0) id 0 [0 1]\n(1, 0, 0) id 1 [0 1]\n"


@tilewright.kernel
def inverse(out, C: tl.constexpr):
    tl.store(out, 1.0 / (tl.load(out) * C))


@tilewright.kernel
def plus_first(out, NUMBERS: tl.constexpr):
    tl.store(out, tl.load(out) + NUMBERS[0])


@pytest.mark.parametrize("zeros", [(0.0, -0.0, 0.0), (-0.0, 0.0, -0.0)])
def test_zero_and_minus_zero_are_two_constexprs(zeros: tuple[float, ...]) -> None:
    for zero in (*zeros, *zeros):  # from the second time on, the launch is warm
        out = np.ones(1, np.float32)
        inverse[1](out, C=zero)
        assert out[0] == np.copysign(np.inf, zero)


def test_numbers_inside_of_a_constexpr_tuple_have_their_type() -> None:
    exact, rounded = 2**24 + 1, 2**24  # i32, and f32
    for numbers, expected in [((0,), exact), ((0.0,), rounded), ((False,), exact), ((0.0,), rounded)]:
        out = np.array([exact], np.int32)
        plus_first[1](out, NUMBERS=numbers)
        assert out[0] == expected


@tilewright.kernel
def sign_of_a_branch(out, n):
    zero = 0.0
    if n > 0:
        zero = -0.0
    tl.store(out, zero)


@tilewright.kernel
def sign_after_a_loop(out, n):
    zero = 0.0
    pair = (zero, 1)
    for _ in range(n):
        pair = (-0.0, 1)
    tl.store(out, pair[0])


def test_zero_and_minus_zero_are_two_values_of_a_name() -> None:
    out = np.ones(1, np.float32)
    for n in (1, 0):
        sign_of_a_branch[1](out, n)
        assert np.signbit(out[0]) == (n > 0)
    with pytest.raises(KernelTypeError, match="the loop changes it to"):
        sign_after_a_loop[1](out, 1)
