"""pad-channels: pad channels to a multiple that kernels read in whole vectors, where that saves more than it costs.

    x: 46 channels                          pad(x): 48
    y = relu(conv(x, w[3,3,46,46]) + b)  -> y: 48 = relu(select(real, conv(pad(x), w[3,3,48,48]), 0) + b[48])
    z = conv(y, v[1,1,46,64])               z = conv(y, v[1,1,48,64])

Channels are the last axis. Weights are padded with zeros at compile time, and padded channels of an operand are
multiplied by zero. In between they go through elementwise operators that are finite at zero, depthwise convolutions,
pooling and padding of images. Where padded channels begin or end otherwise, at inputs, outputs and all other operators,
they are added or cut off by a copy, which is fused like other movement.

Zero times infinity is not zero, so what the padded channels hold must be finite whatever the inputs are. A contraction
sums all of its operand's channels, infinite ones too, so a select makes the padded channels of its result zero. Then
they meet constants and other padded channels only, and `_stays_finite` computes what becomes of them.

All values that must be padded together are a region. A region is padded if the kernels of its operators, with the
contractions around it and the copies, are predicted to be faster.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tilewright.dtypes import DType
from tilewright.graph.ir import Graph, Node, TensorType, constant, input_node
from tilewright.graph.op import apply
from tilewright.graph.ops.layouts import LAST
from tilewright.graph.oracle import evaluate_node
from tilewright.rewrites.base import Pass
from tilewright.rewrites.local import Judge, part_of_graph

MAX_PADDING = (
    1.15  # padded channels over channels: beyond this, the additional work is not worth asking about
)

# Elementwise operators that are finite where their operands are zero.
SAFE = frozenset(
    [
        *("add", "sub", "mul", "maximum", "minimum", "neg", "abs", "square", "cast"),
        *("relu", "leaky_relu", "clamp", "sigmoid", "silu", "gelu", "tanh", "elu", "softplus", "mish"),
        *("hardswish", "hardsigmoid", "erf", "exp"),
    ]
)
_POOLS = frozenset(["max_pool", "avg_pool", "adaptive_max_pool", "adaptive_avg_pool"])
_CONTRACTIONS = frozenset(["conv", "matmul", "linear"])


@dataclass(frozen=True)
class PadChannels(Pass):
    """`multiple`: the multiple to which the channels of a value of a type are padded, such as 8."""

    name = "pad-channels"

    judge: Judge
    multiple: Callable[[Node], int]

    def run(self, graph: Graph) -> Graph:
        regions = regions_of(graph, self.multiple)
        if not regions:
            return graph
        users = graph.users()
        chosen: set[Node] = set()
        regions = [region for region in regions if _stays_finite(graph, region)]
        for cluster in _clusters(regions, users):
            whole = set().union(*cluster)
            if self._is_faster(graph, whole, users):
                chosen |= whole
            elif len(cluster) > 1:
                for region in cluster:
                    if self._is_faster(graph, region, users):
                        chosen |= region
        return padded(graph, chosen, self.multiple) if chosen else graph

    def _is_faster(self, graph: Graph, region: Collection[Node], users: Mapping[Node, list[Node]]) -> bool:
        around = {node for node in region if not (node.is_input or node.is_constant) and _keeps(node, region)}
        around |= {user for node in region for user in users[node] if _ends(user, node)}
        before, made = part_of_graph(graph, around, users)
        inner = {made[node] for node in region if node in made}
        return self.judge.prefers(padded(before, inner, self.multiple), before)


def padded_channels(node: Node, multiple: int) -> int:
    """The number of channels with padding; unchanged if no padding is needed, or if it would be too much."""
    channels = node.shape[-1] if node.type.rank else 1
    more = -(-channels // multiple) * multiple
    return more if more <= MAX_PADDING * channels else channels


# -- regions ----------------------------------------------------------------------------------------------------------


def regions_of(graph: Graph, multiple: Callable[[Node], int]) -> list[set[Node]]:
    """The values that must be padded together, for each contraction that reads or writes unaligned channels."""
    users = graph.users()
    found: list[set[Node]] = []
    seen: set[Node] = set()
    for node in users:
        if not _is_contraction(node):
            continue
        for value in (node.inputs[0], node):
            wanted = value.dtype.is_float and value.type.size > 0 and not value.is_constant
            if value in seen or not wanted or padded_channels(value, multiple(value)) == value.shape[-1]:
                continue
            if value is node.inputs[0] and not _ends(node, value):
                continue
            region = _region(value, users)
            seen |= region
            found.append(region)
    return found


def _region(value: Node, users: Mapping[Node, list[Node]]) -> set[Node]:
    region = {value}
    waiting = [value]
    while waiting:
        node = waiting.pop()
        near = [user for user in users[node] if _follows(user, node)]
        near += [operand for operand in _carried(node) if _follows(node, operand)]
        for each in near:
            if each not in region:
                region.add(each)
                waiting.append(each)
    return region


def _clusters(regions: Sequence[set[Node]], users: Mapping[Node, list[Node]]) -> list[list[set[Node]]]:
    """Groups of regions that contractions connect: one region contains the operand, the other the result."""
    number = {node: n for n, region in enumerate(regions) for node in region}
    parent = list(range(len(regions)))

    def root(n: int) -> int:
        while parent[n] != n:
            n = parent[n]
        return n

    for node, n in number.items():
        for user in users[node]:
            if _ends(user, node) and user in number:
                parent[root(n)] = root(number[user])
    found: dict[int, list[set[Node]]] = {}
    for n, region in enumerate(regions):
        found.setdefault(root(n), []).append(region)
    return list(found.values())


def _is_contraction(node: Node) -> bool:
    """Whether it is a contraction with channels last, one group, and a weight that can be padded."""
    if node.op not in _CONTRACTIONS or not node.inputs[1].is_constant or node.inputs[0].is_constant:
        return False
    if any(not operand.is_constant for operand in node.inputs[1:]):
        return False
    if node.op == "conv":
        return bool(node.attrs["layout"] == LAST and node.attrs["groups"] == 1)
    return node.inputs[1].type.rank == 2


def _ends(user: Node, value: Node) -> bool:
    """Whether it is a contraction over the channels of `value`."""
    return _is_contraction(user) and user.inputs[0] is value


def _carried(node: Node) -> list[Node]:
    """The operands whose channels correspond to the node's."""
    if node.is_input or node.is_constant:
        return []
    same = [x for x in node.inputs if not x.is_constant and x.type.rank and x.shape[-1] == node.shape[-1]]
    return same if node.op in SAFE else same[:1]


