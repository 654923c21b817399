"""Intrinsics that the compiler does not know, as a user would declare them."""

from __future__ import annotations

from tilewright import te
from tilewright.dtypes import DType
from tilewright.hw.intrinsics import (
    Emission,
    Fragment,
    Intrinsic,
    LlvmAssembly,
    LlvmIntrinsic,
    broadcast,
    vector,
)
from tilewright.hw.memory import Scope

F32, I16, I32 = DType.F32, DType.I16, DType.I32


def fma(name: str, emit: Emission, features: tuple[str, ...] = ("avx2", "fma")) -> Intrinsic:
    """`c[n] += a * b[n]` of eight floats."""
    a, b = te.Tensor("a", (), F32), te.Tensor("b", (8,), F32)
    c = te.compute("c", (8,), F32, lambda n: te.reduce_over("sum", a[()] * b[n], []))
    return Intrinsic(
        name, c, (a, b), emit, fragments=(vector(c), broadcast(a, 8), vector(b)), features=features
    )


def assembly(text: str) -> LlvmAssembly:
    return LlvmAssembly(text, "=x,x,x,0", ("a", "b", "c"))


FMA = fma("fma_8xf32", assembly("vfmadd231ps $2, $1, $0"))
WRONG = fma("wrong_8xf32", assembly("vfmsub231ps $2, $1, $0"))  # subtracts what it should add
NONSENSE = fma("nonsense_8xf32", assembly("vfmaddfoops $2, $1, $0"))
ABSENT = fma("absent_8xf32", assembly("vfmadd231ps $2, $1, $0"), ("a-feature-of-tomorrow",))


def _mul() -> Intrinsic:
    """`y[i] = x[i] * s[i]`: no reduction."""
    x, s = te.Tensor("x", (8,), F32), te.Tensor("s", (8,), F32)
    y = te.compute("y", (8,), F32, lambda i: x[i] * s[i])
    return Intrinsic(
        "mul_8xf32", y, (x, s), LlvmAssembly("vmulps $2, $1, $0", "=x,x,x", ("x", "s")), features=("avx2",)
    )


MUL = _mul()


def pmaddwd() -> Intrinsic:
    """`c[n] += sum(a[k] * b[n, k], k)` of pairs of 16-bit integers: what the instruction makes is added afterwards."""
    a, b = te.Tensor("a", (2,), I16), te.Tensor("b", (8, 2), I16)
    (k,) = te.reduce_axes([2])
    c = te.compute(
        "c", (8,), I32, lambda n: te.reduce_over("sum", te.cast(a[k], I32) * te.cast(b[n, k], I32), [k])
    )
    pairs = Fragment(a, Scope.REGISTER, 16, lambda lane, n: (n % 2,))
    return Intrinsic(
        "pmaddwd",
        c,
        (a, b),
        LlvmIntrinsic("llvm.x86.avx2.pmadd.wd", ("a", "b")),
        fragments=(vector(c), pairs, vector(b)),
        features=("avx2",),
    )
