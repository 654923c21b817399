"""The matrix instructions of a warpgroup (`wgmma`, sm_90a), and how they find operands in shared memory.

Four warps compute 64 rows together. The second operand is in shared memory, the first there or in registers, as
`mma.sync` takes it. An operand in shared memory is named by a descriptor of 64 bits. Its rows lie along k, or, of
16-bit types, across k (transposed), in panels of 32, 64 or 128 bytes whose 16-byte chunks are swizzled, as tiles of the
tile language are (`codegen/cuda/tiles/contraction.py`), so that the same copies serve either instruction.
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
MAX_COLUMNS = 256
PANEL_BYTES = 128  # of the longest row
_DEPTHS = {DType.F16: 16, DType.BF16: 16, DType.F32: 8}
_NAMES = {DType.F16: "f16", DType.BF16: "bf16", DType.F32: "tf32"}
_SWIZZLES = {128: 1, 64: 2, 32: 3}  # by bytes of a row: what the descriptor's last bits are
ROW_BYTES = tuple(_SWIZZLES)
ATOM_ROWS, _CHUNK = 8, 16  # rows whose chunks are swizzled differently, and bytes of a chunk
_LEFT_REGISTERS = 4
_REGISTERS = 1 << 16  # of a multiprocessor
_REGISTER_UNIT = 8  # of a thread: what an instruction or a launch divides


def role_registers(consumers: int) -> tuple[int, int] | None:
    """The registers of a thread that only copies and of one that computes, where one warpgroup copies for so many
    others and all of a multiprocessor are theirs. They divide what the block began with, in which each thread has as
    many as any other: who asks for more waits forever. None: each can have as many as an instruction can name."""
    if consumers < 2:
        return None
    copies = 40 if consumers == 2 else 32
    begun = _REGISTERS // WARPGROUP // (consumers + 1) // _REGISTER_UNIT * _REGISTER_UNIT
    computes = (begun * (consumers + 1) - copies) // consumers // _REGISTER_UNIT * _REGISTER_UNIT
    return copies, min(240, computes)


@cache
def warpgroup_multiply(columns: int, dtype: DType, *, left_in_registers: bool = False) -> Intrinsic:
    """`c[m, n] += a[m, k] * b[n, k]` of 64 x `columns` results, a multiple of 8 up to 256; k has 32 bytes."""
    assert columns % 8 == 0 and 8 <= columns <= MAX_COLUMNS
    depth = _DEPTHS[dtype]
    a, b = te.Tensor("a", (ROWS, depth), dtype), te.Tensor("b", (columns, depth), dtype)
    (k,) = te.reduce_axes([depth])
    c = te.compute(
        "c", (ROWS, columns), DType.F32, lambda m, n: te.reduce_over("sum", a[m, k] * b[n, k], [k])
    )
    each = 4 // dtype.bytes  # elements of a register

    def sums(thread: Any, n: Any) -> tuple[Any, ...]:
        lane = thread % 32
        pair = n // 2  # of neighbours: so that pairs are seen to be neighbours where n is twice something
        return thread // 32 * 16 + lane // 4 + pair % 2 * 8, lane % 4 * 2 + n % 2 + pair // 2 * 8

    def left(thread: Any, n: Any) -> tuple[Any, ...]:
        lane = thread % 32
        row = thread // 32 * 16 + lane // 4 + n // each % 2 * 8
        return row, lane % 4 * each + n % each + n // (2 * each) * (depth // 2)

    def whole(thread: Any, n: Any) -> tuple[Any, ...]:
        return n // depth, n % depth

    kind = _NAMES[dtype]
    name = f"wgmma.mma_async.sync.aligned.m64n{columns}k{depth}.f32.{kind}.{kind}"
    first = (
        Fragment(a, Scope.REGISTER, _LEFT_REGISTERS * each, left, WARPGROUP)
        if left_in_registers
        else Fragment(a, Scope.SCRATCH, ROWS * depth, whole)
    )
    fragments = (
        Fragment(c, Scope.REGISTER, ROWS * columns // WARPGROUP, sums, WARPGROUP),
        first,
        Fragment(b, Scope.SCRATCH, columns * depth, whole),
    )
    return Intrinsic(name, c, (a, b), PtxAssembly(name), fragments=fragments, features=("warpgroup_mma",))


def matrix_descriptor(row_bytes: int, panel_bytes: int = _CHUNK) -> int:
    """The constant part of the descriptor of an operand with rows of 128, 64 or 32 bytes; add the address of its first
    atom divided by 16. An atom begins at a multiple of its size. For rows along k, add 2 for each step of 32 bytes
    within the row; groups of eight rows are contiguous. For rows across k, `panel_bytes` is the distance of the next
    panel of rows; a step of 16 along k is 16 rows."""
    stride = ATOM_ROWS * row_bytes // _CHUNK
    return panel_bytes // _CHUNK << 16 | stride << 32 | _SWIZZLES[row_bytes] << 62


def swizzled_offset(row: int, byte: int, row_bytes: int) -> int:
    """The offset of a row's byte from the beginning of the operand."""
    chunk, rest = divmod(byte, _CHUNK)
    turn = {128: row & 7, 64: row >> 1 & 3, 32: row >> 2 & 1}[row_bytes]
    return row * row_bytes + (chunk ^ turn) * _CHUNK + rest


def function_text(intrinsic: Intrinsic, name: str, *, across: tuple[bool, bool] = (False, False)) -> str:
    """A CUDA function around the instruction: accumulators, the operands (descriptors, or four registers), and whether
    it adds to what the accumulators hold. `across`: which operands have rows across k."""
    assert isinstance(intrinsic.emit, PtxAssembly)
    sums, first, _ = intrinsic.fragments
    count = sums.size
    held = first.scope is Scope.REGISTER
    inputs = [f'"r"(a[{n}])' for n in range(_LEFT_REGISTERS)] if held else ['"l"(a)']
    numbers = [f"%{count + n}" for n in range(len(inputs))]
    left = f"{{{', '.join(numbers)}}}" if held else numbers[0]
    right, adds = f"%{count + len(inputs)}", f"%{count + len(inputs) + 1}"
    registers = ", ".join(f"%{n}" for n in range(count))
    outputs = ", ".join(f'"+f"(c[{n}])' for n in range(count))
    signs = ["1", "1"]
    if intrinsic.inputs[0].dtype.bytes == 2:
        signs += [str(int(each)) for each in (across[1:] if held else across)]
    kind = "const unsigned* a" if held else "unsigned long long a"
    return (
        f"__device__ inline void {name}(float* c, {kind}, unsigned long long b, int adds) {{\n"
        f'  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, {adds}, 0;\\n"\n'
        f'    "{intrinsic.emit.mnemonic} {{{registers}}}, {left}, {right}, p, {", ".join(signs)};\\n}}\\n"\n'
        f'    : {outputs} : {", ".join(inputs)}, "l"(b), "r"(adds));\n}}\n'
    )


def wait_text(count: int, name: str) -> str:
    """A CUDA function that waits until the accumulators of all multiplications so far are there."""
    outputs = ", ".join(f'"+f"(c[{n}])' for n in range(count))
    return (
        f"__device__ inline void {name}(float* c) {{\n"
        f'  asm volatile("wgmma.wait_group.sync.aligned 0;" : {outputs} :: "memory");\n}}\n'
    )
