"""Recognises contractions: the sum, over some axes, of a product of two factors.

    out[spatial axes] = value(sum over reduced axes of left[...] * right[...])

A factor is an element of a buffer at an index that depends on the axes, or an expression of such elements; it is zero
where a condition is false. In the normal form, the code that computes it and the epilogue are already inlined.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from tilewright import te
from tilewright.dtypes import DType
from tilewright.loops.formula import Formula, Reduction
from tilewright.loops.ir import Buffer
from tilewright.loops.tiling import columns_of
from tilewright.te.index import coefficient, linear

INT_MAX = 2**31 - 1


@dataclass(frozen=True)
class Factor:
    """A factor: `load`, or `value` computed from it and other loads, where `guard` holds; zero elsewhere."""

    load: te.Load
    guard: te.Expr | None
    value: te.Expr | None = None

    @property
    def buffer(self) -> Buffer:
        assert isinstance(self.load.source, Buffer)
        return self.load.source

    @property
    def dtype(self) -> DType:
        """The type that is multiplied: a value computed from 16-bit floats is rounded to 16 bits again."""
        return self.load.dtype

    @cached_property
    def variables(self) -> frozenset[te.Var]:
        parts = (self.load.indices[0], self.guard, self.value)
        return frozenset().union(*(te.variables(part) for part in parts if part is not None))

    def stride(self, axis: te.Var) -> int:
        """The step in memory along the axis; 0 if it is not constant."""
        return coefficient(self.load.indices[0], axis) or 0

    def lanes(self, inner: te.Var, most: int) -> int:
        """Contiguous neighbours along an axis that one load can read: a power of two, at most `most`."""
        if self.stride(inner) != 1 or (self.guard is not None and inner in te.variables(self.guard)):
            return 1
        form = linear(self.load.indices[0])
        numbers = [inner.extent, form.constant, *(c for atom, c in form.terms.items() if atom != inner)]
        while most > 1 and any(number % most for number in numbers):
            most //= 2
        return most


@dataclass(frozen=True)
class TwoFactorContraction:
    formula: Formula
    left: Factor
    right: Factor

    @property
    def reduction(self) -> Reduction:
        return self.formula.reductions[0]

    @property
    def axes(self) -> tuple[te.Var, ...]:
        return (*self.formula.axes, *self.reduction.axes)

    @property
    def dtype(self) -> DType:
        return self.left.dtype

    def access_matrix(self, axes: Sequence[te.Var], swapped: bool) -> tuple[tuple[bool, ...], ...]:
        """The axes that the result and both factors (in this order, or swapped) depend on."""
        factors = (self.right, self.left) if swapped else (self.left, self.right)
        tensors: list[Collection[te.Expr]] = [self.formula.axes, *(factor.variables for factor in factors)]
        return tuple(tuple(axis in tensor for axis in axes) for tensor in tensors)


def contraction_of(
    formula: Formula, dtypes: Collection[DType], sums: DType = DType.F32
) -> TwoFactorContraction | None:
    """Match a formula as a contraction of these types with sums of this type, or return None."""
    if len(formula.reductions) != 1 or columns_of(formula):
        return None
    (reduction,) = formula.reductions
    body = reduction.body
    if reduction.kind != "sum" or not isinstance(body, te.Call) or body.op != "mul":
        return None
    left, right = (factor_of(arg) for arg in body.args)
    if left is None or right is None or left.dtype is not right.dtype:
        return None
    if left.dtype not in dtypes or reduction.result.dtype is not sums:
        return None
    if any(buffer.size > INT_MAX for buffer in (*formula.inputs, formula.output)):
        return None
    return TwoFactorContraction(formula, left, right)


def factor_of(expr: te.Expr) -> Factor | None:
    """Match an expression as a factor; None if an element's index is itself loaded."""
    loads = te.loads(expr)
    if not loads or any(te.loads(load.indices[0]) for load in loads if load.indices):
        return None
    if len({load.dtype for load in loads}) > 1 or any(not load.indices for load in loads):
        return None
    guards: list[te.Expr] = []
    part = expr
    while not isinstance(part, te.Load):
        if isinstance(part, te.Cast) and _widens(part):
            part = part.value
        elif isinstance(part, te.Select) and isinstance(part.other, te.Const) and part.other.value == 0:
            guards.append(part.cond)
            part = part.then
        else:
            main = max(loads, key=lambda load: len(te.variables(load)))
            return Factor(main, te.all_of(guards), part)
    return Factor(part, te.all_of(guards))


def _widens(cast: te.Cast) -> bool:
    """Whether it takes a factor to the type of the sums."""
    source = cast.value.dtype
    return source.is_half if cast.dtype is DType.F32 else source is DType.I8 and cast.dtype is DType.I32
