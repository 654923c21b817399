"""Gemmini as a slice of code generation: see `codegen/generator.py`. Kernels of the host are LLVM's."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.codegen.cache import ObjectCache
from tilewright.codegen.gemmini.cycles import simulate
from tilewright.codegen.gemmini.layers import (
    Layer,
    Placement,
    Tiling,
    layer_words,
    matmul_loops,
)
from tilewright.codegen.gemmini.tiles.call import call_code
from tilewright.codegen.llvm import generator as llvm
from tilewright.codegen.llvm.workers import Workers
from tilewright.errors import LayerFitError
from tilewright.hw.gemmini import GemminiMachine
from tilewright.hw.gemmini_system import GemminiSystem
from tilewright.hw.gemmini_timing import GemminiTiming
from tilewright.link import Linkable
from tilewright.loops import passes
from tilewright.loops.gemmini.kernel import GemminiKernel
from tilewright.loops.gemmini.tiling import loop_tiling
from tilewright.runtime.contract import Argument
from tilewright.runtime.gemmini import isa
from tilewright.runtime.gemmini.isa import encode, text
from tilewright.runtime.gemmini.kernel import KIND, AcceleratorKernel, Header, Region, packed
from tilewright.runtime.gemmini.words import decode
from tilewright.space.implementation import Kernel
from tilewright.space.tile_operator import TileCall
from tilewright.support.fingerprint import fingerprint

KEEPS_TRIALS = False
AT_ONCE = 2
_ALIGNMENT = 64
_MAX_DRAM = 1 << 31
_DTYPES = {"data": "i8", "weights": "i8", "bias": "i32", "residual": "i8"}


def workers(kernels: int) -> Workers | None:
    """Workers that compile the host's kernels."""
    return llvm.workers(kernels)


