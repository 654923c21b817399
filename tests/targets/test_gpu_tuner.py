"""The race of ways on a GPU, with a process in the place of the card: what fails is typed, and costs one candidate."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from tilewright.space.vendor.pieces import Way
from tilewright.tune.gpu import GpuTuner, Pairs
from tilewright.tune.gpu_known import known_ways
from tilewright.tune.gpu_rule import choose
from tilewright.tune.gpu_sums import Pair, joined, pairs_of
from torch import nn

from tilewright import frontend
from tilewright.db.database import Database
from tilewright.driver import compile_imported
from tilewright.graph.ir import Graph, input_node
from tilewright.graph.op import apply
from tilewright.graph.task import Partition, Task
from tilewright.hw.gpu import A100, H200, GpuMachine
from tilewright.runtime.plan import Origin
from tilewright.support.trace import Trace
from tilewright.targets.cuda import CudaTarget
from tilewright.targets.target import together
from tilewright.tune import gpu, gpu_sums
from tilewright.tune.allocate import Goal, Objective
from tilewright.tune.effort import Tuning
from tilewright.tune.progress import Progress

BOTH = frozenset({"cublaslt", "torch"})


def tasks() -> dict[str, tuple[Task, int]]:
    model = nn.Linear(256, 64).half().eval()
    imported = frontend.import_model(model, (torch.randn(512, 256).half(),))
    return together([CudaTarget(H200, 0, BOTH).partitioned(imported, "fast", Trace.off())])


@pytest.fixture
def tuner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GpuTuner:
    monkeypatch.setattr(gpu, "_FROM_TEMPLATES", 0)
    monkeypatch.setattr(gpu, "_FROM_SKETCHES", 0)
    tuning = Tuning(db=tmp_path / "tuning.db")
    return GpuTuner(H200, 0, "fast", BOTH, tuning, Trace.off(), "tests.targets.faulty:serve")


def test_each_failure_costs_one_candidate_and_what_is_known_is_not_measured_again(
    tuner: GpuTuner, tmp_path: Path
) -> None:
    ways = tuner.tune(tasks())
    (winner,) = ways.values()
    assert dict(winner.config.values)["algorithm"] == 4
    with Database.open(tmp_path / "tuning.db") as database:
        records = database.records()
        (decision,) = database.decisions()
    failures = {(dict(r.config.values)["algorithm"], r.failure) for r in records if r.config.values}
    assert failures == {(0, ""), (1, "crash"), (2, "timeout"), (3, "wrong"), (4, "")}
    assert len(tuner.replaced) == sum(r.failure in ("crash", "timeout") for r in records)
    assert decision.config == winner.config
    assert len(records) == tuner.trials == decision.trials

    again = GpuTuner(H200, 0, "fast", BOTH, tuner.tuning, Trace.off(), "no:where")
    assert [way.config for way in again.tune(tasks()).values()] == [winner.config]
    assert again.trials == 0


def test_a_plain_compilation_takes_what_was_raced(tuner: GpuTuner, tmp_path: Path) -> None:
    """Without a GPU: the decisions are there, and nothing is asked of a card."""
    (winner,) = tuner.tune(tasks()).values()
    assert winner.origin.kind == "tuned"
    imported = frontend.import_model(nn.Linear(256, 64).half().eval(), (torch.randn(512, 256).half(),))
    target = CudaTarget(H200, None, BOTH)
    with Database.open(tmp_path / "tuning.db") as database:
        before = len(database.records()) + len(database.decisions())
    known = compile_imported(imported, target, tuning=Tuning("none", db=tmp_path / "tuning.db"))
    plain = compile_imported(imported, target, tuning=Tuning("none", db=tmp_path / "other.db"))
    (step,) = (step for step in known.plan.steps if step.vendor is not None)
    assert step.vendor is not None and step.vendor.options["algorithm"] == 4
    assert known.plan.tasks[step.task].origin == winner.origin
    assert {info.origin.kind for info in plain.plan.tasks.values()} == {"predicted"}
    with Database.open(tmp_path / "tuning.db") as database:
        assert len(database.records()) + len(database.decisions()) == before
    # On another card, or without these libraries, nothing of it holds.
    for other in (CudaTarget(A100, None, BOTH), CudaTarget(H200)):
        model = compile_imported(imported, other, tuning=Tuning("none", db=tmp_path / "tuning.db"))
        assert {info.origin.kind for info in model.plan.tasks.values()} == {"predicted"}


def test_a_winner_that_slows_the_model_down_is_taken_back_for_good(tuner: GpuTuner, tmp_path: Path) -> None:
    (plain,) = tasks().values()
    rule = choose(plain[0], H200, "fast", BOTH).config

    def models(ways: Mapping[str, Way]) -> Callable[[], float]:
        (way,) = ways.values()
        return lambda: 1e-3 if way.config == rule else 1.1e-3

    tuner = replace(tuner, serve="tests.targets.faulty:serve_well", models=models)
    (way,) = tuner.tune(tasks()).values()
    assert way.config == rule
    again = GpuTuner(H200, 0, "fast", BOTH, tuner.tuning, Trace.off(), "no:where")
    assert [way.config for way in again.tune(tasks()).values()] == [rule]
    assert again.trials == 0


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(64, 256, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.conv(x)).mean((2, 3))


def pooled() -> Partition:
    imported = frontend.import_model(Pooled().half().eval(), (torch.randn(4, 64, 7, 7).half(),))
    return CudaTarget(H200, 0).partitioned(imported, "fast", Trace.off())


def pairs(partition: Partition, machine: GpuMachine = H200) -> Pairs:
    return lambda ways: pairs_of([partition], ways, machine, "fast")


def is_joined(partition: Partition, ways: Mapping[str, Way]) -> bool:
    return joined(partition, ways).calls != partition.calls


@pytest.mark.parametrize("faster", [True, False], ids=["joined", "apart"])
def test_whether_a_pair_is_joined_is_measured_in_the_models_and_remembered(
    tuner: GpuTuner, faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_sums, "_MOST", 1)
    partition = pooled()
    tasks = together([partition])

    def models(ways: Mapping[str, Way]) -> Callable[[], float]:
        return lambda: 1e-3 if is_joined(partition, ways) == faster else 1.1e-3

    serve = "tests.targets.faulty:serve_well"
    first = replace(tuner, models=models, pairs=pairs(partition), serve=serve, libraries=frozenset())
    found = first.tune(tasks)
    assert is_joined(partition, found) == faster and first.trials

    # Another opinion of the card, to which joining looks otherwise, changes nothing.
    rates = replace(H200, tensor_flops_clock=H200.tensor_flops_clock / 1e6) if faster else H200
    (pair,) = pairs(partition, rates)({key: found[key] for key in tasks}).values()
    assert pair.pays != faster
    again = replace(first, serve="no:where", models=None, pairs=pairs(partition, rates), trials=0)
    kept = again.tune(tasks)
    assert {key: way.config for key, way in kept.items()} == {key: way.config for key, way in found.items()}
    assert again.trials == 0
    plain = {key: task for key, (task, _) in tasks.items()}
    known = known_ways(plain, again.memory, pairs(partition, rates), tuner.tuning.db)
    assert {key: way.config for key, way in known.items()} == {key: way.config for key, way in found.items()}

    # It holds for the kernels that were timed.
    with Database.open(tuner.tuning.db) as database:
        decision = database.decision(first._key(pair.task))
        assert decision is not None
        database.decide(msgspec.structs.replace(decision, code="of another day", when=decision.when + 1e-5))
    anew = replace(first, trials=0)
    assert is_joined(partition, anew.tune(tasks)) == faster and anew.trials == 1


def test_what_nobody_runs_in_models_is_joined_only_if_that_is_expected_to_pay(
    tuner: GpuTuner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_sums, "_MOST", 1)
    partition = pooled()
    slow = replace(H200, tensor_flops_clock=H200.tensor_flops_clock / 1e6)
    serve = "tests.targets.faulty:serve_well"
    first = replace(tuner, pairs=pairs(partition, slow), serve=serve, libraries=frozenset())
    assert not is_joined(partition, first.tune(together([partition]))) and first.trials
    again = replace(first, serve="no:where", trials=0)
    assert not is_joined(partition, again.tune(together([partition]))) and not again.trials


def test_a_race_ends_with_the_budget(tuner: GpuTuner, tmp_path: Path) -> None:
    short = replace(tuner.tuning, budget=0.5)
    tuner = replace(tuner, serve="tests.targets.faulty:serve_never", tuning=short)
    began = time.monotonic()
    found = tuner.tune(tasks())
    assert time.monotonic() - began < 10, "that long a process may take to begin, and not a minute to answer"
    assert [way.config for way in found.values()] == [
        choose(task, H200, "fast", BOTH).config for task, _ in tasks().values()
    ]
    with Database.open(tmp_path / "tuning.db") as database:
        assert not database.decisions() and not database.records()


def test_what_has_failed_is_not_taken_where_the_budget_ends(tuner: GpuTuner, tmp_path: Path) -> None:
    short = replace(tuner.tuning, budget=1.0)
    tuner = replace(tuner, serve="tests.targets.faulty:serve_first_wrong", tuning=short)
    ((task, _),) = tasks().values()
    (way,) = tuner.tune(tasks()).values()
    with Database.open(tmp_path / "tuning.db") as database:
        (failed,) = database.records()
    assert failed.failure == "wrong" and failed.config == choose(task, H200, "fast", BOTH).config
    assert way.config != failed.config


def test_when_the_budget_ends_no_more_models_are_run(
    tuner: GpuTuner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_sums, "_MOST", 1)
    partition, ended, asked = pooled(), [0.0], []

    def models(ways: Mapping[str, Way]) -> Callable[[], float]:
        asked.append(ways)
        ended[0] = 1e6
        return lambda: 1e-3

    serve = "tests.targets.faulty:serve_well"
    at_once = replace(tuner, models=models, pairs=pairs(partition), serve=serve, libraries=frozenset())
    at_once = replace(at_once, clock=lambda: time.monotonic() + ended[0])
    assert is_joined(partition, at_once.tune(together([partition]))), "as is expected to pay"
    assert len(asked) == 1 and at_once.trials


def test_a_product_that_is_read_beside_its_mean_is_not_joined_with_it() -> None:
    partition = pooled()
    ways = {key: choose(task, H200, "fast", ()) for key, (task, _) in together([partition]).items()}
    assert pairs(partition)(ways)
    *others, product, mean = partition.calls
    flat = apply("reshape", product.output, shape=(product.output.type.size,))
    body = mean.task.graph
    beside = input_node(len(body.inputs), flat.type)
    first = apply("slice", beside, starts=(0,), stops=(1,), steps=(1,))
    output = apply("add", body.outputs[0], first)
    call = replace(mean, task=Task(Graph((*body.inputs, beside), (output,))), inputs=(*mean.inputs, flat))
    views = {**partition.views, flat: partition.buffer_of(product.output)}
    both = Partition(partition.graph, (*others, product, call), views)
    both.check()
    ways = {key: choose(task, H200, "fast", ()) for key, (task, _) in together([both]).items()}
    assert not pairs(both)(ways)


def test_what_is_interrupted_is_joined_as_the_rule_says(tuner: GpuTuner) -> None:
    partition, asked = pooled(), []

    def interrupted(ways: Mapping[str, Way]) -> Mapping[str, Pair]:
        asked.append(ways)
        if len(asked) == 1:
            raise KeyboardInterrupt
        return pairs(partition)(ways)

    at_once = replace(tuner.tuning, budget=0.0)
    tuner = replace(tuner, pairs=interrupted, tuning=at_once, libraries=frozenset())
    assert is_joined(partition, tuner.tune(together([partition])))


def test_a_product_that_is_taken_back_is_joined_no_more(
    tuner: GpuTuner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_sums, "_MOST", 1)
    monkeypatch.setattr(gpu, "_FROM_TEMPLATES", 2)
    partition = pooled()
    tasks = together([partition])
    (key,) = (key for key, (task, _) in tasks.items() if "conv" in task.label)
    rule = choose(tasks[key][0], H200, "fast", ()).config
    met = []

    def models(ways: Mapping[str, Way]) -> Callable[[], float]:
        case = (ways[key].config == rule, is_joined(partition, ways))
        met.append(case)
        return lambda: 1e-3 if case == (True, False) else 1.1e-3

    serve = "tests.targets.faulty:serve_second"
    other = replace(tuner, models=models, pairs=pairs(partition), serve=serve, libraries=frozenset())
    found = other.tune(tasks)
    assert (False, True) in met, "it was joined with the winner of the race"
    assert found[key].config == rule and not is_joined(partition, found)
    again = replace(other, serve="no:where", models=None, trials=0)
    assert not is_joined(partition, again.tune(tasks)) and not again.trials


def full(tuner: GpuTuner, **changes: object) -> GpuTuner:
    """Kernels of one's own alone, of which there are many."""
    tuning = replace(tuner.tuning, effort="full", **changes)
    return replace(tuner, serve="tests.targets.faulty:serve_by_config", libraries=frozenset(), tuning=tuning)


