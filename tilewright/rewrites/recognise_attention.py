"""recognise_attention: replace hand-written attention by the operator, which one kernel computes.

    matmul(softmax(matmul(q, permute(k)) * scale + mask), v)      ->      attention(q, k, v, mask)

The scale may be a division, scale and mask are optional, and a select with -inf counts as a mask. Intermediate values
must have no other reader, because they would have to be in memory.

A query without visible keys gives NaN when written by hand, but 0 in the operator. So a mask row of only -inf becomes
NaN. A constant mask is examined now; any other costs a pass over the mask, shared by all layers that use it. Scores
that overflow to -inf for every key of a query are not detected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tilewright.graph.attention import fits_one_kernel
from tilewright.graph.ir import Graph, Node, constant, rebuild
from tilewright.graph.op import apply
from tilewright.rewrites.base import Pass
from tilewright.rewrites.simplify_rules import scalar_value

_AS_GOOD_AS_NEVER = -1e30  # a score so low that its weight is 0 next to any other


@dataclass(frozen=True)
class RecogniseAttention(Pass):
    """`has_kernel`: whether one kernel computes this attention."""

    name = "recognise-attention"
    has_kernel: Callable[[Node], bool] = fits_one_kernel

    def run(self, graph: Graph) -> Graph:
        uses = {node: len(users) for node, users in graph.users().items()}
        for node in graph.outputs:
            uses[node] += 1
        single: set[Node] = set()  # nodes of the new graph that are read once

        def rule(node: Node, operands: tuple[Node, ...]) -> Node | None:
            same = all(a is b for a, b in zip(operands, node.inputs, strict=True))
            kept = node if same else replace(node, inputs=operands)
            found = _attention(kept, single)
            known = found is not None and self.has_kernel(found)
            result = replace(found, name=node.name) if found is not None and known else kept
            if uses[node] == 1:
                single.add(result)
            return result

        return rebuild(graph, rule)


@dataclass(frozen=True)
class _Scores:
    """The nodes between the first product and the softmax."""

    product: Node
    scale: float = 1.0
    masks: tuple[Node, ...] = ()


def _attention(node: Node, single: set[Node]) -> Node | None:
    """The attention operator that `node`, the second product, is equivalent to; `single` are the nodes that are read
    once."""
    if node.op != "matmul":
        return None
    weights, value = node.inputs
    if weights.op != "softmax" or weights.attrs["axis"] != weights.type.rank - 1 or weights not in single:
        return None
    scores = _scores(weights.inputs[0], single)
    if scores is None or min(x.type.rank for x in (*scores.product.inputs, value)) < 2:
        return None
    query, key = scores.product.inputs
    operands = [query, _swapped(key), value]
    if scores.masks:
        total = scores.masks[0]
        for mask in scores.masks[1:]:
            total = apply("add", total, mask)
        operands.append(_blind_rows_are_nan(total))
    source = scores.product.source | weights.source | node.source
    result = apply("attention", *operands, causal=False, scale=scores.scale, source=source)
    return result if result.type == node.type else None


def _scores(node: Node, single: set[Node]) -> _Scores | None:
    """From the softmax back to the product: masks first, then the scale."""
    masks: list[Node] = []
    scale = 1.0
    shape = node.shape
    while node in single and node.shape == shape:
        if node.op == "matmul":
            return _Scores(node, scale, tuple(masks))
        step = _mask_step(node, single) if scale == 1.0 else None
        if step is not None:
            node, mask = step
            masks.insert(0, mask)
            continue
        factor = _scale_step(node)
        if factor is None:
            return None
        node, by = factor
        scale *= by
    return None


def _scale_step(node: Node) -> tuple[Node, float] | None:
    """(x, factor) of x * factor or x / divisor."""
    if node.op not in ("mul", "div"):
        return None
    pairs = [node.inputs, node.inputs[::-1]] if node.op == "mul" else [node.inputs]
    for x, number in pairs:
        factor = scalar_value(number)
        if factor is not None and math.isfinite(factor) and factor > 0:
            return x, float(factor) if node.op == "mul" else 1 / float(factor)
    return None


def _mask_step(node: Node, single: set[Node]) -> tuple[Node, Node] | None:
    """(x, mask) of x + mask, or of a select between x and a score with no weight."""
    if node.op == "add":
        for x, mask in (node.inputs, node.inputs[::-1]):
            if x in single and x.shape == node.shape and x.op in ("matmul", "mul", "div", "add", "select"):
                return x, mask
    if node.op == "select":
        keep, one, other = node.inputs
        for x, fill, seen in ((one, other, True), (other, one, False)):
            never = scalar_value(fill)
            if never is None or x.shape != node.shape:
                continue
            if never == -math.inf or (never <= _AS_GOOD_AS_NEVER and _every_row_sees(keep, seen)):
                zero, low = (constant(np.array(v, node.dtype.numpy)) for v in (0.0, -math.inf))
                return x, apply("select", keep, *((zero, low) if seen else (low, zero)))
    return None


def _every_row_sees(mask: Node, seen: bool) -> bool:
    """Whether a mask is constant and lets every query see some key."""
    if mask.data is None or not mask.type.rank:
        return False
    return bool(np.all(np.any(mask.data == seen, axis=-1)))


def _blind_rows_are_nan(mask: Node) -> Node:
    if mask.data is not None and not np.isneginf(mask.data).any():
        return mask
    low, nan = (constant(np.array(v, mask.dtype.numpy)) for v in (-math.inf, math.nan))
    if not mask.type.rank:
        return apply("select", apply("eq", mask, low), nan, mask)
    top = apply("amax", mask, axes=(mask.type.rank - 1,), keepdims=True)
    return apply("select", apply("eq", top, low), nan, mask)


def _swapped(node: Node) -> Node:
    axes: Sequence[int] = (*range(node.type.rank - 2), node.type.rank - 1, node.type.rank - 2)
    if node.op == "permute" and node.attrs["axes"] == axes:
        return node.inputs[0]
    return apply("permute", node, axes=axes)
