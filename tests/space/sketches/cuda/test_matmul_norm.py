"""A matmul and the softmax of its rows, or another norm, in one kernel that rules derive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.programs import GPU, program_text, validation
from tests.space.checked import Inputs
from tests.space.sketches.cuda.test_derived import config_of, derived, program_of
from tests.space.sketches.cuda.test_meaning import check
from tilewright.codegen.cuda.build import build, source_of
from tilewright.codegen.cuda.shared import shared_bytes
from tilewright.dtypes import DType
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.hw.gpu import H200
from tilewright.loops.ir import Program
from tilewright.space.candidates import Candidates
from tilewright.space.sketches import derive
from tilewright.space.sketches.applied import AppliedSketch
from tilewright.space.template import GpuTerms, GpuWork
from tilewright.testing.emulator.run import COMPILER
from tilewright.testing.emulator.run import check as check_emulated
from tilewright.tune.choose import ranked

F16, F32 = DType.F16, DType.F32
WARPS, THREADS = "sketch:matmul-norm+warps+cross", "sketch:matmul-norm+threads+cross"


@dataclass(frozen=True)
class Scores:
    """norm(q @ k^T + bias), a bias if `masked`."""

    m: int
    n: int
    k: int = 24
    batch: int = 0
    dtype: DType = F16
    masked: bool = False
    norm: str = "softmax"

    def task(self) -> Task:
        x = Inputs()
        lead = (self.batch,) if self.batch else ()
        rank = len(lead)
        q, k = (x(*lead, rows, self.k, dtype=self.dtype) for rows in (self.m, self.n))
        scores = apply("matmul", q, apply("permute", k, axes=(*range(rank), rank + 1, rank)))
        scaled = apply("mul", scores, x(1, dtype=self.dtype))
        if self.masked:
            scaled = apply("add", scaled, x(self.n, dtype=self.dtype))
        return x.task(apply(self.norm, scaled, axis=rank + 1))


BY_WARPS = {"bm": 16, "bn": 64, "wm": 16, "wn": 16, "bk": 32, "stages": 1, "prefetch": False}
BY_THREADS = {
    "tm": 4,
    "tn": 16,
    "vm": 1,
    "vn": 4,
    "bk": 8,
    "stages": 2,
    "left_at": "block",
    "right_at": "step",
}
CASES = [
    (Scores(17, 77), WARPS, {**BY_WARPS, "right_at": "step"}),
    (Scores(20, 136, k=40, masked=True), WARPS, {**BY_WARPS, "right_at": "block", "left_at": "block"}),
    (Scores(16, 66, k=70, batch=2), WARPS, {**BY_WARPS, "stages": 2, "prefetch": True, "right_at": "step"}),
    (Scores(9, 77, dtype=F32), THREADS, BY_THREADS),
    (Scores(5, 50, batch=2, dtype=F32, masked=True), THREADS, BY_THREADS),
    (Scores(9, 80, dtype=F32, norm="log_softmax"), THREADS, {**BY_THREADS, "prefetch": True}),
]  # fmt: skip


@pytest.mark.parametrize(("case", "name", "values"), CASES, ids=str)
def test_it_means_what_the_task_means(case: Scores, name: str, values: dict[str, object]) -> None:
    """Interpreted, with copies that come late; the memory that was counted holds what the kernel has."""
    task = case.task()
    applied = derived(task)[name]
    config = config_of(applied, **values)
    program, terms = program_of(applied, config), applied.terms(config)
    check(program, task)
    assert isinstance(terms, GpuTerms)
    assert shared_bytes(program) <= terms.shared_bytes <= H200.shared_block


@pytest.mark.skipif(COMPILER is None, reason="no g++ here to compile the emulator with")
@pytest.mark.parametrize(("case", "name", "values"), [CASES[0], CASES[2], CASES[3]], ids=str)
def test_the_cuda_text_computes_the_task(
    case: Scores, name: str, values: dict[str, object], tmp_path: Path
) -> None:
    task = case.task()
    applied = derived(task)[name]
    program = program_of(applied, config_of(applied, **values))
    check_emulated(source_of(program), validation(task, "fast")[:2], tmp_path)


@pytest.mark.parametrize("capability", ["sm_80", "sm_90a"])
@pytest.mark.parametrize(("dtype", "name"), [(F16, WARPS), (F32, THREADS)])
def test_the_best_ranked_compile_without_spills(dtype: DType, name: str, capability: str) -> None:
    pytest.importorskip(
        "cuda.bindings.nvrtc", reason="NVRTC is not installed: pip install 'tilewright[cuda]'"
    )
    machine = replace(H200, capability=capability)
    work = GpuWork(Scores(512, 640, k=64, dtype=dtype).task(), machine)
    applied = next(each for each in derive(work) if each.space.template == name)
    _, config = ranked(applied, work)[0]
    program, terms = applied.program(config), applied.terms(config)
    assert isinstance(program, Program) and isinstance(terms, GpuTerms)
    kernel = build(source_of(program), machine, "fast", None)
    assert not kernel.resources.spilled_bytes, config
    assert kernel.shared_bytes <= terms.shared_bytes <= machine.shared_block


def test_it_takes_what_the_template_refuses() -> None:
    """More columns than a tile has, batches, and fp32; the sketches are among the candidates."""
    names = {each.space.template for each in Candidates.of(GpuWork(Scores(64, 1000).task(), H200)).applied}
    assert "tensor-core-norm" not in names and names >= {WARPS, THREADS}
    assert list(derived(Scores(64, 300, batch=2).task())) == [WARPS, THREADS]
    assert list(derived(Scores(64, 300, dtype=F32).task())) == [THREADS]
    assert WARPS in derived(Scores(64, 300, dtype=F32).task(), "tf32")


def test_rows_must_fit_shared_memory() -> None:
    """16 rows of 3000 sums in fp32 are 188 KiB, and of 6000 more than a block has: nothing is legal, nor generated."""
    fitting, too_long = (derived(Scores(64, n).task())[WARPS] for n in (3000, 6000))
    assert {dict(config.values)["bm"] for config in fitting.space.configs()} == {16}
    assert not list(too_long.space.configs())


def test_what_it_declines() -> None:
    assert not derived(Scores(64, 300).task(), "strict"), "strict numerics round between the operators"
    assert not derived(Scores(1, 300).task()), "one row is no matrix"
    x = Inputs()
    columns = apply("softmax", apply("matmul", x(64, 32, dtype=F16), x(32, 300, dtype=F16)), axis=0)
    assert not derived(x.task(columns)), "columns are not a block's own"


@pytest.mark.parametrize("number", [0, 3], ids=["warps", "threads"])
def test_the_program_is_the_golden(number: int, golden: Callable[[str, str], None]) -> None:
    case, name, values = CASES[number]
    task = case.task()
    applied = next(each for each in derive(GpuWork(task, GPU)) if each.space.template == name)
    assert isinstance(applied, AppliedSketch)
    config = config_of(applied, **values)
    golden(
        f"matmul-norm-{'warps' if name == WARPS else 'threads'}.txt",
        program_text(task, program_of(applied, config), GPU, config),
    )
