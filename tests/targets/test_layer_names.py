"""The names of a model's layers reach its kernels, by whatever road the model comes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn import functional as F

import tilewright
from tilewright.runtime.contract import plan_digest
from tilewright.support.trace import Trace
from tilewright.tune.progress import Progress


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(inner)) + x)


class Network(nn.Module):
    """Two equal blocks, and a function that no module holds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(Block(16), Block(16))
        self.fc = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.fc(self.layer1(x).mean((2, 3))))


FIRST = "layer1.0.conv1 + bn1 + relu"
SECOND = "layer1.0.conv2 + bn2 + add + relu"
WANTED = [FIRST, SECOND, "layer1.1.conv1 + bn1 + relu", "layer1.1.conv2 + bn2 + add + relu", "fc + gelu"]


@pytest.fixture(scope="module")
def network() -> nn.Module:
    torch.manual_seed(0)
    return Network().eval()


@pytest.fixture(scope="module")
def example() -> torch.Tensor:
    return torch.randn(1, 16, 12, 12)


@pytest.fixture(scope="module")
def compiled(network: nn.Module, example: torch.Tensor) -> tilewright.CompiledModel:
    return tilewright.compile(network, (example,))


def layers_of(model: tilewright.CompiledModel) -> list[str]:
    return [step.layer for step in model.plan.steps]


def test_a_kernel_has_the_names_of_all_layers_that_it_computes(compiled: tilewright.CompiledModel) -> None:
    """What is folded away (batch norm), what is fused, and what is called as a function."""
    assert set(WANTED) < set(layers_of(compiled))
    assert all(layers_of(compiled))


def test_layers_of_equal_shapes_are_one_task(compiled: tilewright.CompiledModel) -> None:
    tasks = {step.layer: step.task for step in compiled.plan.steps}
    assert tasks[FIRST] == tasks[WANTED[2]] and tasks[SECOND] == tasks[WANTED[3]]
    assert not any("layer1" in info.text or "layer1" in info.label for info in compiled.plan.tasks.values())


def test_explain_leads_with_them_and_fits_80_columns(
    compiled: tilewright.CompiledModel, example: torch.Tensor
) -> None:
    explanation = compiled.explain((example,), repeats=2)
    text = str(explanation)
    assert max(map(len, text.splitlines())) <= 80
    lines = text.splitlines()
    assert lines[0].startswith("layer ")
    assert any(line.startswith(FIRST) for line in lines)
    assert [row.layer for row in explanation.rows] == layers_of(compiled)


def test_explain_hides_hashes_until_asked(compiled: tilewright.CompiledModel) -> None:
    explanation = compiled.explain(repeats=2)
    symbols = {step.kernel for step in compiled.plan.steps} | set(compiled.plan.tasks)
    for text in (str(explanation), explanation.table(None)):
        assert not any(symbol[:12] in text for symbol in symbols)
    assert all(symbol in explanation.table(hashes=True) for symbol in symbols)


@pytest.mark.parametrize("width", [80, 100, 140, 300])
def test_explain_shows_what_fits(compiled: tilewright.CompiledModel, width: int) -> None:
    explanation = compiled.explain(repeats=2)
    text = explanation.table(width)
    assert max(map(len, text.splitlines())) <= width
    assert ("schedule" in text) == (width == 300)
    assert SECOND in text


def test_an_artifact_has_them(compiled: tilewright.CompiledModel, tmp_path: Path) -> None:
    compiled.save(tmp_path / "m.tw")
    assert layers_of(tilewright.load(tmp_path / "m.tw")) == layers_of(compiled)


def test_a_plan_of_before_has_the_same_digest(compiled: tilewright.CompiledModel) -> None:
    """The digest is in the machine code's contract: files from before there were names stay readable."""
    plan = compiled.plan
    steps = tuple(msgspec.structs.replace(step, layers=msgspec.UNSET) for step in plan.steps)
    before = msgspec.structs.replace(plan, steps=steps, fusion=msgspec.UNSET)
    assert b'"layers"' not in msgspec.json.encode(before)
    assert plan_digest(before) == plan_digest(plan)
    assert all(step.layer == step.name for step in before.steps)


def test_the_trace_has_them(network: nn.Module, example: torch.Tensor) -> None:
    trace = Trace()
    tilewright.compile(network, (example,), trace=trace)
    named = [event.notes["layer"] for event in trace.events if event.name == "kernel"]
    assert f"{FIRST} and 1 more" in named


