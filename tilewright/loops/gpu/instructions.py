"""Instructions that the threads of a warp carry out together: what they compute, as a tensor expression over tiles, and
which share of each tile every thread has.

A share is a few elements that lie together, in the thread's registers or in scratch memory. An instruction that is a
reduction adds to what is in its result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from tilewright import te
from tilewright.dtypes import DType
from tilewright.hw.gpu import WARP
from tilewright.loops.ir import Scope

ROWS = 8  # of the matrices that are loaded
_ROW_BYTES = 16
_REGISTER_BYTES = 4
_NAMES = {DType.F16: "f16", DType.BF16: "bf16", DType.F32: "tf32"}


def columns(dtype: DType) -> int:
    """Elements of a row of the matrices that are loaded."""
    return _ROW_BYTES // dtype.bytes


@dataclass(frozen=True, eq=False)
class Share:
    """Of a tile: element `n` of `size` of thread `lane` is the tile's at `element(lane, n)`. Threads from `lanes` on
    have none."""

    tensor: te.Tensor
    scope: Scope
    size: int
    element: Callable[[Any, Any], tuple[Any, ...]]
    lanes: int = WARP


@dataclass(frozen=True, eq=False)
class Instruction:
    """`name` is the assembler's; `shares` are of the result, then of the operands in the assembler's order. `through`
    is a function of `codegen/cuda` that registers of the operands go through."""

    name: str
    output: te.Compute
    shares: tuple[Share, ...]
    through: str = ""

    @property
    def adds(self) -> bool:
        return self.output.reduction is not None


@cache
def multiply(depth: int, dtype: DType) -> Instruction:
    """`c[m, n] += a[m, k] * b[n, k]` of 16 x 8 results, on tensor cores; `depth` is of one or two matrices. 32-bit
    floats are rounded on the way in."""
    a, b = te.Tensor("a", (16, depth), dtype), te.Tensor("b", (8, depth), dtype)
    (k,) = te.reduce_axes([depth])
    c = te.compute("c", (16, 8), DType.F32, lambda m, n: te.reduce_over("sum", a[m, k] * b[n, k], [k]))
    kind, each, wide = _NAMES[dtype], _REGISTER_BYTES // dtype.bytes, columns(dtype)

    def left(lane: Any, n: Any) -> tuple[Any, ...]:
        return lane // 4 + n // each % 2 * 8, lane % 4 * each + n % each + n // (2 * each) * wide

    def right(lane: Any, n: Any) -> tuple[Any, ...]:
        return lane // 4, lane % 4 * each + n % each + n // each * wide

    return Instruction(
        f"mma.sync.aligned.m16n8k{depth}.row.col.f32.{kind}.{kind}.f32",
        c,
        (
            Share(c, Scope.REGISTER, 4, lambda lane, n: (lane // 4 + n // 2 * 8, lane % 4 * 2 + n % 2)),
            Share(a, Scope.REGISTER, 16 * depth // WARP, left),
            Share(b, Scope.REGISTER, 8 * depth // WARP, right),
        ),
        "shortened" if dtype is DType.F32 else "",
    )


@cache
def multiply_add(dtype: DType) -> Instruction:
    """`c[m, n] += a[m, k] * b[n, k]` of one element each, in a thread of its own: what every contraction is made of."""
    a, b = te.Tensor("a", (1, 1), dtype), te.Tensor("b", (1, 1), dtype)
    (k,) = te.reduce_axes([1])
    c = te.compute("c", (1, 1), DType.F32, lambda m, n: te.reduce_over("sum", a[m, k] * b[n, k], [k]))
    shares = (Share(tensor, Scope.REGISTER, 1, lambda lane, n: (0, 0), lanes=1) for tensor in (c, a, b))
    return Instruction("fma.rn.f32", c, tuple(shares))


@cache
def load_matrices(count: int, dtype: DType, turned: bool) -> Instruction:
    """`count` matrices of 8 rows of 16 bytes from scratch memory, one row from where each thread says; `turned`: as
    their transposes, of 16-bit elements alone. 1, 2 or 4."""
    wide, each = columns(dtype), _REGISTER_BYTES // dtype.bytes
    source = te.Tensor("source", (count, ROWS, wide), dtype)
    into = te.compute(
        "into",
        (count, ROWS, wide),
        dtype,
        lambda g, i, j: te.Load(source, (g, j, i) if turned else (g, i, j)),
    )
    return Instruction(
        f"ldmatrix.sync.aligned.m8n8.x{count}{'.trans' * turned}.shared.b16",
        into,
        (
            Share(
                into,
                Scope.REGISTER,
                each * count,
                lambda lane, n: (n // each, lane // 4, lane % 4 * each + n % each),
            ),
            Share(
                source,
                Scope.SCRATCH,
                wide,
                lambda lane, n: (lane // ROWS, lane % ROWS, n),
                lanes=ROWS * count,
            ),
        ),
    )
