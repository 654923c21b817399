"""Counts the cost terms of a contraction's config, for one config or, as arrays, for many at once.

A descent compares all combinations of a few knobs (`tune/choose.py`). It passes one array for each of these knobs, and
every number here is then an array. So conditions that depend on a config are `select`, not `if`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from tilewright import te
from tilewright.hw import CpuMachine
from tilewright.loops.ir import Buffer
from tilewright.loops.tiling import Tiles, extent_of
from tilewright.space.space import Config
from tilewright.space.template import Terms, Work
from tilewright.space.templates.cpu.contraction_tail import both, tail_terms
from tilewright.space.templates.cpu.gemm import Coordinate, Gemm
from tilewright.support.arith import ceil_div
from tilewright.support.batch import Number, Truth, least, most, nowhere, select
from tilewright.support.frozen import quickly_made
from tilewright.te.index import coefficient

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
BEGIN, _BROUGHT = (
    100.0,
    256.0,
)  # cycles to start a panel; its bytes per byte that the first tile waits for


class PanelCounts(NamedTuple):
    """The numbers of `Tiles` that the costs need, for many configs at once."""

    size: Number
    count: Number


@quickly_made
@dataclass(frozen=True)
class ContractionTiling:
    """The numbers that follow from a config. If there are many configs, each is an array, and `panels` are counts."""

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
        """The tiling of the last panel, if it has its own. Of many configs, those without one keep their tiles."""
        return None if nowhere(self.has_last) else self._narrow

    @property
    def has_last(self) -> Truth:
        return self.last_vectors > 0

    @cached_property
    def _narrow(self) -> ContractionTiling:
        rows = select(self.has_last, self.last_rows, self.rows)
        vectors = select(self.has_last, self.last_vectors, self.vectors)
        return replace(self, rows=rows, vectors=vectors, last_rows=0, last_vectors=0)


class ContractionTerms:
    """The sizes and the costs of the configs of one contraction."""

    work: Work
    machine: CpuMachine
    gemm: Gemm
    dims: tuple[Coordinate, ...] | None
    lanes: int
    instructions: float  # for one FMA of a vector
    tall = 0.1  # cycles for each row beyond 8 in a step, in tiles of one or two vectors

    @property
    def tail(self) -> int:
        """The columns after the last whole vector, if they are summed separately."""
        raise NotImplementedError

    def shape_of(self, values: Mapping[str, Number]) -> ContractionTiling:
        raise NotImplementedError

    # -- sizes ----------------------------------------------------------------------------------------------------

    def _staged_bytes(self, shape: ContractionTiling) -> Number:
        return self.gemm.data.dtype.bytes * math.prod(self.staged_extents(shape))

    def _panel_bytes(self, shape: ContractionTiling) -> Number:
        return shape.panels.size * self.gemm.length * self.gemm.weight.dtype.bytes

    def staged_extents(self, shape: ContractionTiling) -> tuple[Number, ...]:
        assert self.dims is not None
        outer = self.gemm.rows[0] if self.gemm.rows else None
        return tuple(
            dim.extent(shape.block if dim.axis == outer else dim.axis.extent if dim.axis else 1)
            for dim in self.dims
        )

    def _tiles_per_block(self, shape: ContractionTiling) -> Number:
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

    def partial_size(self, shape: ContractionTiling) -> Number:
        wide = self._tiles_per_block(shape) * shape.rows * shape.vectors * self.lanes
        return wide if shape.last is None else most(wide, self.partial_size(shape.last))

    # -- terms ----------------------------------------------------------------------------------------------------

    def terms(self, config: Config) -> Terms:
        return self.terms_of(dict(config.values))

    def terms_of(self, values: Mapping[str, Number]) -> Terms:
        """The terms of the config with these values or, if some are arrays, of many configs."""
        shape = self.shape_of(values)
        gemm, machine = self.gemm, self.machine
        repeats = self._repeats
        passes = repeats * shape.blocks * shape.chunks * shape.per_chunk
        length = gemm.length
        k_blocks = self._k_blocks(shape)
        size = gemm.weight_bytes
        panel = shape.panels.size * length * size
        weight_bytes = panel * shape.panels.count * repeats
        block_bytes = self.block_bytes(shape)
        data_bytes = block_bytes * shape.blocks * repeats
        chunk_panels = select(shape.chunks > 1, shape.per_chunk, shape.panels.count)
        caches = machine.caches

        # The part of a panel that all rows of the block read stays in L1; what does not fit is loaded again for each
        # tile.
        crowded = (panel + self._tile_bytes(shape)) / k_blocks / (0.75 * caches.l1) - 1
        returns = least(1.0, most(0.0, 2 * crowded)) * (self._tiles_per_block(shape) - 1)
        panel_reads = passes * panel * (1 + returns)
        data_reads = data_bytes * shape.chunks * shape.per_chunk
        fits = caches.keep(panel + block_bytes)
        from_l2 = panel_reads + select(fits & (block_bytes > caches.l1 // 2), data_reads, 0.0)
        # Data that no longer fits is evicted before the next panel needs it; single lines are evicted even earlier.
        filled = (panel + block_bytes) / caches.l2_per_core
        beyond = least(1.0, most(0.0, filled / 0.75 - 1))
        lines = most(beyond, least(1.0, _DISPLACED * (filled / _ROOMY - 1))) if self._streams else beyond
        from_l3 = lines * shape.chunks * (shape.per_chunk - 1) * data_bytes
        # Panels are loaded from memory once per block of rows, unless the chunk's panels stay in L2.
        again = select(panel * chunk_panels > caches.l2_per_core // 2, shape.blocks, 1)
        if gemm.constant_weight:
            from_memory = 1.0 * weight_bytes
            cost = select(shape.prefetch > 0, PREFETCHED_COST, 1.0) if self._streams else 1.0
            from_l3 = from_l3 + weight_bytes * (again - 1) * cost
        else:
            from_memory, from_l3 = 0.0, from_l3 + weight_bytes * again
        # Consecutive chunks on a thread reuse data that the previous one left in the cache, if it fits.
        stays = caches.keep(data_bytes // repeats + panel)
        comes = select(stays, least(shape.chunks, machine.cores), shape.chunks)
        written = gemm.formula.output.size * gemm.formula.output.dtype.bytes
        # Data that the previous kernel left in this core's L2, and data that the next kernel finds there.
        touched = data_bytes * comes + written + weight_bytes * select(shape.chunks > 1, 1, machine.cores)
        near = caches.keep(touched / machine.cores)
        from_l2 = from_l2 + select(near, data_bytes + 2.0 * written, 0.0)
        from_l3 = from_l3 + select(near, data_bytes * (comes - 1), data_bytes * comes + 2.0 * written)
        partial = 2.0 * (k_blocks - 1) * self.partial_size(shape) * passes  # elements
        from_l2 = from_l2 + select(4 * self.partial_size(shape) > caches.l1 // 2, 4 * partial, 0.0)
        staged = 0
        if self.dims is not None:
            staged = select(
                shape.staged, self._staged_bytes(shape) * shape.chunks * shape.blocks * repeats, 0
            )
        prefetched = select(shape.prefetch > 0, self._prefetched(shape, passes, panel), 0.0)
        copied = select(shape.copied, passes * self.gemm.length * shape.vectors, 0)  # vectors
        # Per pass. A chunk without the tail finishes last.
        narrow = select(shape.has_last & (shape.chunks == 1), repeats * shape.blocks, 0)
        tiles = self.tile_terms(shape, passes - narrow, k_blocks)
        if shape.last is not None:
            tiles = both(tiles, self.tile_terms(shape.last, narrow, k_blocks))
        if self.tail:
            tiles = both(tiles, tail_terms(gemm, self.tail, self.lanes, machine.vector_registers))
            kept = caches.keep(block_bytes)
            from_l2 = from_l2 + select(kept, data_bytes, 0)
            from_l3 = from_l3 + select(kept, 0, data_bytes)
        return Terms(
            arithmetic=tiles.arithmetic,
            loads=tiles.loads + (staged / 4 + partial / 2) / self.lanes + copied + prefetched,
            stores=tiles.stores + (staged / 4 + partial / 2) / self.lanes + copied,
            branches=tiles.branches,
            from_l2=from_l2 + staged + tiles.from_l2,
            from_l3=from_l3,
            from_memory=from_memory,
            prefetched=select(shape.prefetch > 0, from_memory, 0.0),
            iterations=repeats * shape.chunks * shape.blocks,
            scalar=tiles.scalar
            + passes * (BEGIN + panel / _BROUGHT)
            + staged / COPIED_BYTES
            + self._far_runs(shape, k_blocks) * (comes + beyond * shape.chunks * (shape.per_chunk - 1))
            + self._far_strips(shape),
        )

    def _k_blocks(self, shape: ContractionTiling) -> Number:
        length = most(self.gemm.length, 1)
        return ceil_div(length, select(shape.k_block > 0, shape.k_block * self.gemm.inner_k, length))

    @cached_property
    def _repeats(self) -> int:
        return extent_of(self.gemm.shared)

    def _prefetched(self, shape: ContractionTiling, passes: Number, panel: Number) -> Number:
        """Prefetch instructions: each line of a panel once, or one per step of K and register tile."""
        if self.gemm.constant_weight:
            return passes * panel / self.machine.line_bytes
        return 1.0 * passes * self._tiles_per_block(shape) * self.gemm.length

    def tile_terms(self, shape: ContractionTiling, passes: Number, k_blocks: Number) -> Terms:
        """The terms of the register tiles alone, for this many panels in a block."""
        tiles = passes * self._tiles_per_block(shape)
        steps, each = tiles * self.gemm.length, shape.rows * shape.vectors
        return Terms(
            arithmetic=steps * most(each * self.instructions, self.machine.chains) + tiles * each,
            loads=1.0 * (steps * (shape.rows + shape.vectors) + tiles * each),
            stores=1.0 * tiles * each,
            branches=steps / shape.unroll + 3.0 * tiles * k_blocks,
            from_l2=steps * self._displaced_rows(shape) * self.machine.line_bytes,
            scalar=tiles * k_blocks * 12.0
            + steps * most(0, shape.rows - 8) * select(shape.vectors < 3, self.tall, _TALL_AND_WIDE)
            + (tiles * each * _STRADDLING_STORE if self.result_pitch % self.machine.line_bytes else 0.0)
            + (steps / self.gemm.short_run * _NEXT_RUN if self.gemm.short_run else 0.0)
            + self.unpacked_cycles(shape, steps, passes * self.gemm.length),
        )

    def _far_runs(self, shape: ContractionTiling, k_blocks: Number) -> Number:
        """Cycles to read all rows of the data once from beyond L2, one K block at a time. Only long runs within a
        page are prefetched by the hardware."""
        gemm = self.gemm
        if not self._streams:
            return 0.0
        at_once = select(shape.staged, 1, k_blocks)
        pages = gemm.length // at_once * gemm.data.dtype.bytes / self.machine.page_bytes
        return self._all_rows * at_once * most(1.0, pages) * FAR_RUN

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

    def _far_strips(self, shape: ContractionTiling) -> Number:
        """Cycles to write panels into rows far from each other, if there are more than the hardware tracks."""
        pages = self._pages_between
        if not pages:
            return 0.0
        cycles = self._all_rows * shape.panels.count * pages * _FAR_STRIP
        return select(self._tiles_per_block(shape) * shape.rows * pages <= _FOLLOWED, 0.0, cycles)

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

    def unpacked_cycles(self, shape: ContractionTiling, steps: Number, visits: Number) -> Number:
        """Cycles to read the weight in place, in `steps`. In `visits` of them, the first to read a step of K of a
        panel, the data may come from far away."""
        if self.gemm.constant_weight:
            return 0.0
        unaligned = 1.0 if self._weight_pitch % self.machine.line_bytes else _UNALIGNED
        straddling = _STRADDLING * unaligned * select(shape.copied, visits, steps)
        source = self.gemm.weight_load.source
        assert isinstance(source, Buffer)
        far = (
            self._weight_pitch > self.machine.line_bytes
            and source.size * source.dtype.bytes > self.machine.caches.l2_per_core
        )
        line = select(shape.prefetch > 0, _FAR_LINE_PREFETCHED, _FAR_LINE)
        return (straddling + (line * visits if far else 0.0)) * shape.vectors

    def _displaced_rows(self, shape: ContractionTiling) -> Number:
        """Rows of a register tile that are evicted from L1 by its other rows before their next element is read. Of
        lines that are whole pages apart, L1 holds one per way, because a way is as large as a page."""
        return least(shape.rows, 2 * most(0.0, shape.rows - self._held_rows))

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

    def _tile_bytes(self, shape: ContractionTiling) -> Number:
        """Bytes of L1 that the data of a register tile occupies."""
        return shape.rows * self.gemm.length * 4

    def block_bytes(self, shape: ContractionTiling) -> Number:
        if self.dims is None:
            outer = self.gemm.rows[0].extent if self.gemm.rows else 1
            load = te.loads(self.gemm.data)[0]
            assert isinstance(load.source, Buffer)
            return load.source.size * load.dtype.bytes * shape.block // outer
        return self._staged_bytes(shape)


def even_block(extent: int, size: Number, unit: Number) -> Number:
    """The least multiple of `unit` that cuts `extent` into no more blocks than `size` does. A partial last block
    overlaps the one before it, so little work is repeated."""
    blocks = ceil_div(extent, size)
    return least(extent, ceil_div(extent, blocks * unit) * unit)
