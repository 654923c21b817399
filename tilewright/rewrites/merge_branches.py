"""merge-branches: add up the weights of convolutions whose results are added (RepVGG's re-parameterisation).

    conv3x3(x, w) + conv1x1(x, v) + batch_norm(x)     ->     conv3x3(x, w + v in its middle + s in the middle)

A convolution is linear in its weights, so convolutions of one operand with the same stride are one convolution, whose
window is the larger one. A 1x1 convolution is one with zeros around, a batch norm or the operand itself a diagonal 1x1
convolution. Sums are computed in f64 and rounded once. A diagonal is not merged into 16-bit weights: next to a one,
small weights would lose their digits. Weights must be constant, and each convolution read only by the sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilewright.errors import TypeRuleError
from tilewright.graph.ir import Graph, Node, constant, rebuild
from tilewright.graph.op import apply
from tilewright.rewrites.base import Pass
from tilewright.rewrites.fold_batch_norm import batch_norm_affine, finite, wide


@dataclass(frozen=True)
class MergeBranches(Pass):
    name = "merge-branches"

    def run(self, graph: Graph) -> Graph:
        uses = {node: len(users) for node, users in graph.users().items()}
        for node in graph.outputs:
            uses[node] += 1

        def rule(node: Node, operands: tuple[Node, ...]) -> Node | None:
            if node.op != "add" or len({operand.type for operand in (*operands, node)}) != 1:
                return None
            for position in (0, 1):
                conv, other = operands[position], operands[1 - position]
                if not _is_branch(conv) or uses[node.inputs[position]] != 1:
                    continue
                if other is not conv.inputs[0] and uses[node.inputs[1 - position]] != 1:
                    continue
                merged = _merged(conv, other, node)
                if merged is not None:
                    return merged
            return None

        return rebuild(graph, rule)


@dataclass(frozen=True)
class _Kernel:
    """A convolution's parameters in f64. `low`: zeros before the image, per spatial axis."""

    weight: np.ndarray
    bias: np.ndarray | None
    low: tuple[int, ...]
    is_diagonal: bool = False


def _is_branch(node: Node) -> bool:
    return (
        node.op == "conv"
        and node.dtype.is_float
        and node.attrs["layout"] == "channels_first"
        and all(step == 1 for step in node.attrs["dilation"])
        and all(operand.is_constant for operand in node.inputs[1:])
    )


def _merged(conv: Node, other: Node, replaced: Node) -> Node | None:
    """Both as one convolution, or None."""
    ours, theirs = _kernel(conv), _as_kernel(other, conv)
    if theirs is None or (theirs.is_diagonal and conv.dtype.is_half):
        return None
    low = tuple(max(a, b) for a, b in zip(ours.low, theirs.low, strict=True))
    ends = [
        max(a - p, b - q)
        for a, p, b, q in zip(
            ours.weight.shape[2:], ours.low, theirs.weight.shape[2:], theirs.low, strict=True
        )
    ]
    window = tuple(p + end for p, end in zip(low, ends, strict=True))
    larger = [max(a, b) for a, b in zip(ours.weight.shape[2:], theirs.weight.shape[2:], strict=True)]
    if list(window) != larger:  # neither window contains the other
        return None
    total = np.zeros((*ours.weight.shape[:2], *window))
    for kernel in (ours, theirs):
        where = tuple(
            slice(p - q, p - q + size)
            for p, q, size in zip(low, kernel.low, kernel.weight.shape[2:], strict=True)
        )
        total[(slice(None), slice(None), *where)] += kernel.weight
    numpy = conv.dtype.numpy
    weight = constant(total.astype(numpy), conv.inputs[1].name)
    biases = [kernel.bias for kernel in (ours, theirs) if kernel.bias is not None]
    operands = [conv.inputs[0], weight]
    if biases:
        operands.append(constant(sum(biases[1:], biases[0]).astype(numpy)))
    if not all(finite(parameter) for parameter in operands[1:]):
        return None
    padding = tuple(_padding(conv, axis, low[axis], window[axis]) for axis in range(len(window)))
    source = conv.source | other.source | replaced.source
    try:
        made = apply(
            "conv", *operands, name=replaced.name, source=source, **{**conv.attrs, "padding": padding}
        )
    except TypeRuleError:
        return None
    return made if made.type == replaced.type else None


def _padding(conv: Node, axis: int, low: int, window: int) -> tuple[int, int]:
    """Zeros before and after the image, so that there are as many results as before."""
    extent, count = conv.inputs[0].shape[2 + axis], conv.shape[2 + axis]
    return low, max(0, (count - 1) * conv.attrs["stride"][axis] + window - extent - low)


def _kernel(conv: Node) -> _Kernel:
    bias = wide(conv.inputs[2]) if len(conv.inputs) > 2 else None
    return _Kernel(wide(conv.inputs[1]), bias, tuple(low for low, _ in conv.attrs["padding"]))


def _as_kernel(node: Node, conv: Node) -> _Kernel | None:
    """A value that is added to `conv` as a convolution of the same operand."""
    x, groups = conv.inputs[0], conv.attrs["groups"]
    if _is_branch(node) and node.inputs[0] is x:
        same = all(node.attrs[name] == conv.attrs[name] for name in ("stride", "groups"))
        return _kernel(node) if same else None
    if any(step != 1 for step in conv.attrs["stride"]) or x.type != conv.type:
        return None
    channels = x.shape[1]
    scale, shift = np.ones(channels), None
    if node.op == "batch_norm" and node.inputs[0] is x and all(p.is_constant for p in node.inputs[1:]):
        affine = batch_norm_affine(node.inputs[1:], node.attrs["eps"])
        assert affine.scale is not None
        scale, shift = affine.scale, affine.shift
    elif node is not x:
        return None
    rank = len(conv.attrs["stride"])
    diagonal = np.zeros((channels, channels // groups, *(1,) * rank))
    rows = np.arange(channels)
    diagonal[(rows, rows % (channels // groups), *(0,) * rank)] = scale
    return _Kernel(diagonal, shift, (0,) * rank, is_diagonal=True)
