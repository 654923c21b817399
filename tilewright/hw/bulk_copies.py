"""The tensor copy engine (TMA, from sm_90 on): boxes of a tensor to shared memory, completing on a barrier there.

A tensor map says where a tensor is, its sizes and strides, and what box one instruction copies, with which swizzle; the
driver encodes it into 128 bytes, which a kernel has as a parameter. What of a box is outside of the tensor is zero. The
instruction is issued by one thread. It announces nothing: the thread tells the barrier first how many bytes will come.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from tilewright import te
from tilewright.dtypes import DType
from tilewright.hw.intrinsics import Fragment, Intrinsic, PtxAssembly
from tilewright.hw.memory import Scope

MAP_BYTES = 128
BARRIER_BYTES = 8
MAX_BOX = 256  # elements along one axis
ALIGNMENT = 16  # of the tensor's address and strides, in bytes
_RANK = 2


@dataclass(frozen=True)
class Box:
    """A box that one instruction copies: `rows` rows of `columns` contiguous elements each. A row has 32, 64 or 128
    bytes, and its length decides the swizzle (`hw/warpgroups.py`)."""

    dtype: DType
    rows: int
    columns: int

    @property
    def row_bytes(self) -> int:
        return self.columns * self.dtype.bytes

    @property
    def bytes(self) -> int:
        return self.rows * self.row_bytes


@cache
def copy_box(box: Box) -> Intrinsic:
    """`into[r, c] = source[r, c]`."""
    source = te.Tensor("source", (box.rows, box.columns), box.dtype)
    into = te.compute("into", (box.rows, box.columns), box.dtype, lambda r, c: te.Load(source, (r, c)))
    size = box.rows * box.columns

    def whole(thread: int, n: int) -> tuple[int, int]:
        return n // box.columns, n % box.columns

    mnemonic = f"cp.async.bulk.tensor.{_RANK}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
    return Intrinsic(
        f"cp.async.bulk.tensor.{_RANK}d",
        into,
        (source,),
        PtxAssembly(mnemonic),
        fragments=(
            Fragment(into, Scope.SCRATCH, size, whole),
            Fragment(source, Scope.GLOBAL, size, whole),
        ),
        features=("bulk_copy",),
    )


def function_text(intrinsic: Intrinsic, name: str, *, multicast: bool = False) -> str:
    """A CUDA function around the instruction: the address in shared memory, the tensor map, the column and the row of
    the box's first element, and the barrier. `multicast`: also the blocks of a cluster, as bits, which all get it at
    the same address, with their own barriers."""
    assert isinstance(intrinsic.emit, PtxAssembly)
    if multicast:
        return (
            f"__device__ inline void {name}(unsigned to, const TensorMap& map, int column, int row, unsigned barrier,"
            " u16 blocks) {\n"
            f'  asm volatile("{intrinsic.emit.mnemonic}.multicast::cluster [%0], [%1, {{%2, %3}}], [%4], %5;"\n'
            '    :: "r"(to), "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"(blocks) : "memory");\n}\n'
        )
    return (
        f"__device__ inline void {name}(unsigned to, const TensorMap& map, int column, int row, unsigned barrier) {{\n"
        f'  asm volatile("{intrinsic.emit.mnemonic} [%0], [%1, {{%2, %3}}], [%4];"\n'
        '    :: "r"(to), "l"(&map), "r"(column), "r"(row), "r"(barrier) : "memory");\n}\n'
    )
