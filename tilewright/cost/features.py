"""Extract features of a loop nest, statement by statement, for learned models.

The 164 numbers of a statement are Ansor's: what it computes and how its loops are annotated (57), the five buffers
with the most traffic (18 each), operations per byte from the innermost loop outwards (10), the memory it allocates
(4) and its context (3). Magnitudes are logarithms. Programs for GPUs have the same features: a statement runs in all
threads of all blocks, copies to shared memory and instructions of warps are statements, and `GPU_FEATURES` says what
else such a statement does. On a CPU, the features of thread bindings and GPU_FEATURES are zero.

Two things differ from Ansor, because programs here are lower-level: registers are not buffers, and reuse is counted
only in serial loops, not in unrolled or vector loops.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tilewright import te
from tilewright.cost.accesses import (
    LINE,
    EnclosingLoop,
    Statement,
    StatementAccess,
    first_written,
    reduced_loops,
    shared_loops,
    statements_of,
)
from tilewright.loops.ir import (
    Across,
    Await,
    BoxCopy,
    Buffer,
    Combine,
    Copy,
    Invoke,
    Kind,
    Program,
    Scope,
    Slide,
    Store,
    Transpose,
    Warp,
    rings_of,
    walk_stmts,
)

BUFFERS = 5
CURVE = 10  # points of operations per byte

# -- feature names
# ----------------------------------------------------------------------------------------------------

_OPERATIONS = ("mad", "addsub", "mul", "divmod", "cmp", "math", "other")
_POSITIONS = (
    "none",
    "inner_spatial",
    "middle_spatial",
    "outer_spatial",
    "inner_reduce",
    "middle_reduce",
    "outer_reduce",
    "mixed",
)
_ANNOTATIONS = ("vector", "unroll", "parallel")
_BINDINGS = ("block_x", "block_y", "block_z", "thread_x", "thread_y", "thread_z", "virtual_thread")
_OF_BUFFER = (
    "reads",
    "writes",
    "reads_and_writes",
    "bytes",
    "unique_bytes",
    "lines",
    "unique_lines",
    "reused_in_loop",
    "reused_in_order",
    "not_reused",
    "reuse_distance_iterations",
    "reuse_distance_bytes",
    "reuse_count",
    "bytes_per_reuse",
    "unique_bytes_per_reuse",
    "lines_per_reuse",
    "unique_lines_per_reuse",
    "stride",
)

COMPUTATION = (
    *(f"float_{kind}" for kind in _OPERATIONS),
    *(f"int_{kind}" for kind in _OPERATIONS),
    "bool_ops",
    "selects",
    *(
        f"{annotation}_{what}"
        for annotation in _ANNOTATIONS
        for what in ("loops", "product", "length", *(f"at_{position}" for position in _POSITIONS))
    ),
    "on_gpu",
    *_BINDINGS,
)
FEATURES: tuple[str, ...] = (
    *COMPUTATION,
    *(f"buffer{number}_{what}" for number in range(BUFFERS) for what in _OF_BUFFER),
    *(f"intensity{number}" for number in range(CURVE)),
    "allocated_bytes",
    "allocated_outside",
    "allocated_inside",
    "allocated_total",
    "executions",
    "loops",
    "written_out",
)

GPU_FEATURES: tuple[str, ...] = (
    "asynchronous_bytes",  # that a copy moves to shared memory while threads go on
    "shared_read_bytes",
    "shared_written_bytes",
    "warp_instruction",
    "tensor_operations",
    "combined_threads",  # over which a value is reduced
    "groups_in_flight",  # of asynchronous copies, in the whole program
    "cluster",
)

_KINDS = {
    **dict.fromkeys(("fma", "dot4"), "mad"),
    **dict.fromkeys(("add", "sub"), "addsub"),
    "mul": "mul",
    **dict.fromkeys(("div", "floordiv", "mod", "fmod"), "divmod"),
    **dict.fromkeys(("min", "max", "eq", "ne", "lt", "le"), "cmp"),
    **dict.fromkeys(
        ("sqrt", "rsqrt", "exp", "exp2_nonpositive", "exp2_rough", "expm1",
         "log", "log1p", "sin", "cos", "tanh", "erf", "pow", "atan2"),
        "math",
    ),
}  # fmt: skip
_KIND_AT = {kind: at for at, kind in enumerate(_OPERATIONS)}
_BOOL_AT, _SELECT_AT = 2 * len(_OPERATIONS), 2 * len(_OPERATIONS) + 1


# -- the features of a program ----------------------------------------------------------------------------------------


def statement_tokens(program: Program, most: int) -> np.ndarray:
    """FEATURES and GPU_FEATURES of the `most` statements that run most often, in program order."""
    statements = statements_of(program, threads=True)
    if not statements:
        return np.zeros((0, len(FEATURES) + len(GPU_FEATURES)))
    context = _Context.of(statements)
    heaviest = sorted(range(len(statements)), key=lambda at: (-_weight(statements[at]), at))[:most]
    in_flight = max(
        [stmt.pending + 1 for stmt in walk_stmts(program.body) if isinstance(stmt, Await)]
        + [ring.slots - 1 for ring in rings_of(program)],
        default=0,
    )
    rows = [
        _row(statements[at], context) + _gpu_row(statements[at], in_flight, program.cluster)
        for at in sorted(heaviest)
    ]
    return _logarithms(np.array(rows))


def _weight(statement: Statement) -> float:
    """The order of statements: those of instructions first, then by how often they run."""
    return statement.executions * (1024.0 if isinstance(statement.stmt, Warp | Invoke) else 1.0)


def _gpu_row(statement: Statement, in_flight: int, cluster: int) -> list[float]:
    stmt = statement.stmt
    copied = stmt.lanes * stmt.buffer.dtype.bytes if isinstance(stmt, Copy) else 0
    copied = stmt.box.bytes if isinstance(stmt, BoxCopy) else copied
    shared = [access for access in statement.accesses if access.buffer.scope is Scope.SCRATCH]
    moved = [access.count * access.buffer.dtype.bytes for access in shared]
    read = sum(size for size, access in zip(moved, shared, strict=True) if access.reads)
    written = sum(size for size, access in zip(moved, shared, strict=True) if access.writes)
    operations = 0.0
    if isinstance(stmt, Warp) and "mma" in stmt.instruction.name:
        left, result = stmt.instruction.fragments[1].tensor, stmt.instruction.fragments[0].tensor
        operations = 2.0 * math.prod(result.shape) * left.shape[-1] / stmt.threads
    return [
        copied * statement.executions,
        read * statement.executions,
        written * statement.executions,
        float(isinstance(stmt, Warp)),
        operations * statement.executions,
        float(stmt.group) if isinstance(stmt, Combine) else 0.0,
        float(in_flight),
        float(cluster - 1),
    ]


PROGRAM_FEATURES: tuple[str, ...] = (
    *(f"main.{name}" for name in FEATURES),
    *(f"all.{name}" for name in FEATURES),
    "statements",
)


def program_features(program: Program) -> np.ndarray:
    """A vector of fixed length: the features of the heaviest statement, the sums over all statements, and their
    number.

    Sums are taken before the logarithm.
    """
    rows = _rows(program)
    main = rows[int(np.argmax(rows[:, _EXECUTIONS_AT]))]
    return _logarithms(np.concatenate([main, rows.sum(axis=0), [float(len(rows))]]))


_EXECUTIONS_AT = FEATURES.index("executions")


def _rows(program: Program) -> np.ndarray:
    statements = statements_of(program)
    if not statements:
        return np.zeros((1, len(FEATURES)))
    context = _Context.of(statements)
    return np.array([_row(statement, context) for statement in statements])


def _logarithms(values: np.ndarray) -> np.ndarray:
    return np.sign(values) * np.log2(1 + np.abs(values))


@dataclass(frozen=True)
class _Context:
    """What a statement's features need to know about the others: where each local buffer is first written, how many
    statements access a buffer, and how many copies of statements are in the innermost loop around each."""

    born: dict[Buffer, tuple[EnclosingLoop, ...]]
    users: dict[Buffer, int]
    copies: dict[EnclosingLoop | None, float]

    @classmethod
    def of(cls, statements: Sequence[Statement]) -> _Context:
        users: dict[Buffer, int] = {}
        copies: dict[EnclosingLoop | None, float] = {}
        for statement in statements:
            for access in statement.accesses:
                users[access.buffer] = users.get(access.buffer, 0) + 1
            around, written = _innermost_running(statement.path)
            copies[around] = copies.get(around, 0.0) + written
        return cls(first_written(statements), users, copies)


def _innermost_running(path: Sequence[EnclosingLoop]) -> tuple[EnclosingLoop | None, float]:
    """(loop, copies): the innermost loop that is not unrolled, and the copies of the statement in it."""
    written = 1.0
    for loop in reversed(path):
        if loop.runs:
            return loop, written
        if loop.kind is Kind.UNROLL:
            written *= loop.var.extent
    return None, written


def _operations(statement: Statement) -> list[float]:
    """The operations of one execution, in the order of COMPUTATION's first names."""
    counts = [0.0] * (_SELECT_AT + 1)
    stmt = statement.stmt
    if isinstance(stmt, Store):
        _count(stmt.value, counts)
    elif isinstance(stmt, Transpose):
        counts[_KIND_AT["other"]] = float(stmt.rows * stmt.columns)
    elif isinstance(stmt, Invoke):
        counts[_KIND_AT["other"]] = float(len(stmt.operands[0].offsets))
    elif isinstance(stmt, Slide):
        counts[_KIND_AT["other"]] = float(stmt.lanes)
    elif isinstance(stmt, Combine):
        counts[_KIND_AT["other"]] = math.log2(stmt.group)
    elif isinstance(stmt, Warp) and "mma" in stmt.instruction.name:
        result, left = (fragment.tensor for fragment in stmt.instruction.fragments[:2])
        counts[_KIND_AT["mad"]] = math.prod(result.shape) * left.shape[-1] / stmt.threads
    return counts


