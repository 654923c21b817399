"""Matmuls and convolutions by a constant with Winograd's inner-product trick, which halves the multiplications.

    a1 b1 + a2 b2 = (a1 + b2) (a2 + b1) - a1 a2 - b1 b2         (`runtime/paired.py`)

It takes two additions more, which pays where a core adds vectors alongside the FMAs, not instead of them
(`CpuMachine.independent_adds`). Two thirds of the rows of a register tile are summed so, one third product by product:
then both kinds of units are busy, and two thirds of the FMAs are left.

    for every chunk of panels and block of rows:                    (parallel)
      for every `rows` rows of the block:
        row by row the means of its squares and absolute values; then, in vectors, all their sizes and ratios
        row by row its lines, scaled by its size, and its correction to scratch
      for every panel of the weight, one vector wide:
        for every `rows` rows of the block:
          acc[rows] = 0
          for groups of 16 steps of K, all 8 pairs (step of K, step of K + 8) written out:
            for every row: acc += (line[step of K] + panel[step of K + 8]) * (line[step of K + 8] + panel[step of K])
              or acc += line[step of K] * panel[step of K] + line[step of K + 8] * panel[step of K + 8]
            prefetch lines of the next panel
          out = epilogue((acc - corrections) * sizes)

An element of the data is used once where it is read, so that it is spread by the instruction that uses it: for that
tiles are one vector wide. The lines of a tile lie in the order in which they are read. The last panel is moved back
where it is not whole, and so are the last register tile and the last block of rows; the last group is filled up with
zeros, of which pairs are left out.

A convolution with channels last is one too: each pixel of its result is a row, and the groups of its steps of K are
those of the channels, window by window.

Rows and columns are brought to one size, the weight when the model is linked: what is added up is rounded at the size
of the larger. An error is small compared with the product of a row's size and a column's, even where products of large
elements with small ones are all there is. `strict` numerics do without.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property

from tilewright import te
from tilewright.dtypes import DType
from tilewright.loops.ir import SCRATCH_LIMIT, Program
from tilewright.loops.tiling import Tiles, extent_of
from tilewright.numerics import is_strict, may_lose_digits
from tilewright.runtime.paired import GROUP, HALF
from tilewright.space.space import Config, Knob, Space
from tilewright.space.template import Applied, Terms, Work
from tilewright.space.templates.cpu.contraction_terms import BEGIN, COPIED_BYTES, PREFETCHED_COST, even_block
from tilewright.space.templates.cpu.fast_algebra.paired_nest import PairedNest, PairedTiling, packed_weight
from tilewright.space.templates.cpu.fast_algebra.row_gemm import RowGemm, row_gemm_of
from tilewright.space.templates.cpu.gemm import gemm_of
from tilewright.support.arith import ceil_div
from tilewright.support.batch import Number, Truth, gcd, least, most, nowhere, select

NAME = "paired"
_ROWS = (6, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 20)
_BLOCKS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32)
_OVERLAPPED = (
    12  # registers alongside the sums of a tile: LLVM adds for some rows before it multiplies for others
)
_MIN_K = 2 * GROUP  # fewer do not make up for what is done with a sum
_MIN_PANELS = 3  # fewer do not make up for scaling the rows, even where every register tile runs in pairs
MAX_UNCERTIFIED = (
    1.05  # of the plain template's time, what a kernel without a certified register tile may take
)
_BYTES = DType.F32.bytes
_FORESEEN = 0.5  # of what a panel that returns from L2 costs: the hardware foresees a run
_ROW = 12.0  # cycles to finish with a row that is scaled
_RUN = 15.0  # cycles to find and to begin with a run of it, where it is a window
_SCALED = Terms(
    arithmetic=4.0, loads=3.0, stores=1.0, branches=2.0
)  # of a vector of a row: measured, then scaled
_PAIR = 0.08  # of a cycle for a row and a pair of steps of K, that neither kind of units explains
_DISPLACED = 3.0  # cycles for a line of a row that others of it have displaced from L1
_TALL = 0.2  # cycles for a row beyond 12 in a step
_TILE = 30.0  # cycles to begin and to end with a register tile


class Paired:
    name = NAME

    def apply(self, work: Work) -> Applied | None:
        if is_strict(work.numerics) or not work.machine.independent_adds:
            return None
        sums = row_gemm_of(gemm_of(work.formula))
        if sums is None:
            return None
        applied = AppliedPaired(work, sums)
        return applied if next(applied.space.configs(), None) is not None else None


class AppliedPaired:
    name = NAME

    def __init__(self, work: Work, sums: RowGemm, *, max_uncertified: float = MAX_UNCERTIFIED) -> None:
        self.max_uncertified = max_uncertified
        self.machine, self.numerics = work.machine, work.numerics
        self.sums, self.gemm = sums, sums.gemm
        self.lanes = work.machine.lanes(DType.F32)
        self.row, self.k_axes = sums.row, sums.gemm.length

    # -- the space ------------------------------------------------------------------------------------------------

    @cached_property
    def space(self) -> Space:
        return Space(
            NAME,
            (
                Knob("rows", _ROWS),
                Knob("block", (0, *_BLOCKS)),
                Knob("chunks", (1, 2, 4, 8, 16, 32)),
                Knob("prefetch", (0, 1)),
            ),
            self._legal,
            together=(("rows", "block"), ("block", "chunks", "prefetch")),
            batched=True,
        )

    def _legal(self, values: Mapping[str, Number]) -> Truth:
        rows, block = values["rows"], values["block"]
        if not self._is_packed or self.k_axes < _MIN_K or not self._fills_tiles:
            return False
        legal = (rows + _OVERLAPPED <= self.machine.vector_registers) & (
            most(1, block) * rows <= self.row.extent
        )
        if nowhere(legal):
            return False
        shape = self.shape_of(values)
        legal = legal & (shape.chunks == values["chunks"]) & (shape.scratch_bytes <= SCRATCH_LIMIT)
        return legal & (self.uncertified_time(shape) <= self.max_uncertified) if shape.certified else legal

    def uncertified_time(self, shape: PairedTiling) -> Number:
        """The time of a row where no register tile is certified, as a multiple of the plain template's.

        Both multiply product by product. This one also measures and scales the row, which takes the longer the fewer
        columns there are to share it; the plain one copies an image with a border before it reads it. All is counted by
        what the ports of any processor do in a cycle."""
        core = self.machine.throughput
        multiplied = shape.per_chunk * self.k_axes / core.fmas
        busiest = max(
            _SCALED.arithmetic / core.fmas, _SCALED.loads / core.loads, _SCALED.stores / core.stores
        )
        vectors = shape.groups * GROUP / self.lanes
        runs = extent_of(self.sums.outer) if self.sums.outer else 0
        scaled = vectors * (busiest + _SCALED.branches) + _ROW + runs * _RUN
        bordered = not isinstance(self.sums.data, te.Load)
        copied = self.sums.data_bytes / self.row.extent / COPIED_BYTES if bordered else 0.0
        return (multiplied + scaled) / (multiplied + copied)

    @property
    def least_computed(self) -> float:
        """Rows that the register tiles of the best height compute, for each row: the last one may be partial."""
        rows = self.row.extent
        return min((ceil_div(rows, each) * each / rows for each in _ROWS if each <= rows), default=math.inf)

    @cached_property
    def _fills_tiles(self) -> bool:
        """Whether the limit holds for some config with partial register tiles counted. It is not asked of each config:
        those that pass would be so few and far apart that a search ends at slow ones."""
        if may_lose_digits(self.numerics):
            return True
        whole = self.shape_of({"rows": _ROWS[0], "block": 0, "chunks": 1, "prefetch": 0})
        return bool(self.least_computed * self.uncertified_time(whole) <= self.max_uncertified)

    @cached_property
    def _is_packed(self) -> bool:
        """Whether the weight can be stored in panels: there are some, groups of a window's steps of K are whole, and
        nothing else reads it."""
        panels = Tiles(self.gemm.vector, self.lanes)
        if panels.count < _MIN_PANELS or (self.sums.outer and self.sums.run.extent % GROUP):
            return False
        return packed_weight(self.sums, panels, panels.var, te.Var("v", self.lanes)) is not None

    def shape_of(self, values: Mapping[str, Number]) -> PairedTiling:
        rows, whole = values["rows"], self.row.extent
        panels = Tiles(self.gemm.vector, self.lanes)
        per_chunk = ceil_div(panels.count, values["chunks"])
        block = even_block(whole, select(values["block"] > 0, values["block"] * rows, whole), rows)
        return PairedTiling(
            rows=rows,
            lanes=self.lanes,
            panels=panels,
            per_chunk=per_chunk,
            chunks=ceil_div(panels.count, per_chunk),
            block=block,
            blocks=ceil_div(self.row.extent, block),
            groups=ceil_div(self.k_axes, GROUP),
            last_pairs=min(HALF, self.k_axes % GROUP or GROUP),
            prefetch=values["prefetch"],
            line=self.machine.line_bytes // DType.F32.bytes,
            streamed=self._streams,
            certified=not may_lose_digits(self.numerics),
        )

    @cached_property
    def _streams(self) -> bool:
        """Whether the data is one run that L2 does not hold."""
        return self.sums.lies_in_rows and self.sums.data_bytes > self.machine.caches.l2_per_core

    # -- what it costs --------------------------------------------------------------------------------------------

    def terms(self, config: Config) -> Terms:
        return self.terms_of(dict(config.values))

    def terms_of(self, values: Mapping[str, Number]) -> Terms:
        """The terms of the config with these values or, if some are arrays, of many configs."""
        shape, caches = self.shape_of(values), self.machine.caches
        line = self.machine.line_bytes
        iterations = shape.chunks * shape.blocks
        passes = iterations * shape.per_chunk  # of a panel
        tiles = passes * shape.tiles
        pairs = tiles * shape.pairs
        scaled_rows = iterations * shape.tiles * shape.rows
        runs = scaled_rows * extent_of(self.sums.outer) if self.sums.outer else 0
        scaled = scaled_rows * shape.groups * GROUP / self.lanes  # vectors

        panel = shape.groups * GROUP * self.lanes * _BYTES
        weight_bytes = panel * shape.panels.count
        block_bytes = self._block_bytes(shape)
        data_bytes = self.sums.data_bytes
        written = self.row.extent * self.gemm.vector.extent * _BYTES

        # A panel stays in L1 while the register tiles pass, as far as it fits there alongside their lines.
        crowded = (panel + block_bytes / shape.tiles) / (0.75 * caches.l1) - 1
        returns = _FORESEEN * least(1.0, most(0.0, 2 * crowded)) * (shape.tiles - 1)
        rows_again = select(block_bytes > caches.l1 // 2, block_bytes, 0)
        from_l2 = passes * (panel * (1 + returns) + rows_again)
        # What L2 does not hold alongside a panel and the next one is displaced.
        beyond = least(1.0, most(0.0, (block_bytes + 2 * panel) / (0.75 * caches.l2_per_core) - 1))
        from_l3 = beyond * (passes - iterations) * block_bytes
        chunk_bytes = shape.per_chunk * panel
        again = weight_bytes * (shape.blocks - 1) * select(shape.prefetch > 0, PREFETCHED_COST, 1.0)
        from_l3 = from_l3 + select(chunk_bytes + block_bytes > caches.l2_per_core // 2, again, 0.0)
        if caches.keep((data_bytes + written) / self.machine.cores):
            from_l2 = from_l2 + (shape.chunks * data_bytes + 2.0 * written)
        else:
            from_l3 = from_l3 + (shape.chunks * data_bytes + 2.0 * written)
        positions = caches.l1 / gcd(shape.rows * line, self.machine.page_bytes)  # for lines of a row
        displaced = select(shape.groups > positions, scaled * _DISPLACED, 0.0)
        return Terms(
            arithmetic=pairs * self.instructions(shape)
            + _SCALED.arithmetic * scaled
            + 2.0 * tiles * shape.rows,
            loads=2.0 * pairs
            + _SCALED.loads * scaled
            + tiles * shape.rows
            + select(shape.prefetch > 0, passes * panel / line, 0.0),
            stores=_SCALED.stores * scaled + tiles * shape.rows,
            branches=tiles * shape.groups + _SCALED.branches * scaled,
            from_l2=from_l2,
            from_l3=from_l3,
            from_memory=float(weight_bytes),
            prefetched=select(shape.prefetch > 0, float(weight_bytes), 0.0),
            iterations=iterations,
            scalar=pairs * (shape.rows * _PAIR + most(0, shape.rows - 12) * _TALL)
            + tiles * _TILE
            + scaled_rows * _ROW
            + runs * _RUN
            + displaced
            + passes * BEGIN,
        )

    def instructions(self, shape: PairedTiling) -> Number:
        """Instructions on the FMA ports for a pair of steps of K in a register tile; or the additions alongside them,
        if those take longer."""
        core, in_pairs = self.machine.throughput, shape.rows - shape.plain_rows
        added = 2 * in_pairs * core.fmas / core.independent_adds
        return most(in_pairs + 2 * shape.plain_rows, added)

    @staticmethod
    def _block_bytes(shape: PairedTiling) -> Number:
        return shape.tiles * shape.rows * shape.groups * GROUP * _BYTES

    # -- the program ----------------------------------------------------------------------------------------------

    def program(self, config: Config) -> Program:
        return PairedNest(self.sums, self.shape_of(dict(config.values))).program(config)
