from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.graph.ops.checks import (
    F16,
    F32,
    F64,
    FLOATS,
    I32,
    INF,
    NAN,
    U8,
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

MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
AVG: dict[int, Any] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
ADAPTIVE_MAX = {1: F.adaptive_max_pool1d, 2: F.adaptive_max_pool2d, 3: F.adaptive_max_pool3d}
ADAPTIVE_AVG = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}


def in_layout(layout: str, function: Any) -> Any:
    if layout == "channels_first":
        return function
    return lambda x: function(x.movedim(-1, 1)).movedim(1, -1)


def operand_in_layout(layout: str, operand: Any) -> Any:
    """Sizes and arrays are given in channels_first."""
    if layout == "channels_first":
        return operand
    if isinstance(operand, tuple):
        return (operand[0], *operand[2:], operand[1])
    return np.ascontiguousarray(np.moveaxis(operand, 1, -1))


def max_attrs(kernel: tuple[int, ...], layout: str = "channels_first", **given: Any) -> dict[str, Any]:
    rank = len(kernel)
    attrs = {"stride": kernel, "padding": (0,) * rank, "dilation": (1,) * rank, "ceil_mode": False}
    return {"kernel": kernel, **attrs, **given, "layout": layout}


def torch_max(attrs: dict[str, Any]) -> Any:
    order = ("kernel", "stride", "padding", "dilation", "ceil_mode")
    return in_layout(
        attrs["layout"], lambda x: MAX[len(attrs["kernel"])](x, *(attrs[name] for name in order))
    )


def avg_attrs(kernel: tuple[int, ...], layout: str = "channels_first", **given: Any) -> dict[str, Any]:
    attrs = {"stride": kernel, "padding": (0,) * len(kernel), "ceil_mode": False, "count_include_pad": True}
    return {"kernel": kernel, **attrs, "divisor": None, **given, "layout": layout}


def torch_avg(attrs: dict[str, Any]) -> Any:
    order = ["kernel", "stride", "padding", "ceil_mode", "count_include_pad"]
    if len(attrs["kernel"]) > 1:
        order.append("divisor")
    return in_layout(
        attrs["layout"], lambda x: AVG[len(attrs["kernel"])](x, *(attrs[name] for name in order))
    )


def max_pool(operand: Any, kernel: tuple[int, ...], dtypes: Any = FLOATS, **given: Any) -> Case:
    attrs = max_attrs(kernel, **given)
    return Case("max_pool", [operand_in_layout(attrs["layout"], operand)], attrs, torch_max(attrs), dtypes)


def avg_pool(operand: Any, kernel: tuple[int, ...], **given: Any) -> Case:
    attrs = avg_attrs(kernel, **given)
    return Case("avg_pool", [operand_in_layout(attrs["layout"], operand)], attrs, torch_avg(attrs))


def adaptive(name: str, shape: Any, sizes: tuple[int, ...], layout: str = "channels_first") -> Case:
    function = (ADAPTIVE_AVG if name == "adaptive_avg_pool" else ADAPTIVE_MAX)[len(sizes)]
    return Case(
        name,
        [operand_in_layout(layout, shape)],
        {"sizes": sizes, "layout": layout},
        in_layout(layout, lambda x: function(x, sizes)),
    )


HOLES = np.random.default_rng(3).standard_normal((1, 2, 6, 6))
HOLES[0, 0, 2, 2], HOLES[0, 1, 0, 0], HOLES[0, 1, 4, 5], HOLES[0, 0, 5] = NAN, INF, -INF, -INF

