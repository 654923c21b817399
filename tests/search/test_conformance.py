"""What every search must do, whatever it thinks of configs. A new one in SEARCHES is held to it without a line here.

Tasks, spaces and models are real. The time of a config is what the analytical model predicts: a cost that has the shape
of a real one, is known without a trial, and never changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from tests.space.checked import Inputs
from tilewright.cost.analytical import Analytical
from tilewright.cost.boosted import Boosted
from tilewright.graph.op import apply
from tilewright.hw import host
from tilewright.search import SEARCHES, Searcher
from tilewright.space.candidates import Candidates
from tilewright.space.outcome import FAILURES, Outcome
from tilewright.space.space import Config
from tilewright.space.template import Work

THREADS = 2


@cache
def large() -> Candidates:
    """A matrix product: hundreds of thousands of combinations."""
    x = Inputs()
    task = x.task(apply("matmul", x(512, 512), x(512, 512, constant=True)))
    return Candidates.of(Work(task, host()), sketches=False)


@cache
def small() -> Candidates:
    """Attention: some tens of configs."""
    x = Inputs()
    task = x.task(apply("attention", *(x(1, 2, 128, 64) for _ in range(3)), causal=False, scale=0.25))
    return Candidates.of(Work(task, replace(host(), cpu="icelake-server")), sketches=False)


@cache
def only_default() -> Candidates:
    x = Inputs()
    return Candidates.of(Work(x.task(apply("softmax", x(8, 24), axis=1)), host()), sketches=False)


@cache
def costs(candidates: Candidates) -> Analytical:
    return Analytical(candidates, THREADS)


def searcher(name: str, candidates: Candidates, seed: int = 0) -> Searcher:
    return SEARCHES[name](candidates, Analytical(candidates, THREADS), seed)


def timed(candidates: Candidates, configs: list[Config]) -> list[Outcome]:
    return [Outcome(config, costs(candidates).seconds(config)) for config in configs]


def failed(configs: list[Config]) -> list[Outcome]:
    return [Outcome(config, None, FAILURES[place % len(FAILURES)]) for place, config in enumerate(configs)]


def run(
    search: Searcher, rounds: int, count: int, told: Callable[[list[Config]], list[Outcome]]
) -> list[Config]:
    asked: list[Config] = []
    for _ in range(rounds):
        batch = search.ask(count)
        asked += batch
        search.tell(told(batch))
    return asked


@pytest.fixture(params=sorted(SEARCHES))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_configs_are_legal_and_distinct_and_never_asked_for_again(name: str) -> None:
    candidates = large()
    asked = run(searcher(name, candidates), 4, 5, lambda batch: timed(candidates, batch))
    assert len(asked) == 20
    assert len(set(asked)) == len(asked)
    assert all(candidates.is_legal(config) for config in asked)


def test_a_small_space_is_asked_for_entirely_and_then_nothing_more(name: str) -> None:
    candidates = small()
    everything = set(candidates.configs())
    search = searcher(name, candidates)
    asked = run(search, 1 + len(everything) // 25, 25, lambda batch: timed(candidates, batch))
    assert set(asked) == everything and len(asked) == len(everything)
    assert search.ask(3) == []
    assert search.done


def test_a_space_of_one_config(name: str) -> None:
    candidates = only_default()
    search = searcher(name, candidates)
    (asked,) = search.ask(4)
    assert asked == Config("default", ())
    search.tell(timed(candidates, [asked]))
    assert search.ask(4) == [] and search.done


def test_the_same_seed_asks_the_same(name: str) -> None:
    candidates = large()
    first, second = (
        run(searcher(name, candidates, seed=3), 3, 4, lambda batch: timed(candidates, batch))
        for _ in range(2)
    )
    assert first == second


def test_it_goes_on_when_everything_fails(name: str) -> None:
    candidates = small()
    search = searcher(name, candidates)
    asked = run(search, 3, 8, failed)
    assert len(set(asked)) == len(asked) == 24
    gain = search.expected_gain
    assert gain is None or 0.0 <= gain <= 1.0


def test_it_goes_on_when_everything_fails_on_a_model_that_learns(name: str) -> None:
    candidates = small()
    search = SEARCHES[name](candidates, Boosted(candidates, THREADS), 0)
    asked = run(search, 3, 4, failed)
    assert len(set(asked)) == 12


def test_what_it_is_told_unasked_is_never_asked_for(name: str) -> None:
    candidates = small()
    known = list(candidates.configs())[::2]
    search = searcher(name, candidates)
    search.tell(timed(candidates, known))
    asked = run(search, 4, 20, lambda batch: timed(candidates, batch))
    assert not set(asked) & set(known)
    assert set(asked) | set(known) == set(candidates.configs())


def test_outcomes_of_configs_that_are_none_of_its_are_passed_over(name: str) -> None:
    """Such as those of another version's records."""
    candidates = small()
    search = searcher(name, candidates)
    strange = Config("winograd", (("outputs", 99),))
    foreign = Config.of("attention", {"vectors": 1, "keys": -7, "stage": False})
    search.tell([Outcome(strange, 1e-9), Outcome(foreign, 1e-9), Outcome(strange, None, "crash")])
    assert len(search.ask(4)) == 4
    assert search.expected_gain is None


def test_nothing_is_asked_for_where_nothing_is_wanted(name: str) -> None:
    search = searcher(name, small())
    assert search.ask(0) == []
    search.tell([])
    assert not search.done
    assert len(search.ask(1)) == 1


def test_the_gain_it_expects_is_a_share(name: str) -> None:
    candidates = large()
    search = searcher(name, candidates)
    assert search.expected_gain is None
    run(search, 2, 4, lambda batch: timed(candidates, batch))
    gain = search.expected_gain
    assert gain is None or 0.0 <= gain <= 1.0


def test_times_that_are_no_times_do_no_harm(name: str) -> None:
    candidates = small()
    search = searcher(name, candidates)
    batch = search.ask(3)
    search.tell(
        [Outcome(config, seconds) for config, seconds in zip(batch, (0.0, math.inf, 1e-3), strict=True)]
    )
    assert len(search.ask(3)) == 3
