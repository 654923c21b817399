"""Indices of a program: which are packs in memory, and which fit 32 bits."""

from __future__ import annotations

from collections.abc import Iterator

from tilewright import te
from tilewright.dtypes import DType
from tilewright.loops.ir import Buffer, Copy, If, Scope, Stmt, Store, walk_stmts
from tilewright.te.index import bounds, coefficient, linear

INT_MAX = 2**31 - 1
_PACK_BYTES, _SHARED_PACK_BYTES = 16, 32  # of shared memory, two accesses in one


def loads_of_all_lanes(expr: te.Expr, lane: te.Var) -> dict[te.Load, te.Expr | None]:
    """The loads that all lanes perform or none does, and under which condition; None: always."""
    found: dict[te.Load, te.Expr | None] = {}
    differing: set[te.Load] = set()

    def visit(node: te.Expr, condition: te.Expr | None) -> None:
        if isinstance(node, te.Select):
            visit(node.cond, condition)
            if lane not in te.variables(node.cond) and not te.loads(node.cond):
                visit(node.then, te.all_of([c for c in (condition, node.cond) if c is not None]))
                negated = te.call("not", node.cond)
                visit(node.other, te.all_of([c for c in (condition, negated) if c is not None]))
            return
        if isinstance(node, te.Load):
            if found.setdefault(node, condition) != condition:
                differing.add(node)
        for child in te.children(node):
            visit(child, condition)

    visit(expr, None)
    return {load: condition for load, condition in found.items() if load not in differing}


def is_pack(buffer: Buffer, index: te.Expr, lane: te.Var) -> bool:
    """Whether the lanes are neighbours in memory, in whole packs."""
    lanes = lane.extent
    if buffer.scope is Scope.REGISTER or coefficient(index, lane) != 1:
        return False
    most = _SHARED_PACK_BYTES if buffer.scope is Scope.SCRATCH else _PACK_BYTES
    if lanes * buffer.dtype.bytes > most or te.loads(index):
        return False
    form = linear(index)
    return form.constant % lanes == 0 and all(
        c % lanes == 0 for atom, c in form.terms.items() if atom != lane
    )


def is_index(expr: te.Expr) -> bool:
    """Whether it is computed from loop variables alone, and so fits the type of indices."""
    return expr.dtype is DType.I64 and not te.loads(expr)


def is_plain_division(expr: te.Call) -> bool:
    dividend, divisor = expr.args
    low, _ = bounds(dividend)
    return low is not None and low >= 0 and isinstance(divisor, te.Const) and int(divisor.value) > 0


def fits(expr: te.Expr) -> bool:
    low, high = bounds(expr)
    return low is not None and high is not None and low >= -INT_MAX and high <= INT_MAX


def index_expressions(stmt: Stmt) -> Iterator[te.Expr]:
    for each in walk_stmts(stmt):
        exprs: tuple[te.Expr, ...] = ()
        if isinstance(each, Store):
            exprs = (each.index, each.value)
        elif isinstance(each, If):
            exprs = (each.cond,)
        elif isinstance(each, Copy):
            exprs = (each.index, each.source_index, *(() if each.cond is None else (each.cond,)))
        for expr in exprs:
            yield from (node for node in te.walk(expr) if is_index(node))
