"""The normal form of a task, on which schedules work.

`formula_of` takes the stages of a task's tensor expressions and leaves as little structure as possible:

1. every stage that is not a reduction is inlined where it is read;
2. each reduction is expressed by the output element that needs it (so its index formulas are over the output's axes);
3. tensors become flat buffers, indices become offsets;
4. axes are split where that makes a division or remainder disappear (`i // 8` and `i % 8` become two axes), and joined
   where all accesses walk them as one.

The result reads: for every value of `axes`, compute the `reductions` in order, then store `value` at offset `store`.
A reduction's result is read as a `Load` of its `Reduction.result`, without an index.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from tilewright import te
from tilewright.dtypes import DType
from tilewright.errors import InternalError
from tilewright.loops.ir import Buffer, Scope
from tilewright.te.index import Linear, coefficient, flat_index, linear, simplify


class NestedReduction(InternalError):
    """A reduction is read element by element by another one. Such a task has no normal form, only templates."""


@dataclass(frozen=True)
class Reduction:
    result: Buffer  # represents the result in the expressions that read it
    kind: str
    body: te.Expr
    axes: tuple[te.Var, ...]

    @property
    def length(self) -> int:
        return math.prod(axis.extent for axis in self.axes)


@dataclass(frozen=True)
class Formula:
    name: str
    inputs: tuple[Buffer, ...]
    output: Buffer
    axes: tuple[te.Var, ...]
    reductions: tuple[Reduction, ...]
    value: te.Expr
    store: te.Expr
    constants: frozenset[Buffer] = frozenset()  # inputs that are the same in every call

    @property
    def rows(self) -> tuple[te.Var, ...]:
        """The axes that some reduction depends on; it is computed once for each of their values."""
        used = {var for reduction in self.reductions for var in te.variables(reduction.body)}
        return tuple(axis for axis in self.axes if axis in used)

    @property
    def moved(self) -> int:
        """Bytes read and written, each element once."""
        return sum(buffer.size * buffer.dtype.bytes for buffer in (*self.inputs, self.output))

    @cached_property
    def epilogue_reads(self) -> float:
        """Bytes read per result after its reductions."""
        read = {load.source for load in te.loads(self.value) if load.indices}
        results = self.output.size
        read_bytes = sum(min(results, b.size) * b.dtype.bytes for b in read if isinstance(b, Buffer))
        return read_bytes / max(1, results)

    def expressions(self) -> list[te.Expr]:
        return [reduction.body for reduction in self.reductions] + [self.value]

    def map(self, change: Callable[[te.Expr], te.Expr]) -> Formula:
        """The formula with `change` applied to every expression, the store offset included."""
        reductions = tuple(replace(r, body=change(r.body)) for r in self.reductions)
        return replace(self, reductions=reductions, value=change(self.value), store=change(self.store))


def formula_of(
    output: te.Tensor,
    inputs: Sequence[te.Tensor],
    name: str = "kernel",
    *,
    constants: Collection[int] = (),
    keep_rounding: bool = False,
) -> Formula:
    """The normal form of `output` as a function of `inputs`; `constants` are the indices of those that never change.
    `keep_rounding`: keep roundings to 16 bits between fused operators."""
    assert isinstance(output, te.Compute), "a task computes something"
    formula = _flat_formula(output, inputs, name)
    formula = replace(formula, constants=frozenset(formula.inputs[number] for number in constants))
    formula = formula.map(
        simplify if keep_rounding else lambda expr: simplify(te.rewrite(expr, drop_rounding))
    )
    formula = _drop_single_iterations(formula)
    formula = _split_axes(formula)
    return _join_axes(formula)


# -- inlining, and reductions in terms of the output ----------------------------------------------------------------


def _inline(stage: te.Compute, bodies: dict[te.Source, te.Expr]) -> te.Expr:
    """The stage's body with every read of a computed tensor replaced by its expression. A tensor that is read several
    times is the same object each time, so time and code size do not grow."""

    def rule(node: te.Expr) -> te.Expr | None:
        if not (isinstance(node, te.Load) and node.source in bodies):
            return None
        source = node.source
        assert isinstance(source, te.Compute)
        return te.substitute(bodies[source], dict(zip(source.axes, node.indices, strict=True)))

    return te.shared(te.rewrite(stage.body, rule))


def _flat_formula(output: te.Compute, inputs: Sequence[te.Tensor], name: str) -> Formula:
    bodies: dict[te.Source, te.Expr] = {}
    reduced: dict[te.Source, te.Reduce] = {}
    for stage in te.stages(output):
        body = _inline(stage, bodies)
        if isinstance(body, te.Reduce):
            reduced[stage] = body
        else:
            bodies[stage] = body

    axes = tuple(te.Var(f"i{n}", axis.extent) for n, axis in enumerate(output.axes))
    if output in reduced:
        value: te.Expr = te.Load(output, axes)
    else:
        value = te.substitute(bodies[output], dict(zip(output.axes, axes, strict=True)))

    reductions: list[Reduction] = []
    # A reduction's readers come after it, so walking backwards meets every reader in its final form first.
    for stage in reversed([s for s in te.stages(output) if s in reduced]):
        for indices in _reads_of(stage, [value, *(r.body for r in reductions)]):
            reduction = _reduction_for(stage, reduced[stage], indices, len(reductions))
            own_axes = {axis for r in reductions for axis in r.axes}
            if any(te.variables(index) & own_axes for index in indices):
                raise NestedReduction(f"{name}: reduction {stage.name} is read inside another's loop")
            value = _replace_reads(value, stage, indices, reduction.result)
            reductions = [
                replace(r, body=_replace_reads(r.body, stage, indices, reduction.result)) for r in reductions
            ]
            reductions.insert(0, reduction)

    buffers = {
        tensor: Buffer(f"x{n}", tensor.dtype, math.prod(tensor.shape)) for n, tensor in enumerate(inputs)
    }
    formula = Formula(
        name=name,
        inputs=tuple(buffers.values()),
        output=Buffer("out", output.dtype, math.prod(output.shape)),
        axes=axes,
        reductions=tuple(reductions),
        value=value,
        store=flat_index(axes, output.shape),
    )
    return formula.map(lambda expr: _flatten_loads(expr, buffers))


def _reads_of(stage: te.Compute, readers: Sequence[te.Expr]) -> list[tuple[te.Expr, ...]]:
    """The distinct index tuples at which `readers` read `stage`."""
    found: dict[tuple[te.Expr, ...], None] = {}
    for reader in readers:
        for load in te.loads(reader):
            if load.source is stage:
                found[tuple(simplify(index) for index in load.indices)] = None
    return list(found)


def _replace_reads(expr: te.Expr, stage: te.Compute, indices: tuple[te.Expr, ...], result: Buffer) -> te.Expr:
    def rule(node: te.Expr) -> te.Expr | None:
        if isinstance(node, te.Load) and node.source is stage:
            if tuple(simplify(index) for index in node.indices) == indices:
                return te.Load(result, ())
        return None

    return te.rewrite(expr, rule)


def _reduction_for(
    stage: te.Compute, body: te.Reduce, indices: tuple[te.Expr, ...], number: int
) -> Reduction:
    axes = tuple(te.Var(f"k{number}_{n}", axis.extent) for n, axis in enumerate(body.axes))
    values: dict[te.Var, te.Expr] = {
        **dict(zip(stage.axes, indices, strict=True)),
        **dict(zip(body.axes, axes, strict=True)),
    }
    result = Buffer(f"r{number}", stage.dtype, 1, Scope.REGISTER)
    return Reduction(result, body.kind, te.substitute(body.body, values), axes)


def _flatten_loads(expr: te.Expr, buffers: dict[te.Tensor, Buffer]) -> te.Expr:
    def rule(node: te.Expr) -> te.Expr | None:
        if not (isinstance(node, te.Load) and isinstance(node.source, te.Tensor)):
            return None
        buffer = buffers.get(node.source)
        if buffer is None:
            raise InternalError(f"{node.source.name} is read but is not an input of the task")
        return te.Load(buffer, (flat_index(node.indices, node.source.shape),))

    return te.rewrite(expr, rule)


def drop_rounding(node: te.Expr) -> te.Expr | None:
    """Drop the rounding in f32 -> 16 bits -> f32 inside one kernel."""
    if isinstance(node, te.Cast) and isinstance(node.value, te.Cast):
        inner = node.value
        if inner.dtype.is_half and node.dtype is DType.F32 and inner.value.dtype is DType.F32:
            return inner.value
    return None


# -- axes -------------------------------------------------------------------------------------------------------------


def _drop_single_iterations(formula: Formula) -> Formula:
    def once(var: te.Var) -> bool:
        return var.extent == 1

    gone: dict[te.Var, te.Expr] = {
        axis: te.as_index(0)
        for axis in (*formula.axes, *(axis for r in formula.reductions for axis in r.axes))
        if once(axis)
    }
    formula = formula.map(lambda expr: simplify(te.substitute(expr, gone)) if gone else expr)
    reductions = tuple(replace(r, axes=tuple(a for a in r.axes if not once(a))) for r in formula.reductions)
    formula = replace(formula, axes=tuple(a for a in formula.axes if not once(a)), reductions=reductions)
    return _inline_trivial_reductions(formula)


def _inline_trivial_reductions(formula: Formula) -> Formula:
    """Replace a reduction over one element by that element, and over none by the identity."""
    single: dict[Buffer, te.Expr] = {}
    for reduction in formula.reductions:
        if not reduction.length:
            single[reduction.result] = te.reduce_identity(reduction.kind, reduction.result.dtype)
        elif not reduction.axes:
            single[reduction.result] = reduction.body

    def rule(node: te.Expr) -> te.Expr | None:
        return single.get(node.source) if isinstance(node, te.Load) and not node.indices else None  # type: ignore[call-overload]

    for _ in single:  # a reduction may read the one before it
        formula = formula.map(lambda expr: te.rewrite(expr, rule))
    return replace(formula, reductions=tuple(r for r in formula.reductions if r.result not in single))


def _split_axes(formula: Formula) -> Formula:
    """Split axes until no `axis // c` or `axis % c` with an exact c is left."""
    while (found := _divided_axis(formula)) is not None:
        axis, inner = found
        pair = (te.Var(axis.name + "o", axis.extent // inner), te.Var(axis.name + "i", inner))
        value = {axis: pair[0] * inner + pair[1]}

        def replace_in(
            axes: tuple[te.Var, ...], old: te.Var = axis, new: tuple[te.Var, ...] = pair
        ) -> tuple[te.Var, ...]:
            return tuple(part for a in axes for part in (new if a == old else (a,)))

        formula = formula.map(lambda expr, value=value: simplify(te.substitute(expr, value)))  # type: ignore[misc]
        reductions = tuple(replace(r, axes=replace_in(r.axes)) for r in formula.reductions)
        formula = replace(formula, axes=replace_in(formula.axes), reductions=reductions)
    return formula


def _divided_axis(formula: Formula) -> tuple[te.Var, int] | None:
    for expr in formula.expressions():
        for node in te.walk(expr):
            if not (isinstance(node, te.Call) and node.op in ("floordiv", "mod")):
                continue
            dividend, divisor = node.args
            if isinstance(dividend, te.Var) and isinstance(divisor, te.Const):
                step = int(divisor.value)
                if 1 < step < dividend.extent and dividend.extent % step == 0:
                    return dividend, step
    return None


def _join_axes(formula: Formula) -> Formula:
    """Join neighbouring axes that every access walks as one: fewer, longer loops."""
    free = {var for expr in formula.expressions() for var in _variables_outside_offsets(expr)}

    def joined(axes: tuple[te.Var, ...], formula: Formula) -> tuple[tuple[te.Var, ...], Formula]:
        position = 0
        while position + 1 < len(axes):
            outer, inner = axes[position], axes[position + 1]
            if outer in free or inner in free or not _walked_as_one(formula, outer, inner):
                position += 1
                continue
            both = te.Var(f"{outer.name}_{inner.name}", outer.extent * inner.extent)
            formula = formula.map(lambda expr, o=outer, i=inner, b=both: _join_in(expr, o, i, b))  # type: ignore[misc]
            axes = (*axes[:position], both, *axes[position + 2 :])
        return axes, formula

    rows = set(formula.rows)
    if any(axis not in rows for axis in formula.axes) and rows:
        # Rows and columns stay separate: only the columns are traversed again after the reductions.
        row_axes = tuple(axis for axis in formula.axes if axis in rows)
        column_axes = tuple(axis for axis in formula.axes if axis not in rows)
        row_axes, formula = joined(row_axes, formula)
        column_axes, formula = joined(column_axes, formula)
        formula = replace(formula, axes=row_axes + column_axes)
    else:
        axes, formula = joined(formula.axes, formula)
        formula = replace(formula, axes=axes)
    for number, reduction in enumerate(formula.reductions):
        axes, formula = joined(reduction.axes, formula)
        changed = list(formula.reductions)
        changed[number] = replace(changed[number], axes=axes)
        formula = replace(formula, reductions=tuple(changed))
    return formula


def _offsets(formula: Formula) -> list[te.Expr]:
    offsets = [load.indices[0] for expr in formula.expressions() for load in te.loads(expr) if load.indices]
    return [*offsets, formula.store]


def _walked_as_one(formula: Formula, outer: te.Var, inner: te.Var) -> bool:
    for offset in _offsets(formula):
        step, stride = coefficient(offset, inner), coefficient(offset, outer)
        if step is None or stride is None or stride != step * inner.extent:
            return False
    return True


def _join_in(expr: te.Expr, outer: te.Var, inner: te.Var, both: te.Var) -> te.Expr:
    def joined_offset(offset: te.Expr) -> te.Expr:
        form = linear(offset)
        step = form.terms.get(inner, 0)
        rest = {atom: c for atom, c in form.terms.items() if atom not in (outer, inner)}
        return Linear({**rest, both: step} if step else rest, form.constant).expr()

    if expr.dtype is DType.I64 and not te.loads(expr) and {outer, inner} & te.variables(expr):
        return joined_offset(expr)  # the store's offset

    def rule(node: te.Expr) -> te.Expr | None:
        if isinstance(node, te.Load) and node.indices:
            return te.Load(node.source, (joined_offset(node.indices[0]),))
        return None

    return te.rewrite(expr, rule)


def _variables_outside_offsets(expr: te.Expr) -> set[te.Var]:
    """Variables used as values or in conditions, or non-linearly inside an offset."""
    found: set[te.Var] = set()
    waiting = [expr]
    while waiting:
        node = waiting.pop()
        if isinstance(node, te.Load):
            for index in node.indices:
                for atom in linear(index).terms:
                    if not isinstance(atom, te.Var):
                        found |= te.variables(atom)
        elif isinstance(node, te.Var):
            found.add(node)
        else:
            waiting.extend(te.children(node))
    return found
