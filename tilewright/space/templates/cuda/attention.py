"""Attention for 16-bit floats in one tensor-core kernel, causal or with any mask, including data movement
around it."""

from __future__ import annotations

from functools import cached_property

from tilewright import te
from tilewright.dtypes import DType
from tilewright.graph.attention import attention_in
from tilewright.hw.gpu import GpuMachine
from tilewright.loops.gpu.attention import AttentionTiles, TensorAttention, padded
from tilewright.loops.gpu.tensor import ROW_PADDING, MatrixOperand
from tilewright.loops.ir import Buffer, Kind, Scope, Stmt, Store, nest
from tilewright.loops.tiling import with_values
from tilewright.space.space import Config, Knob, Space
from tilewright.space.template import Applied, GpuTerms, GpuWork
from tilewright.space.templates.attention import LOG2_E, Operands
from tilewright.space.templates.cuda.matrices import INT_MAX, LANES, matrix
from tilewright.support.batch import Number, Truth, Values, least, select
from tilewright.te.index import coefficient, linear, simplify

NAME = "tensor-core-attention"
_WIDEST = 128  # maximum columns of a head: queries, scores and results of a warp are in registers
_MAX_REGISTERS, _MAX_MASKED = 200, 128  # maximum registers of a thread for these; if a mask is read too
_HELD = 8  # fragments of queries that stay in registers
_OTHERS = 56  # registers of a thread for everything else
_WEIGHT = 0.25  # warp instructions per score, equivalent to its exponential
_COPY = 3  # instructions per copied chunk


class TensorCoreAttention:
    name = NAME

    def apply(self, work: GpuWork) -> Applied | None:
        node = attention_in(work.task.graph)
        if node is None or work.numerics == "strict" or node.dtype not in (DType.F16, DType.BF16):
            return None
        operands = Operands(work.task.graph, node)
        wide = max(operands.width, operands.values) > _WIDEST
        long = any(buffer.size > INT_MAX for buffer in (*operands.inputs, operands.output))
        if wide or long or any(x.dtype is not node.dtype for x in node.inputs[:3]):
            return None
        found = _matrices(operands)
        return None if found is None else AppliedTensorAttention(operands, found, work.machine)


def _matrices(operands: Operands) -> tuple[MatrixOperand, MatrixOperand, MatrixOperand] | None:
    """q, k and v with a row per query or key; None if the elements of a row are not contiguous."""
    found = []
    for element, rows, columns in (
        (operands.query, operands.queries, operands.width),
        (operands.key, operands.keys, operands.width),
        (operands.value, operands.keys, operands.values),
    ):
        row, column = te.Var("row", rows), te.Var("column", columns)
        value = element(row, column)
        (load,) = te.loads(value)
        if not isinstance(value, te.Cast) or value.value is not load:
            return None
        operand = matrix(load, (row,), (column,))
        if operand is None or operand.transposed:
            return None
        found.append(operand)
    q, k, v = found
    return q, k, v


