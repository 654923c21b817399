"""One of every kind of fault on a GPU; for more `python -m tests.faults.gpu_candidates`."""

from __future__ import annotations

from pathlib import Path

import pytest
from tilewright.codegen.cuda.pieces import piece_source
from tilewright.space.vendor.pieces import DEFAULT, ours

from tests.faults.gpu_candidates import (
    FAULTS,
    RECOVERY_SECONDS,
    Fault,
    Injected,
    campaign,
    compiled,
    product,
)
from tilewright.codegen.cuda.build import identity
from tilewright.hw.gpu import H200, detect
from tilewright.space.outcome import FAILURES


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_is_real_machine_code(fault: Fault) -> None:
    """Of a plain kernel here, which compiles in no time."""
    task = product(512)
    (piece,) = ours(task).pieces
    each = Injected(fault, task, DEFAULT, piece_source(piece, H200, "fast"))
    _, symbol = identity(each.source, H200, "fast")
    assert (symbol.encode() in compiled(each, H200).cubin) != ("name" in fault.name)
    assert fault.kind in FAILURES


@pytest.mark.gpu
def test_each_fault_costs_one_candidate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    outcomes, tuner = campaign(detect(), 6, tmp_path / "tuning.db")
    assert [outcome for outcome in outcomes if not outcome.is_right] == []
    assert max(tuner.replaced) <= RECOVERY_SECONDS
