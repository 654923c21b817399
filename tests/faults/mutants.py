"""Programs with one mistake in them: a constant, an index, a bound, an operator, a statement that is not as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from random import Random
from typing import cast

from tilewright import te
from tilewright.dtypes import DType
from tilewright.loops.ir import Block, For, If, Program, Stmt, Store, block, map_exprs, walk_stmts

_OTHER_OPERATOR = {
    "add": "sub",
    "sub": "add",
    "mul": "add",
    "div": "mul",
    "max": "min",
    "min": "max",
    "lt": "le",
    "le": "lt",
    "exp": "abs",
    "exp2_nonpositive": "abs",
    "sqrt": "abs",
    "rsqrt": "sqrt",
    "tanh": "abs",
}
_ORDER_MATTERS = ("sub", "div", "lt", "le", "pow", "fma")


@dataclass(frozen=True)
class Edit:
    """A mistake that can be made in a program."""

    kind: str
    where: str
    made: Callable[[], Program]


def edits(program: Program) -> list[Edit]:
    """Every mistake, always in the same order."""
    found = []
    for at, stmt in enumerate(walk_stmts(program.body)):
        for kind, where, changed in _edits(stmt):
            made = lambda at=at, changed=changed: replace(program, body=_replaced(program.body, at, changed))  # noqa: E731
            found.append(Edit(kind, where, made))
    return found


def shuffled(program: Program, rng: Random) -> Iterator[int]:
    """The numbers of all edits: a kind of mistake at random, then a place for it that is new."""
    by_kind: dict[str, list[int]] = {}
    for number, edit in enumerate(edits(program)):
        by_kind.setdefault(edit.kind, []).append(number)
    for numbers in by_kind.values():
        rng.shuffle(numbers)
    while by_kind:
        kind = rng.choice(sorted(by_kind))
        yield by_kind[kind].pop()
        if not by_kind[kind]:
            del by_kind[kind]


def _edits(stmt: Stmt) -> Iterator[tuple[str, str, Stmt | None]]:
    """(kind of mistake, place in words, the statement with it; None: without the statement)."""
    if isinstance(stmt, For):
        if stmt.var.extent > 2:
            shorter = te.Var(stmt.var.name, stmt.var.extent - 1)
            body = map_exprs(stmt.body, lambda expr: te.substitute(expr, {stmt.var: shorter}))
            yield "loop bound", f"loop {stmt.var.name}", For(shorter, stmt.kind, body)
    elif isinstance(stmt, If):
        yield "condition", "if", If(stmt.cond, stmt.other or Block(()), stmt.then)
        yield "dropped", "if", None
    elif isinstance(stmt, Block):
        for first in range(len(stmt.stmts) - 1):
            swapped = list(stmt.stmts)
            swapped[first], swapped[first + 1] = swapped[first + 1], swapped[first]
            yield "order", f"statements {first} and {first + 1}", Block(tuple(swapped))
    elif isinstance(stmt, Store):
        name = stmt.buffer.name
        yield "dropped", f"store to {name}", None
        for step in (1, -1):
            yield "store index", f"{name} by {step}", replace(stmt, index=stmt.index + step)
        for kind, value in _changed_values(stmt.value):
            yield kind, f"value of {name}", replace(stmt, value=value)


def _changed_values(expr: te.Expr) -> Iterator[tuple[str, te.Expr]]:
    """`expr` with one node changed, for every node and every way to change it. Not inside of indices."""
    if isinstance(expr, te.Const):
        if expr.dtype.is_float:
            yield "constant", te.Const(float(expr.value) + 1.0, expr.dtype)
            yield "constant", te.Const(float(expr.value) * 1.01 + 0.01, expr.dtype)
        elif expr.dtype is not DType.BOOL:
            yield "constant", te.Const(int(expr.value) + 1, expr.dtype)
        return
    if isinstance(expr, te.Load):
        for step in (1, -1):
            yield "load index", te.Load(expr.source, (expr.indices[0] + step,))
        return
    if isinstance(expr, te.Select):
        yield "branches", te.Select(expr.cond, expr.other, expr.then)
    if isinstance(expr, te.Call):
        if expr.op in _OTHER_OPERATOR:
            yield "operator", replace(expr, op=_OTHER_OPERATOR[expr.op])
        if expr.op in _ORDER_MATTERS:
            yield "operands", replace(expr, args=expr.args[1:] + expr.args[:1])
    parts = te.children(expr)
    for number, part in enumerate(parts):
        for kind, changed in _changed_values(part):
            yield kind, te.with_children(expr, (*parts[:number], changed, *parts[number + 1 :]))


def _replaced(stmt: Stmt, at: int, changed: Stmt | None) -> Stmt:
    """The tree with its statement number `at`, in the order of `walk_stmts`, replaced or left out."""
    count = -1

    def visit(node: Stmt) -> Stmt | None:
        nonlocal count
        count += 1
        if count == at:
            count += sum(1 for _ in walk_stmts(node)) - 1
            return changed
        if isinstance(node, For):
            body = visit(node.body)
            return None if body is None else For(node.var, node.kind, body)
        if isinstance(node, Block):
            children = [visit(child) for child in node.stmts]
            return block(*(child for child in children if child is not None))
        if isinstance(node, If):
            then = visit(node.then)
            other = None if node.other is None else visit(node.other)
            return If(node.cond, then or Block(()), other)
        return node

    return visit(stmt) or Block(())


def widened(program: Program) -> Program:
    """The program in double precision: what it means, without its rounding."""
    return cast(Program, _widened(program))


def _widened(part: object) -> object:
    if part is DType.F32:
        return DType.F64
    if isinstance(part, tuple):
        return tuple(map(_widened, part))
    if not is_dataclass(part) or isinstance(part, te.Var):
        return part
    return replace(part, **{field.name: _widened(getattr(part, field.name)) for field in fields(part)})  # type: ignore[type-var]
