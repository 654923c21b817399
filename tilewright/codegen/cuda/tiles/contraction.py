"""Chooses how a `dot` is computed, by an instruction of a warpgroup or of a warp or by FMAs, and the layouts it needs.

The layouts of operands and accumulators follow from the instruction's fragments (`hw/warpgroups.py` and
`hw/tensor_cores.py`): each bit of a register's or a thread's number is one bit of a row or a column. If a tile has
several fragments, they follow each other in registers, and the highest bits of rows and columns go to warps.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.dtypes import DType
from tilewright.hw import tensor_cores
from tilewright.hw.gpu import GpuMachine
from tilewright.hw.intrinsics import Fragment, Intrinsic
from tilewright.hw.warpgroups import MAX_COLUMNS, PANEL_BYTES, ROWS, warpgroup_multiply
from tilewright.tile.ir import Op, TileType
from tilewright.tile.passes.layouts import LANES, REPLICATED, Layout, bits_of, distributed

_DEPTHS = {DType.F16: 16, DType.BF16: 16, DType.F32: 8, DType.I8: 32, DType.U8: 32}
_ROW_BITS, _COLUMN_BITS = 4, 3  # of the results of one instruction of a warp
_GROUP_WARPS = 2  # bits of the warps of a warpgroup
_GROUP_ROWS = ROWS.bit_length() - 1
_GROUP_COLUMNS = 6  # bits of columns that one warpgroup has at least where several share them
_SMALLEST = 4  # bits of columns and of k: rows in shared memory have 32 bytes at least


@dataclass(frozen=True)
class Sizes:
    """The numbers of index bits of a contraction's m, n and k."""

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
    """A dot by `multiply`. `left`: the layout in which the first operand may already be in registers. `m_warps`,
    `n_warps`: for each bit of a warp's number, the row or column bit that it is, or REPLICATED."""

    sizes: Sizes
    multiply: Intrinsic
    accumulators: Layout
    left: Layout
    m_warps: tuple[int, ...]
    n_warps: tuple[int, ...]
    depth: int  # bits of k of one instruction
    refused: str = ""  # why no warpgroup computes it

    @property
    def m_tiles(self) -> list[int]:
        """The row bits that number a warp's instructions."""
        return [bit for bit in range(_ROW_BITS, self.sizes.m) if bit not in self.m_warps]

    @property
    def n_tiles(self) -> list[int]:
        return [bit for bit in range(_COLUMN_BITS, self.sizes.n) if bit not in self.n_warps]

    @property
    def k_steps(self) -> range:
        return range(self.depth, self.sizes.k)


@dataclass(frozen=True)
class WarpgroupPlan:
    """A dot by a warpgroup instruction of `columns` columns. Operands are in shared memory; the first may be in
    registers, in the layout `left`."""

    sizes: Sizes
    dtype: DType
    columns: int
    accumulators: Layout
    left: Layout
    m_warps: tuple[int, ...]
    n_warps: tuple[int, ...]
    depth: int

    @property
    def m_tiles(self) -> list[int]:
        return [bit for bit in range(_GROUP_ROWS, self.sizes.m) if bit not in self.m_warps]

    @property
    def n_tiles(self) -> list[int]:
        first = self.columns.bit_length() - 1
        return [bit for bit in range(first, self.sizes.n) if bit not in self.n_warps]

    @property
    def k_steps(self) -> range:
        return range(self.depth, self.sizes.k)

    def multiply(self, left_in_registers: bool) -> Intrinsic:
        return warpgroup_multiply(self.columns, self.dtype, left_in_registers=left_in_registers)


@dataclass(frozen=True)
class FmaPlan:
    sizes: Sizes
    accumulators: Layout


Plan = WarpgroupPlan | TensorPlan | FmaPlan


def described(plan: Plan) -> str:
    """The instruction of a dot, and why it is not a warpgroup's."""
    if isinstance(plan, WarpgroupPlan):
        return plan.multiply(False).name
    if isinstance(plan, TensorPlan):
        return f"{plan.multiply.name} ({plan.refused})" if plan.refused else plan.multiply.name
    return "FMA"


def plan_dot(op: Op, machine: GpuMachine, warps: int, chained: bool) -> Plan:
    """The plan of a dot. `chained`: the result is an operand of another dot, so each of its rows stays in one warp."""
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
    found = _plan_warpgroups(sizes, dtype, machine, warps)
    if isinstance(found, WarpgroupPlan):
        return found
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
    return TensorPlan(sizes, multiply, accumulators, held, m_warps, n_warps, k_bits, found)


