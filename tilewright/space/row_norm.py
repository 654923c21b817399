"""Norms of rows as templates see them: what is computed once for a row, and which rows are read and written."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tilewright import te
from tilewright.graph.chain import NORMS, Refused
from tilewright.loops.formula import Formula
from tilewright.loops.gpu.thread_index import step_of
from tilewright.loops.ir import Buffer, Scope
from tilewright.loops.tiling import columns_of
from tilewright.space.chain import Stage
from tilewright.te.index import linear
from tilewright.te.scalars import EXPENSIVE_CALLS

_EXPENSIVE = 10.0  # instructions
_LONG = ("div", "sqrt", "rsqrt")  # which take as long


@dataclass(frozen=True)
class RowNorm:
    """A norm's formula. `value` is the formula's, with what depends on the reductions alone replaced by reads without
    an index of the buffers in `of_row`, each with its expression of the reductions' results."""

    formula: Formula
    of_row: tuple[tuple[Buffer, te.Expr], ...]
    value: te.Expr

    @property
    def rows(self) -> tuple[te.Var, ...]:
        return self.formula.rows

    @property
    def columns(self) -> tuple[te.Var, ...]:
        return columns_of(self.formula)

    @property
    def count(self) -> int:
        """The number of rows."""
        return math.prod(axis.extent for axis in self.rows)

    @property
    def length(self) -> int:
        return math.prod(axis.extent for axis in self.columns)

    @property
    def passes(self) -> int:
        return len(self.formula.reductions)

    def reads_rows_of(self, source: Buffer) -> bool:
        """Whether each element, and each reduction, reads `source` in its own row alone, from its first column to its
        last."""
        parts = [(r.body, r.axes) for r in self.formula.reductions] + [(self.value, self.columns)]
        return all(
            _walks(load.indices[0], (*self.rows, *axes))
            for expr, axes in parts
            for load in te.loads(expr)
            if load.source == source
        )


def _walks(index: te.Expr, axes: tuple[te.Var, ...]) -> bool:
    form = linear(index)
    return step_of(form.terms, axes) == 1 and set(form.terms) <= set(axes) and not form.constant


@dataclass(frozen=True)
class NormCondition:
    """A condition on a norm, and the reason to give if it does not hold."""

    holds: Callable[[RowNorm], bool]
    reason: str


CONDITIONS = (
    NormCondition(
        lambda norm: bool(norm.rows) and all(r.length == norm.length for r in norm.formula.reductions),
        "the norm is not one of whole rows",
    ),
    NormCondition(
        lambda norm: _walks(norm.formula.store, (*norm.rows, *norm.columns)),
        "the norm does not write its rows one after the other",
    ),
    NormCondition(
        lambda norm: all(len(reduction.axes) == 1 for reduction in norm.formula.reductions),
        "the rows of the norm are not contiguous",
    ),
)


def is_norm(stage: Stage) -> bool:
    return any(node.op in NORMS for node in stage.sub.task.graph.nodes())


def row_norm_of(formula: Formula) -> RowNorm | Refused:
    """The norm by rows; Refused with the first condition that does not hold."""
    found: dict[te.Expr, Buffer] = {}

    def rule(node: te.Expr) -> te.Expr | None:
        if not depends_on_row_alone(node):
            return None
        if node not in found:
            found[node] = Buffer(f"of_row{len(found)}", node.dtype, 1, Scope.SCRATCH)
        return te.Load(found[node], ())

    norm = RowNorm(formula, (), formula.value)
    for condition in CONDITIONS:
        if not condition.holds(norm):
            return Refused(condition.reason)
    value = _from_above(formula.value, rule)
    return RowNorm(formula, tuple((buffer, expr) for expr, buffer in found.items()), value)


def depends_on_row_alone(node: te.Expr) -> bool:
    """Whether it depends on results of reductions, and on nothing else."""
    loads = te.loads(node)
    return bool(loads) and not any(load.indices for load in loads) and not te.variables(node)


def instructions(expr: te.Expr, with_row: bool = False) -> float:
    """Instructions for an element; a value that is used twice is computed once. `with_row`: with those that depend on
    the row alone, which a compiler moves out of the loop."""
    found: dict[te.Expr, float] = {}
    waiting = [expr]
    while waiting:
        node = waiting.pop()
        if node in found or isinstance(node, te.Load) or (not with_row and depends_on_row_alone(node)):
            continue
        found[node] = 1.0 if isinstance(node, te.Call | te.Cast | te.Select) else 0.0
        if isinstance(node, te.Call) and (node.op in EXPENSIVE_CALLS or node.op in _LONG):
            found[node] = _EXPENSIVE
        waiting.extend(te.children(node))
    return sum(found.values())


def _from_above(expr: te.Expr, rule: Callable[[te.Expr], te.Expr | None]) -> te.Expr:
    """The expression with the largest parts replaced for which the rule has something else."""
    found = rule(expr)
    if found is not None:
        return found
    parts = tuple(_from_above(child, rule) for child in te.children(expr))
    return te.with_children(expr, parts) if parts else expr
