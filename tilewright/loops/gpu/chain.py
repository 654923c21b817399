"""Chains of tensor-core GEMMs as data: the intermediate results stay on the multiprocessor. The loops are hand-written
CUDA C++, which this data completes.

    for tiles of BM rows:                               (blocks, or persistent blocks in turn)
      sums[BM, n0] = a[m, k] * b[k, n0] over all k      (as in a TensorGemm; a block has all columns)
      for each product after it:
        left[BM, k] = `between`, of the sums before     (in registers, or in shared memory)
        sums[BM, n] = left * b                          (b is in shared memory as a whole)
      for threads: `write`, at (m, n + lanes)

In registers, a warp has all columns of its rows: the accumulators of two neighbouring `mma` tiles hold the elements of
one left operand, so that nothing is exchanged. In shared memory, several warps may share a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from tilewright.dtypes import DType
from tilewright.loops.gpu.tensor import ROW_PADDING, TABLE_BYTES, MatrixOperand, TensorGemm, WindowOperand
from tilewright.loops.ir import Buffer, Stmt
from tilewright.runtime.packing import Packing
from tilewright.support.arith import ceil_div
from tilewright.support.batch import Number, most, select

REGISTERS, SHARED = "registers", "shared"
FRAGMENT = 16  # rows and columns of a fragment


@dataclass(frozen=True)
class ChainTiles:
    """The tiling of a block: BM rows, the first product in steps of BK with `stages` of them in shared memory.
    `resident`: where intermediate results are. Of many tilings, arrays."""

    bm: int
    bk: int
    warps_m: int
    warps_n: int
    stages: int
    persistent: bool
    resident: str
    size: ClassVar[int] = 2  # bytes of an element

    @property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_n

    def columns(self, n: int) -> Number:
        """Columns of a tile in shared memory: a power of two, so that swizzling can use address bits."""
        return most(FRAGMENT * self.warps_n, 1 << (n - 1).bit_length())

    def computed(self, n: int) -> Number:
        """Columns that are computed: whole fragments, if one warp has them all."""
        return select(self.warps_n > 1, self.columns(n), FRAGMENT * ceil_div(n, FRAGMENT))

    def operand_bytes(self, n: int) -> Number:
        return self.stages * (self.bm + self.columns(n)) * self.bk * self.size

    def result_bytes(self, widths: tuple[int, ...]) -> Number:
        """The bytes of the sums and, if they are in memory, of intermediate results."""
        sums = 4 * self.bm * (self.computed(widths[-1]) + ROW_PADDING)
        between = self.columns(max(widths[:-1])) * self.bm * self.size
        return select(self.resident == SHARED, most(sums, between), sums)

    def weight_bytes(self, widths: tuple[int, ...]) -> Number:
        """The bytes of the right operands after the first."""
        tiles = [self.columns(n) for n in widths]
        return self.size * sum(one * two for one, two in pairwise(tiles))

    def weights_at(self, widths: tuple[int, ...]) -> Number:
        """The offset of the weights. The results reuse the operands' memory, unless the next operands are there."""
        operands, results = self.operand_bytes(widths[0]), self.result_bytes(widths)
        return select(self.persistent, operands + results, most(operands, results))

    def shared_bytes(self, widths: tuple[int, ...]) -> Number:
        return self.weights_at(widths) + self.weight_bytes(widths)


@dataclass(frozen=True)
class Follower:
    """A product after the first. `between` computes `value`, `lanes` elements of its left operand, from `sum`, as many
    sums; its free variables are `place_m`, the row, and `place_n`, the index of the vector."""

    b: MatrixOperand
    n: int
    k: int
    between: Stmt
    sum: Buffer
    value: Buffer

    @property
    def lanes(self) -> int:
        return self.value.size


@dataclass(frozen=True)
class TensorChain:
    """A chain. `first` is its first product, whose `write` is not used; `write` of the chain has the free variables of
    a TensorGemm's."""

    name: str
    params: tuple[Buffer, ...]
    first: TensorGemm
    followers: tuple[Follower, ...]
    tiles: ChainTiles
    blocks: int
    lanes: int
    sums: Buffer
    write: Stmt
    decisions: str

    @property
    def dtype(self) -> DType:
        return self.first.dtype

    @property
    def m(self) -> int:
        return self.first.m

    @property
    def widths(self) -> tuple[int, ...]:
        """Columns of each product."""
        return (self.first.n, *(follower.n for follower in self.followers))

    @property
    def packings(self) -> tuple[Packing | None, ...]:
        return ()

    @property
    def tile_count(self) -> int:
        return ceil_div(self.m, self.tiles.bm)

    @property
    def small_copies(self) -> bool:
        return self.first.small_copies

    @property
    def table_at(self) -> int:
        return int(self.tiles.shared_bytes(self.widths))

    @property
    def shared_bytes(self) -> int:
        table = self.tiles.bm * TABLE_BYTES if isinstance(self.first.a, WindowOperand) else 0
        return self.table_at + table
