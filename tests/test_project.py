"""The project keeps its own promises: few dependencies, packages in order, a light import, a CI that runs what we
say."""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest brings it there
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "onnx", "lightgbm", "llvmlite", "transformers", "onnxruntime", "triton", "ray")


@pytest.fixture(scope="module")
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def run_python(*arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments],
        check=False,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


# -- what is installed ------------------------------------------------------------------------------------------------


LOADED = """
import sys
from importlib.metadata import packages_distributions

path, *base = sys.argv[1:]
owners = {name: {each.lower().replace("-", "_") for each in found} for name, found in packages_distributions().items()}

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if owners.get(name, {"tilewright"}).isdisjoint({*base, "tilewright"}):
            raise ImportError(f"{name} is not among the dependencies")

sys.meta_path.insert(0, Refuse())
import tilewright
model = tilewright.load(path)
import numpy
model(numpy.ones((2, 3), numpy.float32))
print(*(each for each in base if not any(each in found and name in sys.modules for name, found in owners.items())))
"""


def test_the_core_is_what_loading_a_model_uses(pyproject: dict[str, Any], tmp_path: Path) -> None:
    """It needs no other package, and it imports each of these."""
    onnx = pytest.importorskip("onnx")
    import tilewright

    text = '<ir_version: 10, opset_import: ["" : 17]> g (float[2,3] x) => (float[2,3] y) {y = Relu(x)}'
    tilewright.compile(onnx.parser.parse_model(text)).save(tmp_path / "m.tw")
    names = [re.split(r"[<>=!~\[; ]", line)[0] for line in pyproject["project"]["dependencies"]]
    done = run_python("-c", LOADED, str(tmp_path / "m.tw"), *names)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [], "dependencies that loading does not use"


def test_the_extras_bring_what_they_are_for(pyproject: dict[str, Any]) -> None:
    extras = pyproject["project"]["optional-dependencies"]
    names = {extra: " ".join(lines) for extra, lines in extras.items()}
    assert "typer" in names["cli"] and "jinja2" in names["cli"] and "lightgbm" in names["tune"]
    for extra in ("torch", "onnx"):
        assert "tilewright[cli,tune]" in extras[extra]
    assert "tilewright[cli,tune" in names["dev"], "the tests need both"
    assert "triton" not in extras


def test_the_package_says_who_and_where(pyproject: dict[str, Any]) -> None:
    assert pyproject["project"]["authors"]
    urls = pyproject["project"]["urls"]
    assert {"Homepage", "Source", "Documentation", "Changelog", "Issues"} <= set(urls)
    assert all(url.startswith("https://") for url in urls.values())


def test_links_of_the_description_are_absolute(monkeypatch: pytest.MonkeyPatch) -> None:
    interface = ModuleType("hatchling")  # only the build has it
    interface.MetadataHookInterface = object  # type: ignore[attr-defined]
    for name in ("hatchling", "hatchling.metadata", "hatchling.metadata.plugin"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "hatchling.metadata.plugin.interface", interface)
    absolute = runpy.run_path(str(ROOT / "hatch_build.py"))["absolute"]

    text = absolute((ROOT / "README.md").read_text(), "https://github.com/a/b")
    assert "https://github.com/a/b/blob/main/docs/01-quick-start.md" in text
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    assert targets and [link for link in targets if not link.startswith(("https://", "#"))] == []
    assert absolute("![chart](docs/chart.svg)", "https://github.com/a/b") == (
        "![chart](https://raw.githubusercontent.com/a/b/main/docs/chart.svg)"
    )


def test_every_dependency_has_a_lower_bound(pyproject: dict[str, Any]) -> None:
    lines = [*pyproject["project"]["dependencies"]]
    for extra in pyproject["project"]["optional-dependencies"].values():
        lines += [line for line in extra if not line.startswith("tilewright[")]
    assert [line for line in lines if ">=" not in line] == []


def test_importing_tilewright_loads_no_framework() -> None:
    code = f"import sys, tilewright; print(sorted(set({HEAVY!r}) & set(sys.modules)))"
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


# -- the packages -----------------------------------------------------------------------------------------------------


def test_every_package_has_its_position_among_the_layers(pyproject: dict[str, Any]) -> None:
    layers = next(
        c["layers"] for c in pyproject["tool"]["importlinter"]["contracts"] if c["type"] == "layers"
    )
    placed = set(re.findall(r"\w+", " ".join(layers)))
    package = ROOT / "tilewright"
    rooms = {path.parent.name for path in package.glob("*/__init__.py")}
    rooms |= {path.stem for path in package.glob("*.py")} - {"__init__"}
    assert rooms <= placed, f"give {sorted(rooms - placed)} a place in [tool.importlinter] of pyproject.toml"


