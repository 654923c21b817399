"""Constants are made once, and only what is the same number is the same constant."""

from __future__ import annotations

import gc

from llvmlite import ir

from tests.codegen.llvm.test_emit import HERE, program_of
from tests.loops.formulas import Example, matmul
from tilewright.codegen.llvm.build import llvm_ir
from tilewright.codegen.llvm.types import I1, I32, number, numbers, repeated

F32 = ir.FloatType()


def test_a_constant_is_made_once() -> None:
    assert number(F32, 1.5) is number(F32, 1.5)
    assert repeated(F32, 1.5, 8) is repeated(F32, 1.5, 8)
    assert numbers(I32, (0, 2)) is numbers(I32, (0, 2))


def test_numbers_that_compare_equal_may_differ() -> None:
    assert str(number(F32, 0.0)) != str(number(F32, -0.0))
    assert str(repeated(F32, -0.0, 4)) == str(ir.Constant(ir.VectorType(F32, 4), [-0.0] * 4))
    assert [str(number(I1, value)) for value in (True, 1)] == ["i1 true", "i1 1"]
    assert str(number(I32, 1)) != str(number(ir.IntType(64), 1))


def test_what_ir_was_made_of_does_not_wait_for_the_garbage_collector() -> None:
    program, _ = program_of(Example("matmul", lambda: matmul(13, 37, 20)))
    instructions = llvm_ir(program, HERE, "fast", "k").count("\n")
    gc.collect()
    gc.disable()
    try:
        llvm_ir(program, HERE, "fast", "k")
        waiting = gc.collect()
    finally:
        gc.enable()
    assert instructions > 100 and waiting < instructions
