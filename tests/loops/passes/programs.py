"""Load-and-use loops, written by hand, for the tests of passes."""

from __future__ import annotations

import numpy as np

from tilewright import te
from tilewright.dtypes import DType
from tilewright.loops.ir import (
    Await,
    Buffer,
    Commit,
    Copy,
    For,
    Kind,
    Program,
    Scope,
    Stmt,
    Store,
    block,
)

F32 = DType.F32
ROWS, LANES, THREADS = 5, 4, 8
WIDTH = LANES * THREADS  # of a row

X = Buffer("x", F32, ROWS * WIDTH)
OUT = Buffer("out", F32, WIDTH)
TILE = Buffer("tile", F32, WIDTH, Scope.SCRATCH)
ACC = Buffer("acc", F32, LANES, Scope.REGISTER)
HELD = Buffer("held", F32, LANES, Scope.REGISTER)

k, t, v = te.Var("k", ROWS), te.Var("t", THREADS), te.Var("v", LANES)


def threads(stmt: Stmt) -> Stmt:
    return For(t, Kind.THREAD, stmt)


def lanes(stmt: Stmt) -> Stmt:
    return For(v, Kind.VECTOR, stmt)


def neighbour(index: te.Expr) -> te.Expr:
    """What a thread reads, other threads copied."""
    return (index + LANES) % WIDTH


def copies(index: te.Expr = k) -> Stmt:
    return threads(Copy(TILE, t * LANES, X, index * WIDTH + t * LANES, LANES))


def cleared() -> Stmt:
    return threads(lanes(Store(ACC, v, te.const(0.0, F32))))


def added(source: Buffer = TILE, index: te.Expr | None = None) -> Stmt:
    at = neighbour(t * LANES + v) if index is None else index
    total = te.call("add", te.Load(ACC, (v,)), te.Load(source, (at,)))
    return threads(lanes(Store(ACC, v, total)))


def written() -> Stmt:
    return threads(lanes(Store(OUT, t * LANES + v, te.Load(ACC, (v,)))))


def loop(*body: Stmt) -> Stmt:
    return For(k, Kind.SERIAL, block(*body))


def program(*stmts: Stmt, name: str = "sums") -> Program:
    return Program(name, (X, OUT), block(*stmts))


def sums() -> Program:
    """The sum of all rows, each of which goes through shared memory: columns are moved on by four."""
    return program(cleared(), loop(Await(0), copies(), Commit(), Await(0), added()), written())


def halves() -> Program:
    """The same, and each row goes through registers, a half at a time: half the lanes of each."""
    i, w = te.Var("i", 2), te.Var("w", 2)
    half = Buffer("held", F32, 2, Scope.REGISTER)
    load = threads(For(w, Kind.VECTOR, Store(half, w, te.Load(TILE, (neighbour(t * LANES + i * 2 + w),)))))
    total = te.call("add", te.Load(ACC, (i * 2 + w,)), te.Load(half, (w,)))
    use = threads(For(w, Kind.VECTOR, Store(ACC, i * 2 + w, total)))
    inner = For(i, Kind.UNROLL, block(load, use))
    return program(cleared(), loop(Await(0), copies(), Commit(), Await(0), inner), written())


OUTER = te.Var("o", 3)


def carried() -> Program:
    """The sum of all rows, three times: an outer loop begins with row 0, then 1, then 2, and wraps."""
    row = (k + OUTER) % ROWS
    inner = loop(Await(0), copies(row), Commit(), Await(0), added())
    return program(cleared(), For(OUTER, Kind.SERIAL, inner), written())


def data() -> np.ndarray:
    return np.random.default_rng(0).integers(-8, 8, (ROWS, WIDTH)).astype(np.float32)


def expected() -> np.ndarray:
    return np.roll(data().sum(0), -LANES)
