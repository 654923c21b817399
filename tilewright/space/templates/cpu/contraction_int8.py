"""Matrix products and convolutions of bytes, four taps at a time, summed exactly in i32.

The loops are those of `contraction.py`; a tap is a word of four neighbouring bytes along the innermost axis of the sum:

    acc[rows, vectors] = start
    for words: acc = dot4(data[row, word], panel[word, :], acc)

A panel holds, for every word of taps, the four bytes of each of its columns. `dot4` multiplies unsigned bytes by signed
ones, so where data and weight are of one kind the data is moved by 128 to the other (its sign bit is turned over in
scratch memory), and that is taken off again, 128 times the sum of the weight's column: what the accumulators start at.

    sum x w = sum (x + 128) w - 128 sum w      (both signed)
    sum x w = sum (x - 128) w + 128 sum w      (both unsigned)

The data is read where it lies if words do not straddle what belongs together, else staged with its innermost axis
filled up to whole words; the weight is zero there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tilewright import te
from tilewright.dtypes import DType
from tilewright.loops.ir import Buffer, Kind, Scope, Stmt, Store, block, nest
from tilewright.loops.tiling import (
    PackedOperand,
    Walked,
    blocks_of,
    extent_of,
    pack_operand,
    place_along,
    places_in,
    whole,
)
from tilewright.space.space import Config
from tilewright.space.template import Applied, Terms, Work
from tilewright.space.templates.cpu.contraction import AppliedContraction, Shape
from tilewright.space.templates.cpu.contraction_nest import ContractionNest
from tilewright.space.templates.cpu.product import (
    BlockedProduct,
    Coordinate,
    Product,
    Staged,
    coordinates,
    product_of,
)
from tilewright.support.arith import ceil_div
from tilewright.te.index import Linear, linear

NAME = "contraction_int8"
_BYTES = (DType.I8, DType.U8)
_WORD = DType.I32
_TAPS = _WORD.bytes  # taps in a word
_SIGN_BITS = (
    -0x7F7F7F80
)  # 0x80 in each byte of a word: 128 where bytes are unsigned, -128 where they are signed
_FEWEST_LANES = 4
_WIDE_TILE = 0.5  # cycles a step for each vector beyond four: measured, a load of weights serves too few rows
_PAIRS_INSTRUCTIONS = (
    4.5  # of a dot4 made of 16-bit multiply-adds: two of them, two additions, a share of widening
)


class ContractionInt8:
    name = NAME

    def apply(self, work: Work) -> Applied | None:
        product = product_of(work.formula)
        if product is None or isinstance(product, BlockedProduct):
            return None
        if not _can_be_packed(product) or not _has_dot4(work):
            return None
        words = words_of(product)
        if words is None:
            return None
        applied = _Applied(work, words, words.coordinates)
        return applied if applied.lanes >= _FEWEST_LANES else None


def _has_dot4(work: Work) -> bool:
    return work.machine.dot4_bytes > 0 or "sse2" in work.machine.features


def _can_be_packed(product: Product) -> bool:
    load = product.weight_load
    readers = [x for e in product.formula.expressions() for x in te.loads(e) if x.source == load.source]
    axes = (*product.shared, product.vector, *product.reduction.axes)
    walk = [whole(axis) for axis in axes if axis in te.variables(load)]
    return product.constant_weight and len(readers) == 1 and pack_operand(load, walk) is not None


@dataclass(frozen=True)
class WordProduct(Product):
    """A product of bytes whose innermost taps are taken in words. `data` is a load of words, or has to be staged."""

    bytes_of_data: te.Expr
    words: te.Var
    coordinates: tuple[Coordinate, ...] | None  # of the data, the last one in words

    @property
    def last_tap(self) -> te.Var:
        return self.reduction.axes[-1]

    @property
    def taps(self) -> tuple[te.Var, ...]:
        return (*self.reduction.axes[:-1], self.words)

    @property
    def weight_bytes(self) -> int:
        return _WORD.bytes

    @property
    def turned(self) -> bool:
        """Whether the data's sign bits are turned over."""
        return self.bytes_of_data.dtype is self.weight_load.dtype

    @property
    def filled_up(self) -> bool:
        """Whether the last word of the innermost taps is not whole."""
        return self.last_tap.extent % _TAPS != 0


def words_of(product: Product) -> WordProduct | None:
    """The product in words; None where it is not one of bytes, or its data cannot be had in words."""
    data, weight = product.data, product.weight
    if not (isinstance(data, te.Cast) and isinstance(weight, te.Cast)):
        return None
    if data.dtype is not _WORD or data.value.dtype not in _BYTES or weight.value.dtype not in _BYTES:
        return None
    tap = product.reduction.axes[-1]
    if tap not in te.variables(weight):
        return None
    words = te.Var(tap.name + "_w", ceil_div(tap.extent, _TAPS))
    dims = coordinates(product)
    if dims is not None:
        dims = (*dims[:-1], Coordinate(None, words)) if dims and dims[-1] == Coordinate(None, tap) else None
    turned = data.value.dtype is weight.value.dtype
    in_place = None if turned else _word_load(data.value, tap, words)
    if in_place is None and dims is None:
        return None
    return WordProduct(product.formula, in_place or data, weight, product.vector, data.value, words, dims)


