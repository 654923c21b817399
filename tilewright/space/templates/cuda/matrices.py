"""Recognises matmuls: out[batch, m, n] = epilogue(sum over k of a[batch, m, k] * b[batch, k, n]).

Each of m, n and k is one axis, or several fused ones. `b` is a matrix in memory. If `a` is not, its rows are
gathered: in a convolution, m are the pixels, and k the window positions and channels; rows may also have been
permuted. Either operand may be computed from tensors in memory (`computed.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from tilewright import te
from tilewright.dtypes import DType
from tilewright.loops.formula import Formula
from tilewright.loops.gpu.tensor import ComputedOperand, MatrixOperand, Operand, WindowOperand
from tilewright.loops.gpu.thread_index import positions, step_of
from tilewright.loops.guards import conjuncts
from tilewright.loops.ir import Buffer
from tilewright.loops.tiling import columns_of
from tilewright.runtime.packing import Packing
from tilewright.space.templates.cuda.computed import Element, computed_operand, element_of
from tilewright.te.index import Linear, coefficient, linear, simplify

LANES = (8, 4, 2, 1)
_COPY_BYTES = 16  # maximum bytes of one copy
_MIN_BYTES = 4  # minimum for byte elements, which cannot go through registers in pairs
# Operand types, and the types they are multiplied as. 32-bit floats are rounded when they are loaded.
_COMPUTED = {DType.F16: DType.F32, DType.BF16: DType.F32, DType.I8: DType.I32}
_COMPUTED_ROUNDED = {**_COMPUTED, DType.F32: DType.F32}
_BITS = 31  # maximum window positions in a row's bit mask of what is inside the image
INT_MAX = 2**31 - 1


@dataclass(frozen=True)
class MatrixWork:
    formula: Formula
    a: te.Load
    guard: te.Expr | None  # where `a` is not zero
    b: te.Load
    m: tuple[te.Var, ...]  # outermost first, in order; none: one row
    n: tuple[te.Var, ...]
    k: tuple[te.Var, ...]
    batch: tuple[te.Var, ...]
    packing: Packing | None = None  # of b, if it is a constant that is stored transposed
    left_element: Element | None = None  # the expression that `a` is a part of, if it is more than a load
    right_element: Element | None = None
    multiplied: DType | None = None  # multiplied as this type; None: as `a` is stored

    @cached_property
    def sizes(self) -> tuple[int, int, int]:
        m, n, k = (math.prod(axis.extent for axis in axes) for axes in (self.m, self.n, self.k))
        return m, n, k

    @cached_property
    def batches(self) -> int:
        return math.prod(axis.extent for axis in self.batch)

    @cached_property
    def left(self) -> Operand:
        found = self._left()
        assert found is not None
        return found

    @cached_property
    def right(self) -> MatrixOperand | ComputedOperand:
        found = self._right()
        assert found is not None
        return found

    @cached_property
    def across(self) -> bool:
        """Whether the result is stored by columns: contiguous along m."""
        return coefficient(self.formula.store, self.n[-1]) != 1

    @property
    def is_sound(self) -> bool:
        """Whether the pipeline can read both operands, and indices fit in 32 bits."""
        buffers = (*self.formula.inputs, self.formula.output)
        short = all(buffer.size <= INT_MAX for buffer in buffers)
        left, right = self._left(), self._right()
        return short and left is not None and right is not None and self._can_load(left, right)

    @cached_property
    def dtype(self) -> DType:
        return self.multiplied or self.a.dtype

    @cached_property
    def size(self) -> int:
        """Bytes of an element."""
        return self.dtype.bytes

    def _can_load(self, *operands: Operand) -> bool:
        """Bytes cannot be transposed while loading, nor copied one by one."""
        return self.size > 1 or not any(o.transposed or o.lanes < _MIN_BYTES for o in operands)

    def _left(self) -> Operand | None:
        if self.left_element is not None:
            return computed_operand(self.left_element, self.dtype, self.m, self.k, self.batch)
        return (matrix(self.a, self.m, self.k) if self.guard is None else None) or _window(self)

    def _right(self) -> MatrixOperand | ComputedOperand | None:
        if self.right_element is not None:
            return computed_operand(self.right_element, self.dtype, self.n, self.k, self.batch)
        return matrix(self.b, self.n, self.k)


def matrix_work(
    formula: Formula, rounded: bool = False, multiplied: DType | None = None
) -> MatrixWork | None:
    """Match the formula as a product of two matrices of 16-bit floats or bytes, or return None. `rounded`: also
    accept 32-bit floats, which may be rounded. `multiplied`: the operand type if an operand is computed; without it,
    none may be."""
    computed = _COMPUTED_ROUNDED if rounded else _COMPUTED
    if len(formula.reductions) != 1 or columns_of(formula):
        return None
    (reduction,) = formula.reductions
    body = reduction.body
    if reduction.kind != "sum" or not isinstance(body, te.Call) or body.op != "mul":
        return None
    read = [_read(arg, computed) for arg in body.args]
    if all(read) and read[0].load.dtype is read[1].load.dtype:  # type: ignore[union-attr]
        multiplied, factors = None, read
    else:
        factors = [_factor(arg, computed, multiplied) for arg in body.args]
    for across in (False, True):  # with the other operand on the left, the result may be stored by rows
        for a, b in (factors, factors[::-1]):
            if a is None or b is None or (b.guard is not None and b.element is None):
                continue
            found = _as_matrices(formula, a, b, reduction.axes, multiplied)
            if found is not None and found.across is across:
                return found
    return None


@dataclass(frozen=True)
class _Factor:
    load: te.Load
    guard: te.Expr | None  # where it is not zero
    element: Element | None = None  # the expression that the load is a part of

    @property
    def variables(self) -> set[te.Var]:
        if self.element is not None:
            return self.element.variables
        return te.variables(self.load) | (te.variables(self.guard) if self.guard is not None else set())


def _read(expr: te.Expr, computed: Mapping[DType, DType]) -> _Factor | None:
    found = _guarded_load(expr, computed)
    return None if found is None else _Factor(*found)


def _factor(expr: te.Expr, computed: Mapping[DType, DType], multiplied: DType | None) -> _Factor | None:
    """Match a factor that is read in the multiplied type, or is computed and rounded to it."""
    read = _read(expr, computed)
    if read is not None and read.load.dtype is multiplied:
        return read
    if multiplied is None or computed.get(multiplied) is not expr.dtype:
        return None
    element = element_of(expr)
    return None if element is None else _Factor(element.main, element.guard, element)


def _guarded_load(expr: te.Expr, computed: Mapping[DType, DType]) -> tuple[te.Load, te.Expr | None] | None:
    """(load, where it is not zero) for an element of a type in `computed`, converted as `computed` says."""
    guard: te.Expr | None = None
    wide = expr.dtype
    while not isinstance(expr, te.Load):
        if isinstance(expr, te.Cast) and expr.dtype is wide:
            expr = expr.value
        elif isinstance(expr, te.Select) and isinstance(expr.other, te.Const) and guard is None:
            if expr.other.value != 0:
                return None
            guard, expr = expr.cond, expr.then
        else:
            return None
    plain = all(isinstance(atom, te.Var) for atom in linear(expr.indices[0]).terms)
    return (expr, guard) if computed.get(expr.dtype) is wide and plain else None


def _as_matrices(
    formula: Formula, a: _Factor, b: _Factor, reduced: Sequence[te.Var], multiplied: DType | None
) -> MatrixWork | None:
    """The product with `a` on the left; the output must be contiguous along the last of one operand's own axes."""
    of_a, of_b = (linear(factor.load.indices[0]).terms for factor in (a, b))
    m = [axis for axis in formula.axes if axis in a.variables and axis not in b.variables]
    n = [axis for axis in formula.axes if axis in b.variables and axis not in a.variables]
    batch = tuple(axis for axis in formula.axes if (axis in a.variables) == (axis in b.variables))
    guarded = te.variables(a.guard) if a.guard is not None else set()
    if not n or not set(reduced) <= set(of_b) or guarded & set(batch) or not set(n) <= set(of_b):
        return None
    n.sort(key=lambda axis: -of_b[axis])
    k = sorted(reduced, key=lambda axis: -of_b[axis])
    if coefficient(formula.store, n[-1]) != 1 and not (m and coefficient(formula.store, m[-1]) == 1):
        return None
    if a.guard is None and set(m) <= set(of_a) and step_of(of_a, m) is None:
        m.sort(key=lambda axis: -of_a[axis])
    work = MatrixWork(
        formula, a.load, a.guard, b.load, tuple(m), tuple(n), tuple(k), batch,
        left_element=a.element, right_element=b.element, multiplied=multiplied,
    )  # fmt: skip
    if work.size == 1 and b.element is None and b.load.source in formula.constants:
        work = _with_rows_of_k(work)
    return work if work.is_sound else None


