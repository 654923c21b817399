"""Tile a reduction whose elements share data: which part stays in registers and in which cache, and how its operands
get there.

    for axes that all operands share, chunks of panels, blocks of rows:          S   (parallel)
      for panels of the chunk, `vectors` registers wide:                         S
        for blocks of K:                                                   R   (where there are several)
          for tiles of `rows` rows in the block:                                 S
            for the elements of the K block, `unroll` of them written out:         R
              tile[rows, vectors] += ...                                         S   (written out)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

from tilewright import te
from tilewright.loops.schedule import Schedule
from tilewright.loops.schedule.nest import Leaf, PlainStage, Tile, find_leaf
from tilewright.space.sketches import acts
from tilewright.space.sketches.acts import NativeTile
from tilewright.space.sketches.analysis import (
    Consumer,
    Extents,
    box_reader,
    is_contiguous,
    lanes_for,
    loads_in,
    loops_of,
    moves_along,
)
from tilewright.space.sketches.costs import Cost, TiledCost, inner_cost, stage_cost, together
from tilewright.space.sketches.sketch import Move, Sketch, Values
from tilewright.space.space import Knob
from tilewright.space.template import Work
from tilewright.support.arith import evenly_spread

_WRITTEN_OUT = 320  # maximum FMAs unrolled: code size and compile time
_PARTIAL_BYTES = 256 << 10
_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14)
_VECTORS = (1, 2, 3, 4, 6, 8)
_UNROLL = (1, 2, 4, 8)
_BLOCKS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128)
_CHUNKS = (1, 2, 4, 8, 16, 32)
_BALANCED = 8  # minimum blocks, so that threads get about equal work


@dataclass(frozen=True)
class Axes:
    """The axes of a product, as loops of the stage that stores it."""

    vector: te.Var
    rows: tuple[te.Var, ...]  # axes that the vectorised operand does not depend on, outermost first
    shared: tuple[te.Var, ...]  # the other axes


@dataclass(frozen=True)
class GemmStage:
    """A reduction to be tiled. The register tile is `rows[-1]` x `vector`."""

    work: Work
    consumer: Consumer
    stage: PlainStage  # the reduction
    micro: bool  # whether a micro-kernel or an intrinsic computes the tile
    native: NativeTile | None = None

    @property
    def name(self) -> str:
        return self.stage.leaf.stage

    @cached_property
    def axes(self) -> Axes:
        own = dict(zip(self.consumer.axes, self.stage.axes, strict=True))
        vector = loops_of(self.consumer.stage)[-1]
        inner = own[vector]
        assert inner is not None
        walked = [load for load in loads_in(self.stage.leaf) if moves_along(load, inner)]

        def is_row(axis: te.Var) -> bool:
            mine = own[axis]
            assert mine is not None
            return axis != vector and not all(moves_along(load, mine) for load in walked)

        rows = tuple(axis for axis in loops_of(self.consumer.stage) if is_row(axis))
        shared = tuple(axis for axis in loops_of(self.consumer.stage) if axis not in rows and axis != vector)
        return Axes(vector, rows, shared)

    def axis_of(self, loop: te.Var) -> int:
        """The reduction's axis that corresponds to a loop of the consumer."""
        return self.consumer.axes.index(loop)

    def own(self, loop: te.Var) -> te.Var:
        """The same axis as the reduction's own variable."""
        axis = self.stage.axes[self.axis_of(loop)]
        assert axis is not None
        return axis

    @cached_property
    def lanes(self) -> int:
        if self.native is not None:
            return self.native.lanes
        leaves = (self.stage.leaf, self.consumer.stage.leaf)
        return min(lanes_for(self.work.machine, leaf, self.axes.vector.extent) for leaf in leaves)

    @property
    def row(self) -> te.Var | None:
        return self.axes.rows[-1] if self.axes.rows else None

    @property
    def k_axes(self) -> list[str]:
        return [loop.name for loop in self.stage.reductions]

    @cached_property
    def length(self) -> int:
        return math.prod(loop.var.extent for loop in self.stage.reductions)

    @cached_property
    def last_k(self) -> te.Var:
        return self.stage.reductions[-1].var

    def leaf_in(self, schedule: Schedule) -> Leaf:
        """Its body after other stages were inlined."""
        return find_leaf(schedule.nest, self.name)[1]

    def is_walked(self, load: te.Load) -> bool:
        """Whether the operand depends on the vector axis."""
        return moves_along(load, self.own(self.axes.vector))

    def is_gathered(self, load: te.Load) -> bool:
        """Whether a vector of it is not contiguous in memory."""
        return self.is_walked(load) and not is_contiguous(load, self.own(self.axes.vector))

    @cached_property
    def _positions(self) -> tuple[int | None, ...]:
        """The axis of the consumer that corresponds to each axis of the reduction."""
        positions = {axis: n for n, axis in enumerate(self.consumer.stage.axes) if axis is not None}
        return tuple(None if axis is None else positions[axis] for axis in self.consumer.axes)

    def box_of(self, box: Extents) -> Extents:
        """Convert a box of the consumer to a box of the reduction."""
        return tuple(1 if position is None else box[position] for position in self._positions)

    def operand_box(self, schedule: Schedule, tile: Tile) -> Callable[[Extents], Extents]:
        """The part of an operand that a box of the consumer needs."""
        read = box_reader(self.leaf_in(schedule), self.stage.axes, tile)
        return lambda box: read(self.box_of(box))

    # -- knobs of the register tile -------------------------------------------------------------------------------

    def tile_knobs(self, rename: Mapping[str, str]) -> tuple[Knob, ...]:
        rows = self.row.extent if self.row is not None else 1
        fitting = tuple(n for n in _VECTORS if n * self.lanes <= self.axes.vector.extent)
        unit, step = (self.native.rows, self.native.k_axes) if self.native is not None else (1, 1)
        deep = tuple(n for n in _UNROLL if self.last_k.extent // step % n == 0)
        high = tuple(n for n in _ROWS if n <= rows and n % unit == 0)
        tiles = [(n, m) for n in high for m in fitting if self.tile_is_legal(n, m, 1)]
        # Minimise loads per FMA.
        best = min(tiles, key=lambda tile: 1 / tile[0] + 1 / tile[1])
        return (
            Knob(rename["rows"], high, default=best[0]),
            Knob(rename["vectors"], fitting, default=best[1]),
            Knob(rename["unroll"], deep, default=deep[-1]),
        )

    def tile_is_legal(self, rows: int, vectors: int, unroll: int) -> bool:
        registers = rows * vectors + vectors + 1
        wide = max(1, self.stage.leaf.target.dtype.bytes * self.lanes // self.work.machine.vector_bytes)
        if registers * wide > self.work.machine.vector_registers:
            return False
        return unroll == 1 or rows * vectors * unroll <= _WRITTEN_OUT


@dataclass(frozen=True)
class GemmTiling:
    """The numbers that follow from a config."""

    rows: int
    vectors: int
    unroll: int
    width: int
    panels: int
    per_chunk: int
    chunks: int
    block: int  # of the outermost row axis
    blocks: int
    k_block: int  # of the innermost reduction axis; 0: all of it at once


@dataclass(frozen=True)
class TiledOutput:
    """Tile the output together with a product that only it reads: six levels of loops."""

    gemm: GemmStage

    # -- names of loops -------------------------------------------------------------------------------------------

    @property
    def vector(self) -> str:
        return self.gemm.axes.vector.name

    @property
    def chunk_loop(self) -> str:
        return f"{self.vector}.o.o"

    @property
    def panel_loop(self) -> str:
        return f"{self.vector}.o.i"

    @property
    def block_loop(self) -> str:
        rows = self.gemm.axes.rows
        return f"{rows[0].name}.o" if rows else self.chunk_loop

    @property
    def row_loops(self) -> list[str]:
        """The loops over the tiles of a block; the last one is over the tile's own axis."""
        rows = self.gemm.axes.rows
        if not rows:
            return []
        if len(rows) == 1:
            return [f"{rows[0].name}.i.o"]
        return [f"{rows[0].name}.i", *(axis.name for axis in rows[1:-1]), f"{rows[-1].name}.o"]

    @property
    def tile_row(self) -> str | None:
        rows = self.gemm.axes.rows
        if not rows:
            return None
        return f"{rows[0].name}.i.i" if len(rows) == 1 else f"{rows[-1].name}.i"

    @property
    def parallel_loops(self) -> list[str]:
        blocks = [self.block_loop] if self.gemm.axes.rows else []
        return [*(axis.name for axis in self.gemm.axes.shared), self.chunk_loop, *blocks]

    # -- the space ------------------------------------------------------------------------------------------------

    def moves(self, *, k_blocks: bool, chunks: bool) -> tuple[Move, Move]:
        gemm = self.gemm
        rows = gemm.axes.rows
        outer = rows[0].extent if rows else 1
        units = outer if len(rows) > 1 else -(-outer // 4)
        last = gemm.last_k.extent
        cut = [n for n in range(48, 769) if last % n == 0 and n < last] if k_blocks and rows else []
        tile = gemm.tile_knobs({"rows": "rows", "vectors": "vectors", "unroll": "unroll"})
        blocks = (0, *(n for n in _BLOCKS if n < units))
        unit = int(tile[0].start) if len(rows) == 1 else 1
        balanced = [n for n in blocks if n and n * unit * _BALANCED <= outer]
        knobs = (
            *tile,
            Knob("block", blocks, default=balanced[-1] if balanced else blocks[min(1, len(blocks) - 1)]),
            Knob("chunks", tuple(n for n in _CHUNKS if n == 1 or chunks)),
            Knob("k_block", (0, *evenly_spread(cut, 5))),
        )
        structure = Move(
            self._arrange,
            knobs,
            self._legal,
            lambda values: self._partial_bytes(self.shape(values)),
            together=(("rows", "vectors"), ("block", "chunks")),
        )
        return structure, Move(lambda s, values: acts.in_parallel(s, self.parallel_loops), last=True)

    def shape(self, values: Values) -> GemmTiling:
        gemm = self.gemm
        rows, vectors = int(values["rows"]), int(values["vectors"])
        width = vectors * gemm.lanes
        panels = -(-gemm.axes.vector.extent // width)
        per_chunk = -(-panels // int(values["chunks"]))
        outer = gemm.axes.rows[0].extent if gemm.axes.rows else 1
        unit = rows if len(gemm.axes.rows) == 1 else 1
        block = int(values["block"]) * unit or outer
        return GemmTiling(
            rows,
            vectors,
            int(values["unroll"]),
            width,
            panels,
            per_chunk,
            -(-panels // per_chunk),
            block,
            -(-outer // block),
            int(values["k_block"]),
        )

    def _legal(self, values: Values) -> bool:
        shape, gemm = self.shape(values), self.gemm
        if not gemm.tile_is_legal(shape.rows, shape.vectors, shape.unroll):
            return False
        if int(values["chunks"]) > shape.panels or shape.per_chunk * (shape.chunks - 1) >= shape.panels:
            return False
        if shape.block > (gemm.axes.rows[0].extent if gemm.axes.rows else 1):
            return False
        if not shape.k_block:
            return True
        # An overlapping last tile would add its elements to the partial sums twice.
        assert gemm.row is not None
        whole = (gemm.row.extent if len(gemm.axes.rows) > 1 else shape.block) % shape.rows == 0
        return whole and shape.k_block % shape.unroll == 0 and self._partial_bytes(shape) <= _PARTIAL_BYTES

    def _partial_bytes(self, shape: GemmTiling) -> int:
        if not shape.k_block:
            return 0
        elements = math.prod((shape.block, *(axis.extent for axis in self.gemm.axes.rows[1:]))) * shape.width
        return elements * self.gemm.stage.leaf.target.dtype.bytes

    def width(self, values: Values) -> int:
        return self.shape(values).width

    def k_block(self, values: Values) -> int:
        return self.shape(values).k_block

    def at_block(self, values: Values) -> Extents:
        return self._extents(self.shape(values), chunk=True)

    def at_panel(self, values: Values) -> Extents:
        return self._extents(self.shape(values), chunk=False)

    def _extents(self, shape: GemmTiling, *, chunk: bool) -> Extents:
        axes = self.gemm.axes
        width = min(axes.vector.extent, shape.width * (shape.per_chunk if chunk else 1))
        sizes = (
            {axis: axis.extent for axis in axes.rows} | dict.fromkeys(axes.shared, 1) | {axes.vector: width}
        )
        if axes.rows:
            sizes[axes.rows[0]] = shape.block
        return tuple(1 if axis is None else sizes[axis] for axis in self.gemm.consumer.stage.axes)

    def tiles_in_block(self, shape: GemmTiling) -> int:
        """Register tiles of one panel."""
        rows = self.gemm.axes.rows
        if len(rows) < 2:
            return -(-shape.block // shape.rows)
        between = math.prod(axis.extent for axis in rows[1:-1])
        return shape.block * between * -(-rows[-1].extent // shape.rows)

    def prefetches(self, values: Values) -> tuple[str, str]:
        """The loop that reads a new part of a packed operand in each iteration, and the innermost loop in which the
        next part can be prefetched."""
        shape, k = self.shape(values), self.gemm.k_axes[-1]
        inner = f"{k}.i" if shape.k_block else k
        if self.gemm.native is not None and self.gemm.native.k_axes > 1:
            inner = f"{k}.o"
        return (
            f"{k}.o.final" if shape.k_block else self.panel_loop,
            f"{inner}.o" if shape.unroll > 1 else inner,
        )

    def prefetch_pays(self, values: Values) -> bool:
        """Whether a part has about as many cache lines as there are steps to prefetch one."""
        shape, gemm = self.shape(values), self.gemm
        k_axes = gemm.length * shape.k_block // gemm.last_k.extent if shape.k_block else gemm.length
        steps = self.tiles_in_block(shape) * max(1, k_axes // shape.unroll)
        further = shape.per_chunk > 1 or shape.k_block > 0
        return further and shape.width * k_axes * 4 // gemm.work.machine.line_bytes * 2 >= steps

    # -- the program ----------------------------------------------------------------------------------------------

    def _arrange(self, schedule: Schedule, values: Values) -> Schedule:
        shape, gemm = self.shape(values), self.gemm
        schedule = schedule.split(self.vector, shape.width, "shift")
        schedule = schedule.split(f"{self.vector}.o", shape.per_chunk, "shift")
        rows = acts.names(gemm.axes.rows)
        if rows:
            schedule = schedule.split(rows[0], shape.block, "shift")
            schedule = schedule.split(f"{rows[0]}.i" if len(rows) == 1 else rows[-1], shape.rows, "shift")
        tile_row = [self.tile_row] if self.tile_row else []
        tile = f"{self.vector}.i"
        schedule = schedule.reorder(*self.parallel_loops, self.panel_loop, *self.row_loops, *tile_row, tile)
        schedule = self._in_k_blocks(schedule, shape) if shape.k_block else self._whole(schedule, shape)
        schedule = acts.in_vectors(schedule, tile, gemm.lanes)
        return schedule.unroll(self.tile_row) if self.tile_row else schedule

    def _whole(self, schedule: Schedule, shape: GemmTiling) -> Schedule:
        """The whole sum at once, in registers."""
        gemm = self.gemm
        schedule = schedule.compute_at(gemm.name, [self.panel_loop, *self.row_loops][-1])
        return self._registers(schedule, gemm.name, gemm.k_axes, shape)

    def _in_k_blocks(self, schedule: Schedule, shape: GemmTiling) -> Schedule:
        """The sum of each K block in registers, added to the block's sums in memory."""
        gemm = self.gemm
        k_axes = gemm.k_axes
        schedule = schedule.split(k_axes[-1], shape.k_block).rfactor(f"{k_axes[-1]}.o")
        schedule = schedule.compute_at(gemm.name, self.panel_loop)
        outer = [
            loop
            for axis in gemm.axes.rows[:-1]
            if (loop := acts.axis_loop(schedule, gemm.name, gemm.axis_of(axis))) is not None
        ]
        across = acts.axis_loop(schedule, gemm.name, gemm.axis_of(gemm.axes.vector))
        assert across is not None and gemm.row is not None
        down = acts.axis_loop(schedule, gemm.name, gemm.axis_of(gemm.row))
        k_blocks = f"{k_axes[-1]}.o.final"
        inside = [k_blocks, *outer]
        if down is not None:
            schedule = schedule.split(down, shape.rows)
            inside.append(f"{down}.o")
        schedule = schedule.reorder(*inside, *([f"{down}.i"] if down else []), across)
        schedule = schedule.compute_at(f"{gemm.name}.rf", inside[-1])
        schedule = self._registers(schedule, f"{gemm.name}.rf", [*k_axes[:-1], f"{k_axes[-1]}.i"], shape)
        schedule = acts.in_vectors(schedule, across, gemm.lanes)
        return schedule.unroll(f"{down}.i") if down else schedule

    def _registers(self, schedule: Schedule, stage: str, k_axes: list[str], shape: GemmTiling) -> Schedule:
        gemm = self.gemm
        down = gemm.axis_of(gemm.row) if gemm.row is not None else None
        across = gemm.axis_of(gemm.axes.vector)
        return acts.register_tile(
            schedule,
            stage,
            down,
            across,
            k_axes,
            shape.unroll,
            gemm.lanes,
            micro=gemm.micro,
            native=gemm.native,
        )

    def iterations(self, values: Values) -> int:
        shape = self.shape(values)
        return math.prod(axis.extent for axis in self.gemm.axes.shared) * shape.chunks * shape.blocks

    def terms(self, sketch: Sketch) -> Cost | None:
        own = {
            self.gemm.name,
            *(load.source.name for load in loads_in(self.gemm.leaf_in(sketch.start))),
        }
        others = other_costs(sketch, self.iterations, own)
        return together([TiledCost(self, sketch), *others], self.iterations)


@dataclass(frozen=True)
class TiledStage:
    """A product whose result stays in scratch memory for a block of the output, with its own tiles."""

    gemm: GemmStage
    block_loop: str | None
    rename: Mapping[str, str]
    box: Callable[[Values], Extents]  # of the result

    def move(self) -> Move:
        return Move(
            self._arrange,
            self.gemm.tile_knobs(self.rename),
            self._legal,
            together=((self.rename["rows"], self.rename["vectors"]),),
        )

    def _legal(self, values: Values) -> bool:
        rows, vectors, unroll = self.tile(values)
        extents = dict(zip(self.gemm.consumer.stage.axes, self.box(values), strict=True))
        fits = vectors * self.gemm.lanes <= extents[self.gemm.axes.vector]
        return fits and self.gemm.tile_is_legal(rows, vectors, unroll)

    @property
    def panel_loop(self) -> str | None:
        return self.block_loop

    def width(self, values: Values) -> int:
        return self.tile(values)[1] * self.gemm.lanes

    def k_block(self, values: Values) -> int:
        return 0

    def at_panel(self, values: Values) -> Extents:
        return self.box(values)

    def tile(self, values: Values) -> tuple[int, int, int]:
        rows, vectors, unroll = (int(values[self.rename[knob]]) for knob in ("rows", "vectors", "unroll"))
        return rows, vectors, unroll

    def _arrange(self, schedule: Schedule, values: Values) -> Schedule:
        rows, vectors, unroll = self.tile(values)
        gemm, copy = self.gemm, self.gemm.consumer.name
        vector = gemm.axes.vector.name
        lanes = gemm.lanes
        schedule = schedule.split(vector, vectors * lanes, "shift")
        others = [loop for loop in acts.spatial_loops(schedule, copy) if loop != vector]
        row = gemm.row.name if gemm.row is not None and gemm.row.name in others else None
        at, tile = [f"{vector}.o"], [f"{vector}.i"]
        if row is not None:
            schedule = schedule.split(row, min(rows, acts.extent_of(schedule, row)), "shift")
            others = [loop for loop in others if loop != row]
            at, tile = [*at, f"{row}.o"], [f"{row}.i", *tile]
        schedule = schedule.reorder(*others, *at, *tile).compute_at(gemm.name, at[-1])
        down = gemm.axis_of(gemm.row) if gemm.row is not None else None
        schedule = acts.register_tile(
            schedule,
            gemm.name,
            down,
            gemm.axis_of(gemm.axes.vector),
            gemm.k_axes,
            unroll,
            lanes,
            micro=gemm.micro,
        )
        schedule = acts.in_vectors(schedule, tile[-1], lanes)
        return schedule.unroll(tile[0]) if len(tile) > 1 else schedule


Tiled = TiledOutput | TiledStage


def other_costs(
    sketch: Sketch, iterations: Callable[[Values], int], besides: Collection[str] = ()
) -> list[Cost]:
    """The cost of all stages placed in a block of the output, except those counted elsewhere."""
    inner = {each.gemm.name: each for each in sketch.products if isinstance(each, TiledStage)}
    costs = []
    for name, box in sketch.boxes.items():
        if name in inner:
            costs.append(inner_cost(inner[name], sketch, iterations))
        elif name not in besides:
            costs.append(stage_cost(sketch, name, box, iterations))
    return costs
