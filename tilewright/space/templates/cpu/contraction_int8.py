"""Int8 matmuls and convolutions: four steps of K per instruction, accumulated exactly in i32.

The loops are those of `contraction.py`; one step of K is a word of four neighbouring bytes along the innermost axis
of the sum:

    acc[rows, vectors] = start
    for words: acc = dot4(data[row, word], panel[word, :], acc)

A panel holds, for every word of steps of K, the four bytes of each of its columns. `dot4` multiplies unsigned by
signed bytes. If data and weight have the same signedness, the data is shifted by 128 (its sign bit is flipped in
scratch memory), and the accumulators start at the correction: 128 times the sum of the weight's column.

    sum x w = sum (x + 128) w - 128 sum w      (both signed)
    sum x w = sum (x - 128) w + 128 sum w      (both unsigned)

The data is read in place if words do not straddle rows of its innermost axis. Otherwise it is staged with that axis
padded to whole words; the weight is zero there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tilewright import te
from tilewright.dtypes import DType
from tilewright.loops.ir import Buffer, Kind, Scope, Stmt, Store, block, nest
from tilewright.loops.tiling import (
    PackedOperand,
    Walked,
    blocks_of,
    extent_of,
    index_along,
    indices_in,
    pack_operand,
    whole,
)
from tilewright.space.template import Applied, Terms, Work
from tilewright.space.templates.cpu.contraction import AppliedContraction
from tilewright.space.templates.cpu.contraction_nest import ContractionNest
from tilewright.space.templates.cpu.contraction_terms import ContractionTiling
from tilewright.space.templates.cpu.gemm import (
    BlockedGemm,
    Coordinate,
    Gemm,
    StagedOperand,
    coordinates,
    gemm_of,
)
from tilewright.support.arith import ceil_div
from tilewright.support.batch import Number, most
from tilewright.te.index import Linear, linear

NAME = "contraction_int8"
_BYTES = (DType.I8, DType.U8)
_WORD = DType.I32
_K_PER_WORD = _WORD.bytes  # steps of K in a word
_SIGN_BITS = -0x7F7F7F80  # 0x80 in each byte of a word: 128 if bytes are unsigned, -128 if signed
_MIN_LANES = 4
_WIDE_TILE = (
    0.5  # measured cycles per step for each vector beyond four: a load of weights serves too few rows
)
_PAIRS_INSTRUCTIONS = 4.5  # for a dot4 made of 16-bit FMAs: two FMAs, two additions, a share of widening


class ContractionInt8:
    name = NAME

    def apply(self, work: Work) -> Applied | None:
        gemm = gemm_of(work.formula)
        if gemm is None or isinstance(gemm, BlockedGemm):
            return None
        if not _can_be_packed(gemm) or not _has_dot4(work):
            return None
        words = words_of(gemm)
        if words is None:
            return None
        applied = _AppliedInt8(work, words, words.coordinates)
        return applied if applied.lanes >= _MIN_LANES else None


def _has_dot4(work: Work) -> bool:
    return work.machine.dot4_bytes > 0 or "sse2" in work.machine.features


def _can_be_packed(gemm: Gemm) -> bool:
    load = gemm.weight_load
    readers = [x for e in gemm.formula.expressions() for x in te.loads(e) if x.source == load.source]
    axes = (*gemm.shared, gemm.vector, *gemm.reduction.axes)
    walk = [whole(axis) for axis in axes if axis in te.variables(load)]
    return gemm.constant_weight and len(readers) == 1 and pack_operand(load, walk) is not None


@dataclass(frozen=True)
class WordGemm(Gemm):
    """A byte product whose innermost steps of K form words. `data` is a load of words, or must be staged."""

    bytes_of_data: te.Expr
    words: te.Var
    coordinates: tuple[Coordinate, ...] | None  # of the data, the last one in words

    @property
    def last_k(self) -> te.Var:
        return self.reduction.axes[-1]

    @property
    def k_axes(self) -> tuple[te.Var, ...]:
        return (*self.reduction.axes[:-1], self.words)

    @property
    def weight_bytes(self) -> int:
        return _WORD.bytes

    @property
    def transposed(self) -> bool:
        """Whether the data's sign bits are flipped."""
        return self.bytes_of_data.dtype is self.weight_load.dtype

    @property
    def filled_up(self) -> bool:
        """Whether the last word of the innermost steps of K is padded."""
        return self.last_k.extent % _K_PER_WORD != 0


