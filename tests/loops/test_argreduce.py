"""Places that a reduction looks for are found in 32 bits where all of them fit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.loops.test_memory_bound import check, machines
from tests.space.checked import Inputs
from tilewright.dtypes import DType
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.hw import CpuMachine, host
from tilewright.loops.argreduce import with_narrow_indices
from tilewright.space.template import Work

F32, I32, I64 = DType.F32, DType.I32, DType.I64


def argmax_of(*shape: int, axis: int) -> Task:
    inputs = Inputs()
    return inputs.task(apply("argmax", inputs(*shape), axis=axis, keepdims=False))


def found_in(task: Task) -> list[DType]:
    """The types in which its reductions are computed, once their places are narrow."""
    formula = Work(task, host()).formula
    assert formula is not None
    return [reduction.result.dtype for reduction in with_narrow_indices(formula).reductions]


@pytest.mark.parametrize(("length", "position"), [(1000, I32), ((1 << 31) - 1, I32), (1 << 31, I64)])
def test_positions_that_fit_are_narrow(length: int, position: DType) -> None:
    assert found_in(argmax_of(2, length, axis=1)) == [F32, position]


def test_numbers_that_are_no_positions_stay_as_they_are() -> None:
    inputs = Inputs()
    x = inputs(8, 100, dtype=I64)
    assert found_in(inputs.task(apply("amax", x, axes=(1,), keepdims=False))) == [I64]


@settings(max_examples=12, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 200)),
    axis=st.integers(0, 1),
    seed=st.integers(0, 1000),
    machine=machines,
)
def test_the_first_of_several_is_found(
    shape: tuple[int, int], axis: int, seed: int, machine: CpuMachine
) -> None:
    drawn = np.random.default_rng(seed).choice(np.float32([0, 1, np.nan]), shape, p=[0.5, 0.49, 0.01])
    check(argmax_of(*shape, axis=axis), machine, [drawn], slow=drawn.size < 300)
