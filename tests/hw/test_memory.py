"""Memories and scopes as data, and what a program in a scope that its target lacks comes to."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass, replace

import numpy as np
import pytest

from tests.loops import formulas
from tests.machines import ICE_LAKE
from tilewright.codegen.cuda.emit import emit_program as emit_cuda
from tilewright.codegen.llvm.emit import emit_program as emit_llvm
from tilewright.errors import CodegenError, ScheduleError, VerificationError
from tilewright.hw import Caches, Memory, Scope
from tilewright.hw.gpu import A100, H200
from tilewright.hw.memory import LOOP_SCOPES, scopes_of
from tilewright.loops.interpret import interpret_program
from tilewright.loops.ir import Program
from tilewright.loops.schedule import Schedule
from tilewright.loops.text import print_program
from tilewright.loops.verify import verify_program

SCRATCHPAD = Scope("scratchpad")


@dataclass(frozen=True)
class Accelerator:
    """A machine that is not described yet."""

    @property
    def memories(self) -> tuple[Memory, ...]:
        return (
            Memory("registers", Scope.REGISTER, "thread"),
            Memory("scratchpad", SCRATCHPAD, "core", 256 << 10, bytes_per_cycle=16.0),
            Memory("DRAM", Scope.GLOBAL, "machine"),
        )

    def describe(self) -> str:
        return "an accelerator"


def test_a_scope_is_its_name() -> None:
    assert Scope("scratch") is Scope.SCRATCH and Scope("scratchpad") is SCRATCHPAD
    for same in (pickle.loads(pickle.dumps(SCRATCHPAD)), copy.deepcopy(SCRATCHPAD)):
        assert same is SCRATCHPAD
    assert repr(SCRATCHPAD) == "Scope('scratchpad')" and SCRATCHPAD.value == "scratchpad"
    with pytest.raises(AttributeError, match="does not change"):
        SCRATCHPAD.value = "other"


def test_the_memories_of_a_processor() -> None:
    named = {memory.name: memory for memory in ICE_LAKE.memories}
    assert list(named) == ["registers", "L1", "stack", "L2", "L3", "DRAM"]
    assert named["registers"].bytes == 32 * 64 and named["L1"].bytes == 48 << 10
    assert named["L1"].bytes_per_cycle == 128 and named["L2"].line == 64
    assert set(scopes_of(ICE_LAKE)) == set(LOOP_SCOPES)
    small = replace(ICE_LAKE, caches=Caches(32 << 10, 1 << 20, 0))
    assert "L3" not in {memory.name for memory in small.memories}


def test_the_memories_of_a_card() -> None:
    registers, shared, l2, memory = H200.memories
    assert registers.shared_by == "thread" and shared.shared_by == "block" and l2.scope is None
    assert (l2.latency, memory.latency, memory.bytes) == (200, 557, H200.memory)
    assert memory.bytes_per_cycle == pytest.approx(4.8e12 / 1.98e9 / 132)
    assert set(scopes_of(A100)) == set(LOOP_SCOPES)


def in_scratchpad() -> Program:
    schedule = Schedule.of(*formulas.matmul(4, 8, 6)).set_scope("product", "scratchpad")
    return schedule.program(scopes=scopes_of(Accelerator()))


def test_a_target_adds_a_scope() -> None:
    made = in_scratchpad()
    assert "  scratchpad product: f32[32]\n" in print_program(made)
    rng = np.random.default_rng(0)
    a, b, bias = (rng.standard_normal(size).astype(np.float32) for size in ((4, 6), (6, 8), 8))
    got = interpret_program(made, [a, b, bias], scopes_of(Accelerator()))
    np.testing.assert_allclose(got.reshape(4, 8), np.maximum(a @ b + bias, 0), rtol=1e-5, atol=1e-5)


def test_a_target_without_the_scope_says_so() -> None:
    made = in_scratchpad()
    words = "buffer product is in scope 'scratchpad', and the target has"
    with pytest.raises(VerificationError, match=words):
        verify_program(made)
    with pytest.raises(VerificationError, match=words):
        interpret_program(made, [])
    with pytest.raises(VerificationError, match=words):
        Schedule.of(*formulas.matmul(4, 8, 6)).set_scope("product", "scratchpad").program()
    with pytest.raises(CodegenError, match=words):
        emit_llvm(made, ICE_LAKE, "fast", "kernel")
    with pytest.raises(CodegenError, match=words):
        emit_cuda(made, "kernel")


def test_a_scope_that_nobody_has_named_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"the scope must be one of register, scratch.*, got 'nowhere'"):
        Schedule.of(*formulas.matmul(4, 8, 6)).set_scope("product", "nowhere")
