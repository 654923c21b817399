"""Convolutions with blocks of channels: every config of every template computes the task."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.space.checked import Inputs, error
from tests.space.spills import spilled_vectors_in_loops
from tests.space.templates.cpu.chains import some_config
from tilewright.graph.op import apply
from tilewright.graph.ops.layouts import by
from tilewright.graph.task import Task
from tilewright.hw import host
from tilewright.space.template import Applied, Work
from tilewright.space.templates.cpu import TEMPLATES
from tilewright.tune.choose import choose

QUICK = settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow]
)
Pair = tuple[int, int]


@dataclass(frozen=True)
class Blocked:
    """The sizes of a convolution with a bias, a residual and a relu behind it. Channels are in blocks, (of x, of the
    result)."""

    size: Pair
    blocks: Pair
    block: Pair
    window: Pair = (1, 1)
    stride: int = 1
    dilation: int = 1
    pad: Pair = (0, 0)
    groups: int = 1
    batch: int = 1

    def task(self) -> Task:
        x = Inputs()
        image = x(self.batch, self.blocks[0], *self.size, self.block[0])
        channels = self.blocks[0] * self.block[0], self.blocks[1] * self.block[1]
        weights = x(*self.window, channels[0] // self.groups, channels[1], constant=True)
        if any(self.pad):
            low, high = (0, 0, *self.pad, 0), (0, 0, *self.pad[::-1], 0)
            image = apply("pad", image, low=low, high=high, interior=(0,) * 5, value=0.0)
        conv = apply(
            "conv",
            image,
            weights,
            stride=(self.stride, self.stride),
            padding=((0, 0), (0, 0)),
            dilation=(self.dilation, self.dilation),
            groups=self.groups,
            layout=by(self.block[1]),
        )
        biased = apply("add", conv, x(self.blocks[1], 1, 1, self.block[1], constant=True))
        return x.task(apply("relu", apply("add", biased, x(*conv.shape))))


@st.composite
def convolutions(draw: st.DrawFn) -> Blocked:
    """Dense, grouped and depthwise ones, of odd images."""
    kind = draw(st.sampled_from(("dense", "dense", "grouped", "depthwise")))
    block = draw(st.sampled_from(((16, 16), (8, 8), (4, 16), (1, 16), (32, 16), (16, 64))))
    blocks = draw(st.tuples(st.integers(1, 4), st.integers(2, 5)))
    groups = 1
    if kind == "depthwise":
        block, blocks = (block[1], block[1]), (blocks[1], blocks[1])
        groups = block[1] * blocks[1]
    elif kind == "grouped":
        block, groups = (block[1], block[1]), draw(st.sampled_from((2, 4)))
        blocks = (2 * blocks[0], 2 * blocks[1])
    found = Blocked(
        size=draw(st.tuples(st.integers(3, 11), st.integers(3, 19))),
        blocks=blocks,
        block=block,
        window=draw(st.tuples(*[st.sampled_from((1, 2, 3))] * 2)),
        stride=draw(st.integers(1, 2)),
        dilation=draw(st.integers(1, 2)),
        pad=draw(st.sampled_from(((0, 0), (1, 1), (2, 1)))),
        groups=groups,
        batch=draw(st.integers(1, 2)),
    )
    reach = [found.dilation * (taps - 1) + 1 for taps in found.window]
    assume(all(r <= extent for r, extent in zip(reach, found.size, strict=True)))
    return found


def applied_to(work: Work) -> list[Applied]:
    return [applied for template in TEMPLATES if (applied := template.apply(work)) is not None]


@given(data=st.data(), conv=convolutions())
@QUICK
def test_any_config(data: st.DataObject, conv: Blocked) -> None:
    task = conv.task()
    for applied in applied_to(Work(task, host())):
        config = some_config(data.draw, applied.space)
        assert error(applied.program(config), task) < 1e-5


SOME = Blocked((9, 9), (2, 4), (16, 16), (3, 3), pad=(1, 1))


@pytest.mark.parametrize(
    ("conv", "template"),
    [
        (Blocked((7, 7), (60, 20), (16, 16)), "contraction"),
        (Blocked((7, 7), (60, 10), (16, 16)), "contraction"),
        (replace(SOME, stride=2), "contraction"),
        (replace(SOME, blocks=(3, 4), block=(1, 16), window=(7, 7), stride=2, pad=(3, 3)), "contraction"),
        (replace(SOME, blocks=(4, 4), groups=2), "contraction"),
        (replace(SOME, blocks=(4, 4), groups=64), "depthwise"),
        (replace(SOME, blocks=(4, 4), block=(8, 8), groups=32), "depthwise"),
    ],
)
def test_a_template_takes_it_and_keeps_its_sums_in_registers(conv: Blocked, template: str) -> None:
    task = conv.task()
    choice = choose(Work(task, host()))
    assert choice.config.template == template
    assert error(choice.program, task) < 1e-5
    assert spilled_vectors_in_loops(choice.program, host()) == 0
