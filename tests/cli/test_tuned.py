"""After `tilewright tune MODEL` every command that compiles runs the winners, and measures nothing."""

from __future__ import annotations

import inspect
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import typer
from typer.testing import CliRunner

import tilewright
from tests.cli.test_cli import environment
from tests.tune.test_known import winner_of
from tilewright import zoo as models
from tilewright.cli.app import app
from tilewright.cli.options import BuildOptions
from tilewright.codegen.generator import code_of
from tilewright.db.database import Database
from tilewright.db.record import Decision, Key
from tilewright.frontend import import_model
from tilewright.hw import host
from tilewright.space.space import Config
from tilewright.space.template import Work
from tilewright.support.trace import Trace
from tilewright.targets.cpu import CpuTarget
from tilewright.targets.target import Cutting, computed, together
from tilewright.tune.choose import choose
from tilewright.tune.effort import EFFORTS, Effort

SHARED = (
    "--target",
    "--effort",
    "--inputs",
    "--db",
    "--lock",
    "--numerics",
    "--threads",
    "--budget",
    "--seed",
)
ZOO = ("bert-tiny", "--small")


def rows(path: Path) -> int:
    with closing(sqlite3.connect(path)) as connection:
        return int(connection.execute("SELECT count(*) FROM rows").fetchone()[0])


_watching: list[list[str]] = []  # lists of the worker processes that this process has started meanwhile


def _note_workers(event: str, details: tuple[Any, ...]) -> None:
    if event == "subprocess.Popen":
        workers = [str(word) for word in details[1] if str(word).startswith("tilewright.measure.")]
        for started in _watching:
            started += workers


sys.addaudithook(_note_workers)


@contextmanager
def runners_started() -> Iterator[list[str]]:
    """The worker processes of runners, which build and time candidates, that start meanwhile."""
    started: list[str] = []
    _watching.append(started)
    try:
        yield started
    finally:
        _watching.remove(started)


def invoke(*arguments: str, threads: int | None = 1) -> str:
    counted = () if threads is None else ("--threads", str(threads))
    done = CliRunner().invoke(app, [*arguments, *counted, "--json"])
    assert done.exit_code == 0, (done.output, done.exception)
    return done.stdout


@dataclass(frozen=True)
class Tuned:
    """A model, the database that knows its winners, and these as a lock file says them."""

    model: tuple[str, ...]
    db: Path
    winners: dict[str, dict[str, object]]  # by task: template and values

    def choices_of(self, folder: Path, *command: str) -> dict[str, dict[str, object]]:
        """What a command chooses, by the lock file that it writes."""
        lock, before = folder / "again.lock", rows(self.db)
        with runners_started() as runners:
            invoke(command[0], *self.model, *command[1:], "--db", str(self.db), "--lock", str(lock))
        assert not runners, "it has measured"
        assert rows(self.db) == before, "it has written to the database"
        return choices_in(lock)


def choices_in(lock: Path) -> dict[str, dict[str, object]]:
    tasks = json.loads(lock.read_text())["tasks"]
    return {key: {"template": task["template"], "values": task["values"]} for key, task in tasks.items()}


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    """With winners that nothing but the database would choose, wherever a task has another config."""
    database = tmp_path_factory.mktemp("zoo") / "tuning.sqlite"
    model = (
        models.build("bert-tiny", seed=0, small=True),
        models.example_inputs("bert-tiny", small=True, seed=1),
    )
    imported = import_model(*model)
    tasks = together([CpuTarget(host()).partition(imported, "fast", Trace.off())])
    winners = {}
    with Database.open(database) as opened:
        for key, (task, _) in tasks.items():
            work = Work(task, host(), "fast")
            decision = winner_of(work)
            if decision is not None:
                opened.decide(decision)
            config = choose(work).config if decision is None else decision.config
            winners[key] = {"template": config.template, "values": dict(config.values)}
    return Tuned(ZOO, database, winners)


