"""The loop: what it chooses, keeps and leaves alone, on a machine where configs take the time that a function says; and
the whole of it on this one."""

from __future__ import annotations

import shutil
import signal
import sqlite3
import time
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from torch import nn

import tilewright
from tests.space.checked import Inputs
from tilewright.db.database import Database
from tilewright.db.record import Key
from tilewright.errors import DatabaseVersionError, DatabaseWarning, LockError, OptionError, SpaceError
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.hw import host
from tilewright.measure.measurement import Measurement
from tilewright.measure.runner import Runner
from tilewright.measure.trial import TaskJob
from tilewright.space.candidates import Candidates
from tilewright.space.catalog import catalog
from tilewright.space.space import Config, Knob, Space
from tilewright.space.template import Work
from tilewright.support.trace import Event, Trace
from tilewright.tune.allocate import Goal, Objective
from tilewright.tune.choose import Choice, choose
from tilewright.tune.confirm_in_model import ModelRun
from tilewright.tune.effort import EFFORTS, Effort, Tuning
from tilewright.tune.progress import Progress
from tilewright.tune.tunable import TunableTask
from tilewright.tune.tuner import tune

Seconds = Callable[[Config], "float | str"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture(autouse=True)
def few_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EFFORTS, "quick", Effort(60.0, 4, 12))


QUICK = Tuning("quick", search="random")  # what is found is not the point here, and it takes no time to think


def product(rows: int = 8) -> Task:
    x = Inputs()
    return x.task(apply("matmul", x(rows, 32), x(32, 48, constant=True)))


def softmax() -> Task:
    x = Inputs()
    return x.task(apply("softmax", x(7, 19), axis=1))


class Told:
    """A machine on which a config takes the seconds that a function says; a text is the kind of its failure. Its speed
    is another at each measurement, and the same for those that alternate."""

    def __init__(self, seconds: Seconds) -> None:
        self.seconds = seconds
        self.measured: list[Config] = []
        self.raced: list[list[Config]] = []
        self.speeds = Random(0)

    def speed(self) -> float:
        return self.speeds.uniform(0.5, 1.0)

    def __call__(self, threads: int) -> Told:
        return self

    def __enter__(self) -> Told:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    ahead = 0
    devices = 1
    spent = False

    def expect(self, job: TaskJob) -> None:
        pass

    def prepare(self, job: TaskJob, configs: Sequence[Config], *, best: float | None) -> None:
        pass

    def prepared(self, job: TaskJob, configs: Sequence[Config]) -> list[Measurement]:
        return []

    def measure(
        self, job: TaskJob, configs: Sequence[Config], *, best: float | None, deadline: float | None
    ) -> list[Measurement]:
        found = []
        for config in configs:
            if deadline is not None and time.monotonic() > deadline:
                break
            seconds = self.seconds(config)
            self.measured.append(config)
            if isinstance(seconds, str):
                found.append(Measurement(config, failure=seconds, message="told so"))
            else:
                found.append(Measurement(config, (seconds / self.speed(),) * 5, 0.0))
        return found

    def race(
        self, job: TaskJob, configs: Sequence[Config], seconds: float, *, deadline: float | None = None
    ) -> list[list[float]]:
        self.raced.append(list(configs))
        speed = self.speed()
        times = [self.seconds(config) for config in configs]
        return [[] if isinstance(each, str) else [each / speed] * 5 for each in times]

    def acknowledge(self, job: TaskJob, measured: Sequence[Measurement]) -> None:
        """What was measured is in the database."""


def unasked(config: Config) -> float:
    raise AssertionError(f"{config} is measured")


def tuned(
    told: Told, *tasks: Task, tuning: Tuning | None = None, **options: object
) -> tuple[dict[str, Choice], Progress]:
    progress = Progress()
    choices = tune(
        {task.key: (TunableTask(Work(task, host()), 1), 1) for task in tasks},
        tuning or QUICK,
        threads=1,
        trace=Trace(listener=progress),
        runner=told,
        **options,  # type: ignore[arg-type]
    )
    assert list(choices) == [task.key for task in tasks]
    return choices, progress


