"""The CPU target: loop programs compiled by LLVM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from tilewright import knobs
from tilewright.frontend import ImportedModel
from tilewright.graph.task import Partition
from tilewright.hw import CpuMachine, host
from tilewright.link import Linked
from tilewright.measure.check import checked_kernel
from tilewright.rewrites.base import Observer
from tilewright.rewrites.pipeline import Abilities, run_pipeline
from tilewright.runtime.executor import Executor
from tilewright.runtime.model import CompiledModel
from tilewright.support.trace import Trace
from tilewright.targets.target import DYNAMIC, Cutting, Target
from tilewright.tune.oracle import PredictedCosts


class ProcessorTarget:
    """The methods of targets whose steps run on, or from, a processor."""

    _model: ClassVar[type[CompiledModel]] = CompiledModel

    def default_numerics(self) -> str:
        return knobs.get("numerics")

    def threads(self, wanted: int | None) -> int:
        return wanted or knobs.get("threads")

    def joins_reductions(self) -> bool:
        return False

    @property
    def times_steps(self) -> bool:
        return True

    def load(
        self,
        linked: Linked,
        constants: Sequence[np.ndarray],
        threads: int | None,
        again: Callable[[Target], CompiledModel],
    ) -> CompiledModel:
        return self._model(linked.plan, constants, linked.objects, threads=threads, checker=checked_kernel)


@dataclass(frozen=True)
class CpuTarget(ProcessorTarget):
    machine: CpuMachine

    @property
    def is_here(self) -> bool:
        return self.machine == host()

    def partition(
        self,
        imported: ImportedModel,
        numerics: str,
        trace: Trace,
        observe: Observer | None = None,
        cutting: Cutting = DYNAMIC,
    ) -> Partition:
        oracle = PredictedCosts(self.machine, numerics)
        costs = cutting.costs(self.machine, numerics)
        return run_pipeline(
            imported.graph,
            trace,
            numerics=numerics,
            oracle=oracle,
            abilities=Abilities(pads=cutting.pads),
            observe=observe,
            costs=costs,
        )

    def runner(self, threads: int) -> Any:
        from tilewright.measure.runner import Runner  # imports the measuring code, which only tuning needs

        return Runner(threads)

    def executor(self, linked: Linked, threads: int) -> Executor:
        return Executor(linked.plan, linked.constants, linked.objects, threads)
