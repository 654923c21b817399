"""Recognise transposes: loads along one axis, stores along another, and the register tiles for them."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright import te
from tilewright.hw import CpuMachine
from tilewright.loops.formula import Formula
from tilewright.loops.tiling import lanes_for, power_of_two_below
from tilewright.te.index import coefficient

_SHORT = 4  # maximum extent of an axis that a tile covers completely


@dataclass(frozen=True)
class TransposePattern:
    """The transposed load and its tile: `rows` by `columns` elements of the axes (written, read)."""

    load: te.Load
    read: te.Var  # the contiguous axis of the input
    written: te.Var  # the contiguous axis of the output
    lanes: int
    rows: int
    columns: int

    @property
    def reads_run(self) -> bool:
        return self.columns < self.lanes

    @property
    def writes_run(self) -> bool:
        return self.rows < self.lanes

    def __str__(self) -> str:
        return f"{self.rows} x {self.columns} of ({self.written.name}, {self.read.name})"


def written_axis(formula: Formula) -> te.Var | None:
    """The contiguous axis of the output."""
    return next((axis for axis in reversed(formula.axes) if coefficient(formula.store, axis) == 1), None)


def loads_across(formula: Formula, written: te.Var) -> list[te.Load]:
    """The loads, one for each time they occur, that `written` moves by more than one element."""
    loads = te.unguarded_loads(formula.value)
    return [load for load in loads if coefficient(load.indices[0], written) not in (0, 1)]


def transpose_pattern_of(formula: Formula, machine: CpuMachine) -> TransposePattern | None:
    """Match a formula that reads along another axis than it writes, in tiles; else None."""
    written = written_axis(formula)
    if formula.reductions or written is None:
        return None
    transposed = set(loads_across(formula, written))
    if not transposed and written.extent <= _SHORT:
        loads = te.unguarded_loads(formula.value)
        transposed = {load for load in loads if coefficient(load.indices[0], written) == 0}
    if len(transposed) != 1:
        return None
    (load,) = transposed
    read = next((axis for axis in formula.axes if coefficient(load.indices[0], axis) == 1), None)
    if read is None or coefficient(load.indices[0], written) is None:
        return None
    # A tile of this many vectors fits the registers.
    lanes = min(lanes_for(formula, machine, max(read.extent, written.extent)), machine.vector_registers)
    short = min(_SHORT, lanes - 1)  # a run is narrower than a vector
    if 1 < written.extent <= short and _is_run(formula.store, written, read) and read.extent >= lanes:
        if {read, written} & _variables_outside(formula.value, load):
            return None
        return TransposePattern(load, read, written, lanes, written.extent, lanes)
    if 1 < read.extent <= short and _is_run(load.indices[0], read, written) and written.extent >= lanes:
        return TransposePattern(load, read, written, lanes, lanes, read.extent)
    if coefficient(load.indices[0], written) == 0:
        return None
    lanes = min(lanes, power_of_two_below(min(read.extent, written.extent)))
    return TransposePattern(load, read, written, lanes, lanes, lanes) if lanes >= 4 else None


def _is_run(offset: te.Expr, inner: te.Var, outer: te.Var) -> bool:
    return coefficient(offset, inner) == 1 and coefficient(offset, outer) == inner.extent


def _variables_outside(expr: te.Expr, load: te.Load) -> set[te.Var]:
    return te.variables(te.rewrite(expr, lambda node: te.const(0, load.dtype) if node == load else None))
