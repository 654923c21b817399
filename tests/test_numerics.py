"""The modes of numerics, and that what was measured under another promise is not reused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tilewright
from tests.space.templates.cpu.test_contraction import matmul_task
from tilewright import knobs
from tilewright.db.database import Database
from tilewright.db.record import Decision, Key
from tilewright.hw import host
from tilewright.numerics import NUMERICS, is_strict, may_lose_digits, may_round_to_tf32, mode_of, recorded
from tilewright.space.space import Config
from tilewright.space.template import Work


def test_each_mode_allows_what_it_says() -> None:
    assert [mode for mode in NUMERICS if is_strict(mode)] == ["strict"]
    assert [mode for mode in NUMERICS if may_lose_digits(mode)] == ["relaxed"]
    assert [mode for mode in NUMERICS if may_round_to_tf32(mode)] == ["relaxed", "tf32"]
    assert knobs.get("numerics") == "fast"


@pytest.mark.parametrize("mode", NUMERICS)
def test_a_recorded_mode_is_read_back(mode: str) -> None:
    assert mode_of(recorded(mode)) == mode


def test_decisions_of_the_first_fast_are_not_reused(tmp_path: Path) -> None:
    """It had no bound for each element: its winner may be a kernel that is not allowed any more."""
    key = Key.of(Work(matmul_task(8, 16, 8), host()), threads=1)
    before = Key(key.task, key.machine, key.toolchain, "fast", key.threads)
    assert key != before
    with Database.open(tmp_path / "tuning.db") as database:
        database.decide(Decision(before, Config.of("strassen", {}), 1e-3, "quick", 60.0, 8))
        assert database.decision(before) is not None and database.decision(key) is None


class Scaled(nn.Module):
    """Divided by its largest number: of all, and of each row."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x / x.amax(), x / x.amax(1, keepdim=True)


@pytest.mark.parametrize("magnitude", [2e-39, 1e-42, 1e-38, 1.0, 3e38])
def test_a_division_by_any_number_is_one(magnitude: float) -> None:
    """The reciprocal of a subnormal number is infinite, and that of a very large one has no 24 bits."""
    x = torch.rand(64, 48, generator=torch.Generator().manual_seed(0)) * magnitude
    results = tilewright.compile(Scaled().eval(), (x,), numerics="fast", target="cpu")(x)
    for got, exact in zip(results, Scaled()(x.double()), strict=True):
        np.testing.assert_allclose(got.numpy(), exact.numpy(), rtol=1e-7, atol=0)
