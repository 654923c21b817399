"""A few of what `python -m tests.space.promise` does at length."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from tests.machines import ZEN_4
from tests.space.checked import Inputs, stored_for
from tests.space.promise import allowed, drawn, violations
from tilewright.graph.op import apply
from tilewright.hw import host
from tilewright.measure.single import SingleKernel
from tilewright.space.template import Work
from tilewright.space.templates.cpu.fast_algebra.strassen import Strassen
from tilewright.tune.choose import descend


@pytest.mark.parametrize("seed", [0, 3])
def test_no_element_is_beyond_its_bound(seed: int) -> None:
    taken: Counter[str] = Counter()
    assert list(violations(12, 4, seed, taken)) == []
    assert sum(taken.values()) == 12


def test_what_has_no_such_bound_is_found() -> None:
    """One level of Strassen, which only relaxed numerics allow."""
    x = Inputs()
    task = x.task(apply("matmul", x(64, 256), x(256, 128, constant=True)))
    work = Work(task, host(), "relaxed")
    applied = Strassen().apply(work)
    assert applied is not None
    found = descend(applied, work)
    assert found is not None
    program = applied.program(found[1])
    arrays = drawn(task, 0)
    result = SingleKernel(program, host())(stored_for(program, arrays)).reshape(64, 128)
    exact = arrays[0].astype(np.float64) @ arrays[1].astype(np.float64)
    assert not (np.abs(result - exact) <= allowed(task.output, arrays, paired=True)).all()
    assert Strassen().apply(Work(task, ZEN_4, "fast")) is None
