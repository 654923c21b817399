"""Whole models with kernels of the tuner's choice, which `tune/confirm_in_model.py` runs interleaved."""

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

_ROOM = 2  # times the constants of the models: what must be free, since casts may want each in an order of its own

# The plan of a partition with these choices, and for each key of its tasks of which task it is a part.
Linking = Callable[[Partition, Choices, Boundary], "tuple[Linked, Mapping[str, str]]"]


class ModelRuns:
    """Casts share the constants that they keep alike."""

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
        except DeviceError:  # no memory for it on the card
            return None

        def run() -> dict[str, float]:
            found: dict[str, float] = defaultdict(float)
            for model in ready:
                for task, seconds in model():
                    found[task] += seconds
            return found

        return run

    def _ready(self, partition: Partition, assignment: Choices) -> Callable[[], list[tuple[str, float]]]:
        """The model, loaded: a run of it gives the seconds of each step, by the task that it is for; or of all."""
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