def start_of(task: Task) -> Config:
    return choose(Work(task, host())).config


def faster_than_chosen(task: Task) -> Seconds:
    """What would be chosen without measuring takes two milliseconds, all else about one."""
    start = start_of(task)
    return lambda config: 2e-3 if config == start else varied(config)


def varied(config: Config) -> float:
    return 1e-3 + zlib.crc32(str(config).encode()) % 997 * 1e-7


def fastest(configs: Collection[Config], seconds: Seconds) -> Config:
    return min(configs, key=lambda config: (seconds(config), str(config)))


# -- what is chosen ---------------------------------------------------------------------------------------------------


def test_the_fastest_is_taken_and_nothing_is_tried_twice() -> None:
    task = product()
    told = Told(faster_than_chosen(task))
    choices, progress = tuned(told, task, tuning=Tuning("quick"))
    winner = fastest(told.measured, told.seconds)
    assert choices[task.key].config == winner
    assert told.measured[0] == start_of(task)
    assert len(told.measured) == len(set(told.measured)) == progress.trials
    assert told.raced[-1][:2] == [
        start_of(task),
        winner,
    ]  # the last race is against what would have been chosen
    assert progress.best / progress.before == pytest.approx(varied(winner) / 2e-3)


def test_equal_times_change_nothing() -> None:
    task = product()
    told = Told(lambda config: 1e-3)
    choices, _ = tuned(told, task)
    assert choices[task.key].config == start_of(task)


def test_a_winner_that_loses_the_race_is_not_taken() -> None:
    task = product()
    seconds = faster_than_chosen(task)
    told = Told(
        lambda config: 1e-3 if len(told.raced) > 3 else seconds(config)
    )  # the fourth race is the last
    choices, progress = tuned(told, task)
    assert choices[task.key].config == start_of(task)
    assert len(told.raced) == 4 and progress.tasks[task.key].state == "confirmed"


def test_what_is_wrong_never_wins_and_failures_are_counted_by_kind() -> None:
    task = product()
    start = start_of(task)
    kinds = iter(("wrong", "crash") * 1000)
    told = Told(lambda config: 1e-3 if config == start else next(kinds))
    choices, progress = tuned(told, task)
    assert choices[task.key].config == start
    assert progress.failures["wrong"] + progress.failures["crash"] == len(told.measured) - 1
    records = Database.open().records(Key.of(Work(task, host()), 1))
    assert {record.failure for record in records} == {"", "wrong", "crash"}


def test_where_the_choice_without_measuring_is_wrong_another_is_taken() -> None:
    task = product()
    start = start_of(task)
    choices, _ = tuned(Told(lambda config: "wrong" if config == start else 1e-3), task)
    assert choices[task.key].config != start


def test_what_cannot_be_measured_at_all_is_left_as_predicted() -> None:
    task = product()
    told = Told(lambda config: "crash")
    choices, progress = tuned(told, task)
    assert choices[task.key].config == start_of(task)
    assert progress.ended == "exhausted" and len(told.measured) <= 12


def test_a_task_with_one_candidate_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog("cpu"), "templates", ())
    monkeypatch.setattr(Candidates, "_from_sketches", lambda self: [])
    task = softmax()
    choices, progress = tuned(Told(unasked), task)
    assert choices[task.key].config.template == "default" and progress.ended == "exhausted"


class Inside:
    """Models in which a config of the only task takes the time that a function says."""

    by_task = True

    def __init__(self, seconds: Seconds) -> None:
        self.seconds = seconds

    def __call__(self, assignment: Mapping[str, Choice]) -> ModelRun:
        return lambda: {key: float(self.seconds(choice.config)) for key, choice in assignment.items()}


