"""Depthwise convolutions with channels first are right for odd sizes, windows, strides and paddings, whatever the
config."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.space.checked import Inputs, error
from tests.space.spills import spilled_vectors_in_loops
from tests.space.templates.cpu.chains import machines, some_config
from tests.space.templates.cpu.images import Image, images
from tilewright.cost import cpu
from tilewright.graph.op import apply
from tilewright.hw import CpuMachine, host
from tilewright.measure.single import SingleKernel
from tilewright.space.template import Work
from tilewright.space.templates.cpu.depthwise_channels_first import DepthwiseChannelsFirst
from tilewright.tune.choose import descend

QUICK = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])


@given(image=images(depthwise=True), machine=machines(), data=st.data())
@QUICK
def test_every_config_is_right(image: Image, machine: CpuMachine, data: st.DataObject) -> None:
    task = image.task()
    applied = DepthwiseChannelsFirst().apply(Work(task, machine))
    if applied is None:  # no windows that overlap along both axes
        return
    config = some_config(data.draw, applied.space)
    assert error(applied.program(config), task) < 1e-6
    assert cpu.seconds(applied.terms(config), machine) > 0


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", [(7, 7), (14, 14), (15, 33)])
@pytest.mark.parametrize("numerics", ["fast", "strict"])
def test_the_usual_windows_are_taken(stride: int, size: tuple[int, int], numerics: str) -> None:
    image = Image(2, size, (5, 5), (3, 3), (stride, stride), low=(1, 1), high=(1, 1), groups=5)
    work = Work(image.task(), host(), numerics)
    applied = DepthwiseChannelsFirst().apply(work)
    assert applied is not None
    found = descend(applied, work)
    assert found is not None
    assert error(applied.program(found[1]), work.task, numerics=numerics) < 1e-6


@pytest.mark.parametrize("width", [5, 7, 14])
@pytest.mark.parametrize("added", ["rows", "columns"])
def test_rows_shorter_than_a_vector(width: int, added: str) -> None:
    """A vector reaches beyond the end of a row only where all that is added has a row behind it, too."""
    x = Inputs()
    image, weights = x(1, 3, 9, width + 2), x(3, 1, 3, 3, constant=True)
    attrs = {"stride": (1, 1), "padding": ((0, 0), (0, 0)), "dilation": (1, 1), "groups": 3}
    conv = apply("conv", image, weights, layout="channels_first", **attrs)
    other = x(*conv.shape) if added == "rows" else x(1, 1, 1, width)
    task = x.task(apply("add", conv, apply("broadcast_to", other, shape=conv.shape)))
    applied = DepthwiseChannelsFirst().apply(Work(task, host()))
    assert applied is not None
    for config in list(applied.space.configs())[:48:12]:
        assert error(applied.program(config), task) < 1e-6


@pytest.mark.parametrize("stride", [1, 2])
def test_nan_reaches_exactly_the_windows_that_see_it(stride: int) -> None:
    image = Image(1, (8, 8), (3, 3), (3, 3), (stride, stride), low=(1, 1), high=(1, 1), groups=3)
    task = image.task()
    applied = DepthwiseChannelsFirst().apply(Work(task, host()))
    assert applied is not None
    arrays = [np.ones(node.shape, np.float32) for node in task.graph.inputs]
    arrays[0][0, 1, 4, 7] = np.nan
    for config in list(applied.space.configs())[::40]:
        out = SingleKernel(applied.program(config), host(), threads=1)([a.reshape(-1) for a in arrays])
        touched = {tuple(position) for position in np.argwhere(np.isnan(out.reshape(task.output.shape)))}
        seen = [(y, x) for y in range(8 // stride) for x in range(8 // stride)]
        near = {(y, x) for y, x in seen if abs(y * stride - 4) <= 1 and abs(x * stride - 7) <= 1}
        assert touched == {(0, 1, y, x) for y, x in near}


def test_sums_over_channels_are_declined() -> None:
    assert DepthwiseChannelsFirst().apply(Work(Image(1, (9, 9), (4, 8), (3, 3)).task(), host())) is None


@pytest.mark.parametrize("size", [56, 14])
@pytest.mark.parametrize("stride", [1, 2])
def test_no_register_tile_spills(size: int, stride: int) -> None:
    image = Image(1, (size, size), (32, 32), (3, 3), (stride, stride), low=(1, 1), high=(1, 1), groups=32)
    work = Work(image.task(), host())
    applied = DepthwiseChannelsFirst().apply(work)
    assert applied is not None
    found = descend(applied, work)
    assert found is not None
    assert spilled_vectors_in_loops(applied.program(found[1]), host()) == 0
