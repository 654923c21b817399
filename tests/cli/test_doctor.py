"""What `doctor` says of speeds: measured now, before, or not at all, and why."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import msgspec
import pytest

from tilewright.cli.doctor import _speed, show_calibration
from tilewright.hw import host
from tilewright.hw.gpu import H200
from tilewright.measure.calibration import keep_at, nominal
from tilewright.measure.gpu_calibration import VERSION, GpuCalibration, _key
from tilewright.runtime.cuda import device


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))


def test_a_card_that_nobody_measured() -> None:
    assert _speed(H200, measure=False) == "as fast as it is described: nobody measured it"


@pytest.mark.skipif(device.count() > 0, reason="measuring works where there is a card")
def test_a_measurement_that_failed_is_told_with_its_reason() -> None:
    said = _speed(H200, measure=True)
    assert said.startswith("measuring it failed: ") and said.endswith("nobody measured it")
    reason = said.removeprefix("measuring it failed: ").partition(";")[0]
    assert "none" not in reason and len(reason) > 10
    keep_at(_key(H200), GpuCalibration(VERSION, _key(H200), 4e12, 6e14))
    assert _speed(H200, measure=True).endswith(
        "; 4000 GB/s copy, 600 TFLOP/s fp16 by mma.sync (of an earlier time)"
    )
    assert _speed(H200, measure=False) == "4000 GB/s copy, 600 TFLOP/s fp16 by mma.sync"


@pytest.mark.parametrize(("share", "told"), [(0.6, True), (0.98, False)])
def test_figures_that_other_work_disturbed_are_said_to_be_lost(
    capsys: pytest.CaptureFixture[str], share: float, told: bool
) -> None:
    found = msgspec.structs.replace(nominal(host()), measured=True, share=share)
    show_calibration(asdict(host().caches), msgspec.to_builtins(found))
    said = " ".join(capsys.readouterr().out.split())
    assert ("60% of the processor came to this measurement): these figures are not kept" in said) is told