CASES = [
    case
    for layout in ("channels_first", "channels_last")
    for case in [
        max_pool((1, 2, 9), (3,), layout=layout),
        max_pool((2, 2, 6, 7), (2, 3), layout=layout),
        max_pool((1, 2, 7, 7), (3, 3), stride=(2, 2), padding=(1, 1), layout=layout),
        max_pool((1, 2, 7, 8), (3, 2), stride=(2, 2), padding=(1, 0), dilation=(2, 1), layout=layout),
        max_pool((1, 2, 6, 6), (3, 3), stride=(2, 2), ceil_mode=True, layout=layout),
        max_pool((1, 1, 4, 5, 4), (2, 3, 2), stride=(1, 2, 2), padding=(1, 1, 0), layout=layout),
        avg_pool((1, 2, 9), (3,), stride=(2,), padding=(1,), layout=layout),
        avg_pool((2, 2, 6, 7), (2, 3), layout=layout),
        avg_pool((1, 2, 7, 7), (3, 3), stride=(2, 2), padding=(1, 1), layout=layout),
        avg_pool((1, 2, 7, 7), (3, 3), stride=(2, 2), padding=(1, 1), count_include_pad=False, layout=layout),
        avg_pool((1, 2, 6, 6), (3, 3), stride=(2, 2), ceil_mode=True, layout=layout),
        avg_pool((1, 2, 6, 7), (3, 3), stride=(2, 2), padding=(1, 1), ceil_mode=True, layout=layout),
        avg_pool(
            (1, 2, 6, 7),
            (3, 2),
            stride=(2, 3),
            padding=(1, 1),
            ceil_mode=True,
            count_include_pad=False,
            layout=layout,
        ),
        avg_pool((1, 2, 7, 7), (3, 3), stride=(2, 2), padding=(1, 1), divisor=5, layout=layout),
        avg_pool((1, 1, 4, 5, 4), (2, 3, 2), stride=(1, 2, 2), padding=(1, 1, 0), layout=layout),
        adaptive("adaptive_avg_pool", (1, 2, 7), (3,), layout),
        adaptive("adaptive_avg_pool", (2, 3, 6, 8), (1, 1), layout),
        adaptive("adaptive_avg_pool", (1, 2, 6, 7), (3, 4), layout),
        adaptive("adaptive_avg_pool", (1, 2, 3, 4), (6, 5), layout),
        adaptive("adaptive_avg_pool", (1, 1, 4, 5, 6), (2, 3, 6), layout),
        adaptive("adaptive_max_pool", (1, 2, 7), (3,), layout),
        adaptive("adaptive_max_pool", (1, 2, 6, 7), (3, 4), layout),
        adaptive("adaptive_max_pool", (1, 2, 3, 4), (6, 5), layout),
        adaptive("adaptive_max_pool", (1, 1, 4, 5, 6), (2, 3, 6), layout),
    ]
]
CASES += [
    max_pool(HOLES, (3, 3), stride=(2, 2), padding=(1, 1)),
    avg_pool(HOLES, (3, 3), stride=(2, 2), padding=(1, 1), count_include_pad=False),
    adaptive("adaptive_max_pool", HOLES, (4, 5)),
    adaptive("adaptive_avg_pool", HOLES, (4, 5)),
    max_pool((1, 2, 6), (1,), stride=(2,)),
    avg_pool((1, 2, 6), (1,), stride=(2,)),
    max_pool((0, 2, 6), (2,), dtypes=[F32, F64]),
    max_pool((1, 2, 6, 7), (3, 2), stride=(2, 2), padding=(1, 1), dtypes=[I32, U8]),
]


@pytest.mark.parametrize(("case", "dtype"), lowering_params(CASES))
def test_lowering_equals_oracle(case: Case, dtype: DType) -> None:
    run_lowering(case, dtype)


@pytest.mark.parametrize(("case", "dtype"), torch_params(CASES))
def test_oracle_equals_torch(case: Case, dtype: DType) -> None:
    run_torch(case, dtype)


