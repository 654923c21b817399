"""Layers as loop nests of seven loops, the form in which an accelerator sees a network.

    for n, k, c, q, p, s, r:
        output[n, k, q, p] += weight[k, c, s, r] * input[n, c, q * stride + s * dilation, p * stride + r * dilation]

A matmul is the case in which p walks the rows and q, s and r are 1. Extents: R, S of the kernel (width, height); P, Q
of the output (width, height); C input channels; K output channels; N the batch. Padding is not a loop: it only decides
how large P and Q are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from tilewright.errors import MappingError
from tilewright.graph.ir import Graph, Node
from tilewright.graph.ops.contractions import ConvGeometry

LOOPS = "RSPQCKN"
R, S, P, Q, C, K, N = range(7)

TENSORS = ("weights", "inputs", "outputs")
# Which loops move through a tensor.
RELEVANT = {"weights": (R, S, C, K), "inputs": (R, S, P, Q, C, N), "outputs": (P, Q, K, N)}


@dataclass(frozen=True)
class Layer:
    """A loop nest, and how often a network runs it. Pairs are (width, height)."""

    extents: tuple[int, int, int, int, int, int, int]  # by LOOPS
    stride: tuple[int, int] = (1, 1)
    dilation: tuple[int, int] = (1, 1)
    count: int = 1
    name: str = ""

    def __post_init__(self) -> None:
        if len(self.extents) != len(LOOPS):
            raise MappingError(
                f"a layer has the {len(LOOPS)} extents {', '.join(LOOPS)}, got {self.extents!r}",
                remedy="use Layer.matmul or Layer.convolution",
            )
        numbers = {
            **{f"extent {loop}": extent for loop, extent in zip(LOOPS, self.extents, strict=True)},
            **{f"stride of {axis}": step for axis, step in zip("PQ", self.stride, strict=True)},
            **{f"dilation of {axis}": step for axis, step in zip("RS", self.dilation, strict=True)},
            "count": self.count,
        }
        for what, value in numbers.items():
            if value != int(value) or value < 1:
                raise MappingError(
                    f"{what} of a layer must be a positive integer, got {value!r}",
                    remedy="check the layer's shapes: an output that is empty has nothing to map",
                )

    @classmethod
    def matmul(cls, m: int, k: int, n: int, *, count: int = 1, name: str = "") -> Layer:
        """A matmul of [m, k] by [k, n]."""
        return cls((1, 1, m, 1, k, n, 1), count=count, name=name)

    @classmethod
    def convolution(
        cls,
        image: Sequence[int],
        channels: int,
        filters: int,
        kernel: Sequence[int],
        *,
        stride: Sequence[int] = (1, 1),
        padding: Sequence[tuple[int, int]] = ((0, 0), (0, 0)),
        dilation: Sequence[int] = (1, 1),
        groups: int = 1,
        batch: int = 1,
        count: int = 1,
        name: str = "",
    ) -> Layer:
        """A convolution. `image`, `kernel`, `stride`, `padding` and `dilation` are (height, width), as in PyTorch. A
        grouped convolution is one layer for each group."""
        height, width = (
            (size + sum(pads) - (taps - 1) * spacing - 1) // step + 1
            for size, pads, taps, spacing, step in zip(image, padding, kernel, dilation, stride, strict=True)
        )
        return cls(
            (kernel[1], kernel[0], width, height, channels // groups, filters // groups, batch),
            (stride[1], stride[0]),
            (dilation[1], dilation[0]),
            count * groups,
            name,
        )

    @property
    def macs(self) -> int:
        return math.prod(self.extents)

    def words(self, tensor: str) -> int:
        """The words of a whole tensor, without padding."""
        if tensor != "inputs":
            return math.prod(self.extents[loop] for loop in RELEVANT[tensor])
        width, height = (
            (self.extents[out] - 1) * self.stride[axis] + (self.extents[tap] - 1) * self.dilation[axis] + 1
            for axis, (out, tap) in enumerate(((P, R), (Q, S)))
        )
        return width * height * self.extents[C] * self.extents[N]

    def __str__(self) -> str:
        sizes = " ".join(f"{loop}{extent}" for loop, extent in zip(LOOPS, self.extents, strict=True))
        steps = f" stride {self.stride[0]}x{self.stride[1]}" if self.stride != (1, 1) else ""
        return f"{self.name or 'layer'} ({sizes}{steps})"


class Nests(NamedTuple):
    """Layers as arrays, one row for each."""

    extents: np.ndarray  # [rows, 7]
    stride: np.ndarray  # [rows, 2]
    dilation: np.ndarray  # [rows, 2]

    @classmethod
    def of(cls, layers: Iterable[Layer]) -> Nests:
        found = list(layers)
        return cls(
            np.array([layer.extents for layer in found], float).reshape(-1, len(LOOPS)),
            np.array([layer.stride for layer in found], float).reshape(-1, 2),
            np.array([layer.dilation for layer in found], float).reshape(-1, 2),
        )

    def take(self, rows: np.ndarray | slice) -> Nests:
        return Nests(self.extents[rows], self.stride[rows], self.dilation[rows])


def layers_of(graph: Graph) -> list[Layer]:
    """The matmuls and convolutions of a model, equal ones once with their count. The host computes the other
    operators, and what `left_to_host` says."""
    found: dict[Layer, Layer] = {}
    for node in graph.nodes():
        for layer in () if _is_left(node) else _layers_of_node(node):
            key = replace(layer, count=1, name="")
            known = found.get(key)
            found[key] = layer if known is None else replace(known, count=known.count + layer.count)
    return list(found.values())


def left_to_host(graph: Graph) -> dict[str, int]:
    """The MACs of convolutions that have no mapping, by the operator: transposed ones, and those of more than two
    axes."""
    found: dict[str, int] = {}
    for node in filter(_is_left, graph.nodes()):
        data, weight = node.inputs[0].shape, node.inputs[1].shape
        if node.op == "conv_transpose":  # each input meets the whole window of its group
            name, macs = node.op, math.prod(data) * math.prod(weight[1:])
        else:
            sizes = _sizes(node)
            name = f"{len(sizes.extents)}-d convolution"
            macs = math.prod(node.shape) * sizes.group_inputs * math.prod(sizes.kernel)
        found[name] = found.get(name, 0) + macs
    return found


def _is_left(node: Node) -> bool:
    return node.op == "conv_transpose" or (node.op == "conv" and len(_sizes(node).extents) > 2)


def _sizes(node: Node) -> ConvGeometry:
    return ConvGeometry.of(
        node.inputs[0].shape, node.inputs[1].shape, node.attrs["groups"], node.attrs["layout"]
    )


def _layers_of_node(node: Node) -> list[Layer]:
    shapes = [value.shape for value in node.inputs]
    if node.op == "linear":
        return [
            Layer.matmul(math.prod(shapes[0][:-1]), shapes[0][-1], shapes[1][0], name=node.name),
        ]
    if node.op == "matmul":
        # A right operand without batch axes is one weight for all rows of the left one.
        batch, rows = math.prod(node.shape[:-2]), node.shape[-2]
        if math.prod(shapes[1][:-2]) == 1:
            batch, rows = 1, batch * rows
        return [Layer.matmul(rows, shapes[0][-1], node.shape[-1], count=batch, name=node.name)]
    if node.op == "attention":
        q, k, v = shapes[:3]
        heads, rows = math.prod(node.shape[:-2]), q[-2]
        return [
            Layer.matmul(rows, q[-1], k[-2], count=heads, name=f"{node.name}.scores"),
            Layer.matmul(rows, k[-2], v[-1], count=heads, name=f"{node.name}.values"),
        ]
    if node.op == "conv":
        return [_convolution_of(node)]
    return []


def _convolution_of(node: Node) -> Layer:
    sizes = _sizes(node)
    rank = len(sizes.extents)
    one = (1,) * (2 - rank)
    return Layer.convolution(
        (*one, *sizes.extents),
        sizes.group_inputs * sizes.groups,
        sizes.channels,
        (*one, *sizes.kernel),
        stride=(*one, *node.attrs["stride"]),
        padding=(*(((0, 0),) * (2 - rank)), *node.attrs["padding"]),
        dilation=(*one, *node.attrs["dilation"]),
        groups=sizes.groups,
        batch=sizes.batch,
        name=node.name,
    )
