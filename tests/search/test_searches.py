"""What tells the searches apart: how they use the model."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from tests.search.spaces import THREADS, costs, large, run, searcher, small, timed
from tilewright.cost.analytical import Analytical
from tilewright.search.belief import Belief
from tilewright.search.searcher import diverse, scores
from tilewright.search.searches import SEARCHES
from tilewright.space.outcome import Outcome
from tilewright.space.space import Config
from tilewright.tune.choose import best_of


def best_after(name: str, trials: int, seed: int) -> float:
    candidates = large()
    asked = run(searcher(name, candidates, seed), trials // 4, 4, lambda batch: timed(candidates, batch))
    return min(costs(candidates).seconds(config) for config in asked)


@pytest.mark.parametrize("name", ["guided", "annealing", "evolution"])
def test_with_a_model_that_is_right_it_beats_random(name: str) -> None:
    """The model predicts exactly what is measured."""
    random = min(best_after("random", 24, seed) for seed in range(2))
    assert best_after(name, 8, 0) < random


def test_guided_finds_the_best_of_a_large_space_at_once_if_the_model_is_right() -> None:
    found = best_of(large().work)
    assert found is not None
    assert best_after("guided", 4, 0) <= 1.03 * found[0]


def test_guided_first_asks_for_what_is_predicted_best() -> None:
    candidates = small()
    best = min(candidates.configs(), key=costs(candidates).seconds)
    assert SEARCHES["guided"](candidates, Analytical(candidates, THREADS), 0).ask(1) == [best]


def test_guided_finds_what_a_wrong_model_hides() -> None:
    """Without prefetching, everything is faster than predicted: trials of some such configs show it."""
    candidates = large()

    def told(batch: list[Config]) -> list[Outcome]:
        predicted = [costs(candidates).seconds(config) for config in batch]
        return [
            Outcome(config, seconds * (0.6 if dict(config.values).get("prefetch") == 0 else 1.0))
            for config, seconds in zip(batch, predicted, strict=True)
        ]

    later = [
        config for seed in range(3) for config in run(searcher("guided", candidates, seed), 5, 4, told)[8:]
    ]
    plain = [config for config in later if dict(config.values).get("prefetch") == 0]
    assert len(plain) >= 2 / 3 * len(later)  # with one seed it may come across the first one late


def test_guided_stops_when_the_model_knows_everything() -> None:
    candidates = small()
    search = searcher("guided", candidates)
    rounds = 0
    while not search.done:
        search.tell(timed(candidates, search.ask(4)))
        rounds += 1
    gain = search.expected_gain
    assert (gain is not None and gain < 0.01) or not search.ask(1)
    assert rounds < 12


def test_a_belief_agrees_with_what_was_measured() -> None:
    """Everything takes twice as long as predicted: after a few trials that is believed of all others, more surely."""
    candidates = large()
    model = costs(candidates)
    configs = candidates.sample(Random(0), 60)
    measured = {config: 2 * model.seconds(config) for config in configs[:24]}
    rest = [config for config in configs[24:] if config.template == "contraction"]
    before = Belief.of(candidates, model, rest, {}, len(rest))
    after = Belief.of(candidates, model, rest, measured, len(rest))
    assert _spread(after) < _spread(before)
    errors = [after.mean[at] - np.log(2 * model.seconds(config)) for at, config in enumerate(after.configs)]
    assert np.abs(errors).mean() < 0.25 * np.log(2)


def _spread(belief: Belief) -> float:
    return float(np.sqrt((belief.root**2).sum(axis=1)).mean())


def test_a_batch_is_good_and_diverse() -> None:
    candidates = small()
    configs = list(candidates.configs())
    ranked = list(zip(configs, map(float, scores(costs(candidates), configs)), strict=True))
    best = max(ranked, key=lambda pair: pair[1])[0]
    plain, spread = diverse(ranked, 6, worth=0.0), diverse(ranked, 6, worth=10.0)
    assert plain[0] == best
    assert len({config["vectors"] for config in spread}) >= len({config["vectors"] for config in plain})
    assert len(set(spread)) == 6


def test_doubt_widens_what_is_believed_possible_and_not_what_is_believed() -> None:
    candidates = small()
    fresh = list(candidates.configs())[:12]
    belief = Belief.of(candidates, Analytical(candidates, THREADS), fresh, {}, 12)
    sure, unsure = (belief.draw(np.random.default_rng(0), 400, doubt) for doubt in (1.0, 2.0))
    assert np.allclose(unsure - belief.mean, 2 * (sure - belief.mean))
