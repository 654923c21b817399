"""Contractions whose result is written along another axis than the weight is stored along: channels-first
convolutions.

The loops are those of `contraction.py`, with the channels of the result in the lanes of vectors. The data is read, or
staged, in its own order: it enters the product as one element broadcast to all lanes, which may come from any
address. Only the sums are transposed:

    for every panel:
      for blocks of K, for every `rows` rows of the block:
        ...
        sums[row, :] = acc                                          (scratch memory of rows x panel)
      for every square of the sums:
        transpose it in registers
        out[channel, rows] = epilogue(its rows)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from tilewright import te
from tilewright.loops.formula import Formula
from tilewright.loops.ir import Buffer, Kind, Scope, Stmt, Store, Transpose, block, nest
from tilewright.loops.tiling import Tiles, extent_of, pack_operand, power_of_two_below, row_major, whole
from tilewright.space.template import Applied, Terms, Work
from tilewright.space.templates.cpu.contraction import AppliedContraction
from tilewright.space.templates.cpu.contraction_nest import ContractionNest
from tilewright.space.templates.cpu.contraction_terms import ContractionTiling
from tilewright.space.templates.cpu.gemm import Coordinate, Gemm, StagedOperand, coordinates
from tilewright.support.arith import ceil_div, round_up
from tilewright.support.batch import Number, Truth, floor_log2, least, nowhere, select
from tilewright.te.index import coefficient, linear

NAME = "contraction_transposed"
_MIN_LANES = 4
_SUMS_BYTES = 256 << 10
_WRITTEN_WINDOW = 16  # maximum steps of K of a window that are unrolled
_TRANSPOSING = 2.0  # cycles for a transposed vector, besides the shuffles
RUN = 20.0  # cycles for a run of data that is read for the first time
_COPIED = 1.0  # cycles for a packed vector of data
_PAGES = 32  # pages that the TLB holds for sure
_PAGE_MISS = 3.0  # cycles for a page miss
GATHERED = 1.0  # cycles for an element that is not copied in a run


class ContractionTransposed:
    name = NAME

    def apply(self, work: Work) -> Applied | None:
        gemm = transposed_gemm_of(work.formula)
        if gemm is None:
            return None
        dims = coordinates(gemm)
        if dims is None:
            return None
        applied = AppliedContractionTransposed(work, gemm, gemm.in_storage_order(dims))
        return applied if applied.lanes >= _MIN_LANES else None


@dataclass(frozen=True)
class TransposedGemm(Gemm):
    """A product whose rows, not its vectors, are contiguous in the result."""

    image: tuple[te.Var, ...]  # the contiguous axes at the end of the result, outermost first

    @cached_property
    def rows(self) -> tuple[te.Var, ...]:
        return self.image

    @cached_property
    def shared(self) -> tuple[te.Var, ...]:
        return tuple(axis for axis in self.formula.axes if axis not in self.image and axis != self.vector)

    @cached_property
    def k_axes(self) -> tuple[te.Var, ...]:
        """In the order of the data, so that neighbouring elements are read together."""
        return tuple(sorted(self.reduction.axes, key=lambda tap: -self.step(tap)))

    @property
    def cut(self) -> int:
        return 0


def transposed_gemm_of(formula: Formula | None) -> TransposedGemm | None:
    """Match the formula as a product of data and a constant with the constant's own axis in vectors, or
    return None."""
    if formula is None or len(formula.reductions) != 1 or set(formula.rows) != set(formula.axes):
        return None
    (reduction,) = formula.reductions
    body = reduction.body
    if reduction.kind != "sum" or not (isinstance(body, te.Call) and body.op == "mul"):
        return None
    loads = [load for e in formula.expressions() for load in te.loads(e)]
    if any(te.loads(load.indices[0]) for load in loads if load.indices):
        return None
    for data, weight in (body.args, body.args[::-1]):
        plain = weight.value if isinstance(weight, te.Cast) else weight
        if not isinstance(plain, te.Load) or plain.source not in formula.constants:
            continue
        if sum(load.source == plain.source for load in loads) > 1 or not te.loads(data):
            continue
        gemm = _with_image(formula, data, weight)
        if gemm is not None and _can_be_packed(gemm):
            return gemm
    return None


def _with_image(formula: Formula, data: te.Expr, weight: te.Expr) -> TransposedGemm | None:
    in_data, in_weight = te.variables(data), te.variables(weight)
    own = [axis for axis in formula.axes if axis in in_weight and axis not in in_data]
    image: list[te.Var] = []
    size = 1
    for axis in sorted(formula.axes, key=lambda each: coefficient(formula.store, each) or 0):
        if coefficient(formula.store, axis) != size or axis not in in_data or axis in in_weight:
            break
        image.insert(0, axis)
        size *= axis.extent
    if not own or not image or any(len(dims) > 1 and not _is_flat(formula, dims) for dims in (image,)):
        return None
    vector = max(own, key=lambda axis: axis.extent)
    return TransposedGemm(formula, data, weight, vector, tuple(image))


def _is_flat(formula: Formula, image: Sequence[te.Var]) -> bool:
    """Whether the epilogue can treat the axes of the image as one."""
    for load in te.loads(formula.value):
        form = linear(load.indices[0]) if load.indices else None
        if form is None:
            continue
        steps = [form.terms.get(axis, 0) for axis in image]
        dense = [steps[-1] * extent_of(image[number + 1 :]) for number in range(len(image))]
        if steps != dense or any(not isinstance(atom, te.Var) for atom in form.terms):
            return False
    return not set(image) & {
        v for node in te.walk(formula.value) if _compares(node) for v in te.variables(node)
    }


def _compares(node: te.Expr) -> bool:
    return isinstance(node, te.Select) or (isinstance(node, te.Call) and node.dtype.short == "bool")


def _can_be_packed(gemm: TransposedGemm) -> bool:
    load = gemm.weight_load
    walk = [whole(a) for a in (*gemm.shared, gemm.vector, *gemm.k_axes) if a in te.variables(load)]
    return pack_operand(load, walk) is not None


class AppliedContractionTransposed(AppliedContraction):
    name = NAME
    narrows = False
    gemm: TransposedGemm

    def _unrolls(self) -> tuple[int, ...]:
        windows = {extent_of(self.gemm.k_axes[n:]) for n in range(1, len(self.gemm.k_axes))}
        return tuple(sorted({*super()._unrolls(), *(n for n in windows if 1 < n <= _WRITTEN_WINDOW)}))

    def _legal(self, values: Mapping[str, Number]) -> Truth:
        legal = super()._legal(values)
        if nowhere(legal):
            return legal
        return legal & (self._sums_bytes(self.shape_of(values)) <= _SUMS_BYTES)

    def _sums_bytes(self, shape: ContractionTiling) -> Number:
        return 4 * points_of(self.gemm, shape) * shape.panels.size

    def terms_of(self, values: Mapping[str, Number]) -> Terms:
        terms = super().terms_of(values)
        shape = self.shape_of(values)
        gemm = self.gemm
        copies = extent_of(gemm.shared) * shape.blocks * shape.chunks
        passes = copies * shape.per_chunk
        tiles = self._tiles_per_block(shape)
        longest = gemm.k_axes[0].extent
        k_blocks = ceil_div(longest, select(shape.k_block > 0, shape.k_block, longest))
        points = points_of(gemm, shape)
        transposed = 1.0 * passes * points * shape.panels.size
        scalar = transpose_cycles(transposed, points, self.lanes)
        scalar += copies * self._reading(shape, passes // copies * tiles, k_blocks)
        read = tiles * self._tile_bytes(shape)
        half = self.machine.caches.l1 // 2
        far = select(self._packs(shape), False, read // k_blocks > half)
        again = select(far, 1.0 * passes * read, 0.0)
        again = again + select(self._sums_bytes(shape) > half, 2 * 4 * transposed, 0.0)
        return replace(
            terms,
            loads=terms.loads + transposed / self.lanes,
            stores=terms.stores + transposed / self.lanes,
            from_l2=terms.from_l2 + again,
            scalar=terms.scalar + scalar,
        )

    def _reading(self, shape: ContractionTiling, tiles: Number, k_blocks: Number) -> Number:
        """Cycles to read a block's data, for staging or by register tiles, that depend on its memory layout."""
        gemm = self.gemm
        extents = self.staged_extents(shape)
        runs = math.prod(extents[:-1])
        pages = gemm.length // k_blocks * min(1.0, 4 * gemm.step(gemm.k_axes[0]) / self.machine.page_bytes)
        unstaged = runs * RUN + select(pages > _PAGES, tiles * gemm.length * _PAGE_MISS, 0.0)
        if packs(gemm):
            at_once = ceil_div(shape.rows, 1 << floor_log2(shape.rows))  # overlapping vectors
            vectors = at_once * ceil_div(shape.block, shape.rows) * gemm.length
            copied = runs * RUN + vectors * _COPIED
        else:
            copied = runs * (RUN + (GATHERED * extents[-1] if self._gathers else 0.0))
        return select(shape.staged, copied, unstaged)

    def _packs(self, shape: ContractionTiling) -> Truth:
        """Whether the block is staged in the order in which its register tiles read it."""
        return shape.staged & packs(self.gemm)

    def _staged_bytes(self, shape: ContractionTiling) -> Number:
        tiled = round_up(shape.block, shape.rows)
        copied = tiled * self.gemm.length * self.gemm.data.dtype.bytes
        return select(self._packs(shape), copied, super()._staged_bytes(shape))

    @cached_property
    def _gathers(self) -> bool:
        """Whether neighbours along the last image axis are copied from non-contiguous memory."""
        return self._last_dim.tap is None and self.gemm.step(self.gemm.image[-1]) > 1

    @cached_property
    def _last_dim(self) -> Coordinate:
        assert self.dims is not None
        return next(dim for dim in self.dims if dim.axis == self.gemm.image[-1])

    def _tile_bytes(self, shape: ContractionTiling) -> Number:
        """Bytes of the lines that a register tile reads: some neighbours in each row of the window, per outer step of
        K."""
        step = select(shape.staged, self._last_dim.axis_step, self.gemm.step(self.gemm.image[-1]))
        outer, *window = self.gemm.k_axes
        span = (shape.rows - 1) * step + (window[-1].extent if window else 1) - 1
        rows = outer.extent * extent_of(window[:-1])
        lines = rows * (self.machine.line_bytes + 4 * span)
        return select(self._packs(shape), super()._tile_bytes(shape), lines)

    def nest_of(self, shape: ContractionTiling) -> ContractionNest:
        return TransposedNest(self, shape)


