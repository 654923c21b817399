"""`sketch:warpgroups`: which tasks it takes, and why not others; its joint ranking; it is only chosen by tuning."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.loops.gpu.products import Product
from tests.nvrtc import needs_nvrtc
from tests.programs import GPU
from tests.space.checked import Inputs
from tests.space.sketches.cuda.tasks import product_task
from tilewright.codegen.generator import generator
from tilewright.cost.predictor import all_seconds, nominal
from tilewright.dtypes import DType
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.hw.gpu import A100, H200
from tilewright.loops.ir import BoxCopy, Program, walk_stmts
from tilewright.runtime.plan import MatrixMap
from tilewright.space.candidates import Candidates
from tilewright.space.catalog import catalog
from tilewright.space.sketches.cuda.warpgroups import WarpgroupMatmul
from tilewright.space.template import GpuWork
from tilewright.tune.choose import choose, ranked

NT = Product(1024, 768, 512, transposed_b=False)


def refusal(task: Task, machine: object = GPU) -> str | None:
    work = GpuWork(task, machine)  # type: ignore[arg-type]
    found = WarpgroupMatmul().refusal(work)
    assert (found is None) == (WarpgroupMatmul().apply(work) is not None)
    return found


REFUSED: dict[str, tuple[Callable[[], Task], str]] = {
    "f32": (lambda: product_task(replace(NT, dtype=DType.F32)), "no contraction of two 16-bit factors"),
    "one-step": (lambda: product_task(replace(NT, k=64)), "one step"),
    "nn": (lambda: product_task(replace(NT, transposed_b=True)), "are not neighbours in memory"),
    "odd": (lambda: product_task(replace(NT, k=513)), "do not begin at multiples of 16 bytes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_says_why_it_does_not_apply(name: str) -> None:
    task, why = REFUSED[name]
    assert why in (refusal(task()) or "")


def test_it_needs_the_machine() -> None:
    assert refusal(product_task(NT)) is None
    assert "has no tensor copy engine" in (refusal(product_task(NT), A100) or "")
    assert "has no tensor copy engine" in (
        refusal(product_task(NT), replace(H200, warpgroup_mma=False)) or ""
    )


def test_a_part_of_each_row_is_a_box_too() -> None:
    """As of queries that are stored beside keys and values."""
    x = Inputs()
    both, right = x(256, 256, dtype=DType.F16), x(128, 128, dtype=DType.F16)
    left = apply("slice", both, starts=(0, 128), stops=(256, 256), steps=(1, 1))
    task = x.task(apply("matmul", left, apply("permute", right, axes=(1, 0))))
    work = GpuWork(task, GPU)
    applied = WarpgroupMatmul().apply(work)
    assert applied is not None
    program = applied.program(applied.space.first)  # type: ignore[arg-type]
    assert isinstance(program, Program)
    boxes = {
        stmt.source.buffer.name: stmt.source for stmt in walk_stmts(program.body) if isinstance(stmt, BoxCopy)
    }
    assert {(each.columns, each.stride) for each in boxes.values()} == {(256, 256), (128, 128)}


def test_it_is_measured_and_never_chosen_without() -> None:
    work = GpuWork(product_task(NT), GPU)
    assert WarpgroupMatmul.name in catalog("cuda").only_tuned
    names = {applied.space.template for applied in Candidates.of(work).applied}
    assert WarpgroupMatmul.name in names
    assert all(applied.space.template != WarpgroupMatmul.name for applied in catalog("cuda").trusted(work))
    for options in ({}, {"templates": False}):
        assert choose(work, **options).config.template != WarpgroupMatmul.name


def test_tiles_stages_and_roles_are_ranked_together_and_fast() -> None:
    work = GpuWork(product_task(Product(4096, 4096, 4096, transposed_b=False)), GPU)
    applied = WarpgroupMatmul().apply(work)
    assert applied is not None
    found = ranked(applied, work)
    best = dict(found[0][1].values)
    assert best["roles"] and best["stages"] >= 3 and best["bm"] * best["bn"] >= 128 * 128
    two_slots = {**best, "stages": 2}
    slower = next(seconds for seconds, config in found if dict(config.values) == two_slots)
    assert slower > found[0][0], "two slots hide less than more of them"
    configs = list(applied.space.configs())
    many = [configs[n % len(configs)] for n in range(1000)]
    predictor = nominal(work.machine)
    times = []
    for _ in range(3):
        begin = time.process_time()
        assert all_seconds(applied, many, predictor) is not None
        times.append(time.process_time() - begin)
    assert min(times) < 0.02


def test_a_plan_says_what_the_copy_engine_copies_from() -> None:
    needs_nvrtc()
    work = GpuWork(product_task(NT), GPU)
    applied = WarpgroupMatmul().apply(work)
    assert applied is not None
    config = next(
        c for c in applied.space.configs() if dict(c.values)["bm"] == 128 and dict(c.values)["bn"] == 256
    )
    made, _ = generator("cuda").build(applied.program(config), GPU, "fast", None)
    assert made.launch is not None
    assert made.launch.matrix_maps == (
        MatrixMap(0, 1024, 512, 512, 128, 64),
        MatrixMap(1, 768, 512, 512, 256, 64),
    )
