"""Program -> GpuKernel: machine code for a GPU, from the cache or made now."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import msgspec

from tilewright.codegen.cache import ObjectCache
from tilewright.codegen.cuda import toolchain
from tilewright.codegen.cuda.emit import AWAIT_TURN, emit_program
from tilewright.codegen.cuda.rings import maps_of
from tilewright.codegen.cuda.shared import block_threads, shared_bytes
from tilewright.codegen.cuda.toolchain import Compiled, Resources
from tilewright.errors import CodegenError
from tilewright.hw.gpu import GpuMachine
from tilewright.loops.ir import Buffer, Program
from tilewright.runtime.contract import Argument
from tilewright.runtime.packing import Packing
from tilewright.runtime.plan import MatrixMap
from tilewright.support.fingerprint import fingerprint


@dataclass(frozen=True)
class GpuKernel:
    symbol: str
    cubin: bytes
    blocks: int
    threads: int
    shared_bytes: int  # dynamic: what a launch gives
    resources: Resources
    decisions: str
    cached: bool
    packings: tuple[Packing | None, ...] = ()  # how each input is stored; beyond the end: as it is
    awaits: bool = False  # it waits itself for the end of the kernel before it
    arguments: tuple[Argument, ...] = ()  # the inputs, then the output
    maps: tuple[MatrixMap, ...] = ()  # passed behind them


@lru_cache(maxsize=1)
def _generator_version() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.iterdir()):
        if path.suffix in (".py", ".cuh"):
            digest.update(path.read_bytes())
    return f"{digest.hexdigest()} {toolchain.version()}"


@dataclass(frozen=True)
class GpuSource:
    """A kernel that is more than a loop program: CUDA C++ in which `SYMBOL` stands for its name, and its launch."""

    name: str
    text: str
    params: tuple[Buffer, ...]
    blocks: int
    threads: int
    shared_bytes: int
    decisions: str
    packings: tuple[Packing | None, ...] = ()
    maps: tuple[MatrixMap, ...] = ()  # tensor maps that are passed behind the buffers


SYMBOL = "KERNEL_NAME"


def build(
    program: Program | GpuSource, machine: GpuMachine, numerics: str, cache: ObjectCache | None
) -> GpuKernel:
    """Raise CodegenError if the card has too little of what the program needs: nothing reaches the compiler then."""
    source = program if isinstance(program, GpuSource) else source_of(program)
    if source.shared_bytes > machine.shared_block:
        asked = f"{source.shared_bytes} bytes of shared memory"
        raise CodegenError(f"{source.name}: {asked}, of at most {machine.shared_block}")
    key, symbol = identity(source, machine, numerics)
    found = cache.get(key) if cache is not None else None
    if found is not None:
        compiled = msgspec.msgpack.decode(found, type=Compiled)
    else:
        text = source.text.replace(SYMBOL, symbol)
        compiled = _compiled(text, source, machine, numerics)
        if cache is not None:
            cache.put(key, msgspec.msgpack.encode(compiled))
    return GpuKernel(
        symbol=symbol,
        cubin=compiled.cubin,
        blocks=source.blocks,
        threads=source.threads,
        shared_bytes=source.shared_bytes,
        resources=compiled.resources,
        decisions=source.decisions,
        cached=found is not None,
        packings=source.packings,
        awaits=AWAIT_TURN in source.text,
        arguments=tuple(Argument(buffer.dtype.short, buffer.size) for buffer in source.params),
        maps=source.maps,
    )


def _compiled(text: str, source: GpuSource, machine: GpuMachine, numerics: str) -> Compiled:
    """Left alone, the compiler weighs registers against blocks, and sometimes spills a little: then it is told that one
    block is enough."""
    strict = numerics == "strict"
    compiled = toolchain.compile_source(text, machine.capability, strict=strict)
    for word in ("wgmma", "setmaxnreg"):
        if word in compiled.warnings:
            raise CodegenError(
                f"{source.name}: the compiler does not keep to its {word}: {compiled.warnings}"
            )
    if not compiled.resources.spilled_bytes:
        return compiled
    bounds = f"__launch_bounds__({source.threads}"
    alone = text.replace(f"{bounds})", f"{bounds}, 1)")
    again = toolchain.compile_source(alone, machine.capability, strict=strict)
    return min(compiled, again, key=lambda each: each.resources.spilled_bytes)


def identity(source: GpuSource, machine: GpuMachine, numerics: str) -> tuple[str, str]:
    """(Where the cache keeps its machine code, the kernel's name there.)"""
    key = fingerprint(source.text, machine.capability, numerics, _generator_version())
    return key, f"tw_{key}"


def source_of(program: Program) -> GpuSource:
    return GpuSource(
        name=program.name,
        text=emit_program(program, SYMBOL),
        params=program.params,
        blocks=program.parallel_extent * program.cluster,
        threads=block_threads(program),
        shared_bytes=shared_bytes(program),
        decisions=program.decisions,
        maps=maps_of(program),
    )
