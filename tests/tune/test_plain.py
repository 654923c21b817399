"""The search finds legal, right and remembered configs, within its budget, whatever candidates do."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import tilewright
from tilewright.errors import OptionError
from tilewright.frontend import import_model
from tilewright.hw import host
from tilewright.measure.worker import Answer, Question, Worker
from tilewright.rewrites.pipeline import run_pipeline
from tilewright.space.realise import is_legal, program_for
from tilewright.space.space import Config
from tilewright.space.template import Work
from tilewright.support.trace import Trace
from tilewright.tune import plain
from tilewright.tune.choose import choose
from tilewright.tune.memory import Found, Memory, work_key


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 80), nn.ReLU(), nn.Linear(80, 48)).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def x() -> torch.Tensor:
    return torch.randn(24, 96, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def work(model: nn.Module, x: torch.Tensor) -> Work:
    """The first product, on one core."""
    imported = import_model(model, (x,))
    partition = run_pipeline(imported.graph, Trace.off(), numerics="fast")
    task, _ = next(iter(partition.tasks().values()))
    return Work(task, replace(host(), cores=1))


class Told:
    """A worker that gives each config the time that a function says, and counts."""

    def __init__(self, seconds: object) -> None:
        self.seconds, self.asked = seconds, []

    def ask(self, question: Question, timeout: float) -> Answer:
        self.asked.append(question.configs)
        times = []
        for number, config in enumerate(question.configs):
            value = self.seconds(config)  # type: ignore[operator]
            if isinstance(value, str):
                return Answer(failed=number, kind=value)
            times.append((value,) * 5)
        return Answer(tuple(times))


def searched(work: Work, seconds: object, trials: int = 1000) -> tuple[plain.Search, Config | None]:
    told = Told(seconds)
    search = plain.Search(work, 1, told, time.monotonic() + 60, trials)  # type: ignore[arg-type]
    choice = search.run(choose(work))
    assert is_legal(work, choice.config)
    return search, choice.config


def test_it_finds_what_is_fastest_in_each_knob(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times that depend on each knob alone: going from neighbour to neighbour must reach the least."""
    monkeypatch.setattr(plain, "_HOPELESS", float("inf"))
    target = max(plain.some_configs(plain.applied_templates(work)[0].space), key=str)

    def seconds(config: Config | None) -> float:
        if config is None or config.template != target.template:
            return 10.0
        return 1.0 + sum(config[name] != value for name, value in target.values)

    search, found = searched(work, seconds)
    assert found == target and search.finished == 1.0


def test_the_default_program_may_win(work: Work) -> None:
    _, found = searched(work, lambda config: 1.0 if config is None else 2.0)
    assert found is None


def test_equal_times_change_nothing(work: Work) -> None:
    _, found = searched(work, lambda config: 1.0)
    assert found == choose(work).config


def test_a_fast_wrong_kernel_never_wins_and_failures_are_counted(work: Work) -> None:
    start = choose(work).config

    def seconds(config: Config | None) -> float | str:
        return 1.0 if config == start else "wrong"

    search, found = searched(work, seconds, trials=9)
    assert found == start and search.trials == 9 and search.failures == {"wrong": 8}


def test_what_cannot_be_measured_is_left_as_the_model_chose_it(work: Work) -> None:
    search, found = searched(work, lambda config: "crash")
    assert found == choose(work).config and search.finished is None


def test_no_config_is_tried_twice(work: Work) -> None:
    told = Told(lambda config: 1.0 + hash(config) % 7)
    search = plain.Search(work, 1, told, time.monotonic() + 60, 40)  # type: ignore[arg-type]
    search.run(choose(work))
    new = [configs[-1] for configs in told.asked[:-1]]  # the last one confirms
    assert len(new) == len(set(new))


def test_promising_configs_are_legal_and_cover_every_value(work: Work) -> None:
    (applied, *_) = plain.applied_templates(work)
    configs = [config for _, config in plain.promising(applied, work, lambda one, c: len(str(c)))]
    assert all(is_legal(work, config) for config in configs)
    covered = {choice for config in configs for choice in config.values}
    assert covered >= {choice for config in plain.some_configs(applied.space) for choice in config.values}


