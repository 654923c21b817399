"""Matmuls and direct convolutions: register tiles over packed panels.

    for every chunk of panels and block of rows:                    (parallel)
      stage the block's data in scratch                             (where it is a formula: a padding, a conversion)
      for every panel of the weight, `vectors` registers wide:
        copy it to scratch                                          (where it is no constant and rows pass it often)
        for blocks of K:                                            (where a panel is larger than L1)
          for every `rows` rows of the block:
            acc[rows, vectors] = 0, or the partial sums of the previous block
            for k, unrolled by `unroll`: acc += data[row, k] * panel[k, :]
              prefetch a line of the next block of K                (of the next panel, where none is packed)
            out = epilogue(acc)

The last block of K is as long as what is left. A last panel that is narrower than the others has register tiles of its
own, so that no column is computed twice. If there is only one panel, its last vector overlaps the one before it. If
that is faster, the few columns after the last whole vector belong to no panel, and the last chunk reduces them along K
(`contraction_tail.py`).

A panel of a constant weight is contiguous in the order in which it is read. The panel stays in L2 while the rows of the
block pass, and the rows of the block stay there while the panels of the chunk pass. With so few rows that the kernel is
bound by reading the weight, each vector of a panel is stored separately, contiguous along K: a core that reads several
streams concurrently gets more bandwidth.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from tilewright import te
from tilewright.loops.ir import Buffer, Program
from tilewright.loops.tiling import Tiles, extent_of, lanes_for
from tilewright.space.space import Config, Knob, Space, Value
from tilewright.space.template import Applied, Terms, Work
from tilewright.space.templates.cpu.contraction_nest import ContractionNest
from tilewright.space.templates.cpu.contraction_tail import both, tail_columns, tail_terms
from tilewright.space.templates.cpu.gemm import (
    Coordinate,
    Gemm,
    coordinates,
    gemm_of,
)
from tilewright.support.arith import ceil_div, evenly_spread, round_up
from tilewright.support.frozen import quickly_made
from tilewright.te.index import coefficient

NAME = "contraction"
_STAGED_BYTES = 512 << 10
_PARTIAL_BYTES = 256 << 10
_PANEL_BYTES = 256 << 10
_STRADDLING, _STRADDLING_STORE = 0.75, 1.5  # cycles for a vector in two cache lines
_UNALIGNED = 0.5  # assumed fraction of the caller's tensors that are not aligned to a cache line
_TALL_AND_WIDE = 1.25  # cycles for each row beyond 8 in a step, in tiles of 3 or more vectors
_FAR_LINE, _FAR_LINE_PREFETCHED = (
    4.0,
    2.0,
)  # cycles for a line from L3 outside a run of lines; if prefetched earlier
# The share of L2 that data and a panel can fill before the next panels evict them, and the share of the data that is
# evicted if it is twice as large. (Data under overlapping windows is read more often and stays longer.)
_ROOMY, _DISPLACED = 0.4, 0.45
PREFETCHED_COST = 0.25  # relative cost of panels from L3 that are prefetched one block of K ahead
COPIED_BYTES = 16.0  # per cycle while data is staged: no computation hides the latency
_NEXT_RUN = 4.0  # cycles between blocks of channels, which the hardware does not prefetch
FAR_RUN = 20.0  # cycles for the start of a run of data from L3
_FOLLOWED, _FAR_STRIP = (
    64,
    30.0,
)  # pages that are written in turn; cycles for a strip of a row if there are more
_WRITTEN_OUT = 320  # maximum FMAs unrolled: code size and compile time
_WRITTEN_OUT_BLOCK = 400  # maximum for a whole block of channels, which then needs no inner loop
_SPREAD_EARLY = (
    5  # maximum rows of such a block two vectors wide: LLVM broadcasts elements that are used twice early
)
BEGIN, _BROUGHT = (
    100.0,
    256.0,
)  # cycles to start a panel; its bytes per byte that the first tile waits for
_BLOCKS = (1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 12, 14, 16, 24, 28, 32, 48, 64, 96, 128)
_FEW_CUTS = 4  # minimum number of divisors of the sum's length to cut it by divisors
_K_BLOCKS = (
    64,
    96,
    128,
    192,
    256,
    384,
)  # approximate steps of K in a K block whose length is not a divisor
_NARROW_PAYS = 1 / 32  # minimum share of computed columns that a narrower last panel must save
_FEW_ROWS = 4  # rows for which reading the weight takes longer than multiplying
_LAST_ROWS = 10  # maximum rows of its register tiles


class Contraction:
    name = NAME

    def apply(self, work: Work) -> Applied | None:
        gemm = gemm_of(work.formula)
        if gemm is None:
            return None
        dims = coordinates(gemm)
        if dims is None and not isinstance(gemm.data, te.Load):
            return None
        if dims is not None and gemm.in_planes(dims):
            dims = gemm.in_storage_order(dims)
        return AppliedContraction(work, gemm, dims)


@quickly_made
@dataclass(frozen=True)
class ContractionTiling:
    """The numbers that follow from a config."""

    rows: int
    vectors: int
    unroll: int
    panels: Tiles  # of the vector axis, or of the columns covered by the vectors of the only panel
    per_chunk: int  # panels in a chunk
    chunks: int
    block: int  # values of the outermost row axis in a block: whole register tiles if it is the only one
    blocks: int
    k_block: int  # values of the K axis that is split, summed at once; 0: K is not split
    prefetch: int
    staged: bool
    copied: bool = False  # whether a panel that is not constant is copied to scratch memory
    last_vectors: int = 0  # vectors of the last panel, if it is narrower than the others
    last_rows: int = 0

    @property
    def last(self) -> ContractionTiling | None:
        """The tiling of the last panel, if it has its own."""
        return self._narrow if self.last_vectors else None

    @cached_property
    def _narrow(self) -> ContractionTiling:
        return replace(self, rows=self.last_rows, vectors=self.last_vectors, last_rows=0, last_vectors=0)


class AppliedContraction:
    name = NAME
    tall = 0.1  # cycles for each row beyond 8 in a step, in tiles of one or two vectors
    narrows = (
        True  # whether the last panel may have its own tiles, and vectors may overlap or be stored separately
    )

    def __init__(self, work: Work, gemm: Gemm, dims: tuple[Coordinate, ...] | None) -> None:
        self.work = work
        self.machine = work.machine
        self.gemm = gemm
        self.dims = dims
        self.lanes = lanes_for(gemm.formula, work.machine, gemm.run)
        self.must_stage = not isinstance(gemm.data, te.Load)
        accumulator = gemm.reduction.result.dtype
        self.registers_each = max(1, accumulator.bytes * self.lanes // work.machine.vector_bytes)
        # Integers are widened, multiplied (two instructions on most machines) and added.
        self.instructions = 1.0 if accumulator.is_float else 3.0
        # Cached: a descent asks about thousands of configs, for most of them first whether they are legal and then
        # what they cost.
        self._shape: tuple[object, ContractionTiling] | None = None
        self._last_tiles: dict[tuple[int, int, int], tuple[int, int]] = {}
        self._staged_extents: dict[int, tuple[int, ...]] = {}

    @cached_property
    def vectors_separate(self) -> bool:
        """Whether the vectors of a panel are stored separately."""
        few = extent_of(self.gemm.rows) <= _FEW_ROWS
        return self.narrows and few and self.gemm.constant_weight

    @cached_property
    def tail(self) -> int:
        """The columns after the last whole vector, if they are summed separately."""
        if not self.narrows or self.vectors_separate:
            return 0
        return tail_columns(self.gemm, self.lanes)

    @cached_property
    def columns(self) -> te.Var:
        """The columns that are in panels."""
        vector = self.gemm.vector
        return te.Var("columns", vector.extent - self.tail) if self.tail else vector

    # -- the space ------------------------------------------------------------------------------------------------

    @cached_property
    def space(self) -> Space:
        rows = self.gemm.rows
        tile_axis = rows[-1].extent if rows else 1
        outer = rows[0].extent if len(rows) > 1 else ceil_div(tile_axis, 4)
        blocks = [n for n in _BLOCKS if n < outer]
        stage = (True,) if self.must_stage else (False, True) if self.dims is not None else (False,)
        copy = () if self.gemm.constant_weight else (Knob("copy", (False, True)),)
        return Space(
            self.name,
            (
                Knob("rows", tuple(n for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14) if n <= tile_axis)),
                Knob("vectors", tuple(n for n in (1, 2, 3, 4, 5, 6, 8) if n <= self._most_vectors)),
                Knob("unroll", self._unrolls()),
                Knob("block", (0, *blocks)),
                Knob("chunks", (1, 2, 4, 8, 16, 32)),
                Knob("k_block", (0, *self._cuts())),
                Knob("prefetch", self._prefetch_levels()),
                Knob("stage", stage),
                *copy,
            ),
            self._legal,
            together=(
                ("rows", "vectors"),
                ("block", "chunks", "stage"),
                ("k_block", "prefetch"),
                ("block", "k_block"),
                *((("copy", "k_block", "block"),) if copy else ()),
            ),
        )

    @cached_property
    def _most_vectors(self) -> int:
        """Maximum vectors of a panel: the number of whole ones, or one more that overlaps the one before it."""
        extent = self.columns.extent
        return ceil_div(extent, self.lanes) if self.narrows else extent // self.lanes

    def _prefetch_levels(self) -> tuple[int, ...]:
        """The cache levels to which the next K block of a panel (or the next panel, if none is packed) can be
        prefetched."""
        if self.vectors_separate:
            return (0,)
        return (0, 1, 2) if self.gemm.constant_weight else (0, 2)

    def _cuts(self) -> list[int]:
        """Lengths of K blocks: divisors of the split K axis; if it is the only axis and has few divisors, other
        lengths too."""
        gemm = self.gemm
        extent = gemm.k_axes[gemm.cut].extent
        exact = [n for n in range(1, extent + 1) if extent % n == 0 and self._can_be_k_block(n)]
        if len(exact) >= _FEW_CUTS or len(gemm.k_axes) > 1:
            return evenly_spread(exact, 5)
        k_blocks = (ceil_div(extent, ceil_div(extent, size)) for size in _K_BLOCKS)
        whole_steps = (round_up(size, 8) for size in k_blocks)
        return sorted({*exact, *(size for size in whole_steps if self._can_be_k_block(size))})

    def _can_be_k_block(self, k_block: int) -> bool:
        k_size = k_block * self.gemm.inner_k
        return 48 <= k_size <= 768 and k_size < self.gemm.length

    def _unrolls(self) -> tuple[int, ...]:
        some = {n for n in (1, 2, 4, 8) if n <= max(self.gemm.length, 1)}
        return tuple(sorted(some | {self.gemm.short_run} - {0}))

    def can_be_written_out(self, rows: int, vectors: int, unroll: int) -> bool:
        most = _WRITTEN_OUT_BLOCK if unroll == self.gemm.short_run else _WRITTEN_OUT
        if rows > self._most_rows(vectors, unroll):
            return False
        return unroll == 1 or rows * vectors * unroll <= most

    def _most_rows(self, vectors: int, unroll: int) -> float:
        """Maximum rows of a tile that does not spill."""
        return _SPREAD_EARLY if vectors == 2 and unroll == self.gemm.short_run else math.inf

    def _legal(self, values: Mapping[str, Value]) -> bool:
        rows, vectors, unroll = int(values["rows"]), int(values["vectors"]), int(values["unroll"])
        if self._registers(rows, vectors, unroll) * self.registers_each > self.machine.vector_registers:
            return False
        if not self.can_be_written_out(rows, vectors, unroll):
            return False
        shape = self.shape_of(values)
        if (
            int(values["chunks"]) > shape.panels.count
            or shape.per_chunk * (shape.chunks - 1) >= shape.panels.count
        ):
            return False
        if len(self.gemm.rows) == 1 and shape.block > self.gemm.rows[0].extent:
            return False
        if shape.staged and self._staged_bytes(shape) > _STAGED_BYTES:
            return False
        if shape.prefetch and not self._prefetch_pays(shape):
            return False
        if shape.copied and self._panel_bytes(shape) > _PANEL_BYTES:
            return False
        return not shape.k_block or self.partial_size(shape) * 4 <= _PARTIAL_BYTES

    def _registers(self, rows: int, vectors: int, unroll: int) -> int:
        """Vectors live in the innermost loop; LLVM needs two more in parts of a block of channels."""
        scalar_loads = 3 if unroll < self.gemm.short_run else 1
        return rows * vectors + vectors + scalar_loads

    def shape_of(self, values: Mapping[str, Value]) -> ContractionTiling:
        prefetched = tuple(values.items())
        known = self._shape
        if known is None or known[0] != prefetched:
            known = self._shape = prefetched, self._made_shape(values)
        return known[1]

    def _made_shape(self, values: Mapping[str, Value]) -> ContractionTiling:
        rows, vectors = int(values["rows"]), int(values["vectors"])
        columns = self.columns
        if vectors * self.lanes > columns.extent:
            columns = te.Var("columns", vectors * self.lanes)
        panels = Tiles(columns, vectors * self.lanes)
        per_chunk = ceil_div(panels.count, int(values["chunks"]))
        outer = self.gemm.rows[0].extent if self.gemm.rows else 1
        unit = rows if len(self.gemm.rows) == 1 else 1
        size = even_block(outer, int(values["block"]) * unit or outer, unit)
        tile = vectors, size, int(values["unroll"])
        if tile not in self._last_tiles:
            self._last_tiles[tile] = self.last_tile(panels, *tile)
        last_rows, last_vectors = self._last_tiles[tile]
        return ContractionTiling(
            rows=rows,
            vectors=vectors,
            unroll=int(values["unroll"]),
            panels=panels,
            per_chunk=per_chunk,
            chunks=ceil_div(panels.count, per_chunk),
            block=size,
            blocks=ceil_div(outer, size),
            k_block=int(values["k_block"]),
            prefetch=int(values["prefetch"]),
            staged=bool(values["stage"]),
            copied=bool(values.get("copy", False)),
            last_vectors=last_vectors,
            last_rows=last_rows,
        )

    def last_tile(self, panels: Tiles, vectors: int, block: int, unroll: int) -> tuple[int, int]:
        """(rows, vectors) of the last panel's register tiles; (0, 0): the same as the others."""
        left = panels.axis.extent - (panels.count - 1) * panels.size
        narrow = ceil_div(left, self.lanes)
        saved = (vectors - narrow) / (panels.count * vectors)
        if not self.narrows or self.vectors_separate or saved < _NARROW_PAYS:
            return 0, 0
        rows = block if len(self.gemm.rows) < 2 else self.gemm.rows[-1].extent
        room = self.machine.vector_registers // self.registers_each - 1 - narrow
        most = int(max(1, min(rows, room // narrow, _LAST_ROWS, self._most_rows(narrow, unroll))))
        return min(range(most, 0, -1), key=lambda n: ceil_div(rows, n) * max(n * narrow, 8)), narrow

    def _staged_bytes(self, shape: ContractionTiling) -> int:
        return self.gemm.data.dtype.bytes * math.prod(self.staged_extents(shape))

    def _panel_bytes(self, shape: ContractionTiling) -> int:
        return shape.panels.size * self.gemm.length * self.gemm.weight.dtype.bytes

    def staged_extents(self, shape: ContractionTiling) -> tuple[int, ...]:
        if shape.block not in self._staged_extents:
            assert self.dims is not None
            outer = self.gemm.rows[0] if self.gemm.rows else None
            self._staged_extents[shape.block] = tuple(
                dim.extent(shape.block if dim.axis == outer else dim.axis.extent if dim.axis else 1)
                for dim in self.dims
            )
        return self._staged_extents[shape.block]

    def _tiles_per_block(self, shape: ContractionTiling) -> int:
        """Register tiles of one panel in one block."""
        rows = self.gemm.rows
        if not rows:
            return 1
        if len(rows) == 1:
            return ceil_div(shape.block, shape.rows)
        return shape.block * self._between * ceil_div(rows[-1].extent, shape.rows)

    @cached_property
    def _between(self) -> int:
        """Result rows per value of the outermost and the innermost row axis."""
        return extent_of(self.gemm.rows[1:-1])

    def partial_size(self, shape: ContractionTiling) -> int:
        wide = self._tiles_per_block(shape) * shape.rows * shape.vectors * self.lanes
        return wide if shape.last is None else max(wide, self.partial_size(shape.last))

    def _prefetch_pays(self, shape: ContractionTiling) -> bool:
        """Whether a K block of a panel has about as many lines as there are steps to prefetch one."""
        if not self.gemm.constant_weight:
            return (
                self._weight_pitch > self.machine.line_bytes and self._tiles_per_block(shape) >= shape.vectors
            )
        k_size = (shape.k_block or self.gemm.k_axes[self.gemm.cut].extent) * self.gemm.inner_k
        steps = self._tiles_per_block(shape) * max(1, k_size // shape.unroll)
        return shape.panels.size * k_size * 4 // self.machine.line_bytes * 2 >= steps

    # -- what it costs --------------------------------------------------------------------------------------------

    def terms(self, config: Config) -> Terms:
        shape = self.shape_of(dict(config.values))
        gemm, machine = self.gemm, self.machine
        repeats = self._repeats
        passes = repeats * shape.blocks * shape.chunks * shape.per_chunk
        length = gemm.length
        k_blocks = ceil_div(length, shape.k_block * gemm.inner_k) if shape.k_block else 1
        size = gemm.weight_bytes
        panel = shape.panels.size * length * size
        weight_bytes = panel * shape.panels.count * repeats
        block_bytes = self.block_bytes(shape)
        data_bytes = block_bytes * shape.blocks * repeats
        chunk_panels = shape.per_chunk if shape.chunks > 1 else shape.panels.count
        caches = machine.caches

        # The part of a panel that all rows of the block read stays in L1; what does not fit is loaded again for each
        # tile.
        crowded = (panel + self._tile_bytes(shape)) / k_blocks / (0.75 * caches.l1) - 1
        returns = min(1.0, max(0.0, 2 * crowded)) * (self._tiles_per_block(shape) - 1)
        panel_reads = passes * panel * (1 + returns)
        data_reads = data_bytes * shape.chunks * shape.per_chunk
        fits = caches.keep(panel + block_bytes)
        from_l2 = float(panel_reads) + (data_reads if fits and block_bytes > caches.l1 // 2 else 0)
        # Data that no longer fits is evicted before the next panel needs it; single lines are evicted even earlier.
        filled = (panel + block_bytes) / caches.l2_per_core
        beyond = min(1.0, max(0.0, filled / 0.75 - 1))
        lines = max(beyond, min(1.0, _DISPLACED * (filled / _ROOMY - 1))) if self._streams else beyond
        from_l3 = lines * shape.chunks * (shape.per_chunk - 1) * data_bytes
        # Panels are loaded from memory once per block of rows, unless the chunk's panels stay in L2.
        again = shape.blocks if panel * chunk_panels > caches.l2_per_core // 2 else 1
        if gemm.constant_weight:
            from_memory = float(weight_bytes)
            from_l3 += (
                weight_bytes * (again - 1) * (PREFETCHED_COST if shape.prefetch and self._streams else 1.0)
            )
        else:
            from_memory, from_l3 = 0.0, from_l3 + weight_bytes * again
        # Consecutive chunks on a thread reuse data that the previous one left in the cache, if it fits.
        stays = caches.keep(data_bytes // repeats + panel)
        comes = min(shape.chunks, machine.cores) if stays else shape.chunks
        written = gemm.formula.output.size * gemm.formula.output.dtype.bytes
        # Data that the previous kernel left in this core's L2, and data that the next kernel finds there.
        touched = data_bytes * comes + written + weight_bytes * (1 if shape.chunks > 1 else machine.cores)
        if caches.keep(touched / machine.cores):
            from_l2 += data_bytes + 2.0 * written
            from_l3 += data_bytes * (comes - 1)
        else:
            from_l3 += data_bytes * comes + 2.0 * written
        partial = 2.0 * (k_blocks - 1) * self.partial_size(shape) * passes  # elements
        if 4 * self.partial_size(shape) > caches.l1 // 2:
            from_l2 += 4 * partial
        staged = self._staged_bytes(shape) * shape.chunks * shape.blocks * repeats if shape.staged else 0
        prefetched = self._prefetched(shape, passes, panel) if shape.prefetch else 0.0
        copied = passes * self.gemm.length * shape.vectors if shape.copied else 0  # vectors
        # Per pass. A chunk without the tail finishes last.
        narrow = repeats * shape.blocks if shape.last is not None and shape.chunks == 1 else 0
        tiles = self.tile_terms(shape, passes - narrow, k_blocks)
        if shape.last is not None:
            tiles = both(tiles, self.tile_terms(shape.last, narrow, k_blocks))
        if self.tail:
            tiles = both(tiles, tail_terms(gemm, self.tail, self.lanes, machine.vector_registers))
            if caches.keep(block_bytes):
                from_l2 += data_bytes
            else:
                from_l3 += data_bytes
        return Terms(
            arithmetic=tiles.arithmetic,
            loads=tiles.loads + (staged / 4 + partial / 2) / self.lanes + copied + prefetched,
            stores=tiles.stores + (staged / 4 + partial / 2) / self.lanes + copied,
            branches=tiles.branches,
            from_l2=from_l2 + staged + tiles.from_l2,
            from_l3=from_l3,
            from_memory=from_memory,
            prefetched=from_memory if shape.prefetch else 0.0,
            iterations=repeats * shape.chunks * shape.blocks,
            scalar=tiles.scalar
            + passes * (BEGIN + panel / _BROUGHT)
            + staged / COPIED_BYTES
            + self._far_runs(shape, k_blocks) * (comes + beyond * shape.chunks * (shape.per_chunk - 1))
            + self._far_strips(shape),
        )

    @cached_property
    def _repeats(self) -> int:
        return extent_of(self.gemm.shared)

    def _prefetched(self, shape: ContractionTiling, passes: int, panel: int) -> float:
        """Prefetch instructions: each line of a panel once, or one per step of K and register tile."""
        if self.gemm.constant_weight:
            return passes * panel / self.machine.line_bytes
        return float(passes * self._tiles_per_block(shape) * self.gemm.length)

    def tile_terms(self, shape: ContractionTiling, passes: float, k_blocks: float) -> Terms:
        """The terms of the register tiles alone, for this many panels in a block."""
        tiles = passes * self._tiles_per_block(shape)
        steps, each = tiles * self.gemm.length, shape.rows * shape.vectors
        return Terms(
            arithmetic=steps * max(each * self.instructions, self.machine.chains) + tiles * each,
            loads=float(steps * (shape.rows + shape.vectors) + tiles * each),
            stores=float(tiles * each),
            branches=steps / shape.unroll + 3.0 * tiles * k_blocks,
            from_l2=steps * self._displaced_rows(shape) * self.machine.line_bytes,
            scalar=tiles * k_blocks * 12.0
            + steps * max(0, shape.rows - 8) * (self.tall if shape.vectors < 3 else _TALL_AND_WIDE)
            + (tiles * each * _STRADDLING_STORE if self.result_pitch % self.machine.line_bytes else 0.0)
            + (steps / self.gemm.short_run * _NEXT_RUN if self.gemm.short_run else 0.0)
            + self.unpacked_cycles(shape, steps, passes * self.gemm.length),
        )

    def _far_runs(self, shape: ContractionTiling, k_blocks: int) -> float:
        """Cycles to read all rows of the data once from beyond L2, one K block at a time. Only long runs within a
        page are prefetched by the hardware."""
        gemm = self.gemm
        if not self._streams:
            return 0.0
        at_once = 1 if shape.staged else k_blocks
        pages = gemm.length // at_once * gemm.data.dtype.bytes / self.machine.page_bytes
        return self._all_rows * at_once * max(1.0, pages) * FAR_RUN

    @cached_property
    def _streams(self) -> bool:
        """Whether data that is read in runs exceeds L2."""
        data = extent_of((*self.gemm.rows, *self.gemm.k_axes)) * 4
        return self.in_runs and data > self.machine.caches.l2_per_core

    @cached_property
    def in_runs(self) -> bool:
        """Whether consecutive register tiles read different data, and each row of it in a run."""
        gemm = self.gemm
        separate = self.dims is not None and all(dim.axis is None or dim.tap is None for dim in self.dims)
        if not separate or not isinstance(gemm.data, te.Load) or gemm.run < gemm.vector.extent:
            return False
        return coefficient(gemm.data.indices[0], gemm.k_axes[-1]) == 1

    def _far_strips(self, shape: ContractionTiling) -> float:
        """Cycles to write panels into rows far from each other, if there are more than the hardware tracks."""
        pages = self._pages_between
        if not pages or self._tiles_per_block(shape) * shape.rows * pages <= _FOLLOWED:
            return 0.0
        return self._all_rows * shape.panels.count * pages * _FAR_STRIP

    @cached_property
    def _pages_between(self) -> float:
        """Pages between consecutive rows of a result that does not stay in L2; at most 1."""
        formula, machine = self.gemm.formula, self.machine
        output = formula.output
        kept = output.size * output.dtype.bytes <= 2 * machine.caches.l2_per_core * machine.cores
        if kept or coefficient(formula.store, self.gemm.vector) != 1:
            return 0.0
        return min(1.0, self.gemm.vector.extent * output.dtype.bytes / machine.page_bytes)

    @cached_property
    def _all_rows(self) -> int:
        return self._repeats * extent_of(self.gemm.rows)

    def unpacked_cycles(self, shape: ContractionTiling, steps: float, visits: float) -> float:
        """Cycles to read the weight in place, in `steps`. In `visits` of them, the first to read a step of K of a
        panel, the data may come from far away."""
        if self.gemm.constant_weight:
            return 0.0
        unaligned = 1.0 if self._weight_pitch % self.machine.line_bytes else _UNALIGNED
        straddling = _STRADDLING * unaligned * (visits if shape.copied else steps)
        source = self.gemm.weight_load.source
        assert isinstance(source, Buffer)
        far = (
            self._weight_pitch > self.machine.line_bytes
            and source.size * source.dtype.bytes > self.machine.caches.l2_per_core
        )
        line = _FAR_LINE_PREFETCHED if shape.prefetch else _FAR_LINE
        return (straddling + (line * visits if far else 0.0)) * shape.vectors

    def _displaced_rows(self, shape: ContractionTiling) -> float:
        """Rows of a register tile that are evicted from L1 by its other rows before their next element is read. Of
        lines that are whole pages apart, L1 holds one per way, because a way is as large as a page."""
        return min(shape.rows, 2 * max(0.0, shape.rows - self._held_rows))

    @cached_property
    def _held_rows(self) -> float:
        data, rows = self.gemm.data, self.gemm.rows
        if not rows or not isinstance(data, te.Load):
            return math.inf
        pitch = abs(coefficient(data.indices[0], rows[-1]) or 1) * data.dtype.bytes
        return self.machine.caches.l1 / math.gcd(pitch, self.machine.page_bytes)

    @cached_property
    def _weight_pitch(self) -> int:
        """Bytes between consecutive steps of K in the weight."""
        load = self.gemm.weight_load
        return abs(coefficient(load.indices[0], self.gemm.k_axes[-1]) or 0) * load.dtype.bytes

    @cached_property
    def result_pitch(self) -> int:
        """Bytes between consecutive rows of the result; 0 if there is only one."""
        formula, rows = self.gemm.formula, self.gemm.rows
        return abs(coefficient(formula.store, rows[-1]) or 0) * formula.output.dtype.bytes if rows else 0

    def _tile_bytes(self, shape: ContractionTiling) -> int:
        """Bytes of L1 that the data of a register tile occupies."""
        return shape.rows * self.gemm.length * 4

    def block_bytes(self, shape: ContractionTiling) -> int:
        if self.dims is None:
            outer = self.gemm.rows[0].extent if self.gemm.rows else 1
            load = te.loads(self.gemm.data)[0]
            assert isinstance(load.source, Buffer)
            return load.source.size * load.dtype.bytes * shape.block // outer
        return self._staged_bytes(shape)

    # -- the program ----------------------------------------------------------------------------------------------

    def program(self, config: Config) -> Program:
        return self.nest_of(self.shape_of(dict(config.values))).program(config)

    def nest_of(self, shape: ContractionTiling) -> ContractionNest:
        return ContractionNest(self, shape)


def even_block(extent: int, size: int, unit: int) -> int:
    """The least multiple of `unit` that cuts `extent` into no more blocks than `size` does. A partial last block
    overlaps the one before it, so little work is repeated."""
    blocks = ceil_div(extent, size)
    return min(extent, ceil_div(extent, blocks * unit) * unit)
