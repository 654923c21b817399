"""Names of a program's buffers and loops as identifiers of C++: those of schedules have dots, as in `a.of.out`."""

from __future__ import annotations

import re
from dataclasses import replace

from tilewright import te
from tilewright.loops.ir import (
    Block,
    BoxCopy,
    Buffer,
    Combine,
    Copy,
    Fill,
    Filled,
    For,
    If,
    Program,
    Release,
    Roles,
    Stmt,
    Store,
    Warp,
    local_buffers,
    walk_stmts,
)

_OTHER = re.compile(r"\W")


def with_identifiers(program: Program) -> Program:
    """The program with names that C++ takes; itself if it has such names already."""
    buffers = [*program.params, *local_buffers(program)]
    loops = {stmt.var.name for stmt in walk_stmts(program.body) if isinstance(stmt, For)}
    names = [*dict.fromkeys(buffer.name for buffer in buffers)]
    if not any(_OTHER.search(name) for name in (*names, *loops)) and not loops & set(names):
        return program
    taken: set[str] = set()
    found = {("buffer", name): _unused(name, taken) for name in names}
    found |= {("loop", name): _unused(name, taken) for name in sorted(loops)}
    return _Renaming(found).program(program)


def _unused(name: str, taken: set[str]) -> str:
    base = _OTHER.sub("_", name)
    made, number = base, 2
    while made in taken:
        made, number = f"{base}_{number}", number + 1
    taken.add(made)
    return made


class _Renaming:
    def __init__(self, names: dict[tuple[str, str], str]) -> None:
        self.names = names

    def program(self, program: Program) -> Program:
        params = tuple(map(self.buffer, program.params))
        return replace(program, params=params, body=self.statement(program.body))

    def buffer(self, buffer: Buffer) -> Buffer:
        if buffer.of is not None:
            return self.buffer(buffer.of).read_as(buffer.dtype)
        return replace(buffer, name=self.names["buffer", buffer.name])

    def var(self, var: te.Var) -> te.Var:
        return te.Var(self.names.get(("loop", var.name), var.name), var.extent)

    def expr(self, expr: te.Expr) -> te.Expr:
        def rule(node: te.Expr) -> te.Expr | None:
            if isinstance(node, te.Var):
                return self.var(node)
            if isinstance(node, te.Load) and isinstance(node.source, Buffer):
                return te.Load(self.buffer(node.source), tuple(map(self.expr, node.indices)))
            return None

        return te.rewrite(expr, rule)

    def statement(self, stmt: Stmt) -> Stmt:
        if isinstance(stmt, For):
            return For(self.var(stmt.var), stmt.kind, self.statement(stmt.body))
        if isinstance(stmt, Block):
            return Block(tuple(map(self.statement, stmt.stmts)))
        if isinstance(stmt, If):
            other = None if stmt.other is None else self.statement(stmt.other)
            return If(self.expr(stmt.cond), self.statement(stmt.then), other)
        if isinstance(stmt, Store):
            return Store(
                self.buffer(stmt.buffer), self.expr(stmt.index), self.expr(stmt.value), stmt.streamed
            )
        if isinstance(stmt, Copy):
            cond = None if stmt.cond is None else self.expr(stmt.cond)
            target = self.buffer(stmt.buffer), self.expr(stmt.index)
            return Copy(*target, self.buffer(stmt.source), self.expr(stmt.source_index), stmt.lanes, cond)
        if isinstance(stmt, Warp):
            operands = tuple((self.buffer(buffer), self.expr(index)) for buffer, index in stmt.operands)
            return replace(stmt, thread=self.var(stmt.thread), operands=operands)
        if isinstance(stmt, BoxCopy):
            return replace(
                stmt,
                buffer=self.buffer(stmt.buffer),
                index=self.expr(stmt.index),
                source=replace(stmt.source, buffer=self.buffer(stmt.source.buffer)),
                row=self.expr(stmt.row),
                column=self.expr(stmt.column),
            )
        if isinstance(stmt, Fill):
            copies = tuple(self.statement(copy) for copy in stmt.copies)
            return Fill(stmt.ring, self.expr(stmt.number), copies)  # type: ignore[arg-type]
        if isinstance(stmt, Filled | Release):
            return replace(stmt, number=self.expr(stmt.number))
        if isinstance(stmt, Roles):
            return Roles(self.statement(stmt.producer), self.statement(stmt.consumer), stmt.registers)
        if isinstance(stmt, Combine):
            return replace(stmt, buffer=self.buffer(stmt.buffer))
        return stmt
