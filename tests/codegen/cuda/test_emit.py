"""Every program for GPUs becomes CUDA C++ that compiles, here without a GPU, and keeps its registers."""

from __future__ import annotations

import pytest

from tests.loops.formulas import EXAMPLES, Example
from tests.nvrtc import needs_nvrtc
from tilewright.codegen.cuda.build import build
from tilewright.hw.gpu import A100, H200, GpuMachine
from tilewright.loops.formula import formula_of
from tilewright.loops.gpu.default import default_program

needs_nvrtc()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.name)
@pytest.mark.parametrize("machine", [A100, H200], ids=lambda m: m.capability)
def test_it_compiles_without_spills(example: Example, machine: GpuMachine) -> None:
    output, inputs = example.make()
    program = default_program(formula_of(output, inputs), machine)
    kernel = build(program, machine, "fast", None)
    assert kernel.cubin.startswith(b"\x7fELF")
    assert not kernel.resources.spilled_bytes and not kernel.resources.stack_bytes
    assert machine.resident_blocks(kernel.threads, kernel.resources.registers, kernel.shared_bytes) >= 1
