"""Finds the part of a task that Gemmini computes, and the layer that it is.

A layer is a matmul or convolution of 8-bit integers with 32-bit sums, which matches the accelerator's instruction by
the test on access matrices (`space/mapping.py`), with the following operations that the accelerator computes exactly:

    sums  + bias  + round(residual * scale)       [relu]
          * scale -> round -> clamp -> 8 bits     [relu]  [max_pool]

Without the second line, the sums themselves are stored. The host computes the nodes before and after the layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tilewright.dtypes import DType
from tilewright.errors import LayerFitError
from tilewright.graph.ir import Graph, Node, TensorType, input_node
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.hw.gemmini import GemminiMachine
from tilewright.hw.gemmini_intrinsics import multiply
from tilewright.loops.gemmini.kernel import Role
from tilewright.loops.gemmini.layer import Layer, Pooling
from tilewright.runtime.gemmini.bias import limit, rows_for
from tilewright.space.contraction import contraction_of
from tilewright.space.mapping import mappings
from tilewright.space.template import normal_form

_BYTE = (-128.0, 127.0)
_CHANNELS = 8  # of the operator that the test on access matrices is made with: any would do
_MAX_WINDOW = 15  # of pooling, in the instruction's four bits
_MAX_HANG = 3
_MAX_ANSWERS = 1024
_answers: dict[tuple[str, int], bool] = {}  # by the operator and the array: a network repeats its layers
_SMALLEST = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True)
class Match:
    """`taken`: the accelerator's nodes in order, the last of which is its result. `roles`: of the nodes it reads."""

    layer: Layer
    taken: tuple[Node, ...]
    roles: dict[Node, Role]
    images: int = 1
    own_weights: bool = False


def match(task: Task, machine: GemminiMachine) -> Match | None:
    graph = task.graph
    anchors = [node for node in graph.nodes() if node.op in ("matmul", "linear", "conv", "attention")]
    if len(anchors) != 1 or anchors[0].dtype is not DType.I32:
        return None
    (anchor,) = anchors
    if any(operand.dtype is not DType.I8 for operand in anchor.inputs) or len(anchor.inputs) != 2:
        return None
    found = {"conv": _convolution, "matmul": _matmul}.get(anchor.op, lambda graph, anchor: None)(
        graph, anchor
    )
    if found is None or not is_instruction(anchor, machine.dim):
        return None
    try:
        found = _with_sums(graph, found)
        stored = _stored(graph, found)
    except LayerFitError:
        return None
    if len(stored.roles) != 2 + stored.layer.bias + (stored.layer.residual is not None):
        return None  # one tensor in two roles
    return stored


def is_instruction(anchor: Node, dim: int) -> bool:
    """Whether the array's instruction computes such an operator: its first operand walks as A, its second as B."""
    output = _plain(anchor)
    task = Task(Graph((output.inputs[0], output.inputs[1]), (output,)))
    key = task.key, dim
    if key not in _answers:
        if len(_answers) >= _MAX_ANSWERS:
            _answers.clear()
        _answers[key] = _is_instruction(task, dim)
    return _answers[key]


def _is_instruction(task: Task, dim: int) -> bool:
    formula = normal_form(task, "strict")
    found = None if formula is None else contraction_of(formula, [DType.I8], DType.I32)
    if found is None:
        return False
    tile = (dim, dim, dim)
    operands = [(m.left.buffer.name, m.right.buffer.name) for m in mappings(found, multiply(dim), tile)]
    return (found.formula.inputs[0].name, found.formula.inputs[1].name) in operands


def _plain(anchor: Node) -> Node:
    """The same operator with no extent of 1, which would leave no trace in the formula."""

    def operand(index: int, shape: Sequence[int]) -> Node:
        return input_node(index, TensorType(tuple(shape), DType.I8))

    left, right = (x.shape for x in anchor.inputs)
    if anchor.op == "matmul":
        m, k, n = (max(extent, _CHANNELS) for extent in (left[-2], left[-1], right[-1]))
        batch = [max(extent, 2) for extent in left[:-2]]
        shared = len(right) == 2
        return apply("matmul", operand(0, (*batch, m, k)), operand(1, (k, n) if shared else (*batch, k, n)))
    height, width = (extent + step for extent, step in zip(left[1:3], anchor.attrs["stride"], strict=True))
    channels, results = (max(extent, _CHANNELS) for extent in right[2:])
    data = operand(0, (left[0], height, width, channels))
    return apply("conv", data, operand(1, (*right[:2], channels, results)), **anchor.attrs)


