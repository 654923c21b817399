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
that is, and whether the hardware finds the address by itself. It does where iterations are less than `NEAR` bytes
apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product

from tilewright import te
from tilewright.errors import PipelineError
from tilewright.hw.cores import USUAL
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
    Scope,
    Stmt,
    Store,
    block,
    walk_stmts,
)
from tilewright.loops.passes.accesses import expressions, leaf_statements
from tilewright.loops.passes.load_and_use import load_and_use
from tilewright.loops.passes.pipeline import pipeline
from tilewright.te.index import coefficient, linear, simplify

NEAR = 1024  # bytes between the loads of two iterations that hardware prefetchers follow
MAX_LINES = 8  # maximum prefetches of one load in an iteration


def double_buffered(program: Program, stages: Mapping[str, int]) -> Program:
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
    """A load that a loop may prefetch. `inner`: the loops inside this one that also move it."""

    load: te.Load
    loop: For
    inner: tuple[For, ...]

    @property
    def by_data(self) -> bool:
        return bool(te.loads(self.load.indices[0]))


def loads_ahead(program: Program) -> list[Ahead]:
    """The loads of inputs that are worth a prefetch: each moves with a sequential loop, by data or in large steps."""
    found: dict[tuple[int, te.Expr], Ahead] = {}
    inputs = set(program.params[:-1])
    if any(isinstance(stmt, Prefetch) for stmt in walk_stmts(program.body)):
        return []  # somebody has decided on them
    for path, stmt in leaf_statements(program.body):
        loops = [each for each in path if isinstance(each, For)]
        for expr in expressions(stmt):
            for load in te.loads(expr):
                if load.source not in inputs:
                    continue
                each = _ahead(load, loops)
                if each is not None:
                    found[id(each.loop), load.indices[0]] = each
    return list(found.values())


def _ahead(load: te.Load, loops: list[For]) -> Ahead | None:
    (index,) = load.indices
    moving = te.variables(index)
    number = next(
        (n for n in range(len(loops) - 1, -1, -1) if loops[n].kind is Kind.SERIAL and loops[n].var in moving),
        None,
    )
    if number is None:
        return None
    loop = loops[number]
    by_data = any(loop.var in te.variables(inner.indices[0]) for inner in te.loads(index))
    if not by_data:
        atoms = [atom for atom in linear(index).terms if loop.var in te.variables(atom)]
        step = abs(coefficient(index, loop.var) or 0) * load.source.dtype.bytes
        if atoms != [loop.var] or step < NEAR:
            return None
    return Ahead(load, loop, tuple(each for each in loops[number + 1 :] if each.var in moving))


def prefetched(program: Program, ahead: int, line: int = USUAL.line_bytes) -> Program:
    """The program with prefetches for loads `ahead` iterations later; unchanged if no load is worth it."""
    wanted: dict[int, list[Prefetch]] = {}
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


def _prefetches(each: Ahead, ahead: int, line: int) -> list[Prefetch]:
    """One prefetch for each line that the later iteration loads, as far as constant offsets determine."""
    loop, source = each.loop, each.load.source
    assert isinstance(source, Buffer)
    later: te.Expr = loop.var + ahead
    if each.by_data:  # where the data is read, it must exist
        later = te.call("min", later, te.as_index(loop.var.extent - 1))
    (index,) = each.load.indices
    per_line = max(1, line // source.dtype.bytes)
    steps = [
        range(0, inner.var.extent, max(1, per_line // max(1, abs(coefficient(index, inner.var) or per_line))))
        for inner in each.inner
    ]
    if math.prod(map(len, steps)) > MAX_LINES:
        steps = [range(1) for _ in each.inner]
    found = []
    for at in product(*steps):
        values: dict[te.Var, te.Expr] = {
            inner.var: te.as_index(value) for inner, value in zip(each.inner, at, strict=True)
        }
        where = simplify(te.substitute(index, {**values, loop.var: later}))
        found.append(Prefetch(source, where, level=1))
    return found


def tiles_ahead(program: Program) -> list[str]:
    """The tiles of a CPU program whose copies may be moved to an earlier iteration."""
    names = []
    copied = {
        stmt.buffer.name
        for _, stmt in leaf_statements(program.body)
        if isinstance(stmt, Store) and stmt.buffer.scope is Scope.SCRATCH and isinstance(stmt.value, te.Load)
    }
    for name in sorted(copied):
        try:
            load_and_use(program, name, synchronous=True)
        except PipelineError:
            continue
        names.append(name)
    return names
