"""A norm of the rows of a block, as a stage of `chain.py`: what it costs, and the scratch memory that it needs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from tilewright import te
from tilewright.dtypes import DType
from tilewright.hw import CpuMachine
from tilewright.loops.formula import Formula
from tilewright.loops.row_plan import row_plan_of
from tilewright.space.row_norm import RowNorm, instructions
from tilewright.space.template import Terms
from tilewright.support.arith import ceil_div

# Cycles for an element of a norm's result that the next stage reads, fitted to the norms before linear layers of
# `benchmarks/results/fusion_blocks.md`, where one kernel takes 1% to 23% longer than two.
_READ_BACK = 1.0
_ACROSS = 9.0  # instructions until the lanes of a reduction are one value


@dataclass(frozen=True)
class BlockNorm:
    norm: RowNorm
    machine: CpuMachine
    is_last: bool  # of its chain

    @property
    def formula(self) -> Formula:
        return self.norm.formula

    @cached_property
    def scratch_bytes(self) -> int:
        """Bytes of the values that a pass keeps for the result."""
        kept = row_plan_of(self.formula, self.machine, on_chip=True).kept
        return 0 if kept is None else kept.buffer.size * kept.buffer.dtype.bytes

    @cached_property
    def terms(self) -> Terms:
        """Of all rows of the block. The first pass brings them into L1. Instructions are counted as in the program of a
        norm by itself, which the partition compares with this one: with what a compiler moves out of the loop."""
        norm, bodies = self.norm, [reduction.body for reduction in self.formula.reductions]
        vectors = float(norm.count * ceil_div(norm.length, self.machine.lanes(DType.F32)))
        work = sum(instructions(expr, with_row=True) for expr in (*bodies, self.formula.value)) + len(bodies)
        loads = sum(len(_of_elements(expr)) for expr in (*bodies, self.formula.value))
        return Terms(
            arithmetic=vectors * work + _ACROSS * norm.count * norm.passes,
            loads=vectors * loads,
            stores=vectors,
            branches=float(norm.count * (norm.passes + 1)),
            scalar=0.0 if self.is_last else _READ_BACK * norm.count * norm.length,
        )


def _of_elements(expr: te.Expr) -> set[te.Load]:
    return {load for load in te.loads(expr) if load.indices}
