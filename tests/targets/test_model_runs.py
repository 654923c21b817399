"""Models that the tuner runs with its choices."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch import nn

from tilewright import frontend
from tilewright.graph.task import Partition
from tilewright.hw import host
from tilewright.link import Boundary, Linked
from tilewright.space.template import Work
from tilewright.support.trace import Trace
from tilewright.targets.cpu import CpuTarget
from tilewright.targets.model_runs import ModelRuns
from tilewright.targets.options import Settings
from tilewright.targets.stages import build_plan
from tilewright.targets.target import Choices, computed
from tilewright.tune.choose import Choice, choose

TARGET = CpuTarget(host())


@pytest.fixture(scope="module")
def partition() -> Partition:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 24), nn.Linear(24, 24), nn.Softmax(-1))
    imported = frontend.import_model(layers.eval().requires_grad_(False), (torch.randn(4, 16),))
    return TARGET.partition(imported, "fast", Trace.off())


def choices(*partitions: Partition) -> dict[str, Choice]:
    return {
        key: choose(Work(task, host(), "fast"))
        for partition in partitions
        for key, (task, _) in computed(partition).items()
    }


def staged(*partitions: Partition) -> ModelRuns:
    def linked(partition: Partition, chosen: Choices, boundary: Boundary) -> tuple[Linked, Mapping[str, str]]:
        return build_plan(Settings(TARGET), partition, chosen, boundary)

    return ModelRuns(TARGET, partitions, linked, 1)


def test_every_task_has_the_time_of_all_its_calls(partition: Partition) -> None:
    run = staged(partition, partition)(choices(partition))
    assert run is not None
    for _ in range(2):
        times = run()
        assert set(times) == set(computed(partition)) and all(0 < each < 1 for each in times.values())


def test_what_does_not_fit_into_memory_is_not_staged(
    partition: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1024))
    assert staged(partition)(choices(partition)) is None
