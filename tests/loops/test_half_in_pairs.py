"""Long functions of 16-bit floats are computed two vectors at a time."""

from __future__ import annotations

import pytest

from tests.loops.test_memory_bound import with_vectors
from tests.programs import AVX512
from tests.space.checked import Inputs, error
from tilewright.codegen.llvm import toolchain
from tilewright.codegen.llvm.build import llvm_ir
from tilewright.dtypes import DType
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.hw import CpuMachine
from tilewright.loops.default import default_program
from tilewright.loops.ir import Program
from tilewright.space.template import Work

HALF = pytest.mark.parametrize("dtype", [DType.F16, DType.BF16], ids=lambda dtype: dtype.short)
BOUND = {DType.F16: 4e-4, DType.BF16: 3e-3}
WIDE = with_vectors(64)


def function(op: str, dtype: DType, *shape: int) -> Task:
    x = Inputs()
    wide = apply("cast", x(*shape, dtype=dtype), dtype=DType.F32)
    result = apply("gelu", wide, approximate="none") if op == "gelu" else apply(op, wide)
    return x.task(apply("cast", result, dtype=dtype))


def program_of(task: Task, machine: CpuMachine, numerics: str = "fast") -> Program:
    formula = Work(task, machine, numerics).formula
    assert formula is not None
    return default_program(formula, machine)


@HALF
@pytest.mark.parametrize("numerics", ["fast", "strict"])
@pytest.mark.parametrize("shape", [(32,), (31,), (3, 33), (5, 200), (7, 1000)])
@pytest.mark.parametrize("op", ["gelu", "silu", "tanh", "sin"])
def test_odd_sizes(op: str, shape: tuple[int, ...], numerics: str, dtype: DType) -> None:
    task = function(op, dtype, *shape)
    program = program_of(task, WIDE, numerics)
    if WIDE.vector_registers >= 32:
        assert ("vectors of 32" in program.decisions) == (task.output.type.size >= 32)
    assert error(program, task, numerics=numerics) <= BOUND[dtype]


@HALF
def test_their_halves_are_stored_without_being_joined(dtype: DType) -> None:
    program = program_of(function("gelu", dtype, 64, 128), AVX512)
    text = toolchain.assembly(llvm_ir(program, AVX512, "fast", "kernel"), AVX512)
    assert "vectors of 32" in program.decisions
    assert not any(name in text for name in ("vinsertf64x4", "vinserti64x4"))


def test_short_functions_and_other_types_are_not() -> None:
    x = Inputs()
    single = x.task(apply("gelu", x(64, 128), approximate="none"))
    for task in (function("relu", DType.F16, 64, 128), single):
        assert "vectors of 16" in program_of(task, AVX512).decisions
