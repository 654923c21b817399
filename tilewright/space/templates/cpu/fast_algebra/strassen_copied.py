"""Matmuls by one level of Strassen whose right operand is no constant: 1x1 convolutions with channels first, where it
is the image and the weight is on the left; matmuls of two activations.

The loops are those of `strassen.py`. The first two products are the first to see the two halves of a pair of panels;
the first register tile of each copies its half to scratch memory, as a packed weight would lie, beside its
multiply-adds. So the rows of an image, which may lie pages apart and straddle lines, are visited once and not by each
register tile of each product. Where the next pair is asked for, so are its lines of each row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from tilewright import te
from tilewright.dtypes import DType
from tilewright.hw import CpuMachine
from tilewright.loops.ir import Buffer, Prefetch, Program, Scope, Stmt, Store
from tilewright.numerics import may_lose_digits
from tilewright.space.space import Config, Value
from tilewright.space.template import Applied, Terms, Work
from tilewright.space.templates.cpu.contraction import AppliedContraction
from tilewright.space.templates.cpu.contraction import Shape as PlainShape
from tilewright.space.templates.cpu.contraction_nest import ContractionNest
from tilewright.space.templates.cpu.fast_algebra.strassen import AppliedStrassen, is_large_matrix_product
from tilewright.space.templates.cpu.fast_algebra.strassen_nest import Factors, StrassenNest
from tilewright.space.templates.cpu.fast_algebra.strassen_nest import Shape as PackedShape
from tilewright.space.templates.cpu.product import Product, coordinates, product_of
from tilewright.support.arith import ceil_div

NAME = "strassen_copied"
_BYTES = DType.F32.bytes
_COPIED = 1.0  # cycles for a vector that is copied, of which a register tile hides the rest


class StrassenCopied:
    name = NAME

    def apply(self, work: Work) -> Applied | None:
        if not may_lose_digits(work.numerics):
            return None
        product = product_of(work.formula)
        if product is None or product.constant_weight or not is_large_matrix_product(product):
            return None
        applied = AppliedStrassenCopied(work, product)
        return applied if next(applied.space.configs(), None) is not None else None


@dataclass(frozen=True)
class Shape(PackedShape):
    @property
    def copied_size(self) -> int:
        """Elements of a piece of a pair of panels."""
        return 2 * self.panels.size * 2 * self.piece

    @property
    def scratch_bytes(self) -> int:
        return super().scratch_bytes + self.copied_size * _BYTES


class _OfCopies(AppliedContraction):
    """Register tiles whose right operand has been copied."""

    def unpacked_cycles(self, shape: PlainShape, steps: float, visits: float) -> float:
        return 0.0

    def copying(self, shape: PlainShape, visits: float) -> float:
        """Cycles that it costs to read so many rows of a panel where they lie."""
        return super().unpacked_cycles(replace(shape, copied=True), 0.0, visits)


class AppliedStrassenCopied(AppliedStrassen):
    name = NAME

    def __init__(self, work: Work, product: Product) -> None:
        super().__init__(work, product)
        self.plain: _OfCopies = _OfCopies(work, product, coordinates(product))

    @cached_property
    def _is_packed(self) -> bool:
        return True  # as far as products see it

    def _registers(self, rows: int, vectors: int, long: bool) -> int:
        """What is copied takes one more, which wider tiles have: they wait longer for their right operands."""
        return super()._registers(rows, vectors, long) + (vectors == 2)

    def shape_of(self, values: Mapping[str, Value]) -> Shape:
        return Shape(**vars(super().shape_of(values)))

    def terms(self, config: Config) -> Terms:
        shape = self.shape_of(dict(config.values))
        terms, plain = super().terms(config), replace(self._plain_shape(shape), prefetch=shape.prefetch)
        visits = float(shape.chunks * shape.blocks * shape.per_chunk * 2 * self.tap.extent)
        copied = visits * shape.vectors
        return replace(
            terms,
            loads=terms.loads + copied,
            stores=terms.stores + copied,
            from_l3=terms.from_l3 + terms.from_memory,
            from_memory=0.0,
            prefetched=0.0,
            scalar=terms.scalar + copied * _COPIED + self.plain.copying(plain, visits),
        )

    def program(self, config: Config) -> Program:
        shape = self.shape_of(dict(config.values))
        copy = Buffer("copy", DType.F32, shape.copied_size, Scope.SCRATCH)
        return _Nest(self._plain_nest(shape), shape, self.machine, copy).program(config)


class _Nest(StrassenNest):
    def __init__(self, plain: ContractionNest, shape: Shape, machine: CpuMachine, copy: Buffer) -> None:
        super().__init__(plain, shape, machine)
        self.copy = copy

    def _weight(self, panel: int, tap: te.Expr) -> te.Expr:
        return te.substitute(self.product.weight, {**self._values((0, panel)), self.tap: tap})

    def _right(self, panel: int, tap: te.Expr) -> te.Load:
        return te.Load(self.copy, (self._place_in_copy(panel, tap),))

    def _place_in_copy(self, panel: int, tap: te.Expr) -> te.Expr:
        row = tap - self._first_tap(0) + panel * 2 * self.shape.piece
        return row * self.shape.panels.size + self.plain.column

    def _factors(self, tap: te.Var) -> tuple[Factors, ...]:
        upper, lower, *others = super()._factors(tap)
        return (self._copying(upper, 0, tap), self._copying(lower, 1, tap), *others)

    def _copying(self, factors: Factors, tap_half: int, tap: te.Var) -> Factors:
        """The first product that reads this half of the taps: it copies both panels."""
        row = self._first_tap(tap_half) + tap
        other = Store(self.copy, self._place_in_copy(1, row), self._weight(1, row))
        return replace(factors, right=self._weight(0, row), place=self._right(0, row), copies=(other,))

    def _next_pair(self, step: te.Expr, steps: int) -> list[Stmt]:
        """Of each row of its piece the lines of both panels; or of the next piece's first pair."""
        shape, load = self.shape, self.product.weight_load
        assert isinstance(load.source, Buffer)
        run = 2 * shape.panels.size
        lines = ceil_div(run, shape.in_line)
        each = ceil_div(2 * shape.piece * lines, steps)
        done = self.piece * shape.per_chunk + self.pair + 1
        first = self.which_pair - self.pair + done % shape.per_chunk
        asked: list[Stmt] = []
        for n in range(each):
            number = step * each + n
            place = {
                self.tap: done // shape.per_chunk * (2 * shape.piece) + number // lines,
                self.product.vector: first * run + number % lines * shape.in_line,
            }
            asked.append(Prefetch(load.source, te.substitute(load.indices[0], place), shape.prefetch))
        return asked
