"""The tasks of a data set: layers of networks and transformers at common sizes, and random shapes.

A name is a family and a description: "gemm 512x3072x768 gelu f16". The list is the same in every run, so that a
collection that was interrupted goes on where it ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

from tilewright.dtypes import DType
from tilewright.graph.ir import Graph, Node, TensorType, input_node
from tilewright.graph.op import apply
from tilewright.graph.task import Task

F16, BF16, F32 = DType.F16, DType.BF16, DType.F32


@dataclass(frozen=True)
class TaskSource:
    """A task that is built when it is needed."""

    name: str
    make: Callable[[], Task]
    numerics: str = "fast"

    @property
    def family(self) -> str:
        return self.name.partition(" ")[0]


class _Inputs:
    def __init__(self, dtype: DType) -> None:
        self.nodes: list[Node] = []
        self.constants: set[int] = set()
        self.dtype = dtype

    def __call__(self, *shape: int, constant: bool = False) -> Node:
        if constant:
            self.constants.add(len(self.nodes))
        self.nodes.append(input_node(len(self.nodes), TensorType(shape, self.dtype)))
        return self.nodes[-1]

    def task(self, output: Node) -> Task:
        return Task(Graph(tuple(self.nodes), (output,)), frozenset(self.constants))


# -- one task of each family ------------------------------------------------------------------------------------------


def gemm(m: int, n: int, k: int, epilogue: str, dtype: DType) -> Task:
    x = _Inputs(dtype)
    total = apply("linear", x(m, k), x(n, k, constant=True))
    if epilogue == "none":
        return x.task(total)
    total = apply("add", total, x(n, constant=True))
    if epilogue == "residual":
        return x.task(apply("add", total, x(m, n)))
    if epilogue == "bias":
        return x.task(total)
    attrs: dict[str, Any] = {"approximate": "none"} if epilogue == "gelu" else {}
    return x.task(apply(epilogue, total, **attrs))


def batched(batch: int, m: int, n: int, k: int, dtype: DType) -> Task:
    x = _Inputs(dtype)
    return x.task(apply("matmul", x(batch, m, k), x(batch, k, n)))


def _window(image: Node, weight: Node, window: int, stride: int, groups: int) -> Node:
    edge = (0, window // 2, window // 2, 0)
    if window > 1:
        image = apply("pad", image, low=edge, high=edge, interior=(0, 0, 0, 0), value=0.0)
    attrs: dict[str, Any] = {"padding": ((0, 0), (0, 0)), "dilation": (1, 1), "layout": "channels_last"}
    return apply("conv", image, weight, stride=(stride, stride), groups=groups, **attrs)


def conv(batch: int, size: int, inside: int, outside: int, window: int, stride: int, dtype: DType) -> Task:
    x = _Inputs(dtype)
    image = x(batch, size, size, inside)
    total = _window(image, x(window, window, inside, outside, constant=True), window, stride, 1)
    return x.task(apply("relu", apply("add", total, x(outside, constant=True))))


def depthwise(batch: int, size: int, channels: int, window: int, stride: int, dtype: DType) -> Task:
    x = _Inputs(dtype)
    image = x(batch, size, size, channels)
    total = _window(image, x(window, window, 1, channels, constant=True), window, stride, channels)
    return x.task(apply("clamp", apply("add", total, x(channels, constant=True)), min=0.0, max=6.0))


def separable(size: int, channels: int, outputs: int, dtype: DType) -> Task:
    """A depthwise convolution followed by a pointwise one."""
    x = _Inputs(dtype)
    image = x(1, size, size, channels)
    total = _window(image, x(3, 3, 1, channels, constant=True), 3, 1, channels)
    total = apply("clamp", apply("add", total, x(channels, constant=True)), min=0.0, max=6.0)
    total = _window(total, x(1, 1, channels, outputs, constant=True), 1, 1, 1)
    return x.task(apply("add", total, x(outputs, constant=True)))


def attention(batch: int, heads: int, length: int, width: int, causal: bool, dtype: DType) -> Task:
    x = _Inputs(dtype)
    operands = [x(batch, heads, length, width) for _ in range(3)]
    return x.task(apply("attention", *operands, scale=width**-0.5, causal=causal))


def reduction(op: str, rows: int, columns: int, axis: int, dtype: DType) -> Task:
    x = _Inputs(dtype)
    return x.task(apply(op, x(rows, columns), axes=(axis,), keepdims=False))


def softmax(rows: int, columns: int, dtype: DType) -> Task:
    x = _Inputs(dtype)
    return x.task(apply("softmax", x(rows, columns), axis=1))


def gemm_softmax(m: int, n: int, k: int, dtype: DType) -> Task:
    x = _Inputs(dtype)
    return x.task(apply("softmax", apply("matmul", x(m, k), x(k, n, constant=True)), axis=1))


# -- the lists --------------------------------------------------------------------------------------------------------

# (tokens, width) of encoders and decoders: BERT base and large, GPT-2, ViT, T5, Llama-like.
_TRANSFORMERS = (
    (512, 3072, 768, "gelu"),
    (384, 1024, 4096, "residual"),
    (128, 4096, 1024, "gelu"),
    (1024, 2304, 768, "bias"),
    (1576, 3072, 768, "gelu"),
    (2048, 2048, 512, "relu"),
    (2048, 11008, 4096, "silu"),
    (1, 4096, 4096, "none"),
    (8, 11008, 4096, "none"),
    (64, 3072, 1024, "bias"),
    (4096, 1280, 1280, "residual"),
    (256, 32128, 512, "none"),
)
# Layers of ResNet, VGG, UNet, MobileNet and RetinaNet: size, channels, window, stride.
_IMAGES = (
    (56, 64, 64, 3, 1),
    (28, 128, 128, 3, 1),
    (14, 256, 256, 3, 1),
    (7, 512, 512, 3, 1),
    (56, 64, 128, 1, 2),
    (28, 256, 512, 1, 1),
    (112, 32, 64, 3, 1),
    (224, 3, 32, 3, 2),
    (32, 320, 320, 3, 1),
    (100, 256, 36, 3, 1),
    (14, 576, 96, 1, 1),
    (28, 512, 128, 1, 1),
)


def gpu_sources(seed: int = 0) -> list[TaskSource]:
    """Tasks for GPUs. The families alternate, so that any part of the list contains all of them."""
    rng = Random(seed)
    families = [
        [_gemm(m, n, k, e, F16) for m, n, k, e in _TRANSFORMERS],
        [_conv(rng.choice((1, 8, 32)), *each, F16) for each in _IMAGES],
        [_random_gemm(rng, F16, 12) for _ in range(12)],
        [
            _batched(b, m, n, k, F16)
            for b, m, n, k in ((96, 512, 512, 64), (16, 1024, 1024, 128), (12, 197, 197, 64))
        ],
        [
            _random_gemm(rng, dtype, 10, numerics)
            for dtype, numerics in ((F32, "fast"), (F32, "tf32"), (BF16, "fast")) * 2
        ],
        [_random_conv(rng, F16) for _ in range(8)],
        [
            _reduction(op, rows, columns, axis, dtype)
            for op, rows, columns, axis, dtype in (
                ("sum", 32768, 1024, 0, F16),
                ("amax", 8192, 4096, 0, F32),
                ("sum", 512, 65536, 1, F16),
                ("mean", 100000, 256, 0, F32),
                ("sum", 4096, 1000, 1, F32),
            )
        ],
        [
            _attention(*each, F16)
            for each in (
                (8, 12, 384, 64, False),
                (2, 32, 2048, 128, True),
                (16, 16, 197, 64, False),
                (1, 8, 4096, 64, True),
            )
        ],
        [_softmax(rows, columns, F16) for rows, columns in ((6144, 512), (4096, 32128), (50000, 197))],
    ]
    return list(_alternating(families))


def cpu_sources(seed: int = 0) -> list[TaskSource]:
    """Tasks for CPUs, at sizes at which a call takes milliseconds at most; the families alternate."""
    rng = Random(seed)
    families = [
        [
            _gemm(m, n, k, e, F32)
            for m, n, k, e in (
                (128, 3072, 768, "gelu"),
                (128, 768, 3072, "residual"),
                (197, 768, 768, "bias"),
                (1, 1000, 2048, "bias"),
                (16, 768, 384, "none"),
                (512, 64, 192, "relu"),
                (64, 2048, 512, "relu"),
                (384, 256, 256, "none"),
            )
        ],
        [
            _conv(1, *each, F32)
            for each in (
                (56, 64, 64, 3, 1),
                (28, 128, 96, 1, 1),
                (14, 256, 256, 3, 1),
                (7, 128, 128, 3, 1),
                (28, 32, 64, 3, 2),
                (56, 24, 144, 1, 1),
                (112, 3, 32, 3, 2),
            )
        ],
        [_random_gemm(rng, F32, 9) for _ in range(8)],
        [
            _depthwise(1, *each, F32)
            for each in ((56, 144, 3, 1), (28, 192, 3, 2), (14, 480, 5, 1), (28, 96, 3, 1))
        ],
        [_random_conv(rng, F32, small=True) for _ in range(5)],
        [_separable(*each, F32) for each in ((14, 128, 64), (28, 96, 48), (14, 192, 96))],
        [
            _attention(1, heads, length, width, False, F32)
            for heads, length, width in ((12, 128, 64), (4, 197, 64), (8, 64, 32))
        ],
        [_gemm_softmax(*each, F32) for each in ((256, 128, 96), (96, 320, 64))],
        [_batched(b, m, n, k, F32) for b, m, n, k in ((12, 128, 128, 64), (4, 197, 64, 197))],
    ]
    return list(_alternating(families))


SUITES: dict[str, Callable[[], list[TaskSource]]] = {"cpu": cpu_sources, "cuda": gpu_sources}


def _alternating(families: list[list[TaskSource]]) -> Iterator[TaskSource]:
    seen: set[str] = set()
    for at in range(max(map(len, families))):
        for family in families:
            if at < len(family) and family[at].name not in seen:
                seen.add(family[at].name)
                yield family[at]


# -- names ------------------------------------------------------------------------------------------------------------


def _gemm(m: int, n: int, k: int, epilogue: str, dtype: DType, numerics: str = "fast") -> TaskSource:
    more = "" if numerics == "fast" else f" {numerics}"
    name = f"gemm {m}x{n}x{k} {epilogue} {dtype.short}{more}"
    return TaskSource(name, partial(gemm, m, n, k, epilogue, dtype), numerics)


def _conv(
    batch: int, size: int, inside: int, outside: int, window: int, stride: int, dtype: DType
) -> TaskSource:
    name = f"conv {batch}x{size}x{inside}-{outside} window {window} stride {stride} {dtype.short}"
    return TaskSource(name, partial(conv, batch, size, inside, outside, window, stride, dtype))


def _batched(batch: int, m: int, n: int, k: int, dtype: DType) -> TaskSource:
    return TaskSource(f"batched {batch}x{m}x{n}x{k} {dtype.short}", partial(batched, batch, m, n, k, dtype))


def _depthwise(batch: int, size: int, channels: int, window: int, stride: int, dtype: DType) -> TaskSource:
    name = f"depthwise {batch}x{size}x{channels} window {window} stride {stride} {dtype.short}"
    return TaskSource(name, partial(depthwise, batch, size, channels, window, stride, dtype))


def _separable(size: int, channels: int, outputs: int, dtype: DType) -> TaskSource:
    name = f"separable {size}x{channels}-{outputs} {dtype.short}"
    return TaskSource(name, partial(separable, size, channels, outputs, dtype))


def _attention(batch: int, heads: int, length: int, width: int, causal: bool, dtype: DType) -> TaskSource:
    name = f"attention {batch}x{heads}x{length}x{width}{' causal' if causal else ''} {dtype.short}"
    return TaskSource(name, partial(attention, batch, heads, length, width, causal, dtype))


def _reduction(op: str, rows: int, columns: int, axis: int, dtype: DType) -> TaskSource:
    name = f"reduction {op} {rows}x{columns} axis {axis} {dtype.short}"
    return TaskSource(name, partial(reduction, op, rows, columns, axis, dtype))


def _softmax(rows: int, columns: int, dtype: DType) -> TaskSource:
    return TaskSource(f"softmax {rows}x{columns} {dtype.short}", partial(softmax, rows, columns, dtype))


def _gemm_softmax(m: int, n: int, k: int, dtype: DType) -> TaskSource:
    return TaskSource(f"gemm_softmax {m}x{n}x{k} {dtype.short}", partial(gemm_softmax, m, n, k, dtype))


def _random_gemm(rng: Random, dtype: DType, most: int, numerics: str = "fast") -> TaskSource:
    """A GEMM with random sizes between 32 and 2**most, some of which are not multiples of 8."""

    def size() -> int:
        found = round(2 ** rng.uniform(5, most))
        return found if rng.random() < 0.25 else max(32, found // 32 * 32)

    return _gemm(size(), size(), size(), rng.choice(("none", "bias", "relu", "residual")), dtype, numerics)


def _random_conv(rng: Random, dtype: DType, small: bool = False) -> TaskSource:
    size = rng.choice((7, 10, 14, 20, 28, 40, 56))
    inside, outside = (8 * round(2 ** rng.uniform(1, 4 if small else 6)) for _ in range(2))
    return _conv(
        1 if small else rng.choice((1, 4, 16)),
        size,
        inside,
        outside,
        rng.choice((1, 3, 3, 5)),
        rng.choice((1, 1, 2)),
        dtype,
    )
