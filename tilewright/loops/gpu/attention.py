"""Tensor-core attention as data. The loops are hand-written CUDA C++, which this data completes.

for heads, blocks of queries:                                (blocks)
  for tiles of keys:                                         (STAGES of them under way in shared memory)
    scores = `mask`(scale * q k', query, key), in registers
    sums = sums faded + weights of the scores * v
  for threads: `write`, at (query, value + lanes)            (sums over the sum of their weights)
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewright import te
from tilewright.dtypes import DType
from tilewright.loops.gpu.tensor import ROW_PADDING, MatrixOperand
from tilewright.loops.ir import Buffer, Stmt
from tilewright.support.batch import Number, most

_NARROWEST = 32  # columns of a tile in shared memory


@dataclass(frozen=True)
class AttentionTiles:
    """The tiling of a block: `warps` warps of `rows` x 16 queries each, `keys` keys at a time, `stages` tiles of keys
    in memory."""

    warps: int
    rows: int
    keys: int
    stages: int

    @property
    def queries(self) -> int:
        return self.warps * self.rows * 16

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def shared_bytes(self, width: int, values: int) -> Number:
        """Shared memory for heads of this width, padded; the results reuse the operands' memory at the end."""
        tiles = 2 * (self.queries * width + self.stages * self.keys * (width + values))
        return most(tiles, 4 * self.queries * (values + ROW_PADDING))


@dataclass(frozen=True)
class TensorAttention:
    """`mask`, if any, stores the masked `score` at query `coord_m` and key `coord_k` to `masked`. `write` has the
    free variables of a `TensorGemm`."""

    name: str
    params: tuple[Buffer, ...]
    dtype: DType
    q: MatrixOperand
    k: MatrixOperand
    v: MatrixOperand
    batch: tuple[te.Var, ...]
    queries: int
    keys: int
    width: int
    values: int
    causal: bool
    scale: float  # times log2(e)
    mask: Stmt | None
    tiles: AttentionTiles
    lanes: int
    sums: Buffer
    write: Stmt
    decisions: str

    @property
    def padded(self) -> tuple[int, int]:
        """Columns of queries and keys, and of values, in shared memory."""
        return padded(self.width), padded(self.values)

    @property
    def shared_bytes(self) -> int:
        return int(self.tiles.shared_bytes(*self.padded))


def padded(columns: int) -> int:
    """The next power of two, so that swizzling can use address bits."""
    return max(_NARROWEST, 1 << (columns - 1).bit_length())
