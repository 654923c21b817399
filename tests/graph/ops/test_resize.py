from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graph.ops.checks import (
    FLOATS,
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

LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}


def reference(sizes: tuple[int, ...], mode: str, coordinates: str) -> Any:
    if mode == "nearest":
        torch_mode = "nearest" if coordinates == "asymmetric" else "nearest-exact"
        return lambda x: F.interpolate(x, sizes, mode=torch_mode)
    torch_mode = LINEAR[len(sizes)] if mode == "linear" else "bicubic"
    return lambda x: F.interpolate(x, sizes, mode=torch_mode, align_corners=coordinates == "align_corners")


def resize(shape: tuple[int, ...], sizes: tuple[int, ...], mode: str, coordinates: str) -> Case:
    attrs = {"sizes": sizes, "mode": mode, "coordinates": coordinates}
    in_torch = len(shape) == len(sizes) + 2 and (mode == "nearest" or coordinates != "asymmetric")
    dtypes = (*FLOATS, U8) if mode == "nearest" else FLOATS
    return Case("resize", [shape], attrs, reference(sizes, mode, coordinates) if in_torch else None, dtypes)


SHAPES: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((1, 2, 5), (9,)),
    ((2, 1, 3, 4), (6, 8)),
    ((1, 2, 5, 7), (3, 4)),
    ((1, 1, 4, 6), (4, 3)),
    ((1, 1, 1, 3), (2, 1)),
    ((1, 1, 2, 3, 4), (4, 2, 5)),
]
CASES = [
    resize(shape, sizes, mode, coordinates)
    for shape, sizes in SHAPES
    for mode, coordinates in [
        ("nearest", "asymmetric"),
        ("nearest", "half_pixel"),
        ("linear", "half_pixel"),
        ("linear", "align_corners"),
    ]
] + [
    resize((1, 2, 5, 7), sizes, "cubic", coordinates)
    for sizes in [(10, 14), (3, 4), (5, 9), (1, 1)]
    for coordinates in ("half_pixel", "align_corners")
]
CASES += [
    resize((3, 4), (7,), "linear", "asymmetric"),
    resize((4,), (7,), "linear", "half_pixel"),
    resize((2, 5), (3,), "cubic", "asymmetric"),
    resize((0, 2, 3), (6,), "linear", "half_pixel"),
]


@pytest.mark.parametrize(("case", "dtype"), lowering_params(CASES))
def test_lowering_equals_oracle(case: Case, dtype: DType) -> None:
    run_lowering(case, dtype)


@pytest.mark.parametrize(("case", "dtype"), torch_params(CASES))
def test_oracle_equals_torch(case: Case, dtype: DType) -> None:
    run_torch(case, dtype)


@given(
    st.integers(1, 12),
    st.integers(1, 30),
    st.sampled_from(
        [
            ("nearest", "asymmetric"),
            ("nearest", "half_pixel"),
            ("linear", "half_pixel"),
            ("linear", "align_corners"),
            ("linear", "asymmetric"),
            ("cubic", "half_pixel"),
            ("cubic", "align_corners"),
        ]
    ),
)
@settings(max_examples=120)
def test_any_resize_of_one_axis(extent: int, size: int, way: tuple[str, str]) -> None:
    mode, coordinates = way
    x = np.random.default_rng(0).standard_normal((1, 1, extent))
    if mode == "nearest":
        x = x.astype(np.float32)  # in f64 PyTorch rounds positions to f64
    attrs = {"sizes": (size,), "mode": mode, "coordinates": coordinates}
    check_lowering("resize", [x], **attrs)
    if coordinates != "asymmetric" or mode == "nearest":
        if mode == "cubic":
            expected = reference((size, 1), mode, coordinates)(torch.from_numpy(x)[..., None])[..., 0]
        else:
            expected = reference((size,), mode, coordinates)(torch.from_numpy(x))
        check_torch(oracle_of("resize", [x], **attrs), expected)


@pytest.mark.parametrize(("extent", "size"), [(2, 82), (3, 123), (37, 91)])
def test_nearest_where_torch_rounds_to_the_other_element(extent: int, size: int) -> None:
    x = np.arange(extent, dtype=np.float32).reshape(1, 1, extent)
    coordinates = "asymmetric"
    attrs = {"sizes": (size,), "mode": "nearest", "coordinates": coordinates}
    check_torch(
        oracle_of("resize", [x], **attrs), reference((size,), "nearest", coordinates)(torch.from_numpy(x))
    )
    check_lowering("resize", [x], **attrs)


def test_upsampling_by_two_is_a_plain_index() -> None:
    x = np.zeros((1, 1, 5), np.float32)
    attrs = {"sizes": (10,), "mode": "nearest", "coordinates": "asymmetric"}
    output, _ = lowered(node_of("resize", [x], attrs))
    assert isinstance(output, te.Compute)
    (load,) = te.loads(output.body)
    assert load.indices[2] == output.axes[2] // 2


def test_an_infinite_neighbour_of_weight_zero_gives_nan_as_in_torch() -> None:
    x = np.array([[1.0, 2.0, np.inf], [np.inf, 3.0, 4.0]])
    result = check_lowering("resize", [x], sizes=(1,), mode="linear", coordinates="half_pixel")
    expected = torch.nn.functional.interpolate(torch.tensor(x)[None], size=1, mode="linear")[0]
    np.testing.assert_array_equal(result, expected.numpy())
