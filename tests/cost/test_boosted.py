"""The model that learns: from few outcomes, never for the worse, and the same from the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from random import Random

import numpy as np
import pytest

from tests.cost.tables import Table, tables
from tests.machines import ICE_LAKE
from tests.space.checked import Inputs
from tilewright.cost.analytical import VALID, Analytical
from tilewright.cost.boosted import Boosted, Experience, Validity
from tilewright.cost.model import Prediction
from tilewright.cost.smooth import Smooth
from tilewright.cost.trees import Trees, lightgbm
from tilewright.graph.op import apply
from tilewright.space.candidates import Candidates
from tilewright.space.outcome import Outcome
from tilewright.space.space import Config
from tilewright.space.template import Work

ROOT = Path(__file__).resolve().parents[2]


def product(m: int, n: int, k: int) -> Candidates:
    x = Inputs()
    return Candidates.of(
        Work(x.task(apply("matmul", x(m, k), x(k, n, constant=True))), ICE_LAKE), sketches=False
    )


@pytest.fixture(scope="module")
def space() -> Candidates:
    return product(64, 96, 128)


@pytest.fixture(scope="module")
def configs(space: Candidates) -> list[Config]:
    found = [config for config in space.sample(Random(1), 100) if config.template == "contraction"]
    assert len(found) > 30
    return found


def as_predicted(space: Candidates, configs: list[Config], factor: float = 1.0) -> list[Outcome]:
    seconds = Analytical(space, 2).predict(configs).seconds
    return [Outcome(config, float(time * factor)) for config, time in zip(configs, seconds, strict=True)]


def slow_where(
    space: Candidates, configs: list[Config], knob: str, value: object, times: float = 1.5
) -> list[Outcome]:
    """As predicted, except that one value of a knob costs so many times as much."""
    return [
        Outcome(o.config, o.seconds * (times if o.config[knob] == value else 1.0))
        for o in as_predicted(space, configs)
        if o.seconds is not None
    ]


def errors(predicted: Prediction, seconds: np.ndarray) -> float:
    """Of logarithms, but for a common factor."""
    return float(np.std(np.log(predicted.seconds) - np.log(seconds)))


def agreement(predicted: Prediction, seconds: np.ndarray) -> float:
    """Of ranks: the correlation."""
    ranks = [np.argsort(np.argsort(values)) for values in (predicted.seconds, seconds)]
    return float(np.corrcoef(*ranks)[0, 1])


# -- laws -------------------------------------------------------------------------------------------------------------


def test_with_nothing_learned_it_says_what_the_analytical_model_says(
    space: Candidates, configs: list[Config]
) -> None:
    for objective in ("squared", "rank"):
        ours = Boosted(space, 2, objective=objective).predict(configs)
        theirs = Analytical(space, 2).predict(configs)
        np.testing.assert_array_equal(ours.seconds, theirs.seconds)
        assert [len(part) for part in ours] == [len(configs)] * 3


@pytest.mark.parametrize("objective", ["squared", "rank"])
def test_the_order_of_outcomes_does_not_matter(
    space: Candidates, configs: list[Config], objective: str
) -> None:
    outcomes = slow_where(space, configs[:14], "unroll", 1)
    one, other = (Boosted(space, 2, objective=objective, seed=3) for _ in range(2))
    one.update(outcomes)
    for outcome in reversed(outcomes):
        other.update([outcome])
    for a, b in zip(one.predict(configs), other.predict(configs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9)


def test_what_was_asked_before_does_not_matter(space: Candidates, configs: list[Config]) -> None:
    outcomes = slow_where(space, configs[:14], "unroll", 1)
    one, other = Boosted(space, 2), Boosted(space, 2)
    one.update(outcomes)
    for at in range(len(outcomes)):
        other.predict([Config("default", ()), *configs[at:]])
        other.update([outcomes[at]])
    for a, b in zip(one.predict(configs), other.predict(configs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9)


def test_a_machine_that_is_slower_in_everything_changes_no_order(
    space: Candidates, configs: list[Config]
) -> None:
    model = Boosted(space, 2)
    model.update(as_predicted(space, configs[:12], factor=1.8))
    ours, theirs = model.predict(configs[12:]).seconds, Analytical(space, 2).predict(configs[12:]).seconds
    assert errors(model.predict(configs[12:]), theirs) < 0.02
    assert 1.5 < np.exp(np.mean(np.log(ours / theirs))) < 1.85


def test_noise_teaches_nothing(space: Candidates, configs: list[Config]) -> None:
    rng = np.random.default_rng(0)
    outcomes = [
        Outcome(o.config, o.seconds * float(np.exp(rng.normal(0, 0.05))))
        for o in as_predicted(space, configs[:20])
        if o.seconds is not None
    ]
    model = Boosted(space, 2)
    model.update(outcomes)
    unseen = configs[20:]
    assert errors(model.predict(unseen), Analytical(space, 2).predict(unseen).seconds) < 0.035


def test_it_learns_what_the_analytical_model_does_not_know(space: Candidates, configs: list[Config]) -> None:
    outcomes = slow_where(space, configs, "unroll", 1, times=3.0)
    truth = np.array([outcome.seconds for outcome in outcomes])
    model, ranking = Boosted(space, 2), Boosted(space, 2, objective="rank")
    for one in (model, ranking):
        one.update(outcomes[:24])
    before = Analytical(space, 2).predict(configs[24:])
    assert errors(model.predict(configs[24:]), truth[24:]) < 0.9 * errors(before, truth[24:])
    seen = Analytical(space, 2).predict(configs[:24])
    assert agreement(ranking.predict(configs[:24]), truth[:24]) > agreement(seen, truth[:24])


def test_it_is_surer_of_what_it_has_seen(space: Candidates, configs: list[Config]) -> None:
    model = Boosted(space, 2)
    model.update(slow_where(space, configs[:10], "unroll", 1))
    spread = model.predict(configs).spread
    assert np.median(spread[:10]) < np.median(spread[10:])


def test_the_prior_can_be_left_out(space: Candidates, configs: list[Config]) -> None:
    model = Boosted(space, 2, prior=False)
    model.update(as_predicted(space, configs[:20]))
    predicted, truth = model.predict(configs[20:]), Analytical(space, 2).predict(configs[20:]).seconds
    assert np.corrcoef(np.log(predicted.seconds), np.log(truth))[0, 1] > 0.4


def test_what_other_tasks_have_taught_is_there_from_the_first_config(
    space: Candidates, configs: list[Config]
) -> None:
    other = product(48, 128, 256)
    theirs = [config for config in other.sample(Random(2), 140) if config.template == "contraction"]
    experience = Experience(other, 2, slow_where(other, theirs, "unroll", 1))
    outcomes = slow_where(space, configs, "unroll", 1)
    truth = np.array([outcome.seconds for outcome in outcomes])
    warm = Boosted(space, 2, warm=[experience])
    cold = errors(Analytical(space, 2).predict(configs), truth)
    assert errors(warm.predict(configs), truth) < 0.9 * cold


# -- measured times ---------------------------------------------------------------------------------------------------


def held_out(table: Table, model: Analytical | Boosted, seen: int, seed: int) -> tuple[float, float]:
    """(error, agreement) on the configs that it was not told of."""
    order = np.random.default_rng(seed).permutation(len(table.configs))
    model.update(table.outcomes(order[:seen]))
    rest = order[seen:]
    predicted = model.predict([table.configs[position] for position in rest])
    return errors(predicted, table.seconds[rest]), agreement(predicted, table.seconds[rest])


def over_tables(model: type[Analytical] | type[Boosted], seen: int) -> tuple[float, float]:
    results = [
        held_out(table, model(table.candidates, table.threads), seen, seed)
        for table in tables()
        if len(table.configs) >= seen + 10
        for seed in range(2)
    ]
    error, agreement = np.mean(results, axis=0)
    return float(error), float(agreement)


def test_residuals_that_were_measured_are_learned() -> None:
    """On tables of a real machine, nearer the times and ranks from sixteen outcomes than without, and from four hardly
    farther."""
    assert over_tables(Boosted, 4)[0] < 1.04 * over_tables(Analytical, 4)[0]
    error, agreement = over_tables(Boosted, 16)
    error_before, agreement_before = over_tables(Analytical, 16)
    assert error < 0.97 * error_before
    assert agreement > agreement_before


# -- failures ---------------------------------------------------------------------------------------------------------


def test_without_failures_a_config_is_as_likely_to_work_as_any() -> None:
    validity = Validity()
    config = Config.of("contraction", {"rows": 4})
    assert validity.of([config])[0] == pytest.approx(VALID)
    for _ in range(50):
        validity.add(Outcome(config, 1e-3))
    assert validity.of([config])[0] > VALID


def test_the_value_of_a_knob_that_fails_is_found_out(space: Candidates, configs: list[Config]) -> None:
    model = Boosted(space, 2)
    outcomes = [
        Outcome(config, None, "crash") if config["prefetch"] == 2 else Outcome(config, 1e-3)
        for config in configs[:24]
    ]
    assert 0 < sum(outcome.seconds is None for outcome in outcomes) < 24
    model.update(outcomes)
    valid = model.predict(configs).valid
    bad = np.array([config["prefetch"] == 2 for config in configs])
    assert valid[bad].max() < valid[~bad].min()
    assert valid[bad].max() < 0.3 and valid[~bad].min() > 0.9


def test_failures_alone_do_not_disturb_the_times(space: Candidates, configs: list[Config]) -> None:
    model = Boosted(space, 2)
    model.update([Outcome(config, None, "timeout") for config in configs[:5]])
    np.testing.assert_array_equal(
        model.predict(configs).seconds, Analytical(space, 2).predict(configs).seconds
    )


# -- its parts --------------------------------------------------------------------------------------------------------


def test_similarity_keeps_to_zero_far_from_the_samples() -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(12, 4))
    model = Smooth(rows, np.full(12, 0.3), np.ones(12))
    near, far = model.predict(rows)[0].mean(), model.predict(rows + 50)[0].mean()
    assert near > 0.15 and abs(far) < 1e-6
    assert model.predict(rows + 50)[1].min() > model.predict(rows)[1].max()


def test_rows_may_lack_numbers() -> None:
    rows = np.array(
        [[1.0, np.nan, np.nan], [2.0, np.nan, np.nan], [np.nan, 3.0, np.nan], [np.nan, 5.0, np.nan]]
    )
    mean, spread = Smooth(rows, np.array([0.1, -0.1, 0.2, -0.2]), np.ones(4)).predict(rows)
    assert np.isfinite(mean).all() and (spread > 0).all()


def test_trees_say_what_they_would_of_samples_they_have_not_seen() -> None:
    library = lightgbm()
    if library is None:
        pytest.skip("lightgbm cannot be loaded here")
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(40, 3))
    targets = np.where(rows[:, 0] > 0, 0.3, -0.3)
    one, other = (Trees(library, rows, targets, np.ones(40), seed=5) for _ in range(2))
    np.testing.assert_array_equal(one.predict(rows), other.predict(rows))
    known = ~np.isnan(one.left_out)
    assert known.sum() > 20
    assert np.mean(np.sign(one.left_out[known]) == np.sign(targets[known])) > 0.8


WITHOUT = """
import sys, warnings
sys.modules["lightgbm"] = None  # importing it fails
from tests.cost.tables import tables
from tilewright.cost.boosted import Boosted
table = tables()[0]
model = Boosted(table.candidates, 2)
before = model.predict(table.configs).seconds
model.update(table.outcomes(range(16)))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    after = model.predict(table.configs).seconds
    again = Boosted(table.candidates, 2)
    again.update(table.outcomes(range(16)))
    again.predict(table.configs)
assert (after > 0).all() and (after != before).all()
print(*(str(warning.message) for warning in caught))
"""


def test_without_lightgbm_the_analytical_model_searches_and_says_so_once() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("searches with the analytical model") == 1
    assert "pip install 'tilewright[tune]'" in done.stdout and "libgomp" in done.stdout
