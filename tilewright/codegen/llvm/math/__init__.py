"""Elementary functions as LLVM IR, for scalars and vectors of float and double, with no library behind them.

    value = emit(builder, "exp", x)                                         # x: float, double, or a vector of them
    value = emit(builder, "pow", x, y, context=MathContext(has_fma=False))  # for a machine without FMA

LLVM's own `llvm.exp` and its like become calls of libm, which a generated object may not need. Everything here is
arithmetic, comparisons, selects, bit operations and the intrinsics that are instructions on every target: fabs,
copysign, sqrt, and fma where the context says that there is one. Rounding to integers is by adding a large number,
since `llvm.rint` without SSE4.1 is a call.

The largest errors seen, in units of the last place, over the whole range (the tests allow 2):

            exp   exp2  expm1 tanh  log   log2  log1p sin   cos   erf   pow   atan2 rsqrt fmod
    float   0.90  0.92  1.31  1.59  0.93  1.14  1.53  1.54  1.54  1.67  0.51  0.51  1.50  0
    double  0.87  0.80  1.27  1.54  0.82  0.78  1.28  0.78  0.76  1.00  0.77  0.77  1.49  0

For floats of one argument all numbers were tried where the function bends, a part of them elsewhere; for the others,
millions at random. Without FMA exp, exp2 and erf lose 0.3 more at most. sin and cos hold for arguments of any size.

Special cases are those of C99: signed zeros, infinities, NaN, overflow, gradual underflow, all of pow's table. fmod is
exact. Scalars and vectors of any length give the same bits.

- No instruction carries a fast-math flag, whatever the caller sets on its own: the error terms would be folded away.
  For the same reason a caller must not put "unsafe-fp-math" or its kin on the function that it emits into.
- The default rounding mode is assumed, and that subnormal numbers are not flushed.
- The code stays in the builder's block. What branches or loops is an internal function of the module, made once per
  module and type: `sin` and `cos` (always inlined; their far path, from 2^18 on, is not), `pow`, `fmod` (lane by lane).

Where the polynomials come from: `fit.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import llvmlite.ir as ir

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


_DEFAULT = MathContext()


def emit(builder: ir.IRBuilder, name: str, *args: ir.Value, context: MathContext = _DEFAULT) -> ir.Value:
    """The function of this name (KeyError if there is none) of the arguments, at the builder's place."""
    function = _FUNCTIONS[name]
    if len({str(arg.type) for arg in args}) != 1:
        raise TypeError(
            f"{name} takes arguments of one type, not ({', '.join(str(arg.type) for arg in args)})"
        )
    here = Emit(builder, args[0].type, context)
    return function(*(Real(here, arg) for arg in args)).value
