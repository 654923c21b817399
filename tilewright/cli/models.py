"""Parse a MODEL argument into a model with example inputs.

- `resnet50`: a model of the zoo, with random weights
- `model.pt2`: a program saved by `torch.export.save`
- `model.onnx`: an ONNX model; if it leaves dimensions open, with example inputs in an .npz file
- `model.tw`: an artifact, for commands that need only a compiled model
- `package.module:name`: a function without arguments that returns (nn.Module, example inputs)
"""

from __future__ import annotations

import sys
import sysconfig
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewright.cli.options import BuildOptions
from tilewright.cli.output import compile_progress
from tilewright.errors import MissingDependencyError, TilewrightError, UnknownShapeError
from tilewright.support.suggest import did_you_mean

if TYPE_CHECKING:
    import numpy as np

    from tilewright.runtime.model import CompiledModel


class ModelArgumentError(TilewrightError):
    """A MODEL argument does not name a model."""

    remedy = "give a zoo model (see `tilewright zoo`), a .pt2, .onnx or .tw file, or package.module:function"


class ModelFunctionError(TilewrightError):
    """The user's function, or its module, raised an error."""


@dataclass(frozen=True)
class ModelSource:
    """A model that is not compiled yet."""

    name: str
    model: Any  # nn.Module, ExportedProgram, or the path of an ONNX model
    inputs: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def examples(self) -> Any:
        """The example inputs in the form that `tilewright.compile` takes."""
        from tilewright.runtime.arguments import joined

        return joined(self.inputs, self.kwargs) if self.inputs else self.kwargs or None

    @property
    def is_onnx(self) -> bool:
        return isinstance(self.model, Path)

    @property
    def is_on_gpu(self) -> bool:
        torch = sys.modules.get("torch")
        leaves = [] if torch is None else torch.utils._pytree.tree_leaves((self.inputs, self.kwargs))
        return any(getattr(leaf, "is_cuda", False) for leaf in leaves)

    def on(self, device: str) -> ModelSource:
        """A PyTorch model and its inputs, moved to that device."""
        torch = require_torch()
        if isinstance(self.model, torch.nn.Module):
            model = self.model.to(device)
        else:
            model = torch.export.passes.move_to_device_pass(self.model, device)
        move = partial(_moved, device=device)
        inputs, kwargs = torch.utils._pytree.tree_map(move, (self.inputs, self.kwargs))
        return ModelSource(self.name, model, tuple(inputs), dict(kwargs))

    def eager(self) -> Any:
        """A function that runs the model in PyTorch."""
        if self.is_onnx:
            raise ModelArgumentError(
                f"{self.model} is an ONNX model, and this command compares with PyTorch",
                remedy="use `tilewright bench`, which compares ONNX models with ONNX Runtime and OpenVINO",
            )
        return self.model.module() if hasattr(self.model, "graph_signature") else self.model


def _moved(value: Any, device: str) -> Any:
    return value.to(device) if hasattr(value, "is_cuda") else value


def is_artifact(argument: str) -> bool:
    return argument.endswith(".tw")


TRUSTED = Annotated[
    list[Path] | None,
    typer.Option(
        "--trusted", metavar="KEYFILE", help="load a .tw file only if it is signed with this key; repeatable"
    ),
]


def load_artifact(argument: str, threads: int | None = None, trusted: list[Path] | None = None) -> Any:
    import tilewright

    return tilewright.load(argument, threads=threads, trusted=trusted or None)


def refuse_trusted(argument: str | None, trusted: list[Path] | None) -> None:
    """Refuse a key that would be ignored."""
    if trusted and not (argument and is_artifact(argument)):
        raise ModelArgumentError(
            f"--trusted applies to .tw files only, got {argument or 'no file'}",
            remedy="leave --trusted out",
        )


def require_file(argument: str) -> None:
    """Raise ModelArgumentError if the file does not exist, and suggest a similarly named file next to it."""
    path = Path(argument)
    if path.is_file():
        return
    siblings = [each.name for each in path.parent.glob(f"*{path.suffix}")] if path.parent.is_dir() else []
    raise ModelArgumentError(
        f"the file {argument} does not exist",
        remedy=did_you_mean(path.name, siblings) or "check the path of the file",
    )


def require_torch() -> Any:
    try:
        import torch
    except ImportError:
        raise MissingDependencyError(
            "PyTorch is not installed, and this command needs it", remedy="pip install 'tilewright[torch]'"
        ) from None
    return torch


def load_source(argument: str, build: BuildOptions) -> ModelSource:
    """Load the model that an argument names. PyTorch models move to the target GPU, if this machine has it."""
    if build.inputs is not None and not argument.endswith(".onnx"):
        raise ModelArgumentError(
            f"--inputs applies to ONNX models only, got {argument}", remedy="leave --inputs out"
        )
    if is_artifact(argument):
        require_file(argument)
        raise ModelArgumentError(
            f"{argument} is compiled already, and this command compiles",
            remedy="use `tilewright explain`, `bench` or `report` on it, or give the model that it was compiled from",
        )
    if argument.endswith((".pt2", ".onnx")):
        require_file(argument)
    if argument.endswith(".onnx"):
        given = {} if build.inputs is None else _arrays(build.inputs)
        return ModelSource(Path(argument).stem, Path(argument), (), given)
    if not argument.endswith(".pt2") and ":" not in argument:
        require_known(argument)
    if argument.endswith(".pt2"):
        from tilewright.frontend import check_program_file

        check_program_file(argument)
    require_torch()
    if argument.endswith(".pt2"):
        source = _from_program(argument)
    elif ":" in argument:
        source = _from_function(argument)
    else:
        source = _from_zoo(argument, build)
    if build.target is None:
        return source
    from tilewright.targets.resolve import canonical

    device = canonical(build.target)
    return source.on(device) if device.partition(":")[0] in ("cpu", "cuda") else source


