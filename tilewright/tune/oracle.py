"""Predicted times for rewrites: the time of the config that `choose` would select for each task."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from tilewright.cost.predictor import kernel_seconds, traffic_seconds
from tilewright.dtypes import DType
from tilewright.errors import TilewrightError
from tilewright.graph.ir import Graph, Node, TensorType, input_node
from tilewright.graph.op import Fusion, apply, op_of
from tilewright.graph.task import Task
from tilewright.hw import Machine
from tilewright.rewrites.oracle import Price, measured_scale
from tilewright.space.catalog import catalog
from tilewright.space.decompositions.separate_prologue import NAME as SEPARATE_PROLOGUE
from tilewright.space.space import Space
from tilewright.space.template import Applied, Explaining, Work
from tilewright.tune.choose import best_among
from tilewright.tune.known import decided_choices

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

    def kernel_seconds(self) -> float:
        return kernel_seconds(self.machine)

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

    def channel_multiple(self, dtype: DType) -> int:
        return self.machine.channel_multiple(dtype)

    # -- groups, for the partition by dynamic programming

    def can_compute(self, task: Task) -> bool:
        """A contraction needs a template that fuses: the default program would be too slow to compare, and with a
        separate prologue the kernels are those of two groups."""
        found = _prediction(task, self.machine, self.numerics)
        if _has_contraction(task):
            unfused = (catalog(self.machine.kind).default.name, SEPARATE_PROLOGUE)
            fusing = (applied for applied in found.applied if applied.space.template not in unfused)
            return any(applied.space.first is not None for applied in fusing)
        return found.work.formula is not None

    def refusal(self, task: Task) -> str | None:
        """The first reason that a template for chains gives."""
        work = Work(task, self.machine, self.numerics)
        for template in catalog(self.machine.kind).all_templates:
            if isinstance(template, Explaining) and (reason := template.refusal(work)) is not None:
                return reason
        return None

    def prepare(self, tasks: Collection[Task]) -> None:
        pass

    def decided(self) -> Mapping[Task, bool]:
        return {}

    def price(self, task: Task) -> Price | None:
        seconds = self.seconds(task) + self.kernel_seconds()
        return Price(seconds) if math.isfinite(seconds) else None

    def traffic_seconds(self, bytes: float) -> float:
        return traffic_seconds(self.machine, bytes)


@dataclass(frozen=True)
class KnownCosts(PredictedCosts):
    """The same, with measured times where the tuning database has them.

    Measured and predicted times are compared in one sum, so predictions are multiplied by the ratio of the two, as far
    as it is known from the tasks of the model. That is a median, and a prediction may well be too low beside a measured
    time. Unless the caller `explores`, groups that were never measured are not used where tuned ones cover the graph.
    """

    threads: int = 0
    db: Path | None = None
    explores: bool = False

    def prepare(self, tasks: Collection[Task]) -> None:
        works = {task.key: Work(task, self.machine, self.numerics) for task in tasks}
        try:
            decided = decided_choices(works, self.threads, self.db)
        except TilewrightError:
            return  # without the toolchain, which the records name, nothing was measured
        for key, choice in decided.items():
            task, kind = works[key].task, choice.origin.kind
            self._decided[task] = kind != "predicted"
            if kind == "tuned" and choice.seconds is not None:
                self._measured[task] = choice.seconds
        self._scale[0] = measured_scale(
            (seconds, self.seconds(task)) for task, seconds in self._measured.items()
        )

    def price(self, task: Task) -> Price | None:
        if task in self._measured:
            return Price(self._measured[task] + self.kernel_seconds(), measured=True)
        seconds = self.seconds(task) * self._scale[0] + self.kernel_seconds()
        return Price(seconds) if math.isfinite(seconds) else None

    def decided(self) -> Mapping[Task, bool]:
        return {} if self.explores else self._decided

    @cached_property
    def _measured(self) -> dict[Task, float]:
        return {}

    @cached_property
    def _decided(self) -> dict[Task, bool]:
        return {}

    @cached_property
    def _scale(self) -> list[float]:
        return [1.0]


def _task(output: Node) -> Task:
    return Task(Graph(output.inputs, (output,)))


def _has_contraction(task: Task) -> bool:
    kinds = (op_of(node.op).fusion for node in task.graph.nodes() if not (node.is_input or node.is_constant))
    return Fusion.COMPLEX in kinds


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
