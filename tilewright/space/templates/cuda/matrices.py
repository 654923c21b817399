"""Formulas seen as matrix products: out[batch, m, n] = epilogue(sum over k of a[batch, m, k] * b[batch, k, n]).

m, n and k are one axis each, or several that are counted as one. `b` is always a matrix in memory. Where `a` is not,
its rows are gathered: a convolution is such a product, with the image's places for m and the window's places and
channels for k; so is a product whose rows have been permuted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from tilewright import te
from tilewright.dtypes import DType
from tilewright.loops.formula import Formula
from tilewright.loops.gpu.places import positions
from tilewright.loops.gpu.tensor import MatrixOperand, WindowOperand
from tilewright.loops.ir import Buffer
from tilewright.loops.tiling import columns_of
from tilewright.runtime.packing import Packing
from tilewright.te.index import Linear, coefficient, linear, simplify

LANES = (8, 4, 2, 1)
_COPY_BYTES = 16  # the most that are copied at once
_FEWEST_BYTES = 4  # of bytes, which cannot go through registers in pairs
# What a product's operands may be, and what they are computed with as. 32-bit floats are rounded on the way in.
_COMPUTED = {DType.F16: DType.F32, DType.BF16: DType.F32, DType.I8: DType.I32}
_COMPUTED_ROUNDED = {**_COMPUTED, DType.F32: DType.F32}
_BITS = 31  # of a row of a window: places along its axes, each inside or not
INT_MAX = 2**31 - 1


@dataclass(frozen=True)
class MatrixWork:
    formula: Formula
    a: te.Load
    guard: te.Expr | None  # where `a` is not zero
    b: te.Load
    m: tuple[te.Var, ...]  # outermost first, as they are counted; none: one row
    n: tuple[te.Var, ...]
    k: tuple[te.Var, ...]
    batch: tuple[te.Var, ...]
    packing: Packing | None = None  # of b, where it is a constant that is stored the other way round

    @cached_property
    def sizes(self) -> tuple[int, int, int]:
        m, n, k = (math.prod(axis.extent for axis in axes) for axes in (self.m, self.n, self.k))
        return m, n, k

    @cached_property
    def batches(self) -> int:
        return math.prod(axis.extent for axis in self.batch)

    @cached_property
    def left(self) -> MatrixOperand | WindowOperand:
        found = self._left()
        assert found is not None
        return found

    @cached_property
    def right(self) -> MatrixOperand:
        found = matrix(self.b, self.n, self.k)
        assert found is not None
        return found

    @property
    def is_sound(self) -> bool:
        """Whether both operands can be read as the pipeline wants, and places are counted in 32 bits."""
        buffers = (*self.formula.inputs, self.formula.output)
        short = all(buffer.size <= INT_MAX for buffer in buffers)
        left, right = self._left(), matrix(self.b, self.n, self.k)
        return short and left is not None and right is not None and self._can_load(left, right)

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return self.a.dtype.bytes

    def _can_load(self, *operands: MatrixOperand | WindowOperand) -> bool:
        """Bytes are not transposed on the way, and not copied one by one."""
        return self.size > 1 or not any(o.turned or o.lanes < _FEWEST_BYTES for o in operands)

    def _left(self) -> MatrixOperand | WindowOperand | None:
        return (matrix(self.a, self.m, self.k) if self.guard is None else None) or _window(self)


def matrix_work(formula: Formula, rounded: bool = False) -> MatrixWork | None:
    """None where the formula is no product of two matrices of 16-bit floats or of bytes. `rounded`: 32-bit floats may
    be rounded before they are multiplied, so that they do as well."""
    computed = _COMPUTED_ROUNDED if rounded else _COMPUTED
    if len(formula.reductions) != 1 or columns_of(formula):
        return None
    (reduction,) = formula.reductions
    body = reduction.body
    if reduction.kind != "sum" or not isinstance(body, te.Call) or body.op != "mul":
        return None
    operands = [_guarded_load(arg, computed) for arg in body.args]
    for first, second in ((0, 1), (1, 0)):
        a, b = operands[first], operands[second]
        if a is None or b is None or b[1] is not None or a[0].dtype is not b[0].dtype:
            continue
        found = _as_matrices(formula, *a, b[0], reduction.axes)
        if found is not None:
            return found
    return None


def _guarded_load(expr: te.Expr, computed: Mapping[DType, DType]) -> tuple[te.Load, te.Expr | None] | None:
    """(load, where it is not zero) of an element of a type of `computed`, which is computed with as that says."""
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
    formula: Formula, a: te.Load, guard: te.Expr | None, b: te.Load, reduced: Sequence[te.Var]
) -> MatrixWork | None:
    """The product with `a` on the left; the last of the right operand's own axes is to be the one that the output walks
    along."""
    of_a, of_b = (linear(load.indices[0]).terms for load in (a, b))
    seen = set(of_a) | (te.variables(guard) if guard is not None else set())
    m = [axis for axis in formula.axes if axis in seen and axis not in of_b]
    n = [axis for axis in formula.axes if axis in of_b and axis not in seen]
    batch = tuple(axis for axis in formula.axes if (axis in seen) == (axis in of_b))
    if not n or not set(reduced) <= set(of_b) or (guard is not None and te.variables(guard) & set(batch)):
        return None
    n.sort(key=lambda axis: -of_b[axis])
    k = sorted(reduced, key=lambda axis: -of_b[axis])
    if coefficient(formula.store, n[-1]) != 1:
        return None
    if guard is None and _step(of_a, m) is None:
        m.sort(key=lambda axis: -of_a[axis])
    work = MatrixWork(formula, a, guard, b, tuple(m), tuple(n), tuple(k), batch)
    if work.size == 1 and b.source in formula.constants:
        work = _with_rows_of_k(work)
    return work if work.is_sound else None


def _with_rows_of_k(work: MatrixWork) -> MatrixWork:
    """The same with a constant on the right stored row by row of k, if it is not and can be."""
    stored, (_, n, k) = matrix(work.b, work.n, work.k), work.sizes
    if stored is None or not stored.turned or stored.buffer.size != n * k or stored.pitch != n:
        return work
    terms = linear(work.b.indices[0]).terms
    turned: dict[te.Expr, int] = {
        axis: step * k if axis in work.n else step // n for axis, step in terms.items()
    }
    load = te.Load(work.b.source, (Linear(turned, 0).expr(),))
    return replace(work, b=load, packing=Packing((k, n), (k, n), (0, 2, 3, 1)))


# -- operands ---------------------------------------------------------------------------------------------------------


def _step(terms: Mapping[te.Expr, int], axes: Sequence[te.Var]) -> int | None:
    """How far one place further along all axes, counted as one, is; None where they are not walked as one."""
    if not any(axis in terms for axis in axes):
        return 0
    step = terms.get(axes[-1], 0)
    inner = step
    for outer, axis in zip(reversed(axes[:-1]), reversed(axes), strict=False):
        inner *= axis.extent
        if terms.get(outer, 0) != inner:
            return None
    return step if step > 0 else None


def _lanes(dtype: DType, numbers: Iterable[int]) -> int:
    found, most = list(numbers), _COPY_BYTES // dtype.bytes
    choices = (lanes for lanes in (16, *LANES) if lanes <= most)
    return next(lanes for lanes in choices if all(number % lanes == 0 for number in found))


def matrix(load: te.Load, outer: Sequence[te.Var], depth: Sequence[te.Var]) -> MatrixOperand | None:
    """A load as a matrix in memory, one of whose two directions goes element by element."""
    form = linear(load.indices[0])
    across, along = _step(form.terms, outer), _step(form.terms, depth)
    if across is None or not along or (along != 1 and across != 1):
        return None
    turned = along != 1
    contiguous, pitch = (outer, along) if turned else (depth, across)
    rest = {atom: c for atom, c in form.terms.items() if atom not in (*outer, *depth)}
    extent = math.prod(axis.extent for axis in contiguous)
    lanes = _lanes(load.dtype, [extent, pitch, form.constant, *rest.values()])
    assert isinstance(load.source, Buffer)
    return MatrixOperand(load.source, simplify(Linear(rest, form.constant).expr()), pitch, turned, lanes)


def _window(work: MatrixWork) -> WindowOperand | None:
    """The left operand gathered row by row, element by element where neighbours along k do not lie together."""
    form, buffer = linear(work.a.indices[0]), work.a.source
    inner = work.k[-1]
    assert isinstance(buffer, Buffer)
    if not work.m:
        return None
    m, _, k = work.sizes
    row_of, depth_of = (
        positions(te.Var(name, extent), axes)
        for name, extent, axes in (("place_m", m, work.m), ("place_k", k, work.k))
    )
    rows: dict[te.Expr, int] = {axis: c for axis, c in form.terms.items() if axis in work.m}
    depths: dict[te.Expr, int] = {axis: c for axis, c in form.terms.items() if axis in work.k}
    rest = {atom: c for atom, c in form.terms.items() if atom not in rows and atom not in depths}
    others = [c for axis, c in depths.items() if axis != inner]
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
        needed.append(simplify(te.substitute(axis, depth_of) + len(seen)))
        for place in range(axis.extent):
            at = te.substitute(condition, {axis: te.as_index(place)})
            seen.append(simplify(te.substitute(at, row_of)))
    return WindowOperand(
        buffer,
        simplify(Linear(rest, 0).expr()),
        simplify(te.substitute(Linear(rows, form.constant).expr(), row_of)),
        simplify(te.substitute(Linear(depths, 0).expr(), depth_of)),
        None if inside is None else simplify(te.substitute(inside, row_of)),
        tuple(seen),
        tuple(needed),
        lanes,
    )


def _bits(work: MatrixWork) -> tuple[te.Expr | None, dict[te.Var, te.Expr]] | None:
    """The guard as (condition on rows alone, condition of each axis of k); None where one joins two of these."""
    by_axis: dict[te.Var, list[te.Expr]] = {}
    of_row: list[te.Expr] = []
    for condition in _conjuncts(work.guard) if work.guard is not None else []:
        axes = te.variables(condition) & set(work.k)
        if len(axes) > 1:
            return None
        (by_axis.setdefault(axes.pop(), []) if axes else of_row).append(condition)
    if sum(axis.extent for axis in by_axis) > _BITS:
        return None
    joined = {axis: te.all_of(conditions) for axis, conditions in by_axis.items()}
    return te.all_of(of_row), {axis: c for axis, c in joined.items() if c is not None}


def _conjuncts(condition: te.Expr) -> list[te.Expr]:
    if isinstance(condition, te.Call) and condition.op == "and":
        return [part for arg in condition.args for part in _conjuncts(arg)]
    return [condition]


# -- what is done with a sum ------------------------------------------------------------------------------------------


def at_places(expr: te.Expr, axes: Sequence[te.Var], place: te.Expr) -> te.Expr:
    """`expr` with the axes, counted as one, at `place`: without divisions where an index walks them as one."""

    def walked(index: te.Expr) -> te.Expr:
        form = linear(index)
        step = _step(form.terms, axes)
        if not step or any(
            set(axes) & te.variables(atom) for atom in form.terms if not isinstance(atom, te.Var)
        ):
            return index
        rest = {atom: c for atom, c in form.terms.items() if atom not in axes}
        return Linear(rest, form.constant).expr() + place * step

    def rule(node: te.Expr) -> te.Expr | None:
        if isinstance(node, te.Load) and node.indices:
            return te.Load(node.source, (walked(node.indices[0]),))
        return None

    return te.substitute(te.rewrite(expr, rule), positions(place, axes))


def index_at_places(index: te.Expr, axes: Sequence[te.Var], place: te.Expr) -> te.Expr:
    return at_places(te.Load(Buffer("index", DType.I8, 1), (index,)), axes, place).indices[0]  # type: ignore[attr-defined]
