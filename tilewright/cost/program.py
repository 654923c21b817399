"""Program -> Terms: what a loop nest does, counted from its statements. Templates count their own in closed form; this
is for the programs that no template made."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tilewright import te
from tilewright.hw import CpuMachine
from tilewright.loops.ir import (
    Across,
    Block,
    Buffer,
    For,
    If,
    Kind,
    Prefetch,
    Program,
    Scope,
    Stmt,
    Store,
    Transpose,
    walk_stmts,
)
from tilewright.space.template import Terms
from tilewright.te.index import coefficient

# Instructions, where it is more than one: for divisions and roots the time that they keep a port, for functions about
# the length of their polynomials.
_LONG = {"div": 8, "sqrt": 10, "rsqrt": 12, "floordiv": 16, "mod": 16, "fmod": 20, "pow": 40, "atan2": 30}
_FUNCTIONS = frozenset(("exp", "exp2_weight", "expm1", "log", "log1p", "sin", "cos", "tanh", "erf"))
_FUNCTION = 16
_TURNED = 16.0  # cycles: what a vector of a square tile shows of its access to a row of its own


def terms_of(program: Program, machine: CpuMachine) -> Terms:
    count = _Count(machine)
    count.statement(program.body, 1.0, None)
    streamed = any(isinstance(stmt, Store) and stmt.streamed for stmt in walk_stmts(program.body))
    *inputs, output = program.params
    written = _bytes(output) * (1 if streamed else 2)
    return Terms(
        arithmetic=count.arithmetic,
        loads=count.loads,
        stores=count.stores,
        branches=count.branches,
        scalar=count.scalar,
        from_l3=float(sum(map(_bytes, inputs)) + written),
        iterations=program.parallel_extent,
    )


def _bytes(buffer: Buffer) -> int:
    return buffer.size * buffer.dtype.bytes


@dataclass
class _Count:
    """`times`: how often what is counted runs. `lane`: the variable of the vector loop around it, if there is one."""

    machine: CpuMachine
    arithmetic: float = 0.0
    loads: float = 0.0
    stores: float = 0.0
    branches: float = 0.0
    scalar: float = 0.0

    def statement(self, stmt: Stmt, times: float, lane: te.Var | None) -> None:
        if isinstance(stmt, For):
            if stmt.kind is Kind.VECTOR:
                self.statement(stmt.body, times, stmt.var)
                return
            if stmt.kind is Kind.SERIAL:
                self.branches += times * stmt.var.extent
            self.statement(stmt.body, times * stmt.var.extent, lane)
        elif isinstance(stmt, Block):
            for child in stmt.stmts:
                self.statement(child, times, lane)
        elif isinstance(stmt, If):
            self.branches += times
            # Each branch runs in a part of the cases; what is common is that they do about the same.
            branches = [stmt.then, *([stmt.other] if stmt.other is not None else [])]
            for branch in branches:
                self.statement(branch, times / len(branches), lane)
        elif isinstance(stmt, Transpose):
            vectors = stmt.rows * stmt.columns / stmt.lanes
            # Shuffles have one port of the two.
            self.arithmetic += times * 2 * vectors * math.log2(max(stmt.lanes, 2))
            if min(stmt.rows, stmt.columns) >= stmt.lanes:
                self.scalar += times * vectors * _TURNED
        elif isinstance(stmt, Prefetch):
            self.loads += times
        else:
            self.value(stmt.value, times, lane)
            if stmt.buffer.scope is not Scope.REGISTER:
                self.stores += times * self.accesses(stmt.buffer, stmt.index, lane)

    def value(self, expr: te.Expr, times: float, lane: te.Var | None) -> None:
        """Counts what computing `expr` takes. Offsets are left to the address units, and what is the same in all lanes
        to the loops outside."""
        if isinstance(expr, te.Load):
            buffer = expr.source
            assert isinstance(buffer, Buffer)
            if buffer.scope is not Scope.REGISTER:
                self.loads += times * self.accesses(buffer, expr.indices[0], lane)
            return
        if lane is not None and lane not in te.variables(expr) and not te.loads(expr):
            return
        if isinstance(expr, Across):
            self.arithmetic += times * 2 * math.log2(max(expr.lanes, 2))
        elif isinstance(expr, te.Call) and expr.dtype.short != "i64":
            each = _FUNCTION if expr.op in _FUNCTIONS else _LONG.get(expr.op, 1)
            self.arithmetic += times * each * self.registers(expr, lane)
        elif isinstance(expr, te.Cast | te.Select):
            self.arithmetic += times * self.registers(expr, lane)
        for child in te.children(expr):
            self.value(child, times, lane)

    def registers(self, expr: te.Expr, lane: te.Var | None) -> int:
        """How many registers a vector of its values takes."""
        lanes = 1 if lane is None else lane.extent
        return max(1, lanes * expr.dtype.bytes // self.machine.vector_bytes)

    def accesses(self, buffer: Buffer, index: te.Expr, lane: te.Var | None) -> int:
        if lane is None or coefficient(index, lane) == 0:
            return 1
        if coefficient(index, lane) == 1:
            return max(1, lane.extent * buffer.dtype.bytes // self.machine.vector_bytes)
        return lane.extent  # one by one
