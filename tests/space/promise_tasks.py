"""Random tasks for `promise.py`, of kinds that together reach every template, and their inputs of all magnitudes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import numpy as np

from tests.space.chains import After, Case
from tests.space.checked import Inputs
from tests.space.templates.cpu.chains import Chain
from tilewright.dtypes import DType
from tilewright.graph.ir import Node
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.measure.magnitudes import spread_out

_DEPTHS = (3, 17, 32, 64, 100, 257, 700)
_CHANNELS = (3, 16, 32, 48, 64)


def _finished(x: Inputs, node: Node, random: Random, channel: int = -1) -> Task:
    """With a bias and a relu now and then."""
    if random.random() < 0.4:
        shape = [1] * node.type.rank
        shape[channel] = node.shape[channel]
        node = apply("add", node, x(*shape, constant=True))
    return x.task(apply("relu", node) if random.random() < 0.3 else node)


def matmul(random: Random) -> Task:
    x = Inputs()
    m, n, k = random.randint(1, 60), random.randint(1, 120), random.choice(_DEPTHS)
    a = x(m, k)
    if random.random() < 0.3:
        return _finished(x, apply("linear", a, x(n, k, constant=True)), random)
    return _finished(x, apply("matmul", a, x(k, n, constant=random.random() < 0.8)), random)


def long_rows(random: Random) -> Task:
    """A matmul that may be paired: at least three panels of the widest vectors, and 32 products."""
    x = Inputs()
    m, n = random.randint(6, 60), random.randint(40, 140)
    k = random.choice((32, 64, 100, 257, 700, 1500))
    return _finished(x, apply("matmul", x(m, k), x(k, n, constant=True)), random)


def _conv(random: Random, window: tuple[int, int], stride: int, depthwise: bool, first: bool) -> Task:
    x = Inputs()
    channels = random.choice(_CHANNELS)
    groups = channels if depthwise else 1
    outputs = channels if depthwise else random.choice((8, 24, 48, 80))
    size = (random.randint(window[0], 17), random.randint(window[1], 17))
    border = random.randint(0, min(window) // 2)
    attrs: dict[str, Any] = {"stride": (stride, stride), "dilation": (1, 1), "groups": groups}
    attrs["padding"] = ((0, 0), (0, 0))  # a node of its own by the time that kernels are chosen
    if first:
        image, weight = x(1, channels, *size), x(outputs, channels // groups, *window, constant=True)
    else:
        image, weight = x(1, *size, channels), x(*window, channels // groups, outputs, constant=True)
    ends = (0, 0, border, border) if first else (0, border, border, 0)
    if border:
        image = apply("pad", image, low=ends, high=ends, interior=(0, 0, 0, 0), value=0.0)
    layout = "channels_first" if first else "channels_last"
    return _finished(x, apply("conv", image, weight, layout=layout, **attrs), random, 1 if first else -1)


def conv3(random: Random) -> Task:
    """One that Winograd's algorithm may compute."""
    return _conv(random, (3, 3), 1, False, False)


def conv(random: Random) -> Task:
    return _conv(random, random.choice(((1, 1), (3, 3), (2, 5))), random.choice((1, 2)), False, False)


def conv_channels_first(random: Random) -> Task:
    return _conv(random, random.choice(((1, 1), (3, 3), (2, 5))), random.choice((1, 2)), False, True)


def depthwise(random: Random) -> Task:
    return _conv(random, random.choice(((3, 3), (3, 3), (2, 5))), random.choice((1, 2)), True, False)


def depthwise_channels_first(random: Random) -> Task:
    return _conv(random, random.choice(((3, 3), (3, 3), (2, 5))), random.choice((1, 2)), True, True)


def attention(random: Random) -> Task:
    x = Inputs()
    queries, keys, width = random.randint(1, 70), random.randint(2, 90), random.choice((8, 16, 32, 64))
    shapes = [(1, 2, queries, width), (1, 2, keys, width), (1, 2, keys, width)]
    return x.task(apply("attention", *(x(*shape) for shape in shapes), causal=False, scale=width**-0.5))


def row_block_chain(random: Random) -> Task:
    widths = (random.choice((16, 65, 96)), random.randint(17, 100), random.randint(17, 64))
    after = tuple(After(random.random() < 0.7, random.choice(("relu", "none"))) for _ in range(2))
    image = (random.randint(4, 9), random.randint(4, 9)) if random.random() < 0.4 else None
    return Case(random.randint(20, 130), widths, after, image=image, dtype=DType.F32).task()


def separable(random: Random) -> Task:
    expands, projects = random.choice(((8, 24), (12, None), (None, 20)))
    size = random.randint(5, 12), random.randint(5, 12)
    return Chain(1, *size, expands, random.choice((16, 33, 48)), projects).task()


def int8(random: Random) -> Task:
    x = Inputs()
    m, n, k = random.randint(1, 40), random.randint(16, 100), random.choice((32, 64, 100, 256))
    return x.task(apply("matmul", x(m, k, dtype=DType.U8), x(k, n, constant=True, dtype=DType.I8)))


def row_sums(random: Random) -> Task:
    x = Inputs()
    rows, columns = random.randint(1, 30), random.choice((37, 64, 500, 3000))
    return x.task(apply("sum", x(rows, columns), axes=(random.randint(0, 1),), keepdims=False))


KINDS: Mapping[str, Callable[[Random], Task]] = {
    make.__name__: make
    for make in (
        *(matmul, long_rows, conv3, conv, conv_channels_first, depthwise, depthwise_channels_first),
        *(attention, row_block_chain, separable, int8, row_sums),
    )
}


# -- inputs -----------------------------------------------------------------------------------------------------------


def drawn(task: Task, seed: int) -> list[np.ndarray]:
    """Inputs of all magnitudes: each row of data and column of a weight along the axis that is summed."""
    rng = np.random.default_rng(seed)
    found: dict[Node, np.ndarray] = {}
    for node in task.graph.inputs:
        if node.dtype.is_float:
            found[node] = rng.standard_normal(node.shape).astype(np.float32)
        else:
            limits = np.iinfo(node.dtype.numpy)
            found[node] = rng.integers(limits.min, limits.max, node.shape, endpoint=True).astype(
                node.dtype.numpy
            )
    for node in task.graph.nodes():
        for number, (operand, axis) in enumerate(zip(node.inputs, _summed_axes(node), strict=False)):
            operand = operand.inputs[0] if operand.op == "pad" else operand
            if operand in found and operand.dtype is DType.F32:
                found[operand] = spread_out(found[operand], DType.F32, (axis,), number == 1, rng)
    if task.output.op == "attention":  # beyond, every score but one is nothing
        for node in task.output.inputs[:2]:
            found[node] = np.clip(found[node], -30, 30)
    return [found[node] for node in task.graph.inputs]


def _summed_axes(node: Node) -> tuple[int, ...]:
    match node.op:
        case "matmul":
            return 1, 0
        case "linear":
            return 1, 1
        case "attention":
            return 3, 3, 3
        case "sum":
            return (node.attrs["axes"][0],)
        case "conv":
            return (1, 1) if node.attrs["layout"] == "channels_first" else (3, 2)
        case _:
            return ()
