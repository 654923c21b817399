"""The ways in which libraries compute a task: the contraction with as much of what is behind it as the library takes,
and a kernel of ours for the rest.

- cuBLASLt: matrix products with a bias, something added and an activation; convolutions of one place are such products,
  with strides after a copy of the places that are read.
- cuDNN: convolutions with the channels last, alone or with bias, something added and ReLU.
- attention: the framework's, of operands that are strided views of what the task is given.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tilewright.dtypes import DType
from tilewright.graph.attention import attention_in
from tilewright.graph.ir import Graph, Node, rebuild
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.runtime.packing import Packing
from tilewright.runtime.plan import VendorCall, View
from tilewright.space.vendor.pieces import Piece, Way, cut
from tilewright.space.vendor.views import strided, strides_of

_FLOATS = (DType.F16, DType.BF16, DType.F32)
_SHORT = (DType.F16, DType.BF16)
CUBLASLT, CUDNN, ATTENTION = "cublaslt", "cudnn", "sdpa"
_ACTIVATIONS = {"relu": "relu", "gelu": "gelu"}


def vendor_ways(task: Task, numerics: str = "fast") -> list[Way]:
    """Of a library that takes most of the task first."""
    if task.output.dtype not in _FLOATS or not task.output.type.size:
        return []
    return [*_attention(task), *_products(task, numerics), *_convolutions(task)]


# -- what is behind a contraction -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Epilogue:
    """A run of nodes behind a contraction: what a library may compute with it."""

    nodes: tuple[Node, ...] = ()
    bias: Node | None = None
    added: Node | None = None
    activation: str = ""


def _epilogues(graph: Graph, anchor: Node, numerics: str) -> Iterator[_Epilogue]:
    """The empty one, then longer and longer ones."""
    users = graph.users()
    found = _Epilogue()
    last = anchor
    while True:
        yield found
        readers = users[last]
        if last in graph.outputs or len(readers) != 1 or found.activation:
            return
        following = _with(found, anchor, last, readers[0], numerics)
        if following is None:
            return
        found, last = following, readers[0]


def _with(found: _Epilogue, anchor: Node, last: Node, node: Node, numerics: str) -> _Epilogue | None:
    nodes = (*found.nodes, node)
    if node.op in _ACTIVATIONS and node.shape == anchor.shape:
        # The library's GELU is the approximate one; of 16-bit floats, rounding is coarser than the difference.
        exact = node.op == "gelu" and node.attrs["approximate"] == "none"
        if exact and (numerics == "strict" or node.dtype not in _SHORT):
            return None
        return replace(found, nodes=nodes, activation=_ACTIVATIONS[node.op])
    if node.op != "add" or node.shape != anchor.shape or node.dtype is not anchor.dtype:
        return None
    others = [operand for operand in node.inputs if operand is not last]
    if len(others) != 1 or not others[0].is_input:
        return None
    (other,) = others
    if found.bias is None and other.shape[-1:] == anchor.shape[-1:] and other.type.size == anchor.shape[-1]:
        return replace(found, nodes=nodes, bias=other)
    if found.added is None and other.shape == anchor.shape:
        return replace(found, nodes=nodes, added=other)
    return None


def _anchor(graph: Graph, *ops: str) -> Node | None:
    """The one contraction of a graph, where it is one of these."""
    found = [node for node in graph.nodes() if node.op in ("matmul", "linear", "conv", "attention")]
    return found[0] if len(found) == 1 and found[0].op in ops else None


@dataclass(frozen=True)
class _Cut:
    """A graph cut around its contraction: `before`, nodes that a kernel of ours computes for it."""

    name: str
    task: Task
    graph: Graph
    anchor: Node
    taken: tuple[Node, ...]  # by the library, the anchor among them
    before: tuple[Node, ...] = ()

    def way(
        self, function: str, operands: dict[Node, View], packings: dict[Node, Packing], **call: Any
    ) -> Way:
        """`operands`: of the library's function, in its order; of each node the view (its `argument` is set here)."""
        graph, inputs = self.graph, self.graph.inputs
        constants = [inputs[number] for number in self.task.constants]
        result = self.taken[-1]
        rest = [
            node
            for node in graph.nodes()
            if not (node.is_input or node.is_constant or node in self.taken or node in self.before)
        ]
        parts: list[tuple[tuple[Node, ...], Node]] = [((node,), node) for node in self.before]
        parts.append((self.taken, result))
        if rest:
            parts.append((tuple(rest), graph.outputs[0]))
        pieces = cut(graph, constants, parts)
        position = len(self.before)
        piece = pieces[position]
        views = tuple(
            View(piece.operands.index(node), view.shape, view.strides, view.offset)
            for node, view in operands.items()
        )
        made = VendorCall(function, views, **call)
        packed = tuple(packings.get(node) for node in piece.operands)
        pieces[position] = Piece(piece.task, piece.operands, piece.result, made, packings=packed)
        return Way(self.name, inputs, tuple(pieces))


