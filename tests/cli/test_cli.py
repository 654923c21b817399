"""The commands, run as a user runs them, in their own process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from tests.cli.forked import run_forked


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "COLUMNS": "120", **more}


def run_from_nothing(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tilewright.cli", *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment(),
        timeout=300,
        check=False,
    )


def run(*arguments: str, folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return run_forked(arguments, folder, environment(**more))


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    done = run_from_nothing("compile", "resnet18", "--small", "-o", "m.tw", folder=folder)
    assert done.returncode == 0, done.stderr
    assert "saved to m.tw" in done.stdout
    assert "building" in done.stderr  # progress, also where there is no terminal
    return folder / "m.tw"


def test_compile_as_json(tmp_path: Path) -> None:
    done = run("compile", "bert-tiny", "--small", "--json", folder=tmp_path)
    result = json.loads(done.stdout)
    assert result["kernels"] > 0 and (tmp_path / result["artifact"]).stat().st_size == result["bytes"]
    assert result["arena_bytes"] <= 1.1 * result["arena_lower_bound"]


def test_explain_an_artifact(artifact: Path) -> None:
    done = run_from_nothing("explain", str(artifact), "--json", folder=artifact.parent)
    rows = json.loads(done.stdout)["rows"]
    assert any("conv" in row["label"] for row in rows)
    assert all(row["seconds"] > 0 and row["error"] < 1e-5 for row in rows)
    text = run("explain", str(artifact), folder=artifact.parent).stdout
    assert "layer1.0.conv1 + bn1 + relu" in text and "arena" in text
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80 and lines[0].startswith("layer ")
    assert not any(row["kernel"][:12] in text or row["task"][:12] in text for row in rows)


def test_explain_shows_more_on_request(artifact: Path) -> None:
    rows = json.loads(run("explain", str(artifact), "--json", folder=artifact.parent).stdout)["rows"]
    wide = run("explain", str(artifact), "--wide", folder=artifact.parent).stdout
    assert all(row["program"] in wide and row["label"] in wide for row in rows)
    hashes = run("explain", str(artifact), "--hashes", folder=artifact.parent).stdout
    assert all(row["kernel"] in hashes and row["task"] in hashes for row in rows)


def test_bench(artifact: Path) -> None:
    alone = json.loads(run_from_nothing("bench", str(artifact), "--json", folder=artifact.parent).stdout)
    assert alone
    both = json.loads(
        run(
            *("bench", "resnet18", "--small", "--rounds", "1", "--against", "torch", "--json"),
            folder=artifact.parent,
        ).stdout
    )
    assert both["best"] == "torch" and both["baselines"][0]["seconds"] > 0
    assert both["tilewright_seconds"] > 0 and both["relative_error"] < 1e-4


def test_doctor(tmp_path: Path) -> None:
    found = json.loads(
        run("doctor", "--no-measure", "--json", folder=tmp_path, TILEWRIGHT_THREADS="2").stdout
    )
    options = {option["name"]: option for option in found["options"]}
    assert options["threads"]["value"] == 2 and options["threads"]["from"] == "environment"
    assert found["machine"]["features"] and found["cache"]["folder"]
    assert "Options" in run("doctor", "--no-measure", folder=tmp_path).stdout


def test_a_model_of_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def make():\n"
        "    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()).eval(), (torch.ones(2, 4),)\n"
        "def wrong():\n"
        "    return 3\n"
    )
    done = run("compile", "mine:make", folder=tmp_path)
    assert done.returncode == 0 and (tmp_path / "make.tw").exists()
    assert run("compile", "mine:wrong", folder=tmp_path).returncode == 1
    assert run("compile", "mine:absent", folder=tmp_path).returncode == 1


def test_check_says_how_far_it_is_from_float64(tmp_path: Path) -> None:
    report = json.loads(run("check", "bert-tiny", "--small", "--json", folder=tmp_path).stdout)
    assert report["ok"] and report["outputs"][0]["error"] < 1e-4
    assert "layout" in [each["name"] for each in report["passes"]]
    assert all(each["error"] <= each["bound"] for each in report["passes"])


def test_check_names_the_pass_after_which_a_result_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "from tilewright.graph.ir import Graph, rebuild\n"
        "from tilewright.graph.op import apply\n"
        "from tilewright.rewrites import pipeline\n"
        "from tilewright.rewrites.base import Pass\n"
        "class Broken(Pass):\n"
        "    name = 'broken'\n"
        "    def run(self, graph):\n"
        "        return rebuild(graph, lambda node, inputs: apply('sin', *inputs) if node.op == 'tanh' else None)\n"
        "def make():\n"
        "    right = pipeline.passes\n"
        "    pipeline.passes = lambda *options: (*right(*options)[:3], Broken(), *right(*options)[3:])\n"
        "    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh()).eval(), (torch.randn(2, 3),)\n"
    )
    done = run("check", "mine:make", folder=tmp_path)
    assert done.returncode == 1 and "WRONG after pass 4 of " in done.stdout and ", broken: " in done.stdout
    report = json.loads(run("check", "mine:make", "--json", folder=tmp_path).stdout)
    assert not report["ok"]
    assert next(each["name"] for each in report["passes"] if each["error"] > each["bound"]) == "broken"
    quick = json.loads(run("check", "mine:make", "--no-passes", "--json", folder=tmp_path).stdout)
    assert not quick["ok"] and quick["passes"] is None


def test_an_onnx_model(tmp_path: Path) -> None:
    from onnx import TensorProto, helper, save

    shape = [2, 3]
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])],
        "relu",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    save(model, tmp_path / "relu.onnx")
    assert run("compile", "relu.onnx", folder=tmp_path).returncode == 0
    assert run("explain", "relu.onnx", folder=tmp_path).returncode == 0
    alone = json.loads(run("bench", "relu.onnx", "--against", "none", "--json", folder=tmp_path).stdout)
    assert alone["tilewright_seconds"] > 0 and alone["baselines"] == []
    refused = run("demo", "relu.onnx", folder=tmp_path)
    assert refused.returncode == 1 and "PyTorch" in refused.stderr


def test_check_an_onnx_model(tmp_path: Path) -> None:
    _save_open_onnx(tmp_path / "scaled.onnx")
    np.savez(tmp_path / "inputs.npz", x=np.arange(6, dtype=np.float32).reshape(2, 3))
    done = run("check", "scaled.onnx", "--inputs", "inputs.npz", "--json", folder=tmp_path)
    report = json.loads(done.stdout)
    assert report["ok"] and report["oracle"]["outputs"][0]["error"] < 1e-6
    assert report["reference"]["outputs"][0]["error"] < 1e-6
    text = run("check", "scaled.onnx", "--inputs", "inputs.npz", folder=tmp_path)
    assert text.returncode == 0 and text.stdout.count("OK: 1 output matches") == 2


@pytest.mark.parametrize(
    ("model", "inputs", "complaint"),
    [
        ("absent.onnx", None, "the file absent.onnx does not exist"),
        ("broken.onnx", None, "not an ONNX model, or a truncated one"),
        (
            "scaled.onnx",
            None,
            "leaves dimensions open: x: rows (axis 0) try: pass example inputs of these sizes: --inputs",
        ),
        ("strange.onnx", None, "Unheard (no converter)"),
        ("scaled.onnx", "absent.npz", "cannot read the inputs in absent.npz"),
        ("scaled.onnx", "text.npz", "cannot read the inputs in text.npz"),
        ("scaled.onnx", "single.npy", "it holds one array without a name"),
        ("scaled.onnx", "misnamed.npz", "the model has no inputs called 'z'"),
        ("scaled.onnx", "double.npz", "its example of float64"),
        ("scaled.onnx", "narrow.npz", "its example [2, 2]"),
        ("two.onnx", "x.npz", "the inputs b are missing"),
        ("resnet18", "x.npz", "--inputs applies to ONNX models only, got resnet18"),
    ],
)
def test_mistakes_of_check_with_onnx(model: str, inputs: str | None, complaint: str, tmp_path: Path) -> None:
    _save_open_onnx(tmp_path / "scaled.onnx")
    _save_open_onnx(tmp_path / "strange.onnx", operator="Unheard", width=3, rows=2)
    (tmp_path / "broken.onnx").write_bytes((tmp_path / "scaled.onnx").read_bytes()[:-9])
    (tmp_path / "text.npz").write_text("no arrays here")
    two = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 17]> agraph (float[2] x, float[2] b) => (float[2] y) {y = Add(x, b)}'
    )
    onnx.save(two, tmp_path / "two.onnx")
    np.save(tmp_path / "single.npy", np.ones(3))
    np.savez(tmp_path / "misnamed.npz", z=np.ones((2, 3), np.float32))
    np.savez(tmp_path / "double.npz", x=np.ones((2, 3)))
    np.savez(tmp_path / "narrow.npz", x=np.ones((2, 2), np.float32))
    np.savez(tmp_path / "x.npz", x=np.ones(2, np.float32))
    done = run("check", model, *(("--inputs", inputs) if inputs else ()), folder=tmp_path)
    assert done.returncode == 1, done.stderr
    assert complaint in " ".join(done.stderr.split())
    assert "try:" in done.stderr and "Traceback" not in done.stderr


def _save_open_onnx(path: Path, operator: str = "Softmax", width: int = 3, rows: int | str = "rows") -> None:
    """x of any number of rows -> operator."""
    given = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [rows, width])
    made = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [rows, width])
    graph = onnx.helper.make_graph([onnx.helper.make_node(operator, ["x"], ["y"])], "g", [given], [made])
    opsets = [onnx.helper.make_opsetid("", 17)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10), path)


def test_an_exported_program(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 3).eval()
    torch.export.save(torch.export.export(model, (torch.ones(2, 4),)), tmp_path / "linear.pt2")
    assert run("compile", "linear.pt2", folder=tmp_path).returncode == 0
    assert (tmp_path / "linear.tw").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (("compile", "elephant"), 1, "zoo"),
        (("compile", "absent.pt2"), 1, "does not exist"),
        (("explain", "absent.tw"), 1, "absent.tw"),
        (("compile", "resnet18", "--small", "--numerics", "sloppy"), 1, "numerics"),
        (("compile",), 2, "Missing argument"),
        (("brew", "coffee"), 2, "No such command"),
    ],
)
def test_mistakes_have_messages_and_exit_codes(arguments, code: int, complaint: str, tmp_path: Path) -> None:
    done = run(*arguments, folder=tmp_path)
    assert done.returncode == code, done.stderr
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("text", "seconds"), [("90", 90.0), ("90s", 90.0), ("1.5m", 90.0), ("2h", 7200.0)])
def test_budgets(text: str, seconds: float) -> None:
    from tilewright.cli.options import parse_seconds

    assert parse_seconds(text) == seconds


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--effort", "quick", "--budget", "soon"), "120s"),
        (("--budget", "5s"), "needs no budget"),
        (("--effort", "some"), "'quick'"),
    ],
)
def test_wrong_efforts_are_named(tmp_path: Path, options: tuple[str, ...], said: str) -> None:
    done = run("compile", "bert-tiny", "--small", *options, folder=tmp_path)
    assert done.returncode in (1, 2) and said in done.stderr


def product_model(path: Path) -> None:
    weights = onnx.numpy_helper.from_array(np.ones((32, 24), np.float32), "w")
    product = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 17]> agraph (float[9, 32] x) => (float[9, 24] y) {y = MatMul(x, w)}'
    )
    product.graph.initializer.append(weights)
    onnx.save(product, path)


def test_nothing_is_imported_from_the_current_folder(tmp_path: Path) -> None:
    """Neither by the command nor by the processes that it measures in."""
    product_model(tmp_path / "product.onnx")
    for name in ("json", "numpy", "random", "socket", "array", "msgspec", "llvmlite"):
        (tmp_path / f"{name}.py").write_text("open('executed', 'a').write(__file__)\nraise ImportError\n")
    done = run_from_nothing("tune", "product.onnx", "--budget", "1s", folder=tmp_path)
    assert not (tmp_path / "executed").exists()
    assert done.returncode == 0 and "tuned (" in done.stderr


def test_signed_artifacts(tmp_path: Path) -> None:
    product_model(tmp_path / "product.onnx")
    (tmp_path / "key").write_bytes(b"k" * 32)
    (tmp_path / "other").write_bytes(b"o" * 32)
    done = run("compile", "product.onnx", "-o", "p.tw", "--sign", "key", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert run("bench", "p.tw", "--trusted", "other", "--trusted", "key", folder=tmp_path).returncode == 0
    refused = run("explain", "p.tw", "--trusted", "other", folder=tmp_path)
    assert refused.returncode == 1 and "not signed with a key that is trusted" in refused.stderr
    ignored = run("explain", "product.onnx", "--trusted", "key", folder=tmp_path)
    assert ignored.returncode == 1 and "--trusted applies to .tw files only" in ignored.stderr
    missing = run("compile", "product.onnx", "--sign", "nothere", folder=tmp_path)
    assert missing.returncode == 1 and "cannot read the key" in missing.stderr


def test_tune_with_a_lock(tmp_path: Path) -> None:
    product_model(tmp_path / "product.onnx")
    cache = {"TILEWRIGHT_CACHE_DIR": str(tmp_path / "cache"), "TILEWRIGHT_THREADS": "1"}
    tuning = ("product.onnx", "--budget", "3s", "--lock", "product.lock")
    done = run("tune", *tuning, folder=tmp_path, **cache)
    assert done.returncode == 0, done.stderr
    assert "tuning 1 tasks, 0 of them known already" in done.stderr and "tuned (" in done.stderr
    assert done.stdout.startswith("layer ") and "before us" in done.stdout
    (tmp_path / "product.lock").rename(tmp_path / "kept.lock")
    again = json.loads(run("tune", *tuning, "--json", folder=tmp_path, **cache).stdout)
    assert again["ended"] == "known" and again["trials"] == 0 and again["models"] == ["product"]
    assert (tmp_path / "product.lock").read_text() == (tmp_path / "kept.lock").read_text()
    (tmp_path / "product.lock").write_text("{}")
    broken = run("compile", "product.onnx", "--lock", "product.lock", folder=tmp_path, **cache)
    assert broken.returncode == 1 and "is not a lock file" in broken.stderr


@pytest.mark.parametrize("budget", ["0", "-5s", "soon"])
def test_a_budget_that_is_none(budget: str, tmp_path: Path) -> None:
    done = run("tune", "resnet18", "--small", f"--budget={budget}", folder=tmp_path)
    assert done.returncode == 2 and "a time above 0" in done.stderr
