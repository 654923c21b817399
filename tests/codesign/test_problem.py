"""Layers as loop nests, from shapes and from graphs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tilewright.codesign.problem import Layer, layers_of, left_to_host
from tilewright.errors import MappingError
from tilewright.frontend.torch_export import import_torch


def test_a_convolution_has_the_sizes_that_pytorch_gives_it() -> None:
    module = nn.Conv2d(6, 10, (3, 5), stride=(2, 1), padding=(1, 2), dilation=(2, 1))
    layer = Layer.convolution(
        (20, 30), 6, 10, (3, 5), stride=(2, 1), padding=((1, 1), (2, 2)), dilation=(2, 1)
    )
    _, k, q, p = module(torch.zeros(1, 6, 20, 30)).shape
    assert layer.extents == (5, 3, p, q, 6, k, 1)
    assert layer.stride == (1, 2) and layer.dilation == (1, 2)
    assert layer.macs == 3 * 5 * 6 * k * p * q
    assert layer.words("weights") == module.weight.numel()
    assert layer.words("outputs") == k * p * q
    assert layer.words("inputs") == 6 * ((p - 1) + 5) * ((q - 1) * 2 + 2 * 2 + 1)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.third = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.last = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.third(self.second(self.first(x)).relu())
        rows = x.flatten(2).transpose(1, 2)
        return self.last(rows @ rows.transpose(1, 2) @ rows)


def test_layers_of_a_model_are_its_matmuls_and_convolutions() -> None:
    graph = import_torch(Network().eval(), (torch.zeros(2, 3, 16, 16),)).graph
    found = {(layer.extents, layer.stride): layer.count for layer in layers_of(graph)}
    assert found == {
        ((3, 3, 8, 8, 3, 8, 2), (2, 2)): 1,
        ((3, 3, 8, 8, 1, 1, 2), (1, 1)): 16,  # two layers of eight groups
        ((1, 1, 64, 1, 8, 64, 1), (1, 1)): 2,  # one for each image
        ((1, 1, 64, 1, 64, 8, 1), (1, 1)): 2,
        ((1, 1, 128, 1, 8, 5, 1), (1, 1)): 1,  # one weight for all rows
    }


def test_an_empty_output_is_an_error() -> None:
    with pytest.raises(MappingError, match="extent P of a layer must be a positive integer, got -1"):
        Layer.convolution((8, 2), 3, 8, (3, 4))


def test_extents_are_seven() -> None:
    with pytest.raises(MappingError, match="7 extents"):
        Layer((1, 2, 3))  # type: ignore[arg-type]


def test_what_has_no_mapping_is_left_to_the_host_with_its_macs() -> None:
    model = nn.Sequential(
        nn.Conv3d(2, 6, (3, 1, 2), groups=2),
        nn.Flatten(2),
        nn.ConvTranspose1d(6, 8, 5, stride=2, groups=2),
        nn.Conv1d(8, 4, 3),
    )
    graph = import_torch(model.eval(), (torch.zeros(1, 2, 4, 4, 4),)).graph
    outputs = 6 * 2 * 4 * 3
    assert left_to_host(graph) == {
        "3-d convolution": outputs * 1 * 6,
        "conv_transpose": 6 * 24 * 4 * 5,
    }
    layers = layers_of(graph)
    assert [layer.extents for layer in layers] == [(3, 1, 49, 1, 8, 4, 1)]
    assert left_to_host(import_torch(model[-1:].eval(), (torch.zeros(1, 8, 9),)).graph) == {}
