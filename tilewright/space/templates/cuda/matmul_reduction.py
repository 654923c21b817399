"""Matmuls on tensor cores fused with a row or column reduction of their results, which are never stored.

    out[part, n] = sum, mean, highest or lowest of epilogue(a @ b)[rows of the part, n]
    out[m, part] = the same of epilogue(a @ b)[m, columns of the part]

An example is a global average pool after a convolution. A part has at most as many rows or columns as a tile; longer
reductions are combined by another kernel (`space/decompositions/fused_reduction.py`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from tilewright import te
from tilewright.dtypes import DType
from tilewright.graph.combined import KINDS, Combined, combined_of
from tilewright.graph.ir import Graph
from tilewright.graph.task import Task
from tilewright.hw.gpu import GpuMachine
from tilewright.loops.gpu.tensor import MatrixTiles, ReducedOutput, TensorGemm
from tilewright.loops.gpu.thread_index import step_of
from tilewright.loops.ir import Buffer, Kind, Scope, Stmt, Store, nest
from tilewright.loops.tiling import with_values
from tilewright.numerics import may_round_to_tf32
from tilewright.space.space import Config, Knob, Space
from tilewright.space.template import Applied, GpuTerms, GpuWork, normal_form
from tilewright.space.templates.cuda.matmul import (
    gemm,
    is_legal,
    multiplied,
    result_of,
    terms_of,
    tiles_of,
)
from tilewright.space.templates.cuda.matrices import LANES, MatrixWork, matrix_work
from tilewright.support.batch import Truth, Values
from tilewright.te.index import linear

NAME = "tensor-core-matmul-reduction"
MAX = 256  # maximum rows or columns of a tile
_TILES = (16, 32, 64, 128, 256)
_BYTES = 4  # of an accumulator


class TensorMatmulReduction:
    name = NAME

    def apply(self, work: GpuWork) -> Applied | None:
        found = combined_of(work.task.output, strict=work.numerics == "strict")
        if found is None or found.size > MAX or found.producer.is_input:
            return None
        task = Task(Graph(work.task.graph.inputs, (found.producer,)), work.task.constants)
        formula = normal_form(task, work.numerics)
        if formula is None:
            return None
        matrices = matrix_work(formula, may_round_to_tf32(work.numerics), multiplied(task))
        if matrices is None or matrices.batch or not _is_by_rows(matrices, found):
            return None
        if not _is_aligned(matrices, found):
            return None
        return AppliedMatmulReduction(
            matrices, found, work.task.output.dtype, work.machine, work.numerics == "strict"
        )


def _is_by_rows(work: MatrixWork, found: Combined) -> bool:
    """Whether the reduced rows and columns are those of the product, in the same order."""
    terms = linear(work.formula.store).terms
    m, n, _ = work.sizes
    combined = found.size * found.parts
    counted = (m, n) == ((found.other_size, combined) if found.along else (combined, found.other_size))
    return counted and step_of(terms, work.n) == 1 and step_of(terms, work.m) == n and bool(work.m)


def _is_aligned(work: MatrixWork, found: Combined) -> bool:
    """Whether a tile begins at an index where its operand can be read in vectors."""
    operand = work.right if found.along else work.left
    return found.parts == 1 or not operand.transposed or found.size % operand.lanes == 0


class AppliedMatmulReduction:
    def __init__(
        self, work: MatrixWork, of: Combined, dtype: DType, machine: GpuMachine, strict: bool
    ) -> None:
        self.work, self.of, self.dtype, self.machine, self.strict = work, of, dtype, machine, strict

    @cached_property
    def space(self) -> Space:
        m, n, k = self.work.sizes
        one = (next(tile for tile in _TILES if tile >= self.of.size),)  # one tile per part
        rows = tuple(tile for tile in _TILES if tile < 2 * m or tile == _TILES[0])
        columns = tuple(tile for tile in _TILES[1:] if tile < 2 * n or tile == _TILES[1])
        block_ks = tuple(bytes // self.work.size for bytes in (64, 128))
        return Space(
            NAME,
            (
                Knob("bm", rows if self.of.along else one),
                Knob("bn", (max(one[0], _TILES[1]),) if self.of.along else columns),
                Knob("bk", tuple(bk for bk in block_ks if bk < 2 * k or bk == block_ks[0])),
                Knob("warps_m", (1, 2, 4)),
                Knob("warps_n", (1, 2, 4)),
                Knob("stages", tuple(count for count in (2, 3, 4, 6) if count <= 2 + -(-k // 64))),
            ),
            self._legal,
            together=(("bm", "bn", "bk", "warps_m", "warps_n", "stages"),),
            batched=True,
        )

    @cached_property
    def lanes(self) -> int:
        neighbours = self.of.size if self.of.along else self.of.other_size
        return next(lanes for lanes in LANES if neighbours % lanes == 0)

    def _legal(self, values: Values) -> Truth:
        tiles = tiles_of(self.work, values)
        fits = tiles.threads * self.lanes * _BYTES <= tiles.shared_bytes
        return fits & is_legal(self.work, tiles, self.machine)

    def program(self, config: Config) -> TensorGemm:
        tiles = tiles_of(self.work, dict(config.values))
        plain, lanes = gemm(self.work, tiles, self.machine), self.lanes
        output = Buffer("out", self.dtype, self.of.parts * self.of.other_size)
        words = "columns" if self.of.along else "rows"
        made = replace(
            plain,
            params=(*plain.params[:-1], output),
            lanes=lanes,
            reduced=self._reduced(tiles, output),
            decisions=f"{plain.decisions}, {self.of.op} of {self.of.size} {words}",
        )
        return replace(made, blocks=made.tile_count)

    def _reduced(self, tiles: MatrixTiles, output: Buffer) -> ReducedOutput:
        of, lanes = self.of, self.lanes
        result = result_of(self.work, tiles, lanes)
        value = result.value
        if isinstance(value, te.Cast) and value.dtype.is_half and not self.strict:
            value = value.value  # a value that is not stored is not rounded
        kind, lane = KINDS[of.op], result.lane
        total = Buffer("total", DType.F32, lanes, Scope.REGISTER)
        parts = Buffer("parts", DType.F32, tiles.threads * lanes, Scope.SCRATCH)
        own, at = te.Load(total, (lane,)), te.Var("part", of.parts)
        other = te.Load(parts, (te.Var("other", parts.size) + lane,))
        combiner = te.REDUCE_COMBINERS[kind]
        m, n, _ = self.work.sizes
        column = te.Var("place_n", max(1, n // lanes)) * lanes + lane

        def ended(value: te.Expr) -> te.Expr:
            return te.cast(value / of.size if of.op == "mean" else value, self.dtype)

        def each(buffer: Buffer, index: te.Expr, stored: te.Expr) -> Stmt:
            return with_values(nest([(lane, Kind.VECTOR)], Store(buffer, index, stored)), {})

        write = each(output, at * of.other_size + column, ended(own))
        if of.along:
            first = te.Load(total, (te.as_index(0),))
            write = Store(output, te.Var("place_m", m) * of.parts + at, ended(first))
        return ReducedOutput(
            kind=kind,
            size=of.size,
            along=of.along,
            total=total,
            parts=parts,
            begin=each(total, lane, te.reduce_identity(kind, DType.F32)),
            add=each(total, lane, te.call(combiner, own, te.cast(value, DType.F32))),
            join=each(total, lane, te.call(combiner, own, other)),
            write=write,
        )

    def terms(self, config: Config) -> GpuTerms:
        return self.terms_of(dict(config.values))

    def terms_of(self, values: Values) -> GpuTerms:
        """The terms of a config or, if its values are arrays, of many."""
        tiles = tiles_of(self.work, values)
        terms, formula = terms_of(self.work, tiles), self.work.formula
        out = self.of.parts * self.of.other_size * self.dtype.bytes
        blocks = self.of.parts * -(-self.of.other_size // (tiles.bm if self.of.along else tiles.bn))
        return replace(
            terms,
            blocks=blocks,
            memory=float(formula.moved - formula.output.size * formula.output.dtype.bytes + out),
            written=out / blocks,
        )