def _view(shape: tuple[int, ...], strides: tuple[int, ...] | None = None) -> View:
    return View(0, shape, strides_of(shape) if strides is None else strides)


# -- cuBLASLt -------------------------------------------------------------------------------------------------------


def _products(task: Task, numerics: str) -> Iterator[Way]:
    graph = task.graph
    anchor = _anchor(graph, "matmul", "linear", "conv")
    if anchor is None or len(anchor.inputs) != 2 or anchor.dtype not in _FLOATS:
        return
    before: tuple[Node, ...] = ()
    if anchor.op == "conv":
        if not _is_pointwise(anchor):
            return
        if any(step != 1 for step in anchor.attrs["stride"]):
            graph = _without_stride(graph, anchor)
            anchor = _anchor(graph, "conv")
            assert anchor is not None
            before = (anchor.inputs[0],)
    data, weight = anchor.inputs
    if not all(operand.is_input or operand in before for operand in anchor.inputs):
        return
    sizes = _sizes(anchor)
    if sizes is None:
        return
    batch, m, n, k = sizes
    # A bias alone, or with an activation; the library has no activation of a product that something was added to
    # before its bias, but the sums commute.
    best = list(_epilogues(graph, anchor, numerics))[-1]
    if batch and best.bias is not None:  # of the framework's shapes, one bias for the whole batch
        best = next(_epilogues(graph, anchor, numerics))
    operands = {
        data: _view((*batch, m, k)),
        weight: _view((*batch, k, n), _turned(batch, n, k) if anchor.op == "linear" else None),
    }
    if best.bias is not None:
        operands[best.bias] = _view((n,))
    if best.added is not None:
        if best.added in operands:
            return
        operands[best.added] = _view((*batch, m, n))
    options = {
        "bias": best.bias is not None,
        "added": best.added is not None,
        "activation": best.activation,
    }
    plan = _Cut(CUBLASLT, task, graph, anchor, (anchor, *best.nodes), before)
    yield plan.way("product", operands, {}, result=(*batch, m, n), options=options)


def _turned(batch: tuple[int, ...], n: int, k: int) -> tuple[int, ...]:
    return (*(step * n * k for step in strides_of(batch)), 1, k)


def _is_pointwise(conv: Node) -> bool:
    attrs = conv.attrs
    window = conv.inputs[1].shape[:-2] if attrs["layout"] == "channels_last" else (0,)
    return all(extent == 1 for extent in window) and attrs["groups"] == 1 and not _padded(conv)


def _padded(conv: Node) -> bool:
    return any(any(sides) for sides in conv.attrs["padding"])


def _without_stride(graph: Graph, conv: Node) -> Graph:
    """conv(x, stride s) of one place -> conv(x[::s], stride 1)."""

    def rule(node: Node, operands: tuple[Node, ...]) -> Node | None:
        if node is not conv:
            return None
        data = operands[0]
        steps = (1, *conv.attrs["stride"], 1)
        zeros = (0,) * data.type.rank
        read = apply("slice", data, starts=zeros, stops=data.shape, steps=steps)
        attrs = {**conv.attrs, "stride": (1,) * len(conv.attrs["stride"])}
        return apply("conv", read, *operands[1:], **attrs)

    return rebuild(graph, rule)


def _sizes(anchor: Node) -> tuple[tuple[int, ...], int, int, int] | None:
    """(batch, m, n, k); of one product, no batch."""
    data, weight = anchor.inputs
    k = data.shape[-1]
    if anchor.op == "conv" or weight.type.rank == 2:
        n = weight.shape[0] if anchor.op == "linear" else weight.shape[-1]
        return (), math.prod(data.shape[:-1]), n, k
    if data.shape[:-2] != weight.shape[:-2]:
        return None
    return (math.prod(data.shape[:-2]),), data.shape[-2], weight.shape[-1], k


# -- cuDNN ----------------------------------------------------------------------------------------------------------


