"""Chains of matmuls and convolutions of 16-bit floats in one tensor-core kernel: Bolt's persistent kernels.

    relu(conv3x3(x, a) + c) -> conv1x1(., b)      y = gelu(x @ a + c) -> y @ b + x

The first product is any that `tensor-core-matmul` computes. Of the others, a block computes all columns of its rows
from the rows that it has: `CONDITIONS` lists what that takes. Intermediate results are rounded to 16 bits, as between
kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from tilewright import te
from tilewright.dtypes import DType
from tilewright.graph.chain import NORMS, Refused
from tilewright.hw.gpu import GpuMachine
from tilewright.loops.formula import Formula
from tilewright.loops.gpu.chain import (
    FRAGMENT,
    REGISTERS,
    SHARED,
    ChainTiles,
    Follower,
    TensorChain,
)
from tilewright.loops.gpu.tensor import TABLE_BYTES, MatrixOperand, MatrixTiles, WindowOperand
from tilewright.loops.gpu.thread_index import at_positions, step_of
from tilewright.loops.ir import Buffer, Kind, Scope, Store, nest
from tilewright.loops.tiling import with_results, with_values
from tilewright.space.chain import Stage, stages_of
from tilewright.space.space import Config, Knob, Space
from tilewright.space.template import Applied, GpuTerms, GpuWork
from tilewright.space.templates.cuda import matmul
from tilewright.space.templates.cuda.matrices import MatrixWork, matrix_work
from tilewright.support.arith import ceil_div
from tilewright.support.batch import Number, Truth, Values, least, most, nowhere, rounded, select
from tilewright.te.index import linear

NAME = "tensor-core-chain"
_HALVES = (DType.F16, DType.BF16)
_WIDEST = 256  # maximum columns of a product: a block has them all
_WIDEST_WARP = {REGISTERS: 128, SHARED: 64}  # maximum columns of the first product in a warp
_MAX_REGISTERS = 230  # of a thread, estimated
_FRAGMENT_REGISTERS = 8  # of a fragment of 16 columns that is read a step ahead
_OTHERS = 40  # registers of a thread for everything else
_MIN, _MAX = 64, 256  # minimum and maximum threads of a block
_BETWEEN = 0.22  # warp instructions per intermediate element: its addition, activation, conversion
_VECTOR_WIDTHS = 2  # bank conflicts when results are read from shared memory


@dataclass(frozen=True)
class ChainWork:
    """The products of a chain, each over the buffers of the whole task."""

    stages: tuple[Stage, ...]
    products: tuple[MatrixWork, ...]
    params: tuple[Buffer, ...]

    @cached_property
    def first(self) -> MatrixWork:
        return self.products[0]

    @cached_property
    def m(self) -> int:
        return self.first.sizes[0]

    @cached_property
    def widths(self) -> tuple[int, ...]:
        return tuple(product.sizes[1] for product in self.products)

    @cached_property
    def moved(self) -> int:
        """Bytes of all inputs and of the output."""
        return sum(buffer.size * buffer.dtype.bytes for buffer in self.params)


# -- which chains -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Condition:
    """A condition on two neighbouring products, and the reason to give if it does not hold."""

    holds: Callable[[Stage, MatrixWork, MatrixWork], bool]
    reason: str


CONDITIONS = (
    Condition(
        lambda stage, one, two: not one.batch and not two.batch,
        "its GEMMs are batched",
    ),
    Condition(
        lambda stage, one, two: one.dtype is two.dtype and one.dtype in _HALVES and _is_half(one.formula),
        "it does not multiply 16-bit floats throughout",
    ),
    Condition(
        lambda stage, one, two: two.a.source == stage.source and two.left_element is None,
        "the second GEMM does not read the first as its left operand",
    ),
    Condition(
        lambda stage, one, two: (
            two.guard is None
            and isinstance(two.left, MatrixOperand)
            and (two.sizes[0], two.sizes[2]) == one.sizes[:2]
            and not two.left.transposed
            and two.left.pitch == one.sizes[1]
            and linear(two.left.offset).terms == {}
            and linear(two.left.offset).constant == 0
            and _stores_rows(one)
        ),
        "the second GEMM reads other rows than the block computes",
    ),
    Condition(
        lambda stage, one, two: isinstance(two.right, MatrixOperand) and not linear(two.right.offset).terms,
        "the weight of the second GEMM is computed",
    ),
)


def _is_half(formula: Formula) -> bool:
    return formula.output.dtype in _HALVES


def _stores_rows(work: MatrixWork) -> bool:
    """Whether its result is a dense matrix of its rows, in the order of the tile's."""
    form = linear(work.formula.store)
    _, n, _ = work.sizes
    rows = step_of(form.terms, work.m) if work.m else n
    axes = {*work.m, *work.n}
    return form.constant == 0 and set(form.terms) <= axes and step_of(form.terms, work.n) == 1 and rows == n


