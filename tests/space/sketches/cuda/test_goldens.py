"""The program of each GPU sketch at two configs: with the pipelines of shared memory and registers, and without."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from tests.loops.gpu.products import Product
from tests.programs import GPU, GPU_SKETCHES, gpu_kernel, program_text
from tests.space.checked import Inputs
from tests.space.sketches.cuda.tasks import product_task
from tilewright.dtypes import DType
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.loops.ir import Program
from tilewright.loops.verify import verify_program


def dot_products() -> Task:
    """A matrix by a vector: so few results that the threads of a block share each sum."""
    x = Inputs()
    return x.task(apply("matmul", x(8, 4096, dtype=DType.F16), x(4096, 16, dtype=DType.F16)))


@dataclass(frozen=True)
class Case:
    sketch: str
    label: str
    task: Callable[[], Task]
    values: dict[str, object] = field(default_factory=dict)


CASES = [
    Case(
        "tensorised", "f16",
        lambda: product_task(Product(64, 96, 80, transposed_b=False)),
        {"bm": 32, "bn": 32, "wm": 16, "wn": 16, "bk": 32, "stages": 2, "prefetch": True, "instruction_k": 16},
    ),
    Case(
        "tensorised", "f16-apart",
        lambda: product_task(Product(64, 96, 80, transposed_b=False)),
        {"bm": 32, "bn": 32, "wm": 16, "wn": 16, "bk": 32, "stages": 3, "prefetch": True, "fused": False},
    ),
    Case("tiled", "f32", lambda: product_task(Product(64, 96, 80, dtype=DType.F32))),
    Case(
        "tiled", "f32-pipelined",
        lambda: product_task(Product(64, 96, 80, dtype=DType.F32)),
        {"stages": 3, "prefetch": True, "fused": True},
    ),
    Case(
        "warpgroups", "f16",
        lambda: product_task(Product(192, 96, 136, transposed_b=False)),
        {"bm": 128, "bn": 64, "roles": False},
    ),
    Case(
        "warpgroups", "f16-roles",
        lambda: product_task(Product(192, 96, 136, transposed_b=False)),
        {"bm": 128, "bn": 96, "stages": 3, "roles": True},
    ),
    Case("block-reduction", "f16", dot_products),
    Case("block-reduction", "f16-whole-block", dot_products, {"group": 256, "lanes": 8}),
]  # fmt: skip


def test_every_sketch_has_two_goldens() -> None:
    counts = Counter(case.sketch for case in CASES)
    assert {name for name, count in counts.items() if count >= 2} == set(GPU_SKETCHES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.sketch}-{case.label}")
def test_the_program_is_the_golden(case: Case, golden: Callable[[str, str], None]) -> None:
    task = case.task()
    config, program = gpu_kernel(GPU_SKETCHES[case.sketch], task, case.values)
    assert isinstance(program, Program)
    verify_program(program)
    golden(f"{case.sketch}-{case.label}.txt", program_text(task, program, GPU, config))
