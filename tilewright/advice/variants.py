"""Variations of a layer's task: other channels, other activations, one more 1x1 convolution.

A variation is a task like any other, so the usual candidates compute it and the usual runner checks and times it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from tilewright.graph.ir import Graph, Node, TensorType, input_node
from tilewright.graph.op import Fusion, apply, op_of
from tilewright.graph.ops.layouts import LAST, channels_of
from tilewright.graph.task import Task

# Side by side in the epilogue of a layer; the rest are only recognised.
COMPARED = ("relu", "gelu", "hardswish", "softplus")
ACTIVATIONS = frozenset(
    [*COMPARED, "silu", "sigmoid", "tanh", "clamp", "leaky_relu", "elu", "mish", "hardsigmoid"]
)
_OPTIONS: dict[str, dict[str, Any]] = {
    "gelu": {"approximate": "none"},
    "softplus": {"beta": 1.0, "threshold": 20.0},
}

WIDER = 1.15  # the most additional channels that are worth a look
MULTIPLES = (8, 16, 32, 64)


@dataclass(frozen=True)
class VariedLayer:
    """A task with one contraction. `carries`: whether its channels are the last axis, so that their number can be
    changed."""

    task: Task
    anchor: Node

    @property
    def inputs(self) -> int:
        """The number of input channels."""
        x = self.anchor.inputs[0]
        return channels_of(x.shape, self.anchor.attrs["layout"]) if self.anchor.op == "conv" else x.shape[-1]

    @property
    def outputs(self) -> int:
        if self.anchor.op == "conv":
            return channels_of(self.anchor.shape, self.anchor.attrs["layout"])
        return self.anchor.shape[-1]

    @property
    def groups(self) -> int:
        return int(self.anchor.attrs["groups"]) if self.anchor.op == "conv" else 1

    @property
    def window(self) -> tuple[int, ...]:
        if self.anchor.op != "conv":
            return ()
        weight = self.anchor.inputs[1]
        return weight.shape[2:] if self.anchor.attrs["layout"] == "channels_first" else weight.shape[:-2]

    @property
    def carries(self) -> bool:
        if self.anchor.op == "conv":
            return bool(self.anchor.attrs["layout"] == LAST) and self.groups == 1
        return self.anchor.inputs[1].type.rank == 2


def layer_of(task: Task) -> VariedLayer | None:
    """The task as a layer; None unless it has exactly one contraction with a constant weight."""
    found = _contractions(task)
    return VariedLayer(task, found[0]) if found and why_not_varied(task) is None else None


def why_not_varied(task: Task) -> str | None:
    """Why a task with a contraction is no layer to vary, as a clause; None if it is, or has no contraction."""
    found = _contractions(task)
    if any(node.op == "attention" for node in found):
        return "attention has no weights"
    if len(found) > 1:
        return "one kernel computes several of them"
    if not found:
        return None
    if found[0].op not in ("conv", "matmul", "linear"):
        return f"{found[0].op} is not varied"
    weight = found[0].inputs[1]
    constant = weight.is_constant or (weight.is_input and weight.attrs["index"] in task.constants)
    return None if constant else "their weights are computed"


def _contractions(task: Task) -> list[Node]:
    nodes = (node for node in task.graph.nodes() if not (node.is_input or node.is_constant))
    return [node for node in nodes if op_of(node.op).fusion is Fusion.COMPLEX]


# -- activations ------------------------------------------------------------------------------------------------------


def activation_of(layer: VariedLayer) -> Node | None:
    """The activation in the layer's epilogue: the first one after the contraction."""
    after: set[Node] = {layer.anchor}
    for node in layer.task.graph.nodes():
        if any(operand in after for operand in node.inputs):
            after.add(node)
            if node.op in ACTIVATIONS:
                return node
    return None


def with_activation(layer: VariedLayer, op: str | None) -> Task:
    """The layer with this activation instead of its own, or added after it if it has none; None removes it."""
    graph, own = layer.task.graph, activation_of(layer)

    def made(x: Node) -> Node:
        return x if op is None else apply(op, x, **_OPTIONS.get(op, {}))

    if own is None:
        return Task(Graph(graph.inputs, (made(graph.outputs[0]),)), layer.task.constants)
    return _changed(layer.task, lambda node, operands: made(operands[0]) if node is own else None)