def chain_work(work: GpuWork) -> ChainWork | Refused:
    """Match a task as a chain of products; Refused with the first condition that does not hold."""
    if work.numerics == "strict":
        return Refused("strict numerics round every operator")
    stages = stages_of(work)
    if isinstance(stages, Refused):
        return stages
    products: list[MatrixWork] = []
    for stage in stages:
        found = matrix_work(stage.formula, False, matmul.multiplied(stage.sub.task))
        if found is None:
            groups = max(node.attrs.get("groups", 1) for node in stage.sub.task.graph.nodes())
            if groups > 1:
                return Refused(
                    f"{stage.sub.task.label} has {groups} groups of channels, so it is not one GEMM"
                )
            return Refused(f"{stage.sub.task.label} is not a GEMM of 16-bit floats")
        products.append(found)
    if any(product.packing is not None for product in products):
        return Refused("it does not multiply 16-bit floats throughout")
    for stage, (one, two) in zip(stages[1:], pairwise(products), strict=True):
        for condition in CONDITIONS:
            if not condition.holds(stage, one, two):
                return Refused(condition.reason)
    for number, product in enumerate(products, 1):
        if product.sizes[1] > _WIDEST:
            return Refused(
                f"GEMM {number} has {product.sizes[1]} columns; a block keeps at most {_WIDEST} on chip"
            )
    inputs: dict[str, Buffer] = {
        buffer.name: buffer for stage in stages for buffer in stage.formula.inputs if buffer != stage.source
    }
    count = len(work.task.graph.inputs)
    params = (*(inputs[f"x{number}"] for number in range(count)), stages[-1].formula.output)
    return ChainWork(stages, tuple(products), params)


class TensorCoreChain:
    name = NAME

    def apply(self, work: GpuWork) -> Applied | None:
        found = chain_work(work)
        return None if isinstance(found, Refused) else AppliedChain(found, work.machine)

    def refusal(self, work: GpuWork) -> str | None:
        """Why it does not compute a task; None if it does, or if a template for norms has the reason."""
        if any(node.op in NORMS for node in work.task.graph.nodes()):
            return None
        found = chain_work(work)
        if isinstance(found, Refused):
            return found.reason
        if next(iter(AppliedChain(found, work.machine).space.configs()), None) is None:
            least = min(_least_bytes(found, resident) for resident in (REGISTERS, SHARED))
            return (
                f"its intermediate results and weights take at least {least} bytes of a block's"
                f" {work.machine.shared_block} of shared memory, or too many registers"
            )
        return None


def _least_bytes(work: ChainWork, resident: str) -> int:
    return ChainTiles(FRAGMENT, 32, 1, 1, 2, False, resident).shared_bytes(work.widths)


# -- configs ----------------------------------------------------------------------------------------------------------


