"""What a matrix product for tensor cores means, as a plain loop program: element by element, no tiles."""

from __future__ import annotations

from tilewright import te
from tilewright.dtypes import DType
from tilewright.loops.gpu.tensor import MatrixOperand, TensorProduct, WindowOperand
from tilewright.loops.ir import Kind, Program, Stmt, Store, block, nest


def meaning(product: TensorProduct) -> Program:
    """The sums of one vector of results at a time, then what is done with them."""
    m, k = te.Var("place_m", product.m), te.Var("place_k", product.k)
    vector, lane = te.Var("place_n", product.n // product.lanes), te.Var("v", product.lanes)
    term = _left(product.a, m, k) * _matrix(product.b, vector * product.lanes + lane, k)
    total = te.Load(product.sums, (lane,))
    body: Stmt = block(
        nest([(lane, Kind.SERIAL)], Store(product.sums, lane, te.const(0.0, DType.F32))),
        nest([(k, Kind.SERIAL), (lane, Kind.SERIAL)], Store(product.sums, lane, total + term)),
        product.write,
    )
    loops = [(axis, Kind.SERIAL) for axis in (*product.batch, m, vector)]
    return Program(product.name, product.params, nest(loops, body))


def _left(operand: MatrixOperand | WindowOperand, row: te.Var, k: te.Var) -> te.Expr:
    if isinstance(operand, MatrixOperand):
        return _matrix(operand, row, k)
    element = te.cast(te.Load(operand.buffer, (operand.offset + operand.row + operand.depth,)), DType.F32)
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
    across, along = (k, outer) if operand.turned else (outer, k)
    return te.cast(te.Load(operand.buffer, (operand.offset + across * operand.pitch + along,)), DType.F32)
