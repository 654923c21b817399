"""Matmuls and direct convolutions: register tiles over packed panels.

    for every chunk of panels and block of rows:                    (parallel)
      stage the block's data in scratch                             (where it is a formula: a padding, a conversion)
      for every panel of the weight, `vectors` registers wide:
        copy it to scratch                                          (if it is not constant and rows pass it often)
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
from functools import cached_property
from typing import Any

import numpy as np

from tilewright import te
from tilewright.loops.ir import Program
from tilewright.loops.tiling import Tiles, extent_of, lanes_for
from tilewright.space.space import Config, Knob, Space
from tilewright.space.template import Applied, Work
from tilewright.space.templates.cpu.contraction_nest import ContractionNest
from tilewright.space.templates.cpu.contraction_tail import tail_columns
from tilewright.space.templates.cpu.contraction_terms import (
    ContractionTerms,
    ContractionTiling,
    PanelCounts,
    even_block,
)
from tilewright.space.templates.cpu.gemm import (
    Coordinate,
    Gemm,
    coordinates,
    gemm_of,
)
from tilewright.support.arith import ceil_div, evenly_spread, round_up
from tilewright.support.batch import Number, Truth, most, nowhere, select

NAME = "contraction"
_STAGED_BYTES = 512 << 10
_PARTIAL_BYTES = 256 << 10
_PANEL_BYTES = 256 << 10
_WRITTEN_OUT = 320  # maximum FMAs unrolled: code size and compile time
_WRITTEN_OUT_BLOCK = 400  # maximum for a whole block of channels, which then needs no inner loop
_SPREAD_EARLY = (
    5  # maximum rows of such a block two vectors wide: LLVM broadcasts elements that are used twice early
)
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


class AppliedContraction(ContractionTerms):
    name = NAME
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
        # Cached: a descent asks whether configs are legal, then what they cost.
        self._shape: tuple[object, ContractionTiling] | None = None
        self._last_tiles: dict[tuple[int, int, int], tuple[int, int]] = {}

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
            batched=True,
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

    def can_be_written_out(self, rows: Number, vectors: Number, unroll: Number) -> Truth:
        limit = select(unroll == self.gemm.short_run, _WRITTEN_OUT_BLOCK, _WRITTEN_OUT)
        few = rows <= self._most_rows(vectors, unroll)
        return few & ((unroll == 1) | (rows * vectors * unroll <= limit))

    def _most_rows(self, vectors: Number, unroll: Number) -> Number:
        """Maximum rows of a tile that does not spill."""
        return select((vectors == 2) & (unroll == self.gemm.short_run), _SPREAD_EARLY, math.inf)

    def _legal(self, values: Mapping[str, Number]) -> Truth:
        """Whether a config is legal; of many configs, which of them are."""
        rows, vectors, unroll = values["rows"], values["vectors"], values["unroll"]
        registers = self._registers(rows, vectors, unroll) * self.registers_each
        legal = (registers <= self.machine.vector_registers) & self.can_be_written_out(rows, vectors, unroll)
        if nowhere(legal):
            return legal
        shape = self.shape_of(values)
        panels = shape.panels.count
        legal = legal & (values["chunks"] <= panels) & (shape.per_chunk * (shape.chunks - 1) < panels)
        if len(self.gemm.rows) == 1:
            legal = legal & (shape.block <= self.gemm.rows[0].extent)
        if self.dims is not None:
            legal = legal & select(shape.staged, self._staged_bytes(shape) <= _STAGED_BYTES, True)
        legal = legal & select(shape.prefetch > 0, self._prefetch_pays(shape), True)
        legal = legal & select(shape.copied, self._panel_bytes(shape) <= _PANEL_BYTES, True)
        return legal & select(shape.k_block > 0, self.partial_size(shape) * 4 <= _PARTIAL_BYTES, True)

    def _registers(self, rows: Number, vectors: Number, unroll: Number) -> Number:
        """Vectors live in the innermost loop; LLVM needs two more in parts of a block of channels."""
        return rows * vectors + vectors + select(unroll < self.gemm.short_run, 3, 1)

    def shape_of(self, values: Mapping[str, Number]) -> ContractionTiling:
        known = self._shape
        if known is None or known[0] is not values:
            known = self._shape = values, self._made_shape(values)
        return known[1]

    def _made_shape(self, values: Mapping[str, Number]) -> ContractionTiling:
        rows, vectors, unroll = values["rows"], values["vectors"], values["unroll"]
        panels = self._panels(vectors)
        per_chunk = ceil_div(panels.count, values["chunks"])
        outer = self.gemm.rows[0].extent if self.gemm.rows else 1
        unit = rows if len(self.gemm.rows) == 1 else 1
        size = even_block(outer, select(values["block"] > 0, values["block"] * unit, outer), unit)
        last_rows, last_vectors = self._last_tiles_of(vectors, size, unroll)
        return ContractionTiling(
            rows=rows,
            vectors=vectors,
            unroll=unroll,
            panels=panels,
            per_chunk=per_chunk,
            chunks=ceil_div(panels.count, per_chunk),
            block=size,
            blocks=ceil_div(outer, size),
            k_block=values["k_block"],
            prefetch=values["prefetch"],
            staged=values["stage"],
            copied=values.get("copy", False),
            last_vectors=last_vectors,
            last_rows=last_rows,
        )

    def _panels(self, vectors: Number) -> Any:
        """The panels as `Tiles`; of many configs, their sizes and counts."""
        width = vectors * self.lanes
        count = ceil_div(most(self.columns.extent, width), width)
        if isinstance(width, np.ndarray):
            return PanelCounts(width, count)
        return Tiles(self.columns if width <= self.columns.extent else te.Var("columns", width), width)

    def _last_tiles_of(self, vectors: Number, block: Number, unroll: Number) -> tuple[Number, Number]:
        if not any(isinstance(each, np.ndarray) for each in (vectors, block, unroll)):
            return self._last_tile_of(vectors, block, unroll)
        if not self.narrows or self.vectors_separate:
            return 0, 0
        tiles = zip(*(each.tolist() for each in np.broadcast_arrays(vectors, block, unroll)), strict=True)
        found = np.array([self._last_tile_of(*tile) for tile in tiles])
        return found[:, 0], found[:, 1]

    def _last_tile_of(self, vectors: int, block: int, unroll: int) -> tuple[int, int]:
        tile = vectors, block, unroll
        if tile not in self._last_tiles:
            self._last_tiles[tile] = self.last_tile(self._panels(vectors), *tile)
        return self._last_tiles[tile]

    def last_tile(self, panels: Tiles, vectors: int, block: int, unroll: int) -> tuple[int, int]:
        """(rows, vectors) of the last panel's register tiles; (0, 0): the same as the others."""
        left = panels.axis.extent - (panels.count - 1) * panels.size
        narrow = ceil_div(left, self.lanes)
        saved = (vectors - narrow) / (panels.count * vectors)
        if not self.narrows or self.vectors_separate or saved < _NARROW_PAYS:
            return 0, 0
        rows = block if len(self.gemm.rows) < 2 else self.gemm.rows[-1].extent
        room = self.machine.vector_registers // self.registers_each - 1 - narrow
        tallest = int(max(1, min(rows, room // narrow, _LAST_ROWS, self._most_rows(narrow, unroll))))
        return min(range(tallest, 0, -1), key=lambda n: ceil_div(rows, n) * max(n * narrow, 8)), narrow

    def _prefetch_pays(self, shape: ContractionTiling) -> Truth:
        """Whether a K block of a panel has about as many lines as there are steps to prefetch one."""
        if not self.gemm.constant_weight:
            far = self._weight_pitch > self.machine.line_bytes
            return (self._tiles_per_block(shape) >= shape.vectors) & far
        whole = self.gemm.k_axes[self.gemm.cut].extent
        k_size = select(shape.k_block > 0, shape.k_block, whole) * self.gemm.inner_k
        steps = self._tiles_per_block(shape) * most(1, k_size // shape.unroll)
        return shape.panels.size * k_size * 4 // self.machine.line_bytes * 2 >= steps

    # -- the program ----------------------------------------------------------------------------------------------

    def program(self, config: Config) -> Program:
        return self.nest_of(self.shape_of(dict(config.values))).program(config)

    def nest_of(self, shape: ContractionTiling) -> ContractionNest:
        return ContractionNest(self, shape)
