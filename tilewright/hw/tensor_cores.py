"""The instructions of NVIDIA's tensor cores, and those that load their operands, as warp-level intrinsics.

A fragment is a few contiguous elements, in a thread's registers or in shared memory.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from tilewright import te
from tilewright.dtypes import DType
from tilewright.hw.gpu import WARP
from tilewright.hw.intrinsics import Fragment, Intrinsic, PtxAssembly
from tilewright.hw.memory import Scope

ROWS = 8  # of the matrices that are loaded
_ROW_BYTES = 16
_REGISTER_BYTES = 4
_MAX_MATRICES = 4  # that one instruction loads
_NAMES = {DType.F16: "f16", DType.BF16: "bf16", DType.F32: "tf32", DType.I8: "s8", DType.U8: "u8"}
_OLDEST = ("sm_80",)  # the first with bf16, tf32 and asynchronous copies


def columns(dtype: DType) -> int:
    """Elements in a row of the loaded matrices."""
    return _ROW_BYTES // dtype.bytes


def _intrinsic(name: str, fragments: tuple[Fragment, ...], through: str = "") -> Intrinsic:
    output, *inputs = (fragment.tensor for fragment in fragments)
    emit = PtxAssembly(name, through)
    return Intrinsic(name, output, tuple(inputs), emit, fragments=fragments, features=_OLDEST)


@cache
def multiply(depth: int, dtype: DType) -> Intrinsic:
    """`c[m, n] += a[m, k] * b[n, k]` for 16 x 8 results on tensor cores; `depth` is k, of one or two matrices. 32-bit
    floats are rounded when they are read; products of 8-bit integers are added in 32 bits."""
    a, b = te.Tensor("a", (16, depth), dtype), te.Tensor("b", (8, depth), dtype)
    (k,) = te.reduce_axes([depth])
    into = DType.F32 if dtype.is_float else DType.I32

    def product(m: Any, n: Any) -> te.Expr:
        if dtype.is_float:
            return a[m, k] * b[n, k]
        return te.cast(a[m, k], into) * te.cast(b[n, k], into)

    c = te.compute("c", (16, 8), into, lambda m, n: te.reduce_over("sum", product(m, n), [k]))
    kind, each, wide = _NAMES[dtype], _REGISTER_BYTES // dtype.bytes, columns(dtype)
    sum_kind = "f32" if dtype.is_float else "s32"

    def sums(lane: Any, n: Any) -> tuple[Any, ...]:
        return lane // 4 + n // 2 * 8, lane % 4 * 2 + n % 2

    def left(lane: Any, n: Any) -> tuple[Any, ...]:
        return lane // 4 + n // each % 2 * 8, lane % 4 * each + n % each + n // (2 * each) * wide

    def right(lane: Any, n: Any) -> tuple[Any, ...]:
        return lane // 4, lane % 4 * each + n % each + n // each * wide

    return _intrinsic(
        f"mma.sync.aligned.m16n8k{depth}.row.col.{sum_kind}.{kind}.{kind}.{sum_kind}",
        (
            Fragment(c, Scope.REGISTER, 4, sums, WARP),
            Fragment(a, Scope.REGISTER, 16 * depth // WARP, left, WARP),
            Fragment(b, Scope.REGISTER, 8 * depth // WARP, right, WARP),
        ),
        "shortened" if dtype is DType.F32 else "",
    )


@cache
def load_left(depth: int, dtype: DType, count: int = 1, transposed: bool = False) -> Intrinsic:
    """Load the left operand of `multiply(depth, dtype)`, 16 rows of shared memory, each thread giving the address of a
    part of a row; `count` operands below each other. `transposed`: rows of shared memory run along the operand's
    columns, for 16-bit elements only."""
    return _load_operand("left", 16, depth, dtype, count, transposed)


@cache
def load_right(depth: int, dtype: DType, count: int = 1, transposed: bool = False) -> Intrinsic:
    """Load the right operand of `multiply(depth, dtype)`, 8 rows of shared memory, as `load_left` loads the left."""
    return _load_operand("right", 8, depth, dtype, count, transposed)


def loaded_together(depth: int, dtype: DType, rows: int) -> int:
    """How many operands of so many rows (16 of the left, 8 of the right) one instruction loads at most."""
    return max(1, _MAX_MATRICES // (rows // ROWS * (depth // columns(dtype))))


def _load_operand(name: str, rows: int, depth: int, dtype: DType, count: int, transposed: bool) -> Intrinsic:
    wide = columns(dtype)
    each = rows // ROWS * (depth // wide)  # matrices of an operand
    shape = (depth, count * rows) if transposed else (count * rows, depth)
    source = te.Tensor("source", shape, dtype)
    into = te.compute(
        f"into_{name}",
        (count * rows, depth),
        dtype,
        lambda m, k: te.Load(source, (k, m) if transposed else (m, k)),
    )
    held = multiply(depth, dtype).fragments[1 if name == "left" else 2]

    def element(lane: Any, n: Any) -> tuple[Any, ...]:
        row, column = held.element(lane, n % held.size)
        return row + n // held.size * rows, column

    def row(lane: Any, n: Any) -> tuple[Any, ...]:
        """The matrices in the order of the operands' registers: first along rows, then along k."""
        number = lane // ROWS % each
        down, along = (number % 2, number // 2) if rows > ROWS else (0, number)
        down = down + lane // ROWS // each * (rows // ROWS)
        within = lane % ROWS
        return (
            (along * wide + within, down * ROWS + n)
            if transposed
            else (within + down * ROWS, along * wide + n)
        )

    matrices = count * each
    return _intrinsic(
        f"ldmatrix.sync.aligned.m8n8.x{matrices}{'.trans' * transposed}.shared.b16",
        (
            Fragment(into, Scope.REGISTER, count * held.size, element if count > 1 else held.element, WARP),
            Fragment(source, Scope.SCRATCH, wide, row, lanes=ROWS * matrices),
        ),
    )


@cache
def multiply_add(dtype: DType) -> Intrinsic:
    """`c[m, n] += a[m, k] * b[n, k]` for one element each in one thread: the scalar step of every contraction."""
    a, b = te.Tensor("a", (1, 1), dtype), te.Tensor("b", (1, 1), dtype)
    (k,) = te.reduce_axes([1])
    c = te.compute("c", (1, 1), DType.F32, lambda m, n: te.reduce_over("sum", a[m, k] * b[n, k], [k]))
    held = (Fragment(tensor, Scope.REGISTER, 1, lambda lane, n: (0, 0)) for tensor in (c, a, b))
    return _intrinsic("fma.rn.f32", tuple(held))


@cache
def load_matrices(count: int, dtype: DType, transposed: bool) -> Intrinsic:
    """Load `count` (1, 2 or 4) matrices of 8 rows of 16 bytes from shared memory; each thread gives the address of a
    row. `transposed`: load their transposes, for 16-bit elements only."""
    wide, each = columns(dtype), _REGISTER_BYTES // dtype.bytes
    source = te.Tensor("source", (count, ROWS, wide), dtype)
    into = te.compute(
        "into",
        (count, ROWS, wide),
        dtype,
        lambda g, i, j: te.Load(source, (g, j, i) if transposed else (g, i, j)),
    )
    return _intrinsic(
        f"ldmatrix.sync.aligned.m8n8.x{count}{'.trans' * transposed}.shared.b16",
        (
            Fragment(
                into,
                Scope.REGISTER,
                each * count,
                lambda lane, n: (n // each, lane // 4, lane % 4 * each + n % each),
                WARP,
            ),
            Fragment(
                source,
                Scope.SCRATCH,
                wide,
                lambda lane, n: (lane // ROWS, lane % ROWS, n),
                lanes=ROWS * count,
            ),
        ),
    )
