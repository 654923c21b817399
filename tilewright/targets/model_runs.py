"""Run whole models with kernels that the tuner chose, for `tune/confirm_in_model.py`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import psutil

from tilewright.errors import DeviceError
from tilewright.graph.task import Partition
from tilewright.link import Boundary, Linked
from tilewright.runtime.dynamic import ConstantPool
from tilewright.runtime.explain import random_inputs
from tilewright.targets.target import Choices, Target
from tilewright.tune.confirm_in_model import WHOLE, ModelRun

_ROOM = 2  # free memory needed, as a multiple of the models' constants: each choice may store them in its own order

# Returns the plan of a partition with these choices, and the task of each key in the plan.
Linking = Callable[[Partition, Choices, Boundary], "tuple[Linked, Mapping[str, str]]"]


class ModelRuns:
    """Models with given choices. They share the constants that they store alike."""

    def __init__(
        self, target: Target, partitions: Sequence[Partition], linked: Linking, threads: int
    ) -> None:
        self._target, self._partitions, self._linked, self._threads = target, partitions, linked, threads
        self._pool = ConstantPool()
        self.by_task = target.times_steps

    def __call__(self, assignment: Choices) -> ModelRun | None:
        if _ROOM * sum(map(_constant_bytes, self._partitions)) > psutil.virtual_memory().available:
            return None
        try:
            ready = [self._ready(partition, assignment) for partition in self._partitions]
        except DeviceError:  # the GPU has no memory for it
            return None

        def run() -> dict[str, float]:
            found: dict[str, float] = defaultdict(float)
            for model in ready:
                for task, seconds in model():
                    found[task] += seconds
            return found

        return run

    def _ready(self, partition: Partition, assignment: Choices) -> Callable[[], list[tuple[str, float]]]:
        """Load the model. A run returns the seconds of each step by its task, or of the whole model."""
        boundary = Boundary.anonymous(len(partition.graph.inputs), len(partition.graph.outputs))
        linked, owner = self._linked(partition, assignment, boundary)
        shared = Linked(linked.plan, tuple(self._pool.shared(linked.constants)), linked.objects)
        executor = self._target.executor(shared, self._threads)
        inputs, outputs = random_inputs(linked.plan), executor.new_outputs()
        if not self.by_task:
            executor.run(inputs, outputs)
            return lambda: [(WHOLE, executor.seconds_of_graph())]
        tasks = [owner[step.task] for step in linked.plan.steps]
        timed = executor.step_timer(inputs, outputs)
        return lambda: list(zip(tasks, timed(), strict=True))


def _constant_bytes(partition: Partition) -> int:
    return sum(node.type.bytes for node in partition.graph.nodes() if node.is_constant)
