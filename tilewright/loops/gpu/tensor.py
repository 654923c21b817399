"""Tensor-core GEMMs as data: the operands, the tiling, and the epilogue. The loops are hand-written CUDA C++, which
this data completes.

    for batches, tiles of BM x BN:                    (blocks)
      sums[BM, BN] = a[m, k] * b[k, n] over all k     (STAGES tiles of BK in flight in shared memory)
      for threads: `write`, at (m, n + lanes)         (any expression of the sums, neighbours along n)

With `reduced`, the epilogue's results are combined over the rows or columns of a tile, and only the combinations are
written. `statistics` of the rows of `a` are computed before the loop, for a norm of its rows; with `normalised`, the
rows of the result go through a norm. With `split` > 1, the blocks of a cluster each sum a part of K; then each adds up
and writes a part of the rows. `persistent` blocks compute several tiles in sequence, and load the operands of the next
tile while they write.
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
from tilewright.support.batch import Number, most, select

ROW_PADDING = 8  # padding floats at the end of a row of sums, against bank conflicts
TABLE_BYTES = 8  # per gathered row: its offset and its mask of what is inside


@dataclass(frozen=True)
class MatrixTiles:
    """The tiling of a block: BM x BN results, in steps of BK, by warps_m x warps_n warps; `stages` steps are in
    shared memory. Of many tilings, arrays."""

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
    def shared_bytes(self) -> Number:
        """The sums reuse the operands' memory at the end, unless the next operands are already there."""
        sums = self.bm * (self.bn + ROW_PADDING) * 4
        return select(self.persistent, self.stage_bytes + sums, most(self.stage_bytes, sums))

    @property
    def accumulators(self) -> int:
        """Registers of a thread for sums."""
        return self.bm * self.bn // self.threads


@dataclass(frozen=True)
class MatrixOperand:
    """A matrix in memory: rows of k for each m or n, or, if `transposed`, the other way round. It begins at `offset`,
    an expression of the batch variables; `lanes` elements can be loaded at once."""

    buffer: Buffer
    offset: te.Expr
    pitch: int
    transposed: bool
    lanes: int


@dataclass(frozen=True)
class WindowOperand:
    """The first operand as windows of an image: row `coord_m` begins at offset + `row`, and its element `coord_k` is
    `k_offset` further. It is zero unless all bits of `needed` are set in the row's mask; `seen` computes these bits
    from conditions on `coord_m`. `inside` applies to the whole row."""

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
    """A matrix whose elements are computed on their way to shared memory.

    `read` loads the inputs of `lanes` neighbours into the registers `kept`; `compute` computes the elements from
    these into `value`. The neighbours run along k or, if `transposed`, along m or n. The free variables `outer` and
    `at_k` are their indices, where the one along the neighbours counts vectors; `batch` are the batch axes. Elements
    are zero where `inside` is false.
    """

    buffers: tuple[Buffer, ...]  # the buffers that are read
    batch: tuple[te.Var, ...]
    kept: tuple[Buffer, ...]
    value: Buffer
    inside: te.Expr | None
    read: Stmt
    compute: Stmt
    work: float  # instructions per element
    transposed: bool
    lanes: int

    @cached_property
    def kept_bytes(self) -> float:
        """Bytes per element."""
        return sum(buffer.size * buffer.dtype.bytes for buffer in self.kept) / self.lanes


Operand = MatrixOperand | WindowOperand | ComputedOperand


@dataclass(frozen=True)
class ReducedOutput:
    """The epilogue's results combined over every `size` neighbouring rows or, if `along`, columns, which form a tile.

    `begin` initialises the accumulators `total` of a vector; `add` combines the one at `sum_row`, `sum_vector`;
    `join` combines another thread's, in `parts` from `other` on. `write` has the free variables `part`, the index of
    the rows or columns, and `coord_n` or `coord_m`; if `along`, the first element of the vector is the result.
    """

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
class NormReduction:
    """A reduction along a row by neighbouring threads, vector by vector: `begin` initialises the accumulators `total`
    of a thread, `add` combines the next vector, and `result`, of one element, is what the reductions after it read."""

    kind: str
    result: Buffer
    total: Buffer
    begin: Stmt
    add: Stmt

    @property
    def lanes(self) -> int:
        return self.total.size


@dataclass(frozen=True)
class RowStatistics:
    """What a norm needs of the rows of the left operand, computed before the pipeline starts.

    `passes` read a row of `length` elements, with the free variables `place_m`, the row, and `at_k`, the index of the
    vector. Then `keep` stores the statistics in `tables`, in shared memory, with `sum_row`, the row of the tile.
    """

    passes: tuple[NormReduction, ...]
    tables: tuple[Buffer, ...]
    keep: Stmt
    length: int

    @property
    def bytes(self) -> int:
        return sum(table.size * table.dtype.bytes for table in self.tables)


@dataclass(frozen=True)
class NormalisedOutput:
    """The epilogue's results through a norm of their rows, where a tile has whole rows. `keep` stores a vector of the
    results in `sums`, `passes` read it there, and `write` stores the norm's; all have the free variables of a
    TensorGemm's `write`."""

    keep: Stmt
    passes: tuple[NormReduction, ...]
    write: Stmt


@dataclass(frozen=True)
class TensorGemm:
    """A GEMM. `write` has the free variables `place_*`: the batch axes by name, `place_m` the row of the result,
    `place_n` the index of its vector; `sum_row` and `sum_vector` are the same within the tile. If the result is
    stored by columns (`across`), vectors run along m: `place_m` and `sum_row` count them, `place_n` and
    `sum_vector` are columns."""

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
    lanes: int  # output elements written at once
    sums: Buffer
    write: Stmt
    decisions: str
    packings: tuple[Packing | None, ...] = ()  # how each input is stored; None, or beyond the end: unchanged
    reduced: ReducedOutput | None = None  # if set, `write` is not used
    statistics: RowStatistics | None = None
    normalised: NormalisedOutput | None = None  # if set, `write` is not used
    across: bool = False

    @property
    def step_m(self) -> int:
        """Rows from one tile to the next."""
        return self.tiles.bm if self.reduced is None or self.reduced.along else self.reduced.size

    @property
    def step_n(self) -> int:
        return self.reduced.size if self.reduced is not None and self.reduced.along else self.tiles.bn

    @property
    def rows(self) -> int:
        """The number of tile rows."""
        return ceil_div(self.m, self.step_m)

    @property
    def columns(self) -> int:
        return ceil_div(self.n, self.step_n)

    @property
    def tile_count(self) -> int:
        return self.rows * self.columns * math.prod(axis.extent for axis in self.batch)

    @property
    def small_copies(self) -> bool:
        """Whether an operand is copied in many small chunks."""
        return min(self.a.lanes, self.b.lanes) * self.tiles.size < 8

    @property
    def shared_bytes(self) -> int:
        table = self.tiles.bm * TABLE_BYTES if isinstance(self.a, WindowOperand) else 0
        statistics = 0 if self.statistics is None else self.statistics.bytes
        return int(self.tiles.shared_bytes + table + statistics)
