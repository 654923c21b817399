"""Every zoo model, compiled, gives PyTorch's outputs: batch 1 and 3, one and two threads, fast and strict.

The bounds are relative L2 errors against float64: 1e-4 end to end for "fast", and for "strict" the larger of twice
PyTorch's own error and 1e-6. The small versions run here, the slowest with batch 1 alone; `-m slow` runs the
full-size ones.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import tilewright
from tests.zoo.small import SMALL_MODELS
from tilewright import zoo

FAST_BOUND = 1e-4


def leaves(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def error(got: torch.Tensor, truth: torch.Tensor) -> float:
    difference = torch.linalg.norm(got.double() - truth.double())
    return (difference / torch.linalg.norm(truth.double())).item()


def as_float64(value: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda t: t.double() if t.is_floating_point() else t, value)


def check(name: str, batch: int, *, small: bool, numerics: str = "fast") -> None:
    model = zoo.build(name, small=small)
    inputs = zoo.example_inputs(name, batch=batch, small=small)
    with torch.no_grad():
        eager = leaves(model(*inputs))
        truth = leaves(copy.deepcopy(model).double()(*as_float64(inputs)))
        compiled = tilewright.compile(model, inputs, numerics=numerics)
        for threads in (1, 2):
            compiled.threads = threads
            got = leaves(compiled(*inputs))
            assert len(got) == len(truth)
            for ours, theirs, exact in zip(got, eager, truth, strict=True):
                assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
                bound = FAST_BOUND if numerics == "fast" else max(2 * error(theirs, exact), 1e-6)
                assert error(ours, exact) <= bound


# It takes twice as long as any other, and another batch changes only the sizes of its kernels.
LARGEST = "retinanet"


@pytest.mark.parametrize(
    ("name", "batch"),
    [
        pytest.param(name, batch, marks=[pytest.mark.slow] if (name, batch) == (LARGEST, 3) else [])
        for name in SMALL_MODELS
        for batch in (1, 3)
    ],
)
def test_small_model_is_right(name: str, batch: int) -> None:
    check(name, batch, small=True)


@pytest.mark.parametrize("name", ["resnet18", "mobilenetv2", "bert-tiny", "gpt2", "unet"])
def test_strict_numerics(name: str) -> None:
    check(name, 1, small=True, numerics="strict")


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", zoo.names())
def test_full_size_model_is_right(name: str, batch: int) -> None:
    check(name, batch, small=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["resnet18", "bert-tiny", "vit-b16"])
def test_half_precision_is_no_worse_than_the_framework(name: str, dtype: torch.dtype) -> None:
    """At most twice PyTorch's own error, computed in float64 from the same rounded weights and inputs."""
    model = zoo.build(name, small=True).to(dtype)
    inputs = tuple(x.to(dtype) if x.is_floating_point() else x for x in zoo.example_inputs(name, small=True))
    with torch.no_grad():
        (theirs,) = leaves(model(*inputs))
        (truth,) = leaves(copy.deepcopy(model).double()(*as_float64(inputs)))
        (ours,) = leaves(tilewright.compile(model, inputs)(*inputs))
    assert ours.dtype == dtype
    assert error(ours, truth) <= 2 * error(theirs, truth)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("resnet18", torch.bfloat16),
        ("bert-tiny", torch.float16),
        pytest.param("mobilenetv2", torch.float16, marks=pytest.mark.slow),
        pytest.param("gpt2", torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_half_precision_runs_the_kernels_of_float32(name: str, dtype: torch.dtype) -> None:
    """But for a few at inputs and outputs: so it is as fast. What the constants are stored as is in `explain`."""

    def compiled(dtype: torch.dtype) -> tilewright.CompiledModel:
        inputs = tuple(
            x.to(dtype) if x.is_floating_point() else x for x in zoo.example_inputs(name, small=True)
        )
        return tilewright.compile(zoo.build(name, small=True).to(dtype), inputs)

    half, single = (compiled(each) for each in (dtype, torch.float32))
    boundary = [step for step in half.plan.steps if step.task not in single.plan.tasks]
    assert len(boundary) <= 4 and len(half.plan.steps) <= len(single.plan.steps) + 2
    explained = half.explain(repeats=1)
    assert explained.constant_types["f32"] > sum(explained.constant_types.values()) / 2
    assert not single.explain(repeats=1).constant_types
