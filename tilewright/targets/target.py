"""The target protocol: the part of the pipeline that depends on the kind of machine.

Everything else is shared and is in `driver.py`: one tuner chooses the implementation of each task, one code generator
per kind (`codegen/generator.py`) builds it, and one linker links it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tilewright.frontend import ImportedModel
from tilewright.graph.task import Partition, Task
from tilewright.hw import Machine
from tilewright.link import Boundary, Linked
from tilewright.rewrites.base import Observer
from tilewright.rewrites.oracle import GroupCosts
from tilewright.runtime.model import CompiledModel
from tilewright.support.trace import Trace
from tilewright.tune.choose import Choice
from tilewright.tune.oracle import KnownCosts, PredictedCosts

# Replaces a model's constants by equal constants of other models.
Share = Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]]
Choices = Mapping[str, Choice]  # by task key


def boundary(imported: ImportedModel) -> Boundary:
    """The boundary of an imported model."""
    return Boundary(
        imported.input_names,
        imported.input_tree,
        imported.output_tree,
        imported.argument_names,
        imported.pinned,
    )


def unshared(constants: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
    return constants


@dataclass(frozen=True)
class Cutting:
    """How the graph is cut into tasks: `partition` "dynamic" or "greedy".

    `measured`: times of kernels with this many `threads` are read from the database `db` (None: the one in the cache
    folder). Otherwise all are predicted, and the tasks are the same whatever was tuned, as a lock file needs them.
    `explores`: groups that were never measured may replace tuned ones, because this run measures them.
    `pads`: unaligned channels may be padded.
    """

    partition: str = "dynamic"
    threads: int = 0
    db: Path | None = None
    measured: bool = True
    explores: bool = False
    pads: bool = True

    def costs(self, machine: Machine, numerics: str) -> GroupCosts | None:
        """The times of groups, for dynamic programming; None for greedy fusion."""
        if self.partition == "greedy":
            return None
        if not self.measured:
            return PredictedCosts(machine, numerics)
        return KnownCosts(machine, numerics, threads=self.threads, db=self.db, explores=self.explores)


DYNAMIC = Cutting()


class Target(Protocol):
    @property
    def machine(self) -> Any:
        """The description in `hw/` that candidates, code generation and cost models use."""

    @property
    def is_here(self) -> bool:
        """Whether this process can measure on the target."""

    def default_numerics(self) -> str:
        """The mode that is used if the caller gives none."""

    def threads(self, wanted: int | None) -> int:
        """The number of threads of a call; 0 if the caller cannot choose it."""

    def partition(
        self,
        imported: ImportedModel,
        numerics: str,
        trace: Trace,
        observe: Observer | None = None,
        cutting: Cutting = DYNAMIC,
    ) -> Partition:
        """Cut the graph into tasks. `observe` receives the graph after every pass."""

    def joins_reductions(self) -> bool:
        """Whether there are kernels that compute a GEMM together with a reduction of its results."""

    @property
    def times_steps(self) -> bool:
        """Whether the steps of a running model can be timed separately. On a GPU they overlap."""

    def runner(self, threads: int) -> Any:
        """The runner that builds, checks and times candidates (`measure.measuring.Measuring`)."""

    def executor(self, linked: Linked, threads: int) -> Any:
        """An executor that runs a plan step by step, for timing tasks inside a model (`targets/model_runs.py`)."""

    def load(
        self,
        linked: Linked,
        constants: Sequence[np.ndarray],
        threads: int | None,
        again: Callable[[Target], CompiledModel],
    ) -> CompiledModel:
        """Load a plan as a runnable model. `again` compiles the model for another target, with these choices if they
        are legal there."""


def computed(partition: Partition) -> dict[str, tuple[Task, int]]:
    """The tasks that need a kernel. Tensors without elements need none."""
    return {key: found for key, found in partition.tasks().items() if found[0].output.type.size}


def together(partitions: Sequence[Partition]) -> dict[str, tuple[Task, int]]:
    """The tasks of several models, each with the total number of its calls."""
    tasks: dict[str, tuple[Task, int]] = {}
    for partition in partitions:
        for key, (task, count) in computed(partition).items():
            tasks[key] = (task, tasks.get(key, (task, 0))[1] + count)
    return tasks