def test_full_effort_goes_on_until_nothing_is_gained_and_the_seed_says_what_is_drawn(
    tuner: GpuTuner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "_RANKED", 2)
    monkeypatch.setattr(GpuTuner, "_built", lambda self, way: None)  # nobody runs them
    tried: dict[int, list[str]] = {}
    for seed in (0, 1):
        database = tmp_path / f"{seed}.db"
        one = full(tuner, seed=seed, db=database)
        (winner,) = one.tune(tasks()).values()
        with Database.open(database) as opened:
            tried[seed] = [str(record.config) for record in opened.records()]
            decision = opened.decision(one._key(next(iter(tasks().values()))[0]))
        assert decision is not None and decision.effort == "complete" and decision.config == winner.config
        assert decision.trials > 4 and winner.origin == Origin("tuned", decision.when)
        again = replace(one, serve="no:where", trials=0)
        assert [way.config for way in again.tune(tasks()).values()] == [winner.config] and not again.trials
    assert tried[0] != tried[1]
    assert len(set(tried[0])) > len(set(quick_tried(tuner, tmp_path / "quick.db")))


def quick_tried(tuner: GpuTuner, database: Path) -> list[str]:
    quick = full(tuner, db=database)
    quick = replace(quick, tuning=replace(quick.tuning, effort="quick"))
    quick.tune(tasks())
    with Database.open(database) as opened:
        return [str(record.config) for record in opened.records()]