def test_no_file_is_long() -> None:
    """One that outgrows 600 lines usually holds two ideas."""
    package = ROOT / "tilewright"
    lines = {str(path.relative_to(package)): path.read_text().count("\n") for path in package.rglob("*.py")}
    assert {name: count for name, count in lines.items() if count > 600} == {}


# -- what CI runs, and what the papers say ----------------------------------------------------------------------------


def test_ci_runs_the_documented_commands() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    commands = script.read_text().splitlines()
    assert "make lint" in commands
    assert "make test" in commands
    readme = ROOT / "README.md"
    assert readme.exists()
    assert "make test" in readme.read_text()


def test_changelog_names_the_version(pyproject: dict[str, Any]) -> None:
    version = pyproject["project"]["version"]
    assert re.search(rf"^## \[{re.escape(version)}\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "tilewright" / "py.typed").exists()


# -- the benchmark ----------------------------------------------------------------------------------------------------


def test_the_benchmark_runs_and_outlives_a_system_that_is_missing(tmp_path: Path) -> None:
    results, table = tmp_path / "results.json", tmp_path / "table.md"
    done = run_python(
        "benchmarks/cpu_models.py", "--small", "--models=bert-tiny", "--systems=torch-eager,torch-nhwc,ours",
        "--rounds=1", f"--json={results}", f"--markdown={table}", timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (model,) = json.loads(results.read_text())["models"]
    assert model["absent"] == {"torch-nhwc": {"reason": "the model takes no images", "failed": False}}
    assert model["ours_over_torch_eager"] > 0
    assert model["systems"]["torch-eager"]["error"] == 0
    assert model["systems"]["ours"]["error"] < 1e-4
    assert "| bert-tiny |" in table.read_text()


def test_the_benchmark_of_operators_runs(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    results, table = tmp_path / "results.json", tmp_path / "table.md"
    done = run_python(
        "benchmarks/cpu_ops.py", "--quick", "--only=gemm,attention", "--cases=x", "--systems=numpy,ours,machine",
        "--threads=1", f"--json={results}", f"--markdown={table}", timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(results.read_text())
    assert [case["section"] for case in found["cases"]] == ["gemm"] * 3 + ["attention"]
    for case in found["cases"]:
        assert case["best_baseline"] == "numpy" and case["limit"] > 0 and case["efficiency"] > 0
        assert all(timing["error"] < 1e-5 for timing in case["systems"].values())
    assert {c["met"] for criteria in found["criteria"].values() for c in criteria} <= {True, False}
    assert "## attention" in table.read_text()


# -- one meaning for each name ----------------------------------------------------------------------------------------

# Public names of classes with several meanings. Rename one instead of adding to this list: it may only shrink. Classes
# of the same role for several targets, such as `Along` of LLVM and of CUDA, may share a name for good.
SHARED_NAMES = {
    "Absent": 2, "Along": 2, "Assignment": 2, "Attention": 2, "Block": 2, "BlockPointer": 3, "Budget": 2,
    "Buffer": 2, "Builder": 2, "ChainWork": 2, "Compiled": 3, "Condition": 2, "Context": 2, "Control": 2,
    "Cut": 2, "Cycles": 2, "Default": 2, "Device": 3, "Epilogue": 2, "Executor": 4, "Expressions": 2,
    "For": 2, "Frame": 2, "Gemm": 2, "Group": 2, "If": 2, "Launch": 2, "Layer": 2, "Layout": 2, "Left": 2,
    "Limits": 2, "Location": 2, "Loops": 2, "Machine": 2, "Match": 2, "Memory": 3, "Objective": 2, "Op":
    2, "Part": 2, "Pool": 2, "Region": 2, "Rule": 2, "Scope": 2, "Sizes": 2, "SourceLocation": 2, "Tile":
    2, "Timer": 2, "Values": 2, "Work": 2, "Workers": 3, "Written": 2,
}  # fmt: skip


def test_class_names_have_one_meaning() -> None:
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tilewright").rglob("*.py")):
        if "zoo" in path.parts:
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(str(path.relative_to(ROOT / "tilewright")))
    shared = {name: paths for name, paths in found.items() if len(paths) > 1}
    grown = {name: paths for name, paths in shared.items() if len(paths) > SHARED_NAMES.get(name, 1)}
    assert not grown, f"choose another name for the new class: {grown}"
    shrunk = {name: count for name, count in SHARED_NAMES.items() if len(shared.get(name, "x")) < count}
    assert not shrunk, f"lower or remove these in SHARED_NAMES: {shrunk}"
