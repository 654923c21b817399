"""Pooling and resampling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.frontend.checking import check, floats, functions, ops_of

POOLS: dict[str, Any] = {
    "max": lambda x: [
        F.max_pool2d(x, 2),
        F.max_pool2d(x, 3, 2, 1),
        F.max_pool2d(x, (2, 3), (1, 2), dilation=2),
    ],
    "max_ceil": lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True),
    "avg": lambda x: [
        F.avg_pool2d(x, 2),
        F.avg_pool2d(x, 3, 2, 1),
        F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    ],
    "avg_ceil": lambda x: [F.avg_pool2d(x, 3, 2, ceil_mode=True), F.avg_pool2d(x, 2, divisor_override=3)],
    "adaptive_avg": lambda x: [F.adaptive_avg_pool2d(x, 1), F.adaptive_avg_pool2d(x, (3, None))],
    "adaptive_max": lambda x: F.adaptive_max_pool2d(x, (3, 2)),
    "lp": lambda x: F.lp_pool2d(x.abs(), 2.0, 2),
    "one_axis": lambda x: [F.max_pool1d(x[0], 2), F.avg_pool1d(x[0], 3, 2), F.adaptive_avg_pool1d(x[0], 3)],
    "three_axes": lambda x: [
        F.max_pool3d(x[None], 2),
        F.avg_pool3d(x[None], 2),
        F.adaptive_avg_pool3d(x[None], 2),
    ],
    "no_batch": lambda x: [F.max_pool2d(x[0], 2), F.avg_pool2d(x[0], 2), F.adaptive_avg_pool2d(x[0], 2)],
    "values_with_indices": lambda x: F.max_pool2d(x, 2, return_indices=True)[0],
    "indices": lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True),
}
RESIZES: dict[str, Any] = {
    "nearest": lambda x: [F.interpolate(x, scale_factor=2), F.interpolate(x, size=(3, 11))],
    "nearest_exact": lambda x: F.interpolate(x, size=(3, 11), mode="nearest-exact"),
    "bilinear": lambda x: [F.interpolate(x, scale_factor=f, mode="bilinear") for f in (2, (1, 3), 0.5)],
    "bilinear_corners": lambda x: F.interpolate(x, size=(9, 5), mode="bilinear", align_corners=True),
    "bilinear_one": lambda x: F.interpolate(x, size=(1, 5), mode="bilinear", align_corners=True),
    "bicubic": lambda x: [
        F.interpolate(x, scale_factor=2, mode="bicubic"),
        F.interpolate(x, (5, 4), mode="bicubic"),
    ],
    "bicubic_corners": lambda x: F.interpolate(x, (5, 4), mode="bicubic", align_corners=True),
    "linear": lambda x: F.interpolate(x[0], size=9, mode="linear"),
    "nearest_1d": lambda x: F.interpolate(x[0], scale_factor=2),
    "trilinear": lambda x: F.interpolate(x[None], scale_factor=2, mode="trilinear"),
    "module": torch.nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
    "pixel_area": lambda x: F.interpolate(x, size=(3, 4), mode="area"),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_pools(dtype: torch.dtype) -> None:
    check(functions(POOLS), floats(2, 3, 8, 7, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_resizes(dtype: torch.dtype) -> None:
    check(functions(RESIZES), floats(2, 3, 6, 8, dtype=dtype))


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_a_factor_that_does_not_divide(mode: str) -> None:
    """1.3 * 5 = 6.5 elements: PyTorch samples 6, at multiples of 1 / 1.3. Its own decomposition says which."""
    result = check(lambda x: F.interpolate(x, scale_factor=1.3, mode=mode), floats(1, 2, 5, 5))
    assert "take" in ops_of(result)
