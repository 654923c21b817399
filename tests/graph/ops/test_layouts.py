"""Convolutions and pools whose channels are stored in blocks are those of PyTorch, and of their lowering."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.graph.ops.checks import Case, lowering_params, run_lowering, run_torch, torch_params
from tilewright.dtypes import DType
from tilewright.graph.ops.layouts import block_of, by, channels_of, spatial_axes

CONVS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def joined(x: torch.Tensor) -> torch.Tensor:
    """Channels first, of blocks."""
    return x.movedim(-1, 2).flatten(1, 2)


def in_blocks(x: torch.Tensor, block: int) -> torch.Tensor:
    return x.unflatten(1, (-1, block)).movedim(2, -1)


def conv(
    x: tuple[int, ...],
    w: tuple[int, ...],
    read: int,
    block: int,
    *,
    bias: bool = False,
    **given: Any,
) -> Case:
    """Sizes with channels first; `read` and `block` are the channels in a block of x and of the result."""
    rank = len(w) - 2
    attrs = {
        "stride": (1,) * rank,
        "padding": ((0, 0),) * rank,
        "dilation": (1,) * rank,
        "groups": 1,
        **given,
    }

    def reference(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        weight = w.movedim((-1, -2), (0, 1))
        more = (attrs["stride"], 0, attrs["dilation"], attrs["groups"])
        return in_blocks(CONVS[rank](joined(x), weight, bias, *more), block)

    operands = [(x[0], x[1] // read, *x[2:], read), (*w[2:], w[1], w[0]), *([(w[0],)] if bias else [])]
    return Case("conv", operands, {**attrs, "layout": by(block)}, reference)


def max_pool(x: tuple[int, ...], block: int, kernel: tuple[int, int], padding: tuple[int, int]) -> Case:
    attrs: dict[str, Any] = {"kernel": kernel, "stride": (2, 1), "padding": padding, "dilation": (1, 1)}

    def reference(x: torch.Tensor) -> torch.Tensor:
        return in_blocks(F.max_pool2d(joined(x), kernel, (2, 1), padding), block)

    operand = (x[0], x[1] // block, *x[2:], block)
    return Case("max_pool", [operand], {**attrs, "ceil_mode": False, "layout": by(block)}, reference)


def adaptive(x: tuple[int, ...], block: int, sizes: tuple[int, int]) -> Case:
    def reference(x: torch.Tensor) -> torch.Tensor:
        return in_blocks(F.adaptive_avg_pool2d(joined(x), sizes), block)

    operand = (x[0], x[1] // block, *x[2:], block)
    return Case("adaptive_avg_pool", [operand], {"sizes": sizes, "layout": by(block)}, reference)


CASES = [
    conv((1, 8, 9), (4, 8, 3), 4, 2, bias=True),
    conv((2, 8, 5, 6), (12, 8, 3, 2), 4, 4, bias=True),
    conv((1, 3, 7, 8), (8, 3, 3, 3), 1, 4, stride=(2, 3), dilation=(1, 2)),
    conv((1, 8, 5, 5), (8, 4, 3, 3), 4, 4, groups=2),
    conv((1, 8, 5, 5), (8, 4, 3, 3), 2, 8, groups=2, bias=True),
    conv((1, 8, 5, 5), (8, 2, 3, 3), 4, 4, groups=4),
    conv((1, 8, 5, 5), (8, 1, 3, 3), 4, 4, groups=8, bias=True),
    conv((1, 4, 5, 5), (8, 1, 3, 3), 4, 8, groups=4, stride=(2, 2)),
    conv((2, 6, 4, 3), (4, 6, 1, 1), 6, 2),
    conv((0, 8, 4, 3), (4, 8, 1, 1), 4, 2),
    conv((1, 4, 4, 5, 4), (4, 4, 2, 3, 2), 2, 4, stride=(1, 2, 1)),
    max_pool((2, 8, 6, 7), 4, (2, 3), (1, 1)),
    adaptive((1, 8, 6, 7), 2, (3, 4)),
    adaptive((2, 8, 6, 8), 8, (1, 1)),
]


@pytest.mark.parametrize(("case", "dtype"), lowering_params(CASES))
def test_lowering_equals_oracle(case: Case, dtype: DType) -> None:
    run_lowering(case, dtype)


@pytest.mark.parametrize(("case", "dtype"), torch_params(CASES))
def test_oracle_equals_torch(case: Case, dtype: DType) -> None:
    run_torch(case, dtype)


def test_names_of_layouts() -> None:
    assert by(16) == "channels_by_16"
    assert [block_of(name) for name in (by(16), by(1), "channels_first", "channels_last")] == [16, 1, 0, 0]
    assert channels_of((1, 4, 7, 7, 16), by(16)) == 64
    assert [*spatial_axes(5, by(16))] == [2, 3]
