"""The baselines of `tilewright bench`: PyTorch eager, Inductor, ONNX Runtime and OpenVINO, where they are installed.

Each runs as a user would run it: default settings, the same number of threads, float32 if the model is float32. A
PyTorch model is exported to ONNX for the baselines that need it.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.cli.models import ModelSource, require_torch
from tilewright.errors import OptionError
from tilewright.support.suggest import did_you_mean

if TYPE_CHECKING:
    import numpy as np

Run = Callable[[], Any]  # calls the model once and returns its results in the runtime's own types


class NotPossible(Exception):
    """A baseline cannot run this model here; the message says why."""


@dataclass(frozen=True)
class TimedCall:
    """The model, the inputs of one call, and a folder for files."""

    source: ModelSource
    arrays: Sequence[np.ndarray]  # the model's tensors, in order
    names: Sequence[str]  # their names
    threads: int
    folder: Path

    @cached_property
    def onnx_file(self) -> Path:
        """Return the path of the model as ONNX. Raises NotPossible if PyTorch's exporter cannot write it."""
        if self.source.is_onnx:
            return Path(self.source.model)
        for package in ("onnx", "onnxscript"):
            if importlib.util.find_spec(package) is None:
                raise NotPossible(f"exporting the model to ONNX needs {package}: pip install {package}")
        torch = require_torch()
        path = self.folder / "model.onnx"
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        try:
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")
                torch.onnx.export(
                    self.source.eager(),
                    self.source.inputs,
                    str(path),
                    kwargs=self.source.kwargs or None,
                    dynamo=True,
                    verbose=False,
                )
        except Exception as error:  # the exporter may raise anything
            raise NotPossible(f"PyTorch cannot export the model to ONNX: {_first_line(error)}") from None
        return path


@dataclass(frozen=True)
class BaselineSystem:
    name: str  # the name in --against
    label: str
    package: str
    make: Callable[[TimedCall], Run]
    takes_onnx: bool = True
    on_gpu: bool = False

    def obstacle(self, call: TimedCall) -> str:
        """Why the baseline cannot run this model or on this machine; "" if it can."""
        if importlib.util.find_spec(self.package) is None:
            return f"not installed: pip install {self.package}"
        if call.source.is_onnx and not self.takes_onnx:
            return "the model is an ONNX file"
        return "compared on CPUs only" if call.source.is_on_gpu and not self.on_gpu else ""

    def prepare(self, call: TimedCall) -> Run:
        """Return a function that calls the model, after one call. Raises NotPossible if that fails."""
        try:
            run = self.make(call)
            run()
        except NotPossible:
            raise
        except Exception as error:  # another compiler may raise anything
            raise NotPossible(_first_line(error)) from None
        return run


def _eager(call: TimedCall) -> Run:
    torch = require_torch()
    return _torch_run(torch, call.source.eager(), call)


def _inductor(call: TimedCall) -> Run:
    compiler = os.environ.get("CXX", "g++")
    if not call.source.is_on_gpu and shutil.which(compiler) is None:
        raise NotPossible(f"Inductor needs a C++ compiler, and {compiler} was not found (set CXX)")
    torch = require_torch()
    return _torch_run(torch, torch.compile(call.source.eager()), call)


def _torch_run(torch: Any, model: Any, call: TimedCall) -> Run:
    def run() -> Any:
        # Not `inference_mode`: Inductor would compile again when the mode changes.
        with torch.no_grad():
            result = model(*call.source.inputs, **call.source.kwargs)
        if call.source.is_on_gpu:
            torch.cuda.synchronize()
        return result

    return run


def _onnx_runtime(call: TimedCall) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = call.threads
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(call.onnx_file), options, providers=["CPUExecutionProvider"])
    feed = _feed([value.name for value in session.get_inputs()], call)
    return lambda: session.run(None, feed)


def _openvino(call: TimedCall) -> Run:
    import openvino

    core = openvino.Core()
    settings = {
        "INFERENCE_NUM_THREADS": call.threads,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",  # by default it chooses bf16 if the machine has it
    }
    compiled = core.compile_model(core.read_model(str(call.onnx_file)), "CPU", settings)
    request = compiled.create_infer_request()
    names = [port.any_name for port in compiled.inputs]
    feed = _feed(names, call)
    inputs = {position: feed[name] for position, name in enumerate(names)}
    outputs = list(compiled.outputs)

    def run() -> list[Any]:
        found = request.infer(inputs, share_inputs=True)
        return [found[port] for port in outputs]

    return run


def _feed(names: Sequence[str], call: TimedCall) -> dict[str, np.ndarray]:
    """Map arrays to a session's input names: by name, or in order if the names differ, as they may after an
    export."""
    by_name = dict(zip(call.names, call.arrays, strict=True))
    if set(names) <= set(by_name):
        return {name: by_name[name] for name in names}
    if len(names) != len(call.arrays):
        raise NotPossible(f"the exported model has {len(names)} inputs instead of {len(call.arrays)}")
    return dict(zip(names, call.arrays, strict=True))


BASELINES = {
    baseline.name: baseline
    for baseline in (
        BaselineSystem("torch", "PyTorch eager", "torch", _eager, takes_onnx=False, on_gpu=True),
        BaselineSystem(
            "inductor", "torch.compile (Inductor)", "torch", _inductor, takes_onnx=False, on_gpu=True
        ),
        BaselineSystem("onnxruntime", "ONNX Runtime", "onnxruntime", _onnx_runtime),
        BaselineSystem("openvino", "OpenVINO", "openvino", _openvino),
    )
}
_ALSO = {"ort": "onnxruntime", "eager": "torch", "pytorch": "torch", "torch.compile": "inductor"}


def chosen(against: str) -> tuple[list[BaselineSystem], bool]:
    """Return the baselines of a comma-separated list, and whether they were named; "all" means all that are
    installed."""
    names = [each.strip().lower() for each in against.split(",") if each.strip()]
    if names == ["all"]:
        return list(BASELINES.values()), False
    if names == ["none"]:
        return [], True
    found = []
    for name in names:
        baseline = BASELINES.get(_ALSO.get(name, name))
        if baseline is None:
            known = (*BASELINES, "all", "none")
            raise OptionError(
                f"--against must be a list of {', '.join(known)}, got {name!r}",
                remedy=did_you_mean(name, (*known, *_ALSO))
                or "tilewright bench MODEL --against torch,onnxruntime",
            )
        found.append(baseline)
    return found, True


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
