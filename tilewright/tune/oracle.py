"""The times that rewrites ask for, predicted: of each task the config that `choose` would take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from tilewright.cost import cpu
from tilewright.cost.program import terms_of
from tilewright.graph.ir import Graph, Node, TensorType, input_node
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.hw import CpuMachine
from tilewright.loops.default import default_program
from tilewright.space.template import Work
from tilewright.tune.choose import best_of


@dataclass(frozen=True)
class PredictedCosts:
    """A `CostOracle` for one machine."""

    machine: CpuMachine
    numerics: str = "fast"

    def seconds(self, task: Task) -> float:
        return _predicted(task, self.machine, self.numerics)

    def moving(self, type: TensorType, axes: Sequence[int], *, alone: bool = True) -> float:
        x = input_node(0, type)
        permuting = self.seconds(_task(apply("permute", x, axes=tuple(axes))))
        if alone:
            return permuting
        # Any kernel that walks over the tensor in its own order would do.
        return max(0.0, permuting - self.seconds(_task(apply("reshape", x, shape=type.shape))))


def _task(output: Node) -> Task:
    return Task(Graph(output.inputs, (output,)))


@lru_cache(maxsize=4096)
def _predicted(task: Task, machine: CpuMachine, numerics: str) -> float:
    """Models repeat their layers, and a model that is compiled for many shapes asks again for most."""
    work = Work(task, machine, numerics)
    best = best_of(work)
    if best is not None:
        return best[0]
    if work.formula is None:
        return float("inf")
    return cpu.seconds(terms_of(default_program(work.formula, machine), machine), machine)
