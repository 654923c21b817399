"""The pipeline on the models of the papers, small: the same function, and the structure that each should have."""

from __future__ import annotations

import time
from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.rewrites.helpers import assert_close
from tilewright.graph.ir import Graph, Node
from tilewright.graph.lower import lower_graph
from tilewright.graph.op import flops_of
from tilewright.graph.oracle import evaluate
from tilewright.graph.task import Partition
from tilewright.measure.passes import run_calls
from tilewright.rewrites.pipeline import run_pipeline

zoo = pytest.importorskip("tilewright.zoo")
torch_export = pytest.importorskip("tilewright.frontend.torch_export")

# One configuration of each architecture: the small forms of the others are the same.
MODELS = [
    *[
        "resnet18",
        "resnet50",
        "vgg16",
        "repvgg-a0",
        "repvgg-a0-branches",
        "mobilenetv2",
        "bert-base",
        "gpt2",
        "vit-b16",
    ],
    *["detr-3", "setr-naive", "setr-pup", "unet", "retinanet"],
]


@cache
def imported(name: str) -> tuple[Graph, list[np.ndarray]]:
    inputs = zoo.example_inputs(name, small=True)
    graph: Graph = torch_export.import_torch(zoo.build(name, small=True), inputs).graph
    return graph, [tensor.numpy() for tensor in inputs]


@cache
def partition(name: str) -> Partition:
    return run_pipeline(imported(name)[0])


@pytest.mark.parametrize("name", MODELS)
def test_same_function(name: str) -> None:
    graph, inputs = imported(name)
    # Folded batch norms are rounded to f32 once more, and so is the scale of attention.
    exact = not any(node.op in ("batch_norm", "attention", "div") for node in graph.nodes())
    tolerance = 1e-9 if exact else 1e-6
    assert_close(run_calls(partition(name), inputs), evaluate(graph, inputs), tolerance)


@pytest.mark.parametrize("name", MODELS)
def test_every_task_can_be_lowered(name: str) -> None:
    for task, _ in partition(name).tasks().values():
        output, operands = lower_graph(task.graph)
        assert output.shape == task.output.shape
        assert [tensor.shape for tensor in operands] == [node.shape for node in task.graph.inputs]


def permutes(name: str) -> list[Node]:
    return [node for node in partition(name).graph.nodes() if node.op == "permute"]


def labels(name: str) -> Counter[str]:
    return Counter(call.task.label for call in partition(name).calls)


@pytest.mark.parametrize(
    "name", ["resnet18", "resnet50", "repvgg-a0", "repvgg-a0-branches", "mobilenetv2", "retinanet"]
)
def test_one_permute_of_the_image_and_none_behind(name: str) -> None:
    (only,) = permutes(name)
    assert only.inputs[0].is_input


def test_unet_permutes_its_input_and_output() -> None:
    first, *shuffles, last = permutes("unet")
    assert first.inputs[0].is_input
    assert last in partition("unet").graph.outputs
    # Each transposed convolution is a matmul whose windows are put in place.
    depth = 2
    assert len(shuffles) == depth and all(node.type.rank == 6 for node in shuffles)


def test_vgg_permutes_nothing_before_its_dense_layers() -> None:
    (only,) = permutes("vgg16")
    assert only.inputs[0].is_input


@pytest.mark.parametrize("name", ["bert-base", "gpt2", "vit-b16", "setr-naive"])
def test_a_transformer_permutes_q_k_v_and_the_result_of_attention(name: str) -> None:
    layers = 2
    image = {"vit-b16": 1, "setr-naive": 2}.get(name, 0)
    assert len(permutes(name)) == 4 * layers + image


def test_kernels_of_a_residual_network() -> None:
    # Of the two convolutions that meet in a residual addition, the later one takes it.
    assert labels("resnet18") == {
        "permute": 1,
        "pad+conv+add+relu": 7,
        "pad+conv+add": 3,
        "pad+conv+add+add+relu": 3,
        "conv+add+add+relu": 3,
        "max_pool": 1,
        "mean": 1,
        "matmul+add": 1,
    }


def test_kernels_of_a_transformer() -> None:
    layers = 2
    assert labels("bert-base") == {
        "take+add+add+layer_norm": 1,
        "matmul+add": 3 * layers,
        "attention": layers,  # no permute around it
        "matmul+add+add": 2 * layers,
        "layer_norm": 2 * layers,
        "matmul+add+gelu": layers,
    }
    assert "permute" not in labels("gpt2")


def test_equal_layers_are_tuned_once() -> None:
    found = partition("bert-base")
    assert len(found.tasks()) < len(found.calls) / 2


def test_nothing_is_computed_that_was_not_before() -> None:
    for name in ("resnet18", "bert-base", "unet"):
        before = sum(map(flops_of, imported(name)[0].nodes()))
        assert partition(name).flops <= 1.02 * before


@pytest.mark.parametrize("name,limit", [("resnet50", 1.5), ("bert-base", 2.0)])
@pytest.mark.slow
def test_the_pipeline_is_quick_on_whole_models(name: str, limit: float) -> None:
    graph: Any = torch_export.import_torch(zoo.build(name), zoo.example_inputs(name)).graph
    start = time.process_time()
    run_pipeline(graph)
    assert time.process_time() - start < limit