def _with_rows_of_k(work: MatrixWork) -> MatrixWork:
    """The same product with a constant right operand stored row by row of k, if possible."""
    stored, (_, n, k) = matrix(work.b, work.n, work.k), work.sizes
    if stored is None or not stored.transposed or stored.buffer.size != n * k or stored.pitch != n:
        return work
    terms = linear(work.b.indices[0]).terms
    transposed: dict[te.Expr, int] = {
        axis: step * k if axis in work.n else step // n for axis, step in terms.items()
    }
    load = te.Load(work.b.source, (Linear(transposed, 0).expr(),))
    return replace(work, b=load, packing=Packing((k, n), (k, n), (0, 2, 3, 1)))


# -- operands ---------------------------------------------------------------------------------------------------------


def _lanes(dtype: DType, numbers: Iterable[int]) -> int:
    found, most = list(numbers), _COPY_BYTES // dtype.bytes
    choices = (lanes for lanes in (16, *LANES) if lanes <= most)
    return next(lanes for lanes in choices if all(number % lanes == 0 for number in found))


def matrix(load: te.Load, outer: Sequence[te.Var], k_axes: Sequence[te.Var]) -> MatrixOperand | None:
    """A load as a matrix in memory that is contiguous in one of its two directions."""
    form = linear(load.indices[0])
    across, along = step_of(form.terms, outer), step_of(form.terms, k_axes)
    if across is None or not along or (along != 1 and across != 1):
        return None
    transposed = along != 1
    contiguous, pitch = (outer, along) if transposed else (k_axes, across)
    rest = {atom: c for atom, c in form.terms.items() if atom not in (*outer, *k_axes)}
    extent = math.prod(axis.extent for axis in contiguous)
    lanes = _lanes(load.dtype, [extent, pitch, form.constant, *rest.values()])
    assert isinstance(load.source, Buffer)
    return MatrixOperand(load.source, simplify(Linear(rest, form.constant).expr()), pitch, transposed, lanes)


