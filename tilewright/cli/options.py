"""The options of every command that compiles: declared once, checked before anything is loaded or compiled.

@app.command() @compiling def explain(model: MODEL, build: Build, json: JSON = False) -> None: ...

`compiling` replaces the parameter `build` by one command-line option for each field of `BuildOptions`.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from tilewright import knobs
from tilewright.cli.output import interrupts_reported
from tilewright.errors import OptionError, TilewrightError


class OutputFileError(TilewrightError):
    """A command could not write its output file."""

    remedy = "name a file in a folder that exists and that you can write: -o FILE"


def parse_seconds(text: str | float) -> float:
    """`"90"`, `"90s"`, `"1.5m"` -> 90.0"""
    from tilewright.tune.effort import parse_duration

    try:
        return parse_duration(text)
    except OptionError:
        raise typer.BadParameter("a time above 0, such as 120, 120s, 5m or 1h") from None


def parse_task_latencies(given: Sequence[str] | None) -> dict[str, float] | None:
    """`["linear+relu=50us"]` -> {"linear+relu": 5e-05}"""
    found = {}
    for each in given or ():
        label, equals, time = each.rpartition("=")
        if not (label and equals):
            raise typer.BadParameter(
                f"--task-latency must be LABEL=TIME, such as linear+relu=50us, got {each!r}"
            )
        found[label] = parse_seconds(time)
    return found or None


def complete_model(incomplete: str) -> list[str]:
    """Complete MODEL in the shell: models of the zoo, and model files."""
    from tilewright.zoo import names

    folder = Path(incomplete) if incomplete.endswith("/") else Path(incomplete).parent
    try:
        found = [
            f"{path}/" if path.is_dir() else str(path)
            for path in sorted(folder.iterdir())
            if path.is_dir() or path.suffix in MODEL_FILES
        ]
    except OSError:
        found = []
    return [each for each in (*names(), *found) if each.startswith(incomplete)]


def one_of(*values: str) -> Callable[[str], list[str]]:
    return lambda incomplete: [value for value in values if value.startswith(incomplete)]


MODEL_FILES = (".pt2", ".onnx", ".tw")
MODEL = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="a zoo model, a .pt2 or .onnx file, a .tw artifact (bench, explain, report), or package.module:function",
        autocompletion=complete_model,
    ),
]
JSON = Annotated[
    bool,
    typer.Option("--json", help="print the result, or the error, as one JSON document on standard output"),
]


@dataclass(frozen=True)
class BuildOptions:
    """How a model is loaded and compiled."""

    target: Annotated[
        str | None,
        typer.Option(
            help="cpu; cuda or cuda:1, a GPU here; sm_90, a GPU elsewhere (to save); gemmini, a simulated accelerator. "
            "Default: where the model is",
            autocompletion=one_of("cpu", "cuda", "sm_80", "sm_86", "sm_89", "sm_90", "gemmini"),
        ),
    ] = None
    effort: Annotated[
        str,
        typer.Option(
            help="none: measure nothing, use what was tuned; quick: measure, for a minute; full: until no more than 1% "
            "is expected",
            autocompletion=one_of("none", "quick", "full"),
        ),
    ] = "none"
    budget: Annotated[
        float | None,
        typer.Option(parser=parse_seconds, metavar="SECONDS", help="of measuring, such as 120s or 5m"),
    ] = None
    lock: Annotated[
        Path | None,
        typer.Option("--lock", help="a file of choices: obeyed where it exists, otherwise written"),
    ] = None
    db: Annotated[
        Path | None, typer.Option("--db", help="the tuning database; default: in the cache folder")
    ] = None
    inputs: Annotated[
        Path | None, typer.Option("--inputs", help="an .npz file: example inputs of an ONNX model, by name")
    ] = None
    numerics: Annotated[
        str | None,
        typer.Option(help=", ".join(knobs.NUMERICS), autocompletion=one_of(*knobs.NUMERICS)),
    ] = None
    threads: Annotated[
        int | None, typer.Option(help="threads of a call; default: as many as this process may use")
    ] = None
    batch: Annotated[int, typer.Option(min=1, help="batch size of a zoo model")] = 1
    small: Annotated[bool, typer.Option("--small", help="the zoo model's small version")] = False
    seed: Annotated[int, typer.Option(help="seed of a zoo model's weights and inputs, and of the search")] = 0
    search: Annotated[
        str,
        typer.Option(
            help="what proposes candidates: guided, evolution, annealing, random, exhaustive",
            autocompletion=one_of("guided", "evolution", "annealing", "random", "exhaustive"),
        ),
    ] = "guided"
    cost_model: Annotated[
        str,
        typer.Option(
            "--cost-model",
            help="what ranks candidates: boosted (learns), attention (trained on other tasks), analytical",
            autocompletion=one_of("boosted", "attention", "analytical"),
        ),
    ] = "boosted"
    allocation: Annotated[
        str, typer.Option(help="which task is measured next: gradient, heaviest, round-robin")
    ] = "gradient"
    partition: Annotated[
        str,
        typer.Option(
            help="how operators are grouped into kernels: dynamic (programming, by time), greedy (rules)",
            autocompletion=one_of("dynamic", "greedy"),
        ),
    ] = "dynamic"

    def check(self) -> None:
        """Raise TilewrightError for options that would fail later."""
        # These import the whole compiler, so not for --help.
        from tilewright.targets.options import CompileOptions
        from tilewright.targets.resolve import resolve_target
        from tilewright.tune.lock import check_lockable, read_lock

        knobs.table()  # the options of the environment
        CompileOptions(**self.compiling).check()
        if self.target is not None:
            resolve_target(self.target)
        if self.lock is not None and read_lock(self.lock) is None:
            check_lockable(self.lock)

    def check_loaded(self, artifact: str, also: Sequence[str] = ()) -> None:
        """Check the options for an artifact, which is already compiled. Raises OptionError for options without
        effect; `also` are those that the command itself reads."""
        loading = ("threads", *also)
        idle = [
            f"--{field.name}"
            for field in fields(self)
            if field.name not in loading and getattr(self, field.name) != field.default
        ]
        if idle:
            raise OptionError(
                f"{artifact} is compiled already, and {', '.join(idle)} would change nothing",
                remedy="leave them out, or give the model that it was compiled from",
            )

    @property
    def compiling(self) -> dict[str, Any]:
        """The arguments of `tilewright.compile`."""
        from tilewright.targets.options import CompileOptions

        found = {each.name: getattr(self, each.name) for each in fields(CompileOptions)}
        if self.effort == "none":  # the seed is that of a zoo model's weights
            found["seed"] = 0
        return found


def compiling(command: Callable[..., None] | None = None, *, effort: str = "none") -> Any:
    """Decorate a command that has a parameter `build`, so that typer sees its options. `effort` is the default."""
    if command is None:
        return functools.partial(compiling, effort=effort)
    own = get_type_hints(command, include_extras=True)
    shared = get_type_hints(BuildOptions, include_extras=True)
    usual = {field.name: field.default for field in fields(BuildOptions)} | {"effort": effort}
    parameters = [
        parameter.replace(annotation=own[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(command).parameters.items()
        if name != "build"
    ]
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=usual[name], annotation=shared[name])
        for name in usual
    ]

    def run(**given: Any) -> None:
        build = BuildOptions(**{name: given.pop(name) for name in usual})
        if str(given.get("model") or "").endswith(".tw"):
            knobs.table()  # an artifact is already compiled, and loading it needs no compiler
        else:
            build.check()
        with interrupts_reported():
            command(build=build, **given)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def check_output(path: Path) -> None:
    """Raise OutputFileError if the file cannot be written, before the compilation starts."""
    if path.is_dir():
        raise OutputFileError(f"cannot write {path}: it is a folder")
    if not path.parent.is_dir():
        raise OutputFileError(f"cannot write {path}: the folder {path.parent} does not exist")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise OutputFileError(f"cannot write {path}: no permission")
