"""What the templates see in a task is the task: products, convolutions and permuted operands, without a card."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.loops.gpu.meaning import computed
from tests.rewrites.helpers import array
from tests.space.checked import Inputs
from tests.space.templates.cuda.tiles import TILES
from tilewright.dtypes import DType
from tilewright.graph.op import apply
from tilewright.graph.oracle import evaluate
from tilewright.graph.task import Task
from tilewright.hw.gpu import H200
from tilewright.loops.gpu.tensor import WindowOperand
from tilewright.measure.check import relative_error
from tilewright.space.template import GpuWork
from tilewright.space.templates.cuda.matmul import AppliedMatmul, TensorCores, gemm

F16 = DType.F16


def applied_to(task: Task) -> AppliedMatmul:
    found = TensorCores().apply(GpuWork(task, H200))
    assert isinstance(found, AppliedMatmul)
    return found


def check(task: Task) -> None:
    arrays = [array(*n.shape, seed=i, dtype=n.dtype) for i, n in enumerate(task.graph.inputs)]
    (reference,) = evaluate(task.graph, arrays, precise=True)
    got = computed(gemm(applied_to(task).work, TILES[0], H200), arrays)
    got = got.astype(np.float64).reshape(reference.shape)
    assert relative_error(got, reference) < 1e-3


def to_heads() -> Task:
    """A projection whose results are stored by head."""
    x = Inputs()
    total = apply("matmul", x(2, 5, 12, dtype=F16), x(12, 8, dtype=F16))
    return x.task(apply("permute", apply("reshape", total, shape=(2, 5, 2, 4)), axes=(0, 2, 1, 3)))


def from_heads() -> Task:
    """A projection of what lies by head, and a residual."""
    x = Inputs()
    merged = apply("reshape", apply("permute", x(2, 3, 5, 4, dtype=F16), axes=(0, 2, 1, 3)), shape=(2, 5, 12))
    total = apply("matmul", merged, x(12, 8, dtype=F16))
    return x.task(apply("add", total, x(2, 5, 8, dtype=F16)))


def scores() -> Task:
    """Of queries and keys, head by head."""
    x = Inputs()
    keys = apply("permute", x(2, 3, 6, 4, dtype=F16), axes=(0, 1, 3, 2))
    return x.task(apply("relu", apply("matmul", x(2, 3, 5, 4, dtype=F16), keys)))


@pytest.mark.parametrize(("make", "gathered"), [(to_heads, False), (from_heads, True), (scores, False)])
def test_permuted_operands(make: Callable[[], Task], gathered: bool) -> None:
    task = make()
    assert isinstance(applied_to(task).work.left, WindowOperand) == gathered
    check(task)


@settings(max_examples=12, deadline=None)
@given(
    size=st.tuples(st.integers(3, 5), st.integers(3, 5)),
    channels=st.tuples(st.integers(1, 3), st.integers(1, 4)),
    window=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.integers(1, 2),
    edge=st.integers(0, 1),
    residual=st.booleans(),
)
def test_convolutions(
    size: tuple[int, int],
    channels: tuple[int, int],
    window: tuple[int, int],
    stride: int,
    edge: int,
    residual: bool,
) -> None:
    x = Inputs()
    inside, outside = channels
    image, weight = x(2, *size, inside, dtype=F16), x(*window, inside, outside, constant=True, dtype=F16)
    if edge:
        border = (0, edge, edge, 0)
        image = apply("pad", image, low=border, high=border, interior=(0, 0, 0, 0), value=0.0)
    attrs: dict[str, Any] = {"padding": ((0, 0), (0, 0)), "dilation": (1, 1), "groups": 1}
    out = apply("conv", image, weight, stride=(stride, stride), layout="channels_last", **attrs)
    if residual:
        out = apply("add", out, x(*out.shape, dtype=F16))
    task = x.task(apply("relu", out))
    if TensorCores().apply(GpuWork(task, H200)) is not None:
        check(task)
    else:
        assert inside * window[0] * window[1] == 1 or outside == 1, "declined without a reason"
