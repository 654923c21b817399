"""Schedules for GPUs, written with the primitives: a matmul on tensor cores, and one on ordinary units."""

from __future__ import annotations

import numpy as np

from tilewright import te
from tilewright.dtypes import DType
from tilewright.hw.tensor_cores import load_left, load_right, multiply
from tilewright.hw.warpgroups import warpgroup_multiply
from tilewright.loops.schedule import Schedule

F16, BF16, F32 = DType.F16, DType.BF16, DType.F32
Task = tuple[te.Tensor, list[te.Tensor]]
DEPTH = 16  # of the instruction


def matmul(m: int, n: int, k: int, dtype: DType = F16) -> Task:
    a, b = te.Tensor("a", (m, k), dtype), te.Tensor("b", (n, k), dtype)
    (r,) = te.reduce_axes([k])
    product = te.compute("product", (m, n), F32, lambda i, j: te.reduce_over("sum", a[i, r] * b[j, r], [r]))
    return te.compute("out", (m, n), dtype, lambda i, j: te.cast(product[i, j], dtype)), [a, b]


def fetched(schedule: Schedule, tile: str, threads: int, lanes: int) -> Schedule:
    """The loops of a copy among all threads of a block, `lanes` neighbours each."""
    schedule = schedule.split(f"{tile}.i1", lanes).fuse(f"{tile}.i0", f"{tile}.i1.o", into=f"{tile}.f")
    schedule = schedule.split(f"{tile}.f", threads).vectorise(f"{tile}.i1.i")
    schedule = schedule.reorder(f"{tile}.f.i", f"{tile}.f.o").unroll(f"{tile}.f.o")
    return schedule.bind(f"{tile}.f.i", "thread.x")


