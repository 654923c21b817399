"""Gemmini's intrinsics: what their expressions say is what its instructions compute, in the memories that they name."""

from __future__ import annotations

import numpy as np
import pytest

from tilewright.hw.gemmini import ACCUMULATOR, SCRATCHPAD, GemminiMachine
from tilewright.hw.gemmini_intrinsics import intrinsics, load, multiply, store
from tilewright.hw.memory import Scope, scopes_of
from tilewright.runtime.gemmini import Functional, make
from tilewright.runtime.gemmini.isa import ACCUMULATOR as ACC
from tilewright.runtime.gemmini.isa import BY_NAME, FULL, NONE, ONE, scale_bits
from tilewright.te.interpret import interpret

DIM = 4
MACHINE = GemminiMachine(dim=DIM, scratchpad=512, accumulator=1024)


def test_every_operand_is_in_a_memory_of_the_machine_and_every_opcode_exists() -> None:
    scopes = scopes_of(MACHINE)
    for intrinsic in intrinsics(DIM):
        assert all(fragment.scope in scopes for fragment in intrinsic.fragments)
        assert all(name in BY_NAME for name in intrinsic.emit.opcodes)  # type: ignore[union-attr]
    held = {fragment.tensor.name: fragment.scope for fragment in multiply(DIM).fragments}
    assert held == {"a": SCRATCHPAD, "b": SCRATCHPAD, "c": ACCUMULATOR}
    assert load(DIM).fragment("source").scope is Scope.GLOBAL


@pytest.mark.parametrize(("relu", "scale"), [(False, 0.013), (True, 0.5)])
def test_instructions_compute_the_expressions(relu: bool, scale: float) -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-128, 128, (DIM, DIM)).astype(np.int8) for _ in range(2))
    product = multiply(DIM)
    sums = interpret(product.output, dict(zip(product.inputs, (a, b), strict=True)))
    out = store(DIM, relu)
    scales = np.array(scale, np.float32)
    expected = interpret(out.output, dict(zip(out.inputs, (sums.astype(np.int32), scales), strict=True)))

    dram = np.zeros(256, np.uint8)
    dram[64:80], dram[80:96] = a.view(np.uint8).ravel(), b.view(np.uint8).ravel()
    program = [
        make("config_ex", a_stride=1),
        make("config_ld", slot=0, stride=DIM, scale=ONE),
        make("mvin", dram=64, local=0, rows=DIM, cols=DIM),
        make("mvin", dram=80, local=DIM, rows=DIM, cols=DIM),
        make("preload", b=DIM, rows=DIM, cols=DIM, c=ACC, c_rows=DIM, c_cols=DIM),
        make("compute_preloaded", a=0, rows=DIM, cols=DIM, d=NONE),
        make("config_st", stride=DIM, scale=scale_bits(scale), relu=relu),
        make("mvout", dram=96, local=ACC, rows=DIM, cols=DIM),
        make("config_st", stride=4 * DIM, scale=ONE),
        make("mvout", dram=128, local=ACC | FULL, rows=DIM, cols=DIM),
    ]
    Functional(MACHINE, dram).run(program)
    np.testing.assert_array_equal(dram[128:192].view(np.int32).reshape(DIM, DIM), sums)
    np.testing.assert_array_equal(dram[96:112].view(np.int8).reshape(DIM, DIM), expected)
