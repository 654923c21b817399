"""Tensor expressions that between them use every feature of the loop room, for the tests of loops and codegen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tilewright import te
from tilewright.dtypes import DType

F32, F64, I64, BOOL = DType.F32, DType.F64, DType.I64, DType.BOOL


@dataclass(frozen=True)
class Example:
    name: str
    make: Callable[[], tuple[te.Tensor, list[te.Tensor]]]


def tensor(name: str, *shape: int, dtype: DType = F32) -> te.Tensor:
    return te.Tensor(name, shape, dtype)


def matmul(m: int, n: int, k: int, dtype: DType = F32) -> tuple[te.Tensor, list[te.Tensor]]:
    a, b, bias = (
        tensor("a", m, k, dtype=dtype),
        tensor("b", k, n, dtype=dtype),
        tensor("bias", n, dtype=dtype),
    )
    (r,) = te.reduce_axes([k])
    product = te.compute("product", (m, n), dtype, lambda i, j: te.reduce_over("sum", a[i, r] * b[r, j], [r]))
    return te.compute("out", (m, n), dtype, lambda i, j: te.call("max", product[i, j] + bias[j], 0)), [
        a,
        b,
        bias,
    ]


def softmax(rows: int, columns: int, axis: int) -> tuple[te.Tensor, list[te.Tensor]]:
    x = tensor("x", rows, columns) if axis == 1 else tensor("x", columns, rows)
    (r,) = te.reduce_axes([columns])

    def at(row: te.Expr, column: te.Expr) -> te.Expr:
        return x[row, column] if axis == 1 else x[column, row]

    top = te.compute("top", (rows,), F32, lambda i: te.reduce_over("max", at(i, r), [r]))
    total = te.compute("total", (rows,), F32, lambda i: te.reduce_over("sum", at(i, r) - top[i], [r]))

    def element(i: te.Expr, j: te.Expr) -> te.Expr:
        row, column = (i, j) if axis == 1 else (j, i)
        return (at(row, column) - top[row]) / total[row]

    return te.compute("out", x.shape, F32, element), [x]


def group_statistics() -> tuple[te.Tensor, list[te.Tensor]]:
    """Read with `c // 3`: the axis has to be split before rows and columns can be distinguished."""
    x = tensor("x", 2, 6, 5)
    c, s = te.reduce_axes([3, 5])
    mean = te.compute("mean", (2, 2), F32, lambda n, g: te.reduce_over("sum", x[n, g * 3 + c, s], [c, s]))
    return te.compute("out", x.shape, F32, lambda n, i, j: x[n, i, j] - mean[n, i // 3]), [x]


def padded() -> tuple[te.Tensor, list[te.Tensor]]:
    x = tensor("x", 3, 7)

    def element(i: te.Expr, j: te.Expr) -> te.Expr:
        inside = te.all_of([te.call("le", te.as_index(2), j), te.call("lt", j, te.as_index(9))])
        assert inside is not None
        return te.select(inside, x[i, j - 2], -1.0)

    return te.compute("out", (3, 12), F32, element), [x]


def gathered() -> tuple[te.Tensor, list[te.Tensor]]:
    table, index = tensor("table", 10, 9), tensor("index", 5, dtype=I64)

    def element(i: te.Expr, j: te.Expr) -> te.Expr:
        row = te.call("min", te.call("max", index[i], 0), 9)
        return table[row, j]

    return te.compute("out", (5, 9), F32, element), [table, index]


def looked_up_by_lane() -> tuple[te.Tensor, list[te.Tensor]]:
    table, index = tensor("table", 10), tensor("index", 21, dtype=I64)
    return te.compute("out", (21,), F32, lambda i: table[te.call("min", te.call("max", index[i], 0), 9)]), [
        table,
        index,
    ]


def transposed() -> tuple[te.Tensor, list[te.Tensor]]:
    x = tensor("x", 19, 13)
    return te.compute("out", (13, 19), F32, lambda i, j: x[j, i] * 2.0), [x]


def window() -> tuple[te.Tensor, list[te.Tensor]]:
    x = tensor("x", 9, 9, 5)
    p, q = te.reduce_axes([3, 3])
    best = te.compute(
        "best", (4, 4, 5), F32, lambda i, j, c: te.reduce_over("max", x[i * 2 + p, j * 2 + q, c], [p, q])
    )
    return best, [x]


def iota() -> tuple[te.Tensor, list[te.Tensor]]:
    x = tensor("x", 4, 11)
    return te.compute("out", (4, 11), F32, lambda i, j: te.cast(i * 11 + j, F32) + x[i, j]), [x]


def first_largest() -> tuple[te.Tensor, list[te.Tensor]]:
    x = tensor("x", 7, 21)
    (r,) = te.reduce_axes([21])
    top = te.compute("top", (7,), F32, lambda i: te.reduce_over("max", x[i, r], [r]))
    (s,) = te.reduce_axes([21])
    far = te.const(99, I64)
    where = te.compute(
        "where",
        (7,),
        I64,
        lambda i: te.reduce_over("min", te.select(te.call("eq", x[i, s], top[i]), s, far), [s]),
    )
    return where, [x]


def halves(dtype: DType) -> tuple[te.Tensor, list[te.Tensor]]:
    x, y = tensor("x", 5, 23, dtype=dtype), tensor("y", 23, dtype=dtype)
    scaled = te.compute("scaled", (5, 23), dtype, lambda i, j: x[i, j] * y[j])
    return te.compute("out", (5, 23), dtype, lambda i, j: scaled[i, j] + x[i, j]), [x, y]


def integers(dtype: DType) -> tuple[te.Tensor, list[te.Tensor]]:
    x, y = tensor("x", 37, dtype=dtype), tensor("y", 37, dtype=dtype)
    return te.compute("out", (37,), dtype, lambda i: te.call("max", x[i] + y[i] * 3, x[i])), [x, y]


def any_true() -> tuple[te.Tensor, list[te.Tensor]]:
    x = tensor("x", 6, 19)
    (r,) = te.reduce_axes([19])
    return te.compute(
        "out", (6,), BOOL, lambda i: te.reduce_over("any", te.call("lt", te.const(1.5, F32), x[i, r]), [r])
    ), [x]


EXAMPLES = [
    Example("matmul", lambda: matmul(13, 37, 20)),
    Example("matmul_row", lambda: matmul(1, 70, 33)),
    Example("matmul_narrow", lambda: matmul(9, 3, 8)),
    Example("matmul_f64", lambda: matmul(7, 21, 16, F64)),
    Example("softmax_last", lambda: softmax(5, 43, 1)),
    Example("softmax_first", lambda: softmax(21, 6, 0)),
    Example("softmax_short", lambda: softmax(4, 3, 1)),
    Example("group_statistics", group_statistics),
    Example("padded", padded),
    Example("gathered", gathered),
    Example("looked_up_by_lane", looked_up_by_lane),
    Example("transposed", transposed),
    Example("window", window),
    Example("iota", iota),
    Example("first_largest", first_largest),
    Example("f16", lambda: halves(DType.F16)),
    Example("bf16", lambda: halves(DType.BF16)),
    Example("i8", lambda: integers(DType.I8)),
    Example("u8", lambda: integers(DType.U8)),
    Example("i32", lambda: integers(DType.I32)),
    Example("i64", lambda: integers(DType.I64)),
    Example("any_true", any_true),
]
