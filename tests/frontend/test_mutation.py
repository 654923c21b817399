"""In-place operators: on values of the model itself they are followed, on buffers and inputs refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.frontend.checking import Function, check, floats, import_torch
from tilewright.errors import MutationError
from tilewright.frontend.torch import mutation


def chain(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.add_(1).mul_(x).relu_()
    y += 0.5
    y.clamp_(min=0.7)
    return y


def earlier_name(x: torch.Tensor) -> Any:
    """A later read of the value by its first name sees the write."""
    y = x + 1
    z = y.relu_()
    w = y * 2
    y.neg_()
    return y, z, w


def through_dropout(x: torch.Tensor) -> Any:
    """Dropout in eval mode returns its operand itself."""
    y = x + 1
    z = F.dropout(y, 0.5, False)
    z.relu_()
    return y, z


def into_slices(x: torch.Tensor) -> Any:
    y = torch.zeros(4, 4)
    y[1:3] = x[1:3]
    y[:, 0] += 2
    y[::2, 3] = 7.0
    y.view(16)[5] = -1.0
    return y, y.sum(0)


def view_before_the_write(x: torch.Tensor) -> Any:
    y = x * 2
    row = y[1]
    y.mul_(3)
    row.add_(1)
    return y, row


def view_after_the_write(x: torch.Tensor) -> Any:
    y = x * 2
    y.relu_()
    return y.flatten().exp(), y[1]


def filled(x: torch.Tensor) -> Any:
    y = torch.empty_like(x)
    y.copy_(x)
    z = torch.empty(3).fill_(2.0)
    w = x.clone().zero_()
    v = (x * 1).masked_fill_(x > 0, -1)
    return y, z, w, v


def accumulated(x: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(4)
    for row in x:
        total += row
    return total


@pytest.mark.parametrize(
    "model",
    [
        chain,
        earlier_name,
        through_dropout,
        into_slices,
        view_before_the_write,
        view_after_the_write,
        filled,
        accumulated,
    ],
)
def test_writes_to_values(model: Callable[..., Any]) -> None:
    check(model, floats(4, 4))


def test_simple_writes_need_no_retracing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutation, "retraced", None)
    for model in (chain, earlier_name, through_dropout, view_after_the_write, accumulated):
        check(model, floats(4, 4))
    check(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Flatten()).eval(), floats(1, 3, 5, 5))


def test_half_precision_keeps_its_type() -> None:
    def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = x * 1
        z += y
        z *= 0.1
        return z

    check(model, floats(8, dtype=torch.float16), floats(8, seed=1))


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(1))
        self.cache = nn.Module()
        self.cache.register_buffer("keys", torch.zeros(4, 2))
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps.add_(1)
        self.cache.keys[1:3] = x
        return x + self.steps


def test_buffers_are_named() -> None:
    with pytest.raises(MutationError, match=r"buffer steps, its buffer cache\.keys"):
        import_torch(Counter(), floats(2, 2))


def test_inputs_are_named() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        x[0] = 0
        return x * 2

    with pytest.raises(MutationError, match="input args_0"):
        import_torch(Function(model), floats(3, 2))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_exported_program_that_writes() -> None:
    program = torch.export.export(Counter(), (floats(2, 2),)).run_decompositions()
    with pytest.raises(MutationError, match="steps"):
        import_torch(program)
