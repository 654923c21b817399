"""What the tests of operators share: a case (an operator applied to something), and the two questions asked of it.

Does the lowering, interpreted, give what the oracle gives? Does the oracle give what PyTorch gives?
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from tilewright import te
from tilewright.dtypes import DType
from tilewright.graph.ir import Node, TensorType, input_node
from tilewright.graph.op import application, apply, op_of
from tilewright.graph.oracle import evaluate_node
from tilewright.te.interpret import interpret

F64, F32, F16, BF16 = DType.F64, DType.F32, DType.F16, DType.BF16
I64, I32, I16, I8, U8, BOOL = DType.I64, DType.I32, DType.I16, DType.I8, DType.U8, DType.BOOL
FLOATS = (F64, F32, F16, BF16)
INTS = (I64, I32, I16, I8, U8)

NAN, INF = float("nan"), float("inf")

# Relative and absolute, of results rounded to the type: sums of a few dozen terms of size about 1.
TOLERANCE = {F64: (1e-10, 1e-11), F32: (3e-5, 1e-5), F16: (3e-3, 1e-3), BF16: (2e-2, 1e-2)}


@dataclass(frozen=True)
class Case:
    """`op` applied to operands: a shape stands for random values of the tested type, a float array is converted to it,
    any other array is used as it is. `torch` is the same computation in PyTorch."""

    op: str
    operands: Sequence[tuple[int, ...] | np.ndarray]
    attrs: dict[str, Any] = field(default_factory=dict)
    torch: Callable[..., torch.Tensor] | None = None
    dtypes: Sequence[DType] = FLOATS

    def arrays(self, dtype: DType) -> list[np.ndarray]:
        rng = np.random.default_rng(0)
        return [
            random_array(rng, operand, dtype) if isinstance(operand, tuple) else converted(operand, dtype)
            for operand in self.operands
        ]

    def __str__(self) -> str:
        shapes = [op if isinstance(op, tuple) else f"{op.dtype}{list(op.shape)}" for op in self.operands]
        attrs = ",".join(f"{name}={value}" for name, value in self.attrs.items())
        return f"{self.op}({', '.join(map(str, shapes))}; {attrs})".replace(" ", "")


def converted(array: np.ndarray, dtype: DType) -> np.ndarray:
    with np.errstate(all="ignore"):
        return array.astype(dtype.numpy) if array.dtype == np.float64 and dtype.is_float else array


def random_array(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType) -> np.ndarray:
    if dtype is BOOL:
        return np.asarray(rng.random(shape) < 0.5)
    if dtype.is_float:
        return np.asarray(rng.standard_normal(shape)).astype(dtype.numpy)
    low = 0 if dtype is U8 else -9
    return np.asarray(rng.integers(low, 10, shape)).astype(dtype.numpy)


def node_of(op: str, arrays: Sequence[np.ndarray], attrs: dict[str, Any]) -> Node:
    inputs = [
        input_node(position, TensorType(array.shape, DType.of(array)))
        for position, array in enumerate(arrays)
    ]
    return apply(op, *inputs, **attrs)


def lowered(node: Node) -> tuple[te.Tensor, list[te.Tensor]]:
    record = op_of(node.op)
    assert record.lower is not None
    inputs = [te.Tensor(f"x{n}", operand.shape, operand.dtype) for n, operand in enumerate(node.inputs)]
    return record.lower(application(node), inputs), inputs


def check_lowering(op: str, arrays: Sequence[np.ndarray], **attrs: Any) -> np.ndarray:
    """The interpreted lowering, which has been found equal to the oracle and well formed."""
    node = node_of(op, arrays, attrs)
    output, inputs = lowered(node)
    check_form(output, node.type)
    result = interpret(output, dict(zip(inputs, arrays, strict=True)))
    expected = evaluate_node(node, arrays, precise=False)
    assert result.dtype == expected.dtype == node.dtype.numpy
    assert_close(result, expected, node.dtype)
    return result


def check_form(output: te.Tensor, type: TensorType) -> None:
    """A body is an expression, or one reduction at the top, of a type in which there is arithmetic."""
    assert (output.shape, output.dtype) == (type.shape, type.dtype)
    for stage in te.stages(output):
        body = stage.body
        if isinstance(body, te.Reduce):
            assert body.axes and not body.dtype.is_half
            body = body.body
        bound = {*stage.axes, *(stage.reduction.axes if stage.reduction else ())}
        assert te.variables(body) <= bound, "a variable that no axis binds"
        for part in te.walk(body):
            assert not isinstance(part, te.Reduce), "a reduction inside an expression"
            assert not isinstance(part, te.Call) or not part.dtype.is_half, "arithmetic in a storage type"
            if isinstance(part, te.Load):
                assert isinstance(part.source, te.Tensor)
                assert len(part.indices) == len(part.source.shape)
                assert all(index.dtype is I64 for index in part.indices)


def oracle_of(op: str, arrays: Sequence[np.ndarray], **attrs: Any) -> np.ndarray:
    return evaluate_node(node_of(op, arrays, attrs), arrays, precise=True)


def check_torch(result: np.ndarray, expected: torch.Tensor) -> None:
    assert result.shape == tuple(expected.shape)
    if result.dtype.kind == "f":
        assert_close(result, expected.double().numpy(), F64)
    else:
        np.testing.assert_array_equal(result, expected.numpy())


def assert_close(result: np.ndarray, expected: np.ndarray, dtype: DType) -> None:
    if not dtype.is_float:
        np.testing.assert_array_equal(result, expected)
        return
    rtol, atol = TOLERANCE[dtype]
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(
            result.astype(np.float64), expected.astype(np.float64), rtol=rtol, atol=atol, equal_nan=True
        )


def lowering_params(cases: Iterable[Case]) -> list[Any]:
    return [
        pytest.param(case, dtype, id=f"{case}-{dtype.short}")
        for case in cases
        for dtype in case.dtypes
        if op_of(case.op).lower is not None
    ]


def torch_params(cases: Iterable[Case]) -> list[Any]:
    return [
        pytest.param(case, dtype, id=f"{case}-{dtype.short}")
        for case in cases
        for dtype in case.dtypes
        if case.torch is not None and dtype not in (F32, F16, BF16)
    ]


def run_lowering(case: Case, dtype: DType) -> None:
    check_lowering(case.op, case.arrays(dtype), **case.attrs)


def run_torch(case: Case, dtype: DType) -> None:
    assert case.torch is not None
    arrays = case.arrays(dtype)
    expected = case.torch(*(torch.from_numpy(array) for array in arrays))
    check_torch(oracle_of(case.op, arrays, **case.attrs), expected)
