"""Launches of Triton kernels in the processes that measure. Triton is imported here and nowhere else below `tune`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from tilewright.errors import MissingDependencyError
from tilewright.measure.kernel_job import Grid3, KernelSpec
from tilewright.space.space import Config
from tilewright.support.bundle import restored, value_of


class TritonLaunch:
    def __init__(self, spec: KernelSpec) -> None:
        try:
            triton = importlib.import_module("triton")
        except ImportError:
            raise MissingDependencyError("Triton is not installed", remedy="pip install triton") from None
        self.spec = spec
        self.kernel: Any = restored(spec.bundle, triton.jit)

    def prepare(self, tensors: dict[str, Any], config: Config, grid: Grid3) -> Callable[[], None]:
        import torch

        given = {
            name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
            for name, value in tensors.items()
        }
        constants = {name: value_of(reference) for name, reference in self.spec.constants}
        arguments = {**given, **dict(self.spec.scalars), **constants, **dict(config.values)}
        launch = self.kernel[grid]
        return lambda: launch(**arguments)

    def written(self, tensors: dict[str, Any], config: Config) -> None:
        """Not known exactly."""
        return
