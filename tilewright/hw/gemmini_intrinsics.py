"""Gemmini's instructions as intrinsics: what each computes over tiles of `dim` rows and columns, and in which memories
its operands are."""

from __future__ import annotations

from functools import cache

from tilewright import te
from tilewright.dtypes import DType
from tilewright.hw.gemmini import ACCUMULATOR, SCRATCHPAD
from tilewright.hw.intrinsics import AcceleratorCode, Fragment, Intrinsic, vector
from tilewright.hw.memory import Scope


def _in(tensor: te.Tensor, scope: Scope) -> Fragment:
    whole = vector(tensor)
    return Fragment(tensor, scope, whole.size, whole.element)


@cache
def multiply(dim: int) -> Intrinsic:
    """`c[m, n] += a[m, k] * b[k, n]`: the array, its weights preloaded, its sums in the accumulator."""
    a, b = te.Tensor("a", (dim, dim), DType.I8), te.Tensor("b", (dim, dim), DType.I8)
    (k,) = te.reduce_axes([dim])

    def element(m: te.Expr, n: te.Expr) -> te.Expr:
        return te.reduce_over("sum", te.cast(a[m, k], DType.I32) * te.cast(b[k, n], DType.I32), [k])

    c = te.compute("c", (dim, dim), DType.I32, element)
    return Intrinsic(
        "gemmini.multiply",
        c,
        (a, b),
        AcceleratorCode(("preload", "compute_preloaded")),
        fragments=(_in(c, ACCUMULATOR), _in(a, SCRATCHPAD), _in(b, SCRATCHPAD)),
    )


@cache
def load(dim: int, accumulator: bool = False) -> Intrinsic:
    """DRAM to the scratchpad, or 32-bit sums to the accumulator."""
    dtype = DType.I32 if accumulator else DType.I8
    source = te.Tensor("source", (dim, dim), dtype)
    into = te.compute("into", (dim, dim), dtype, lambda m, n: source[m, n])
    scope = ACCUMULATOR if accumulator else SCRATCHPAD
    name = "gemmini.load_accumulator" if accumulator else "gemmini.load"
    opcode = "mvin3" if accumulator else "mvin"
    return Intrinsic(
        name,
        into,
        (source,),
        AcceleratorCode((opcode,)),
        fragments=(_in(into, scope), _in(source, Scope.GLOBAL)),
    )


@cache
def store(dim: int, relu: bool = False) -> Intrinsic:
    """Sums to DRAM, times a scale, rounded to the nearest integer (ties to even) and saturated to 8 bits."""
    sums, scale = te.Tensor("sums", (dim, dim), DType.I32), te.Tensor("scale", (), DType.F32)

    def element(m: te.Expr, n: te.Expr) -> te.Expr:
        value: te.Expr = sums[m, n]
        if relu:
            value = te.call("max", value, te.Const(0, DType.I32))
        scaled = te.call("round", te.cast(value, DType.F32) * scale[()])
        low, high = te.Const(-128.0, DType.F32), te.Const(127.0, DType.F32)
        return te.cast(te.call("min", te.call("max", scaled, low), high), DType.I8)

    into = te.compute("into", (dim, dim), DType.I8, element)
    return Intrinsic(
        "gemmini.store_relu" if relu else "gemmini.store",
        into,
        (sums, scale),
        AcceleratorCode(("mvout",)),
        fragments=(_in(into, Scope.GLOBAL), _in(sums, ACCUMULATOR), _in(scale, Scope.REGISTER)),
    )


def intrinsics(dim: int) -> tuple[Intrinsic, ...]:
    """The intrinsics of an array of this size."""
    return (multiply(dim), load(dim), load(dim, accumulator=True), store(dim), store(dim, relu=True))
