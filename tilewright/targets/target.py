"""What a target is: the part of the road that depends on the kind of machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tilewright.frontend import ImportedModel
from tilewright.graph.task import Partition, Task
from tilewright.hw import CpuMachine
from tilewright.hw.gpu import GpuMachine
from tilewright.link import Boundary
from tilewright.rewrites.base import Observer
from tilewright.runtime.model import CompiledModel
from tilewright.support.trace import Trace
from tilewright.tune.allocate import Objective
from tilewright.tune.effort import KNOWN, Tuning

# Puts equal constants of other models in the place of a model's own.
Share = Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]]
Choices = Mapping[str, Any]  # by the key of a task; what a target's own `chosen` gave


def boundary(imported: ImportedModel) -> Boundary:
    """Of a model as it was imported."""
    return Boundary(
        imported.input_names,
        imported.input_tree,
        imported.output_tree,
        imported.argument_names,
        imported.pinned,
    )


def unshared(constants: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
    return constants


class Target(Protocol):
    @property
    def machine(self) -> CpuMachine | GpuMachine: ...

    @property
    def is_here(self) -> bool:
        """Whether this process can measure on it."""

    def default_numerics(self) -> str:
        """Where the caller says nothing."""

    def partitioned(
        self, imported: ImportedModel, numerics: str, trace: Trace, observe: Observer | None = None
    ) -> Partition:
        """Graph -> tasks. `observe` is told the graph after every pass."""

    def chosen(
        self,
        partitions: Sequence[Partition],
        numerics: str,
        threads: int | None,
        trace: Trace,
        *,
        tuning: Tuning = KNOWN,
        lock: str | Path | None = None,
        objective: Objective | None = None,
    ) -> Choices:
        """Tasks -> how each is computed: as the lock file says, or as measured now or before, or as predicted."""

    def finished(
        self,
        imported: ImportedModel,
        partition: Partition,
        numerics: str,
        threads: int | None,
        trace: Trace,
        choices: Choices,
        share: Share = unshared,
    ) -> CompiledModel:
        """Choices -> kernels -> a model that runs."""


def computed(partition: Partition) -> dict[str, tuple[Task, int]]:
    """The tasks that need a kernel: a tensor without elements needs none."""
    return {key: found for key, found in partition.tasks().items() if found[0].output.type.size}


def together(partitions: Sequence[Partition]) -> dict[str, tuple[Task, int]]:
    """The tasks of several models, each with the number of its calls in all of them."""
    tasks: dict[str, tuple[Task, int]] = {}
    for partition in partitions:
        for key, (task, count) in computed(partition).items():
            tasks[key] = (task, tasks.get(key, (task, 0))[1] + count)
    return tasks
