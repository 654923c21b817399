"""LLVM as a slice of code generation: see `codegen/generator.py`."""

from __future__ import annotations

from typing import Any

from tilewright.codegen.cache import ObjectCache
from tilewright.codegen.llvm import toolchain as llvm
from tilewright.codegen.llvm.build import build as build_kernel
from tilewright.codegen.llvm.build import kernel_key, llvm_ir
from tilewright.codegen.llvm.tiles.call import build_call, call_ir, call_key
from tilewright.codegen.llvm.workers import Workers, worker_processes
from tilewright.errors import CodegenError
from tilewright.hw import CpuMachine
from tilewright.link import Linkable
from tilewright.loops.ir import Program
from tilewright.space.implementation import Kernel
from tilewright.space.tile_operator import TileCall

KEEPS_TRIALS = False  # it is made faster than it is read
AT_ONCE = 2  # one in LLVM, where llvmlite has a lock of its own, while IR of another is made under the interpreter's
_SYMBOL = "kernel"  # the same in all texts; a real kernel's name depends on more than its code


def workers(kernels: int) -> Workers | None:
    processes = worker_processes(kernels)
    return Workers(processes) if processes else None


def build(
    kernel: Kernel,
    machine: CpuMachine,
    numerics: str,
    cache: ObjectCache | None,
    workers: Workers | None = None,
) -> tuple[Linkable, bool]:
    if isinstance(kernel, TileCall):
        return build_call(kernel, machine, cache)
    made = build_kernel(_program(kernel), machine, numerics, cache, workers)
    found = Linkable(
        made.symbol, made.object_code, made.extent, made.decisions, made.packings, arguments=made.arguments
    )
    return found, made.cached


def check_trial(kernel: Kernel, machine: CpuMachine, numerics: str, cache: ObjectCache | None) -> None:
    """Spills are in L1, and measured like the rest."""


def source(kernel: Kernel, machine: CpuMachine, numerics: str) -> str:
    if isinstance(kernel, TileCall):
        return call_ir(kernel, machine, _SYMBOL)
    return llvm_ir(_program(kernel), machine, numerics, _SYMBOL)


def key(kernel: Kernel, machine: CpuMachine, numerics: str) -> str:
    if isinstance(kernel, TileCall):
        return call_key(kernel, machine)
    return kernel_key(_program(kernel), machine, numerics)


def toolchain(machine: CpuMachine) -> str:
    return llvm.version()


def plan_target(machine: CpuMachine) -> dict[str, Any]:
    return {"triple": machine.triple, "cpu": machine.cpu, "features": list(machine.features)}


def _program(kernel: Kernel) -> Program:
    if not isinstance(kernel, Program):
        raise CodegenError(f"{kernel.name}: a processor has no tensor cores")
    return kernel
