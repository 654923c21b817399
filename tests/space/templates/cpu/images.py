"""Convolutions with channels first as tasks, and random ones."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import assume
from hypothesis import strategies as st

from tests.space.checked import Inputs
from tilewright.dtypes import DType
from tilewright.graph.op import apply
from tilewright.graph.task import Task

Pair = tuple[int, int]


@dataclass(frozen=True)
class Image:
    """The sizes of a convolution with a bias, a residual and a relu behind it."""

    batch: int
    size: Pair
    channels: Pair
    window: Pair
    stride: Pair = (1, 1)
    dilation: Pair = (1, 1)
    low: Pair = (0, 0)
    high: Pair = (0, 0)
    groups: int = 1
    dtype: DType = DType.F32

    @property
    def fits(self) -> bool:
        reach = [step * (taps - 1) + 1 for taps, step in zip(self.window, self.dilation, strict=True)]
        padded = [sum(extents) for extents in zip(self.size, self.low, self.high, strict=True)]
        return all(r <= extent for r, extent in zip(reach, padded, strict=True))

    def task(self) -> Task:
        x = Inputs()
        image = x(self.batch, self.channels[0], *self.size, dtype=self.dtype)
        shape = (self.channels[1], self.channels[0] // self.groups, *self.window)
        weights = x(*shape, constant=True, dtype=self.dtype)
        if any(self.low + self.high):
            low, high = (0, 0, *self.low), (0, 0, *self.high)
            image = apply("pad", image, low=low, high=high, interior=(0, 0, 0, 0), value=0.0)
        conv = apply(
            "conv",
            image,
            weights,
            stride=self.stride,
            padding=((0, 0), (0, 0)),
            dilation=self.dilation,
            groups=self.groups,
            layout="channels_first",
        )
        biased = apply("add", conv, x(self.channels[1], 1, 1, constant=True, dtype=self.dtype))
        return x.task(apply("relu", apply("add", biased, x(*conv.shape, dtype=self.dtype))))


pairs = st.tuples(st.integers(0, 2), st.integers(0, 2))


@st.composite
def images(draw: st.DrawFn, *, depthwise: bool) -> Image:
    groups = draw(st.integers(2, 6)) if depthwise else draw(st.integers(1, 2))
    channels = (groups, groups) if depthwise else (draw(st.integers(1, 20)), draw(st.integers(4, 40)))
    image = Image(
        batch=draw(st.integers(1, 2)),
        size=draw(st.tuples(st.integers(1, 20), st.integers(1, 40))),
        channels=channels if depthwise else (channels[0] * groups, channels[1] * groups),
        window=draw(st.tuples(*[st.sampled_from((1, 2, 3, 5))] * 2)),
        stride=draw(st.tuples(st.integers(1, 3), st.integers(1, 3))),
        dilation=draw(st.tuples(st.integers(1, 2), st.integers(1, 2))),
        low=draw(pairs),
        high=draw(pairs),
        groups=groups,
    )
    assume(image.fits)
    return image
