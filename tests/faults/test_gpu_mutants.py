"""Mutants of kernels for a GPU, a few of them on a card; for more `python -m tests.faults.gpu_mutants`."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from tests.faults import gpu_mutants
from tests.faults.gpu_edits import KINDS, OPERATORS
from tests.faults.gpu_mutants import (
    EQUIVALENT,
    PASSED,
    TASKS,
    Checked,
    FaultTarget,
    as_exact,
    fault_targets,
    run_mutants,
)
from tests.faults.killable import Killable
from tests.nvrtc import needs_nvrtc
from tilewright.hw.gpu import H200, detect
from tilewright.measure.runner import Runner
from tilewright.space.template import Work
from tilewright.space.templates.default import DEFAULT

needs_nvrtc()


def test_there_are_many_kinds_of_mistakes() -> None:
    assert len(KINDS) >= 10 and len(OPERATORS) > len(KINDS)
    found = fault_targets(H200, Random(0))
    assert len({fault_target.work.task.key for fault_target in found}) == len(TASKS)
    templates = {fault_target.config.template for fault_target in found}
    assert {"tensor-core-matmul", "tensor-core-attention", "sketch:tensorised", "default"} <= templates
    met = {edit.kind for fault_target in found for edit in fault_target.edits}
    assert met == set(KINDS)


@pytest.mark.parametrize("number", [0, 2])
def test_mutants_compile_to_other_machine_code(number: int) -> None:
    fault_target = FaultTarget(Work(TASKS[number](), H200), DEFAULT)
    some = list(itertools.islice(fault_target.legal_edits(Random(1)), 10))
    codes = {fault_target.mutant(each).parts[0].code for each in some}
    assert len(some) == 10 and len(codes) > 7 and fault_target.built.parts[0].code not in codes
    assert len({fault_target.edits[each].kind for each in some}) >= 4
    again = list(itertools.islice(FaultTarget(fault_target.work, DEFAULT).legal_edits(Random(1)), 10))
    assert again == some, "the seed says which"


def _harmful(what: str) -> int:
    if what == "crash":
        os.abort()
    if what == "hang":
        time.sleep(600)
    if what == "raise":
        raise ValueError("no")
    return os.getpid()


def test_a_judge_that_crashes_or_hangs_costs_one_answer() -> None:
    judge = Killable(_harmful, 20.0)
    try:
        first = judge("")
        assert first[0] and first[1] != os.getpid()
        assert judge("") == first, "the process stays"
        assert judge("crash") == (False, "its process ended")
        assert judge("raise") == (False, "ValueError: no")
        worked, other = judge("")
        assert worked and other != first[1]
    finally:
        judge.close()


def test_a_judge_that_hangs_is_ended() -> None:
    judge = Killable(_harmful, 0.5)
    try:
        assert judge("hang") == (False, "it took longer than 0.5 s")
    finally:
        judge.close()


class _FakeRunner:
    """Fails with what the code of a mutant says; where it says "slow", only alongside another."""

    def __init__(self, surrounding: bool) -> None:
        self.surrounding = surrounding

    def build(self, *_: object) -> None: ...

    def trial(self, job: object, config: object, made: Any, *, best: float) -> SimpleNamespace:
        code = made.built.decode()
        if code == "slow":
            return SimpleNamespace(failure="timeout" if self.surrounding else "wrong")
        return SimpleNamespace(failure=code if code in ("wrong", "timeout", "illegal") else "")


def test_outcomes_of_mutants_side_by_side() -> None:
    """In order, whichever runner had them; and what took too long is asked again, by the first alone."""
    codes = ["wrong", "slow", "same", "illegal", "other", "timeout", "crashes"]
    fault_target = SimpleNamespace(
        job=None, config=None, built=b"same", mutant=lambda number: codes[number].encode()
    )

    def judge(job: object, original: bytes, mutant: bytes) -> tuple[bool, Any]:
        return (False, "its process ended") if mutant == b"crashes" else (True, mutant == original)

    runners = [_FakeRunner(surrounding=number > 0) for number in range(3)]
    checked = Checked(cast(list[Runner], runners), judge)
    outcomes = checked(cast(FaultTarget, fault_target), range(len(codes)))
    assert outcomes == ["wrong", "wrong", EQUIVALENT, "illegal", PASSED, "timeout", PASSED]


def test_results_that_only_round_elsewhere_are_as_exact() -> None:
    exact = np.linspace(0.1, 3.0, 500)
    meant = exact.astype(np.float16)
    other = np.where(np.abs(exact - np.nextafter(meant, np.float16(4))) < np.spacing(meant) * 0.6,
                     np.nextafter(meant, np.float16(4)), meant)  # fmt: skip
    assert (other != meant).any() and as_exact(other, meant, exact)
    for wrong in (
        np.float16(np.nan),
        np.float16(np.inf),
        np.nextafter(np.nextafter(meant[7], np.float16(9)), np.float16(9)),
    ):
        changed = meant.copy()
        changed[7] = wrong
        assert not as_exact(changed, meant, exact)


@pytest.mark.gpu
def test_no_mutant_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(gpu_mutants, "TASKS", TASKS[:3])
    assert run_mutants(detect(), 20, 0) == []
