"""quantise: a float graph as one of 8-bit integers, for targets that compute those; not one of the compiler's passes.

    conv(x, w) + b [+ y] [relu]   ->   sums = conv(bytes of x, bytes of w) + b' [+ round(bytes of y * r)]   in i32
                                       bytes = clamp(round(float(sums) * s)) [relu]

Scales are symmetric, one for each tensor, from the largest magnitude that it has for the samples. A convolution's
results stay bytes, through max pooling and into residuals; a linear layer's sums become floats again, and so does
whatever else is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tilewright.dtypes import DType
from tilewright.graph.ir import Graph, Node, constant
from tilewright.graph.op import apply
from tilewright.graph.oracle import evaluate
from tilewright.rewrites.fold_batch_norm import FoldBatchNorm
from tilewright.rewrites.fold_constants import FoldConstants
from tilewright.rewrites.simplify import Simplify

_LARGEST = 127
_SMALL = 1e-8  # magnitude of a tensor of zeros


@dataclass(frozen=True)
class _Bytes:
    """A tensor that is `node * scale`."""

    node: Node
    scale: float


@dataclass(frozen=True)
class _Chain:
    """A contraction with constant weights, and what is computed with its sums."""

    contraction: Node
    residual: Node | None = None
    relu: bool = False


def quantise(graph: Graph, samples: Sequence[Sequence[np.ndarray]]) -> Graph:
    """`samples`: inputs of the graph that its scales are taken from."""
    for step in (FoldConstants(), Simplify(fast=True), FoldBatchNorm()):
        graph = step.run(graph)
    maker = _Quantiser(graph, samples)
    return Graph(graph.inputs, tuple(maker.floats(node) for node in graph.outputs))


class _Quantiser:
    def __init__(self, graph: Graph, samples: Sequence[Sequence[np.ndarray]]) -> None:
        self._readers = {node: len(users) for node, users in graph.users().items()}
        for node in graph.outputs:
            self._readers[node] += 1
        self._largest: dict[Node, float] = {}
        nodes = [node for node in graph.nodes() if node.dtype is DType.F32 and node.type.size]
        for sample in samples:
            found = evaluate(Graph(graph.inputs, tuple(nodes)), list(sample), precise=False)
            for node, value in zip(nodes, found, strict=True):
                self._largest[node] = max(self._largest.get(node, _SMALL), float(np.abs(value).max()))
        self._floats: dict[Node, Node] = {}
        self._bytes: dict[Node, _Bytes] = {}
        # In order, so that nothing recurs deeply.
        for node in graph.nodes():
            if self._is_needed(node):
                self.floats(node)

    def _is_needed(self, node: Node) -> bool:
        return node.is_input or node.is_constant or node.dtype is not DType.F32

    # -- both forms of a value ------------------------------------------------------------------------------------

    def floats(self, node: Node) -> Node:
        if node not in self._floats:
            self._floats[node] = _named(self._as_floats(node), node)
        return self._floats[node]

    def _as_floats(self, node: Node) -> Node:
        if node.is_input or node.is_constant:
            return node
        chain = self._chain(node)
        if chain is not None and chain.contraction.op == "linear":
            sums, scale = self._sums(chain)
            return _times(apply("cast", sums, dtype=DType.F32), scale)
        if chain is not None or node in self._bytes or self._pools_bytes(node):
            found = self.bytes(node)
            return _times(apply("cast", found.node, dtype=DType.F32), found.scale)
        return replace(node, inputs=tuple(self.floats(operand) for operand in node.inputs))

    def bytes(self, node: Node) -> _Bytes:
        if node not in self._bytes:
            found = self._as_bytes(node)
            self._bytes[node] = replace(found, node=_named(found.node, node))
        return self._bytes[node]

    def _as_bytes(self, node: Node) -> _Bytes:
        scale = self._largest[node] / _LARGEST
        chain = self._chain(node)
        if chain is not None and chain.contraction.op == "conv":
            sums, step = self._sums(chain)
            made = _rounded(_times(apply("cast", sums, dtype=DType.F32), step / scale))
            return _Bytes(apply("relu", made) if chain.relu else made, scale)
        if self._pools_bytes(node):
            below = self.bytes(node.inputs[0])
            return _Bytes(apply("max_pool", below.node, **node.attrs), below.scale)
        return _Bytes(_rounded(_times(self.floats(node), 1 / scale)), scale)

    def _pools_bytes(self, node: Node) -> bool:
        return node.op == "max_pool" and self._chain(node.inputs[0]) is not None

    # -- contractions ---------------------------------------------------------------------------------------------

    def _chain(self, node: Node) -> _Chain | None:
        relu = node.op == "relu" and self._readers[node.inputs[0]] == 1
        inner = node.inputs[0] if relu else node
        if _is_contraction(inner):
            return None if relu and inner.op == "linear" else _Chain(inner, relu=relu)
        if inner.op != "add" or len(set(inner.inputs)) != 2:
            return None
        for operand, other in (inner.inputs, inner.inputs[::-1]):
            if operand.op == "conv" and _is_contraction(operand) and self._readers[operand] == 1:
                if other.shape == operand.shape and not other.is_constant:
                    return _Chain(operand, other, relu)
        return None

    def _sums(self, chain: _Chain) -> tuple[Node, float]:
        """In i32, and what one of them is worth."""
        node = chain.contraction
        data, weight = self.bytes(node.inputs[0]), node.inputs[1].data
        assert weight is not None
        weight_scale = max(float(np.abs(weight).max()), _SMALL) / _LARGEST
        values = np.rint(weight / weight_scale).astype(np.int8)
        scale = data.scale * weight_scale
        if node.op == "conv":
            sums = apply("conv", data.node, constant(values), **node.attrs)
        else:
            sums = apply("matmul", data.node, constant(np.ascontiguousarray(values.T)))
        if len(node.inputs) == 3:
            bias = node.inputs[2].data
            assert bias is not None
            shape = (-1, *[1] * (node.type.rank - 2)) if node.op == "conv" else (-1,)
            sums = apply("add", sums, constant(np.rint(bias / scale).astype(np.int32).reshape(shape)))
        if chain.residual is not None:
            added = self.bytes(chain.residual)
            scaled = _times(apply("cast", added.node, dtype=DType.F32), added.scale / scale)
            sums = apply("add", sums, apply("cast", apply("round", scaled), dtype=DType.I32))
        return sums, scale


def _is_contraction(node: Node) -> bool:
    """Whether it is a contraction of floats with constant weights."""
    if node.op not in ("conv", "linear") or node.dtype is not DType.F32:
        return False
    if node.op == "conv" and (node.attrs["groups"] != 1 or node.attrs["layout"] != "channels_first"):
        return False
    return all(operand.is_constant for operand in node.inputs[1:])


def _named(made: Node, origin: Node) -> Node:
    """The node with the name and the layer of the node that it replaces, for messages."""
    return made if made is origin else replace(made, name=origin.name, source=origin.source)


def _times(node: Node, scale: float) -> Node:
    return apply("mul", node, constant(np.array(scale, np.float32)))


def _rounded(node: Node) -> Node:
    """To the nearest integer, saturated."""
    kept = apply("clamp", apply("round", node), min=-128.0, max=127.0)
    return apply("cast", apply("cast", kept, dtype=DType.I32), dtype=DType.I8)
