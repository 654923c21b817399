"""Example arguments of a call: by position, by name, or both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CallArguments:
    """Positional and keyword arguments together."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def joined(inputs: Any, kwargs: Mapping[str, Any] | None) -> Any:
    """`inputs` unchanged if there are no keyword arguments."""
    if not kwargs:
        return inputs
    args, named = ((), {}) if inputs is None else as_arguments(inputs)
    return CallArguments(args, {**named, **kwargs})


def as_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) of a tuple of positional arguments, a mapping of keyword arguments, both, or one tensor."""
    if isinstance(inputs, CallArguments):
        return inputs.args, inputs.kwargs
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)), {}
