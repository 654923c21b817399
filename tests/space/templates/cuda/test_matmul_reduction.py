"""Products whose results are combined over rows before they are written: right, compiled, and used where it pays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.loops.gpu.meaning import computed
from tests.space.checked import Inputs
from tests.space.templates.cuda.tiles import arrays_of, check_it_compiles, check_on_a_card
from tilewright.dtypes import DType
from tilewright.graph.combined import combined_of
from tilewright.graph.op import apply
from tilewright.graph.oracle import evaluate
from tilewright.graph.task import Task
from tilewright.hw.gpu import A100, H200, GpuMachine, detect
from tilewright.measure.check import relative_error
from tilewright.runtime.cuda import device
from tilewright.space.template import GpuWork
from tilewright.space.templates.cuda.matmul_reduction import AppliedMatmulReduction, TensorMatmulReduction

F16 = DType.F16


def pooled(size: int, inside: int, outside: int, op: str = "mean", window: int = 1) -> Task:
    """The mean of each of 3 images behind relu(conv + residual)."""
    x = Inputs()
    image = x(3, size, size, inside, dtype=F16)
    weight = x(window, window, inside, outside, dtype=F16, constant=True)
    edge = (0, window // 2, window // 2, 0)
    if window > 1:
        image = apply("pad", image, low=edge, high=edge, interior=(0, 0, 0, 0), value=0.0)
    attrs: dict[str, Any] = {"padding": ((0, 0), (0, 0)), "dilation": (1, 1), "groups": 1}
    total = apply("conv", image, weight, stride=(1, 1), layout="channels_last", **attrs)
    out = apply("relu", apply("add", total, x(*total.shape, dtype=F16)))
    return x.task(apply(op, out, axes=(1, 2), keepdims=True))


def over_rows(m: int, n: int, k: int, op: str, dtype: DType = F16, parts: int = 1) -> Task:
    """Of gelu(a @ b + bias), all rows, or those of parts, in float32."""
    x = Inputs()
    total = apply("add", apply("matmul", x(m, k, dtype=dtype), x(k, n, dtype=dtype)), x(n, dtype=dtype))
    wide = apply("cast", apply("gelu", total, approximate="none"), dtype=DType.F32)
    split = apply("reshape", wide, shape=(parts, m // parts, n))
    return x.task(apply(op, split, axes=(1,), keepdims=False))


def over_columns(m: int, n: int, k: int, op: str, dtype: DType = F16, parts: int = 1) -> Task:
    """Of relu(a @ b + bias), all columns, or those of parts."""
    x = Inputs()
    total = apply("add", apply("matmul", x(m, k, dtype=dtype), x(k, n, dtype=dtype)), x(n, dtype=dtype))
    wide = apply("cast", apply("relu", total), dtype=DType.F32)
    if parts > 1:
        wide = apply("reshape", wide, shape=(m, parts, n // parts))
    return x.task(apply(op, wide, axes=(wide.type.rank - 1,), keepdims=False))


def of_whole_numbers(m: int, n: int, k: int) -> Task:
    """Of what a cast leaves of a @ b."""
    x = Inputs()
    total = apply("matmul", x(m, k, dtype=F16), x(k, n, dtype=F16))
    whole = apply("cast", apply("cast", total, dtype=DType.I32), dtype=DType.F32)
    return x.task(apply("sum", whole, axes=(0,), keepdims=False))


def of_windows(size: int, inside: int, outside: int) -> Task:
    """Over the channels of a convolution, of an image that is computed on the way, with a border."""
    x = Inputs()
    edge, none = (0, 1, 1, 0), (0, 0, 0, 0)
    data = apply("sigmoid", x(2, size, size, inside, dtype=F16))
    image = apply("pad", data, low=edge, high=edge, interior=none, value=0.0)
    attrs: dict[str, Any] = {"padding": ((0, 0), (0, 0)), "dilation": (1, 1), "groups": 1}
    weight = x(3, 3, inside, outside, dtype=F16, constant=True)
    total = apply("conv", image, weight, stride=(1, 1), layout="channels_last", **attrs)
    return x.task(apply("amax", total, axes=(3,), keepdims=False))


CASES: dict[str, Callable[[], Task]] = {
    "mean of 49": lambda: pooled(7, 24, 40),
    "mean of windows": lambda: pooled(5, 8, 16, window=3),
    "highest of 100": lambda: pooled(10, 16, 33, "amax"),
    "sum of all": lambda: over_rows(70, 50, 64, "sum"),
    "lowest": lambda: over_rows(33, 36, 40, "amin", DType.BF16),
    "sums of columns": lambda: over_columns(70, 200, 32, "sum"),
    "highest of columns, in parts": lambda: over_columns(33, 192, 40, "amax", parts=2),
    "means of odd columns": lambda: over_columns(40, 33, 24, "mean", DType.BF16),
    "sums of parts": lambda: over_rows(96, 264, 32, "sum", parts=4),
    "sums of whole numbers": lambda: of_whole_numbers(48, 40, 32),
    "highest of windows": lambda: of_windows(5, 8, 24),
}


def applied_to(task: Task, machine: GpuMachine = H200) -> AppliedMatmulReduction:
    found = TensorMatmulReduction().apply(GpuWork(task, machine))
    assert isinstance(found, AppliedMatmulReduction)
    return found


@pytest.mark.parametrize("name", CASES)
def test_what_is_combined_is_the_task(name: str) -> None:
    task = CASES[name]()
    applied, arrays = applied_to(task), arrays_of(task)
    (reference,) = evaluate(task.graph, arrays, precise=True)
    kernel = applied.program(next(iter(applied.space.configs())))
    got = computed(kernel, arrays).astype(np.float64).reshape(reference.shape)
    assert relative_error(got, reference) < 2e-3


@pytest.mark.parametrize(
    ("name", "machine"), [("mean of windows", A100), ("sums of parts", H200)], ids=lambda x: str(x)[:16]
)
def test_random_configs_compile_without_spills(name: str, machine: GpuMachine) -> None:
    check_it_compiles(applied_to(CASES[name](), machine), machine, 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("machine", [A100, H200], ids=lambda machine: machine.capability)
@pytest.mark.parametrize("name", CASES)
def test_more_random_configs_compile(name: str, machine: GpuMachine, seed: int) -> None:
    check_it_compiles(applied_to(CASES[name](), machine), machine, seed)


def test_other_reductions_are_declined() -> None:
    for axes in ((0,), (0, 2), (2, 3), (1,)):
        task = pooled(7, 24, 40)
        out = apply("mean", task.output.inputs[0], axes=axes, keepdims=False)
        other = Task(type(task.graph)(task.graph.inputs, (out,)))
        assert TensorMatmulReduction().apply(GpuWork(other, H200)) is None, axes
    assert TensorMatmulReduction().apply(GpuWork(over_rows(300, 32, 32, "sum"), H200)) is None, (
        "more rows than a tile"
    )


@pytest.mark.parametrize("dtype", [DType.I8, DType.I64, DType.F64])
def test_what_float32_cannot_hold_is_not_combined_in_it(dtype: DType) -> None:
    x = Inputs()
    for axis in range(2):
        assert combined_of(apply("sum", x(512, 64, dtype=dtype), axes=(axis,), keepdims=False)) is None


def test_in_strict_a_product_of_halves_is_rounded_twice_before_it_is_combined() -> None:
    """To what a cast between says, and as the product itself is."""
    x = Inputs()
    brain = apply("cast", apply("matmul", x(32, 32, dtype=F16), x(32, 32, dtype=F16)), dtype=DType.BF16)
    task = x.task(apply("sum", apply("cast", brain, dtype=DType.F32), axes=(0,), keepdims=False))
    arrays = arrays_of(task)
    kernels = {}
    for numerics in ("fast", "strict"):
        applied = TensorMatmulReduction().apply(GpuWork(task, H200, numerics))
        assert applied is not None
        kernels[numerics] = applied.program(next(iter(applied.space.configs())))
    rounded = [computed(kernels[numerics], arrays) for numerics in ("strict", "fast")]
    product = (arrays[0].astype(np.float32) @ arrays[1].astype(np.float32)).astype(np.float16)
    expected = product.astype(DType.BF16.numpy).astype(np.float64).sum(0)
    errors = [relative_error(each.astype(np.float64).reshape(-1), expected) for each in rounded]
    assert errors[0] < 1e-6 < 1e-4 < errors[1]


@pytest.mark.parametrize("axis", [0, 1])
def test_of_nothing_there_are_no_parts(axis: int) -> None:
    empty = Inputs()(*((0, 4) if axis == 0 else (4, 0)), dtype=F16)
    assert combined_of(apply("sum", empty, axes=(axis,), keepdims=False)) is None


def test_tiles_begin_where_vectors_do() -> None:
    assert TensorMatmulReduction().apply(GpuWork(over_columns(40, 104, 32, "sum"), H200)) is not None
    assert TensorMatmulReduction().apply(GpuWork(over_columns(40, 208, 32, "sum", parts=2), H200)) is not None
    assert TensorMatmulReduction().apply(GpuWork(over_columns(40, 104, 32, "sum", parts=2), H200)) is None
    x = Inputs()
    left = apply("permute", x(32, 98, dtype=F16), axes=(1, 0))
    total = apply("reshape", apply("matmul", left, x(32, 24, dtype=F16)), shape=(2, 49, 24))
    task = x.task(apply("amax", total, axes=(1,), keepdims=False))
    assert TensorMatmulReduction().apply(GpuWork(task, H200)) is None, (
        "its columns are rows in memory, and 49 no vectors"
    )


@pytest.mark.gpu
@pytest.mark.skipif(not device.count(), reason="no NVIDIA GPU")
@pytest.mark.parametrize("name", CASES)
def test_it_is_right_on_a_card(name: str) -> None:
    task, machine = CASES[name](), detect()
    check_on_a_card(applied_to(task, machine), task, arrays_of(task), machine, 2e-3)
