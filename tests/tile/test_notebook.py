"""A kernel that a notebook's cell defines: its source is in `linecache` alone, as IPython puts it there."""

from __future__ import annotations

import linecache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilewright
from tilewright.errors import KernelShapeError

_CELL = """
import tilewright, tilewright.tile as tl

STEP = 1

@tilewright.kernel
def stepped(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) + STEP, mask=at < n)
"""
_MISTAKE = _CELL.replace("+ STEP", "+ tl.arange(0, 2 * BLOCK)")


def run_cell(text: str, number: int, names: dict[str, Any]) -> None:
    file = f"/tmp/ipykernel_1/{number}.py"
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    exec(compile(text, file, "exec"), names)


def grid(meta: dict[str, Any]) -> tuple[int]:
    return (-(-meta["n"] // meta["BLOCK"]),)


@pytest.fixture
def names() -> dict[str, Any]:
    return {"__name__": "__main__"}


def test_a_cell_runs_is_run_again_and_is_tuned(names: dict[str, Any], tmp_path: Path) -> None:
    x = np.arange(100, dtype=np.float32)
    run_cell(_CELL, 1, names)
    for launch in (names["stepped"][grid], names["stepped"].interpret[grid]):
        out = np.zeros_like(x)
        launch(x, out, 100, BLOCK=16)
        np.testing.assert_array_equal(out, x + 1)
    run_cell("STEP = 2", 2, names)
    names["stepped"][grid](x, out, 100, BLOCK=16)
    np.testing.assert_array_equal(out, x + 2)
    run_cell(_CELL.replace("+ STEP", "* 3"), 3, names)
    tuned = tilewright.autotune({"BLOCK": (16, 64)}, key=["n"], db=tmp_path / "trials.db")(names["stepped"])
    found = tuned.tune(grid, x, out, 100, trials=2)
    assert found.config["BLOCK"] in (16, 64)
    tuned[grid](x, out, 100)
    np.testing.assert_array_equal(out, x * 3)


def test_a_mistake_in_a_cell_is_shown_at_its_line(names: dict[str, Any]) -> None:
    run_cell(_MISTAKE, 4, names)
    x = np.zeros(8, np.float32)
    with pytest.raises(
        KernelShapeError, match=r"ipykernel_1/4.py(.|\n)*\+ tl.arange\(0, 2 \* BLOCK\)(.|\n)*\^"
    ):
        names["stepped"][grid](x, x.copy(), 8, BLOCK=8)
