"""`torch.autocast` around the compilation and inside the model: the casts that it implies are part of the graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tilewright
from tests.frontend.checking import TOLERANCE, floats, relative_error
from tilewright.dtypes import DType
from tilewright.frontend.torch.types import to_numpy

TYPES = {torch.bfloat16: DType.BF16, torch.float16: DType.F16}


class Net(nn.Module):
    """Operators that autocast takes in 16 bits, some that it takes in float32, some that it leaves alone."""

    def __init__(self, inside: torch.dtype | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.linear = nn.Conv1d(4, 8, 3), nn.LayerNorm(6), nn.Linear(6, 5)
        self.inside = inside
        self.eval()

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.relu(self.norm(self.conv(x))))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.inside is None:
            y = self.features(x)
        else:
            with torch.autocast("cpu", dtype=self.inside):
                y = self.features(x)
        with torch.autocast("cpu", enabled=False):
            exact = y.float() @ y.float().mT
        return {"y": y, "exact": exact, "soft": torch.softmax(y, -1), "sum": y.sum() + x.sum()}


def check(got: Any, expected: Any, dtype: DType) -> None:
    assert list(got) == list(expected)
    for name, value in expected.items():
        assert got[name].dtype is value.dtype, name
        assert relative_error(to_numpy(got[name]), to_numpy(value)) <= TOLERANCE[dtype], name


@pytest.mark.parametrize("dtype", TYPES)
def test_around_the_compilation(dtype: torch.dtype) -> None:
    model, x = Net(), floats(2, 4, 8)
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype):
        fast = tilewright.compile(model, (x,))
        expected = model(x)
    assert expected["y"].dtype is dtype
    # It is a model in these types from then on, whether autocast is on when it is called or not.
    check(fast(x), expected, TYPES[dtype])
    with torch.autocast("cpu", dtype=dtype):
        check(fast(x), expected, TYPES[dtype])


@pytest.mark.parametrize("dtype", TYPES)
def test_inside_the_model(dtype: torch.dtype) -> None:
    model, x = Net(dtype), floats(2, 4, 8)
    with torch.no_grad():
        expected = model(x)
    check(tilewright.compile(model, (x,))(x), expected, TYPES[dtype])
    program = torch.export.export(model, (x,), strict=False)
    check(tilewright.compile(program)(x), expected, TYPES[dtype])


def test_a_program_that_was_exported_under_autocast() -> None:
    model, x = Net(), floats(2, 4, 8)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        program = torch.export.export(model, (x,), strict=False)
        expected = model(x)
    check(tilewright.compile(program)(x), expected, DType.BF16)


def test_other_shapes_are_computed_as_the_first_one() -> None:
    model = Net()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        policy = tilewright.runtime.dispatch.Policy(limit=2, eager=2)
        fast = tilewright.compile(model, (floats(2, 4, 8),), dynamic=policy)
    for batch in (2, 3, 4):  # the last one runs in PyTorch
        x = floats(batch, 4, 8)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            expected = model(x)
        check(fast(x), expected, DType.BF16)
    assert len(fast.variants) == 2