# -- the contraction --------------------------------------------------------------------------------------------------


def _convolution(graph: Graph, conv: Node) -> Match | None:
    attrs = conv.attrs
    data, weights = conv.inputs
    if attrs["layout"] != "channels_last" or attrs["groups"] != 1 or conv.type.rank != 4:
        return None
    if any(step != 1 for step in attrs["dilation"]) or len(set(attrs["stride"])) != 1:
        return None
    (top, bottom), (left, right) = attrs["padding"]
    taken: tuple[Node, ...] = (conv,)
    if data.op == "pad" and _is_border(data) and list(graph.users()[data]) == [conv]:
        low, high = data.attrs["low"], data.attrs["high"]
        top, bottom, left, right = top + low[1], bottom + high[1], left + low[2], right + high[2]
        taken, data = (data, conv), data.inputs[0]
    images, height, width, channels = data.shape
    kernel = weights.shape[:2]
    try:
        layer = Layer(
            height,
            width,
            channels,
            weights.shape[3],
            (kernel[0], kernel[1]),
            attrs["stride"][0],
            (top, left, bottom, right),
            full=True,
        )
    except LayerFitError:
        return None
    return Match(layer, taken, {data: "data", weights: "weights"}, images)


def _is_border(pad: Node) -> bool:
    """Zeros around rows and columns."""
    attrs = pad.attrs
    if pad.type.rank != 4 or attrs["value"] != 0 or any(attrs["interior"]):
        return False
    sides = (*attrs["low"], *attrs["high"])
    return min(sides) >= 0 and not any(attrs[side][axis] for side in ("low", "high") for axis in (0, 3))


def _matmul(graph: Graph, matmul: Node) -> Match | None:
    data, weights = matmul.inputs
    *batch, m, k = data.shape
    n = weights.shape[-1]
    shared = len(weights.shape) == 2
    if not shared and weights.shape[:-2] != tuple(batch):
        return None
    count = int(np.prod(batch, dtype=np.int64))
    roles: dict[Node, Role] = {data: "data", weights: "weights"}
    if shared:
        return Match(Layer(1, count * m, k, n, full=True), (matmul,), roles)
    return Match(Layer(1, m, k, n, full=True), (matmul,), roles, count, own_weights=True)


# -- behind it --------------------------------------------------------------------------------------------------------


def _reader(graph: Graph, node: Node) -> Node | None:
    """The only reader of a value; None if it has several, or is a result of the task."""
    readers = graph.users()[node]
    return readers[0] if len(readers) == 1 and node not in graph.outputs else None


def _with_sums(graph: Graph, found: Match) -> Match:
    """Bias, residual and ReLU of the sums."""
    while (reader := _reader(graph, found.taken[-1])) is not None and reader.dtype is DType.I32:
        last, layer = found.taken[-1], found.layer
        if reader.op == "relu":
            return replace(found, layer=replace(layer, relu=True), taken=(*found.taken, reader))
        others = [operand for operand in reader.inputs if operand is not last]
        if reader.op != "add" or len(others) != 1 or reader.shape != last.shape:
            break
        (other,) = others
        channels = layer.out_channels
        is_bias = other.type.size == channels and other.shape[-1:] == (channels,)
        roles: dict[Node, Role]
        taken: tuple[Node, ...] = (reader,)
        if is_bias and not layer.bias and not found.own_weights and (bias := _bias(graph, other)) is not None:
            source, rows, nodes = bias
            layer, roles = replace(layer, bias=True, bias_rows=rows), {source: "bias"}
            taken = (*nodes, reader)
        elif layer.residual is None and (residual := _residual(graph, other)) is not None:
            scale, source, nodes = residual
            if source.shape != last.shape or not source.is_input:
                break
            layer, roles, taken = replace(layer, residual=scale), {source: "residual"}, (*nodes, reader)
        else:
            break
        found = replace(found, layer=layer, taken=(*found.taken, *taken), roles={**found.roles, **roles})
    return found


