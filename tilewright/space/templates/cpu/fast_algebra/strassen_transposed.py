"""1x1 convolutions with channels first by one level of Strassen, along the channels of the weight.

The loops are those of `strassen.py` with pixels as rows, over the packed panels of `contraction_transposed.py`. All
seven left operands of a K block are made beforehand, as register tiles read them: the pixels of a tile side by side,
step of K after step of K. A convolution that leaves out pixels has those it takes gathered first. The sums of a panel
are transposed as soon as the last of the products that add to it is done:

    for every chunk of pairs of panels and block of pixels:         (parallel)
      for blocks of K:
        gather the pixels; the left operands to scratch
        for every pair of panels:
          five products, the first panel's sums transposed
          two products, the second panel's sums transposed
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
from tilewright.space.templates.cpu.contraction_transposed import (
    GATHERED,
    RUN,
    AppliedContractionTransposed,
    TransposedGemm,
    TransposedNest,
    transpose_cycles,
    transposed_gemm_of,
    vectors_of,
)
from tilewright.space.templates.cpu.fast_algebra.strassen import AppliedStrassen, is_large_enough
from tilewright.space.templates.cpu.fast_algebra.strassen_nest import (
    ALONE,
    PRODUCTS,
    QUARTERS,
    SUMS,
    Quarter,
    StrassenNest,
)
from tilewright.space.templates.cpu.fast_algebra.strassen_nest import StrassenTiling as PackedShape
from tilewright.space.templates.cpu.gemm import coordinates

NAME = "strassen_transposed"
_BYTES = DType.F32.bytes
_MADE = 2.0  # cycles for a vector of left operands, in all
_FIRST_PANEL, _SECOND_PANEL = 4, 6  # the products that are the last to add to its sums


class StrassenTransposed:
    name = NAME

    def apply(self, work: Work) -> Applied | None:
        if not may_lose_digits(work.numerics):
            return None
        gemm = transposed_gemm_of(work.formula)
        if gemm is None or not _is_one_gemm(gemm):
            return None
        if coordinates(gemm) is None:
            return None
        applied = AppliedStrassenTransposed(work, gemm)
        return applied if next(applied.space.configs(), None) is not None else None


def _is_one_gemm(gemm: TransposedGemm) -> bool:
    """Whether it is an image of float32 under a 1x1 window, and large enough."""
    data, weight = gemm.data, gemm.weight
    if gemm.shared or len(gemm.k_axes) > 1 or not isinstance(data, te.Load) or weight != gemm.weight_load:
        return False
    dtypes = {data.dtype, weight.dtype, gemm.reduction.result.dtype}
    return dtypes == {DType.F32} and is_large_enough(extent_of(gemm.image), gemm.length)


@dataclass(frozen=True)
class StrassenTransposedTiling(PackedShape):
    gathers: bool  # whether the pixels of a block do not lie side by side

    @property
    def left_size(self) -> int:
        """Elements of a left operand: the pixels of each register tile, step of K after step of K."""
        return self.tiles * self.k_block * self.rows

    @property
    def sums_size(self) -> int:
        return PRODUCTS * self.left_size

    @property
    def gathered_size(self) -> int:
        return 2 * self.k_block * self.block if self.gathers else 0

    @property
    def transposed_size(self) -> int:
        return self.block * self.panels.size

    @property
    def scratch_bytes(self) -> int:
        return super().scratch_bytes + (self.gathered_size + self.transposed_size) * _BYTES


class AppliedStrassenTransposed(AppliedStrassen):
    name = NAME
    gemm: TransposedGemm

    def __init__(self, work: Work, gemm: TransposedGemm) -> None:
        dims = coordinates(gemm)
        assert dims is not None
        self.machine, self.gemm = work.machine, gemm
        self.row, (self.k,) = te.Var("pixel", extent_of(gemm.image)), gemm.k_axes
        dims = gemm.in_storage_order(dims)
        self.transposed = AppliedContractionTransposed(work, gemm, dims)
        self.plain = AppliedContractionTransposed(work, replace(gemm, image=(self.row,)), dims)
        self.lanes = self.plain.lanes
        self.gathers = len(gemm.image) > 1 or gemm.step(gemm.image[-1]) > 1

    @cached_property
    def _is_packed(self) -> bool:
        return True  # or it would be no such product

    def _legal(self, values: Mapping[str, Value]) -> bool:
        if self.gemm.vector.extent % (2 * int(values["vectors"]) * self.lanes) or not super()._legal(values):
            return False
        shape = self.shape_of(values)
        whole = shape.blocks == 1 or self.row.extent % shape.block == 0
        return whole and not shape.rest and shape.block % extent_of(self.gemm.image[1:]) == 0

    def shape_of(self, values: Mapping[str, Value]) -> StrassenTransposedTiling:
        return StrassenTransposedTiling(**vars(super().shape_of(values)), gathers=self.gathers)

    def terms(self, config: Config) -> Terms:
        shape = self.shape_of(dict(config.values))
        terms = super().terms(config)
        iterations = shape.chunks * shape.blocks
        k_size = iterations * self.k.extent
        made = k_size // 2 * shape.tiles * len(vectors_of(shape.rows)) * PRODUCTS
        width = self.gemm.image[-1].extent if self.gathers else shape.block
        reading = k_size * (shape.block // width * RUN + (shape.block * GATHERED if self.gathers else 0.0))
        transposed = iterations * shape.per_chunk * 2 * shape.transposed_size
        return replace(
            terms,
            loads=terms.loads + transposed / self.lanes,
            stores=terms.stores + transposed / self.lanes + made,
            scalar=terms.scalar
            + made * _MADE
            + reading
            + transpose_cycles(transposed, shape.block, self.lanes),
        )

    def program(self, config: Config) -> Program:
        shape = self.shape_of(dict(config.values))
        plain = replace(self._plain_shape(shape), block=shape.block // extent_of(self.gemm.image[1:]))
        return _TransposedNest(TransposedNest(self.transposed, plain), shape, self.machine, self.row).program(
            config
        )


class _TransposedNest(StrassenNest):
    plain: TransposedNest
    shape: StrassenTransposedTiling
    gemm: TransposedGemm

    @cached_property
    def gathered(self) -> Buffer:
        return Buffer("gathered", DType.F32, self.shape.gathered_size, Scope.SCRATCH)

    # -- left operands --------------------------------------------------------------------------------------------

    def _add_rows(self) -> Stmt:
        shape = self.shape
        k, tile = te.Var("st", shape.k_block), self.tile
        lane = te.Var("sv", power_of_two_below(shape.rows))

        def quarter(row_half: int, k_half: int, start: int) -> te.Expr:
            first = row_half * (shape.block - shape.half) + self.row_tiles.start()
            return self._pixel(first + start + lane, k_half, k)

        stores: list[Store] = []
        for start in vectors_of(shape.rows):
            a11, a12, a21, a22 = (quarter(*halves, start) for halves in QUARTERS)
            lower = a21 + a22
            rest = lower - a11
            lefts = (rest, a11 - a21, lower, a12 - rest, a11, a12, a22)
            stores += [
                Store(self.sums, self._position_of(number, k) + start + lane, value)
                for number, value in enumerate(lefts)
            ]
        made = nest([(tile, Kind.SERIAL), (k, Kind.SERIAL), (lane, Kind.VECTOR)], block(*stores))
        return block(self._gather(), made) if shape.gathers else made

    def _pixel(self, pixel: te.Expr, k_half: int, k: te.Expr) -> te.Expr:
        """An element of the current block."""
        if self.shape.gathers:
            row = k + k_half * self.shape.k_block
            return te.Load(self.gathered, (row * self.shape.block + pixel,))
        (axis,) = self.gemm.image
        position = {axis: self.block_start + pixel, self.k: self._first_k(k_half) + k}
        return te.substitute(self.gemm.data, position)

    def _gather(self) -> Stmt:
        """The pixels of the block, which is some of the image's first axis and all of the others."""
        axes, shape = self.gemm.image, self.shape
        first, *inner = axes
        k = te.Var("gt", 2 * shape.k_block)
        positions = [te.Var("g0", shape.block // extent_of(inner))]
        positions += [te.Var(f"g{n + 1}", axis.extent) for n, axis in enumerate(inner)]
        *outer, last = positions
        lane = te.Var("gv", min(shape.lanes, power_of_two_below(last.extent)))
        along = Tiles(last, lane.extent)
        in_block: list[te.Expr] = [*outer, along.start() + lane]
        values: dict[te.Var, te.Expr] = {self.k: self._first_k(0) + k}
        pixel: te.Expr = te.as_index(0)
        for axis, position in zip(axes, in_block, strict=True):
            values[axis] = self.plain.block_start + position if axis == first else position
            pixel = pixel * axis.extent + position
        store = Store(self.gathered, k * shape.block + pixel, te.substitute(self.gemm.data, values))
        loops = [(var, Kind.SERIAL) for var in (k, *outer, along.var)]
        return nest([*loops, (lane, Kind.VECTOR)], store)

    def _position_of(self, number: int, k: te.Expr) -> te.Expr:
        """The offset of the first pixel of the current register tile in a left operand."""
        return (self.tile * self.shape.k_block + k) * self.shape.rows + number * self.shape.left_size

    def _sum(self, number: int, k: te.Expr) -> te.Load:
        return te.Load(self.sums, (self._position_of(number, k) + self.plain.row,))

    def _data(self, row_half: int, k_half: int, k: te.Expr) -> te.Expr:
        return self._sum(SUMS + ALONE.index((row_half, k_half)), k)

    # -- results --------------------------------------------------------------------------------------------------

    def _products(self) -> Stmt:
        k = te.Var("t", self.shape.k_block)
        stmts: list[Stmt] = []
        for number, factors in enumerate(self._factors(k)):
            stmts.append(self._product(number, k, factors))
            if number in (_FIRST_PANEL, _SECOND_PANEL):
                stmts.append(self._transposed(int(number == _SECOND_PANEL)))
        return block(*stmts)

    def _transposed(self, panel: int) -> Stmt:
        which = {self.plain.chunk: te.as_index(0), self.plain.panel: self.which_pair * 2 + panel}
        stmts = with_values(block(*self.plain.after_tiles()), which)
        if self.shape.k_blocks == 1:
            return stmts
        return If(te.call("eq", self.k_block, te.as_index(self.shape.k_blocks - 1)), stmts)

    def _finished(self, quarter: Quarter, value: te.Expr) -> Stmt:
        pixel = self._current_row(quarter[0]) - self.block_start
        plain = self.plain
        position = pixel * self.shape.panels.size + plain.vec * plain.lanes + plain.lane
        return nest(plain.in_tile, Store(plain.sums, position, value))
