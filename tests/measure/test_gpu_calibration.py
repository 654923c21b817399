"""What is measured of a card is kept, changes the rates that configs are ranked with, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tilewright.codegen.cuda.build import build
from tilewright.hw.gpu import A100, H200, GpuMachine, detect
from tilewright.measure.calibration import keep_at
from tilewright.measure.gpu_calibration import (
    _OF_COPY,
    _OF_PRODUCT,
    VERSION,
    GpuCalibration,
    _key,
    _product,
    calibrate,
    rated,
    stored,
)
from tilewright.runtime.cuda.device import Device


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))


def measured(machine: GpuMachine, memory: float, tensor: float) -> GpuCalibration:
    """Of a card that does so much of what it is described to do."""
    copy = memory * _OF_COPY * machine.memory_bytes_per_second
    whole = machine.tensor_flops_clock * machine.clock_mhz * 1e6 * machine.sms
    return GpuCalibration(VERSION, _key(machine), copy, tensor * _OF_PRODUCT * whole)


def test_a_card_that_nobody_measured_is_as_it_is_described() -> None:
    assert stored(H200) is None and rated(H200) is H200


def test_rates_are_those_that_were_measured() -> None:
    keep_at(_key(A100), measured(A100, 0.5, 1.25))
    found = rated(A100)
    assert found.memory_bytes_per_second == pytest.approx(0.5 * A100.memory_bytes_per_second)
    assert found.tensor_flops_clock == pytest.approx(1.25 * A100.tensor_flops_clock)
    rates = {"memory_bytes_per_second": 0.0, "tensor_flops_clock": 0.0}
    assert replace(found, **rates) == replace(A100, **rates), "all else is the same"
    assert rated(H200) is H200, "another card"


def test_what_makes_no_sense_is_not_believed() -> None:
    for wrong in (
        measured(A100, 100.0, 1.0),
        measured(A100, 1.0, 0.0),
        replace_version(measured(A100, 1.0, 1.0)),
    ):
        keep_at(_key(A100), wrong)
        assert rated(A100) is A100


def replace_version(found: GpuCalibration) -> GpuCalibration:
    return GpuCalibration(VERSION + 1, found.card, 0.5 * found.copy, found.products)


def test_the_product_that_is_measured_fits_every_card() -> None:
    for machine in (A100, H200):
        assert not build(_product(machine), machine, "fast", None).resources.spilled_bytes


@pytest.mark.gpu
def test_a_card_is_measured() -> None:
    machine = detect()
    found = calibrate(machine, Device())
    assert stored(machine) == found
    assert 0.6 < found.copy / machine.memory_bytes_per_second < 1.0
    assert 0.6 < rated(machine).tensor_flops_clock / machine.tensor_flops_clock < 1.6
