"""Models of one repeated part compile with bounded recursion and are right; `tests/fuzz/scaling.py` has them larger."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from tests.fuzz import scaling
from tests.programs import AVX2
from tilewright.graph.ir import Graph
from tilewright.loops.text import print_program
from tilewright.rewrites.pipeline import run_pipeline
from tilewright.space.template import Work
from tilewright.support.trace import Trace
from tilewright.tune.choose import choose
from tilewright.tune.oracle import PredictedCosts

# Frames that a compilation may nest, whatever the size of its model: half of Python's default limit.
MAX_FRAMES = 500


LOGARITHM = 12  # frames by which sums that are halved again and again may grow when a model is doubled


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


def depth_of(graph: Graph) -> int:
    """The most functions that its compilation nests, in any thread."""
    local, deepest = threading.local(), 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal deepest
        if event in ("call", "return"):
            local.depth = getattr(local, "depth", 0) + (1 if event == "call" else -1)
            deepest = max(deepest, local.depth)

    before = sys.getprofile()
    threading.setprofile(count)
    sys.setprofile(count)
    try:
        scaling.compiled_right(graph)
    finally:
        sys.setprofile(before)
        threading.setprofile(None)  # type: ignore[arg-type]
    return deepest


@pytest.mark.slow
@pytest.mark.usefixtures("imported")
@pytest.mark.parametrize("name", scaling.KINDS)
def test_a_model_of_twice_the_size_nests_no_deeper(name: str) -> None:
    """A frame for each part would add as many as there are parts, and a limit that these sizes do not reach is no
    limit."""
    make, _, size = scaling.KINDS[name]
    size = max(size, 32) if name == "branches" else size  # an index of fewer parts is simplified as a whole
    first = depth_of(make(size))  # before the larger one: what is found once and cached nests too
    assert depth_of(make(2 * size)) <= first + LOGARITHM


def test_the_depth_of_a_recursion_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def nested(depth: int) -> float:
        return 0.0 if not depth else nested(depth - 1)

    monkeypatch.setattr(scaling, "compiled_right", lambda graph: nested(len(graph.nodes())))
    few, more = (scaling.additions(n) for n in (20, 40))
    assert depth_of(more) - depth_of(few) == len(more.nodes()) - len(few.nodes()) > LOGARITHM


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


def work_of(graph: Graph) -> dict[str, int]:
    """What a compilation does up to machine code, on any host: functions called, and the size of its programs."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        tasks = [
            call.task for call in run_pipeline(graph, Trace.off(), oracle=PredictedCosts(AVX2, "fast")).calls
        ]
        programs = [choose(Work(task, AVX2)).program for task in tasks]
    finally:
        sys.setprofile(before)
    return {"calls": calls, "text": sum(len(print_program(program)) for program in programs)}


@pytest.mark.parametrize("name", ["silu", "mish", "runge_kutta"])
def test_the_work_of_a_compilation_is_linear(name: str) -> None:
    """Values that are read twice are not written out twice at each step: 2^20 times at the end of 20."""
    make, _, _ = scaling.KINDS[name]
    work_of(make(2))  # what is imported or cached once
    few, more, many = (work_of(make(steps)) for steps in (5, 10, 20))
    for what, found in many.items():
        # From 5 to 10 steps the first task is cut; after that each step adds the same.
        assert more[what] <= 8 * few[what]
        assert found <= 2.5 * more[what]
