"""decompose: replace composites without a lowering, and forms that lowerings do not support, by other operators.

linear(x, w, b)             reshape(matmul(reshape(x), permute(w)) + b): all leading axes of x are one, M
matmul(a, b), b a matrix    likewise
conv(x, w, b) with padding  conv(pad(x), w) + b
conv_transpose(x, w, b)     conv(pad(x) with zeros between its elements, flipped w) + b; or, if windows do not
                            overlap, a matmul over channels and a permute, which multiplies no zeros
batch_norm                  x * scale + shift
attention                   matmul(softmax(matmul(q * scale, permute(k)) + mask), v); it stays whole where one kernel
                            computes it all. Few queries of 16-bit types: sum(q * scale * k) instead of the first
                            matmul, which would transpose all keys for them
concat(a, b, ...) of many   concat(concat(a, b, ...), ...): of no more operands than one kernel takes, as few of them
                            twice as possible
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from tilewright.dtypes import DType
from tilewright.graph.ir import Graph, Node, constant, rebuild, toposort
from tilewright.graph.op import apply
from tilewright.graph.tile_operator import inlined
from tilewright.graph.verify import MAX_CONCATENATED
from tilewright.rewrites.base import Pass
from tilewright.rewrites.fold_batch_norm import batch_norm_affine
from tilewright.rewrites.shapes import reshape_to
from tilewright.support.trace import Event, Trace


@dataclass(frozen=True)
class Decompose(Pass):
    name = "decompose"
    reaches = "decomposed"

    # Whether one kernel computes this attention, in its own order of summation; None: all are decomposed.
    keeps_attention: Callable[[Node], bool] | None = None
    # With 16-bit types, attention with at most this many queries is decomposed all the same: the single kernel first
    # converts all keys and values in scratch memory, which takes longer than the few queries do. Their scores are sums
    # over rows of keys as they are stored.
    few_queries: int = 0
    keeps_tile_kernels: bool = True  # otherwise their references are inlined

    def run(self, graph: Graph) -> Graph:
        with Trace.off().span(self.name) as span:
            return self.traced(graph, span)

    def traced(self, graph: Graph, span: Event) -> Graph:
        if not self.keeps_tile_kernels:
            graph = inlined(graph)
        expanded: Counter[str] = Counter()
        span.note(rules=expanded)

        def rule(node: Node, operands: tuple[Node, ...]) -> Node | None:
            expand = EXPANSIONS.get(node.op)
            if expand is None or (node.op == "attention" and self._keeps(node)):
                return None
            node = replace(node, inputs=operands)
            result = (
                expand_attention(node, by_rows=self._has_few_queries(node))
                if node.op == "attention"
                else expand(node)
            )
            if result is None:
                return None
            expanded[node.op] += 1
            return _named(result, node)

        return rebuild(graph, rule)

    def _keeps(self, attention: Node) -> bool:
        keeps = self.keeps_attention
        return keeps is not None and not self._has_few_queries(attention) and keeps(attention)

    def _has_few_queries(self, attention: Node) -> bool:
        return attention.dtype.is_half and attention.inputs[0].shape[-2] <= self.few_queries


def _named(result: Node, node: Node) -> Node:
    """The replacement of `node` gets its name; all new nodes get its origin in the model."""
    named: dict[Node, Node] = {operand: operand for operand in node.inputs}

    for new in toposort([result], first=node.inputs):
        if new in named:
            continue
        operands = tuple(named[operand] for operand in new.inputs)
        named[new] = (
            new if new.is_constant else replace(new, inputs=operands, source=new.source or node.source)
        )
    found = named[result]
    return found if found in node.inputs else replace(found, name=node.name)


def scalar(value: float | bool, dtype: DType) -> Node:
    return constant(np.array(value, dtype.numpy))


def zero(dtype: DType) -> float | int:
    return 0.0 if dtype.is_float else 0


def swap_last(node: Node) -> Node:
    rank = node.type.rank
    return apply("permute", node, axes=(*range(rank - 2), rank - 1, rank - 2))


# -- matrices -----------------------------------------------------------------------------------------------------


def flat_matmul(x: Node, matrix: Node, bias: Node | None = None) -> Node:
    """x [..., K] times [K, N] with the leading axes of x fused, so that the kernel sees one long M."""
    *lead, width = x.shape
    result = apply("matmul", reshape_to(x, (math.prod(lead), width)), matrix)
    if bias is not None:
        result = apply("add", result, bias)
    return reshape_to(result, (*lead, matrix.shape[1]))


def expand_linear(node: Node) -> Node:
    x, weight, *bias = node.inputs
    return flat_matmul(x, swap_last(weight), bias[0] if bias else None)


def expand_matmul(node: Node) -> Node | None:
    a, b = node.inputs
    matrix = b.shape[-2:]
    one_matrix = math.prod(b.shape[:-2]) == 1 and b.type.rank <= a.type.rank
    if not one_matrix or a.type.rank == 2:
        return None
    return flat_matmul(a, reshape_to(b, matrix))


# -- convolutions -------------------------------------------------------------------------------------------------


def with_bias(result: Node, bias: list[Node], channel_axis: int) -> Node:
    if not bias:
        return result
    after = result.type.rank - 1 - channel_axis
    return apply("add", result, reshape_to(bias[0], (*bias[0].shape, *[1] * after)))


def padded(x: Node, axes: range, pairs: tuple[tuple[int, int], ...], interior: tuple[int, ...] = ()) -> Node:
    """x with zeros around its axes `axes`, and `interior` zeros between its elements."""
    low, high, between = ([0] * x.type.rank for _ in range(3))
    for axis, (before, after), gap in zip(axes, pairs, interior or (0,) * len(pairs), strict=True):
        low[axis], high[axis], between[axis] = before, after, gap
    if not any(low + high + between):
        return x
    return apply("pad", x, low=tuple(low), high=tuple(high), interior=tuple(between), value=zero(x.dtype))


def expand_conv(node: Node) -> Node | None:
    x, weight, *bias = node.inputs
    pairs = node.attrs["padding"]
    if not bias and not any(low or high for low, high in pairs):
        return None
    last = node.attrs["layout"] == "channels_last"
    spatial = range(1, x.type.rank - 1) if last else range(2, x.type.rank)
    attrs = {**node.attrs, "padding": ((0, 0),) * len(spatial)}
    result = apply("conv", padded(x, spatial, pairs), weight, **attrs)
    return with_bias(result, bias, x.type.rank - 1 if last else 1)


def expand_conv_transpose(node: Node) -> Node:
    x, weight, *bias = node.inputs
    attrs = node.attrs
    kernel = weight.shape[2:]
    separate = (
        kernel == attrs["stride"]
        and not any(attrs["padding"])
        and not any(attrs["output_padding"])
        and all(step == 1 for step in attrs["dilation"])
        and attrs["groups"] == 1
    )
    return separate_windows(x, weight, bias) if separate else spread_windows(node, x, weight, bias)


def separate_windows(x: Node, weight: Node, bias: list[Node]) -> Node:
    """A transposed convolution without overlap: each element of x makes its own window of the result. A matmul [N H
    W, I] x [I, h w O] computes all windows; a permute then interleaves their rows and columns."""
    batch, channels, *extents = x.shape
    outputs, *kernel = weight.shape[1:]
    rank = len(kernel)
    rows = apply("permute", x, axes=(0, *range(2, rank + 2), 1))
    rows = reshape_to(rows, (batch * math.prod(extents), channels))
    columns = apply("permute", weight, axes=(0, *range(2, rank + 2), 1))
    columns = reshape_to(columns, (channels, math.prod(kernel) * outputs))
    result = apply("matmul", rows, columns)
    if bias:
        repeated = apply("broadcast_to", bias[0], shape=(math.prod(kernel), outputs))
        result = apply("add", result, reshape_to(repeated, (math.prod(kernel) * outputs,)))
    result = reshape_to(result, (batch, *extents, *kernel, outputs))
    # N H W h w O -> N H h W w O
    between = [axis for d in range(rank) for axis in (1 + d, 1 + rank + d)]
    result = apply("permute", result, axes=(0, *between, 2 * rank + 1))
    large = tuple(extent * k for extent, k in zip(extents, kernel, strict=True))
    result = reshape_to(result, (batch, *large, outputs))
    return apply("permute", result, axes=(0, rank + 1, *range(1, rank + 1)))


def spread_windows(node: Node, x: Node, weight: Node, bias: list[Node]) -> Node:
    """A convolution of x, with zeros between and around its elements, by the flipped kernel."""
    attrs = node.attrs
    groups, kernel = attrs["groups"], weight.shape[2:]
    rank = len(kernel)
    transposed = weight
    if groups > 1:  # (g I/g) O/g ... -> (g O/g) I/g ...
        inputs, outputs = weight.shape[0] // groups, weight.shape[1]
        transposed = reshape_to(transposed, (groups, inputs, outputs, *kernel))
        transposed = apply("permute", transposed, axes=(0, 2, 1, *range(3, rank + 3)))
        transposed = reshape_to(transposed, (groups * outputs, inputs, *kernel))
    else:
        transposed = apply("permute", transposed, axes=(1, 0, *range(2, rank + 2)))
    transposed = apply("flip", transposed, axes=tuple(range(2, rank + 2)))

    reach = [step * (k - 1) for step, k in zip(attrs["dilation"], kernel, strict=True)]
    pairs = [
        (far - cut, far - cut + more)
        for far, cut, more in zip(reach, attrs["padding"], attrs["output_padding"], strict=True)
    ]
    interior = tuple(step - 1 for step in attrs["stride"])
    around = tuple((max(low, 0), max(high, 0)) for low, high in pairs)
    wide = padded(x, range(2, rank + 2), around, interior)
    cut = [(max(-low, 0), max(-high, 0)) for low, high in pairs]
    if any(
        low or high for low, high in cut
    ):  # padding beyond the kernel's extent removes elements of x itself
        stops = [extent - high for extent, (_, high) in zip(wide.shape[2:], cut, strict=True)]
        wide = apply(
            "slice",
            wide,
            starts=(0, 0, *(low for low, _ in cut)),
            stops=(*wide.shape[:2], *stops),
            steps=(1,) * (rank + 2),
        )
    result = apply(
        "conv",
        wide,
        transposed,
        stride=(1,) * rank,
        padding=((0, 0),) * rank,
        dilation=attrs["dilation"],
        groups=groups,
        layout="channels_first",
    )
    return with_bias(result, bias, 1)


# -- normalisation ------------------------------------------------------------------------------------------------


def expand_batch_norm(node: Node) -> Node:
    x, *parameters = node.inputs
    compute = node.dtype.compute
    along = (-1, *[1] * (x.type.rank - 2))
    if all(parameter.is_constant for parameter in parameters):
        affine = batch_norm_affine(tuple(parameters), node.attrs["eps"])
        assert affine.scale is not None and affine.shift is not None
        with np.errstate(all="ignore"):
            scale, shift = (
                constant(values.astype(compute.numpy).reshape(along))
                for values in (affine.scale, affine.shift)
            )
    else:
        shape = (x.shape[1], *along[1:])
        weight, bias, mean, variance = (
            reshape_to(apply("cast", parameter, dtype=compute), shape) for parameter in parameters
        )
        deviation = apply("rsqrt", apply("add", variance, scalar(node.attrs["eps"], compute)))
        scale = apply("mul", weight, deviation)
        shift = apply("sub", bias, apply("mul", mean, scale))
    wide = apply("cast", x, dtype=compute)
    result = apply("add", apply("mul", wide, scale), shift)
    return apply("cast", result, dtype=node.dtype)


# -- attention ----------------------------------------------------------------------------------------------------


def scores_by_rows(query: Node, key: Node) -> Node:
    """[..., Q, K]: each the sum of a query times a key along their contiguous axis."""
    *stack, queries, width = query.shape
    every_query = reshape_to(query, (*stack, queries, 1, width))
    every_key = reshape_to(key, (*key.shape[:-2], 1, *key.shape[-2:]))
    product = apply("mul", every_query, every_key)
    return apply("sum", product, axes=(product.type.rank - 1,), keepdims=False)


def expand_attention(node: Node, by_rows: bool = False) -> Node:
    """Scores and softmax are in f32 for 16-bit types, as in PyTorch; the weights are rounded to v's type."""
    query, key, value, *masks = node.inputs
    compute, scale = node.dtype.compute, node.attrs["scale"]
    query, key = (apply("cast", x, dtype=compute) for x in (query, key))
    if scale != 1:
        query = apply("mul", query, scalar(scale, compute))  # the smallest tensor on the path to the scores
    scores = scores_by_rows(query, key) if by_rows else apply("matmul", query, swap_last(key))

    keep: Node | None = None  # where there is attention; None: everywhere
    added: Node | None = None
    for mask in masks:
        if mask.dtype is DType.BOOL:
            keep = mask
        else:
            added = apply("cast", mask, dtype=compute)
            scores = apply("add", scores, added)
    if node.attrs["causal"]:
        seen = lower_triangle(*scores.shape[-2:])
        keep = seen if keep is None else apply("logical_and", keep, seen)
    never = scalar(-math.inf, compute)
    if keep is not None:
        scores = apply("select", keep, scores, never)

    weights = apply("softmax", scores, axis=scores.type.rank - 1)
    result = apply("matmul", apply("cast", weights, dtype=node.dtype), value)
    if not masks:
        return result  # causal only: every query sees the first key
    # For a query without visible keys, softmax gives NaN, PyTorch 0. The mask, which is smaller than the scores,
    # tells which.
    if added is not None and keep is not None:
        added = apply("select", keep, added, never)
    if added is not None:
        last = (added.type.rank - 1,)
        sees = apply("ne", apply("amax", added, axes=last, keepdims=True), never)
    else:
        assert keep is not None
        sees = apply("any", keep, axes=(keep.type.rank - 1,), keepdims=True)
    return apply("select", sees, result, scalar(0, node.dtype))


