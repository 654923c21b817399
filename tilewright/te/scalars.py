"""The scalar functions of tensor expressions: one table, which every code generator must support.

`numpy` defines the meaning, for the interpreter of loop programs and the tests of generated code.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Scalar:
    name: str
    arity: int
    numpy: Callable[..., Any]
    predicate: bool = False  # returns a bool whatever its arguments are
    symbol: str = ""  # infix form in text

    @property
    def text(self) -> str:
        return self.symbol or self.name


_erf = np.vectorize(math.erf, otypes=[np.float64])


def _erf_like(x: Any) -> Any:
    return _erf(x).astype(np.asarray(x).dtype)


def _exp2_weight(x: Any) -> Any:
    exponent = np.finfo(np.asarray(x).dtype).minexp
    with np.errstate(over="ignore"):
        return np.where(x < exponent - 0.5, 0, np.exp2(x)).astype(np.asarray(x).dtype)


def _floor_pow2(x: Any) -> Any:
    mantissa, exponent = np.frexp(x)
    return np.where(np.isfinite(x) & (mantissa != 0), np.ldexp(np.sign(mantissa), exponent - 1), x).astype(
        np.asarray(x).dtype
    )


def _dot4(a: Any, b: Any, c: Any) -> Any:
    total = np.asarray(c, np.int64)
    for shift in (0, 8, 16, 24):
        unsigned, signed = np.right_shift(a, shift) & 255, np.right_shift(b, shift) & 255
        total = total + unsigned * np.where(signed < 128, signed, signed - 256)
    return total.astype(np.int32)  # wraps around


_TABLE = [
    # arithmetic, any type
    Scalar("add", 2, np.add, symbol="+"),
    Scalar("sub", 2, np.subtract, symbol="-"),
    Scalar("mul", 2, np.multiply, symbol="*"),
    Scalar("min", 2, np.minimum),
    Scalar("max", 2, np.maximum),
    Scalar("neg", 1, np.negative),
    Scalar("abs", 1, np.abs),
    # integers: rounding towards minus infinity, the remainder has the divisor's sign
    Scalar("floordiv", 2, np.floor_divide, symbol="//"),
    Scalar("mod", 2, np.mod, symbol="%"),
    Scalar("shl", 2, np.left_shift, symbol="<<"),
    Scalar("shr", 2, np.right_shift, symbol=">>"),
    # bools and integers, bitwise
    Scalar("and", 2, np.bitwise_and, symbol="&"),
    Scalar("or", 2, np.bitwise_or, symbol="|"),
    Scalar("xor", 2, np.bitwise_xor, symbol="^"),
    Scalar("not", 1, np.invert),
    # comparisons
    Scalar("eq", 2, np.equal, predicate=True, symbol="=="),
    Scalar("ne", 2, np.not_equal, predicate=True, symbol="!="),
    Scalar("lt", 2, np.less, predicate=True, symbol="<"),
    Scalar("le", 2, np.less_equal, predicate=True, symbol="<="),
    # floats
    Scalar("div", 2, np.divide, symbol="/"),
    Scalar("fmod", 2, np.fmod),
    Scalar("pow", 2, np.power),
    Scalar("atan2", 2, np.arctan2),
    Scalar("sqrt", 1, np.sqrt),
    Scalar("rsqrt", 1, lambda x: 1 / np.sqrt(x)),
    Scalar("exp", 1, np.exp),
    Scalar(
        "exp2_nonpositive", 1, _exp2_weight
    ),  # for arguments up to 0; results below the normal numbers are 0
    Scalar("exp2_rough", 1, _exp2_weight),  # the same for any argument, to at least 20 bits
    Scalar("expm1", 1, np.expm1),
    Scalar("log", 1, np.log),
    Scalar("log1p", 1, np.log1p),
    Scalar("sin", 1, np.sin),
    Scalar("cos", 1, np.cos),
    Scalar("tanh", 1, np.tanh),
    Scalar("erf", 1, _erf_like),
    Scalar("floor_pow2", 1, _floor_pow2),  # the power of two at or below a normal number, with its sign
    Scalar("floor", 1, np.floor),
    Scalar("ceil", 1, np.ceil),
    Scalar("trunc", 1, np.trunc),
    Scalar("round", 1, np.rint),  # halves to even
    Scalar("copysign", 2, np.copysign),
    # a * b + c, rounded once; the update of every sum of products
    Scalar(
        "fma", 3, lambda a, b, c: (np.multiply(a, b, dtype=np.longdouble) + c).astype(np.asarray(c).dtype)
    ),
    # i32: the four unsigned bytes of a times the four signed bytes of b, plus c
    Scalar("dot4", 3, _dot4),
]

SCALARS: dict[str, Scalar] = {scalar.name: scalar for scalar in _TABLE}

# Functions that cost many times an addition, and are better stored than recomputed. Fusion has the same table for
# operators, including those lowered to one of these (`rewrites/fuse.py`).
EXPENSIVE_CALLS = frozenset(
    [
        *("exp", "exp2_nonpositive", "expm1", "log", "log1p", "pow"),
        *("tanh", "erf", "sin", "cos", "atan2", "div", "sqrt"),
    ]
)
