"""Matrix products of 16-bit floats on tensor cores, of any transposition, alignment and batch, with any epilogue."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright import te
from tilewright.dtypes import DType
from tilewright.hw.gpu import GpuMachine
from tilewright.loops.formula import Formula
from tilewright.loops.gpu.tensor import ROW_PADDING, MatrixOperand, MatrixTiles, TensorProduct
from tilewright.loops.ir import Buffer, Kind, Scope, Store, nest
from tilewright.loops.tiling import columns_of, with_results, with_values
from tilewright.te.index import Linear, coefficient, linear, simplify

_LANES = (8, 4, 2, 1)
_MOST_ACCUMULATORS = 128  # registers of a thread; the fragments need about as many again


@dataclass(frozen=True)
class MatrixWork:
    """A formula as a matrix product: out[batch, m, n] = epilogue(sum over k of a[batch, m, k] * b[batch, k, n])."""

    formula: Formula
    a: te.Load
    b: te.Load
    m: te.Var | None  # None: one row
    n: te.Var | None
    k: te.Var
    batch: tuple[te.Var, ...]

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.m.extent if self.m else 1, self.n.extent if self.n else 1, self.k.extent


def matrix_work(formula: Formula) -> MatrixWork | None:
    """None where the formula is not a plain product of two matrices of 16-bit floats."""
    if len(formula.reductions) != 1 or columns_of(formula):
        return None
    (reduction,) = formula.reductions
    body = reduction.body
    if reduction.kind != "sum" or len(reduction.axes) != 1 or not _is_product(body):
        return None
    assert isinstance(body, te.Call)
    first, second = (arg.value for arg in body.args)  # type: ignore[attr-defined]
    if first.dtype is not second.dtype or first.dtype not in (DType.F16, DType.BF16):
        return None
    k = reduction.axes[0]
    axes = set(formula.axes)
    if not all(set(linear(load.indices[0]).terms) <= axes | {k} for load in (first, second)):
        return None
    for a, b in ((first, second), (second, first)):
        found = _as_matrices(formula, a, b, k)
        if found is not None:
            return found
    return None


def _is_product(body: te.Expr) -> bool:
    return (
        isinstance(body, te.Call)
        and body.op == "mul"
        and all(
            isinstance(arg, te.Cast) and arg.dtype is DType.F32 and isinstance(arg.value, te.Load)
            for arg in body.args
        )
    )


def _as_matrices(formula: Formula, a: te.Load, b: te.Load, k: te.Var) -> MatrixWork | None:
    """The product with `a` on the left; the right operand's own axis is to be the one that the output walks along."""
    of_a, of_b = (linear(load.indices[0]).terms for load in (a, b))
    only_a = [axis for axis in formula.axes if axis in of_a and axis not in of_b]
    only_b = [axis for axis in formula.axes if axis in of_b and axis not in of_a]
    batch = tuple(axis for axis in formula.axes if (axis in of_a) == (axis in of_b))
    if len(only_a) > 1 or len(only_b) > 1 or not (only_a or only_b):
        return None
    m, n = (only_a[0] if only_a else None), (only_b[0] if only_b else None)
    if n is None or coefficient(formula.store, n) != 1:
        return None
    if not (_is_matrix(of_a, m, k) and _is_matrix(of_b, n, k)):
        return None
    return MatrixWork(formula, a, b, m, n, k, batch)


def _is_matrix(terms: dict[te.Expr, int], outer: te.Var | None, k: te.Var) -> bool:
    """Whether one of the two axes lies in memory element by element."""
    return terms.get(k, 0) == 1 or (outer is not None and terms.get(outer, 0) == 1 and terms.get(k, 0) > 0)


def is_legal(work: MatrixWork, tiles: MatrixTiles, machine: GpuMachine) -> bool:
    warp_m, warp_n = tiles.bm // tiles.warps_m, tiles.bn // tiles.warps_n
    return (
        tiles.bm % (16 * tiles.warps_m) == 0
        and tiles.bn % (16 * tiles.warps_n) == 0
        and tiles.bk in (32, 64)
        and tiles.stages >= 2
        and tiles.shared_bytes <= machine.shared_block
        and tiles.threads <= machine.threads_block
        and tiles.accumulators <= _MOST_ACCUMULATORS
        and warp_m >= 16
        and warp_n >= 16
    )


def product(work: MatrixWork, tiles: MatrixTiles) -> TensorProduct:
    formula = work.formula
    m, n, k = work.sizes
    a, b = (_operand(load, outer, work) for load, outer in ((work.a, work.m), (work.b, work.n)))
    assert work.n is not None
    lanes = _output_lanes(work)
    sums = Buffer("sums", DType.F32, tiles.bm * (tiles.bn + ROW_PADDING), Scope.SCRATCH)
    lane = te.Var("v", lanes)
    row, vector = te.Var("place_m", m), te.Var("place_n", max(1, n // lanes))
    sum_row, sum_vector = te.Var("sum_row", tiles.bm), te.Var("sum_vector", tiles.bn // lanes)
    position: dict[te.Var, te.Expr] = {work.n: vector * lanes + lane}
    if work.m is not None:
        position[work.m] = row
    total = te.Load(sums, (sum_row * (tiles.bn + ROW_PADDING) + sum_vector * lanes + lane,))
    value = with_results(te.substitute(formula.value, position), {formula.reductions[0].result: total})
    store = Store(formula.output, te.substitute(formula.store, position), value)
    write = with_values(nest([(lane, Kind.VECTOR)], store), {})
    t = tiles
    words = (
        f"tensor cores: {m} x {n} x {k} by {t.bm} x {t.bn} x {t.bk}, {t.warps_m} x {t.warps_n} warps,"
        f" {t.stages} stages"
    )
    params = (*formula.inputs, formula.output)
    dtype = work.a.dtype
    return TensorProduct(
        formula.name, params, dtype, a, b, work.batch, m, n, k, tiles, lanes, sums, write, words
    )


def _operand(load: te.Load, outer: te.Var | None, work: MatrixWork) -> MatrixOperand:
    form = linear(load.indices[0])
    turned = form.terms.get(work.k, 0) != 1
    along, across = (outer, work.k) if turned else (work.k, outer)
    assert along is not None
    pitch = form.terms.get(across, 0) if across is not None else 0
    rest = {atom: c for atom, c in form.terms.items() if atom not in (outer, work.k)}
    numbers = [along.extent, pitch, form.constant, *rest.values()]
    lanes = next(lanes for lanes in _LANES if all(number % lanes == 0 for number in numbers))
    assert isinstance(load.source, Buffer)
    return MatrixOperand(load.source, simplify(Linear(rest, form.constant).expr()), pitch, turned, lanes)


def _output_lanes(work: MatrixWork) -> int:
    """Neighbours along n that are written together: at most 16 bytes, whole vectors only."""
    formula, n = work.formula, work.n
    assert n is not None
    form = linear(formula.store)
    numbers = [n.extent, form.constant, *(c for atom, c in form.terms.items() if atom != n)]
    most = 16 // formula.output.dtype.bytes
    return next(lanes for lanes in _LANES if lanes <= most and all(number % lanes == 0 for number in numbers))
