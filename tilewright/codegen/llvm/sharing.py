"""Finds unrolled loops whose copies read the same elements.

An unrolled sum over a window, for several neighbours at once, reads most elements again in a later copy, for another
neighbour:

    unroll k < 7: unroll r < 6: acc[r, :] += x[2 * r + k] * w[k, :]

A broadcast element takes a vector register. LLVM would keep the whole window in registers from copy to copy and spill
accumulators for it, although reading an element again costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from tilewright import te
from tilewright.loops.ir import Block, Buffer, For, Kind, Scope, Stmt, Store
from tilewright.te.index import coefficient


def shares_elements(loop: For) -> bool:
    """Whether copies of the loop add to the same vectors, and read elements in all lanes that another copy reads."""
    return any(
        _again(position, loop.var, loops)
        for store, loops in _stores(loop.body, ())
        if _accumulates(store) and not coefficient(store.index, loop.var)
        for position in _elements(store, loops)
    )


def _stores(stmt: Stmt, loops: tuple[For, ...]) -> Iterator[tuple[Store, tuple[For, ...]]]:
    """Stores under loops that are written out or in lanes, with these loops."""
    if isinstance(stmt, Store):
        yield stmt, loops
    elif isinstance(stmt, Block):
        for child in stmt.stmts:
            yield from _stores(child, loops)
    elif isinstance(stmt, For) and stmt.kind in (Kind.UNROLL, Kind.VECTOR):
        yield from _stores(stmt.body, (*loops, stmt))


def _accumulates(store: Store) -> bool:
    return store.buffer.scope is Scope.REGISTER and any(
        load.source == store.buffer and load.indices == (store.index,) for load in te.loads(store.value)
    )


def _elements(store: Store, loops: tuple[For, ...]) -> Iterator[te.Expr]:
    """The addresses of elements that are broadcast to all lanes."""
    lanes = [loop.var for loop in loops if loop.kind is Kind.VECTOR]
    for load in te.loads(store.value):
        in_memory = isinstance(load.source, Buffer) and load.source.scope is not Scope.REGISTER
        if in_memory and lanes and all(coefficient(load.indices[0], lane) == 0 for lane in lanes):
            yield load.indices[0]


def _again(position: te.Expr, var: te.Var, loops: tuple[For, ...]) -> bool:
    """Whether moving by some copies of `var` comes to the same as moving by some of another written-out loop."""
    step = abs(coefficient(position, var) or 0)
    return any(
        step * copies == abs(coefficient(position, loop.var) or 0) * others
        for loop in loops
        if step and loop.kind is Kind.UNROLL
        for copies in range(1, var.extent)
        for others in range(1, loop.var.extent)
    )
