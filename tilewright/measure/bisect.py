"""Check whether a compiled model is correct, and if not, find the first wrong task.

`check_model` compares a compiled model with the framework's own model in float64. If a result is further from it than
the bound, the plan is run step by step: a step whose output is far from the float64 oracle of its task, on the very
inputs that it was given, is the first that deviates. If no step does, the error was in the graph before it was cut
into tasks, or it is the sum of many small ones; the report says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewright.measure.check import kernel_error, relative_error
from tilewright.runtime import tree
from tilewright.runtime.arguments import as_arguments
from tilewright.runtime.model import CompiledModel
from tilewright.runtime.plan import Step

# Bounds on the relative L2 error against float64, for a whole model and for one kernel, by the element type of the
# result. Integers and bools must be exact.
MODEL_BOUNDS = {"f64": 1e-10, "f32": 1e-4, "f16": 2e-2, "bf16": 1e-1}
KERNEL_BOUNDS = {"f64": 1e-11, "f32": 1e-5, "f16": 5e-3, "bf16": 4e-2}
STRICT_BOUND = 1e-6  # for f32 with strict numerics, or twice the framework's own error


@dataclass(frozen=True)
class OutputCheck:
    """One tensor of the result."""

    name: str
    error: float  # of the compiled model
    framework_error: float  # of the framework in the model's own types
    bound: float

    @property
    def ok(self) -> bool:
        return self.error <= self.bound


@dataclass(frozen=True)
class Deviation:
    """A step of the plan whose output is wrong."""

    step: int  # its index in the plan
    name: str  # what it computes in the model
    label: str  # its operators
    kernel: str
    error: float
    bound: float


@dataclass(frozen=True)
class CheckReport:
    outputs: tuple[OutputCheck, ...]
    deviation: Deviation | None = None  # the first one, if an output is wrong and a task explains it
    steps: int = 0

    @property
    def ok(self) -> bool:
        return all(output.ok for output in self.outputs)

    def __str__(self) -> str:
        worst = max((output.error for output in self.outputs), default=0.0)
        if self.ok:
            count = len(self.outputs)
            matching = "1 output matches" if count == 1 else f"{count} outputs match"
            return f"OK: {matching} float64, the largest error is {worst:.1e}"
        wrong = "; ".join(
            f"{output.name} has an error of {output.error:.1e} (at most {output.bound:.1e}, the framework's own is"
            f" {output.framework_error:.1e})"
            for output in self.outputs
            if not output.ok
        )
        if self.deviation is None:
            return (
                f"WRONG: {wrong}. Each of the {self.steps} tasks is right on its own inputs: the error is in the graph"
                " before it was cut into tasks, or the sum of all"
            )
        first = self.deviation
        return (
            f"WRONG: {wrong}. The first task that deviates is step {first.step} of {self.steps}, {first.name}:"
            f" {first.label} ({first.kernel}), with an error of {first.error:.1e} (at most {first.bound:.1e})"
        )


def check_model(compiled: CompiledModel, model: Any, inputs: Any) -> CheckReport:
    """Compare `compiled` with `model`, the nn.Module it was compiled from, on `inputs`: a tuple of positional
    arguments, a dict of keyword arguments, or one tensor. The module is run in its own types, and a copy of it in
    float64."""
    args, kwargs = as_arguments(inputs)
    got = _arrays(compiled(*args, **kwargs))
    own = _arrays(_in_framework(model, args, kwargs))
    exact = _arrays(_in_float64(model, args, kwargs))
    return compare(compiled, got, own, exact, inputs)


def compare(
    compiled: CompiledModel,
    got: Sequence[np.ndarray],
    own: Sequence[np.ndarray],
    exact: Sequence[np.ndarray],
    inputs: Any,
) -> CheckReport:
    """The report on existing results: Tilewright's, the framework's, and the exact ones."""
    if not len(got) == len(own) == len(exact):
        raise ValueError(f"{len(got)} results, the framework has {len(own)}")
    outputs = []
    for spec, ours, theirs, right in zip(compiled.plan.outputs, got, own, exact, strict=True):
        mine, framework = _error(ours, right), _error(theirs, right)
        outputs.append(OutputCheck(spec.name, mine, framework, _bound(compiled, spec.dtype, framework)))
    report = CheckReport(tuple(outputs), steps=len(compiled.plan.steps))
    if report.ok:
        return report
    return CheckReport(report.outputs, first_deviation(compiled, inputs), report.steps)


def first_deviation(compiled: CompiledModel, inputs: Any) -> Deviation | None:
    """The first step whose output is wrong for the inputs that it received."""
    for number, (step, given, output) in enumerate(compiled.executor.trace(compiled._arrays(inputs))):
        deviation = _deviation(compiled, number, step, given, output)
        if deviation is not None:
            return deviation
    return None


def _deviation(
    compiled: CompiledModel, number: int, step: Step, given: list[np.ndarray], output: np.ndarray
) -> Deviation | None:
    info = compiled.plan.tasks[step.task]
    error = kernel_error(info, given, output)
    bound = KERNEL_BOUNDS.get(info.output.dtype, 0.0)
    if not error > bound and not math.isnan(error):
        return None
    return Deviation(number, step.name, info.label, step.kernel, error, bound)


def _bound(compiled: CompiledModel, dtype: str, framework: float) -> float:
    if dtype not in MODEL_BOUNDS:
        return framework  # for integers and bools: as many wrong ones as the framework has
    if compiled.plan.numerics == "strict" and dtype == "f32":
        return max(2 * framework, STRICT_BOUND)
    return max(MODEL_BOUNDS[dtype], 2 * framework if dtype in ("f16", "bf16") else 0.0)


def _error(result: np.ndarray, reference: np.ndarray) -> float:
    return math.inf if result.shape != reference.shape else relative_error(result, reference)


# -- the framework ----------------------------------------------------------------------------------------------------


def _in_framework(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    import torch

    with torch.no_grad():
        return model(*args, **kwargs)


def _in_float64(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    import copy

    import torch
    from torch.utils import _pytree

    def widened(value: Any) -> Any:
        return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    wide_args, wide_kwargs = _pytree.tree_map(widened, (args, kwargs))
    return _in_framework(copy.deepcopy(model).double(), wide_args, wide_kwargs)


def _arrays(value: Any) -> list[np.ndarray]:
    return [_array(leaf) for leaf in tree.flatten(value)[0]]


def _array(leaf: Any) -> np.ndarray:
    """A tensor of either kind as a contiguous array; bfloat16, which NumPy lacks, by its bits."""
    if isinstance(leaf, np.ndarray):
        return np.ascontiguousarray(leaf)
    import torch

    leaf = leaf.detach().contiguous()
    if leaf.dtype is torch.bfloat16:
        import ml_dtypes

        return np.asarray(leaf.cpu().view(torch.int16).numpy().view(ml_dtypes.bfloat16))
    return np.asarray(leaf.cpu().numpy())
