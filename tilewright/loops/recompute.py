"""Decide which expressions are cheaper to store than to recompute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tilewright import te
from tilewright.loops.ir import Buffer
from tilewright.te.index import bounds, simplify
from tilewright.te.scalars import EXPENSIVE_CALLS


def is_expensive(expr: te.Expr, axes: Sequence[te.Var]) -> bool:
    """Whether it contains something expensive that differs for every element of the row."""
    return any(
        isinstance(node, te.Call)
        and node.op in EXPENSIVE_CALLS
        and node.dtype.is_float
        and te.variables(node) & set(axes)
        for node in te.walk(expr)
    )


def computable_anywhere(expr: te.Expr) -> Iterator[te.Expr]:
    """The subexpressions of `expr`, parents first, that can be computed for every element. Loads under a condition
    may be valid only if it holds."""
    always = set(_unconditional(expr))
    for part in te.walk(expr):
        if part in always or all(_is_there(load) for load in te.loads(part)):
            yield part


def _unconditional(expr: te.Expr) -> Iterator[te.Expr]:
    """`expr` and its subexpressions, except the branches of conditions."""
    yield expr
    for part in (expr.cond,) if isinstance(expr, te.Select) else te.children(expr):
        yield from _unconditional(part)


def _is_there(load: te.Load) -> bool:
    """Whether it reads inside its buffer without relying on enclosing conditions."""
    if not load.indices:
        return True
    assert isinstance(load.source, Buffer)
    low, high = bounds(simplify(load.indices[0]))
    return low is not None and high is not None and low >= 0 and high < load.source.size
