"""The yardstick itself: errors are what they should be, and a wrong kernel shows."""

from __future__ import annotations

import numpy as np
import pytest

import tilewright
from tilewright import zoo
from tilewright.measure.check import kernel_error, relative_error


def test_relative_error() -> None:
    assert relative_error(np.array([3.0, 4.5]), np.array([3.0, 4.0])) == pytest.approx(0.1)
    assert relative_error(np.zeros(3), np.zeros(3)) == 0
    assert relative_error(np.array([1, 2, 4]), np.array([1, 2, 3])) == pytest.approx(1 / 3)
    assert relative_error(np.zeros(0), np.zeros(0)) == 0


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_special_values_must_stand_in_the_same_positions(special: float) -> None:
    assert relative_error(np.array([1.0, special]), np.array([1.0, special])) == 0
    assert relative_error(np.array([1.0, 2.0]), np.array([1.0, special])) == np.inf
    assert relative_error(np.array([special, 2.0]), np.array([1.0, 2.0])) == np.inf


def test_explain_gives_every_kernel_its_error_and_a_wrong_result_shows() -> None:
    inputs = zoo.example_inputs("mobilenetv2", small=True)
    compiled = tilewright.compile(zoo.build("mobilenetv2", small=True), inputs)
    rows = compiled.explain(inputs, repeats=1).to_dict()["rows"]
    assert rows and all(row["error"] is not None and row["error"] <= 1e-5 for row in rows)
    arrays = [x.numpy() for x in inputs]
    step, ins, out = next(iter(compiled.executor.trace(arrays)))
    info = compiled.plan.tasks[step.task]
    assert kernel_error(info, ins, out) <= 1e-5
    broken = out.copy()
    broken.reshape(-1)[0] += 1.0
    assert kernel_error(info, ins, broken) > 1e-5
