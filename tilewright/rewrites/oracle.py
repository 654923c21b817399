"""The cost oracle protocol for rewrites: times, without knowledge of the machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tilewright.dtypes import DType
from tilewright.graph.ir import TensorType
from tilewright.graph.task import Task


class CostOracle(Protocol):
    """Predicted or measured times. Rewrites only add and compare them."""

    def seconds(self, task: Task) -> float:
        """The time of the task's best kernel."""

    def upper_bound(self, task: Task) -> tuple[float, bool]:
        """An upper bound on the time of the best kernel, found with less effort, and whether it is exact."""

    def permute_seconds(self, type: TensorType, axes: Sequence[int], *, alone: bool = True) -> float:
        """The time of permuting a tensor: in a kernel of its own, or the additional time in a kernel that reads or
        writes the tensor anyway."""

    def block(self, channels: int, dtype: DType) -> int:
        """The best number of channels per block for kernels that read blocks as vectors; 0: there are no such
        kernels."""


class FewestBytes:
    """An oracle without a machine: channels-last kernels, which have every template, and as few permuted bytes as
    possible."""

    def seconds(self, task: Task) -> float:
        first = any(node.attrs.get("layout") == "channels_first" for node in task.graph.nodes())
        return float("inf") if first else 0.0

    def upper_bound(self, task: Task) -> tuple[float, bool]:
        return self.seconds(task), True

    def permute_seconds(self, type: TensorType, axes: Sequence[int], *, alone: bool = True) -> float:
        return float(type.bytes)

    def block(self, channels: int, dtype: DType) -> int:
        return 0