def _count(expr: te.Expr, counts: list[float]) -> None:
    """Operations of one evaluation, without index arithmetic, which the address units do."""
    if isinstance(expr, te.Load | te.Const | te.Var):
        return
    first = 0 if expr.dtype.is_float else len(_OPERATIONS)
    if isinstance(expr, te.Call):
        operand = expr.args[0].dtype
        if operand.short == "bool":
            counts[_BOOL_AT] += 1
        else:
            first = 0 if operand.is_float else len(_OPERATIONS)
            counts[first + _KIND_AT[_KINDS.get(expr.op, "other")]] += 1
    elif isinstance(expr, te.Select):
        counts[_SELECT_AT] += 1
    elif isinstance(expr, Across):
        counts[first + _KIND_AT["addsub" if expr.kind == "sum" else "cmp"]] += expr.lanes - 1
    else:
        counts[first + _KIND_AT["other"]] += 1
    for child in te.children(expr):
        _count(child, counts)


# -- a statement's row ------------------------------------------------------------------------------------------------


def _row(statement: Statement, context: _Context) -> list[float]:
    inside_out = statement.path[::-1]
    executions = statement.executions
    runs = [1.0]  # executions inside each loop, innermost first
    for loop in inside_out:
        runs.append(runs[-1] * loop.var.extent)
    counts = _operations(statement)
    together = [
        sum(access.unique[depth] for access in statement.accesses) for depth in range(len(inside_out) + 1)
    ]
    row = [count * executions for count in counts]
    row += _annotations(statement, context)
    row += _bindings(statement)
    row += _buffers(statement, context, runs, together)
    row += _curve(sum(counts), runs, together)
    row += _allocation(statement, context)
    around, _ = _innermost_running(statement.path)
    row += [executions, float(len(statement.path)), context.copies[around]]
    return row


