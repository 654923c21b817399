"""Tile kernels on a card: the ten kernels, random programs, streams, and what a warm call costs."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from tests.codegen.cuda.tiles.cases import MAKERS, Case
from tests.codegen.cuda.tiles.random_programs import launch_of
from tests.tile import kernels
from tests.tile.generator import generate
from tilewright.dtypes import DType
from tilewright.errors import KernelArgumentError
from tilewright.runtime.cuda import device
from tilewright.tile.executors import executor_for

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not device.count(), reason="no NVIDIA GPU"),
]


def on_card(array: np.ndarray) -> Any:
    """A tensor of the same bytes."""
    kind = getattr(torch, DType.of(array).numpy.name)
    raw = torch.from_numpy(np.ascontiguousarray(array).view(np.uint8).reshape(-1).copy())
    return raw.cuda().view(kind).reshape(array.shape)


def back(tensor: Any, like: np.ndarray) -> np.ndarray:
    raw = tensor.reshape(-1).view(torch.uint8).cpu().numpy()
    return raw.view(like.dtype).reshape(like.shape)


@pytest.mark.parametrize("case", [make() for make in MAKERS], ids=lambda case: case.name)
def test_the_ten_kernels(case: Case) -> None:
    tensors = [on_card(each) if isinstance(each, np.ndarray) else each for each in case.arguments]
    names = [parameter.name for parameter in case.kernel.source.parameters]
    case.kernel[case.grid](*tensors, **case.constants, options={"warps": case.warps})
    case.check(back(tensors[names.index(case.result)], case.wanted.astype(case_type(case))))


def case_type(case: Case) -> np.dtype:
    names = [parameter.name for parameter in case.kernel.source.parameters]
    return np.dtype(case.arguments[names.index(case.result)].dtype)


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_random_programs(first: int) -> None:
    executor = executor_for("cuda")
    assert executor is not None
    for seed in range(first, first + 50):
        made = generate(seed)
        launch = launch_of(made, seed)
        run = executor.compile(launch.program, launch.facts, {"warps": launch.warps, "stages": launch.stages})
        assert run is not None
        tensors = {name: on_card(array) for name, array in made.arrays.items()}
        run(made.grid, made.values({name: tensor.data_ptr() for name, tensor in tensors.items()}))
        torch.cuda.synchronize()
        made.check(
            {name: back(tensors[name], wanted) for name, wanted in made.wanted.items()}, f"seed {seed}"
        )


def test_a_launch_goes_to_the_current_stream() -> None:
    x, out = torch.ones(64, 1024, device="cuda"), torch.zeros(64, 1024, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.mul_(3)
        kernels.add_row[16, 4](x, x[0].clone(), out, 64, 1024, BM=4, BN=256)
    stream.synchronize()
    assert torch.all(out == 6)


def test_a_grid_that_is_too_large() -> None:
    x = torch.ones(4, device="cuda")
    with pytest.raises(KernelArgumentError, match="65535"):
        kernels.add_row[1, 70_000](x, x, x, 1, 4, BM=1, BN=4)


def test_a_warm_call_is_cheap() -> None:
    """Over a bare launch of the same kernel, by the driver: 10 us at most (the bound has room for a busy host)."""
    x, out = torch.ones(64, 64, device="cuda"), torch.zeros(64, 64, device="cuda")

    def call() -> None:
        kernels.softmax[(64,)](x, out, 64, 64, BLOCK=64)

    for _ in range(100):
        call()
    torch.cuda.synchronize()
    best = min(_seconds(call) for _ in range(20))
    assert best < 40e-6, best


def _seconds(call: Any, count: int = 100) -> float:
    begin = time.perf_counter()
    for _ in range(count):
        call()
    spent = (time.perf_counter() - begin) / count
    torch.cuda.synchronize()
    return spent
