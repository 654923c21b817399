"""One of every kind of fault on a GPU, and mutants of its kernels; for more `python -m tests.faults.gpu_candidates`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.gpu_candidates import (
    FAULTS,
    RECOVERY_SECONDS,
    Fault,
    Injected,
    compiled,
    product,
    run_faults,
    source_of,
)
from tests.nvrtc import needs_nvrtc
from tilewright.codegen.cuda.build import identity
from tilewright.hw.gpu import H200, detect
from tilewright.space.outcome import FAILURES
from tilewright.space.template import Work
from tilewright.space.templates.default import DEFAULT

needs_nvrtc()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_is_real_machine_code(fault: Fault) -> None:
    """Of a plain kernel here, which compiles in no time."""
    task = product(64)
    each = Injected(fault, task, DEFAULT, (), source_of(Work(task, H200), DEFAULT))
    _, symbol = identity(each.source, H200, "fast")
    assert (symbol.encode() in compiled(each, H200).cubin) != ("name" in fault.name)
    assert fault.kind in FAILURES


@pytest.mark.gpu
def test_each_fault_costs_one_candidate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    outcomes = run_faults(detect(), 6)
    assert [outcome for outcome in outcomes if not outcome.is_right] == []
    assert max(outcome.recovery for outcome in outcomes) <= RECOVERY_SECONDS
