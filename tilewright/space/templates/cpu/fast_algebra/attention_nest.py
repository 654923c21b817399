"""The loop nest of attention with Winograd's inner-product trick, for cores that add vectors alongside those that they
multiply: two products are taken as one and two additions,

    a1 b1 + a2 b2 = (a1 + b2) (a2 + b1) - a1 a2 - b1 b2

where the sums of a1 a2 and of b1 b2 belong to a row or a column alone and are subtracted once. Two in three elements of
a register tile are computed so, the third as usual: then multipliers and adders are busy alike, and what takes three
cycles takes two. A tile is one vector wide, so that each broadcast is an operand in memory, which costs nothing, and
not an instruction.

What is added has to be alike in size, or the smaller one is lost. So keys, queries and values get root mean squares of
1, the weights of a query a mean of 1, and their sizes are put back where something is multiplied anyway:

    for every head, for chunks of queries:                          (parallel)
      ku[key, :] = k[key, :] / ksize[key];  vu[key, :] = v[key, :] / vsize[key]
      for blocks of queries:
        qt[:, row] = q[row, :] / qsize[row]
        for tiles of keys, for vectors of rows:
          weight = 2^mask((sum over d of ku[key, d] * qt[d, row]) * ksize[key] * qsize[row])
          total[row] += weight;  p[key, row] = weight * vsize[key];  weighed[row] += p[key, row]
        p[key, row] *= keys / weighed[row]
        for vectors of values, for vectors of rows:
          out[row, e] = (sum over keys of p[key, row] * vu[key, e]) * weighed[row] / (keys * total[row])

Weights are positive: products of neighbours would add up to much more than the result. So the second number of every
other pair is negated on both sides, which leaves a2 b2 as it is and lets the products of neighbours cancel. The error
is that of plain products, within a fifth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from tilewright import te
from tilewright.dtypes import DType
from tilewright.hw import CpuMachine
from tilewright.loops.ir import Buffer, Kind, Scope, Stmt, Store, Transpose, block, nest, set_to
from tilewright.loops.tiling import Tiles
from tilewright.space.templates.attention import Operands
from tilewright.space.templates.cpu.attention_nest import (
    WIDE,
    AttentionNest,
    AttentionTiling,
    Element,
    ScoreTile,
    even_parts,
)
from tilewright.support.arith import ceil_div

_PLAIN = 3  # of so many elements, one is computed as usual
_TINY, _HUGE = (
    1e-37,
    1e38,
)  # sums of squares between them are those of numbers that can be divided by their size
_ZERO = te.const(0, DType.F32)


class _PairedTile(ScoreTile):
    """One whose products are computed in pairs; those that are computed again are not."""


class PairedAttentionNest(AttentionNest):
    def __init__(self, operands: Operands, machine: CpuMachine, shape: AttentionTiling) -> None:
        super().__init__(operands, machine, shape)
        assert self.one_block and self.direct
        keys = operands.keys
        self.half = operands.width // 2
        self.unit_keys = self.scratch("ku", keys * operands.width)
        self.unit_values = self.scratch("vu", keys * operands.values)
        self.key_size, self.key_inverse, self.key_cross, self.value_size, self.value_inverse = (
            self.scratch(name, keys) for name in ("ksize", "kinverse", "kcross", "vsize", "vinverse")
        )
        self.value_cross = self.scratch("vcross", operands.values)
        self.query_size, self.query_cross, self.weighed, self.share, self.weight_cross = (
            self.scratch(name, self.rows) for name in ("qsize", "qcross", "weighed", "share", "pcross")
        )

    # -- operands of unit size ------------------------------------------------------------------------------------

    def staging(self, first: te.Expr, count: int) -> list[Stmt]:
        return [self._measured(), self._unit_keys(), self._unit_values()]

    def _measured(self) -> Stmt:
        """The sizes of keys and values, and the sums of products of pairs of a key's numbers, a vector of keys at a
        time."""
        operands, lanes = self.operands, self.lanes
        tiles, r = Tiles(te.Var("key", operands.keys), lanes), te.Var("r", lanes)
        tile = Buffer("transposed", DType.F32, lanes * lanes, Scope.REGISTER)
        in_tile = [(r, Kind.UNROLL), (self.lane, Kind.VECTOR)]
        row, at = tiles.start() + r, tiles.start() + self.lane
        across = [(self.lane, Kind.VECTOR)]
        transposed = [self.at(tile, self.lane + n * lanes) for n in range(lanes)]

        def summed(chunks: int, update: Callable[[te.Expr, te.Expr], te.Expr]) -> Iterator[Stmt]:
            """The tile, transposed, of the sums over `chunks` vectors of each row."""
            chunk, element = te.Var("c", chunks), te.Load(tile, (r * lanes + self.lane,))
            yield nest(in_tile, set_to(element, _ZERO))
            yield nest(
                [(chunk, Kind.SERIAL), *in_tile], set_to(element, update(chunk * lanes + self.lane, element))
            )
            yield Transpose(tile, lanes, lanes, lanes)

        def sized(operand: Element, width: int, size: Buffer, inverse: Buffer) -> Iterator[Stmt]:
            def square(column: te.Expr, total: te.Expr) -> te.Expr:
                number = operand(row, column)
                return te.call("fma", number, number, total)

            yield from summed(width // lanes, square)
            yield nest(across, Store(size, at, _size(_sum(transposed), width)))
            yield nest(across, Store(inverse, at, _inverse(self.at(size, at))))

        def product(column: te.Expr, total: te.Expr) -> te.Expr:
            low, high = (operands.key(row, d) for d in (column, column + self.half))
            return te.call("fma", low, high, total)

        inverse = self.at(self.key_inverse, at)
        crosses = [-number if n % 2 == 0 else number for n, number in enumerate(transposed)]
        return nest(
            [(tiles.var, Kind.SERIAL)],
            block(
                *sized(operands.key, operands.width, self.key_size, self.key_inverse),
                *summed(self.half // lanes, product),
                nest(across, Store(self.key_cross, at, _sum(crosses) * inverse * inverse)),
                *sized(operands.value, operands.values, self.value_size, self.value_inverse),
            ),
        )

    def _unit_keys(self) -> Stmt:
        width, lanes = self.operands.width, self.lanes
        key, chunk = te.Var("key", self.operands.keys), te.Var("c", width // lanes)
        column = chunk * lanes + self.lane
        unit = self.operands.key(key, column) * self.at(self.key_inverse, key)
        first = te.call("lt", column, te.as_index(self.half))
        even = te.call("eq", self.lane % 2, te.as_index(0))
        unit = te.select(te.call("or", first, even), unit, -unit)
        loops = [(key, Kind.SERIAL), (chunk, Kind.UNROLL), (self.lane, Kind.VECTOR)]
        return nest(loops, Store(self.unit_keys, key * width + column, unit))

    def _unit_values(self) -> Stmt:
        """Vector by vector of values: all keys of each, side by side, and the products of pairs of keys."""
        lanes, keys = self.lanes, self.operands.keys
        u = te.Var("u", self.operands.values // lanes)

        def unit(key: te.Expr) -> te.Expr:
            return self.operands.value(key, u * lanes + self.lane) * self.at(self.value_inverse, key)

        def position(key: te.Expr) -> te.Load:
            return te.Load(self.unit_values, ((u * keys + key) * lanes + self.lane,))

        cross = te.Load(self.value_cross, (u * lanes + self.lane,))
        return nest([(u, Kind.SERIAL)], self._in_pairs_of_keys(unit, position, cross))

    def _in_pairs_of_keys(
        self, number: Callable[[te.Expr], te.Expr], position: Callable[[te.Expr], te.Load], cross: te.Load
    ) -> Stmt:
        """The numbers of all keys to their places, those of odd pairs' second keys negated; to `cross`, less the
        products of pairs."""
        low, high, total = (
            Buffer(name, DType.F32, self.lanes, Scope.REGISTER) for name in ("low", "high", "cross")
        )
        a, b, products = (te.Load(buffer, (self.lane,)) for buffer in (low, high, total))

        def each(*stores: Store) -> Stmt:
            return block(*(nest([(self.lane, Kind.VECTOR)], store) for store in stores))

        def pair(key: te.Expr, even: bool) -> Stmt:
            second = number(key + 1)
            return each(
                set_to(a, number(key)),
                set_to(position(key), a),
                set_to(b, second if even else -second),
                set_to(position(key + 1), b),
                set_to(products, te.call("fma", -a, b, products)),
            )

        pairs = _in_pairs(
            "key", self.operands.keys, pair, lambda key: each(set_to(position(key), number(key)))
        )
        return block(each(set_to(products, _ZERO)), *pairs, each(set_to(cross, products)))

    def transpose_queries(self, rows: int, vectors: int) -> Stmt:
        groups = even_parts(vectors, WIDE)
        return block(
            super().transpose_queries(rows, vectors), *(self._unit_queries(*group) for group in groups)
        )

    def _unit_queries(self, start: int, vectors: int) -> Stmt:
        lanes = self.lanes
        u, d, j = te.Var("u", vectors), te.Var("d", self.operands.width), te.Var("j", self.half // 2)
        in_row = [(u, Kind.UNROLL), (self.lane, Kind.VECTOR)]
        row = (u + start) * lanes + self.lane
        squares, inverse, cross, low, high = (
            te.Load(Buffer(name, DType.F32, vectors * lanes, Scope.REGISTER), (u * lanes + self.lane,))
            for name in ("squares", "inverse", "cross", "low", "high")
        )
        size = te.Load(self.query_size, (row,))

        def each(*stores: Store) -> Stmt:
            return block(*(nest(in_row, store) for store in stores))

        def number(column: te.Expr) -> te.Load:
            return te.Load(self.qt, (column * self.rows + row,))

        def pair(column: te.Expr, even: bool) -> Stmt:
            first, second = number(column), number(column + self.half)
            unit = second * inverse
            return each(
                set_to(low, first * inverse),
                set_to(first, low),
                set_to(high, unit if even else -unit),
                set_to(second, high),
                set_to(cross, te.call("fma", -low, high, cross)),
            )

        return block(
            each(set_to(squares, _ZERO)),
            nest([(d, Kind.SERIAL)], each(set_to(squares, te.call("fma", number(d), number(d), squares)))),
            each(set_to(size, _size(squares, self.operands.width)), set_to(inverse, _inverse(size))),
            each(set_to(cross, _ZERO)),
            nest([(j, Kind.SERIAL)], block(pair(j * 2, True), pair(j * 2 + 1, False))),
            each(set_to(te.Load(self.query_cross, (row,)), cross)),
        )

    # -- scores and weights ---------------------------------------------------------------------------------------

    def attend(self, rows: int, vectors: int, first: te.Expr, count: int) -> Stmt:
        again = self.weights_again(rows, vectors, first, count)
        return block(
            *(() if self.ahead else self.staging(first, count)),
            self.each(vectors, self.weighed, _ZERO),
            *self._paired_scores(rows, vectors, first, count),
            self.unless_in_range(vectors, again),
            *self._shares(vectors),
            self._evened_weights(vectors),
            self.weighted(rows, first, count),
        )

    @property
    def keys_of_a_tile(self) -> int:
        most = self.registers // 2  # the others hold sums on their way
        return ceil_div(self.operands.keys, ceil_div(self.operands.keys, most))

    def _paired_scores(self, rows: int, vectors: int, first: te.Expr, count: int) -> Iterator[Stmt]:
        """Tile by tile of the keys, which stays in L1 for all queries."""
        size = self.keys_of_a_tile
        whole, rest = divmod(count, size)
        number, vector = te.Var("key_t", whole), te.Var("vector", vectors)
        tile = _PairedTile(vector, 1, number * size, size)
        loops = [(number, Kind.SERIAL), (vector, Kind.SERIAL)]
        yield nest(loops, self.score_tile(tile, rows, first, self.weights))
        if rest:
            tile = _PairedTile(vector, 1, te.as_index(whole * size), rest)
            yield nest(loops[1:], self.score_tile(tile, rows, first, self.weights))

    def key_at(self, tile: ScoreTile, first: te.Expr, column: te.Expr) -> te.Expr:
        return self.at(self.unit_keys, (first + tile.in_block) * self.operands.width + column)

    def products(self, tile: ScoreTile, register: Buffer, first: te.Expr) -> list[Stmt]:
        row = self.row_of(tile)
        in_tile = [*tile.loops, (self.lane, Kind.VECTOR)]
        element = tile.vector * self.lanes + self.lane
        key_size = self.at(self.key_size, first + tile.in_block)
        score = self.at(register, element) * key_size * self.at(self.query_size, row)
        resized = nest(in_tile, Store(register, element, score))
        products = self._in_pairs_of_columns if isinstance(tile, _PairedTile) else super().products
        return [*products(tile, register, first), resized]

    def _in_pairs_of_columns(self, tile: ScoreTile, register: Buffer, first: te.Expr) -> list[Stmt]:
        row = self.row_of(tile)
        in_row = [(tile.u, Kind.UNROLL), (self.lane, Kind.VECTOR)]
        element = tile.vector * self.lanes + self.lane

        def of(key: int, expr: te.Expr) -> te.Expr:
            return te.substitute(expr, {tile.key: te.as_index(key)})

        def begin(key: int) -> Stmt:
            cross = self.at(self.query_cross, row) + self.at(self.key_cross, first + tile.in_block)
            return nest(
                in_row, Store(register, of(key, element), of(key, cross) if is_paired(key) else _ZERO)
            )

        def pair(column: te.Expr, even: bool) -> Stmt:
            columns = column, column + self.half
            low, high = (self.at(self.qt, d * self.rows + row) for d in columns)

            def accumulated(key: int) -> Iterator[Store]:
                a1, a2 = (of(key, self.key_at(tile, first, d)) for d in columns)
                return _accumulated(register, of(key, element), (a1, a2), (low, high), is_paired(key))

            return block(*(nest(in_row, store) for key in range(tile.count) for store in accumulated(key)))

        j = te.Var("j", self.half // 2)
        summed = nest([(j, Kind.SERIAL)], block(pair(j * 2, True), pair(j * 2 + 1, False)))
        return [*(begin(key) for key in range(tile.count)), summed]

    def weights(self, tile: ScoreTile, register: Buffer) -> Stmt:
        """p = the weights of a tile times the sizes of values; the sums of both."""
        in_row = [(tile.u, Kind.UNROLL), (self.lane, Kind.VECTOR)]
        row, position = self.row_of(tile), tile.u * self.lanes + self.lane
        element = tile.vector * self.lanes + self.lane
        weight = te.Load(register, (element,))
        size = self.at(self.value_size, tile.in_block)
        held = Buffer("totals", DType.F32, tile.vectors * self.lanes, Scope.REGISTER)
        also_held = Buffer("weights", DType.F32, tile.vectors * self.lanes, Scope.REGISTER)
        totals, weighed = (te.Load(buffer, (position,)) for buffer in (held, also_held))
        kept = (
            (totals, te.Load(self.total, (row,))),
            (weighed, te.Load(self.weighed, (row,))),
        )
        stores = (
            set_to(weight, te.call("exp2_rough", weight)),
            set_to(totals, totals + weight),
            set_to(weight, weight * size),
            Store(self.p, self.score(tile.u + tile.start, tile.in_block) + self.lane, weight),
            set_to(weighed, weighed + weight),
        )
        each = block(*(nest([(self.lane, Kind.VECTOR)], store) for store in stores))
        return block(
            *(nest(in_row, set_to(sum_, before)) for sum_, before in kept),
            nest(tile.loops, each),
            *(nest(in_row, set_to(before, sum_)) for sum_, before in kept),
        )

    def weights_again(self, rows: int, vectors: int, first: te.Expr, count: int) -> Stmt:
        u, key = te.Var("u", vectors), te.Var("k", count)
        position = self.score(u, key) + self.lane
        row = u * self.lanes + self.lane
        times_size = Store(self.p, position, self.at(self.p, position) * self.at(self.value_size, key))
        summed = Store(self.weighed, row, self.at(self.weighed, row) + self.at(self.p, position))
        loops = [(u, Kind.SERIAL), (key, Kind.SERIAL), (self.lane, Kind.VECTOR)]
        return block(
            super().weights_again(rows, vectors, first, count),
            self.each(vectors, self.weighed, _ZERO),
            nest(loops, block(times_size, summed)),
        )

    def _shares(self, vectors: int) -> Iterator[Stmt]:
        """The factors for the weights of a query, which make their mean 1, and for sums of values."""
        row = te.Var("u", vectors) * self.lanes + self.lane
        total, weighed = self.at(self.total, row), self.at(self.weighed, row)
        keys = te.const(self.operands.keys, DType.F32)

        def quotient(a: te.Expr, b: te.Expr) -> te.Expr:
            return te.select(te.call("eq", b, _ZERO), 0.0, a / b)

        yield self.each(vectors, self.share, quotient(keys, weighed))
        yield self.each(vectors, self.fade, quotient(weighed, keys * total))

    def _evened_weights(self, vectors: int) -> Stmt:
        """p = p * share, and the products of pairs of keys."""
        vector = te.Var("vector", vectors)
        row = vector * self.lanes + self.lane

        def position(key: te.Expr) -> te.Load:
            return te.Load(self.p, (self.score(vector, key) + self.lane,))

        def evened(key: te.Expr) -> te.Expr:
            return position(key) * self.at(self.share, row)

        cross = te.Load(self.weight_cross, (row,))
        return nest([(vector, Kind.SERIAL)], self._in_pairs_of_keys(evened, position, cross))

    # -- sums of values -------------------------------------------------------------------------------------------

    def weighted(self, rows: int, first: te.Expr, count: int) -> Stmt:
        group, rest = te.Var("group", rows // self.lanes), rows % self.lanes
        vector = te.Var("vector", self.operands.values // self.lanes)
        stmts: list[Stmt] = []
        if group.extent:
            stmts.append(nest([(group, Kind.SERIAL)], self._values_tile(group, self.lanes, vector)))
        if rest:
            stmts.append(self._values_tile(te.as_index(group.extent), rest, vector))
        return nest([(vector, Kind.SERIAL)], block(*stmts))

    def _values_tile(self, group: te.Expr, rows: int, vector: te.Expr) -> Stmt:
        """out = the sums over all keys of `rows` rows of a group and a vector of values."""
        lanes, keys = self.lanes, self.operands.keys
        register = Buffer("sum", DType.F32, rows * lanes, Scope.REGISTER)
        column = vector * lanes + self.lane

        def element(r: int) -> te.Expr:
            return self.lane + r * lanes

        def value(key: te.Expr) -> te.Expr:
            return self.at(self.unit_values, (vector * keys + key) * lanes + self.lane)

        def weight(key: te.Expr, r: int) -> te.Expr:
            return self.at(self.p, self.score(group, key) + r)

        def in_rows(stores: Callable[[int], Iterable[Store]]) -> Stmt:
            return block(
                *(nest([(self.lane, Kind.VECTOR)], store) for r in range(rows) for store in stores(r))
            )

        def begin(r: int) -> Iterator[Store]:
            cross = self.at(self.value_cross, column) + self.at(self.weight_cross, group * lanes + r)
            yield Store(register, element(r), cross if is_paired(r) else _ZERO)

        def pair(key: te.Expr, even: bool) -> Stmt:
            b = value(key), value(key + 1)
            return in_rows(
                lambda r: _accumulated(
                    register, element(r), (weight(key, r), weight(key + 1, r)), b, is_paired(r)
                )
            )

        def single(r: int) -> Iterator[Store]:
            last = te.as_index(keys - 1)
            total = self.at(register, element(r))
            yield Store(register, element(r), te.call("fma", weight(last, r), value(last), total))

        def end(r: int) -> Iterator[Store]:
            row = group * lanes + r
            yield self.result(row, column, self.at(register, element(r)) * self.at(self.fade, row))

        return block(in_rows(begin), *_in_pairs("k", keys, pair, lambda _: in_rows(single)), in_rows(end))


def is_paired(number: int) -> bool:
    """Whether an element of a register tile is computed with the adders' help."""
    return number % _PLAIN != _PLAIN - 1


