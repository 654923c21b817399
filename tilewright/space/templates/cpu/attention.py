"""Attention in one kernel: softmax(scale q k' + mask) v, a block of queries at a time, the scores never in memory.

    for every head and block of queries:                            (parallel)
      qt[d, row] = scale * log2(e) * q[row, d]                      (transposed into scratch: rows are lanes)
      top[row] = lowest; total[row] = 0; acc[row, e] = 0
      for blocks of keys:                                           (causal: those that some query of the block sees)
        for tiles of keys: p[key, row] = mask(sum over d of k[key, d] * qt[d, row]); top = max(top, p)
        fade[row] = 2^(top before - top)
        p[key, row] = 2^(p[key, row] - top[row]); total = total * fade + sum over keys of p
        for tiles of rows: acc[row, e] = acc[row, e] * fade[row] + sum over keys of p[key, row] * v[key, e]
      out[row, e] = acc[row, e] / total[row]

Queries are the lanes of the scores, so keys are read where they lie, element by element, maxima and sums never cross
lanes, and the second product finds what it broadcasts side by side. Where all keys are one block nothing fades, and the
result goes straight from registers to its place.

Scores are kept times log2(e), so that their weights are powers of two. `top` begins at the lowest finite number: a
query that sees nothing has only zeros for weights, and their sum says so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from tilewright import te
from tilewright.dtypes import DType
from tilewright.graph.attention import attention_in
from tilewright.loops.ir import Buffer, If, Kind, Program, Scope, Stmt, Store, Transpose, block, nest
from tilewright.loops.tiling import Tiles, power_of_two_below, with_values
from tilewright.space.space import Config, Knob, Space, Value
from tilewright.space.template import Applied, Terms, Work
from tilewright.space.templates.attention import LOG2_E, Operands

NAME = "attention"
_LOWEST = -3.4028234663852886e38
_UNROLL = 4
_WIDE = 4  # vectors side by side in a register tile
_SCRATCH = 512 << 10
_EXP = 16  # instructions of a score's maximum, weight and sum
_TRANSPOSING = 1.0  # cycles for an element of q
_DRAINING = 20.0  # cycles between two register tiles in which the ports are not full


_Element = Callable[[te.Expr, te.Expr], te.Expr]


class Attention:
    name = NAME

    def apply(self, work: Work) -> Applied | None:
        node = attention_in(work.task.graph)
        if node is None or work.numerics == "strict":
            return None
        return _Applied(work, Operands(work.task.graph, node))


# -- the space --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Shape:
    """The numbers that follow from a config."""

    vectors: int  # of queries in a block
    keys: int  # in a block
    staged: bool  # whether v is copied to where it lies densely


class _Applied:
    def __init__(self, work: Work, operands: Operands) -> None:
        self.machine, self.operands = work.machine, operands
        self.lanes = work.machine.lanes(DType.F32)

    @cached_property
    def space(self) -> Space:
        operands = self.operands
        most = -(-operands.queries // self.lanes)
        keys = [n for n in (32, 48, 64, 96, 128, 192, 256, 384, 512) if n < operands.keys]
        return Space(
            NAME,
            (
                Knob("vectors", tuple(n for n in (1, 2, 3, 4, 6, 8) if n <= most)),
                Knob("keys", (*keys, operands.keys)),
                Knob("stage", (True,) if operands.half else (False, True)),
            ),
            lambda values: self._scratch_bytes(_shape(values)) <= _SCRATCH,
            together=(("vectors", "keys", "stage"),),
        )

    def _scratch_bytes(self, shape: _Shape) -> int:
        builder = _Builder(self, shape)
        held = builder.rows * (self.operands.width + builder.padded + shape.keys)
        held += shape.keys * builder.padded * builder.staged
        held += shape.keys * builder.padded_width * self.operands.half
        return 4 * held

    def terms(self, config: Config) -> Terms:
        shape, operands, caches = _shape(dict(config.values)), self.operands, self.machine.caches
        builder = _Builder(self, shape)
        width, columns = operands.width, builder.padded // builder.value_lanes
        block_bytes = 4 * shape.keys * builder.padded
        apart = not builder.staged and not operands.values_are_dense
        # Values that lie apart meet in few sets of the first cache, and every tile of rows reads them again.
        again = apart or block_bytes + 4 * shape.keys * self.lanes > caches.l1
        spilled = 4 * shape.keys * builder.rows > 0.75 * caches.l1
        arithmetic = loads = stores = branches = from_l2 = scalar = 0.0
        for rows, vectors, keys in self._blocks(shape):
            groups = _even_parts(vectors, _WIDE)
            tiles = [
                (size, tile)
                for _, size in _even_parts(columns, _WIDE)
                for part in (self.lanes,) * (rows // self.lanes) + (rows % self.lanes,)
                for _, tile in builder.row_tiles(part, size)
            ]
            arithmetic += keys * (width * vectors + rows * columns + _EXP * vectors)
            loads += sum(keys * width * (1 + size / builder.key_tile(size)) for _, size in groups)
            loads += sum(keys * (size + tile) for size, tile in tiles) + keys * vectors
            stores += 2 * keys * vectors
            branches += sum(keys * width / builder.key_tile(size) / _UNROLL for _, size in groups)
            branches += keys * (len(tiles) / _UNROLL + len(groups))
            passes = -(-keys // shape.keys)
            kept = passes * rows * columns * (not builder.one_block)
            staged = keys * columns * builder.staged
            arithmetic, loads, stores = arithmetic + kept, loads + kept + staged, stores + kept + staged
            scalar += width * rows * _TRANSPOSING
            scalar += _DRAINING * (passes * len(tiles) + sum(keys / builder.key_tile(n) for _, n in groups))
            from_l2 += 4 * keys * (width * len(groups) + operands.values * (len(tiles) if again else 1))
            from_l2 += 12 * keys * rows * spilled
        heads = operands.heads
        moved = sum(x.size * x.dtype.bytes for x in (*operands.inputs, operands.output))
        return Terms(
            arithmetic=heads * arithmetic,
            loads=heads * loads,
            stores=heads * stores,
            branches=heads * branches,
            from_l2=heads * from_l2,
            from_l3=moved,
            iterations=heads * builder.block.extent,
            scalar=heads * scalar,
        )

    def _blocks(self, shape: _Shape) -> Iterator[tuple[int, int, int]]:
        """(queries, their vectors, keys that they are compared with) of every block of a head."""
        operands, rows = self.operands, shape.vectors * self.lanes
        for first in range(0, operands.queries, rows):
            count = min(rows, operands.queries - first)
            keys = operands.keys
            if operands.causal and shape.keys < keys:
                keys = min(keys, -(-(first + count) // shape.keys) * shape.keys)
            yield count, -(-count // self.lanes), keys

    def program(self, config: Config) -> Program:
        return _Builder(self, _shape(dict(config.values))).program(config)


def _shape(values: Mapping[str, Value]) -> _Shape:
    return _Shape(int(values["vectors"]), int(values["keys"]), bool(values["stage"]))


# -- the program ------------------------------------------------------------------------------------------------------


class _Builder:
    """The loop nest of one config."""

    def __init__(self, applied: _Applied, shape: _Shape) -> None:
        self.operands, self.shape, self.lanes = applied.operands, shape, applied.lanes
        self.registers = applied.machine.vector_registers
        self.rows = shape.vectors * self.lanes
        self.block = te.Var("block", -(-self.operands.queries // self.rows))
        self.first_row: te.Expr = self.block * self.rows
        self.lane = te.Var("v", self.lanes)

        width, values = self.operands.width, self.operands.values
        self.value_lanes = min(self.lanes, power_of_two_below(values))
        self.padded = _padded(values, self.value_lanes)
        self.padded_width = _padded(width, min(self.lanes, power_of_two_below(width)))
        self.one_block = shape.keys >= self.operands.keys
        self.direct = self.one_block and self.padded == values  # from registers to the output
        self.staged = shape.staged or self.padded > values
        self.qt = self._scratch("qt", width * self.rows)
        self.p = self._scratch("p", shape.keys * self.rows)
        self.top, self.before, self.total, self.fade = (
            self._scratch(name, self.rows) for name in ("top", "before", "total", "fade")
        )
        self.acc = self._scratch("kept", self.rows * self.padded)
        self.staged_values = self._scratch("vs", shape.keys * self.padded)
        self.staged_keys = self._scratch("ks", shape.keys * self.padded_width)

    @staticmethod
    def _scratch(name: str, size: int) -> Buffer:
        # A few lines more than needed: buffers whose sizes are powers of two would begin at equal places in their
        # pages, where loads of one wait for stores of another.
        return Buffer(name, DType.F32, size + 80, Scope.SCRATCH)

    def program(self, config: Config) -> Program:
        operands = self.operands
        full, rest = divmod(operands.queries, self.rows)
        parts = [self._queries(self.rows, self.shape.vectors)] if full else []
        if rest:
            parts.append(self._queries(rest, -(-rest // self.lanes)))
        body = parts[0]
        if len(parts) == 2:
            body = If(te.call("lt", self.block, te.as_index(full)), parts[0], parts[1])
        loops = [var for var in (*operands.lead, self.block) if var.extent > 1]
        parallel = te.Var("head", math.prod(var.extent for var in loops))
        place: te.Expr = parallel
        values: dict[te.Var, te.Expr] = {}
        for var in reversed(loops):
            values[var] = place % var.extent
            place = place // var.extent
        nested = nest([(parallel, Kind.PARALLEL)], with_values(body, values))
        return Program("attention", (*operands.inputs, operands.output), nested, str(config))

    # -- a block of queries ---------------------------------------------------------------------------------------

    def _queries(self, rows: int, vectors: int) -> Stmt:
        """All of one block, of which `rows` exist; they take `vectors` vectors."""
        shape, keys = self.shape, self.operands.keys
        stmts: list[Stmt] = [self._transpose_queries(rows, vectors)]
        stmts.append(self._each(vectors, self.top, te.const(_LOWEST, DType.F32)))
        stmts.append(self._each(vectors, self.total, te.const(0, DType.F32)))
        if not self.one_block:
            stmts.append(self._clear(rows))
        whole, rest = divmod(keys, shape.keys)
        number = te.Var("kb", whole)
        if whole:
            body = self._keys(rows, vectors, number * shape.keys, shape.keys)
            stmts.append(nest([(number, Kind.SERIAL)], body))
        if rest:
            stmts.append(self._keys(rows, vectors, te.as_index(whole * shape.keys), rest))
        if not self.one_block:
            stmts.append(self._reciprocals(vectors))
        if not self.direct:
            stmts.append(self._finish(rows))
        return block(*stmts)

    def _at(self, buffer: Buffer, index: te.Expr | int) -> te.Expr:
        return te.Load(buffer, (te.as_index(index),))

    def _score(self, vector: te.Expr, key: te.Expr) -> te.Expr:
        """Where the scores of a key and a vector of rows are: each vector's lie together, for the second product."""
        return (vector * self.shape.keys + key) * self.lanes

    def _each(self, vectors: int, buffer: Buffer, value: te.Expr) -> Stmt:
        """`buffer` = `value`, a formula of the row `u * lanes + v`, for every row of the block."""
        u = te.Var("u", vectors)
        return nest(
            [(u, Kind.UNROLL), (self.lane, Kind.VECTOR)], Store(buffer, u * self.lanes + self.lane, value)
        )

    def _transpose_queries(self, rows: int, vectors: int) -> Stmt:
        operands, lanes = self.operands, self.lanes
        scale = te.const(operands.scale * LOG2_E, DType.F32)
        u = te.Var("u", -(-rows // lanes))

        def query(row: te.Expr, column: te.Expr) -> te.Expr:
            place = self.first_row + row
            if rows < vectors * lanes:
                place = te.call("min", place, te.as_index(operands.queries - 1))
            return operands.query(place, column)

        if not operands.queries_are_rows or operands.width < lanes:
            column = te.Var("d", operands.width)
            row = u * lanes + self.lane
            store = Store(self.qt, column * self.rows + row, query(row, column) * scale)
            return nest([(column, Kind.SERIAL), (u, Kind.UNROLL), (self.lane, Kind.VECTOR)], store)
        tiles = Tiles(te.Var("d", operands.width), lanes)
        tile = Buffer("turned", DType.F32, lanes * lanes, Scope.REGISTER)
        step = te.Var("r", lanes)
        in_tile = [(step, Kind.UNROLL), (self.lane, Kind.VECTOR)]
        element = step * lanes + self.lane
        filled = Store(tile, element, query(u * lanes + step, tiles.start() + self.lane))
        at = (tiles.start() + step) * self.rows + u * lanes + self.lane
        turned = block(
            nest(in_tile, filled),
            Transpose(tile, lanes, lanes, lanes),
            nest(in_tile, Store(self.qt, at, self._at(tile, element) * scale)),
        )
        return nest([(u, Kind.SERIAL), (tiles.var, Kind.SERIAL)], turned)

    def _clear(self, rows: int) -> Stmt:
        row, u, lane = (
            te.Var("r", rows),
            te.Var("u", self.padded // self.value_lanes),
            te.Var("v", self.value_lanes),
        )
        place = row * self.padded + u * self.value_lanes + lane
        loops = [(row, Kind.SERIAL), (u, Kind.UNROLL), (lane, Kind.VECTOR)]
        return nest(loops, Store(self.acc, place, te.const(0, DType.F32)))

    def _finish(self, rows: int) -> Stmt:
        """out = acc / total, from scratch."""
        tiles = Tiles(te.Var("e", self.operands.values), self.value_lanes)
        row, u, lane = te.Var("r", rows), te.Var("u", tiles.count), te.Var("v", self.value_lanes)
        column = tiles.start_of(u) + lane
        value = self._at(self.acc, row * self.padded + column) * self._at(self.fade, row)
        loops = [(row, Kind.SERIAL), (u, Kind.UNROLL), (lane, Kind.VECTOR)]
        return nest(loops, self._result(row, column, value))

    def _reciprocals(self, vectors: int) -> Stmt:
        """fade = 1 / total, or 0 for a query that sees nothing."""
        u = te.Var("u", vectors)
        total = self._at(self.total, u * self.lanes + self.lane)
        none = te.call("eq", total, te.const(0, DType.F32))
        return self._each(vectors, self.fade, te.select(none, 0.0, te.const(1, DType.F32) / total))

    def _result(self, row: te.Expr, column: te.Expr, value: te.Expr) -> Store:
        output = self.operands.output
        return Store(output, self.operands.place(self.first_row + row, column), te.cast(value, output.dtype))

    # -- a block of keys ------------------------------------------------------------------------------------------

    def _keys(self, rows: int, vectors: int, first: te.Expr, count: int) -> Stmt:
        stmts: list[Stmt] = []
        if self.operands.half:
            stmts.append(self._stage(self.staged_keys, self.operands.key, self.operands.width, first, count))
        if self.staged:
            stmts.append(
                self._stage(self.staged_values, self.operands.value, self.operands.values, first, count)
            )
        if not self.one_block:
            u = te.Var("u", vectors)
            stmts.append(self._each(vectors, self.before, self._at(self.top, u * self.lanes + self.lane)))
        groups = _even_parts(vectors, _WIDE)
        for start, size in groups:
            stmts.append(self._scores(start, size, rows, first, count))
        for start, size in groups:
            stmts.append(self._exponentials(start, size, count))
        if self.one_block:
            stmts.append(self._reciprocals(vectors))
        stmts.append(self._weighted(rows, first, count))
        whole = block(*stmts)
        if not self.operands.causal or self.one_block:
            return whole
        last_row = self.first_row + (rows - 1)
        return If(te.call("le", first, last_row), whole)

    def _stage(self, buffer: Buffer, source: _Element, width: int, first: te.Expr, count: int) -> Stmt:
        """A block of keys or values, dense and in f32; rows are filled up with zeros to whole vectors."""
        lanes = min(self.lanes, power_of_two_below(width))
        padded = _padded(width, lanes)
        row, lane, u = te.Var("r", count), te.Var("v", lanes), te.Var("u", padded // lanes)
        column = u * lanes + lane
        value = source(first + row, column)
        if padded > width:
            value = te.select(te.call("lt", column, te.as_index(width)), value, 0.0)
        store = Store(buffer, row * padded + column, value)
        return nest([(row, Kind.SERIAL), (u, Kind.UNROLL), (lane, Kind.VECTOR)], store)

    def _scores(self, start: int, vectors: int, rows: int, first: te.Expr, count: int) -> Stmt:
        """p[key, row] for some vectors of rows, and their maxima so far."""
        operands = self.operands
        tile = min(self.key_tile(vectors), count)
        tiles = Tiles(te.Var("key", count), tile)
        key, u, d = te.Var("k", tile), te.Var("u", vectors), te.Var("d", operands.width)
        in_tile = [(key, Kind.UNROLL), (u, Kind.UNROLL), (self.lane, Kind.VECTOR)]
        register = Buffer("scores", DType.F32, tile * vectors * self.lanes, Scope.REGISTER)
        element = (key * vectors + u) * self.lanes + self.lane
        kept = te.Load(register, (element,))
        in_block = tiles.start() + key
        row = (u + start) * self.lanes + self.lane

        def of_key(column: te.Expr) -> te.Expr:
            if operands.half:
                return self._at(self.staged_keys, in_block * self.padded_width + column)
            return operands.key(first + in_block, column)

        update = te.call("fma", of_key(d), self._at(self.qt, d * self.rows + row), kept)
        step = nest(in_tile, Store(register, element, update))
        zero = nest(in_tile, Store(register, element, te.const(0, DType.F32)))
        query = self.first_row + row
        if rows < self.rows and operands.mask_is_by_row:
            query = te.call("min", query, te.as_index(operands.queries - 1))
        seen = operands.mask(kept, query, first + in_block)
        stmts: list[Stmt] = [zero, _unrolled(d, step)]
        if operands.masked:
            stmts.append(nest(in_tile, Store(register, element, seen)))
        if operands.causal:
            visible = te.call("le", first + in_block, self.first_row + row)
            hidden = nest(in_tile, Store(register, element, te.select(visible, kept, -math.inf)))
            some_hidden = te.call(
                "lt", self.first_row + start * self.lanes, first + tiles.start() + (tile - 1)
            )
            stmts.append(If(some_hidden, hidden))
        stmts.append(nest(in_tile, Store(self.p, self._score(u + start, in_block) + self.lane, kept)))
        in_row = [(u, Kind.UNROLL), (self.lane, Kind.VECTOR)]
        tops = Buffer("tops", DType.F32, vectors * self.lanes, Scope.REGISTER)
        place = u * self.lanes + self.lane
        stmts.append(nest(in_row, Store(tops, place, self._at(self.top, row))))
        stmts.append(nest(in_tile, Store(tops, place, _larger(kept, self._at(tops, place)))))
        stmts.append(nest(in_row, Store(self.top, row, self._at(tops, place))))
        return nest([(tiles.var, Kind.SERIAL)], block(*stmts))

    def _exponentials(self, start: int, vectors: int, count: int) -> Stmt:
        """p = 2^(p - top) for some vectors of rows, and their sums; how much what was summed before fades."""
        u, key = te.Var("u", vectors), te.Var("k", count)
        in_row = [(u, Kind.UNROLL), (self.lane, Kind.VECTOR)]
        size = vectors * self.lanes
        tops, sums = (Buffer(name, DType.F32, size, Scope.REGISTER) for name in ("tops", "sums"))
        element = u * self.lanes + self.lane
        row = (u + start) * self.lanes + self.lane
        top, sum_ = self._at(tops, element), self._at(sums, element)
        place = self._score(u + start, key) + self.lane
        weight = te.call("exp2_weight", self._at(self.p, place) - top)
        fresh = Buffer("weight", DType.F32, size, Scope.REGISTER)
        weighted = block(
            nest(in_row, Store(fresh, element, weight)),
            nest(in_row, Store(self.p, place, self._at(fresh, element))),
            nest(in_row, Store(sums, element, sum_ + self._at(fresh, element))),
        )
        begin: list[Stmt] = [nest(in_row, Store(tops, element, self._at(self.top, row)))]
        if self.one_block:
            begin.append(nest(in_row, Store(sums, element, te.const(0, DType.F32))))
        else:
            fade = te.call("exp2_weight", self._at(self.before, row) - top)
            begin.append(nest(in_row, Store(self.fade, row, fade)))
            begin.append(
                nest(in_row, Store(sums, element, self._at(self.total, row) * self._at(self.fade, row)))
            )
        end = nest(in_row, Store(self.total, row, sum_))
        return block(*begin, nest([(key, Kind.SERIAL)], weighted), end)

    def _weighted(self, rows: int, first: te.Expr, count: int) -> Stmt:
        """acc[row, e] = acc[row, e] * fade[row] + sum over keys of p[key, row] * v[key, e]."""
        stmts: list[Stmt] = []
        group = te.Var("group", rows // self.lanes)
        for start, vectors in _even_parts(self.padded // self.value_lanes, _WIDE):
            # Tiles may not overlap: what is accumulated twice is wrong.
            for part, size in self.row_tiles(self.lanes, vectors) if group.extent else ():
                tile = self._weighted_tile(group, part, size, start, vectors, first, count)
                stmts.append(nest([(group, Kind.SERIAL)], tile))
            last = te.as_index(group.extent)
            for part, size in self.row_tiles(rows % self.lanes, vectors):
                stmts.append(self._weighted_tile(last, part, size, start, vectors, first, count))
        return block(*stmts)

    def key_tile(self, vectors: int) -> int:
        """Keys in a register tile of so many vectors of rows."""
        return min(self.registers * 3 // 4 // vectors, 16)

    def row_tiles(self, rows: int, vectors: int) -> list[tuple[int, int]]:
        """(first, how many) of the rows of one vector's lanes that a register tile takes."""
        return _even_parts(rows, self.registers * 3 // 4 // vectors)

    def _weighted_tile(
        self, group: te.Expr, part: int, rows: int, start: int, vectors: int, first: te.Expr, count: int
    ) -> Stmt:
        lanes = self.value_lanes
        r, u, lane, key = te.Var("r", rows), te.Var("u", vectors), te.Var("v", lanes), te.Var("k", count)
        in_tile = [(r, Kind.UNROLL), (u, Kind.UNROLL), (lane, Kind.VECTOR)]
        register = Buffer("sum", DType.F32, rows * vectors * lanes, Scope.REGISTER)
        element = (r * vectors + u) * lanes + lane
        kept = te.Load(register, (element,))
        row, column = group * self.lanes + part + r, (u + start) * lanes + lane
        if self.staged:
            value = self._at(self.staged_values, key * self.padded + column)
        else:
            value = self.operands.value(first + key, column)
        weight = self._at(self.p, self._score(group, key) + part + r)
        update = te.call("fma", weight, value, kept)
        step = nest(in_tile, Store(register, element, update))
        fade = self._at(self.fade, row)
        begin: te.Expr = te.const(0, DType.F32)
        if not self.one_block:
            begin = self._at(self.acc, row * self.padded + column) * fade
        end = Store(self.acc, row * self.padded + column, kept)
        if self.direct:
            end = self._result(row, column, kept * fade)
        return block(nest(in_tile, Store(register, element, begin)), _unrolled(key, step), nest(in_tile, end))


def _padded(extent: int, lanes: int) -> int:
    return -(-extent // lanes) * lanes


def _even_parts(total: int, most: int) -> list[tuple[int, int]]:
    """(first, how many) of parts of at most `most`, as even as possible."""
    count = -(-total // most)
    starts = [number * total // max(count, 1) for number in range(count + 1)]
    return [(start, end - start) for start, end in itertools.pairwise(starts)]


def _larger(a: te.Expr, b: te.Expr) -> te.Expr:
    """The larger one; b where either is NaN. One instruction: NaN reaches the result through the exponential."""
    return te.select(te.call("lt", b, a), a, b)


def _unrolled(axis: te.Var, step: Stmt) -> Stmt:
    """The loop over `axis` with `_UNROLL` steps written out."""
    count, rest = divmod(axis.extent, _UNROLL)
    outer, copy, tail = (
        te.Var(axis.name + "_o", count),
        te.Var(axis.name + "_c", _UNROLL),
        te.Var(axis.name + "_r", rest),
    )
    stmts: list[Stmt] = []
    if count:
        body = nest([(copy, Kind.UNROLL)], with_values(step, {axis: outer * _UNROLL + copy}))
        stmts.append(nest([(outer, Kind.SERIAL)], body))
    if rest:
        stmts.append(nest([(tail, Kind.UNROLL)], with_values(step, {axis: tail + count * _UNROLL})))
    return block(*stmts)
