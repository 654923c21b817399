"""Kernels that do harm while they run: object code of programs that no verifier has seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import msgspec

from tilewright import te
from tilewright.hw import host
from tilewright.loops.ir import Block, Buffer, For, If, Kind, Program, Stmt, Store, block
from tilewright.measure.single import Built
from tilewright.runtime.plan import TensorSpec

# What each does, and as what it must be known.
KERNEL_FAULTS = {
    "segmentation fault": "crash",
    "hang": "timeout",
    "buffers without end": "memory",
    "one element": "wrong",
    "last row": "wrong",
    "one lane": "wrong",
    "canary after output": "wrong",
    "canary before output": "wrong",
    "canary of an input": "wrong",
    "written input": "wrong",
    "element left out": "wrong",
    "read beyond an input": "crash",
    "foreign function": "build",
}
_LITTLE = 1e-3


def harmful(program: Program, fault: str, rng: Random) -> Built:
    """The object code of `program` with the fault in it."""
    if fault == "buffers without end":
        built = Built.of(program, host(), "fast")
        *inputs, output = built.parameters
        endless = (*inputs, TensorSpec(output.name, output.dtype, (1 << 44,)))
        return msgspec.structs.replace(with_part(built, parameters=endless), parameters=endless)
    if fault == "foreign function":
        built = Built.of(program, host(), "fast")
        return with_part(built, code=built.parts[0].code.replace(b"\x7fELF", b"\x7fELK", 1))
    return Built.of(_broken(program, fault, rng), host(), "fast")


def with_part(built: Built, **changes: object) -> Built:
    """The same with its only kernel changed."""
    (part,) = built.parts
    return msgspec.structs.replace(built, parts=(msgspec.structs.replace(part, **changes),))


def _broken(program: Program, fault: str, rng: Random) -> Program:
    output = program.params[-1]
    first = program.params[0]
    one = te.const(1, output.dtype)
    beyond = rng.choice((0, 1, 5, 63))
    if fault == "segmentation fault":
        return _and_then(program, Store(output, te.as_index(1 << 42), one))
    if fault == "hang":
        return _and_then(program, _endless(output))
    if fault == "canary after output":
        return _and_then(program, Store(output, te.as_index(output.size + beyond), one))
    if fault == "canary before output":
        return _and_then(program, Store(output, te.as_index(-1 - beyond), one))
    if fault == "canary of an input":
        place = rng.choice((first.size + beyond, -1 - beyond))
        return _and_then(program, Store(first, te.as_index(place), te.const(1, first.dtype)))
    if fault == "written input":
        place = te.as_index(rng.randrange(first.size))
        return _and_then(program, Store(first, place, te.Load(first, (place,)) + te.const(1, first.dtype)))
    if fault == "read beyond an input":  # whatever is there, the result is the same
        found = te.call("lt", te.Load(first, (te.as_index(first.size),)), te.const(-3e38, first.dtype))
        kept = te.Load(output, (te.as_index(0),))
        return _and_then(program, Store(output, te.as_index(0), te.select(found, one, kept)))
    if fault == "one element":
        wrong = te.as_index(rng.randrange(output.size))
        return _outputs(program, lambda index: te.call("eq", index, wrong), little=True)
    if fault == "last row":
        return _outputs(
            program, lambda index: te.call("lt", te.as_index(output.size * 7 // 8), index), little=True
        )
    if fault == "one lane":
        lane = rng.randrange(4)
        return _outputs(program, lambda index: te.call("eq", index % 16, te.as_index(lane)), little=True)
    assert fault == "element left out"
    return _outputs(program, lambda index: te.call("eq", index, te.as_index(output.size // 2)), little=False)


def _and_then(program: Program, harm: Stmt) -> Program:
    """In every iteration of the parallel loop, after its work."""
    body = program.body
    if isinstance(body, For) and body.kind is Kind.PARALLEL:
        return replace(program, body=For(body.var, body.kind, block(body.body, harm)))
    return replace(program, body=block(body, harm))


def _endless(output: Buffer) -> Stmt:
    place = te.as_index(0)
    again = Store(output, place, te.Load(output, (place,)) + te.const(1, output.dtype))
    return For(te.Var("endless", 1 << 60), Kind.SERIAL, again)


def _outputs(program: Program, wrong: Callable[[te.Expr], te.Expr], little: bool) -> Program:
    """Every store to the output, in elements that are `wrong` a little too large, or NaN as they were before."""
    output = program.params[-1]

    def visit(stmt: Stmt) -> Stmt:
        if isinstance(stmt, Store) and stmt.buffer == output:
            off = stmt.value * te.const(1 + _LITTLE, output.dtype) + te.const(_LITTLE, output.dtype)
            changed = off if little else te.const(float("nan"), output.dtype)
            return replace(stmt, value=te.select(wrong(stmt.index), changed, stmt.value))
        return stmt

    return replace(program, body=_mapped(program.body, visit))


def _mapped(stmt: Stmt, change: Callable[[Stmt], Stmt]) -> Stmt:
    if isinstance(stmt, For):
        return For(stmt.var, stmt.kind, _mapped(stmt.body, change))
    if isinstance(stmt, Block):
        return Block(tuple(_mapped(child, change) for child in stmt.stmts))
    if isinstance(stmt, If):
        other = None if stmt.other is None else _mapped(stmt.other, change)
        return If(stmt.cond, _mapped(stmt.then, change), other)
    return change(stmt)
