"""Products on tensor cores whose results are combined over rows at once: the results themselves are never written.

    out[part, n] = sum, mean, highest or lowest of epilogue(a @ b)[rows of the part, n]

The mean of an image behind its last convolution is one. A part has no more rows than a tile; where there are more, the
parts of parts are another kernel's (`tilewright/tune/gpu_sums.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from tilewright import te
from tilewright.dtypes import DType
from tilewright.graph.ir import Graph, Node
from tilewright.graph.task import Task
from tilewright.hw.gpu import GpuMachine
from tilewright.loops.gpu.tensor import MatrixTiles, ReducedRows, TensorProduct
from tilewright.loops.ir import Buffer, Kind, Scope, Stmt, Store, nest
from tilewright.loops.tiling import with_values
from tilewright.space.space import Config, Knob, Space, Value
from tilewright.space.template import normal_form
from tilewright.space.templates.cuda.matmul import (
    is_legal,
    multiplied,
    product,
    result_of,
    terms_of,
    tiles_of,
)
from tilewright.space.templates.cuda.matrices import LANES, MatrixWork, matrix_work
from tilewright.space.templates.cuda.places import step_of
from tilewright.space.templates.cuda.template import GpuApplied, GpuTerms, GpuWork
from tilewright.te.index import linear

NAME = "tensor-sums"
KINDS = {"sum": "sum", "mean": "sum", "amax": "max", "amin": "min"}
MOST_ROWS = 256  # of a tile
_TILES = (16, 32, 64, 128, 256)
_BYTES = 4  # of an accumulator


@dataclass(frozen=True)
class RowsOf:
    """A reduction over neighbouring rows of what `producer` computes, `rows` at a time."""

    op: str
    producer: Node
    rows: int
    parts: int
    columns: int


def rows_of(reduction: Node) -> RowsOf | None:
    """None where a node is something else. What lies between it and the producer may not move anything."""
    if reduction.op not in KINDS or not reduction.inputs[0].type.rank:
        return None
    source, axes = reduction.inputs[0], tuple(reduction.attrs["axes"])
    rank = source.type.rank
    if not axes or axes != tuple(range(axes[0], rank - 1)):
        return None
    rows, parts = math.prod(source.shape[axes[0] : -1]), math.prod(source.shape[: axes[0]])
    producer, columns = source, source.shape[-1]
    while producer.op == "cast" or (producer.op == "reshape" and producer.inputs[0].shape[-1:] == (columns,)):
        producer = producer.inputs[0]
    return RowsOf(reduction.op, producer, rows, parts, columns)


class TensorSums:
    name = NAME

    def apply(self, work: GpuWork) -> GpuApplied | None:
        found = rows_of(work.task.output)
        if found is None or found.rows > MOST_ROWS or found.producer.is_input:
            return None
        task = Task(Graph(work.task.graph.inputs, (found.producer,)), work.task.constants)
        formula = normal_form(task, work.numerics)
        if formula is None:
            return None
        matrices = matrix_work(formula, work.numerics == "tf32", multiplied(task))
        if matrices is None or matrices.batch or not _is_by_rows(matrices, found):
            return None
        return Applied(matrices, found, work.task.output.dtype, work.machine, work.numerics == "strict")


def _is_by_rows(work: MatrixWork, found: RowsOf) -> bool:
    """Whether the product's rows and columns, as they are counted, are those that are combined."""
    terms = linear(work.formula.store).terms
    m, n, _ = work.sizes
    counted = (m, n) == (found.rows * found.parts, found.columns)
    return counted and step_of(terms, work.n) == 1 and step_of(terms, work.m) == n and bool(work.m)