def test_a_config_of_another_version_is_not_legal(work: Work) -> None:
    config = choose(work).config
    assert config is not None and is_legal(work, config)
    (name, _), *rest = config.values
    for strange in (
        Config("no such template", config.values),
        Config(config.template, tuple(rest)),
        Config(config.template, ((name, 12345), *rest)),
        Config(config.template, (*config.values, ("new", 1))),
    ):
        assert not is_legal(work, strange)


# -- with real measurements -------------------------------------------------------------------------------------------


def test_a_second_compilation_measures_nothing(
    model: nn.Module, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = Trace()
    begin = time.monotonic()
    first = tilewright.compile(model, (x,), effort="quick", budget=6, threads=1, trace=trace)
    spent = time.monotonic() - begin
    tasks = [event for event in trace.events if event.name == "tune.task"]
    assert tasks and all(event.notes["trials"] >= 1 and not event.notes["failures"] for event in tasks)
    assert torch.allclose(first(x), model(x), atol=1e-5)

    monkeypatch.setattr(Worker, "ask", None)
    second = tilewright.compile(model, (x,), effort="quick", budget=6, threads=1)
    assert second.plan.kernels == first.plan.kernels
    assert torch.equal(second(x), first(x))
    assert spent < 60


def test_an_interrupt_keeps_what_there_is(
    model: nn.Module, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> Answer:
        raise KeyboardInterrupt

    monkeypatch.setattr(Worker, "ask", interrupted)
    trace = Trace()
    compiled = tilewright.compile(model, (x,), effort="full", trace=trace)
    assert torch.allclose(compiled(x), model(x), atol=1e-5)
    assert any(event.name == "tune.interrupted" for event in trace.events)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"budget": 5}, "needs no budget"),
        ({"effort": "quick", "budget": 0}, "above 0"),
        ({"effort": "quick", "budget": float("nan")}, "above 0"),
        ({"effort": "some"}, "'none', 'quick', 'full'"),
        ({"effort": "quick", "target": replace(host(), cores=host().cores + 1)}, "this machine"),
    ],
)
def test_mistakes_are_named(model: nn.Module, x: torch.Tensor, options: dict[str, object], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        tilewright.compile(model, (x,), **options)  # type: ignore[call-overload]


# -- the memory -------------------------------------------------------------------------------------------------------


def test_memory(own_cache: Path, work: Work) -> None:
    key, config = work_key(work, 1), choose(work).config
    assert key != work_key(work, 2) and key != work_key(replace(work, numerics="strict"), 1)
    first = Found(key, "a", "quick", 60.0, config, 1.0, 3)
    Memory(own_cache).add(first)
    other = Memory(own_cache)
    assert other.get(key) == first and other.get("x") is None
    second = Found(key, "a", "full", 60.0, None, 0.5, 30)
    other.add(second)
    assert Memory(own_cache).get(key) == second
    assert plain._remembered(work, first, plain.Tuning("full", 60.0)) is None
    assert plain._remembered(work, first, plain.Tuning("quick", 61.0)) is None
    remembered = plain._remembered(work, second, plain.Tuning("quick"))
    assert remembered is not None and remembered.program == program_for(work, None)


def test_damaged_lines_are_passed_over(own_cache: Path) -> None:
    found = Found("k", "a", "quick", 1.0, Config("t", (("rows", 3), ("on", True), ("how", "a"))), 1.0, 3)
    memory = Memory(own_cache)
    memory.add(found)
    (path,) = (own_cache / "tuned").iterdir()
    good = path.read_bytes()
    path.write_bytes(b"\xff\xfe\n" + good[:20] + b"\n{}\n[]\n" + good)
    assert Memory(own_cache).get("k") == found


def test_a_memory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "tuned").write_text("not a folder")
    Memory(tmp_path).add(Found("k", "a", "quick", 1.0, None, 1.0, 3))
    assert Memory(tmp_path).get("k") is None
