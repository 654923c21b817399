"""Steps are found where they are, records survive the disk and nothing else does, and figures are plausible."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given

from tilewright.dtypes import DType
from tilewright.hw import Caches, host
from tilewright.loops.interpret import interpret_program
from tilewright.loops.verify import verify_program
from tilewright.measure import calibrate as module
from tilewright.measure import calibration as records
from tilewright.measure.calibrate import believed, calibrate, peak_flops, steps_down
from tilewright.measure.calibration import calibration_for, machine_key, nominal, stored

SIZES = [round(8192 * 2 ** (step / 2)) for step in range(30)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    return tmp_path


def staircase(capacities: list[int], plateaus: list[float]) -> list[float]:
    return [plateaus[sum(size > capacity for capacity in capacities)] for size in SIZES]


@given(
    st.lists(st.integers(2, len(SIZES) - 3), min_size=3, max_size=3, unique=True),
    st.lists(st.floats(1.5, 5), min_size=3, max_size=3),
    st.randoms(use_true_random=False),
)
def test_steps_are_found(places: list[int], factors: list[float], random: object) -> None:
    """Any three steps of at least 1.5x, under 4% of noise."""
    capacities = [SIZES[place] for place in sorted(places)]
    plateaus = [1e11 / math.prod(factors[:level]) for level in range(4)]
    noisy = [speed * random.uniform(0.96, 1.04) for speed in staircase(capacities, plateaus)]  # type: ignore[attr-defined]
    for capacity, factor, (size, ratio) in zip(capacities, factors, steps_down(SIZES, noisy, 3), strict=True):
        assert capacity <= size <= 1.42 * capacity
        assert ratio == pytest.approx(factor, rel=0.1)


def test_the_system_is_believed_where_the_speeds_agree() -> None:
    stated = Caches(48 << 10, 1280 << 10, 48 << 20)
    speeds = staircase([stated.l1, stated.l2, 20 << 20], [120e9, 80e9, 21e9, 11e9])
    found = believed(stated, SIZES, speeds)
    assert (found.l1, found.l2) == (stated.l1, stated.l2)
    assert 16 << 20 <= found.l3 <= 24 << 20  # a third level that others use too


def test_flat_speeds_say_nothing() -> None:
    stated = Caches()
    found = believed(stated, SIZES, [1e10 * (1 + 0.01 * (number % 3)) for number in range(len(SIZES))])
    assert (found.l1, found.l2, found.l3) == (stated.l1, stated.l2, stated.l3)


def test_two_levels() -> None:
    stated = Caches(64 << 10, 1 << 20, l3=0, l3_cores=1)
    found = believed(stated, SIZES, staircase([64 << 10, 4 << 20], [100e9, 50e9, 10e9]))
    assert found.l1 == 64 << 10 and 3 << 20 < found.l2 < 6 << 20 and found.l3 == 0


def test_the_read_loop_reads_everything() -> None:
    program = module._read_program(lanes=4, blocks=3, times=2, threads=2)
    verify_program(program)
    values = np.arange(program.params[0].size, dtype=np.float32)
    assert interpret_program(program, [values]).sum() == 2 * values.sum()


def test_nothing_is_measured_without_being_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SingleKernel", None)
    found = calibration_for(host())
    assert not found.measured and found.sensible and found == nominal(host())


@pytest.fixture
def in_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ARRAY_BYTES", 8 << 20)
    monkeypatch.setattr(module, "_PASSES", 1)
    monkeypatch.setattr(module, "_READ_BYTES", 8 << 20)


def test_a_measurement_is_kept(in_short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_SHARE", 0.0)
    machine = replace(host(), cores=1)
    found = calibrate(machine)
    assert found.measured and found.sensible and found.machine == machine_key(machine)
    assert 1e8 < found.one.flops < 1e13 and 1e8 < found.one.memory < 1e13
    assert 0 < found.share < 1.2
    assert calibration_for(machine) == found
    assert stored(replace(machine, cores=7)) is None


def test_a_measurement_beside_other_work_is_not_kept(in_short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = replace(host(), cores=1)
    monkeypatch.setattr(module, "LEAST_SHARE", 2.0)  # more than there is
    assert calibrate(machine).measured and stored(machine) is None
    earlier = msgspec.structs.replace(nominal(machine), measured=True)
    records.keep(machine, earlier)
    calibrate(machine)
    assert stored(machine) == earlier


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: b"\xff" + data,
        lambda data: data.replace(b'"flops"', b'"flips"'),
        lambda data: data.replace(b'"version": %d' % records.VERSION, b'"version": 0'),
        lambda data: data.replace(b'"threads": 1,', b'"threads": 0,'),
        lambda data: data.replace(b'"copy": ', b'"copy": -'),
    ],
)
def test_damage_counts_as_absence(own_cache: Path, damage: object) -> None:
    machine = host()
    good = msgspec.structs.replace(nominal(machine), measured=True)
    records.keep(machine, good)
    (path,) = (own_cache / "calibration").iterdir()
    assert stored(machine) == good
    before = path.read_bytes()
    path.write_bytes(damage(before))  # type: ignore[operator]
    assert path.read_bytes() != before
    assert stored(machine) is None and not calibration_for(machine).measured


def test_a_folder_that_cannot_be_written(own_cache: Path) -> None:
    (own_cache / "calibration").write_text("not a folder")
    records.keep(host(), nominal(host()))
    assert stored(host()) is None


def test_calls_are_long_enough_to_hide_their_start() -> None:
    """A call of 50 microseconds, a third of them spent on its start, once gave three quarters of the peak."""
    kernel, operands, _ = module.peak_kernel(host(), 1)
    assert kernel.seconds(operands, at_least=0.01) > 1e-3
    fastest_imaginable = 1e12  # bytes a second, of one thread from its first cache
    assert module._READ_BYTES / fastest_imaginable > 2e-4


def test_peak_is_plausible() -> None:
    assert 1e8 < peak_flops(host(), 1) < 1e13
    assert host().lanes(DType.F32) >= 4
