"""The loop nest of an attention: one config of `attention.py`, whose docstring shows the loops."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tilewright import te
from tilewright.dtypes import DType
from tilewright.hw import CpuMachine
from tilewright.loops.ir import Across, Buffer, If, Kind, Program, Scope, Stmt, Store, Transpose, block, nest
from tilewright.loops.tiling import Tiles, power_of_two_below, with_values
from tilewright.space.space import Config
from tilewright.space.templates.attention import LOG2_E, Operands
from tilewright.support.arith import ceil_div, round_up

UNROLL = 4
WIDE = 4  # adjacent vectors in a register tile
_LOWEST = -3.4028234663852886e38
_FAR = 2.0**60  # maximum of unnormalised weight sums, and the inverse of the minimum
_MAX_KEYS = 16  # maximum in a register tile
_KEYS_AGAIN = 2  # in a register tile when scores are computed again
_STREAMED = 0.4  # share of L2 bandwidth that products can use without waiting

Element = Callable[[te.Expr, te.Expr], te.Expr]


@dataclass(frozen=True)
class AttentionTiling:
    """The numbers that follow from a config."""

    vectors: int  # vectors of queries in a block
    keys: int  # in a block
    staged: bool  # whether v is copied to contiguous, aligned memory
    shared_blocks: int = 1  # blocks of queries that share the staged data


class AttentionNest:
    """The loop nest of one config. A nest with other products overrides the methods without a leading underscore."""

    def __init__(self, operands: Operands, machine: CpuMachine, shape: AttentionTiling) -> None:
        self.operands, self.shape = operands, shape
        self.lanes, self.registers = machine.lanes(DType.F32), machine.vector_registers
        self.value_block = self._bytes_of_a_block(machine)
        self.rows = shape.vectors * self.lanes
        self.block = te.Var("block", ceil_div(operands.queries, self.rows))
        self.chunk = te.Var("chunk", ceil_div(self.block.extent, shape.shared_blocks))
        self.first_row: te.Expr = self.block * self.rows
        self.lane = te.Var("v", self.lanes)

        width, values = operands.width, operands.values
        self.value_lanes = min(self.lanes, power_of_two_below(values))
        self.padded = round_up(values, self.value_lanes)
        self.padded_width = round_up(width, min(self.lanes, power_of_two_below(width)))
        self.one_block = shape.keys >= operands.keys
        self.direct = self.one_block and self.padded == values  # from registers to the output
        self.staged = shape.staged or self.padded > values
        self.ahead = shape.shared_blocks > 1  # whether everything is staged before the first block of queries
        held = operands.keys if self.ahead else shape.keys
        self.qt = self.scratch("qt", width * self.rows)
        self.p = self.scratch("p", shape.keys * self.rows)
        self.top, self.before, self.total, self.fade = (
            self.scratch(name, self.rows) for name in ("top", "before", "total", "fade")
        )
        self.acc = self.scratch("kept", self.rows * self.padded)
        self.staged_values = self.scratch("vs", held * self.padded)
        self.staged_keys = self.scratch("ks", held * self.padded_width)

    @staticmethod
    def scratch(name: str, size: int) -> Buffer:
        # A few extra lines: buffers whose sizes are powers of two would start at the same page offset, and loads of
        # one would wait for stores of another (4K aliasing).
        return Buffer(name, DType.F32, size + 80, Scope.SCRATCH)

    def program(self, config: Config) -> Program:
        operands = self.operands
        full, rest = divmod(operands.queries, self.rows)
        parts = [self._queries(self.rows, self.shape.vectors)] if full else []
        if rest:
            parts.append(self._queries(rest, ceil_div(rest, self.lanes)))
        body = parts[0]
        if len(parts) == 2:
            body = If(te.call("lt", self.block, te.as_index(full)), parts[0], parts[1])
        body = self._chunk(body)
        loops = [var for var in (*operands.lead, self.chunk) if var.extent > 1]
        parallel = te.Var("head", math.prod(var.extent for var in loops))
        position: te.Expr = parallel
        values: dict[te.Var, te.Expr] = {}
        for var in reversed(loops):
            values[var] = position % var.extent
            position = position // var.extent
        nested = nest([(parallel, Kind.PARALLEL)], with_values(body, values))
        return Program("attention", (*operands.inputs, operands.output), nested, str(config))

    def _chunk(self, body: Stmt) -> Stmt:
        """Repeat `body`, one block of queries, for a whole chunk."""
        blocks, chunks = self.block.extent, self.chunk.extent
        inside = te.Var("inside", ceil_div(blocks, chunks))
        number = self.chunk * inside.extent + inside
        body = with_values(body, {self.block: number})
        if inside.extent * chunks > blocks:
            body = If(te.call("lt", number, te.as_index(blocks)), body)
        staged = self.staging(te.as_index(0), self.operands.keys) if self.ahead else ()
        return block(*staged, nest([(inside, Kind.SERIAL)], body))

    # -- a block of queries ---------------------------------------------------------------------------------------

    def _queries(self, rows: int, vectors: int) -> Stmt:
        """One block of queries with `rows` rows in `vectors` vectors."""
        shape, keys = self.shape, self.operands.keys
        stmts: list[Stmt] = [self.transpose_queries(rows, vectors)]
        stmts.append(self.each(vectors, self.total, te.const(0, DType.F32)))
        if not self.one_block:
            stmts.append(self._nothing_seen(vectors))
            stmts.append(self._clear(rows))
        whole, rest = divmod(keys, shape.keys)
        number = te.Var("kb", whole)
        if whole:
            body = self.attend(rows, vectors, number * shape.keys, shape.keys)
            stmts.append(nest([(number, Kind.SERIAL)], body))
        if rest:
            stmts.append(self.attend(rows, vectors, te.as_index(whole * shape.keys), rest))
        if not self.one_block:
            stmts.append(self._reciprocals(vectors))
        if not self.direct:
            stmts.append(self._finish(rows))
        return block(*stmts)

    def at(self, buffer: Buffer, index: te.Expr | int) -> te.Expr:
        return te.Load(buffer, (te.as_index(index),))

    def score(self, vector: te.Expr, key: te.Expr) -> te.Expr:
        """The index of the scores of a key and a vector of rows; each vector's scores are contiguous for the second
        product."""
        return (vector * self.shape.keys + key) * self.lanes

    def each(self, vectors: int, buffer: Buffer, value: te.Expr) -> Stmt:
        """Store `value`, a formula of the row `u * lanes + v`, to `buffer` for every row of the block."""
        u = te.Var("u", vectors)
        return nest(
            [(u, Kind.UNROLL), (self.lane, Kind.VECTOR)], Store(buffer, u * self.lanes + self.lane, value)
        )

    def transpose_queries(self, rows: int, vectors: int) -> Stmt:
        operands, lanes = self.operands, self.lanes
        scale = te.const(operands.scale * LOG2_E, DType.F32)
        u = te.Var("u", ceil_div(rows, lanes))

        def query(row: te.Expr, column: te.Expr) -> te.Expr:
            position = self.first_row + row
            if rows < vectors * lanes:
                position = te.call("min", position, te.as_index(operands.queries - 1))
            return operands.query(position, column)

        if not operands.queries_are_rows or operands.width < lanes:
            column = te.Var("d", operands.width)
            row = u * lanes + self.lane
            store = Store(self.qt, column * self.rows + row, query(row, column) * scale)
            return nest([(column, Kind.SERIAL), (u, Kind.UNROLL), (self.lane, Kind.VECTOR)], store)
        tiles = Tiles(te.Var("d", operands.width), lanes)
        tile = Buffer("transposed", DType.F32, lanes * lanes, Scope.REGISTER)
        step = te.Var("r", lanes)
        in_tile = [(step, Kind.UNROLL), (self.lane, Kind.VECTOR)]
        element = step * lanes + self.lane
        filled = Store(tile, element, query(u * lanes + step, tiles.start() + self.lane))
        at = (tiles.start() + step) * self.rows + u * lanes + self.lane
        transposed = block(
            nest(in_tile, filled),
            Transpose(tile, lanes, lanes, lanes),
            nest(in_tile, Store(self.qt, at, self.at(tile, element) * scale)),
        )
        return nest([(u, Kind.SERIAL), (tiles.var, Kind.SERIAL)], transposed)

    def _clear(self, rows: int) -> Stmt:
        row, u, lane = (
            te.Var("r", rows),
            te.Var("u", self.padded // self.value_lanes),
            te.Var("v", self.value_lanes),
        )
        position = row * self.padded + u * self.value_lanes + lane
        loops = [(row, Kind.SERIAL), (u, Kind.UNROLL), (lane, Kind.VECTOR)]
        return nest(loops, Store(self.acc, position, te.const(0, DType.F32)))

    def _finish(self, rows: int) -> Stmt:
        """out = acc / total, from scratch."""
        tiles = Tiles(te.Var("e", self.operands.values), self.value_lanes)
        row, u, lane = te.Var("r", rows), te.Var("u", tiles.count), te.Var("v", self.value_lanes)
        column = tiles.start_of(u) + lane
        value = self.at(self.acc, row * self.padded + column) * self.at(self.fade, row)
        loops = [(row, Kind.SERIAL), (u, Kind.UNROLL), (lane, Kind.VECTOR)]
        return nest(loops, self.result(row, column, value))

    def _reciprocals(self, vectors: int) -> Stmt:
        """fade = 1 / total, or 0 for a query without visible keys."""
        u = te.Var("u", vectors)
        total = self.at(self.total, u * self.lanes + self.lane)
        none = te.call("eq", total, te.const(0, DType.F32))
        return self.each(vectors, self.fade, te.select(none, 0.0, te.const(1, DType.F32) / total))

    def result(self, row: te.Expr, column: te.Expr, value: te.Expr) -> Store:
        output = self.operands.output
        return Store(
            output, self.operands.position(self.first_row + row, column), te.cast(value, output.dtype)
        )

    # -- a block of keys ------------------------------------------------------------------------------------------

    def attend(self, rows: int, vectors: int, first: te.Expr, count: int) -> Stmt:
        stmts = [] if self.ahead else self.staging(first, count)
        groups = even_parts(vectors, WIDE)

        def scores(finish: Finish) -> Iterator[Stmt]:
            for start, size in groups:
                yield self._scores(start, size, rows, first, count, self.key_tile(size), finish)

        if self.one_block:
            again = self.weights_again(rows, vectors, first, count)
            stmts += [*scores(self.weights), self.unless_in_range(vectors, again)]
            stmts.append(self._reciprocals(vectors))
        else:
            u = te.Var("u", vectors)
            stmts.append(self.each(vectors, self.before, self.at(self.top, u * self.lanes + self.lane)))
            stmts += [*scores(self._maxima), *(self._exponentials(*group, count) for group in groups)]
        stmts.append(self.weighted(rows, first, count))
        whole = block(*stmts)
        if not self.operands.causal or self.one_block:
            return whole
        last_row = self.first_row + (rows - 1)
        return If(te.call("le", first, last_row), whole)

    def weights_again(self, rows: int, vectors: int, first: te.Expr, count: int) -> Stmt:
        """Compute p = the weights of all keys relative to the maximum of each query, with little code, because it is
        rare."""
        groups = even_parts(vectors, WIDE)
        scores = (
            self._scores(start, size, rows, first, count, min(_KEYS_AGAIN, self.key_tile(size)), self._maxima)
            for start, size in groups
        )
        exponentials = (self._exponentials(*group, count) for group in groups)
        return block(self._nothing_seen(vectors), *scores, *exponentials)

    def _nothing_seen(self, vectors: int) -> Stmt:
        return self.each(vectors, self.top, te.const(_LOWEST, DType.F32))

    def unless_in_range(self, vectors: int, stmt: Stmt) -> Stmt:
        """Run `stmt` if the weights of a query are so large or so small that they must be relative to the maximum."""
        u = te.Var("u", vectors)
        total = self.at(self.total, u * self.lanes + self.lane)
        farthest = Buffer("farthest", DType.F32, self.lanes, Scope.REGISTER)
        distance = te.call("max", total, te.const(1, DType.F32) / total)
        farther = te.call("max", self.at(farthest, self.lane), distance)
        near = te.call("le", Across("max", farthest, 0, self.lanes), te.const(_FAR, DType.F32))
        return block(
            nest([(self.lane, Kind.VECTOR)], Store(farthest, self.lane, te.const(1, DType.F32))),
            nest([(u, Kind.UNROLL), (self.lane, Kind.VECTOR)], Store(farthest, self.lane, farther)),
            If(te.call("not", near), stmt),
        )

    def staging(self, first: te.Expr, count: int) -> list[Stmt]:
        """Stage some keys and values, as configured."""
        operands = self.operands
        stmts: list[Stmt] = []
        if operands.half:
            stmts.append(self._stage(self.staged_keys, operands.key, operands.width, first, count))
        if self.staged:
            stmts.append(self._stage(self.staged_values, operands.value, operands.values, first, count))
        return stmts

    def _stage(self, buffer: Buffer, source: Element, width: int, first: te.Expr, count: int) -> Stmt:
        """Stage a block of keys or values as contiguous f32; rows are padded with zeros to whole vectors."""
        lanes = min(self.lanes, power_of_two_below(width))
        padded = round_up(width, lanes)
        row, lane, u = te.Var("r", count), te.Var("v", lanes), te.Var("u", padded // lanes)
        column = u * lanes + lane
        value = source(first + row, column)
        if padded > width:
            value = te.select(te.call("lt", column, te.as_index(width)), value, 0.0)
        store = Store(buffer, row * padded + column, value)
        return nest([(row, Kind.SERIAL), (u, Kind.UNROLL), (lane, Kind.VECTOR)], store)

    def _scores(
        self, start: int, vectors: int, rows: int, first: te.Expr, count: int, tile_keys: int, finish: Finish
    ) -> Stmt:
        """The scores of some vectors of rows, one register tile of keys at a time; `finish` receives each tile. Tiles
        must not overlap, because their sums would count twice."""
        size = min(tile_keys, count)
        whole, rest = divmod(count, size)
        number = te.Var("key_t", whole)
        tile = ScoreTile(start, vectors, number * size, size)
        stmts = [nest([(number, Kind.SERIAL)], self.score_tile(tile, rows, first, finish))]
        if rest:
            tile = ScoreTile(start, vectors, te.as_index(whole * size), rest)
            stmts.append(self.score_tile(tile, rows, first, finish))
        return block(*stmts)

    def score_tile(self, tile: ScoreTile, rows: int, first: te.Expr, finish: Finish) -> Stmt:
        operands = self.operands
        in_tile = [*tile.loops, (self.lane, Kind.VECTOR)]
        register = Buffer("scores", DType.F32, tile.size * self.lanes, Scope.REGISTER)
        element = tile.vector * self.lanes + self.lane
        kept = te.Load(register, (element,))
        row = self.row_of(tile)
        query = self.first_row + row
        if rows < self.rows and operands.mask_is_by_row:
            query = te.call("min", query, te.as_index(operands.queries - 1))
        seen = operands.mask(kept, query, first + tile.in_block)
        stmts = self.products(tile, register, first)
        if operands.masked:
            stmts.append(nest(in_tile, Store(register, element, seen)))
        if operands.causal:
            visible = te.call("le", first + tile.in_block, self.first_row + row)
            hidden = nest(in_tile, Store(register, element, te.select(visible, kept, -math.inf)))
            last_key = first + tile.begin + (tile.count - 1)
            some_hidden = te.call("lt", self.first_row + tile.start * self.lanes, last_key)
            stmts.append(If(some_hidden, hidden))
        return block(*stmts, finish(tile, register))

    def row_of(self, tile: ScoreTile) -> te.Expr:
        return (tile.u + tile.start) * self.lanes + self.lane

    def products(self, tile: ScoreTile, register: Buffer, first: te.Expr) -> list[Stmt]:
        """The products of a tile's keys and queries, before masking."""
        d = te.Var("d", self.operands.width)
        in_tile = [*tile.loops, (self.lane, Kind.VECTOR)]
        element = tile.vector * self.lanes + self.lane
        query = self.at(self.qt, d * self.rows + self.row_of(tile))
        update = te.call("fma", self.key_at(tile, first, d), query, te.Load(register, (element,)))
        zero = nest(in_tile, Store(register, element, te.const(0, DType.F32)))
        return [zero, _unrolled(d, nest(in_tile, Store(register, element, update)))]

    def key_at(self, tile: ScoreTile, first: te.Expr, column: te.Expr) -> te.Expr:
        if self.operands.half:
            position = first + tile.in_block if self.ahead else tile.in_block
            return self.at(self.staged_keys, position * self.padded_width + column)
        return self.operands.key(first + tile.in_block, column)

    def _maxima(self, tile: ScoreTile, register: Buffer) -> Stmt:
        """p = the scores of a tile; top = the maxima so far."""
        score = self.at(register, tile.vector * self.lanes + self.lane)
        kept = Store(self.p, self.score(tile.u + tile.start, tile.in_block) + self.lane, score)
        return self._folded(tile, self.top, lambda so_far: _larger(score, so_far), kept)

    def weights(self, tile: ScoreTile, register: Buffer) -> Stmt:
        """p = the unnormalised weights of a tile, and their sums."""
        element = tile.vector * self.lanes + self.lane
        weight = self.at(register, element)
        weighed = Store(register, element, te.call("exp2_rough", weight))
        kept = Store(self.p, self.score(tile.u + tile.start, tile.in_block) + self.lane, weight)
        return self._folded(tile, self.total, lambda so_far: so_far + weight, weighed, kept)

    def _folded(
        self, tile: ScoreTile, buffer: Buffer, update: Callable[[te.Expr], te.Expr], *before: Store
    ) -> Stmt:
        """Store each score of a tile, then update `buffer`, which has an element per row."""
        in_row = [(tile.u, Kind.UNROLL), (self.lane, Kind.VECTOR)]
        held = Buffer("folded", DType.F32, tile.vectors * self.lanes, Scope.REGISTER)
        position = tile.u * self.lanes + self.lane
        row = self.row_of(tile)
        of_score = [*before, Store(held, position, update(self.at(held, position)))]
        each = block(*(nest([(self.lane, Kind.VECTOR)], store) for store in of_score))
        return block(
            nest(in_row, Store(held, position, self.at(buffer, row))),
            nest(tile.loops, each),
            nest(in_row, Store(buffer, row, self.at(held, position))),
        )

    def _exponentials(self, start: int, vectors: int, count: int) -> Stmt:
        """p = 2^(p - top) for some vectors of rows, their sums, and the factor by which earlier sums fade."""
        u, key = te.Var("u", vectors), te.Var("k", count)
        in_row = [(u, Kind.UNROLL), (self.lane, Kind.VECTOR)]
        size = vectors * self.lanes
        tops, sums = (Buffer(name, DType.F32, size, Scope.REGISTER) for name in ("tops", "sums"))
        element = u * self.lanes + self.lane
        row = (u + start) * self.lanes + self.lane
        top, sum_ = self.at(tops, element), self.at(sums, element)
        position = self.score(u + start, key) + self.lane
        weight = te.call("exp2_nonpositive", self.at(self.p, position) - top)
        fresh = Buffer("weight", DType.F32, size, Scope.REGISTER)
        weighted = block(
            nest(in_row, Store(fresh, element, weight)),
            nest(in_row, Store(self.p, position, self.at(fresh, element))),
            nest(in_row, Store(sums, element, sum_ + self.at(fresh, element))),
        )
        begin: list[Stmt] = [nest(in_row, Store(tops, element, self.at(self.top, row)))]
        if self.one_block:
            begin.append(nest(in_row, Store(sums, element, te.const(0, DType.F32))))
        else:
            fade = te.call("exp2_nonpositive", self.at(self.before, row) - top)
            begin.append(nest(in_row, Store(self.fade, row, fade)))
            begin.append(
                nest(in_row, Store(sums, element, self.at(self.total, row) * self.at(self.fade, row)))
            )
        end = nest(in_row, Store(self.total, row, sum_))
        return block(*begin, nest([(key, Kind.SERIAL)], weighted), end)

    def weighted(self, rows: int, first: te.Expr, count: int) -> Stmt:
        """acc[row, e] = acc[row, e] * fade[row] + sum over keys of p[key, row] * v[key, e], for one block of keys at
        a time: its values stay in L1 for all rows."""
        size = ceil_div(count, self.value_blocks(count))
        whole, rest = divmod(count, size)
        number = te.Var("value_block", whole)
        ends = te.call("eq", number, te.as_index(whole - 1)) if not rest else False
        value_block = _ValueBlock(first, number * size, size, te.call("eq", number, te.as_index(0)), ends)
        if whole == 1:
            value_block = _ValueBlock(first, te.as_index(0), size, True, not rest)
        stmts = [nest([(number, Kind.SERIAL)], self._weighted_block(rows, value_block))]
        if rest:
            last = _ValueBlock(first, te.as_index(whole * size), rest, False, True)
            stmts.append(self._weighted_block(rows, last))
        return block(*stmts)

    def _weighted_block(self, rows: int, value_block: _ValueBlock) -> Stmt:
        stmts: list[Stmt] = []
        group = te.Var("group", rows // self.lanes)
        for start, vectors in even_parts(self.padded // self.value_lanes, WIDE):
            # Tiles must not overlap, because their sums would count twice.
            tiles = [
                self._weighted_tile(group, part, size, start, vectors, value_block)
                for part, size in self.row_tiles(self.lanes, vectors)
            ]
            if group.extent:
                stmts.append(nest([(group, Kind.SERIAL)], block(*tiles)))
            last = te.as_index(group.extent)
            for part, size in self.row_tiles(rows % self.lanes, vectors):
                stmts.append(self._weighted_tile(last, part, size, start, vectors, value_block))
        return block(*stmts)

    def value_blocks(self, count: int) -> int:
        """The number of blocks into which the keys are cut for the second product."""
        columns = min(self.padded, WIDE * self.value_lanes)
        return max(1, ceil_div(count * columns * 4, self.value_block))

    def _bytes_of_a_block(self, machine: CpuMachine) -> int:
        """Bytes of values in a block, which all tiles of rows read in turn."""
        rows = self.registers * 3 // 4 // WIDE
        wanted = machine.vector_bytes * machine.throughput.fmas / rows  # bytes per cycle
        if wanted <= _STREAMED * machine.throughput.l2:
            return machine.caches.l2_per_core // 4
        return machine.caches.l1 * 2 // 3  # the rest is for the weights

    def key_tile(self, vectors: int) -> int:
        """Keys in a register tile with this many vectors of rows."""
        return min(self.registers * 3 // 4 // vectors, _MAX_KEYS)

    def row_tiles(self, rows: int, vectors: int) -> list[tuple[int, int]]:
        """(first, count) of the rows of one vector's lanes in each register tile."""
        return even_parts(rows, self.registers * 3 // 4 // vectors)

    def _weighted_tile(
        self, group: te.Expr, part: int, rows: int, start: int, vectors: int, value_block: _ValueBlock
    ) -> Stmt:
        lanes = self.value_lanes
        r, u, lane, key = (
            te.Var("r", rows),
            te.Var("u", vectors),
            te.Var("v", lanes),
            te.Var("k", value_block.count),
        )
        in_tile = [(r, Kind.UNROLL), (u, Kind.UNROLL), (lane, Kind.VECTOR)]
        register = Buffer("sum", DType.F32, rows * vectors * lanes, Scope.REGISTER)
        element = (r * vectors + u) * lanes + lane
        kept = te.Load(register, (element,))
        row, column = group * self.lanes + part + r, (u + start) * lanes + lane
        in_block = value_block.start + key
        if self.staged:
            position = value_block.first + in_block if self.ahead else in_block
            value = self.at(self.staged_values, position * self.padded + column)
        else:
            value = self.operands.value(value_block.first + in_block, column)
        weight = self.at(self.p, self.score(group, in_block) + part + r)
        update = te.call("fma", weight, value, kept)
        step = nest(in_tile, Store(register, element, update))
        fade, held = self.at(self.fade, row), row * self.padded + column
        before = self.at(self.acc, held)
        new = te.const(0, DType.F32) if self.one_block else before * fade
        begin, resume = (nest(in_tile, Store(register, element, value)) for value in (new, before))
        suspend = nest(in_tile, Store(self.acc, held, kept))
        end = nest(in_tile, self.result(row, column, kept * fade)) if self.direct else suspend
        return block(
            _either(value_block.begins, begin, resume),
            _unrolled(key, step),
            _either(value_block.ends, end, suspend),
        )


@dataclass(frozen=True)
class ScoreTile:
    """`count` keys from `begin` on within a block of keys, by `vectors` vectors of rows from `start` on."""

    start: te.Expr | int
    vectors: int
    begin: te.Expr
    count: int

    @property
    def key(self) -> te.Var:
        return te.Var("k", self.count)

    @property
    def u(self) -> te.Var:
        return te.Var("u", self.vectors)

    @property
    def loops(self) -> list[tuple[te.Var, Kind]]:
        return [(self.key, Kind.UNROLL), (self.u, Kind.UNROLL)]

    @property
    def in_block(self) -> te.Expr:
        return self.begin + self.key

    @property
    def vector(self) -> te.Expr:
        """The index of the vector in the register tile."""
        return self.key * self.vectors + self.u

    @property
    def size(self) -> int:
        return self.count * self.vectors


Finish = Callable[[ScoreTile, Buffer], Stmt]


@dataclass(frozen=True)
class _ValueBlock:
    """`count` keys from `start` on, in the block of keys that begins at `first`, and whether they are its first or
    last: known, or a condition."""

    first: te.Expr
    start: te.Expr
    count: int
    begins: te.Expr | bool
    ends: te.Expr | bool


def _either(which: te.Expr | bool, then: Stmt, other: Stmt) -> Stmt:
    if isinstance(which, bool) or then == other:
        return then if which else other
    return If(which, then, other)


def even_parts(total: int, most: int) -> list[tuple[int, int]]:
    """(first, count) of parts with at most `most` elements, as even as possible."""
    count = ceil_div(total, most)
    starts = [number * total // max(count, 1) for number in range(count + 1)]
    return [(start, end - start) for start, end in itertools.pairwise(starts)]


def _larger(a: te.Expr, b: te.Expr) -> te.Expr:
    """The larger one; b if either is NaN. This is one instruction; NaN still reaches the result through the
    exponential."""
    return te.select(te.call("lt", b, a), a, b)


def _unrolled(axis: te.Var, step: Stmt) -> Stmt:
    """The loop over `axis` with `UNROLL` steps unrolled."""
    count, rest = divmod(axis.extent, UNROLL)
    outer, copy, tail = (
        te.Var(axis.name + "_o", count),
        te.Var(axis.name + "_c", UNROLL),
        te.Var(axis.name + "_r", rest),
    )
    stmts: list[Stmt] = []
    if count:
        body = nest([(copy, Kind.UNROLL)], with_values(step, {axis: outer * UNROLL + copy}))
        stmts.append(nest([(outer, Kind.SERIAL)], body))
    if rest:
        stmts.append(nest([(tail, Kind.UNROLL)], with_values(step, {axis: tail + count * UNROLL})))
    return block(*stmts)
