"""A sample of the fault campaign, one of every kind and some mutants; for more `python -m tests.faults.candidates`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from random import Random

import pytest

from tests.faults.candidates import (
    FAULTS,
    Fault,
    FaultTarget,
    convolution,
    inject,
    normalised,
    outcomes_of,
    product,
    runner_for_faults,
    softmax,
    survived,
)
from tilewright.graph.task import Task
from tilewright.hw import host
from tilewright.loops.verify import verify_program
from tilewright.measure.runner import Runner
from tilewright.measure.trial import TaskJob
from tilewright.space.space import Config
from tilewright.space.template import Work
from tilewright.space.templates.default import DEFAULT
from tilewright.tune.choose import choose


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with runner_for_faults() as runner:
        yield runner


# One of every kind; what is left out is the same to us from where we stand.
SAMPLE = {
    *("segmentation fault", "endless loop", "memory of a library", "exception", "out of bounds"),
    *(
        "hang",
        "buffers without end",
        "one element",
        "canary after output",
        "written input",
        "read beyond an input",
        "element left out",
    ),
}


@pytest.mark.parametrize(
    "fault", [f for f in FAULTS if f.name in SAMPLE], ids=lambda fault: f"{fault.stage}: {fault.name}"
)
def test_it_is_caught_typed_and_survived(runner: Runner, fault: Fault) -> None:
    job = TaskJob.of(Work(product(), host()), 2)
    sound = choose(job.work())
    measured = inject(runner, job, sound, fault, Random(0))
    assert measured.failure == fault.expected, measured.message
    assert measured.message
    assert survived(runner, job, sound)


@pytest.mark.parametrize("make", [product, softmax, normalised], ids=lambda make: make.__name__)
def test_no_mutant_passes(runner: Runner, make: Callable[[], Task]) -> None:
    fault_target = FaultTarget.of(make(), DEFAULT)
    numbers = list(itertools.islice(fault_target.legal_edits(Random(3)), 4))
    for number, outcome in zip(numbers, outcomes_of(runner, fault_target, numbers), strict=True):
        assert outcome != "passed", fault_target.edits[number]


def test_a_kernel_that_recomputes_nan_does_not_hide_what_it_has_not_written(runner: Runner) -> None:
    """Winograd's template computes a tile again, directly, where one of its results is no number: scratch memory that
    happens to hold NaN would never show."""
    config = Config(
        "winograd",
        (("outputs", 4), ("tiles", 4), ("vectors", 1), ("channels", 16), ("panel_groups", 1)),
    )
    fault_target = FaultTarget.of(convolution(), config)
    dropped = [
        number
        for number, edit in enumerate(fault_target.edits)
        if edit.kind == "dropped" and edit.where == "store to seen"
    ]
    numbers = dropped[-3:]  # those of tiles at the border, which all of these are
    for number in numbers:
        verify_program(fault_target.edits[number].made())
    assert outcomes_of(runner, fault_target, numbers) == ["wrong"] * 3


def test_an_equivalent_mutant_is_known_as_such() -> None:
    fault_target = FaultTarget.of(product(), DEFAULT)
    assert fault_target.is_equivalent(fault_target.program)
    without = next(edit for edit in fault_target.edits if edit.kind == "dropped")
    assert not fault_target.is_equivalent(without.made())
