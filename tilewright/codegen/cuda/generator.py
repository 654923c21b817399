"""CUDA C++ and NVRTC as a slice of code generation: see `codegen/generator.py`."""

from __future__ import annotations

from functools import lru_cache
from importlib import metadata
from typing import Any

from msgspec import UNSET

from tilewright.codegen.cache import ObjectCache
from tilewright.codegen.cuda import toolchain as nvrtc
from tilewright.codegen.cuda.build import GpuSource, identity
from tilewright.codegen.cuda.build import build as build_kernel
from tilewright.codegen.cuda.tensor import tensor_source
from tilewright.codegen.cuda.tiles.call import call_source
from tilewright.errors import PipelineError
from tilewright.hw.gpu import GpuMachine
from tilewright.link import Linkable
from tilewright.loops.ir import Program, rings_of
from tilewright.runtime.cuda.executor import AWAITS_TURN, TRIPLE
from tilewright.runtime.plan import Launch
from tilewright.space.implementation import Kernel
from tilewright.space.tile_operator import TileCall

KEEPS_TRIALS = True  # it takes a second to make
AT_ONCE = 64  # NVRTC takes most of the time, and runs without the interpreter's lock


def workers(kernels: int) -> None:
    """None: NVRTC runs in threads."""


def build(
    kernel: Kernel, machine: GpuMachine, numerics: str, cache: ObjectCache | None, workers: None = None
) -> tuple[Linkable, bool]:
    made = build_kernel(_source(kernel, machine), machine, numerics, cache)
    found = Linkable(
        made.symbol,
        made.cubin,
        made.blocks,
        made.decisions,
        made.packings,
        launch=Launch(made.threads, made.shared_bytes, made.awaits, made.maps or UNSET),
        arguments=made.arguments,
    )
    return found, made.cached


def check_trial(kernel: Kernel, machine: GpuMachine, numerics: str, cache: ObjectCache | None) -> None:
    """A pipelined loop holds more in registers: one that spills where the plain loop does not waits for memory in each
    iteration."""
    if not isinstance(kernel, Program) or (kernel.unpipelined is None and not rings_of(kernel)):
        return

    def spilled(program: Program) -> int:
        return build_kernel(_source(program, machine), machine, numerics, cache).resources.spilled_bytes

    found = spilled(kernel)
    # What the copy engine fills has no plain form: nothing in it needs registers that the pipeline does not.
    if found and (kernel.unpipelined is None or not spilled(kernel.unpipelined)):
        raise PipelineError(
            f"pipeline: {kernel.name}: pipelined, it spills {found} bytes of each thread's registers; without a"
            " pipeline, none",
            remedy="fewer stages, no registers a step ahead, or a smaller tile",
        )


def source(kernel: Kernel, machine: GpuMachine, numerics: str) -> str:
    return _source(kernel, machine).text


def key(kernel: Kernel, machine: GpuMachine, numerics: str) -> str:
    return identity(_source(kernel, machine), machine, numerics)[0]


def _source(kernel: Kernel, machine: GpuMachine) -> GpuSource:
    return call_source(kernel, machine) if isinstance(kernel, TileCall) else tensor_source(kernel)


def toolchain(machine: GpuMachine) -> str:
    return f"{nvrtc.version()}, torch {_torch_version()}" if machine.libraries else nvrtc.version()


@lru_cache(maxsize=1)
def _torch_version() -> str:
    """The version of PyTorch, which brings the libraries. This process need not have imported it."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "none"


def plan_target(machine: GpuMachine) -> dict[str, Any]:
    features = [AWAITS_TURN] if machine.dependent_launch else []
    return {"triple": TRIPLE, "cpu": machine.capability, "features": features}