def _follows(node: Node, operand: Node) -> bool:
    """Whether each channel of the node comes from the same channel of `operand`."""
    if not node.type.rank or not any(x is operand for x in _carried(node)):
        return False
    if node.op in SAFE:
        rest = [x for x in node.inputs if x is not operand]
        return all(x.is_constant or (x.type.rank and x.shape[-1] == node.shape[-1]) for x in rest)
    if node.op in _POOLS:
        return bool(node.attrs["layout"] == LAST)
    if node.op == "pad":
        ends = (*node.attrs["low"][-1:], *node.attrs["high"][-1:], *node.attrs["interior"][-1:])
        return node.inputs[0] is operand and not any(ends) and node.attrs["value"] == 0
    return _is_depthwise(node) and node.inputs[0] is operand


def _is_depthwise(node: Node) -> bool:
    return (
        node.op == "conv"
        and node.attrs["layout"] == LAST
        and node.attrs["groups"] == node.shape[-1] == node.inputs[0].shape[-1]
        and node.shape[-1] > 1
        and all(operand.is_constant for operand in node.inputs[1:])
    )


def _stays_finite(graph: Graph, region: Collection[Node]) -> bool:
    """Whether padded channels stay finite in all values of a region. They start as zeros; constants for all channels,
    such as the 1 in x + 1, may change them."""
    held: dict[Node, np.ndarray] = {}  # the least and the greatest number, and zero
    for node in graph.nodes():
        if node not in region:
            continue
        carried = [operand for operand in _carried(node) if operand in held and _follows(node, operand)]
        if not carried or not _keeps(node, region) or _is_contraction(node) or _is_depthwise(node):
            held[node] = np.zeros(1)
            continue
        found = held[carried[0]]
        if node.op in SAFE:
            found = _at(node, [held[x] if x in held else _for_padding(x, node) for x in node.inputs])
        limit = np.sqrt(65504.0 if node.dtype is DType.F16 else np.finfo(np.float32).max)
        if not (np.abs(found) < limit).all():
            return False
        held[node] = np.unique([found.min(), 0.0, found.max()])
    return True


def _for_padding(operand: Node, node: Node) -> np.ndarray:
    """The value of a constant operand in padded channels."""
    data = operand.data
    if data is None or (data.ndim and data.shape[-1] == node.shape[-1] > 1):
        return np.zeros(1)
    wide = data.astype(np.float64)
    return np.array([wide.min(), wide.max()])


