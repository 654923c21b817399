"""Convolutions as matmuls with a gathered operand: what is taken, that it compiles, that it is right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from tests.rewrites.helpers import array
from tests.space.checked import Inputs
from tests.space.templates.cuda.tiles import check_it_compiles, check_on_a_card, compiled
from tilewright.dtypes import DType
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.hw.gpu import H200, GpuMachine, detect
from tilewright.loops.gpu.tensor import WindowOperand
from tilewright.runtime.cuda import device
from tilewright.space.template import GpuWork
from tilewright.space.templates.cuda.matmul import AppliedMatmul, TensorCores


@dataclass(frozen=True)
class Case:
    size: tuple[int, int]
    channels: tuple[int, int]
    window: tuple[int, int] = (3, 3)
    stride: int = 1
    edge: int = 1
    dilation: int = 1
    residual: bool = True
    dtype: DType = DType.F16

    @property
    def name(self) -> str:
        numbers = (*self.size, *self.channels, *self.window, self.stride, self.edge, self.dilation)
        return "-".join(map(str, numbers)) + f"-{self.dtype.short}"

    def task(self) -> Task:
        """relu(conv(x, w) + bias + residual), channels last, of a batch of 2."""
        x = Inputs()
        inside, outside = self.channels
        image = x(2, *self.size, inside, dtype=self.dtype)
        weight = x(*self.window, inside, outside, constant=True, dtype=self.dtype)
        bias = x(outside, constant=True, dtype=self.dtype)
        if self.edge:
            edge = (0, self.edge, self.edge, 0)
            image = apply("pad", image, low=edge, high=edge, interior=(0, 0, 0, 0), value=0.0)
        attrs: dict[str, Any] = {
            "stride": (self.stride,) * 2,
            "padding": ((0, 0), (0, 0)),
            "dilation": (self.dilation,) * 2,
            "groups": 1,
            "layout": "channels_last",
        }
        out = apply("conv", image, weight, bias, **attrs)
        if self.residual:
            out = apply("add", out, x(*out.shape, dtype=self.dtype))
        return x.task(apply("relu", out))


CASES = [
    Case((14, 14), (64, 64)),
    Case((15, 13), (16, 40), stride=2),
    Case((15, 15), (3, 64), window=(7, 7), stride=2, edge=3, residual=False),
    Case((9, 11), (12, 20), dilation=2, edge=2, dtype=DType.BF16),
    Case((14, 14), (32, 48), window=(1, 1), stride=2, edge=0),
    Case((8, 8), (10, 33), window=(1, 3), edge=1),
    Case((8, 9), (24, 32), edge=0),
]


def applied_to(task: Task, machine: GpuMachine) -> AppliedMatmul:
    found = TensorCores().apply(GpuWork(task, machine))
    assert isinstance(found, AppliedMatmul)
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_is_a_product_with_gathered_rows(case: Case) -> None:
    work = applied_to(case.task(), H200).work
    height, width = case.task().graph.outputs[0].shape[1:3]
    inside, outside = case.channels
    assert work.sizes == (2 * height * width, outside, inside * case.window[0] * case.window[1])
    assert isinstance(work.left, WindowOperand)
    assert work.left.lanes == next(lanes for lanes in (8, 4, 2, 1) if inside % lanes == 0)


@pytest.mark.parametrize(("case", "machine", "seed"), compiled(CASES, quick=3))
def test_random_configs_compile_without_spills(case: Case, machine: GpuMachine, seed: int) -> None:
    check_it_compiles(applied_to(case.task(), machine), machine, seed)


@pytest.mark.gpu
@pytest.mark.skipif(not device.count(), reason="no NVIDIA GPU")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_is_right_on_a_card(case: Case) -> None:
    machine, task = detect(), case.task()
    arrays = [array(*n.shape, seed=i, dtype=n.dtype) for i, n in enumerate(task.graph.inputs)]
    check_on_a_card(
        applied_to(task, machine), task, arrays, machine, 4e-4 if case.dtype is DType.F16 else 4e-3
    )
