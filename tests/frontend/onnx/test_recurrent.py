"""Stacks of recurrent layers, in every direction, against PyTorch's with the same weights."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from torch import nn

import tilewright
from tests.frontend.onnx.checking import check_model, floats, model_of
from tilewright.frontend.onnx import import_onnx
from tilewright.graph.oracle import evaluate

TIME, BATCH, INPUTS, HIDDEN = 4, 3, 6, 5
GATES = {"RNN": [0], "GRU": [1, 0, 2], "LSTM": [0, 3, 1, 2]}  # PyTorch's gates in the order of the standard
LENGTHS = np.array([2, 4, 3], np.int32)
DIRECTIONS = ["forward", "reverse", "bidirectional"]


def gates(values: torch.Tensor, layer: str) -> np.ndarray:
    """A parameter of PyTorch's with its gates in the standard's order."""
    parts = values.detach().numpy().reshape(len(GATES[layer]), HIDDEN, -1)
    return np.concatenate([parts[gate] for gate in GATES[layer]])


class Reference(nn.Module):
    """A stack of layers of one direction or both, each a module of PyTorch."""

    def __init__(self, layer: str, direction: str, layers: int, bias: bool) -> None:
        super().__init__()
        self.direction, self.both = direction, direction == "bidirectional"
        width = HIDDEN * (1 + self.both)
        made = getattr(nn, layer)
        self.layers = nn.ModuleList(
            made(INPUTS if number == 0 else width, HIDDEN, bidirectional=self.both, bias=bias)
            for number in range(layers)
        )

    def reversed(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Each sequence backwards within its own length."""
        if self.direction != "reverse":
            return x
        position = torch.arange(TIME)[:, None]
        index = torch.where(position < lengths, lengths - 1 - position, position)
        return x.gather(0, index[..., None].expand(-1, -1, x.shape[2]))

    def forward(self, x: torch.Tensor, lengths: torch.Tensor, states: list[Any]) -> list[torch.Tensor]:
        """Of every layer the outputs [time, batch, directions * hidden] and the last states."""
        results: list[torch.Tensor] = []
        for module, initial in zip(self.layers, states, strict=True):
            packed = nn.utils.rnn.pack_padded_sequence(
                self.reversed(x, lengths), lengths, enforce_sorted=False
            )
            outputs, last = module(packed, initial)
            x, _ = nn.utils.rnn.pad_packed_sequence(outputs, total_length=TIME)
            x = self.reversed(x, lengths)
            results += [x, *(last if isinstance(last, tuple) else (last,))]
        return results


