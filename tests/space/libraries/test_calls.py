"""Every implementation with a library call means its task: kernels by the oracle, calls by the library's function."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.space.checked import Inputs
from tests.space.implementations import NAMES, WITH_LIBRARIES, computed, library_calls
from tilewright import frontend
from tilewright.cost.analytical import Analytical
from tilewright.cost.gpu import seconds
from tilewright.dtypes import DType
from tilewright.graph.op import apply
from tilewright.graph.oracle import evaluate
from tilewright.graph.task import Task
from tilewright.hw.gpu import H200
from tilewright.measure.check import relative_error
from tilewright.measure.single import Built, KernelRun, plan_of
from tilewright.rewrites.expand import expand
from tilewright.space.candidates import Candidates
from tilewright.space.template import Work
from tilewright.space.templates.cuda.default import Default
from tilewright.space.templates.default import DEFAULT
from tilewright.support.trace import Trace
from tilewright.targets.cuda import CudaTarget
from tilewright.targets.options import Settings
from tilewright.targets.stages import choose_implementations
from tilewright.zoo import registry

TARGET = CudaTarget(WITH_LIBRARIES)


@lru_cache(maxsize=8)
def zoo_tasks(name: str) -> tuple[Task, ...]:
    model = registry.build(name, small=True).half()
    inputs = tuple(
        x.half() if x.is_floating_point() else x for x in registry.example_inputs(name, 2, small=True)
    )
    return tasks_of(model, inputs)


def windows() -> Task:
    """The last convolution of windows: the first has three channels, which no library takes as they are stored."""
    return [task for task in zoo_tasks("resnet18") if task.label == "pad+conv+add+relu"][-1]


def tasks_of(model: nn.Module, inputs: tuple[Any, ...]) -> tuple[Task, ...]:
    partition = TARGET.partition(frontend.import_model(model, inputs), "fast", Trace.off())
    return tuple(task for task, _ in partition.tasks().values())


def random_inputs(task: Task) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [
        rng.standard_normal(node.shape) / 4 if node.dtype.is_float else rng.integers(0, 2, node.shape)
        for node in task.graph.inputs
    ]


def assert_calls_are_right(task: Task) -> int:
    """How many implementations there are. Algorithms of the library differ in no more than their number."""
    inputs = random_inputs(task)
    (expected,) = evaluate(task.graph, inputs, precise=True)
    candidates = Candidates.of(Work(task, WITH_LIBRARIES))
    found = 0
    for config, implementation in library_calls(candidates.work):
        if dict(config.values).get("algorithm", 0):
            continue
        found += 1
        assert candidates.is_legal(config) and implementation.uses_library
        error = relative_error(computed(implementation, inputs), expected)
        assert error < 1e-3, f"{task.label} by {config}: {error:.1e}"
    return found


@pytest.mark.parametrize("name", ["resnet18", "bert-tiny"])
def test_calls_of_the_zoo(name: str) -> None:
    tasks = zoo_tasks(name)
    anchored = [
        t for t in tasks if {"conv", "linear", "matmul", "attention"} & {n.op for n in t.graph.nodes()}
    ]
    found = [assert_calls_are_right(task) for task in anchored]
    assert sum(map(bool, found)) >= len(anchored) - 1, "a library computes (nearly) every contraction"


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
def test_calls_of_convolutions(
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
        assert_calls_are_right(task)


def gelu_of(approximate: str, dtype: DType) -> Task:
    x = Inputs()
    total = apply("linear", x(64, 32, dtype=dtype), x(48, 32, dtype=dtype, constant=True))
    biased = apply("add", total, x(48, dtype=dtype, constant=True))
    return x.task(apply("gelu", biased, approximate=approximate))


@pytest.mark.parametrize(
    ("approximate", "dtype", "numerics", "activation"),
    [
        ("tanh", DType.F32, "strict", "gelu"),
        ("none", DType.F16, "fast", "gelu"),
        ("none", DType.F16, "strict", ""),
        ("none", DType.F32, "fast", ""),
    ],
)
def test_a_gelu_is_the_librarys_where_it_is_as_exact(
    approximate: str, dtype: DType, numerics: str, activation: str
) -> None:
    work = Work(gelu_of(approximate, dtype), WITH_LIBRARIES, numerics)
    calls = [part.call for _, made in library_calls(work) for part in made.parts if part.call is not None]
    assert {call.options["activation"] for call in calls} == {activation}


def test_without_libraries_there_are_no_calls() -> None:
    """Each library is requested by name: a card without PyTorch may still have cuBLASLt."""
    task = windows()
    assert not list(library_calls(Work(task, H200)))
    assert {config.template for config, _ in library_calls(Work(task, WITH_LIBRARIES))} == {"cudnn"}
    (product,) = (task for task in zoo_tasks("resnet18") if task.label.startswith("matmul"))
    assert {config.template for config, _ in library_calls(Work(product, WITH_LIBRARIES))} == {NAMES[0]}


def test_an_implementation_becomes_a_plan_of_its_own() -> None:
    task = windows()
    for _, implementation in library_calls(Work(task, WITH_LIBRARIES)):
        built = Built.of(implementation, WITH_LIBRARIES, "fast")
        inputs = len(built.sources)
        plan, objects = plan_of(
            [KernelRun(built, range(inputs), 0)] * 3, WITH_LIBRARIES, inputs=inputs, outputs=1
        )
        assert len(plan.steps) == 3 * len(implementation.parts)
        assert set(built.sources) == set(range(len(task.graph.inputs)))
        assert len(objects) == sum(part.call is None for part in implementation.parts)


class Patches(nn.Module):
    """The first layer of a vision transformer: a row for each patch of 16x16 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 768, 16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x).flatten(2).transpose(1, 2)


def test_movement_before_a_library_is_one_kernel() -> None:
    """The permute of the input, and what puts windows into rows."""
    model = Patches().half().eval()
    imported = frontend.import_model(model, (torch.randn(8, 3, 224, 224).half(),))
    partition = TARGET.partition(imported, "fast", Trace.off())
    chosen = choose_implementations(Settings(TARGET), [partition])
    assert "cublaslt" in {choice.config.template for choice in chosen.choices.values()}
    implementations = {key: choice.implementation for key, choice in chosen.choices.items()}
    expanded = expand(partition, implementations, {key: key for key in implementations})
    first, second = expanded.partition.calls[:2]
    assert first.task.label == "permute+reshape+permute+reshape" and first.key in expanded.joined
    assert expanded.parts[second.key].call is not None  # type: ignore[attr-defined]


def test_the_kernels_around_a_call_take_as_long_as_they_do_alone() -> None:
    """The mean behind a convolution: by its default program, which leaves most of the card idle."""
    x = Inputs()
    image, weight = (
        x(4, 56, 56, 64, dtype=DType.F16),
        x(1, 1, 64, 256, dtype=DType.F16, constant=True),
    )
    window: dict[str, Any] = {"stride": (1, 1), "padding": ((0, 0), (0, 0)), "dilation": (1, 1), "groups": 1}
    total = apply("conv", image, weight, layout="channels_last", **window)
    work = Work(x.task(apply("mean", total, axes=(1, 2), keepdims=False)), WITH_LIBRARIES)
    config, implementation = next(library_calls(work))
    *_, mean = implementation.parts
    alone = Default().apply(Work(mean.task, WITH_LIBRARIES))
    assert alone is not None
    terms = alone.terms(DEFAULT)
    assert terms is not None
    expected = seconds(terms, WITH_LIBRARIES)
    predicted = Analytical(Candidates.of(work), 0).seconds(config)
    assert expected > 50e-6 and predicted > expected
