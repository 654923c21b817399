"""The conformance suite of searches.

Tasks, spaces and models are real. The time of a config is the analytical prediction: realistic, known without a
trial, and constant.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

from tilewright.cost.analytical import Analytical
from tilewright.cost.boosted import Boosted
from tilewright.cost.model import CostModel
from tilewright.graph.op import apply
from tilewright.hw import CpuMachine
from tilewright.search.searcher import Searcher
from tilewright.space.candidates import Candidates
from tilewright.space.outcome import FAILURES, Outcome
from tilewright.space.space import Config
from tilewright.space.template import Work
from tilewright.testing.problems import Inputs

_THREADS = 2
# The same everywhere, so that spaces are too.
_MACHINE = CpuMachine("x86_64-unknown-linux-gnu", "icelake-server", ("avx2", "fma"), (), 32, 16, True, 2)


@cache
def _large() -> Candidates:
    """A GEMM: hundreds of thousands of combinations."""
    x = Inputs()
    task = x.task(apply("matmul", x(512, 512), x(512, 512, constant=True)))
    return Candidates.of(Work(task, _MACHINE), sketches=False)


@cache
def _small() -> Candidates:
    """Attention: some tens of configs."""
    x = Inputs()
    task = x.task(apply("attention", *(x(1, 2, 128, 64) for _ in range(3)), causal=False, scale=0.25))
    return Candidates.of(Work(task, _MACHINE), sketches=False)


@cache
def _only_default() -> Candidates:
    x = Inputs()
    return Candidates.of(Work(x.task(apply("softmax", x(8, 24), axis=1)), _MACHINE), sketches=False)


@cache
def _costs(candidates: Candidates) -> Analytical:
    return Analytical(candidates, _THREADS)


def _timed(candidates: Candidates, configs: list[Config]) -> list[Outcome]:
    return [Outcome(config, _costs(candidates).seconds(config)) for config in configs]


def _failed(configs: list[Config]) -> list[Outcome]:
    return [
        Outcome(config, None, FAILURES[position % len(FAILURES)]) for position, config in enumerate(configs)
    ]


def _run(
    search: Searcher, rounds: int, count: int, told: Callable[[list[Config]], list[Outcome]]
) -> list[Config]:
    asked: list[Config] = []
    for _ in range(rounds):
        batch = search.ask(count)
        asked += batch
        search.tell(told(batch))
    return asked


class SearchSuite:
    """Inherit it, and implement `make`."""

    def make(self, candidates: Candidates, model: CostModel, seed: int) -> Searcher:
        raise NotImplementedError

    def _searcher(self, candidates: Candidates, seed: int = 0) -> Searcher:
        return self.make(candidates, Analytical(candidates, _THREADS), seed)

    def test_configs_are_legal_and_distinct_and_never_asked_for_again(self) -> None:
        candidates = _large()
        asked = _run(self._searcher(candidates), 4, 5, lambda batch: _timed(candidates, batch))
        assert len(asked) == 20
        assert len(set(asked)) == len(asked)
        assert all(candidates.is_legal(config) for config in asked)

    def test_a_small_space_is_asked_for_entirely_and_then_nothing_more(self) -> None:
        candidates = _small()
        everything = set(candidates.configs())
        search = self._searcher(candidates)
        asked = _run(search, 1 + len(everything) // 25, 25, lambda batch: _timed(candidates, batch))
        assert set(asked) == everything and len(asked) == len(everything)
        assert search.ask(3) == []
        assert search.done

    def test_a_space_of_one_config(self) -> None:
        candidates = _only_default()
        search = self._searcher(candidates)
        (asked,) = search.ask(4)
        assert asked == Config("default", ())
        search.tell(_timed(candidates, [asked]))
        assert search.ask(4) == [] and search.done

    def test_the_same_seed_asks_the_same(self) -> None:
        candidates = _large()
        first, second = (
            _run(self._searcher(candidates, seed=3), 3, 4, lambda batch: _timed(candidates, batch))
            for _ in range(2)
        )
        assert first == second

    def test_it_goes_on_when_everything_fails(self) -> None:
        search = self._searcher(_small())
        asked = _run(search, 3, 8, _failed)
        assert len(set(asked)) == len(asked) == 24
        gain = search.expected_gain
        assert gain is None or 0.0 <= gain <= 1.0

    def test_it_goes_on_when_everything_fails_on_a_model_that_learns(self) -> None:
        candidates = _small()
        search = self.make(candidates, Boosted(candidates, _THREADS), 0)
        assert len(set(_run(search, 3, 4, _failed))) == 12

    def test_what_it_is_told_unasked_is_never_asked_for(self) -> None:
        candidates = _small()
        known = list(candidates.configs())[::2]
        search = self._searcher(candidates)
        search.tell(_timed(candidates, known))
        rounds = 1 + len(list(candidates.configs())) // 20
        asked = _run(search, rounds, 20, lambda batch: _timed(candidates, batch))
        assert not set(asked) & set(known)
        assert set(asked) | set(known) == set(candidates.configs())

    def test_outcomes_of_configs_that_are_none_of_its_are_passed_over(self) -> None:
        """Outcomes of unknown configs are ignored, such as those of another version's records."""
        search = self._searcher(_small())
        strange = Config("winograd", (("outputs", 99),))
        foreign = Config.of("attention", {"vectors": 1, "keys": -7, "stage": False})
        search.tell([Outcome(strange, 1e-9), Outcome(foreign, 1e-9), Outcome(strange, None, "crash")])
        assert len(search.ask(4)) == 4
        assert search.expected_gain is None

    def test_nothing_is_asked_for_where_nothing_is_wanted(self) -> None:
        search = self._searcher(_small())
        assert search.ask(0) == []
        search.tell([])
        assert not search.done
        assert len(search.ask(1)) == 1

    def test_the_gain_it_expects_is_a_share(self) -> None:
        candidates = _large()
        search = self._searcher(candidates)
        assert search.expected_gain is None
        _run(search, 2, 4, lambda batch: _timed(candidates, batch))
        gain = search.expected_gain
        assert gain is None or 0.0 <= gain <= 1.0

    def test_times_that_are_no_times_do_no_harm(self) -> None:
        search = self._searcher(_small())
        batch = search.ask(3)
        search.tell(
            [Outcome(config, seconds) for config, seconds in zip(batch, (0.0, math.inf, 1e-3), strict=True)]
        )
        assert len(search.ask(3)) == 3