def _convolutions(task: Task) -> Iterator[Way]:
    graph = task.graph
    conv = _anchor(graph, "conv")
    if conv is None or conv.type.rank != 4 or len(conv.inputs) != 2 or conv.dtype not in _FLOATS:
        return
    if conv.attrs["layout"] != "channels_last" or not conv.inputs[1].is_input:
        return
    data, weight = conv.inputs
    padding = list(conv.attrs["padding"])
    before: tuple[Node, ...] = ()
    taken: tuple[Node, ...] = (conv,)
    if data.op == "pad":
        inner = _even_border(data)
        if inner is not None and not _padded(conv):
            padding, taken, data = inner, (data, conv), data.inputs[0]
        else:
            before = (data,)
    if not (data.is_input or data in before) or any(low != high for low, high in padding):
        return
    height, width, inner_channels, channels = weight.shape
    number = task.graph.inputs.index(weight)
    packings: dict[Node, Packing] = {}
    if number in task.constants:
        packings[weight] = Packing(weight.shape, weight.shape, (0, 2, 4, 6, 7, 1, 3, 5))
        strides = (height * width * inner_channels, 1, width * inner_channels, inner_channels)
    else:
        whole = strides_of(weight.shape)
        strides = (whole[3], whole[2], whole[0], whole[1])
    operands = {
        data: _channels_first(data),
        weight: _view((channels, inner_channels, height, width), strides),
    }
    options = {
        "stride": list(conv.attrs["stride"]),
        "padding": [low for low, _ in padding],
        "dilation": list(conv.attrs["dilation"]),
        "groups": conv.attrs["groups"],
    }
    batch, rows, columns, _ = conv.shape
    common = {"result": (batch, channels, rows, columns), "order": (0, 2, 3, 1), "options": options}
    whole_run = list(_epilogues(graph, conv, "fast"))[-1]
    if whole_run.activation == "relu" and whole_run.bias is not None and whole_run.added is not data:
        function, more = "conv_relu", {whole_run.bias: _view((channels,))}
        if whole_run.added is not None:
            function, more = "conv_add_relu", {**more, whole_run.added: _channels_first(whole_run.added)}
        plan = _Cut(CUDNN, task, graph, conv, (*taken, *whole_run.nodes), before)
        yield plan.way(function, {**operands, **more}, packings, **common)
    plan = _Cut(f"{CUDNN} apart", task, graph, conv, taken, before)
    yield plan.way("conv", operands, packings, **common)


def _channels_first(node: Node) -> View:
    batch, height, width, channels = node.shape
    strides = strides_of(node.shape)
    return _view((batch, channels, height, width), (strides[0], strides[3], strides[1], strides[2]))


def _even_border(pad: Node) -> list[tuple[int, int]] | None:
    """Of zeros around the image, as wide on both sides."""
    low, high = pad.attrs["low"], pad.attrs["high"]
    if pad.attrs["value"] or any(pad.attrs["interior"]) or low != high or min(low) < 0:
        return None
    if low[0] or low[-1]:
        return None
    return list(zip(low[1:-1], high[1:-1], strict=True))


# -- attention ------------------------------------------------------------------------------------------------------


def _attention(task: Task) -> Iterator[Way]:
    graph = task.graph
    node = attention_in(graph)
    if node is None or node.dtype not in _FLOATS:
        return
    causal = bool(node.attrs["causal"])
    if causal and len(node.inputs) > 3:
        return
    found = [strided(operand) for operand in node.inputs]
    order: list[View] = []
    sources: list[Node] = []
    for each in found:
        if each is None or not each.source.is_input:
            return
        sources.append(each.source)
        order.append(View(0, each.shape, each.strides, each.offset))
    if any(len(view.shape) != node.type.rank for view in order[:3]) or node.type.rank < 3:
        return
    behind = _behind(graph, node)
    if behind is None:
        return
    pieces = cut(graph, [graph.inputs[n] for n in task.constants], [(_computed(graph), graph.outputs[0])])
    (piece,) = pieces
    numbered = tuple(
        View(piece.operands.index(source), view.shape, view.strides, view.offset)
        for source, view in zip(sources, order, strict=True)
    )
    call = VendorCall(
        "attention",
        numbered,
        result=node.shape,
        order=behind,
        options={"causal": causal, "scale": float(node.attrs["scale"])},
    )
    yield Way(ATTENTION, graph.inputs, (Piece(piece.task, piece.operands, piece.result, call),))


def _computed(graph: Graph) -> tuple[Node, ...]:
    return tuple(node for node in graph.nodes() if not (node.is_input or node.is_constant))


def _behind(graph: Graph, attention: Node) -> tuple[int, ...] | None:
    """The order in which the axes of the result are stored, where what is behind it is one permute and reshapes."""
    chain: list[Node] = []
    node = graph.outputs[0]
    while node is not attention:
        chain.append(node)
        node = node.inputs[0]
    permutes = [each for each in reversed(chain) if each.op == "permute"]
    if not permutes:
        return ()
    first = permutes[0]
    if len(permutes) > 1 or first.inputs[0] is not attention:
        return None
    return tuple(first.attrs["axes"])
