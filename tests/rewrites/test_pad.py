"""pad-channels: the same function with padded channels, for any region, and padding only where it is faster."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.rewrites.helpers import array, graph_of, inputs_for, x_input
from tilewright.dtypes import DType
from tilewright.graph.ir import Graph, Node, TensorType, constant
from tilewright.graph.op import apply
from tilewright.graph.oracle import evaluate
from tilewright.graph.task import Task
from tilewright.graph.verify import verify
from tilewright.rewrites.local import Judge
from tilewright.rewrites.pad_channels import SAFE, PadChannels, padded, regions_of
from tilewright.rewrites.partition import partition
from tilewright.rewrites.pipeline import passes

LAST = "channels_last"
UNARY = ("relu", "gelu", "silu", "tanh", "hardswish", "sigmoid")


def conv(x: Node, channels: int, size: int = 1, seed: int = 0, groups: int = 1) -> Node:
    weight = constant(array(size, size, x.shape[-1] // groups, channels, seed=seed))
    low = (0, size // 2, size // 2, 0)
    if size > 1:
        x = apply("pad", x, low=low, high=low, interior=(0,) * 4, value=0.0)
    pads = ((0, 0), (0, 0))
    return apply("conv", x, weight, stride=(1, 1), padding=pads, dilation=(1, 1), groups=groups, layout=LAST)


def bias(x: Node, seed: int = 0) -> Node:
    return apply("add", x, constant(array(x.shape[-1], seed=seed)))


def unary(op: str, x: Node) -> Node:
    return apply(op, x, approximate="none") if op == "gelu" else apply(op, x)


def eight(node: Node) -> int:
    return 8


def everything(graph: Graph) -> Graph:
    """With all regions padded, whatever that costs."""
    return padded(graph, set().union(*regions_of(graph, eight)), eight)


@st.composite
def networks(draw: Any) -> Graph:
    """Convolutions with unaligned channels, depthwise ones, residuals, pooling, and what ends a region."""
    counts = st.sampled_from((15, 22, 23, 30, 31, 16))
    x = x_input(1, 5, 6, draw(counts))
    pool, value = [x], x
    for step in range(draw(st.integers(1, 7))):
        kind = draw(
            st.sampled_from(
                ("conv", "conv", "depthwise", "unary", "residual", "pool", "permute", "matmul", "mean")
            )
        )
        if kind == "conv":
            value = conv(value, draw(counts), draw(st.sampled_from((1, 3))), step)
            value = bias(value, step) if draw(st.booleans()) else value
        elif kind == "depthwise":
            value = conv(value, value.shape[-1], 3, step, groups=value.shape[-1])
        elif kind == "unary":
            value = unary(draw(st.sampled_from(UNARY)), value)
        elif kind == "residual":
            same = [each for each in pool if each.shape == value.shape]
            value = apply("add", value, draw(st.sampled_from(same))) if same else value
        elif kind == "pool":
            size, ends = (3, 3), (1, 1)
            value = apply(
                *("max_pool", value),
                **{"kernel": size, "stride": (1, 1), "padding": ends, "dilation": (1, 1)},
                **{"ceil_mode": False, "layout": LAST},
            )
        elif kind == "permute":  # ends a region: channels are no longer last
            value = apply("permute", value, axes=(0, 2, 1, 3) if draw(st.booleans()) else (0, 1, 3, 2))
        elif kind == "matmul":
            value = apply("matmul", value, constant(array(value.shape[-1], draw(counts), seed=step)))
        else:
            value = apply("softmax", value, axis=3)
        pool.append(value)
    more = draw(st.lists(st.sampled_from(pool[1:]), max_size=1))
    return graph_of(value, *more)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(networks())
def test_padding_keeps_the_function(graph: Graph) -> None:
    if not regions_of(graph, eight):
        return
    after = everything(graph)
    verify(after, "imported")
    assert [node.type for node in after.outputs] == [node.type for node in graph.outputs]
    inputs = inputs_for(graph)
    for actual, expected in zip(evaluate(after, inputs), evaluate(graph, inputs), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-9 * max(1.0, np.abs(expected).max()))


def test_a_chain_is_padded_without_copies_in_between() -> None:
    x = x_input(1, 7, 7, 64)
    y = apply("relu", bias(conv(x, 46, 3)))
    after = everything(graph_of(conv(apply("relu", conv(y, 46, 3, seed=1)), 64, seed=2)))
    shapes = [node.shape for node in after.nodes() if node.op == "conv"]
    assert [shape[-1] for shape in shapes] == [48, 48, 64]
    assert not [node for node in after.nodes() if node.op == "slice"]
    assert all(node.shape[1] > 7 for node in after.nodes() if node.op == "pad")  # of images only


def test_channels_that_are_aligned_or_few_are_left() -> None:
    assert not regions_of(graph_of(conv(x_input(1, 7, 7, 48), 64)), eight)
    assert not regions_of(graph_of(conv(x_input(1, 7, 7, 3), 64)), eight)  # 3 -> 8 is too much


def test_operators_that_are_not_finite_at_zero_end_a_region() -> None:
    assert "log" not in SAFE and "div" not in SAFE and "rsqrt" not in SAFE
    x = apply("log", conv(x_input(1, 4, 4, 64), 46))
    after = everything(graph_of(conv(x, 64, seed=1)))
    logs = [node for node in after.nodes() if node.op == "log"]
    assert [node.shape[-1] for node in logs] == [46]


@pytest.mark.parametrize("op", sorted(SAFE))
def test_every_safe_operator_is_finite_at_zero(op: str) -> None:
    attrs: dict[str, Any] = {
        "gelu": {"approximate": "none"},
        "clamp": {"min": -1.0, "max": 6.0},
        "cast": {"dtype": DType.F32},
        "leaky_relu": {"slope": 0.1},
        "elu": {"alpha": 1.0},
        "softplus": {"beta": 1.0, "threshold": 20.0},
    }
    x = x_input(4)
    for count in (1, 2):
        try:
            node = apply(op, *[x] * count, **attrs.get(op, {}))
        except Exception:  # it takes the other number of operands
            continue
        (found,) = evaluate(graph_of(node), [np.zeros(4)])
        assert np.isfinite(found).all()
        return
    raise AssertionError(f"{op} could not be applied")


def _free_padding() -> Judge:
    return Judge(_Times(unaligned=1.0, copy=0.0), partition)


@pytest.mark.parametrize(("shift", "pads"), [(1.0, True), (200.0, False)], ids=["exp(x + 1)", "exp(x + 200)"])
def test_padded_channels_stay_finite(shift: float, pads: bool) -> None:
    """exp(200) is infinite in float32, and infinity times the zeros of the next weight is NaN, whatever x is."""
    x = conv(x_input(1, 4, 4, 64), 46)
    shifted = apply("exp", apply("add", x, constant(np.float32(shift))))
    graph = graph_of(conv(shifted, 64, seed=1))
    after = PadChannels(_free_padding(), eight).run(graph)
    assert any(node.op == "exp" and node.shape[-1] == 48 for node in after.nodes()) == pads


def test_an_operand_for_all_channels_that_is_not_constant_ends_a_region() -> None:
    """What it holds at run time, such as infinity, would meet the zeros of padded channels."""
    scale = x_input(1, 1, 1, 1, index=1)
    x = apply("mul", conv(x_input(1, 4, 4, 64), 46), scale)
    after = everything(graph_of(conv(x, 64, seed=1)))
    assert [node.shape[-1] for node in after.nodes() if node.op == "mul"] == [46]


@pytest.mark.parametrize("between", ["relu", "depthwise", "max_pool"])
@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan])
def test_infinity_and_nan_stay_where_they_are(between: str, number: float) -> None:
    """An infinity times the zeros of padded weights is NaN: the next contraction must not sum it."""
    x = x_input(1, 5, 5, 64)
    y = conv(x, 46)
    if between == "relu":
        y = apply("relu", y)
    elif between == "depthwise":
        y = conv(apply("relu", y), 46, 3, groups=46)
    else:
        ones = (1, 1)
        pool: dict[str, Any] = {
            "kernel": (2, 2),
            "stride": ones,
            "padding": (0, 0),
            "dilation": ones,
            "ceil_mode": False,
        }
        y = apply("max_pool", y, layout=LAST, **pool)
    weights = constant(np.abs(array(1, 1, 46, 64, seed=2)))  # the sum of infinities of one sign is no NaN
    ends = ((0, 0), (0, 0))
    last: dict[str, Any] = {
        "stride": (1, 1),
        "padding": ends,
        "dilation": (1, 1),
        "groups": 1,
        "layout": LAST,
    }
    graph = graph_of(apply("conv", apply("relu", y), weights, **last))
    after = everything(graph)
    assert any(node.op == "conv" and node.shape[-1] == 48 for node in after.nodes())
    data = array(1, 5, 5, 64)
    data[0, 2, 1, 7] = number
    (expected,), (actual,) = evaluate(graph, [data]), evaluate(after, [data])
    assert not np.isfinite(expected).all()
    np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-9 * np.abs(expected[0, 0, 0]).max())


def test_only_what_another_kernel_sums_gets_zeros() -> None:
    after = everything(graph_of(apply("softmax", conv(x_input(1, 4, 4, 64), 46), axis=3)))
    assert [node.shape[-1] for node in after.nodes() if node.op == "conv"] == [48]
    assert not [node for node in after.nodes() if node.op == "select"]


def test_strict_numerics_do_not_pad() -> None:
    assert "pad-channels" in {each.name for each in passes("fast", _Times(1.0, 0.0))}
    assert "pad-channels" not in {each.name for each in passes("strict", _Times(1.0, 0.0))}


class _Times:
    """A time for each product by its channels; copies are free or not."""

    def __init__(self, unaligned: float, copy: float, kernel: float = 0.0) -> None:
        self.unaligned, self.copy, self.kernel = unaligned, copy, kernel

    def kernel_seconds(self) -> float:
        return self.kernel

    def seconds(self, task: Task) -> float:
        products = [node for node in task.graph.nodes() if node.op == "conv"]
        odd = [p for p in products if p.shape[-1] % 8 or p.inputs[0].shape[-1] % 8]
        return len(products) + self.unaligned * len(odd) if products else self.copy

    def upper_bound(self, task: Task) -> tuple[float, bool]:
        return self.seconds(task), True

    def permute_seconds(self, type: TensorType, axes: Any, *, alone: bool = True) -> float:
        return 0.0

    def block(self, channels: int, dtype: DType) -> int:
        return 0

    def channel_multiple(self, dtype: DType) -> int:
        return 8


@pytest.mark.parametrize(
    "unaligned,copy,kernel,pads",
    [(1.0, 0.1, 0.0, True), (1.0, 5.0, 0.0, False), (0.0, 0.0, 0.0, False), (1.0, 0.1, 5.0, False)],
)
def test_padded_where_the_gain_beats_the_copy(
    unaligned: float, copy: float, kernel: float, pads: bool
) -> None:
    """`kernel`: what each kernel, a copy too, adds to a call."""
    graph = graph_of(conv(conv(x_input(1, 7, 7, 46), 46), 46, seed=1))  # copies at both ends
    judge = Judge(_Times(unaligned, copy, kernel), partition)
    after = PadChannels(judge, eight).run(graph)
    widths = {node.shape[-1] for node in after.nodes() if node.op == "conv"}
    assert widths == ({48} if pads else {46})
