"""Depthwise convolutions with channels first: one channel of one image, a plane, at a time, vectors along its rows.

    for every chunk of planes and strip of rows:                    (parallel)
      clear the staged rows
      for every plane of the chunk:
        stage the rows that the strip reads: columns 0, s, 2s, ..., then 1, s + 1, ..., for a stride of s
        for every tile of `rows` rows and `vectors` vectors:
          acc = sum over the window of staged * weight
          out = epilogue(acc)

A row that is shorter than a vector is written as a whole vector: lanes beyond its end fall on the next row, which is
written later. The last row is written with shorter vectors.

The zero padding is part of the staged rows and stays there from plane to plane. 16-bit floats are converted to f32 as
they are staged, and results to 16 bits as they are written. Neighbours along a row are neighbours
in the staged rows for every stride, so whole vectors are read, at an offset given by the column of the window.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from tilewright import te
from tilewright.dtypes import DType
from tilewright.loops.formula import Formula
from tilewright.loops.ir import Buffer, For, If, Kind, Program, Scope, Stmt, Store, Transpose, block, nest
from tilewright.loops.tiling import Tiles, extent_of, power_of_two_below, with_values
from tilewright.space.space import Config, Knob, Space, Value
from tilewright.space.template import Applied, Terms, Work
from tilewright.space.templates.cpu.contraction_transposed import TransposedGemm
from tilewright.space.templates.cpu.gemm import ContiguousRun, Coordinate, coordinates, holds, run_of
from tilewright.support.arith import ceil_div, round_up
from tilewright.te.index import coefficient, simplify

NAME = "depthwise_channels_first"
F32 = DType.F32
_MIN_LANES = 4
_WIDEST_STRIDE = 4  # maximum stride whose columns are separated in registers
_STAGED_BYTES = 256 << 10
_MAX_SUMS = (
    6  # maximum vectors of a register tile: more leave no registers for the window and for loads ahead
)
_WRITTEN_VECTORS = 4  # vectors of a copied row that are unrolled
_WRITTEN_OUT = 320  # maximum FMAs unrolled: code size and compile time


class DepthwiseChannelsFirst:
    name = NAME

    def apply(self, work: Work) -> Applied | None:
        planes = planes_of(work.formula)
        return None if planes is None else _AppliedPlanes(work, planes)


@dataclass(frozen=True)
class PlaneWindow:
    """A window over each plane, with one weight per element of the window."""

    formula: Formula
    weight: te.Expr
    rows: Coordinate
    columns: Coordinate
    row: te.Var  # row of the padded plane, as far as windows reach
    run: ContiguousRun  # the columns of such a row

    @property
    def outer(self) -> tuple[te.Var, ...]:
        return tuple(axis for axis in self.formula.axes if axis not in (self.rows.axis, self.columns.axis))

    @property
    def stride(self) -> int:
        """Stride of the columns."""
        return self.columns.axis_step


def planes_of(formula: Formula | None) -> PlaneWindow | None:
    if formula is None or len(formula.reductions) != 1 or set(formula.rows) != set(formula.axes):
        return None
    (reduction,) = formula.reductions
    body = reduction.body
    if reduction.kind != "sum" or not (isinstance(body, te.Call) and body.op == "mul"):
        return None
    stored = formula.value.dtype
    if len(reduction.axes) != 2 or body.dtype is not F32 or not (stored is F32 or stored.is_half):
        return None
    for data, weight in (body.args, body.args[::-1]):
        gemm = _windowed(formula, data, weight)
        found = None if gemm is None else _with_rows(gemm)
        if found is not None:
            return found
    return None


def _windowed(formula: Formula, data: te.Expr, weight: te.Expr) -> TransposedGemm | None:
    """Data that depends on all axes, and a weight that depends on all but the two image axes."""
    in_data, in_weight = te.variables(data), te.variables(weight)
    image = tuple(axis for axis in formula.axes if axis not in in_weight and axis in in_data)[-2:]
    if not isinstance(weight, te.Load) or len(image) < 2 or not set(formula.axes) <= in_data:
        return None
    row, column = image
    dense = coefficient(formula.store, column) == 1 and coefficient(formula.store, row) == column.extent
    return TransposedGemm(formula, data, weight, formula.axes[0], image) if dense else None


def _with_rows(gemm: TransposedGemm) -> PlaneWindow | None:
    dims = coordinates(gemm)
    if dims is None or len(dims) != 2 or any(dim.tap is None for dim in dims):
        return None
    rows, columns = dims
    if columns.axis_step > _WIDEST_STRIDE:
        return None
    row, column = (te.Var(name, _reach(dim)) for name, dim in zip(("Y", "X"), dims, strict=True))
    value = simplify(te.substitute(gemm.data, {**rows.at(row), **columns.at(column)}))
    run = run_of(value, [column])
    if run is None or run.border.value != 0:
        return None
    return PlaneWindow(gemm.formula, gemm.weight, rows, columns, row, run)


def _reach(dim: Coordinate) -> int:
    assert dim.axis is not None
    return dim.extent(dim.axis.extent)


@dataclass(frozen=True)
class PlaneTiling:
    """The numbers that follow from a config."""

    rows: int  # of a register tile
    vectors: int
    strip: Tiles  # of the rows of results
    planes: Tiles  # of all planes
    lanes: int
    kept: bool  # whether the weights stay in registers
    beyond: bool = False  # whether vectors are longer than a row


class _AppliedPlanes:
    def __init__(self, work: Work, planes: PlaneWindow) -> None:
        assert planes.rows.axis is not None and planes.columns.axis is not None
        self.work, self.planes = work, planes
        self.height, self.width = planes.rows.axis, planes.columns.axis
        self.lanes = min(work.machine.lanes(F32), power_of_two_below(self.width.extent))
        self.window = extent_of(planes.formula.reductions[0].axes)

    @cached_property
    def space(self) -> Space:
        height, width, count = self.height.extent, self.width.extent, extent_of(self.planes.outer)
        strips = dict.fromkeys(ceil_div(height, n) for n in (1, 2, 4, 8, 16))
        chunks = dict.fromkeys(ceil_div(count, n) for n in (2, 1, 4, 8, 16, 32, 64, 128))
        vectors = [n for n in (1, 2, 3, 4) if n * self.lanes <= width] or [1]
        return Space(
            NAME,
            (
                Knob("rows", tuple(n for n in (1, 2, 3, 4, 5, 6, 7, 8) if n <= height)),
                Knob("vectors", tuple(vectors)),
                Knob("strip", tuple(strips)),
                Knob("planes", tuple(chunks)),
            ),
            self._legal,
            together=(("rows", "vectors"), ("strip", "planes")),
        )

    def _legal(self, values: Mapping[str, Value]) -> bool:
        shape = self.shape(values)
        each = shape.rows * shape.vectors
        if each > min(_MAX_SUMS, self.work.machine.vector_registers // 2) or shape.rows > shape.strip.size:
            return False
        if each * self.window > _WRITTEN_OUT and each > 1:
            return False
        return 4 * self.staged_rows(shape) * self.staged_width <= _STAGED_BYTES

    def shape(self, values: Mapping[str, Value]) -> PlaneTiling:
        rows, vectors = int(values["rows"]), int(values["vectors"])
        free = self.work.machine.vector_registers - 2 * rows * vectors
        strip = int(values["strip"])
        # Overlapping strips would write beyond the end of rows that another thread has finished.
        beyond = self.wide > self.lanes and rows < strip and self.height.extent % strip == 0
        return PlaneTiling(
            rows,
            vectors,
            Tiles(te.Var("y", self.height.extent), strip),
            Tiles(te.Var("o", extent_of(self.planes.outer)), int(values["planes"])),
            self.wide if beyond else self.lanes,
            kept=self.window <= free,
            beyond=beyond,
        )

    @cached_property
    def wide(self) -> int:
        """Lanes of a vector that holds a whole row in less than a full vector; `lanes` if there is none."""
        wide = 2 * self.lanes
        fits = self.lanes < self.width.extent < wide <= self.work.machine.lanes(F32)
        return wide if fits and self._rows_follow_each_other else self.lanes

    @property
    def _rows_follow_each_other(self) -> bool:
        """Whether every tensor that the epilogue reads has another row after each but the last."""
        indices = [load.indices[0] for load in te.loads(self.planes.formula.value) if load.indices]
        return all(
            coefficient(index, self.width) == 1 and coefficient(index, self.height) == self.width.extent
            for index in indices
            if self.width in te.variables(index)
        )

    def staged_rows(self, shape: PlaneTiling) -> int:
        return self.planes.rows.extent(shape.strip.size)

    @cached_property
    def pitch(self) -> int:
        """Elements between the first columns of consecutive remainders: whole vectors."""
        columns, run = self.planes.columns, self.planes.run
        assert columns.tap is not None
        read = (
            max(self.width.extent, self.wide)
            + (columns.tap.extent - 1) * columns.tap_step // self.planes.stride
        )
        written = ceil_div(run.end, self.planes.stride) + 1
        return round_up(max(read, written), self.wide)

    @property
    def staged_width(self) -> int:
        return self.planes.stride * self.pitch

    def terms(self, config: Config) -> Terms:
        shape, planes = self.shape(dict(config.values)), self.planes
        iterations = shape.planes.count * shape.strip.count
        strips = iterations * shape.planes.size
        staged = strips * self.staged_rows(shape)
        across = ceil_div(self.width.extent, shape.vectors * shape.lanes)
        tiles = (
            strips * Tiles(shape.strip.axis, shape.rows).count * shape.strip.size // shape.strip.axis.extent
        )
        tiles = max(tiles, strips) * across
        last = 2 * strips if shape.beyond else 0  # shorter vectors of the last row
        taps = planes.columns.tap.extent if planes.columns.tap is not None else 1
        seen = planes.rows.extent(shape.rows) * taps * shape.vectors
        each = shape.rows * shape.vectors
        copied = ceil_div(planes.run.end - planes.run.begin, shape.lanes)
        output = planes.formula.output
        element = planes.run.load.dtype
        source = staged * (planes.run.end - planes.run.begin) * element.bytes
        moved = staged * copied if planes.stride > 1 else 0
        converted = (staged * copied if element.is_half else 0) + (
            tiles * each if output.dtype.is_half else 0
        )
        weights = 0 if shape.kept else self.window
        return Terms(
            arithmetic=(tiles * each + last) * self.window + moved + converted,
            loads=tiles * (1.5 * seen + weights) + staged * copied + (strips + last) * self.window,
            stores=tiles * each + last + staged * copied,
            branches=tiles + 2.0 * staged,
            from_l3=source + 2.0 * output.size * output.dtype.bytes,
            iterations=iterations,
            scalar=(tiles + last) * 8.0 + staged * 6.0 + strips * 40.0,
        )

    def program(self, config: Config) -> Program:
        return _PlaneNest(self, self.shape(dict(config.values))).program(config)


def _loop(tiles: Tiles) -> Kind:
    """The loop kind for a few vectors of a short row: unrolled, they need no counter."""
    return Kind.UNROLL if tiles.count <= _WRITTEN_VECTORS else Kind.SERIAL


class _PlaneNest:
    """The loop nest of one config."""

    def __init__(self, applied: _AppliedPlanes, shape: PlaneTiling) -> None:
        self.applied, self.shape, self.planes = applied, shape, applied.planes
        rows = applied.staged_rows(shape)
        self.staged = Buffer("staged", F32, rows * applied.staged_width, Scope.SCRATCH)
        self.staged_row = te.Var("sy", rows)
        self.lane = te.Var("v", shape.lanes)
        self.parallel = te.Var("p", shape.planes.count * shape.strip.count)
        self.first_row = shape.strip.start_of(self.parallel % shape.strip.count)
        self.plane = te.Var("plane", shape.planes.size)
        which: te.Expr = shape.planes.start_of(self.parallel // shape.strip.count) + self.plane
        self.values: dict[te.Var, te.Expr] = {}
        for axis in reversed(self.planes.outer):
            self.values[axis] = which % axis.extent
            which = which // axis.extent

    def program(self, config: Config) -> Program:
        formula = self.planes.formula
        each = block(self._fill(), *self._weights(), *self._rows())
        body = block(*self._clear(), nest([(self.plane, Kind.SERIAL)], with_values(each, self.values)))
        body = with_values(nest([(self.parallel, Kind.PARALLEL)], body), {})
        return Program(formula.name, (*formula.inputs, formula.output), body, str(config))

    # -- the staged rows ----------------------------------------------------------------------------------------------

    def _clear(self) -> list[Stmt]:
        zero = te.const(0, F32)
        return self._along("c", self.staged.size, lambda at: Store(self.staged, at, zero))

    def _along(self, name: str, extent: int, store: Callable[[te.Expr], Store]) -> list[Stmt]:
        """Run `store` for every index below `extent`, in vectors."""
        if extent <= 0:
            return []
        lane = te.Var("w", min(self.applied.work.machine.lanes(F32), power_of_two_below(extent)))
        tiles = Tiles(te.Var(name, extent), lane.extent)
        return [nest([(tiles.var, _loop(tiles)), (lane, Kind.VECTOR)], store(tiles.start() + lane))]

    def _fill(self) -> Stmt:
        """Fill the rows of a strip. If the strip has all rows, those outside the image are the same for every plane
        and already zero."""
        run, width = self.planes.run, self.applied.staged_width
        step = self.planes.rows.axis_step

        def at(row: te.Expr) -> tuple[te.Expr | None, Stmt]:
            values = {self.planes.row: row + self.first_row * step}
            guard = None if run.outer_guard is None else simplify(te.substitute(run.outer_guard, values))
            load = te.Load(run.load.source, (te.substitute(run.load.indices[0], values),))
            return guard, self._copied(load, row * width)

        guard, copied = at(self.staged_row)
        if guard is not None and self.shape.strip.count == 1:
            rows = [n for n in range(self.staged_row.extent) if holds(guard, self.staged_row, n)]
            inside = te.Var("sy", len(rows))
            _, copied = at(inside + rows[0])
            return nest([(inside, Kind.SERIAL)], copied)
        if guard is not None:
            zero, start = te.const(0, F32), self.staged_row * width
            copied = If(
                guard, copied, block(*self._along("z", width, lambda n: Store(self.staged, start + n, zero)))
            )
        return nest([(self.staged_row, Kind.SERIAL)], copied)

    def _copied(self, load: te.Load, start: te.Expr) -> Stmt:
        """Copy the columns of a row of the plane, each to the group of its remainder."""
        run, stride, pitch = self.planes.run, self.planes.stride, self.applied.pitch
        column = next(iter(te.variables(load.indices[0]) & {te.Var("X", _reach(self.planes.columns))}))
        length = run.end - run.begin

        def source(at: te.Expr | int) -> te.Expr:
            index = te.substitute(load.indices[0], {column: te.as_index(at) + run.begin})
            return run.copied(te.Load(load.source, (index,)))

        def target(number: int, whole: te.Expr | int) -> te.Expr:
            """The index of column `begin + whole * stride + number`."""
            position = run.begin + number
            return start + (position % stride) * pitch + position // stride + te.as_index(whole)

        if stride == 1:
            return block(*self._along("x", length, lambda at: Store(self.staged, target(0, at), source(at))))
        count, stmts = length // stride, list[Stmt]()
        if count:
            lane = te.Var("w", min(self.applied.work.machine.lanes(F32), power_of_two_below(count)))
            tiles, lanes = Tiles(te.Var("x", count), lane.extent), lane.extent
            group = Buffer("group", F32, stride * lanes, Scope.REGISTER)
            first = tiles.start()
            read = [
                For(
                    lane,
                    Kind.VECTOR,
                    Store(group, lane + n * lanes, source(first * stride + n * lanes + lane)),
                )
                for n in range(stride)
            ]
            written = [
                For(
                    lane,
                    Kind.VECTOR,
                    Store(self.staged, target(n, first + lane), te.Load(group, (lane + n * lanes,))),
                )
                for n in range(stride)
            ]
            transposed = block(*read, Transpose(group, lanes, stride, lanes), *written)
            stmts.append(nest([(tiles.var, _loop(tiles))], transposed))
        for n in range(count * stride, length):
            stmts.append(Store(self.staged, target(n, 0), source(n)))
        return block(*stmts)

    # -- sums -------------------------------------------------------------------------------------------------------

    def _weight_at(self, ky: int, kx: int) -> te.Expr:
        rows, columns = self.planes.rows, self.planes.columns
        assert rows.tap is not None and columns.tap is not None
        return te.substitute(self.planes.weight, {rows.tap: te.as_index(ky), columns.tap: te.as_index(kx)})

    @cached_property
    def _kept(self) -> Buffer:
        return Buffer("window", F32, self.applied.window * self.shape.lanes, Scope.REGISTER)

    @cached_property
    def _taps(self) -> list[tuple[int, int]]:
        rows, columns = self.planes.rows, self.planes.columns
        assert rows.tap is not None and columns.tap is not None
        return [(ky, kx) for ky in range(rows.tap.extent) for kx in range(columns.tap.extent)]

    def _weights(self) -> list[Stmt]:
        """The window's weights, each broadcast to a register."""
        if not self.shape.kept:
            return []
        lanes = self.shape.lanes
        stores = [
            Store(self._kept, self.lane + n * lanes, self._weight_at(*tap))
            for n, tap in enumerate(self._taps)
        ]
        return [For(self.lane, Kind.VECTOR, block(*stores))]

    def _weight(self, number: int) -> te.Expr:
        if not self.shape.kept or self.lane.extent != self.shape.lanes:
            return self._weight_at(*self._taps[number])
        return te.Load(self._kept, (self.lane + number * self.shape.lanes,))

    def _rows(self) -> list[Stmt]:
        """All rows of a strip, in order; the last one separately if vectors extend beyond the row ends."""
        shape, width = self.shape, self.applied.width.extent
        if not shape.beyond:
            return [self._tiles(shape, 0, shape.strip.size, width)]
        all_but_last = self._tiles(shape, 0, shape.strip.size - 1, shape.lanes)
        short = replace(shape, rows=1, lanes=self.applied.lanes)
        self.lane = te.Var("s", short.lanes)
        last = self._tiles(short, shape.strip.size - 1, 1, width)
        self.lane = te.Var("v", shape.lanes)
        return [all_but_last, last]

    def _tiles(self, shape: PlaneTiling, first: int, count: int, width_of_row: int) -> Stmt:
        """Register tiles over `count` rows of the strip."""
        planes, lanes = self.planes, shape.lanes
        down = Tiles(te.Var("row", count), shape.rows)
        along = Tiles(te.Var("x", width_of_row), shape.vectors * lanes)
        accumulator = Buffer(f"acc{lanes}", F32, shape.rows * shape.vectors * lanes, Scope.REGISTER)
        width, pitch, stride = self.applied.staged_width, self.applied.pitch, planes.stride

        def element(r: int, u: int) -> te.Expr:
            return self.lane + (r * shape.vectors + u) * lanes

        def data(r: int, u: int, ky: int, kx: int) -> te.Expr:
            row = (down.start() + first + r) * planes.rows.axis_step + ky * planes.rows.tap_step
            shift = kx * planes.columns.tap_step
            column = shift % stride * pitch + shift // stride + u * lanes
            return te.Load(self.staged, (row * width + along.start() + self.lane + column,))

        # In the order of the staged rows, so that a vector shared by several result rows is loaded once.
        steps = sorted(
            (r * planes.rows.axis_step + ky * planes.rows.tap_step, kx, u, r, number)
            for number, (ky, kx) in enumerate(self._taps)
            for r in range(shape.rows)
            for u in range(shape.vectors)
        )
        begun: set[tuple[int, int]] = set()
        stores: list[Stmt] = []
        for _, kx, u, r, number in steps:
            operands = (data(r, u, self._taps[number][0], kx), self._weight(number))
            total = te.Load(accumulator, (element(r, u),))
            value = te.call("fma", *operands, total) if (r, u) in begun else te.call("mul", *operands)
            begun.add((r, u))
            stores.append(Store(accumulator, element(r, u), value))
        stores.extend(
            self._written(
                down.start() + first + r, along.start() + u * lanes, te.Load(accumulator, (element(r, u),))
            )
            for r in range(shape.rows)
            for u in range(shape.vectors)
        )
        tile = For(self.lane, Kind.VECTOR, block(*stores))
        return nest([(down.var, Kind.SERIAL), (along.var, Kind.SERIAL)], tile)

    def _written(self, row: te.Expr, column: te.Expr, total: te.Expr) -> Stmt:
        """Store the vector of results of the strip's `row` that begins at `column`."""
        formula = self.planes.formula
        result = formula.reductions[0].result
        values: dict[te.Var, te.Expr] = {
            self.applied.height: self.first_row + row,
            self.applied.width: column + self.lane,
        }
        value = te.rewrite(
            te.substitute(formula.value, values),
            lambda node: total if isinstance(node, te.Load) and node.source == result else None,
        )
        return Store(formula.output, te.substitute(formula.store, values), value)
