"""GEMMs by a constant as rows of K: one row for each row of a matrix or each pixel of a convolution's result.

    out[row, vector] = epilogue(sum over outer and run of data[row, outer, run] * weight[outer, run, vector])

Whatever axes its rows have, one number counts them: templates that copy rows before they use them need no more.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from tilewright import te
from tilewright.dtypes import DType
from tilewright.loops.ir import Buffer
from tilewright.loops.tiling import counted_by, extent_of
from tilewright.space.templates.cpu.gemm import Gemm
from tilewright.te.index import coefficient


@dataclass(frozen=True)
class RowGemm:
    gemm: Gemm

    @cached_property
    def row(self) -> te.Var:
        rows = self.gemm.rows
        return rows[0] if len(rows) == 1 else te.Var("row", extent_of(rows))

    @property
    def outer(self) -> tuple[te.Var, ...]:
        """K but the last: a window's."""
        return self.gemm.k_axes[:-1]

    @property
    def run(self) -> te.Var:
        """The last of K, which lie after each other in the data."""
        return self.gemm.k_axes[-1]

    @cached_property
    def data(self) -> te.Expr:
        return self._by_row(self.gemm.data)

    @cached_property
    def store(self) -> te.Expr:
        return self._by_row(self.gemm.formula.store)

    @cached_property
    def value(self) -> te.Expr:
        return self._by_row(self.gemm.formula.value)

    @property
    def lies_in_rows(self) -> bool:
        """Whether the data is a matrix, its rows after each other."""
        load = self.data
        return (
            not self.outer
            and isinstance(load, te.Load)
            and coefficient(load.indices[0], self.row) == self.run.extent
        )

    @cached_property
    def data_bytes(self) -> int:
        """The bytes of the data that are read, each element once."""
        (load,) = te.loads(self.data)
        assert isinstance(load.source, Buffer)
        return min(load.source.size, self.row.extent * self.gemm.length) * load.dtype.bytes

    def _by_row(self, expr: te.Expr) -> te.Expr:
        rows = self.gemm.rows
        return expr if len(rows) == 1 else counted_by(self.row, rows, expr)


def row_gemm_of(gemm: Gemm | None) -> RowGemm | None:
    """None where it is not a product of float32 by a constant, where rows are not read in runs, or where they are
    computed: a border of zeros is all that there may be."""
    if gemm is None or type(gemm) is not Gemm or gemm.shared or not gemm.rows:
        return None
    data, weight = gemm.data, gemm.weight
    if not gemm.constant_weight or weight != gemm.weight_load:
        return None
    run = gemm.k_axes[-1]
    if isinstance(data, te.Select):
        if run in te.variables(data.cond) or data.other != te.const(0.0, DType.F32):
            return None
        data = data.then
    dtypes = {data.dtype, weight.dtype, gemm.reduction.result.dtype}
    if not isinstance(data, te.Load) or dtypes != {DType.F32} or coefficient(data.indices[0], run) != 1:
        return None
    return RowGemm(gemm)
