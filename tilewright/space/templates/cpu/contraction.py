"""Matrix products and direct convolutions: register tiles over packed panels.

    for every chunk of panels and block of rows:                    (parallel)
      stage the block's data in scratch                             (where it is a formula: a padding, a conversion)
      for every panel of the weight, `vectors` registers wide:
        for pieces of the taps:                                     (where a panel is longer than the first cache)
          for every `rows` rows of the block:
            acc[rows, vectors] = 0, or what the piece before left
            for taps, `unroll` written out: acc += data[row, tap] * panel[tap, :]
              prefetch a line of the next piece
            out = epilogue(acc)

The last piece is as long as what is left. The last panel has register tiles of its own where it is narrower than the
others: columns that it shares with the panel before are not computed again.

A panel of a constant weight is contiguous in the order in which it is read. It stays in the second cache while the rows
of the block pass; the rows of the block stay there while the panels of the chunk pass. Where there are so few rows that
reading the weight is all there is to do, each vector of a panel is stored apart, its taps behind each other:
memory gives more to a core that reads from several places at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from tilewright import te
from tilewright.loops.ir import (
    Buffer,
    For,
    If,
    Kind,
    Prefetch,
    Program,
    Scope,
    Stmt,
    Store,
    block,
    nest,
)
from tilewright.loops.tiling import (
    PackedOperand,
    Tiles,
    blocks_of,
    extent_of,
    lanes_for,
    pack_operand,
    places_in,
    power_of_two_below,
    whole,
    with_values,
)
from tilewright.space.space import Config, Knob, Space, Value
from tilewright.space.template import Applied, Terms, Work
from tilewright.space.templates.cpu.product import (
    Coordinate,
    Product,
    Staged,
    coordinates,
    product_of,
    run_of,
)
from tilewright.te.index import coefficient, simplify

NAME = "contraction"
_LINE = 64
_STAGED_BYTES = 512 << 10
_PARTIAL_BYTES = 256 << 10
_STRADDLING = 0.75  # cycles for a vector in two cache lines
_FAR_LINE = 4.0  # cycles for a line that comes from the third cache by itself, not in a run of lines
_WRITTEN_OUT = 320  # multiply-adds written out at most: code size and compile time
_FEW_CUTS = 4  # divisors of a sum's length that are enough to cut it by
_PIECES = (64, 96, 128, 192, 256, 384)  # about as many taps are in a piece whose length is no divisor
_NARROW_PAYS = 1 / 32  # of the columns computed, what a narrower last panel must save
_FEW_ROWS = 4  # for which reading the weight takes longer than multiplying it
_LAST_ROWS = 10  # of its register tiles at most


class Contraction:
    name = NAME

    def apply(self, work: Work) -> Applied | None:
        product = product_of(work.formula)
        if product is None:
            return None
        dims = coordinates(product)
        if dims is None and not isinstance(product.data, te.Load):
            return None
        return AppliedContraction(work, product, dims)


@dataclass(frozen=True)
class Shape:
    """The numbers that follow from a config."""

    rows: int
    vectors: int
    unroll: int
    panels: Tiles  # of the vector axis
    per_chunk: int  # panels in a chunk
    chunks: int
    block: int  # values of the outermost row axis in a block: whole register tiles where it is the only one
    blocks: int
    tap_block: int  # values of the tap that is cut whose products are summed at once; 0: all taps of all axes
    prefetch: int
    staged: bool
    last_vectors: int = 0  # of the last panel, where it is narrower than the others
    last_rows: int = 0

    @property
    def last(self) -> Shape | None:
        """The shape of the last panel, if it has one of its own."""
        if not self.last_vectors:
            return None
        return replace(self, rows=self.last_rows, vectors=self.last_vectors, last_rows=0, last_vectors=0)


class AppliedContraction:
    name = NAME
    narrows = True  # whether the last panel may have tiles of its own, and vectors may be stored apart

    def __init__(self, work: Work, product: Product, dims: tuple[Coordinate, ...] | None) -> None:
        self.work = work
        self.machine = work.machine
        self.product = product
        self.dims = dims
        self.lanes = lanes_for(product.formula, work.machine, product.vector.extent)
        self.must_stage = not isinstance(product.data, te.Load)
        accumulator = product.reduction.result.dtype
        self.registers_each = max(1, accumulator.bytes * self.lanes // work.machine.vector_bytes)
        # Integers are widened, multiplied (two instructions on most machines) and added.
        self.instructions = 1.0 if accumulator.is_float else 3.0

    @cached_property
    def apart(self) -> bool:
        """Whether the vectors of a panel are stored apart from each other."""
        few = extent_of(self.product.rows) <= _FEW_ROWS
        return self.narrows and few and self.product.constant_weight

    # -- the space ------------------------------------------------------------------------------------------------

    @cached_property
    def space(self) -> Space:
        rows = self.product.rows
        tile_axis = rows[-1].extent if rows else 1
        outer = rows[0].extent if len(rows) > 1 else -(-tile_axis // 4)
        blocks = [n for n in (1, 2, 3, 4, 6, 7, 8, 12, 14, 16, 24, 28, 32, 48, 64, 96, 128) if n < outer]
        stage = (True,) if self.must_stage else (False, True) if self.dims is not None else (False,)
        return Space(
            self.name,
            (
                Knob("rows", tuple(n for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14) if n <= tile_axis)),
                Knob(
                    "vectors",
                    tuple(n for n in (1, 2, 3, 4, 6, 8) if n * self.lanes <= self.product.vector.extent),
                ),
                Knob("unroll", self._unrolls()),
                Knob("block", (0, *blocks)),
                Knob("chunks", (1, 2, 4, 8, 16, 32)),
                Knob("tap_block", (0, *self._cuts())),
                Knob("prefetch", (0, 1, 2) if self.product.constant_weight and not self.apart else (0,)),
                Knob("stage", stage),
            ),
            self._legal,
            together=(("rows", "vectors"), ("block", "chunks", "stage"), ("tap_block", "prefetch")),
        )

    def _cuts(self) -> list[int]:
        """Divisors of the tap that is cut; of one without many, which is the only one, also others."""
        product = self.product
        extent = product.taps[product.cut].extent
        exact = [n for n in range(1, extent + 1) if extent % n == 0 and self._can_be_piece(n)]
        if len(exact) >= _FEW_CUTS or len(product.taps) > 1:
            return _spread(exact, 5)
        pieces = (-(-extent // -(-extent // size)) for size in _PIECES)
        whole_steps = (-(-size // 8) * 8 for size in pieces)
        return sorted({*exact, *(size for size in whole_steps if self._can_be_piece(size))})

    def _can_be_piece(self, tap_block: int) -> bool:
        taps = tap_block * self.product.whole_taps
        return 48 <= taps <= 768 and taps < self.product.length

    def _unrolls(self) -> tuple[int, ...]:
        return tuple(n for n in (1, 2, 4, 8) if n <= max(self.product.length, 1))

    def _legal(self, values: Mapping[str, Value]) -> bool:
        shape = self._shape(values)
        if self._registers(shape) * self.registers_each > self.machine.vector_registers:
            return False
        if shape.rows * shape.vectors * shape.unroll > _WRITTEN_OUT and shape.unroll > 1:
            return False
        if (
            int(values["chunks"]) > shape.panels.count
            or shape.per_chunk * (shape.chunks - 1) >= shape.panels.count
        ):
            return False
        if len(self.product.rows) == 1 and shape.block > self.product.rows[0].extent:
            return False
        if shape.staged and self._staged_bytes(shape) > _STAGED_BYTES:
            return False
        if shape.prefetch and not self._prefetch_pays(shape):
            return False
        return not shape.tap_block or self._partial_size(shape) * 4 <= _PARTIAL_BYTES

    def _registers(self, shape: Shape) -> int:
        """Vectors that are alive in the innermost loop."""
        return shape.rows * shape.vectors + shape.vectors + 1

    def _shape(self, values: Mapping[str, Value]) -> Shape:
        rows, vectors = int(values["rows"]), int(values["vectors"])
        panels = Tiles(self.product.vector, vectors * self.lanes)
        per_chunk = -(-panels.count // int(values["chunks"]))
        outer = self.product.rows[0].extent if self.product.rows else 1
        unit = rows if len(self.product.rows) == 1 else 1
        size = int(values["block"]) * unit or outer
        last_rows, last_vectors = self._last_tile(panels, vectors, size)
        return Shape(
            rows=rows,
            vectors=vectors,
            unroll=int(values["unroll"]),
            panels=panels,
            per_chunk=per_chunk,
            chunks=-(-panels.count // per_chunk),
            block=size,
            blocks=-(-outer // size),
            tap_block=int(values["tap_block"]),
            prefetch=int(values["prefetch"]),
            staged=bool(values["stage"]),
            last_vectors=last_vectors,
            last_rows=last_rows,
        )

    def _last_tile(self, panels: Tiles, vectors: int, block: int) -> tuple[int, int]:
        """(rows, vectors) of the last panel's register tiles; (0, 0): as of the others."""
        left = panels.axis.extent - (panels.count - 1) * panels.size
        narrow = -(-left // self.lanes)
        saved = (vectors - narrow) / (panels.count * vectors)
        if not self.narrows or self.apart or saved < _NARROW_PAYS:
            return 0, 0
        rows = block if len(self.product.rows) < 2 else self.product.rows[-1].extent
        room = self.machine.vector_registers // self.registers_each - 1 - narrow
        most = max(1, min(rows, room // narrow, _LAST_ROWS))
        return min(range(most, 0, -1), key=lambda n: -(-rows // n) * max(n * narrow, 8)), narrow

    def _staged_bytes(self, shape: Shape) -> int:
        total = self.product.data.dtype.bytes
        for extent in self._staged_extents(shape):
            total *= extent
        return total

    def _staged_extents(self, shape: Shape) -> tuple[int, ...]:
        assert self.dims is not None
        outer = self.product.rows[0] if self.product.rows else None
        return tuple(
            dim.extent(shape.block if dim.axis == outer else dim.axis.extent if dim.axis else 1)
            for dim in self.dims
        )

    def _tiles_per_block(self, shape: Shape) -> int:
        """Register tiles of one panel in one block."""
        rows = self.product.rows
        if not rows:
            return 1
        if len(rows) == 1:
            return -(-shape.block // shape.rows)
        inner = extent_of(rows[1:-1]) * -(-rows[-1].extent // shape.rows)
        return shape.block * inner

    def _partial_size(self, shape: Shape) -> int:
        wide = self._tiles_per_block(shape) * shape.rows * shape.vectors * self.lanes
        return wide if shape.last is None else max(wide, self._partial_size(shape.last))

    def _prefetch_pays(self, shape: Shape) -> bool:
        """Whether the lines of a piece of a panel are about as many as the steps in which one can be asked for."""
        taps = (shape.tap_block or self.product.taps[self.product.cut].extent) * self.product.whole_taps
        steps = self._tiles_per_block(shape) * max(1, taps // shape.unroll)
        return shape.panels.size * taps * 4 // _LINE * 2 >= steps

    # -- what it costs --------------------------------------------------------------------------------------------

    def terms(self, config: Config) -> Terms:
        shape = self._shape(dict(config.values))
        product, machine = self.product, self.machine
        repeats = extent_of(product.shared)
        passes = repeats * shape.blocks * shape.chunks * shape.per_chunk
        length = product.length
        pieces = -(-length // (shape.tap_block * product.whole_taps)) if shape.tap_block else 1
        size = product.weight_bytes
        panel = shape.panels.size * length * size
        weight_bytes = panel * shape.panels.count * repeats
        block_bytes = self._block_bytes(shape)
        data_bytes = block_bytes * shape.blocks * repeats
        chunk_panels = shape.per_chunk if shape.chunks > 1 else shape.panels.count
        caches = machine.caches

        # The part of a panel that all rows of the block pass by stays in the first cache, or comes again for each tile.
        near = panel // pieces + self._tile_bytes(shape) // pieces <= caches.l1 * 3 // 4
        panel_reads = passes * panel * (1 if near else self._tiles_per_block(shape))
        data_reads = data_bytes * shape.chunks * shape.per_chunk
        fits = panel + block_bytes <= caches.l2_per_core * 3 // 4
        from_l2 = float(panel_reads) + (data_reads if fits and block_bytes > caches.l1 // 2 else 0)
        # What does not fit there any more is displaced before the next panel wants it.
        beyond = min(1.0, max(0.0, (panel + block_bytes) / (0.75 * caches.l2_per_core) - 1))
        from_l3 = beyond * (data_reads - data_bytes * shape.chunks)
        # Panels come from memory once for each block of rows, unless the chunk's stay in the second cache.
        again = shape.blocks if panel * chunk_panels > caches.l2_per_core // 2 else 1
        if product.constant_weight:
            from_memory = float(weight_bytes)
            from_l3 += weight_bytes * (again - 1)
        else:
            from_memory, from_l3 = 0.0, from_l3 + weight_bytes * again
        # Chunks that follow each other on a thread find the data where the one before has left it, if it fits.
        stays = data_bytes // repeats + panel <= 0.75 * caches.l2_per_core
        from_l3 += data_bytes * (min(shape.chunks, machine.cores) if stays else shape.chunks)
        written = product.formula.output.size * product.formula.output.dtype.bytes
        partial = 2.0 * (pieces - 1) * self._partial_size(shape) * passes  # elements
        staged = self._staged_bytes(shape) * shape.chunks * shape.blocks * repeats if shape.staged else 0
        asked = passes * panel / _LINE if shape.prefetch else 0.0
        narrow = repeats * shape.blocks if shape.last is not None else 0  # of the passes
        tiles = [self._tile_terms(shape, passes - narrow, pieces)]
        if shape.last is not None:
            tiles.append(self._tile_terms(shape.last, narrow, pieces))
        return Terms(
            arithmetic=sum(each.arithmetic for each in tiles),
            loads=sum(each.loads for each in tiles) + (staged / 4 + partial / 2) / self.lanes + asked,
            stores=sum(each.stores for each in tiles) + (staged / 4 + partial / 2) / self.lanes,
            branches=sum(each.branches for each in tiles),
            from_l2=from_l2 + staged,
            from_l3=from_l3 + 2.0 * written,
            from_memory=from_memory,
            prefetched=from_memory if shape.prefetch else 0.0,
            iterations=repeats * shape.chunks * shape.blocks,
            scalar=sum(each.scalar for each in tiles) + passes * 100.0,
        )

    def _tile_terms(self, shape: Shape, passes: int, pieces: int) -> Terms:
        """Of the register tiles alone, of so many panels in a block."""
        tiles = passes * self._tiles_per_block(shape)
        steps, each = tiles * self.product.length, shape.rows * shape.vectors
        return Terms(
            arithmetic=steps * max(each * self.instructions, 8.0) + tiles * each,
            loads=float(steps * (shape.rows + shape.vectors) + tiles * each),
            stores=float(tiles * each),
            branches=steps / shape.unroll + 3.0 * tiles * pieces,
            scalar=tiles * pieces * 12.0
            + steps * max(0, shape.rows - 8) * 0.25
            + self._unpacked(shape, steps, passes * self.product.length),
        )

    def _unpacked(self, shape: Shape, steps: int, visits: int) -> float:
        """Cycles that it costs to read the weight where it lies, in `steps`; in `visits` of them, which are the first
        to read a tap of a panel, it may come from far away."""
        if self.product.constant_weight:
            return 0.0
        straddling = _STRADDLING * steps if self._weight_pitch % _LINE else 0.0
        source = self.product.weight_load.source
        assert isinstance(source, Buffer)
        far = (
            self._weight_pitch > _LINE and source.size * source.dtype.bytes > self.machine.caches.l2_per_core
        )
        return (straddling + (_FAR_LINE * visits if far else 0.0)) * shape.vectors

    @cached_property
    def _weight_pitch(self) -> int:
        """Bytes from one tap of the weight to the next."""
        load = self.product.weight_load
        return abs(coefficient(load.indices[0], self.product.taps[-1]) or 0) * load.dtype.bytes

    def _tile_bytes(self, shape: Shape) -> int:
        """Of the first cache, what the data of a register tile takes up."""
        return shape.rows * self.product.length * 4

    def _block_bytes(self, shape: Shape) -> int:
        if self.dims is None:
            outer = self.product.rows[0].extent if self.product.rows else 1
            load = te.loads(self.product.data)[0]
            assert isinstance(load.source, Buffer)
            return load.source.size * load.dtype.bytes * shape.block // outer
        return self._staged_bytes(shape)

    # -- the program ----------------------------------------------------------------------------------------------

    def program(self, config: Config) -> Program:
        return self.nest_of(self._shape(dict(config.values))).program(config)

    def nest_of(self, shape: Shape) -> ContractionNest:
        return ContractionNest(self, shape)


def _spread(values: list[int], count: int) -> list[int]:
    """At most `count` of the values, evenly spread."""
    if len(values) <= count:
        return values
    return [values[round(n * (len(values) - 1) / (count - 1))] for n in range(count)]


class ContractionNest:
    """The loop nest of one config."""

    def __init__(self, applied: AppliedContraction, shape: Shape) -> None:
        self.shape, self.product, self.dims = shape, applied.product, applied.dims
        self.partial_size = applied._partial_size(shape)
        self.staged_extents = applied._staged_extents(shape) if shape.staged else ()
        self.lanes = self.staging_lanes = applied.lanes
        product, formula = self.product, applied.product.formula

        self.chunk = te.Var("chunk", shape.chunks)
        self.block = te.Var("block", shape.blocks)
        self.panel = te.Var("panel", shape.per_chunk)
        self.row, self.vec, self.lane = (
            te.Var("r", shape.rows),
            te.Var("u", shape.vectors),
            te.Var("v", self.lanes),
        )
        self.taps = product.taps
        self.piece_loops: list[te.Var] = []  # over pieces of equal length
        self.rest = 0  # taps of one more, shorter piece
        if shape.tap_block:
            cut = self.taps[product.cut]
            self.piece_loops = [*self.taps[: product.cut], te.Var("piece", cut.extent // shape.tap_block)]
            self.rest = cut.extent % shape.tap_block
        self.in_tile = [(self.row, Kind.UNROLL), (self.vec, Kind.UNROLL), (self.lane, Kind.VECTOR)]
        self.width = shape.vectors * self.lanes
        self.element = self.row * self.width + self.vec * self.lanes + self.lane
        # Of a narrower panel the last columns: those before are in the panel before it, too.
        self.column = self.vec * self.lanes + self.lane + (shape.panels.size - self.width)

        self.apart = applied.apart
        # Which panel: chunks of panels, the last one moved back.
        first = Tiles(te.Var("panels", shape.panels.count), shape.per_chunk).start_of(self.chunk)
        self.which_panel = first + self.panel
        self.values: dict[te.Var, te.Expr] = {
            product.vector: shape.panels.start_of(self.which_panel) + self.column
        }
        self.vectors = Tiles(product.vector, self.lanes)
        all_vectors = te.Var("vectors", self.vectors.count)
        self.which_vector = Tiles(all_vectors, shape.vectors).start_of(self.which_panel) + self.vec
        if self.apart:
            self.values[product.vector] = self.vectors.start_of(self.which_vector) + self.lane
        self.row_loops: list[te.Var] = []
        self.block_start: te.Expr = te.as_index(0)
        self._place_rows()
        self.accumulator = Buffer(
            f"acc{shape.vectors}", product.reduction.result.dtype, shape.rows * self.width, Scope.REGISTER
        )
        self.packed = self._packed_weight()
        self.formula = formula
        self.last = ContractionNest(applied, shape.last) if shape.last is not None else None
        if self.last is not None:
            self.last.partial_size = self.partial_size

    def _place_rows(self) -> None:
        """Loops over register tiles in a block, and the row axes' values in them."""
        rows, shape = self.product.rows, self.shape
        if not rows:
            return
        blocks = Tiles(rows[0], shape.block)
        self.block_start = blocks.start_of(self.block) if shape.blocks > 1 else te.as_index(0)
        if len(rows) == 1:
            in_block = te.Var("row", shape.block)
            tiles = Tiles(in_block, shape.rows)
            self.row_loops = [tiles.var]
            self.values[rows[0]] = self.block_start + tiles.start() + self.row
            return
        in_block = te.Var(rows[0].name + "_b", shape.block)
        tiles = Tiles(rows[-1], shape.rows)
        self.row_loops = [in_block, *rows[1:-1], tiles.var]
        self.values[rows[0]] = self.block_start + in_block
        self.values[rows[-1]] = tiles.start() + self.row

    def _packed_weight(self) -> PackedOperand | None:
        product, panels = self.product, self.shape.panels
        load = product.weight_load
        if not product.constant_weight:
            return None
        readers = [x for e in product.formula.expressions() for x in te.loads(e) if x.source == load.source]
        if len(readers) > 1:
            return None
        moving = te.variables(load.indices[0])
        outer = [whole(axis) for axis in product.shared if axis in moving]
        taps = [whole(axis) for axis in self.taps if axis in moving]
        if self.apart:
            first, last = blocks_of(self.vectors, self.which_vector), places_in(self.vectors, self.lane)
        else:
            first, last = blocks_of(panels, self.which_panel), places_in(panels, self.column)
        return pack_operand(load, [*outer, first, *taps, last])

    def program(self, config: Config) -> Program:
        formula = self.formula
        stmts: list[Stmt] = []
        staged = self._stage() if self.shape.staged else None
        if staged is not None:
            stmts.append(self._fill(staged, self.product.data))
        tiles = self._tiles(staged)
        if self.last is not None:
            is_last = te.call("eq", self.which_panel, te.as_index(self.shape.panels.count - 1))
            tiles = If(is_last, self.last._tiles(staged), tiles)
        panel = block(*self._before_tiles(), tiles, *self._after_tiles())
        stmts.append(nest([(self.panel, Kind.SERIAL)], panel))
        body = self._parallel(with_values(block(*stmts), {}))
        inputs = [
            self.packed.buffer if self.packed is not None and b == self.packed.original else b
            for b in formula.inputs
        ]
        packings = tuple(
            self.packed.packing if self.packed is not None and b == self.packed.original else None
            for b in formula.inputs
        )
        return Program(formula.name, (*inputs, formula.output), body, str(config), packings)

    def _tiles(self, staged: Staged | None) -> Stmt:
        """All register tiles of a panel in a block."""
        data, rows = self.product.data, [(loop, Kind.SERIAL) for loop in self.row_loops]
        if staged is not None:
            data = te.Load(staged.buffer, (self._place_in(staged),))
        pieces = [(loop, Kind.SERIAL) for loop in self.piece_loops]
        stmts = [nest([*pieces, *rows], self._register_tile(data, self._weight(), short=False))]
        if self.rest:
            stmts.append(nest(rows, self._register_tile(data, self._weight(), short=True)))
        return block(*stmts)

    def _weight(self) -> te.Expr:
        """The element of the weight that the current tap, vector and lane take."""
        packed, load = self.packed, self.product.weight_load
        if packed is None:
            return self.product.weight
        return te.rewrite(self.product.weight, lambda node: packed.load if node == load else None)

    def _before_tiles(self) -> list[Stmt]:
        """What is done once for a panel."""
        return []

    def _after_tiles(self) -> list[Stmt]:
        return []

    def _parallel(self, body: Stmt) -> Stmt:
        loops = [axis for axis in (*self.product.shared, self.chunk, self.block) if axis.extent > 1]
        parallel = te.Var("p", extent_of(loops))
        rest: te.Expr = parallel
        values: dict[te.Var, te.Expr] = {}
        for loop in reversed(loops):
            values[loop] = rest % loop.extent
            rest = rest // loop.extent
        return nest([(parallel, Kind.PARALLEL)], with_values(body, values))

    # -- staging ----------------------------------------------------------------------------------------------------

    def _stage(self) -> Staged:
        assert self.dims is not None
        size = 1
        for extent in self.staged_extents:
            size *= extent
        buffer = Buffer("staged", self.product.data.dtype, size, Scope.SCRATCH)
        return Staged(buffer, self.dims, self.staged_extents)

    def _place_in(self, staged: Staged) -> te.Expr:
        """Where in the staged block the element for the current row and tap is."""
        return staged.offset(self._places_in_block())

    def _places_in_block(self) -> list[te.Expr]:
        """The current row and tap as coordinates of the staged block."""
        assert self.dims is not None
        places: list[te.Expr] = []
        for dim in self.dims:
            axis: te.Expr | None = None
            if dim.axis is not None:
                axis = self.values.get(dim.axis, dim.axis)
                if dim.axis == self.product.rows[0]:
                    axis = axis - self.block_start
            places.append(dim.of(axis, dim.tap))
        return places

    def _fill(self, staged: Staged, data: te.Expr) -> Stmt:
        """The block's data, dimension by dimension; trailing ones that lie together in memory are copied as one run."""
        places = [te.Var(f"s{n}", extent) for n, extent in enumerate(staged.extents)]
        value = self._at_places(data, staged, places)
        run = run_of(value, places)
        if run is None:
            return self._fill_vectors(staged, places, value)
        outer, inner = places[: run.first], extent_of(places[run.first + 1 :])
        begin, end = run.begin * inner, run.end * inner
        start = staged.offset([*outer, *[te.as_index(0)] * (len(places) - run.first)])
        source = te.substitute(run.load.indices[0], dict.fromkeys(places[run.first :], te.as_index(0)))
        load = te.Load(run.load.source, (source,))

        def border(low: int, high: int) -> list[Stmt]:
            outside = self._as_staged(run.border)
            return self._along(low, high, lambda at: Store(staged.buffer, start + at, outside))

        def copied(at: te.Expr) -> Store:
            return Store(staged.buffer, start + at, self._as_staged(te.Load(load.source, (source + at,))))

        whole_row = staged.extents[run.first] * inner
        filled = block(*border(0, begin), *self._along(begin, end, copied), *border(end, whole_row))
        if run.outer_guard is not None:
            filled = If(run.outer_guard, filled, block(*border(0, whole_row)))
        return nest([(var, Kind.SERIAL) for var in outer], filled)

    def _at_places(self, data: te.Expr, staged: Staged, places: Sequence[te.Var]) -> te.Expr:
        """The data as a formula over places in the staged block."""
        values: dict[te.Var, te.Expr] = {}
        for dim, place in zip(staged.coordinates, places, strict=True):
            starts = self.product.rows and dim.axis == self.product.rows[0]
            values |= dim.at(place + self.block_start * dim.axis_step if starts else place)
        return simplify(te.substitute(data, values))

    def _along(self, low: int, high: int, store: Callable[[te.Expr], Store]) -> list[Stmt]:
        """`store` for every place in [low, high), in vectors."""
        if high <= low:
            return []
        lanes = min(self.staging_lanes, power_of_two_below(high - low))
        tiles, lane = Tiles(te.Var(f"a{low}", high - low), lanes), te.Var("sv", lanes)
        at = store(tiles.start() + lane + low)
        return [nest([(tiles.var, Kind.SERIAL), (lane, Kind.VECTOR)], at)]

    def _fill_vectors(self, staged: Staged, places: list[te.Var], value: te.Expr) -> Stmt:
        """Any formula, in vectors along the last dimension."""
        last = places[-1]
        lanes = min(self.lanes, power_of_two_below(last.extent))
        tiles, lane = Tiles(last, lanes), te.Var("sv", lanes)
        at = {last: tiles.start() + lane}
        element = self._as_staged(te.substitute(value, at))
        store = Store(staged.buffer, te.substitute(staged.offset(places), at), element)
        loops = [*((var, Kind.SERIAL) for var in places[:-1]), (tiles.var, Kind.SERIAL), (lane, Kind.VECTOR)]
        return nest(loops, store)

    def _as_staged(self, value: te.Expr) -> te.Expr:
        """An element of the data as it is kept in scratch memory."""
        return value

    # -- the register tile ------------------------------------------------------------------------------------------

    def _register_tile(self, data: te.Expr, weight: te.Expr, *, short: bool) -> Stmt:
        """Sums over a piece of the taps, the `short` one at their end or any other."""
        kept = te.Load(self.accumulator, (self.element,))
        update = self._update(data, weight, kept)
        step = nest(self.in_tile, Store(self.accumulator, self.element, te.substitute(update, self.values)))
        summing = self._tap_loops(step, short)
        zero = nest(self.in_tile, Store(self.accumulator, self.element, self._first_value()))

        finish = nest(self.in_tile, self._finished(kept))
        if extent_of(self.piece_loops) == 1 and not self.rest:
            return block(zero, summing, finish)

        partial = Buffer("partial", self.accumulator.dtype, self.partial_size, Scope.SCRATCH)
        place = counted(self.row_loops) * self.accumulator.size + self.element
        resume = nest(self.in_tile, Store(self.accumulator, self.element, te.Load(partial, (place,))))
        suspend = nest(self.in_tile, Store(partial, place, kept))
        if short:
            return block(resume, summing, finish)
        piece = counted(self.piece_loops)
        first = te.call("eq", piece, te.as_index(0))
        if self.rest:
            return block(If(first, zero, resume), summing, suspend)
        last = te.call("eq", piece, te.as_index(extent_of(self.piece_loops) - 1))
        return block(If(first, zero, resume), summing, If(last, finish, suspend))

    def _finished(self, kept: te.Expr) -> Store:
        """What is done with a sum."""
        value, store = self._result(kept), self.formula.store
        return Store(
            self.formula.output, te.substitute(store, self.values), te.substitute(value, self.values)
        )

    def _result(self, total: te.Expr) -> te.Expr:
        """The value of an element whose sum is `total`."""
        result = self.product.reduction.result
        return te.rewrite(
            self.formula.value,
            lambda node: total if isinstance(node, te.Load) and node.source == result else None,
        )

    def _update(self, data: te.Expr, weight: te.Expr, kept: te.Expr) -> te.Expr:
        if kept.dtype.is_float:
            return te.call("fma", data, weight, kept)
        return te.call("add", kept, te.call("mul", data, weight))

    def _first_value(self) -> te.Expr:
        """What an accumulator begins at."""
        return te.const(0, self.accumulator.dtype)

    def _tap_loops(self, step: Stmt, short: bool) -> Stmt:
        """The loops over taps, the innermost `unroll` steps written out; a step is followed by a prefetch."""
        unroll, taps = self.shape.unroll, list(self.taps)
        if self.shape.tap_block:
            cut, *whole_taps = taps[self.product.cut :]
            in_piece = te.Var(cut.name + "_i", self.rest if short else self.shape.tap_block)
            before = (
                te.as_index(cut.extent - self.rest) if short else self.piece_loops[-1] * self.shape.tap_block
            )
            step = with_values(step, {cut: before + in_piece})
            taps = [in_piece, *whole_taps]
        written: list[te.Var] = []
        while len(taps) > 1 and taps[-1].extent <= unroll:
            written.insert(0, taps[-1])
            unroll //= taps.pop().extent
        last, outer = taps[-1], taps[:-1]
        unroll = max(1, min(unroll, last.extent))
        counter, copy = te.Var(last.name + "_u", last.extent // unroll), te.Var(last.name + "_c", unroll)
        inner = nest([(axis, Kind.UNROLL) for axis in written], step)
        main = nest([(copy, Kind.UNROLL)], with_values(inner, {last: counter * unroll + copy}))
        if self.shape.prefetch and self.packed is not None:
            main = block(main, *self._prefetches([*outer, counter], short))
        stmts: list[Stmt] = [
            For(counter, Kind.SERIAL, main)
            if counter.extent > 1
            else with_values(main, {counter: te.as_index(0)})
        ]
        rest = last.extent - counter.extent * unroll
        if rest:
            tail = te.Var(last.name + "_r", rest)
            done = counter.extent * unroll
            stmts.append(nest([(tail, Kind.UNROLL)], with_values(inner, {last: tail + done})))
        return nest([(axis, Kind.SERIAL) for axis in outer], block(*stmts))

    def _prefetches(self, tap_loops: list[te.Var], short: bool) -> list[Stmt]:
        """Lines of what comes after this piece of the panel, as many as spread it over this one's register tiles."""
        assert self.packed is not None
        weight = self.packed.load.source
        assert isinstance(weight, Buffer)
        size = weight.dtype.bytes
        taps = self.shape.tap_block * self.product.whole_taps or self.product.length
        piece_size = self.shape.panels.size * taps
        panel_size = self.shape.panels.size * self.product.length
        loops = [*self.row_loops, *tap_loops]
        lines = -(-piece_size * size // _LINE)
        each = -(-lines // extent_of(loops))
        behind = te.as_index(panel_size) if short else (counted(self.piece_loops) + 1) * piece_size
        following = self.which_panel * panel_size + behind
        first = following + counted(loops) * (each * _LINE // size)
        return [Prefetch(weight, first + n * (_LINE // size), self.shape.prefetch) for n in range(each)]


def counted(loops: Sequence[te.Var]) -> te.Expr:
    """How many iterations of the nest of `loops` came before this one."""
    count: te.Expr = te.as_index(0)
    for loop in loops:
        count = count * loop.extent + loop
    return count
