"""The cost oracle protocol for rewrites: times, without knowledge of the machine."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

from tilewright.dtypes import DType
from tilewright.graph.ir import TensorType
from tilewright.graph.task import Task


class CostOracle(Protocol):
    """Predicted or measured times. Rewrites only add and compare them."""

    def seconds(self, task: Task) -> float:
        """The time of the task's best kernel."""

    def kernel_seconds(self) -> float:
        """The time that each further kernel adds to a model's call, besides its own."""

    def upper_bound(self, task: Task) -> tuple[float, bool]:
        """An upper bound on the time of the best kernel, found with less effort, and whether it is exact."""

    def permute_seconds(self, type: TensorType, axes: Sequence[int], *, alone: bool = True) -> float:
        """The time of permuting a tensor: in a kernel of its own, or the additional time in a kernel that reads or
        writes the tensor anyway."""

    def block(self, channels: int, dtype: DType) -> int:
        """The best number of channels per block for kernels that read blocks as vectors; 0: there are no such
        kernels."""


@dataclass(frozen=True)
class Price:
    """The time of a group's best kernel."""

    seconds: float
    measured: bool = False  # otherwise predicted


class GroupCosts(Protocol):
    """Times of groups that one kernel may compute, for the partition by dynamic programming."""

    def can_compute(self, task: Task) -> bool:
        """Whether some candidate computes the task. It is what makes a group legal."""

    def prepare(self, tasks: Collection[Task]) -> None:
        """Announce the tasks that will be priced."""

    def decided(self) -> Mapping[Task, bool]:
        """The announced tasks that were tuned, and whether their choice is final: measured, or the only candidate.
        Where these cover the graph, groups are chosen among them. Empty for a run that measures more."""

    def price(self, task: Task) -> Price | None:
        """The time of the task: measured if it was tuned, otherwise predicted; None if neither is known."""

    def traffic_seconds(self, bytes: float) -> float:
        """The most that a fused kernel saves by not moving this many bytes: their traffic, and one launch."""


def measured_scale(times: Iterable[tuple[float, float]]) -> float:
    """The factor that puts predicted seconds on the scale of measured ones: the median ratio of these pairs of measured
    and predicted seconds, or 1 without any."""
    ratios = [measured / predicted for measured, predicted in times if 0 < predicted < math.inf]
    return statistics.median(ratios) if ratios else 1.0


@dataclass(frozen=True)
class MeasuredCosts:
    """Costs with measured seconds of some tasks, by key; those of all others are predicted, on the same scale."""

    costs: GroupCosts
    times: Mapping[str, float]

    def can_compute(self, task: Task) -> bool:
        return self.costs.can_compute(task)

    def prepare(self, tasks: Collection[Task]) -> None:
        prices = {task.key: self.costs.price(task) for task in tasks if task.key in self.times}
        self._scale[0] = measured_scale(
            (self.times[key], price.seconds) for key, price in prices.items() if price
        )

    @cached_property
    def _scale(self) -> list[float]:
        return [1.0]

    def decided(self) -> Mapping[Task, bool]:
        return {}

    def price(self, task: Task) -> Price | None:
        if task.key in self.times:
            return Price(self.times[task.key], measured=True)
        predicted = self.costs.price(task)
        return None if predicted is None else Price(predicted.seconds * self._scale[0])

    def traffic_seconds(self, bytes: float) -> float:
        return self.costs.traffic_seconds(bytes)

    def refusal(self, task: Task) -> str | None:
        return self.costs.refusal(task) if isinstance(self.costs, ExplainsRefusals) else None


@runtime_checkable
class ExplainsRefusals(Protocol):
    """`GroupCosts` that know why a group has no kernel."""

    def refusal(self, task: Task) -> str | None:
        """Why no candidate computes the task, as a clause; None if that is not known."""


class FewestBytes:
    """An oracle without a machine: channels-last kernels, which have every template, and as few permuted bytes as
    possible."""

    def seconds(self, task: Task) -> float:
        first = any(node.attrs.get("layout") == "channels_first" for node in task.graph.nodes())
        return float("inf") if first else 0.0

    def kernel_seconds(self) -> float:
        return 0.0

    def upper_bound(self, task: Task) -> tuple[float, bool]:
        return self.seconds(task), True

    def permute_seconds(self, type: TensorType, axes: Sequence[int], *, alone: bool = True) -> float:
        return float(type.bytes)

    def block(self, channels: int, dtype: DType) -> int:
        return 0
