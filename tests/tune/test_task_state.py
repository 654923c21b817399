"""What a task asks of a search and makes of measurements, where a search or a cost model of a user's own is faulty."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.tune.test_tuner import Told, product, tuned, varied
from tilewright.cost.analytical import Analytical
from tilewright.cost.model import Prediction
from tilewright.db.database import Database
from tilewright.errors import TilewrightWarning
from tilewright.extend import (
    register_cost_model,
    register_search,
    unregister_cost_model,
    unregister_search,
)
from tilewright.hw import host
from tilewright.measure.jobs import Job
from tilewright.measure.measurement import Measurement
from tilewright.search import Search
from tilewright.space.outcome import Outcome
from tilewright.space.space import Config
from tilewright.space.template import Work
from tilewright.tune.effort import EFFORTS, Effort, Tuning
from tilewright.tune.experience import PastRecords
from tilewright.tune.task_state import TaskState
from tilewright.tune.tunable import TunableTask


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    monkeypatch.setitem(EFFORTS, "quick", Effort(60.0, 4, 12))


class Faulty(Search):
    """A search that asks for whatever a function says, and gives up on a caller that never stops asking."""

    configs: Callable[[Search, int], list[Config]]
    asked = 0

    def ask(self, count: int) -> list[Config]:
        type(self).asked += 1
        assert type(self).asked < 100, "it is asked again and again"
        return type(self).configs(self, count)


@pytest.fixture
def faulty() -> Iterator[type[Faulty]]:
    class Mine(Faulty):
        pass

    register_search("faulty", Mine)
    yield Mine
    unregister_search("faulty")


def test_a_search_that_repeats_itself_is_done(faulty: type[Faulty]) -> None:
    faulty.configs = lambda search, count: [next(search.candidates.configs())] * count
    told = Told(varied)
    _, progress = tuned(told, product(), tuning=Tuning("quick", search="faulty"))
    assert progress.ended == "exhausted" and len(told.measured) == len(set(told.measured)) <= 2


def test_what_is_no_candidate_is_not_measured(faulty: type[Faulty]) -> None:
    def configs(search: Search, count: int) -> list[Config]:
        legal = next(search.candidates.configs())
        values = {name: -7 for name, _ in legal.values}
        return [Config("gone", ()), Config.of(legal.template, values), legal]

    faulty.configs = configs
    told = Told(varied)
    with pytest.warns(TilewrightWarning, match="search 'faulty' proposed .*not a candidate of matmul"):
        tuned(told, product(), tuning=Tuning("quick", search="faulty"))
    assert all(config.template != "gone" for config in told.measured)
    assert all(value != -7 for config in told.measured for _, value in config.values)


def test_a_search_asks_for_no_more_than_it_may(faulty: type[Faulty]) -> None:
    faulty.configs = lambda search, count: search.candidates.sample(search.rng, count + 3)
    told = Told(varied)
    tuned(told, product(), tuning=Tuning("quick", search="faulty", trials=6))
    assert len(told.measured) == 6


class Raising(Search):
    """A search that cannot take what was measured."""

    def propose(self, count: int) -> Iterator[Config]:
        return self.candidates.configs()

    def tell(self, outcomes: Sequence[Outcome]) -> None:
        if outcomes:
            raise KeyError("a bug of its author's")


def test_a_measured_round_is_kept_though_the_search_raises() -> None:
    register_search("raising", Raising)
    told = Told(varied)
    try:
        with pytest.raises(KeyError):
            tuned(told, product(), tuning=Tuning("quick", search="raising"))
    finally:
        unregister_search("raising")
    with Database.open() as database:
        assert {record.config for record in database.records()} == set(told.measured) != set()


class Numbered(Analytical):
    """A cost model that predicts another time for each config."""

    def predict(self, configs: Sequence[Config]) -> Prediction:
        seconds, spread, valid = super().predict(configs)
        for at, config in enumerate(configs):
            seconds[at] = varied(config)
        return Prediction(seconds, spread, valid)


class Lossy(Told):
    """A machine that loses the second result of each round."""

    def measure(
        self, job: Job, configs: Sequence[Config], *, best: float | None, deadline: float | None
    ) -> list[Measurement]:
        measured = super().measure(job, configs, best=best, deadline=deadline)  # type: ignore[arg-type]
        return [one for at, one in enumerate(measured) if at != 1]


def test_each_record_has_the_prediction_of_its_own_config() -> None:
    register_cost_model(
        "numbered", lambda candidates, threads, seed, experience: Numbered(candidates, threads)
    )
    try:
        tuned(Lossy(varied), product(), tuning=Tuning("quick", search="random", cost_model="numbered"))
    finally:
        unregister_cost_model("numbered")
    with Database.open() as database:
        records = database.records()
    assert len(records) > 2
    assert all(record.predicted == varied(record.config) for record in records)


def test_known_configs_are_told_to_the_search_and_others_asked_for(faulty: type[Faulty]) -> None:
    """A search that does not know of earlier runs asks for what they measured; that is told, not measured again."""
    told: list[Outcome] = []
    faulty.configs = lambda search, count: [*search.candidates.configs()][len(told) :][:count]
    faulty.tell = lambda self, outcomes: told.extend(outcomes)  # type: ignore[method-assign]
    tunable = TunableTask(Work(product(), host()), 1)
    with Database.open() as database:
        state = TaskState(tunable, Tuning("quick", search="faulty"), PastRecords(database))
        first = state.ask()
        state.tell([Measurement(config, (1e-3,)) for config in first])
        assert not set(state.ask()) & set(first)