def _bias(graph: Graph, node: Node) -> tuple[Node, int, tuple[Node, ...]] | None:
    """The bias as it is stored, the rows of bytes that hold it if it is bounded, and the nodes between."""
    if node.is_input:
        return node, 0, ()
    if node.op != "clamp" or not node.inputs[0].is_input or len(graph.users()[node]) > 1:
        return None
    low, high = node.attrs["min"], node.attrs["max"]
    rows = 0 if high is None else rows_for(int(high))
    return (node.inputs[0], rows, (node,)) if rows and (low, high) == (-limit(rows), limit(rows)) else None


def _residual(graph: Graph, node: Node) -> tuple[float, Node, tuple[Node, ...]] | None:
    """cast(round(cast(bytes) * scale)): the scale, the bytes, and the nodes."""
    chain = [node]
    while (
        len(chain) < 5
        and chain[0].op in ("cast", "round", "mul", "clamp")
        and len(graph.users()[chain[0]]) == 1
    ):
        below = [operand for operand in chain[0].inputs if not operand.is_constant]
        if len(below) != 1:
            return None
        if below[0].dtype is DType.I8:
            break
        chain.insert(0, below[0])
    if [each.op for each in chain] != ["cast", "mul", "round", "cast"] or chain[0].inputs[
        0
    ].dtype is not DType.I8:
        return None
    scale = _scalar(chain[1])
    if scale is None or scale * 128 >= 2**31 or chain[0].dtype is not DType.F32:
        return None
    return scale, chain[0].inputs[0], tuple(chain)


def _scalar(product: Node) -> float | None:
    """A positive constant that something is multiplied by, as the accelerator takes it."""
    found = [operand for operand in product.inputs if operand.is_constant and operand.type.size == 1]
    if product.op != "mul" or len(found) != 1 or found[0].dtype is not DType.F32:
        return None
    data = found[0].data
    assert data is not None
    scale = float(data.reshape(()))
    return scale if np.isfinite(scale) and scale >= _SMALLEST else None


def _stored(graph: Graph, found: Match) -> Match:
    """The layer with scaling to 8 bits, ReLU and pooling when it is stored; unchanged if other nodes follow."""
    nodes: list[Node] = []
    layer = found.layer
    relu, scale = layer.relu, None
    last = found.taken[-1]
    expected = ["cast", "mul", "round", "clamp", "cast"]
    while expected:
        reader = _reader(graph, last)
        if reader is None:
            return found
        if reader.op == "relu" and len(expected) in (1, 2, 3):
            relu = True
        elif reader.op != expected[0] or (reader.op == "mul" and (scale := _scalar(reader)) is None):
            return found
        elif reader.op == "clamp":
            low, high = reader.attrs["min"], reader.attrs["max"]
            if high != _BYTE[1] or low not in (_BYTE[0], 0.0):
                return found
            relu = relu or low == 0.0
        if reader.op != "relu":
            expected.pop(0)
        nodes.append(reader)
        last = reader
        if not expected and reader.dtype is DType.I32:
            expected = ["cast"]
    if last.dtype is not DType.I8 or nodes[0].dtype is not DType.F32:
        return found
    if (reader := _reader(graph, last)) is not None and reader.op == "relu":
        nodes.append(reader)
        relu, last = True, reader
    assert scale is not None
    stored = replace(
        found,
        layer=replace(layer, relu=relu, scale=scale, full=False),
        taken=(*found.taken, *nodes),
    )
    return _pooled(graph, stored)


def _pooled(graph: Graph, found: Match) -> Match:
    pool = _reader(graph, found.taken[-1])
    pooling = None if pool is None else pooling_of(pool)
    if pool is None or pooling is None or found.layer.height == 1:
        return found
    try:
        layer = replace(found.layer, pooling=pooling)
    except LayerFitError:
        return found
    return replace(found, layer=layer, taken=(*found.taken, pool))


def pooling_of(node: Node) -> Pooling | None:
    """A max_pool as the accelerator computes it on the way out."""
    if node.op != "max_pool" or node.attrs["layout"] != "channels_last" or node.attrs["ceil_mode"]:
        return None
    attrs = node.attrs
    sets = [set(attrs[name]) for name in ("kernel", "stride", "padding", "dilation")]
    if any(len(each) != 1 for each in sets) or node.type.rank != 4 or node.dtype is not DType.I8:
        return None
    size, stride, padding, dilation = (each.pop() for each in sets)
    if dilation != 1 or max(size, stride) > _MAX_WINDOW or padding > min(_MAX_HANG, size - 1):
        return None
    return Pooling(size, stride, padding)
