"""View contractions as GEMMs: the operand along the vector axis, the row axes, and the layout of the other operand in
scratch memory.

    out[batch, rows, vector] = epilogue(sum over steps of K of data[batch, rows, steps of K] * weight[batch, steps of K,
    vector])

A convolution is one too: `rows` are the image's axes, `k_axes` are the window and the channels, and the data is
indexed by y + ky and x + kx.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from tilewright import te
from tilewright.loops.formula import Formula, Reduction
from tilewright.loops.guards import conjuncts
from tilewright.loops.ir import Buffer
from tilewright.te.index import Linear, coefficient, flat_index, linear, simplify

_SHORT = 16  # maximum steps of K that are unrolled at once


@dataclass(frozen=True)
class Gemm:
    formula: Formula
    data: te.Expr  # independent of `vector`
    weight: te.Expr  # depends on `vector`; a load, or a converted load
    vector: te.Var

    @property
    def reduction(self) -> Reduction:
        return self.formula.reductions[0]

    @cached_property
    def weight_load(self) -> te.Load:
        return te.loads(self.weight)[0]

    @cached_property
    def rows(self) -> tuple[te.Var, ...]:
        """Axes that only the data depends on, outermost first."""
        return self._axes(data=True, weight=False)

    @cached_property
    def shared(self) -> tuple[te.Var, ...]:
        """Axes that both operands depend on, or only the weight, except the vector axis."""
        both = set(self._axes(data=True, weight=True)) | set(self._axes(data=False, weight=True))
        return tuple(axis for axis in self.formula.axes if axis in both and axis != self.vector)

    def _axes(self, *, data: bool, weight: bool) -> tuple[te.Var, ...]:
        in_data, in_weight = te.variables(self.data), te.variables(self.weight)
        return tuple(a for a in self.formula.axes if (a in in_data) is data and (a in in_weight) is weight)

    @cached_property
    def constant_weight(self) -> bool:
        return self.weight_load.source in self.formula.constants

    @cached_property
    def k_axes(self) -> tuple[te.Var, ...]:
        """The reduction axes, outermost first."""
        return self.reduction.axes

    @cached_property
    def length(self) -> int:
        return math.prod(tap.extent for tap in self.k_axes)

    @property
    def cut(self) -> int:
        """The K axis that is split if a panel is read in K blocks; all axes after it are in every K block."""
        return len(self.k_axes) - 1

    @cached_property
    def inner_k(self) -> int:
        """Steps of K per value of the split axis."""
        return math.prod(tap.extent for tap in self.k_axes[self.cut + 1 :])

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of one element of the weight."""
        return self.weight_load.dtype.bytes

    @property
    def run(self) -> int:
        """Contiguous elements along `vector` in the result."""
        return self.vector.extent

    def step(self, axis: te.Var) -> int:
        """The stride of the axis in the data, in elements."""
        return self._steps[axis]

    @cached_property
    def _steps(self) -> dict[te.Var, int]:
        forms = [linear(load.indices[0]).terms for load in te.loads(self.data)]
        axes = (*self.formula.axes, *self.reduction.axes)
        return {axis: max(abs(form.get(axis, 0)) for form in forms) for axis in axes}

    def in_storage_order(self, dims: Sequence[Coordinate]) -> tuple[Coordinate, ...]:
        def step(dim: Coordinate) -> int:
            return max(self.step(axis) for axis in (dim.axis, dim.tap) if axis is not None)

        return tuple(sorted(dims, key=lambda dim: -step(dim)))

    def in_planes(self, dims: Sequence[Coordinate]) -> bool:
        """Whether windows move over the data, and the padding is not stored with each pixel."""
        windows = any(dim.axis is not None and dim.tap is not None for dim in dims)
        return windows and self.step(self.k_axes[-1]) > 1

    @cached_property
    def short_run(self) -> int:
        """The number of contiguous steps of K in the data, if it is small; 0: large."""
        return 0

    def parts(self, number: te.Expr, lane: te.Var) -> dict[te.Var, te.Expr]:
        """The formula's own axes at lane `lane` of vector `number`, if `vector` is not one of them."""
        return {}


