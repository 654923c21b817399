"""`tilewright bench`: who runs, who cannot and why, and what is left of an interrupted run."""

from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from tests.cli.inprocess import Done, run_here
from tests.cli.test_manners import MINE, Command
from tilewright.cli import baselines
from tilewright.cli import bench as bench_module

SCALED = """<ir_version: 10, opset_import: ["" : 17]>
    agraph (float[3] b, float[2, 3] x) => (float[2, 3] y) {z = Mul(x, b) y = Relu(z)}"""


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench_module, "_PAUSE", 0.0)
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    onnx.save(onnx.parser.parse_model(SCALED), tmp_path / "scaled.onnx")
    return lambda *arguments: run_here(monkeypatch, capsys, *arguments)


def rows(done: Done) -> dict[str, dict[str, Any]]:
    assert done.code == 0, done.err
    return {row["name"]: row for row in json.loads(done.out)["baselines"]}


@pytest.fixture
def onnx_runtime(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A package of that name whose sessions run onnx's own reference; the threads that sessions were given."""
    from onnx.reference import ReferenceEvaluator

    threads: list[int] = []

    class Session:
        def __init__(self, path: str, options: Any, providers: list[str]) -> None:
            self._model = ReferenceEvaluator(path)
            threads.append(options.intra_op_num_threads)

        def get_inputs(self) -> list[Any]:
            return [SimpleNamespace(name=name) for name in self._model.input_names]

        def run(self, _: None, feed: dict[str, np.ndarray]) -> Any:
            return self._model.run(None, feed)

    module = ModuleType("onnxruntime")
    module.__spec__ = ModuleSpec("onnxruntime", None)
    module.SessionOptions = SimpleNamespace  # type: ignore[attr-defined]
    module.InferenceSession = Session  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "onnxruntime", module)
    return threads


def test_an_onnx_model_against_onnx_runtime(cli: Command, onnx_runtime: list[int]) -> None:
    done = cli("bench", "scaled.onnx", "--against", "ort", "--rounds", "1", "--threads", "1", "--json")
    (row,) = rows(done).values()
    assert row["seconds"] > 0 and row["speedup"] > 0 and row["error"] < 1e-6 and onnx_runtime == [1]
    found = json.loads(done.out)
    assert found["best"] == "onnxruntime" and found["tilewright_seconds"] > 0


def test_inputs_of_an_onnx_model_go_to_their_names(
    cli: Command, onnx_runtime: list[int], tmp_path: Path
) -> None:
    np.savez(tmp_path / "given.npz", x=np.ones((2, 3), np.float32), b=np.arange(3, dtype=np.float32))
    done = cli("bench", "scaled.onnx", "--against", "ort", "--inputs", "given.npz", "--rounds", "1", "--json")
    assert rows(done)["onnxruntime"]["error"] == 0


def test_a_pytorch_model_against_pytorch_and_onnx_runtime(cli: Command, onnx_runtime: list[int]) -> None:
    pytest.importorskip("onnxscript")
    found = rows(cli("bench", "mine:both", "--against", "torch,onnxruntime", "--rounds", "1", "--json"))
    assert list(found) == ["torch", "onnxruntime"]
    assert all(row["seconds"] > 0 and row["error"] < 1e-6 and not row["reason"] for row in found.values())


def test_a_baseline_that_is_not_installed_is_said_where_it_was_named(
    cli: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        baselines.importlib.util, "find_spec", lambda name: None if name == "openvino" else object()
    )
    named = rows(cli("bench", "mine:make", "--against", "torch,openvino", "--rounds", "1", "--json"))
    assert named["openvino"]["reason"] == "not installed: pip install openvino"
    assert named["openvino"]["seconds"] is None
    text = cli("bench", "mine:make", "--against", "torch,openvino", "--rounds", "1")
    assert (
        "OpenVINO: not installed" in text.err and "PyTorch eager" in text.out and "OpenVINO" not in text.out
    )


def test_all_leaves_out_what_is_not_installed_and_tells_why_others_cannot_run(
    cli: Command, monkeypatch: pytest.MonkeyPatch, onnx_runtime: list[int]
) -> None:
    def broken(call: baselines.TimedCall) -> Any:
        raise RuntimeError("no compiler\nmore lines")

    monkeypatch.setattr(baselines, "BASELINES", {**baselines.BASELINES})
    replaced = baselines.BaselineSystem("inductor", "Inductor", "torch", broken)
    absent = baselines.BaselineSystem("openvino", "OpenVINO", "no_such_package", broken)
    monkeypatch.setitem(baselines.BASELINES, "inductor", replaced)
    monkeypatch.setitem(baselines.BASELINES, "openvino", absent)
    found = rows(cli("bench", "scaled.onnx", "--rounds", "1", "--json"))
    assert list(found) == ["inductor", "onnxruntime"] and found["onnxruntime"]["seconds"] > 0
    assert found["inductor"]["reason"] == "RuntimeError: no compiler"


def test_pytorch_cannot_run_an_onnx_file(cli: Command) -> None:
    found = rows(cli("bench", "scaled.onnx", "--against", "torch", "--rounds", "1", "--json"))
    assert found["torch"]["reason"] == "the model is an ONNX file"


def test_an_interrupted_run_shows_the_results_so_far(cli: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = iter([[1e-3], [2e-3], KeyboardInterrupt()])

    def turn(run: Any) -> list[float]:
        result = next(turns)
        if isinstance(result, KeyboardInterrupt):
            raise result
        return result

    monkeypatch.setattr(bench_module, "_turn", turn)
    done = cli("bench", "mine:make", "--against", "torch", "--json")
    assert done.code == 130
    found = json.loads(done.out)
    assert found["tilewright_seconds"] == 1e-3 and found["baselines"][0]["speedup"] == 2.0


def test_the_pytorch_results_are_compared(cli: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = baselines.BaselineSystem(
        "torch", "PyTorch eager", "torch", lambda call: lambda: torch.full((2, 3), 1e3)
    )
    monkeypatch.setattr(bench_module, "chosen", lambda against: ([wrong], True))
    assert rows(cli("bench", "mine:make", "--rounds", "1", "--json"))["torch"]["error"] > 0.5


@pytest.mark.parametrize(("load", "told"), [(0.1, False), (4.0, True)])
def test_a_busy_machine_is_told(
    cli: Command, monkeypatch: pytest.MonkeyPatch, load: float, told: bool
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (load * bench_module.knobs.usable_cores(), 0.0, 0.0))
    done = cli("bench", "mine:make", "--against", "torch", "--rounds", "1")
    assert ("other programs were running (4.0 processes for each core)" in done.err) is told


@pytest.mark.slow
def test_inductor(cli: Command) -> None:
    (row,) = rows(cli("bench", "mine:make", "--against", "inductor", "--rounds", "1", "--json")).values()
    assert row["seconds"] and row["error"] < 1e-5, row["reason"]