def _at(node: Node, operands: Sequence[np.ndarray]) -> np.ndarray:
    """The results of an elementwise operator for each combination of numbers."""
    grid = [each.reshape(-1) for each in np.meshgrid(*operands)]
    types = [TensorType(grid[0].shape, x.dtype) for x in node.inputs]
    made = apply(node.op, *(input_node(number, type) for number, type in enumerate(types)), **node.attrs)
    return np.asarray(evaluate_node(made, grid), np.float64)


def _keeps(node: Node, region: Collection[Node]) -> bool:
    """Whether a value of a region is computed with padded channels; otherwise a copy adds them."""
    return _is_contraction(node) or (
        bool(_carried(node)) and all(x in region and _follows(node, x) for x in _carried(node))
    )


# -- the rewrite ------------------------------------------------------------------------------------------------------


def padded(graph: Graph, region: Collection[Node], multiple: Callable[[Node], int]) -> Graph:
    """The graph with the channels of these values padded."""
    new: dict[Node, Node] = {node: node for node in graph.inputs}  # without padding
    large: dict[Node, Node] = {}
    summed: dict[Node, Node] = {}  # contractions, whose padded channels may be NaN

    def whole(node: Node) -> Node:
        """The value without padding."""
        if node not in new:
            new[node] = _resized(summed.get(node, large[node]), node.shape[-1])
        return new[node]

    for node in graph.nodes():
        channels = padded_channels(node, multiple(node)) if node in region else 0
        keeps = node in region and not node.is_input and not node.is_constant and _keeps(node, region)
        ends = _is_contraction(node) and node.inputs[0] in large
        if node in region and not keeps:
            if not node.is_input:
                new[node] = _same(node, whole)
            large[node] = _resized(new[node], channels)
        elif keeps and _is_contraction(node):
            summed[node] = _contraction(node, large.get(node.inputs[0]) or whole(node.inputs[0]), channels)
            large[node] = _with_zeros(summed[node], node.shape[-1])
        elif keeps:
            large[node] = _followed(node, large, whole, channels)
        elif ends:
            new[node] = _contraction(node, large[node.inputs[0]], node.shape[-1])
        elif not node.is_input:
            new[node] = _same(node, whole)
    return Graph(graph.inputs, tuple(whole(node) for node in graph.outputs))


def _same(node: Node, whole: Callable[[Node], Node]) -> Node:
    operands = tuple(map(whole, node.inputs))
    same = all(a is b for a, b in zip(operands, node.inputs, strict=True))
    return node if same else replace(node, inputs=operands)


def _contraction(node: Node, data: Node, channels: int) -> Node:
    """The contraction of `data`, with this many channels of results."""
    outward, inward = (0, 1) if node.op == "linear" else (-1, -2)
    weight = _filled(_filled(node.inputs[1], inward, data.shape[-1]), outward, channels)
    bias = [_filled(each, -1, channels) for each in node.inputs[2:]]
    return apply(node.op, data, weight, *bias, name=node.name, source=node.source, **node.attrs)


def _with_zeros(value: Node, channels: int) -> Node:
    """The value with zeros from this channel on."""
    if value.shape[-1] == channels:
        return value
    real = constant(np.arange(value.shape[-1]) < channels)
    zero = constant(np.zeros((), value.dtype.numpy))
    return apply("select", real, value, zero, source=value.source)


def _followed(node: Node, large: Mapping[Node, Node], whole: Callable[[Node], Node], channels: int) -> Node:
    """A node that does not mix channels, on padded operands."""
    operands = []
    for operand in node.inputs:
        if operand in large:
            operands.append(large[operand])
        elif operand.is_constant and operand.type.rank and operand.shape[-1] == node.shape[-1] > 1:
            operands.append(_filled(operand, -1, channels))
        else:
            operands.append(whole(operand))
    attrs = dict(node.attrs)
    if _is_depthwise(node):
        attrs["groups"] = channels
    return apply(node.op, *operands, name=node.name, source=node.source, **attrs)


def _filled(weight: Node, axis: int, extent: int) -> Node:
    """A constant, padded with zeros to `extent`."""
    data = weight.data
    assert data is not None
    if data.shape[axis] == extent:
        return weight
    amounts = [(0, 0)] * data.ndim
    amounts[axis] = (0, extent - data.shape[axis])
    return constant(np.pad(data, amounts), name=weight.name)


def _resized(node: Node, channels: int) -> Node:
    """The value with more or fewer channels."""
    rank, more = node.type.rank, channels - node.shape[-1]
    zeros = (0,) * rank
    if more >= 0:
        high = (*zeros[:-1], more)
        return apply("pad", node, low=zeros, high=high, interior=zeros, value=0.0, source=node.source)
    stops = (*node.shape[:-1], channels)
    return apply("slice", node, starts=zeros, stops=stops, steps=(1,) * rank, source=node.source)