def exported(
    reference: Reference, layer: str, *, bias: bool, lengths: bool, initial: bool, batch_first: bool
) -> onnx.ModelProto:
    """The stack in ONNX's operators, with what joins the directions of one layer for the next."""
    initialisers: list[onnx.TensorProto] = []
    nodes: list[onnx.NodeProto] = []

    def constant(name: str, value: np.ndarray) -> str:
        initialisers.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
        return name

    current, outputs = "x", []
    inputs = [("x", onnx.TensorProto.FLOAT)]
    if lengths:
        inputs.append(("lengths", onnx.TensorProto.INT32))
    for number, module in enumerate(reference.layers):
        ways = ["", "_reverse"][: 1 + reference.both]

        def stacked(kind: str, module: Any = module, ways: list[str] = ways) -> np.ndarray:
            return np.stack([gates(getattr(module, f"{kind}_l0{way}"), layer) for way in ways])

        operands = [current, constant(f"w{number}", stacked("weight_ih"))]
        operands.append(constant(f"r{number}", stacked("weight_hh")))
        if bias:
            both = np.concatenate([stacked("bias_ih"), stacked("bias_hh")], 1)[..., 0]
            operands.append(constant(f"b{number}", both))
        else:
            operands.append("")
        operands.append("lengths" if lengths else "")
        kept = ["h", "c"] if layer == "LSTM" else ["h"]
        for state in kept if initial else []:
            operands.append(f"{state}{number}")
            inputs.append((f"{state}{number}", onnx.TensorProto.FLOAT))
        made = [f"y{number}", *(f"last_{state}{number}" for state in kept)]
        attributes = {"linear_before_reset": 1} if layer == "GRU" else {}
        nodes.append(
            helper.make_node(
                layer,
                operands,
                made,
                hidden_size=HIDDEN,
                direction=reference.direction,
                layout=int(batch_first),
                **attributes,
            )
        )
        outputs += made
        order = (0, 1, 2, 3) if batch_first else (0, 2, 1, 3)
        nodes.append(helper.make_node("Transpose", [made[0]], [f"t{number}"], perm=order))
        shape = constant(f"s{number}", np.array([0, 0, -1]))
        nodes.append(helper.make_node("Reshape", [f"t{number}", shape], [f"z{number}"]))
        current = f"z{number}"
    given = [helper.make_tensor_value_info(name, kind, None) for name, kind in inputs]
    results = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in outputs]
    graph = helper.make_graph(nodes, "stack", given, results, initialisers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


CASES = [
    (layer, direction, *rest)
    for layer, direction in itertools.product(GATES, DIRECTIONS)
    for rest in (
        (1, True, False, False),
        (2, True, True, True),
        (3, False, True, False),
        (2, True, False, True),
    )
]


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize(("layer", "direction", "layers", "bias", "lengths", "initial"), CASES)
def test_stacks(
    layer: str, direction: str, layers: int, bias: bool, lengths: bool, initial: bool, batch_first: bool
) -> None:
    torch.manual_seed(0)
    reference = Reference(layer, direction, layers, bias).eval()
    ways = 1 + reference.both
    model = exported(reference, layer, bias=bias, lengths=lengths, initial=initial, batch_first=batch_first)
    x = torch.randn(TIME, BATCH, INPUTS)
    feeds = {"x": x.transpose(0, 1) if batch_first else x}
    sizes = torch.from_numpy(LENGTHS).long() if lengths else torch.full((BATCH,), TIME)
    if lengths:
        feeds["lengths"] = torch.from_numpy(LENGTHS)
    states: list[Any] = []
    for number in range(layers):
        kept = [torch.randn(ways, BATCH, HIDDEN) for _ in range(2 if layer == "LSTM" else 1)]
        if initial:
            names = (f"{state}{number}" for state in "hc")
            feeds |= {
                name: value.transpose(0, 1) if batch_first else value
                for name, value in zip(names, kept, strict=False)
            }
        states.append(None if not initial else tuple(kept) if layer == "LSTM" else kept[0])
    with torch.no_grad():
        expected = reference(x, sizes, states)

    arrays = {name: np.ascontiguousarray(value.numpy()) for name, value in feeds.items()}
    imported = import_onnx(model, arrays)
    results = evaluate(imported.graph, [arrays[name] for name in imported.input_names], precise=False)
    for got, wanted in zip(results, expected, strict=True):
        if got.ndim == 4:  # [time, directions, batch, hidden], or [batch, time, directions, hidden]
            got = got.transpose(1, 0, 2, 3) if batch_first else got.transpose(0, 2, 1, 3)
            got = got.reshape(TIME, BATCH, ways * HIDDEN)
        elif batch_first:
            got = got.transpose(1, 0, 2)
        np.testing.assert_allclose(got, wanted.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    ("layer", "direction"), [("LSTM", "forward"), ("GRU", "reverse"), ("RNN", "bidirectional")]
)
def test_the_steps_share_their_kernels(layer: str, direction: str, batch: int, tmp_path: Path) -> None:
    """Each step reads its part of the inputs' product in place; saved and loaded too."""
    ways, rows, steps = 1 + (direction == "bidirectional"), len(GATES[layer]) * HIDDEN, 40
    x = {"x": floats(steps, batch, INPUTS)}
    model = model_of(
        f'y = {layer} <hidden_size: int = {HIDDEN}, direction: string = "{direction}"> (x, w, r)', x
    )
    for name, width in (("w", INPUTS), ("r", HIDDEN)):
        array = floats(ways, rows, width, seed=len(name)) * np.float32(0.3)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    compiled = tilewright.compile(import_onnx(model), threads=1)
    assert len(compiled.plan.steps) > steps and len(compiled.plan.kernels) < steps // 2
    compiled.save(tmp_path / "model.tw")
    (expected,) = evaluate(import_onnx(model).graph, [x["x"]], precise=False)
    for run in (compiled, tilewright.load(tmp_path / "model.tw")):
        np.testing.assert_allclose(run(x["x"]), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("layer", GATES)
def test_in_a_branch(layer: str, known: bool, taken: bool) -> None:
    """A layer in a branch of If, whose input, weights and states come from outside, as speech models have it."""
    x = floats(TIME, BATCH, INPUTS)
    rows = len(GATES[layer]) * HIDDEN
    operands = {"w": floats(1, rows, INPUTS, seed=1), "r": floats(1, rows, HIDDEN, seed=2)}
    operands |= {"b": floats(1, 2 * rows, seed=3), "h": floats(1, BATCH, HIDDEN, seed=4)}
    operands = {name: array * np.float32(0.3) for name, array in operands.items()}
    constant = f"c = Constant <value: tensor = bool {{{int(taken)}}}> ()" if known else ""
    kept = "s, last" if layer != "LSTM" else "s, last, cell"
    squeezed = (  # as PyTorch exports a squeeze
        "n = Shape <start: int = 0, end: int = 1> (d) single = Equal (n, one) yes = Squeeze (single, k) e = If (yes)"
        " <then_branch = less () => (float[A, B, C] f) { f = Squeeze (d, k) },"
        " else_branch = same () => (float[Z, A, B, C] g) { g = Identity (d) }>"
    )
    text = (
        f"{constant} y = If (c) <then_branch = recurrent () => (float[A, B, C] out) {{ {squeezed}"
        f' {kept} = {layer} <hidden_size: int = {HIDDEN}> (e, w, r, b, "", h) out = Squeeze (s, one) }},'
        " else_branch = plain () => (float[A, B, C] out) { t = Squeeze (d, k)"
        " out = Slice (t, begins, ends, axes) }>"
    )
    inputs = {"d": x[None]} if known else {"c": np.array(taken), "d": x[None]}
    model = model_of(text, inputs)
    indices = {"k": 0, "one": 1, "begins": 0, "ends": HIDDEN, "axes": 2}
    for name, array in (*operands.items(), *((n, np.array([i])) for n, i in indices.items())):
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    check_model(model, inputs, rtol=1e-4, atol=1e-5, compiled=layer == "LSTM")