def test_what_is_faster_alone_but_not_in_the_model_is_not_taken() -> None:
    task = product()
    start = start_of(task)
    told = Told(faster_than_chosen(task))
    choices, progress = tuned(told, task, models=Inside(lambda config: 1e-3 if config == start else 2e-3))
    assert choices[task.key].config == start
    assert progress.tasks[task.key].state == "confirmed" and progress.best == pytest.approx(1e-3)
    again, progress = tuned(Told(unasked), task, models=Inside(unasked))
    assert again[task.key].config == start and progress.ended == "known"


def test_what_is_about_as_fast_alone_may_win_in_the_model() -> None:
    task = product()
    start = start_of(task)
    told = Told(lambda config: 1e-3 if config == start else varied(config))
    choices, _ = tuned(told, task, models=Inside(lambda config: 2e-3 if config == start else varied(config)))
    others = sorted((config for config in told.measured if config != start), key=told.seconds)
    assert choices[task.key].config == others[0]


# -- what is kept -----------------------------------------------------------------------------------------------------


def test_a_second_run_measures_nothing_and_chooses_the_same() -> None:
    tasks = (product(), softmax())
    first, _ = tuned(Told(faster_than_chosen(tasks[0])), *tasks)
    for tuning in (QUICK, replace(QUICK, budget=5.0), replace(QUICK, seed=7)):
        again, progress = tuned(Told(unasked), *tasks, tuning=tuning)
        assert progress.ended == "known" and progress.trials == 0
        assert {key: c.config for key, c in again.items()} == {key: c.config for key, c in first.items()}


def test_what_had_too_little_time_is_taken_up_again_where_it_was_left() -> None:
    task = product()
    tuned(Told(unasked), task, tuning=replace(QUICK, budget=1e-9))
    slow = Told(lambda config: (time.sleep(0.3), varied(config))[1])
    short = replace(QUICK, budget=1.0)
    tuned(slow, task, tuning=short)
    assert slow.measured
    tuned(Told(unasked), task, tuning=short)
    again = Told(varied)
    tuned(again, task, tuning=QUICK)
    assert again.measured and not set(again.measured) & set(slow.measured)


def test_an_unmeasured_task_of_one_model_is_measured_for_another() -> None:
    """The budget of the first is spent before the smaller task has its turn."""
    large, small = product(64), product()
    told = Told(lambda config: (time.sleep(0.3), 1e-3)[1])
    short = replace(QUICK, budget=1.5)
    _, progress = tuned(told, small, large, tuning=short)
    assert progress.tasks[large.key].trials and not progress.tasks[small.key].trials
    tuned(Told(unasked), small, large, tuning=short)  # the same again: nothing
    alone = Told(lambda config: 1e-3)
    tuned(alone, small, tuning=short)
    assert alone.measured


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_keeps_everything_and_the_next_run_goes_on(number: signal.Signals) -> None:
    task = product()
    seconds = faster_than_chosen(task)
    told = Told(seconds)

    def interrupting(config: Config) -> float | str:
        if len(told.measured) == 6 and len(told.raced) == 1:
            signal.raise_signal(number)
        return seconds(config)

    told.seconds = interrupting
    choices, progress = tuned(told, task)
    assert progress.ended == "interrupted"
    kept = {record.config for record in Database.open().records()}
    assert len(kept) == 4 and kept < set(told.measured)  # the round that was interrupted is lost
    assert choices[task.key].config == fastest(kept, seconds)
    after = Told(seconds)
    choices, progress = tuned(after, task)
    assert choices[task.key].config == fastest({*kept, *after.measured}, seconds)
    assert progress.ended != "interrupted" and not set(after.measured) & kept


def test_the_same_records_and_seed_give_the_same_plan(tmp_path: Path) -> None:
    tasks = (product(),)
    slow = Told(lambda config: (time.sleep(0.2), varied(config))[1])
    tuned(slow, *tasks, tuning=replace(QUICK, budget=1.0))
    shutil.copy(tmp_path / "tuning.sqlite", tmp_path / "copy.sqlite")
    found = []
    for path in (tmp_path / "tuning.sqlite", tmp_path / "copy.sqlite"):
        told = Told(varied)
        choices, _ = tuned(told, *tasks, tuning=Tuning("quick", seed=3, db=path))
        found.append(([choice.config for choice in choices.values()], told.measured))
    assert found[0] == found[1]


