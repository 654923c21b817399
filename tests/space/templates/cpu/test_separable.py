"""Chains of convolutions in one kernel are right for odd sizes, whatever the config and whatever part is absent."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.space.templates.cpu.chains import Chain, chains, check, machines, some_config
from tilewright.cost import cpu
from tilewright.graph.separable import separable_of
from tilewright.hw import CpuMachine, host
from tilewright.loops.verify import verify_program
from tilewright.space.space import Config
from tilewright.space.template import Work
from tilewright.space.templates.cpu.separable import SeparableChain

forms = st.one_of(
    chains(expand=True, project=True),
    chains(expand=True, project=False),
    chains(expand=False, project=True),
)


@settings(max_examples=25)
@given(chain=forms, machine=machines(), data=st.data())
def test_every_config_is_right(chain: Chain, machine: CpuMachine, data: st.DataObject) -> None:
    task = chain.task()
    applied = SeparableChain().apply(Work(task, machine))
    assert applied is not None
    config = some_config(data.draw, applied.space)
    check(task, applied.program(config), machine)
    assert cpu.seconds(applied.terms(config), machine) > 0


@settings(max_examples=10)
@given(chain=forms)
def test_it_is_right_in_strict_numerics(chain: Chain) -> None:
    task = chain.task()
    applied = SeparableChain().apply(Work(task, host(), "strict"))
    assert applied is not None
    check(task, applied.program(next(iter(applied.space.configs()))), host(), "strict")


@settings(max_examples=60)
@given(chain=forms, machine=machines())
def test_whatever_fusion_may_join_has_a_config(chain: Chain, machine: CpuMachine) -> None:
    task = chain.task()
    assert separable_of(task) is not None
    applied = SeparableChain().apply(Work(task, machine))
    assert applied is not None
    verify_program(applied.program(next(iter(applied.space.configs()))))


@pytest.mark.parametrize("channels", [16, 3400])
def test_a_large_image_fits_the_scratch_memory_or_is_no_chain(channels: int) -> None:
    task = Chain(1, 64, 64, 8, channels, 8).task()
    applied = SeparableChain().apply(Work(task, host()))
    assert (applied is not None) == (channels == 16)
    if applied is not None:
        verify_program(applied.program(next(iter(applied.space.configs()))))


def test_computing_rows_twice_is_counted() -> None:
    applied = SeparableChain().apply(Work(Chain(1, 56, 56, 24, 144, 24).task(), host()))
    assert applied is not None

    def arithmetic(chunk: int) -> float:
        values = {
            "chunk": chunk,
            "step": 1,
            "blocks": 1,
            "columns": 7,
            "expand": "7x2",
            "project": "7x2",
            "prefetch": False,
        }
        return applied.terms(Config.of("separable", values)).arithmetic

    assert arithmetic(56) < arithmetic(28) < arithmetic(14) < arithmetic(2)
