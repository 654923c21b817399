"""What is rewritten for machines whose libraries compute the contractions, and that it keeps the meaning."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from tilewright import frontend
from tilewright.graph.ir import Graph
from tilewright.graph.oracle import evaluate
from tilewright.graph.task import Partition
from tilewright.rewrites.pipeline import Abilities, run_pipeline

WITH_LIBRARIES = Abilities(chains=False, half=True, libraries=True)


class Attends(nn.Module):
    """Queries, keys and values of one input; `shared`: the keys are read elsewhere too."""

    def __init__(self, shared: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))
        self.shared = shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x) for layer in (self.q, self.k, self.v))
        heads = [each.view(2, 16, 2, 16).transpose(1, 2) for each in (q, k, v)]
        result = nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(2, 16, 32)
        return result + k if self.shared else result


def graph_of(model: nn.Module, x: torch.Tensor) -> Graph:
    return frontend.import_model(model.eval(), (x,)).graph


def computed(partition: Partition, x: np.ndarray) -> np.ndarray:
    """By the tasks, call after call."""
    values = {node: np.asarray(node.data, np.float64) for node in partition.graph.nodes() if node.is_constant}
    values |= dict.fromkeys(partition.graph.inputs, x)
    for call in partition.calls:
        arrays = [values[partition.buffer_of(node)].reshape(node.shape) for node in call.inputs]
        (result,) = evaluate(call.task.graph, arrays, precise=True)
        values[call.output] = np.asarray(result).reshape(call.output.shape)
    return values[partition.graph.outputs[0]]


def test_products_of_one_operand_become_one() -> None:
    x = torch.randn(2, 16, 32)
    model = Attends()
    graph = graph_of(model, x)
    merged, split = run_pipeline(graph, abilities=WITH_LIBRARIES), run_pipeline(graph)
    assert [sum("matmul" in call.task.label for call in p.calls) for p in (merged, split)] == [1, 3]
    assert np.allclose(computed(merged, x.numpy()), model(x).detach().numpy(), atol=1e-5)


def test_a_product_that_is_read_elsewhere_stays_apart() -> None:
    x = torch.randn(2, 16, 32)
    model = Attends(shared=True)
    merged = run_pipeline(graph_of(model, x), abilities=WITH_LIBRARIES)
    assert sum("matmul" in call.task.label for call in merged.calls) == 2
    assert np.allclose(computed(merged, x.numpy()), model(x).detach().numpy(), atol=1e-5)


def test_a_clamp_goes_to_the_depthwise_convolution_that_reads_it() -> None:
    layers = [nn.Conv2d(8, 16, 1), nn.ReLU6(), nn.Conv2d(16, 16, 3, 1, 1, groups=16), nn.ReLU6()]
    model, x = nn.Sequential(*layers), 4 * torch.randn(1, 8, 6, 6)
    partition = run_pipeline(graph_of(model, x), abilities=WITH_LIBRARIES)
    labels = [call.task.label for call in partition.calls if "conv" in call.task.label]
    assert labels == ["conv+add", "clamp+pad+conv+add+clamp"]
    assert np.allclose(computed(partition, x.numpy()), model(x).detach().numpy(), atol=1e-5)


def test_a_clamp_goes_to_the_mean_that_reads_it() -> None:
    model = nn.Sequential(nn.Conv2d(8, 16, 1), nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    x = 4 * torch.randn(1, 8, 6, 6)
    partition = run_pipeline(graph_of(model, x), abilities=WITH_LIBRARIES)
    assert "clamp+mean" in [call.task.label for call in partition.calls]
    assert np.allclose(computed(partition, x.numpy()), model(x).detach().numpy(), atol=1e-5)


def test_a_clamp_with_two_readers_stays() -> None:
    class Forks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(8, 16, 1)
            self.second = nn.Conv2d(16, 16, 3, 1, 1, groups=16)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = nn.functional.relu6(self.first(x))
            return self.second(x), x.exp()

    model, x = Forks(), 4 * torch.randn(1, 8, 6, 6)
    partition = run_pipeline(graph_of(model, x), abilities=WITH_LIBRARIES)
    assert "conv+add+clamp" in [call.task.label for call in partition.calls]
    assert np.allclose(computed(partition, x.numpy()), model(x)[0].detach().numpy(), atol=1e-5)
