"""The NVIDIA GPU target: kernels in CUDA C++ through NVRTC, library calls between them, one CUDA graph per model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tilewright import knobs
from tilewright.frontend import ImportedModel
from tilewright.graph.task import Partition
from tilewright.hw.gpu import PORTABLE, GpuMachine, detect
from tilewright.link import Linked
from tilewright.measure.check import checked_kernel
from tilewright.rewrites.base import Observer
from tilewright.rewrites.pipeline import Abilities, run_pipeline
from tilewright.runtime.cuda import device, vendor
from tilewright.runtime.cuda.executor import GpuExecutor
from tilewright.runtime.cuda.model import GpuModel
from tilewright.runtime.model import CompiledModel
from tilewright.runtime.ports import torch_module
from tilewright.support.trace import Trace
from tilewright.targets.target import DYNAMIC, Cutting, Target
from tilewright.tune.oracle import PredictedCosts

_ABILITIES = Abilities(
    chains=False, half=True, libraries=True, prologues=True, tile_kernels=True, splits_reductions=False
)


@dataclass(frozen=True)
class CudaTarget:
    """A GPU of this machine (`ordinal`), or only the description of one (None)."""

    machine: GpuMachine
    ordinal: int | None = None

    @classmethod
    def of_card(cls, ordinal: int) -> Target:
        """The target for a GPU here. Raises DeviceError, MissingDependencyError or TargetError if models cannot run
        on it."""
        there = tuple(sorted(name for name, found in vendor.is_available().items() if found))
        return cls(replace(detect(ordinal), libraries=there), ordinal)

    @classmethod
    def described(cls, machine: GpuMachine) -> Target:
        """The target for a described GPU elsewhere: without libraries, because a file cannot hold them."""
        return cls(replace(machine, libraries=()))

    @property
    def is_here(self) -> bool:
        return self.ordinal is not None and device.count() > self.ordinal

    def default_numerics(self) -> str:
        """The mode set by the option, else the one that matches PyTorch's setting for float32."""
        chosen = knobs.get("numerics")
        return "tf32" if chosen == "fast" and _torch_rounds() else chosen

    def threads(self, wanted: int | None) -> int:
        return 0

    def partition(
        self,
        imported: ImportedModel,
        numerics: str,
        trace: Trace,
        observe: Observer | None = None,
        cutting: Cutting = DYNAMIC,
    ) -> Partition:
        oracle = PredictedCosts(self.machine, numerics)
        libraries = bool(self.machine.libraries)
        abilities = replace(
            _ABILITIES,
            libraries=libraries,
            joins_reductions=self.joins_reductions(),
            pads=cutting.pads,
            computes_attention=oracle.can_compute,
        )
        return run_pipeline(
            imported.graph,
            trace,
            numerics=numerics,
            oracle=oracle,
            abilities=abilities,
            observe=observe,
            costs=cutting.costs(self.machine, numerics),
        )

    def joins_reductions(self) -> bool:
        return True

    @property
    def times_steps(self) -> bool:
        return False

    def runner(self, threads: int) -> Any:
        from tilewright.measure.runner import Runner  # imports the measuring code, which only tuning needs

        return Runner(threads, device=self.ordinal)

    def executor(self, linked: Linked, threads: int) -> GpuExecutor:
        return GpuExecutor(linked.plan, linked.constants, linked.objects, self.ordinal or 0)

    def load(
        self,
        linked: Linked,
        constants: Sequence[np.ndarray],
        threads: int | None,
        again: Callable[[Target], CompiledModel],
    ) -> GpuModel:
        def planned_for(machine: GpuMachine) -> GpuModel:
            """Plan the model again without libraries."""
            found = again(replace(self, machine=machine))
            assert isinstance(found, GpuModel)
            return found

        def to_save() -> list[GpuModel]:
            """The variants to save: one for GPUs like this one, then one for all others."""
            alone = replace(self.machine, libraries=())
            own = planned_for(alone) if self.machine.libraries else model
            return [own, planned_for(PORTABLE)] if self.machine != PORTABLE else [own]

        model = GpuModel(
            linked.plan,
            constants,
            linked.objects,
            ordinal=self.ordinal or 0,
            checker=checked_kernel,
            to_save=to_save,
        )
        return model


def _torch_rounds() -> bool:
    """Whether PyTorch may round float32 in matmuls on a GPU."""
    torch = torch_module()
    if torch is None:
        return False
    matmul = torch.backends.cuda.matmul
    precision = getattr(matmul, "fp32_precision", None)
    if precision is None:  # before PyTorch 2.9
        return bool(matmul.allow_tf32)
    return bool(precision == "tf32" or (precision == "none" and torch.backends.fp32_precision == "tf32"))
