"""The tuner with works of a GPU: real builders, search and database; a process stands in the place of the card."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from random import Random

import numpy as np
import pytest

from tests.nvrtc import needs_nvrtc
from tests.space.checked import Inputs
from tests.space.implementations import WITH_LIBRARIES
from tests.tune import fake_gpu
from tilewright.db.database import Database
from tilewright.db.record import Record
from tilewright.dtypes import DType
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.hw.gpu import A100, H200, GpuMachine
from tilewright.measure.runner import Runner
from tilewright.space.candidates import Candidates
from tilewright.space.libraries.cublaslt import CublasLt
from tilewright.space.space import Config
from tilewright.space.template import Applied, Work
from tilewright.space.templates.cuda.default import Default
from tilewright.space.templates.cuda.matmul import TensorCores
from tilewright.support.trace import Event, Trace
from tilewright.tune.allocate import Goal, Objective
from tilewright.tune.choose import Choice
from tilewright.tune.confirm_in_model import WHOLE, ModelRun
from tilewright.tune.effort import EFFORTS, Effort, Tuning
from tilewright.tune.experience import PastRecords
from tilewright.tune.known import COMPLETE, known_choices
from tilewright.tune.progress import Progress
from tilewright.tune.tunable import TunableTask
from tilewright.tune.tuner import tune

needs_nvrtc()


def product(m: int = 4096, n: int = 1024, k: int = 1024) -> Task:
    x = Inputs()
    total = apply("linear", x(m, k, dtype=DType.F16), x(n, k, dtype=DType.F16, constant=True))
    return x.task(apply("relu", apply("add", total, x(n, dtype=DType.F16, constant=True))))


@dataclass(frozen=True)
class Few(TunableTask):
    """A task of which only some candidates are searched: five of the library, which need no compiler, and the default
    program, which NVRTC compiles."""

    @cached_property
    def candidates(self) -> Candidates:
        found = [template.apply(self.work) for template in (CublasLt(), Default())]
        return Candidates(self.work, only=tuple(applied for applied in found if applied is not None))


def few(task: Task, machine: GpuMachine = WITH_LIBRARIES) -> Few:
    return Few(Work(task, machine), 0)


def tuned(
    *tunables: TunableTask,
    tuning: Tuning,
    card: str = "serve",
    objective: Objective | None = None,
    listener: Callable[[str, Event], None] | None = None,
    models: Callable[[Mapping[str, Choice]], ModelRun] | None = None,
) -> tuple[dict[str, Choice], Progress]:
    progress = Progress()

    def listen(kind: str, event: Event) -> None:
        progress(kind, event)
        if listener is not None:
            listener(kind, event)

    choices = tune(
        {tunable.work.task.key: (tunable, 1) for tunable in tunables},
        tuning,
        threads=0,
        trace=Trace(listener=listen),
        objective=objective,
        runner=lambda threads: Runner(threads, device=0, builders=2, timing=f"tests.tune.fake_gpu:{card}"),
        models=models,  # type: ignore[arg-type]
    )
    return choices, progress


def unasked(*_: object) -> float:
    raise AssertionError("something is measured")


@pytest.fixture
def quick(tmp_path: Path) -> Tuning:
    """Of a few candidates all are tried."""
    return Tuning("quick", budget=20.0, db=tmp_path / "tuning.db", search="exhaustive")


def records_of(tuning: Tuning) -> list[Record]:
    with Database.open(tuning.db) as database:
        return database.records()


def algorithm_of(config: Config) -> int | None:
    values = dict(config.values)
    return int(values["algorithm"]) if "algorithm" in values else None


# -- what is chosen, and kept -----------------------------------------------------------------------------------------


def test_the_fastest_wins_and_is_remembered(quick: Tuning) -> None:
    tunable = few(product())
    choices, progress = tuned(tunable, tuning=quick)
    (choice,) = choices.values()
    assert algorithm_of(choice.config) == 4 and choice.origin.kind == "tuned"
    assert choice.seconds == pytest.approx(1.1e-5) and progress.ended != "known"
    records = records_of(quick)
    assert len(records) == len({record.config for record in records}) == progress.trials == 6
    assert {record.failure for record in records} == {""}
    assert {record.config.template for record in records} == {"cublaslt", "default"}

    again, progress = tuned(tunable, tuning=quick, card="serve_never")
    assert again[product().key].config == choice.config
    assert progress.ended == "known" and progress.trials == 0
    assert len(records_of(quick)) == len(records)


def test_a_plain_compilation_takes_what_was_measured(quick: Tuning) -> None:
    """Without a card. On another one, or without these libraries, nothing of it holds."""
    tunable = few(product())
    (choice,) = tuned(tunable, tuning=quick)[0].values()
    works = {"here": tunable.work}
    found = known_choices(works, 0, quick.db)
    assert found["here"].config == choice.config and found["here"].origin == choice.origin
    assert found["here"].implementation.uses_library
    for machine in (H200, replace(A100, libraries=WITH_LIBRARIES.libraries)):
        assert not known_choices({"there": Work(product(), machine)}, 0, quick.db)


def test_the_whole_space_is_searched_with_kernels_that_nvrtc_compiles(
    quick: Tuning, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without libraries: the configs of the tensor-core template among others, each with a time of its own."""
    monkeypatch.setitem(EFFORTS, "quick", Effort(60.0, 3, 6))
    tunable = TunableTask(Work(product(), H200), 0)
    choices, progress = tuned(tunable, tuning=replace(quick, search="guided"))
    records = records_of(quick)
    assert progress.trials == len(records) == 6 and {record.failure for record in records} == {""}
    assert len({record.times for record in records}) == 6
    assert records[0].config == tunable.start.config, "what would run without measuring comes first"
    assert all(record.build_seconds > 0 and record.predicted for record in records)
    best = min(records, key=lambda record: record.seconds or math.inf)
    (choice,) = choices.values()
    assert choice.config in (best.config, tunable.start.config)