def test_tuning_tells_of_layers(tmp_path: Path) -> None:
    progress = Progress()
    model = nn.Sequential(nn.Sequential(nn.Linear(16, 16)), nn.Sequential(nn.Linear(16, 16))).eval()
    tilewright.compile(
        model,
        (torch.randn(2, 16),),
        effort="quick",
        budget=0.5,
        partition="greedy",  # no chain
        db=tmp_path / "tuning.sqlite",
        trace=Trace(listener=progress),
    )
    assert [task.name for task in progress.tasks.values()] == ["0.0 and 1 more"]


def test_explain_prints_no_control_characters(compiled: tilewright.CompiledModel) -> None:
    """A file may hold any name."""
    explanation = compiled.explain(repeats=1)
    rows = tuple(msgspec.structs.replace(row, layer="a\x1b[31mb\n") for row in explanation.rows)
    assert "\x1b" not in msgspec.structs.replace(explanation, rows=rows).table(None)


def test_dynamo_names_layers_as_torch_export_does(network: nn.Module, example: torch.Tensor) -> None:
    seen: list[list[str]] = []
    from tilewright.frontend.torch import source_location

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        seen.append([position.layer for position in source_location.indices_of(graph.graph).values()])
        return graph.forward

    torch._dynamo.reset()
    torch.compile(network, backend=backend)(example)
    assert {"layer1.0.conv1", "layer1.0.relu", "layer1.1.bn2", "fc"} <= set(seen[0])


def test_attention_has_the_names_of_all_that_it_replaces() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value = (nn.Linear(32, 32) for _ in range(3))
            self.softmax = nn.Softmax(-1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            query, key, value = self.query(x), self.key(x), self.value(x)
            return self.softmax(query @ key.transpose(-2, -1) / 32**0.5) @ value

    model = tilewright.compile(nn.Sequential(Attention()).eval(), (torch.randn(1, 24, 32),))
    (name,) = (step.layer for step in model.plan.steps if "attention" in model.plan.tasks[step.task].label)
    assert "0.softmax" in name or "softmax" in name.split(" + ")
    assert any(name.startswith("0.query") for name in layers_of(model))  # perhaps with key and value


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (("/encoder/encoder.0/fc/MatMul", "/encoder/encoder.0/act/Relu_1"), "encoder.0.fc + act"),
        (("fc_fwd", "relu0"), "fc_fwd + relu0"),
        (("", ""), "m + y"),
    ],
)
def test_onnx_nodes_give_their_names(names: tuple[str, str], wanted: str) -> None:
    onnx = pytest.importorskip("onnx")
    weight = onnx.numpy_helper.from_array(np.ones((8, 8), np.float32), "w")
    nodes = [
        onnx.helper.make_node("MatMul", ["x", "w"], ["m"], name=names[0]),
        onnx.helper.make_node("Relu", ["m"], ["y"], name=names[1]),
    ]
    ports = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [4, 8]) for name in "xy"]
    graph = onnx.helper.make_graph(nodes, "g", ports[:1], ports[1:], [weight])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)])
    fast = tilewright.compile(model)
    assert layers_of(fast) == [wanted]
    assert fast(np.ones((4, 8), np.float32)).shape == (4, 8)


def test_the_newer_onnx_exporter_writes_scopes_beside_a_node() -> None:
    onnx = pytest.importorskip("onnx")
    from tilewright.frontend.onnx.names import layer_of

    node = onnx.helper.make_node("Conv", ["x", "w"], ["y"], name="node_conv2d_1")
    assert layer_of(node) == "node_conv2d_1"
    scopes = node.metadata_props.add()
    scopes.key, scopes.value = "pkg.torch.onnx.name_scopes", "['', 'layer1', 'layer1.0.conv1', 'conv2d_1']"
    assert layer_of(node) == "layer1.0.conv1"
    for damaged in ("[", "3", "['a', 4]", "__import__('os')"):
        scopes.value = damaged
        assert layer_of(node) == "node_conv2d_1"


def test_a_layer_called_twice_has_one_name() -> None:
    linear = nn.Linear(8, 8)
    model = nn.Sequential(linear, nn.Tanh(), linear).eval()
    fast = tilewright.compile(model, (torch.randn(2, 8),))
    assert all("@" not in name for name in layers_of(fast))


def test_provenance_is_not_part_of_a_task(network: nn.Module, example: torch.Tensor) -> None:
    from tilewright.frontend import import_model
    from tilewright.graph.ir import rebuild
    from tilewright.graph.provenance import Provenance
    from tilewright.rewrites.partition import partition

    graph = import_model(network, (example,)).graph
    renamed = rebuild(
        graph,
        lambda node, operands: (
            replace(node, inputs=operands, source=Provenance(("other",))) if node.inputs else None
        ),
    )
    keys = [[call.task.key for call in partition(each).calls] for each in (graph, renamed)]
    assert keys[0] == keys[1]
    assert all(call.layers == ("other",) for call in partition(renamed).calls)