@pytest.fixture(scope="module")
def onnx_model(tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    """As `tilewright tune` has tuned it."""
    folder = tmp_path_factory.mktemp("onnx")
    _save_product(folder / "product.onnx")
    np.savez(folder / "inputs.npz", x=np.ones((9, 32), np.float32))
    model = (str(folder / "product.onnx"), "--inputs", str(folder / "inputs.npz"))
    database, lock = folder / "tuning.sqlite", folder / "tuned.lock"
    with pytest.MonkeyPatch.context() as patch, runners_started() as runners:
        patch.setitem(EFFORTS, "quick", Effort(60.0, 4, 8))
        said = json.loads(invoke("tune", *model, "--db", str(database), "--lock", str(lock)))
    assert said["trials"] and runners
    return Tuned(model, database, choices_in(lock))


def _save_product(path: Path, depth: int = 32, width: int = 24) -> None:
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 17]> agraph (float[n, {depth}] x) => (float[n, {width}] y)'
        " {y = MatMul(x, w)}"
    )
    weight = np.ones((depth, width), np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    onnx.save(model, path)


COMMANDS = {
    "compile": ("-o", "m.tw"),
    "tune": ("--effort", "none"),
    "bench": ("--rounds", "1"),
    "explain": (),
    "check": (),
    "demo": (),
    "report": (),
}
ADVISE = ("--layers", "1", "--within", "60s")  # which measures, and so writes no lock file


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_runs_the_winners(
    command: str, zoo: Tuned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert zoo.choices_of(tmp_path, command, *COMMANDS[command]) == zoo.winners


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "demo"])  # which is for the zoo
def test_and_so_with_an_onnx_model(
    command: str, onnx_model: Tuned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert onnx_model.choices_of(tmp_path, command, *COMMANDS[command]) == onnx_model.winners


@pytest.mark.parametrize("name", ["zoo", "onnx_model"])
def test_advice_is_about_the_winners(name: str, request: pytest.FixtureRequest) -> None:
    tuned: Tuned = request.getfixturevalue(name)
    before = rows(tuned.db)
    found = json.loads(invoke("advise", *tuned.model, *ADVISE, "--db", str(tuned.db)))
    (layer,) = found["layers"]
    winners = {
        str(Config.of(str(winner["template"]), winner["values"]))  # type: ignore[arg-type]
        for winner in tuned.winners.values()
    }
    assert layer["config"] in winners and layer["origin"].startswith("tuned 20")
    assert rows(tuned.db) == before


def test_the_default_database_is_tuned_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --db: the one in the cache folder."""
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setitem(EFFORTS, "quick", Effort(60.0, 4, 8))
    monkeypatch.chdir(tmp_path)
    _save_product(tmp_path / "product.onnx")
    np.savez(tmp_path / "inputs.npz", x=np.ones((9, 32), np.float32))
    model = ("product.onnx", "--inputs", "inputs.npz")
    with runners_started() as runners:
        assert json.loads(invoke("tune", *model, "--lock", "tuned.lock"))["trials"]
    assert runners
    (database,) = (tmp_path / "cache").rglob("tuning.sqlite")
    tuned, kept = choices_in(tmp_path / "tuned.lock"), rows(database)
    with runners_started() as runners:
        for command in ("compile", "explain", "check"):
            lock = f"{command}.lock"
            invoke(command, *model, *COMMANDS[command], "--lock", lock)
            assert choices_in(tmp_path / lock) == tuned
        explained = json.loads(invoke("explain", *model))["rows"]
        again = json.loads(invoke("tune", *model))
    assert {row["origin"]["kind"] for row in explained} == {"tuned"}
    assert again["trials"] == 0 and not runners and rows(database) == kept


def test_where_choices_came_from_is_in_explain_the_report_and_the_artifact(
    zoo: Tuned, tmp_path: Path
) -> None:
    common = (*zoo.model, "--db", str(zoo.db))
    explained = json.loads(invoke("explain", *common))["rows"]
    kinds = {row["origin"]["kind"] for row in explained}
    assert "tuned" in kinds and kinds <= {"tuned", "predicted", "default", "only"}
    reported = json.loads(invoke("report", *common))["tasks"]
    assert any(task["origin"].startswith("tuned 20") for task in reported)
    invoke("compile", *common, "-o", str(tmp_path / "m.tw"))
    loaded = tilewright.load(tmp_path / "m.tw", threads=1)
    assert "tuned" in {info.origin.kind for info in loaded.plan.tasks.values()}
    assert [row["program"] for row in explained] == [row.program for row in loaded.explain().rows]
    page = tmp_path / "report.html"
    done = CliRunner().invoke(app, ["report", *common, "--threads", "1", "-o", str(page)])
    text = page.read_text()
    assert done.exit_code == 0 and "<dt>Chosen</dt><dd>tuned 20" in text
    assert "the speed of PyTorch" in text and explained[0]["layer"] in text


@pytest.fixture(scope="module")
def tuned_apart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database in which the zoo model's greedy groups are decided, every other one far slower than predicted, so
    that groups which were never measured are predicted to be faster."""
    database = tmp_path_factory.mktemp("apart") / "tuning.sqlite"
    model = models.build("bert-tiny", seed=0, small=True)
    imported = import_model(model, models.example_inputs("bert-tiny", small=True, seed=1))
    greedy = CpuTarget(host()).partition(imported, "fast", Trace.off(), cutting=Cutting("greedy"))
    with Database.open(database) as opened:
        for number, (task, _) in enumerate(computed(greedy).values()):
            work = Work(task, host(), "fast")
            chosen = choose(work)
            seconds = (chosen.seconds or 1e-6) * (1000 if number % 3 == 0 else 1)
            code = code_of(chosen.implementation, host(), "fast")
            opened.decide(Decision(Key.of(work, 1), chosen.config, seconds, "quick", 60.0, 12, code=code))
    return database


@pytest.mark.parametrize("command", ["explain", "check", "compile"])
def test_without_a_lock_file_no_kernel_is_one_that_was_never_measured(
    command: str, tuned_apart: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    seen: list[str] = []
    load = CpuTarget.load

    def recorded(target: CpuTarget, linked: Any, *rest: Any) -> Any:
        seen.extend(info.origin.kind for info in linked.plan.tasks.values())
        return load(target, linked, *rest)

    monkeypatch.setattr(CpuTarget, "load", recorded)
    said = json.loads(invoke(command, *ZOO, *COMMANDS[command], "--db", str(tuned_apart)))
    assert set(seen) == {"tuned"}
    if command == "explain":
        assert {row["origin"]["kind"] for row in said["rows"]} == {"tuned"}


def test_every_command_that_compiles_takes_the_same_options() -> None:
    group: Any = typer.main.get_command(app)
    names = (*COMMANDS, "advise")
    for command in (*(group.commands[name] for name in names), group.commands["db"].commands["explain"]):
        options = {option for parameter in command.params for option in parameter.opts}
        assert set(SHARED) <= options, command.name
        efforts = {p.default for p in command.params if p.name == "effort"}
        assert efforts == {"quick" if command.name == "tune" else "none"}
    assert set(inspect.signature(BuildOptions).parameters) >= {option.removeprefix("--") for option in SHARED}


# -- mistakes, found before anything is compiled ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (("compile", *ZOO, "--batch", "-1"), 2, "--batch"),
        (("compile", *ZOO, "--batch", "0"), 2, "--batch"),
        (("bench", *ZOO, "--rounds", "0"), 2, "--rounds"),
        (("compile", *ZOO, "-o", "absent/m.tw"), 1, "the folder absent does not exist"),
        (("compile", *ZOO, "-o", "."), 1, "it is a folder"),
        (("report", *ZOO, "-o", "absent/r.html"), 1, "the folder absent does not exist"),
        (("explain", *ZOO, "--threads", "-3"), 1, "threads=-3"),
        (("check", *ZOO, "--effort", "some"), 1, "got 'some'"),
        (("bench", *ZOO, "--numerics", "sloppy"), 1, "got 'sloppy'"),
        (("report", *ZOO, "--budget", "5s"), 1, "needs no budget"),
        (("explain", *ZOO, "--search", "random"), 1, "needs no search"),
        (("tune", *ZOO, "--objective", "least"), 1, "objective must be one of 'sum', 'geomean'"),
        (("tune", *ZOO, "--task-latency", "softmax"), 2, "LABEL=TIME"),
        (("tune", *ZOO, "--task-latency", "softmax=soon"), 2, "a time above 0"),
        (("explain", *ZOO, "--target", "tpu"), 1, "got 'tpu'"),
        (("compile", *ZOO, "--target", "sm_70"), 1, "compute capability 7.0"),
        (("tune", *ZOO, "--lock", "absent/x.lock"), 1, "the folder absent does not exist"),
        (("compile", *ZOO, "--lock", "broken.lock"), 1, "broken.lock is not a lock file"),
        (("check", "damaged.pt2"), 1, "damaged.pt2 is not an exported program, or is damaged"),
        (("compile", "mine:raises"), 1, "mine.py:2, in raises: return {}['weights']"),
        (("compile", "syntax:make"), 1, "syntax:make raised SyntaxError"),
        (("compile", "mine:absent"), 1, "mine has no function 'absent'"),
        (("compile", "nowhere.at.all:make"), 1, "No module named 'nowhere'"),
        (("compile", "m.tw"), 1, "m.tw is compiled already, and this command compiles"),
        (
            ("explain", "m.tw", "--effort", "quick"),
            1,
            "m.tw is compiled already, and --effort would change nothing",
        ),
    ],
)
def test_mistakes_are_found_early_and_have_a_message(
    arguments: tuple[str, ...],
    code: int,
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from tilewright.cli.output import run_guarded

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tilewright, "compile", None)  # whoever gets that far has not looked before
    monkeypatch.setattr(tilewright, "compile_all", None)
    monkeypatch.setattr("sys.argv", ["tilewright", *arguments])
    monkeypatch.setenv("COLUMNS", "300")
    (tmp_path / "broken.lock").write_text("{")
    (tmp_path / "m.tw").touch()
    (tmp_path / "damaged.pt2").write_bytes(b"PK\x03\x04 no program")
    (tmp_path / "mine.py").write_text("def raises():\n    return {}['weights']\n")
    (tmp_path / "syntax.py").write_text("def make(:\n")
    for name in ("mine", "syntax"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    try:
        ended = run_guarded(app)
    except SystemExit as exit:
        ended = int(exit.code or 0)
    said = " ".join(capsys.readouterr().err.split())
    assert ended == code and complaint in said and "Traceback" not in said


def test_goals_reach_the_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(tilewright, "compile_all", lambda models, **options: asked.append(options))
    goals = ("--objective", "geomean", "--latency", "5ms")
    tasks = ("--task-latency", "linear+relu=50us", "--task-latency", "softmax=1ms")
    invoke("tune", *ZOO, *goals, *tasks, "--seed", "3")
    invoke("tune", *ZOO)
    first, second = asked
    assert (first["objective"], first["latency"], first["seed"]) == ("geomean", [5e-3], 3)
    assert first["task_latency"] == {"linear+relu": pytest.approx(5e-5), "softmax": 1e-3}
    assert (second["objective"], second["latency"], second["task_latency"]) == ("sum", None, None)


def test_a_seed_of_weights_needs_no_measuring() -> None:
    assert BuildOptions(seed=3).compiling["seed"] == 0
    assert BuildOptions(seed=3, effort="quick").compiling["seed"] == 3


def test_options_of_the_environment_are_looked_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE_LIMIT", "foo")
    with pytest.raises(tilewright.errors.OptionError, match="TILEWRIGHT_CACHE_LIMIT='foo'"):
        BuildOptions().check()


def test_a_program_in_a_file_is_a_model_in_python_too(tmp_path: Path) -> None:
    model, x = torch.nn.Linear(4, 3).eval(), torch.ones(2, 4)
    torch.export.save(torch.export.export(model, (x,)), tmp_path / "linear.pt2")
    fast = tilewright.compile(str(tmp_path / "linear.pt2"))
    assert torch.allclose(fast(x), model(x), atol=1e-6)
    assert torch.allclose(tilewright.compile(tmp_path / "linear.pt2")(x), model(x), atol=1e-6)
    with pytest.raises(tilewright.errors.ModelFileError, match="cannot read"):
        tilewright.compile(tmp_path / "absent.pt2")


def test_models_reach_a_gpu_that_is_described(tmp_path: Path, onnx_model: Tuned) -> None:
    """`cuda` does the same with the one that is here; without one there is a file to take elsewhere."""
    for model in (("halves:make",), onnx_model.model):
        (tmp_path / "halves.py").write_text(
            "import torch\ndef make():\n    return torch.nn.Linear(8, 8).half().eval(), (torch.ones(4, 8).half(),)\n"
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path)
            invoke("compile", *model, "--target", "sm_90", "-o", "gpu.tw", threads=None)
        found = json.loads(_manifest(tmp_path / "gpu.tw"))
        assert found["variants"][0]["plan"]["target"]["cpu"] == "sm_90a"


def _manifest(path: Path) -> bytes:
    import zipfile

    with zipfile.ZipFile(path) as archive:
        return archive.read("manifest.json")


def test_an_interrupted_tune_keeps_everything_and_exits_with_130(tmp_path: Path) -> None:
    database = tmp_path / "tuning.sqlite"
    _save_product(tmp_path / "product.onnx", 768, 512)
    np.savez(tmp_path / "inputs.npz", x=np.ones((64, 768), np.float32))
    model = ("product.onnx", "--inputs", "inputs.npz", "--threads", "1")
    command = ("tune", *model, "--effort", "full", "--budget", "120s", "--db", str(database))
    process = subprocess.Popen(
        [sys.executable, "-m", "tilewright.cli", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**environment(), "TILEWRIGHT_CACHE_DIR": str(tmp_path / "cache")},
    )
    try:
        begun = time.monotonic()
        while not (database.exists() and _trials(database)) and time.monotonic() - begun < 120:
            time.sleep(0.1)
        kept = _trials(database)
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert "interrupted; what was measured is kept" in err and "before us" in out
    assert _trials(database) >= kept > 0


def _trials(path: Path) -> int:
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
            return int(connection.execute("SELECT count(*) FROM rows WHERE kind = 'trial'").fetchone()[0])
    except sqlite3.Error:
        return 0