# -- what fails -------------------------------------------------------------------------------------------------------


def test_each_failure_costs_one_candidate_and_the_spare_process_takes_over(
    quick: Tuning, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(fake_gpu.LOG, str(log := tmp_path / "log"))
    choices, progress = tuned(few(product()), tuning=quick, card="serve_faults")
    (choice,) = choices.values()
    assert algorithm_of(choice.config) in (0, None), "the others failed"
    failures = {algorithm_of(record.config): record.failure for record in records_of(quick)}
    assert failures == {0: "", 1: "crash", 2: "timeout", 3: "wrong", 4: "illegal", None: ""}
    assert progress.failures == {"crash": 1, "timeout": 1, "wrong": 1, "illegal": 1}
    messages = {record.failure: record.message for record in records_of(quick)}
    assert "inputs of seed" in messages["wrong"] and "exit code 3" in messages["crash"]

    lines = [line.split() for line in log.read_text().splitlines()]
    for deadly in ("1", "2", "4"):
        pids = {line[0] for line in lines if line[1:] == ["check", deadly]}
        for pid in pids:
            assert [line for line in lines if line[0] == pid][-1][1:] == ["check", deadly], (
                "it is asked no more"
            )
    assert len({line[0] for line in lines}) >= 4
    assert [line[1] for line in lines].count("sit") >= 4, "each process takes the task up anew"


def test_what_fails_is_not_tried_again_by_a_later_run(quick: Tuning) -> None:
    tuned(few(product()), tuning=quick, card="serve_faults")
    longer = replace(quick, effort="full", budget=30.0)
    choices, progress = tuned(few(product()), tuning=longer, card="serve")
    assert algorithm_of(next(iter(choices.values())).config) in (0, None) and progress.trials == 0


def test_the_budget_ends_it(quick: Tuning) -> None:
    tunable = few(product())
    short = replace(quick, budget=0.5)
    began = time.monotonic()
    choices, progress = tuned(tunable, tuning=short, card="serve_never")
    assert time.monotonic() - began < 12, "that long processes may take to begin, and not a minute to answer"
    (choice,) = choices.values()
    assert choice.config == tunable.start.config and choice.origin.kind == "predicted"
    assert progress.ended == "budget" and not records_of(short)
    assert not known_choices({"x": tunable.work}, 0, short.db), "nothing was measured"


def test_an_interrupt_keeps_the_best(quick: Tuning) -> None:
    """After the first round, which four candidates are in; the next run goes on from there."""
    rounds: list[int] = []

    def interrupt(kind: str, event: Event) -> None:
        if kind == "end" and event.name == "tune.round":
            rounds.append(event.notes["trials"])
            signal.raise_signal(signal.SIGINT)

    choices, progress = tuned(few(product()), tuning=quick, listener=interrupt)
    records = records_of(quick)
    assert progress.ended == "interrupted" and rounds == [4] and len(records) == 4
    best = min(records, key=lambda record: record.seconds or math.inf)
    (choice,) = choices.values()
    assert choice.config == best.config and choice.origin.kind == "tuned"
    choices, progress = tuned(few(product()), tuning=quick)
    assert progress.trials == 2 and algorithm_of(choices[product().key].config) == 4


# -- when it ends -----------------------------------------------------------------------------------------------------


def test_full_effort_goes_on_until_there_is_nothing_left(quick: Tuning) -> None:
    full = replace(quick, effort="full")
    choices, progress = tuned(few(product()), tuning=full)
    with Database.open(full.db) as database:
        (decision,) = database.decisions()
    assert progress.ended in ("exhausted", "converged") and decision.trials == 6
    assert decision.effort == COMPLETE and decision.config == choices[product().key].config
    assert decision.default_seconds is not None and decision.default_seconds > decision.seconds
    longer = replace(full, budget=1e6)
    _, progress = tuned(few(product()), tuning=longer, card="serve_never")
    assert progress.ended == "known", "complete is complete, whatever the budget"


def test_no_more_rounds_once_the_latency_is_reached(quick: Tuning, monkeypatch: pytest.MonkeyPatch) -> None:
    """Predicted are some 5 us, which is too long; measured are 0.2 us."""
    monkeypatch.setenv(fake_gpu.SCALE, "0.01")
    monkeypatch.setitem(EFFORTS, "quick", Effort(60.0, 2, 48))
    calls = {product().key: 1}
    wanted = Objective((Goal(calls, latency=1e-6),))
    _, progress = tuned(few(product()), tuning=quick, objective=wanted)
    assert progress.ended == "met" and 0 < progress.trials < 6
    met = Objective((Goal(calls, latency=1.0),))
    other = replace(quick, db=quick.db.with_name("other.db") if quick.db else None)
    _, progress = tuned(few(product()), tuning=other, objective=met)
    assert progress.ended == "met" and progress.trials == 0


def test_progress_can_be_followed(quick: Tuning) -> None:
    seen: list[tuple[str, str]] = []
    _, progress = tuned(
        few(product()),
        few(product(2048, 1024, 1024)),
        tuning=quick,
        listener=lambda kind, event: seen.append((kind, event.name)),
    )
    names = [name for _, name in seen]
    assert names[0] == "tune.begin" and names[-1] == "tune.end"
    assert seen.count(("begin", "tune.round")) == seen.count(("end", "tune.round")) >= 2
    assert progress.trials == 12 and {task.state for task in progress.tasks.values()} == {"confirmed"}
    assert progress.best < progress.before and progress.best == pytest.approx(2.2e-5)


# -- inside the models ------------------------------------------------------------------------------------------------


class Whole:
    """Models of which only the whole has a time, as on a GPU: so many seconds with these choices."""

    by_task = False

    def __init__(self, seconds: Callable[[Mapping[str, Choice]], float]) -> None:
        self.seconds, self.asked = seconds, 0

    def __call__(self, assignment: Mapping[str, Choice]) -> ModelRun:
        self.asked += 1
        return lambda: {WHOLE: self.seconds(assignment)}


def test_what_is_faster_alone_and_slower_in_the_models_is_taken_back(quick: Tuning) -> None:
    tunable = few(product())
    start = tunable.start.config
    slower = Whole(lambda assignment: sum(1e-3 if c.config == start else 1.1e-3 for c in assignment.values()))
    choices, _ = tuned(tunable, tuning=quick, models=slower)
    choice = choices[product().key]
    (measured,) = (record for record in records_of(quick) if record.config == start)
    assert choice.config == start and slower.asked >= 2
    assert choice.seconds == pytest.approx(measured.seconds), "as measured alone, not as predicted"
    again, progress = tuned(tunable, tuning=quick, card="serve_never", models=Whole(unasked))
    assert again[product().key].config == start and progress.ended == "known"


def test_of_two_winners_the_one_that_harms_the_models_is_taken_back(quick: Tuning) -> None:
    tunables = [few(product()), few(product(2048, 1024, 1024))]
    starts = {tunable.work.task.key: tunable.start.config for tunable in tunables}
    harmful = tunables[0].work.task.key

    def seconds(assignment: Mapping[str, Choice]) -> float:
        gains = {key: choice.config != starts[key] for key, choice in assignment.items()}
        return 1e-3 + sum((1e-4 if key == harmful else -3e-4) * gain for key, gain in gains.items())

    choices, _ = tuned(*tunables, tuning=quick, models=Whole(seconds))
    assert {key: choice.config == starts[key] for key, choice in choices.items()} == {
        key: key == harmful for key in starts
    }


# -- other cards ------------------------------------------------------------------------------------------------------


def test_what_was_measured_on_another_card_is_learned_from(tmp_path: Path) -> None:
    """Times that the analytical model does not expect: small tiles are fast. With the records of a card of another
    name and size the model ranks them right before anything is measured on this one."""
    other = replace(H200, name="another card", sms=100)
    task = product(1024, 512, 512)
    here, there = (TunableTask(Work(task, machine), 0) for machine in (H200, other))
    assert here.key != there.key

    def seconds(config: Config) -> float:
        return 1e-6 * config.int("bm") * config.int("bn") ** 0.5 * config.int("stages")

    applied = TensorCores().apply(there.work)
    assert applied is not None
    configs = _sampled(applied, 120)
    with Database.open(tmp_path / "tuning.db") as database:
        database.add(
            [there.record(config, times=(seconds(config),) * 3, error=0.0) for config in configs[:80]]
        )
        experience = PastRecords(database).experience(here)
        assert [len(each.outcomes) for each in experience] == [80]
        assert not PastRecords(database).experience(with_strict_numerics(here))
    unseen = [config for config in configs[80:] if here.candidates.is_legal(config)]
    truth = [seconds(config) for config in unseen]
    with_it, without = (
        _rank_correlation(here.model("boosted", 0, past).predict(unseen).seconds, truth)
        for past in (experience, [])
    )
    assert with_it > 0.9 > without + 0.1


def with_strict_numerics(tunable: TunableTask) -> TunableTask:
    """The same task where every rounding is kept: times of others say nothing about it."""
    return TunableTask(replace(tunable.work, numerics="strict"), 0)


def _sampled(applied: Applied, count: int) -> list[Config]:
    rng = Random(0)
    found: dict[Config, None] = {}
    while len(found) < count:
        config = applied.space.sample(rng)
        assert config is not None
        found.setdefault(config)
    return list(found)


def _rank_correlation(a: object, b: object) -> float:
    ranks = [np.argsort(np.argsort(np.asarray(values))) for values in (a, b)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])
