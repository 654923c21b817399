"""What is known of cards by their capability, and that it changes no fingerprint."""

from __future__ import annotations

from dataclasses import asdict, fields, replace

import pytest

from tilewright.hw.gpu import A10, A100, DESCRIBED, H200, L4, PORTABLE, GpuMachine


# Dense TFLOP/s of the data sheets: float32, 16-bit tensor cores. The last is given for 1.83 GHz.
@pytest.mark.parametrize(
    ("machine", "float32", "tensor"),
    [(A100, 19.5, 312), (A10, 31.2, 125), (L4, 30.3, 121), (replace(H200, clock_mhz=1_830), 61.9, 989)],
    ids=lambda value: value.name if isinstance(value, GpuMachine) else str(value),
)
def test_peaks_are_those_of_the_data_sheets(machine: GpuMachine, float32: float, tensor: float) -> None:
    assert machine.fma_flops == pytest.approx(float32 * 1e12, rel=0.01)
    assert machine.peak_tensor_flops == pytest.approx(tensor * 1e12, rel=0.01)


def test_the_float32_peak_of_an_h200() -> None:
    assert H200.fma_flops == pytest.approx(67e12, rel=0.01), "at its own clock"


@pytest.mark.parametrize("machine", DESCRIBED.values(), ids=lambda machine: machine.capability)
def test_no_instruction_exceeds_the_peak(machine: GpuMachine) -> None:
    assert machine.tensor_flops_clock <= machine.rates.peak_tensor_flops_clock


def test_launches() -> None:
    assert H200.launch_seconds == 1.6e-6
    assert H200.rates.fitted and not A100.rates.fitted


def test_a_newer_card_has_the_rates_of_the_newest_that_is_known() -> None:
    assert replace(H200, capability="sm_120").rates is H200.rates
    assert PORTABLE.rates is A100.rates


@pytest.mark.parametrize("machine", DESCRIBED.values(), ids=lambda machine: machine.capability)
def test_rates_are_no_part_of_a_fingerprint(machine: GpuMachine) -> None:
    described = {field.name for field in fields(GpuMachine)}
    assert set(asdict(machine)) == described
    assert not described & {"rates", "launch_seconds", "peak_tensor_flops", "memories", "features"}


def test_features() -> None:
    assert A100.features == ("sm_80", "async_copy")
    assert {"sm_80", "sm_86", "sm_89", "sm_90", "warpgroup_mma", "clusters"} <= set(H200.features)
