"""Whole models tuned for a GPU by a process that stands for the card: what is joined, kept, locked and compiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.nvrtc import needs_nvrtc
from tests.targets.pooled import Pooled, imported, partitioned
from tests.tune import fake_gpu
from tilewright.db.database import Database
from tilewright.driver import compile_imported
from tilewright.hw.gpu import H200
from tilewright.link import Linked
from tilewright.measure.runner import Runner
from tilewright.runtime.plan import Plan
from tilewright.support.trace import Trace
from tilewright.targets.cuda import CudaTarget
from tilewright.targets.options import Settings
from tilewright.targets.stages import Chosen, choose_implementations
from tilewright.tune.effort import EFFORTS, Effort, Tuning
from tilewright.tune.progress import Progress

needs_nvrtc()

JOINED = "conv+add+relu+mean"


@dataclass(frozen=True)
class FakeExecutor:
    """Runs a plan on no card: a model takes as long as it has steps."""

    plan: Plan

    def new_outputs(self) -> list[np.ndarray]:
        return []

    def run(self, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray]) -> None:
        assert len(inputs) == len(self.plan.inputs)

    def seconds_of_graph(self) -> float:
        return 1e-5 * len(self.plan.steps)


@dataclass(frozen=True)
class FakeTarget(CudaTarget):
    """An H200 that is there."""

    @property
    def is_here(self) -> bool:
        return True

    def runner(self, threads: int) -> Any:
        return Runner(threads, device=0, builders=2, timing="tests.tune.fake_gpu:serve")

    def executor(self, linked: Linked, threads: int) -> Any:
        return FakeExecutor(linked.plan)


TARGET = FakeTarget(H200, 0)


@pytest.fixture
def tuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tuning:
    """Two candidates of each task."""
    monkeypatch.setitem(EFFORTS, "quick", Effort(60.0, 2, 2))
    return Tuning("quick", db=tmp_path / "tuning.db")


def chosen(tuning: Tuning, lock: Path | None = None) -> tuple[Chosen, Progress]:
    progress = Progress()
    partition = partitioned(Pooled())
    trace = Trace(listener=progress)
    return choose_implementations(
        Settings(TARGET, tuning=tuning, lock=lock, trace=trace), [partition]
    ), progress


def is_joined(found: Chosen) -> bool:
    return any(call.task.label == JOINED for call in found.partitions[0].calls)


@pytest.mark.parametrize("joined", [True, False], ids=["joined", "apart"])
def test_whether_a_pair_is_joined_is_measured_and_remembered(
    joined: bool, tuning: Tuning, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(fake_gpu.FAST if joined else fake_gpu.SLOW, JOINED)
    found, progress = chosen(tuning)
    assert is_joined(found) == joined and progress.trials >= 5
    assert JOINED in {task.label for task in progress.tasks.values()}, "it is measured either way"
    measured = {choice.origin.kind for choice in found.choices.values()}
    assert measured == {"tuned", "only"} or measured == {"tuned"}, measured

    # The same again without a measurement, with effort="none" too, whatever is predicted.
    again, progress = chosen(tuning)
    assert progress.ended == "known" and progress.trials == 0 and is_joined(again) == joined
    plain, _ = chosen(replace(tuning, effort="none"))
    assert {k: c.config for k, c in plain.choices.items()} == {k: c.config for k, c in found.choices.items()}
    assert is_joined(plain) == joined

    # A lock holds it without any database.
    lock = tmp_path / "lock.json"
    chosen(replace(tuning, effort="none"), lock)
    locked, _ = chosen(Tuning("none", db=tmp_path / "empty.db"), lock)
    assert is_joined(locked) == joined
    assert {choice.origin.kind for choice in locked.choices.values()} == {"lock"}


def test_a_model_is_tuned_and_compiled_with_what_won(tuning: Tuning, tmp_path: Path) -> None:
    model = imported(Pooled())
    progress = Progress()
    first = compile_imported(model, TARGET, tuning=tuning, trace=Trace(listener=progress))
    assert progress.ended and progress.trials
    first.plan.validate()
    plain = compile_imported(model, CudaTarget(H200), tuning=Tuning("none", db=tuning.db))
    assert plain.plan.steps == first.plan.steps, "what was measured is taken without a card"
    origins = {info.origin.kind for info in plain.plan.tasks.values()}
    assert "tuned" in origins and origins <= {"tuned", "only", "default"}
    Database.open(tmp_path / "empty.db").close()
    empty = compile_imported(model, CudaTarget(H200), tuning=Tuning("none", db=tmp_path / "empty.db"))
    assert {info.origin.kind for info in empty.plan.tasks.values()} <= {"predicted", "default"}