@dataclass(frozen=True)
class BlockedGemm(Gemm):
    """A product with blocks of channels. The vector axis follows the weight and is two axes in the result; K consists
    of blocks of channels, the window, and the channels of a block."""

    blocks: te.Var
    inside: te.Var  # the index in a block

    def in_planes(self, dims: Sequence[Coordinate]) -> bool:
        return True

    @property
    def cut(self) -> int:
        return 0

    @property
    def run(self) -> int:
        return self.inside.extent

    @cached_property
    def short_run(self) -> int:
        last = self.k_axes[-1]
        dense = all(coefficient(load.indices[0], last) == 1 for load in te.loads(self.data))
        return last.extent if dense and len(self.k_axes) > 1 and last.extent <= _SHORT else 0

    def parts(self, number: te.Expr, lane: te.Var) -> dict[te.Var, te.Expr]:
        vectors = self.inside.extent // lane.extent  # in a block
        position = number % vectors * lane.extent + lane
        return {self.blocks: number // vectors, self.inside: position}


def gemm_of(formula: Formula | None) -> Gemm | None:
    """Match the formula as a product of data and weight, or return None."""
    if formula is None or len(formula.reductions) != 1:
        return None
    (reduction,) = formula.reductions
    body = reduction.body
    if reduction.kind != "sum" or not (isinstance(body, te.Call) and body.op == "mul"):
        return None
    if set(formula.rows) != set(formula.axes) or any(te.loads(index) for index in _indices(formula)):
        return None
    contiguous = [axis for axis in formula.axes if coefficient(formula.store, axis) == 1]
    if len(contiguous) != 1:
        return None
    (vector,) = contiguous
    moving = [operand for operand in body.args if vector in te.variables(operand)]
    if len(moving) != 1:
        return None
    weight = moving[0]
    data = body.args[1] if weight is body.args[0] else body.args[0]
    plain = weight.value if isinstance(weight, te.Cast) else weight
    if not isinstance(plain, te.Load):
        return None
    gemm = _blocked(formula, data, weight, plain, vector) or Gemm(formula, data, weight, vector)
    plain = gemm.weight_load
    vector = gemm.vector
    readers = [load for e in formula.expressions() for load in te.loads(e) if load.source == plain.source]
    walked = coefficient(plain.indices[0], vector) == 1
    if not walked and (not gemm.constant_weight or len(readers) > 1):
        return None
    return gemm


def _blocked(
    formula: Formula, data: te.Expr, weight: te.Expr, load: te.Load, inside: te.Var
) -> BlockedGemm | None:
    """The product with `inside` and the weight's axis that continues it fused into one."""
    index, size = load.indices[0], inside.extent
    own = [axis for axis in formula.axes if axis != inside and axis not in te.variables(data)]
    step = coefficient(index, inside) or 0
    blocks = next((axis for axis in own if coefficient(index, axis) == step * size), None)
    if not step or blocks is None or size & (size - 1):
        return None
    channel = te.Var("channel", blocks.extent * size)
    form = linear(index)
    terms = {atom: c for atom, c in form.terms.items() if atom not in (blocks, inside)}
    joined = te.Load(load.source, (Linear({**terms, channel: step}, form.constant).expr(),))
    moved = te.rewrite(weight, lambda node: joined if node == load else None)
    return BlockedGemm(formula, data, moved, channel, blocks, inside)


def _indices(formula: Formula) -> list[te.Expr]:
    return [load.indices[0] for e in formula.expressions() for load in te.loads(e) if load.indices]


# -- the data operand in scratch memory -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Coordinate:
    """One dimension of the data's index: `axis_step * axis + tap_step * tap`, or one of the two alone."""

    axis: te.Var | None
    tap: te.Var | None
    axis_step: int = 1
    tap_step: int = 1

    def extent(self, length: int) -> int:
        """The number of values it takes while `axis` takes `length` consecutive ones."""
        k_axes = self.tap.extent if self.tap is not None else 1
        steps = length if self.axis is not None else 1
        return (steps - 1) * self.axis_step + (k_axes - 1) * self.tap_step + 1

    def at(self, value: te.Expr) -> dict[te.Var, te.Expr]:
        """Values of axis and step of K that combine to `value`; they may be outside their extents."""
        zero = te.as_index(0)
        if self.axis is None or (self.tap is not None and self.axis_step != 1):
            assert self.tap is not None
            return {self.tap: value} | ({self.axis: zero} if self.axis is not None else {})
        return {self.axis: value} | ({self.tap: zero} if self.tap is not None else {})

    def of(self, axis: te.Expr | None, tap: te.Expr | None) -> te.Expr:
        total: te.Expr = te.as_index(0)
        if axis is not None:
            total = total + axis * self.axis_step
        return total if tap is None else total + tap * self.tap_step


def coordinates(gemm: Gemm) -> tuple[Coordinate, ...] | None:
    """The dimensions of the data: rows (with their window axis), then the other K axes; None if the index has another
    form."""
    k_axes = [axis for axis in gemm.reduction.axes if axis in te.variables(gemm.data)]
    found: list[Coordinate] = []
    for row in gemm.rows:
        partner = next((tap for tap in k_axes if _steps(gemm.data, row, tap) is not None), None)
        if partner is None:
            found.append(Coordinate(row, None))
            continue
        steps = _steps(gemm.data, row, partner)
        assert steps is not None
        if 1 not in steps:
            return None
        k_axes.remove(partner)
        found.append(Coordinate(row, partner, *steps))
    return (*found, *(Coordinate(None, tap) for tap in k_axes))


def _steps(data: te.Expr, row: te.Var, tap: te.Var) -> tuple[int, int] | None:
    """(a, b) if the data depends on row and step of K only through a * row + b * step, with overlap."""
    ratios: set[tuple[int, int]] = set()
    for expr in _index_forms(data):
        form = linear(expr)
        if any(not isinstance(atom, te.Var) and {row, tap} & te.variables(atom) for atom in form.terms):
            return None
        a, b = form.terms.get(row, 0), form.terms.get(tap, 0)
        if not a and not b:
            continue
        if a <= 0 or b <= 0:
            return None
        shared = math.gcd(a, b)
        ratios.add((a // shared, b // shared))
    if len(ratios) != 1:
        return None
    a, b = ratios.pop()
    # Without overlap (a row of A and its columns) they are two dimensions.
    return (a, b) if b * (tap.extent - 1) >= a and a * (row.extent - 1) >= b and a <= 8 and b <= 8 else None


def _index_forms(expr: te.Expr) -> list[te.Expr]:
    """The integer expressions that contain variables: load offsets, and sides of comparisons."""
    found: list[te.Expr] = []
    for node in te.walk(expr):
        if isinstance(node, te.Load):
            found.extend(node.indices)
        elif isinstance(node, te.Call) and node.dtype.short == "bool":
            found.extend(arg for arg in node.args if arg.dtype.short == "i64")
    return found


@dataclass(frozen=True)
class StagedOperand:
    """The data operand, or a block of it, as a dense array in scratch memory."""

    buffer: Buffer
    coordinates: tuple[Coordinate, ...]
    extents: tuple[int, ...]

    def offset(self, positions: Sequence[te.Expr]) -> te.Expr:
        return simplify(flat_index(positions, self.extents))


@dataclass(frozen=True)
class ContiguousRun:
    """A value that is a copy along its trailing dimensions, from `first` on, which are contiguous in memory. It is
    `load` while dimension `first` is in [begin, end) and `outer_guard` holds, and `border` elsewhere. 16-bit floats
    may be copied to f32."""

    first: int
    begin: int
    end: int
    load: te.Load
    outer_guard: te.Expr | None
    border: te.Const

    def copied(self, load: te.Load) -> te.Expr:
        """An element of the run, in the type of the copy."""
        return te.cast(load, self.border.dtype)


def run_of(value: te.Expr, positions: Sequence[te.Var]) -> ContiguousRun | None:
    """Match `value`, a formula over `positions`, as a run over as many trailing dimensions as possible; None if it is
    not a copy."""
    conditions: list[te.Expr] = []
    border = te.const(0, value.dtype)
    if isinstance(value, te.Select) and isinstance(value.other, te.Const):
        border = value.other
        conditions, value = conjuncts(value.cond), value.then
    load = te.element(value)
    if load is None:
        return None
    form = linear(load.indices[0])
    if any(not isinstance(atom, te.Var) and set(positions) & te.variables(atom) for atom in form.terms):
        return None
    first, dense = len(positions), 1
    while first and form.terms.get(positions[first - 1], 0) == dense:
        first -= 1
        dense *= positions[first].extent
        if any(positions[first] in te.variables(condition) for condition in conditions):
            break
    if first == len(positions):
        return None
    inner = set(positions[first:])
    outer_guards = [c for c in conditions if not te.variables(c) & inner]
    own = [c for c in conditions if te.variables(c) & inner]
    if any(te.variables(c) != {positions[first]} for c in own):
        return None
    inside = [n for n in range(positions[first].extent) if all(holds(c, positions[first], n) for c in own)]
    if not inside or inside != list(range(inside[0], inside[-1] + 1)):
        return None
    return ContiguousRun(first, inside[0], inside[-1] + 1, load, te.all_of(outer_guards), border)


def holds(cond: te.Expr, var: te.Var, value: int) -> bool:
    """Whether the condition, which has only this variable, holds for this value."""
    decided = simplify(te.substitute(cond, {var: te.as_index(value)}))
    return isinstance(decided, te.Const) and bool(decided.value)
