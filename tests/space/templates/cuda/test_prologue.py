"""What stands before a product, computed on the way to tensor cores: taken, right, compiled, and left apart where that
is better."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tests.loops.gpu.meaning import computed
from tests.space.checked import Inputs
from tests.space.implementations import WITH_LIBRARIES, library_calls
from tests.space.templates.cuda.tiles import TILES, arrays_of, check_it_compiles, check_on_a_card
from tilewright.dtypes import DType
from tilewright.graph.ir import Node
from tilewright.graph.op import apply
from tilewright.graph.oracle import evaluate
from tilewright.graph.task import Task
from tilewright.hw.gpu import A100, H200, GpuMachine, detect
from tilewright.loops.gpu.tensor import ComputedOperand
from tilewright.measure.check import relative_error
from tilewright.runtime.cuda import device
from tilewright.space.candidates import Candidates
from tilewright.space.decompositions.separate_prologue import NAME
from tilewright.space.template import GpuWork
from tilewright.space.templates.cuda.matmul import AppliedMatmul, TensorCores, gemm
from tilewright.tune.choose import choose

F16, BF16 = DType.F16, DType.BF16


def gated(m: int, n: int, k: int, dtype: DType = F16) -> Task:
    """silu(gate) * x, then a product with bias."""
    x = Inputs()
    gate, data = x(m, k, dtype=dtype), x(m, k, dtype=dtype)
    total = apply("matmul", apply("mul", apply("silu", gate), data), x(k, n, dtype=dtype, constant=True))
    return x.task(apply("add", total, x(n, dtype=dtype)))


def normalised(m: int, n: int, k: int) -> Task:
    """A norm's scale and shift, with the statistics of rows given, in float32."""
    x = Inputs()
    wide = apply("cast", x(m, k, dtype=F16), dtype=DType.F32)
    mean, deviation = x(m, 1, dtype=DType.F32), x(m, 1, dtype=DType.F32)
    scaled = apply("mul", apply("sub", wide, mean), deviation)
    moved = apply("add", apply("mul", scaled, x(k, dtype=DType.F32)), x(k, dtype=DType.F32))
    return x.task(apply("matmul", apply("cast", moved, dtype=F16), x(k, n, dtype=F16)))


def converted(m: int, n: int, k: int) -> Task:
    """Float32 data, and bytes with a scale for each row of k as the weight."""
    x = Inputs()
    data = apply("cast", x(m, k, dtype=DType.F32), dtype=F16)
    weight = apply("mul", apply("cast", x(k, n, dtype=DType.I8), dtype=F16), x(k, 1, dtype=F16))
    return x.task(apply("matmul", data, weight))


def transposed(m: int, n: int, k: int) -> Task:
    """gelu of a matrix that lies the other way round, by head."""
    x = Inputs()
    data = apply("gelu", x(2, k, m, dtype=F16), approximate="none")
    return x.task(apply("matmul", apply("permute", data, axes=(0, 2, 1)), x(2, k, n, dtype=F16)))


