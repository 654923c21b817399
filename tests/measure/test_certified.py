"""The share of certified tiles that `explain` shows is what the kernel's certificate says."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tilewright
from tests.machines import here_as

ZEN_4 = here_as("znver4")
pytestmark = pytest.mark.skipif(ZEN_4 is None, reason="this processor does not run code for Zen 4")


def explained(x: torch.Tensor) -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(512, 256), torch.nn.ReLU(), torch.nn.Linear(256, 512)).eval()
    fast = tilewright.compile(model, (x,), target=ZEN_4)
    explanation = fast.explain((x,), repeats=1)
    return [row.certified for row in explanation.rows if row.certified is not None]


def test_all_tiles_of_ordinary_rows_are_certified_and_none_of_sparse_ones() -> None:
    ordinary = torch.randn(128, 512)
    assert explained(ordinary) == [1.0, 1.0]
    sparse = ordinary * (torch.rand(128, 512) < 0.01)
    first, _ = explained(sparse)
    assert first == 0.0
    mixed = torch.cat([ordinary[:64], sparse[64:]])
    first, _ = explained(mixed)
    assert 0.3 < first < 0.6


def test_convolutions_count_pixels() -> None:
    torch.manual_seed(0)
    model = torch.nn.Conv2d(64, 256, 3, stride=2, padding=1).eval()
    x = torch.randn(1, 64, 28, 28)
    fast = tilewright.compile(model, (x,), target=ZEN_4)
    certified = [row.certified for row in fast.explain((x,), repeats=1).rows if row.certified is not None]
    assert certified == [1.0] and "are certified" in str(fast.explain((x,), repeats=1))
    assert np.isfinite(fast(x).numpy()).all()
