"""Matmuls with an epilogue, in every transposition, for the tests of the tensor-core templates."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright import te
from tilewright.dtypes import DType


@dataclass(frozen=True)
class Product:
    m: int
    n: int
    k: int
    batch: int = 1
    transposed_a: bool = False  # a is stored [k, m]
    transposed_b: bool = True  # b is stored [k, n]; else [n, k], as the weight of a linear layer
    dtype: DType = DType.F16
    epilogue: bool = True

    @property
    def name(self) -> str:
        letters = ("T" if self.transposed_a else "N") + ("N" if self.transposed_b else "T")
        return f"{self.batch}x{self.m}x{self.n}x{self.k}-{letters}-{self.dtype.short}"

    def expression(self) -> tuple[te.Tensor, list[te.Tensor]]:
        """relu(a @ b + bias) + residual, or a @ b alone."""
        g, m, n, k, dtype = self.batch, self.m, self.n, self.k, self.dtype
        a = te.Tensor("a", (g, k, m) if self.transposed_a else (g, m, k), dtype)
        b = te.Tensor("b", (g, k, n) if self.transposed_b else (g, n, k), dtype)
        bias, residual = te.Tensor("bias", (n,), dtype), te.Tensor("residual", (g, m, n), dtype)
        (r,) = te.reduce_axes([k])

        def element(h: te.Expr, i: te.Expr, j: te.Expr) -> te.Expr:
            left = a[h, r, i] if self.transposed_a else a[h, i, r]
            right = b[h, r, j] if self.transposed_b else b[h, j, r]
            return te.reduce_over("sum", left * right, [r])

        total = te.compute("total", (g, m, n), DType.F32, element)
        if not self.epilogue:
            return te.compute("out", (g, m, n), dtype, lambda h, i, j: total[h, i, j]), [a, b]

        def finished(h: te.Expr, i: te.Expr, j: te.Expr) -> te.Expr:
            return te.call("max", total[h, i, j] + bias[j], 0.0) + residual[h, i, j]

        return te.compute("out", (g, m, n), dtype, finished), [a, b, bias, residual]


PRODUCTS = [
    Product(128, 128, 64),
    Product(256, 192, 320, transposed_b=False),
    Product(100, 72, 40, batch=3, transposed_a=True),
    Product(100, 72, 40, batch=3, transposed_a=True, transposed_b=False, dtype=DType.BF16),
    Product(127, 769, 511),
    Product(127, 769, 511, transposed_b=False),
    Product(33, 50, 66, transposed_a=True),
    Product(34, 52, 68, batch=2, dtype=DType.BF16),
    Product(1, 64, 256, transposed_b=False),
    Product(197, 197, 64, batch=2, transposed_b=False, epilogue=False),
]
