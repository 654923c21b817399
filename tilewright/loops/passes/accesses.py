"""Finds the buffers that a statement reads and writes; walks statements with their enclosing loops and branches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from tilewright import te
from tilewright.loops.ir import (
    Across,
    Block,
    BoxCopy,
    Buffer,
    Combine,
    Copy,
    Fill,
    Filled,
    For,
    If,
    Invoke,
    Prefetch,
    Release,
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
    if isinstance(stmt, Store | Copy | BoxCopy):
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
    if isinstance(stmt, BoxCopy):
        return stmt.index, stmt.row, stmt.column
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
    elif isinstance(stmt, BoxCopy):
        found.add(stmt.source.buffer)
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


@dataclass(frozen=True, eq=False)
class Placed:
    """Statements with variables replaced by values, and with each buffer of `moved` replaced by its new one, at an
    index offset. An expression that occurs again is changed once."""

    values: Mapping[te.Var, te.Expr]
    moved: Moved
    _known: dict[te.Expr, te.Expr] = field(default_factory=dict)
    _moves: dict[Indexed, Indexed] = field(default_factory=dict)

    def of(self, stmt: Stmt) -> Stmt:
        if isinstance(stmt, For):
            return For(stmt.var, stmt.kind, self.of(stmt.body))
        if isinstance(stmt, Block):
            return Block(tuple(map(self.of, stmt.stmts)))
        if isinstance(stmt, If):
            other = None if stmt.other is None else self.of(stmt.other)
            return If(self._expr(stmt.cond), self.of(stmt.then), other)
        if isinstance(stmt, Store):
            return Store(*self._at(stmt.buffer, stmt.index), self._expr(stmt.value), stmt.streamed)
        if isinstance(stmt, Copy):
            buffer, index = self._at(stmt.buffer, stmt.index)
            source, source_index = self._at(stmt.source, stmt.source_index)
            cond = None if stmt.cond is None else self._expr(stmt.cond)
            return Copy(buffer, index, source, source_index, stmt.lanes, cond)
        if isinstance(stmt, BoxCopy):
            buffer, index = self._at(stmt.buffer, stmt.index)
            row, column = self._expr(stmt.row), self._expr(stmt.column)
            return replace(stmt, buffer=buffer, index=index, row=row, column=column)
        if isinstance(stmt, Fill):
            copies = tuple(self.of(copy) for copy in stmt.copies)
            return Fill(stmt.ring, self._expr(stmt.number), copies)  # type: ignore[arg-type]
        if isinstance(stmt, Filled | Release):
            return replace(stmt, number=self._expr(stmt.number))
        if isinstance(stmt, Warp):
            return replace(stmt, operands=tuple(self._at(*operand) for operand in stmt.operands))
        if isinstance(stmt, Invoke):
            locations = []
            for location in stmt.operands:
                buffer, index = self._at(location.buffer, location.index)
                locations.append(replace(location, buffer=buffer, index=index))
            return replace(stmt, operands=tuple(locations))
        if isinstance(stmt, Prefetch):
            return replace(stmt, index=self._expr(stmt.index))
        return stmt

    def _at(self, buffer: Buffer, index: te.Expr) -> Indexed:
        access = buffer, index
        if access not in self._moves:
            new, further = self.moved.get(buffer, (buffer, None))
            changed = self._expr(index)
            self._moves[access] = new, changed if further is None else simplify(changed + further)
        return self._moves[access]

    def _expr(self, expr: te.Expr) -> te.Expr:
        found = self._known.get(expr)
        if found is None:
            found = te.substitute(expr, self.values) if self.values else expr
            found = simplify(te.rewrite(found, self._element) if self._loads_moved(found) else found)
            self._known[expr] = found
        return found

    def _loads_moved(self, expr: te.Expr) -> bool:
        return bool(self.moved) and any(load.source in self.moved for load in te.loads(expr))

    def _element(self, node: te.Expr) -> te.Expr | None:
        if isinstance(node, te.Load) and node.source in self.moved:
            buffer, further = self.moved[node.source]  # type: ignore[index]
            return te.Load(buffer, (node.indices[0] + further,))
        return None
