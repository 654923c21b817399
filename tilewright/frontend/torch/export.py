"""Export a module: checks before, the export, and explanations of its failures."""

from __future__ import annotations

import inspect
import logging
import os
import re
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.export import ExportedProgram, _trace

from tilewright.errors import (
    ExportError,
    InputError,
    ModelFileError,
    TrainingModeError,
    UnsupportedModelError,
)
from tilewright.frontend.torch.containers import known_containers
from tilewright.frontend.torch.decompose import retraced
from tilewright.frontend.torch.plain_modules import plain_modules
from tilewright.frontend.torch.source_location import last_user_frame
from tilewright.frontend.torch.types import to_torch
from tilewright.runtime import tree
from tilewright.runtime.arguments import CallArguments
from tilewright.runtime.dynamic import bind

_CACHE = re.compile(r"\w*Cache\b")  # Hugging Face's cache classes
_USE_CACHE = (
    "compile the model without its cache of keys and values: add use_cache=False to the example inputs, as in"
    ' tilewright.compile(model, {"input_ids": ids, "use_cache": False})'
)

# Common operators that autocast computes in 16 bits.
_IN_16_BITS = frozenset({"linear", "matmul", "mm", "bmm", "addmm", "conv1d", "conv2d", "conv3d"})

# Modules that behave differently in training mode.
_MODAL = (
    nn.modules.dropout._DropoutNd,
    nn.modules.batchnorm._NormBase,
    nn.RReLU,
    nn.RNNBase,
    nn.MultiheadAttention,
)


def check_mode(model: nn.Module) -> None:
    """Raise TrainingModeError if the model, or a module in it whose mode matters, is in training mode."""
    if model.training:
        raise TrainingModeError(f"{type(model).__name__} is in training mode")
    modal = [
        f"{name} ({type(module).__name__})"
        for name, module in model.named_modules()
        if module.training and isinstance(module, _MODAL)
    ]
    if modal:
        more = f" and {len(modal) - 3} more" if len(modal) > 3 else ""
        raise TrainingModeError(f"modules in training mode: {', '.join(modal[:3])}{more}")