def tensorised(
    shape: tuple[int, int, int],
    block: tuple[int, int, int] = (32, 16, 32),
    warp: tuple[int, int] = (16, 16),
    stages: int = 1,
    registers: int = 1,
    swizzled: bool = True,
) -> Schedule:
    """out = a b' with `mma.sync`: blocks, warps, tiles in shared memory and fragments in registers."""
    (bm, bn, bk), (wm, wn) = block, warp
    threads = 32 * (bm // wm) * (bn // wn)
    s = Schedule.of(*matmul(*shape)).tile(["out.i0", "out.i1"], [bm, bn])
    s = s.compute_at("product", "out.i1.o").set_scope("product", "register")
    s = s.split("product.r0", bk).split("product.r0.i", DEPTH)
    s = s.split("product.i0", wm).split("product.i0.i", 16).split("product.i1", wn).split("product.i1.i", 8)
    outer = ("r0.o", "i0.o", "i1.o", "r0.i.o", "i0.i.o", "i1.i.o", "i0.i.i", "i1.i.i", "r0.i.i")
    s = s.reorder(*(f"product.{loop}" for loop in outer))
    for name, rows, load in (("a", 16, load_left(DEPTH, F16)), ("b", 8, load_right(DEPTH, F16))):
        tile, held = f"{name}.of.product", f"{name}.of.product.of.product"
        s = s.cache_read(name, "product", "shared").cache_read(tile, "product", "register")
        s = s.compute_at(held, "product.r0.i.o").compute_at(tile, "product.r0.o")
        s = s.swizzle(tile) if swizzled else s
        s = s.split(f"{held}.i0", rows).unroll(f"{held}.i0.o").tensorise(f"{held}.i0.i", load)
        s = fetched(s, tile, threads, 8)
    s = s.bind("product.i0.o", "warp.y").bind("product.i1.o", "warp.x")
    s = s.unroll("product.i0.i.o").unroll("product.i1.i.o").tensorise("product.i0.i.i", multiply(DEPTH, F16))
    s = s.split("out.i0.i", wm).split("out.i0.i.i", 16).split("out.i1.i", wn).split("out.i1.i.i", 8)
    order = ("i0.i.o", "i1.i.o", "i0.i.i.o", "i1.i.i.o", "i0.i.i.i", "i1.i.i.i")
    s = s.reorder(*(f"out.{loop}" for loop in order))
    s = s.bind("out.i0.i.o", "warp.y").bind("out.i1.i.o", "warp.x")
    s = (
        s.unroll("out.i0.i.i.o")
        .unroll("out.i1.i.i.o")
        .bind("out.i0.o", "block.y")
        .bind("out.i1.o", "block.x")
    )
    for name in "ab":
        s = s.pipeline(f"{name}.of.product", stages) if stages > 1 else s
        s = s.pipeline(f"{name}.of.product.of.product", registers) if registers > 1 else s
    return s


def padded(x: te.Tensor, rows: int, columns: int) -> te.Tensor:
    """`x` with zeros behind its rows and columns, for tiles that reach beyond them."""
    zero = te.cast(te.const(0, x.dtype.compute), x.dtype)

    def value(i: te.Expr, j: te.Expr) -> te.Expr:
        edges = [(i, x.shape[0], rows), (j, x.shape[1], columns)]
        inside = te.all_of([te.call("lt", at, te.as_index(n)) for at, n, whole in edges if whole > n])
        return te.Load(x, (i, j)) if inside is None else te.select(inside, te.Load(x, (i, j)), zero)

    return te.compute(f"{x.name}.tile", (rows, columns), x.dtype, value)


def relu_of_matmul(shape: tuple[int, int, int], block: tuple[int, int, int], dtype: DType = F16) -> Task:
    """relu(a b' + bias), of matrices with zeros behind their edges: sizes need not be multiples of the block's."""
    m, n, k = shape
    rows, columns, deep = (-(-size // tile) * tile for size, tile in zip(shape, block, strict=True))
    a, b = te.Tensor("a", (m, k), dtype), te.Tensor("b", (n, k), dtype)
    bias = te.Tensor("bias", (n,), dtype)
    left, right = padded(a, rows, deep), padded(b, columns, deep)
    (r,) = te.reduce_axes([deep])
    product = te.compute(
        "product", (rows, columns), F32, lambda i, j: te.reduce_over("sum", left[i, r] * right[j, r], [r])
    )

    def result(i: te.Expr, j: te.Expr) -> te.Expr:
        total = product[i, j] + te.cast(bias[j], F32)
        return te.cast(te.call("max", total, te.const(0.0, F32)), dtype)

    return te.compute("out", (m, n), dtype, result), [a, b, bias]


def warpgroups(
    shape: tuple[int, int, int],
    block: tuple[int, int, int] = (128, 64, 64),
    stages: int = 3,
    dtype: DType = F16,
    *,
    specialise: bool = True,
    copy: str = "bulk",
    cluster: int = 1,
    in_turn: bool = False,
) -> Schedule:
    """`relu_of_matmul` with `wgmma`, 64 rows of results for each warpgroup, and tiles that the copy engine brings.
    `in_turn`: a block computes all tiles of its rows, one after the other."""
    bm, bn, bk = block
    s = Schedule.of(*relu_of_matmul(shape, block, dtype))
    s = s.tile(["out.i0", "out.i1"], [bm, bn], tail="guard").split("out.i0.i", 64)
    s = s.compute_at("product", "out.i1.o").set_scope("product", "register")
    s = s.split("product.r0", bk).split("product.r0.i", DEPTH).split("product.i0", 64)
    s = s.reorder(*(f"product.{loop}" for loop in ("r0.o", "i0.o", "r0.i.o", "i0.i", "i1", "r0.i.i")))
    for tile in ("a.tile", "b.tile"):
        s = s.set_scope(tile, "shared").compute_at(tile, "product.r0.o").swizzle(tile)
    s = s.bind("product.i0.o", "warpgroup.x").unroll("product.r0.i.o")
    s = s.tensorise("product.i0.i", warpgroup_multiply(bn, dtype)).bind("out.i0.i.o", "warpgroup.x")
    s = s.bind("out.i0.o", "block.y")
    s = s if in_turn else s.bind("out.i1.o", "block.x")
    for tile in ("a.tile", "b.tile"):
        s = s.pipeline(tile, stages, copy=copy, specialise=specialise, cluster=cluster)
    return s


def simt(shape: tuple[int, int, int], stages: int = 1, registers: int = 1) -> Schedule:
    """out = a b' in fp32 on ordinary units: 8 x 8 threads with 2 x 2 results each, steps of 8."""
    s = Schedule.of(*matmul(*shape, F32)).tile(["out.i0", "out.i1"], [16, 16])
    s = s.compute_at("product", "out.i1.o").set_scope("product", "register")
    s = s.split("product.r0", 8).tile(["product.i0", "product.i1"], [2, 2])
    s = s.reorder(*(f"product.{loop}" for loop in ("r0.o", "i0.o", "i1.o", "r0.i", "i0.i", "i1.i")))
    for name in "ab":
        tile, held = f"{name}.of.product", f"{name}.of.product.of.product"
        s = s.cache_read(name, "product", "shared").cache_read(tile, "product", "register")
        s = s.compute_at(held, "product.r0.i").compute_at(tile, "product.r0.o")
        s = fetched(s.unroll(f"{held}.i0"), tile, 64, 2)
    s = s.bind("product.i0.o", "thread.y").bind("product.i1.o", "thread.x")
    s = s.unroll("product.i0.i").unroll("product.i1.i")
    s = s.tile(["out.i0.i", "out.i1.i"], [2, 2]).bind("out.i0.i.o", "thread.y").bind("out.i1.i.o", "thread.x")
    s = s.unroll("out.i0.i.i").unroll("out.i1.i.i").bind("out.i0.o", "block.y").bind("out.i1.o", "block.x")
    for name in "ab":
        s = s.pipeline(f"{name}.of.product", stages) if stages > 1 else s
        s = s.pipeline(f"{name}.of.product.of.product", registers) if registers > 1 else s
    return s


def operands(shape: tuple[int, int, int], dtype: DType = F16) -> list[np.ndarray]:
    m, n, k = shape
    rng = np.random.default_rng(0)
    return [rng.integers(-3, 4, (rows, k)).astype(dtype.numpy) for rows in (m, n)]


def product_of(arrays: list[np.ndarray]) -> np.ndarray:
    a, b = (array.astype(np.float64) for array in arrays)
    return a @ b.T
