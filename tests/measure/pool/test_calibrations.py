"""The calibrations of nodes reach the driver, each for machines of its own description."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from tests.measure.pool.threads import LABEL, TestTimer, ThreadWorkers
from tests.programs import AVX2, AVX512
from tilewright.cost.cpu import nominal_rates, rates_of
from tilewright.hw.cpu import CpuMachine
from tilewright.hw.gpu import A100, H200
from tilewright.hw.machine import Machine, from_text, to_text
from tilewright.measure import calibration, gpu_calibration
from tilewright.measure.calibration import Calibration
from tilewright.measure.gpu_calibration import GpuCalibration
from tilewright.measure.pool import calibrations
from tilewright.measure.pool.actors import Timer
from tilewright.measure.pool.wire import Hello, encode

pytest.importorskip("ray")  # its version must agree on all nodes


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef" * 4)
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))


def measured(machine: CpuMachine, faster: float) -> Calibration:
    """Of a machine whose cores reach so many times the nominal rates."""
    usual = calibration.nominal(machine)

    def times(speeds: calibration.Speeds) -> calibration.Speeds:
        rates = msgspec.structs.asdict(speeds)
        return calibration.Speeds(
            rates.pop("threads"), **{name: faster * rate for name, rate in rates.items()}
        )

    return msgspec.structs.replace(usual, measured=True, one=times(usual.one), all=times(usual.all))


def as_json(record: msgspec.Struct) -> str:
    return msgspec.json.encode(record).decode()


def node(name: str, machine: CpuMachine, record: str) -> TestTimer:
    class Node(TestTimer):
        def hello(self) -> bytes:
            hello = msgspec.msgpack.decode(super().hello(), type=Hello)
            return encode(msgspec.structs.replace(hello, machine=to_text(machine), calibration=record))

    return Node(name)


def test_machines_of_one_label_are_calibrated_apart() -> None:
    wide = replace(AVX512, cpu=AVX2.cpu)
    actors = {
        f"timer/node0/{LABEL}/0": lambda: node("node0", AVX2, ""),
        f"timer/node1/{LABEL}/0": lambda: node("node1", AVX2, as_json(measured(AVX2, 1.5))),
        f"timer/node2/{LABEL}/0": lambda: node("node2", wide, as_json(measured(wide, 0.7))),
    }
    workers = ThreadWorkers(actors)
    workers.refresh(20.0)
    for machine, faster in ((AVX2, 1.5), (wide, 0.7)):
        text = to_text(machine)
        assert rates_of(machine) == nominal_rates(machine)
        variant = next(w.variant for w in workers.timers(text))
        assert workers.choose(f"{LABEL}#{variant}") == text
        calibrations.keep(text, workers.calibration(text))
        assert rates_of(machine).one.hertz == pytest.approx(faster * nominal_rates(machine).one.hertz)


def test_a_timer_sends_what_was_measured_of_its_machine() -> None:
    timer = Timer("node", "cpu:here", None, machine=to_text(AVX2))
    assert msgspec.msgpack.decode(timer.hello(), type=Hello).calibration == ""
    calibration.keep(AVX2, measured(AVX2, 1.5))
    sent = msgspec.msgpack.decode(timer.hello(), type=Hello).calibration
    assert msgspec.json.decode(sent, type=Calibration) == measured(AVX2, 1.5)
    pseudo = Timer("node", "cpu:pseudo", None, "pseudo", to_text(AVX2))
    assert msgspec.msgpack.decode(pseudo.hello(), type=Hello).calibration == ""


def test_what_this_machine_has_measured_is_kept() -> None:
    calibration.keep(AVX2, measured(AVX2, 1.2))
    calibrations.keep(to_text(AVX2), as_json(measured(AVX2, 1.5)))
    assert calibration.stored(AVX2) == measured(AVX2, 1.2)


@pytest.mark.parametrize(
    "record",
    [
        "",
        "{}",
        "[1, 2",
        as_json(measured(AVX512, 1.5)),
        as_json(msgspec.structs.replace(measured(AVX2, 1.5), version=calibration.VERSION + 1)),
        as_json(measured(AVX2, -1.0)),
    ],
    ids=["none", "empty", "broken", "another machine's", "another version's", "implausible"],
)
def test_a_calibration_that_is_no_use_is_dropped(record: str) -> None:
    calibrations.keep(to_text(AVX2), record)
    assert calibration.stored(AVX2) is None


@pytest.mark.parametrize("machine", [AVX2, AVX512, A100, H200], ids=lambda machine: machine.kind)
def test_the_key_of_a_machine_survives_its_journey(machine: Machine) -> None:
    """Records that a driver writes for a device are found on the device's own machine."""
    assert calibration.machine_key(from_text(to_text(machine))) == calibration.machine_key(machine)


def test_a_gpus_calibration() -> None:
    key = gpu_calibration._key(H200)
    record = GpuCalibration(gpu_calibration.VERSION, key, 3e12, 6e14)
    calibrations.keep(to_text(A100), as_json(record))
    assert gpu_calibration.stored(A100) is None
    calibrations.keep(to_text(H200), as_json(record))
    assert gpu_calibration.stored(H200) == record
    assert calibrations.stored(to_text(H200)) == as_json(record)
