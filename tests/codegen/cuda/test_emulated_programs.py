"""CUDA C++ that is emitted from loop programs, on the emulated GPU: default schedules and sketches, without a card."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tests.codegen.cuda.judge import MAX_CASES
from tests.loops.gpu.products import Product
from tests.loops.test_goldens import softmax
from tests.programs import GPU, GPU_SKETCHES, default_program, gpu_kernel, validation
from tests.space.checked import Inputs
from tests.space.sketches.cuda.tasks import product_task
from tilewright.codegen.cuda.build import source_of
from tilewright.dtypes import DType
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.loops.ir import Program
from tilewright.testing.emulator.run import COMPILER, Emulated, check

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ here to compile the emulator with")
F16, BF16, F32 = DType.F16, DType.BF16, DType.F32


def bias_gelu() -> Task:
    x = Inputs()
    return x.task(apply("gelu", apply("add", x(7, 45, dtype=F16), x(45, dtype=F16)), approximate="none"))


def transposed() -> Task:
    x = Inputs()
    return x.task(apply("permute", x(70, 45, dtype=F16), axes=(1, 0)))


def column_sums() -> Task:
    x = Inputs()
    return x.task(apply("sum", x(37, 50), axes=(0,), keepdims=False))


def variance(rows: int, columns: int) -> Task:
    x = Inputs()
    data = x(rows, columns)
    apart = apply("sub", data, apply("mean", data, axes=(1,), keepdims=True))
    return x.task(apply("mean", apply("mul", apart, apart), axes=(1,), keepdims=False))


DEFAULTS: dict[str, Callable[[], Task]] = {
    "bias-gelu": bias_gelu,
    "transposed": transposed,
    "columns-sum": column_sums,
    "softmax-in-a-warp": lambda: softmax(5, 43),
    "softmax-f16": lambda: softmax(3, 1000, F16),
    "variance-of-few-long-rows": lambda: variance(2, 20_000),
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_default_program_computes_the_task(name: str, tmp_path: Path) -> None:
    task = DEFAULTS[name]()
    check(source_of(default_program(task, GPU)), validation(task, "fast")[:MAX_CASES], tmp_path)


def test_rows_that_share_a_block_on_a_small_card(tmp_path: Path) -> None:
    task = softmax(16, 37, F16)
    program = default_program(task, replace(GPU, sms=1))
    assert "in shared memory" in program.decisions
    check(source_of(program), validation(task, "fast")[:MAX_CASES], tmp_path)


SMALL = {"bm": 16, "bn": 32, "wm": 16, "wn": 16, "bk": 32}
SKETCHES: list[tuple[str, str, Callable[[], Task], dict[str, object]]] = [
    ("tensorised", "nt", lambda: product_task(Product(9, 20, 40, transposed_b=False)),
     {**SMALL, "stages": 2, "prefetch": True, "instruction_k": 16}),
    ("tensorised", "tn-bf16", lambda: product_task(Product(12, 24, 36, transposed_a=True, dtype=BF16)),
     {**SMALL, "stages": 3, "prefetch": False, "instruction_k": 8}),
    ("tensorised", "batch", lambda: product_task(Product(5, 17, 21, batch=2)),
     {**SMALL, "stages": 1, "prefetch": False, "instruction_k": 16}),
    ("tensorised", "inner", lambda: product_task(Product(9, 20, 70)),
     {**SMALL, "stages": 3, "prefetch": True, "fused": False, "instruction_k": 16}),
    ("tensorised", "registers", lambda: product_task(Product(9, 20, 70)),
     {**SMALL, "stages": 1, "prefetch": True, "instruction_k": 16}),
    ("warpgroups", "borders", lambda: product_task(Product(100, 72, 136, transposed_b=False)),
     {"bm": 128, "bn": 64, "stages": 3, "roles": True}),
    ("warpgroups", "one-role", lambda: product_task(Product(70, 65, 200, dtype=BF16, transposed_b=False)),
     {"bm": 64, "bn": 64, "stages": 2, "roles": False}),
    ("warpgroups", "batch", lambda: product_task(Product(24, 40, 72, batch=2, transposed_b=False)),
     {"bm": 64, "bn": 64, "stages": 2, "roles": True}),
    ("tiled", "f32", lambda: product_task(Product(20, 40, 30, dtype=F32)), {}),
    ("tiled", "both", lambda: product_task(Product(20, 40, 30, dtype=F32)),
     {"stages": 3, "prefetch": True, "fused": True}),
    ("block-reduction", "f16", lambda: product_task(Product(3, 8, 600, epilogue=False)), {}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("sketch", "task", "values"),
    [pytest.param(sketch, task, values, id=f"{sketch}-{label}") for sketch, label, task, values in SKETCHES],
)
def test_a_sketch_computes_the_task(
    sketch: str, task: Callable[[], Task], values: dict[str, object], tmp_path: Path
) -> None:
    _, program = gpu_kernel(GPU_SKETCHES[sketch], task(), values)
    assert isinstance(program, Program)
    check(source_of(program), validation(task(), "fast")[:MAX_CASES], tmp_path)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=lambda dtype: dtype.short)
def test_conversions_are_those_of_numpy(dtype: DType, tmp_path: Path) -> None:
    """Of the emulator itself: every exponent, ties, subnormals, infinities."""
    rng = np.random.default_rng(0)
    values = np.ldexp(rng.uniform(-2, 2, 4096), rng.integers(-30, 20, 4096)).astype(np.float32)
    exact = np.arange(2048, dtype=np.uint16).view(dtype.numpy).astype(np.float32)
    with np.errstate(over="ignore"):
        ties = ((exact[1:] + exact[:-1]) / 2).astype(np.float32)
        values = np.concatenate(
            [values, exact, ties, np.array([np.inf, -np.inf, 65519, 65520, 0, -0.0, 1e-9], np.float32)]
        )
        x = Inputs()
        task = x.task(apply("cast", x(values.size), dtype=dtype))
        (got,) = Emulated(source_of(default_program(task, GPU)), tmp_path)([[values]])
        expected = values.astype(ml_dtypes.bfloat16 if dtype is BF16 else np.float16)
    np.testing.assert_array_equal(got.view(np.uint16), expected.view(np.uint16))
