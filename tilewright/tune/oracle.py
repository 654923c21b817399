"""Predicted times for rewrites: the time of the config that `choose` would select for each task."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from tilewright.dtypes import DType
from tilewright.graph.ir import Graph, Node, TensorType, input_node
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.hw import Machine
from tilewright.space.catalog import catalog
from tilewright.space.space import Space
from tilewright.space.template import Applied, Work
from tilewright.tune.choose import best_among

_QUICK = (
    1000  # maximum number of configs of a space that is fast to search; knobs of one group count together
)


@dataclass(frozen=True)
class PredictedCosts:
    """A `CostOracle` for one machine."""

    machine: Machine
    numerics: str = "fast"

    def seconds(self, task: Task) -> float:
        return _prediction(task, self.machine, self.numerics).seconds

    def upper_bound(self, task: Task) -> tuple[float, bool]:
        return _prediction(task, self.machine, self.numerics).upper_bound

    def permute_seconds(self, type: TensorType, axes: Sequence[int], *, alone: bool = True) -> float:
        x = input_node(0, type)
        permuting = self.seconds(_task(apply("permute", x, axes=tuple(axes))))
        if alone:
            return permuting
        # Any kernel that traverses the tensor in its own order would do.
        return max(0.0, permuting - self.seconds(_task(apply("reshape", x, shape=type.shape))))

    def block(self, channels: int, dtype: DType) -> int:
        return self.machine.channel_block(channels, dtype)


def _task(output: Node) -> Task:
    return Task(Graph(output.inputs, (output,)))


@lru_cache(maxsize=1024)
def _prediction(task: Task, machine: Machine, numerics: str) -> _Prediction:
    """Cached, because models repeat layers, and compiling a model for many shapes repeats most tasks."""
    return _Prediction(Work(task, machine, numerics))


@dataclass(frozen=True)
class _Prediction:
    work: Work

    @cached_property
    def applied(self) -> list[Applied]:
        """Templates only: sketches take long to derive and are seldom the best, so layouts are compared by their
        templates."""
        return catalog(self.work.machine.kind).trusted(self.work, sketches=False)

    @cached_property
    def seconds(self) -> float:
        """The time of the config that `choose` selects; of the default program if no template has a legal config."""
        least = self._least(self.applied)
        return least if math.isfinite(least) else self._default

    @cached_property
    def upper_bound(self) -> tuple[float, bool]:
        quick = [applied for applied in self.applied if _searched(applied.space) <= _QUICK]
        least = self._least(quick)
        if len(quick) == len(self.applied) or not math.isfinite(least):
            return self.seconds, True
        return least, False

    def _least(self, templates: Sequence[Applied]) -> float:
        best = best_among(self.work, templates)
        return math.inf if best is None else best[0]

    @property
    def _default(self) -> float:
        applied = catalog(self.work.machine.kind).default.apply(self.work)
        return math.inf if applied is None else self._least([applied])


def _searched(space: Space) -> int:
    """The number of configs that one round of a descent examines."""
    return sum(math.prod(len(knob.choices) for knob in group) for group in space.groups())
