"""`tilewright.tune_triton`: kernels of Triton, in its interpreter here, on a GPU where there is one."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import tilewright
from tilewright.dtypes import DType
from tilewright.errors import AutotuneError, KernelNameError
from tilewright.tile.ir import Pointer, TileType
from tilewright.tune.triton_kernels import stored_parameters
from tilewright.tune.triton_source import read_as_tile_kernel

KERNELS = """
import sys
from pathlib import Path

import torch
import triton
import triton.language as tl

import tilewright
from tilewright.errors import AutotuneError, ReferenceMismatchError

DEVICE = sys.argv[2]
ONE = tl.constexpr(1.0)


@triton.jit
def shifted(x, by):
    return x + by


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr, WRONG: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    total = tl.load(x + at, mask=inside) + tl.load(y + at, mask=inside)
    if WRONG:
        total = shifted(total, ONE)
    tl.store(out + at, total, mask=inside)


def grid(meta):
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


n = 3000
x, y = torch.randn(n, device=DEVICE), torch.randn(n, device=DEVICE)
out = torch.zeros(n, device=DEVICE)
db = Path(sys.argv[1]) / "tuning.db"
space = {"BLOCK": (1024, 256, 512, 300), "WRONG": (False, True), "num_warps": (4, 8)}
fast = tilewright.tune_triton(add, space, key=["n"], reference=lambda x, y: x + y, db=db)
fast[grid](x, y, out, n)
assert torch.allclose(out, x + y) and not db.exists(), "a launch measures nothing"
out.zero_()
tuned = fast.tune(grid, x, y, out, n, effort="full", budget=100, trials=16)
assert not out.any(), "tensors are not written to"
print(tuned)
assert tuned.origin.kind == "tuned" and not tuned.config["WRONG"] and tuned.config["BLOCK"] != 300
assert set(tuned.failures) <= {"wrong", "build"} and tuned.failures, tuned.failures
again = tilewright.tune_triton(add, space, key=["n"], db=db)
assert again.best(grid, x, y, out, n) == tuned.config, "the winner is kept"

small = tilewright.tune_triton(add, {"BLOCK": (512, 1024), "WRONG": (False, True)}, key=["n"], db=db.with_name("b.db"))
tuned = small.tune(grid, x, y, out, n, budget=60)
assert not tuned.config["WRONG"], "without a reference, configs must agree with the default"

bad = tilewright.tune_triton(add, {"BLOCK": (512, 1024)}, ["n"], lambda x, y: x - y, db=db.with_name("c.db"))
try:
    bad.tune(grid, x, y, out, n, WRONG=False, budget=60, trials=2)
except ReferenceMismatchError as error:
    print(error)
else:
    raise AssertionError("a reference that disagrees")
print("done")
"""


def run(folder: Path, device: str, **environment: str) -> str:
    script = folder / "kernels_of_triton.py"
    script.write_text(KERNELS)
    command = [sys.executable, str(script), str(folder), device]
    root = str(Path(tilewright.__file__).parents[1])
    found = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": root, **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_in_the_interpreter_of_triton(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    assert "done" in run(tmp_path, "cpu", TRITON_INTERPRET="1")


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    assert "done" in run(tmp_path, "cuda")


def test_what_is_no_kernel_of_triton() -> None:
    with pytest.raises(AutotuneError, match=r"needs a kernel of @triton\.jit"):
        tilewright.tune_triton(print, {"BLOCK": (1,)})


def _as_triton(function: Any) -> Any:
    """As if `tl` were Triton's language, and the function under @triton.jit."""
    names = {**function.__globals__, "tl": types.ModuleType("triton.language")}
    return types.FunctionType(function.__code__, names, function.__name__)


def row_sum(x, out, columns, BLOCK):
    n = tl.arange(0, BLOCK)  # noqa: F821
    total = tl.sum(tl.load(x + n, mask=n < columns, other=0.0), axis=0)  # noqa: F821
    tl.store(out, total)  # noqa: F821


def uses_inline_assembly(x, out, columns, BLOCK):
    tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tl.load(x)], tl.int32, False, 1)  # noqa: F821


def test_a_kernel_of_triton_is_read_as_tiles() -> None:
    kernel = read_as_tile_kernel(_as_triton(row_sum))
    assert kernel is not None
    constants = {"BLOCK": 64}
    pointer, number = TileType(Pointer(DType.F32)), TileType(DType.I32)
    program = kernel.specialise({"x": pointer, "out": pointer, "columns": number}, constants)
    assert "reduce" in str(program) and "f32[64]" in str(program)
    unknown = read_as_tile_kernel(_as_triton(uses_inline_assembly))
    assert unknown is not None
    with pytest.raises(KernelNameError):
        unknown.specialise({"x": pointer, "out": pointer, "columns": number}, constants)


def test_which_parameters_are_stored_to() -> None:
    def kernel(x: Any, out: Any, other: Any, count: Any, n: Any) -> None:
        at = out + n
        value = tl.load(x + tl.load(other))  # noqa: F821
        for _ in range(n):
            tl.store(at, value)  # noqa: F821
            at += n
        tl.atomic_add(count, 1)  # noqa: F821

    assert stored_parameters(kernel) - {"n"} == {"out", "count"}


def _store_plainly(at: Any, value: Any) -> None:
    tl.store(at, value)  # noqa: F821


_store = types.SimpleNamespace(fn=_store_plainly)  # as @triton.jit makes one


def _store_later(value: Any, at: Any) -> None:
    if value:
        _store(at=at + 1, value=value)


def test_stores_by_descriptors_by_keyword_and_in_called_functions_count() -> None:
    def by_descriptor(x: Any, out: Any, n: Any) -> None:
        source = tl.make_tensor_descriptor(x, shape=[n], strides=[1], block_shape=[8])  # noqa: F821
        into = tl.make_tensor_descriptor(out, shape=[n], strides=[1], block_shape=[8])  # noqa: F821
        into.store([n], source.load([n]))

    def by_keyword(x: Any, out: Any, count: Any) -> None:
        tl.store(value=tl.load(x), pointer=out + 1)  # noqa: F821
        tl.atomic_add(pointer=count, val=1)  # noqa: F821

    def by_function(x: Any, out: Any, count: Any) -> None:
        _store(out + 1, tl.load(x))  # noqa: F821
        helper(tl.load(x), count)  # noqa: F821

    helper = types.SimpleNamespace(fn=_store_later)

    def by_helper(x: Any, out: Any, n: Any) -> None:
        helper(tl.load(x), at=out)  # noqa: F821

    assert stored_parameters(by_descriptor) - {"n"} == {"out"}
    assert stored_parameters(by_keyword) == {"out", "count"}
    assert stored_parameters(by_function) == {"out", "count"}
    assert stored_parameters(by_helper) == {"out"}


def test_a_pointer_through_several_names_counts() -> None:
    def kernel(x: Any, out: Any, n: Any) -> None:
        a = b = c = d = n
        for _ in range(n):
            tl.store(d, tl.load(x))  # noqa: F821
            d = c
            c = b
            if n:
                b = a
                a = out

    assert stored_parameters(kernel) - {"n"} == {"out"}