def _accumulated(
    register: Buffer, position: te.Expr, a: tuple[te.Expr, te.Expr], b: tuple[te.Expr, te.Expr], paired: bool
) -> Iterator[Store]:
    """a1 b1 + a2 b2, added to the element at `position`; a1 and a2 are broadcast."""
    (a1, a2), (b1, b2), total = a, b, te.Load(register, (position,))
    if paired:
        yield Store(register, position, te.call("fma", b2 + a1, b1 + a2, total))
    else:
        yield Store(register, position, te.call("fma", a1, b1, total))
        yield Store(register, position, te.call("fma", a2, b2, total))


def _in_pairs(
    name: str, count: int, pair: Callable[[te.Expr, bool], Stmt], single: Callable[[te.Expr], Stmt]
) -> Iterator[Stmt]:
    """`count` numbers by pairs, even and odd ones in turn; a last number without another is single."""
    whole, rest = divmod(count, 4)
    number = te.Var(name + "_p", whole)
    if whole:
        yield nest([(number, Kind.SERIAL)], block(pair(number * 4, True), pair(number * 4 + 2, False)))
    if rest >= 2:
        yield pair(te.as_index(whole * 4), True)
    if rest % 2:
        yield single(te.as_index(count - 1))


def _sum(numbers: Sequence[te.Expr]) -> te.Expr:
    """Add by halves, so that few additions wait for others."""
    if len(numbers) == 1:
        return numbers[0]
    middle = len(numbers) // 2
    return _sum(numbers[:middle]) + _sum(numbers[middle:])


def _size(squares: te.Expr, width: int) -> te.Expr:
    """The root mean square of `width` numbers; 0 where there is nothing but zeros, so that what is computed of them is
    nothing, too; 1 where it is no number to divide by: infinity and NaN stay what they are, where they are."""
    root = te.select(te.call("lt", squares, _HUGE), te.call("sqrt", squares * (1.0 / width)), 1.0)
    return te.select(te.call("lt", squares, _TINY), 0.0, root)


def _inverse(size: te.Expr) -> te.Expr:
    return te.select(te.call("eq", size, _ZERO), 1.0, te.const(1, DType.F32) / size)
