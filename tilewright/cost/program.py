"""Count the terms of a loop program from its statements. Templates count their own in closed form; this is for all
other programs.

Traffic follows from footprints. Loops that together touch no more than a cache holds reuse what they touched before;
in each iteration of the loops around them, it is loaded again. Compulsory traffic comes from the shared cache, and
that of constants from memory, like weights in a model.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tilewright import te
from tilewright.cost.accesses import (
    EnclosingLoop,
    Statement,
    first_written,
    moves_of,
    reduced_loops,
    statements_of,
)
from tilewright.errors import InternalError
from tilewright.hw import CpuMachine
from tilewright.loops.ir import (
    Across,
    Block,
    BoxCopy,
    Buffer,
    Combine,
    Copy,
    For,
    If,
    Invoke,
    Kind,
    Prefetch,
    Program,
    Scope,
    Slide,
    Stmt,
    Store,
    Transpose,
    Warp,
)
from tilewright.loops.tiling import separate_accesses
from tilewright.space.template import Terms
from tilewright.te.index import coefficient

# Instruction counts other than one: the port time of divisions and roots, and the approximate polynomial length of
# functions.
_LONG = {"div": 8, "sqrt": 10, "rsqrt": 12, "floordiv": 16, "mod": 16, "fmod": 20, "pow": 40, "atan2": 30}
_FUNCTIONS = frozenset(("exp", "exp2_nonpositive", "expm1", "log", "log1p", "sin", "cos", "tanh", "erf"))
_FUNCTION = 16
_TRANSPOSED = 16.0  # cycles per vector of a square tile for accessing a separate row
_LATENCY_MEMORY = 10.0  # cycles between dependent sums that go through memory
_USABLE = 0.75  # share of a cache


def terms_of(program: Program, machine: CpuMachine, constants: Collection[int] = ()) -> Terms:
    """`constants`: the inputs that are the same in every call."""
    statements = statements_of(program, machine.line_bytes)
    count = _Count(machine, first_written(statements))
    for statement in statements:
        count.statement(statement)
    streamed = any(isinstance(s.stmt, Store) and s.stmt.streamed for s in statements)
    *inputs, output = program.params
    kept = sum(_bytes(buffer) for number, buffer in enumerate(inputs) if number in constants)
    once = sum(map(_bytes, inputs)) - kept + _bytes(output) * (1 if streamed else 2)
    footprints = _footprints(statements)
    caches = machine.caches
    return Terms(
        arithmetic=count.arithmetic,
        loads=count.loads,
        stores=count.stores,
        branches=_branches(program.body, 1.0),
        from_l2=_again(statements, footprints, caches.l1 * _USABLE),
        from_l3=once + _again(statements, footprints, caches.l2_per_core * _USABLE),
        from_memory=float(kept),
        iterations=program.parallel_extent,
        scalar=count.scalar,
    )


def _bytes(buffer: Buffer) -> int:
    return buffer.size * buffer.dtype.bytes


def _branches(stmt: Stmt, times: float) -> float:
    if isinstance(stmt, For):
        if stmt.kind is Kind.VECTOR:
            return _branches(stmt.body, times)
        inside = times * stmt.var.extent
        return _branches(stmt.body, inside) + (inside if stmt.kind is Kind.SERIAL else 0.0)
    if isinstance(stmt, Block):
        return sum(_branches(child, times) for child in stmt.stmts)
    if isinstance(stmt, If):
        # Each branch runs in a part of the cases; branches usually do about the same work.
        parts = [stmt.then, *([stmt.other] if stmt.other is not None else [])]
        return times + sum(_branches(part, times / len(parts)) for part in parts)
    return 0.0


# -- traffic ----------------------------------------------------------------------------------------------------------


def _footprints(statements: Sequence[Statement]) -> dict[EnclosingLoop, float]:
    """Bytes of cache lines that each loop touches in all its iterations."""
    by_buffer: dict[EnclosingLoop, dict[Buffer, float]] = {}
    for statement in statements:
        inside_out = statement.path[::-1]
        for access in statement.accesses:
            memory = access.buffer.memory
            for depth, loop in enumerate(inside_out):
                touched = by_buffer.setdefault(loop, {})
                touched[memory] = max(touched.get(memory, 0.0), access.lines[depth + 1])
    return {loop: sum(touched.values()) for loop, touched in by_buffer.items()}


def _again(statements: Sequence[Statement], footprints: dict[EnclosingLoop, float], capacity: float) -> float:
    """Bytes that are loaded into a cache again after eviction."""
    repeated: dict[Buffer, float] = {}
    for statement in statements:
        path = statement.path
        fits = next((at for at, loop in enumerate(path) if footprints.get(loop, 0.0) <= capacity), len(path))
        if fits == 0:
            continue
        for access in statement.accesses:
            depth = len(path) - fits
            times = float(math.prod(loop.var.extent for loop in path[:fits]))
            around = path[fits - 1]
            if around.var not in access.moves:  # it is reused before other data evicts it
                times /= around.var.extent
            brought = times * access.lines[depth] * (2 if access.writes else 1)
            once = access.lines[-1] * (2 if access.writes else 1)
            memory = access.buffer.memory
            repeated[memory] = max(repeated.get(memory, 0.0), brought - once)
    return sum(repeated.values())


# -- instructions -----------------------------------------------------------------------------------------------------


@dataclass
class _Count:
    """`times`: the number of executions. `lane`: the variable of the enclosing vector loop, if any."""

    machine: CpuMachine
    born: dict[Buffer, tuple[EnclosingLoop, ...]]
    arithmetic: float = 0.0
    loads: float = 0.0
    stores: float = 0.0
    scalar: float = 0.0

    @property
    def in_a_cycle(self) -> float:
        """FMAs per cycle; one for shuffles."""
        return self.machine.throughput.fmas

    def statement(self, statement: Statement) -> None:
        stmt, path = statement.stmt, statement.path
        lane = path[-1].var if path and path[-1].kind is Kind.VECTOR else None
        times = statement.executions / (1 if lane is None else lane.extent)
        if isinstance(stmt, Transpose):
            vectors = stmt.rows * stmt.columns / stmt.lanes
            self.arithmetic += times * self.in_a_cycle * vectors * math.log2(max(stmt.lanes, 2))
            if min(stmt.rows, stmt.columns) >= stmt.lanes:
                self.scalar += times * vectors * _TRANSPOSED
        elif isinstance(stmt, Slide):
            self.arithmetic += times * self.in_a_cycle
        elif isinstance(stmt, Prefetch):
            self.loads += times
        elif isinstance(stmt, Invoke):
            result, *inputs = (position for position in stmt.operands)
            self.arithmetic += times
            self.loads += times * sum(position.buffer.scope is not Scope.REGISTER for position in inputs)
            self.stores += times * (result.buffer.scope is not Scope.REGISTER)
        elif isinstance(stmt, Combine | Copy | BoxCopy | Warp):
            raise InternalError("expected a CPU program, got a GPU program")
        else:
            each = self.value(stmt.value, lane)
            self.arithmetic += max(times * each, self.waiting(statement, times, lane))
            for load in statement.loads:
                self.load(load, path, times, lane)
            if stmt.buffer.scope is not Scope.REGISTER:
                self.stores += times * self.accesses(stmt.buffer, stmt.index, lane, stored=True)

    def waiting(self, statement: Statement, times: float, lane: te.Var | None) -> float:
        """Instruction slots lost while sums wait for earlier ones."""
        reduced = reduced_loops(statement, self.born)
        stmt, path = statement.stmt, statement.path
        if not reduced or not isinstance(stmt, Store):
            return 0.0
        inside = path[path.index(reduced[-1]) + 1 :]
        chains = math.prod(loop.var.extent for loop in inside if loop.kind is not Kind.VECTOR)
        chains *= self.registers(stmt.value, lane)
        in_register = stmt.buffer.scope is Scope.REGISTER
        needed = self.machine.chains if in_register else self.in_a_cycle * _LATENCY_MEMORY
        return needed * times * self.registers(stmt.value, lane) / chains

    def load(self, load: te.Load, path: Sequence[EnclosingLoop], times: float, lane: te.Var | None) -> None:
        """Unrolled copies read the same element once."""
        buffer = load.source
        assert isinstance(buffer, Buffer)
        if buffer.scope is Scope.REGISTER:
            return
        moves = moves_of(load.indices[0])
        for loop in reversed(path):
            if loop.runs:
                break
            if loop.kind is Kind.UNROLL and loop.var not in moves:
                times /= loop.var.extent
        self.loads += times * self.accesses(buffer, load.indices[0], lane)

    def value(self, expr: te.Expr, lane: te.Var | None) -> float:
        """Instructions for computing `expr`, without loads. Offsets are left to the address units, and values that
        are uniform over the lanes to outer loops."""
        if isinstance(expr, te.Load):
            return 0.0
        if lane is not None and lane not in te.variables(expr) and not te.loads(expr):
            return 0.0
        count = 0.0
        if isinstance(expr, Across):
            count = 2 * math.log2(max(expr.lanes, 2))
        elif isinstance(expr, te.Call) and expr.dtype.short != "i64":
            each = _FUNCTION if expr.op in _FUNCTIONS else _LONG.get(expr.op, 1)
            count = float(each * self.registers(expr, lane))
        elif isinstance(expr, te.Cast | te.Select):
            count = float(self.registers(expr, lane))
        return count + sum(self.value(child, lane) for child in te.children(expr))

    def registers(self, expr: te.Expr, lane: te.Var | None) -> int:
        """The number of registers for a vector of its values."""
        lanes = 1 if lane is None else lane.extent
        return max(1, lanes * expr.dtype.bytes // self.machine.vector_bytes)

    def accesses(self, buffer: Buffer, index: te.Expr, lane: te.Var | None, *, stored: bool = False) -> int:
        if lane is None or coefficient(index, lane) == 0:
            return 1
        whole = max(1, lane.extent * buffer.dtype.bytes // self.machine.vector_bytes)
        stride = coefficient(index, lane)
        if stride == 1:
            return whole
        if stride is None or stored:
            return lane.extent  # one by one
        return int(min(lane.extent, whole * separate_accesses(stride)))
