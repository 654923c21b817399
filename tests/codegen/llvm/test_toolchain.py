"""LLVM as a toolchain: nothing is left behind by a kernel that was compiled."""

from __future__ import annotations

import gc

from tests.faults.growth import resident_mb
from tilewright.codegen.llvm import toolchain
from tilewright.hw import host


def module(number: int) -> str:
    lines = [f"  %x{k + 1} = fadd float %x{k}, {float(1000 * number + k)}" for k in range(20)]
    return f"define float @f{number}(float %x0) {{\n" + "\n".join(lines) + "\n  ret float %x20\n}\n"


def test_compiling_leaves_no_memory_behind() -> None:
    machine = host()
    for number in range(60):
        toolchain.object_code(module(number), machine)
    gc.collect()
    before = resident_mb()
    for number in range(200):
        toolchain.object_code(module(100 + number), machine)
    gc.collect()
    assert resident_mb() - before < 6  # 17 with pass managers that are not freed
