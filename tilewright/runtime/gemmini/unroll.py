"""Loop instructions as the primitive ones that the machine issues for them.

    for k, j, i: [D(i, j)] [B(k, j)] [A(i, k)]  preload, compute  [C(i, j)]

Each block is loaded where it is first needed and stored after its last sum. A lies at the foot of the scratchpad, B at
its head, each block in `dim` rows; C fills the accumulator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tilewright.runtime.gemmini.functional import loop_operands
from tilewright.runtime.gemmini.isa import ACCUMULATE, ACCUMULATOR, FULL, NONE, ONE, Array, Instruction, make


def unrolled(program: Sequence[Instruction], machine: Array) -> list[Instruction]:
    """The program with primitive instructions in place of each loop."""
    found: list[Instruction] = []
    given: dict[str, Instruction] = {}
    for instruction in program:
        if instruction.name.startswith("loop_ws_"):
            given[instruction.name] = instruction
        elif instruction.name == "loop_ws":
            found += loop_ws(instruction, given, machine)
        else:
            found.append(instruction)
    return found


def loop_ws(instruction: Instruction, given: dict[str, Instruction], machine: Array) -> Iterator[Instruction]:
    dim = machine.dim
    (m, n, k), start, stride = loop_operands(given, dim)
    blocks_i, blocks_j, blocks_k = (given["loop_ws_bounds"][axis] for axis in "ijk")
    yield make("config_ex", a_stride=1)
    yield make("config_ld", slot=0, stride=stride["a"], scale=ONE)
    yield make("config_ld", slot=1, stride=stride["b"], scale=ONE)
    yield make("config_ld", slot=2, stride=stride["d"], scale=ONE, shrunk=instruction["low_bias"])
    yield make("config_st", stride=stride["c"], scale=instruction["scale"], relu=instruction["relu"])
    bias_bytes = 1 if instruction["low_bias"] else 4
    first_b = machine.scratchpad_rows - blocks_k * blocks_j * dim
    for kk in range(blocks_k):
        depth = min(dim, k - kk * dim)
        for j in range(blocks_j):
            cols = min(dim, n - j * dim)
            for i in range(blocks_i):
                rows = min(dim, m - i * dim)
                a, b = (i * blocks_k + kk) * dim, first_b + (kk * blocks_j + j) * dim
                c = ACCUMULATOR | (i * blocks_j + j) * dim
                if kk == 0 and start["d"]:
                    dram = start["d"] + i * dim * stride["d"] + j * dim * bias_bytes
                    yield make("mvin3", dram=dram, local=c, rows=rows, cols=cols)
                if i == 0:
                    dram = start["b"] + kk * dim * stride["b"] + j * dim
                    yield make("mvin2", dram=dram, local=b, rows=depth, cols=cols)
                if j == 0:
                    dram = start["a"] + i * dim * stride["a"] + kk * dim
                    yield make("mvin", dram=dram, local=a, rows=rows, cols=depth)
                into = c | (ACCUMULATE if kk or start["d"] else 0)
                weights = b if i == 0 else NONE
                yield make("preload", b=weights, rows=depth, cols=cols, c=into, c_rows=rows, c_cols=cols)
                compute = "compute_preloaded" if i == 0 else "compute_accumulated"
                yield make(compute, a=a, rows=rows, cols=depth, d=NONE)
                if kk == blocks_k - 1:
                    dram = start["c"] + i * dim * stride["c"] + j * dim * (4 if instruction["full"] else 1)
                    local = c | (FULL if instruction["full"] else 0)
                    yield make("mvout", dram=dram, local=local, rows=rows, cols=cols)
