"""Matmuls by one level of Strassen in Winograd's form: seven products of quarters instead of eight.

The rows of a block, the taps of a piece and the panels of a pair are each cut into two halves, so that the operands are
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
      for pieces of the taps:
        s1 ... s4 of the block to scratch
        for every pair of panels:
          for each of the seven products:
            for every `rows` rows of half the block:
              acc[rows, vectors] = 0, or a sum that it shares with the product before
              for taps, `unroll` written out: acc += left[row, tap] * right[tap, :]
                prefetch lines of the next pair, of the rows' next piece
              to scratch what other products begin with; out = epilogue(acc), or what the next piece goes on with
      taps that are in no piece: eight products, as usual
      a last panel that is in no pair, columns behind the panels: as in a contraction

The first register tile of a product computes its t in registers, beside multiply-adds that wait for nothing else, and
puts it where the other tiles find it in the first cache. Nothing is stored twice: the weight is as in a contraction.

What is added up is rounded at the size of what it is added to: the error is small beside the largest rows and taps
that are paired, not beside each one. On random data it is that of a contraction. No element's
error is bounded by its own products, so it is for `relaxed` numerics alone.
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
from tilewright.space.templates.cpu.contraction import (
    ASKED_SHOWN,
    BEGIN,
    COPIED_BYTES,
    FAR_RUN,
    AppliedContraction,
    even_block,
)
from tilewright.space.templates.cpu.contraction import Shape as PlainShape
from tilewright.space.templates.cpu.contraction_nest import ContractionNest
from tilewright.space.templates.cpu.contraction_tail import tail_terms
from tilewright.space.templates.cpu.fast_algebra.strassen_nest import (
    PRODUCTS,
    Shape,
    StrassenNest,
    asks_data,
)
from tilewright.space.templates.cpu.product import Product, coordinates, product_of
from tilewright.support.arith import ceil_div
from tilewright.te.index import coefficient

NAME = "strassen"
_ROWS = (4, 5, 6, 7, 8, 9, 10, 11, 12, 14)
_BLOCKS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 14, 16, 20, 24, 32)
_PIECES = (64, 96, 128, 160, 192, 256, 384)  # about as many taps are in half a piece
_LEAST_TAPS = 48  # of half a piece: fewer do not make up for what is done with a sum
_LEAST_ROWS = 12  # of half a block: fewer do not make up for the differences of the weight
_SHORT_CODE, _SPREAD_LATE = 4, 8  # steps written out; rows
_MOST_REST = 16  # taps behind the last piece, which are written out
# Of the second cache, what may be filled so that nothing is displaced; while a block streams through it.
_ROOMY, _ROOMY_STREAMED = 0.75, 0.6
_MOVED = 0.9  # cycles for a vector of sums that is kept or begun with: nothing is computed beside it
_BYTES = DType.F32.bytes
# Of the seven products: subtractions of quarters of the weight, and what they read more than a product does; sums that
# are begun with or added at an end, sums that are kept; results.
_SUBTRACTED, _BEGUN, _ENDED, _RESULTS = 5, 7, 8, 4


class Strassen:
    name = NAME

    def apply(self, work: Work) -> Applied | None:
        if not may_lose_digits(work.numerics):
            return None
        product = product_of(work.formula)
        if product is None or not product.constant_weight or not is_large_matrix_product(product):
            return None
        applied = AppliedStrassen(work, product)
        return applied if next(applied.space.configs(), None) is not None else None


def is_large_enough(rows: int, taps: int) -> bool:
    """Whether a block and a piece can be cut into halves that are worth it."""
    return rows > 2 * (_LEAST_ROWS - 1) and taps >= 2 * _LEAST_TAPS


def is_large_matrix_product(product: Product) -> bool:
    """Whether it is a matrix of float32, its rows in runs, times another, and large enough."""
    one = (
        type(product) is Product and not product.shared and len(product.rows) == 1 and len(product.taps) == 1
    )
    data, weight = product.data, product.weight
    if not one or not isinstance(data, te.Load) or weight != product.weight_load:
        return False
    dtypes = {data.dtype, weight.dtype, product.reduction.result.dtype}
    (row,), (tap,) = product.rows, product.taps
    runs = dtypes == {DType.F32} and coefficient(data.indices[0], tap) == 1
    return runs and is_large_enough(row.extent, tap.extent)


class AppliedStrassen:
    name = NAME

    def __init__(self, work: Work, product: Product) -> None:
        self.machine, self.product = work.machine, product
        self.plain = AppliedContraction(work, product, coordinates(product))
        self.lanes = self.plain.lanes
        (self.row,), (self.tap,) = product.rows, product.taps

    # -- the space ------------------------------------------------------------------------------------------------

    @cached_property
    def space(self) -> Space:
        length = self.tap.extent
        pieces = {max(1, round(length / (2 * size))) for size in _PIECES}
        vectors = self.plain.columns.extent // self.lanes
        return Space(
            self.name,
            (
                Knob("rows", _ROWS),
                Knob("vectors", tuple(n for n in (1, 2, 3, 4, 5) if 2 * n <= vectors) or (1,)),
                Knob("unroll", (4, 8)),
                Knob("block", (0, *_BLOCKS)),
                Knob("chunks", (1, 2, 4, 8, 16, 32)),
                Knob("pieces", tuple(sorted(pieces))),
                Knob("prefetch", (0, 1, 2)),
            ),
            self._legal,
            together=(
                ("rows", "vectors", "block"),
                ("block", "chunks", "pieces"),
                ("chunks", "pieces", "prefetch"),
            ),
        )

    def _legal(self, values: Mapping[str, Value]) -> bool:
        if self.plain.apart or not self._is_packed:
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
            and (not shape.prefetch or shape.pairs * shape.pieces > 1)
            and shape.half >= max(rows, _LEAST_ROWS)
            and shape.piece >= _LEAST_TAPS
            and shape.rest <= _MOST_REST
            and shape.scratch_bytes <= SCRATCH_LIMIT
        )

    def _registers(self, rows: int, vectors: int, long: bool) -> int:
        """Beside the accumulators: a right operand, an element of the left one, and what a difference is made of. In
        long code LLVM wants two more."""
        return rows * vectors + vectors + (4 if long else 2)

    @cached_property
    def _is_packed(self) -> bool:
        """Whether the weight can be stored in panels: nothing else reads it."""
        smallest = {"rows": 4, "vectors": 1, "unroll": 4, "block": 0, "chunks": 1, "pieces": 1, "prefetch": 0}
        return self._plain_nest(self.shape_of(smallest)).packed is not None

    def shape_of(self, values: Mapping[str, Value]) -> Shape:
        rows, vectors = int(values["rows"]), int(values["vectors"])
        panels = Tiles(self.plain.columns, vectors * self.lanes)
        pairs = max(1, panels.count // 2)
        per_chunk = ceil_div(pairs, int(values["chunks"]))
        block = even_block(self.row.extent, int(values["block"]) * 2 * rows or self.row.extent, 2 * rows)
        pieces = int(values["pieces"])
        piece = self.tap.extent // (2 * pieces)
        return Shape(
            rows=rows,
            vectors=vectors,
            lanes=self.lanes,
            unroll=int(values["unroll"]),
            panels=panels,
            per_chunk=per_chunk,
            chunks=ceil_div(pairs, per_chunk),
            block=block,
            blocks=ceil_div(self.row.extent, block),
            piece=piece,
            pieces=pieces,
            rest=self.tap.extent - 2 * pieces * piece,
            prefetch=int(values["prefetch"]),
            in_line=self.machine.line_bytes // _BYTES,
        )

    # -- what it costs --------------------------------------------------------------------------------------------

    def terms(self, config: Config) -> Terms:
        shape, caches = self.shape_of(dict(config.values)), self.machine.caches
        plain = self._plain_shape(shape)
        iterations = shape.chunks * shape.blocks
        passes = iterations * shape.per_chunk * shape.pieces  # of a pair of panels, piece by piece
        right = shape.piece * shape.panels.size * _BYTES
        left = shape.half * shape.piece * _BYTES
        quarter = shape.quarter_size * _BYTES
        data_bytes = self.row.extent * self.tap.extent * _BYTES
        written = self.row.extent * self.product.vector.extent * _BYTES
        weight_bytes = shape.panels.count * shape.panels.size * self.tap.extent * _BYTES

        # A product is one of register tiles as of a contraction with half the rows and taps.
        products = self.plain.tile_terms(
            replace(plain, block=shape.half),
            passes * PRODUCTS * shape.piece / self.tap.extent,
            self.tap.extent / shape.piece,
        )
        others = [self._rest_terms(shape), *self._last_columns(shape, plain)]

        # In vectors: what is added up before, beside and after the products.
        sums = iterations * shape.pieces * shape.half * ceil_div(shape.piece, self.lanes)
        differences = passes * shape.piece * shape.vectors
        results = passes * shape.quarter_size / self.lanes
        resumed = _RESULTS * (shape.pieces - 1) / shape.pieces

        # A right operand stays in the first cache while the register tiles pass; what does not fit comes again.
        # So does what the lines of the next pair displace there.
        crowded = (right + shape.rows * shape.piece * _BYTES) / caches.l1 - 1
        returns = min(1.0, max(0.0, crowded)) * (shape.tiles - 1)
        displaced = 4 if shape.prefetch else 0
        from_l2 = passes * (
            right * (PRODUCTS * (1 + returns) + _SUBTRACTED + displaced)
            + left * PRODUCTS
            + quarter * (_BEGUN + _ENDED + resumed)
        )
        # What the second cache does not hold beside a pair of panels, and beside this piece's data and the next one's
        # where that is asked for, is displaced.
        asks = asks_data(self.product, shape, self.machine)
        block_bytes = shape.block * self.tap.extent * _BYTES
        panels = min(8 * right, weight_bytes)
        used = shape.scratch_bytes + panels + (8 if asks else 4) * left
        roomy = _ROOMY_STREAMED if asks else _ROOMY
        beyond = min(1.0, max(0.0, used / (roomy * caches.l2_per_core) - 1))
        from_l3 = beyond * passes * (left * PRODUCTS + quarter * resumed)
        staged = float(iterations * block_bytes)
        asked = max(beyond, ASKED_SHOWN) if asks else 1.0
        again = (shape.single + bool(self.plain.tail)) * self._last_chunks(shape)
        if caches.keep((data_bytes + written) / self.machine.cores):
            from_l2 += staged + 2.0 * written
            far_runs = 0.0
        else:
            from_l3 += asked * staged + 2.0 * written
            pages = max(1.0, 2 * shape.piece * _BYTES / self.machine.page_bytes)  # of a run
            far_runs = (beyond if asks else 1.0) * iterations * shape.block * shape.pieces * pages
            if not caches.keep(block_bytes):  # of what the last columns read again
                from_l3 += again * data_bytes
                far_runs += again * self.row.extent * shape.pieces * pages
        chunk_bytes = 2 * shape.per_chunk * shape.panels.size * self.tap.extent * _BYTES
        if chunk_bytes > caches.l2_per_core // 2:
            from_l3 += weight_bytes * (shape.blocks - 1) * (ASKED_SHOWN if shape.prefetch else 1.0)
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

    def _rest_terms(self, shape: Shape) -> Terms:
        """Of the taps that are in no piece."""
        tiles = shape.chunks * shape.blocks * shape.per_chunk * 4 * shape.tiles if shape.rest else 0
        each = shape.rows * shape.vectors
        steps = tiles * shape.rest
        return Terms(
            arithmetic=float(steps * each),
            loads=float(steps * (shape.rows + shape.vectors) + tiles * each),
            from_l2=float(tiles * each * self.machine.line_bytes),
            scalar=tiles * 12.0,
        )

    def _last_columns(self, shape: Shape, plain: PlainShape) -> list[Terms]:
        """Of a panel that is in no pair and of columns that are in none."""
        chunks = self._last_chunks(shape)
        found = []
        if shape.single:
            panel = plain.last or plain
            tiles = self.plain.tile_terms(panel, chunks * shape.blocks, shape.pieces)
            read = panel.vectors * self.lanes * self.tap.extent * _BYTES * chunks * shape.blocks
            found.append(replace(tiles, from_l2=tiles.from_l2 + read))
        if self.plain.tail:
            found.append(tail_terms(self.product, self.plain.tail, self.lanes, self.machine.vector_registers))
        return found

    def _last_chunks(self, shape: Shape) -> int:
        """How often the last columns count: one chunk has them, and is the last to end."""
        return min(shape.chunks, self.machine.cores)

    # -- the program ----------------------------------------------------------------------------------------------

    def program(self, config: Config) -> Program:
        shape = self.shape_of(dict(config.values))
        return StrassenNest(self._plain_nest(shape), shape, self.machine).program(config)

    def _plain_nest(self, shape: Shape) -> ContractionNest:
        """The nest of what is computed as usual: it packs the weight, too."""
        return ContractionNest(self.plain, self._plain_shape(shape))

    def _plain_shape(self, shape: Shape) -> PlainShape:
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
            tap_block=shape.single_taps,
            prefetch=0,
            staged=False,
            last_vectors=vectors,
            last_rows=rows,
        )
