"""Models as they would run, with kernels of the tuner's choice: what `tune/rehearse.py` runs by turns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import psutil

from tilewright.graph.task import Partition
from tilewright.link import Boundary, Linked
from tilewright.runtime.dynamic import ConstantPool
from tilewright.runtime.executor import Executor
from tilewright.runtime.explain import random_inputs
from tilewright.tune.choose import Choice
from tilewright.tune.rehearse import Run

_ROOM = 2  # times the constants of the models: what must be free, since casts may want each in an order of its own


class Staged:
    """`linked`: a plan for a partition with these choices. Casts share the constants that they keep alike."""

    def __init__(
        self,
        partitions: Sequence[Partition],
        linked: Callable[[Partition, Mapping[str, Choice], Boundary], Linked],
        threads: int,
    ) -> None:
        self._partitions, self._linked, self._threads = partitions, linked, threads
        self._pool = ConstantPool()

    def __call__(self, cast: Mapping[str, Choice]) -> Run | None:
        if _ROOM * sum(map(_constant_bytes, self._partitions)) > psutil.virtual_memory().available:
            return None
        ready = []
        for partition in self._partitions:
            linked = self._linked(partition, cast, boundary_of(partition))
            constants = self._pool.shared(linked.constants)
            ready.append(Executor(linked.plan, constants, linked.objects, self._threads))
        inputs = [random_inputs(executor.plan) for executor in ready]
        outputs = [executor.new_outputs() for executor in ready]

        def run() -> dict[str, float]:
            found: dict[str, float] = defaultdict(float)
            for executor, given, taken in zip(ready, inputs, outputs, strict=True):
                times = executor.time_range(_addresses(given), _addresses(taken))
                for step, seconds in zip(executor.plan.steps, times, strict=True):
                    found[step.task] += seconds
            return found

        return run


def _addresses(arrays: Sequence[np.ndarray]) -> list[int]:
    return [array.ctypes.data for array in arrays]


def _constant_bytes(partition: Partition) -> int:
    return sum(node.type.bytes for node in partition.graph.nodes() if node.is_constant)


def boundary_of(partition: Partition) -> Boundary:
    """Nobody calls these models by name."""

    def leaves(count: int) -> dict[str, object]:
        return {"kind": "tuple", "items": [{"kind": "leaf", "index": index} for index in range(count)]}

    inputs, outputs = len(partition.graph.inputs), len(partition.graph.outputs)
    names = tuple(f"x{number}" for number in range(inputs))
    keywords = {"kind": "dict", "keys": [], "items": []}
    return Boundary(names, {"kind": "tuple", "items": [leaves(inputs), keywords]}, leaves(outputs), names)
