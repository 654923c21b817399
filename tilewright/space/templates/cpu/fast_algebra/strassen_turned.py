"""1x1 convolutions with channels first by one level of Strassen, along the channels of the weight.

The loops are those of `strassen.py` with pixels as rows, over the packed panels of `turned.py`. All seven left operands
of a piece are made beforehand, as register tiles read them: the pixels of a tile side by side, tap after tap. A
convolution that leaves out pixels has those it takes gathered first. The sums of a panel are turned as soon as the last
of the products that add to it is done:

    for every chunk of pairs of panels and block of pixels:         (parallel)
      for pieces of the taps:
        gather the pixels; the left operands to scratch
        for every pair of panels:
          five products, the first panel's sums turned
          two products, the second panel's sums turned
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from tilewright import te
from tilewright.dtypes import DType
from tilewright.loops.ir import Buffer, If, Kind, Program, Scope, Stmt, Store, block, nest
from tilewright.loops.tiling import Tiles, extent_of, power_of_two_below, with_values
from tilewright.numerics import may_lose_digits
from tilewright.space.space import Config, Value
from tilewright.space.template import Applied, Terms, Work
from tilewright.space.templates.cpu.fast_algebra.strassen import AppliedStrassen, is_large_enough
from tilewright.space.templates.cpu.fast_algebra.strassen_nest import (
    ALONE,
    PRODUCTS,
    QUARTERS,
    SUMS,
    Quarter,
    StrassenNest,
)
from tilewright.space.templates.cpu.fast_algebra.strassen_nest import Shape as PackedShape
from tilewright.space.templates.cpu.product import coordinates
from tilewright.space.templates.cpu.turned import (
    GATHERED,
    RUN,
    AppliedTurned,
    TurnedNest,
    TurnedProduct,
    turned_product_of,
    turning_cycles,
    vectors_of,
)

NAME = "strassen_turned"
_BYTES = DType.F32.bytes
_MADE = 2.0  # cycles for a vector of left operands, in all
_FIRST_PANEL, _SECOND_PANEL = 4, 6  # the products that are the last to add to its sums


class StrassenTurned:
    name = NAME

    def apply(self, work: Work) -> Applied | None:
        if not may_lose_digits(work.numerics):
            return None
        product = turned_product_of(work.formula)
        if product is None or not _is_one_matrix_product(product):
            return None
        if coordinates(product) is None:
            return None
        applied = AppliedStrassenTurned(work, product)
        return applied if next(applied.space.configs(), None) is not None else None


def _is_one_matrix_product(product: TurnedProduct) -> bool:
    """Whether it is an image of float32 that a window of one pixel sees, and large enough."""
    data, weight = product.data, product.weight
    if (
        product.shared
        or len(product.taps) > 1
        or not isinstance(data, te.Load)
        or weight != product.weight_load
    ):
        return False
    dtypes = {data.dtype, weight.dtype, product.reduction.result.dtype}
    return dtypes == {DType.F32} and is_large_enough(extent_of(product.image), product.length)


@dataclass(frozen=True)
class Shape(PackedShape):
    gathers: bool  # whether the pixels of a block do not lie side by side

    @property
    def left_size(self) -> int:
        """Elements of a left operand: the pixels of each register tile, tap after tap."""
        return self.tiles * self.piece * self.rows

    @property
    def sums_size(self) -> int:
        return PRODUCTS * self.left_size

    @property
    def gathered_size(self) -> int:
        return 2 * self.piece * self.block if self.gathers else 0

    @property
    def turned_size(self) -> int:
        return self.block * self.panels.size

    @property
    def scratch_bytes(self) -> int:
        return super().scratch_bytes + (self.gathered_size + self.turned_size) * _BYTES


class AppliedStrassenTurned(AppliedStrassen):
    name = NAME
    product: TurnedProduct

    def __init__(self, work: Work, product: TurnedProduct) -> None:
        dims = coordinates(product)
        assert dims is not None
        self.machine, self.product = work.machine, product
        self.row, (self.tap,) = te.Var("pixel", extent_of(product.image)), product.taps
        dims = product.in_storage_order(dims)
        self.turned = AppliedTurned(work, product, dims)
        self.plain = AppliedTurned(work, replace(product, image=(self.row,)), dims)
        self.lanes = self.plain.lanes
        self.gathers = len(product.image) > 1 or product.step(product.image[-1]) > 1

    @cached_property
    def _is_packed(self) -> bool:
        return True  # or it would be no such product

    def _legal(self, values: Mapping[str, Value]) -> bool:
        if self.product.vector.extent % (2 * int(values["vectors"]) * self.lanes) or not super()._legal(
            values
        ):
            return False
        shape = self.shape_of(values)
        whole = shape.blocks == 1 or self.row.extent % shape.block == 0
        return whole and not shape.rest and shape.block % extent_of(self.product.image[1:]) == 0

    def shape_of(self, values: Mapping[str, Value]) -> Shape:
        return Shape(**vars(super().shape_of(values)), gathers=self.gathers)

    def terms(self, config: Config) -> Terms:
        shape = self.shape_of(dict(config.values))
        terms = super().terms(config)
        iterations = shape.chunks * shape.blocks
        taps = iterations * self.tap.extent
        made = taps // 2 * shape.tiles * len(vectors_of(shape.rows)) * PRODUCTS
        width = self.product.image[-1].extent if self.gathers else shape.block
        reading = taps * (shape.block // width * RUN + (shape.block * GATHERED if self.gathers else 0.0))
        turned = iterations * shape.per_chunk * 2 * shape.turned_size
        return replace(
            terms,
            loads=terms.loads + turned / self.lanes,
            stores=terms.stores + turned / self.lanes + made,
            scalar=terms.scalar + made * _MADE + reading + turning_cycles(turned, shape.block, self.lanes),
        )

    def program(self, config: Config) -> Program:
        shape = self.shape_of(dict(config.values))
        plain = replace(self._plain_shape(shape), block=shape.block // extent_of(self.product.image[1:]))
        return _Nest(TurnedNest(self.turned, plain), shape, self.machine, self.row).program(config)


class _Nest(StrassenNest):
    plain: TurnedNest
    shape: Shape
    product: TurnedProduct

    @cached_property
    def gathered(self) -> Buffer:
        return Buffer("gathered", DType.F32, self.shape.gathered_size, Scope.SCRATCH)

    # -- left operands --------------------------------------------------------------------------------------------

    def _add_rows(self) -> Stmt:
        shape = self.shape
        tap, tile = te.Var("st", shape.piece), self.tile
        lane = te.Var("sv", power_of_two_below(shape.rows))

        def quarter(row_half: int, tap_half: int, start: int) -> te.Expr:
            first = row_half * (shape.block - shape.half) + self.row_tiles.start()
            return self._pixel(first + start + lane, tap_half, tap)

        stores: list[Store] = []
        for start in vectors_of(shape.rows):
            a11, a12, a21, a22 = (quarter(*halves, start) for halves in QUARTERS)
            lower = a21 + a22
            rest = lower - a11
            lefts = (rest, a11 - a21, lower, a12 - rest, a11, a12, a22)
            stores += [
                Store(self.sums, self._place_of(number, tap) + start + lane, value)
                for number, value in enumerate(lefts)
            ]
        made = nest([(tile, Kind.SERIAL), (tap, Kind.SERIAL), (lane, Kind.VECTOR)], block(*stores))
        return block(self._gather(), made) if shape.gathers else made

    def _pixel(self, pixel: te.Expr, tap_half: int, tap: te.Expr) -> te.Expr:
        """Of the current block."""
        if self.shape.gathers:
            row = tap + tap_half * self.shape.piece
            return te.Load(self.gathered, (row * self.shape.block + pixel,))
        (axis,) = self.product.image
        place = {axis: self.block_start + pixel, self.tap: self._first_tap(tap_half) + tap}
        return te.substitute(self.product.data, place)

    def _gather(self) -> Stmt:
        """The pixels of the block, which is some of the image's first axis and all of the others."""
        axes, shape = self.product.image, self.shape
        first, *inner = axes
        tap = te.Var("gt", 2 * shape.piece)
        places = [te.Var("g0", shape.block // extent_of(inner))]
        places += [te.Var(f"g{n + 1}", axis.extent) for n, axis in enumerate(inner)]
        *outer, last = places
        lane = te.Var("gv", min(shape.lanes, power_of_two_below(last.extent)))
        along = Tiles(last, lane.extent)
        in_block: list[te.Expr] = [*outer, along.start() + lane]
        values: dict[te.Var, te.Expr] = {self.tap: self._first_tap(0) + tap}
        pixel: te.Expr = te.as_index(0)
        for axis, place in zip(axes, in_block, strict=True):
            values[axis] = self.plain.block_start + place if axis == first else place
            pixel = pixel * axis.extent + place
        store = Store(self.gathered, tap * shape.block + pixel, te.substitute(self.product.data, values))
        loops = [(var, Kind.SERIAL) for var in (tap, *outer, along.var)]
        return nest([*loops, (lane, Kind.VECTOR)], store)

    def _place_of(self, number: int, tap: te.Expr) -> te.Expr:
        """Of the first pixel of the current register tile, in a left operand."""
        return (self.tile * self.shape.piece + tap) * self.shape.rows + number * self.shape.left_size

    def _sum(self, number: int, tap: te.Expr) -> te.Load:
        return te.Load(self.sums, (self._place_of(number, tap) + self.plain.row,))

    def _data(self, row_half: int, tap_half: int, tap: te.Expr) -> te.Expr:
        return self._sum(SUMS + ALONE.index((row_half, tap_half)), tap)

    # -- results --------------------------------------------------------------------------------------------------

    def _products(self) -> Stmt:
        tap = te.Var("t", self.shape.piece)
        stmts: list[Stmt] = []
        for number, factors in enumerate(self._factors(tap)):
            stmts.append(self._product(number, tap, factors))
            if number in (_FIRST_PANEL, _SECOND_PANEL):
                stmts.append(self._turned(int(number == _SECOND_PANEL)))
        return block(*stmts)

    def _turned(self, panel: int) -> Stmt:
        which = {self.plain.chunk: te.as_index(0), self.plain.panel: self.which_pair * 2 + panel}
        stmts = with_values(block(*self.plain.after_tiles()), which)
        if self.shape.pieces == 1:
            return stmts
        return If(te.call("eq", self.piece, te.as_index(self.shape.pieces - 1)), stmts)

    def _finished(self, quarter: Quarter, value: te.Expr) -> Stmt:
        pixel = self._current_row(quarter[0]) - self.block_start
        plain = self.plain
        place = pixel * self.shape.panels.size + plain.vec * plain.lanes + plain.lane
        return nest(plain.in_tile, Store(plain.sums, place, value))