class Applied:
    def __init__(
        self, work: MatrixWork, rows: RowsOf, dtype: DType, machine: GpuMachine, strict: bool
    ) -> None:
        self.work, self.rows, self.dtype, self.machine, self.strict = work, rows, dtype, machine, strict

    @cached_property
    def space(self) -> Space:
        _, n, k = self.work.sizes
        depths = tuple(bytes // self.work.size for bytes in (64, 128))
        return Space(
            NAME,
            (
                Knob("bm", (next(tile for tile in _TILES if tile >= self.rows.rows),)),
                Knob("bn", tuple(tile for tile in _TILES[1:] if tile < 2 * n or tile == _TILES[1])),
                Knob("bk", tuple(depth for depth in depths if depth < 2 * k or depth == depths[0])),
                Knob("warps_m", (1, 2, 4)),
                Knob("warps_n", (1, 2, 4)),
                Knob("stages", tuple(count for count in (2, 3, 4, 6) if count <= 2 + -(-k // 64))),
            ),
            self._legal,
            together=(("bm", "bn", "bk", "warps_m", "warps_n", "stages"),),
        )

    @cached_property
    def lanes(self) -> int:
        return next(lanes for lanes in LANES if self.rows.columns % lanes == 0)

    def _legal(self, values: Mapping[str, Value]) -> bool:
        tiles = tiles_of(self.work, values)
        return tiles.threads * self.lanes * _BYTES <= tiles.shared_bytes and is_legal(
            self.work, tiles, self.machine
        )

    def kernel(self, config: Config) -> TensorProduct:
        tiles = tiles_of(self.work, dict(config.values))
        plain, lanes = product(self.work, tiles, self.machine), self.lanes
        output = Buffer("out", self.dtype, self.rows.parts * self.rows.columns)
        made = replace(
            plain,
            params=(*plain.params[:-1], output),
            lanes=lanes,
            reduced=self._reduced(tiles, output),
            decisions=f"{plain.decisions}, {self.rows.op} of {self.rows.rows} rows",
        )
        return replace(made, blocks=made.tile_count)

    def _reduced(self, tiles: MatrixTiles, output: Buffer) -> ReducedRows:
        rows, lanes = self.rows, self.lanes
        result = result_of(self.work, tiles, lanes)
        value = result.value
        if isinstance(value, te.Cast) and value.dtype.is_half and not self.strict:
            value = value.value  # what is not written is not rounded
        kind, lane = KINDS[rows.op], result.lane
        total = Buffer("total", DType.F32, lanes, Scope.REGISTER)
        parts = Buffer("parts", DType.F32, tiles.threads * lanes, Scope.SCRATCH)
        own, at = te.Load(total, (lane,)), te.Var("part", rows.parts)
        other = te.Load(parts, (te.Var("other", parts.size) + lane,))
        combiner = te.REDUCE_COMBINERS[kind]
        ended: te.Expr = own * te.const(1.0 / rows.rows, DType.F32) if rows.op == "mean" else own
        column = te.Var("place_n", max(1, rows.columns // lanes)) * lanes + lane

        def each(buffer: Buffer, index: te.Expr, stored: te.Expr) -> Stmt:
            return with_values(nest([(lane, Kind.VECTOR)], Store(buffer, index, stored)), {})

        return ReducedRows(
            rows=rows.rows,
            total=total,
            parts=parts,
            begin=each(total, lane, te.reduce_identity(kind, DType.F32)),
            add=each(total, lane, te.call(combiner, own, te.cast(value, DType.F32))),
            join=each(total, lane, te.call(combiner, own, other)),
            write=each(output, at * rows.columns + column, te.cast(ended, self.dtype)),
        )

    def terms(self, config: Config) -> GpuTerms:
        tiles = tiles_of(self.work, dict(config.values))
        terms, formula = terms_of(self.work, tiles), self.work.formula
        out = self.rows.parts * self.rows.columns * self.dtype.bytes
        blocks = self.rows.parts * -(-self.rows.columns // tiles.bn)
        return replace(
            terms,
            blocks=blocks,
            memory=float(formula.moved - formula.output.size * formula.output.dtype.bytes + out),
            written=out / blocks,
        )
