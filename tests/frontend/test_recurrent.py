"""Recurrent layers of PyTorch: stacked, of both directions, with projections, first states and without biases."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.frontend.checking import check

TIME, BATCH, INPUTS, HIDDEN = 3, 2, 4, 5


def states(layers: int, width: int = HIDDEN) -> torch.Tensor:
    return torch.randn(layers, BATCH, width)


CASES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "LSTM of two layers": (nn.LSTM(INPUTS, HIDDEN, 2, bidirectional=True), ()),
    "LSTM with projections and states": (
        nn.LSTM(INPUTS, HIDDEN, 2, bidirectional=True, proj_size=3),
        ((states(4, 3), states(4)),),
    ),
    "LSTM without biases, batch first": (nn.LSTM(INPUTS, HIDDEN, 3, bias=False, batch_first=True), ()),
    "GRU of two layers": (nn.GRU(INPUTS, HIDDEN, 2, bidirectional=True, batch_first=True), (states(4),)),
    "GRU without biases": (nn.GRU(INPUTS, HIDDEN, 2, bidirectional=True, bias=False), ()),
    "RNN of relu": (nn.RNN(INPUTS, HIDDEN, 2, bidirectional=True, nonlinearity="relu"), (states(4),)),
    "RNN of tanh, batch first": (nn.RNN(INPUTS, HIDDEN, 2, batch_first=True, bias=False), ()),
}


@pytest.mark.parametrize("case", sorted(CASES))
def test_layers(case: str) -> None:
    module, initial = CASES[case]
    shape = (BATCH, TIME, INPUTS) if module.batch_first else (TIME, BATCH, INPUTS)
    check(module.eval(), torch.randn(shape), *initial)


def test_one_sequence_without_a_batch() -> None:
    check(nn.GRU(INPUTS, HIDDEN, 2, bidirectional=True).eval(), torch.randn(TIME, INPUTS))
