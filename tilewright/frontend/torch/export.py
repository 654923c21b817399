"""A module as an ExportedProgram: the checks before, the export, and its failures in words."""

from __future__ import annotations

import inspect
import traceback
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from tilewright.errors import ExportError, TrainingModeError, UnsupportedModelError
from tilewright.frontend.torch.places import last_user_frame
from tilewright.frontend.torch.plain_modules import plain_modules

# Modules that compute something else in training mode.
_MODAL = (
    nn.modules.dropout._DropoutNd,
    nn.modules.batchnorm._NormBase,
    nn.RReLU,
    nn.RNNBase,
    nn.MultiheadAttention,
)


def check_mode(model: nn.Module) -> None:
    """TrainingModeError if the model, or a module in it that minds, is in training mode."""
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
    """(args, kwargs) of the example call: a tuple of arguments, a single tensor, or a dict of keyword arguments."""
    keywords = dict(example_kwargs or {})
    if example_inputs is None and not keywords:
        raise UnsupportedModelError(
            "an nn.Module needs example inputs: a tuple of arguments, a single tensor, or a dict of keyword arguments"
        )
    if example_inputs is None:
        return (), keywords
    if isinstance(example_inputs, torch.Tensor):
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


def export(model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> ExportedProgram:
    try:
        with plain_modules(), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.export.export(model, arguments, keywords or None, strict=False)
    except Exception as error:  # tracing runs the user's code, which may raise anything
        raise ExportError(_explained(model, error)) from error


def _explained(model: nn.Module, error: Exception) -> str:
    """The first lines of the exporter's message and the line of the user's code that it stopped at."""
    lines = [line.rstrip() for line in str(error).splitlines() if line.strip()][:4]
    text = f"torch.export could not trace {type(model).__name__}: {type(error).__name__}: " + "\n  ".join(
        lines
    )
    file, line, code = _user_frame(error)
    return f"{text}\n  at {file}:{line}" + (f": {code}" if code else "") if file else text


def _user_frame(error: Exception) -> tuple[str, int, str]:
    """Of the frames below the export call, the last that is not PyTorch's. The first frame is ours."""
    frames = traceback.format_exception(type(error), error, error.__traceback__)
    own = f'File "{__file__}"'
    frame = last_user_frame("".join(part for part in frames if own not in part))
    return ("", 0, "") if frame[0].startswith(torch.__path__[0]) else frame


def argument_names(model: nn.Module) -> tuple[str, ...]:
    """The names of the parameters of `forward` that can be given by name."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return tuple(p.name for p in inspect.signature(model.forward).parameters.values() if p.kind in named)


def program_argument_names(program: ExportedProgram) -> tuple[str, ...]:
    """The same of a program, which remembers those that it was exported with."""
    signature = program.module_call_graph[0].signature if program.module_call_graph else None
    return tuple(getattr(signature, "forward_arg_names", None) or ())