class AppliedTensorAttention:
    def __init__(
        self,
        operands: Operands,
        matrices: tuple[MatrixOperand, MatrixOperand, MatrixOperand],
        machine: GpuMachine,
    ) -> None:
        self.operands, self.matrices, self.machine = operands, matrices, machine

    @cached_property
    def space(self) -> Space:
        return Space(
            NAME,
            (
                Knob("warps", (2, 4, 8)),
                Knob("rows", (1, 2)),
                Knob("keys", (32, 64, 128)),
                Knob("stages", (2, 3)),
            ),
            lambda values: self.is_legal(tiles_of(values)),
            together=(("warps", "rows", "keys", "stages"),),
            batched=True,
        )

    def is_legal(self, tiles: AttentionTiles) -> Truth:
        legal = tiles.shared_bytes(*self._padded) <= self.machine.shared_block
        legal = legal & (self._held(tiles) <= (_MAX_MASKED if self.operands.masked else _MAX_REGISTERS))
        return legal & (tiles.queries < 2 * max(32, self.operands.queries))

    @property
    def _padded(self) -> tuple[int, int]:
        return padded(self.operands.width), padded(self.operands.values)

    def _held(self, tiles: AttentionTiles) -> Number:
        """Registers of a thread for queries, scores and results."""
        width, values = self._padded
        fragments = tiles.rows * width // 16
        queries = 4 * select(fragments <= _HELD, fragments, tiles.rows)
        return queries + tiles.rows * (tiles.keys + values) // 2

    def program(self, config: Config) -> TensorAttention:
        operands, tiles = self.operands, tiles_of(dict(config.values))
        q, k, v = self.matrices
        row, key = te.Var("place_m", operands.queries), te.Var("place_k", operands.keys)
        lanes = self._lanes()
        columns = self._padded[1] + ROW_PADDING
        sums = Buffer("sums", DType.F32, tiles.queries * columns, Scope.SCRATCH)
        lane = te.Var("v", lanes)
        vector = te.Var("place_n", max(1, operands.values // lanes))
        sum_row = te.Var("sum_row", tiles.queries)
        sum_vector = te.Var("sum_vector", self._padded[1] // lanes)
        total = te.Load(sums, (sum_row * columns + sum_vector * lanes + lane,))
        output = operands.output
        position = operands.position(row, vector * lanes + lane)
        write = nest([(lane, Kind.VECTOR)], Store(output, position, te.cast(total, output.dtype)))
        words = (
            f"attention on tensor cores: {operands.heads} heads, {operands.queries} queries, {operands.keys} keys,"
            f" by {tiles.queries} x {tiles.keys}, {tiles.warps} warps, {tiles.stages} stages"
        )
        return TensorAttention(
            name="attention",
            params=(*operands.inputs, output),
            dtype=output.dtype,
            q=q,
            k=k,
            v=v,
            batch=operands.lead,
            queries=operands.queries,
            keys=operands.keys,
            width=operands.width,
            values=operands.values,
            causal=operands.causal,
            scale=operands.scale * LOG2_E,
            mask=self._mask(row, key),
            tiles=tiles,
            lanes=lanes,
            sums=sums,
            write=with_values(write, {}),
            decisions=words,
        )

    def _mask(self, row: te.Var, key: te.Var) -> Stmt | None:
        if not self.operands.masked:
            return None
        score, masked = (Buffer(name, DType.F32, 1, Scope.REGISTER) for name in ("score", "masked"))
        zero = te.as_index(0)
        return with_values(Store(masked, zero, self.operands.mask(te.Load(score, (zero,)), row, key)), {})

    def _lanes(self) -> int:
        """Neighbours in a result's row that are written together."""
        operands = self.operands
        column = te.Var("column", operands.values)
        position = simplify(operands.position(te.Var("row", operands.queries), column))
        form = linear(position)
        if coefficient(position, column) != 1:
            return 1
        numbers = [operands.values, form.constant, *(c for atom, c in form.terms.items() if atom != column)]
        return next(lanes for lanes in LANES if all(number % lanes == 0 for number in numbers))

    def terms(self, config: Config) -> GpuTerms:
        return self.terms_of(dict(config.values))

    def terms_of(self, values: Values) -> GpuTerms:
        """The terms of a config or, if its values are arrays, of many."""
        operands, tiles = self.operands, tiles_of(values)
        width, columns = self._padded
        blocks = operands.heads * -(-operands.queries // tiles.queries)
        seen: Number = operands.keys
        if operands.causal:
            seen = least(seen, (operands.queries + tiles.queries) // 2)
        pairs = tiles.queries * tiles.keys
        tile_bytes = 2 * tiles.keys * (width + columns)
        copies = sum(
            tiles.keys * wide / max(2, operand.lanes) / 32
            for operand, wide in zip(self.matrices[1:], (width, columns), strict=True)
        )
        each = operands.queries * operands.values * operands.output.dtype.bytes
        moved = sum(b.size * b.dtype.bytes for b in (*operands.inputs, operands.output))
        masked = 4.0 * pairs / 32 * operands.masked
        return GpuTerms(
            blocks=blocks,
            threads=tiles.threads,
            registers=least(255, self._held(tiles) + _OTHERS),
            shared_bytes=tiles.shared_bytes(width, columns),
            steps=-(-seen // tiles.keys),
            stages=tiles.stages,
            flops=2.0 * pairs * (width + columns),
            scalar=_WEIGHT * pairs + copies * _COPY + masked + pairs * (width + columns) / 2048,
            copies=copies,
            shared_traffic=1.0 * (tile_bytes + tiles.warps * tile_bytes),
            loaded=1.0 * tile_bytes,
            memory=float(moved),
            write_loaded=2.0 * tiles.queries * width,
            written=each * tiles.queries / operands.queries,
            write_shared=12.0 * tiles.queries * columns,
        )


def tiles_of(values: Values) -> AttentionTiles:
    return AttentionTiles(**values)
