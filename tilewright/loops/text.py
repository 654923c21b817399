"""The text form of loop programs, for people and for fingerprints: equal text means equal code."""

from __future__ import annotations

from tilewright.loops.ir import (
    Across,
    Await,
    Block,
    BoxCopy,
    Combine,
    Commit,
    Copy,
    Fill,
    Filled,
    For,
    If,
    Invoke,
    Location,
    Multiplied,
    Pop,
    Prefetch,
    Program,
    Push,
    Release,
    Roles,
    Slide,
    Stmt,
    Transpose,
    Warp,
    local_buffers,
)
from tilewright.te import Call, Cast, Const, Expr, Load, Reduce, Select, Var
from tilewright.te.scalars import SCALARS


def print_expr(expr: Expr) -> str:
    if isinstance(expr, Const):
        return (
            repr(expr.value) if expr.dtype.short in ("i64", "bool") else f"{expr.value!r}{expr.dtype.short}"
        )
    if isinstance(expr, Var):
        return expr.name
    if isinstance(expr, Load):
        return f"{expr.source.name}[{', '.join(map(print_expr, expr.indices))}]"
    if isinstance(expr, Across):
        return f"across_{expr.kind}({expr.buffer.name}[{expr.offset}:{expr.offset + expr.lanes}])"
    if isinstance(expr, Cast):
        return f"{expr.dtype.short}({print_expr(expr.value)})"
    if isinstance(expr, Select):
        return f"({print_expr(expr.then)} if {print_expr(expr.cond)} else {print_expr(expr.other)})"
    if isinstance(expr, Reduce):
        axes = ", ".join(f"{axis.name}<{axis.extent}" for axis in expr.axes)
        return f"{expr.kind}[{axes}]({print_expr(expr.body)})"
    assert isinstance(expr, Call)
    scalar = SCALARS[expr.op]
    args = [print_expr(arg) for arg in expr.args]
    if scalar.symbol:
        return f"({f' {scalar.symbol} '.join(args)})"
    return f"{expr.op}({', '.join(args)})"


def print_program(program: Program) -> str:
    params = ", ".join(f"{b.name}: {b.dtype.short}[{b.size}]" for b in program.params)
    together = f", {program.together} blocks together" if program.together > 1 else ""
    lines = [f"program {program.name}({params}){together}"]
    lines += [f"  {b.scope.value} {b.name}: {b.dtype.short}[{b.size}]" for b in local_buffers(program)]

    def visit(stmt: Stmt, depth: int) -> None:
        pad = "  " * depth
        if isinstance(stmt, For):
            lines.append(f"{pad}{stmt.kind.value} {stmt.var.name} < {stmt.var.extent}:")
            visit(stmt.body, depth + 1)
        elif isinstance(stmt, Block):
            for child in stmt.stmts:
                visit(child, depth)
        elif isinstance(stmt, If):
            lines.append(f"{pad}if {print_expr(stmt.cond)}:")
            visit(stmt.then, depth + 1)
            if stmt.other is not None:
                lines.append(f"{pad}else:")
                visit(stmt.other, depth + 1)
        elif isinstance(stmt, Prefetch):
            purpose = " to write" if stmt.written else ""
            lines.append(f"{pad}prefetch L{stmt.level} {stmt.buffer.name}[{print_expr(stmt.index)}]{purpose}")
        elif isinstance(stmt, Transpose):
            lines.append(
                f"{pad}transpose {stmt.buffer.name}[{stmt.rows}, {stmt.columns}] in {stmt.lanes} lanes"
            )
        elif isinstance(stmt, Slide):
            following = f"{stmt.following.name}[{stmt.position}]"
            lines.append(
                f"{pad}slide {stmt.buffer.name} before {following} by {stmt.begin} of {stmt.lanes} lanes"
            )
        elif isinstance(stmt, Combine):
            lines.append(
                f"{pad}combine_{stmt.kind} {stmt.buffer.name}[{stmt.offset}] over {stmt.group} threads"
            )
        elif isinstance(stmt, Copy):
            guard = "" if stmt.cond is None else f" if {print_expr(stmt.cond)}"
            lines.append(
                f"{pad}copy {stmt.buffer.name}[{print_expr(stmt.index)}] <-"
                f" {stmt.source.name}[{print_expr(stmt.source_index)}] x {stmt.lanes}{guard}"
            )
        elif isinstance(stmt, Commit):
            lines.append(f"{pad}commit")
        elif isinstance(stmt, Await):
            lines.append(f"{pad}await all but {stmt.pending}")
        elif isinstance(stmt, BoxCopy):
            lines.append(pad + _box_copy(stmt))
        elif isinstance(stmt, Fill):
            lines.append(f"{pad}fill {stmt.ring.name}[{stmt.ring.slots}], {print_expr(stmt.number)}:")
            lines.extend("  " * (depth + 1) + _box_copy(copy) for copy in stmt.copies)
        elif isinstance(stmt, Filled | Release):
            word = "await" if isinstance(stmt, Filled) else "release"
            lines.append(f"{pad}{word} {stmt.ring.name}, {print_expr(stmt.number)}")
        elif isinstance(stmt, Multiplied):
            lines.append(f"{pad}multiplied all but {stmt.pending}")
        elif isinstance(stmt, Roles):
            counts = stmt.registers or ("", "")
            for name, role, count in zip(
                ("producer", "consumer"), (stmt.producer, stmt.consumer), counts, strict=True
            ):
                lines.append(f"{pad}{name}{f' with {count} registers' if count else ''}:")
                visit(role, depth + 1)
        elif isinstance(stmt, Push | Pop):
            word = "push" if isinstance(stmt, Push) else "pop"
            lines.append(f"{pad}{word} {stmt.source} -> {stmt.target}, queue {stmt.queue}")
        elif isinstance(stmt, Warp):
            operands = ", ".join(
                f"{b.name}[{print_expr(index)}]{f' in rows of {pitch}' if pitch else ''}"
                for (b, index), pitch in zip(stmt.operands, stmt.operand_pitches, strict=True)
            )
            lines.append(f"{pad}{'start ' * stmt.running}{stmt.instruction.name} {operands}")
        elif isinstance(stmt, Invoke):
            operands = ", ".join(map(_location, stmt.operands))
            lines.append(f"{pad}{stmt.intrinsic.name}@{stmt.intrinsic.digest} {operands}")
        else:
            arrow = "<-" if stmt.streamed else "="
            lines.append(
                f"{pad}{stmt.buffer.name}[{print_expr(stmt.index)}] {arrow} {print_expr(stmt.value)}"
            )

    visit(program.body, 1)
    return "\n".join(lines) + "\n"


def _box_copy(copy: BoxCopy) -> str:
    source, box = copy.source, copy.box
    first = f"{source.buffer.name}[{print_expr(copy.row)}, {print_expr(copy.column)}]"
    matrix = f"[{source.rows}, {source.columns}] by {source.stride}"
    word = "copy together" if copy.shared else "copy"
    return f"{word} {copy.buffer.name}[{print_expr(copy.index)}] <- {first} x [{box.rows}, {box.columns}] of {matrix}"


def _location(location: Location) -> str:
    lanes = "" if location.is_run else f" at {', '.join(map(str, location.offsets))}"
    return f"{location.buffer.name}[{print_expr(location.index)}] x {len(location.offsets)}{lanes}"