# -- what gets the budget ---------------------------------------------------------------------------------------------


def test_a_model_that_is_fast_enough_is_left_alone() -> None:
    one, two = product(), product(16)
    goals = (Goal({one.key: 3}, latency=1.0), Goal({two.key: 1}))
    told = Told(lambda config: 1e-3)
    _, progress = tuned(told, one, two, objective=Objective(goals))
    assert progress.tasks[one.key].trials == 0 and progress.tasks[two.key].trials > 0
    met = Objective((Goal({one.key: 3}, latency=1.0), Goal({two.key: 1}, latency=1.0)))
    _, progress = tuned(Told(unasked), one, two, tuning=replace(QUICK, effort="full"), objective=met)
    assert progress.ended in ("met", "known")


def order_of(allocation: str, folder: Path, *tasks: Task) -> list[str]:
    """Which task each round went to, of 24 trials."""
    order: list[str] = []

    def listen(kind: str, event: Event) -> None:
        if event.name == "tune.round" and kind == "end":
            order.append(event.notes["task"])

    told = Told(lambda config: 1e-3 if config.template == "default" else varied(config))
    tune(
        {task.key: (TunableTask(Work(task, host()), 1), calls) for calls, task in enumerate(tasks, 1)},
        replace(QUICK, allocation=allocation, trials=24, db=folder / f"{allocation}.sqlite"),
        threads=1,
        trace=Trace(listener=listen),
        runner=told,
    )
    assert len(told.measured) == 24
    return order


def test_the_allocation_decides_which_task_is_measured_next(tmp_path: Path) -> None:
    tasks = product(8), product(9), product(10)
    light, middle, heavy = (task.key for task in tasks)
    assert order_of("round-robin", tmp_path, *tasks) == [light, middle, heavy] * 2
    assert order_of("heaviest", tmp_path, *tasks)[:3] == [heavy] * 3  # until it has all its trials
    assert set(order_of("gradient", tmp_path, *tasks)[:3]) == {light, middle, heavy}


def test_so_many_trials_and_no_more() -> None:
    told = Told(varied)
    limited = replace(QUICK, trials=8)
    _, progress = tuned(told, product(), product(9), tuning=limited)
    assert progress.ended == "trials" and progress.trials == len(told.measured) == 8
    _, progress = tuned(told, product(), product(9), tuning=QUICK)  # has more to offer than that decision
    assert progress.ended != "known" and progress.trials


def test_the_budget_is_honoured() -> None:
    told = Told(lambda config: (time.sleep(0.1), varied(config))[1])
    begin = time.monotonic()
    _, progress = tuned(told, product(), softmax(), tuning=replace(QUICK, effort="full", budget=1.5))
    assert time.monotonic() - begin < 1.5 + 2.0
    assert progress.ended == "budget" and progress.trials


# -- what goes wrong --------------------------------------------------------------------------------------------------


def test_a_full_disk_costs_only_the_keeping(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = product(), product(16)
    tuned(Told(lambda config: 1e-3), first)
    before = Database.open().records()

    def full(*_: object) -> int:
        raise sqlite3.OperationalError("database or disk is full")

    told = Told(faster_than_chosen(second))
    with monkeypatch.context() as patch, pytest.warns(DatabaseWarning, match="disk is full.*kept in memory"):
        patch.setattr(Database, "_insert", full)
        choices, _ = tuned(told, second)
    assert choices[second.key].config == fastest(told.measured, told.seconds)
    assert Database.open().records() == before


def test_a_database_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    task = product()
    told = Told(faster_than_chosen(task))
    with pytest.warns(DatabaseWarning, match="cannot write to the tuning database"):
        choices, _ = tuned(told, task, tuning=replace(QUICK, db=tmp_path / "file" / "x.sqlite"))
    assert choices[task.key].config == fastest(told.measured, told.seconds)


def test_a_database_of_a_newer_version(tmp_path: Path) -> None:
    tuned(Told(lambda config: 1e-3), product())
    path = tmp_path / "tuning.sqlite"
    with sqlite3.connect(path) as connection:
        connection.executescript(f"PRAGMA user_version = 9; PRAGMA application_id = {(0x5457 << 16) + 9}")
    content = path.read_bytes()
    with pytest.raises(DatabaseVersionError, match="has format 9"):
        tuned(Told(unasked), product())
    assert path.read_bytes() == content


class Choiceless:
    """A template whose knob has nothing to choose from."""

    name = "choiceless"

    def apply(self, work: Work) -> Choiceless:
        return self

    @property
    def space(self) -> Space:
        return Space(self.name, (Knob("rows", ()),), lambda values: True)


def test_a_knob_without_a_value_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog("cpu"), "templates", (Choiceless(),))
    with pytest.raises(SpaceError, match="knob 'rows' of 'choiceless' has nothing to choose from"):
        tuned(Told(unasked), softmax())