def packs(gemm: TransposedGemm) -> bool:
    """Whether the rows of a register tile are contiguous for every step of K, so that a block can be stored tile by
    tile."""
    return len(gemm.image) == 1 and te.element(gemm.data) is not None and gemm.step(gemm.image[0]) == 1


def vectors_of(rows: int) -> list[int]:
    """The starts of overlapping vectors that cover the rows of a register tile."""
    lanes = power_of_two_below(rows)
    return [min(start, rows - lanes) for start in range(0, rows, lanes)]


def transpose_cycles(transposed: Number, points: Number, lanes: int) -> Number:
    """Cycles to transpose this many sums in blocks of `points`."""
    bits = least(floor_log2(lanes), floor_log2(points))
    return transposed * (_TRANSPOSING + bits + 1) / (1 << bits)


def points_of(gemm: TransposedGemm, shape: ContractionTiling) -> Number:
    """Elements of the image in a block."""
    return shape.block * extent_of(gemm.image[1:])


class TransposedNest(ContractionNest):
    gemm: TransposedGemm

    def __init__(self, applied: AppliedContractionTransposed, shape: ContractionTiling) -> None:
        super().__init__(applied, shape)
        self.points = points_of(self.gemm, shape)
        self.sums = Buffer("sums", self.accumulator.dtype, self.points * shape.panels.size, Scope.SCRATCH)

    # -- staging: the rows of each register tile, for one step of K after another ------------------------------------

    def _stage(self) -> StagedOperand:
        if not packs(self.gemm):
            return super()._stage()
        size = self._tiles_of_block.count * self.gemm.length * self.shape.rows
        return StagedOperand(Buffer("packed", self.gemm.data.dtype, size, Scope.SCRATCH), (), ())

    @property
    def _tiles_of_block(self) -> Tiles:
        return Tiles(te.Var("row", self.shape.block), self.shape.rows)

    def _position_in(self, staged: StagedOperand) -> te.Expr:
        return self._first_position() + self.row if packs(self.gemm) else super()._position_in(staged)

    def _first_position(self) -> te.Expr:
        gemm = self.gemm
        return (self._tiles_of_block.var * gemm.length + row_major(gemm.k_axes)) * self.shape.rows

    def _fill(self, staged: StagedOperand, data: te.Expr) -> Stmt:
        if not packs(self.gemm):
            return super()._fill(staged, data)
        rows, tiles, (axis,) = self.shape.rows, self._tiles_of_block, self.gemm.image
        lane = te.Var("w", power_of_two_below(rows))
        first = self.block_start + tiles.start()
        stores = [
            Store(
                staged.buffer,
                self._first_position() + start + lane,
                te.substitute(data, {axis: first + start + lane}),
            )
            for start in vectors_of(rows)
        ]
        loops = [(loop, Kind.SERIAL) for loop in (*self.gemm.k_axes, tiles.var)]
        return nest([*loops, (lane, Kind.VECTOR)], block(*stores))

    # -- the sums ---------------------------------------------------------------------------------------------------

    def _prefetched_ahead(self) -> list[Stmt]:
        return []

    def _finished(self, kept: te.Expr) -> Store:
        point: te.Expr = te.as_index(0)
        for axis in self.gemm.image:
            position = self.values.get(axis, axis)
            if axis == self.gemm.image[0]:
                position = position - self.block_start
            point = point * axis.extent + position
        return Store(self.sums, point * self.shape.panels.size + self.vec * self.lanes + self.lane, kept)

    def after_tiles(self) -> list[Stmt]:
        """Transpose the sums, square by square, and apply the epilogue."""
        side = min(self.lanes, power_of_two_below(self.points))
        square = Buffer("square", self.sums.dtype, side * side, Scope.REGISTER)
        points = Tiles(te.Var("point", self.points), side)
        column = te.Var("column", self.shape.panels.size // side)
        step, lane = te.Var("q", side), te.Var("w", side)
        in_square = [(step, Kind.UNROLL), (lane, Kind.VECTOR)]
        element = step * side + lane
        position = (points.start() + step) * self.shape.panels.size + column * side + lane
        fill = nest(in_square, Store(square, element, te.Load(self.sums, (position,))))
        values: dict[te.Var, te.Expr] = dict.fromkeys(self.gemm.image, te.as_index(0))
        values[self.gemm.image[-1]] = self._first_point() + points.start() + lane
        values[self.gemm.vector] = self.shape.panels.start_of(self.which_panel) + column * side + step
        value = te.substitute(self.result_of(te.Load(square, (element,))), values)
        write = nest(in_square, Store(self.formula.output, te.substitute(self.formula.store, values), value))
        transposed = block(fill, Transpose(square, side, side, side), write)
        return [nest([(column, Kind.SERIAL), (points.var, Kind.SERIAL)], transposed)]

    def _first_point(self) -> te.Expr:
        return self.block_start * extent_of(self.gemm.image[1:])
