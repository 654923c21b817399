"""What a template for GPUs is: as those for processors, with kernels and counted terms of another kind."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from tilewright.graph.task import Task
from tilewright.hw.gpu import GpuMachine
from tilewright.loops.formula import Formula
from tilewright.loops.gpu.attention import TensorAttention
from tilewright.loops.gpu.tensor import TensorProduct
from tilewright.loops.ir import Program
from tilewright.space.space import Config, Space
from tilewright.space.template import normal_form

TensorKernel = TensorProduct | TensorAttention | Program


@dataclass(frozen=True)
class GpuWork:
    """A task on a card."""

    task: Task
    machine: GpuMachine
    numerics: str = "fast"

    @cached_property
    def formula(self) -> Formula | None:
        return normal_form(self.task, self.numerics)


@dataclass(frozen=True)
class GpuTerms:
    """What a kernel does, counted: what an analytical model turns into time. Those of the main loop are of one block
    and one of its `steps`."""

    blocks: int
    threads: int  # of a block
    registers: int  # of a thread, estimated
    shared_bytes: int  # that a block asks for
    steps: int
    stages: int  # steps that are under way at once
    flops: float  # on tensor cores
    scalar: float  # instructions, over all warps
    copies: float  # instructions of a warp that copy to shared memory
    shared_traffic: float  # bytes into and out of shared memory
    loaded: float  # bytes that come from the second cache or beyond
    memory: float  # bytes of the whole kernel that come from memory at least once
    write_loaded: float  # bytes that a block reads for its results, behind the main loop
    written: float  # bytes of them
    write_shared: float  # bytes into and out of shared memory for them
    cluster: int = 1  # blocks that must run at once
    ordinary: float = 0.0  # instructions that wait for nothing but each other, over all warps
    persistent: bool = (
        False  # a block begins the next tile while it writes the results of one; `blocks` are tiles
    )


class GpuApplied(Protocol):
    """A template applied to one task."""

    @property
    def space(self) -> Space: ...

    def terms(self, config: Config) -> GpuTerms: ...

    def kernel(self, config: Config) -> TensorKernel:
        """What `codegen.cuda.tensor.tensor_source` makes CUDA C++ of."""


class GpuTemplate(Protocol):
    @property
    def name(self) -> str: ...

    def apply(self, work: GpuWork) -> GpuApplied | None:
        """None where the template has nothing to say about this task."""
