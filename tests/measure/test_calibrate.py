"""Caches are found as large as they are, records survive the disk and nothing else does, and numbers are plausible."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given

from tilewright.dtypes import DType
from tilewright.hw import Caches, host
from tilewright.hw.cores import USUAL
from tilewright.loops.interpret import interpret_program
from tilewright.loops.verify import verify_program
from tilewright.measure import calibrate as module
from tilewright.measure import calibration as records
from tilewright.measure.calibrate import believed, calibrate, never_falling, peak_flops
from tilewright.measure.calibration import calibration_for, machine_key, nominal, stored

SIZES = [round(8192 * 2 ** (step / 2)) for step in range(30)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    return tmp_path


K, M = 1 << 10, 1 << 20

# Of processors, as (L1, L2, L3), and the cycles that a line is waited for from each and from memory.
PROCESSORS = {
    "Ice Lake": ((48 * K, 1280 * K, 48 * M), (5, 14, 70, 280)),
    "Zen 4": ((32 * K, 1 * M, 32 * M), (4, 14, 50, 350)),
    "Skylake": ((32 * K, 1 * M, 33 * M), (5, 14, 70, 300)),
    "laptop": ((32 * K, 256 * K, 8 * M), (4, 12, 42, 250)),
    "fast cores": ((128 * K, 12 * M), (3, 18, 320)),
}


@dataclass(frozen=True)
class Weather:
    """How sharply a cache ends: its lines begin to miss at `early` times its size, and `steep` times as many as have no
    place then. Noise, and how often another guest makes a line wait half as long again."""

    early: float
    steep: float
    noise: float
    disturbed: float
    seed: int

    def waits(self, sizes: list[int], capacities: Sequence[float], cycles: Sequence[float]) -> list[float]:
        random = Random(self.seed)
        found = []
        for size in sizes:
            missing = [min(1.0, max(0.0, self.steep * (1 - self.early * c / size))) for c in capacities]
            steps = zip(missing, itertools.pairwise(cycles), strict=True)
            wait = cycles[0] + sum(share * (after - before) for share, (before, after) in steps)
            wait *= random.uniform(1, 1 + self.noise) * (1.5 if random.random() < self.disturbed else 1)
            found.append(wait * 0.3e-9)
        return found


weather = st.builds(
    Weather,
    st.floats(0.75, 1.0),
    st.floats(1.5, 4.0),  # from lines that are displaced at random to those displaced in order
    st.floats(0.0, 0.08),
    st.sampled_from([0.0, 0.05]),
    st.integers(0, 1 << 30),
)
processor = st.sampled_from(sorted(PROCESSORS))


def stated(sizes: Sequence[int]) -> Caches:
    return Caches(*sizes) if len(sizes) == 3 else Caches(*sizes, l3=0, l3_cores=1)


def as_list(found: records.Capacities) -> list[int]:
    return [size for size in (found.l1, found.l2, found.l3) if size]


@given(processor, weather)
def test_a_system_that_tells_the_truth_is_believed(name: str, under: Weather) -> None:
    capacities, cycles = PROCESSORS[name]
    caches = stated(capacities)
    sizes = module._growing_sizes(caches, USUAL.line_bytes)
    assert as_list(believed(caches, sizes, under.waits(sizes, capacities, cycles))) == list(capacities)


@given(processor, st.sampled_from([0.2, 0.3, 0.4, 0.9]), weather)
def test_others_use_the_third_level_too(name: str, left: float, under: Weather) -> None:
    *own, shared = PROCESSORS[name][0]
    if len(own) < 2:
        return
    caches = stated([*own, shared])
    sizes = module._growing_sizes(caches, USUAL.line_bytes)
    found = as_list(believed(caches, sizes, under.waits(sizes, [*own, left * shared], PROCESSORS[name][1])))
    assert found[:2] == own
    assert found[2] == shared if left > 0.8 else 0.5 * left * shared < found[2] < 2 * left * shared


@given(processor, processor, weather)
def test_another_machines_caches_are_found_out(name: str, other: str, under: Weather) -> None:
    capacities, cycles = PROCESSORS[name]
    said = PROCESSORS[other][0]
    if len(said) != len(capacities):
        return
    caches = stated(said)
    sizes = module._growing_sizes(caches, USUAL.line_bytes)
    found = as_list(believed(caches, sizes, under.waits(sizes, capacities, cycles)))
    for word, size, real in zip(said, found, capacities, strict=True):
        assert size == word if word == real else real / 2 < size < 2 * real


@pytest.mark.parametrize("said", [(32 * K, 4 * M, 16 * M), (32 * K, 512 * K, 16 * M)])
@given(processor, weather)
def test_what_hypervisors_say_by_default(said: tuple[int, int, int], name: str, under: Weather) -> None:
    capacities, cycles = PROCESSORS[name]
    if len(capacities) < 3:
        return
    caches = stated(said)
    sizes = module._growing_sizes(caches, USUAL.line_bytes)
    found = as_list(believed(caches, sizes, under.waits(sizes, capacities, cycles)))
    for size, real in zip(found, capacities, strict=True):
        assert real / 2.1 < size < 2.1 * real


@given(st.sampled_from([320 * M, 480 * M]), weather)
def test_of_a_third_level_larger_than_any_array_the_waits_say_nothing(large: int, under: Weather) -> None:
    (*own, _), cycles = PROCESSORS["Ice Lake"]
    caches = stated([*own, large])
    sizes = module._growing_sizes(caches, USUAL.line_bytes)
    calm = replace(under, disturbed=0.0)
    found = believed(caches, sizes, calm.waits(sizes, [*own, large], cycles))
    assert as_list(found) == [*own, large]


@pytest.mark.parametrize("third", [0, 8, 12, 16, 24, 25, 30, 32, 33, 36, 48, 54, 60, 64, 105, 480])
def test_arrays_are_whole_lines(third: int) -> None:
    sizes = module._growing_sizes(Caches(l3=third * M), USUAL.line_bytes)
    assert all(size % 64 == 0 for size in sizes) and sizes == sorted(set(sizes))


def test_arrays_of_any_size_are_waited_for() -> None:
    sizes = module._growing_sizes(host().caches, host().line_bytes)[:4]  # the last is no power of two
    assert all(0 < seconds < 1e-6 for seconds in module.waits(host(), sizes))


def test_waits_that_do_not_change_say_nothing() -> None:
    caches = Caches()
    found = believed(caches, SIZES, [1e-8 * (1 + 0.01 * (number % 3)) for number in range(len(SIZES))])
    assert as_list(found) == [caches.l1, caches.l2, caches.l3]


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=30))
def test_the_nearest_that_never_falls(values: list[float]) -> None:
    found = never_falling(np.array(values))
    assert len(found) == len(values) and (np.diff(found) >= 0).all()
    assert found.mean() == pytest.approx(np.mean(values), abs=1e-9)
    rising = np.sort(values)
    assert np.square(found - values).sum() <= np.square(rising - values).sum() + 1e-9
    np.testing.assert_array_equal(never_falling(rising), rising)


def test_a_chain_is_followed() -> None:
    program = module.follow_program(positions=24, steps=5)
    verify_program(program)
    chain = np.zeros(24, np.int64)
    chain[[0, 16, 8]] = [16, 8, 0]
    assert interpret_program(program, [chain, np.array([16])]).tolist() == [0]  # 8, 0, 16, 8, 0


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
    monkeypatch.setattr(module, "MIN_SHARE", 0.0)
    machine = replace(host(), cores=1)
    found = calibrate(machine)
    assert found.measured and found.sensible and found.machine == machine_key(machine)
    assert 1e8 < found.one.flops < 1e13 and 1e8 < found.one.memory < 1e13
    assert 0 < found.share < 1.2
    assert calibration_for(machine) == found
    assert stored(replace(machine, cores=7)) is None


def test_a_measurement_beside_other_work_is_not_kept(in_short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = replace(host(), cores=1)
    monkeypatch.setattr(module, "MIN_SHARE", 2.0)  # more than there is
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
    fastest_imaginable = 1e12  # bytes a second, of one thread from its L1
    assert module._READ_BYTES / fastest_imaginable > 2e-4


def test_peak_is_plausible() -> None:
    assert 1e8 < peak_flops(host(), 1) < 1e13
    assert host().lanes(DType.F32) >= 4
