"""Load and run compiled models. This package needs numpy, llvmlite, msgspec and safetensors' format, and never
imports torch, the compiler or the tuner: a saved model runs without them. `Plan` is a model as data, `Executor` runs
a plan, users call a `CompiledModel`, and `artifact` reads and writes its file. The names below are imported on first
use, so that importing the package stays cheap."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilewright.runtime.artifact import load, save
    from tilewright.runtime.executor import Executor
    from tilewright.runtime.explain import BenchResult, Explanation
    from tilewright.runtime.memory import LiveBuffer, plan_memory
    from tilewright.runtime.model import CompiledModel
    from tilewright.runtime.plan import MemoryReport, Place, Plan, Step, TaskInfo, TensorSpec

_HOMES = {
    "BenchResult": "explain",
    "LiveBuffer": "memory",
    "CompiledModel": "model",
    "Executor": "executor",
    "Explanation": "explain",
    "MemoryReport": "plan",
    "Place": "plan",
    "Plan": "plan",
    "Step": "plan",
    "TaskInfo": "plan",
    "TensorSpec": "plan",
    "load": "artifact",
    "plan_memory": "memory",
    "save": "artifact",
}

__all__ = [
    "BenchResult",
    "CompiledModel",
    "Executor",
    "Explanation",
    "LiveBuffer",
    "MemoryReport",
    "Place",
    "Plan",
    "Step",
    "TaskInfo",
    "TensorSpec",
    "load",
    "plan_memory",
    "save",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