def words_of(gemm: Gemm) -> WordGemm | None:
    """The product in words; None if it is not a byte product, or its data cannot be read in words."""
    data, weight = gemm.data, gemm.weight
    if not (isinstance(data, te.Cast) and isinstance(weight, te.Cast)):
        return None
    if data.dtype is not _WORD or data.value.dtype not in _BYTES or weight.value.dtype not in _BYTES:
        return None
    k = gemm.reduction.axes[-1]
    if k not in te.variables(weight):
        return None
    words = te.Var(k.name + "_w", ceil_div(k.extent, _K_PER_WORD))
    dims = coordinates(gemm)
    if dims is not None:
        dims = (*dims[:-1], Coordinate(None, words)) if dims and dims[-1] == Coordinate(None, k) else None
    transposed = data.value.dtype is weight.value.dtype
    direct = None if transposed else _word_load(data.value, k, words)
    if direct is None and dims is None:
        return None
    return WordGemm(gemm.formula, direct or data, weight, gemm.vector, data.value, words, dims)


def _word_load(data: te.Expr, k: te.Var, words: te.Var) -> te.Load | None:
    """The data as words in place; None if they would be partial or not contiguous."""
    if not isinstance(data, te.Load) or k.extent % _K_PER_WORD:
        return None
    form = linear(data.indices[0])
    steps = {atom: step for atom, step in form.terms.items() if atom != k}
    if form.terms.get(k) != 1 or any(step % _K_PER_WORD for step in (form.constant, *steps.values())):
        return None
    in_words = {atom: step // _K_PER_WORD for atom, step in steps.items()}
    position = Linear({**in_words, words: 1}, form.constant // _K_PER_WORD).expr()
    assert isinstance(data.source, Buffer)
    return te.Load(data.source.read_as(_WORD), (position,))


class _AppliedInt8(AppliedContraction):
    name = NAME
    narrows = False
    gemm: WordGemm

    def __init__(self, work: Work, gemm: WordGemm, dims: tuple[Coordinate, ...] | None) -> None:
        super().__init__(work, gemm, dims)
        self.one_instruction = _WORD.bytes * self.lanes <= work.machine.dot4_bytes
        self.instructions = 1.0 if self.one_instruction else _PAIRS_INSTRUCTIONS

    def _registers(self, rows: Number, vectors: Number, unroll: Number) -> Number:
        widened = 0 if self.one_instruction else vectors + 4
        return super()._registers(rows, vectors, unroll) + widened

    def terms_of(self, values: Mapping[str, Number]) -> Terms:
        terms = super().terms_of(values)
        shape = self.shape_of(values)
        repeats = extent_of(self.gemm.shared) * shape.blocks * shape.chunks * shape.per_chunk
        steps = repeats * self._tiles_per_block(shape) * self.gemm.length
        terms = replace(terms, scalar=terms.scalar + steps * most(0, shape.vectors - 4) * _WIDE_TILE)
        if not self.gemm.transposed:
            return terms
        summed = 1.0 * repeats * self.gemm.length * shape.vectors
        return replace(
            terms, arithmetic=terms.arithmetic + summed * self.instructions, loads=terms.loads + summed
        )

    def nest_of(self, shape: ContractionTiling) -> ContractionNest:
        return _Int8Nest(self, shape)


class _Int8Nest(ContractionNest):
    gemm: WordGemm

    def __init__(self, applied: _AppliedInt8, shape: ContractionTiling) -> None:
        super().__init__(applied, shape)
        self.staging_lanes = applied.machine.vector_bytes  # of bytes
        self.starts = Buffer("starts", _WORD, shape.panels.size, Scope.SCRATCH)

    # -- operands ---------------------------------------------------------------------------------------------------

    def _packed_weight(self) -> PackedOperand | None:
        gemm, panels = self.gemm, self.shape.panels
        load, k = gemm.weight_load, gemm.last_k
        moving = te.variables(load.indices[0])
        walk = [
            *(whole(axis) for axis in gemm.shared if axis in moving),
            blocks_of(panels, self.which_panel),
            *(whole(axis) for axis in gemm.reduction.axes[:-1] if axis in moving),
            Walked(k, _K_PER_WORD, gemm.words, positions=False),
            indices_in(panels, self.vec * self.lanes + self.lane),
        ]
        each = Walked(k, _K_PER_WORD, te.as_index(0), positions=True)
        packed = pack_operand(load, [*walk, each], zero_filled=[k] if gemm.filled_up else [])
        assert packed is not None, "`_can_be_packed` said otherwise"
        return replace(packed, load=te.Load(packed.buffer.read_as(_WORD), (index_along(walk),)))

    def weight_element(self) -> te.Expr:
        assert self.packed is not None
        return self.packed.load

    def _stage(self) -> StagedOperand:
        assert self.dims is not None
        size = _K_PER_WORD * math.prod(self.staged_extents)
        kept = Buffer("staged", self.gemm.bytes_of_data.dtype, size, Scope.SCRATCH)
        return StagedOperand(kept.read_as(_WORD), self.dims, self.staged_extents)

    def _fill(self, staged: StagedOperand, data: te.Expr) -> Stmt:
        gemm, kept = self.gemm, staged.buffer.memory
        dims = (*staged.coordinates[:-1], Coordinate(None, gemm.last_k))
        in_bytes = StagedOperand(kept, dims, (*staged.extents[:-1], _K_PER_WORD * staged.extents[-1]))
        if not gemm.filled_up:
            return super()._fill(in_bytes, gemm.bytes_of_data)
        zero = te.const(0, kept.dtype)
        clear = self._along(0, kept.size, lambda at: Store(kept, at, zero))
        extents = (*staged.extents[:-1], gemm.last_k.extent)
        positions = [te.Var(f"s{n}", extent) for n, extent in enumerate(extents)]
        value = self._at_positions(gemm.bytes_of_data, in_bytes, positions)
        return block(*clear, self._fill_vectors(in_bytes, positions, value))

    def _as_staged(self, value: te.Expr) -> te.Expr:
        if not self.gemm.transposed:
            return value
        sign_bit = te.const(-128 if value.dtype is DType.I8 else 128, value.dtype)
        return te.call("xor", value, sign_bit)

    # -- the register tile ------------------------------------------------------------------------------------------

    def _update(self, data: te.Expr, weight: te.Expr, kept: te.Expr) -> te.Expr:
        if self.gemm.weight_load.dtype is DType.I8:
            return te.call("dot4", data, weight, kept)
        return te.call("dot4", weight, data, kept)

    def before_tiles(self) -> list[Stmt]:
        """Initialise the accumulators of each column with the correction for flipped sign bits."""
        if not self.gemm.transposed:
            return []
        sums = Buffer("sums", _WORD, self.shape.panels.size, Scope.REGISTER)
        position = self.vec * self.lanes + self.lane
        in_panel = [(self.vec, Kind.UNROLL), (self.lane, Kind.VECTOR)]
        zero, kept = te.const(0, _WORD), te.Load(sums, (position,))
        added = self._update(te.const(_SIGN_BITS, _WORD), self.weight_element(), kept)
        taps = [(k, Kind.SERIAL) for k in self.k_axes]
        return [
            nest(in_panel, Store(sums, position, zero)),
            nest([*taps, *in_panel], Store(sums, position, added)),
            nest(in_panel, Store(self.starts, position, te.call("sub", zero, kept))),
        ]

    def _first_value(self) -> te.Expr:
        if not self.gemm.transposed:
            return super()._first_value()
        return te.Load(self.starts, (self.vec * self.lanes + self.lane,))
