"""Elementwise operators, casts, formulas and PyTorch's type promotion."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.frontend.checking import check, floats, functions, imported, integers, ops_of
from tilewright.dtypes import DType

UNARY: dict[str, Any] = {
    name: getattr(torch, name)
    for name in [
        "abs",
        "acos",
        "asin",
        "asinh",
        "atan",
        "ceil",
        "cos",
        "cosh",
        "deg2rad",
        "erf",
        "erfc",
        "exp",
        "exp2",
        "expm1",
        "floor",
        "frac",
        "neg",
        "positive",
        "rad2deg",
        "relu",
        "round",
        "sgn",
        "sigmoid",
        "sign",
        "sin",
        "sinc",
        "sinh",
        "sqrt",
        "square",
        "tan",
        "tanh",
        "trunc",
        "isnan",
        "isinf",
        "isfinite",
        "isposinf",
        "isneginf",
        "logical_not",
        "nan_to_num",
    ]
}
OF_POSITIVE: dict[str, Any] = {
    name: getattr(torch, name)
    for name in ["log", "log2", "log10", "log1p", "rsqrt", "reciprocal", "acosh", "logit"]
}
ACTIVATIONS: dict[str, Any] = {
    "celu": lambda x: F.celu(x, 0.7),
    "clamp": lambda x: x.clamp(-0.5, 0.8),
    "clamp_max": lambda x: torch.clamp_max(x, 0.3),
    "clamp_min": lambda x: x.clamp(min=0.1),
    "elu": lambda x: F.elu(x, 1.3),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "glu": lambda x: F.glu(x, dim=1),
    "hardshrink": F.hardshrink,
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "hardtanh": lambda x: F.hardtanh(x, -0.4, 0.6),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "logsigmoid": F.logsigmoid,
    "mish": F.mish,
    "prelu": lambda x: F.prelu(x, torch.full((4,), 0.3, dtype=x.dtype)),
    "prelu_one": lambda x: F.prelu(x, torch.full((1,), 0.3, dtype=x.dtype)),
    "relu6": F.relu6,
    "rrelu": F.rrelu,
    "selu": F.selu,
    "silu": F.silu,
    "softplus": lambda x: F.softplus(x, 2.0, 3.0),
    "softshrink": F.softshrink,
    "softsign": F.softsign,
    "tanhshrink": F.tanhshrink,
    "threshold": lambda x: F.threshold(x, 0.2, -1.0),
}
BINARY: dict[str, Any] = {
    "add_alpha": lambda a, b: torch.add(a, b, alpha=0.3),
    "sub_alpha": lambda a, b: torch.sub(a, b, alpha=2),
    "rsub": lambda a, b: 3.5 - a,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "div_floor": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "div_trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "floor_divide": lambda a, b: a // 0.75,
    "remainder": lambda a, b: a % b,
    "remainder_scalar": lambda a, b: a % 0.75,
    "fmod": lambda a, b: torch.fmod(a, b),
    "atan2": torch.atan2,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "fmax": torch.fmax,
    "pow": lambda a, b: a.abs() ** b,
    "pow_of_number": lambda a, b: 2.5**b,
    "powers": lambda a, b: [a.abs() ** p for p in (0, 1, 2, 3, 0.5, -0.5, -1, 1.7)],
    "hypot": torch.hypot,
    "logaddexp": torch.logaddexp,
    "xlogy": lambda a, b: torch.xlogy(a, b.abs()),
    "heaviside": torch.heaviside,
    "copysign": lambda a, b: torch.copysign(a, -1.0),
    "comparisons": lambda a, b: [a == b, a != b, a < b, a <= b, a > b, a >= b, a > 0.25],
    "where": lambda a, b: torch.where(a > b, a, 0.5),
    "masked_fill": lambda a, b: a.masked_fill(b > 0, float("-inf")),
    "clamp_tensor": lambda a, b: torch.clamp(a, b, b + 1),
    "clamp_min_tensor": lambda a, b: torch.clamp_min(a, b),
    "addcmul": lambda a, b: torch.addcmul(a, a, b, value=0.7),
    "addcdiv": lambda a, b: torch.addcdiv(a, a, b, value=0.7),
    "lerp": lambda a, b: torch.lerp(a, b, 0.3),
    "lerp_tensor": lambda a, b: torch.lerp(a, b, a),
}
INTEGER: dict[str, Any] = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b - 3,
    "true_div": lambda a, b: a / b,
    "div_floor": lambda a, b: a // b,
    "div_trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "remainder": lambda a, b: a % b,
    "fmod": torch.fmod,
    "power": lambda a, b: a**5,
    "bits": lambda a, b: [a & b, a | b, a ^ b, ~a, a & 3],
    "shifts": lambda a, b: [a << 2, a >> 1, torch.bitwise_left_shift(a, 1), torch.bitwise_xor(a, b)],
    "clamp": lambda a, b: a.clamp(-2, 3),
    "clamp_float": lambda a, b: a.clamp(-2.5, 3.5),
    "abs_sign": lambda a, b: [a.abs(), a.sign(), -a],
    "rounding": lambda a, b: [a.floor(), a.ceil(), a.round()],
    "float_functions": lambda a, b: [a.exp(), a.sigmoid(), a.abs().sqrt()],
    "isnan": lambda a, b: [a.isnan(), a.isfinite()],
    "logical": lambda a, b: [torch.logical_and(a, b), torch.logical_or(a, b), torch.logical_xor(a, b)],
    "compare_float": lambda a, b: a > 0.5,
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_unary(dtype: torch.dtype) -> None:
    check(functions(UNARY), torch.linspace(-0.99, 0.99, 23, dtype=dtype))
    # Large arguments, where formulas for hyperbolic functions could overflow or cancel.
    large = {name: UNARY[name] for name in ("asinh", "sinh", "cosh", "erf", "sigmoid", "tanh", "frac")}
    check(functions(large), torch.linspace(-30, 30, 21, dtype=dtype))


def test_unary_of_positive() -> None:
    check(functions({**OF_POSITIVE, "logit_eps": lambda x: torch.logit(x, 0.1)}), torch.linspace(0.01, 3, 20))
    check(functions({"atanh": torch.atanh}), torch.linspace(-0.9, 0.9, 20))
    check(functions({"decimals": lambda x: x.round(decimals=2)}), floats(20))


def test_special_values() -> None:
    x = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -1.0, 2.0])
    named = (
        "isnan",
        "isinf",
        "isfinite",
        "isposinf",
        "isneginf",
        "nan_to_num",
        "relu",
        "sign",
        "exp",
        "sigmoid",
    )
    table = {name: UNARY[name] for name in named}
    table["nan_to"] = lambda x: torch.nan_to_num(x, 1.0, 2.0, 3.0)
    table["clamp"] = lambda x: x.clamp(-0.5, 0.5)
    table["logaddexp"] = lambda x: torch.logaddexp(x, x)
    table["maximum"] = lambda x: torch.maximum(x, torch.zeros_like(x))
    table["fmax"] = lambda x: torch.fmax(x, torch.zeros_like(x))
    table["logsigmoid"] = lambda x: F.logsigmoid(x)
    check(functions(table), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_activations(dtype: torch.dtype) -> None:
    table = dict(ACTIVATIONS)
    if dtype is not torch.float32:
        table = {
            k: f for k, f in table.items() if k not in ("rrelu", "logsigmoid")
        }  # not in PyTorch, or less exact
    check(functions(table), floats(3, 4, 5, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_binary(dtype: torch.dtype) -> None:
    check(functions(BINARY), floats(3, 4, dtype=dtype), floats(4, dtype=dtype, seed=1))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8])
def test_integers(dtype: torch.dtype) -> None:
    check(functions(INTEGER), integers(5, 4, dtype=dtype), integers(4, low=1, dtype=dtype))


def test_bytes() -> None:
    a, b = integers(5, 4, low=0, high=200, dtype=torch.uint8), integers(4, low=1, dtype=torch.uint8)
    table = {name: INTEGER[name] for name in ("add", "mul", "true_div", "div_trunc", "bits", "logical")}
    check(functions(table), a, b)


def test_bools() -> None:
    table = {
        "add": lambda a, b: a + b,
        "mul": lambda a, b: a * b,
        "bits": lambda a, b: [a & b, a | b, a ^ b, ~a],
        "compare": lambda a, b: [a == b, a != b, a < b, a >= b],
        "where": lambda a, b: torch.where(a, b, False),
        "add_int": lambda a, b: a + 1,
        "mul_float": lambda a, b: a * 0.5,
        "extremes": lambda a, b: [torch.maximum(a, b), torch.minimum(a, b)],
        "rsub": lambda a, b: 1.0 - a.float(),
    }
    a, b = torch.tensor([True, True, False, False]), torch.tensor([True, False, True, False])
    check(functions(table), a, b)


def test_bfloat16_numbers_are_not_rounded() -> None:
    """0.1 is not a bfloat16; PyTorch multiplies by the f32 nearest to 0.1."""
    result = check(lambda x: (x * 0.1, x * 0.5), floats(64, dtype=torch.bfloat16))
    inexact, exact = result.graph.outputs
    assert [inexact.op, inexact.inputs[0].op, exact.op] == ["cast", "mul", "mul"]


PROMOTIONS = [
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.float16),
    (torch.int32, torch.float16),
    (torch.int64, torch.int8),
    (torch.bool, torch.int32),
    (torch.uint8, torch.int8),
    (torch.float32, torch.float64),
]


@pytest.mark.parametrize("left, right", PROMOTIONS)
def test_promotion_of_tensors(left: torch.dtype, right: torch.dtype) -> None:
    table = {
        "add": lambda a, b, s: a + b,
        "scalar_tensor": lambda a, b, s: a * s,
        "compare": lambda a, b, s: a > b,
        "where": lambda a, b, s: torch.where(a > 0, a, b),
        "cat": lambda a, b, s: torch.cat([a, b]),
        "stack": lambda a, b, s: torch.stack([a, b]),
        "div": lambda a, b, s: a / b,
        "number": lambda a, b, s: a + 1.5,
        "three": lambda a, b, s: torch.where(a > 0, a + b, s),
    }
    check(
        functions(table), integers(6, low=1).to(left), integers(6, low=1).to(right), torch.tensor(3).to(right)
    )


def test_rank_zero_tensors_do_not_promote() -> None:
    result = check(lambda x, s: x * s, floats(4, dtype=torch.float16), torch.tensor(0.3))
    assert result.graph.outputs[0].dtype is DType.F16


def test_casts_and_copies_leave_nothing() -> None:
    def model(x: torch.Tensor) -> list[torch.Tensor]:
        same = [
            x.detach(),
            x.clone(),
            x.contiguous(),
            x.float(),
            x.to("cpu"),
            F.dropout(x, 0.5, False),
            x.type_as(x),
        ]
        return [*same, x.half(), x.double(), x.long(), x.bool(), x.to(torch.bfloat16)]

    result = check(model, floats(2, 3))
    assert [node.op for node in result.graph.outputs] == ["input"] * 7 + ["cast"] * 5


def test_names_and_sources() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())

        def forward(self, x: torch.Tensor) -> Any:
            return self.inner(x).softmax(-1)

    graph = imported(Model().eval(), floats(2, 4)).graph
    gelu = graph.outputs[0].inputs[0]
    linear = gelu.inputs[0]
    assert (linear.name, gelu.name, graph.outputs[0].name) == ("linear", "gelu", "softmax")
    assert str(linear.source).startswith("inner.0 test_elementwise.py:")
    assert linear.inputs[1].name == "inner.0.weight"
    assert ops_of(imported(Model().eval(), floats(2, 4))).count("constant") == 2
