"""Attention with a knob `paired`: both of its matmuls by Winograd's inner-product trick (`attention_nest.py`).

It is the template of `templates/cpu/attention.py` in all else, and has its name: a config without pairs is one of it.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.dtypes import DType
from tilewright.graph.attention import attention_in
from tilewright.hw import CpuMachine
from tilewright.numerics import is_strict, may_lose_digits
from tilewright.space.space import Config, Knob, Value
from tilewright.space.template import Applied, Terms, Work
from tilewright.space.templates.attention import Operands
from tilewright.space.templates.cpu.attention import (
    DRAINING,
    NAME,
    TRANSPOSING,
    AppliedAttention,
    shape_of,
)
from tilewright.space.templates.cpu.attention_nest import AttentionNest
from tilewright.space.templates.cpu.fast_algebra.attention_nest import PairedAttentionNest
from tilewright.support.arith import ceil_div

_PAIRED = 2 / 3  # of an FMA: what a product takes where adders take part
_PAIRED_WEIGHT = 14  # instructions of a score's size, weight and sums
_UNIT = 6.0  # cycles for a vector that is brought to unit size


class PairedAttention:
    name = NAME

    def apply(self, work: Work) -> Applied | None:
        node = attention_in(work.task.graph)
        if node is None or is_strict(work.numerics):
            return None
        return AppliedPairedAttention(work, Operands(work.task.graph, node))


def is_pairable(operands: Operands, machine: CpuMachine) -> bool:
    lanes = machine.lanes(DType.F32)
    whole = operands.width % (2 * lanes) == 0 and operands.values % lanes == 0
    return machine.independent_adds and whole and operands.keys >= lanes


class AppliedPairedAttention(AppliedAttention):
    def __init__(self, work: Work, operands: Operands) -> None:
        super().__init__(work, operands)
        self.may_pair = may_lose_digits(work.numerics) and is_pairable(operands, work.machine)

    def knobs(self) -> tuple[Knob, ...]:
        return (*super().knobs(), Knob("paired", (False, True) if self.may_pair else (False,)))

    def is_legal(self, values: Mapping[str, Value]) -> bool:
        if not _is_paired(values):
            return super().is_legal(values)
        operands, shape = self.operands, shape_of(values)
        if shape.keys < operands.keys or shape.staged != operands.half:
            return False
        nest, staged = self.nest_of(values), operands.keys * (operands.width + operands.values)
        return self.can_share(nest, staged=True) and self.fits(nest, staged)

    def nest_of(self, values: Mapping[str, Value]) -> AttentionNest:
        if not _is_paired(values):
            return super().nest_of(values)
        return PairedAttentionNest(self.operands, self.machine, shape_of(values))

    def terms(self, config: Config) -> Terms:
        nest = self.nest_of(dict(config.values))
        if not isinstance(nest, PairedAttentionNest):
            return super().terms(config)
        operands, lanes = self.operands, self.lanes
        keys, width, columns = operands.keys, operands.width, operands.values // self.lanes
        spilled = 4 * keys * nest.rows > 0.75 * self.machine.caches.l1
        arithmetic = loads = stores = from_l2 = scalar = 0.0
        for rows, vectors, _ in self.blocks(nest.shape):
            tiles, groups = ceil_div(keys, nest.keys_of_a_tile), ceil_div(rows, lanes)
            products = keys * (width * vectors + rows * columns)
            arithmetic += _PAIRED * products + _PAIRED_WEIGHT * keys * vectors
            # Of elements, two are read in a cycle in which one vector would be.
            loads += products / 2 + width * tiles * vectors + keys * columns * groups + 2 * keys * vectors
            stores += 2 * keys * vectors
            scalar += width * (rows * TRANSPOSING + vectors * _UNIT)
            scalar += (tiles * vectors + groups * columns) * DRAINING
            from_l2 += 4 * keys * (width + operands.values) + (8 + 4 * columns) * keys * rows * spilled
        scalar += nest.chunk.extent * keys * (width // lanes + columns) * _UNIT
        return self.of_all_heads(
            nest, arithmetic=arithmetic, loads=loads, stores=stores, from_l2=from_l2, scalar=scalar
        )


def _is_paired(values: Mapping[str, Value]) -> bool:
    return bool(values.get("paired", False))
