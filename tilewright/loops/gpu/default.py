"""The default program of any formula on a GPU, chosen without measuring.

- `elementwise`: no reduction; each thread computes a few vectors of the output (`elementwise.py`).
- `transposed`: the same, read along another axis than it is written along: tiles transposed in shared memory
  (`transposed.py`).
- `rows`: reductions along memory (softmax, norms, sums over the last axes): a group of threads for each row, which
  stays in their registers (`rows.py`). If there are many long rows, they are staged in shared memory, several at once
  or one ahead (`staged_rows.py`).
- `windows`: sums over overlapping windows, such as a depthwise convolution: neighbours share loads (`windows.py`).
- `pooled`: the same along contiguous memory, such as channels-first pooling: neighbours load most of a row as one
  vector (`pooling.py`).
- `columns`: any other reduction: a thread for each result, neighbours in memory on neighbouring threads
  (`columns.py`).
"""

from __future__ import annotations

from tilewright.hw.gpu import GpuMachine
from tilewright.loops.formula import Formula
from tilewright.loops.gpu.columns import columns_program
from tilewright.loops.gpu.elementwise import elementwise_program
from tilewright.loops.gpu.pooling import pooled_program
from tilewright.loops.gpu.rows import is_rowwise, rows_program
from tilewright.loops.gpu.staged_rows import staged_rows_program
from tilewright.loops.gpu.transposed import transposed_program
from tilewright.loops.gpu.windows import windows_program
from tilewright.loops.ir import Program


def default_program(formula: Formula, machine: GpuMachine) -> Program:
    if not formula.reductions:
        return transposed_program(formula, machine) or elementwise_program(formula, machine)
    if is_rowwise(formula):
        return staged_rows_program(formula, machine) or rows_program(formula, machine)
    for schedule in (windows_program, pooled_program):
        if (program := schedule(formula, machine)) is not None:
            return program
    return columns_program(formula, machine)
