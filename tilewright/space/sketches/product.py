"""Tiles of a reduction whose elements share data: what of it stays in registers, in which cache, and how its operands
come there.

    for axes that all operands share, chunks of panels, blocks of rows:          S   (parallel)
      for panels of the chunk, `vectors` registers wide:                         S
        for pieces of the sum:                                                   R   (where there are several)
          for tiles of `rows` rows in the block:                                 S
            for the elements of the piece, `unroll` of them written out:         R
              tile[rows, vectors] += ...                                         S   (written out)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from tilewright import te
from tilewright.loops.schedule import Schedule
from tilewright.loops.schedule.nest import Leaf, Plain, Tile, find_leaf
from tilewright.space.sketches import acts
from tilewright.space.sketches.analysis import (
    Consumer,
    Extents,
    box_reader,
    bytes_of,
    is_contiguous,
    lanes_for,
    loads_in,
    loops_of,
    moves_along,
)
from tilewright.space.sketches.sketch import Move, Sketch, Values
from tilewright.space.space import Knob
from tilewright.space.template import Terms, Work

_WRITTEN_OUT = 320  # multiply-adds written out at most: code size and compile time
_PARTIAL_BYTES = 256 << 10
_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14)
_VECTORS = (1, 2, 3, 4, 6, 8)
_UNROLL = (1, 2, 4, 8)
_BLOCKS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128)
_CHUNKS = (1, 2, 4, 8, 16, 32)
_LINE = 64


@dataclass(frozen=True)
class Axes:
    """The axes of a product, as the loops of the stage that stores it."""

    vector: te.Var
    rows: tuple[te.Var, ...]  # along which what is read in vectors does not move, outermost first
    shared: tuple[te.Var, ...]  # the others


@dataclass(frozen=True)
class Product:
    """A reduction to be tiled. The register tile is `rows[-1]` x `vector`."""

    work: Work
    consumer: Consumer
    stage: Plain  # the reduction
    micro: bool  # whether a micro-kernel computes the tile

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
        """The axis of the reduction over which a loop of the consumer runs."""
        return self.consumer.axes.index(loop)

    def own(self, loop: te.Var) -> te.Var:
        """That axis as the reduction's own variable."""
        axis = self.stage.axes[self.axis_of(loop)]
        assert axis is not None
        return axis

    @cached_property
    def lanes(self) -> int:
        leaves = (self.stage.leaf, self.consumer.stage.leaf)
        return min(lanes_for(self.work.machine, leaf, self.axes.vector.extent) for leaf in leaves)

    @property
    def row(self) -> te.Var | None:
        return self.axes.rows[-1] if self.axes.rows else None

    @property
    def taps(self) -> list[str]:
        return [loop.name for loop in self.stage.reductions]

    @cached_property
    def length(self) -> int:
        return math.prod(loop.var.extent for loop in self.stage.reductions)

    @cached_property
    def last_tap(self) -> te.Var:
        return self.stage.reductions[-1].var

    def leaf_in(self, schedule: Schedule) -> Leaf:
        """What it computes after other stages were inlined into it."""
        return find_leaf(schedule.nest, self.name)[1]

    def is_walked(self, load: te.Load) -> bool:
        """Whether the operand moves along the vectors."""
        return moves_along(load, self.own(self.axes.vector))

    def is_gathered(self, load: te.Load) -> bool:
        """Whether a vector of it is not one piece of memory."""
        return self.is_walked(load) and not is_contiguous(load, self.own(self.axes.vector))

    @cached_property
    def _places(self) -> tuple[int | None, ...]:
        """For each axis of the reduction, that of the consumer."""
        places = {axis: n for n, axis in enumerate(self.consumer.stage.axes) if axis is not None}
        return tuple(None if axis is None else places[axis] for axis in self.consumer.axes)

    def box_of(self, box: Extents) -> Extents:
        """A box of the consumer as one of the reduction."""
        return tuple(1 if place is None else box[place] for place in self._places)

    def operand_box(self, schedule: Schedule, tile: Tile) -> Callable[[Extents], Extents]:
        """What a box of the consumer needs of an operand."""
        read = box_reader(self.leaf_in(schedule), self.stage.axes, tile)
        return lambda box: read(self.box_of(box))

    # -- knobs of the register tile -------------------------------------------------------------------------------

    def tile_knobs(self, rename: Mapping[str, str]) -> tuple[Knob, ...]:
        rows = self.row.extent if self.row is not None else 1
        fitting = tuple(n for n in _VECTORS if n * self.lanes <= self.axes.vector.extent)
        deep = tuple(n for n in _UNROLL if self.last_tap.extent % n == 0)
        return (
            Knob(rename["rows"], tuple(n for n in _ROWS if n <= rows)),
            Knob(rename["vectors"], fitting),
            Knob(rename["unroll"], deep, default=deep[-1]),
        )

    def tile_is_legal(self, rows: int, vectors: int, unroll: int) -> bool:
        registers = rows * vectors + vectors + 1
        wide = max(1, self.stage.leaf.target.dtype.bytes * self.lanes // self.work.machine.vector_bytes)
        if registers * wide > self.work.machine.vector_registers:
            return False
        return unroll == 1 or rows * vectors * unroll <= _WRITTEN_OUT


@dataclass(frozen=True)
class Shape:
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
    piece: int  # of the innermost axis of the reduction; 0: all of it at once


@dataclass(frozen=True)
class TiledOutput:
    """The output in tiles of a product that it alone reads: six levels of loops."""

    product: Product

    # -- names of loops -------------------------------------------------------------------------------------------

    @property
    def vector(self) -> str:
        return self.product.axes.vector.name

    @property
    def chunk_loop(self) -> str:
        return f"{self.vector}.o.o"

    @property
    def panel_loop(self) -> str:
        return f"{self.vector}.o.i"

    @property
    def block_loop(self) -> str:
        rows = self.product.axes.rows
        return f"{rows[0].name}.o" if rows else self.chunk_loop

    @property
    def row_loops(self) -> list[str]:
        """Over the tiles of a block; the last one is that of the tile's own axis."""
        rows = self.product.axes.rows
        if not rows:
            return []
        if len(rows) == 1:
            return [f"{rows[0].name}.i.o"]
        return [f"{rows[0].name}.i", *(axis.name for axis in rows[1:-1]), f"{rows[-1].name}.o"]

    @property
    def tile_row(self) -> str | None:
        rows = self.product.axes.rows
        if not rows:
            return None
        return f"{rows[0].name}.i.i" if len(rows) == 1 else f"{rows[-1].name}.i"

    @property
    def parallel_loops(self) -> list[str]:
        blocks = [self.block_loop] if self.product.axes.rows else []
        return [*(axis.name for axis in self.product.axes.shared), self.chunk_loop, *blocks]

    # -- the space ------------------------------------------------------------------------------------------------

    def moves(self, *, pieces: bool, chunks: bool) -> tuple[Move, Move]:
        product = self.product
        rows = product.axes.rows
        outer = rows[0].extent if rows else 1
        units = outer if len(rows) > 1 else -(-outer // 4)
        last = product.last_tap.extent
        cut = [n for n in range(48, 769) if last % n == 0 and n < product.length] if pieces and rows else []
        knobs = (
            *product.tile_knobs({"rows": "rows", "vectors": "vectors", "unroll": "unroll"}),
            Knob("block", (0, *(n for n in _BLOCKS if n < units))),
            Knob("chunks", tuple(n for n in _CHUNKS if n == 1 or chunks)),
            Knob("piece", (0, *_spread(cut, 5))),
        )
        structure = Move(
            self._arrange,
            knobs,
            self._legal,
            lambda values: self._partial_bytes(self.shape(values)),
            together=(("rows", "vectors"), ("block", "chunks")),
        )
        return structure, Move(lambda s, values: acts.in_parallel(s, self.parallel_loops), last=True)

    def shape(self, values: Values) -> Shape:
        product = self.product
        rows, vectors = int(values["rows"]), int(values["vectors"])
        width = vectors * product.lanes
        panels = -(-product.axes.vector.extent // width)
        per_chunk = -(-panels // int(values["chunks"]))
        outer = product.axes.rows[0].extent if product.axes.rows else 1
        unit = rows if len(product.axes.rows) == 1 else 1
        block = int(values["block"]) * unit or outer
        return Shape(
            rows,
            vectors,
            int(values["unroll"]),
            width,
            panels,
            per_chunk,
            -(-panels // per_chunk),
            block,
            -(-outer // block),
            int(values["piece"]),
        )

    def _legal(self, values: Values) -> bool:
        shape, product = self.shape(values), self.product
        if not product.tile_is_legal(shape.rows, shape.vectors, shape.unroll):
            return False
        if int(values["chunks"]) > shape.panels or shape.per_chunk * (shape.chunks - 1) >= shape.panels:
            return False
        if shape.block > (product.axes.rows[0].extent if product.axes.rows else 1):
            return False
        if not shape.piece:
            return True
        # A tile that is moved back would add its elements to the partial sums twice.
        assert product.row is not None
        whole = (product.row.extent if len(product.axes.rows) > 1 else shape.block) % shape.rows == 0
        return whole and shape.piece % shape.unroll == 0 and self._partial_bytes(shape) <= _PARTIAL_BYTES

    def _partial_bytes(self, shape: Shape) -> int:
        if not shape.piece:
            return 0
        elements = (
            math.prod((shape.block, *(axis.extent for axis in self.product.axes.rows[1:]))) * shape.width
        )
        return elements * self.product.stage.leaf.target.dtype.bytes

    def width(self, values: Values) -> int:
        return self.shape(values).width

    def piece(self, values: Values) -> int:
        return self.shape(values).piece

    def at_block(self, values: Values) -> Extents:
        return self._extents(self.shape(values), chunk=True)

    def at_panel(self, values: Values) -> Extents:
        return self._extents(self.shape(values), chunk=False)

    def _extents(self, shape: Shape, *, chunk: bool) -> Extents:
        axes = self.product.axes
        width = min(axes.vector.extent, shape.width * (shape.per_chunk if chunk else 1))
        sizes = (
            {axis: axis.extent for axis in axes.rows} | dict.fromkeys(axes.shared, 1) | {axes.vector: width}
        )
        if axes.rows:
            sizes[axes.rows[0]] = shape.block
        return tuple(1 if axis is None else sizes[axis] for axis in self.product.consumer.stage.axes)

    # -- the program ----------------------------------------------------------------------------------------------

    def _arrange(self, schedule: Schedule, values: Values) -> Schedule:
        shape, product = self.shape(values), self.product
        schedule = schedule.split(self.vector, shape.width, "shift")
        schedule = schedule.split(f"{self.vector}.o", shape.per_chunk, "shift")
        rows = acts.names(product.axes.rows)
        if rows:
            schedule = schedule.split(rows[0], shape.block, "shift")
            schedule = schedule.split(f"{rows[0]}.i" if len(rows) == 1 else rows[-1], shape.rows, "shift")
        tile_row = [self.tile_row] if self.tile_row else []
        tile = f"{self.vector}.i"
        schedule = schedule.reorder(*self.parallel_loops, self.panel_loop, *self.row_loops, *tile_row, tile)
        schedule = self._pieces(schedule, shape) if shape.piece else self._whole(schedule, shape)
        schedule = acts.in_vectors(schedule, tile, product.lanes)
        return schedule.unroll(self.tile_row) if self.tile_row else schedule

    def _whole(self, schedule: Schedule, shape: Shape) -> Schedule:
        """All of the sum at once, in registers."""
        product = self.product
        schedule = schedule.compute_at(product.name, [self.panel_loop, *self.row_loops][-1])
        return self._registers(schedule, product.name, product.taps, shape)

    def _pieces(self, schedule: Schedule, shape: Shape) -> Schedule:
        """The sum of each piece in registers, added to sums of the block in memory."""
        product = self.product
        taps = product.taps
        schedule = schedule.split(taps[-1], shape.piece).rfactor(f"{taps[-1]}.o")
        schedule = schedule.compute_at(product.name, self.panel_loop)
        outer = [
            loop
            for axis in product.axes.rows[:-1]
            if (loop := acts.axis_loop(schedule, product.name, product.axis_of(axis))) is not None
        ]
        across = acts.axis_loop(schedule, product.name, product.axis_of(product.axes.vector))
        assert across is not None and product.row is not None
        down = acts.axis_loop(schedule, product.name, product.axis_of(product.row))
        pieces = f"{taps[-1]}.o.final"
        inside = [pieces, *outer]
        if down is not None:
            schedule = schedule.split(down, shape.rows)
            inside.append(f"{down}.o")
        schedule = schedule.reorder(*inside, *([f"{down}.i"] if down else []), across)
        schedule = schedule.compute_at(f"{product.name}.rf", inside[-1])
        schedule = self._registers(schedule, f"{product.name}.rf", [*taps[:-1], f"{taps[-1]}.i"], shape)
        schedule = acts.in_vectors(schedule, across, product.lanes)
        return schedule.unroll(f"{down}.i") if down else schedule

    def _registers(self, schedule: Schedule, stage: str, taps: list[str], shape: Shape) -> Schedule:
        product = self.product
        down = product.axis_of(product.row) if product.row is not None else None
        across = product.axis_of(product.axes.vector)
        return acts.register_tile(
            schedule, stage, down, across, taps, shape.unroll, product.lanes, micro=product.micro
        )

    def terms(self, sketch: Sketch) -> Callable[[Values], Terms] | None:
        """None where other reductions are computed besides."""
        known = {load.source.name for load in loads_in(self.product.leaf_in(sketch.start))}
        others = sketch.boxes.keys() - known - {self.product.name}
        return None if others else Cost(self, sketch)


class Cost:
    """What a config of a tiled output costs, counted as the template for matrix products does."""

    def __init__(self, tiled: TiledOutput, sketch: Sketch) -> None:
        product = self.product = tiled.product
        self.tiled = tiled
        leaf = product.leaf_in(sketch.start)
        operands = [Operand(product, sketch, load) for load in loads_in(leaf)]
        self.walked = [each for each in operands if each.walked]
        self.others = [each for each in operands if not each.walked]
        self.constant = any(each.load.source.name in sketch.start.nest.constants for each in self.walked)
        self.accesses = sum(product.lanes if each.gathered else 1 for each in self.walked)
        values = [node for node in te.walk(leaf.value) if node.dtype.short not in ("i64", "bool")]
        computed = sum(isinstance(node, te.Call | te.Select) for node in values)
        converted = sum(isinstance(node, te.Cast) for node in values)
        fused = leaf.kind == "sum" and leaf.target.dtype.is_float
        # One multiply-add for floats; integers are widened, multiplied and added.
        self.instructions = computed + converted / 4 + (0.0 if fused else 2.0)

    def __call__(self, values: Values) -> Terms:
        shape, product = self.tiled.shape(values), self.product
        axes, caches = product.axes, product.work.machine.caches
        repeats = math.prod(axis.extent for axis in axes.shared)
        in_block = -(-shape.block // shape.rows)
        if len(axes.rows) > 1:
            in_block = shape.block * math.prod(axis.extent for axis in axes.rows[1:-1])
            in_block *= -(-axes.rows[-1].extent // shape.rows)
        passes = repeats * shape.blocks * shape.chunks * shape.per_chunk
        tiles = passes * in_block
        steps = tiles * product.length
        pieces = product.last_tap.extent // shape.piece if shape.piece else 1

        at_panel, at_block = self.tiled.at_panel(values), self.tiled.at_block(values)
        panel = sum(each.bytes(at_panel) for each in self.walked)
        block = sum(each.bytes(at_block) for each in self.others)
        data = block * shape.blocks * repeats
        # The part of a panel that all rows of the block pass by stays in the first cache, or comes again for each tile.
        near = panel // pieces + shape.rows * product.length * 4 // pieces <= caches.l1 * 3 // 4
        panel_reads = passes * panel if near else tiles * panel
        data_reads = data * shape.chunks * shape.per_chunk
        fits = panel + block <= caches.l2_per_core * 3 // 4
        from_l2 = float(panel_reads) + (data_reads if fits and block > caches.l1 // 2 else 0)
        from_l3 = 0.0 if fits else float(min(data_reads, panel_reads))
        # Panels come from memory once for each block of rows, unless the chunk's stay in the second cache.
        chunk_panels = shape.per_chunk if shape.chunks > 1 else shape.panels
        again = shape.blocks if panel * chunk_panels > caches.l2_per_core // 2 else 1
        weight = panel * shape.panels * repeats
        from_l3 += weight * (again - 1 if self.constant else again) + data * shape.chunks
        output = product.consumer.stage.leaf.target
        from_l3 += 2.0 * output.size * output.dtype.bytes

        each = shape.rows * shape.vectors
        epilogue = tiles * each
        partial = 2.0 * epilogue * pieces if pieces > 1 else 0.0  # a piece's sums are added to those before
        iterations = repeats * shape.chunks * shape.blocks
        copied = sum(op.copied(at_panel, passes) for op in self.walked)
        copied += sum(op.copied(at_block, iterations) for op in self.others)
        return Terms(
            arithmetic=steps * max(each * self.instructions, 8.0) + epilogue + partial / 2,
            loads=steps * (shape.rows * len(self.others) + shape.vectors * self.accesses)
            + epilogue
            + partial
            + copied,
            stores=epilogue + partial + copied,
            branches=steps / shape.unroll + 3.0 * tiles * pieces,
            from_l2=from_l2,
            from_l3=from_l3,
            from_memory=float(weight) if self.constant else 0.0,
            iterations=iterations,
            scalar=tiles * pieces * 12.0 + passes * 100.0 + steps * max(0, shape.rows - 8) * 0.25,
        )


class Operand:
    """One operand of a product, and whether it is put elsewhere before it is read."""

    def __init__(self, product: Product, sketch: Sketch, load: te.Load) -> None:
        assert isinstance(load.source, Tile)
        self.load, self.tile = load, load.source
        self.walked = product.is_walked(load)
        self.how = sketch.operands.get(load.source.name, "")
        self.gathered = product.is_gathered(load) and not self.how
        # Copies go in vectors, or element by element where the order changes.
        self.at_once = 0.5 if product.is_gathered(load) else product.lanes
        self.box = product.operand_box(sketch.start, load.source)

    def bytes(self, box: Extents) -> int:
        return bytes_of(self.tile, self.box(box))

    def copied(self, box: Extents, times: int) -> float:
        """Instructions that copy it so many times."""
        if self.how in ("", "packed"):
            return 0.0
        return self.bytes(box) / self.tile.dtype.bytes * times / self.at_once


@dataclass(frozen=True)
class TiledStage:
    """A product whose result is kept in scratch memory for a block of the output, in tiles of its own."""

    product: Product
    block_loop: str | None
    rename: Mapping[str, str]
    box: Callable[[Values], Extents]  # of the result

    def move(self) -> Move:
        return Move(
            self._arrange,
            self.product.tile_knobs(self.rename),
            self._legal,
            together=((self.rename["rows"], self.rename["vectors"]),),
        )

    def _legal(self, values: Values) -> bool:
        rows, vectors, unroll = self._tile(values)
        extents = dict(zip(self.product.consumer.stage.axes, self.box(values), strict=True))
        fits = vectors * self.product.lanes <= extents[self.product.axes.vector]
        return fits and self.product.tile_is_legal(rows, vectors, unroll)

    @property
    def panel_loop(self) -> str | None:
        return self.block_loop

    def width(self, values: Values) -> int:
        return self._tile(values)[1] * self.product.lanes

    def piece(self, values: Values) -> int:
        return 0

    def at_panel(self, values: Values) -> Extents:
        return self.box(values)

    def _tile(self, values: Values) -> tuple[int, int, int]:
        rows, vectors, unroll = (int(values[self.rename[knob]]) for knob in ("rows", "vectors", "unroll"))
        return rows, vectors, unroll

    def _arrange(self, schedule: Schedule, values: Values) -> Schedule:
        rows, vectors, unroll = self._tile(values)
        product, copy = self.product, self.product.consumer.name
        vector = product.axes.vector.name
        lanes = product.lanes
        schedule = schedule.split(vector, vectors * lanes, "shift")
        others = [loop for loop in acts.spatial_loops(schedule, copy) if loop != vector]
        row = product.row.name if product.row is not None and product.row.name in others else None
        at, tile = [f"{vector}.o"], [f"{vector}.i"]
        if row is not None:
            schedule = schedule.split(row, min(rows, acts.extent_of(schedule, row)), "shift")
            others = [loop for loop in others if loop != row]
            at, tile = [*at, f"{row}.o"], [f"{row}.i", *tile]
        schedule = schedule.reorder(*others, *at, *tile).compute_at(product.name, at[-1])
        down = product.axis_of(product.row) if product.row is not None else None
        schedule = acts.register_tile(
            schedule,
            product.name,
            down,
            product.axis_of(product.axes.vector),
            product.taps,
            unroll,
            lanes,
            micro=product.micro,
        )
        schedule = acts.in_vectors(schedule, tile[-1], lanes)
        return schedule.unroll(tile[0]) if len(tile) > 1 else schedule


Tiled = TiledOutput | TiledStage


def _spread(values: list[int], count: int) -> list[int]:
    """At most `count` of the values, evenly spread."""
    if len(values) <= count:
        return values
    return [values[round(n * (len(values) - 1) / (count - 1))] for n in range(count)]
