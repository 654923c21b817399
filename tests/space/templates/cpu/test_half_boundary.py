"""Tasks at the boundary of a 16-bit model: computed in f32, with a residual or an operand that is read and a result
that is stored in 16 bits. Every template that takes such a task computes it; the fast ones of f32 do take it."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from tests.rewrites.helpers import conv
from tests.space.checked import Inputs, error
from tilewright.dtypes import DType
from tilewright.graph.ir import Node
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.hw import host
from tilewright.space.template import Work
from tilewright.space.templates.cpu import TEMPLATES

BOUND = {DType.F16: 4e-4, DType.BF16: 3e-3}  # twice the rounding of the result

Made = Callable[[Inputs], Node]


def product(x: Inputs) -> Node:
    return apply("matmul", x(96, 160), x(160, 96, constant=True))


def convolution(size: int, channels: int, window: int, layout: str, groups: int = 1) -> Made:
    def make(x: Inputs) -> Node:
        last = layout == "channels_last"
        image = x(1, size, size, channels) if last else x(1, channels, size, size)
        low = (0, 1, 1, 0) if last else (0, 0, 1, 1)
        if window > 1:
            image = apply("pad", image, low=low, high=low, interior=(0,) * 4, value=0.0)
        inputs = channels // groups
        shape = (window, window, inputs, channels) if last else (channels, inputs, window, window)
        return conv(image, x(*shape, constant=True), layout=layout, groups=groups)

    return make


KINDS: dict[str, tuple[Made, set[str]]] = {
    "matmul": (product, {"contraction"}),
    "3x3, channels last": (convolution(14, 32, 3, "channels_last"), {"contraction", "winograd"}),
    "3x3, channels first": (convolution(14, 32, 3, "channels_first"), {"contraction_transposed"}),
    "1x1, channels first": (convolution(14, 64, 1, "channels_first"), {"contraction_transposed"}),
    "depthwise": (convolution(14, 32, 3, "channels_first", groups=32), {"depthwise_channels_first"}),
    "depthwise, odd": (convolution(9, 7, 3, "channels_first", groups=7), {"depthwise_channels_first"}),
}

# The templates that convert the operand themselves, at no more than a part of the kernel's time.
READING = {
    "matmul": {"contraction"},
    "3x3, channels last": {"contraction"},
    "1x1, channels first": {"contraction_transposed"},
    "depthwise": {"depthwise_channels_first"},
    "depthwise, odd": {"depthwise_channels_first"},
}
NUMERICS = pytest.mark.parametrize("numerics", ["fast", "strict"])


class Widened(Inputs):
    """Operands that are no constants are of 16 bits, and converted to f32."""

    def __init__(self, dtype: DType) -> None:
        super().__init__()
        self.dtype = dtype

    def __call__(self, *shape: int, dtype: DType = DType.F32, constant: bool = False) -> Node:
        if constant:
            return super().__call__(*shape, dtype=dtype, constant=True)
        return apply("cast", super().__call__(*shape, dtype=self.dtype), dtype=DType.F32)


def boundary_task(make: Made, dtype: DType) -> Task:
    x = Inputs()
    result = make(x)
    residual = apply("cast", x(*result.shape, dtype=dtype), dtype=DType.F32)
    return x.task(apply("cast", apply("relu", apply("add", result, residual)), dtype=dtype))


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16], ids=lambda dtype: dtype.short)
@pytest.mark.parametrize("kind", KINDS)
def test_every_template_stores_16_bits(kind: str, dtype: DType) -> None:
    make, wanted = KINDS[kind]
    task = boundary_task(make, dtype)
    taken = set()
    for template in TEMPLATES:
        applied = template.apply(Work(task, host()))
        if applied is None:
            continue
        taken.add(template.name)
        config = applied.space.sample(Random(0))
        assert config is not None
        assert error(applied.program(config), task) <= BOUND[dtype], config
    assert wanted <= taken


@NUMERICS
@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16], ids=lambda dtype: dtype.short)
@pytest.mark.parametrize("kind", READING)
def test_the_same_of_an_operand_in_16_bits(kind: str, dtype: DType, numerics: str) -> None:
    x = Widened(dtype)
    task = x.task(apply("cast", KINDS[kind][0](x), dtype=dtype))
    taken = set()
    for template in TEMPLATES:
        applied = template.apply(Work(task, host(), numerics))
        if applied is None:
            continue
        taken.add(template.name)
        for seed in range(3):
            config = applied.space.sample(Random(seed))
            assert config is not None
            assert error(applied.program(config), task, numerics=numerics) <= BOUND[dtype], config
    assert READING[kind] <= taken
