"""Program -> Kernel: the object code of a loop program, from the cache or made now."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from tilewright import te
from tilewright.codegen.cache import ObjectCache
from tilewright.codegen.llvm import toolchain
from tilewright.codegen.llvm.emit import emit_program
from tilewright.codegen.llvm.workers import Workers
from tilewright.hw import CpuMachine
from tilewright.loops import tiling
from tilewright.loops.ir import Program
from tilewright.loops.text import print_program
from tilewright.runtime.contract import Argument
from tilewright.runtime.packing import Packing
from tilewright.support.fingerprint import fingerprint


@dataclass(frozen=True)
class CompiledKernel:
    symbol: str
    object_code: bytes
    extent: int  # iterations of the parallel loop
    decisions: str
    packings: tuple[Packing | None, ...]  # how each input is expected
    cached: bool
    arguments: tuple[Argument, ...] = ()  # the inputs, then the output


@lru_cache(maxsize=1)
def _generator_version() -> str:
    """Changes with every change to this package and to what it asks about indices and strides: a cache never serves
    what an older generator made."""
    digest = hashlib.sha256()
    rooms = (Path(__file__).parent, Path(te.__file__).parent)
    for path in (*(path for room in rooms for path in sorted(room.rglob("*.py"))), Path(tiling.__file__)):
        digest.update(path.read_bytes())
    return f"{digest.hexdigest()} {toolchain.version()}"


def kernel_key(program: Program, machine: CpuMachine, numerics: str) -> str:
    described = asdict(machine), asdict(machine.throughput)
    return fingerprint(print_program(program), *described, numerics, _generator_version())


def build(
    program: Program,
    machine: CpuMachine,
    numerics: str,
    cache: ObjectCache | None,
    workers: Workers | None = None,
) -> CompiledKernel:
    """`workers`: processes that may run LLVM for this one."""
    key = kernel_key(program, machine, numerics)
    symbol = f"tw_{key}"
    found = cache.get(key) if cache is not None else None
    if found is not None:
        return _kernel(program, symbol, found, cached=True)
    text = llvm_ir(program, machine, numerics, symbol)
    code = (toolchain if workers is None else workers).object_code(text, machine)
    if cache is not None:
        cache.put(key, code)
    return _kernel(program, symbol, code, cached=False)


def _kernel(program: Program, symbol: str, code: bytes, *, cached: bool) -> CompiledKernel:
    inputs = len(program.params) - 1
    packings = (*program.packings, *[None] * (inputs - len(program.packings)))
    arguments = tuple(Argument(buffer.dtype.short, buffer.size) for buffer in program.params)
    return CompiledKernel(
        symbol, code, program.parallel_extent, program.decisions, packings, cached, arguments
    )


def llvm_ir(program: Program, machine: CpuMachine, numerics: str, symbol: str) -> str:
    module = emit_program(program, machine, numerics, symbol)
    text = str(module)
    # A block and its instructions refer to each other, and would wait for the garbage collector: thousands of them.
    for function in module.functions:
        for block in function.blocks:
            block.instructions.clear()
        function.blocks.clear()
    return text
