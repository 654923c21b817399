"""fold-batch-norm: fold per-channel scales and shifts after a contraction into its weights.

    %1 = conv(%x, %w)
    %2 = batch_norm(%1, %g, %b, %mean, %var)        ->      %2 = conv(%x, %w', %b')

with w' = w * s, b' = (b_conv - mean) * s + b and s = g / sqrt(var + eps), in f64 and rounded once. The same is done
for a multiplication or an addition with one constant value per channel. Everything must be constant, and the
contraction must have no other reader. A batch norm that cannot be folded is left to `decompose`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tilewright.graph.ir import Graph, Node, constant, rebuild
from tilewright.graph.op import apply
from tilewright.rewrites.base import Pass


@dataclass(frozen=True)
class ChannelAffine:
    """y = x * scale + shift, one of each per channel, in f64. None: 1 and 0."""

    scale: np.ndarray | None
    shift: np.ndarray | None


@dataclass(frozen=True)
class FoldBatchNorm(Pass):
    name = "fold-batch-norm"

    def run(self, graph: Graph) -> Graph:
        uses = {node: len(users) for node, users in graph.users().items()}
        for node in graph.outputs:
            uses[node] += 1

        def rule(node: Node, operands: tuple[Node, ...]) -> Node | None:
            if node.op not in ("batch_norm", "mul", "add", "sub"):
                return None
            for position, operand in enumerate(operands):
                if node.op in ("batch_norm", "sub") and position > 0:
                    break
                if foldable(operand) and uses[node.inputs[position]] == 1 and operand.type == node.type:
                    affine = affine_of(node, operands, position, channel_axis(operand))
                    folded = None if affine is None else fold(operand, affine, node)
                    if folded is not None:
                        return folded
            return None

        return rebuild(graph, rule)


def foldable(node: Node) -> bool:
    """Whether it is a float contraction with constant weights."""
    return (
        node.op in ("conv", "linear", "conv_transpose")
        and node.dtype.is_float
        and all(operand.is_constant for operand in node.inputs[1:])
    )


def channel_axis(node: Node) -> int:
    last = node.op == "linear" or node.attrs.get("layout") == "channels_last"
    return node.type.rank - 1 if last else 1


def affine_of(node: Node, operands: tuple[Node, ...], position: int, axis: int) -> ChannelAffine | None:
    """The per-channel operation of `node` on its operand at `position`, along `axis`; None if it is not constant."""
    others = operands[:position] + operands[position + 1 :]
    if not all(other.is_constant for other in others):
        return None
    if node.op == "batch_norm":
        return batch_norm_affine(others, node.attrs["eps"]) if axis == 1 else None
    values = per_channel(others[0], node.type.rank, axis, node.shape[axis])
    if values is None:
        return None
    if node.op == "mul":
        return ChannelAffine(values, None)
    return ChannelAffine(None, values if node.op == "add" else -values)


def batch_norm_affine(parameters: tuple[Node, ...], eps: float) -> ChannelAffine:
    weight, bias, mean, variance = (wide(parameter) for parameter in parameters)
    with np.errstate(all="ignore"):
        scale = weight / np.sqrt(variance + eps)
        return ChannelAffine(scale, bias - mean * scale)


def per_channel(node: Node, rank: int, axis: int, channels: int) -> np.ndarray | None:
    """A constant that varies only along the channels, as one value per channel."""
    extents = (1,) * (rank - node.type.rank) + node.shape
    if len(extents) != rank or any(extent != 1 for d, extent in enumerate(extents) if d != axis):
        return None
    return np.broadcast_to(wide(node).reshape(-1), (channels,))


def fold(node: Node, affine: ChannelAffine, replaced: Node) -> Node | None:
    """The contraction followed by `affine`, as one contraction; None if a weight would overflow."""
    x, weight, *bias = node.inputs
    channels = node.shape[channel_axis(node)]
    shift = wide(bias[0]) if bias else np.zeros(channels)
    with np.errstate(all="ignore"):
        if affine.scale is not None:
            weight = scaled_weight(node, weight, affine.scale)
            shift = shift * affine.scale
        if affine.shift is not None:
            shift = shift + affine.shift
        rounded = constant(shift.astype(node.dtype.numpy), bias[0].name if bias else _bias_name(weight))
    if not all(finite(parameter) for parameter in (weight, rounded)):
        return None
    operands = (x, weight, rounded) if bias or affine.shift is not None else (x, weight)
    return apply(node.op, *operands, name=replaced.name, source=node.source | replaced.source, **node.attrs)


def _bias_name(weight: Node) -> str:
    return f"{weight.name.removesuffix('.weight')}.bias" if weight.name else ""


def scaled_weight(node: Node, weight: Node, scale: np.ndarray) -> Node:
    assert weight.data is not None
    data = weight.data
    grouped: np.ndarray
    factors: np.ndarray
    if node.op == "conv_transpose":  # I, O / groups, spatial; the inputs of a group are contiguous
        groups = node.attrs["groups"]
        grouped = data.reshape(groups, -1, data.shape[1], math.prod(data.shape[2:]))
        factors = scale.reshape(groups, 1, -1, 1)
    elif node.attrs.get("layout") == "channels_last":  # spatial, I / groups, O
        grouped, factors = data, scale
    else:  # O, I / groups, spatial, or N, K
        grouped, factors = data.reshape(data.shape[0], -1), scale.reshape(-1, 1)
        if weight.dtype.is_half:
            return constant(carried(grouped, factors).reshape(data.shape), weight.name)
    result = np.empty(grouped.shape, data.dtype)
    # NumPy converts to f64 and back in chunks, so no f64 arrays as large as the weights are made.
    if data.dtype.kind == "f":
        np.multiply(grouped, factors, out=result, dtype=np.float64, casting="same_kind")
    else:  # bfloat16 is unknown to NumPy's own casting rules
        result[...] = grouped.astype(np.float64) * factors
    return constant(result.reshape(data.shape), weight.name)


def carried(rows: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """The rows times their factors, where the rounding error of each weight is carried to the next one in its row.

    Independently rounded 16-bit weights have errors as large as those of activations, but the same at every pixel: a
    mean over the image averages out the errors of activations, not those of weights. With the carry, a row's sum is
    exact to one rounding, and so is its product with activations of one sign.
    """
    result = np.empty(rows.shape, rows.dtype)
    left = np.zeros(len(rows))
    for slot in range(rows.shape[1]):
        exact = rows[:, slot].astype(np.float64) * factors[:, 0] + left
        result[:, slot] = exact.astype(rows.dtype)
        left = exact - result[:, slot].astype(np.float64)
    return result


def finite(node: Node) -> bool:
    assert node.data is not None
    # The extremes are finite only if every element is (NaN propagates); unlike masks they need no memory.
    data = node.data
    return data.size == 0 or bool(np.isfinite(data.max()) and np.isfinite(data.min()))


def wide(node: Node) -> np.ndarray:
    assert node.data is not None
    return node.data.astype(np.float64)
