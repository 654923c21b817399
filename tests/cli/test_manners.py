"""What a user expects of any command line: help, versions, suggestions, exit codes, pipes, JSON, a quick start."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch

import tilewright
from tests.cli.inprocess import Done, run_here
from tests.cli.test_cli import environment
from tests.db.samples import config, key, record, work
from tilewright.cli import output
from tilewright.cli.options import complete_model
from tilewright.db.database import Database
from tilewright.db.record import Decision
from tilewright.support.trace import Trace

MINE = """
import torch
def helper():
    return torch.ones(3).reshape(5)
def breaks():
    return helper()
def make():
    return torch.nn.Linear(4, 3).eval(), (torch.ones(2, 4),)
class Scaled(torch.nn.Module):
    def forward(self, x, *, scale):
        return x * scale
def both():
    return Scaled().eval(), (torch.ones(2, 4),), {"scale": torch.full((4,), 2.0)}
def misfit():
    return torch.nn.Linear(4, 3).eval(), (torch.ones(2, 5),)
"""


class Command(Protocol):
    def __call__(self, *arguments: str) -> Done: ...


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return lambda *arguments: run_here(monkeypatch, capsys, *arguments)


# -- help, versions, completion ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [("--version",), ("-V",)])
def test_the_version(cli: Command, arguments: tuple[str, ...]) -> None:
    assert cli(*arguments) == (0, f"tilewright {tilewright.__version__}\n", "")


@pytest.mark.parametrize(
    "arguments", [(), ("-h",), ("--help",), ("bench", "-h"), ("db",), ("db", "ls", "-h")]
)
def test_help(cli: Command, arguments: tuple[str, ...]) -> None:
    done = cli(*arguments)
    assert done.code == 0 and "Usage: tilewright" in done.out and not done.err
    assert "<bool>" not in done.out, "a flag takes no value"


COMPLETIONS = {
    "bash": lambda line: {
        "_TILEWRIGHT_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split(" ")) - 1),
    },
    "zsh": lambda line: {"_TILEWRIGHT_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": line},
    "fish": lambda line: {
        "_TILEWRIGHT_COMPLETE": "complete_fish",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        "_TYPER_COMPLETE_ARGS": line,
    },
}


def process(*arguments: str, folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tilewright.cli", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env=environment(**more), timeout=300, check=False
    )


@pytest.mark.parametrize("module", ["tilewright", "tilewright.cli"])
def test_the_package_runs_as_a_module(module: str, tmp_path: Path) -> None:
    """A file in the current folder must not shadow an installed module."""
    (tmp_path / "typer.py").write_text("raise SystemExit('shadowed')")
    said = subprocess.run(
        [sys.executable, "-m", module, "-h"],
        capture_output=True, text=True, cwd=tmp_path, env=environment(), timeout=60, check=False,
    )  # fmt: skip
    assert (said.returncode, said.stderr) == (0, "") and "compile" in said.stdout


@pytest.mark.parametrize("shell", COMPLETIONS)
def test_completion(shell: str, tmp_path: Path) -> None:
    said = process(folder=tmp_path, **COMPLETIONS[shell]("tilewright bench resn")).stdout
    assert "resnet18" in said and "resnet50" in said and "bert" not in said
    script = process(folder=tmp_path, _TILEWRIGHT_COMPLETE=f"source_{shell}").stdout
    assert f"complete_{shell}" in script and "tilewright" in script


def test_models_are_completed_with_files(cli: Command, tmp_path: Path) -> None:
    (tmp_path / "own.onnx").touch()
    (tmp_path / "own.txt").touch()
    assert complete_model("own") == ["own.onnx"]
    assert complete_model("bert-") == ["bert-tiny", "bert-base", "bert-large"]


@pytest.mark.parametrize(
    ("arguments", "code", "suggestion"),
    [
        (("compile", "resnt18"), 1, "'resnet18'"),
        (("compile", "ResNet50"), 1, "'resnet50'"),
        (("compile", "own.onxx"), 1, "neither a zoo model nor"),
        (("compile", "onw.onnx"), 1, "'own.onnx'"),
        (("compil", "resnet18"), 2, "'compile'"),
        (("db", "lst"), 2, "'ls'"),
        (("compile", "resnet18", "--efort", "quick"), 2, "--effort"),
        (("compile", "resnet18", "--effort", "ful"), 1, "'full'"),
        (("compile", "resnet18", "--numerics", "strct"), 1, "'strict'"),
        (("compile", "resnet18", "--target", "cdua"), 1, "'cuda'"),
        (("bench", "resnet18", "--against", "onnxruntme"), 1, "'onnxruntime'"),
    ],
)
def test_did_you_mean(
    cli: Command, tmp_path: Path, arguments: tuple[str, ...], code: int, suggestion: str
) -> None:
    (tmp_path / "own.onnx").touch()
    done = cli(*arguments)
    assert done.code == code and suggestion in done.err and not done.out


# -- errors -----------------------------------------------------------------------------------------------------------


def test_an_error_in_the_users_function_shows_only_the_users_frames(cli: Command) -> None:
    done = cli("compile", "mine:breaks")
    assert done.code == 1
    frames = [line for line in done.err.splitlines() if ", in " in line]
    assert [frame.partition(", in ")[2] for frame in frames] == [
        "breaks: return helper()",
        "helper: return torch.ones(3).reshape(5)",
    ]
    assert "python -c 'import mine; mine.breaks()'" in done.err
    assert "site-packages" not in done.err and "Traceback" not in done.err


def test_a_damaged_program_is_one_message(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "damaged.pt2", "w") as archive:
        archive.writestr("no", "program")
    done = process("compile", "damaged.pt2", folder=tmp_path)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 2, "with nothing of PyTorch's log"
    assert done.stderr.startswith("error: damaged.pt2 is not an exported program")


def test_a_truncated_program_is_found_without_pytorch(tmp_path: Path) -> None:
    (tmp_path / "damaged.pt2").write_bytes(b"PK\x03\x04 no program")
    code = (
        "import sys; from tilewright.cli.app import app; from tilewright.cli.output import run_guarded;"
        "sys.argv = ['tilewright', 'compile', 'damaged.pt2']; code = run_guarded(app);"
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, cwd=tmp_path, env=environment(), timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith(
        "error: damaged.pt2 is not an exported program, or is damaged: it is not a zip"
    )


def test_json_before_the_command_is_explained(cli: Command) -> None:
    done = cli("--json", "compile", "resnet18")
    error = json.loads(done.out)["error"]
    assert done.code == 2 and error["remedy"].startswith("put --json after the command")


def test_an_empty_onnx_file_is_named(cli: Command, tmp_path: Path) -> None:
    (tmp_path / "empty.onnx").write_bytes(b"")
    done = cli("compile", str(tmp_path / "empty.onnx"))
    assert done.code == 1
    assert f"{tmp_path}/empty.onnx has no graph: it is empty or not an ONNX model" in done.err


def test_inputs_that_do_not_fit_are_one_message(cli: Command, tmp_path: Path) -> None:
    done = process("compile", "mine:misfit", folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[1].startswith(
        "error: Linear does not run on these inputs (input: float32[2, 5])"
    )
    assert "torch/" not in done.stderr and "fake_tensor" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "kind"),
    [
        (("compile", "resnt18"), 1, "ModelArgumentError"),
        (("compile", "mine:breaks"), 1, "ModelFunctionError"),
        (("compile", "resnet18", "--batch", "0"), 2, "UsageError"),
        (("bench", "--rounds"), 2, "UsageError"),
        (("db", "import", "absent.jsonl"), 1, "DatabaseFileError"),
    ],
)
def test_errors_in_json(cli: Command, arguments: tuple[str, ...], code: int, kind: str) -> None:
    done = cli(*arguments, "--json")
    error = json.loads(done.out)["error"]
    assert done.code == code == error["exit_code"] and error["kind"] == kind and not done.err
    assert error["message"] and error["remedy"]


@pytest.mark.parametrize("json_too", [False, True])
def test_an_exception_that_nobody_expected_is_an_internal_error(
    cli: Command, monkeypatch: pytest.MonkeyPatch, json_too: bool
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("of ours")

    monkeypatch.setattr(tilewright, "compile", broken)
    done = cli("compile", "mine:make", *(["--json"] if json_too else []))
    assert done.code == 3 and "Traceback" in done.err, "whoever reports it needs the frames"
    said = json.loads(done.out)["error"]["message"] if json_too else done.err
    assert "ZeroDivisionError: of ours" in said and "report" in done.out + done.err


def test_gpu_is_a_name_for_cuda(cli: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewright.cli.models import ModelSource

    moved: list[str] = []
    monkeypatch.setattr("tilewright.targets.resolve.resolve_target", lambda *_: None)
    monkeypatch.setattr(ModelSource, "on", lambda self, device: moved.append(device) or self)
    monkeypatch.setattr(tilewright, "compile", interrupted)
    cli("compile", "mine:make", "--target", "gpu:1")
    assert moved == ["cuda:1"]


def test_warnings_are_one_line(cli: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    done = cli("compile", "mine:make", "--db", "absent.sqlite")
    assert done.code == 0
    (line,) = [line for line in done.err.splitlines() if "warning" in line.lower()]
    assert line.startswith("warning: the tuning database absent.sqlite cannot be used")


# -- interrupts -------------------------------------------------------------------------------------------------------


def interrupted(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


@pytest.mark.parametrize("verb", ["compile", "bench", "explain", "check", "report", "demo", "tune"])
def test_interrupted_while_it_compiles(cli: Command, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    monkeypatch.setattr(tilewright, "compile", interrupted)
    monkeypatch.setattr(tilewright, "compile_all", interrupted)
    assert cli(verb, "mine:make").code == 130


def test_interrupted_doctor_and_list(cli: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewright.measure.calibrate.calibrate", interrupted)
    assert cli("doctor").code == 130
    monkeypatch.setattr(Database, "records", interrupted)
    assert cli("db", "ls", "--db", "some.sqlite").code == 130


def test_a_compilation_whose_tuning_was_interrupted_is_saved_and_exits_with_130(
    cli: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compile = tilewright.compile

    def ended_early(model: Any, inputs: Any, trace: Trace, **options: Any) -> Any:
        trace.mark("tune.begin", budget=60.0, effort="quick", tasks=[])
        trace.mark("tune.end", why="interrupted")
        return compile(model, inputs)

    monkeypatch.setattr(tilewright, "compile", ended_early)
    done = cli("compile", "mine:make", "--effort", "quick")
    assert done.code == 130 and (tmp_path / "make.tw").exists() and "saved to make.tw" in done.out


def test_an_interrupt_while_python_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewright.cli import main

    monkeypatch.setattr("tilewright.cli.output.run_guarded", interrupted)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130


def test_without_typer_the_extra_is_named(tmp_path: Path) -> None:
    code = "import sys; sys.modules['typer'] = None; from tilewright.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=False
    )
    assert done.returncode == 1 and "pip install 'tilewright[cli]'" in done.stderr


# -- pipes and terminals ----------------------------------------------------------------------------------------------


def test_no_line_is_broken_in_a_pipe(cli: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    done = cli("compile", "mine:make")
    first, saved = done.out.splitlines()
    assert "arena" in first and "weights" in first and saved.startswith("saved to make.tw")
    assert "lower bound" in first and "\x1b" not in done.out + done.err
    failed = cli("compile", "resnt18").err.splitlines()
    assert failed[0].startswith("error: unknown model 'resnt18'") and len(failed) == 2


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "tuning.sqlite"
    with Database.open(path) as opened:
        opened.add([record(number, of=work(8 + number % 2)) for number in range(10)])
        opened.decide(Decision(key(), config(1), 1e-5, "quick", 60.0, 12))
    return path


def at_80_columns(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    screen = io.StringIO()
    terminal = output._Console(
        file=screen, force_terminal=True, width=80, height=25, highlight=False, no_color=True
    )
    for module in ("app", "bench", "database", "doctor", "output"):
        monkeypatch.setattr(f"tilewright.cli.{module}.console", terminal)
    return screen


def shown(screen: io.StringIO) -> list[str]:
    from rich.text import Text

    return Text.from_ansi(screen.getvalue()).plain.splitlines()


def test_db_ls_fits_80_columns_and_hides_hashes(
    cli: Command, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Database.open(database) as opened:
        long = record(3, of=work(10))
        opened.add([type(long)(**{**_fields(long), "label": "pad+conv+add+batch_norm+" * 6})])
    screen = at_80_columns(monkeypatch)
    assert cli("db", "ls", "--db", str(database)).code == 0
    lines = shown(screen)[2:]
    assert all(len(line) <= 80 for line in lines)
    assert sum("matmul+relu" in line for line in lines) == 2 and sum("…" in line for line in lines) == 1
    hashes = {each for k in (key(), key(work(9))) for each in (k.task[:8], k.machine[:6], k.toolchain[:8])}
    assert not [line for line in lines if any(each in line for each in hashes)]
    piped = process("db", "ls", "-l", "--db", str(database), folder=database.parent).stdout.splitlines()
    assert any(key().task[:12] in line and str(config(1)) in line for line in piped)
    assert any("pad+conv+add+batch_norm+" * 6 in line for line in piped), "a pipe cuts nothing"


def _fields(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__struct_fields__}


def test_the_zoo_has_sizes_and_inputs(cli: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    (resnet,) = [line for line in cli("zoo").out.splitlines() if line.startswith("resnet50 ")]
    assert "25.6M" in resnet and "f32[1,3,224,224]" in resnet and "bottleneck" in resnet
    cards = {card["name"]: card for card in json.loads(cli("zoo", "--json").out)}
    assert cards["gpt2"]["parameters"] == 124_439_808 and cards["gpt2"]["inputs"] == ["i64[1,128]"]
    screen = at_80_columns(monkeypatch)
    assert cli("zoo").code == 0
    assert all(len(line) <= 80 for line in shown(screen))


def test_doctor_has_a_verdict_on_every_line(cli: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    done = cli("doctor", "--no-measure")
    assert done.code == 0
    findings = done.out.partition("\n\n")[0].splitlines()[1:]
    assert len(findings) > 8 and all(line.startswith(("OK ", "note ")) for line in findings)
    assert done.out.endswith("no problems\n") and "2 GiB" in done.out
    monkeypatch.setenv("TILEWRIGHT_TREADS", "2")
    done = cli("doctor", "--no-measure")
    assert done.code == 1 and done.out.endswith("1 problem(s)\n")
    found = json.loads(cli("doctor", "--no-measure", "--json").out)
    assert not found["ok"] and found["machine"]["features"]


# -- start-up ---------------------------------------------------------------------------------------------------------

STARTED = """
import sys
sys.argv = ["tilewright", *sys.argv[1:]]
from tilewright.cli import main
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
print("HEAVY", *sorted({"torch", "numpy", "llvmlite", "onnx", "lightgbm", "tilewright.driver"} & set(sys.modules)))
"""


@pytest.mark.parametrize(
    "arguments", [("--version",), ("-h",), ("compile", "-h"), ("zoo",), ("db", "ls", "--db", "new.sqlite")]
)
def test_what_needs_no_compiler_starts_without_it(arguments: tuple[str, ...], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STARTED, *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "HEAVY"


def test_an_artifact_is_timed_without_the_compiler(tmp_path: Path) -> None:
    tilewright.compile(torch.nn.Linear(4, 3).eval(), (torch.ones(2, 4),)).save(tmp_path / "m.tw")
    code = STARTED.replace('"numpy", "llvmlite", ', "")
    done = subprocess.run(
        [sys.executable, "-c", code, "bench", "m.tw"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment(),
        check=False,
    )
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "HEAVY", done.stderr


def test_positional_and_keyword_inputs_of_a_function(cli: Command, tmp_path: Path) -> None:
    assert cli("compile", "mine:both").code == 0
    assert list(tilewright.load(tmp_path / "both.tw").inputs) == ["x", "scale"]
    checked = json.loads(cli("check", "mine:both", "--no-passes", "--json").out)
    assert checked["ok"]
    assert os.path.exists(tmp_path / "both.tw")


@pytest.mark.parametrize(
    ("seconds", "text"), [(1.26, "1260"), (0.9996, "1000"), (0.0336, "33.6"), (53e-6, "0.053"), (0.0, "0")]
)
def test_times_have_no_exponent(seconds: float, text: str) -> None:
    assert output.milliseconds(seconds) == text


def test_help_breaks_lines_at_the_terminal_only() -> None:
    """A line break in a docstring's first paragraph would be one in the list of commands."""
    from tilewright.cli.app import app
    from tilewright.cli.database import app as database

    commands = [*app.registered_commands, *database.registered_commands]
    assert len(commands) > 10
    for command in commands:
        assert command.callback is not None
        first = (command.callback.__doc__ or "").partition("\n\n")[0]
        assert first and "\n" not in first, command.callback.__name__
