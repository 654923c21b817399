"""The partition by dynamic programming on described GPUs: chains are groups if a candidate computes them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tilewright
from tilewright.dataset.models import model_sources
from tilewright.db.database import Database
from tilewright.db.record import Decision, Key
from tilewright.driver import check_passes
from tilewright.errors import OptionError
from tilewright.frontend import import_model
from tilewright.graph.task import Partition
from tilewright.hw import host
from tilewright.hw.gpu import H200
from tilewright.rewrites import dynamic
from tilewright.space.template import Work
from tilewright.support.trace import Trace
from tilewright.targets.cpu import CpuTarget
from tilewright.targets.cuda import CudaTarget
from tilewright.targets.options import CompileOptions
from tilewright.targets.target import Cutting, computed
from tilewright.tune.choose import choose


def cut(model: nn.Module, x: torch.Tensor, partition: str = "dynamic") -> Partition:
    imported = import_model(model.half().eval(), (x.half(),))
    target = CudaTarget(replace(H200, libraries=("cublaslt", "torch")))
    return target.partition(imported, "fast", Trace.off(), cutting=Cutting(partition))


def feed_forward(width: int, wide: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, wide), nn.ReLU(), nn.Linear(wide, width))


def test_two_narrow_gemms_are_one_kernel() -> None:
    x = torch.zeros(16384, 64)
    model = feed_forward(64, 128)
    assert [call.task.label for call in cut(model, x).calls] == ["matmul+add+relu+matmul+add"]
    assert [call.task.label for call in cut(model, x, "greedy").calls] == ["matmul+add+relu", "matmul+add"]


def test_two_wide_gemms_are_two() -> None:
    found = cut(feed_forward(768, 3072), torch.zeros(512, 768))
    assert [call.task.label for call in found.calls] == ["matmul+add+relu", "matmul+add"]


def test_the_report_is_in_the_trace() -> None:
    trace = Trace()
    imported = import_model(feed_forward(64, 128).half().eval(), (torch.zeros(16384, 64).half(),))
    CudaTarget(H200).partition(imported, "fast", trace)
    (event,) = (event for event in trace.events if event.name == "rewrites.partition")
    assert event.notes["fusion"]["changed"] == 1
    assert event.notes["fusion"]["seconds"] < event.notes["fusion"]["greedy_seconds"]


def test_another_partition_is_refused() -> None:
    with pytest.raises(OptionError, match="partition must be one of 'dynamic', 'greedy', got 'magic'"):
        CompileOptions(partition="magic").check()


def test_a_padded_norm_is_two_kernels_on_a_cpu() -> None:
    """A transposed convolution pads its operand; a norm in the same kernel would read rows beyond its input's."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(4)
            self.up = nn.ConvTranspose2d(
                4, 16, 3, stride=2, padding=1, output_padding=1, groups=4, bias=False
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.up(self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2))

    model, x = Model().eval(), torch.randn(1, 4, 1, 9)
    fast = tilewright.compile(model, (x,))
    torch.testing.assert_close(fast(x), model(x), atol=1e-5, rtol=1e-5)


def test_the_passes_are_checked_for_the_cut_that_is_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[Cutting] = []
    cut = CpuTarget.partition

    def recorded(*given: Any, **named: Any) -> Partition:
        seen.append(named["cutting"])
        return cut(*given, **named)

    path = tmp_path / "tuning.sqlite"
    Database.open(path).close()
    monkeypatch.setattr(CpuTarget, "partition", recorded)
    model, x = feed_forward(4, 8).eval(), torch.randn(2, 4)
    options: list[dict[str, Any]] = [
        {"partition": "greedy", "threads": 1, "db": path},
        {"lock": path.with_suffix(".lock")},
    ]
    for each in options:
        tilewright.compile(model, (x,), target="cpu", **each)
        assert check_passes(model, (x,), [x.numpy()], target="cpu", **each).ok
    assert seen[0] == seen[1] == Cutting("greedy", 1, path) and not seen[0].explores
    assert seen[2] == seen[3] and not seen[2].measured


def test_a_cut_that_was_tuned_stays_until_a_run_measures_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One kernel came out slower than predicted, and so a larger group that was never measured is predicted to be
    faster than it."""
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    target = CpuTarget(host())
    rows = nn.Unflatten(0, (-1, 2)), nn.Flatten(1)  # in pairs: what follows is no part of the chain
    model, x = nn.Sequential(*feed_forward(64, 128), *rows, nn.Linear(128, 32)).eval(), torch.zeros(256, 64)
    imported = import_model(model, (x,))
    before = target.partition(imported, "fast", Trace.off(), cutting=Cutting("greedy"))
    works = [Work(task, host(), "fast") for task, _ in computed(before).values()]
    assert len(works) == 3
    with Database.open() as database:
        for number, work in enumerate(works):
            chosen = choose(work)
            seconds = (chosen.seconds or 1e-6) * (1000 if number == 0 else 1)
            database.decide(Decision(Key.of(work, 0), chosen.config, seconds, "quick", 60.0, 12))
    after = computed(target.partition(imported, "fast", Trace.off()))
    explored = target.partition(imported, "fast", Trace.off(), cutting=Cutting(explores=True))
    assert set(after) == set(computed(before)) != set(computed(explored))


def test_a_data_set_has_the_same_tasks_whatever_was_tuned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    target = CpuTarget(host())
    monkeypatch.setattr(dynamic, "MARGIN", 0.9)  # so that there is a rival
    model, x = feed_forward(64, 128).eval(), torch.zeros(256, 64)
    before = {source.make().key for source in model_sources([("model", model, (x,))], target)}
    imported = import_model(model, (x,))
    predicted = target.partition(imported, "fast", Trace.off(), cutting=Cutting(measured=False))
    rival = predicted.rival()
    assert rival is not None
    with Database.open() as database:
        for cut, seconds in ((predicted, 10.0), (rival.partition, 1e-6)):
            for task, _ in computed(cut).values():
                work = Work(task, host(), "fast")
                database.decide(Decision(Key.of(work, 0), choose(work).config, seconds, "quick", 60.0, 12))
    measured = computed(target.partition(imported, "fast", Trace.off()))
    after = {source.make().key for source in model_sources([("model", model, (x,))], target)}
    assert after == before != set(measured)
