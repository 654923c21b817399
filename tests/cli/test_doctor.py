"""What `doctor` says of speeds: measured now, before, or not at all, and why."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tilewright.cli.doctor import NOTE, OK, PROBLEM, calibration_findings, examine, gpu_speed
from tilewright.hw import host
from tilewright.hw.gpu import H200
from tilewright.measure.calibration import keep_at, nominal
from tilewright.measure.gpu_calibration import VERSION, GpuCalibration, _key
from tilewright.runtime.cuda import device


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))


def test_a_gpu_that_is_not_calibrated() -> None:
    assert gpu_speed(H200, measure=False) == "not calibrated; using data-sheet values"


@pytest.mark.skipif(device.count() > 0, reason="measuring works where there is a card")
def test_a_measurement_that_failed_is_told_with_its_reason() -> None:
    said = gpu_speed(H200, measure=True)
    assert said.startswith("measuring it failed: ") and said.endswith(
        "not calibrated; using data-sheet values"
    )
    reason = said.removeprefix("measuring it failed: ").partition(";")[0]
    assert "none" not in reason and len(reason) > 10
    keep_at(_key(H200), GpuCalibration(VERSION, _key(H200), 4e12, 6e14))
    assert gpu_speed(H200, measure=True).endswith(
        "; 4000 GB/s copy, 600 TFLOP/s fp16 by mma.sync (of an earlier run)"
    )
    assert gpu_speed(H200, measure=False) == "4000 GB/s copy, 600 TFLOP/s fp16 by mma.sync"


@pytest.mark.parametrize(("share", "told"), [(0.6, True), (0.98, False)])
def test_results_that_other_work_disturbed_are_said_to_be_lost(share: float, told: bool) -> None:
    found = msgspec.structs.replace(nominal(host()), measured=True, share=share)
    said = [finding.text for finding in calibration_findings(host(), found)]
    assert any("60% of the CPU was left to this measurement" in text for text in said) is told


def test_what_was_not_measured_is_a_note_and_no_problem() -> None:
    found = list(calibration_findings(host(), nominal(host())))
    assert {finding.verdict for finding in found} == {NOTE}
    assert found[-1].text.startswith("not calibrated") and found[-1].remedy == "tilewright doctor"


def verdicts() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for finding in examine({}, measure=False):
        found.setdefault(finding.name, []).append(finding.verdict)
    return found


def test_every_part_has_a_verdict() -> None:
    found = verdicts()
    assert {
        "platform",
        "environment",
        "libraries",
        "CPU",
        "threads",
        "cache",
        "database",
        "speed",
        "GPU",
    } <= set(found)
    assert {each for verdicts in found.values() for each in verdicts} <= {OK, NOTE}


def test_a_misspelt_variable_and_a_wrong_value_are_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_TREADS", "4")
    monkeypatch.setenv("TILEWRIGHT_NUMERICS", "sloppy")
    problems = [finding for finding in examine({}, measure=False) if finding.verdict == PROBLEM]
    assert "TILEWRIGHT_TREADS is not an option" in problems[0].text
    assert "'TILEWRIGHT_THREADS'" in problems[0].remedy
    assert any("TILEWRIGHT_NUMERICS='sloppy' must be one of" in finding.text for finding in problems)


def test_more_threads_than_cores_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_THREADS", "1000")
    assert verdicts()["threads"] == [PROBLEM]


def test_a_missing_package_is_named_with_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tilewright.cli.doctor._version", lambda package: None if package in ("lightgbm", "numpy") else "1.0"
    )
    found = {finding.text: finding for finding in examine({}, measure=False)}
    assert found["numpy is not installed"].verdict == PROBLEM
    absent = next(finding for text, finding in found.items() if text.startswith("no lightgbm"))
    assert absent.verdict == NOTE and absent.remedy == "pip install 'tilewright[tune]'"


def test_progress_is_shown_while_it_measures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tilewright.measure.calibrate.calibrate", lambda machine: nominal(machine))
    list(examine({}, measure=True, quiet=False))
    assert "measuring peak FLOP/s, bandwidth and caches" in capsys.readouterr().err
