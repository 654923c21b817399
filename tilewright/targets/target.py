"""The target protocol: the part of the pipeline that depends on the kind of machine.

Everything else is the same for all of them and stands in `driver.py`: the tasks are chosen by one tuner, built by one
code generation per kind (`codegen/generator.py`) and linked by one linker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from tilewright.frontend import ImportedModel
from tilewright.graph.task import Partition, Task
from tilewright.link import Boundary, Linked
from tilewright.rewrites.base import Observer
from tilewright.runtime.model import CompiledModel
from tilewright.support.trace import Trace
from tilewright.tune.choose import Choice

# Puts equal constants of other models in the place of a model's own.
Share = Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]]
Choices = Mapping[str, Choice]  # by the key of a task


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
    def machine(self) -> Any:
        """Of `hw/`: what candidates, code generation and cost models ask."""

    @property
    def is_here(self) -> bool:
        """Whether this process can measure on it."""

    def default_numerics(self) -> str:
        """Where the caller says nothing."""

    def threads(self, wanted: int | None) -> int:
        """That a call uses; 0 where that is not for the caller to say."""

    def partition(
        self, imported: ImportedModel, numerics: str, trace: Trace, observe: Observer | None = None
    ) -> Partition:
        """Graph -> tasks. `observe` is told the graph after every pass."""

    def joins_reductions(self) -> bool:
        """Whether there are kernels that compute a GEMM together with the reduction of its results."""

    @property
    def times_steps(self) -> bool:
        """Whether the steps of a running model have times of their own: on a GPU they overlap."""

    def runner(self, threads: int) -> Any:
        """What builds, checks and times candidates (`tune.tuner.Measuring`)."""

    def executor(self, linked: Linked, threads: int) -> Any:
        """What runs a plan step by step, for those who time its tasks inside a model (`targets/model_runs.py`)."""

    def load(
        self,
        linked: Linked,
        constants: Sequence[np.ndarray],
        threads: int | None,
        again: Callable[[Target], CompiledModel],
    ) -> CompiledModel:
        """Plan -> a model that runs. `again`: the same model for another target, with these choices where they hold."""


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
