"""Channels-first 1x1 convolutions by seven products, along the channels: right whatever the config."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.machines import ICE_LAKE
from tests.space.checked import error, legal_configs, stored_for
from tests.space.spills import spilled_vectors_in_loops
from tests.space.templates.cpu.images import Image
from tilewright.dtypes import DType
from tilewright.graph.task import Task
from tilewright.hw import CpuMachine, host
from tilewright.measure.single import SingleKernel
from tilewright.measure.validation import make_validation
from tilewright.space.space import Config
from tilewright.space.template import Work
from tilewright.space.templates.cpu.fast_algebra.strassen_transposed import (
    AppliedStrassenTransposed,
    StrassenTransposed,
)
from tilewright.tune.choose import choose, descend

QUICK = settings(
    max_examples=4, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow]
)
BOUND = 1e-5
LANES = host().lanes(DType.F32)


def applied_to(task: Task, machine: CpuMachine | None = None) -> AppliedStrassenTransposed:
    applied = StrassenTransposed().apply(Work(task, machine or host(), "relaxed"))
    assert isinstance(applied, AppliedStrassenTransposed)
    return applied


def pixels(size: int, channels: tuple[int, int], stride: int = 1) -> Task:
    return Image(1, (size, size), channels, (1, 1), stride=(stride, stride)).task()


@given(
    data=st.data(),
    size=st.tuples(st.integers(5, 30), st.integers(5, 30)),
    channels=st.tuples(st.integers(48, 150), st.integers(1, 5)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
)
@QUICK
def test_any_config_of_a_convolution_of_one_pixel(
    data: st.DataObject, size: tuple[int, int], channels: tuple[int, int], stride: tuple[int, int]
) -> None:
    """Odd numbers of pixels, and pixels that are left out; the same bits on one thread and on two."""
    seen = [-(-extent // step) for extent, step in zip(size, stride, strict=True)]
    assume(seen[0] * seen[1] >= 24)
    task = Image(1, size, (2 * channels[0], 2 * LANES * channels[1]), (1, 1), stride=stride).task()
    applied = StrassenTransposed().apply(Work(task, host(), "relaxed"))
    assume(applied is not None)  # of many pixels in an odd number no blocks are alike
    assert applied is not None
    config = data.draw(legal_configs(applied.space))
    assert error(applied.program(config), task) < BOUND
    terms = applied.terms(config)
    assert terms is not None and terms.arithmetic > 0


def test_blocks_of_pixels_that_are_one_axis_apart() -> None:
    """Rows of twelve pixels, of which every other is seen: all are as far apart as those of one row."""
    task = Image(1, (12, 12), (96, 4 * LANES), (1, 1), stride=(1, 2)).task()
    applied = applied_to(task)
    blocks = [c for c in applied.space.configs() if applied.shape_of(dict(c.values)).blocks > 1]
    for config in blocks[:: max(1, len(blocks) // 3)]:
        assert error(applied.program(config), task) < BOUND


@pytest.mark.parametrize(
    "task",
    [
        pixels(4, (128, 64)),  # too few pixels
        pixels(14, (64, 128)),  # too few taps
        pixels(14, (128, 3 * LANES)),  # no pairs of panels
        Image(2, (14, 14), (128, 64), (1, 1)).task(),
        Image(1, (14, 14), (128, 64), (3, 3), low=(1, 1), high=(1, 1)).task(),
        Image(1, (14, 14), (128, 64), (1, 1), dtype=DType.F16).task(),
    ],
)
def test_it_declines(task: Task) -> None:
    assert StrassenTransposed().apply(Work(task, host(), "relaxed")) is None


@pytest.mark.parametrize("numerics", ["fast", "strict"])
def test_only_relaxed_numerics_allow_it(numerics: str) -> None:
    assert StrassenTransposed().apply(Work(pixels(14, (1024, 512)), host(), numerics)) is None


@pytest.mark.parametrize("machine", [host(), ICE_LAKE])
def test_many_channels_are_computed_so_and_few_are_not(machine: CpuMachine) -> None:
    assert (
        choose(Work(pixels(14, (1024, 2048), stride=2), machine, "relaxed")).config.template
        == "strassen_transposed"
    )
    assert (
        choose(Work(pixels(28, (512, 64), stride=2), machine, "relaxed")).config.template
        == "contraction_transposed"
    )


@pytest.mark.parametrize(
    ("size", "channels", "stride"), [(7, (512, 2048), 1), (14, (1024, 512), 1), (28, (512, 1024), 2)]
)
def test_the_error_is_that_of_a_product_as_usual(size: int, channels: tuple[int, int], stride: int) -> None:
    task = pixels(size, channels, stride)
    applied = applied_to(task)
    found = descend(applied, Work(task, host(), "relaxed"))
    assert found is not None
    assert error(applied.program(found[1]), task) < 1.5e-6


def test_its_validation_allows_for_pixels_that_are_added_to_larger_ones() -> None:
    task = pixels(14, (256, 128), stride=2)
    applied = applied_to(task)
    found = descend(applied, Work(task, host(), "relaxed"))
    assert found is not None
    program = applied.program(found[1])
    kernel = SingleKernel(program, host())
    for seed in range(3):
        for case in make_validation(task, "relaxed", seed).cases:
            case.error(kernel(stored_for(program, case.inputs)))


@pytest.mark.parametrize("unroll", [4, 8])
def test_no_register_tile_spills(unroll: int) -> None:
    """The largest tiles of two vectors and of the most; what is smaller has room."""
    applied = applied_to(pixels(14, (384, 40 * LANES)))
    largest: dict[int, Config] = {}
    for config in applied.space.configs():
        if (config["unroll"], config["k_blocks"], config["prefetch"]) == (unroll, 2, 1):
            largest[config.int("vectors")] = config  # rows grow
    for config in {largest[2], largest[max(largest)]}:
        assert spilled_vectors_in_loops(applied.program(config), host()) == 0, str(config)
