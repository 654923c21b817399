"""GEMMs for tensor cores, as data: the operands, the tiling, and the epilogue. The loops themselves are written by
hand, in CUDA C++, with this filled in.

    for batches, tiles of BM x BN:                    (blocks)
      sums[BM, BN] = a[m, k] * b[k, n] over all k     (STAGES tiles of depth BK under way in shared memory)
      for threads: `write`, at (m, n + lanes)         (any expression of the sums, neighbours along n)

With `reduced`, what becomes of the sums is combined over the rows of a tile, or its columns, and the combinations alone
are written.
Where `split` > 1, so many blocks, a cluster, sum a part of the depth each; then each adds up and writes a part of the
rows. `persistent` blocks compute several tiles in turn, and load what the next one needs while they write.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from tilewright import te
from tilewright.dtypes import DType
from tilewright.loops.ir import Buffer, Stmt
from tilewright.runtime.packing import Packing
from tilewright.support.arith import ceil_div

ROW_PADDING = 8  # floats at the end of a row of sums, against conflicts of banks
TABLE_BYTES = 8  # of a row that is gathered: where it begins and what of it is inside


@dataclass(frozen=True)
class MatrixTiles:
    """Of a block: BM x BN results, in steps of BK, by warps_m x warps_n warps; `stages` steps are in shared memory."""

    bm: int
    bn: int
    bk: int
    warps_m: int
    warps_n: int
    stages: int
    split: int = 1
    persistent: bool = False
    size: int = 2  # bytes of an element

    @property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_n

    @property
    def stage_bytes(self) -> int:
        return self.stages * (self.bm + self.bn) * self.bk * self.size

    @property
    def shared_bytes(self) -> int:
        """The sums take the operands' place at the end, unless the next ones are there already."""
        sums = self.bm * (self.bn + ROW_PADDING) * 4
        return self.stage_bytes + sums if self.persistent else max(self.stage_bytes, sums)

    @property
    def accumulators(self) -> int:
        """Registers of a thread that hold sums."""
        return self.bm * self.bn // self.threads


@dataclass(frozen=True)
class MatrixOperand:
    """A matrix in memory: m or n along rows of k, or, where `transposed`, the other way round. It begins at `offset`,
    an expression of the batch variables; `lanes` elements can be read at once."""

    buffer: Buffer
    offset: te.Expr
    pitch: int
    transposed: bool
    lanes: int


@dataclass(frozen=True)
class WindowOperand:
    """The first operand as what windows of an image see: row `coord_m` begins at offset + `row`, its element `coord_k`
    is `depth` further. It is zero there unless the row has the bits of all of `needed` set; `seen` are its bits, of
    conditions on `coord_m` alone. `inside` holds for the row as a whole."""

    buffer: Buffer
    offset: te.Expr
    row: te.Expr
    k_offset: te.Expr
    inside: te.Expr | None
    seen: tuple[te.Expr, ...]
    needed: tuple[te.Expr, ...]
    lanes: int
    transposed: bool = False


@dataclass(frozen=True)
class ComputedOperand:
    """A matrix whose elements are computed on their way to shared memory. `read` brings what `lanes` neighbours take
    into the registers `kept`, `compute` makes them of these, in `value`. They are neighbours along k, or, where
    `transposed`, along m or n. Their places are the free variables `outer` and `depth`, of which the one that they are
    neighbours along counts vectors; so are the batch axes `batch`. Where `inside` does not hold they are zero."""

    buffers: tuple[Buffer, ...]  # that are read
    batch: tuple[te.Var, ...]
    kept: tuple[Buffer, ...]
    value: Buffer
    inside: te.Expr | None
    read: Stmt
    compute: Stmt
    work: float  # instructions for an element
    transposed: bool
    lanes: int

    @cached_property
    def kept_bytes(self) -> float:
        """For an element."""
        return sum(buffer.size * buffer.dtype.bytes for buffer in self.kept) / self.lanes


Operand = MatrixOperand | WindowOperand | ComputedOperand


@dataclass(frozen=True)
class ReducedOutput:
    """What becomes of a product's sums, combined over every `size` neighbouring rows, or, where `along`, columns; as
    many are a tile. `begin` sets the accumulators `total`, of a vector; `add` takes in that of `sum_row`, `sum_vector`,
    `join` what another thread has, in `parts` from `other` on. `write` has the free variables `part`, the number of the
    rows or columns, and `coord_n` or `coord_m`; where `along`, the first of the vector is the result."""

    kind: str
    size: int
    along: bool
    total: Buffer
    parts: Buffer
    begin: Stmt
    add: Stmt
    join: Stmt
    write: Stmt


@dataclass(frozen=True)
class TensorGemm:
    """`write` has the free variables `coord_*`: of the batch axes their names, `coord_m` the row of the result,
    `coord_n` the number of its vector, and `sum_row`, `sum_vector` the same within the tile."""

    name: str
    params: tuple[Buffer, ...]
    dtype: DType
    a: Operand
    b: MatrixOperand | ComputedOperand
    batch: tuple[te.Var, ...]
    m: int
    n: int
    k: int
    tiles: MatrixTiles
    blocks: int
    lanes: int  # of the output, written at once
    sums: Buffer
    write: Stmt
    decisions: str
    packings: tuple[Packing | None, ...] = ()  # how each input is stored; beyond the end: as it is
    reduced: ReducedOutput | None = None  # then `write` is not done

    @property
    def step_m(self) -> int:
        """Rows from one tile to the next."""
        return self.tiles.bm if self.reduced is None or self.reduced.along else self.reduced.size

    @property
    def step_n(self) -> int:
        return self.reduced.size if self.reduced is not None and self.reduced.along else self.tiles.bn

    @property
    def rows(self) -> int:
        """Of tiles."""
        return ceil_div(self.m, self.step_m)

    @property
    def columns(self) -> int:
        return ceil_div(self.n, self.step_n)

    @property
    def tile_count(self) -> int:
        return self.rows * self.columns * math.prod(axis.extent for axis in self.batch)

    @property
    def small_copies(self) -> bool:
        """Whether an operand is copied in many pieces."""
        return min(self.a.lanes, self.b.lanes) * self.tiles.size < 8

    @property
    def shared_bytes(self) -> int:
        table = self.tiles.bm * TABLE_BYTES if isinstance(self.a, WindowOperand) else 0
        return self.tiles.shared_bytes + table
