"""The template protocol: one kind of implementation for a class of tasks, written by hand or derived by rules, with
knobs.

A template takes a `Work` and either declines or returns an `Applied`: the space of its configs for that task,
the cost of each in counted terms, and what each builds. Configs are legal by construction: every config of the space
computes the task. Library calls and decompositions into several kernels are templates too, on every target.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from tilewright.graph.ir import Node
from tilewright.graph.lower import lower_graph
from tilewright.graph.op import Fusion, op_of
from tilewright.graph.task import Task
from tilewright.hw import CpuMachine, Machine
from tilewright.hw.gpu import GpuMachine
from tilewright.loops.formula import Formula, NestedReduction, formula_of
from tilewright.loops.softmax_exp import with_softmax_exp
from tilewright.space.implementation import Implementation, Kernel
from tilewright.space.space import Config, Space
from tilewright.space.terms import Counted, GpuTerms, Terms

__all__ = [
    "Applied",
    "Batched",
    "CpuWork",
    "Explaining",
    "Featured",
    "GpuTerms",
    "GpuWork",
    "Template",
    "Terms",
    "Work",
    "normal_form",
]

M_co = TypeVar("M_co", bound=Machine, covariant=True)


@dataclass(frozen=True)
class Work(Generic[M_co]):
    """A task on a machine."""

    task: Task
    machine: M_co
    numerics: str = "fast"

    @cached_property
    def formula(self) -> Formula | None:
        return normal_form(self.task, self.numerics)


CpuWork = Work[CpuMachine]
GpuWork = Work[GpuMachine]


def normal_form(task: Task, numerics: str) -> Formula | None:
    """The task as a formula; None if a reduction is read inside another reduction's loop."""
    if _has_chain(task):
        return None
    output, inputs = lower_graph(task.graph)
    strict = numerics == "strict"
    try:
        formula = formula_of(output, inputs, constants=task.constants, keep_rounding=strict)
    except NestedReduction:
        return None
    return formula if strict else with_softmax_exp(formula)


def _has_chain(task: Task) -> bool:
    """Whether a contraction reads the result of another: nested reductions, without lowering both to find out."""
    below: set[Node] = set()
    for node in task.graph.nodes():
        if node.is_input or node.is_constant:
            continue
        is_contraction = op_of(node.op).fusion is Fusion.COMPLEX
        if any(operand in below for operand in node.inputs):
            if is_contraction:
                return True
            below.add(node)
        elif is_contraction:
            below.add(node)
    return False


class Applied(Protocol):
    """A template applied to one task."""

    @property
    def space(self) -> Space: ...

    def terms(self, config: Config) -> Counted | None:
        """The counted terms; None if they are to be counted in the program."""

    def program(self, config: Config) -> Kernel | Implementation:
        """The implementation for this config: one kernel, or several parts."""


@runtime_checkable
class Batched(Protocol):
    """An `Applied` that counts the terms of many configs at once: faster, if a search compares hundreds of them. Its
    space is `batched`."""

    @property
    def space(self) -> Space: ...

    def terms_of(self, values: Mapping[str, Any]) -> Counted:
        """The terms, as arrays, of the configs with these values: of each knob one value for all, or an array."""


@runtime_checkable
class Featured(Protocol):
    """An `Applied` that tells a model that learns more of a config than its terms and its knobs."""

    def features(self, config: Config) -> dict[str, float]:
        """Numbers by name. What is learned on one task should hold on another: ratios and logarithms."""


@runtime_checkable
class Explaining(Protocol):
    """A template that says why it does not apply, for reports."""

    def refusal(self, work: Work) -> str | None:
        """Why it does not compute a task; None if it does."""


class Template(Protocol):
    @property
    def name(self) -> str: ...

    def apply(self, work: Work) -> Applied | None:
        """Apply the template to a task; None if it does not apply."""
