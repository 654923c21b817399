"""How a `dot` is computed: by an instruction of tensor cores, or by FMAs; and the layouts that follow from it.

The layouts of operands and accumulators are read off the instruction's fragments (`hw/tensor_cores.py`): each bit of a
register's or a lane's number is one bit of a row or a column. Fragments that a tile has more of follow each other in
registers, and the highest bits of rows and columns go to warps.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.dtypes import DType
from tilewright.hw import tensor_cores
from tilewright.hw.gpu import GpuMachine
from tilewright.hw.intrinsics import Fragment, Intrinsic
from tilewright.tile.ir import Op, TileType
from tilewright.tile.passes.layouts import LANES, REPLICATED, Layout, bits_of, distributed

_DEPTHS = {DType.F16: 16, DType.BF16: 16, DType.F32: 8, DType.I8: 32, DType.U8: 32}
_ROW_BITS, _COLUMN_BITS = 4, 3  # of the results of one instruction


@dataclass(frozen=True)
class Sizes:
    """Bits of the sizes of a contraction."""

    batch: int
    m: int
    n: int
    k: int

    @staticmethod
    def of(op: Op) -> Sizes:
        a, b = (operand.type for operand in op.operands[:2])
        assert isinstance(a, TileType) and isinstance(b, TileType)
        *batch, m, k = a.shape
        return Sizes(bits_of(batch), bits_of((m,)), bits_of((b.shape[-1],)), bits_of((k,)))


@dataclass(frozen=True)
class TensorPlan:
    """By `multiply`. `left`: the layout in which the first operand may be in registers already. `m_warps`, `n_warps`:
    by bit of a warp's number, the bit of a row or a column that it is, or REPLICATED."""

    sizes: Sizes
    multiply: Intrinsic
    accumulators: Layout
    left: Layout
    m_warps: tuple[int, ...]
    n_warps: tuple[int, ...]
    depth: int  # bits of k of one instruction

    @property
    def m_tiles(self) -> list[int]:
        """The bits of a row that number a warp's instructions."""
        return [bit for bit in range(_ROW_BITS, self.sizes.m) if bit not in self.m_warps]

    @property
    def n_tiles(self) -> list[int]:
        return [bit for bit in range(_COLUMN_BITS, self.sizes.n) if bit not in self.n_warps]

    @property
    def k_steps(self) -> range:
        return range(self.depth, self.sizes.k)


@dataclass(frozen=True)
class FmaPlan:
    sizes: Sizes
    accumulators: Layout


Plan = TensorPlan | FmaPlan


def plan_dot(op: Op, machine: GpuMachine, warps: int, chained: bool) -> Plan:
    """`chained`: the result is an operand of another dot, whose rows then stay in one warp."""
    sizes = Sizes.of(op)
    operand = op.operands[0].type
    assert isinstance(operand, TileType)
    dtype = operand.dtype
    depth = _DEPTHS.get(dtype, 0)
    exact = dtype is DType.F32 and op.settings["precision"] != "tf32"
    fits = depth and sizes.m >= _ROW_BITS and sizes.n >= _COLUMN_BITS and 1 << sizes.k >= depth
    if exact or not fits or tensor_cores.multiply(depth, dtype).missing(machine):
        total = sizes.batch + sizes.m + sizes.n
        return FmaPlan(sizes, distributed(range(total), min(2, sizes.n), warps))
    multiply = tensor_cores.multiply(depth, dtype)
    m_warps, n_warps = _split(sizes, warps, chained)
    sums, left, _ = multiply.fragments
    k_bits = depth.bit_length() - 1
    plan = TensorPlan(sizes, multiply, _NOTHING, _NOTHING, m_warps, n_warps, k_bits)
    m_tiles, n_tiles = plan.m_tiles, plan.n_tiles
    batches = range(sizes.m + sizes.n, sizes.m + sizes.n + sizes.batch)
    registers, lanes = _bits(sums, sizes.n)
    accumulators = Layout(
        (*registers, *n_tiles, *(sizes.n + bit for bit in m_tiles), *batches),
        lanes,
        tuple(
            n if n != REPLICATED else sizes.n + m if m != REPLICATED else REPLICATED
            for m, n in zip(m_warps, n_warps, strict=True)
        ),
    )
    registers, lanes = _bits(left, sizes.k)
    batches = range(sizes.m + sizes.k, sizes.m + sizes.k + sizes.batch)
    held = Layout(
        (*registers, *plan.k_steps, *(sizes.k + bit for bit in m_tiles), *batches),
        lanes,
        tuple(sizes.k + m if m != REPLICATED else REPLICATED for m in m_warps),
    )
    return TensorPlan(sizes, multiply, accumulators, held, m_warps, n_warps, k_bits)


_NOTHING = Layout((), (), ())


def _split(sizes: Sizes, warps: int, chained: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Warps over rows and columns, so that each has a block that is about square."""
    m, n = sizes.m, sizes.n
    m_warps, n_warps = [REPLICATED] * warps, [REPLICATED] * warps
    for number in range(warps):
        rows, columns = m > _ROW_BITS, n > _COLUMN_BITS
        if rows and (chained or not columns or m >= n):
            m -= 1
            m_warps[number] = m
        elif columns:
            n -= 1
            n_warps[number] = n
    return tuple(m_warps), tuple(n_warps)


def _bits(fragment: Fragment, columns: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of registers and of lanes, as bits of row * 2**columns + column."""

    def bit(lane: int, n: int) -> int:
        row, column = fragment.element(lane, n)
        number = (row << columns) + column
        assert number.bit_count() == 1
        return int(number).bit_length() - 1

    registers = tuple(bit(0, 1 << n) for n in range(fragment.size.bit_length() - 1))
    return registers, tuple(bit(1 << n, 0) for n in range(LANES))


# -- operands in shared memory ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SharedTile:
    """A matrix in shared memory, rows of 16-byte chunks, chunks of neighbouring rows exchanged (swizzled) so that eight
    rows at one column lie in different banks. `masks`: by bit of the element's number, the bits of the address."""

    masks: tuple[int, ...]
    by_rows: bool  # neighbours lie along the last axis


def shared_tile(rows: int, columns: int, batch: int, size: int, *, by_rows: bool) -> SharedTile:
    """Of a matrix with so many bits of rows and columns."""
    inner, outer = (columns, rows) if by_rows else (rows, columns)
    row_bytes = size << inner
    chunks = row_bytes // 16
    along = [size << bit for bit in range(inner)]
    across = []
    for bit in range(outer):
        skipped = 0 if chunks >= 8 else 1 if chunks == 4 else 2
        exchanged = bit - skipped
        swizzled = 16 << exchanged if chunks >= 2 and 0 <= exchanged < min(3, chunks.bit_length() - 1) else 0
        across.append(row_bytes << bit | swizzled)
    low, high = (along, across) if by_rows else (across, along)
    batches = [(size << (rows + columns)) << bit for bit in range(batch)]
    return SharedTile((*low, *high, *batches), by_rows)
