"""Chains of a 1x1, a depthwise and a 1x1 convolution (either 1x1 may be absent), without storing the intermediate
images.

    for every chunk of rows (and block of channels, where nothing sums over them):          (parallel)
      for every `step` rows of the chunk:
        for every panel of channels, `vectors` registers wide:
          expanded[rows of the window] = expand of those rows of the source that are not there yet
          filtered[step rows] = depthwise of expanded
        for every panel of the output, for every `rows` pixels of the step:
          out = project of filtered

The expanded rows form a ring buffer in scratch memory. A row is computed once per chunk; only rows that two chunks
share are computed twice. If a chunk is a single step, the panels share the memory of one. Scratch memory is laid out
by vectors of channels, [vector][row][column][lane], so that a register tile reads and writes whole neighbouring
lines. Each row has the zero padding at both ends; rows beyond the image are filled with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tilewright import te
from tilewright.graph.ir import Node
from tilewright.graph.separable import ConvStage, Separable, separable_of
from tilewright.loops.ir import (
    SCRATCH_LIMIT,
    Buffer,
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
from tilewright.loops.tiling import Tiles, power_of_two_below, with_values
from tilewright.runtime.packing import Packing
from tilewright.space.space import Config, Knob, Space, Value
from tilewright.space.template import Applied, Terms, Work
from tilewright.space.templates.cpu.depthwise import (
    F32,
    Position,
    RowAccumulators,
    WindowAccumulators,
    after,
    column_choices,
    offset,
    stage_value,
    task_buffers,
    window_loads,
)
from tilewright.support.arith import ceil_div, round_up
from tilewright.te.index import in_range

NAME = "separable"
_UNROLL = 4  # unrolled steps of a sum
_MAX_PREFETCHES = 4  # maximum per step of a sum


class SeparableChain:
    name = NAME

    def apply(self, work: Work) -> Applied | None:
        chain = separable_of(work.task)
        if chain is None or (chain.expand is None and chain.project is None):
            return None
        return _AppliedSeparable(work, chain)


@dataclass(frozen=True)
class _Panels:
    """A 1x1 convolution in register tiles of `rows` pixels by `vectors` registers of output channels."""

    stage: ConvStage
    lanes: int
    rows: int
    vectors: int

    @property
    def depth(self) -> int:
        return self.stage.conv.inputs[0].shape[-1]

    @property
    def channels(self) -> Tiles:
        """The output channels in vectors."""
        return Tiles(te.Var("c", self.stage.channels), self.lanes)

    @property
    def tiles(self) -> Tiles:
        """The vectors in panels."""
        return Tiles(te.Var("g", self.channels.count), self.vectors)

    @property
    def packing(self) -> Packing:
        """[vector][input channel][lane]"""
        shape = (self.depth, self.stage.channels)
        return Packing(shape, (self.depth, self.lanes), (2, 0, 1, 3))


@dataclass(frozen=True)
class _SeparableTiling:
    """The numbers that follow from a config."""

    chunk: int  # rows of the result
    step: int
    blocks: int  # of channels
    columns: int
    expand: _Panels | None
    project: _Panels | None
    group: int  # vectors of channels that are expanded and filtered together
    prefetch: bool  # whether weights are prefetched while rows are expanded

    @property
    def single(self) -> bool:
        """Whether a chunk is a single step."""
        return self.chunk == self.step


class _AppliedSeparable:
    def __init__(self, work: Work, chain: Separable) -> None:
        self.machine, self.chain = work.machine, chain
        self.in_line = work.machine.line_bytes // F32.bytes  # elements per line
        self.lanes = min(work.machine.lanes(F32), power_of_two_below(chain.depthwise.channels))
        self.vectors = ceil_div(chain.depthwise.channels, self.lanes)

    # -- the space ------------------------------------------------------------------------------------------------

    @cached_property
    def space(self) -> Space:
        chain, rows = self.chain, self.chain.rows.outputs
        counts = (1, 2, 3, 4, 6, 8, 12, 16, 28)
        chunks = dict.fromkeys(ceil_div(rows, count) for count in counts if count <= rows)
        steps = tuple(n for n in (1, 2, 4, 7, 8, 14) if n < rows)
        blocks = (
            tuple(n for n in (1, 2, 4, 8, 16, 32) if n <= self.vectors) if chain.project is None else (1,)
        )
        return Space(
            NAME,
            (
                Knob("chunk", tuple(chunks)),
                Knob("step", (*steps, 0)),
                Knob("blocks", blocks),
                Knob("columns", column_choices(chain)),
                Knob("expand", self._tile_choices(chain.expand, chain.columns.extent)),
                Knob("project", self._tile_choices(chain.project, chain.columns.outputs)),
                Knob("prefetch", (False, True) if chain.expand is not None else (False,)),
            ),
            self._legal,
            together=(("chunk", "step", "blocks"), ("expand", "columns"), ("project",)),
        )

    def _tile_choices(self, stage: ConvStage | None, pixels: int) -> tuple[str, ...]:
        """Register tiles "rows x vectors" that fit the registers, for rows of this many pixels."""
        if stage is None:
            return ("",)
        lanes = min(self.machine.lanes(F32), power_of_two_below(stage.channels))
        vectors = ceil_div(stage.channels, lanes)
        return tuple(
            f"{rows}x{wide}"
            for wide in (1, 2, 3, 4)
            for rows in (4, 6, 7, 8, 12, 14)
            if wide <= vectors and rows * wide + wide + 1 <= self.machine.vector_registers and rows <= pixels
        ) or (f"{min(pixels, 4)}x1",)

    def _legal(self, values: Mapping[str, Value]) -> bool:
        shape = self._shape(values)
        if shape.chunk % shape.step:
            return False
        groups = ceil_div(self.vectors, shape.group)
        if shape.blocks > groups or ceil_div(groups, shape.blocks) * (shape.blocks - 1) >= groups:
            return False
        if shape.prefetch and (not shape.single or self.prefetched_lines(shape)[0] > _MAX_PREFETCHES):
            return False
        return 4 * sum(self.scratch(shape)) <= SCRATCH_LIMIT

    def _shape(self, values: Mapping[str, Value]) -> _SeparableTiling:
        expand = self._panels(self.chain.expand, str(values["expand"]))
        return _SeparableTiling(
            chunk=int(values["chunk"]),
            step=int(values["step"]) or int(values["chunk"]),
            blocks=int(values["blocks"]),
            columns=int(values["columns"]),
            expand=expand,
            project=self._panels(self.chain.project, str(values["project"])),
            group=expand.vectors if expand is not None else self.vectors,
            prefetch=bool(values["prefetch"]),
        )

    def _panels(self, stage: ConvStage | None, tile: str) -> _Panels | None:
        if stage is None:
            return None
        rows, vectors = map(int, tile.split("x"))
        lanes = min(self.machine.lanes(F32), power_of_two_below(stage.channels))
        return _Panels(stage, lanes, rows, vectors)

    def ring(self, shape: _SeparableTiling) -> int:
        """The number of expanded rows that are kept."""
        return (shape.step - 1) * self.chain.rows.stride + self.chain.rows.reach

    def scratch(self, shape: _SeparableTiling) -> tuple[int, int]:
        """Elements of (expanded rows, filtered rows)."""
        chain = self.chain
        expanded = filtered = 0
        if shape.expand is not None:
            kept = shape.group if shape.single else self.vectors
            expanded = kept * self.ring(shape) * chain.columns.padded * self.lanes
        if shape.project is not None:
            filtered = self.vectors * shape.step * chain.columns.outputs * self.lanes
        return expanded, filtered

    def prefetched_lines(self, shape: _SeparableTiling) -> tuple[int, int]:
        """Weight lines to prefetch per step of the expansion's sums: (of the next panel, of the projection)."""
        panels = shape.expand
        assert panels is not None
        tiles = ceil_div(self.chain.columns.extent, panels.rows)
        steps = self.ring(shape) * tiles * max(1, panels.depth // _UNROLL)
        following = ceil_div(panels.vectors * panels.depth * panels.lanes, self.in_line * steps)
        if shape.project is None:
            return following, 0
        groups = ceil_div(self.vectors, shape.group)
        return following, ceil_div(shape.project.packing.size, self.in_line * steps * groups)

    # -- what it costs --------------------------------------------------------------------------------------------

    def terms(self, config: Config) -> Terms:
        shape = self._shape(dict(config.values))
        chain, caches = self.chain, self.machine.caches
        chunks = chain.batch * ceil_div(chain.rows.outputs, shape.chunk)
        steps = chunks * (shape.chunk // shape.step)
        groups = ceil_div(self.vectors, shape.group)
        groups = round_up(groups, shape.blocks)
        expanded, filtered = (4 * size for size in self.scratch(shape))
        near = caches.l1 * 3 // 4
        parts: list[Terms] = []
        from_l2 = from_l3 = from_memory = 0.0
        if shape.expand is not None:
            rows = float((shape.chunk - 1) * chain.rows.stride + chain.rows.reach)
            # At the upper and lower end some rows of a chunk are padding.
            rows -= (chain.rows.before + chain.rows.after) * chain.batch / chunks
            tiles = chunks * rows * groups * ceil_div(chain.columns.extent, shape.expand.rows)
            parts.append(self._product_terms(shape.expand, tiles))
            if 4 * shape.group * self.ring(shape) * chain.columns.padded * self.lanes > near:
                from_l2 += parts[-1].stores * 64 * (1 + chain.rows.reach / chain.rows.stride)
            from_l2 += steps * shape.expand.stage.weight.type.bytes
            from_l2 += tiles * shape.expand.rows * shape.expand.depth * 4.0
        taps, columns = chain.rows.taps * chain.columns.taps, shape.columns
        tiles = chunks * shape.chunk * groups * shape.group * ceil_div(chain.columns.outputs, columns)
        parts.append(
            Terms(
                arithmetic=tiles * columns * (max(taps, taps * 6 / columns) + after(chain.depthwise)),
                loads=tiles * (window_loads(chain, columns) + taps),
                stores=tiles * columns,
                branches=2.0 * tiles,
                scalar=tiles * 4.0,
            )
        )
        if shape.project is not None:
            panels = shape.project.tiles.count
            tiles = steps * panels * ceil_div(shape.step * chain.columns.outputs, shape.project.rows)
            parts.append(self._product_terms(shape.project, tiles))
            panel = shape.project.vectors * shape.project.lanes * shape.project.depth * 4
            from_l2 += float(tiles if panel > near // 2 else steps * panels) * panel
            if filtered > near // 2:
                from_l2 += steps * filtered * (panels if panel < near else 1)
        for stage in chain.stages:
            from_memory += stage.weight.type.bytes
            from_l3 += stage.weight.type.bytes * (chunks - 1) * (shape.blocks == 1)
        if not caches.keep(expanded + filtered):
            from_l3 += steps * (expanded + filtered)
        from_l3 += chain.source.type.bytes * shape.blocks + 2.0 * chain.task.output.type.bytes
        return Terms(
            arithmetic=sum(part.arithmetic for part in parts),
            loads=sum(part.loads for part in parts),
            stores=sum(part.stores for part in parts),
            branches=sum(part.branches for part in parts),
            from_l2=from_l2,
            from_l3=from_l3,
            from_memory=from_memory,
            prefetched=from_memory if shape.prefetch else 0.0,
            iterations=chunks * shape.blocks,
            scalar=sum(part.scalar for part in parts),
        )

    def _product_terms(self, panels: _Panels, tiles: float) -> Terms:
        each = panels.rows * panels.vectors
        return Terms(
            arithmetic=tiles * (panels.depth * max(each, self.machine.chains) + each * after(panels.stage)),
            loads=tiles * (panels.depth * (panels.rows + panels.vectors) + each),
            stores=tiles * each,
            branches=tiles * (panels.depth / _UNROLL + 3.0),
            scalar=tiles * (12.0 + panels.depth * max(0, panels.rows - 8) * 0.25),
        )

    def program(self, config: Config) -> Program:
        return _Builder(self, self._shape(dict(config.values))).program(config)


class _Builder:
    """The loop nest of one config."""

    def __init__(self, applied: _AppliedSeparable, shape: _SeparableTiling) -> None:
        chain = applied.chain
        self.chain, self.shape, self.lanes, self.vectors = chain, shape, applied.lanes, applied.vectors
        self.ring = applied.ring(shape)
        self.in_line = applied.in_line
        self.prefetched = applied.prefetched_lines(shape) if shape.prefetch else (0, 0)
        self.inputs = chain.task.graph.inputs
        self.out = Buffer("out", F32, chain.task.output.type.size)
        self.packings: dict[Node, Packing] = {
            panels.stage.weight: panels.packing for panels in (shape.expand, shape.project) if panels
        }
        self.buffers = task_buffers(chain)
        for node, packing in self.packings.items():
            self.buffers[node] = Buffer(self.buffers[node].name, F32, packing.size)
        expanded, filtered = applied.scratch(shape)
        self.expanded = Buffer("expanded", F32, expanded, Scope.SCRATCH)
        self.filtered = Buffer("filtered", F32, filtered, Scope.SCRATCH)
        self.lane = te.Var("v", self.lanes)
        self.channels = Tiles(te.Var("c", chain.depthwise.channels), self.lanes)

        rows = Tiles(te.Var("y", chain.rows.outputs), shape.chunk)
        self.groups = Tiles(te.Var("g", self.vectors), shape.group)
        in_block = Tiles(te.Var("b", self.groups.count), ceil_div(self.groups.count, shape.blocks))
        self.parallel = te.Var("p", chain.batch * rows.count * in_block.count)
        self.group = te.Var("gi", in_block.size)
        which = in_block.start_of(self.parallel % in_block.count) + self.group
        self.first_vector = self.groups.start_of(which)
        self.first_row = rows.start_of((self.parallel // in_block.count) % rows.count)
        self.batch = self.parallel // (in_block.count * rows.count)
        self.step = te.Var("t", shape.chunk // shape.step)

    def program(self, config: Config) -> Program:
        stages: list[Stmt] = []
        before: list[Stmt] = []
        if self.shape.expand is not None:
            before.append(self.zero_columns())
            kept = self.ring - self.shape.step * self.chain.rows.stride
            if not self.shape.single:
                before.append(self.in_groups(self.expand(te.as_index(0), kept)))
                new = te.as_index(kept) + self.step * (self.shape.step * self.chain.rows.stride)
                stages.append(self.expand(new, self.shape.step * self.chain.rows.stride))
            else:
                stages.append(self.expand(te.as_index(0), self.ring))
            stages.append(self.filter_ring())
        else:
            stages.append(self.filter_source())
        body: list[Stmt] = [self.in_groups(block(*stages))]
        if self.shape.project is not None:
            body.append(self.project())
        steps = nest([(self.step, Kind.SERIAL)], block(*body))
        nested = with_values(nest([(self.parallel, Kind.PARALLEL)], block(*before, steps)), {})
        params = (*(self.buffers[node] for node in self.inputs), self.out)
        packings = tuple(self.packings.get(node) for node in self.inputs)
        return Program("kernel", params, nested, str(config), packings)

    def in_groups(self, stmt: Stmt) -> Stmt:
        return nest([(self.group, Kind.SERIAL)], stmt)

    # -- expanded rows ----------------------------------------------------------------------------------------------

    def expanded_at(self, vector: te.Expr, row: te.Expr, column: te.Expr) -> te.Expr:
        """The index of a vector of the group; rows and columns count from the first that the chunk's windows need."""
        rolling = not self.shape.single
        position = row % self.ring if rolling else row
        kept = self.first_vector + vector if rolling else vector
        return ((kept * self.ring + position) * self.chain.columns.padded + column) * self.lanes + self.lane

    def zero_columns(self) -> Stmt:
        """Zero the padding at both ends of every row, once; nothing else writes there."""
        columns = self.chain.columns
        kept = self.expanded.size // (self.ring * columns.padded * self.lanes)
        row = te.Var("z", kept * self.ring)
        stmts: list[Stmt] = []
        for begin, count in ((0, columns.before), (columns.before + columns.extent, columns.after)):
            column = te.Var("zx", count)
            at = (row * columns.padded + begin + column) * self.lanes + self.lane
            if count:
                zero = Store(self.expanded, at, te.const(0, F32))
                stmts.append(nest([(column, Kind.SERIAL), (self.lane, Kind.VECTOR)], zero))
        return nest([(row, Kind.SERIAL)], block(*stmts)) if stmts else block()

    def expand(self, first: te.Expr, count: int) -> Stmt:
        """Expand `count` rows from `first` on, for one group of channels."""
        panels, chain = self.shape.expand, self.chain
        assert panels is not None
        height, width = chain.rows.extent, chain.columns.extent
        line = te.Var("e", count)
        row = first + line
        y = self.first_row * chain.rows.stride + (row - chain.rows.before)
        pixels = Tiles(te.Var("ex", width), panels.rows)
        source, weight = self.buffers[chain.source], self.buffers[panels.stage.weight]
        value = stage_value(panels.stage, self.inputs, self.buffers)

        def left(pixel: te.Expr, k: te.Expr) -> te.Expr:
            return te.Load(source, (((self.batch * height + y) * width + pixel) * panels.depth + k,))

        def right(vector: te.Expr, k: te.Expr) -> te.Expr:
            vector = self.first_vector + vector
            return te.Load(weight, ((vector * panels.depth + k) * self.lanes + self.lane,))

        def write(pixel: te.Expr, vector: te.Expr, total: te.Expr) -> Store:
            channel = self.channels.start_of(self.first_vector + vector) + self.lane
            at = self.expanded_at(vector, row, pixel + chain.columns.before)
            return Store(self.expanded, at, value(total, (self.batch, y, pixel, channel)))

        def prefetch(step: te.Var) -> list[Stmt]:
            done = (line * pixels.count + pixels.var) * step.extent + step
            return self.prefetches(done, count * pixels.count * step.extent)

        tile = _tile(panels, self.lane, pixels.start(), [(_taps(panels.depth), left)], right, write, prefetch)
        computed = nest([(pixels.var, Kind.SERIAL)], tile)
        inside = in_range(y, height)
        if inside is not None:
            vector, pixel = te.Var("zu", self.shape.group), te.Var("zx", width)
            at = self.expanded_at(vector, row, pixel + chain.columns.before)
            zero = Store(self.expanded, at, te.const(0, F32))
            loops = [(vector, Kind.SERIAL), (pixel, Kind.SERIAL), (self.lane, Kind.VECTOR)]
            computed = If(inside, computed, nest(loops, zero))
        return nest([(line, Kind.SERIAL)], computed)

    def prefetches(self, step: te.Expr, steps: int) -> list[Stmt]:
        """Prefetch weight lines of the next group and of the projection, in one of the `steps` of a group's sums."""
        following, projecting = self.prefetched
        stmts: list[Stmt] = []
        if following:
            assert self.shape.expand is not None
            panels = self.shape.expand
            first = (self.first_vector + panels.vectors) * (panels.depth * panels.lanes)
            weight = self.buffers[panels.stage.weight]
            stmts += [
                Prefetch(weight, first + (step * following + n) * self.in_line) for n in range(following)
            ]
        if projecting:
            assert self.shape.project is not None
            first = self.group * (steps * projecting * self.in_line)
            weight = self.buffers[self.shape.project.stage.weight]
            stmts += [
                Prefetch(weight, first + (step * projecting + n) * self.in_line) for n in range(projecting)
            ]
        return stmts

    # -- filtered rows ----------------------------------------------------------------------------------------------

    def filter_ring(self) -> Stmt:
        """Filter the rows of a step from the expanded ones, for one group of channels."""
        chain, shape = self.chain, self.shape
        vector, line = te.Var("u", shape.group), te.Var("r", shape.step)
        kernel = self.buffers[chain.depthwise.weight]
        channel = self.channels.start_of(self.first_vector + vector)
        row = self.step * shape.step + line

        def data(ky: int, column: te.Expr) -> te.Expr:
            seen = row * chain.rows.stride + ky * chain.rows.dilation
            return te.Load(self.expanded, (self.expanded_at(vector, seen, column + chain.columns.before),))

        def weight(ky: int, kx: int) -> te.Expr:
            tap = ky * chain.columns.taps + kx
            return te.Load(kernel, (channel + self.lane + tap * chain.depthwise.channels,))

        accumulator = Buffer("window", F32, shape.columns * self.lanes, Scope.REGISTER)
        sums = WindowAccumulators(
            chain.rows, chain.columns, shape.columns, self.lane, accumulator, data, weight
        )
        tiles = Tiles(te.Var("x", chain.columns.outputs), shape.columns)
        written = sums.results(
            lambda n, total: self.write_filtered(vector, line, row, tiles.start() + n, total)
        )
        loops = [(vector, Kind.SERIAL), (line, Kind.SERIAL), (tiles.var, Kind.SERIAL)]
        return nest(loops, block(sums.stmt(tiles.start()), written))

    def filter_source(self) -> Stmt:
        """Filter the rows of a step from the source itself."""
        shape = self.shape
        vector, line = te.Var("u", shape.group), te.Var("r", shape.step)
        row = self.step * shape.step + line
        channel = self.channels.start_of(self.first_vector + vector)
        rows = RowAccumulators(self.chain, self.buffers, self.lanes, shape.columns)
        stmt = rows.stmt(
            self.batch,
            self.first_row + row,
            channel,
            [vector],
            lambda column, total: self.write_filtered(vector, line, row, column, total),
        )
        return nest([(line, Kind.SERIAL)], stmt)

    def write_filtered(
        self, vector: te.Expr, line: te.Expr, row: te.Expr, column: te.Expr, total: te.Expr
    ) -> Store:
        """`line` counts rows of the step, `row` those of the chunk."""
        chain = self.chain
        channel = self.channels.start_of(self.first_vector + vector) + self.lane
        position: Position = (self.batch, self.first_row + row, column, channel)
        value = stage_value(chain.depthwise, self.inputs, self.buffers)(total, position)
        if chain.project is None:
            return Store(self.out, offset(position, chain.depthwise.conv.shape), value)
        width = chain.columns.outputs
        pixels = self.shape.step * width
        at = ((self.first_vector + vector) * pixels + line * width + column) * self.lanes + self.lane
        return Store(self.filtered, at, value)

    # -- the output -------------------------------------------------------------------------------------------------

    def project(self) -> Stmt:
        panels, chain, shape = self.shape.project, self.chain, self.shape
        assert panels is not None
        width, depth, lanes = chain.columns.outputs, panels.depth, self.lanes
        pixels = Tiles(te.Var("m", shape.step * width), panels.rows)
        panel = te.Var("n", panels.tiles.count)
        first_vector = panels.tiles.start_of(panel)
        lane = te.Var("o", panels.lanes)
        weight = self.buffers[panels.stage.weight]
        value = stage_value(panels.stage, self.inputs, self.buffers)
        first_pixel = (self.first_row + self.step * shape.step) * width

        def left(pixel: te.Expr, k: te.Expr) -> te.Expr:
            return te.Load(self.filtered, ((k // lanes * pixels.axis.extent + pixel) * lanes + k % lanes,))

        def left_in_last(pixel: te.Expr, k: te.Expr) -> te.Expr:
            # The last vector overlaps: its first lanes repeat channels of the one before.
            position = k - depth // lanes * lanes + (lanes - depth % lanes)
            return te.Load(self.filtered, ((depth // lanes * pixels.axis.extent + pixel) * lanes + position,))

        def right(vector: te.Expr, k: te.Expr) -> te.Expr:
            return te.Load(weight, (((first_vector + vector) * depth + k) * panels.lanes + lane,))

        def write(pixel: te.Expr, vector: te.Expr, total: te.Expr) -> Store:
            channel = panels.channels.start_of(first_vector + vector) + lane
            # Pixels form one axis; an axis of extent 1 would count as broadcast.
            at_zero, at_pixel = te.as_index(0), first_pixel + pixel
            image = (at_pixel, at_zero) if width == 1 else (at_zero, at_pixel)
            position: Position = (self.batch, *image, channel)
            at = offset(position, chain.task.output.shape)
            return Store(self.out, at, value(total, position))

        whole, rest = depth // lanes * lanes, depth % lanes
        sums = [(_taps(whole, lanes), left)]
        if rest:
            sums.append((_taps(rest, first=whole), left_in_last))
        tile = _tile(panels, lane, pixels.start(), sums, right, write)
        return nest([(panel, Kind.SERIAL), (pixels.var, Kind.SERIAL)], tile)


@dataclass(frozen=True)
class _Taps:
    """Steps of a sum: their loops, the unrolled ones, and the index of the innermost step."""

    loops: tuple[te.Var, ...]
    copies: te.Var
    k: te.Expr


def _taps(count: int, within: int = 0, first: int = 0) -> list[_Taps]:
    """`count` steps from `first` on, a few of them unrolled. `within`: in vectors of this size, whose loop is
    separate so that positions within a vector are known at code generation."""
    within = within or count
    outer, unroll = te.Var("kv", count // within), min(_UNROLL, within)
    middle, inner = te.Var("ko", within // unroll), te.Var("ki", unroll)
    found = [_Taps((outer, middle), inner, outer * within + middle * unroll + inner + first)]
    done = within // unroll * unroll
    if within > done:
        assert outer.extent == 1
        tail = te.Var("kt", within - done)
        found.append(_Taps((), tail, tail + (first + done)))
    return found


def _tile(
    panels: _Panels,
    lane: te.Var,
    first_pixel: te.Expr,
    sums: Sequence[tuple[Sequence[_Taps], Callable[[te.Expr, te.Expr], te.Expr]]],
    right: Callable[[te.Expr, te.Expr], te.Expr],
    write: Callable[[te.Expr, te.Expr, te.Expr], Store],
    prefetch: Callable[[te.Var], list[Stmt]] = lambda step: [],
) -> Stmt:
    """One register tile: initialise, sum over the pixels, and `write(pixel, vector, total)`. `prefetch(loop)` goes
    into the innermost loop of the sum."""
    row, vector = te.Var("pr", panels.rows), te.Var("pu", panels.vectors)
    accumulator = Buffer("acc_" + lane.name, F32, panels.rows * panels.vectors * lane.extent, Scope.REGISTER)
    element = (row * panels.vectors + vector) * lane.extent + lane
    total = te.Load(accumulator, (element,))
    in_tile = [(row, Kind.UNROLL), (vector, Kind.UNROLL), (lane, Kind.VECTOR)]
    stmts: list[Stmt] = [nest(in_tile, Store(accumulator, element, te.const(0, F32)))]
    for chunks, left in sums:
        for taps in chunks:
            product = te.call("fma", left(first_pixel + row, taps.k), right(vector, taps.k), total)
            step = nest([(taps.copies, Kind.UNROLL), *in_tile], Store(accumulator, element, product))
            if taps.loops:
                step = block(step, *prefetch(taps.loops[-1]))
            stmts.append(nest([(loop, Kind.SERIAL) for loop in taps.loops], step))
    stmts.append(nest(in_tile, write(first_pixel + row, vector, total)))
    return block(*stmts)
