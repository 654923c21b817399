"""Tile programs as CUDA text, on an emulated GPU: the ten kernels against NumPy, random programs against theirs, and
operations of their own. Shared memory is watched for races; what a missing barrier would do is shown on mutants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tilewright
import tilewright.tile as tl
from tests.codegen.cuda.tiles.cases import MAKERS, Case, dequant_case, matmul_case
from tests.codegen.cuda.tiles.emulated import Launch, build, launch, run, run_one
from tests.codegen.cuda.tiles.random_programs import check, check_matmuls
from tests.tile.kernels import random
from tilewright.testing.emulator.run import COMPILER, Complaint
from tilewright.tile.ir import Op, walk

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ here to compile the emulator with")


def _has_dots(case: Case) -> bool:
    return any(isinstance(node, Op) and node.name == "dot" for node in walk(case.launch().program.body))


@pytest.mark.parametrize("stages", [1, 3])
def test_the_ten_kernels(stages: int, tmp_path: Path) -> None:
    """With stages, those that have dots: their operands are copied ahead."""
    cases = [case for case in (make() for make in MAKERS) if stages == 1 or _has_dots(case)]
    launches = [case.launch(stages) for case in cases]
    if stages > 1:
        texts = [each.source().kernel for each in launches]
        assert all("copy_async<" in text or "copy_box(" in text for text in texts)
        assert sum("copy_box(" in text for text in texts) == 3, (
            "the matmuls with block pointers by warpgroups"
        )
    results = run(launches, tmp_path)
    for case, found in zip(cases, results, strict=True):
        case.check(found[case.result])


@pytest.mark.parametrize("first", [0, pytest.param(20, marks=pytest.mark.slow)])
def test_random_programs(first: int, tmp_path: Path) -> None:
    """Few of them; `python -m tests.tile.random_programs 2000 --target cuda` runs many."""
    check(range(first, first + 20), tmp_path)


def test_random_matmuls_by_warpgroups(tmp_path: Path) -> None:
    check_matmuls(range(3), tmp_path)


# -- operations --------------------------------------------------------------------------------------------------------


@tilewright.kernel
def along(x, total, best, where, sums, ordered, M: tl.constexpr, N: tl.constexpr, AXIS: tl.constexpr):
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    value = tl.load(x + at)
    kept = tl.arange(0, M) if AXIS == 1 else tl.arange(0, N)
    tl.store(total + kept, tl.sum(value, axis=AXIS))
    tl.store(best + kept, tl.max(value, axis=AXIS))
    tl.store(where + kept, tl.argmax(value, axis=AXIS))
    tl.store(sums + at, tl.cumsum(value, axis=AXIS))
    tl.store(ordered + at, tl.sort(value, axis=AXIS, descending=AXIS == 0))


@tilewright.kernel
def contract(
    a, b, out, B: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, TF32: tl.constexpr
):
    z, m = tl.arange(0, B)[:, None, None], tl.arange(0, M)[None, :, None]
    n, k = tl.arange(0, N)[None, None, :], tl.arange(0, K)
    x = tl.load(a + z * (M * K) + m * K + k[None, None, :])
    y = tl.load(b + z * (K * N) + k[None, :, None] * N + n)
    precision = "tf32" if TF32 else "ieee"
    tl.store(out + z * (M * N) + m * N + n, tl.dot(x, y, input_precision=precision))


@tilewright.kernel
def in_order(x, old, counts, N: tl.constexpr):
    """Stores and loads of one instance through different layouts: they happen in the order of the program."""
    n = tl.arange(0, N)
    tl.store(x + n, n)
    tl.store(x + n, tl.load(x + (N - 1 - n)) + 1)
    tl.store(x + (N - 1 - n), tl.load(x + (n ^ 33)))
    before = tl.atomic_add(counts + n % 4, n)
    tl.store(old + n, before * 0 + tl.load(counts + n // (N // 4)))
    one = tl.atomic_add(counts, 5)
    tl.store(counts + 1, one)


@tilewright.kernel
def swaps(x, y, n, N: tl.constexpr):
    """Carried values that change places, pointers that move, and a loop that ends by its data."""
    i = tl.arange(0, N)
    a, b, at = tl.load(x + i), tl.load(y + i), x + i
    steps = 0
    while steps < n:
        a, b = b, a
        at += 1
        steps += 1
    if steps > 2:
        b = b + 1
    tl.store(x + i, a)
    tl.store(y + i, b)


def _along(dtype: Any, axis: int, m: int, n: int, warps: int) -> tuple[Launch, dict[str, np.ndarray]]:
    x = np.random.default_rng(5).integers(0, 50, (m, n)).astype(dtype)
    if dtype is np.float32:
        x[0, 1] = x[min(3, m - 1), 3] = np.nan
    kept = m if axis == 1 else n
    sums = np.int32 if np.dtype(dtype).kind in "iu" and np.dtype(dtype).itemsize < 4 else dtype
    out = [np.empty(kept, sums), np.empty(kept, dtype), np.empty(kept, np.int32), np.empty((m, n), sums)]
    out.append(np.empty((m, n), dtype))
    wide = x.astype(np.float32) if np.dtype(dtype).itemsize == 2 and np.dtype(dtype).kind not in "iu" else x
    ordered = np.sort(wide, axis)
    wanted = {
        "total": wide.sum(axis, dtype=sums if np.dtype(sums).kind == "i" else np.float32).astype(sums),
        "best": wide.max(axis).astype(dtype),
        "where": wide.argmax(axis).astype(np.int32),
        "sums": np.cumsum(wide, axis, dtype=sums if np.dtype(sums).kind == "i" else np.float32).astype(sums),
        "ordered": (np.flip(ordered, 0) if axis == 0 else ordered).astype(dtype),
    }
    return launch(along, x, *out, M=m, N=n, AXIS=axis, warps=warps), wanted


def _contract(
    dtype: Any, sizes: tuple[int, int, int, int], warps: int, tf32: bool = False
) -> tuple[Launch, dict[str, np.ndarray]]:
    b, m, n, k = sizes
    low = 0 if dtype is np.uint8 else -8
    x, y = (
        np.random.default_rng(seed).integers(low, 9, shape).astype(dtype)
        for seed, shape in ((1, (b, m, k)), (2, (b, k, n)))
    )
    into = np.int32 if np.dtype(dtype).kind in "iu" else np.float64 if dtype is np.float64 else np.float32
    wanted = (x.astype(np.float64) @ y.astype(np.float64)).astype(into)
    made = launch(contract, x, y, np.empty((b, m, n), into), B=b, M=m, N=n, K=k, TF32=tf32, warps=warps)
    return made, {"out": wanted}


def _in_order() -> tuple[Launch, dict[str, np.ndarray]]:
    size = 128
    x, old, counts = np.zeros(size, np.int32), np.zeros(size, np.int32), np.zeros(4, np.int32)
    n = np.arange(size)
    wanted = np.empty(size, np.int32)
    wanted[size - 1 - n] = (n[::-1] + 1)[n ^ 33]
    sums = np.array([n[i::4].sum() for i in range(4)])
    after = np.array([sums[0] + 5, sums[0], *sums[2:]])
    made = launch(in_order, x, old, counts, N=size)
    return made, {"x": wanted, "old": sums[n // (size // 4)], "counts": after}


def _swaps(n: int) -> tuple[Launch, dict[str, np.ndarray]]:
    x, y = random(32), random(32, seed=1)
    a, b = (y, x) if n % 2 else (x, y)
    return launch(swaps, x, y, n, N=32, warps=1), {"x": a, "y": b + np.float32(n > 2)}


# In registers, over lanes and over warps; with NaN; of halves, whose sums are exact here.
OPERATIONS = (
    lambda: _along(np.float32, 1, 4, 256, 4),
    lambda: _along(np.float32, 0, 128, 4, 4),
    lambda: _along(np.int8, 1, 2, 64, 2),
    lambda: _along(np.float16, 0, 16, 8, 1),
    lambda: _along(ml_dtypes.bfloat16, 1, 1, 8, 4),
    lambda: _contract(np.float16, (1, 32, 64, 32), 4),
    lambda: _contract(ml_dtypes.bfloat16, (2, 16, 8, 16), 2),
    lambda: _contract(np.float32, (1, 32, 16, 16), 4, tf32=True),
    lambda: _contract(np.float32, (2, 16, 32, 8), 2),
    lambda: _contract(np.int8, (1, 16, 32, 64), 4),
    lambda: _contract(np.uint8, (1, 64, 8, 32), 1),
    lambda: _contract(np.float64, (1, 8, 8, 4), 1),
    lambda: _contract(np.int8, (2, 4, 4, 8), 1),
    _in_order,
    lambda: _swaps(0),
    lambda: _swaps(1),
    lambda: _swaps(3),
)


@pytest.mark.parametrize("descending", [False, True])
def test_operations(descending: bool, binary: tuple[Path, Path]) -> None:
    """Whatever the order of threads."""
    for number, make in enumerate(OPERATIONS):
        made, wanted = make()
        found = run_one(made, number, *binary, descending)
        for name, array in wanted.items():
            np.testing.assert_array_equal(
                found[name].astype(np.float64), array.astype(np.float64), err_msg=name
            )


@pytest.fixture(scope="module")
def binary(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """All operations in one."""
    folder = tmp_path_factory.mktemp("operations")
    return build([make()[0] for make in OPERATIONS], folder), folder


def test_a_missing_barrier_is_found(tmp_path: Path) -> None:
    names = ("softmax-256", "matmul_gelu-64x64x64-float16")
    made = [case.launch() for case in (make() for make in MAKERS) if case.name in names]
    program = build(made, tmp_path, ("__syncthreads();", ""))
    for number, each in enumerate(made):
        with pytest.raises(Complaint, match="since the last barrier"):
            run_one(each, number, program, tmp_path)


@pytest.mark.parametrize(
    ("old", "new"),
    [("await_copies<1>();", ""), ("await_copies<1>();", "await_copies<2>();"), ("commit_copies();", "")],
)
def test_copies_that_are_not_awaited_are_found(old: str, new: str, tmp_path: Path) -> None:
    case = next(case for case in (make() for make in MAKERS) if case.name == "batched_matmul-float16")
    made = case.launch(stages=3)
    program = build([made], tmp_path, (old, new))
    with pytest.raises(Complaint, match="asynchronous copy"):
        run_one(made, 0, program, tmp_path)


@pytest.mark.parametrize(
    ("kernel", "old", "new"),
    [
        # What is multiplied was not waited for; is overwritten while it is multiplied; is never told to be free; is
        # written by threads without a fence.
        ("matmul", "await_phase(", "if (t < 0) await_phase("),
        ("matmul", "await_multiplications_but_one();", ""),
        ("matmul", "if (started", "if (false && started"),
        ("dequant", "fence_for_warpgroups();", ""),
    ],
)
def test_multiplications_that_are_not_kept_apart_from_copies_are_found(
    kernel: str, old: str, new: str, tmp_path: Path
) -> None:
    if kernel == "dequant":
        case = dequant_case(64, 64, 64, (64, 64, 16))
    else:
        case = matmul_case(64, 64, 160, np.float16, (64, 64, 16), 4)
    made = case.launch(stages=3)
    program = build([made], tmp_path, (old, new))
    with pytest.raises((Complaint, AssertionError)):
        case.check(run_one(made, 0, program, tmp_path)[case.result])