def lower_triangle(rows: int, columns: int) -> Node:
    """bool [rows, columns]: whether the column is at most the row."""
    row = apply("iota", shape=(rows, 1), axis=0, dtype=DType.I32)
    column = apply("iota", shape=(1, columns), axis=1, dtype=DType.I32)
    return apply("le", column, row)


def expand_concat(node: Node) -> Node | None:
    axis, parts = node.attrs["axis"], list(node.inputs)
    while len(parts) > MAX_CONCATENATED:
        surplus = len(parts) - MAX_CONCATENATED
        joined: list[Node] = []
        while surplus and parts:
            count = min(MAX_CONCATENATED, surplus + 1, len(parts))
            joined.append(apply("concat", *parts[:count], axis=axis) if count > 1 else parts[0])
            surplus, parts = surplus - (count - 1), parts[count:]
        parts = joined + parts
    return None if len(parts) == len(node.inputs) else apply("concat", *parts, axis=axis)


EXPANSIONS: Mapping[str, Callable[[Node], Node | None]] = {
    "linear": expand_linear,
    "matmul": expand_matmul,
    "conv": expand_conv,
    "conv_transpose": expand_conv_transpose,
    "batch_norm": expand_batch_norm,
    "attention": expand_attention,
    "concat": expand_concat,
}
