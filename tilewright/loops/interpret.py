"""The meaning of loop programs, executed literally: slow, and what generated code is tested against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tilewright import te
from tilewright.dtypes import DType
from tilewright.loops.ir import (
    Across,
    Block,
    Buffer,
    Combine,
    For,
    If,
    Kind,
    Prefetch,
    Program,
    Scope,
    Stmt,
    Transpose,
    local_buffers,
    thread_count,
)
from tilewright.te.scalars import SCALARS


def interpret_program(program: Program, inputs: Sequence[np.ndarray]) -> np.ndarray:
    """Run the program on flat copies of `inputs`; gives the flat output. Elements never written are NaN or -1."""
    memory = {
        buffer: np.ascontiguousarray(array).reshape(-1)
        for buffer, array in zip(program.params[:-1], inputs, strict=True)
    }
    output = program.params[-1]
    registers: dict[Buffer, np.ndarray] = {}
    threads = thread_count(program)
    for buffer in (output, *local_buffers(program)):
        empty = np.nan if buffer.dtype.is_float else -1
        if buffer.scope is Scope.REGISTER:
            registers[buffer] = np.full((threads, buffer.size), empty).astype(buffer.dtype.numpy)
        else:
            memory[buffer] = np.full(buffer.size, empty).astype(buffer.dtype.numpy)
    with np.errstate(all="ignore"):
        _Machine(memory, registers).run(program.body, {})
    return memory[output]


class _Machine:
    def __init__(self, shared: dict[Buffer, np.ndarray], registers: dict[Buffer, np.ndarray]) -> None:
        self.shared, self.registers = shared, registers
        self.thread = 0

    def memory(self, buffer: Buffer) -> np.ndarray:
        if buffer.scope is not Scope.REGISTER:
            return self.shared[buffer]
        own: np.ndarray = self.registers[buffer][self.thread]
        return own

    def run(self, stmt: Stmt, env: dict[te.Var, int]) -> None:
        if isinstance(stmt, Block):
            for child in stmt.stmts:
                self.run(child, env)
        elif isinstance(stmt, For):
            for value in range(stmt.var.extent):
                if stmt.kind is Kind.THREAD:
                    self.thread = value
                self.run(stmt.body, {**env, stmt.var: value})
        elif isinstance(stmt, If):
            if self.value(stmt.cond, env):
                self.run(stmt.then, env)
            elif stmt.other is not None:
                self.run(stmt.other, env)
        elif isinstance(stmt, Transpose):
            tile = self.memory(stmt.buffer)[: stmt.rows * stmt.columns]
            tile[:] = tile.reshape(stmt.rows, stmt.columns).T.flatten()
        elif isinstance(stmt, Combine):
            values = self.registers[stmt.buffer][:, stmt.offset]
            groups = values.reshape(-1, stmt.group)
            groups[:] = np.array([_pairwise(stmt.kind, group) for group in groups])[:, None]
        elif not isinstance(stmt, Prefetch):
            index = int(self.value(stmt.index, env))
            if not 0 <= index < stmt.buffer.size:
                raise IndexError(f"{stmt.buffer.name}[{index}] of {stmt.buffer.size}")
            self.memory(stmt.buffer)[index] = self.value(stmt.value, env)

    def value(self, expr: te.Expr, env: dict[te.Var, int]) -> Any:
        if isinstance(expr, te.Const):
            return np.asarray(expr.value).astype(expr.dtype.numpy)[()]
        if isinstance(expr, te.Var):
            return np.int64(env.get(expr, 0))
        if isinstance(expr, te.Load):
            assert isinstance(expr.source, Buffer)
            index = int(self.value(expr.indices[0], env))
            if not 0 <= index < expr.source.size:
                raise IndexError(f"{expr.source.name}[{index}] of {expr.source.size}")
            return self.elements(expr.source)[index]
        if isinstance(expr, te.Select):
            return self.value(expr.then if self.value(expr.cond, env) else expr.other, env)
        if isinstance(expr, te.Cast):
            return _convert(self.value(expr.value, env), expr.dtype)
        if isinstance(expr, Across):
            return self.across(expr)
        assert isinstance(expr, te.Call)
        arguments = [self.value(arg, env) for arg in expr.args]
        return np.asarray(SCALARS[expr.op].numpy(*arguments)).astype(expr.dtype.numpy)[()]

    def elements(self, buffer: Buffer) -> np.ndarray:
        if buffer.of is None:
            return self.memory(buffer)
        whole = buffer.size * buffer.dtype.bytes // buffer.of.dtype.bytes
        return self.memory(buffer.of)[:whole].view(buffer.dtype.numpy)

    def across(self, expr: Across) -> Any:
        return _pairwise(expr.kind, self.memory(expr.buffer)[expr.offset : expr.offset + expr.lanes])


def _pairwise(kind: str, vector: np.ndarray) -> Any:
    combine = SCALARS[te.REDUCE_COMBINERS[kind]].numpy
    while len(vector) > 1:
        half = len(vector) // 2
        vector = combine(vector[:half], vector[half:])
    return vector[0]


def _convert(value: Any, dtype: DType) -> Any:
    if dtype is DType.BOOL:
        return np.bool_(value != 0)
    return np.asarray(value).astype(dtype.numpy)[()]
