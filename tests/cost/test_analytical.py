"""The model that needs no measurement, behind the interface of all models."""

from __future__ import annotations

import math
from pathlib import Path
from random import Random

import numpy as np
import pytest

from tests.cost.tables import tables
from tests.space.checked import Inputs
from tilewright.cost import cpu
from tilewright.cost.analytical import Analytical
from tilewright.cost.predictor import CALL_SECONDS
from tilewright.cost.program import terms_of
from tilewright.errors import InternalError
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.hw import host
from tilewright.loops.ir import Program
from tilewright.measure import calibration
from tilewright.space.candidates import Candidates
from tilewright.space.outcome import Outcome
from tilewright.space.space import Config, Space
from tilewright.space.template import Terms, Work

DEFAULT = Config("default", ())
LANES = host().vector_bytes // 4


def product(m: int, n: int, k: int) -> Task:
    x = Inputs()
    return x.task(apply("matmul", x(m, k), x(k, n, constant=True)))


def candidates(task: Task) -> Candidates:
    return Candidates.of(Work(task, host()), sketches=False)


def test_a_prediction_has_one_element_for_each_config() -> None:
    found = candidates(product(24, 32, 40))
    configs = found.sample(Random(0), 7)
    predicted = Analytical(found, 2).predict(configs)
    assert [len(part) for part in predicted] == [7, 7, 7]
    assert (predicted.seconds > 0).all() and (predicted.spread > 0).all() and (predicted.valid > 0.9).all()
    assert [len(part) for part in Analytical(found, 2).predict([])] == [0, 0, 0]
    assert (predicted.optimistic(1.0) < predicted.seconds).all()


def test_it_learns_nothing() -> None:
    found = candidates(product(24, 32, 40))
    model = Analytical(found, 2)
    before = model.predict([DEFAULT])
    model.update([Outcome(DEFAULT, 1.0)])
    np.testing.assert_array_equal(model.predict([DEFAULT]).seconds, before.seconds)


def test_a_template_that_counts_nothing_is_counted_in_its_program() -> None:
    found = candidates(product(24, 32, 40))
    counted = terms_of(found.program(DEFAULT), host(), found.work.task.constants)
    assert Analytical(found, 2).terms(DEFAULT) == counted
    assert counted.from_memory == 32 * 40 * 4  # the weight is constant


class Broken:
    """A template whose configs are not as legal as its space says."""

    space = Space("broken", (), lambda values: True)

    def terms(self, config: Config) -> Terms | None:
        return None

    def program(self, config: Config) -> Program:
        raise InternalError("there is no such program")


def test_what_has_no_program_is_not_valid() -> None:
    found = candidates(product(24, 32, 40))
    found.__dict__["applied"] = (Broken(),)
    predicted = Analytical(found, 2).predict([Config("broken", ())])
    assert predicted.seconds[0] == math.inf and predicted.valid[0] == 0


# Products of which each is best computed by another way: tiny ones, narrow ones, ones with many rows.
@pytest.mark.parametrize(
    "shape", [(1, 4, 4), (3, 2, 2), (8, 8, 32), (64, 9, 5), (128, 3, 128), (64, 64, 64), (256, 256, 256)]
)
def test_the_default_program_is_on_the_scale_of_the_templates(shape: tuple[int, int, int]) -> None:
    """Of tasks that both compute about equally well, neither is predicted far off the other."""
    found = candidates(product(*shape))
    model = Analytical(found, 2)
    default = model.seconds(DEFAULT)
    best = min(model.seconds(config) for config in found.sample(Random(0), 200) if config != DEFAULT)
    assert 0.5 < default / best < 4
    assert min(default, best) > CALL_SECONDS


def test_the_choice_without_measurement_is_near_the_best() -> None:
    """Over tables that were measured once: what the constants in `cost/cpu.py` are for."""
    shares = []
    for table in tables():
        predicted = Analytical(table.candidates, table.threads).predict(table.configs).seconds
        shares.append(table.seconds.min() / table.seconds[np.argmin(predicted)])
    assert np.mean(shares) > 0.85 and min(shares) > 0.7, shares


# -- the machine ------------------------------------------------------------------------------------------------------


def speeds(threads: int, flops: float, scale: float) -> calibration.Speeds:
    """Of a core with `flops`, and `scale` times a usual one's memory."""
    each = [figure * scale * threads for figure in (3e11, 1.2e11, 3e10, 1e10, 1e10)]
    return calibration.Speeds(threads, flops * threads, *each)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    return tmp_path


def keep(flops: float, scale: float) -> None:
    machine = host()
    sizes = calibration.Capacities(machine.caches.l1, machine.caches.l2_per_core, machine.caches.l3)
    found = calibration.Calibration(
        calibration.VERSION,
        calibration.machine_key(machine),
        True,
        sizes,
        speeds(1, flops, scale),
        speeds(2, flops, scale),
    )
    calibration.keep(machine, found)


def test_without_a_calibration_rates_are_nominal(folder: Path) -> None:
    assert cpu.rates_of(host()) == cpu.nominal_rates(host())


def test_a_calibrated_machine_is_predicted_by_its_own_rates(folder: Path) -> None:
    most = host().throughput
    peak = most.hertz * most.fmas * (2 if host().has_fma else 1) * LANES
    keep(peak, 3.0)
    found = candidates(product(2, 1024, 1024))  # little arithmetic for each weight
    usual = Analytical(found, 2).seconds(DEFAULT)
    keep(peak, 1.0)
    assert Analytical(found, 2).seconds(DEFAULT) > 1.2 * usual


def test_a_calibration_that_cannot_be_true_is_believed_as_far_as_it_can(folder: Path) -> None:
    keep(1e9, 1e-3)
    rates, nominal = cpu.rates_of(host()), cpu.nominal_rates(host())
    assert rates.one.hertz == nominal.one.hertz / 2 and rates.all.l2 == nominal.all.l2 / 2
