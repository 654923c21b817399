"""Every way of a library means its task: pieces of ours by the oracle, calls by what the library's function is."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tilewright import frontend
from tilewright.dtypes import DType
from tilewright.graph.ir import Graph, Node, TensorType, input_node
from tilewright.graph.op import apply
from tilewright.graph.oracle import evaluate
from tilewright.graph.task import Task
from tilewright.hw.gpu import H200
from tilewright.measure.check import relative_error
from tilewright.measure.exam import L2_BOUNDS
from tilewright.measure.gpu_ways import error_bound, expected_of, way_plan
from tilewright.runtime.plan import VendorCall, View
from tilewright.space.vendor.candidates import candidate_ways
from tilewright.space.vendor.pieces import Way, refined
from tilewright.support.trace import Trace
from tilewright.targets.cuda import CudaTarget
from tilewright.zoo import registry

LIBRARIES = frozenset({"cublaslt", "torch"})
TARGET = CudaTarget(H200, None, LIBRARIES)


@lru_cache(maxsize=8)
def zoo_tasks(name: str) -> tuple[Task, ...]:
    model = registry.build(name, small=True).half()
    inputs = tuple(
        x.half() if x.is_floating_point() else x for x in registry.example_inputs(name, 2, small=True)
    )
    return tasks_of(model, inputs)


def tasks_of(model: nn.Module, inputs: tuple[Any, ...]) -> tuple[Task, ...]:
    partition = TARGET.partitioned(frontend.import_model(model, inputs), "fast", Trace.off())
    return tuple(task for task, _ in partition.tasks().values())


def random_inputs(task: Task) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [
        rng.standard_normal(node.shape) / 4 if node.dtype.is_float else rng.integers(0, 2, node.shape)
        for node in task.graph.inputs
    ]


def computed(task: Task, way: Way, inputs: list[np.ndarray]) -> np.ndarray:
    values: dict[Node, np.ndarray] = dict(zip(way.inputs, inputs, strict=True))
    for piece in way.pieces:
        arrays = [values[node] for node in piece.operands]
        if piece.call is None:
            (values[piece.result],) = evaluate(piece.task.graph, arrays, precise=True)
            continue
        packings = (*piece.packings, *[None] * (len(arrays) - len(piece.packings)))
        stored = [a if p is None else p.pack(a) for a, p in zip(arrays, packings, strict=True)]
        values[piece.result] = called(piece.call, stored).reshape(piece.result.shape)
    return values[way.pieces[-1].result]


def called(call: VendorCall, arrays: list[np.ndarray]) -> np.ndarray:
    x, w, *rest = (viewed(view, arrays) for view in call.operands)
    if call.function == "product":
        result = x @ w
        result = sum(rest, result)
        activation = call.options["activation"]
        result = torch.relu(result) if activation == "relu" else result
        result = nn.functional.gelu(result, approximate="tanh") if activation == "gelu" else result
    elif call.function == "attention":
        options = {"is_causal": call.options["causal"], "scale": call.options["scale"]}
        result = nn.functional.scaled_dot_product_attention(x, w, rest[0], *rest[1:], **options)
    else:
        window = [call.options[name] for name in ("stride", "padding", "dilation", "groups")]
        result = torch.conv2d(x, w, rest[0] if rest else None, *window)
        result = sum(rest[1:], result)
        result = torch.relu(result) if call.function.endswith("relu") else result
    assert tuple(result.shape) == call.result
    return result.permute(call.order or tuple(range(result.dim()))).contiguous().numpy()


def viewed(view: View, arrays: list[np.ndarray]) -> torch.Tensor:
    flat = torch.from_numpy(np.ascontiguousarray(arrays[view.argument]).reshape(-1).astype(np.float64))
    return flat.as_strided(view.shape, view.strides, view.offset)


def assert_ways_are_right(task: Task) -> int:
    inputs = random_inputs(task)
    (expected,) = evaluate(task.graph, inputs, precise=True)
    ways = candidate_ways(task, H200, "fast", LIBRARIES, algorithms=1)
    for way in ways:
        error = relative_error(computed(task, way, inputs), expected)
        assert error < 1e-3, f"{task.label} by {way.name}: {error:.1e}"
    assert len({way.config for way in ways}) == len(ways)
    return len(ways)


@pytest.mark.parametrize("name", ["resnet18", "bert-tiny"])
def test_ways_of_the_zoo(name: str) -> None:
    assert sum(map(assert_ways_are_right, zoo_tasks(name))) > len(zoo_tasks(name))


@settings(max_examples=8)
@given(
    channels=st.sampled_from([1, 3, 4, 8, 12]),
    results=st.sampled_from([4, 8]),
    kernel=st.integers(1, 4),
    stride=st.integers(1, 4),
    padding=st.integers(0, 2),
    groups=st.sampled_from([1, 2, 4]),
    residual=st.booleans(),
    bias=st.booleans(),
)
def test_ways_of_convolutions(
    channels: int,
    results: int,
    kernel: int,
    stride: int,
    padding: int,
    groups: int,
    residual: bool,
    bias: bool,
) -> None:
    groups = groups if channels % groups == 0 else 1
    conv = nn.Conv2d(channels, results, kernel, stride, min(padding, kernel - 1), groups=groups, bias=bias)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = conv

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.conv(x) + y) if residual else torch.relu(self.conv(x)) * y

    x = torch.randn(2, channels, 12, 12)
    model = Block().half().eval()
    y = torch.randn(conv.half()(x.half()).shape)
    for task in tasks_of(model, (x.half(), y.half())):
        assert_ways_are_right(task)


def test_the_oracle_of_a_few_rows_is_the_first_rows_of_the_oracle() -> None:
    for task in zoo_tasks("resnet18"):
        inputs = random_inputs(task)
        (whole,) = evaluate(task.graph, inputs, precise=True)
        answer, rows = expected_of(task.graph, inputs)
        assert np.allclose(np.asarray(whole)[rows], answer)


def test_a_way_becomes_a_plan_of_its_own() -> None:
    task = next(task for task in zoo_tasks("resnet18") if task.label == "pad+conv+add+relu")
    inputs = [a.astype(n.dtype.numpy) for a, n in zip(random_inputs(task), task.graph.inputs, strict=True)]
    for way in candidate_ways(task, H200, "fast", LIBRARIES):
        plan, constants, _ = way_plan(task, way, inputs, H200, "fast", repeats=3)
        plan.validate()
        assert len(plan.steps) == 3 * len(way.pieces)
        assert len(constants) == len(plan.constants) == 2


def test_movement_before_a_library_is_one_kernel() -> None:
    """The permute of the input, and what puts windows into rows."""
    model = nn.Conv2d(3, 16, 4, 4).half().eval()
    imported = frontend.import_model(model, (torch.randn(2, 3, 16, 16).half(),))
    partition = TARGET.partitioned(imported, "fast", Trace.off())
    ways = TARGET.chosen([partition], "fast", None, Trace.off())
    split, pieces = refined(partition, ways)
    labels = [call.task.label for call in split.calls]
    assert labels[0] == "permute+reshape+permute+reshape"
    assert [pieces[call.key].call is not None for call in split.calls][:2] == [False, True]


def test_a_task_is_held_to_the_coarsest_type_that_it_computes() -> None:
    x, y = (input_node(number, TensorType((32, 32), DType.F16)) for number in range(2))
    product = apply("matmul", x, y)
    wide = apply("cast", product, dtype=DType.F32)
    assert error_bound(Task(Graph((x, y), (product,))), "strict") == L2_BOUNDS[DType.F16]
    assert error_bound(Task(Graph((x, y), (wide,))), "strict") == L2_BOUNDS[DType.F16]
    a, b = (input_node(number, TensorType((32, 32), DType.F32)) for number in range(2))
    single = Task(Graph((a, b), (apply("matmul", a, b),)))
    assert error_bound(single, "strict") == L2_BOUNDS[DType.F32]
    assert error_bound(single, "tf32") == L2_BOUNDS[DType.F16]
    assert error_bound(Task(Graph((a,), (apply("argmax", a, axis=1, keepdims=False),))), "fast") == 0.0
