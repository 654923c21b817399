"""Models of one repeated part compile with bounded recursion and are right; `tests/fuzz/scaling.py` has them larger."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator

import pytest

from tests.fuzz import scaling

# Frames that a compilation may nest, whatever the size of its model: half of Python's default limit.
MAX_FRAMES = 500


@pytest.fixture(scope="module")
def imported() -> None:
    """Imports, and what is built once, may nest as they like."""
    scaling.compiled_right(scaling.layers(1))


@pytest.fixture
def few_frames(imported: None) -> Iterator[None]:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + MAX_FRAMES)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.usefixtures("few_frames")
@pytest.mark.parametrize("name", scaling.KINDS)
def test_it_compiles_with_bounded_recursion(name: str) -> None:
    make, _, size = scaling.KINDS[name]
    scaling.compiled_right(make(size))


def test_growth_is_the_exponent() -> None:
    assert scaling.growth([10, 20, 40], [1.0, 2.0, 4.0]) == pytest.approx(1.0)
    assert scaling.growth([10, 20, 40], [1.0, 4.0, 16.0]) == pytest.approx(2.0)


def test_the_command_fails_where_time_grows_too_fast(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scaling, "compiled_right", lambda graph: len(graph.nodes()) ** 2.0)
    assert scaling.main(["additions"]) == 1
    assert "1 of 1 kinds failed: additions" in capsys.readouterr().out
    monkeypatch.setattr(scaling, "compiled_right", lambda graph: float(len(graph.nodes())))
    assert scaling.main(["additions"]) == 0
