"""Programs cut at random operators: the regions, run by the oracle, and the rest give PyTorch's results."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx, nn

from tilewright.frontend.torch.captured import (
    capture,
    export_region,
    import_region,
    lifted_tensors,
    user_inputs,
)
from tilewright.frontend.torch.regions import Cut, cut
from tilewright.frontend.torch.types import to_numpy, to_torch
from tilewright.graph.oracle import evaluate


class Model(nn.Module):
    """Constants of all kinds, views of them and of results, operators with several results."""

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
        tied = weight.t() * 2 + torch.arange(6.0)
        y = torch.relu(x @ tied + bias)
        first, second = y.chunk(2, -1)
        largest, _ = torch.exp(first).max(-1, keepdim=True)
        z = torch.tanh(second - largest) @ tied[::2, :].softmax(0)
        w = torch.cat([z, y], -1) * torch.tensor([0.5, 2.0]).repeat(6)
        return w.t(), y, first, weight.t(), z.mean(0).expand(4, -1), w @ (weight @ weight.t()).repeat(2, 1)


class Evaluated(nn.Module):
    def __init__(self, region: Any) -> None:
        super().__init__()
        self.region = region

    def forward(self, *tensors: torch.Tensor) -> Any:
        results = evaluate(self.region.model.graph, [to_numpy(tensor) for tensor in tensors], precise=False)
        placed = [
            to_torch(value) if order is None else to_torch(value).permute(order)
            for value, order in zip(results, self.region.orders, strict=True)
        ]
        return placed[0] if len(placed) == 1 else tuple(placed)


def compiled_regions(chunks: Cut) -> None:
    for name in chunks.regions:
        program = export_region(chunks.module.get_submodule(name))
        region = import_region(program, frozen=chunks.constants_of(name))
        chunks.replace(name, Evaluated(region), region.inputs)


@pytest.mark.parametrize("seed", range(40))
def test_random_cuts(seed: int) -> None:
    chance = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(5, 6, generator=generator), torch.randn(6, 6, generator=generator)
    arguments = (x, weight, torch.randn(6, generator=generator))
    captured = capture(fx.symbolic_trace(Model()), arguments)
    nodes = [n.name for n in captured.program.graph.nodes if n.op == "call_function"]
    stays = frozenset(chance.sample(nodes, chance.randrange(4)))
    frozen = {i: arguments[i] for i in chance.sample([1, 2], chance.randrange(3))}
    chunks = cut(replace(captured, torch_side=captured.torch_side | stays), frozen)
    compiled_regions(chunks)
    module, taken = chunks.finished()
    given = [*lifted_tensors(captured.program).values(), *arguments]
    got, expected = module(*[given[i] for i in taken]), Model()(*arguments)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, check_stride=True)
    assert got[3].data_ptr() == weight.data_ptr() and got[2].data_ptr() == got[1].data_ptr()
    if not stays:
        (region,) = [node for node in module.graph.nodes if node.op == "call_module"]
        assert len(region.args) == 3 - len(frozen)


def test_a_region_that_depends_on_the_call_has_no_other_input() -> None:
    arguments = (torch.randn(5, 6), torch.randn(6, 6), torch.randn(6))
    captured = capture(fx.symbolic_trace(Model()), arguments)
    stays = {
        n.name
        for n in captured.program.graph.nodes
        if str(n.target) in ("aten.tanh.default", "aten.exp.default")
    }
    chunks = cut(
        replace(captured, torch_side=captured.torch_side | stays), {1: arguments[1], 2: arguments[2]}
    )
    compiled_regions(chunks)
    module, _ = chunks.finished()
    varying = {node for node in module.graph.nodes if node.name == user_inputs(captured.program)[0]}
    for node in module.graph.nodes:
        if not varying.isdisjoint(node.all_input_nodes):
            assert node.op != "call_module" or varying.issuperset(node.all_input_nodes)
            varying.add(node)
    assert len(chunks.regions) >= 2 and varying.issuperset(
        n for n in module.graph.nodes if n.op == "call_module"
    )