def test_what_was_decided_in_haste_is_tuned_further_with_full_effort(
    tuner: GpuTuner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "_RANKED", 2)
    monkeypatch.setattr(gpu, "_FROM_TEMPLATES", 2)
    monkeypatch.setattr(GpuTuner, "_built", lambda self, way: None)
    hasty = full(tuner)
    hasty = replace(hasty, tuning=replace(hasty.tuning, effort="quick"))
    hasty.tune(tasks())
    assert hasty.trials
    further = full(tuner)
    further.tune(tasks())
    assert further.trials


@pytest.mark.parametrize(("latency", "raced"), [(1.0, False), (1e-9, True), (None, True)])
def test_models_that_are_fast_enough_get_no_more_of_the_budget(
    tuner: GpuTuner, latency: float | None, raced: bool
) -> None:
    calls = {key: count for key, (_, count) in tasks().items()}
    asked = []

    def each_model(ways: Mapping[str, Way]) -> list[float]:
        asked.append(ways)
        return [1e-3]

    progress = Progress()
    goal = Objective((Goal(calls, latency),))
    serve = "tests.targets.faulty:serve_well"
    tuner = replace(tuner, objective=goal, each_model=each_model, trace=Trace(listener=progress), serve=serve)
    found = tuner.tune(tasks())
    assert bool(tuner.trials) == raced and bool(asked) == (latency is not None)
    assert progress.ended == ("exhausted" if raced else "met") and progress.trials == tuner.trials
    if not raced:
        assert {way.origin.kind for way in found.values()} == {"predicted"}


def test_a_tuning_run_on_a_gpu_can_be_followed(tuner: GpuTuner) -> None:
    progress = Progress()
    tuner = replace(tuner, trace=Trace(listener=progress), serve="tests.targets.faulty:serve_well")
    tuner.tune(tasks())
    (task,) = progress.tasks.values()
    assert task.state == "done" and task.trials == tuner.trials and 0 < task.best <= task.before
    again = Progress()
    replace(tuner, trace=Trace(listener=again), serve="no:where").tune(tasks())
    assert again.ended == "known" and [task.state for task in again.tasks.values()] == ["known"]
