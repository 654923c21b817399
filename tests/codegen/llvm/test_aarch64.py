"""Object code for 64-bit ARM: it builds here, and under qemu (`pytest -m slow`) it computes what NumPy does."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.hw.declared import FMA
from tests.loops import formulas
from tests.rewrites.helpers import array
from tests.space.checked import Inputs, stored_for
from tests.space.sketches.tasks import conv, elementwise, matmul, softmax
from tilewright.codegen.llvm import toolchain
from tilewright.codegen.llvm.build import build, llvm_ir
from tilewright.dtypes import DType
from tilewright.errors import IntrinsicError
from tilewright.graph.op import apply
from tilewright.graph.oracle import evaluate
from tilewright.graph.task import Task
from tilewright.hw import CpuMachine
from tilewright.hw.arm import aarch64
from tilewright.loops.ir import Program
from tilewright.loops.schedule import Schedule
from tilewright.measure.check import relative_error
from tilewright.space.candidates import Candidates
from tilewright.space.template import Work
from tilewright.space.templates.default import DEFAULT
from tilewright.tune.choose import choose

MACHINES = {
    "neon": aarch64("neoverse-n1"),
    "neon-i8mm": aarch64("neoverse-v1"),
    "sve-128": aarch64("neoverse-v2", sve_bits=128),
    "sve-256": aarch64("neoverse-v1", sve_bits=256),
    "apple": aarch64("apple-m1"),
}


def of_bytes() -> Task:
    x = Inputs()
    weight = x(64, 48, dtype=DType.I8, constant=True)
    return x.task(apply("matmul", x(12, 64, dtype=DType.U8), weight))


TASKS: dict[str, Callable[[], Task]] = {
    "matmul": lambda: matmul(24, 65, 50, epilogue=True),
    "conv": lambda: conv((9, 8), (5, 24)),
    "softmax": lambda: softmax(7, 101),
    "elementwise": lambda: elementwise(9, 103),
    "int8": of_bytes,
}

machines = pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
tasks = pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)


def chosen(task: Task, machine: CpuMachine) -> Program:
    return choose(Work(task, machine)).program


@machines
@tasks
def test_it_builds(task: Callable[[], Task], machine: CpuMachine) -> None:
    kernel = build(chosen(task(), machine), machine, "fast", None)
    assert kernel.object_code[:4] == b"\x7fELF"
    assert int.from_bytes(kernel.object_code[18:20], "little") == 183  # EM_AARCH64


def registers(text: str) -> set[str]:
    return set(re.findall(r"\b([vz])\d+\.", text))


@pytest.mark.parametrize(("name", "expected"), [("neon", {"v"}), ("sve-128", {"v"}), ("sve-256", {"z"})])
def test_vectors_are_those_of_the_machine(name: str, expected: set[str]) -> None:
    """Of 128 bits LLVM makes NEON's instructions, where there is SVE too: they are as wide."""
    machine = MACHINES[name]
    program = chosen(matmul(24, 64, 48), machine)
    assert expected <= registers(toolchain.assembly(llvm_ir(program, machine, "fast", "kernel"), machine))


def test_bytes_are_multiplied_by_usdot() -> None:
    machine = MACHINES["neon-i8mm"]
    text = toolchain.assembly(llvm_ir(chosen(of_bytes(), machine), machine, "fast", "kernel"), machine)
    assert "usdot" in text


def test_an_instruction_of_x86_is_refused() -> None:
    machine = MACHINES["neon"]
    schedule = Schedule.of(*formulas.matmul(4, 8, 6)).reorder("product.r0", "product.i1")
    program = schedule.tensorise("product.i1", FMA).program()
    with pytest.raises(IntrinsicError, match=r"needs avx2, fma, which neoverse-n1, 128-bit vectors"):
        llvm_ir(program, machine, "fast", "kernel")


# -- under qemu -------------------------------------------------------------------------------------------------------

_MAIN = r"""
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
extern void SYMBOL(uint8_t **arguments, int64_t begin, int64_t end);
/* The folder: files 0, 1, ... are the inputs, and `out` is written. Then the bytes of each parameter. */
int main(int count, char **words) {
  int parameters = count - 2;
  uint8_t **arguments = malloc(parameters * sizeof *arguments);
  for (int n = 0; n < parameters; n++) {
    size_t bytes = strtoull(words[2 + n], 0, 10);
    arguments[n] = aligned_alloc(64, (bytes + 127) / 64 * 64);
    memset(arguments[n], 0xa5, bytes);
    if (n == parameters - 1) break;
    char path[4096];
    snprintf(path, sizeof path, "%s/%d", words[1], n);
    FILE *file = fopen(path, "rb");
    if (!file || fread(arguments[n], 1, bytes, file) != bytes) return 2;
    fclose(file);
  }
  for (int64_t n = EXTENT; n-- > 0;) SYMBOL(arguments, n, n + 1);
  char path[4096];
  snprintf(path, sizeof path, "%s/out", words[1]);
  FILE *file = fopen(path, "wb");
  size_t bytes = strtoull(words[count - 1], 0, 10);
  return !file || fwrite(arguments[parameters - 1], 1, bytes, file) != bytes || fclose(file) ? 3 : 0;
}
"""
_COMPILER, _QEMU = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64")


def run_emulated(program: Program, machine: CpuMachine, inputs: list[np.ndarray], folder: Path) -> np.ndarray:
    """The flat output of a program's object code, linked with a small C program and run by qemu."""
    assert _COMPILER is not None and _QEMU is not None
    kernel = build(program, machine, "fast", None)
    (folder / "kernel.o").write_bytes(kernel.object_code)
    (folder / "main.c").write_text(_MAIN)
    defined = [f"-DSYMBOL={kernel.symbol}", f"-DEXTENT={kernel.extent}"]
    sources = ["main.c", "kernel.o", "-lm", "-o", "main"]
    subprocess.run([_COMPILER, "-static", "-O1", *defined, *sources], cwd=folder, check=True)
    for number, data in enumerate(inputs):
        (folder / str(number)).write_bytes(data.tobytes())
    sizes = [str(buffer.size * buffer.dtype.bytes) for buffer in program.params]
    bits = machine.vector_bytes * 8
    cpu = f"max,sve{bits}=on,sve-max-vq={bits // 128}" if machine.vscale else "max"
    command = [_QEMU, "-cpu", cpu, "./main", ".", *sizes]
    subprocess.run(command, cwd=folder, check=True, timeout=120)
    return np.frombuffer((folder / "out").read_bytes(), program.params[-1].dtype.numpy)


@pytest.mark.slow
@pytest.mark.skipif(_COMPILER is None or _QEMU is None, reason="needs qemu-aarch64 and aarch64-linux-gnu-gcc")
@machines
@tasks
@pytest.mark.parametrize("default", [False, True], ids=["chosen", "default"])
def test_it_computes_what_numpy_does(
    task: Callable[[], Task], machine: CpuMachine, default: bool, tmp_path: Path
) -> None:
    made, work = task(), Work(task(), dataclasses.replace(machine, cores=2))
    program = Candidates.of(work).program(DEFAULT) if default else choose(work).program
    arrays = [array(*node.shape, seed=n, dtype=node.dtype) for n, node in enumerate(made.graph.inputs)]
    (expected,) = evaluate(made.graph, arrays, precise=True)
    got = run_emulated(program, machine, stored_for(program, arrays), tmp_path).reshape(expected.shape)
    if expected.dtype.kind in "iu":
        np.testing.assert_array_equal(got, expected)
    else:
        assert relative_error(got, expected) < 1e-5