@st.composite
def windows(draw: st.DrawFn, rank: int) -> dict[str, Any]:
    def entries(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(rank))

    kernel = entries(1, 4)
    padding = tuple(draw(st.integers(0, k // 2)) for k in kernel)
    return {"kernel": kernel, "stride": entries(1, 5), "padding": padding, "ceil_mode": draw(st.booleans())}


@given(st.data())
@settings(max_examples=100)
def test_any_pool(data: st.DataObject) -> None:
    rank = data.draw(st.integers(1, 2))
    given_attrs = data.draw(windows(rank))
    extents = tuple(data.draw(st.integers(1, 9)) for _ in range(rank))
    kernel, padding = given_attrs["kernel"], given_attrs["padding"]
    assume(all(e + 2 * p >= k for e, p, k in zip(extents, padding, kernel, strict=True)))
    x = np.random.default_rng(0).standard_normal((1, 2, *extents))
    attrs = max_attrs(dilation=(1,) * rank, **given_attrs)
    check_torch(oracle_of("max_pool", [x], **attrs), torch_max(attrs)(torch.from_numpy(x)))
    check_lowering("max_pool", [x], **attrs)
    attrs = avg_attrs(count_include_pad=data.draw(st.booleans()), **given_attrs)
    check_torch(oracle_of("avg_pool", [x], **attrs), torch_avg(attrs)(torch.from_numpy(x)))
    check_lowering("avg_pool", [x], **attrs)


@given(st.integers(1, 12), st.integers(1, 12))
@settings(max_examples=60)
def test_any_adaptive_pool(extent: int, size: int) -> None:
    x = np.random.default_rng(0).standard_normal((1, 1, extent))
    for name in ("adaptive_avg_pool", "adaptive_max_pool"):
        case = adaptive(name, x.shape, (size,))
        assert case.torch is not None
        check_torch(oracle_of(name, [x], **case.attrs), case.torch(torch.from_numpy(x)))
        check_lowering(name, [x], **case.attrs)


# -- what is constant is a constant -------------------------------------------------------------------------------


def stages_of(
    op: str, shape: tuple[int, ...], attrs: dict[str, Any], dtype: Any = np.float32
) -> list[te.Compute]:
    output, _ = lowered(node_of(op, [np.zeros(shape, dtype)], attrs))
    return te.stages(output)


def conditions(stage: te.Compute) -> set[str]:
    """The axes that the conditions of a stage look at."""
    return {
        variable.name
        for part in te.walk(stage.body)
        if isinstance(part, te.Select)
        for variable in te.variables(part.cond)
    }


def test_only_axes_that_can_leave_the_range_have_conditions() -> None:
    (plain,) = stages_of("max_pool", (1, 2, 6, 6), max_attrs((2, 2)))
    assert not conditions(plain)
    (one,) = stages_of("max_pool", (1, 2, 7, 6), max_attrs((3, 2), stride=(2, 2), padding=(1, 0)))
    assert conditions(one) == {"i2", "r0"}
    (even,) = stages_of("adaptive_max_pool", (1, 2, 6, 6), {"sizes": (2, 3), "layout": "channels_first"})
    assert not conditions(even)
    assert even.reduction is not None and [axis.extent for axis in even.reduction.axes] == [3, 2]


def test_a_constant_count_is_a_constant_divisor() -> None:
    for op, attrs in [
        ("avg_pool", avg_attrs((2, 2))),
        ("avg_pool", avg_attrs((3, 3), stride=(2, 2), padding=(1, 1))),
        ("adaptive_avg_pool", {"sizes": (1, 1), "layout": "channels_first"}),
    ]:
        *_, last = stages_of(op, (1, 2, 7, 7) if op == "avg_pool" else (1, 2, 6, 6), attrs)
        assert isinstance(last.body, te.Call) and isinstance(last.body.args[1], te.Const)


def test_a_window_of_one_element_is_no_reduction() -> None:
    (stage,) = stages_of("max_pool", (1, 2, 6), max_attrs((1,), stride=(2,)))
    assert stage.reduction is None


def test_halves_are_averaged_in_f32() -> None:
    stages = stages_of("avg_pool", (1, 2, 6), avg_attrs((2,)), np.float16)
    assert [stage.dtype for stage in stages] == [F32, F16]