def call_arguments(
    example_inputs: Any, example_kwargs: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) of the example call: a tuple of arguments, a single tensor, a dict of keyword arguments, or both.
    NumPy arrays among them become tensors."""
    args, kwargs = _example_call(example_inputs, example_kwargs)
    leaves, spec = tree.flatten((args, kwargs))
    if any(isinstance(leaf, (np.ndarray, np.generic)) for leaf in leaves):
        args, kwargs = tree.unflatten(spec, [to_torch(leaf) for leaf in leaves])
    return tuple(args), dict(kwargs)


def _example_call(
    example_inputs: Any, example_kwargs: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    keywords = dict(example_kwargs or {})
    if example_inputs is None and not keywords:
        raise UnsupportedModelError(
            "an nn.Module needs example inputs: a tuple of arguments, a single tensor, or a dict of keyword arguments"
        )
    if example_inputs is None:
        return (), keywords
    if isinstance(example_inputs, CallArguments):
        return example_inputs.args, {**example_inputs.kwargs, **keywords}
    if isinstance(example_inputs, (torch.Tensor, np.ndarray)):
        return (example_inputs,), keywords
    if isinstance(example_inputs, Mapping):
        return (), {**example_inputs, **keywords}
    if type(example_inputs) is tuple:
        return example_inputs, keywords
    raise UnsupportedModelError(
        f"example inputs of type {type(example_inputs).__name__}: pass a tuple of arguments, a single tensor, or a dict"
        " of keyword arguments",
        remedy="wrap them in a tuple: (inputs,)",
    )


def load_program(path: str | os.PathLike[str]) -> ExportedProgram:
    """A program that torch.export.save wrote. Raises ModelFileError if PyTorch cannot read it."""
    try:
        with _quiet_torch():
            return torch.export.load(os.fspath(path))
    except OSError as error:
        raise ModelFileError(f"cannot read {path}: {error.strerror or error}") from None
    except Exception as error:  # of zip, JSON, pickle or PyTorch: a file may hold anything
        first = next(iter(str(error).splitlines()), "")
        raise ModelFileError(
            f"{path} is not an exported program, or is damaged: {type(error).__name__}: {first}",
            remedy="write it again with torch.export.save, with the version of PyTorch that is installed here",
        ) from None


def export(model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> ExportedProgram:
    try:
        with (
            plain_modules,
            known_containers(model, (arguments, keywords)),
            torch.no_grad(),
            _quiet_torch(),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            return torch.export.export(model, arguments, keywords or None, strict=False)
    except Exception as error:  # tracing runs the user's code, which may raise anything
        _check_runs(model, arguments, keywords)
        remedy = _USE_CACHE if _CACHE.search(str(error)) else None
        what = f"torch.export could not trace {type(model).__name__}"
        raise ExportError(_explained(what, error), remedy=remedy) from error


def _check_runs(model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """Raise InputError if PyTorch cannot run the model on these inputs either: its own message is better."""
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model(*arguments, **keywords)
    except Exception as error:
        error.__context__ = None  # the exporter's failure is reported only if this call succeeds
        given = _described(bind(argument_names(model), arguments, keywords))
        text = _explained(f"{type(model).__name__} does not run on these inputs ({given})", error)
        raise InputError(
            text, remedy="pass inputs that the model takes; PyTorch says above why not these"
        ) from None


def _described(given: Mapping[str, Any]) -> str:
    """`x: float32[2, 5], scale: 2.0`"""
    parts = []
    for name, value in given.items():
        tensors = [leaf for leaf in tree.flatten(value)[0] if isinstance(leaf, torch.Tensor)]
        shown = [f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}" for leaf in tensors]
        parts.append(f"{name}: {', '.join(shown) or repr(value)[:40]}")
    return ", ".join(parts)


@contextmanager
def _quiet_torch() -> Iterator[None]:
    """Suppress what PyTorch logs about a failure before it raises it, unless the user has enabled logs."""
    if os.environ.get("TORCH_LOGS"):
        yield
        return
    known = logging.root.manager.loggerDict  # each logger of PyTorch's has a handler of its own
    loggers = [logging.getLogger(name) for name in list(known) if name.partition(".")[0] == "torch"]
    handlers = [handler for logger in loggers for handler in logger.handlers]
    for handler in handlers:
        handler.addFilter(_drop)
    # Of a failed trace it also prints the graph so far, to standard error: in that module print is this.
    vars(_trace)["print"] = lambda *values, **options: None
    try:
        yield
    finally:
        vars(_trace).pop("print", None)
        for handler in handlers:
            handler.removeFilter(_drop)


def _drop(record: logging.LogRecord) -> bool:
    return False


Autocast = tuple[tuple[str, bool, torch.dtype], ...]  # of each kind of device: whether it is on, and its type


def autocast_now() -> Autocast:
    kinds = ("cpu", "cuda")
    return tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)


@contextmanager
def autocast_as(then: Autocast) -> Iterator[None]:
    """`torch.autocast` as it was when `then` was taken."""
    with ExitStack() as stack:
        for (kind, on, dtype), (_, on_now, dtype_now) in zip(then, autocast_now(), strict=True):
            if (on, dtype) != (on_now, dtype_now):
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=on))
        yield


def autocast_written_out(program: ExportedProgram) -> ExportedProgram:
    """The program with the casts of `torch.autocast` as explicit operators: autocast around it now or when it was
    exported, and inside the model."""
    if any(on for _, on, _ in autocast_now()):
        return retraced(program, {})
    kind, dtype = next(filter(None, map(_cast_by, program.graph.nodes)), (None, None))
    if kind is not None:
        with torch.autocast(kind, dtype=dtype):
            return retraced(program, {})
    return retraced(program, {}) if any(map(_is_wrapped, program.graph.nodes)) else program


def _cast_by(node: Any) -> tuple[str, torch.dtype] | None:
    """The autocast under which this node was exported, if it multiplies float32 and returns 16 bits."""
    name = str(getattr(node.target, "overloadpacket", "")).removeprefix("aten.")
    value = node.meta.get("val")
    if name not in _IN_16_BITS or not isinstance(value, torch.Tensor):
        return None
    if value.dtype not in (torch.bfloat16, torch.float16):
        return None
    operands = [operand.meta.get("val") for operand in node.all_input_nodes]
    same = any(isinstance(x, torch.Tensor) and x.dtype is value.dtype for x in operands)
    return None if same else (value.device.type, value.dtype)


def _is_wrapped(node: Any) -> bool:
    """Whether it is a part of the model under autocast or another gradient mode: a nested graph."""
    return isinstance(node.target, torch._ops.HigherOrderOperator) and node.target.name().startswith(
        "wrap_with_"
    )


def _explained(what: str, error: Exception) -> str:
    """An error message: what failed, the first lines of PyTorch's message, and the line of the user's code where it
    stopped."""
    lines = [line.rstrip() for line in str(error).splitlines() if line.strip()][:4]
    text = f"{what}: {type(error).__name__}: " + "\n  ".join(lines)
    file, line, code = _user_frame(error)
    return f"{text}\n  at {file}:{line}" + (f": {code}" if code else "") if file else text


def _user_frame(error: Exception) -> tuple[str, int, str]:
    """The last frame below the export call that is not PyTorch's. The first frame is Tilewright's."""
    frames = traceback.format_exception(type(error), error, error.__traceback__)
    own = f'File "{__file__}"'
    frame = last_user_frame("".join(part for part in frames if own not in part))
    return ("", 0, "") if frame[0].startswith(torch.__path__[0]) else frame


def argument_names(model: nn.Module) -> tuple[str, ...]:
    """The parameters of `forward` that can be passed by name."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return tuple(p.name for p in inspect.signature(model.forward).parameters.values() if p.kind in named)


def program_argument_names(program: ExportedProgram) -> tuple[str, ...]:
    """The same for a program, which records those that it was exported with."""
    signature = program.module_call_graph[0].signature if program.module_call_graph else None
    return tuple(getattr(signature, "forward_arg_names", None) or ())
