"""What is known of cards by their capability, and that it changes no fingerprint."""

from __future__ import annotations

from dataclasses import asdict, fields, replace

import pytest

from tilewright.hw.gpu import A100, DESCRIBED, H200, L4, PORTABLE, GpuMachine


def test_rates_of_instructions() -> None:
    assert (H200.mma_sync_flops_clock, H200.wgmma_flops_clock) == (1800, 4096)
    assert A100.wgmma_flops_clock == L4.wgmma_flops_clock == 0
    # The data sheet's 989 Tflop/s, at the clock for which it is given.
    assert H200.wgmma_flops_clock * H200.sms * 1.83e9 == pytest.approx(989e12, rel=0.01)
    assert replace(H200, capability="sm_90", warpgroup_mma=False).wgmma_flops_clock == 0


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
    assert not described & {"rates", "launch_seconds", "wgmma_flops_clock", "memories", "features"}


def test_features() -> None:
    assert A100.features == ("sm_80", "async_copy")
    assert {"sm_80", "sm_86", "sm_89", "sm_90", "warpgroup_mma", "clusters"} <= set(H200.features)