def convolved(size: int, inside: int, outside: int, window: int, stride: int = 1) -> Task:
    """relu(image * scale of its channels + shift), with a border, through a convolution: zero is not zero before."""
    x = Inputs()
    image, scale, shift = (
        x(2, size, size, inside, dtype=F16),
        x(2, 1, 1, inside, dtype=F16),
        x(inside, dtype=F16),
    )
    data = apply("relu", apply("add", apply("mul", image, scale), shift))
    if window > 1:
        edge = (0, window // 2, window // 2, 0)
        data = apply("pad", data, low=edge, high=edge, interior=(0, 0, 0, 0), value=0.0)
    attrs: dict[str, Any] = {"padding": ((0, 0), (0, 0)), "dilation": (1, 1), "groups": 1}
    weight = x(window, window, inside, outside, dtype=F16, constant=True)
    return x.task(apply("conv", data, weight, stride=(stride, stride), layout="channels_last", **attrs))


CASES: dict[str, Callable[[], Task]] = {
    "gated": lambda: gated(40, 24, 32),
    "gated, no vectors": lambda: gated(33, 17, 35),
    "gated, pairs": lambda: gated(20, 18, 22, BF16),
    "normalised": lambda: normalised(24, 16, 40),
    "converted": lambda: converted(17, 24, 32),
    "turned": lambda: transposed(16, 24, 20),
    "convolved": lambda: convolved(6, 8, 12, 3),
    "convolved, every second": lambda: convolved(6, 6, 8, 3, 2),
    "pointwise": lambda: convolved(5, 16, 8, 1),
}


def applied_to(task: Task, machine: GpuMachine = H200) -> AppliedMatmul:
    found = TensorCores().apply(GpuWork(task, machine))
    assert isinstance(found, AppliedMatmul)
    return found


@pytest.mark.parametrize("name", CASES)
def test_what_is_read_and_computed_is_the_task(name: str) -> None:
    task = CASES[name]()
    work, arrays = applied_to(task).work, arrays_of(task)
    assert isinstance(work.left, ComputedOperand)
    (reference,) = evaluate(task.graph, arrays, precise=True)
    got = computed(gemm(work, TILES[0], H200), arrays).astype(np.float64)
    assert relative_error(got.reshape(reference.shape), reference) < (
        5e-3 if task.output.dtype is BF16 else 1e-3
    )


@pytest.mark.parametrize(
    ("name", "machine"),
    [("gated", A100), ("converted", H200), ("convolved, every second", H200)],
    ids=lambda x: x if isinstance(x, str) else x.capability,
)
def test_random_configs_compile_without_spills(name: str, machine: GpuMachine) -> None:
    check_it_compiles(applied_to(CASES[name](), machine), machine, 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("machine", [A100, H200], ids=lambda machine: machine.capability)
@pytest.mark.parametrize("name", CASES)
def test_more_random_configs_compile(name: str, machine: GpuMachine, seed: int) -> None:
    check_it_compiles(applied_to(CASES[name](), machine), machine, seed)


def test_an_element_is_not_rounded_to_what_it_is_not() -> None:
    """A product of float32 stays one, though its weight was of 16 bits."""
    x = Inputs()
    weight = apply("cast", x(32, 16, dtype=F16), dtype=DType.F32)
    task = x.task(apply("matmul", x(8, 32, dtype=DType.F32), weight))
    assert TensorCores().apply(GpuWork(task, H200)) is None
    assert TensorCores().apply(GpuWork(task, H200, "tf32")) is not None


def ops(nodes: Sequence[Node]) -> list[str]:
    return [node.op for node in nodes if not (node.is_input or node.is_constant)]


def test_libraries_compute_the_product_behind_a_kernel() -> None:
    for task, before in (
        (gated(64, 64, 64), ["silu", "mul"]),
        (convolved(8, 8, 16, 3), ["mul", "add", "relu"]),
    ):
        found = [made for _, made in library_calls(GpuWork(task, WITH_LIBRARIES))]
        assert found
        for implementation in found:
            first, second = implementation.parts[:2]
            assert ops(first.task.graph.nodes()) == before and first.call is None
            assert second.call is not None


def test_what_would_be_computed_again_and_again_is_left_apart() -> None:
    once, often = gated(4096, 64, 64), convolved(64, 64, 2048, 3)
    assert choose(GpuWork(once, H200)).config.template == "tensor-core-matmul"
    choice = choose(GpuWork(often, H200))
    assert choice.config.template == NAME
    assert [ops(part.task.graph.nodes()) for part in choice.implementation.parts] == [
        ["mul", "add", "relu"],
        ["pad", "conv"],
    ]
    candidates = Candidates.of(GpuWork(often, H200))
    assert candidates.is_legal(choice.config) and candidates.recalled(choice.config) == choice.config
    other = Candidates.of(GpuWork(gated(64, 64, 64), A100))
    assert not other.is_legal(choice.config), "not a config of this one"


@pytest.mark.gpu
@pytest.mark.skipif(not device.count(), reason="no NVIDIA GPU")
@pytest.mark.parametrize("name", CASES)
def test_it_is_right_on_a_card(name: str) -> None:
    task, machine = CASES[name](), detect()
    bound = 8e-3 if task.output.dtype is BF16 else 1e-3
    check_on_a_card(applied_to(task, machine), task, arrays_of(task), machine, bound)
