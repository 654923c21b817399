"""What a matmul for tensor cores means, as a plain loop program: element by element, no tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tilewright import te
from tilewright.dtypes import DType
from tilewright.hw import host
from tilewright.loops.gpu.tensor import (
    ComputedOperand,
    MatrixOperand,
    Operand,
    ReducedOutput,
    TensorGemm,
    WindowOperand,
)
from tilewright.loops.ir import Block, For, If, Kind, Program, Scope, Stmt, Store, block, nest, walk_stmts
from tilewright.loops.tiling import with_values
from tilewright.measure.single import SingleKernel


def meaning(product: TensorGemm) -> Program:
    """The sums of one vector of results at a time, then what is done with them."""
    m = te.Var("place_m", product.m)
    vector = te.Var("place_n", product.n // product.lanes)
    batch = [(axis, Kind.SERIAL) for axis in product.batch]
    first = _first_of_tile(product)
    if product.reduced is None:
        body = block(_sums(product, m, vector), with_values(product.write, first))
        return Program(
            product.name, product.params, nest([*batch, (m, Kind.SERIAL), (vector, Kind.SERIAL)], body)
        )
    reduced = product.reduced
    if reduced.along:
        return _along(product, reduced, m)
    part, row = te.Var("part", product.m // reduced.size), te.Var("row", reduced.size)
    at = {m: part * reduced.size + row}
    added = block(_sums(product, m, vector), with_values(reduced.add, first))
    body = block(reduced.begin, nest([(row, Kind.SERIAL)], with_values(added, at)), reduced.write)
    return Program(product.name, product.params, nest([(part, Kind.SERIAL), (vector, Kind.SERIAL)], body))


def _along(product: TensorGemm, reduced: ReducedOutput, m: te.Var) -> Program:
    """Vector by vector of a part's columns, then the lanes of what was combined."""
    lanes = product.lanes
    part, vector = te.Var("part", product.n // reduced.size), te.Var("vector", reduced.size // lanes)
    position = te.Var("place_n", product.n // lanes)
    added = block(_sums(product, m, position), with_values(reduced.add, _first_of_tile(product)))
    at = {position: part * vector.extent + vector}
    zero, lane = te.as_index(0), te.Var("other", lanes)
    combiner = te.REDUCE_COMBINERS[reduced.kind]
    total = replace(reduced.total, scope=Scope.SCRATCH)

    def scratch(stmt: Stmt) -> Stmt:
        if isinstance(stmt, For):
            return replace(stmt, body=scratch(stmt.body))
        if isinstance(stmt, If):
            return replace(stmt, then=scratch(stmt.then))
        if isinstance(stmt, Block):
            return block(*map(scratch, stmt.stmts))
        assert isinstance(stmt, Store)

        def moved(node: te.Expr) -> te.Expr | None:
            is_total = isinstance(node, te.Load) and node.source == reduced.total
            return te.Load(total, node.indices) if is_total else None  # type: ignore[attr-defined]

        buffer = total if stmt.buffer == reduced.total else stmt.buffer
        return Store(buffer, stmt.index, te.rewrite(stmt.value, moved))

    both = te.call(combiner, te.Load(total, (zero,)), te.Load(total, (lane,)))
    folded = If(te.call("lt", zero, lane), Store(total, zero, both))
    body = block(
        scratch(reduced.begin),
        nest([(vector, Kind.SERIAL)], scratch(with_values(added, at))),
        nest([(lane, Kind.SERIAL)], folded),
        scratch(reduced.write),
    )
    return Program(product.name, product.params, nest([(m, Kind.SERIAL), (part, Kind.SERIAL)], body))


def _sums(product: TensorGemm, m: te.Var, vector: te.Var) -> Stmt:
    k, lane = te.Var("place_k", product.k), te.Var("v", product.lanes)
    column = vector * product.lanes + lane
    (before_a, left), (before_b, right) = (
        _element(operand, name, position, k)
        for operand, name, position in ((product.a, "left", m), (product.b, "right", column))
    )
    total = te.Load(product.sums, (lane,))
    term = block(*before_a, *before_b, Store(product.sums, lane, total + left * right))
    return block(
        nest([(lane, Kind.SERIAL)], Store(product.sums, lane, te.const(0.0, DType.F32))),
        nest([(k, Kind.SERIAL), (lane, Kind.SERIAL)], term),
    )


def computed(product: TensorGemm, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """What it means, as machine code of this processor: the expressions are those that become CUDA C++."""
    return SingleKernel(meaning(product), host(), threads=1)([array.reshape(-1) for array in arrays])


def _first_of_tile(product: TensorGemm) -> dict[te.Var, te.Expr]:
    tiles = product.tiles
    positions = (te.Var("sum_row", tiles.bm), te.Var("sum_vector", tiles.bn // product.lanes))
    return dict.fromkeys(positions, te.as_index(0))


def _element(operand: Operand, name: str, outer: te.Expr, k: te.Var) -> tuple[list[Stmt], te.Expr]:
    """(What comes before an element, the element)."""
    if isinstance(operand, ComputedOperand):
        return _computed(operand, name, outer, k)
    return [], _matrix(operand, outer, k) if isinstance(operand, MatrixOperand) else _window(operand)


def _computed(operand: ComputedOperand, name: str, outer: te.Expr, k: te.Var) -> tuple[list[Stmt], te.Expr]:
    """The vector that the element is in is read and computed, and it taken from there."""
    along = outer if operand.transposed else k
    number = along // operand.lanes
    at = {
        te.Var("outer", _extent(operand.read, "outer")): number if operand.transposed else outer,
        te.Var("at_k", _extent(operand.read, "at_k")): k if operand.transposed else number,
    }
    names = {
        buffer: replace(buffer, name=f"{name}_{buffer.name}", scope=Scope.SCRATCH)
        for buffer in (*operand.kept, operand.value)
    }

    def renamed(node: te.Expr) -> te.Expr | None:
        if isinstance(node, te.Load) and node.source in names:
            return te.Load(names[node.source], node.indices)
        return None

    def made(stmt: Stmt) -> Stmt:
        if isinstance(stmt, For):
            return replace(stmt, body=made(stmt.body))
        if isinstance(stmt, Block):
            return block(*map(made, stmt.stmts))
        assert isinstance(stmt, Store)
        value = te.substitute(te.rewrite(stmt.value, renamed), at)
        return Store(names[stmt.buffer], stmt.index, value)

    stmts = [made(operand.read), made(operand.compute)]
    value: te.Expr = te.cast(te.Load(names[operand.value], (along % operand.lanes,)), DType.F32)
    if operand.inside is not None:
        inside = te.substitute(operand.inside, at)
        return [If(inside, block(*stmts))], te.select(inside, value, 0.0)
    return stmts, value


def _extent(stmt: Stmt, name: str) -> int:
    found = {
        var.extent
        for each in walk_stmts(stmt)
        if isinstance(each, Store)
        for var in te.variables(each.value)
        if var.name == name
    }
    return found.pop() if found else 1


def _window(operand: WindowOperand) -> te.Expr:
    element = te.cast(te.Load(operand.buffer, (operand.offset + operand.row + operand.k_offset,)), DType.F32)
    conditions = [] if operand.inside is None else [operand.inside]
    for needed in operand.needed:
        allowed: te.Expr = te.const(False, DType.BOOL)
        for number, bit in enumerate(operand.seen):
            is_it = te.call("and", te.call("eq", needed, te.as_index(number)), bit)
            allowed = te.call("or", allowed, is_it)
        conditions.append(allowed)
    condition = te.all_of(conditions)
    return element if condition is None else te.select(condition, element, 0.0)


def _matrix(operand: MatrixOperand, outer: te.Expr, k: te.Expr) -> te.Expr:
    across, along = (k, outer) if operand.transposed else (outer, k)
    return te.cast(te.Load(operand.buffer, (operand.offset + across * operand.pitch + along,)), DType.F32)
