"""Mutants of kernels on the emulated GPU, a few of them; for more `python -m tests.faults.gpu_mutants --emulated`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest

from tests.faults import campaign
from tests.faults.campaign import EQUIVALENT, PASSED, PassedMutant
from tests.faults.emulated_mutants import COMPLAINT, WRONG, EmulatedTarget
from tests.faults.gpu_edits import Edit
from tests.faults.gpu_mutants import FaultTarget
from tests.space.checked import Inputs
from tilewright.codegen.cuda.build import GpuSource
from tilewright.dtypes import DType
from tilewright.graph.op import apply
from tilewright.hw.gpu import H200
from tilewright.loops.ir import Buffer
from tilewright.space.template import Work
from tilewright.space.templates.default import DEFAULT
from tilewright.testing.emulator.run import COMPILER, Complaint, Emulated, _flags

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ here to compile the emulator with")


def with_edits(*changes: tuple[str, str]) -> EmulatedTarget:
    x = Inputs()
    task = x.task(apply("add", x(40, dtype=DType.F32), x(40, dtype=DType.F32)))
    found = EmulatedTarget(FaultTarget(Work(task, H200), DEFAULT))
    text = found.target.source.text
    edits = []
    for old, new in changes:
        begin = text.rindex(old)
        edits.append(Edit("made up", begin, begin + len(old), new, f"{old} -> {new}"))
    found.target.__dict__["edits"] = edits
    return found


def test_outcomes_of_mutants_on_the_emulated_gpu() -> None:
    found = with_edits((" + ", " - "), (" + ", "  +  "), ("void", "no"))
    assert [found.outcome(number) for number in range(3)] == [WRONG, EQUIVALENT, COMPLAINT]


def test_a_wrong_mutant_that_validation_lets_through_passes() -> None:
    found = with_edits((" + ", " - "))
    shape = found.cases[0].allowed.shape
    blind = replace(found.cases[0], allowed=found.cases[0].allowed + math.inf, l2_bound=math.inf)
    assert blind.allowed.shape == shape
    found.__dict__["cases"] = [blind]
    assert found.outcome(0) == PASSED


READS = """
typedef float f32;
extern "C" __global__ void KERNEL_NAME(const f32* __restrict__ x, f32* __restrict__ out) {
  extern __shared__ __align__(128) unsigned char shared[];
  f32 unset;
  out[threadIdx.x] = fmaxf(x[threadIdx.x], %s);
}
"""
LEFT = "reinterpret_cast<f32*>(shared)[threadIdx.x]"


def largest_of(other: str) -> GpuSource:
    """A maximum drops NaN, so that one that reads what was never written may look right."""
    x, out = Buffer("x", DType.F32, 32), Buffer("out", DType.F32, 32)
    return GpuSource("largest", READS % other, (x, out), 1, 32, 128, "")


def test_a_maximum_with_shared_memory_that_was_never_written_is_seen(tmp_path: Path) -> None:
    given = [[np.linspace(-2, 2, 32, dtype=np.float32)]]
    kernel = Emulated(largest_of(LEFT), tmp_path)
    assert kernel(given)[0].tolist() == given[0][0].tolist(), "NaN is dropped"
    with pytest.raises(Complaint, match="on memory that was never written, in launch 0"):
        kernel.in_both_orders(given)
    sound = Emulated(largest_of("x[threadIdx.x]"), tmp_path)
    assert sound.in_both_orders(given)[0].tolist() == given[0][0].tolist()


def test_a_register_that_was_never_written_does_not_look_right() -> None:
    if not any("auto-var-init" in flag for flag in _flags()):
        pytest.skip("this g++ leaves registers as they are")
    x = Inputs()
    found = EmulatedTarget(FaultTarget(Work(x.task(apply("neg", x(32))), H200), DEFAULT))
    text = found.target.source.text
    begin = text.rindex(".at[v] = ") + len(".at[v] = ")
    value = text[begin : text.index(";", begin)]
    with_unset = f"[&] {{ f32 unset; return unset != 0.0f ? {value} : 0.0f; }}()"
    edit = Edit("made up", begin, begin + len(value), with_unset, "")
    found.target.__dict__["edits"] = [edit]
    assert found.outcome(0) == COMPLAINT


def test_a_kernel_that_does_not_pass_itself_has_no_mutants(capsys: pytest.CaptureFixture[str]) -> None:
    found = with_edits((" + ", " - "))
    found.__dict__["cases"] = [replace(found.cases[0], reference=found.cases[0].reference + 1)]
    assert list(found.legal_edits(Random(0))) == []
    assert "the original does not pass" in capsys.readouterr().out


def test_a_mutant_that_passed_can_be_found_again() -> None:
    class Target:
        name = "a kernel"
        edits = tuple(SimpleNamespace(kind="index + 1", where=f"line {number}") for number in range(4))

        def legal_edits(self, rng: Random) -> Iterator[int]:
            return iter(range(4))

    outcomes = ["wrong", PASSED, EQUIVALENT, "wrong"]
    passed = campaign.run_mutants(3, 0, [Target()], lambda _, numbers: [outcomes[n] for n in numbers], 2)
    assert passed == [PassedMutant("a kernel", 1, "index + 1", "line 1")]
