"""What a kernel for tensor cores is held to: the oracle's answers, with the roundings that its operands may have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tests.codegen.cuda.tensor_kernels import Kernel
from tests.programs import CheckCase, validation
from tilewright.codegen.cuda.build import GpuSource
from tilewright.codegen.cuda.tensor import tensor_source
from tilewright.dtypes import DType
from tilewright.graph.ir import Graph
from tilewright.graph.oracle import evaluate, evaluate_node
from tilewright.graph.task import Task
from tilewright.loops.gpu.tensor import ComputedOperand, TensorGemm

_ROUNDOFF = {DType.F16: 2.0**-11, DType.BF16: 2.0**-8, DType.F32: 2.0**-11}  # F32: as TF32
_SMALLEST = {DType.F16: 2.0**-14, DType.BF16: 2.0**-126, DType.F32: 2.0**-126}  # normal numbers
_LARGEST = {DType.F16: 65520.0, DType.BF16: 2.0**128, DType.F32: 2.0**128}
MAX_CASES = 8


def asked(kernel: Kernel, seed: int | None = None) -> tuple[GpuSource, Sequence[CheckCase]]:
    """A kernel's CUDA text, and inputs with the answers to them. With a seed: of any config."""
    made, task = kernel.made(seed), kernel.task()
    cases = list(validation(task, kernel.numerics)[:MAX_CASES])
    if getattr(made, "causal", False):
        # A value that no query sees is not read at all, so that a NaN there goes nowhere; the oracle multiplies it by
        # a weight of zero.
        cases = [case for case in cases if case.name != "special"]
    if isinstance(made, TensorGemm) and _rounds_operands(made):
        cases = [
            replace(
                case, allowed=case.allowed + _operand_rounding(task, case.inputs, made.dtype), l2_bound=np.inf
            )
            for case in cases
        ]
    return tensor_source(made), cases


def _rounds_operands(product: TensorGemm) -> bool:
    """Whether the tensor cores are given other numbers than the task says, in single precision."""
    return product.dtype is DType.F32 or any(isinstance(o, ComputedOperand) for o in (product.a, product.b))


def _operand_rounding(task: Task, inputs: Sequence[np.ndarray], dtype: DType) -> np.ndarray:
    """Of a contraction whose operands are each rounded once: twice the roundoff of every product. What is behind the
    contraction moves by no more than its operand does."""
    (anchor,) = [node for node in task.graph.nodes() if node.op in ("matmul", "linear", "conv")]
    operands = evaluate(Graph(task.graph.inputs, anchor.inputs[:2]), inputs, precise=True)
    with np.errstate(all="ignore"):
        sizes = [np.abs(x.astype(np.float64)) + _SMALLEST[dtype] for x in operands]
        sizes = [np.where(size < _LARGEST[dtype], size, np.inf) for size in sizes]
        rest = [np.zeros(node.shape) for node in anchor.inputs[2:]]
        products = evaluate_node(anchor, [*sizes, *rest], precise=True)
        allowed = 2.2 * _ROUNDOFF[dtype] * products
    allowed = np.where(np.isnan(allowed), np.inf, allowed)
    if allowed.size != task.output.type.size:
        assert task.output.op in ("amax", "amin"), "an extreme is as far off as what it is of"
        allowed = allowed.max(tuple(task.output.attrs["axes"]))
    return allowed.reshape(-1)
