"""cuBLASLt: GEMMs with a bias, a residual and an activation in one call.

A 1x1 convolution is such a GEMM; with a stride, after a copy of the pixels that it reads. So is a convolution with
adjacent, non-overlapping windows (a patch embedding), after the windows are copied to rows. The storage order of the
weight and the library's algorithm are knobs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from tilewright.graph.ir import Graph, Node, rebuild
from tilewright.graph.op import apply
from tilewright.runtime.packing import Packing
from tilewright.runtime.plan import View
from tilewright.space.implementation import Implementation
from tilewright.space.libraries.call import (
    FLOATS,
    Around,
    Epilogue,
    anchor_of,
    busy_share,
    computed,
    epilogues,
    is_for_library,
    rounded,
    unit_of,
    view,
)
from tilewright.space.libraries.strides import strides_of
from tilewright.space.space import Config, Knob, Space, Value
from tilewright.space.template import Applied, GpuWork
from tilewright.space.terms import Counted

NAME = "cublaslt"
_ALGORITHMS = 5  # algorithms that the library proposes
_BOTH_ORDERS = 3  # algorithms for which both weight orders are tried
_ALIGNED = 16  # row size in bytes must be a multiple of this, or the library uses slow kernels
_UNALIGNED_SPEED = 0.25  # 27.4 us for 1023x1021x1019 in float16 on an H200


class CublasLt:
    name = NAME

    def apply(self, work: GpuWork) -> Applied | None:
        if NAME not in work.machine.libraries or not is_for_library(work.task):
            return None
        found = _gemm(work)
        return found if found is not None and found.around.is_possible else None


@dataclass(frozen=True)
class _Gemm:
    work: GpuWork
    graph: Graph
    anchor: Node
    weight: Node
    taken: tuple[Node, ...]
    before: tuple[Node, ...]
    epilogue: Epilogue
    batch: tuple[int, ...]
    m: int
    n: int
    k: int

    @cached_property
    def around(self) -> Around:
        return Around(self.work, self.graph, (*self.taken, *self.epilogue.nodes), self.before)

    @cached_property
    def space(self) -> Space:
        constant = self.graph.inputs.index(self.weight) in self.work.task.constants
        orders: tuple[Value, ...] = (False,)
        if self.anchor.op == "linear":
            orders = (True,)
        elif constant and not self.batch:
            orders = (True, False)
        count = 1 if self.work.numerics == "strict" else _ALGORITHMS
        return Space(
            NAME,
            (
                Knob("transposed_weight", orders, ordered=False),
                Knob("algorithm", tuple(range(count)), ordered=False),
            ),
            lambda values: (
                values["transposed_weight"] == orders[0] or int(values["algorithm"]) < _BOTH_ORDERS
            ),
        )

    def terms(self, config: Config) -> Counted:
        busy = busy_share(self.work.machine, math.prod(self.batch), self.m, self.n, self.k, splits=True)
        if (self.k * self.anchor.dtype.bytes | self.n * self.anchor.dtype.bytes) % _ALIGNED:
            busy *= _UNALIGNED_SPEED
        return self.around.terms(unit_of(self.anchor, self.work.numerics), busy)

    def program(self, config: Config) -> Implementation:
        batch, m, n, k = self.batch, self.m, self.n, self.k
        epilogue = self.epilogue
        by_rows = bool(config["transposed_weight"])
        operands: dict[Node, View] = {self.anchor.inputs[0]: view((*batch, m, k))}
        operands[self.weight] = view((*batch, k, n), _transposed(batch, n, k) if by_rows else None)
        if epilogue.bias is not None:
            operands[epilogue.bias] = view((n,))
        if epilogue.added is not None:
            operands[epilogue.added] = view((*batch, m, n))
        packings = {self.weight: _last_axis_first(self.weight.shape)}
        options = {
            "bias": epilogue.bias is not None,
            "added": epilogue.added is not None,
            "activation": epilogue.activation,
            **rounded(self.anchor, self.work.numerics),
            "algorithm": config.int("algorithm"),
        }
        packed = packings if by_rows and self.anchor.op != "linear" else {}
        return self.around.implementation("product", operands, packed, result=(*batch, m, n), options=options)


def _gemm(work: GpuWork) -> _Gemm | None:
    task, numerics = work.task, work.numerics
    graph = task.graph
    anchor = anchor_of(graph, "matmul", "linear", "conv")
    if anchor is None or len(anchor.inputs) != 2 or anchor.dtype not in FLOATS:
        return None
    before: tuple[Node, ...] = ()
    if anchor.op == "conv":
        if not (_is_pointwise(anchor) or _is_patches(anchor)):
            return None
        if not _is_pointwise(anchor):
            graph = _with_rows(graph, anchor)
        elif any(step != 1 for step in anchor.attrs["stride"]):
            graph = _without_stride(graph, anchor)
        if graph is not task.graph:
            anchor = anchor_of(graph, "conv")
            assert anchor is not None
            before = computed(Graph(graph.inputs, (anchor.inputs[0],)))
    data, weight = anchor.inputs
    taken: tuple[Node, ...] = (anchor,)
    if weight.op == "reshape":
        taken, weight = (weight, anchor), weight.inputs[0]
    if not weight.is_input:
        return None
    before = before or computed(Graph(graph.inputs, (data,)))
    sizes = _sizes(anchor)
    if sizes is None:
        return None
    batch, m, n, k = sizes
    best = list(epilogues(graph, anchor, numerics))[-1]
    if batch and best.bias is not None:  # the library would need one bias per batch element
        best = next(epilogues(graph, anchor, numerics))
    distinct = {data, weight, best.bias, best.added} - {None}
    if len(distinct) < 2 + (best.bias is not None) + (best.added is not None):
        return None  # one tensor in two roles
    return _Gemm(work, graph, anchor, weight, taken, before, best, batch, m, n, k)


def _last_axis_first(shape: tuple[int, ...]) -> Packing:
    last = 2 * len(shape) - 1
    return Packing(shape, shape, (*range(0, last, 2), last, *range(1, last, 2)))


def _transposed(batch: tuple[int, ...], n: int, k: int) -> tuple[int, ...]:
    return (*(step * n * k for step in strides_of(batch)), 1, k)


def _is_pointwise(conv: Node) -> bool:
    attrs = conv.attrs
    window = conv.inputs[1].shape[:-2] if attrs["layout"] == "channels_last" else (0,)
    return all(extent == 1 for extent in window) and attrs["groups"] == 1 and not is_padded(conv)


def is_padded(conv: Node) -> bool:
    return any(any(sides) for sides in conv.attrs["padding"])


def _is_patches(conv: Node) -> bool:
    """Whether its windows are adjacent and cover the image."""
    attrs = conv.attrs
    if attrs["layout"] != "channels_last" or attrs["groups"] != 1 or is_padded(conv) or conv.type.rank != 4:
        return False
    window = conv.inputs[1].shape[:2]
    image = conv.inputs[0].shape[1:3]
    tiles = all(extent % side == 0 for extent, side in zip(image, window, strict=True))
    return tiles and tuple(attrs["stride"]) == window and all(step == 1 for step in attrs["dilation"])


def _with_rows(graph: Graph, conv: Node) -> Graph:
    """Rewrite conv(x, w) with adjacent windows to a 1x1 conv whose channels hold a whole window."""

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
    """1x1 conv(x, stride s) -> conv(x[::s], stride 1)."""

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
    """Return (batch, m, n, k), without a batch for a single GEMM."""
    data, weight = anchor.inputs
    k = data.shape[-1]
    if anchor.op == "conv" or weight.type.rank == 2:
        n = weight.shape[0] if anchor.op == "linear" else weight.shape[-1]
        return (), math.prod(data.shape[:-1]), n, k
    if data.shape[:-2] != weight.shape[:-2]:
        return None
    return (math.prod(data.shape[:-2]),), data.shape[-2], weight.shape[-1], k
