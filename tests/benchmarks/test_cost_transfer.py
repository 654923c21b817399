"""The benchmark of transfer between GPUs, on a made-up kernel whose best configs are the same on all of them."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("lightgbm")

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import cost_transfer
from cost_transfer import ALL_TABLES, TREES, Known, Trial, read, report, share

GPUS = ("A100", "A4000", "W6600")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for factor, gpu in enumerate(GPUS, 1):
        with (tmp_path / f"scale-{gpu}.csv").open("w") as file:
            rows = csv.writer(file)
            rows.writerow(["block", "unroll", "same", "time_ms"])
            for block in (1, 2, 4, 8, 16, 32):
                for unroll in (1, 2, 4, 8, 16):
                    failed = gpu == "A4000" and (block, unroll) == (1, 1)
                    rows.writerow([block, unroll, 7, "" if failed else factor * (64 / block + 16 / unroll)])
    return tmp_path


def test_a_kernel_has_the_knobs_that_vary_and_its_failures(folder: Path) -> None:
    (kernel,) = read(folder)
    assert [knob.name for knob in kernel.space.knobs] == ["block", "unroll"] and len(kernel.configs) == 30
    assert np.isnan(kernel.seconds["A4000"]).sum() == 1 and not np.isnan(kernel.seconds["A100"]).any()
    assert share(kernel.seconds["A100"], [int(np.argmin(kernel.seconds["A100"]))]) == 1.0


def test_a_trial_knows_nothing_of_the_gpu_that_is_left_out(folder: Path) -> None:
    (kernel,) = read(folder)
    what = Known(kernel, "A100", 12, seed=1)
    assert set(what.others) == {"A4000", "W6600"} and all(len(at) == 12 for at in what.others.values())
    before = what.trees([])
    kernel.seconds["A100"][:] = np.random.default_rng(0).uniform(1, 2, len(before))
    np.testing.assert_array_equal(what.trees([]), before)
    assert (what.trees(what.random) != before).any()  # it learns from what is measured there


def test_trees_on_knobs_alone_do_not_see_the_machine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (kernel,) = read(folder)
    what = Known(kernel, "A100", 20, seed=1)
    alone, with_machine = what.trees([]), what.trees([], sees_machine=True)
    monkeypatch.setattr(cost_transfer, "GPUS", dict.fromkeys(cost_transfer.GPUS, cost_transfer.GPUS["W6600"]))
    np.testing.assert_array_equal(what.trees([]), alone)
    assert alone.shape == with_machine.shape


def test_the_whole_benchmark_goes_on_where_it_was(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = folder / "log.jsonl"
    monkeypatch.setattr(cost_transfer, "steps_of", lambda known: 3)
    trials: list[Trial] = []
    for method in ("attention", *TREES, "random", ALL_TABLES):
        found = cost_transfer._one((folder, "scale", "A100", 12, 0, method, "cpu"))
        assert all(0 < trial.best_of <= 1 and 0 < trial.after_random <= 1 for trial in found)
        trials += found
    assert len(trials) == 6  # the network alone is one more
    by_method = {trial.method: trial for trial in trials}
    assert by_method[ALL_TABLES].best_of == 1.0  # the best configs are the same everywhere
    log.write_text("".join(json.dumps(trial.__dict__) + "\n" for trial in trials))
    methods = ",".join(each for each in by_method if each not in (ALL_TABLES, "attention: its network alone"))
    arguments = [str(folder), "--gpus", "A100", "--known", "12", "--seeds", "1", "--methods", methods]
    monkeypatch.setattr(sys, "argv", ["cost_transfer.py", *arguments, "--log", str(log)])
    cost_transfer.main()  # everything is in the log
    assert len(log.read_text().splitlines()) == 6
    said = capsys.readouterr().out
    assert f"| scale | 12 | {TREES[0]} | 1 | {by_method[TREES[0]].best_of:.3f} |" in said
    assert said.startswith(report(trials).splitlines()[0])
