"""Gemmini as a slice of code generation: see `codegen/generator.py`. Kernels of the host are LLVM's."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewright.codegen.cache import ObjectCache
from tilewright.codegen.gemmini.cycles import simulate
from tilewright.codegen.gemmini.layers import Placement, layer_program
from tilewright.codegen.llvm import generator as llvm
from tilewright.codegen.llvm.workers import Workers
from tilewright.errors import LayerFitError
from tilewright.hw.gemmini_system import GemminiSystem
from tilewright.link import Linkable
from tilewright.loops.gemmini.kernel import GemminiKernel
from tilewright.runtime.contract import Argument
from tilewright.runtime.gemmini.isa import Instruction, encode, text
from tilewright.runtime.gemmini.kernel import KIND, Header, Region, packed
from tilewright.space.implementation import Kernel
from tilewright.support.fingerprint import fingerprint

KEEPS_TRIALS = False
AT_ONCE = 2
_ALIGNMENT = 64
_MAX_DRAM = 1 << 31
_DTYPES = {"data": "i8", "weights": "i8", "bias": "i32", "residual": "i8"}


def workers(kernels: int) -> Workers | None:
    """For kernels of the host."""
    return llvm.workers(kernels)


def build(
    kernel: Kernel,
    machine: GemminiSystem,
    numerics: str,
    cache: ObjectCache | None,
    workers: Workers | None = None,
) -> tuple[Linkable, bool]:
    if not isinstance(kernel, GemminiKernel):
        return llvm.build(kernel, machine.host, numerics, cache, workers)
    program, header = compiled(kernel, machine)
    words = f"gemmini: {header.instructions:,} instructions, {header.cycles:,} cycles, {kernel.decisions}"
    sizes = [
        (_DTYPES[role], kernel.bytes_of(role) * (kernel.images if kernel.is_per_image(role) else 1))
        for role in kernel.roles
    ]
    sizes.append(("i32" if kernel.layer.full else "i8", kernel.result_bytes * kernel.images))
    arguments = tuple(Argument(dtype, size // (4 if dtype == "i32" else 1)) for dtype, size in sizes)
    code = packed(header, encode(program))
    symbol = f"tw_gemmini_{key(kernel, machine, numerics)}"
    return Linkable(symbol, code, 1, words, (None,) * len(kernel.roles), arguments=arguments), False


def compiled(kernel: GemminiKernel, machine: GemminiSystem) -> tuple[list[Instruction], Header]:
    """The program of one image, and where its operands are."""
    regions, at = [], _ALIGNMENT
    for role in kernel.roles:
        size = kernel.bytes_of(role)
        regions.append(Region(at, size, kernel.is_per_image(role)))
        at += -(-size // _ALIGNMENT) * _ALIGNMENT
    result = Region(at, kernel.result_bytes, True)
    size = at + kernel.result_bytes
    if size > _MAX_DRAM:
        raise LayerFitError(f"{kernel.name}: {size} bytes of operands are more than {_MAX_DRAM}")
    starts = {role: region.start for role, region in zip(kernel.roles, regions, strict=True)}
    accelerator = machine.accelerator
    program = layer_program(kernel.layer, kernel.tiling, accelerator, Placement(results=at, **starts))
    cycles = simulate(program, accelerator, machine.timing)
    header = Header(
        dim=accelerator.dim,
        scratchpad_rows=accelerator.scratchpad_rows,
        accumulator_rows=accelerator.accumulator_rows,
        dram_bytes=size,
        images=kernel.images,
        arguments=tuple(regions),
        result=result,
        instructions=len(program) * kernel.images,
        cycles=cycles.total * kernel.images,
    )
    return program, header


def source(kernel: Kernel, machine: GemminiSystem, numerics: str) -> str:
    if not isinstance(kernel, GemminiKernel):
        return llvm.source(kernel, machine.host, numerics)
    return text(compiled(kernel, machine)[0])


def key(kernel: Kernel, machine: GemminiSystem, numerics: str) -> str:
    if not isinstance(kernel, GemminiKernel):
        return llvm.key(kernel, machine.host, numerics)
    return fingerprint(repr(kernel), repr(machine.accelerator), repr(machine.timing))


def toolchain(machine: GemminiSystem) -> str:
    return f"{llvm.toolchain(machine.host)}, NumPy {np.__version__}"


def plan_target(machine: GemminiSystem) -> dict[str, Any]:
    found = llvm.plan_target(machine.host)
    accelerator = machine.accelerator
    return {
        **found,
        "triple": f"{KIND}-{found['triple']}",
        "accelerator": f"{accelerator.dim}x{accelerator.dim}",
    }
