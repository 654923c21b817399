"""A sample of kernels under NVIDIA's compute-sanitizer: no access out of bounds, no race in shared memory.

    python -m tests.codegen.cuda.sanitized [memcheck] [racecheck] [synccheck]

One kernel of each template with and without what is fused, of each sketch and of each default schedule, at sizes that
no tile divides. The tool comes with the CUDA toolkit; where it is missing, or the system does not let it look into a
process, this says so and the exit status is 2.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from random import Random

import numpy as np

from tests.loops.formulas import EXAMPLES
from tests.loops.gpu.products import PRODUCTS
from tests.loops.test_default import random_arrays
from tests.rewrites.helpers import array
from tests.space.checked import Inputs
from tests.space.sketches.cuda.tasks import product_task
from tests.space.templates.cuda import test_attention, test_convolution, test_matmul_reduction, test_prologue
from tilewright.codegen.cuda.build import GpuSource, source_of
from tilewright.codegen.cuda.tensor import tensor_source
from tilewright.dtypes import DType
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.hw.gpu import GpuMachine, detect
from tilewright.loops.formula import formula_of
from tilewright.loops.gpu.default import default_program
from tilewright.measure.gpu import GpuProgram
from tilewright.runtime.cuda.device import Device
from tilewright.space.implementation import Implementation
from tilewright.space.sketches.cuda import SKETCHES
from tilewright.space.template import GpuWork
from tilewright.space.templates.cuda import TEMPLATES

TOOLS = ("memcheck", "racecheck", "synccheck")
MISSING = 2
_SECONDS = 540
_POSITIONS = ("compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer")
_REFUSED = (
    "injection library",
    "not permitted",
    "Unable to attach",
)  # the system's word, not a kernel's fault

Sample = tuple[str, GpuSource, list[np.ndarray]]


def tool() -> str | None:
    return next((found for name in _POSITIONS if (found := shutil.which(name))), None)


def columns() -> Task:
    x = Inputs()
    return x.task(apply("softmax", x(700, 90, dtype=DType.F16), axis=0))


def samples(machine: GpuMachine) -> Iterator[Sample]:
    for example in EXAMPLES:
        output, inputs = example.make()
        program = default_program(formula_of(output, inputs), machine)
        yield example.name, source_of(program), random_arrays(inputs)
    tasks: dict[str, Task] = {
        **{case.name: product_task(case) for case in PRODUCTS[::3]},
        **{f"prologue, {name}": make() for name, make in test_prologue.CASES.items()},
        **{f"sums, {name}": make() for name, make in test_matmul_reduction.CASES.items()},
        **{f"convolution {case.name}": case.task() for case in test_convolution.CASES[:3]},
        "columns": columns(),
        **{f"attention {case.name}": case.task() for case in test_attention.CASES[2:5]},
    }
    for name, task in tasks.items():
        arrays = [array(*n.shape, seed=i, dtype=n.dtype) for i, n in enumerate(task.graph.inputs)]
        for template in (*TEMPLATES, *SKETCHES):
            applied = template.apply(GpuWork(task, machine))
            config = None if applied is None else applied.space.sample(Random(0))
            if applied is not None and config is not None:
                made = applied.program(config)
                assert not isinstance(made, Implementation)
                yield f"{name}, by {template.name}", tensor_source(made), arrays


def run() -> None:
    """Every kernel once, in this process."""
    machine, device = detect(), Device()
    for name, source, arrays in samples(machine):
        kernel = GpuProgram(source, machine, device)
        kernel.run(arrays)
        kernel.close()
        print(name, flush=True)


def main(chosen: list[str]) -> int:
    sanitizer = tool()
    if sanitizer is None:
        print("compute-sanitizer is not installed: it comes with the CUDA toolkit", file=sys.stderr)
        return MISSING
    itself = [sys.executable, "-m", "tests.codegen.cuda.sanitized", "--run"]
    for name in chosen or TOOLS:
        command = [sanitizer, "--tool", name, "--error-exitcode", "9", *itself]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_SECONDS)
        said = done.stdout + done.stderr
        print(said[-4000:])
        if done.returncode:
            return MISSING if any(word in said for word in _REFUSED) else 1
    return 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--run"]:
        run()
        sys.exit(0)
    sys.exit(main(sys.argv[1:]))
