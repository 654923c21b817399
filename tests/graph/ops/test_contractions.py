from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graph.ops.checks import (
    F16,
    F32,
    F64,
    FLOATS,
    I32,
    I64,
    INF,
    NAN,
    Case,
    check_lowering,
    check_torch,
    lowered,
    lowering_params,
    node_of,
    oracle_of,
    run_lowering,
    run_torch,
    torch_params,
)
from tilewright import te
from tilewright.dtypes import DType

NUMBERS = (*FLOATS, I64, I32)
CONVS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def conv_attrs(rank: int, layout: str = "channels_first", **given: Any) -> dict[str, Any]:
    attrs = {"stride": (1,) * rank, "padding": ((0, 0),) * rank, "dilation": (1,) * rank, "groups": 1}
    return {**attrs, **given, "layout": layout}


def torch_conv(attrs: dict[str, Any]) -> Any:
    """In PyTorch, through its own layout and with the padding made by hand."""

    def reference(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        last = attrs["layout"] == "channels_last"
        if last:
            x, w = x.movedim(-1, 1), w.movedim((-1, -2), (0, 1))
        flat = [entry for pair in reversed(attrs["padding"]) for entry in pair]
        result = CONVS[w.ndim - 2](
            F.pad(x, flat), w, bias, attrs["stride"], 0, attrs["dilation"], attrs["groups"]
        )
        return result.movedim(1, -1) if last else result

    return reference


def conv(
    x: tuple[int, ...],
    w: tuple[int, ...],
    *,
    bias: bool = False,
    layout: str = "channels_first",
    **given: Any,
) -> Case:
    """Sizes in channels_first, whatever the layout."""
    channels = w[0]
    if layout == "channels_last":
        x, w = (x[0], *x[2:], x[1]), (*w[2:], w[1], w[0])
    attrs = conv_attrs(len(x) - 2, layout, **given)
    operands = [x, w, (channels,)] if bias else [x, w]
    return Case("conv", operands, attrs, torch_conv(attrs))


def conv_transpose(x: tuple[int, ...], w: tuple[int, ...], *, bias: bool = False, **given: Any) -> Case:
    rank = len(x) - 2
    attrs = {
        "stride": (1,) * rank,
        "padding": (0,) * rank,
        "output_padding": (0,) * rank,
        "dilation": (1,) * rank,
        "groups": 1,
        **given,
    }

    def reference(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        order = ("stride", "padding", "output_padding", "groups", "dilation")
        return TRANSPOSED[rank](x, w, bias, *(attrs[name] for name in order))

    operands = [x, w, (w[1] * attrs["groups"],)] if bias else [x, w]
    return Case("conv_transpose", operands, attrs, reference)


MATMULS = [
    ((3, 4), (4, 5)),
    ((1, 1), (1, 1)),
    ((2, 3, 4), (2, 4, 2)),
    ((2, 1, 3, 4), (5, 4, 2)),
    ((3, 4), (2, 4, 5)),
    ((2, 3, 0), (0, 4)),
    ((0, 4), (4, 3)),
]
CASES = [
    *(Case("matmul", shapes, torch=torch.matmul, dtypes=NUMBERS) for shapes in MATMULS),
    Case("matmul", [np.array([[1.0, INF], [NAN, 0.0]]), np.array([[1.0], [-INF]])], torch=torch.matmul),
    Case("linear", [(4,), (3, 4)], torch=F.linear),
    Case("linear", [(2, 4), (3, 4), (3,)], torch=F.linear),
    Case("linear", [(2, 3, 4), (5, 4), (5,)], torch=F.linear),
    Case("linear", [(2, 3, 4), (5, 4)], torch=F.linear),
    Case("linear", [(2, 0), (5, 0), (5,)], torch=F.linear, dtypes=[F32, F64]),
    Case("linear", [(0, 3), (5, 3)], torch=F.linear, dtypes=[F32, F64]),
]
for layout in ("channels_first", "channels_last"):
    CASES += [
        conv((1, 3, 9), (4, 3, 3), layout=layout),
        conv((2, 4, 9), (4, 2, 3), bias=True, stride=(2,), dilation=(2,), groups=2, layout=layout),
        conv((2, 3, 5, 6), (4, 3, 3, 2), bias=True, layout=layout),
        conv((1, 3, 7, 8), (5, 3, 3, 3), stride=(2, 3), dilation=(1, 2), layout=layout),
        conv((1, 4, 5, 5), (6, 2, 3, 3), bias=True, groups=2, layout=layout),
        conv((1, 4, 5, 5), (4, 1, 3, 3), bias=True, groups=4, layout=layout),
        conv((1, 3, 5, 5), (6, 1, 3, 3), groups=3, stride=(2, 2), layout=layout),
        conv((2, 6, 4, 3), (5, 6, 1, 1), bias=True, layout=layout),
        conv((2, 3, 4, 3), (3, 1, 1, 1), bias=True, groups=3, layout=layout),
        conv((1, 1, 5, 5), (2, 1, 3, 3), layout=layout),
        conv((1, 2, 4, 5), (3, 2, 1, 3), stride=(2, 1), layout=layout),
        conv((1, 2, 4, 5, 4), (3, 2, 2, 3, 2), bias=True, stride=(1, 2, 1), layout=layout),
        conv((1, 4, 4, 5, 4), (4, 2, 2, 1, 3), groups=2, dilation=(2, 1, 1), layout=layout),
        conv((0, 3, 5, 5), (4, 3, 3, 3), layout=layout),
    ]
PADDED = [
    conv((2, 3, 5, 6), (4, 3, 3, 3), bias=True, padding=((1, 1), (1, 1)), layout=layout)
    for layout in ("channels_first", "channels_last")
] + [
    conv((1, 2, 5), (3, 2, 4), padding=((2, 1),)),
    conv((1, 4, 6, 6), (4, 1, 3, 3), padding=((1, 1), (0, 2)), groups=4, stride=(2, 2)),
    conv((1, 2, 3, 3, 3), (2, 2, 3, 3, 3), padding=((1, 1), (1, 1), (1, 1))),
]
TRANSPOSES = [
    conv_transpose((1, 3, 5), (3, 2, 3)),
    conv_transpose((2, 4, 5), (4, 3, 3), bias=True, stride=(2,), padding=(1,), output_padding=(1,), groups=2),
    conv_transpose((1, 3, 4, 5), (3, 2, 2, 2), bias=True, stride=(2, 2)),
    conv_transpose(
        (1, 3, 4, 5), (3, 2, 3, 3), stride=(2, 3), padding=(1, 2), dilation=(2, 1), output_padding=(1, 2)
    ),
    conv_transpose((1, 4, 3, 3), (4, 1, 4, 4), groups=4, stride=(2, 2), padding=(1, 1)),
    conv_transpose((1, 2, 2, 3, 2), (2, 3, 2, 2, 2), stride=(2, 1, 2)),
    conv_transpose((0, 3, 4, 5), (3, 2, 2, 2)),
]


@pytest.mark.parametrize(("case", "dtype"), lowering_params(CASES))
def test_lowering_equals_oracle(case: Case, dtype: DType) -> None:
    run_lowering(case, dtype)


@pytest.mark.parametrize(("case", "dtype"), torch_params([*CASES, *PADDED, *TRANSPOSES]))
def test_oracle_equals_torch(case: Case, dtype: DType) -> None:
    run_torch(case, dtype)


@st.composite
def convolutions(draw: st.DrawFn, most_padding: int) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    rank = draw(st.integers(1, 2))
    groups, inputs, outputs = (draw(st.integers(1, 3)) for _ in range(3))

    def entries(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(rank))

    kernel, stride, dilation, room = entries(1, 3), entries(1, 3), entries(1, 2), entries(0, 4)
    extents = tuple(step * (k - 1) + 1 + more for k, step, more in zip(kernel, dilation, room, strict=True))
    padding = tuple(zip(entries(0, most_padding), entries(0, most_padding), strict=True))
    layout = draw(st.sampled_from(["channels_first", "channels_last"]))
    rng = np.random.default_rng(0)
    x = rng.standard_normal((draw(st.integers(1, 2)), groups * inputs, *extents))
    w = rng.standard_normal((groups * outputs, inputs, *kernel))
    if layout == "channels_last":
        x, w = np.moveaxis(x, 1, -1), np.moveaxis(w, (0, 1), (-1, -2))
    attrs = conv_attrs(rank, layout, stride=stride, dilation=dilation, groups=groups, padding=padding)
    return x, w, attrs


@given(convolutions(most_padding=0))
@settings(max_examples=60)
def test_any_convolution_is_lowered(drawn: tuple[np.ndarray, np.ndarray, dict[str, Any]]) -> None:
    x, w, attrs = drawn
    check_lowering("conv", [x, w], **attrs)


@given(convolutions(most_padding=2))
@settings(max_examples=60)
def test_any_convolution_is_torchs(drawn: tuple[np.ndarray, np.ndarray, dict[str, Any]]) -> None:
    x, w, attrs = drawn
    expected = torch_conv(attrs)(torch.from_numpy(x), torch.from_numpy(w))
    check_torch(oracle_of("conv", [x, w], **attrs), expected)


@pytest.mark.parametrize(
    ("a", "b"), [("int8", "int8"), ("uint8", "int8"), ("int8", "uint8"), ("uint8", "uint8")]
)
def test_bytes_are_summed_in_i32(a: str, b: str) -> None:
    rng = np.random.default_rng(0)

    def extremes(kind: str, shape: tuple[int, ...]) -> np.ndarray:
        info = np.iinfo(kind)
        return rng.choice(np.array([info.min, info.max, 1, 7], kind), shape)

    left, right = extremes(a, (3, 40)), extremes(b, (40, 2))
    expected = left.astype(np.int64) @ right.astype(np.int64)
    result = check_lowering("matmul", [left, right])
    assert result.dtype == np.int32
    np.testing.assert_array_equal(result, expected)
    bias = np.array([5, -7], np.int32)
    weight = np.ascontiguousarray(right.T)
    np.testing.assert_array_equal(check_lowering("linear", [left, weight, bias]), expected + bias)
    x, w = extremes(a, (1, 3, 5, 5)), extremes(b, (4, 3, 3, 3))
    reference = torch_conv(conv_attrs(2))(torch.from_numpy(x).double(), torch.from_numpy(w).double())
    np.testing.assert_array_equal(check_lowering("conv", [x, w], **conv_attrs(2)), reference.numpy())


def test_halves_are_summed_in_f32() -> None:
    x = np.ones((1, 4096), np.float16)
    assert check_lowering("linear", [x, x]) == 4096
    output, _ = lowered(node_of("linear", [x, x], {}))
    assert [stage.dtype for stage in te.stages(output)] == [F32, F16]


# -- the form that templates look for -----------------------------------------------------------------------------


def reduction_of(op: str, arrays: list[np.ndarray], attrs: dict[str, Any]) -> tuple[te.Compute, te.Reduce]:
    output, _ = lowered(node_of(op, arrays, attrs))
    stage = te.stages(output)[0]
    assert stage.reduction is not None
    return stage, stage.reduction


def zeros(*shapes: tuple[int, ...], dtype: Any = np.float32) -> list[np.ndarray]:
    return [np.zeros(shape, dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_contraction_is_a_product_of_two_loads_data_first(dtype: str) -> None:
    def source(factor: te.Expr) -> str:
        load = factor.value if isinstance(factor, te.Cast) else factor
        assert isinstance(load, te.Load)
        return load.source.name

    for op, shapes, attrs in [
        ("matmul", [(3, 4), (4, 5)], {}),
        ("linear", [(3, 4), (5, 4), (5,)], {}),
        ("conv", [(1, 4, 5, 5), (6, 2, 3, 3), (6,)], conv_attrs(2, groups=2)),
    ]:
        _, reduction = reduction_of(op, zeros(*shapes, dtype=dtype), attrs)
        body = reduction.body
        assert isinstance(body, te.Call) and body.op == "mul"
        assert [source(factor) for factor in body.args] == ["x0", "x1"]


def test_convolutions_sum_over_the_kernel_and_then_the_channels() -> None:
    _, reduction = reduction_of("conv", zeros((1, 6, 5, 5), (4, 6, 3, 2)), conv_attrs(2))
    assert [axis.extent for axis in reduction.axes] == [3, 2, 6]


def test_axes_of_one_element_are_not_summed_over() -> None:
    _, pointwise = reduction_of("conv", zeros((1, 6, 5, 5), (4, 6, 1, 1)), conv_attrs(2))
    assert [axis.extent for axis in pointwise.axes] == [6]
    _, depthwise = reduction_of("conv", zeros((1, 6, 5, 5), (6, 1, 3, 2)), conv_attrs(2, groups=6))
    assert [axis.extent for axis in depthwise.axes] == [3, 2]
    output, _ = lowered(node_of("conv", zeros((1, 6, 5, 5), (6, 1, 1, 1)), conv_attrs(2, groups=6)))
    assert isinstance(output, te.Compute) and output.reduction is None


def test_one_group_has_no_group_arithmetic() -> None:
    stage, reduction = reduction_of("conv", zeros((1, 6, 5, 5), (4, 6, 3, 3)), conv_attrs(2))
    data, weight = te.loads(reduction.body)
    assert data.indices[1] == reduction.axes[-1]
    assert weight.indices[:2] == (stage.axes[1], reduction.axes[-1])


def test_depthwise_reads_its_own_channel() -> None:
    stage, reduction = reduction_of("conv", zeros((1, 6, 5, 5), (6, 1, 3, 3)), conv_attrs(2, groups=6))
    assert te.loads(reduction.body)[0].indices[1] == stage.axes[1]


def test_padding_is_not_lowered() -> None:
    arrays = zeros((1, 2, 5), (3, 2, 3))
    with pytest.raises(AssertionError, match="padding"):
        lowered(node_of("conv", arrays, conv_attrs(1, padding=((1, 0),))))