def _annotations(statement: Statement, context: _Context) -> list[float]:
    path = statement.path
    reduced = reduced_loops(statement, context.born)
    spatial = [loop for loop in path if loop not in reduced]
    row: list[float] = []
    for kind in (Kind.VECTOR, Kind.UNROLL, Kind.PARALLEL):
        loops = [loop for loop in path if loop.kind is kind]
        position = "none"
        if loops:
            inner = loops[-1]
            among, what = (spatial, "spatial") if inner in spatial else (reduced, "reduce")
            slot = among.index(inner)
            where = "inner" if slot == len(among) - 1 else "outer" if slot == 0 else "middle"
            position = f"{where}_{what}"
        row += [
            float(len(loops)),
            float(math.prod(loop.var.extent for loop in loops)) if loops else 0.0,
            float(loops[-1].var.extent) if loops else 0.0,
        ]
        row += [float(position == name) for name in _POSITIONS]
    return row


def _bindings(statement: Statement) -> list[float]:
    threads = math.prod(loop.var.extent for loop in statement.path if loop.kind is Kind.THREAD)
    if not any(loop.kind is Kind.THREAD for loop in statement.path):
        return [0.0] * (1 + len(_BINDINGS))
    blocks = math.prod(loop.var.extent for loop in statement.path if loop.kind is Kind.PARALLEL)
    return [1.0, float(blocks), 1.0, 1.0, float(threads), 1.0, 1.0, 1.0]


