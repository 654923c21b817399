"""Loop instructions as the primitive ones that the machine issues for them.

    for k, j, i: [D(i, j)] [B(k, j)] [A(i, k)]  preload, compute  [C(i, j)]

Each block is loaded where it is first needed and stored after its last sum. A lies at the foot of the scratchpad, B at
its head, each block in `dim` rows; C fills the accumulator. A convolution has phases: data, weights, bias, computes,
stores; its memories are used alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from tilewright.runtime.gemmini.functional import loop_operands
from tilewright.runtime.gemmini.isa import (
    ACCUMULATE,
    ACCUMULATOR,
    FULL,
    NONE,
    ONE,
    Array,
    Convolution,
    Instruction,
    make,
)


def unrolled(program: Sequence[Instruction], machine: Array) -> list[Instruction]:
    """The program with primitive instructions in place of each loop."""
    return [instruction for instruction in decoded(program, machine) if instruction is not None]


def decoded(program: Sequence[Instruction], machine: Array) -> Iterator[Instruction | None]:
    """The decoder's output in each cycle if it is never stalled: a primitive instruction, or None while a loop is set
    up or skips a step."""
    given: dict[str, Instruction] = {}
    for instruction in program:
        if not instruction.name.startswith("loop_"):
            yield instruction
            continue
        yield None
        if instruction.name == "loop_ws":
            yield from loop_ws(instruction, given, machine)
        elif instruction.name == "loop_conv_ws":
            yield from loop_conv_ws(Convolution.of(instruction, given), machine)
        else:
            given[instruction.name] = instruction


def loop_ws(
    instruction: Instruction, given: dict[str, Instruction], machine: Array
) -> Iterator[Instruction | None]:
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
                else:
                    yield None
                if i == 0:
                    dram = start["b"] + kk * dim * stride["b"] + j * dim
                    yield make("mvin2", dram=dram, local=b, rows=depth, cols=cols)
                else:
                    yield None
                if j == 0:
                    dram = start["a"] + i * dim * stride["a"] + kk * dim
                    yield make("mvin", dram=dram, local=a, rows=rows, cols=depth)
                else:
                    yield None
                into = c | (ACCUMULATE if kk or start["d"] else 0)
                weights = b if i == 0 else NONE
                yield make("preload", b=weights, rows=depth, cols=cols, c=into, c_rows=rows, c_cols=cols)
                compute = "compute_preloaded" if i == 0 else "compute_accumulated"
                yield make(compute, a=a, rows=rows, cols=depth, d=NONE)
                if kk == blocks_k - 1:
                    dram = start["c"] + i * dim * stride["c"] + j * dim * (4 if instruction["full"] else 1)
                    local = c | (FULL if instruction["full"] else 0)
                    yield make("mvout", dram=dram, local=local, rows=rows, cols=cols)
                else:
                    yield None


def loop_conv_ws(conv: Convolution, machine: Array) -> Iterator[Instruction]:
    dim, width, height = machine.dim, conv.width, conv.height
    blocks, out_blocks = -(-conv.in_channels // dim), -(-conv.out_channels // dim)
    _, weight_rows, _ = conv.rows(dim)
    first_weights = machine.scratchpad_rows - weight_rows
    pixels = conv.out_rows * conv.out_cols
    taps = list(product(range(conv.kernel_rows), range(conv.kernel_cols)))
    segments = [
        (y, x, min(dim, conv.out_cols - x))
        for y in range(conv.out_rows)
        for x in range(0, conv.out_cols, dim)
    ]

    def depth(block: int) -> int:
        return min(dim, conv.in_channels - block * dim)

    def cols(j: int) -> int:
        return min(dim, conv.out_channels - j * dim)

    def weight(tap: int, block: int, j: int) -> int:
        return first_weights + ((tap * blocks + block) * out_blocks + j) * dim

    def result(j: int, y: int, x: int) -> int:
        return ACCUMULATOR | j * pixels + y * conv.out_cols + x

    yield make("config_ex", a_stride=conv.stride)
    yield make("config_ld", slot=0, stride=conv.data_pitch, scale=ONE)
    yield make("config_ld", slot=1, stride=conv.weights_pitch, scale=ONE)
    yield make("config_ld", slot=2, stride=0, scale=ONE)
    yield make("config_st", stride=conv.results_pitch, scale=conv.scale, relu=conv.relu)
    for block, y in product(range(blocks), range(height)):
        for x, run, exists in _runs(conv, y, dim):
            dram = (
                conv.data + (y - conv.top) * conv.data_row + (x - conv.left) * conv.data_pitch + block * dim
            )
            local = (block * height + y) * width + x
            yield make("mvin", dram=dram if exists else 0, local=local, rows=run, cols=depth(block))
    for tap, block, j in product(range(len(taps)), range(blocks), range(out_blocks)):
        dram = conv.weights + (tap * conv.in_channels + block * dim) * conv.weights_pitch + j * dim
        yield make("mvin2", dram=dram, local=weight(tap, block, j), rows=depth(block), cols=cols(j))
    if conv.bias:
        for j, (y, x, part) in product(range(out_blocks), segments):
            yield make("mvin3", dram=conv.bias + j * dim * 4, local=result(j, y, x), rows=part, cols=cols(j))
    for (tap, (kr, kc)), block, j in product(enumerate(taps), range(blocks), range(out_blocks)):
        add = ACCUMULATE if conv.bias or tap or block else 0
        for at, (y, x, part) in enumerate(segments):
            b, into = NONE if at else weight(tap, block, j), result(j, y, x) | add
            yield make("preload", b=b, rows=depth(block), cols=cols(j), c=into, c_rows=part, c_cols=cols(j))
            a = (block * height + y * conv.stride + kr) * width + x * conv.stride + kc
            name = "compute_accumulated" if at else "compute_preloaded"
            yield make(name, a=a, rows=part, cols=depth(block), d=NONE)
    for j, (y, x, part) in product(range(out_blocks), segments):
        dram = (
            conv.results + y * conv.results_row + x * conv.results_pitch + j * dim * (4 if conv.full else 1)
        )
        local = result(j, y, x) | (FULL if conv.full else 0)
        yield make("mvout", dram=dram, local=local, rows=part, cols=cols(j))


def _runs(conv: Convolution, y: int, dim: int) -> Iterator[tuple[int, int, bool]]:
    """A row of data: where each run of pixels begins, how long it is, and whether they exist."""
    end = conv.left + conv.in_cols
    inside = conv.top <= y < conv.top + conv.in_rows
    x = 0
    while x < conv.width:
        limit = conv.width if not inside or x >= end else min(conv.width, conv.left if x < conv.left else end)
        run = min(dim, limit - x)
        yield x, run, inside and conv.left <= x < end
        x += run
