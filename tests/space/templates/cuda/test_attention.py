"""Attention on tensor cores: what is taken, that it compiles, and, on a card, that it is right."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

from tests.rewrites.helpers import array
from tests.space.checked import Inputs
from tests.space.templates.cuda.tiles import check_it_compiles, check_on_a_card, compiled
from tilewright.dtypes import DType
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.hw.gpu import H200, GpuMachine, detect
from tilewright.runtime.cuda import device
from tilewright.space.template import GpuWork
from tilewright.space.templates.cuda.attention import AppliedTensorAttention, TensorCoreAttention


@dataclass(frozen=True)
class Case:
    queries: int
    keys: int
    width: int
    causal: bool = False
    mask: str = ""  # "bool", "row" or "added"
    heads_inside: bool = False  # operands are [batch, length, heads, width], as a projection leaves them
    dtype: DType = DType.F16

    @property
    def name(self) -> str:
        words = ("causal" * self.causal, self.mask, "inside" * self.heads_inside, self.dtype.short)
        return f"{self.queries}x{self.keys}x{self.width}-" + "-".join(filter(None, words))

    def task(self) -> Task:
        x = Inputs()
        batch, heads = 2, 3

        def operand(length: int) -> object:
            if not self.heads_inside:
                return x(batch, heads, length, self.width, dtype=self.dtype)
            plain = x(batch, length, heads * self.width, dtype=self.dtype)
            split = apply("reshape", plain, shape=(batch, length, heads, self.width))
            return apply("permute", split, axes=(0, 2, 1, 3))

        operands = [operand(self.queries), operand(self.keys), operand(self.keys)]
        if self.mask:
            rows = 1 if self.mask == "row" else self.queries
            kind = DType.BOOL if self.mask == "bool" else self.dtype
            operands.append(x(batch, 1, rows, self.keys, dtype=kind))
        out = apply("attention", *operands, scale=1 / math.sqrt(self.width), causal=self.causal)
        if self.heads_inside:
            out = apply("permute", out, axes=(0, 2, 1, 3))
            out = apply("reshape", out, shape=(batch, self.queries, heads * self.width))
        return x.task(out)


CASES = [
    Case(128, 128, 64),
    Case(197, 197, 64, heads_inside=True),
    Case(100, 130, 32, causal=True),
    Case(130, 100, 128, causal=True, heads_inside=True, dtype=DType.BF16),
    Case(77, 77, 80, mask="added"),
    Case(60, 90, 40, mask="bool", heads_inside=True),
    Case(65, 300, 64, mask="row", dtype=DType.BF16),
    Case(1, 500, 64),
    Case(33, 47, 37),
]


def test_results_are_written_in_vectors_of_16_bytes() -> None:
    for inside in (False, True):
        applied = TensorCoreAttention().apply(GpuWork(Case(64, 64, 64, heads_inside=inside).task(), H200))
        assert isinstance(applied, AppliedTensorAttention)
        assert applied.program(next(iter(applied.space.configs()))).lanes == 8


def applied_to(task: Task, machine: GpuMachine) -> AppliedTensorAttention:
    found = TensorCoreAttention().apply(GpuWork(task, machine))
    assert isinstance(found, AppliedTensorAttention)
    return found


def test_what_it_cannot_do_is_declined() -> None:
    template = TensorCoreAttention()
    assert template.apply(GpuWork(Case(64, 64, 64, dtype=DType.F32).task(), H200)) is None
    assert template.apply(GpuWork(Case(64, 64, 160).task(), H200)) is None
    assert template.apply(GpuWork(Case(64, 64, 64).task(), H200, "strict")) is None


@pytest.mark.parametrize(("case", "machine", "seed"), compiled(CASES, quick=3))
def test_random_configs_compile_without_spills(case: Case, machine: GpuMachine, seed: int) -> None:
    check_it_compiles(applied_to(case.task(), machine), machine, seed)


@pytest.mark.gpu
@pytest.mark.skipif(not device.count(), reason="no NVIDIA GPU")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_is_right_on_a_card(case: Case) -> None:
    machine, task = detect(), case.task()
    arrays = [array(*n.shape, seed=i, dtype=n.dtype) for i, n in enumerate(task.graph.inputs)]
    if case.mask == "bool":
        arrays[3][:, :, 5] = False  # a query that sees nothing
    check_on_a_card(
        applied_to(task, machine), task, arrays, machine, 1e-3 if case.dtype is DType.F16 else 8e-3
    )
