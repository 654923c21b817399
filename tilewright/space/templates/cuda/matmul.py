"""Matmuls and convolutions on tensor cores, with any epilogue, and any prologue of both operands. A result is stored by
rows or, as where a model returns an image with its channels first, by columns.

Element types are 16-bit floats, 32-bit floats if they may be rounded ("tf32"), both with any transposition and
alignment, and bytes if both operands have rows of k. Batches are supported; convolutions are channels-last with any
window, stride and padding. The pipeline is in `codegen/cuda/matmul.cuh`; the configs decide how the work is tiled.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from tilewright import te
from tilewright.dtypes import DType
from tilewright.graph.task import Task
from tilewright.hw.gpu import GpuMachine
from tilewright.loops.gpu.tensor import (
    ROW_PADDING,
    TABLE_BYTES,
    ComputedOperand,
    MatrixTiles,
    Operand,
    TensorGemm,
    WindowOperand,
)
from tilewright.loops.gpu.thread_index import at_positions, index_at_positions, positions
from tilewright.loops.ir import Buffer, Kind, Scope, Store, nest
from tilewright.loops.tiling import with_results, with_values
from tilewright.numerics import may_round_to_tf32
from tilewright.space.space import Config, Knob, Space
from tilewright.space.template import Applied, GpuTerms, GpuWork
from tilewright.space.templates.cuda.matrices import LANES, MatrixWork, matrix_work
from tilewright.support.batch import Number, Truth, Values, least, nowhere, rounded, select
from tilewright.te.index import linear, simplify

NAME = "tensor-core-matmul"
_STEP_BYTES = (64, 128)  # bytes of a row per step
_WIDEST_WARP = 64  # maximum rows or columns of a warp
_MIN, _MAX = 64, 256  # minimum and maximum threads of a block
_MIN_SINGLY = 128  # minimum threads if elements go through registers one by one: other warps hide the latency
_MAX_REGISTERS = 265  # maximum per thread, by an estimate that is pessimistic for high counts
MAX_COPIES = 48  # maximum per thread and step: each may need its own address
_MAX_WAVES = 4  # maximum waves of blocks that share tiles; with more, there is enough work without sharing
_SHORT = 1024  # the longest sum of a product with persistent blocks
_MAX_SPLIT = 8  # blocks of a cluster that every GPU with clusters can run
_COPY, _GATHER = 4, 19  # instructions per copied chunk, and additional ones if it is gathered
_ROUNDED = 5  # instructions per fragment of rounded elements
_SINGLY = 3  # loads and stores per pair of elements that goes through registers
_VECTOR_WIDTHS = 2  # bank conflicts when results are read from shared memory
_COLUMNS = 4  # the same down the columns


class TensorCores:
    name = NAME

    def apply(self, work: GpuWork) -> Applied | None:
        if work.formula is None:
            return None
        found = matrix_work(work.formula, may_round_to_tf32(work.numerics), multiplied(work.task))
        if found is None or (found.across and not is_permuted(work.task)):
            return None
        return AppliedMatmul(found, work.machine)


def is_permuted(task: Task) -> bool:
    """Whether fusion moved a permute into the kernel. A convolution that is channels-first by itself is left to others:
    the layout pass does not know what could be joined with it channels-last, such as a mean of its pixels."""
    return any(node.op == "permute" for node in task.graph.nodes())


def multiplied(task: Task) -> DType | None:
    """The type of a contraction's operands after their prologues."""
    anchors = [node for node in task.graph.nodes() if node.op in ("matmul", "linear", "conv")]
    dtypes = {operand.dtype for anchor in anchors for operand in anchor.inputs[:2]}
    return dtypes.pop() if len(anchors) == len(dtypes) == 1 else None


