"""The ways in which libraries compute a task: the contraction with as much of what is behind it as the library takes,
and a kernel of ours for the rest.

- cuBLASLt: matrix products with a bias, something added and an activation. A convolution of one place is such a
  product, with strides after a copy of the places that are read; so is one whose windows lie side by side, after they
  have been put into rows. The weight is stored in rows of either axis; the library proposes several algorithms.
- cuDNN: convolutions with the channels last, alone or with bias, something added and ReLU; few channels are filled up
  with zeros to as many as its fast kernels read at once.
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
from tilewright.numerics import may_round_to_tf32
from tilewright.runtime.packing import Packing
from tilewright.runtime.plan import VendorCall, View
from tilewright.space.space import Config
from tilewright.space.vendor.pieces import Piece, Way, cut
from tilewright.space.vendor.views import strided, strides_of

_FLOATS = (DType.F16, DType.BF16, DType.F32)
_SHORT = (DType.F16, DType.BF16)
CUBLASLT, CUDNN, ATTENTION = "cublaslt", "cudnn", "sdpa"
_TURNED = 3  # algorithms for which both orders of a weight are worth trying
_FEW = 8  # channels that a library reads at once
_ACTIVATIONS = {"relu": "relu", "gelu": "gelu"}


def vendor_ways(task: Task, numerics: str = "fast", algorithms: int = 1) -> list[Way]:
    """The one that is best without measurement first. `algorithms`: of those that a library proposes, so many."""
    if task.output.dtype not in _FLOATS or not task.output.type.size:
        return []
    return [*_attention(task), *_products(task, numerics, algorithms), *_convolutions(task, numerics)]


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


def _rounded(anchor: Node, numerics: str) -> dict[str, bool]:
    """The option of a library that may round float32 before it multiplies."""
    return {"rounded": True} if may_round_to_tf32(numerics) and anchor.dtype is DType.F32 else {}


def _anchor(graph: Graph, *ops: str) -> Node | None:
    """The one contraction of a graph, where it is one of these."""
    found = [node for node in graph.nodes() if node.op in ("matmul", "linear", "conv", "attention")]
    return found[0] if len(found) == 1 and found[0].op in ops else None


@dataclass(frozen=True)
class _Cut:
    """A graph cut around its contraction: `before`, nodes that a kernel of ours computes for it."""

    config: Config
    task: Task
    graph: Graph
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
        parts: list[tuple[tuple[Node, ...], Node]] = []
        if self.before:
            parts.append((self.before, self.before[-1]))
        parts.append((self.taken, result))
        if rest:
            parts.append((tuple(rest), graph.outputs[0]))
        pieces = cut(graph, constants, parts)
        position = 1 if self.before else 0
        piece = pieces[position]
        views = tuple(
            View(piece.operands.index(node), view.shape, view.strides, view.offset)
            for node, view in operands.items()
        )
        made = VendorCall(function, views, **call)
        packed = tuple(packings.get(node) for node in piece.operands)
        pieces[position] = Piece(piece.task, piece.operands, piece.result, made, packings=packed)
        return Way(self.config, inputs, tuple(pieces))


def _view(shape: tuple[int, ...], strides: tuple[int, ...] | None = None) -> View:
    return View(0, shape, strides_of(shape) if strides is None else strides)


# -- cuBLASLt -------------------------------------------------------------------------------------------------------


def _products(task: Task, numerics: str, algorithms: int) -> Iterator[Way]:
    graph = task.graph
    anchor = _anchor(graph, "matmul", "linear", "conv")
    if anchor is None or len(anchor.inputs) != 2 or anchor.dtype not in _FLOATS:
        return
    before: tuple[Node, ...] = ()
    if anchor.op == "conv":
        if not (_is_pointwise(anchor) or _is_patches(anchor)):
            return
        if not _is_pointwise(anchor):
            graph = _with_rows(graph, anchor)
        elif any(step != 1 for step in anchor.attrs["stride"]):
            graph = _without_stride(graph, anchor)
        if graph is not task.graph:
            anchor = _anchor(graph, "conv")
            assert anchor is not None
            before = _computed(Graph(graph.inputs, (anchor.inputs[0],)))
    data, weight = anchor.inputs
    taken: tuple[Node, ...] = (anchor,)
    if weight.op == "reshape":
        taken, weight = (weight, anchor), weight.inputs[0]
    if not weight.is_input:
        return
    if not before:
        before = _computed(Graph(graph.inputs, (data,)))
    sizes = _sizes(anchor)
    if sizes is None:
        return
    batch, m, n, k = sizes
    best = list(_epilogues(graph, anchor, numerics))[-1]
    if batch and best.bias is not None:  # the library would want a bias for each of the batch
        best = next(_epilogues(graph, anchor, numerics))
    operands = {data: _view((*batch, m, k)), weight: _view((*batch, k, n))}
    if best.bias is not None:
        operands[best.bias] = _view((n,))
    if best.added is not None:
        operands[best.added] = _view((*batch, m, n))
    if len(operands) < 2 + (best.bias is not None) + (best.added is not None):
        return  # one tensor in two places
    options = {
        "bias": best.bias is not None,
        "added": best.added is not None,
        "activation": best.activation,
        **_rounded(anchor, numerics),
    }
    constant = graph.inputs.index(weight) in task.constants
    across = _across(weight.shape)
    turned = [True] if anchor.op == "linear" else [True, False] if constant and not batch else [False]
    for algorithm in range(algorithms):
        for rows in turned if algorithm < _TURNED else turned[:1]:
            packings = {weight: across} if rows and anchor.op != "linear" else {}
            views = {**operands, weight: _view((*batch, k, n), _turned(batch, n, k) if rows else None)}
            config = Config.of(CUBLASLT, {"turned": int(rows), "algorithm": algorithm})
            plan = _Cut(config, task, graph, (*taken, *best.nodes), before)
            chosen = {**options, "algorithm": algorithm}
            yield plan.way("product", views, packings, result=(*batch, m, n), options=chosen)
        if numerics == "strict":
            return


def _across(shape: tuple[int, ...]) -> Packing:
    """The last axis first."""
    last = 2 * len(shape) - 1
    return Packing(shape, shape, (*range(0, last, 2), last, *range(1, last, 2)))


def _turned(batch: tuple[int, ...], n: int, k: int) -> tuple[int, ...]:
    return (*(step * n * k for step in strides_of(batch)), 1, k)


def _is_pointwise(conv: Node) -> bool:
    attrs = conv.attrs
    window = conv.inputs[1].shape[:-2] if attrs["layout"] == "channels_last" else (0,)
    return all(extent == 1 for extent in window) and attrs["groups"] == 1 and not _padded(conv)


def _padded(conv: Node) -> bool:
    return any(any(sides) for sides in conv.attrs["padding"])


def _is_patches(conv: Node) -> bool:
    """Whether its windows lie side by side and cover the image."""
    attrs = conv.attrs
    if attrs["layout"] != "channels_last" or attrs["groups"] != 1 or _padded(conv) or conv.type.rank != 4:
        return False
    window = conv.inputs[1].shape[:2]
    image = conv.inputs[0].shape[1:3]
    tiles = all(extent % side == 0 for extent, side in zip(image, window, strict=True))
    return tiles and tuple(attrs["stride"]) == window and all(step == 1 for step in attrs["dilation"])


def _with_rows(graph: Graph, conv: Node) -> Graph:
    """conv(x, w) of windows side by side -> conv of one place, each with all of a window in its channels."""

    def rule(node: Node, operands: tuple[Node, ...]) -> Node | None:
        if node is not conv:
            return None
        data, weight = operands
        batch, rows, columns, _ = conv.shape
        height, width, channels, results = weight.shape
        split = apply("reshape", data, shape=(batch, rows, height, columns, width, channels))
        moved = apply("permute", split, axes=(0, 1, 3, 2, 4, 5))
        flat = apply("reshape", moved, shape=(batch, rows, columns, height * width * channels))
        kernel = apply("reshape", weight, shape=(1, 1, height * width * channels, results))
        return apply("conv", flat, kernel, **{**conv.attrs, "stride": (1, 1)})

    return rebuild(graph, rule)


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


def _convolutions(task: Task, numerics: str) -> Iterator[Way]:
    conv = _anchor(task.graph, "conv")
    if conv is None or conv.type.rank != 4 or len(conv.inputs) != 2 or conv.dtype not in _FLOATS:
        return
    if conv.attrs["layout"] != "channels_last" or not conv.inputs[1].is_input:
        return
    channels, groups = conv.inputs[0].shape[-1], conv.attrs["groups"]
    fills = [0] if channels >= _FEW or groups > 1 or conv.dtype not in _SHORT else [_FEW, _FEW // 2, 0]
    constant = task.graph.inputs.index(conv.inputs[1]) in task.constants
    for filled in fills if constant else [0]:
        if filled <= channels and filled:
            continue
        for apart in (False, True):
            config = Config.of(CUDNN, {"apart": int(apart), "filled": filled})
            way = _convolution(task, config, numerics, filled, apart)
            if way is not None:
                yield way


def _convolution(task: Task, config: Config, numerics: str, filled: int, apart: bool) -> Way | None:
    """`filled`: channels, the new ones all zero; 0: as they are. `apart`: nothing else in the library's call."""
    graph = _with_channels(task.graph, filled) if filled else task.graph
    conv = _anchor(graph, "conv")
    assert conv is not None
    data, weight = conv.inputs
    taken: tuple[Node, ...] = (conv,)
    padding = list(conv.attrs["padding"])
    if filled:  # conv(pad(slice(filled(x)))): the library reads all of it, as the weight is zero there
        taken, data = (data, *taken), data.inputs[0]
    if data.op == "pad" and not (filled and data.attrs["high"][-1]):
        border = _even_border(data)
        if border is not None and not _padded(conv):
            padding, taken, data = border, (data, *taken), data.inputs[0]
    before = _computed(Graph(graph.inputs, (data,)))
    if any(low != high for low, high in padding):
        return None
    height, width, inner, channels = weight.shape
    reads = filled or inner
    packings: dict[Node, Packing] = {}
    if graph.inputs.index(weight) in task.constants:
        blocks = (height, width, reads, channels)
        packings[weight] = Packing(
            weight.shape, blocks, (0, 2, 4, 6, 7, 1, 3, 5), zero_filled=(2,) if filled else ()
        )
        strides = (height * width * reads, 1, width * reads, reads)
    else:
        whole = strides_of(weight.shape)
        strides = (whole[3], whole[2], whole[0], whole[1])
    operands = {data: _channels_first(data), weight: _view((channels, reads, height, width), strides)}
    options = {
        "stride": list(conv.attrs["stride"]),
        "padding": [low for low, _ in padding],
        "dilation": list(conv.attrs["dilation"]),
        "groups": conv.attrs["groups"],
        **_rounded(conv, numerics),
    }
    batch, rows, columns, _ = conv.shape
    common = {"result": (batch, channels, rows, columns), "order": (0, 2, 3, 1), "options": options}
    if apart:
        return _Cut(config, task, graph, taken, before).way("conv", operands, packings, **common)
    run = list(_epilogues(graph, conv, "fast"))[-1]
    if run.activation != "relu" or run.bias is None or run.added in operands:
        return None
    function, more = "conv_relu", {run.bias: _view((channels,))}
    if run.added is not None:
        function, more = "conv_add_relu", {**more, run.added: _channels_first(run.added)}
    plan = _Cut(config, task, graph, (*taken, *run.nodes), before)
    return plan.way(function, {**operands, **more}, packings, **common)


def _with_channels(graph: Graph, filled: int) -> Graph:
    """conv(x) or conv(pad(x)) -> the same of a slice of x, filled up with channels of zeros, and padded with it."""
    conv = _anchor(graph, "conv")
    assert conv is not None

    def rule(node: Node, operands: tuple[Node, ...]) -> Node | None:
        if node is not conv:
            return None
        data, weight = operands
        border = data if data.op == "pad" and _even_border(data) is not None else None
        source = data if border is None else border.inputs[0]
        zeros = (0,) * source.type.rank
        high = (*zeros[:-1], filled - source.shape[-1])
        wide = apply("pad", source, low=zeros, high=high, interior=zeros, value=0.0)
        if border is not None:
            wide = apply("pad", wide, **border.attrs)
        stops = (*wide.shape[:-1], source.shape[-1])
        read = apply("slice", wide, starts=zeros, stops=stops, steps=(1,) * len(zeros))
        return apply("conv", read, weight, **conv.attrs)

    return rebuild(graph, rule)


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
    yield Way(Config(ATTENTION, ()), graph.inputs, (Piece(piece.task, piece.operands, piece.result, call),))


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
