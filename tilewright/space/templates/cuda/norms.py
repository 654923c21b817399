"""Matmuls of 16-bit floats with a norm of rows before them, after them, or both, in one tensor-core kernel.

    y = layer_norm(x) @ a                  y = rms_norm(x) @ a -> gelu              y = layer_norm(x @ a + r)

A norm before: a block first computes the statistics of its rows (the sums that the norm needs, and what depends on
them alone), and keeps them in shared memory. Then each element of the left operand is normalised on its way there, as
by any prologue. Blocks that share rows compute the statistics again. A norm after: a block has all columns, so its
epilogue computes the statistics of whole rows. A softmax is a norm here too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from tilewright import te
from tilewright.dtypes import DType
from tilewright.graph.chain import NORMS, Refused
from tilewright.hw.gpu import GpuMachine
from tilewright.loops.formula import Formula, drop_rounding
from tilewright.loops.gpu.tensor import (
    ROW_PADDING,
    ComputedOperand,
    MatrixTiles,
    NormalisedOutput,
    NormReduction,
    RowStatistics,
    TensorGemm,
)
from tilewright.loops.gpu.thread_index import (
    VECTOR_BYTES,
    at_positions,
    index_at_positions,
    positions,
    step_of,
    vector_lanes,
)
from tilewright.loops.ir import Buffer, Kind, Scope, Stmt, Store, block, nest
from tilewright.loops.tiling import with_results, with_values
from tilewright.space.chain import stages_of
from tilewright.space.row_norm import RowNorm, instructions, is_norm, row_norm_of
from tilewright.space.space import Config, Knob, Space
from tilewright.space.template import Applied, GpuTerms, GpuWork
from tilewright.space.templates.cuda.matmul import (
    AppliedMatmul,
    gemm,
    is_legal,
    multiplied,
    result_of,
    terms_of,
    tiles_of,
)
from tilewright.space.templates.cuda.matrices import LANES, MatrixWork, matrix_work
from tilewright.support.batch import Truth, Values
from tilewright.te.index import linear, simplify

NAME = "tensor-core-norm"
_HALVES = (DType.F16, DType.BF16)
_WIDEST = 256  # maximum columns of a product before a norm: a tile has them all
_TILE = te.Var("m0", 1 << 30)  # the first row of a block's tile
_OTHERS = 4.0  # instructions per vector of a reduction besides its own: a load, and the loop


# -- which tasks ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NormWork:
    """A product with the norm `before` it, which its left operand already contains, and the norm `after` it."""

    matrices: MatrixWork
    before: RowNorm | None
    after: RowNorm | None
    between: Buffer | None  # the product's results, which `after` reads
    params: tuple[Buffer, ...]

    @cached_property
    def moved(self) -> int:
        """Bytes of all inputs and of the output."""
        return sum(buffer.size * buffer.dtype.bytes for buffer in self.params)


def norm_work(work: GpuWork) -> NormWork | Refused:
    """Match a task as a matmul between norms; Refused with a reason if a block cannot compute it."""
    if work.numerics == "strict":
        return Refused("strict numerics round every operator")
    stages = stages_of(work)
    if isinstance(stages, Refused):
        return stages
    norms = [is_norm(stage) for stage in stages]
    if norms.count(False) != 1 or len(stages) > 3 or not any(norms):
        return Refused("it is not one GEMM with a norm before or after it")
    product = stages[norms.index(False)]
    before, after = (
        None if not part else row_norm_of(part[0].formula)
        for part in (stages[: norms.index(False)], stages[norms.index(False) + 1 :])
    )
    for each in (before, after):
        if isinstance(each, Refused):
            return each
    assert not isinstance(before, Refused) and not isinstance(after, Refused)
    formula = product.formula
    if before is not None:
        assert product.source is not None
        inside = _normalised(formula, product.source, before)
        if inside is None:
            return Refused("the GEMM reads other rows than the norm's")
        formula = inside
    matrices = matrix_work(formula, False, multiplied(product.sub.task))
    if matrices is None or matrices.dtype not in _HALVES or matrices.packing is not None:
        return Refused(f"{product.sub.task.label} is not a GEMM of 16-bit floats")
    if matrices.batch:
        return Refused("its GEMMs are batched")
    m, n, k = matrices.sizes
    if before is not None and not _has_rows(matrices, before, m, k):
        return Refused("the GEMM reads other rows than the norm's")
    between = None
    if after is not None:
        between = product.formula.output
        if n > _WIDEST:
            return Refused(f"the norm has rows of {n} columns; a block keeps at most {_WIDEST} on chip")
        if (m, n) != (after.count, after.length) or not _stores_rows(matrices):
            return Refused("the norm reads other rows than the block computes")
        if not after.reads_rows_of(between):
            return Refused("the norm reads other rows than the block computes")
    inputs = {b.name: b for s in stages for b in s.formula.inputs if b != s.source}
    count = len(work.task.graph.inputs)
    params = (*(inputs[f"x{number}"] for number in range(count)), stages[-1].formula.output)
    return NormWork(matrices, before, after, between, params)


def _normalised(formula: Formula, source: Buffer, norm: RowNorm) -> Formula | None:
    """The product with its left operand computed by the norm, whose values of a row are at index `row - m0` of
    their tables. None if it is read elsewhere too, or not by rows."""
    loads = {load for expr in formula.expressions() for load in te.loads(expr) if load.source == source}
    if len(loads) != 1 or any(load.source == source for load in te.loads(formula.value)):
        return None
    (load,) = loads
    row, column = (
        simplify(index) for index in (load.indices[0] // norm.length, load.indices[0] % norm.length)
    )
    at = {**positions(row, norm.rows), **positions(column, norm.columns)}
    tables: dict[te.Source, te.Expr] = {
        buffer: te.Load(buffer, (simplify(row - _TILE),)) for buffer, _ in norm.of_row
    }

    def kept(node: te.Expr) -> te.Expr | None:
        return tables.get(node.source) if isinstance(node, te.Load) and not node.indices else None

    value = simplify(te.rewrite(te.substitute(norm.value, at), kept))
    changed = formula.map(lambda expr: te.rewrite(expr, lambda node: value if node == load else None))
    inputs = dict.fromkeys((*(b for b in formula.inputs if b != source), *norm.formula.inputs))
    return replace(changed, inputs=tuple(inputs), constants=formula.constants | norm.formula.constants)


def _has_rows(work: MatrixWork, norm: RowNorm, m: int, k: int) -> bool:
    """Whether the product's rows are those of the norm, in their order, each read from one end to the other."""
    if (
        (m, k) != (norm.count, norm.length)
        or not isinstance(work.left, ComputedOperand)
        or work.left.transposed
    ):
        return False
    assert work.left_element is not None
    names = {buffer for buffer, _ in norm.of_row}
    found = [load.indices[0] for load in work.left_element.loads if load.source in names]
    return all(
        step_of({atom: c for atom, c in linear(index).terms.items() if atom != _TILE}, work.m) == 1
        for index in found
    )


