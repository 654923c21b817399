"""Attention in one kernel: softmax(scale q k' + mask) v, a block of queries at a time, the scores never in memory.

    for every head, for blocks of queries:                          (a head's blocks in one or several parallel chunks)
      qt[d, row] = scale * log2(e) * q[row, d]                      (transposed into scratch: rows are lanes)
      top[row] = lowest; total[row] = 0; acc[row, e] = 0
      for blocks of keys:                                           (causal: those that some query of the block sees)
        for tiles of keys: p[key, row] = mask(sum over d of k[key, d] * qt[d, row]); top = max(top, p)
        fade[row] = 2^(top before - top)
        p[key, row] = 2^(p[key, row] - top[row]); total = total * fade + sum over keys of p
        for pieces of the keys, for tiles of rows:                  (acc fades with the first piece)
          acc[row, e] = acc[row, e] * fade[row] + sum over keys of p[key, row] * v[key, e]
      out[row, e] = acc[row, e] / total[row]

Queries are the lanes of the scores, so keys are read where they lie, element by element, maxima and sums never cross
lanes, and the second product finds what it broadcasts side by side. Where all keys are one block nothing fades, and the
result goes straight from registers to its place. Scores become weights there while they are in registers:

        for tiles of keys: p[key, row] = 2^mask(sum over d of k[key, d] * qt[d, row]); total = total + p

Their quotients are the same as relative to the largest, unless the weights of a query come to more than floats have
room for, or to so little that small ones are missed. Few queries have such scores; if one has, those of its block are
computed again and weighed as above. Sums of values have such weights until they are divided: beyond 1e18 they may come
to infinity, and below 1e-18 to nothing, where the result would not.

The second product reads v once for every few queries: a piece of it at a time, which stays in the first cache while all
queries of the block pass, or in the second where that gives values faster than they are multiplied. It is slower by a
third where vectors of v straddle cache lines: v can be staged, once for all the blocks of a chunk.

Where a core adds vectors beside those that it multiplies, both products can take a third less: `attention_paired.py`.

Scores are kept times log2(e), so that their weights are powers of two. `top` begins at the lowest finite number: a
query that sees nothing has only zeros for weights, and their sum says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property

from tilewright.dtypes import DType
from tilewright.graph.attention import attention_in
from tilewright.loops.ir import Program
from tilewright.numerics import is_strict, may_lose_digits
from tilewright.space.space import Config, Knob, Space, Value
from tilewright.space.template import Applied, Terms, Work
from tilewright.space.templates.attention import Operands
from tilewright.space.templates.cpu.attention_nest import UNROLL, WIDE, AttentionNest, Shape, even_parts
from tilewright.space.templates.cpu.attention_paired import PairedNest, is_pairable

NAME = "attention"
_SCRATCH = 512 << 10
_EXP = 16  # instructions of a score's maximum, weight and sum
_WEIGHT = 10  # of its weight and sum, where it is in a register
_PAIRED = 2 / 3  # of a multiply-add, what a product takes where adders take part
_PAIRED_WEIGHT = 14  # instructions of a score's size, weight and sums
_UNIT = 6.0  # cycles for a vector that is brought to unit size
_TRANSPOSING = 1.0  # cycles for an element of q
_DRAINING = 30.0  # cycles between two register tiles in which the ports are not full
_FADING = 400.0  # cycles for a vector of rows that more keys follow: what was summed is read, scaled and written again
_STAGING = 2.0  # cycles for a vector
# By which part the second product is slower where values are not staged: their lines meet in few sets of the first
# cache. Side by side they begin with a line, since the arena and tensors do; only an array of a caller may not.
_APART, _STRADDLING = 0.5, 0.03


class Attention:
    name = NAME

    def apply(self, work: Work) -> Applied | None:
        node = attention_in(work.task.graph)
        if node is None or is_strict(work.numerics):
            return None
        return _Applied(work, Operands(work.task.graph, node))


# -- the space --------------------------------------------------------------------------------------------------------


class _Applied:
    def __init__(self, work: Work, operands: Operands) -> None:
        self.machine, self.operands = work.machine, operands
        self.may_pair = may_lose_digits(work.numerics) and is_pairable(operands, work.machine)
        self.lanes = work.machine.lanes(DType.F32)

    @cached_property
    def space(self) -> Space:
        operands = self.operands
        most = -(-operands.queries // self.lanes)
        keys = [n for n in (32, 48, 64, 96, 128, 192, 256, 384, 512) if n < operands.keys]
        return Space(
            NAME,
            (
                Knob("vectors", tuple(range(1, min(most, 8) + 1))),
                Knob("keys", (*keys, operands.keys)),
                Knob("stage", (True,) if operands.half else (False, True)),
                Knob("together", tuple(1 << n for n in range((most - 1).bit_length() + 1))),
                Knob("paired", (False, True) if self.may_pair else (False,)),
            ),
            lambda values: self._is_legal(_shape(values)),
            together=(("vectors", "keys", "stage", "together", "paired"),),
        )

    def _is_legal(self, shape: Shape) -> bool:
        operands = self.operands
        if shape.paired and (shape.keys < operands.keys or shape.staged != operands.half):
            return False
        nest = self._nest(shape)
        shares = nest.staged or shape.paired
        if shape.together > 1 and not (shares and shape.together < 2 * nest.block.extent):
            return False
        held = nest.rows * (operands.width + nest.padded + shape.keys)
        if shape.paired:
            staged = operands.keys * (operands.width + operands.values)
        else:
            staged = nest.padded * nest.staged + nest.padded_width * operands.half
            staged *= operands.keys if nest.ahead else shape.keys
        return 4 * (held + staged) <= _SCRATCH

    def _nest(self, shape: Shape) -> AttentionNest:
        return (PairedNest if shape.paired else AttentionNest)(self.operands, self.machine, shape)

    def terms(self, config: Config) -> Terms:
        shape, operands, caches = _shape(dict(config.values)), self.operands, self.machine.caches
        nest = self._nest(shape)
        if isinstance(nest, PairedNest):
            return self._paired_terms(shape, nest)
        width, columns = operands.width, nest.padded // nest.value_lanes
        unstaged = 0.0 if nest.staged else _STRADDLING if operands.values_are_dense else _APART
        spilled = 4 * shape.keys * nest.rows > 0.75 * caches.l1
        arithmetic = loads = stores = branches = from_l2 = scalar = 0.0
        for rows, vectors, keys in self._blocks(shape):
            groups = even_parts(vectors, WIDE)
            tiles = [
                (size, tile)
                for _, size in even_parts(columns, WIDE)
                for part in (self.lanes,) * (rows // self.lanes) + (rows % self.lanes,)
                for _, tile in nest.row_tiles(part, size)
            ]
            passes = [shape.keys] * (keys // shape.keys) + [keys % shape.keys] * (keys % shape.keys > 0)
            arithmetic += keys * (rows * columns + (_WEIGHT if nest.one_block else _EXP) * vectors)
            arithmetic += keys * width * vectors
            for _, size in groups:
                count = sum(-(-part // nest.key_tile(size)) for part in passes)
                loads += width * (keys + count * size)
                branches += count * width / UNROLL
                scalar += count * _DRAINING
            loads += sum(keys * (size + tile) for size, tile in tiles) + keys * vectors * (not nest.one_block)
            stores += keys * vectors * (1 if nest.one_block else 2)
            branches += keys * (len(tiles) / UNROLL + len(groups))
            pieces = sum(nest.pieces(part) for part in passes)
            kept = (pieces - nest.one_block) * rows * columns
            arithmetic += len(passes) * rows * columns
            loads, stores = loads + kept, stores + kept
            scalar += width * rows * _TRANSPOSING + pieces * len(tiles) * _DRAINING
            scalar += len(passes) * vectors * _FADING * (not nest.one_block)
            scalar += keys * columns * _STAGING * (nest.staged and not nest.ahead)
            scalar += unstaged * keys * rows * columns / 2
            from_l2 += 4 * keys * (width * len(groups) + operands.values)
            from_l2 += (8 if nest.one_block else 12) * keys * rows * spilled
        scalar += nest.chunk.extent * operands.keys * columns * _STAGING * nest.ahead
        return self._of_all_heads(
            nest,
            arithmetic=arithmetic,
            loads=loads,
            stores=stores,
            branches=branches,
            from_l2=from_l2,
            scalar=scalar,
        )

    def _of_all_heads(self, nest: AttentionNest, **terms: float) -> Terms:
        operands = self.operands
        moved = sum(x.size * x.dtype.bytes for x in (*operands.inputs, operands.output))
        counted = {name: operands.heads * of_head for name, of_head in terms.items()}
        return Terms(from_l3=moved, iterations=operands.heads * nest.chunk.extent, **counted)

    def _paired_terms(self, shape: Shape, nest: PairedNest) -> Terms:
        operands, lanes = self.operands, self.lanes
        keys, width, columns = operands.keys, operands.width, operands.values // self.lanes
        spilled = 4 * keys * nest.rows > 0.75 * self.machine.caches.l1
        arithmetic = loads = stores = from_l2 = scalar = 0.0
        for rows, vectors, _ in self._blocks(shape):
            tiles, groups = -(-keys // nest.keys_of_a_tile), -(-rows // lanes)
            products = keys * (width * vectors + rows * columns)
            arithmetic += _PAIRED * products + _PAIRED_WEIGHT * keys * vectors
            # Of elements, two are read in a cycle in which one vector would be.
            loads += products / 2 + width * tiles * vectors + keys * columns * groups + 2 * keys * vectors
            stores += 2 * keys * vectors
            scalar += width * (rows * _TRANSPOSING + vectors * _UNIT)
            scalar += (tiles * vectors + groups * columns) * _DRAINING
            from_l2 += 4 * keys * (width + operands.values) + (8 + 4 * columns) * keys * rows * spilled
        scalar += nest.chunk.extent * keys * (width // lanes + columns) * _UNIT
        return self._of_all_heads(
            nest, arithmetic=arithmetic, loads=loads, stores=stores, from_l2=from_l2, scalar=scalar
        )

    def _blocks(self, shape: Shape) -> Iterator[tuple[int, int, int]]:
        """(queries, their vectors, keys that they are compared with) of every block of a head."""
        operands, rows = self.operands, shape.vectors * self.lanes
        for first in range(0, operands.queries, rows):
            count = min(rows, operands.queries - first)
            keys = operands.keys
            if operands.causal and shape.keys < keys:
                keys = min(keys, -(-(first + count) // shape.keys) * shape.keys)
            yield count, -(-count // self.lanes), keys

    def program(self, config: Config) -> Program:
        return self._nest(_shape(dict(config.values))).program(config)


def _shape(values: Mapping[str, Value]) -> Shape:
    return Shape(
        int(values["vectors"]),
        int(values["keys"]),
        bool(values["stage"]),
        int(values.get("together", 1)),
        bool(values.get("paired", False)),
    )