def _word_load(data: te.Expr, tap: te.Var, words: te.Var) -> te.Load | None:
    """The data as words where it lies; None where they would not be whole, or not its neighbours."""
    if not isinstance(data, te.Load) or tap.extent % _TAPS:
        return None
    form = linear(data.indices[0])
    steps = {atom: step for atom, step in form.terms.items() if atom != tap}
    if form.terms.get(tap) != 1 or any(step % _TAPS for step in (form.constant, *steps.values())):
        return None
    in_words = {atom: step // _TAPS for atom, step in steps.items()}
    place = Linear({**in_words, words: 1}, form.constant // _TAPS).expr()
    assert isinstance(data.source, Buffer)
    return te.Load(data.source.read_as(_WORD), (place,))


class _Applied(AppliedContraction):
    name = NAME
    narrows = False
    product: WordProduct

    def __init__(self, work: Work, product: WordProduct, dims: tuple[Coordinate, ...] | None) -> None:
        super().__init__(work, product, dims)
        self.one_instruction = _WORD.bytes * self.lanes <= work.machine.dot4_bytes
        self.instructions = 1.0 if self.one_instruction else _PAIRS_INSTRUCTIONS

    def _registers(self, shape: Shape) -> int:
        widened = 0 if self.one_instruction else shape.vectors + 4
        return super()._registers(shape) + widened

    def terms(self, config: Config) -> Terms:
        terms = super().terms(config)
        shape = self.shape_of(dict(config.values))
        repeats = extent_of(self.product.shared) * shape.blocks * shape.chunks * shape.per_chunk
        steps = repeats * self._tiles_per_block(shape) * self.product.length
        terms = replace(terms, scalar=terms.scalar + steps * max(0, shape.vectors - 4) * _WIDE_TILE)
        if not self.product.turned:
            return terms
        summed = float(repeats * self.product.length * shape.vectors)
        return replace(
            terms, arithmetic=terms.arithmetic + summed * self.instructions, loads=terms.loads + summed
        )

    def nest_of(self, shape: Shape) -> ContractionNest:
        return _Nest(self, shape)


class _Nest(ContractionNest):
    product: WordProduct

    def __init__(self, applied: _Applied, shape: Shape) -> None:
        super().__init__(applied, shape)
        self.staging_lanes = applied.machine.vector_bytes  # of bytes
        self.starts = Buffer("starts", _WORD, shape.panels.size, Scope.SCRATCH)

    # -- operands ---------------------------------------------------------------------------------------------------

    def _packed_weight(self) -> PackedOperand | None:
        product, panels = self.product, self.shape.panels
        load, tap = product.weight_load, product.last_tap
        moving = te.variables(load.indices[0])
        walk = [
            *(whole(axis) for axis in product.shared if axis in moving),
            blocks_of(panels, self.which_panel),
            *(whole(axis) for axis in product.reduction.axes[:-1] if axis in moving),
            Walked(tap, _TAPS, product.words, places=False),
            places_in(panels, self.vec * self.lanes + self.lane),
        ]
        each = Walked(tap, _TAPS, te.as_index(0), places=True)
        packed = pack_operand(load, [*walk, each], zero_filled=[tap] if product.filled_up else [])
        assert packed is not None, "`_can_be_packed` said otherwise"
        return replace(packed, load=te.Load(packed.buffer.read_as(_WORD), (place_along(walk),)))

    def weight_element(self) -> te.Expr:
        assert self.packed is not None
        return self.packed.load

    def _stage(self) -> Staged:
        assert self.dims is not None
        size = _TAPS * math.prod(self.staged_extents)
        kept = Buffer("staged", self.product.bytes_of_data.dtype, size, Scope.SCRATCH)
        return Staged(kept.read_as(_WORD), self.dims, self.staged_extents)

    def _fill(self, staged: Staged, data: te.Expr) -> Stmt:
        product, kept = self.product, staged.buffer.memory
        dims = (*staged.coordinates[:-1], Coordinate(None, product.last_tap))
        in_bytes = Staged(kept, dims, (*staged.extents[:-1], _TAPS * staged.extents[-1]))
        if not product.filled_up:
            return super()._fill(in_bytes, product.bytes_of_data)
        zero = te.const(0, kept.dtype)
        clear = self._along(0, kept.size, lambda at: Store(kept, at, zero))
        extents = (*staged.extents[:-1], product.last_tap.extent)
        places = [te.Var(f"s{n}", extent) for n, extent in enumerate(extents)]
        value = self._at_places(product.bytes_of_data, in_bytes, places)
        return block(*clear, self._fill_vectors(in_bytes, places, value))

    def _as_staged(self, value: te.Expr) -> te.Expr:
        if not self.product.turned:
            return value
        sign_bit = te.const(-128 if value.dtype is DType.I8 else 128, value.dtype)
        return te.call("xor", value, sign_bit)

    # -- the register tile ------------------------------------------------------------------------------------------

    def _update(self, data: te.Expr, weight: te.Expr, kept: te.Expr) -> te.Expr:
        if self.product.weight_load.dtype is DType.I8:
            return te.call("dot4", data, weight, kept)
        return te.call("dot4", weight, data, kept)

    def before_tiles(self) -> list[Stmt]:
        """What the accumulators of each column start at: what turning the data's sign bits over adds, taken off."""
        if not self.product.turned:
            return []
        sums = Buffer("sums", _WORD, self.shape.panels.size, Scope.REGISTER)
        place = self.vec * self.lanes + self.lane
        in_panel = [(self.vec, Kind.UNROLL), (self.lane, Kind.VECTOR)]
        zero, kept = te.const(0, _WORD), te.Load(sums, (place,))
        added = self._update(te.const(_SIGN_BITS, _WORD), self.weight_element(), kept)
        taps = [(tap, Kind.SERIAL) for tap in self.taps]
        return [
            nest(in_panel, Store(sums, place, zero)),
            nest([*taps, *in_panel], Store(sums, place, added)),
            nest(in_panel, Store(self.starts, place, te.call("sub", zero, kept))),
        ]

    def _first_value(self) -> te.Expr:
        if not self.product.turned:
            return super()._first_value()
        return te.Load(self.starts, (self.vec * self.lanes + self.lane,))
