"""Elementary functions as LLVM IR."""

from __future__ import annotations

from collections.abc import Callable

import llvmlite.ir as ir  # type: ignore[import-untyped, unused-ignore]

from .error_function import erf
from .exponential import exp, exp2, expm1, tanh
from .logarithm import log, log1p, log2
from .power import fmod, pow, rsqrt
from .trigonometric import atan2, cos, sin
from .values import Emit, MathContext, Real

__all__ = ["FUNCTIONS", "MathContext", "emit"]

_FUNCTIONS: dict[str, Callable[..., Real]] = {
    function.__name__: function
    for function in (exp, expm1, exp2, log, log2, log1p, sin, cos, tanh, erf, pow, rsqrt, atan2, fmod)
}
FUNCTIONS: frozenset[str] = frozenset(_FUNCTIONS)


def emit(
    builder: ir.IRBuilder, name: str, *args: ir.Value, context: MathContext = MathContext()
) -> ir.Value:
    function = _FUNCTIONS[name]
    here = Emit(builder, args[0].type, context)
    return function(*(Real(here, arg) for arg in args)).value