def _plan_warpgroups(sizes: Sizes, dtype: DType, machine: GpuMachine, warps: int) -> WarpgroupPlan | str:
    """The plan by warpgroup instructions, or why there is none. Only 16-bit floats qualify: 32-bit ones are rounded in
    registers, and these instructions read shared memory."""
    if not dtype.is_half:
        return f"a warpgroup multiplies f16 and bf16, not {dtype.short}"
    if warpgroup_multiply(8, dtype).missing(machine):
        return f"{machine.capability} has no warpgroup instructions"
    if warps < _GROUP_WARPS:
        return f"a warpgroup has 4 warps, the block {1 << warps}"
    if sizes.m < _GROUP_ROWS:
        return f"a warpgroup has {ROWS} rows, the tile {1 << sizes.m}"
    if min(sizes.n, sizes.k) < _SMALLEST:
        return f"rows of shared memory need {1 << _SMALLEST} elements at least"
    m, n = sizes.m, sizes.n
    m_warps, n_warps = [_ROW_BITS, _ROW_BITS + 1], [REPLICATED] * _GROUP_WARPS
    for _ in range(_GROUP_WARPS, warps):
        rows = m > _GROUP_ROWS
        if not rows and n <= _GROUP_COLUMNS:
            return f"{1 << warps} warps are more than a tile of {1 << sizes.m} x {1 << sizes.n} has work for"
        m, n = (m - 1, n) if rows else (m, n - 1)
        m_warps.append(m if rows else REPLICATED)
        n_warps.append(REPLICATED if rows else n)
    columns = min(1 << n, MAX_COLUMNS)
    depth = _DEPTHS[dtype].bit_length() - 1
    split = (tuple(m_warps), tuple(n_warps))
    plan = WarpgroupPlan(sizes, dtype, columns, _NOTHING, _NOTHING, *split, depth)
    sums, left, _ = plan.multiply(True).fragments
    registers, lanes = _bits(sums, sizes.n)
    batches = range(sizes.m + sizes.n, sizes.m + sizes.n + sizes.batch)
    accumulators = Layout(
        (*registers, *plan.n_tiles, *(sizes.n + bit for bit in plan.m_tiles), *batches),
        lanes,
        tuple(b if b != REPLICATED else sizes.n + a for a, b in zip(*split, strict=True)),
    )
    registers, lanes = _bits(left, sizes.k)
    batches = range(sizes.m + sizes.k, sizes.m + sizes.k + sizes.batch)
    held = Layout(
        (*registers, *plan.k_steps, *(sizes.k + bit for bit in plan.m_tiles), *batches),
        lanes,
        tuple(sizes.k + a if a != REPLICATED else REPLICATED for a in m_warps),
    )
    return WarpgroupPlan(sizes, dtype, columns, accumulators, held, *split, depth)


_NOTHING = Layout((), (), ())


def _split(sizes: Sizes, warps: int, chained: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Divide warps over rows and columns such that the block of each is nearly square."""
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
    """Register bits and lane bits, as bits of row * 2**columns + column."""

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
    """A matrix in shared memory, in panels of rows of up to 128 bytes. The 16-byte chunks of neighbouring rows are
    exchanged (swizzled) so that eight rows at one column are in different banks. `masks`: for each bit of the element
    index, its address bits."""

    masks: tuple[int, ...]
    by_rows: bool  # neighbours lie along the last axis
    row_bytes: int = 0
    panel_bytes: int = 0  # how far the next panel is


def shared_tile(rows: int, columns: int, batch: int, size: int, *, by_rows: bool) -> SharedTile:
    """The shared-memory tile of a matrix with this many bits of rows and columns."""
    inner, outer = (columns, rows) if by_rows else (rows, columns)
    row_bytes = min(size << inner, PANEL_BYTES)
    panel_bytes = row_bytes << outer
    whole = (row_bytes // size).bit_length() - 1  # bits within a row of a panel
    chunks = row_bytes // 16
    along = [size << bit if bit < whole else panel_bytes << (bit - whole) for bit in range(inner)]
    across = []
    for bit in range(outer):
        skipped = 0 if chunks >= 8 else 1 if chunks == 4 else 2
        exchanged = bit - skipped
        swizzled = 16 << exchanged if chunks >= 2 and 0 <= exchanged < min(3, chunks.bit_length() - 1) else 0
        across.append(row_bytes << bit | swizzled)
    low, high = (along, across) if by_rows else (across, along)
    batches = [(size << (rows + columns)) << bit for bit in range(batch)]
    return SharedTile((*low, *high, *batches), by_rows, row_bytes, panel_bytes)
