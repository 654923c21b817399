"""Sketches as machine code: that it compiles, within what was promised, and, on a card, that it is right."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

import pytest

from tests.loops.gpu.products import PRODUCTS
from tests.nvrtc import needs_nvrtc
from tests.rewrites.helpers import array
from tests.space.checked import Inputs
from tests.space.sketches.cuda.tasks import CONVOLUTIONS, product_task
from tests.space.templates.cuda.tiles import FEW_BYTES, check_on_a_card, compiled
from tilewright.codegen.cuda.build import build
from tilewright.codegen.cuda.tensor import tensor_source
from tilewright.dtypes import DType
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.hw.gpu import H200, GpuMachine, detect
from tilewright.runtime.cuda import device
from tilewright.space.candidates import Candidates
from tilewright.space.implementation import Implementation
from tilewright.space.sketches.cuda import SKETCHES
from tilewright.space.template import GpuWork, Template
from tilewright.space.terms import GpuTerms
from tilewright.tune.choose import ranked


@dataclass(frozen=True)
class Sketched:
    sketch: Template
    task: Task
    name: str


def summed(rows: int, columns: int, axis: int) -> Task:
    x = Inputs()
    return x.task(apply("softmax", x(rows, columns, dtype=DType.F16), axis=axis))


TASKS = [
    *((case.name, product_task(case)) for case in PRODUCTS),
    *(
        (case.name, product_task(case))
        for case in (replace(each, dtype=DType.F32) for each in PRODUCTS[1:8:2])
    ),
    *((case.name, case.task()) for case in CONVOLUTIONS),
    ("rows", summed(20, 5000, 1)),
    ("columns", summed(700, 90, 0)),
]
CASES = [
    Sketched(sketch, task, f"{sketch.name}-{name}")
    for sketch in SKETCHES
    for name, task in TASKS
    if sketch.apply(GpuWork(task, H200)) is not None
]


@pytest.mark.parametrize(("case", "machine", "seed"), compiled(CASES, quick=12))
def test_random_configs_compile_without_spills(case: Sketched, machine: GpuMachine, seed: int) -> None:
    """What the predicate calls legal, the compiler takes, within the card's limits and with no more memory than was
    counted."""
    needs_nvrtc()
    applied = case.sketch.apply(GpuWork(case.task, machine))
    assert applied is not None
    config = applied.space.sample(Random(seed))
    assert config is not None
    made, terms = applied.program(config), applied.terms(config)
    assert not isinstance(made, Implementation) and isinstance(terms, GpuTerms)
    kernel = build(tensor_source(made), machine, "fast", None)
    used = kernel.resources
    assert used.spilled_bytes <= FEW_BYTES, config
    assert machine.resident_blocks(kernel.threads, used.registers, kernel.shared_bytes) >= 1
    assert kernel.shared_bytes <= terms.shared_bytes <= machine.shared_block


@pytest.mark.parametrize("number", range(0, len(CASES), 17))
def test_the_best_are_candidates_that_can_be_named_again(number: int) -> None:
    case = CASES[number]
    work = GpuWork(case.task, H200)
    candidates = Candidates.of(work)
    applied = case.sketch.apply(work)
    assert applied is not None
    fastest = ranked(applied, work)[:4]
    assert fastest and fastest[0][0] < 1
    for _, config in fastest:
        assert candidates.is_legal(config) and candidates.recalled(config) == config
        assert not candidates.implementation(config).uses_library


@pytest.mark.gpu
@pytest.mark.skipif(not device.count(), reason="no NVIDIA GPU")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_is_right_on_a_card(case: Sketched) -> None:
    machine, task = detect(), case.task
    arrays = [array(*n.shape, seed=i, dtype=n.dtype) for i, n in enumerate(task.graph.inputs)]
    applied = case.sketch.apply(GpuWork(task, machine))
    assert applied is not None
    most = {DType.F32: 2e-6, DType.F16: 1e-3, DType.BF16: 8e-3}[task.graph.inputs[0].dtype]
    check_on_a_card(applied, task, arrays, machine, most)
