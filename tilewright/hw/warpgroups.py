"""The matrix instructions of a warpgroup (`wgmma`, sm_90a), and how they find operands in shared memory.

Four warps compute 64 rows together; both operands are in shared memory, each named by a descriptor of 64 bits. Their
rows lie along k, in atoms of 8 rows of 32, 64 or 128 bytes whose 16-byte chunks are swizzled, as tiles of the tile
language are (`codegen/cuda/tiles/contraction.py`), so that the same copies serve either instruction.

No kernel uses these yet.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from tilewright import te
from tilewright.dtypes import DType
from tilewright.hw.intrinsics import Fragment, Intrinsic, PtxAssembly
from tilewright.hw.memory import Scope

WARPGROUP = 128  # threads
ROWS = 64  # of the results of one instruction
_DEPTHS = {DType.F16: 16, DType.BF16: 16, DType.F32: 8}
_NAMES = {DType.F16: "f16", DType.BF16: "bf16", DType.F32: "tf32"}
_SWIZZLES = {128: 1, 64: 2, 32: 3}  # by bytes of a row: what the descriptor's last bits are
_ATOM_ROWS, _CHUNK = 8, 16


@cache
def warpgroup_multiply(columns: int, dtype: DType) -> Intrinsic:
    """`c[m, n] += a[m, k] * b[n, k]` of 64 x `columns` results, a multiple of 8 up to 256; k has 32 bytes."""
    assert columns % 8 == 0 and 8 <= columns <= 256
    depth = _DEPTHS[dtype]
    a, b = te.Tensor("a", (ROWS, depth), dtype), te.Tensor("b", (columns, depth), dtype)
    (k,) = te.reduce_axes([depth])
    c = te.compute(
        "c", (ROWS, columns), DType.F32, lambda m, n: te.reduce_over("sum", a[m, k] * b[n, k], [k])
    )

    def sums(thread: Any, n: Any) -> tuple[Any, ...]:
        lane = thread % 32
        return thread // 32 * 16 + lane // 4 + n // 2 % 2 * 8, lane % 4 * 2 + n % 2 + n // 4 * 8

    def whole(thread: Any, n: Any) -> tuple[Any, ...]:
        return n // depth, n % depth

    kind = _NAMES[dtype]
    name = f"wgmma.mma_async.sync.aligned.m64n{columns}k{depth}.f32.{kind}.{kind}"
    fragments = (
        Fragment(c, Scope.REGISTER, ROWS * columns // WARPGROUP, sums, WARPGROUP),
        Fragment(a, Scope.SCRATCH, ROWS * depth, whole),
        Fragment(b, Scope.SCRATCH, columns * depth, whole),
    )
    return Intrinsic(name, c, (a, b), PtxAssembly(name), fragments=fragments, features=("warpgroup_mma",))


def matrix_descriptor(row_bytes: int) -> int:
    """What is constant in the descriptor of an operand with rows of 128, 64 or 32 bytes along k; the address of its
    first atom divided by 16 is added, and 2 for each step of 32 bytes along k within the row. An atom begins at a
    multiple of its size."""
    leading = 1  # between columns of atoms: there is one, so it is not used
    stride = _ATOM_ROWS * row_bytes // _CHUNK
    return leading << 16 | stride << 32 | _SWIZZLES[row_bytes] << 62


def swizzled_offset(row: int, byte: int, row_bytes: int) -> int:
    """Where a byte of a row lies, from the beginning of the operand."""
    chunk, rest = divmod(byte, _CHUNK)
    turn = {128: row & 7, 64: row >> 1 & 3, 32: row >> 2 & 1}[row_bytes]
    return row * row_bytes + (chunk ^ turn) * _CHUNK + rest


def function_text(intrinsic: Intrinsic, name: str) -> str:
    """A CUDA function around the instruction: accumulators, two descriptors, and whether it adds to what they hold."""
    assert isinstance(intrinsic.emit, PtxAssembly)
    count = intrinsic.fragments[0].size
    registers = ", ".join(f"%{n}" for n in range(count))
    outputs = ", ".join(f'"+f"(c[{n}])' for n in range(count))
    halves = intrinsic.inputs[0].dtype.bytes == 2
    scales = (
        "1, 1, 0, 0" if halves else "1, 1"
    )  # signs, and for 16-bit types that neither operand is transposed
    return (
        f"__device__ inline void {name}(float* c, unsigned long long a, unsigned long long b, int adds) {{\n"
        f'  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 2}, 0;\\n"\n'
        f'    "{intrinsic.emit.mnemonic} {{{registers}}}, %{count}, %{count + 1}, p, {scales};\\n}}\\n"\n'
        f'    : {outputs} : "l"(a), "l"(b), "r"(adds));\n}}\n'
    )
