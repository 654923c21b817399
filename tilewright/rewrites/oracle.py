"""The cost oracle protocol of the rewrites: times, without knowing a machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tilewright.dtypes import DType
from tilewright.graph.ir import TensorType
from tilewright.graph.task import Task


class CostOracle(Protocol):
    """Predicted or measured times. All that a rewrite does with them is to add and to compare."""

    def seconds(self, task: Task) -> float:
        """The time of the task's best kernel."""

    def upper_bound(self, task: Task) -> tuple[float, bool]:
        """A time that the best kernel does not exceed, found with less effort; and whether it is the best kernel's."""

    def permute_seconds(self, type: TensorType, axes: Sequence[int], *, alone: bool = True) -> float:
        """The time of permuting a tensor: in a kernel of its own, or what it adds to one that would read or write the
        tensor anyway."""

    def block(self, channels: int, dtype: DType) -> int:
        """Of so many channels, how many are best stored together as a block that kernels read as vectors; 0: there are
        no such kernels."""


class FewestBytes:
    """Where no machine is in sight: channels-last kernels, which have every template, and as few bytes as possible to
    permute between them."""

    def seconds(self, task: Task) -> float:
        first = any(node.attrs.get("layout") == "channels_first" for node in task.graph.nodes())
        return float("inf") if first else 0.0

    def upper_bound(self, task: Task) -> tuple[float, bool]:
        return self.seconds(task), True

    def permute_seconds(self, type: TensorType, axes: Sequence[int], *, alone: bool = True) -> float:
        return float(type.bytes)

    def block(self, channels: int, dtype: DType) -> int:
        return 0