def _from_program(argument: str) -> ModelSource:
    from tilewright.frontend.torch.export import load_program

    program = load_program(argument)
    args, kwargs = program.example_inputs or ((), {})
    return ModelSource(Path(argument).stem, program, tuple(args), dict(kwargs))


def require_known(argument: str) -> None:
    """Raise ModelArgumentError unless the zoo has this model."""
    from tilewright.zoo import names

    if argument in names():
        return
    if (suggestion := did_you_mean(argument, names())) and not Path(argument).exists():
        raise ModelArgumentError(f"unknown model {argument!r}", remedy=suggestion)
    raise ModelArgumentError(
        f"unknown model {argument!r}: neither a zoo model nor a .pt2 or .onnx file nor package.module:function"
    )


def _from_zoo(argument: str, build: BuildOptions) -> ModelSource:
    from tilewright import zoo

    model = zoo.build(argument, seed=build.seed, small=build.small)
    inputs = zoo.example_inputs(argument, batch=build.batch, seed=build.seed + 1, small=build.small)
    return ModelSource(argument, model, inputs, {})


def compiled_source(source: ModelSource, build: BuildOptions, quiet: bool) -> tuple[CompiledModel, float]:
    """Compile the model, show progress, and return the model and the seconds it took."""
    import tilewright

    begin = time.perf_counter()
    with compile_progress(quiet) as trace, sizes_wanted():
        model = tilewright.compile(source.model, source.examples, trace=trace, **build.compiling)
    return model, time.perf_counter() - begin


@contextmanager
def sizes_wanted() -> Iterator[None]:
    """Advice for an ONNX model with open dimensions, on the command line."""
    try:
        yield
    except UnknownShapeError as error:
        remedy = "pass example inputs of these sizes: --inputs FILE, written by numpy.savez(FILE, name=array)"
        raise UnknownShapeError(error.message, remedy=remedy) from None


def _arrays(path: Path) -> dict[str, np.ndarray]:
    import numpy as np

    try:
        archive = np.load(path, allow_pickle=False)
        if isinstance(archive, np.ndarray):
            raise ValueError("it holds one array without a name")
        with archive:
            return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ModelArgumentError(
            f"cannot read the inputs in {path}: {error}",
            remedy="write them with numpy.savez(path, name=array, ...), by the names of the model's inputs",
        ) from None


class _Absent(Exception):
    """The module does not exist, or has no such name in it."""


def _function(module_name: str, name: str) -> Any:
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise _Absent(str(error)) from None
        raise  # the module exists, but one of its imports does not
    except (TypeError, ValueError) as error:  # ":make", "a..b:make"
        if module_name.strip(".") and ".." not in module_name:
            raise
        raise _Absent(str(error)) from None
    found = getattr(module, name, None)
    if not callable(found):
        raise _Absent(f"{module_name} has no function {name!r}")
    return found


def _raised(argument: str, error: Exception) -> str:
    """Format the error with the lines of the user's code that raised it, without those of Python, PyTorch or
    Tilewright."""
    import traceback

    package = argument.partition(":")[0].partition(".")[0]
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename, package)
    ]
    lines = [
        f"\n  {frame.filename}:{frame.lineno}, in {frame.name}" + (f": {frame.line}" if frame.line else "")
        for frame in frames
    ]
    if isinstance(error, SyntaxError) and error.filename:
        lines.append(f"\n  {error.filename}:{error.lineno}")
    return f"{argument} raised {type(error).__name__}: {error}{''.join(lines)}"


def _is_users(filename: str, package: str) -> bool:
    """Whether a file is the user's: not Tilewright's, and installed only if it belongs to the named package."""
    if filename.startswith("<"):  # importlib's frames and others without a file
        return False
    path = Path(filename).resolve()
    if path.is_relative_to(Path(__file__).resolve().parents[1]):
        return False
    installed = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")}
    roots = [root for root in installed if path.is_relative_to(root)]
    return not roots or any(path.relative_to(root).parts[0].removesuffix(".py") == package for root in roots)


def _from_function(argument: str) -> ModelSource:
    module_name, _, function_name = argument.partition(":")
    # The user's module is usually in the current folder. It goes last, so that no file in it shadows an installed
    # module.
    sys.path.append("")
    try:
        function = _function(module_name, function_name)
        made = function()
    except _Absent as error:
        raise ModelArgumentError(f"cannot get {argument}: {error}") from None
    except Exception as error:  # the user's code may raise anything
        call = f"python -c 'import {module_name}; {module_name}.{function_name}()'"
        raise ModelFunctionError(
            _raised(argument, error), remedy=f"correct the function, and try it alone: {call}"
        ) from error
    finally:
        sys.path.remove("")
    if not (isinstance(made, tuple) and len(made) in (2, 3)):
        raise ModelArgumentError(
            f"{argument} returned a {type(made).__name__}, not (model, example inputs)",
            remedy="return (model, inputs), or (model, positional inputs, keyword inputs)",
        )
    model, inputs, keywords = made if len(made) == 3 else (*made, {})
    if isinstance(inputs, dict):
        return ModelSource(function_name, model, (), {**inputs, **keywords})
    return ModelSource(
        function_name, model, inputs if isinstance(inputs, tuple) else (inputs,), dict(keywords)
    )