def build(
    kernel: Kernel,
    machine: GemminiSystem,
    numerics: str,
    cache: ObjectCache | None,
    workers: Workers | None = None,
) -> tuple[Linkable, bool]:
    if not isinstance(kernel, GemminiKernel | TileCall):
        return llvm.build(kernel, machine.host, numerics, cache, workers)
    name = key(kernel, machine, numerics)
    symbol = f"tw_gemmini_{name}"
    code = cache.get(name) if cache is not None else None
    cached = code is not None
    if code is None:
        code = _code(kernel, machine)
        if code is None:
            return llvm.build(kernel, machine.host, numerics, cache, workers)
        if cache is not None:
            cache.put(name, code)
    header = AcceleratorKernel(code, symbol).header
    described = f"gemmini: {header.instructions:,} instructions, {header.cycles:,} cycles, {header.decisions}"
    if isinstance(kernel, TileCall):
        specs = tuple(Argument(dtype.short, size) for dtype, size in kernel.specs)
        return Linkable(symbol, code, 1, described, (None,) * (len(specs) - 1), arguments=specs), cached
    sizes = [
        (_DTYPES[role], kernel.bytes_of(role) * (kernel.images if kernel.is_per_image(role) else 1))
        for role in kernel.roles
    ]
    sizes.append(("i32" if kernel.layer.full else "i8", kernel.result_bytes * kernel.images))
    arguments = tuple(Argument(dtype, size // (4 if dtype == "i32" else 1)) for dtype, size in sizes)
    return Linkable(symbol, code, 1, described, (None,) * len(kernel.roles), arguments=arguments), cached


def _code(kernel: GemminiKernel | TileCall, machine: GemminiSystem) -> bytes | None:
    if isinstance(kernel, TileCall):
        return call_code(kernel, machine.accelerator)
    words, header = compiled(kernel, machine)
    return packed(header, words)


def compiled(kernel: GemminiKernel, machine: GemminiSystem) -> tuple[np.ndarray, Header]:
    """The words of one image's program, and the locations of its operands."""
    accelerator = machine.accelerator
    found = _form(_timed(kernel.layer), kernel.tiling, accelerator, machine.timing)
    layer = kernel.layer if found.loops is None else replace(kernel.layer, bias_rows=0)
    regions, at = [], _ALIGNMENT
    for role in kernel.roles:
        bias_rows = layer.bias_rows if role == "bias" else 0
        region = Region(at, kernel.bytes_of(role), kernel.is_per_image(role), bias_rows)
        regions.append(region)
        at += -(-region.stored // _ALIGNMENT) * _ALIGNMENT
    result = Region(at, kernel.result_bytes, True)
    size = at + kernel.result_bytes
    if size > _MAX_DRAM:
        raise LayerFitError(f"{kernel.name}: {size} bytes of operands are more than {_MAX_DRAM}")
    starts = {role: region.start for role, region in zip(kernel.roles, regions, strict=True)}
    locations = Placement(results=at, **starts)
    if found.loops is None:
        words = layer_words(layer, kernel.tiling, accelerator, locations)
    else:
        words = encode(matmul_loops(layer, found.loops, accelerator, locations))
    header = Header(
        dim=accelerator.dim,
        scratchpad_rows=accelerator.scratchpad_rows,
        accumulator_rows=accelerator.accumulator_rows,
        dram_bytes=size,
        images=kernel.images,
        arguments=tuple(regions),
        result=result,
        instructions=len(words) * kernel.images,
        cycles=found.cycles * kernel.images,
        decisions=kernel.decisions if found.loops is None else found.decisions(accelerator.dim),
    )
    return words, header


def _timed(layer: Layer) -> Layer:
    """The layer without scales and ReLU, which do not affect the time."""
    residual = None if layer.residual is None else 1.0
    return replace(layer, scale=1.0, relu=False, residual=residual)


@dataclass(frozen=True)
class _Form:
    """The cycles of one image, and the tiling of loop instructions if these are no slower than primitive ones."""

    cycles: int
    loops: Tiling | None

    def decisions(self, dim: int) -> str:
        assert self.loops is not None
        return f"loop_ws of tiles {self.loops.cols}x{self.loops.out_blocks * dim}"


@lru_cache(maxsize=1024)
def _form(layer: Layer, tiling: Tiling, machine: GemminiMachine, timing: GemminiTiming) -> _Form:
    """Choose between loop instructions and primitive ones. `loop_conv_ws` is not tried: nothing is prefetched before a
    loop, and convolutions were measured to take 24% to 55% longer. Addresses do not affect the cycles unless they are
    0."""
    at = Placement(data=64, weights=64, results=64, bias=64, residual=64)
    cycles = simulate(layer_words(layer, tiling, machine, at), machine, timing).total
    plain = layer.pointwise and layer.stride == 1 and layer.pooling is None and layer.residual is None
    loops = loop_tiling(layer, machine) if plain else None
    if loops is None:
        return _Form(cycles, None)
    of_words = replace(layer, bias_rows=0)
    other = simulate(matmul_loops(of_words, loops, machine, at), machine, timing).total
    return _Form(cycles, None) if other > cycles else _Form(other, loops)


def check_trial(kernel: Kernel, machine: GemminiSystem, numerics: str, cache: ObjectCache | None) -> None:
    """The accelerator has no registers that could spill."""


def source(kernel: Kernel, machine: GemminiSystem, numerics: str) -> str:
    if not isinstance(kernel, GemminiKernel):
        return llvm.source(kernel, machine.host, numerics)
    return text(decode(compiled(kernel, machine)[0]))


def key(kernel: Kernel, machine: GemminiSystem, numerics: str) -> str:
    if not isinstance(kernel, GemminiKernel | TileCall):
        return llvm.key(kernel, machine.host, numerics)
    text = repr(kernel) if isinstance(kernel, GemminiKernel) else str(kernel)
    return fingerprint(_generator_version(), text, repr(machine.accelerator), repr(machine.timing))


@lru_cache(maxsize=1)
def _generator_version() -> str:
    """A digest of everything that determines a kernel's program."""
    digest = hashlib.sha256()
    for room in (Path(__file__).parent, Path(isa.__file__).parent, Path(passes.__file__).parent):
        for path in sorted(room.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


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
