"""Program -> GpuKernel: machine code for a GPU, from the cache or made now."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import msgspec

from tilewright.codegen.cuda import toolchain
from tilewright.codegen.cuda.emit import emit_program, shared_bytes
from tilewright.codegen.cuda.toolchain import Compiled, Resources
from tilewright.codegen.llvm.cache import ObjectCache
from tilewright.errors import CodegenError
from tilewright.hw.gpu import GpuMachine
from tilewright.loops.ir import Program, thread_count
from tilewright.loops.text import print_program
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


@lru_cache(maxsize=1)
def _generator_version() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.iterdir()):
        if path.suffix in (".py", ".cuh"):
            digest.update(path.read_bytes())
    return f"{digest.hexdigest()} {toolchain.version()}"


def build(program: Program, machine: GpuMachine, numerics: str, cache: ObjectCache | None) -> GpuKernel:
    """CodegenError where the card has too little of what the program needs: nothing reaches the compiler then."""
    shared = shared_bytes(program)
    if shared > machine.shared_block:
        raise CodegenError(
            f"{program.name}: {shared} bytes of shared memory, of at most {machine.shared_block}"
        )
    key = fingerprint(print_program(program), machine.capability, numerics, _generator_version())
    symbol = f"tw_{key}"
    found = cache.get(key) if cache is not None else None
    if found is not None:
        compiled, cached = msgspec.msgpack.decode(found, type=Compiled), True
    else:
        source = emit_program(program, symbol)
        compiled, cached = (
            toolchain.compile_source(source, machine.capability, strict=numerics == "strict"),
            False,
        )
        if cache is not None:
            cache.put(key, msgspec.msgpack.encode(compiled))
    return GpuKernel(
        symbol=symbol,
        cubin=compiled.cubin,
        blocks=program.parallel_extent,
        threads=thread_count(program),
        shared_bytes=shared,
        resources=compiled.resources,
        decisions=program.decisions,
        cached=cached,
    )
