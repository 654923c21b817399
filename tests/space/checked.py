"""Running what templates make: a task of its own, any config's program, its result compared with the oracle's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st

from tests.rewrites.helpers import array
from tilewright.graph.oracle import evaluate
from tilewright.graph.task import Task
from tilewright.hw import CpuMachine, host
from tilewright.loops.ir import Program
from tilewright.loops.verify import verify_program
from tilewright.measure.check import relative_error
from tilewright.measure.single import SingleKernel
from tilewright.runtime.executor import aligned_empty
from tilewright.space.space import Config, Space
from tilewright.testing.problems import Inputs

__all__ = ["Inputs", "error", "legal_configs", "results", "same_on_two_threads", "stored_for"]


def results(
    program: Program, task: Task, *, numerics: str = "fast", seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """(what the kernel computes, what the oracle does) on random data; the same bits on one thread and on two."""
    verify_program(program)
    arrays = [array(*n.shape, seed=seed + i, dtype=n.dtype) for i, n in enumerate(task.graph.inputs)]
    stored = stored_for(program, arrays)
    (reference,) = evaluate(task.graph, arrays, precise=True)
    return same_on_two_threads(program, stored, numerics=numerics).reshape(reference.shape), reference


def stored_for(program: Program, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Inputs as the program expects them: flat, and packed where it says so."""
    packings = (*program.packings, *[None] * (len(arrays) - len(program.packings)))
    return [
        np.ascontiguousarray(array).reshape(-1) if packing is None else packing.pack(array)
        for array, packing in zip(arrays, packings, strict=True)
    ]


def same_on_two_threads(
    program: Program,
    stored: Sequence[np.ndarray],
    *,
    machine: CpuMachine | None = None,
    numerics: str = "fast",
    because: str = "",
) -> np.ndarray:
    """What a program computes: the same bits on one thread and on two."""
    kernel = _built(program, machine or host(), numerics)
    inputs = [_aligned(each) for each in stored]
    kernel.executor.threads = 1
    one = kernel(inputs)
    kernel.executor.threads = 2
    np.testing.assert_array_equal(kernel(inputs), one, err_msg=because)
    return one


@lru_cache(maxsize=16)
def _built(program: Program, machine: CpuMachine, numerics: str) -> SingleKernel:
    """Many tests run one program on other numbers: it is compiled once."""
    return SingleKernel(program, machine, numerics=numerics, threads=1)


def _aligned(values: np.ndarray) -> np.ndarray:
    """A copy of which the kernel, which outlives it, keeps none."""
    copy = aligned_empty(values.nbytes).view(values.dtype).reshape(values.shape)
    copy[...] = values
    return copy


def error(program: Program, task: Task, *, numerics: str = "fast", seed: int = 0) -> float:
    return relative_error(*results(program, task, numerics=numerics, seed=seed))


@st.composite
def legal_configs(draw: st.DrawFn, space: Space) -> Config:
    """Any config of the space; illegal draws are thrown away."""
    values = {knob.name: draw(st.sampled_from(knob.choices), label=knob.name) for knob in space.knobs}
    assume(space.legal(values))
    return Config.of(space.template, values)
