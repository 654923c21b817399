"""cuDNN: channels-last convolutions, alone or with bias, residual and ReLU.

A small number of input channels is padded with zeros to the number that its fast kernels read at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tilewright.graph.ir import Graph, Node, rebuild
from tilewright.graph.op import apply
from tilewright.graph.separable import is_depthwise
from tilewright.runtime.packing import Packing
from tilewright.runtime.plan import View
from tilewright.space.implementation import Implementation
from tilewright.space.libraries.call import (
    FLOATS,
    SHORT,
    Around,
    anchor_of,
    busy_share,
    computed,
    epilogues,
    is_for_library,
    rounded,
    unit_of,
    view,
)
from tilewright.space.libraries.cublaslt import is_padded
from tilewright.space.libraries.strides import strides_of
from tilewright.space.space import Config, Knob, Space
from tilewright.space.template import Applied, GpuWork
from tilewright.space.terms import Counted

NAME = "cudnn"
_FRAMEWORK = "torch"  # the framework it is called through
_AT_ONCE = 8  # channels that its fast kernels read


class Cudnn:
    name = NAME

    def apply(self, work: GpuWork) -> Applied | None:
        if _FRAMEWORK not in work.machine.libraries or not is_for_library(work.task):
            return None
        conv = anchor_of(work.task.graph, "conv")
        if conv is None or conv.type.rank != 4 or len(conv.inputs) != 2 or conv.dtype not in FLOATS:
            return None
        if conv.attrs["layout"] != "channels_last" or not conv.inputs[1].is_input:
            return None
        channels, groups = conv.inputs[0].shape[-1], conv.attrs["groups"]
        constant = work.task.graph.inputs.index(conv.inputs[1]) in work.task.constants
        few = channels < _AT_ONCE and groups == 1 and conv.dtype in SHORT and constant
        pads = [0, *(count for count in (_AT_ONCE // 2, _AT_ONCE) if few and count > channels)]
        calls = {
            (fused, padded): call
            for padded in pads
            for fused in (True, False)
            if (call := _call(work, padded, fused)) is not None and call.around.is_possible
        }
        return AppliedCudnn(work, conv, calls) if calls else None


@dataclass(frozen=True)
class _Call:
    around: Around
    function: str
    operands: dict[Node, View]
    packings: dict[Node, Packing]
    common: dict[str, Any]


@dataclass(frozen=True)
class AppliedCudnn:
    work: GpuWork
    conv: Node
    calls: dict[tuple[bool, int], _Call]

    @property
    def space(self) -> Space:
        fused = tuple(sorted({fused for fused, _ in self.calls}, reverse=True))
        pads = tuple(sorted({padded for _, padded in self.calls}, reverse=True))
        return Space(
            NAME,
            (Knob("fused", fused, ordered=False), Knob("padded_channels", pads)),
            lambda values: (bool(values["fused"]), int(values["padded_channels"])) in self.calls,
        )

    def _of(self, config: Config) -> _Call:
        return self.calls[bool(config["fused"]), config.int("padded_channels")]

    def terms(self, config: Config) -> Counted:
        batch, rows, columns, channels = self.conv.shape
        summed = math.prod(self.conv.inputs[1].shape[:-1])
        busy = busy_share(self.work.machine, 1, batch * rows * columns, channels, summed, splits=False)
        unit = unit_of(self.conv, self.work.numerics)
        if is_depthwise(self.conv) or self.conv.inputs[1].shape[2] < _AT_ONCE:
            unit, busy = "scalar", busy / 2  # nothing for tensor cores
        return self._of(config).around.terms(unit, busy)

    def program(self, config: Config) -> Implementation:
        call = self._of(config)
        return call.around.implementation(call.function, call.operands, call.packings, **call.common)


def _call(work: GpuWork, padded: int, fused: bool) -> _Call | None:
    """`padded`: the number of input channels after zero padding, 0 for no padding. `fused`: bias and ReLU are part of
    the call."""
    task, numerics = work.task, work.numerics
    graph = _with_channels(task.graph, padded) if padded else task.graph
    conv = anchor_of(graph, "conv")
    assert conv is not None
    data, weight = conv.inputs
    taken: tuple[Node, ...] = (conv,)
    padding = list(conv.attrs["padding"])
    if padded:  # conv(pad(slice(padded(x)))): the library reads all of it, because the weight is zero there
        taken, data = (data, *taken), data.inputs[0]
    if data.op == "pad" and not (padded and data.attrs["high"][-1]):
        border = _even_border(data)
        if border is not None and not is_padded(conv):
            padding, taken, data = border, (data, *taken), data.inputs[0]
    before = computed(Graph(graph.inputs, (data,)))
    if any(low != high for low, high in padding):
        return None
    height, width, inner, channels = weight.shape
    reads = padded or inner
    packings: dict[Node, Packing] = {}
    if graph.inputs.index(weight) in task.constants:
        blocks = (height, width, reads, channels)
        packings[weight] = Packing(
            weight.shape, blocks, (0, 2, 4, 6, 7, 1, 3, 5), zero_filled=(2,) if padded else ()
        )
        strides = (height * width * reads, 1, width * reads, reads)
    else:
        whole = strides_of(weight.shape)
        strides = (whole[3], whole[2], whole[0], whole[1])
    operands = {data: _channels_first(data), weight: view((channels, reads, height, width), strides)}
    options = {
        "stride": list(conv.attrs["stride"]),
        "padding": [low for low, _ in padding],
        "dilation": list(conv.attrs["dilation"]),
        "groups": conv.attrs["groups"],
        **rounded(conv, numerics),
    }
    batch, rows, columns, _ = conv.shape
    common = {"result": (batch, channels, rows, columns), "order": (0, 2, 3, 1), "options": options}
    if not fused:
        return _Call(Around(work, graph, taken, before), "conv", operands, packings, common)
    run = list(epilogues(graph, conv, "fast"))[-1]
    if run.activation != "relu" or run.bias is None or run.added in operands:
        return None
    function, more = "conv_relu", {run.bias: view((channels,))}
    if run.added is not None:
        function, more = "conv_add_relu", {**more, run.added: _channels_first(run.added)}
    around = Around(work, graph, (*taken, *run.nodes), before)
    return _Call(around, function, {**operands, **more}, packings, common)


def _with_channels(graph: Graph, padded: int) -> Graph:
    """Rewrite conv(x) or conv(pad(x)) to read a slice of x that was padded with zero channels and the border."""
    conv = anchor_of(graph, "conv")
    assert conv is not None

    def rule(node: Node, operands: tuple[Node, ...]) -> Node | None:
        if node is not conv:
            return None
        data, weight = operands
        border = data if data.op == "pad" and _even_border(data) is not None else None
        source = data if border is None else border.inputs[0]
        zeros = (0,) * source.type.rank
        high = (*zeros[:-1], padded - source.shape[-1])
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
    return view((batch, channels, height, width), (strides[0], strides[3], strides[1], strides[2]))


def _even_border(pad: Node) -> list[tuple[int, int]] | None:
    """The width of zero padding around the image, if it is the same on both sides."""
    low, high = pad.attrs["low"], pad.attrs["high"]
    if pad.attrs["value"] or any(pad.attrs["interior"]) or low != high or min(low) < 0:
        return None
    if low[0] or low[-1]:
        return None
    return list(zip(low[1:-1], high[1:-1], strict=True))
