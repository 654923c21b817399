from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graph.ops.checks import (
    BF16,
    BOOL,
    F16,
    F32,
    F64,
    FLOATS,
    I8,
    I32,
    I64,
    INF,
    INTS,
    NAN,
    U8,
    Case,
    check_lowering,
    lowering_params,
    oracle_of,
    random_array,
    run_lowering,
    run_torch,
    torch_params,
)
from tilewright.dtypes import DType

VALUES = np.array(
    [NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 3.0, -3.0, 7.25, -19.0, 25.0, 120.0]
)
MODERATE = np.concatenate([VALUES[:-1], np.linspace(-3, 3, 25)])  # where f32 keeps its digits

# Every operator in PyTorch, at the same place in the type table as here.
UNARY_FLOAT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "neg": torch.neg,
    "abs": torch.abs,
    "sign": torch.sign,
    "square": torch.square,
    "relu": torch.relu,
    "exp": torch.exp,
    "expm1": torch.expm1,
    "exp2": torch.exp2,
    "log": torch.log,
    "log2": torch.log2,
    "log1p": torch.log1p,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "sin": torch.sin,
    "cos": torch.cos,
    "tan": torch.tan,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "erf": torch.erf,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "trunc": torch.trunc,
    "round": torch.round,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "mish": F.mish,
    "isnan": torch.isnan,
    "isinf": torch.isinf,
    "isfinite": torch.isfinite,
}
WITH_ATTRS: list[tuple[str, dict[str, Any], Callable[[torch.Tensor], torch.Tensor]]] = [
    ("gelu", {"approximate": "none"}, F.gelu),
    ("gelu", {"approximate": "tanh"}, lambda x: F.gelu(x, approximate="tanh")),
    ("softplus", {"beta": 1.0, "threshold": 20.0}, F.softplus),
    ("softplus", {"beta": 2, "threshold": 3}, lambda x: F.softplus(x, beta=2, threshold=3)),
    ("elu", {"alpha": 1.0}, F.elu),
    ("elu", {"alpha": 0.3}, lambda x: F.elu(x, alpha=0.3)),
    ("leaky_relu", {"slope": 0.01}, F.leaky_relu),
    ("clamp", {"min": -1.0, "max": 2.5}, lambda x: torch.clamp(x, -1, 2.5)),
    ("clamp", {"min": None, "max": 2}, lambda x: torch.clamp(x, max=2)),
    ("clamp", {"min": 0, "max": None}, lambda x: torch.clamp(x, min=0)),
    ("clamp", {"min": None, "max": None}, lambda x: x),
    ("clamp", {"min": 2.0, "max": -1.0}, lambda x: torch.clamp(x, 2, -1)),
]
BINARY_FLOAT: dict[str, Callable[..., torch.Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "div": torch.div,
    "pow": torch.pow,
    "atan2": torch.atan2,
    "floordiv": torch.floor_divide,
    "mod": torch.remainder,
    "fmod": torch.fmod,
    "eq": torch.eq,
    "ne": torch.ne,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
}
BINARY_BOOL: dict[str, Callable[..., torch.Tensor]] = {
    "logical_and": torch.logical_and,
    "logical_or": torch.logical_or,
    "logical_xor": torch.logical_xor,
    "bitwise_and": torch.bitwise_and,
    "bitwise_or": torch.bitwise_or,
    "bitwise_xor": torch.bitwise_xor,
    "eq": torch.eq,
    "ne": torch.ne,
    "lt": torch.lt,
    "ge": torch.ge,
}
BINARY_INT: dict[str, Callable[..., torch.Tensor]] = {
    name: BINARY_FLOAT[name]
    for name in ("add", "sub", "mul", "maximum", "minimum", "eq", "ne", "lt", "le", "gt", "ge")
} | {"bitwise_and": torch.bitwise_and, "bitwise_or": torch.bitwise_or, "bitwise_xor": torch.bitwise_xor}
DIVISIONS: dict[str, Callable[..., torch.Tensor]] = {
    name: BINARY_FLOAT[name] for name in ("floordiv", "mod", "fmod")
}


def ints(dtype: DType) -> np.ndarray:
    info = np.iinfo(dtype.numpy)
    return np.unique(
        np.array(
            [info.min, info.max, 0, 1, 2, 3, 7, -1 if info.min else 5, -7 if info.min else 9], dtype.numpy
        )
    )


def pairs(left: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return left[:, None] + np.zeros_like(right), right[None, :]


def cases() -> list[Case]:
    found = [Case(name, [MODERATE], torch=function) for name, function in UNARY_FLOAT.items()]
    found += [Case(name, [MODERATE], attrs, function) for name, attrs, function in WITH_ATTRS]
    found += [Case(name, pairs(VALUES, VALUES), torch=function) for name, function in BINARY_FLOAT.items()]
    truth = np.array([[True], [False]]), np.array([True, False])
    found += [Case(name, truth, torch=function, dtypes=[BOOL]) for name, function in BINARY_BOOL.items()]
    found += [
        Case("logical_not", truth[:1], torch=torch.logical_not, dtypes=[BOOL]),
        Case("bitwise_not", truth[:1], torch=torch.bitwise_not, dtypes=[BOOL]),
    ]
    for dtype in INTS:
        values = ints(dtype)
        both = pairs(values, values)
        found += [Case(name, both, torch=function, dtypes=[dtype]) for name, function in BINARY_INT.items()]
        unary = ("neg", "abs", "sign", "square", "relu")
        found += [Case(name, [values], torch=UNARY_FLOAT[name], dtypes=[dtype]) for name in unary]
        found.append(Case("bitwise_not", [values], torch=torch.bitwise_not, dtypes=[dtype]))
        found.append(
            Case("clamp", [values], {"min": 1, "max": 5}, lambda x: torch.clamp(x, 1, 5), dtypes=[dtype])
        )
        # PyTorch raises on a division by 0 and, on some types, on one of the least value by -1.
        found += [Case(name, both, dtypes=[dtype]) for name in DIVISIONS]
        harmless = pairs(values, values[(values != 0) & (values != (-1 if np.iinfo(dtype.numpy).min else 0))])
        found += [
            Case(name, harmless, torch=function, dtypes=[dtype]) for name, function in DIVISIONS.items()
        ]
        shifts = pairs(values, np.arange(7, dtype=dtype.numpy))
        found.append(Case("shl", shifts, torch=torch.bitwise_left_shift, dtypes=[dtype]))
        found.append(Case("shr", shifts, torch=torch.bitwise_right_shift, dtypes=[dtype]))
    condition = np.array([[True], [False]])
    found += [
        Case("select", [condition, (3,), (2, 1)], torch=torch.where, dtypes=[*FLOATS, I64, I8, BOOL]),
        Case("select", [np.array(True), (2,), np.array(NAN)], torch=torch.where, dtypes=[F64, F32]),
        Case("add", [(), ()], torch=torch.add, dtypes=[*FLOATS, I32]),
        Case("exp", [()], torch=torch.exp),
        Case("mul", [(2, 1, 3), (4, 1)], torch=torch.mul),
    ]
    return found + list(cast_cases())


def cast_cases() -> Any:
    whole, broken = np.array([0.0, 1.0, 3.0, 100.0]), np.array([-3.7, -1.0, -0.2, 0.0, 0.9, 1.5, 100.5])
    for target in DType:
        to_torch = getattr(torch, str(target.numpy)) if target is not BF16 else torch.bfloat16
        same = target.numpy.itemsize == 8 or not target.is_float  # where PyTorch does not round

        def reference(x: torch.Tensor, to: Any = to_torch) -> torch.Tensor:
            return x.to(to)

        attrs = {"dtype": target}
        values = whole if target is U8 else broken
        yield Case("cast", [values], attrs, reference if same else None, dtypes=FLOATS)
        if target.is_float or target is BOOL:
            yield Case("cast", [np.array([NAN, INF, -INF, 1e-30])], attrs, reference if same else None)
        for source in (*INTS, BOOL):
            array = np.array([0, 1, 100]).astype(source.numpy)
            yield Case("cast", [array], attrs, reference if same else None, dtypes=[source])
            if source is not BOOL and not target.is_float:  # what does not fit wraps around
                yield Case("cast", [ints(source)], attrs, reference, dtypes=[source])


CASES = cases()


@pytest.mark.parametrize(("case", "dtype"), lowering_params(CASES))
def test_lowering_equals_oracle(case: Case, dtype: DType) -> None:
    run_lowering(case, dtype)


@pytest.mark.parametrize(("case", "dtype"), torch_params(CASES))
def test_oracle_equals_torch(case: Case, dtype: DType) -> None:
    run_torch(case, dtype)


@given(st.data())
@settings(max_examples=60)
def test_operands_broadcast(data: st.DataObject) -> None:
    shapes = data.draw(hnp.mutually_broadcastable_shapes(num_shapes=3, max_dims=4, max_side=4, min_side=0))
    dtype = data.draw(st.sampled_from([F32, F16, I8, I64]))
    rng = np.random.default_rng(0)
    a, b, c = (random_array(rng, shape, dtype) for shape in shapes.input_shapes)
    assert check_lowering("mul", [a, b]).shape == np.broadcast_shapes(a.shape, b.shape)
    assert check_lowering("select", [c > 0, a, b]).shape == shapes.result_shape


@given(st.floats(width=32), st.floats(width=32))
@settings(max_examples=150)
def test_float_division_with_rounding_is_torchs(a: float, b: float) -> None:
    left, right = np.array(a), np.array(b)
    for name, function in DIVISIONS.items():
        expected = function(torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64))
        np.testing.assert_allclose(oracle_of(name, [left, right]), expected.numpy(), rtol=1e-12)
        check_lowering(name, [left, right])


@pytest.mark.parametrize("dtype", FLOATS)
def test_saturating_functions_never_give_nan_for_numbers(dtype: DType) -> None:
    largest = {F64: 1e300, F32: 1e38, F16: 6e4, BF16: 1e38}[dtype]
    x = np.array([-largest, -1e3, 1e3, largest]).astype(dtype.numpy)
    for name in ("sigmoid", "silu", "tanh", "mish", "hardswish", "erf"):
        assert not np.isnan(check_lowering(name, [x]).astype(np.float64)).any(), name
    assert not np.isnan(check_lowering("gelu", [x], approximate="tanh").astype(np.float64)).any()
    assert not np.isnan(check_lowering("softplus", [x], beta=1.0, threshold=20.0).astype(np.float64)).any()


def test_divisors_that_would_trap_are_replaced() -> None:
    """No division in the lowering of an integer division has 0 or -1 as its divisor."""
    for dtype, (name, _) in itertools.product((I8, I32, I64), DIVISIONS.items()):
        least = np.iinfo(dtype.numpy).min
        a, b = np.array([least, 5, least], dtype.numpy), np.array([-1, 0, 0], dtype.numpy)
        result = check_lowering(name, [a, b])
        np.testing.assert_array_equal(result, [least if name == "floordiv" else 0, 0, 0])


def test_exp2_and_log2_have_the_stated_error() -> None:
    x = np.linspace(-20, 20, 401).astype(np.float32)
    error = np.abs(check_lowering("exp2", [x]).astype(np.float64) / np.exp2(x.astype(np.float64)) - 1)
    assert (error <= 6e-8 * (np.abs(x) + 4)).all()
    powers = np.exp2(np.arange(-20, 20)).astype(np.float32)
    np.testing.assert_allclose(check_lowering("log2", [powers]), np.arange(-20, 20), rtol=3e-7)
    assert math.isinf(check_lowering("log2", [np.zeros((), np.float32)]))