class AppliedMatmul:
    def __init__(self, work: MatrixWork, machine: GpuMachine) -> None:
        self.work, self.machine = work, machine

    @cached_property
    def space(self) -> Space:
        m, n, k = self.work.sizes

        def sizes(extent: int, *choices: int) -> tuple[int, ...]:
            """Sizes up to twice the extent."""
            return tuple(size for size in choices if size < 2 * extent or size == choices[0])

        fewest = _tile_count(self.work, MatrixTiles(256, 256, 32, 4, 4, 2))
        few = self.machine.clusters and fewest <= _MAX_WAVES * self.machine.sms
        split = (1, 2, 4, 8) if few and _sums_dtype(self.work) is DType.F32 else (1,)
        block_ks = tuple(bytes // self.work.size for bytes in _STEP_BYTES)
        persistent = (False, True) if k <= _SHORT else (False,)
        return Space(
            NAME,
            (
                Knob("bm", sizes(m, 16, 32, 64, 128, 256)),
                Knob("bn", sizes(n, 32, 64, 128, 256)),
                Knob("bk", sizes(k, *block_ks)),
                Knob("warps_m", (1, 2, 4)),
                Knob("warps_n", (1, 2, 4)),
                Knob("stages", tuple(n for n in (2, 3, 4, 6, 8) if n <= 2 + -(-k // 64))),
                Knob("split", split),
                Knob("persistent", persistent, ordered=False),
            ),
            self._legal,
            together=(("bm", "bn", "bk", "warps_m", "warps_n", "stages", "split", "persistent"),),
            batched=True,
        )

    def _legal(self, values: Values) -> Truth:
        return is_legal(self.work, tiles_of(self.work, values), self.machine)

    def program(self, config: Config) -> TensorGemm:
        return gemm(self.work, tiles_of(self.work, dict(config.values)), self.machine)

    def terms(self, config: Config) -> GpuTerms:
        return self.terms_of(dict(config.values))

    def terms_of(self, values: Values) -> GpuTerms:
        """The terms of a config or, if its values are arrays, of many."""
        return terms_of(self.work, tiles_of(self.work, values))


def tiles_of(work: MatrixWork, values: Values) -> MatrixTiles:
    return MatrixTiles(**values, size=work.size)


def _sums_dtype(work: MatrixWork) -> DType:
    return work.formula.reductions[0].result.dtype


def is_legal(work: MatrixWork, tiles: MatrixTiles, machine: GpuMachine) -> Truth:
    """Whether a tiling is legal; of many tilings, which of them are."""
    warp_m, warp_n = tiles.bm // tiles.warps_m, tiles.bn // tiles.warps_n
    legal = (warp_m >= 16) & (warp_m <= _WIDEST_WARP) & (warp_n >= 16) & (warp_n <= _WIDEST_WARP)
    if nowhere(legal):
        return legal
    table = tiles.bm * TABLE_BYTES if isinstance(work.left, WindowOperand) else 0
    fewest = _MIN_SINGLY if any(_goes_singly(work, o) for o in (work.left, work.right)) else _MIN
    steps = -(-work.sizes[2] // tiles.bk)
    step_bytes = tiles.bk * tiles.size
    legal = legal & (tiles.bm % (16 * tiles.warps_m) == 0) & (tiles.bn % (16 * tiles.warps_n) == 0)
    legal = legal & _is_power_of_two(warp_m) & _is_power_of_two(warp_n)
    legal = legal & ((step_bytes == _STEP_BYTES[0]) | (step_bytes == _STEP_BYTES[1])) & (tiles.stages >= 2)
    legal = legal & (tiles.shared_bytes + table <= machine.shared_block)
    legal = legal & (fewest <= tiles.threads) & (tiles.threads <= _MAX)
    legal = legal & (copies_of(work, tiles) <= MAX_COPIES) & (registers_of(work, tiles) <= _MAX_REGISTERS)
    may_split = (tiles.split <= steps) & (not work.across) & _may_split(work, tiles, machine)
    legal = legal & ((tiles.split == 1) | may_split)
    return legal & select(tiles.persistent, _may_persist(work, tiles, machine), True)


def _may_split(work: MatrixWork, tiles: MatrixTiles, machine: GpuMachine) -> Truth:
    """Whether blocks can share a tile, and there are so few tiles that it may pay."""
    fits = machine.clusters & (tiles.split <= _MAX_SPLIT) & (tiles.bm % tiles.split == 0)
    return fits & (_tile_count(work, tiles) * tiles.split <= _MAX_WAVES * machine.sms)


def _may_persist(work: MatrixWork, tiles: MatrixTiles, machine: GpuMachine) -> Truth:
    """Whether there are enough tiles, each with so short a sum that its start and end matter."""
    short = work.sizes[2] <= _SHORT
    return short & (tiles.split == 1) & (_tile_count(work, tiles) > machine.sms)


def _tile_count(work: MatrixWork, tiles: MatrixTiles) -> int:
    m, n, _ = work.sizes
    return -(-m // tiles.bm) * -(-n // tiles.bn) * work.batches


def _blocks(work: MatrixWork, tiles: MatrixTiles, machine: GpuMachine) -> int:
    """Persistent blocks: as many as run at once, or fewer if all can then have the same number of tiles."""
    count = _tile_count(work, tiles)
    if not tiles.persistent:
        return count * tiles.split
    registers = min(255, round(registers_of(work, tiles)))
    at_once = machine.sms * max(1, machine.resident_blocks(tiles.threads, registers, tiles.shared_bytes))
    turns = -(-count // at_once)
    return -(-count // turns)


def copies_of(work: MatrixWork, tiles: MatrixTiles) -> float:
    """Copies per thread and step."""
    a, b = (_copy_lanes(work, operand) for operand in (work.left, work.right))
    return (tiles.bm / a + tiles.bn / b) * tiles.bk / tiles.threads


def _goes_singly(work: MatrixWork, operand: Operand) -> bool:
    """Whether its elements go through registers one by one."""
    return operand.lanes * work.size < 4


def _copy_lanes(work: MatrixWork, operand: Operand) -> int:
    """Elements that are copied at once; single ones are copied in pairs."""
    return 2 if _goes_singly(work, operand) else operand.lanes


def registers_of(work: MatrixWork, tiles: MatrixTiles) -> Number:
    """Estimated registers of a thread, fitted to what the compiler used for 800 kernels: each item counts 1.5 times
    its obvious size, because the compiler loads ahead and keeps addresses."""
    registers: Number = 32 + 1.4 * tiles.accumulators
    for outer, operand in ((tiles.bm, work.left), (tiles.bn, work.right)):
        elements = outer * tiles.bk / tiles.threads
        if isinstance(operand, ComputedOperand):
            registers = registers + 2.5 * elements * operand.kept_bytes / 4
        elif _goes_singly(work, operand):
            registers = registers + 1.8 * elements
        else:
            registers = registers + 2.3 * elements / operand.lanes
    return registers


def _is_power_of_two(value: Number) -> Truth:
    return value & (value - 1) == 0


@dataclass(frozen=True)
class MatmulResult:
    """The epilogue of a tile's sums for a vector of results: the value, and where it is stored."""

    sums: Buffer
    lane: te.Var
    value: te.Expr
    position: te.Expr


def result_of(work: MatrixWork, tiles: MatrixTiles, lanes: int) -> MatmulResult:
    if work.across:
        return _result_across(work, tiles, lanes)
    formula = work.formula
    m, n, _ = work.sizes
    sums = Buffer("sums", _sums_dtype(work), tiles.bm * (tiles.bn + ROW_PADDING), Scope.SCRATCH)
    lane = te.Var("v", lanes)
    row, vector = te.Var("place_m", m), te.Var("place_n", max(1, n // lanes))
    sum_row, sum_vector = te.Var("sum_row", tiles.bm), te.Var("sum_vector", tiles.bn // lanes)
    column = vector * lanes + lane
    total = te.Load(sums, (sum_row * (tiles.bn + ROW_PADDING) + sum_vector * lanes + lane,))
    value = at_positions(at_positions(formula.value, work.n, column), work.m, row)
    value = with_results(value, {formula.reductions[0].result: total})
    position = index_at_positions(index_at_positions(formula.store, work.n, column), work.m, row)
    return MatmulResult(sums, lane, value, position)


def _result_across(work: MatrixWork, tiles: MatrixTiles, lanes: int) -> MatmulResult:
    """The same with the vector along m."""
    formula, inner = work.formula, work.m[-1]
    m, n, _ = work.sizes
    sums = Buffer("sums", _sums_dtype(work), tiles.bm * (tiles.bn + ROW_PADDING), Scope.SCRATCH)
    lane = te.Var("v", lanes)
    vector, column = te.Var("place_m", max(1, m // lanes)), te.Var("place_n", n)
    sum_row, sum_column = te.Var("sum_row", max(1, tiles.bm // lanes)), te.Var("sum_vector", tiles.bn)
    total = te.Load(sums, ((sum_row * lanes + lane) * (tiles.bn + ROW_PADDING) + sum_column,))
    vectors = te.Var(inner.name, inner.extent // lanes)
    rows = positions(vector, (*work.m[:-1], vectors))
    at = {axis: rows[axis] for axis in work.m[:-1]} | {inner: rows[vectors] * lanes + lane}

    def placed(expr: te.Expr) -> te.Expr:
        return simplify(te.substitute(expr, {**at, **positions(column, work.n)}))

    value = with_results(placed(formula.value), {formula.reductions[0].result: total})
    return MatmulResult(sums, lane, value, placed(formula.store))


def gemm(work: MatrixWork, tiles: MatrixTiles, machine: GpuMachine) -> TensorGemm:
    formula = work.formula
    m, n, k = work.sizes
    left, right = work.left, work.right
    lanes = _output_lanes(work)
    result = result_of(work, tiles, lanes)
    store = Store(formula.output, result.position, result.value)
    write = with_values(nest([(result.lane, Kind.VECTOR)], store), {})
    t = tiles
    words = (
        f"tensor cores: {m} x {n} x {k} by {t.bm} x {t.bn} x {t.bk}, {t.warps_m} x {t.warps_n} warps,"
        f" {t.stages} stages"
        + (f", k in {t.split} parts" if t.split > 1 else "")
        + (", tiles in turn" if t.persistent else "")
        + (", stored by columns" if work.across else "")
        + "".join(
            f", {name} computed on the way"
            for name, operand in (("the left", left), ("the right", right))
            if isinstance(operand, ComputedOperand)
        )
    )
    params = (*formula.inputs, formula.output)
    dtype = work.dtype
    return TensorGemm(
        name=formula.name,
        params=params,
        dtype=dtype,
        a=left,
        b=right,
        batch=work.batch,
        m=m,
        n=n,
        k=k,
        tiles=tiles,
        blocks=_blocks(work, tiles, machine),
        lanes=lanes,
        sums=result.sums,
        write=write,
        decisions=words,
        packings=tuple(work.packing if buffer == work.b.source else None for buffer in formula.inputs),
        across=work.across,
    )


def _output_lanes(work: MatrixWork) -> int:
    """Neighbours along n, or m, that are written together: at most 16 bytes, whole vectors only."""
    formula, inner = work.formula, (work.m if work.across else work.n)[-1]
    form = linear(formula.store)
    numbers = [inner.extent, form.constant, *(c for atom, c in form.terms.items() if atom != inner)]
    most = min(8, 16 // formula.output.dtype.bytes)
    return next(lanes for lanes in LANES if lanes <= most and all(number % lanes == 0 for number in numbers))


# -- what a config costs ----------------------------------------------------------------------------------------------


def terms_of(work: MatrixWork, tiles: MatrixTiles) -> GpuTerms:
    left, right = work.left, work.right
    t, formula = tiles, work.formula
    tile_bytes = t.size * (t.bm + t.bn) * t.bk
    copies = sum(
        outer * t.bk / _copy_lanes(work, operand) / 32 * (_SINGLY if _goes_singly(work, operand) else 1)
        for outer, operand in ((t.bm, left), (t.bn, right))
    )
    gathered = t.bm * t.bk / _copy_lanes(work, left) / 32 if isinstance(left, WindowOperand) else 0.0
    computed = sum(
        outer * t.bk / 32 * operand.work
        for outer, operand in ((t.bm, left), (t.bn, right))
        if isinstance(operand, ComputedOperand)
    )
    warp_m, warp_n = t.bm // t.warps_m, t.bn // t.warps_n
    fragments = t.warps_m * t.warps_n * (warp_m + warp_n) * t.bk * t.size
    per_fragment = _ROUNDED if t.size == 4 else 1
    products = t.bm * t.bn * t.bk * t.size / 4096
    instructions = fragments / 512 * per_fragment + products + copies * _COPY + gathered * _GATHER + computed
    results = t.bm * t.bn
    return GpuTerms(
        blocks=_tile_count(work, t) * t.split,
        threads=t.threads,
        registers=least(255, rounded(registers_of(work, t))),
        shared_bytes=t.shared_bytes,
        steps=-(-work.sizes[2] // (t.bk * t.split)),
        stages=t.stages,
        flops=1.0 * t.bm * t.bn * t.bk * t.size,  # in units of 16-bit elements
        scalar=instructions,
        copies=copies,
        shared_traffic=1.0 * (tile_bytes + fragments),
        loaded=1.0 * tile_bytes,
        memory=float(formula.moved),
        write_loaded=formula.epilogue_reads * results / t.split,
        written=results * formula.output.dtype.bytes / t.split,
        write_shared=4.0
        * results
        * (1 + (_COLUMNS if work.across else _VECTOR_WIDTHS + select(t.split > 1, 2, 0)) / t.split),
        cluster=t.split,
        persistent=t.persistent,
    )
