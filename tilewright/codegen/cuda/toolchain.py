"""NVRTC as a toolchain: CUDA C++ text in, machine code and what it uses out. No GPU and no CUDA installation needed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tilewright.errors import CodegenError, MissingDependencyError


@dataclass(frozen=True)
class Resources:
    """The resources that a kernel uses per thread or block, as reported by the assembler."""

    registers: int
    spilled_bytes: int
    stack_bytes: int
    static_shared_bytes: int


@dataclass(frozen=True)
class Compiled:
    cubin: bytes
    resources: Resources
    warnings: str


@lru_cache(maxsize=1)
def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError:
        raise MissingDependencyError("CUDA kernels need NVRTC, which is in the extra cuda") from None
    return nvrtc


@lru_cache(maxsize=1)
def version() -> str:
    nvrtc = _nvrtc()
    try:
        _, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as error:  # the bindings are there and the library is not
        raise MissingDependencyError(f"NVRTC cannot be loaded ({error}); it is in the extra cuda") from None
    return f"NVRTC {major}.{minor}"


def compile_source(
    source: str, capability: str, *, strict: bool = False, exact_division: bool = False
) -> Compiled:
    """`capability`: "sm_90a"; or "compute_80": PTX for all cards from there on, of whose registers nothing is known.
    `strict`: products and sums are not contracted, and division is exact. CodegenError with the compiler's words where
    it refuses."""
    nvrtc = _nvrtc()
    version()
    options = [
        f"--gpu-architecture={capability}",
        "--std=c++17",
        f"--fmad={'false' if strict else 'true'}",
        # Else within 2 units of the last place, and without branches.
        f"--prec-div={'true' if strict or exact_division else 'false'}",
        # NVRTC's own cache: what comes out of it comes without the words of ptxas, and code is kept here anyway.
        "--no-cache",
    ]
    portable = capability.startswith("compute_")
    if not portable:
        options.append("--ptxas-options=-v")
    encoded = [option.encode() for option in options]
    result, program = nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], [])
    _succeed(nvrtc, result, "")
    try:
        (result,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        log = written(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        words = log.rstrip(b"\x00").decode(errors="replace")
        _succeed(nvrtc, result, words)
        code = (
            written(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
            if portable
            else written(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
        )
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return Compiled(code, _resources(words), _warnings(words))


def written(size_of: Any, get: Any, program: Any) -> bytes:
    """NVRTC writes into the bytes that it is given. CPython has one object for all equal bytes of length 0 and 1, so
    what is given is longer than that."""
    _, size = size_of(program)
    data = bytes(size + 2)
    get(program, data)
    return data[:size]


def _succeed(nvrtc: Any, result: Any, log: str) -> None:
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CodegenError(f"NVRTC rejected generated code ({result.name}): {log.strip()}")


def _resources(log: str) -> Resources:
    def sum_of(pattern: str) -> int:
        return sum(map(int, re.findall(pattern, log)))

    registers = max(map(int, re.findall(r"Used (\d+) registers", log)), default=0)
    spilled = sum_of(r"(\d+) bytes spill stores") + sum_of(r"(\d+) bytes spill loads")
    return Resources(registers, spilled, sum_of(r"(\d+) bytes stack frame"), sum_of(r"(\d+) bytes smem"))


def _warnings(log: str) -> str:
    return "\n".join(line for line in log.splitlines() if "warning" in line.lower())
