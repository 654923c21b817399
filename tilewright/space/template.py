"""What a template is: a way to compute a class of tasks, structured by hand, with knobs.

A template looks at a piece of Work and either declines or answers with an `Applied`: the space of its configs for that
task, what each would cost in counted terms, and the program of each. Configs are legal by construction: every one of
the space makes a program that is right.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from tilewright.graph.lower import lower_graph
from tilewright.graph.task import Task
from tilewright.hw import CpuMachine
from tilewright.loops.formula import Formula, NestedReduction, formula_of
from tilewright.loops.ir import Program
from tilewright.loops.weights import with_weights
from tilewright.space.space import Config, Space


@dataclass(frozen=True)
class Work:
    """A task on a machine."""

    task: Task
    machine: CpuMachine
    numerics: str = "fast"

    @cached_property
    def formula(self) -> Formula | None:
        return normal_form(self.task, self.numerics)


def normal_form(task: Task, numerics: str) -> Formula | None:
    """The task as a formula; None where a reduction is read inside another's loop."""
    output, inputs = lower_graph(task.graph)
    strict = numerics == "strict"
    try:
        formula = formula_of(output, inputs, constants=task.constants, keep_rounding=strict)
    except NestedReduction:
        return None
    return formula if strict else with_weights(formula)


@dataclass(frozen=True)
class Terms:
    """What a program does, counted over all threads: what an analytical model turns into time.

    Instructions are whole vectors. Traffic is bytes that come from each level of memory into the one before it; stores
    count as twice their bytes where they miss (the line is read first).
    """

    arithmetic: float  # instructions of the multiply-add ports
    loads: float = 0.0  # loads and broadcasts issued
    stores: float = 0.0
    branches: float = (
        0.0  # iterations of innermost loops: each costs about a mispredicted or taken branch's share
    )
    from_l2: float = 0.0
    from_l3: float = 0.0
    from_memory: float = 0.0
    prefetched: float = 0.0  # of `from_memory`, bytes asked for early enough by the program itself
    iterations: int = 1  # of the parallel loop
    scalar: float = 0.0  # cycles that none of the above covers, over all threads


class Applied(Protocol):
    """A template applied to one task."""

    @property
    def space(self) -> Space: ...

    def terms(self, config: Config) -> Terms | None:
        """None where they are to be counted in the program itself."""

    def program(self, config: Config) -> Program: ...


class Template(Protocol):
    @property
    def name(self) -> str: ...

    def apply(self, work: Work) -> Applied | None:
        """None where the template has nothing to say about this task."""
