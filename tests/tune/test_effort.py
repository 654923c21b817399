"""Times that a user gives, and those that make no sense."""

from __future__ import annotations

import math

import pytest

from tilewright.errors import OptionError
from tilewright.tune.effort import Tuning, parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (90, 90.0),
        (0.5, 0.5),
        ("90", 90.0),
        ("120s", 120.0),
        (" 1.5 m ", 90.0),
        ("1h", 3600.0),
        ("250ms", 0.25),
        ("50us", 50e-6),
    ],
)
def test_durations(text: float | str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize(
    "value", [0, -1, math.nan, "0", "0s", "-3s", "soon", "", "3 weeks", "nan", True, None]
)
def test_what_is_no_duration(value: object) -> None:
    with pytest.raises(
        OptionError, match=r"budget must be a time above 0, got .*[^$]*try: give budget in seconds"
    ):
        parse_duration(value)  # type: ignore[arg-type]


def test_an_effort_has_a_budget_of_its_own() -> None:
    assert Tuning("quick").seconds == 60.0 and Tuning("quick", 5.0).seconds == 5.0
    assert Tuning("full").seconds == math.inf