def _buffers(
    statement: Statement, context: _Context, runs: list[float], together: list[float]
) -> list[float]:
    inside_out = statement.path[::-1]
    described = []
    for access in statement.accesses:
        moved = statement.executions * access.count * access.buffer.dtype.bytes
        innermost = next(
            (abs(access.moves[loop.var][0]) for loop in inside_out if loop.var in access.moves), 0.0
        )
        lines = moved / access.buffer.dtype.bytes * min(1.0, innermost * access.buffer.dtype.bytes / LINE)
        unique, unique_lines = access.unique[-1], access.lines[-1] / LINE
        kind, iterations, bytes_between, count = _reuse(access, inside_out, runs, together, context)
        shared = [value / count if count else 2 * value for value in (moved, unique, lines, unique_lines)]
        described.append(
            [
                float(access.reads and not access.writes),
                float(access.writes and not access.reads),
                float(access.reads and access.writes),
                moved,
                unique,
                lines,
                unique_lines,
                float(kind == "loop"),
                float(kind == "order"),
                float(kind == "none"),
                iterations,
                bytes_between,
                count,
                *shared,
                innermost,
            ]
        )
    described.sort(key=lambda values: (-values[6], -values[3]))  # those with the most lines first
    row = [value for values in described[:BUFFERS] for value in values]
    return row + [0.0] * (BUFFERS * len(_OF_BUFFER) - len(row))


def _reuse(
    access: StatementAccess,
    inside_out: Sequence[EnclosingLoop],
    runs: list[float],
    together: list[float],
    context: _Context,
) -> tuple[str, float, float, float]:
    """(kind, iterations between, bytes between, count) for the nearest loop that reuses the same bytes."""
    for depth, loop in enumerate(inside_out):
        if loop.runs and loop.var not in access.moves:
            return "loop", runs[depth], together[depth], float(loop.var.extent)
    others = context.users[access.buffer] - 1
    if others > 0:
        return "order", runs[-1], together[-1], float(others)
    return "none", 0.0, 0.0, 0.0


def _curve(operations: float, runs: list[float], together: list[float]) -> list[float]:
    """Operations per byte touched, at evenly spaced points (in log executions) from the innermost loop to the whole
    program."""
    if not operations or not together[-1]:
        return [0.0] * CURVE
    at = [math.log2(run) for run in runs]
    values = [math.log2(1 + operations * run / touched) for run, touched in zip(runs, together, strict=True)]
    found = []
    for number in range(CURVE):
        wanted = at[-1] * number / (CURVE - 1)
        above = min(bisect_left(at, wanted), len(at) - 1)
        below = max(0, above - 1)
        width = at[above] - at[below]
        share = (wanted - at[below]) / width if width else 0.0
        found.append(2 ** (values[below] + share * (values[above] - values[below])) - 1)
    return found


def _allocation(statement: Statement, context: _Context) -> list[float]:
    target = statement.target
    if target is None or target.scope is Scope.GLOBAL:
        return [0.0] * 4
    size = float(target.size * target.dtype.bytes)
    common = shared_loops(statement.path, context.born.get(target, ()))
    outside = float(math.prod(loop.var.extent for loop in statement.path[:common]))
    return [size, outside, statement.executions / outside, size * outside]