def _window(work: MatrixWork) -> WindowOperand | None:
    """The left operand gathered row by row; element by element if neighbours along k are not contiguous."""
    form, buffer = linear(work.a.indices[0]), work.a.source
    inner = work.k[-1]
    assert isinstance(buffer, Buffer)
    if not work.m:
        return None
    m, _, k = work.sizes
    row_of, k_of = (
        positions(te.Var(name, extent), axes)
        for name, extent, axes in (("place_m", m, work.m), ("place_k", k, work.k))
    )
    rows: dict[te.Expr, int] = {axis: c for axis, c in form.terms.items() if axis in work.m}
    k_terms: dict[te.Expr, int] = {axis: c for axis, c in form.terms.items() if axis in work.k}
    rest = {atom: c for atom, c in form.terms.items() if atom not in rows and atom not in k_terms}
    others = [c for axis, c in k_terms.items() if axis != inner]
    bits = _bits(work)
    if bits is None:
        return None
    inside, guarded = bits
    lanes = _lanes(work.a.dtype, [inner.extent, form.constant, *rows.values(), *others, *rest.values()])
    if form.terms.get(inner, 0) != 1 or inner in guarded:
        lanes = 1
    seen: list[te.Expr] = []
    needed: list[te.Expr] = []
    for axis, condition in guarded.items():
        needed.append(simplify(te.substitute(axis, k_of) + len(seen)))
        for position in range(axis.extent):
            at = te.substitute(condition, {axis: te.as_index(position)})
            seen.append(simplify(te.substitute(at, row_of)))
    return WindowOperand(
        buffer,
        simplify(Linear(rest, 0).expr()),
        simplify(te.substitute(Linear(rows, form.constant).expr(), row_of)),
        simplify(te.substitute(Linear(k_terms, 0).expr(), k_of)),
        None if inside is None else simplify(te.substitute(inside, row_of)),
        tuple(seen),
        tuple(needed),
        lanes,
    )


def _bits(work: MatrixWork) -> tuple[te.Expr | None, dict[te.Var, te.Expr]] | None:
    """The guard as (condition on rows, condition on each k axis); None if a condition combines two of these."""
    by_axis: dict[te.Var, list[te.Expr]] = {}
    of_row: list[te.Expr] = []
    for condition in conjuncts(work.guard) if work.guard is not None else []:
        axes = te.variables(condition) & set(work.k)
        if len(axes) > 1:
            return None
        (by_axis.setdefault(axes.pop(), []) if axes else of_row).append(condition)
    if sum(axis.extent for axis in by_axis) > _BITS:
        return None
    joined = {axis: te.all_of(conditions) for axis, conditions in by_axis.items()}
    return te.all_of(of_row), {axis: c for axis, c in joined.items() if c is not None}
