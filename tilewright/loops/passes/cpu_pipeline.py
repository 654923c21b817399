"""Pipelining on processors, which have no asynchronous copies: what later iterations load is on its way to a cache, or
is packed, while this one computes.

    for r < 64:                              for r < 64:
      out += table[index[r], ..]      ->       prefetch table[index[min(r + 8, 63)], ..]
                                               out += table[index[r], ..]

    for k < 8:                               tile[0, ..] = b[0, ..]
      tile[..] = b[k, ..]                    for k < 8:
      ... tile ...                    ->       if k + 1 < 8: tile[(k + 1) % 2, ..] = b[k + 1, ..]
                                               ... tile[k % 2] ...

`load_and_use.py` decides on tiles: the copies of a tile are moved ahead where it may be pipelined. A load that needs no
tile may be prefetched in a sequential loop that moves it, because nothing writes an input: the analysis is which loop
that is, and whether the hardware prefetcher follows. It follows constant strides of less than `NEAR` bytes; addresses
that depend on data, and larger strides, are prefetched by the program.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from tilewright import te
from tilewright.hw.cores import USUAL
from tilewright.loops.gpu.thread_index import under
from tilewright.loops.ir import (
    Await,
    Block,
    Buffer,
    Commit,
    For,
    If,
    Kind,
    Prefetch,
    Program,
    Stmt,
    block,
    walk_stmts,
)
from tilewright.loops.passes.accesses import expressions
from tilewright.loops.passes.load_and_use import ProgramAccesses
from tilewright.loops.passes.pipeline import pipeline
from tilewright.te.index import coefficient, linear, simplify

NEAR = 1024  # bytes between the loads of two iterations that hardware prefetchers follow
MAX_LINES = 8  # maximum prefetches of one load in an iteration


def double_buffered(program: Program | ProgramAccesses, stages: Mapping[str, int]) -> Program:
    """The program with tiles filled for later iterations, in this many copies. Raises PipelineError with the reason."""
    made = pipeline(program, stages, synchronous=list(stages))
    return replace(made, body=_without_waits(made.body))


def _without_waits(stmt: Stmt) -> Stmt:
    """Remove waits: on a CPU, a store is complete when the next statement begins."""
    if isinstance(stmt, Block):
        return block(*(_without_waits(each) for each in stmt.stmts if not isinstance(each, Commit | Await)))
    if isinstance(stmt, For):
        return For(stmt.var, stmt.kind, _without_waits(stmt.body))
    if isinstance(stmt, If):
        other = None if stmt.other is None else _without_waits(stmt.other)
        return If(stmt.cond, _without_waits(stmt.then), other)
    return stmt


@dataclass(frozen=True)
class Ahead:
    """A load that a loop may prefetch. `inner`: the loops inside this one; `guards`: the conditions inside it under
    which the program loads."""

    load: te.Load
    loop: For
    inner: tuple[For, ...]
    guards: tuple[te.Expr, ...]

    @property
    def moving(self) -> list[For]:
        """The inner loops that also move the load."""
        return [each for each in self.inner if each.var in te.variables(self.load.indices[0])]

    @property
    def by_data(self) -> bool:
        return bool(te.loads(self.load.indices[0]))


@dataclass(frozen=True)
class _Found:
    """A load of an input, with the loops and conditions around it, outermost first."""

    load: te.Load
    around: tuple[For | te.Expr, ...]


def loads_ahead(program: Program) -> list[Ahead]:
    """The loads of inputs that are worth a prefetch: each moves with a sequential loop, at addresses that depend on
    data or with a large stride."""
    if any(isinstance(stmt, Prefetch) for stmt in walk_stmts(program.body)):
        return []  # somebody has decided on them
    inputs = set(program.params[:-1])
    found: dict[tuple[int, te.Expr], Ahead] = {}
    for each in _loads(program.body, ()):
        ahead = _ahead(each, inputs) if each.load.source in inputs else None
        if ahead is not None:
            found.setdefault((id(ahead.loop), each.load.indices[0]), ahead)
    return list(found.values())


def _loads(stmt: Stmt, around: tuple[For | te.Expr, ...]) -> Iterator[_Found]:
    if isinstance(stmt, For):
        yield from _loads(stmt.body, (*around, stmt))
    elif isinstance(stmt, Block):
        for child in stmt.stmts:
            yield from _loads(child, around)
    elif isinstance(stmt, If):
        yield from _loads_in(stmt.cond, around)
        yield from _loads(stmt.then, (*around, stmt.cond))
        if stmt.other is not None:
            yield from _loads(stmt.other, (*around, te.call("not", stmt.cond)))
    else:
        for expr in expressions(stmt):
            yield from _loads_in(expr, around)


def _loads_in(expr: te.Expr, around: tuple[For | te.Expr, ...]) -> Iterator[_Found]:
    if isinstance(expr, te.Select):
        yield from _loads_in(expr.cond, around)
        yield from _loads_in(expr.then, (*around, expr.cond))
        yield from _loads_in(expr.other, (*around, te.call("not", expr.cond)))
        return
    if isinstance(expr, te.Load):
        yield _Found(expr, around)
    for part in te.children(expr):
        yield from _loads_in(part, around)


def _ahead(found: _Found, inputs: Collection[te.Source]) -> Ahead | None:
    (index,) = found.load.indices
    moving = te.variables(index)
    number = next(
        (
            n
            for n, each in reversed(list(enumerate(found.around)))
            if isinstance(each, For) and each.kind is Kind.SERIAL and each.var in moving
        ),
        None,
    )
    if number is None:
        return None
    loop = found.around[number]
    assert isinstance(loop, For)
    inside = found.around[number + 1 :]
    guards = tuple(each for each in inside if not isinstance(each, For))
    by_data = any(loop.var in te.variables(inner.indices[0]) for inner in te.loads(index))
    if not by_data:
        atoms = [atom for atom in linear(index).terms if loop.var in te.variables(atom)]
        step = abs(coefficient(index, loop.var) or 0) * found.load.source.dtype.bytes
        if atoms != [loop.var] or step < NEAR:
            return None
    elif any(inner.source not in inputs for expr in (index, *guards) for inner in te.loads(expr)):
        return None  # what a later iteration computes is not known yet
    return Ahead(found.load, loop, tuple(each for each in inside if isinstance(each, For)), guards)


def prefetched(program: Program, ahead: int, line: int = USUAL.line_bytes) -> Program:
    """The program with prefetches for loads `ahead` iterations later; unchanged if no load is worth it."""
    wanted: dict[int, list[Stmt]] = {}
    for each in loads_ahead(program):
        if each.loop.var.extent > ahead:
            wanted.setdefault(id(each.loop), []).extend(_prefetches(each, ahead, line))
    if not wanted:
        return program

    def visit(stmt: Stmt) -> Stmt:
        if isinstance(stmt, For):
            return For(stmt.var, stmt.kind, block(*wanted.get(id(stmt), ()), visit(stmt.body)))
        if isinstance(stmt, Block):
            return Block(tuple(map(visit, stmt.stmts)))
        if isinstance(stmt, If):
            return If(stmt.cond, visit(stmt.then), None if stmt.other is None else visit(stmt.other))
        return stmt

    count = sum(map(len, wanted.values()))
    words = f"{count} prefetch{'es' if count > 1 else ''} {ahead} iterations ahead"
    return replace(program, body=visit(program.body), decisions=f"{program.decisions}, {words}")


def _prefetches(each: Ahead, ahead: int, line: int) -> list[Stmt]:
    """One prefetch for each line that the later iteration loads, as far as constant offsets determine."""
    loop, source = each.loop, each.load.source
    assert isinstance(source, Buffer)
    later: te.Expr = loop.var + ahead
    if each.by_data:  # where the data is read, it must exist
        later = te.call("min", later, te.as_index(loop.var.extent - 1))
    (index,) = each.load.indices
    moving = each.moving
    per_line = max(1, line // source.dtype.bytes)
    steps = [
        range(0, inner.var.extent, max(1, per_line // max(1, abs(coefficient(index, inner.var) or per_line))))
        for inner in moving
    ]
    if math.prod(map(len, steps)) > MAX_LINES:
        steps = [range(1) for _ in moving]
    found = []
    for at in product(*steps):
        values: dict[te.Var, te.Expr] = {inner.var: te.as_index(0) for inner in each.inner}
        values |= {inner.var: te.as_index(value) for inner, value in zip(moving, at, strict=True)}
        values[loop.var] = later
        where = simplify(te.substitute(index, values))
        guards = [simplify(te.substitute(guard, values)) for guard in each.guards if each.by_data]
        needed = [guard for guard in guards if not isinstance(guard, te.Const)]
        if len(needed) == len(guards) or all(guard.value for guard in guards if isinstance(guard, te.Const)):
            found.append(under(te.all_of(needed), Prefetch(source, where, level=1)))
    return found
