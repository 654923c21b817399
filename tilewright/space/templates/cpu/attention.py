"""Attention in one kernel: softmax(scale q k' + mask) v, a block of queries at a time, the scores never in memory.

    for every head, for blocks of queries:                          (a head's blocks in one or several parallel chunks)
      qt[d, row] = scale * log2(e) * q[row, d]                      (transposed into scratch: rows are lanes)
      top[row] = lowest; total[row] = 0; acc[row, e] = 0
      for blocks of keys:                                           (causal: those that some query of the block sees)
        for tiles of keys: p[key, row] = mask(sum over d of k[key, d] * qt[d, row]); top = max(top, p)
        fade[row] = 2^(top before - top)
        p[key, row] = 2^(p[key, row] - top[row]); total = total * fade + sum over keys of p
        for blocks of the keys, for tiles of rows:                  (acc fades with the first block)
          acc[row, e] = acc[row, e] * fade[row] + sum over keys of p[key, row] * v[key, e]
      out[row, e] = acc[row, e] / total[row]

Queries are the lanes of the scores. So keys are read in place, element by element, maxima and sums never cross lanes,
and the elements that the second product broadcasts are contiguous. If all keys form one block, nothing fades, and
results go from registers to the output. Scores then become weights while they are in registers:

        for tiles of keys: p[key, row] = 2^mask(sum over d of k[key, d] * qt[d, row]); total = total + p

The quotients are the same as relative to the maximum, unless the weights of a query overflow, or are so small that
some underflow. Such scores are rare; if a query has them, its block is computed again as above. Sums of values carry
these weights until the division: above 1e18 they may overflow, and below 1e-18 underflow, where the result would not.

The second product reads v once for every few queries, one block at a time. The block stays in L1 while all queries of
the block use it, or in L2 if that delivers values faster than they are multiplied. The product is a third slower if
vectors of v straddle cache lines; v can be staged, once for all the blocks of a chunk.

Scores are scaled by log2(e), so that their weights are powers of two. `top` starts at the lowest finite number: a
query without visible keys has only zero weights, and their sum shows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property

from tilewright.dtypes import DType
from tilewright.graph.attention import attention_in
from tilewright.loops.ir import Program
from tilewright.numerics import is_strict
from tilewright.space.space import Config, Knob, Space, Value
from tilewright.space.template import Applied, Terms, Work
from tilewright.space.templates.attention import Operands
from tilewright.space.templates.cpu.attention_nest import (
    UNROLL,
    WIDE,
    AttentionNest,
    AttentionTiling,
    even_parts,
)
from tilewright.support.arith import ceil_div, round_up

NAME = "attention"
_SCRATCH = 512 << 10
_EXP = 16  # instructions for a score's maximum, weight and sum
_WEIGHT = 10  # instructions for its weight and sum, if it is in a register
TRANSPOSING = 1.0  # cycles for an element of q
DRAINING = 30.0  # cycles between two register tiles in which the FMA ports are not full
_FADING = 400.0  # cycles per vector of rows and block of keys to rescale the accumulators
_STAGING = 2.0  # cycles for a vector
# The slowdown of the second product if values are not staged: their lines map to few sets of L1. Contiguous values
# start at a line boundary, because the arena and tensors do; only a caller's array may not.
_SEPARATE_ROWS, _STRADDLING = 0.5, 0.03


class Attention:
    name = NAME

    def apply(self, work: Work) -> Applied | None:
        node = attention_in(work.task.graph)
        if node is None or is_strict(work.numerics):
            return None
        return AppliedAttention(work, Operands(work.task.graph, node))


# -- the space --------------------------------------------------------------------------------------------------------


class AppliedAttention:
    """Attention applied to a task. A template with another loop nest overrides the methods that differ."""

    def __init__(self, work: Work, operands: Operands) -> None:
        self.machine, self.operands = work.machine, operands
        self.lanes = work.machine.lanes(DType.F32)

    @cached_property
    def space(self) -> Space:
        knobs = self.knobs()
        return Space(NAME, knobs, self.is_legal, together=(tuple(knob.name for knob in knobs),))

    def knobs(self) -> tuple[Knob, ...]:
        operands = self.operands
        most = ceil_div(operands.queries, self.lanes)
        keys = [n for n in (32, 48, 64, 96, 128, 192, 256, 384, 512) if n < operands.keys]
        return (
            Knob("vectors", tuple(range(1, min(most, 8) + 1))),
            Knob("keys", (*keys, operands.keys)),
            Knob("stage", (True,) if operands.half else (False, True)),
            Knob("shared_blocks", tuple(1 << n for n in range((most - 1).bit_length() + 1))),
        )

    def is_legal(self, values: Mapping[str, Value]) -> bool:
        nest, shape = self.nest_of(values), shape_of(values)
        staged = nest.padded * nest.staged + nest.padded_width * self.operands.half
        staged *= self.operands.keys if nest.ahead else shape.keys
        return self.can_share(nest, staged=nest.staged) and self.fits(nest, staged)

    def can_share(self, nest: AttentionNest, *, staged: bool) -> bool:
        """Whether blocks of queries can share staged data, and there are enough blocks."""
        together = nest.shape.shared_blocks
        return together == 1 or (staged and together < 2 * nest.block.extent)

    def fits(self, nest: AttentionNest, staged: int) -> bool:
        """Whether a block of queries and this many elements of keys and values fit in scratch memory."""
        held = nest.rows * (self.operands.width + nest.padded + nest.shape.keys)
        return 4 * (held + staged) <= _SCRATCH

    def nest_of(self, values: Mapping[str, Value]) -> AttentionNest:
        return AttentionNest(self.operands, self.machine, shape_of(values))

    def terms(self, config: Config) -> Terms:
        nest, operands, caches = self.nest_of(dict(config.values)), self.operands, self.machine.caches
        shape = nest.shape
        width, columns = operands.width, nest.padded // nest.value_lanes
        unstaged = 0.0 if nest.staged else _STRADDLING if operands.values_are_dense else _SEPARATE_ROWS
        spilled = 4 * shape.keys * nest.rows > 0.75 * caches.l1
        arithmetic = loads = stores = branches = from_l2 = scalar = 0.0
        for rows, vectors, keys in self.blocks(shape):
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
                count = sum(ceil_div(part, nest.key_tile(size)) for part in passes)
                loads += width * (keys + count * size)
                branches += count * width / UNROLL
                scalar += count * DRAINING
            loads += sum(keys * (size + tile) for size, tile in tiles) + keys * vectors * (not nest.one_block)
            stores += keys * vectors * (1 if nest.one_block else 2)
            branches += keys * (len(tiles) / UNROLL + len(groups))
            value_blocks = sum(nest.value_blocks(part) for part in passes)
            kept = (value_blocks - nest.one_block) * rows * columns
            arithmetic += len(passes) * rows * columns
            loads, stores = loads + kept, stores + kept
            scalar += width * rows * TRANSPOSING + value_blocks * len(tiles) * DRAINING
            scalar += len(passes) * vectors * _FADING * (not nest.one_block)
            scalar += keys * columns * _STAGING * (nest.staged and not nest.ahead)
            scalar += unstaged * keys * rows * columns / 2
            from_l2 += 4 * keys * (width * len(groups) + operands.values)
            from_l2 += (8 if nest.one_block else 12) * keys * rows * spilled
        scalar += nest.chunk.extent * operands.keys * columns * _STAGING * nest.ahead
        return self.of_all_heads(
            nest,
            arithmetic=arithmetic,
            loads=loads,
            stores=stores,
            branches=branches,
            from_l2=from_l2,
            scalar=scalar,
        )

    def of_all_heads(self, nest: AttentionNest, **terms: float) -> Terms:
        operands = self.operands
        moved = sum(x.size * x.dtype.bytes for x in (*operands.inputs, operands.output))
        counted = {name: operands.heads * of_head for name, of_head in terms.items()}
        return Terms(from_l3=moved, iterations=operands.heads * nest.chunk.extent, **counted)

    def blocks(self, shape: AttentionTiling) -> Iterator[tuple[int, int, int]]:
        """(queries, their vectors, keys that they are compared with) for every block of a head."""
        operands, rows = self.operands, shape.vectors * self.lanes
        for first in range(0, operands.queries, rows):
            count = min(rows, operands.queries - first)
            keys = operands.keys
            if operands.causal and shape.keys < keys:
                keys = min(keys, round_up(first + count, shape.keys))
            yield count, ceil_div(count, self.lanes), keys

    def program(self, config: Config) -> Program:
        return self.nest_of(dict(config.values)).program(config)


def shape_of(values: Mapping[str, Value]) -> AttentionTiling:
    return AttentionTiling(
        int(values["vectors"]),
        int(values["keys"]),
        bool(values["stage"]),
        int(values.get("shared_blocks", 1)),
    )
