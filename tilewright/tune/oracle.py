"""The times that rewrites ask for, predicted: of each task the config that `choose` would take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from tilewright.cost import cpu
from tilewright.cost.program import terms_of
from tilewright.dtypes import DType
from tilewright.graph.ir import Graph, Node, TensorType, input_node
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.hw import CpuMachine
from tilewright.loops.default import default_program
from tilewright.space.space import Space
from tilewright.space.template import Applied, Work
from tilewright.space.templates.cpu import TEMPLATES
from tilewright.tune.choose import descend

_QUICK = (
    1000  # configs that a space may have to be among the quick ones, knobs that go together counted together
)


@dataclass(frozen=True)
class PredictedCosts:
    """A `CostOracle` for one machine."""

    machine: CpuMachine
    numerics: str = "fast"

    def seconds(self, task: Task) -> float:
        return _prediction(task, self.machine, self.numerics).seconds

    def quickly(self, task: Task) -> tuple[float, bool]:
        return _prediction(task, self.machine, self.numerics).quickly

    def moving(self, type: TensorType, axes: Sequence[int], *, alone: bool = True) -> float:
        x = input_node(0, type)
        permuting = self.seconds(_task(apply("permute", x, axes=tuple(axes))))
        if alone:
            return permuting
        # Any kernel that walks over the tensor in its own order would do.
        return max(0.0, permuting - self.seconds(_task(apply("reshape", x, shape=type.shape))))

    def block(self, channels: int, dtype: DType) -> int:
        """The lanes of a vector, or half of them."""
        lanes = self.machine.lanes(dtype) if dtype.is_float else 1
        return next((size for size in (lanes, lanes // 2) if size > 1 and channels % size == 0), 0)


def _task(output: Node) -> Task:
    return Task(Graph(output.inputs, (output,)))


@lru_cache(maxsize=1024)
def _prediction(task: Task, machine: CpuMachine, numerics: str) -> _Prediction:
    """Models repeat their layers, and a model that is compiled for many shapes asks again for most."""
    return _Prediction(Work(task, machine, numerics))


@dataclass(frozen=True)
class _Prediction:
    work: Work

    @cached_property
    def applied(self) -> list[Applied]:
        return [applied for t in TEMPLATES if (applied := t.apply(self.work)) is not None]

    @cached_property
    def seconds(self) -> float:
        """As `choose` chooses: the default program where no template has a legal config."""
        least = self._least(self.applied)
        return least if math.isfinite(least) else self._default

    @cached_property
    def quickly(self) -> tuple[float, bool]:
        quick = [applied for applied in self.applied if _searched(applied.space) <= _QUICK]
        least = self._least(quick)
        if len(quick) == len(self.applied) or not math.isfinite(least):
            return self.seconds, True
        return least, False

    def _least(self, templates: Sequence[Applied]) -> float:
        found = (descend(applied, self.work) for applied in templates)
        return min((seconds for seconds, _ in filter(None, found)), default=math.inf)

    @property
    def _default(self) -> float:
        machine, formula = self.work.machine, self.work.formula
        if formula is None:
            return math.inf
        return cpu.seconds(terms_of(default_program(formula, machine), machine), machine)


def _searched(space: Space) -> int:
    """How many configs one round of a descent looks at."""
    return sum(math.prod(len(knob.choices) for knob in group) for group in space.groups())
