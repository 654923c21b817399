"""Matmuls by one level of Strassen whose right operand is not constant: 1x1 convolutions with channels first, where it
is the image and the weight is on the left; matmuls of two activations.

The loops are those of `strassen.py`. The first two products are the first to see the two halves of a pair of panels;
the first register tile of each copies its half to scratch memory, as a packed weight would lie, alongside its
FMAs. So the rows of an image, which may lie pages apart and straddle lines, are visited once and not by each
register tile of each product. Where the next pair is prefetched, so are its lines of each row.
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
from tilewright.space.templates.cpu.contraction_nest import ContractionNest
from tilewright.space.templates.cpu.contraction_terms import ContractionTiling as PlainShape
from tilewright.space.templates.cpu.fast_algebra.strassen import AppliedStrassen, is_large_gemm
from tilewright.space.templates.cpu.fast_algebra.strassen_nest import Factors, StrassenNest
from tilewright.space.templates.cpu.fast_algebra.strassen_nest import StrassenTiling as PackedShape
from tilewright.space.templates.cpu.gemm import Gemm, coordinates, gemm_of
from tilewright.support.arith import ceil_div

NAME = "strassen_packed"
_BYTES = DType.F32.bytes
_COPIED = 1.0  # cycles for a vector that is copied, of which a register tile hides the rest


class StrassenPacked:
    name = NAME

    def apply(self, work: Work) -> Applied | None:
        if not may_lose_digits(work.numerics):
            return None
        gemm = gemm_of(work.formula)
        if gemm is None or gemm.constant_weight or not is_large_gemm(gemm):
            return None
        applied = AppliedStrassenPacked(work, gemm)
        return applied if next(applied.space.configs(), None) is not None else None


@dataclass(frozen=True)
class StrassenPackedTiling(PackedShape):
    @property
    def copied_size(self) -> int:
        """Elements of a K block of a pair of panels."""
        return 2 * self.panels.size * 2 * self.k_block

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


class AppliedStrassenPacked(AppliedStrassen):
    name = NAME

    def __init__(self, work: Work, gemm: Gemm) -> None:
        super().__init__(work, gemm)
        self.plain: _OfCopies = _OfCopies(work, gemm, coordinates(gemm))

    @cached_property
    def _is_packed(self) -> bool:
        return True  # as far as products see it

    def _registers(self, rows: int, vectors: int, long: bool) -> int:
        """The number of registers. With two vectors it is one more, for the copied operand: such tiles wait longer for
        their right operands."""
        return super()._registers(rows, vectors, long) + (vectors == 2)

    def shape_of(self, values: Mapping[str, Value]) -> StrassenPackedTiling:
        return StrassenPackedTiling(**vars(super().shape_of(values)))

    def terms(self, config: Config) -> Terms:
        shape = self.shape_of(dict(config.values))
        terms, plain = super().terms(config), replace(self._plain_shape(shape), prefetch=shape.prefetch)
        visits = float(shape.chunks * shape.blocks * shape.per_chunk * 2 * self.k.extent)
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
        return _PackedNest(self._plain_nest(shape), shape, self.machine, copy).program(config)


class _PackedNest(StrassenNest):
    def __init__(
        self, plain: ContractionNest, shape: StrassenPackedTiling, machine: CpuMachine, copy: Buffer
    ) -> None:
        super().__init__(plain, shape, machine)
        self.copy = copy

    def _weight(self, panel: int, k: te.Expr) -> te.Expr:
        return te.substitute(self.gemm.weight, {**self._values((0, panel)), self.k: k})

    def _right(self, panel: int, k: te.Expr) -> te.Load:
        return te.Load(self.copy, (self._position_in_copy(panel, k),))

    def _position_in_copy(self, panel: int, k: te.Expr) -> te.Expr:
        row = k - self._first_k(0) + panel * 2 * self.shape.k_block
        return row * self.shape.panels.size + self.plain.column

    def _factors(self, k: te.Var) -> tuple[Factors, ...]:
        upper, lower, *others = super()._factors(k)
        return (self._copying(upper, 0, k), self._copying(lower, 1, k), *others)

    def _copying(self, factors: Factors, k_half: int, k: te.Var) -> Factors:
        """The first product that reads this half of K: it copies both panels."""
        row = self._first_k(k_half) + k
        other = Store(self.copy, self._position_in_copy(1, row), self._weight(1, row))
        return replace(factors, right=self._weight(0, row), position=self._right(0, row), copies=(other,))

    def _next_pair(self, step: te.Expr, steps: int) -> list[Stmt]:
        """Prefetch the lines of both panels in each row of the K block, or those of the next K block's first pair."""
        shape, load = self.shape, self.gemm.weight_load
        assert isinstance(load.source, Buffer)
        run = 2 * shape.panels.size
        lines = ceil_div(run, shape.in_line)
        each = ceil_div(2 * shape.k_block * lines, steps)
        done = self.k_block * shape.per_chunk + self.pair + 1
        first = self.which_pair - self.pair + done % shape.per_chunk
        prefetched: list[Stmt] = []
        for n in range(each):
            number = step * each + n
            position = {
                self.k: done // shape.per_chunk * (2 * shape.k_block) + number // lines,
                self.gemm.vector: first * run + number % lines * shape.in_line,
            }
            prefetched.append(Prefetch(load.source, te.substitute(load.indices[0], position), shape.prefetch))
        return prefetched
