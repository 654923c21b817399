"""Dataclasses that are quickly made are those of `dataclass` in every other way."""

from __future__ import annotations

import dataclasses
import pickle
from dataclasses import dataclass
from functools import cached_property

import pytest

from tilewright.support.frozen import quickly_made


@quickly_made
@dataclass(frozen=True)
class Point:
    x: int
    y: int = 2
    label: str = ""

    def __post_init__(self) -> None:
        if self.x < 0:
            raise ValueError("x must not be negative")

    @cached_property
    def sum(self) -> int:
        return self.x + self.y


def test_it_is_made_by_position_by_name_and_with_defaults() -> None:
    assert Point(1) == Point(1, 2) == Point(y=2, x=1) == Point(1, 2, "")
    assert hash(Point(1)) == hash(Point(1, 2)) and Point(1) != Point(2)
    assert repr(Point(1)) == "Point(x=1, y=2, label='')"
    assert dataclasses.replace(Point(1), y=5) == Point(1, 5) and dataclasses.asdict(Point(1))["y"] == 2
    assert pickle.loads(pickle.dumps(Point(3))) == Point(3)
    assert Point(1).sum == 3


def test_it_stays_frozen_and_is_checked() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Point(1).x = 3  # type: ignore[misc]
    with pytest.raises(ValueError, match="negative"):
        Point(-1)
    with pytest.raises(TypeError):
        Point()  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        Point(1, z=3)  # type: ignore[call-arg]
