"""Finds the buffers that a statement reads and writes; walks statements with their enclosing loops and branches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from tilewright import te
from tilewright.loops.ir import (
    Across,
    Block,
    Buffer,
    Combine,
    Copy,
    For,
    If,
    Invoke,
    Prefetch,
    Slide,
    Stmt,
    Store,
    Transpose,
    Warp,
)
from tilewright.te.index import simplify

Path = tuple[For | If, ...]  # enclosing loops and branches, outermost first
Indexed = tuple[Buffer, te.Expr]
# For each buffer, the buffer that replaces it and what is added to its indices.
Moved = Mapping[Buffer, tuple[Buffer, te.Expr]]


def leaf_statements(stmt: Stmt, path: Path = ()) -> Iterator[tuple[Path, Stmt]]:
    """Every statement that contains no other, in order."""
    if isinstance(stmt, For):
        yield from leaf_statements(stmt.body, (*path, stmt))
    elif isinstance(stmt, Block):
        for child in stmt.stmts:
            yield from leaf_statements(child, path)
    elif isinstance(stmt, If):
        yield from leaf_statements(stmt.then, (*path, stmt))
        if stmt.other is not None:
            yield from leaf_statements(stmt.other, (*path, stmt))
    else:
        yield path, stmt


def children(stmt: Stmt) -> tuple[Stmt, ...]:
    """The statements of a loop's body."""
    return stmt.stmts if isinstance(stmt, Block) else (stmt,)


def written(stmt: Stmt) -> Indexed | None:
    """The buffer that a leaf statement writes, and where; None if it writes none."""
    if isinstance(stmt, Store | Copy):
        return stmt.buffer, stmt.index
    if isinstance(stmt, Warp):
        return stmt.operands[0]
    if isinstance(stmt, Invoke):
        return stmt.operands[0].buffer, stmt.operands[0].index
    if isinstance(stmt, Transpose | Slide | Combine):
        return stmt.buffer, te.as_index(0)
    return None


def expressions(stmt: Stmt) -> tuple[te.Expr, ...]:
    """The expressions that a leaf statement evaluates."""
    if isinstance(stmt, Store):
        return stmt.index, stmt.value
    if isinstance(stmt, Copy):
        return (stmt.index, stmt.source_index, *(() if stmt.cond is None else (stmt.cond,)))
    if isinstance(stmt, Warp):
        return tuple(index for _, index in stmt.operands)
    if isinstance(stmt, Invoke):
        return tuple(location.index for location in stmt.operands)
    return (stmt.index,) if isinstance(stmt, Prefetch) else ()


def loaded(*exprs: te.Expr) -> set[Buffer]:
    """The buffers that expressions read; a view counts as itself."""
    found = {load.source for expr in exprs for load in te.loads(expr) if isinstance(load.source, Buffer)}
    for expr in exprs:
        found |= {node.buffer for node in te.walk(expr) if isinstance(node, Across)}
    return found


def read(stmt: Stmt) -> set[Buffer]:
    """The buffers that a leaf statement reads."""
    found = loaded(*expressions(stmt))
    if isinstance(stmt, Copy):
        found.add(stmt.source)
    elif isinstance(stmt, Warp):
        found |= {buffer for buffer, _ in stmt.operands[0 if stmt.instruction.accumulates else 1 :]}
    elif isinstance(stmt, Invoke):
        first = 0 if stmt.intrinsic.accumulates else 1
        found |= {location.buffer for location in stmt.operands[first:]}
    elif isinstance(stmt, Transpose | Combine):
        found.add(stmt.buffer)
    elif isinstance(stmt, Slide):
        found |= {stmt.buffer, stmt.following}
    return found


def placed_at(stmt: Stmt, values: Mapping[te.Var, te.Expr], moved: Moved) -> Stmt:
    """The statement with variables replaced by values, and with each buffer of `moved` replaced by its new one, at an
    index offset."""

    def element(node: te.Expr) -> te.Expr | None:
        if isinstance(node, te.Load) and node.source in moved:
            buffer, further = moved[node.source]  # type: ignore[index]
            return te.Load(buffer, (node.indices[0] + further,))
        return None

    def in_expr(expr: te.Expr) -> te.Expr:
        found = te.substitute(expr, values) if values else expr
        return simplify(te.rewrite(found, element) if moved else found)

    def at(buffer: Buffer, index: te.Expr) -> Indexed:
        if buffer not in moved:
            return buffer, in_expr(index)
        new, further = moved[buffer]
        return new, simplify(in_expr(index) + further)

    def visit(each: Stmt) -> Stmt:
        if isinstance(each, For):
            return For(each.var, each.kind, visit(each.body))
        if isinstance(each, Block):
            return Block(tuple(map(visit, each.stmts)))
        if isinstance(each, If):
            return If(in_expr(each.cond), visit(each.then), None if each.other is None else visit(each.other))
        if isinstance(each, Store):
            return Store(*at(each.buffer, each.index), in_expr(each.value), each.streamed)
        if isinstance(each, Copy):
            buffer, index = at(each.buffer, each.index)
            source, source_index = at(each.source, each.source_index)
            cond = None if each.cond is None else in_expr(each.cond)
            return Copy(buffer, index, source, source_index, each.lanes, cond)
        if isinstance(each, Warp):
            return replace(each, operands=tuple(at(*operand) for operand in each.operands))
        if isinstance(each, Invoke):
            locations = []
            for location in each.operands:
                buffer, index = at(location.buffer, location.index)
                locations.append(replace(location, buffer=buffer, index=index))
            return replace(each, operands=tuple(locations))
        if isinstance(each, Prefetch):
            return replace(each, index=in_expr(each.index))
        return each

    return visit(stmt)
