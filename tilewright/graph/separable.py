"""Separable convolutions: chains of convolutions that one kernel computes without storing the intermediate images.

    expand      1x1 convolution, elementwise nodes after it         (may be absent)
    depthwise   zero padding, a window for each channel separately, elementwise nodes after it
    project     1x1 convolution, elementwise nodes after it         (may be absent)

Channels are last; a lone depthwise convolution may have blocks of channels.

`separable_of` recognises such a chain. Greedy fusion creates no other tasks with two convolutions; templates support
every chain that it recognises.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.dtypes import DType
from tilewright.graph.ir import Node
from tilewright.graph.op import Fusion, op_of
from tilewright.graph.ops.layouts import block_of, channels_of, spatial_axes
from tilewright.graph.task import Task

ROOM = 768 << 10  # bytes of scratch memory available to a chain


@dataclass(frozen=True)
class ConvStage:
    """A convolution and the elementwise nodes after it; the next stage reads `last`."""

    conv: Node
    last: Node

    @property
    def weight(self) -> Node:
        return self.conv.inputs[1]

    @property
    def channels(self) -> int:
        return channels_of(self.conv.shape, self.conv.attrs["layout"])


@dataclass(frozen=True)
class WindowAxis:
    """The windows of the depthwise convolution along one axis."""

    extent: int  # elements of the source
    outputs: int
    taps: int
    stride: int
    dilation: int
    before: int  # zeros before the first element
    after: int

    @property
    def reach(self) -> int:
        """Elements from the first to the last element of a window."""
        return self.dilation * (self.taps - 1) + 1

    @property
    def padded(self) -> int:
        return self.before + self.extent + self.after


@dataclass(frozen=True)
class Separable:
    task: Task
    source: Node  # of the chain's first convolution: an input of the task
    expand: ConvStage | None
    rows: WindowAxis
    columns: WindowAxis
    depthwise: ConvStage
    project: ConvStage | None

    @property
    def batch(self) -> int:
        return self.source.shape[0]

    @property
    def block(self) -> int:
        """Channels per block; 0 if channels are last."""
        return block_of(self.depthwise.conv.attrs["layout"])

    @property
    def stages(self) -> list[ConvStage]:
        return [stage for stage in (self.expand, self.depthwise, self.project) if stage is not None]

    @property
    def least_scratch(self) -> int:
        """Minimum bytes: the rows of one window and, before a projection, one row of results, for all channels."""
        expanded = self.rows.reach * self.columns.padded if self.expand else 0
        filtered = self.columns.outputs if self.project else 0
        return 4 * (self.depthwise.channels + 16) * (expanded + filtered)


def separable_of(task: Task) -> Separable | None:
    """Match a task as a chain, or return None."""
    graph = task.graph
    nodes = [node for node in graph.nodes() if not node.is_input and not node.is_constant]
    if any(node.dtype is not DType.F32 for node in graph.nodes()):
        return None
    convs = [node for node in nodes if node.op == "conv"]
    if len(convs) == 1 and _is_blocked_depthwise(convs[0]):
        middle = 0
    else:
        middle = next((number for number, conv in enumerate(convs) if is_depthwise(conv)), 2)
    if middle > 1 or len(convs) - middle > 2:
        return None
    if not all(is_pointwise(conv) for number, conv in enumerate(convs) if number != middle):
        return None
    constants = {node for node in graph.inputs if node.attrs["index"] in task.constants}
    if any(conv.inputs[1] not in constants for conv in convs):
        return None
    pad = convs[middle].inputs[0] if convs[middle].inputs[0].op == "pad" else None
    heads = [conv.inputs[0] for conv in convs]
    if pad is not None:
        if not _pads_image(pad, _image_axes(convs[middle])):
            return None
        heads[middle] = pad.inputs[0]
    elementwise = [node for node in nodes if node not in convs and node is not pad]
    stages = _stages(convs, elementwise, heads, task.output)
    if stages is None or not heads[0].is_input or heads[0] in constants:
        return None
    rows, columns = _windows(convs[middle], pad)
    found = Separable(
        task,
        heads[0],
        stages[0] if middle else None,
        rows,
        columns,
        stages[middle],
        stages[middle + 1] if len(stages) > middle + 1 else None,
    )
    return found if found.least_scratch <= ROOM else None


def is_depthwise(conv: Node) -> bool:
    """Whether each channel has its own window and one result."""
    channels = conv.inputs[0].shape[-1]
    return (
        _is_image_conv(conv)
        and conv.attrs["layout"] == "channels_last"
        and conv.attrs["groups"] == channels == conv.shape[-1]
        and channels > 1
        and _overlaps(conv)
    )


def _is_blocked_depthwise(conv: Node) -> bool:
    """The same with blocks of channels that hold whole vectors."""
    block, x = block_of(conv.attrs["layout"]), conv.inputs[0]
    return (
        block > 0
        and block & (block - 1) == 0
        and x.shape[-1] == block
        and _is_image_conv(conv)
        and conv.attrs["groups"] == x.shape[1] * block == conv.shape[1] * block
        and _overlaps(conv)
    )


def is_pointwise(conv: Node) -> bool:
    return (
        _is_image_conv(conv)
        and conv.attrs["layout"] == "channels_last"
        and conv.attrs["groups"] == 1
        and conv.inputs[1].shape[:2] == (1, 1)
        and conv.attrs["stride"] == (1, 1)
        and conv.shape[-1] > 1
    )


def _is_image_conv(conv: Node) -> bool:
    return (
        conv.op == "conv"
        and conv.inputs[1].type.rank == 4
        and conv.attrs["padding"] == ((0, 0), (0, 0))
        and len(conv.inputs) == 2
        and conv.type.size > 0
    )


def _image_axes(conv: Node) -> range:
    return spatial_axes(conv.type.rank, conv.attrs["layout"])


def _overlaps(conv: Node) -> bool:
    """Whether windows are larger than their stride."""
    larger = all(taps > stride for taps, stride in zip(_reaches(conv), conv.attrs["stride"], strict=True))
    return larger and conv.inputs[1].shape[:2] != (1, 1)


def _reaches(conv: Node) -> list[int]:
    kernel = conv.inputs[1].shape[:2]
    return [step * (k - 1) + 1 for k, step in zip(kernel, conv.attrs["dilation"], strict=True)]


def _pads_image(pad: Node, image: range) -> bool:
    ends = (pad.attrs["low"], pad.attrs["high"])
    return (
        pad.attrs["value"] == 0
        and not any(pad.attrs["interior"])
        and all(min(amounts) >= 0 for amounts in ends)
        and not any(amounts[axis] for amounts in ends for axis in range(pad.type.rank) if axis not in image)
    )


def _windows(conv: Node, pad: Node | None) -> list[WindowAxis]:
    kernel = conv.inputs[1].shape[:2]
    windows = []
    for number, axis in enumerate(_image_axes(conv)):
        before, after = (pad.attrs["low"][axis], pad.attrs["high"][axis]) if pad else (0, 0)
        windows.append(
            WindowAxis(
                extent=conv.inputs[0].shape[axis] - before - after,
                outputs=conv.shape[axis],
                taps=kernel[number],
                stride=conv.attrs["stride"][number],
                dilation=conv.attrs["dilation"][number],
                before=before,
                after=after,
            )
        )
    return windows


def _follows(shape: tuple[int, ...], conv: Node) -> bool:
    """Whether a tensor that broadcasts to an image has one element per pixel, or one for all pixels."""
    extents, image = (1,) * (conv.type.rank - len(shape)) + shape, _image_axes(conv)
    return all(extents[axis] == 1 for axis in image) or all(
        extents[axis] == conv.shape[axis] for axis in image
    )


def _stages(
    convs: list[Node], elementwise: list[Node], heads: list[Node], output: Node
) -> list[ConvStage] | None:
    """The stages in order. None if an elementwise node does not have the shape of its convolution, reads another
    stage, or reads a tensor that varies along only one image axis (pixels form one axis)."""
    number_of = {conv: number for number, conv in enumerate(convs)}
    for node in elementwise:
        numbers = {number_of[operand] for operand in node.inputs if operand in number_of}
        if len(numbers) != 1 or op_of(node.op).fusion is not Fusion.ELEMENTWISE:
            return None
        (number,) = numbers
        outside = [operand.shape for operand in node.inputs if operand not in number_of]
        if node.shape != convs[number].shape or not all(_follows(shape, convs[number]) for shape in outside):
            return None
        number_of[node] = number
    stages = [ConvStage(conv, last) for conv, last in zip(convs, [*heads[1:], output], strict=True)]
    if any(number_of.get(stage.last) != number for number, stage in enumerate(stages)):
        return None
    return stages
