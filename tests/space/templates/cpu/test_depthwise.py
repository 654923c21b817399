"""Depthwise convolutions are right for odd sizes, windows, strides and paddings, whatever the config."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.space.templates.cpu.chains import Chain, chains, check, machines, some_config
from tilewright.cost import cpu
from tilewright.graph.separable import WindowAxis
from tilewright.hw import CpuMachine, host
from tilewright.hw.caches import Caches
from tilewright.measure.single import SingleKernel
from tilewright.space.space import Config
from tilewright.space.template import Work
from tilewright.space.templates.cpu.depthwise import Depthwise, column_tiles


@settings(max_examples=20)
@given(chain=chains(expand=False, project=False), machine=machines(), data=st.data())
def test_every_config_is_right(chain: Chain, machine: CpuMachine, data: st.DataObject) -> None:
    task = chain.task()
    applied = Depthwise().apply(Work(task, machine))
    assert applied is not None
    config = some_config(data.draw, applied.space)
    check(task, applied.program(config), machine)
    assert cpu.seconds(applied.terms(config), machine) > 0


@settings(max_examples=10)
@given(chain=chains(expand=False, project=False))
def test_it_is_right_in_strict_numerics(chain: Chain) -> None:
    task = chain.task()
    applied = Depthwise().apply(Work(task, host(), "strict"))
    assert applied is not None
    check(task, applied.program(next(iter(applied.space.configs()))), host(), "strict")


def test_nan_reaches_exactly_the_windows_that_see_it() -> None:
    chain = Chain(1, 9, 9, None, 17, None)
    task = chain.task()
    applied = Depthwise().apply(Work(task, host()))
    assert applied is not None
    program = applied.program(next(iter(applied.space.configs())))
    arrays = [np.ones(node.shape, np.float32) for node in task.graph.inputs]
    arrays[0][0, 4, 8, 3] = np.nan
    result = SingleKernel(program, host(), threads=1)([array.reshape(-1) for array in arrays])
    touched = np.argwhere(np.isnan(result.reshape(1, 9, 9, 17)))
    assert {tuple(position) for position in touched} == {(0, y, x, 3) for y in (3, 4, 5) for x in (7, 8)}


def test_other_tasks_are_declined() -> None:
    for chain in (Chain(1, 8, 8, 4, 16, None), Chain(1, 8, 8, None, 16, 8)):
        assert Depthwise().apply(Work(chain.task(), host())) is None


@given(
    outputs=st.integers(1, 120),
    taps=st.integers(1, 5),
    stride=st.integers(1, 3),
    before=st.integers(0, 4),
    behind=st.integers(0, 4),
    count=st.integers(1, 10),
)
def test_tiles_cover_a_row_and_those_in_between_need_no_padding(
    outputs: int, taps: int, stride: int, before: int, behind: int, count: int
) -> None:
    extent = (outputs - 1) * stride + taps - before - behind
    if extent < 1 or count > outputs:
        return
    window = WindowAxis(extent, outputs, taps, stride, 1, before, behind)
    ends, between, begin = column_tiles(window, count)
    covered = {start + n for start in ends for n in range(count)}
    if between is not None:
        inner = range(begin, begin + between.axis.extent)
        assert len(inner) >= count
        for result in inner:
            assert result * stride - before >= 0 and result * stride - before + taps <= extent
        covered |= set(inner)
    assert covered == set(range(outputs))


def test_threads_that_share_pixels_are_predicted_slower_than_threads_with_rows_of_their_own() -> None:
    """Lines at the border of their channels go to and fro between them."""
    caches = Caches(48 << 10, 1280 << 10, 32 << 20)
    machine = replace(host(), cpu="icelake-server", cores=2, caches=caches)
    applied = Depthwise().apply(Work(Chain(1, 28, 28, None, 96, None).task(), machine))
    assert applied is not None

    def predicted(rows: int, blocks: int) -> float:
        config = applied.space.recalled(
            Config.of("depthwise", {"columns": 7, "rows": rows, "blocks": blocks})
        )
        assert config is not None
        return cpu.seconds(applied.terms(config), machine, 2)

    assert predicted(28, 2) > 1.2 * predicted(14, 1)
    assert predicted(14, 2) < 1.1 * predicted(14, 1)  # each thread has both blocks of its rows