def _stores_rows(work: MatrixWork) -> bool:
    """Whether its result is a dense matrix of its rows."""
    form = linear(work.formula.store)
    rows = step_of(form.terms, work.m) if work.m else work.sizes[1]
    return not form.constant and step_of(form.terms, work.n) == 1 and rows == work.sizes[1]


class TensorCoreNorm:
    name = NAME

    def apply(self, work: GpuWork) -> Applied | None:
        found = norm_work(work)
        return None if isinstance(found, Refused) else AppliedNorm(found, work.machine)

    def refusal(self, work: GpuWork) -> str | None:
        """Why it does not compute a task with a norm; None if it does, or there is no norm."""
        if not any(node.op in NORMS for node in work.task.graph.nodes()):
            return None
        found = norm_work(work)
        if isinstance(found, Refused):
            return found.reason
        if next(iter(AppliedNorm(found, work.machine).space.configs()), None) is None:
            return f"no tile with whole rows fits a block's {work.machine.shared_block} of shared memory"
        return None


# -- configs ----------------------------------------------------------------------------------------------------------


class AppliedNorm:
    def __init__(self, work: NormWork, machine: GpuMachine) -> None:
        self.work, self.machine = work, machine

    @cached_property
    def space(self) -> Space:
        """That of the matmul: no persistent blocks, and a tile has all columns if a norm follows."""
        plain = AppliedMatmul(self.work.matrices, self.machine).space
        n = self.work.matrices.sizes[1]
        own: dict[str, tuple[object, ...]] = {"persistent": (False,)}
        if self.work.after is not None:
            own |= {"bn": (max(32, 1 << (n - 1).bit_length()),), "split": (1,)}
        knobs = tuple(
            Knob(knob.name, own.get(knob.name, knob.choices), ordered=knob.ordered)  # type: ignore[arg-type]
            for knob in plain.knobs
        )
        return Space(NAME, knobs, self._legal, together=plain.together, batched=True)

    def _legal(self, values: Values) -> Truth:
        tiles = tiles_of(self.work.matrices, values)
        fits = tiles.shared_bytes + self._table_bytes(tiles) <= self.machine.shared_block
        return fits & is_legal(self.work.matrices, tiles, self.machine)

    def _table_bytes(self, tiles: MatrixTiles) -> int:
        tables = () if self.work.before is None else self.work.before.of_row
        return tiles.bm * sum(buffer.dtype.bytes for buffer, _ in tables)

    def program(self, config: Config) -> TensorGemm:
        work, tiles = self.work, tiles_of(self.work.matrices, dict(config.values))
        made = replace(gemm(work.matrices, tiles, self.machine), params=work.params, packings=())
        if work.before is not None:
            assert isinstance(made.a, ComputedOperand)
            made = replace(
                made,
                a=replace(made.a, batch=(*made.a.batch, _TILE)),
                statistics=_statistics(work.before, tiles, work.matrices.sizes[0]),
                decisions=f"{made.decisions}, statistics of rows first",
            )
        if work.after is not None:
            made = self._with_norm_after(made, work.after, tiles)
        return made

    def _with_norm_after(self, made: TensorGemm, norm: RowNorm, tiles: MatrixTiles) -> TensorGemm:
        work = self.work
        assert work.between is not None
        output, n = work.params[-1], work.matrices.sizes[1]
        most = min(made.lanes, VECTOR_BYTES // output.dtype.bytes)
        lanes = next(lanes for lanes in LANES if lanes <= most and n % lanes == 0)
        return replace(
            made,
            lanes=lanes,
            normalised=_normalised_output(work, norm, tiles, lanes),
            decisions=f"{made.decisions}, a norm of the result's rows",
        )

    def terms(self, config: Config) -> GpuTerms:
        return self.terms_of(dict(config.values))

    def terms_of(self, values: Values) -> GpuTerms:
        """Those of the matmul, with the passes over rows before its loop, or over the sums after it. If the values are
        arrays, of many configs."""
        work, tiles = self.work, tiles_of(self.work.matrices, values)
        plain = terms_of(work.matrices, tiles)
        _, n, k = work.matrices.sizes
        read = written = scalar = 0.0
        waits: float = 0.0
        if (before := work.before) is not None:
            element = work.matrices.dtype.bytes
            read = 1.0 * tiles.bm * k * element
            vectors = 1.0 * tiles.bm * k / 32
            scalar = vectors * (_passes_work(before) + before.passes * _OTHERS * element / 16)
            # A thread has at least a quarter of a row, whose vectors it waits for together.
            waits = 1.0 * before.passes * tiles.bm / tiles.threads
        if (after := work.after) is not None:
            written = 4.0 * tiles.bm * tiles.bn * (after.passes + 2)
            scalar = scalar + tiles.bm * tiles.bn / 32 * _passes_work(after)
            bytes = work.params[-1].dtype.bytes
            plain = replace(plain, written=1.0 * tiles.bm * n * bytes)
        return replace(
            plain,
            memory=float(work.moved),
            shared_bytes=plain.shared_bytes + self._table_bytes(tiles),
            write_loaded=plain.write_loaded + read,
            write_shared=plain.write_shared + written,
            write_scalar=plain.write_scalar + scalar,
            waits_before=waits,
        )


def _passes_work(norm: RowNorm) -> float:
    """Instructions per element of a row for all reductions, their own additions included."""
    return sum(instructions(reduction.body) + 1 for reduction in norm.formula.reductions)


# -- what a config builds ---------------------------------------------------------------------------------------------


def _statistics(norm: RowNorm, tiles: MatrixTiles, m: int) -> RowStatistics:
    row = te.Var("place_m", m)
    passes = _passes(
        norm, lambda body, axes, at: at_positions(at_positions(body, norm.rows, row), axes, at), "at_k"
    )
    results = {r.result: te.Load(r.result, (te.as_index(0),)) for r in norm.formula.reductions}
    tables, keep = [], list[Stmt]()
    for buffer, expr in norm.of_row:
        table = replace(buffer, size=tiles.bm)
        tables.append(table)
        keep.append(Store(table, te.Var("sum_row", tiles.bm), with_results(expr, results)))
    return RowStatistics(passes, tuple(tables), block(*keep), norm.length)


def _passes(
    norm: RowNorm,
    placed: Callable[[te.Expr, Sequence[te.Var], te.Expr], te.Expr],
    vector: str,
    lanes: int = 0,
) -> tuple[NormReduction, ...]:
    """The norm's reductions. `placed`: a body with its axes at a position of the row; `vector`: the variable that
    counts vectors; `lanes`: their length, by default as many as can be loaded at once."""
    results: Mapping[Buffer, te.Expr] = {
        r.result: te.Load(r.result, (te.as_index(0),)) for r in norm.formula.reductions
    }
    found = []
    for number, reduction in enumerate(norm.formula.reductions):
        width = lanes or _lanes(reduction.body, reduction.axes[-1])
        lane = te.Var("v", width)
        total = Buffer(f"total{number}", reduction.result.dtype, width, Scope.REGISTER)
        own = te.Load(total, (lane,))
        at = te.Var(vector, reduction.length // width) * width + lane
        body = with_results(placed(simplify(reduction.body), reduction.axes, at), results)
        more = te.call(te.REDUCE_COMBINERS[reduction.kind], own, te.cast(body, total.dtype))
        identity = te.reduce_identity(reduction.kind, total.dtype)
        found.append(
            NormReduction(
                reduction.kind,
                reduction.result,
                total,
                _each(lane, Store(total, lane, identity)),
                _each(lane, Store(total, lane, more)),
            )
        )
    return tuple(found)


def _lanes(body: te.Expr, axis: te.Var) -> int:
    return vector_lanes(
        [(load.indices[0], load.dtype.bytes) for load in te.loads(body) if load.indices], axis
    )


def _normalised_output(work: NormWork, norm: RowNorm, tiles: MatrixTiles, lanes: int) -> NormalisedOutput:
    result = result_of(work.matrices, tiles, lanes)
    m, n, _ = work.matrices.sizes
    pitch = tiles.bn + ROW_PADDING
    sum_row, sum_vector = te.Var("sum_row", tiles.bm), te.Var("sum_vector", tiles.bn // lanes)
    row, vector = te.Var("place_m", m), te.Var("place_n", max(1, n // lanes))
    lane = result.lane
    sum_at = sum_row * pitch + sum_vector * lanes + lane
    of_tile = te.Load(result.sums, (sum_at,))

    def placed(expr: te.Expr, axes: Sequence[te.Var], at: te.Expr) -> te.Expr:
        moved = te.rewrite(expr, lambda node: _from_sums(node, work.between, of_tile))
        return at_positions(at_positions(moved, norm.rows, row), axes, at)

    value = result.value
    if isinstance(value, te.Cast) and value.dtype.is_half:
        value = value.value  # a value that is not stored is not rounded
    formula = norm.formula
    results = {r.result: te.Load(r.result, (te.as_index(0),)) for r in formula.reductions}
    column = vector * lanes + lane
    final = with_results(placed(formula.value, norm.columns, column), results)
    position = index_at_positions(index_at_positions(formula.store, norm.columns, column), norm.rows, row)
    return NormalisedOutput(
        _each(lane, Store(result.sums, sum_at, te.cast(value, DType.F32))),
        _passes(norm, placed, "sum_vector", lanes),
        _each(lane, Store(work.params[-1], position, final)),
    )


def _from_sums(node: te.Expr, between: Buffer | None, sums: te.Expr) -> te.Expr | None:
    """What the tile has instead of an element of the product's result, which is not rounded on the way: it might
    overflow."""
    if isinstance(node, te.Load) and node.source == between:
        return te.cast(sums, node.dtype)
    return drop_rounding(node)


def _each(lane: te.Var, stmt: Stmt) -> Stmt:
    return with_values(nest([(lane, Kind.VECTOR)], stmt), {})
