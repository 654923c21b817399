"""Find the innermost statements of a program, and the memory that each touches inside each enclosing loop.

The term counter and the learned models both start from this.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tilewright import te
from tilewright.errors import InternalError
from tilewright.hw.cores import USUAL
from tilewright.loops.ir import (
    Await,
    Block,
    BoxCopy,
    Buffer,
    Combine,
    Commit,
    Copy,
    Fill,
    Filled,
    For,
    If,
    Invoke,
    Kind,
    Multiplied,
    Pop,
    Prefetch,
    Program,
    Push,
    Release,
    Roles,
    Scope,
    Slide,
    Stmt,
    Store,
    Transpose,
    Warp,
)

LINE = USUAL.line_bytes  # without a machine: features of a program alone

Innermost = Store | Prefetch | Transpose | Slide | Combine | Invoke | Copy | BoxCopy | Warp


@dataclass(frozen=True, eq=False)
class EnclosingLoop:
    """One loop of a program."""

    var: te.Var
    kind: Kind

    @property
    def runs(self) -> bool:
        """Whether its iterations run in sequence, not unrolled or in lanes."""
        return self.kind is Kind.SERIAL or self.kind is Kind.PARALLEL


@dataclass(eq=False)
class StatementAccess:
    """Reads and writes of one buffer by one statement. `moves`: the index step of each loop, and the number of
    distinct indices it gives."""

    buffer: Buffer
    moves: dict[te.Var, tuple[float, float]]
    count: int = 1
    reads: bool = False
    writes: bool = False
    width: int = 1  # neighbouring elements of one access
    # Distinct bytes, and bytes of their cache lines, inside each loop, the innermost first.
    unique: list[float] = field(default_factory=list)
    lines: list[float] = field(default_factory=list)


@dataclass(eq=False)
class Statement:
    """A statement. `path`: the enclosing loops, the outermost first."""

    stmt: Innermost
    path: tuple[EnclosingLoop, ...]
    executions: float
    loads: list[te.Load]
    accesses: list[StatementAccess]

    @property
    def target(self) -> Buffer | None:
        if isinstance(self.stmt, Invoke):
            return self.stmt.operands[0].buffer
        if isinstance(self.stmt, Warp):
            return self.stmt.operands[0][0]
        return None if isinstance(self.stmt, Prefetch) else self.stmt.buffer

    @property
    def accumulates(self) -> bool:
        return any(load.source == self.target for load in self.loads)


def statements_of(program: Program, line: int = LINE, threads: bool = False) -> list[Statement]:
    """The statements in program order, for a machine with this cache-line size. Each of two branches counts half.
    `threads`: the program may be one for threads of a GPU, whose copies and instructions of warps are statements."""
    return list(_statements(program.body, (), 1.0, line, threads))


def _statements(
    stmt: Stmt, path: tuple[EnclosingLoop, ...], executions: float, line: int, threads: bool
) -> Iterator[Statement]:
    if isinstance(stmt, For):
        loop = EnclosingLoop(stmt.var, stmt.kind)
        yield from _statements(stmt.body, (*path, loop), executions * stmt.var.extent, line, threads)
    elif isinstance(stmt, Block):
        for child in stmt.stmts:
            yield from _statements(child, path, executions, line, threads)
    elif isinstance(stmt, If):
        branches = [stmt.then] if stmt.other is None else [stmt.then, stmt.other]
        for branch in branches:
            yield from _statements(branch, path, executions / len(branches), line, threads)
    elif isinstance(stmt, Copy | Commit | Await | Warp | BoxCopy | Fill | Roles) and not threads:
        raise InternalError("expected a CPU program, got a GPU program")
    elif isinstance(stmt, Roles):
        for role in (stmt.producer, stmt.consumer):
            yield from _statements(role, path, executions, line, threads)
    elif isinstance(stmt, Fill):
        for copy in stmt.copies:
            yield _statement(copy, path, executions, line)
    elif isinstance(stmt, Commit | Await | Filled | Release | Multiplied | Push | Pop):
        return
    elif isinstance(stmt, Warp):  # all threads issue it together
        inside = (*path, EnclosingLoop(stmt.thread, Kind.THREAD))
        yield _statement(stmt, inside, executions * stmt.thread.extent, line)
    else:
        yield _statement(stmt, path, executions, line)


def _statement(stmt: Innermost, path: tuple[EnclosingLoop, ...], executions: float, line: int) -> Statement:
    accesses: dict[Buffer, StatementAccess] = {}
    loads: list[te.Load] = []
    if isinstance(stmt, Prefetch):
        _add(accesses, stmt.buffer, stmt.index, write=False)
    elif isinstance(stmt, Store):
        _find_loads(stmt.value, loads)
        for load in loads:
            _add(accesses, load.source, load.indices[0], write=False)
        _add(accesses, stmt.buffer, stmt.index, write=True)
    elif isinstance(stmt, Invoke):
        result, *inputs = stmt.operands
        for position in inputs:
            _add(accesses, position.buffer, position.index, write=False)
        if stmt.intrinsic.accumulates:
            loads.append(te.Load(result.buffer, (result.index,)))
            _add(accesses, result.buffer, result.index, write=False)
        _add(accesses, result.buffer, result.index, write=True)
    elif isinstance(stmt, Copy):
        _add(accesses, stmt.source, stmt.source_index, write=False, width=stmt.lanes)
        _add(accesses, stmt.buffer, stmt.index, write=True, width=stmt.lanes)
    elif isinstance(stmt, BoxCopy):
        count, source = stmt.box.rows * stmt.box.columns, stmt.source
        first = stmt.row * source.stride + stmt.column
        _add(accesses, source.buffer, first, write=False, width=count)
        _add(accesses, stmt.buffer, stmt.index, write=True, width=count)
    elif isinstance(stmt, Warp):
        sizes = [fragment.size for fragment in stmt.instruction.fragments]
        for number, ((buffer, index), size) in enumerate(zip(stmt.operands, sizes, strict=True)):
            _add(accesses, buffer, index, write=number == 0, width=size)
    inside_out = path[::-1]
    for access in accesses.values():
        access.unique, access.lines = _touched(access, inside_out, line)
    return Statement(stmt, path, executions, loads, list(accesses.values()))


def _find_loads(expr: te.Expr, found: list[te.Load]) -> None:
    if isinstance(expr, te.Load):
        found.append(expr)
        return
    for child in te.children(expr):
        _find_loads(child, found)


def _add(
    accesses: dict[Buffer, StatementAccess], source: te.Source, index: te.Expr, *, write: bool, width: int = 1
) -> None:
    assert isinstance(source, Buffer)
    if source.scope is Scope.REGISTER:
        return
    access = accesses.get(source.memory)
    if access is None:
        access = accesses[source.memory] = StatementAccess(source, moves_of(index), width, width=width)
    else:
        access.count += width
    access.reads, access.writes = access.reads or not write, access.writes or write


def moves_of(index: te.Expr) -> dict[te.Var, tuple[float, float]]:
    """(step, count) for each variable: the mean distance by which one iteration moves the index, and the number of
    distinct indices. Exact if the index is linear."""
    if isinstance(index, te.Var):
        return {index: (1.0, float(index.extent))} if index.extent > 1 else {}
    if isinstance(index, te.Const):
        return {}
    if isinstance(index, te.Call):
        if index.op == "mul":
            for factor, other in (index.args, index.args[::-1]):
                if isinstance(factor, te.Const):
                    by = float(factor.value)
                    return {var: (step * by, positions) for var, (step, positions) in moves_of(other).items()}
        elif index.op in ("floordiv", "mod") and isinstance(index.args[1], te.Const):
            return _divided(index.op, moves_of(index.args[0]), float(index.args[1].value))
    found: dict[te.Var, tuple[float, float]] = {}
    subtracts = isinstance(index, te.Call) and index.op == "sub"
    sums = isinstance(index, te.Call) and index.op in ("add", "sub")
    for number, child in enumerate(te.children(index)):
        for var, (step, positions) in moves_of(child).items():
            step = -step if subtracts and number == 1 else step
            before = found.get(var)
            if before is None:
                found[var] = (step, positions)
            elif sums:
                found[var] = (before[0] + step, max(before[1], positions))
            elif abs(step) > abs(before[0]):
                found[var] = (step, positions)
    return found


def _divided(
    op: str, moves: dict[te.Var, tuple[float, float]], divisor: float
) -> dict[te.Var, tuple[float, float]]:
    found = {}
    for var, (step, positions) in moves.items():
        if op == "floordiv":
            if abs(step) < divisor:
                positions = min(positions, math.floor(abs(step) * (positions - 1) / divisor) + 1.0)
            step = step / divisor
        elif step % divisor == 0:
            continue
        else:
            positions = min(positions, max(1.0, divisor / abs(step)))
        if positions > 1:
            found[var] = (step, positions)
    return found


def _touched(
    access: StatementAccess, inside_out: Sequence[EnclosingLoop], line: int
) -> tuple[list[float], list[float]]:
    size = access.buffer.dtype.bytes
    whole = access.buffer.size * float(size)
    whole_lines = line * math.ceil(whole / line)
    positions = span = float(access.width)
    run, runs = span * size, 1.0  # contiguous bytes, with gaps below a line, and the number of such runs
    unique, lines = [run], [max(run, float(line))]
    for loop in inside_out:
        move = access.moves.get(loop.var)
        if move is not None:
            step, count = abs(move[0]), move[1]
            reach = span + step * (count - 1)
            positions = positions * count if step >= span else min(positions * count, reach)
            span = reach
            if step * size <= max(run, line):
                run += step * size * (count - 1)
            else:
                runs *= count
        unique.append(min(positions * size, whole))
        lines.append(min(runs * max(float(line), run), whole_lines))
    return unique, lines


def shared_loops(one: Sequence[EnclosingLoop], other: Sequence[EnclosingLoop]) -> int:
    """How many outermost loops two statements share."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a is not b:
            break
        count += 1
    return count


def first_written(statements: Sequence[Statement]) -> dict[Buffer, tuple[EnclosingLoop, ...]]:
    """The loops around the statement that initialises each buffer."""
    born: dict[Buffer, tuple[EnclosingLoop, ...]] = {}
    for statement in statements:
        target = statement.target
        if target is not None and target not in born and not statement.accumulates:
            born[target] = statement.path
    return born


def reduced_loops(statement: Statement, born: dict[Buffer, tuple[EnclosingLoop, ...]]) -> list[EnclosingLoop]:
    """The loops in which a statement accumulates into one element: those since its initialisation that do not move
    it."""
    stmt = statement.stmt
    if not isinstance(stmt, Store) or not statement.accumulates:
        return []
    common = shared_loops(statement.path, born.get(stmt.buffer, ()))
    moved = moves_of(stmt.index)
    return [loop for loop in statement.path[common:] if loop.var not in moved]