# -- on this machine --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    # Rows are joined in pairs in between, so that the two layers are no chain on any machine.
    pairs = nn.Unflatten(0, (-1, 2)), nn.Flatten(1)
    return (
        nn.Sequential(nn.Linear(96, 80), nn.ReLU(), *pairs, nn.Linear(160, 48)).eval().requires_grad_(False)
    )


@pytest.fixture(scope="module")
def x() -> torch.Tensor:
    return torch.randn(24, 96, generator=torch.Generator().manual_seed(1))


def test_a_model_is_tuned_locked_and_built_again(
    model: nn.Module, x: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(EFFORTS, "quick", Effort(60.0, 4, 4))
    progress, lock = Progress(), tmp_path / "model.lock"
    first = tilewright.compile(
        model, (x,), effort="quick", budget="60s", threads=1, lock=lock, trace=Trace(listener=progress)
    )
    assert progress.trials and torch.allclose(first(x), model(x), atol=1e-5)

    monkeypatch.setattr(Runner, "measure", None)
    monkeypatch.setattr(Runner, "race", None)
    again = tilewright.compile(model, (x,), effort="quick", budget="60s", threads=1)
    locked = tilewright.compile(model, (x,), effort="full", threads=1, lock=lock)
    for other in (again, locked):
        assert other.plan.kernels == first.plan.kernels
        assert torch.equal(other(x), first(x))
    with pytest.raises(LockError, match="does not fit this build"):
        tilewright.compile(model, (x[:6],), lock=lock)


def test_several_models_share_their_tasks(
    model: nn.Module, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Runner, "measure", None)  # fast enough as they are: nothing is measured
    progress = Progress()
    two = tilewright.compile_all(
        [(model, (x,)), (model[0], (x,)), (model, (x,))],
        latency=["1s", "1s", "1s"],
        trace=Trace(listener=progress),
    )
    assert [compiled(x).shape[1] for compiled in two] == [48, 80, 48]
    assert sorted(task.calls for task in progress.tasks.values()) == [1, 2, 2]
    with pytest.raises(OptionError, match="1 latencies for 2 models"):
        tilewright.compile_all([(model, (x,))] * 2, latency=[1])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"budget": 5}, "needs no budget"),
        ({"effort": "quick", "budget": 0}, "above 0"),
        ({"effort": "quick", "budget": -3}, "above 0"),
        ({"effort": "quick", "budget": float("nan")}, "above 0"),
        ({"effort": "quick", "budget": "a while"}, "above 0"),
        ({"allocation": "random"}, "allocation must be one of 'gradient', 'heaviest', 'round-robin'"),
        ({"effort": "some"}, "'none', 'quick', 'full'"),
        ({"effort": "quick", "target": replace(host(), cores=host().cores + 1)}, "this machine"),
        ({"lock": "x", "dynamic": True}, "a single input signature"),
    ],
)
def test_mistakes_are_named(model: nn.Module, x: torch.Tensor, options: dict[str, object], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        tilewright.compile(model, (x,), **options)  # type: ignore[call-overload]
