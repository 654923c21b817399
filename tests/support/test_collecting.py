"""Thresholds of the garbage collector are as before once no caller is inside."""

from __future__ import annotations

import gc

import pytest

from tilewright.support.collecting import collecting_the_young


def test_the_oldest_objects_are_left_alone_inside() -> None:
    before = gc.get_threshold()
    with collecting_the_young():
        young, middle, oldest = gc.get_threshold()
        assert (young, middle) == before[:2] and oldest > 1_000_000
    assert gc.get_threshold() == before


def test_the_last_to_leave_puts_the_thresholds_back() -> None:
    before = gc.get_threshold()
    first, second = collecting_the_young(), collecting_the_young()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert gc.get_threshold()[2] > 1_000_000
    second.__exit__(None, None, None)
    assert gc.get_threshold() == before


def test_an_error_puts_them_back() -> None:
    before = gc.get_threshold()
    with pytest.raises(ValueError, match="inside"), collecting_the_young():
        raise ValueError("inside")
    assert gc.get_threshold() == before