class AppliedChain:
    def __init__(self, work: ChainWork, machine: GpuMachine) -> None:
        self.work, self.machine = work, machine

    @cached_property
    def space(self) -> Space:
        k = self.work.first.sizes[2]
        return Space(
            NAME,
            (
                Knob("bm", (16, 32, 64, 128, 256)),
                Knob("bk", tuple(bk for bk in (32, 64) if bk == 32 or k > 32)),
                Knob("warps_m", (1, 2, 4, 8)),
                Knob("warps_n", (1, 2, 4)),
                Knob("stages", tuple(n for n in (2, 3, 4, 6) if n <= 2 + -(-k // 64))),
                Knob("persistent", (False, True), ordered=False),
                Knob("resident", (REGISTERS, SHARED), ordered=False),
            ),
            lambda values: self.is_legal(tiles_of(values)),
            together=(("bm", "bk", "warps_m", "warps_n", "stages", "persistent", "resident"),),
            batched=True,
        )

    def is_legal(self, tiles: ChainTiles) -> Truth:
        t, work = tiles, self.work
        warp_m = t.bm // t.warps_m
        legal = (t.bm % (FRAGMENT * t.warps_m) == 0) & (warp_m <= 64) & (warp_m & (warp_m - 1) == 0)
        if nowhere(legal):
            return legal
        widest = select(t.resident == REGISTERS, _WIDEST_WARP[REGISTERS], _WIDEST_WARP[SHARED])
        legal = legal & ((t.resident != REGISTERS) | (t.warps_n == 1))
        legal = legal & (t.computed(work.widths[0]) <= widest * t.warps_n)
        singly = any(operand.lanes == 1 for operand in (work.first.left, work.first.right))
        legal = legal & ((128 if singly else _MIN) <= t.threads) & (t.threads <= _MAX)
        legal = legal & select(t.persistent, ceil_div(work.m, t.bm) > self.machine.sms, True)
        table = t.bm * TABLE_BYTES if isinstance(work.first.left, WindowOperand) else 0
        legal = legal & (t.shared_bytes(work.widths) + table <= self.machine.shared_block)
        legal = legal & (matmul.copies_of(work.first, first_tiles(work, t)) <= matmul.MAX_COPIES)
        return legal & (self._registers(t) <= _MAX_REGISTERS)

    def _registers(self, tiles: ChainTiles) -> Number:
        """Estimated registers of a thread: of the first product's loop, or of the largest product after it."""
        t, work = tiles, self.work
        warp_m = t.bm // t.warps_m
        wide = most(0, t.computed(work.widths[0]) // t.warps_n - 64) // FRAGMENT
        found = matmul.registers_of(work.first, computed_tiles(work, t)) + _FRAGMENT_REGISTERS * wide
        for k, n in pairwise(work.widths):
            left = select(t.resident == REGISTERS, warp_m * k / 64, warp_m / 4)
            found = most(found, _OTHERS + left + 1.15 * warp_m * t.computed(n) / t.warps_n / 32)
        return found

    def program(self, config: Config) -> TensorChain:
        return chain(self.work, tiles_of(dict(config.values)), self.machine, self._blocks(config))

    def _blocks(self, config: Config) -> int:
        """Persistent blocks: as many as run at once, or fewer if all can then have the same number of tiles."""
        t = tiles_of(dict(config.values))
        count = ceil_div(self.work.m, t.bm)
        if not t.persistent:
            return count
        registers, shared = min(255, round(self._registers(t))), t.shared_bytes(self.work.widths)
        at_once = self.machine.sms * max(1, self.machine.resident_blocks(t.threads, registers, shared))
        return ceil_div(count, ceil_div(count, at_once))

    def terms(self, config: Config) -> GpuTerms:
        return self.terms_of(dict(config.values))

    def terms_of(self, values: Values) -> GpuTerms:
        """Those of the first product; the others come behind its main loop, with the results. If the values are
        arrays, of many configs."""
        work, t = self.work, tiles_of(values)
        first = matmul.terms_of(work.first, computed_tiles(work, t))
        columns = [t.computed(n) for n in work.widths]
        between = 1.0 * sum(t.bm * n for n in columns[:-1])
        flops = sum(2.0 * t.bm * one * two for one, two in pairwise(columns))
        read = sum(
            t.warps_m * t.warps_n * 2.0 * one * (two / t.warps_n) for one, two in pairwise(columns)
        )  # every warp reads the weights of its columns
        kept = select(t.resident == REGISTERS, 0.0, (2.0 + 2.0 * t.warps_n) * between)
        last = work.stages[-1].formula
        results = t.bm * work.widths[-1]
        reads = sum(
            s.formula.epilogue_reads * t.bm * n for s, n in zip(work.stages, work.widths, strict=True)
        )
        weights = select(t.persistent, 0.0, t.weight_bytes(work.widths))
        return GpuTerms(
            blocks=ceil_div(work.m, t.bm),
            threads=t.threads,
            registers=least(255, rounded(self._registers(t))),
            shared_bytes=t.shared_bytes(work.widths),
            steps=first.steps,
            stages=t.stages,
            flops=first.flops,
            scalar=first.scalar,
            copies=first.copies,
            shared_traffic=first.shared_traffic,
            loaded=first.loaded,
            memory=float(work.moved),
            write_loaded=reads + weights,
            written=1.0 * results * last.output.dtype.bytes,
            write_shared=4.0 * t.bm * columns[-1] * (1 + _VECTOR_WIDTHS) + kept + read,
            persistent=t.persistent,
            write_flops=flops,
            write_scalar=_BETWEEN * between + flops / 4096 + read / 512,
        )


def tiles_of(values: Values) -> ChainTiles:
    return ChainTiles(**values)


def first_tiles(work: ChainWork, tiles: ChainTiles) -> MatrixTiles:
    t = tiles
    return MatrixTiles(t.bm, t.columns(work.widths[0]), t.bk, t.warps_m, t.warps_n, t.stages)


def computed_tiles(work: ChainWork, tiles: ChainTiles) -> MatrixTiles:
    """The same with the columns that are computed, for what it costs."""
    return replace(first_tiles(work, tiles), bn=tiles.computed(work.widths[0]))


# -- what a config builds ---------------------------------------------------------------------------------------------


def chain(work: ChainWork, tiles: ChainTiles, machine: GpuMachine, blocks: int) -> TensorChain:
    followers = tuple(_follower(one, two) for one, two in pairwise(work.products))
    last, t = work.products[-1], tiles
    # The epilogue of the last product reads its sums as if it were a product by itself.
    end = matmul.gemm(
        last, MatrixTiles(t.bm, t.computed(work.widths[-1]), 32, t.warps_m, t.warps_n, 2), machine
    )
    sizes = " then ".join("{} x {} x {}".format(*product.sizes) for product in work.products)
    words = (
        f"chain on tensor cores: {sizes} by {t.bm} rows, steps of {t.bk}, {t.warps_m} x {t.warps_n} warps,"
        f" {t.stages} stages, intermediate results in {_named(t)}"
        + (", tiles in turn" if t.persistent else "")
    )
    return TensorChain(
        name="chain",
        params=work.params,
        first=matmul.gemm(work.first, first_tiles(work, t), machine),
        followers=followers,
        tiles=t,
        blocks=blocks,
        lanes=end.lanes,
        sums=end.sums,
        write=end.write,
        decisions=words,
    )


def _named(tiles: ChainTiles) -> str:
    return "registers" if tiles.resident == REGISTERS else "shared memory"


def _follower(one: MatrixWork, two: MatrixWork) -> Follower:
    """The second product, and what becomes of the first one's sums before it."""
    formula = one.formula
    m, n, k = one.sizes[0], two.sizes[1], two.sizes[2]
    lanes = 2 if k % 2 == 0 else 1
    total, value = (Buffer(name, DType.F32, lanes, Scope.REGISTER) for name in ("sum", "value"))
    lane = te.Var("v", lanes)
    row, vector = te.Var("place_m", m), te.Var("place_n", max(1, k // lanes))
    result = at_positions(at_positions(formula.value, one.n, vector * lanes + lane), one.m, row)
    result = with_results(result, {formula.reductions[0].result: te.Load(total, (lane,))})
    if isinstance(result, te.Cast) and result.value.dtype is DType.F32:  # rounded two at a time
        result = result.value
    stored = Store(value, lane, te.cast(result, DType.F32))
    assert isinstance(two.right, MatrixOperand)
    return Follower(two.right, n, k, with_values(nest([(lane, Kind.VECTOR)], stored), {}), total, value)