# -- channels ---------------------------------------------------------------------------------------------------------


def wider(channels: int) -> list[int]:
    """Rounder numbers of channels that are slightly larger."""
    found = {-(-channels // multiple) * multiple for multiple in MULTIPLES}
    return sorted(number for number in found if channels < number <= WIDER * channels)


def with_channels(layer: VariedLayer, inputs: int, outputs: int) -> Task | None:
    """The layer with other numbers of channels; None if channels are not its last axis."""
    if not layer.carries:
        return None
    anchor, task = layer.anchor, layer.task
    weight = anchor.inputs[1]
    shapes = {anchor.inputs[0]: (*anchor.inputs[0].shape[:-1], inputs)}
    rows, columns = (outputs, inputs) if anchor.op == "linear" else (inputs, outputs)
    shapes[weight] = (*weight.shape[:-2], rows, columns)
    new: dict[Node, Node] = {}
    # Producers of the contraction's operand have its channels, all other operands those of its result.
    before = set(Graph((), (anchor.inputs[0],)).nodes())
    for node in task.graph.nodes():
        if node.is_input:
            last = inputs if node in before else outputs
            own = layer.inputs if node in before else layer.outputs
            same = node.type.rank > 0 and node.shape[-1] == own > 1
            shape = shapes.get(node, (*node.shape[:-1], last) if same else node.shape)
            new[node] = input_node(node.attrs["index"], TensorType(shape, node.dtype))
        elif node.is_constant:
            new[node] = node
        else:
            if node.op in ("reshape", "permute", "slice", "concat", "broadcast_to"):
                return None  # its attributes name shapes
            new[node] = apply(node.op, *(new[x] for x in node.inputs), name=node.name, **node.attrs)
    return Task(
        Graph(tuple(new[node] for node in task.graph.inputs), (new[task.graph.outputs[0]],)), task.constants
    )


# -- one more 1x1 convolution -----------------------------------------------------------------------------------------


def pointwise_after(layer: VariedLayer) -> tuple[Task, Task] | None:
    """(the layer with a 1x1 convolution of as many channels and a ReLU after it, these two alone); None unless it is a
    convolution over a window, which is where RepVGG-like models are deepened."""
    if layer.anchor.op != "conv" or max(layer.window, default=1) == 1 or layer.groups != 1:
        return None
    task = layer.task
    output = task.graph.outputs[0]
    if output.shape != layer.anchor.shape:
        return None

    def block(x: Node, number: int) -> tuple[Node, Node]:
        layout, channels = layer.anchor.attrs["layout"], layer.outputs
        rank = len(layer.window)
        ones = (1,) * rank
        shape = (channels, channels, *ones) if layout == "channels_first" else (*ones, channels, channels)
        weight = input_node(number, TensorType(shape, x.dtype))
        attrs = {"stride": ones, "padding": ((0, 0),) * rank, "dilation": ones, "groups": 1, "layout": layout}
        return weight, apply("relu", apply("conv", x, weight, name="conv", **attrs))

    count = len(task.graph.inputs)
    weight, result = block(output, count)
    both = Task(Graph((*task.graph.inputs, weight), (result,)), task.constants | {count})
    x = input_node(0, output.type)
    weight, result = block(x, 1)
    return both, Task(Graph((x, weight), (result,)), frozenset([1]))


def _changed(task: Task, rule: Callable[[Node, tuple[Node, ...]], Node | None]) -> Task:
    new: dict[Node, Node] = {}
    for node in task.graph.nodes():
        operands = tuple(new[operand] for operand in node.inputs)
        new[node] = rule(node, operands) or (replace(node, inputs=operands) if operands else node)
    graph = task.graph
    return Task(Graph(graph.inputs, tuple(new[node] for node in graph.outputs)), task.constants)


def alternatives(layer: VariedLayer) -> Iterator[tuple[int, int]]:
    """Pairs (inputs, outputs) in which one number is rounder."""
    for number in wider(layer.outputs):
        yield layer.inputs, number
    for number in wider(layer.inputs):
        yield number, layer.outputs
