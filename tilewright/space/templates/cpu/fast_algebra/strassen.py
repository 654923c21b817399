"""Matmuls by one level of Strassen in Winograd's form: seven block products instead of eight.

The rows of a block, the k of a block of K and the panels of a pair are each cut in half, so that the operands are
2 x 2 quarters, a11 ... and b11 ...; with

    s1 = a21 + a22    s2 = s1 - a11    s3 = a11 - a21    s4 = a12 - s2
    t1 = b12 - b11    t2 = b22 - t1    t3 = b22 - b12    t4 = t2 - b21

the quarters of the result are

    c11 = a11 b11 + a12 b21
    c21 = a11 b11 + s2 t2 + s3 t3 - a22 t4
    c22 = a11 b11 + s2 t2 + s3 t3 + s1 t1
    c12 = a11 b11 + s2 t2 + s1 t1 + s4 b22

and the loops, over the packed panels of `contraction.py`:

    for every chunk of pairs of panels and block of rows:           (parallel)
      for blocks of K:
        s1 ... s4 of the block to scratch
        for every pair of panels:
          for each of the seven products:
            for every `rows` rows of half the block:
              acc[rows, vectors] = 0, or a sum that it shares with the product before
              for k, unrolled by `unroll`: acc += left[row, k] * right[k, :]
                prefetch lines of the next pair, and of the rows' next block of K
              store to scratch what other products begin with; out = epilogue(acc), or partial sums for the next block
      the rest of K that fills no block: eight products, as usual
      a last panel that is in no pair, columns after the panels: as in a contraction

The first register tile of a product computes its t in registers, between FMAs that do not depend on it, and stores it
where the other tiles find it in L1. Nothing is stored twice: the weight is packed as in a contraction.

Sums are rounded relative to the larger summand, so the error is small relative to the largest of the rows and columns
that are added, not relative to each one. On random data it equals that of a contraction. Since no element's error is
bounded by its own products, the template is for `relaxed` numerics alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

from tilewright import te
from tilewright.dtypes import DType
from tilewright.loops.ir import SCRATCH_LIMIT, Program
from tilewright.loops.tiling import Tiles
from tilewright.numerics import may_lose_digits
from tilewright.space.space import Config, Knob, Space, Value
from tilewright.space.template import Applied, Terms, Work
from tilewright.space.templates.cpu.contraction import AppliedContraction
from tilewright.space.templates.cpu.contraction_nest import ContractionNest
from tilewright.space.templates.cpu.contraction_tail import tail_terms
from tilewright.space.templates.cpu.contraction_terms import (
    BEGIN,
    COPIED_BYTES,
    FAR_RUN,
    PREFETCHED_COST,
    even_block,
)
from tilewright.space.templates.cpu.contraction_terms import ContractionTiling as PlainShape
from tilewright.space.templates.cpu.fast_algebra.strassen_nest import (
    PRODUCTS,
    StrassenNest,
    StrassenTiling,
    prefetches_data,
)
from tilewright.space.templates.cpu.gemm import Gemm, coordinates, gemm_of
from tilewright.support.arith import ceil_div
from tilewright.te.index import coefficient

NAME = "strassen"
_ROWS = (4, 5, 6, 7, 8, 9, 10, 11, 12, 14)
_BLOCKS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 14, 16, 20, 24, 32)
_K_BLOCKS = (64, 96, 128, 160, 192, 256, 384)  # about as many steps of K are in half a K block
_MIN_K = 48  # of half a K block: fewer do not make up for what is done with a sum
_MIN_ROWS = 12  # of half a block: fewer do not make up for the differences of the weight
_SHORT_CODE, _SPREAD_LATE = 4, 8  # steps written out; rows
_MAX_REST = 16  # steps of K after the last K block, which are written out
# Of L2, what may be filled so that nothing is displaced; while a block streams through it.
_ROOMY, _ROOMY_STREAMED = 0.75, 0.6
_MOVED = 0.9  # cycles for a vector of sums that is kept or begun with: nothing is computed alongside it
_BYTES = DType.F32.bytes
# Of the seven products: subtractions of quarters of the weight, and what they read more than a product does; sums that
# are begun with or added at an end, sums that are kept; results.
_SUBTRACTED, _BEGUN, _ENDED, _RESULTS = 5, 7, 8, 4


class Strassen:
    name = NAME

    def apply(self, work: Work) -> Applied | None:
        if not may_lose_digits(work.numerics):
            return None
        gemm = gemm_of(work.formula)
        if gemm is None or not gemm.constant_weight or not is_large_gemm(gemm):
            return None
        applied = AppliedStrassen(work, gemm)
        return applied if next(applied.space.configs(), None) is not None else None


def is_large_enough(rows: int, k_size: int) -> bool:
    """Whether a block and a K block can be cut into halves that are worth it."""
    return rows > 2 * (_MIN_ROWS - 1) and k_size >= 2 * _MIN_K


def is_large_gemm(gemm: Gemm) -> bool:
    """Whether it is a matrix of float32, its rows in runs, times another, and large enough."""
    one = type(gemm) is Gemm and not gemm.shared and len(gemm.rows) == 1 and len(gemm.k_axes) == 1
    data, weight = gemm.data, gemm.weight
    if not one or not isinstance(data, te.Load) or weight != gemm.weight_load:
        return False
    dtypes = {data.dtype, weight.dtype, gemm.reduction.result.dtype}
    (row,), (k,) = gemm.rows, gemm.k_axes
    runs = dtypes == {DType.F32} and coefficient(data.indices[0], k) == 1
    return runs and is_large_enough(row.extent, k.extent)


class AppliedStrassen:
    name = NAME

    def __init__(self, work: Work, gemm: Gemm) -> None:
        self.machine, self.gemm = work.machine, gemm
        self.plain = AppliedContraction(work, gemm, coordinates(gemm))
        self.lanes = self.plain.lanes
        (self.row,), (self.k,) = gemm.rows, gemm.k_axes

    # -- the space ------------------------------------------------------------------------------------------------

    @cached_property
    def space(self) -> Space:
        length = self.k.extent
        k_blocks = {max(1, round(length / (2 * size))) for size in _K_BLOCKS}
        vectors = self.plain.columns.extent // self.lanes
        return Space(
            self.name,
            (
                Knob("rows", _ROWS),
                Knob("vectors", tuple(n for n in (1, 2, 3, 4, 5) if 2 * n <= vectors) or (1,)),
                Knob("unroll", (4, 8)),
                Knob("block", (0, *_BLOCKS)),
                Knob("chunks", (1, 2, 4, 8, 16, 32)),
                Knob("k_blocks", tuple(sorted(k_blocks))),
                Knob("prefetch", (0, 1, 2)),
            ),
            self._legal,
            together=(
                ("rows", "vectors", "block"),
                ("block", "chunks", "k_blocks"),
                ("chunks", "k_blocks", "prefetch"),
            ),
        )

    def _legal(self, values: Mapping[str, Value]) -> bool:
        if self.plain.vectors_separate or not self._is_packed:
            return False
        panels = Tiles(self.plain.columns, int(values["vectors"]) * self.lanes)
        if panels.size > self.plain.columns.extent or panels.count < 2:
            return False
        rows, vectors = int(values["rows"]), int(values["vectors"])
        # In long code LLVM spreads elements of many rows before they are used.
        long = int(values["unroll"]) > _SHORT_CODE
        if self._registers(rows, vectors, long) > self.machine.vector_registers:
            return False
        if rows > (_SPREAD_LATE if long else self.machine.vector_registers // 2):
            return False
        if int(values["block"]) * 2 * rows > self.row.extent:
            return False
        shape = self.shape_of(values)
        return (
            shape.chunks == values["chunks"]
            and (not shape.prefetch or shape.pairs * shape.k_blocks > 1)
            and shape.half >= max(rows, _MIN_ROWS)
            and shape.k_block >= _MIN_K
            and shape.rest <= _MAX_REST
            and shape.scratch_bytes <= SCRATCH_LIMIT
        )

    def _registers(self, rows: int, vectors: int, long: bool) -> int:
        """Alongside the accumulators: a right operand, an element of the left one, and what a difference is made of. In
        long code LLVM wants two more."""
        return rows * vectors + vectors + (4 if long else 2)

    @cached_property
    def _is_packed(self) -> bool:
        """Whether the weight can be stored in panels: nothing else reads it."""
        smallest = {
            "rows": 4,
            "vectors": 1,
            "unroll": 4,
            "block": 0,
            "chunks": 1,
            "k_blocks": 1,
            "prefetch": 0,
        }
        return self._plain_nest(self.shape_of(smallest)).packed is not None

    def shape_of(self, values: Mapping[str, Value]) -> StrassenTiling:
        rows, vectors = int(values["rows"]), int(values["vectors"])
        panels = Tiles(self.plain.columns, vectors * self.lanes)
        pairs = max(1, panels.count // 2)
        per_chunk = ceil_div(pairs, int(values["chunks"]))
        block = even_block(self.row.extent, int(values["block"]) * 2 * rows or self.row.extent, 2 * rows)
        k_blocks = int(values["k_blocks"])
        k_block = self.k.extent // (2 * k_blocks)
        return StrassenTiling(
            rows=rows,
            vectors=vectors,
            lanes=self.lanes,
            unroll=int(values["unroll"]),
            panels=panels,
            per_chunk=per_chunk,
            chunks=ceil_div(pairs, per_chunk),
            block=block,
            blocks=ceil_div(self.row.extent, block),
            k_block=k_block,
            k_blocks=k_blocks,
            rest=self.k.extent - 2 * k_blocks * k_block,
            prefetch=int(values["prefetch"]),
            in_line=self.machine.line_bytes // _BYTES,
        )

    # -- what it costs --------------------------------------------------------------------------------------------

    def terms(self, config: Config) -> Terms:
        shape, caches = self.shape_of(dict(config.values)), self.machine.caches
        plain = self._plain_shape(shape)
        iterations = shape.chunks * shape.blocks
        passes = iterations * shape.per_chunk * shape.k_blocks  # of a pair of panels, K block by K block
        right = shape.k_block * shape.panels.size * _BYTES
        left = shape.half * shape.k_block * _BYTES
        quarter = shape.quarter_size * _BYTES
        data_bytes = self.row.extent * self.k.extent * _BYTES
        written = self.row.extent * self.gemm.vector.extent * _BYTES
        weight_bytes = shape.panels.count * shape.panels.size * self.k.extent * _BYTES

        # A product is one of register tiles as of a contraction with half the rows and steps of K.
        products = self.plain.tile_terms(
            replace(plain, block=shape.half),
            passes * PRODUCTS * shape.k_block / self.k.extent,
            self.k.extent / shape.k_block,
        )
        others = [self._rest_terms(shape), *self._last_columns(shape, plain)]

        # In vectors: what is added up before, alongside and after the products.
        sums = iterations * shape.k_blocks * shape.half * ceil_div(shape.k_block, self.lanes)
        differences = passes * shape.k_block * shape.vectors
        results = passes * shape.quarter_size / self.lanes
        resumed = _RESULTS * (shape.k_blocks - 1) / shape.k_blocks

        # A right operand stays in L1 while the register tiles pass; what does not fit comes again.
        # So does what the lines of the next pair displace there.
        crowded = (right + shape.rows * shape.k_block * _BYTES) / caches.l1 - 1
        returns = min(1.0, max(0.0, crowded)) * (shape.tiles - 1)
        displaced = 4 if shape.prefetch else 0
        from_l2 = passes * (
            right * (PRODUCTS * (1 + returns) + _SUBTRACTED + displaced)
            + left * PRODUCTS
            + quarter * (_BEGUN + _ENDED + resumed)
        )
        # What L2 does not hold alongside a pair of panels, and alongside this K block's data and the next one's
        # where that is prefetched, is displaced.
        prefetches = prefetches_data(self.gemm, shape, self.machine)
        block_bytes = shape.block * self.k.extent * _BYTES
        panels = min(8 * right, weight_bytes)
        used = shape.scratch_bytes + panels + (8 if prefetches else 4) * left
        roomy = _ROOMY_STREAMED if prefetches else _ROOMY
        beyond = min(1.0, max(0.0, used / (roomy * caches.l2_per_core) - 1))
        from_l3 = beyond * passes * (left * PRODUCTS + quarter * resumed)
        staged = float(iterations * block_bytes)
        prefetched = max(beyond, PREFETCHED_COST) if prefetches else 1.0
        again = (shape.single + bool(self.plain.tail)) * self._last_chunks(shape)
        if caches.keep((data_bytes + written) / self.machine.cores):
            from_l2 += staged + 2.0 * written
            far_runs = 0.0
        else:
            from_l3 += prefetched * staged + 2.0 * written
            pages = max(1.0, 2 * shape.k_block * _BYTES / self.machine.page_bytes)  # of a run
            far_runs = (beyond if prefetches else 1.0) * iterations * shape.block * shape.k_blocks * pages
            if not caches.keep(block_bytes):  # of what the last columns read again
                from_l3 += again * data_bytes
                far_runs += again * self.row.extent * shape.k_blocks * pages
        chunk_bytes = 2 * shape.per_chunk * shape.panels.size * self.k.extent * _BYTES
        if chunk_bytes > caches.l2_per_core // 2:
            from_l3 += weight_bytes * (shape.blocks - 1) * (PREFETCHED_COST if shape.prefetch else 1.0)
        return Terms(
            arithmetic=products.arithmetic
            + sum(each.arithmetic for each in others)
            + (4 * sums + _SUBTRACTED * differences + 4 * results),
            loads=products.loads
            + sum(each.loads for each in others)
            + 4 * sums
            + _SUBTRACTED * differences
            + (_BEGUN + resumed) * results
            + (passes * 4 * right / self.machine.line_bytes if shape.prefetch else 0.0),
            stores=products.stores
            + sum(each.stores for each in others)
            + 4 * sums
            + 4 * differences
            + _ENDED * results,
            branches=products.branches + sum(each.branches for each in others),
            from_l2=from_l2 + products.from_l2 + sum(each.from_l2 for each in others),
            from_l3=from_l3,
            from_memory=float(weight_bytes),
            prefetched=float(weight_bytes) if shape.prefetch else 0.0,
            iterations=iterations,
            scalar=products.scalar
            + sum(each.scalar for each in others)
            + passes * BEGIN
            + results * (_BEGUN + _ENDED + resumed) * _MOVED
            + far_runs * FAR_RUN
            + staged / COPIED_BYTES,
        )

    def _rest_terms(self, shape: StrassenTiling) -> Terms:
        """The terms of the steps of K that are in no K block."""
        tiles = shape.chunks * shape.blocks * shape.per_chunk * 4 * shape.tiles if shape.rest else 0
        each = shape.rows * shape.vectors
        steps = tiles * shape.rest
        return Terms(
            arithmetic=float(steps * each),
            loads=float(steps * (shape.rows + shape.vectors) + tiles * each),
            from_l2=float(tiles * each * self.machine.line_bytes),
            scalar=tiles * 12.0,
        )

    def _last_columns(self, shape: StrassenTiling, plain: PlainShape) -> list[Terms]:
        """The terms of a panel that is in no pair, and of columns that are in no panel."""
        chunks = self._last_chunks(shape)
        found = []
        if shape.single:
            panel = plain.last or plain
            tiles = self.plain.tile_terms(panel, chunks * shape.blocks, shape.k_blocks)
            read = panel.vectors * self.lanes * self.k.extent * _BYTES * chunks * shape.blocks
            found.append(replace(tiles, from_l2=tiles.from_l2 + read))
        if self.plain.tail:
            found.append(tail_terms(self.gemm, self.plain.tail, self.lanes, self.machine.vector_registers))
        return found

    def _last_chunks(self, shape: StrassenTiling) -> int:
        """The weight of the last columns: one chunk has them, and is the last to end."""
        return min(shape.chunks, self.machine.cores)

    # -- the program ----------------------------------------------------------------------------------------------

    def program(self, config: Config) -> Program:
        shape = self.shape_of(dict(config.values))
        return StrassenNest(self._plain_nest(shape), shape, self.machine).program(config)

    def _plain_nest(self, shape: StrassenTiling) -> ContractionNest:
        """The nest of what is computed as usual: it packs the weight, too."""
        return ContractionNest(self.plain, self._plain_shape(shape))

    def _plain_shape(self, shape: StrassenTiling) -> PlainShape:
        rows, vectors = self.plain.last_tile(shape.panels, shape.vectors, shape.block, shape.unroll)
        return PlainShape(
            rows=shape.rows,
            vectors=shape.vectors,
            unroll=shape.unroll,
            panels=shape.panels,
            per_chunk=shape.panels.count,
            chunks=1,
            block=shape.block,
            blocks=shape.blocks,
            k_block=shape.single_k,
            prefetch=0,
            staged=False,
            last_vectors=vectors,
            last_rows=rows,
        )
