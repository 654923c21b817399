"""The simulation of a pool follows what can be computed by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from pool_simulation import Costs, simulated


def test_one_device_with_enough_builders_is_busy_all_the_time() -> None:
    result = simulated(1, 4, 1000, Costs(build=0.05, trial=0.1, driver=0.0))
    assert result.rate == pytest.approx(10.0, rel=0.02)


def test_builders_are_the_limit_where_they_are_few() -> None:
    result = simulated(8, 1, 500, Costs(build=0.5, trial=0.1, driver=0.0))
    assert result.rate == pytest.approx(2.0, rel=0.02)


def test_the_driver_is_the_limit_of_many_devices() -> None:
    costs = Costs(build=0.1, trial=0.1, driver=0.001)
    result = simulated(1000, 2000, 20_000, costs)
    assert result.rate == pytest.approx(1 / (4 * costs.driver), rel=0.02)
    assert result.driver_busy > 0.98


def test_failures_cost_time_and_lose_nothing() -> None:
    steady = simulated(4, 8, 2000, Costs())
    failing = simulated(4, 8, 2000, Costs(failures=0.05, back=2.0))
    assert failing.given_again > 0
    assert 0.5 * steady.rate < failing.rate < steady.rate
