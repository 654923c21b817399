"""One of every kind of fault on a GPU, and mutants of its kernels; for more `python -m tests.faults.gpu_candidates`."""

from __future__ import annotations

import itertools
from pathlib import Path
from random import Random

import pytest

from tests.faults import gpu_candidates
from tests.faults.gpu_candidates import (
    FAULTS,
    RECOVERY_SECONDS,
    TASKS,
    Fault,
    Injected,
    Subject,
    compiled,
    product,
    run_faults,
    run_mutants,
    source_of,
    subjects,
)
from tests.faults.gpu_mutants import KINDS, OPERATORS
from tilewright.codegen.cuda.build import identity
from tilewright.hw.gpu import H200, detect
from tilewright.space.outcome import FAILURES
from tilewright.space.template import Work
from tilewright.space.templates.default import DEFAULT

pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed: pip install 'tilewright[cuda]'")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_is_real_machine_code(fault: Fault) -> None:
    """Of a plain kernel here, which compiles in no time."""
    task = product(64)
    each = Injected(fault, task, DEFAULT, (), source_of(Work(task, H200), DEFAULT))
    _, symbol = identity(each.source, H200, "fast")
    assert (symbol.encode() in compiled(each, H200).cubin) != ("name" in fault.name)
    assert fault.kind in FAILURES


def test_there_are_many_kinds_of_mistakes() -> None:
    assert len(KINDS) >= 10 and len(OPERATORS) > len(KINDS)
    found = subjects(H200, Random(0))
    assert len({subject.work.task.key for subject in found}) == len(TASKS)
    templates = {subject.config.template for subject in found}
    assert {"tensor-product", "tensor-attention", "sketch:tensorised", "default"} <= templates
    met = {edit.kind for subject in found for edit in subject.edits}
    assert met == set(KINDS)


@pytest.mark.parametrize("number", [0, 2])
def test_mutants_compile_to_other_machine_code(number: int) -> None:
    subject = Subject(Work(TASKS[number](), H200), DEFAULT)
    some = list(itertools.islice(subject.legal_edits(Random(1)), 10))
    codes = {subject.mutant(each).parts[0].code for each in some}
    assert len(some) == 10 and len(codes) > 7 and subject.built.parts[0].code not in codes
    assert len({subject.edits[each].kind for each in some}) >= 4
    again = list(itertools.islice(Subject(subject.work, DEFAULT).legal_edits(Random(1)), 10))
    assert again == some, "the seed says which"


@pytest.mark.gpu
def test_each_fault_costs_one_candidate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    outcomes = run_faults(detect(), 6)
    assert [outcome for outcome in outcomes if not outcome.is_right] == []
    assert max(outcome.recovery for outcome in outcomes) <= RECOVERY_SECONDS


@pytest.mark.gpu
def test_no_mutant_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(gpu_candidates, "TASKS", TASKS[:3])
    assert run_mutants(detect(), 20, 0) == 0
