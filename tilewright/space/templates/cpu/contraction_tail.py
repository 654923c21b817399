"""The last columns of a matmul, too few for a vector: reduced along K, a vector at a time.

    for every few rows of the block:
      acc[row, column, :] = 0
      for steps of K, in vectors: acc += data[row, steps of K] * weight[column, steps of K]
      out[row, column] = epilogue(the sum of acc[row, column, :])

As a vector of columns they would cost as much as a whole vector; this way they cost only their own lanes. Their
weight is stored after the panels, column by column.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilewright import te
from tilewright.dtypes import DType
from tilewright.loops.ir import Across, Buffer, For, Kind, Scope, Stmt, Store, block, nest
from tilewright.loops.tiling import Tiles, extent_of, with_values
from tilewright.space.template import Terms
from tilewright.space.templates.cpu.gemm import Gemm
from tilewright.support.arith import ceil_div
from tilewright.te.index import coefficient, linear

if TYPE_CHECKING:
    from tilewright.space.templates.cpu.contraction_nest import ContractionNest

_MAX_ROWS = 8
_FEW = 3 / 8  # share of a vector above which a whole vector costs less
_PAYS = 1 / 32  # minimum share of computed lanes that must be saved
_ADDED_UP = 10.0  # instructions for the horizontal sum of a vector
_STRADDLING = 0.75  # cycles for a vector in two cache lines
_LONG = 8  # vectors along K that outweigh the horizontal sum
_CHEAP = {"add", "sub", "mul", "min", "max"}  # operations that an epilogue may apply to single elements


def tail_columns(gemm: Gemm, lanes: int) -> int:
    """The number of columns after the last whole vector that are better summed this way; 0: none."""
    vectors, columns = divmod(gemm.vector.extent, lanes)
    if not vectors or not 0 < columns <= _FEW * lanes or not _can_be_tail(gemm, lanes):
        return 0
    return columns if (1 - columns / lanes) / (vectors + 1) >= _PAYS else 0


def tail_terms(gemm: Gemm, columns: int, lanes: int, registers: int) -> Terms:
    rows = extent_of(gemm.rows)
    steps = rows * ceil_div(gemm.length, lanes)
    each = steps / _rows_at_once(columns, registers)
    return Terms(
        arithmetic=columns * (steps + rows * _ADDED_UP),
        loads=steps + each * columns,
        stores=float(rows * columns),
        branches=each,
        scalar=steps * _STRADDLING,
    )


def _can_be_tail(gemm: Gemm, lanes: int) -> bool:
    """Whether rows of the data and columns of the weight are contiguous along K, and the epilogue is cheap."""
    load, data = gemm.weight_load, gemm.data
    if type(gemm) is not Gemm or gemm.shared or len(gemm.rows) != 1 or len(gemm.k_axes) != 1:
        return False
    if not isinstance(data, te.Load) or gemm.weight != load or not gemm.constant_weight:
        return False
    (k,) = gemm.k_axes
    form, source = linear(load.indices[0]), load.source
    assert isinstance(source, Buffer)
    whole = set(form.terms) == {k, gemm.vector} and not form.constant
    formula = gemm.formula
    readers = [x for e in formula.expressions() for x in te.loads(e) if x.source == source]
    calls = [node.op for node in te.walk(formula.value) if isinstance(node, te.Call)]
    return (
        whole
        and source.size == k.extent * gemm.vector.extent
        and len(readers) == 1
        and {data.dtype, load.dtype, gemm.reduction.result.dtype} == {DType.F32}
        and coefficient(data.indices[0], k) == 1
        and k.extent >= _LONG * lanes
        and _CHEAP.issuperset(calls)
    )


def _rows_at_once(columns: int, registers: int) -> int:
    """Rows whose sums stay in registers, next to a vector of each column."""
    return max(1, min(_MAX_ROWS, (registers - 2 - columns) // columns))


def tail(nest_: ContractionNest, columns: int, registers: int) -> Stmt:
    """Compute the last `columns` of the current block."""
    gemm, shape, lanes = nest_.gemm, nest_.shape, nest_.lanes
    assert nest_.packed is not None
    rows = min(shape.block, _rows_at_once(columns, registers))
    tiles = Tiles(te.Var("row", shape.block), rows)
    k, first_row = gemm.k_axes[0], nest_.block_start + tiles.start()
    after = nest_.packed.packing.size - columns * k.extent
    sums = Buffer("tail" + nest_.name, DType.F32, rows * columns * lanes, Scope.REGISTER)
    row, column, lane = te.Var("tr", rows), te.Var("tc", columns), te.Var("v", lanes)
    in_tile = [(row, Kind.UNROLL), (column, Kind.UNROLL), (lane, Kind.VECTOR)]
    position = (row * columns + column) * lanes + lane
    data = te.substitute(gemm.data, {gemm.rows[0]: first_row + row})
    weight = te.Load(nest_.packed.load.source, (column * k.extent + k + after,))
    zero = te.const(0.0, DType.F32)

    def step(first: te.Expr, *, whole: bool) -> Stmt:
        operands = [te.substitute(operand, {k: first + lane}) for operand in (data, weight)]
        if not whole:
            inside = te.call("lt", first + lane, te.as_index(k.extent))
            operands = [te.Select(inside, operand, zero) for operand in operands]
        return nest(in_tile, Store(sums, position, te.call("fma", *operands, te.Load(sums, (position,)))))

    k_vectors = te.Var("k_vectors", k.extent // lanes)
    summing: list[Stmt] = [For(k_vectors, Kind.SERIAL, step(k_vectors * lanes, whole=True))]
    if k.extent % lanes:
        summing.append(step(te.as_index(k_vectors.extent * lanes), whole=False))
    finish: list[Stmt] = []
    for r in range(rows):
        for c in range(columns):
            total = Across("sum", sums, (r * columns + c) * lanes, lanes)
            at = {
                gemm.rows[0]: first_row + r,
                gemm.vector: te.as_index(gemm.vector.extent - columns + c),
            }
            value, store = nest_.result_of(total), nest_.formula.store
            finish.append(Store(nest_.formula.output, te.substitute(store, at), te.substitute(value, at)))
    begin = nest(in_tile, Store(sums, position, zero))
    return with_values(nest([(tiles.var, Kind.SERIAL)], block(begin, *summing, *finish)), {})


def both(one: Terms, other: Terms) -> Terms:
    """Add the work of register tiles."""
    return Terms(
        arithmetic=one.arithmetic + other.arithmetic,
        loads=one.loads + other.loads,
        stores=one.stores + other.stores,
        branches=one.branches + other.branches,
        from_l2=one.from_l2 + other.from_l2,
        scalar=one.scalar + other.scalar,
    )
