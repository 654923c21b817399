"""Operators of 16-bit floats on a CPU are one kernel: nothing is converted in a pass of its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.programs import AVX2, AVX512, ZEN4
from tests.rewrites.helpers import conv, graph_of, weight, x_input
from tilewright.dtypes import DType
from tilewright.graph.ir import Node
from tilewright.graph.op import apply
from tilewright.hw import CpuMachine
from tilewright.rewrites.pipeline import run_pipeline
from tilewright.tune.oracle import PredictedCosts


def depthwise(dtype: DType) -> Node:
    padded = apply(
        "pad",
        x_input(1, 144, 56, 56, dtype=dtype),
        low=(0, 0, 1, 1),
        high=(0, 0, 1, 1),
        interior=(0,) * 4,
        value=0.0,
    )
    return conv(padded, weight(144, 1, 3, 3, dtype=dtype), groups=144)


def pointwise(dtype: DType) -> Node:
    return conv(x_input(1, 256, 56, 56, dtype=dtype), weight(64, 256, 1, 1, dtype=dtype))


def upsampled(dtype: DType) -> Node:
    x = x_input(4, 64, 56, 56, dtype=dtype)
    return apply("resize", x, sizes=(112, 112), mode="linear", coordinates="half_pixel")


def averaged(dtype: DType) -> Node:
    return apply("mean", x_input(8, 2048, 7, 7, dtype=dtype), axes=(2, 3), keepdims=True)


def scores(dtype: DType) -> Node:
    query, keys = x_input(12, 1, 64, dtype=dtype), x_input(12, 64, 1024, index=1, dtype=dtype)
    return apply("matmul", query, keys)


@pytest.mark.parametrize("machine", [AVX512, AVX2, ZEN4], ids=["avx512", "avx2", "zen4"])
@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16], ids=lambda dtype: dtype.short)
@pytest.mark.parametrize("make", [depthwise, pointwise, upsampled, averaged, scores])
def test_one_kernel_converts(make: Callable[[DType], Node], dtype: DType, machine: CpuMachine) -> None:
    costs = PredictedCosts(machine)
    found = run_pipeline(graph_of(make(dtype)), oracle=costs, costs=costs)
    assert [call.task.label for call in found.calls] == [found.calls[0].task.label]


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16], ids=lambda dtype: dtype.short)
def test_a_query_reads_a_cache_as_it_is_stored(dtype: DType) -> None:
    """Scores, softmax and weighted sum: no kernel transposes or converts keys or values."""
    query = x_input(1, 12, 1, 64, dtype=dtype)
    keys, values = (x_input(1, 12, 1024, 64, index=n, dtype=dtype) for n in (1, 2))
    costs = PredictedCosts(AVX512)
    attention = apply("attention", query, keys, values, causal=False, scale=0.125)
    found = run_pipeline(graph_of(attention), oracle=costs, costs=costs)
    assert len(found.calls) == 3
    assert max(call.task.output.type.size for call in found.calls) == 12 * 1024
