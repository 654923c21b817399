"""Gemmini's instructions as data: a table of opcodes with their fields, from which encoding, decoding, printing and
the RTL's decoder (`codegen/gemmini/rtl.py`) follow.

An instruction is three 64-bit words, as the processor hands it to the accelerator: the RISC-V instruction (opcode
custom-3 with a 7-bit function number), and its two source registers. Memory on the machine is addressed by rows of
`dim` elements; the high bits of a local address say which memory:

    31            accumulator (32-bit elements), else scratchpad (8-bit elements)
    30            accumulator only: add to what the row holds, instead of replacing it
    29            accumulator only: 32-bit elements in DRAM, no scaling
    28..0         row

What each instruction does, in program order; `config_*` holds until the next of its kind:

    config_ex     rows of A between two rows that a compute reads (`a_stride`)
    config_ld     for mvin, mvin2 or mvin3 (`slot`): bytes between DRAM rows, rows between blocks, a scale, and whether
                  the accumulator is loaded from 8-bit elements
    config_st     for mvout: bytes between DRAM rows, a scale, ReLU, max pooling
    mvin*         DRAM to a local memory: `rows` x `cols`; from column `dim` on, each further `dim` columns go
                  `block_stride` rows further. The rest of a row becomes 0; at DRAM address 0, all of it.
    mvout         a local memory to DRAM
    preload       weights into the array (`b` NONE: those that it has), and where the next compute's results go (`c`)
    compute_*     C (=, +=) A x weights: `preloaded` takes the weights of the last preload that had some,
                  `accumulated` goes on with those of the compute before it
    fence         all before it is complete before anything behind it starts; nothing else orders a load and a store of
                  the same bytes of DRAM
    flush         as a fence; weights and configuration are those of a reset
    loop_ws       a whole matmul of the bounds, addresses and strides that `loop_ws_*` gave
    loop_conv_ws  a whole convolution of what `loop_conv_ws_*` gave. Data outside its rows and columns is 0; `top` and
                  `left` say how far the first window reaches beyond them. All operands fit the machine at once.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from tilewright.errors import InstructionError

CUSTOM_3 = 0x7B
ACCUMULATOR = 1 << 31
ACCUMULATE = 1 << 30
FULL = 1 << 29
ROW_MASK = (1 << 29) - 1
NONE = 0xFFFFFFFF  # no local address
MAX_BLOCKS = 4  # of `dim` columns that one mvin loads


class Array(Protocol):
    """The properties of a machine that a program depends on."""

    @property
    def dim(self) -> int: ...
    @property
    def scratchpad_rows(self) -> int: ...
    @property
    def accumulator_rows(self) -> int: ...


@dataclass(frozen=True)
class Field:
    name: str
    word: int  # 1 or 2: which source register
    low: int
    bits: int


@dataclass(frozen=True, eq=False)
class Opcode:
    """`kind`: the value of the two low bits of the first register, where one function number serves several."""

    name: str
    function: int
    fields: tuple[Field, ...] = ()
    kind: int | None = None

    @cached_property
    def position(self) -> dict[str, int]:
        return {field.name: at for at, field in enumerate(self.fields)}


def _local(name: str, word: int, prefix: str = "") -> tuple[Field, ...]:
    """An operand in a local memory: address, columns, rows."""
    return (
        Field(name, word, 0, 32),
        Field(f"{prefix}cols", word, 32, 16),
        Field(f"{prefix}rows", word, 48, 16),
    )


_MOVE = (Field("dram", 1, 0, 48), *_local("local", 2))
_A, _D = _local("a", 1), Field("d", 2, 0, 32)

OPCODES = (
    Opcode("config_ex", 0, (Field("a_stride", 1, 16, 16),), kind=0),
    Opcode(
        "config_ld",
        0,
        (
            Field("shrunk", 1, 2, 1),
            Field("slot", 1, 3, 2),
            Field("block_stride", 1, 16, 16),
            Field("scale", 1, 32, 32),
            Field("stride", 2, 0, 32),
        ),
        kind=1,
    ),
    Opcode(
        "config_st",
        0,
        (
            Field("relu", 1, 2, 1),
            Field("pool_size", 1, 4, 4),
            Field("pool_stride", 1, 8, 4),
            Field("pool_top", 1, 12, 2),
            Field("pool_left", 1, 14, 2),
            Field("pool_pitch", 1, 16, 16),
            Field("rows_in", 1, 32, 8),
            Field("cols_in", 1, 40, 8),
            Field("rows_out", 1, 48, 8),
            Field("cols_out", 1, 56, 8),
            Field("stride", 2, 0, 32),
            Field("scale", 2, 32, 32),
        ),
        kind=2,
    ),
    Opcode("mvin2", 1, _MOVE),
    Opcode("mvin", 2, _MOVE),
    Opcode("mvout", 3, _MOVE),
    Opcode("compute_preloaded", 4, (*_A, _D)),
    Opcode("compute_accumulated", 5, (*_A, _D)),
    Opcode("preload", 6, (*_local("b", 1), *_local("c", 2, "c_"))),
    Opcode("flush", 7),
    Opcode(
        "loop_ws",
        8,
        (
            Field("relu", 1, 0, 1),
            Field("full", 1, 1, 1),
            Field("low_bias", 1, 2, 1),
            Field("scale", 2, 32, 32),
        ),
    ),
    Opcode(
        "loop_ws_bounds",
        9,
        (
            *(Field(f"pad_{axis}", 1, 16 * at, 16) for at, axis in enumerate("ijk")),
            *(Field(axis, 2, 16 * at, 16) for at, axis in enumerate("ijk")),
        ),
    ),
    Opcode("loop_ws_addresses_ab", 10, (Field("a", 1, 0, 48), Field("b", 2, 0, 48))),
    Opcode("loop_ws_addresses_dc", 11, (Field("d", 1, 0, 48), Field("c", 2, 0, 48))),
    Opcode("loop_ws_strides_ab", 12, (Field("a", 1, 0, 32), Field("b", 2, 0, 32))),
    Opcode("loop_ws_strides_dc", 13, (Field("d", 1, 0, 32), Field("c", 2, 0, 32))),
    Opcode("mvin3", 14, _MOVE),
    Opcode(
        "loop_conv_ws",
        15,
        (
            Field("relu", 1, 0, 1),
            Field("full", 1, 1, 1),
            Field("weights_pitch", 1, 32, 32),
            Field("scale", 2, 32, 32),
        ),
    ),
    Opcode(
        "loop_conv_ws_image",
        16,
        (
            Field("in_rows", 1, 0, 16),
            Field("in_cols", 1, 16, 16),
            Field("in_channels", 2, 0, 16),
            Field("out_channels", 2, 16, 16),
        ),
    ),
    Opcode(
        "loop_conv_ws_window",
        17,
        (
            Field("out_rows", 1, 0, 16),
            Field("out_cols", 1, 16, 16),
            Field("kernel_rows", 2, 0, 8),
            Field("kernel_cols", 2, 8, 8),
            Field("stride", 2, 16, 8),
            Field("top", 2, 24, 8),
            Field("left", 2, 32, 8),
        ),
    ),
    Opcode("loop_conv_ws_operands", 18, (Field("data", 1, 0, 48), Field("weights", 2, 0, 48))),
    Opcode("loop_conv_ws_results", 19, (Field("bias", 1, 0, 48), Field("results", 2, 0, 48))),
    Opcode(
        "loop_conv_ws_pitches",
        20,
        (
            Field("data", 1, 0, 32),
            Field("data_row", 1, 32, 32),
            Field("results", 2, 0, 32),
            Field("results_row", 2, 32, 32),
        ),
    ),
    Opcode("fence", 127),
)
BY_NAME = {opcode.name: opcode for opcode in OPCODES}
LOOPS = ("loop_ws", "loop_conv_ws")
# What is given to each loop before it, by the loop's name.
GIVEN = {loop: [name for name in BY_NAME if name.startswith(f"{loop}_")] for loop in LOOPS}
MVINS = ("mvin", "mvin2", "mvin3")  # by slot
COMPUTES = ("compute_preloaded", "compute_accumulated")


@dataclass(frozen=True)
class Instruction:
    opcode: Opcode
    values: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.opcode.name

    def __getitem__(self, field: str) -> int:
        return self.values[self.opcode.position[field]]

    def words(self) -> tuple[int, int, int]:
        registers = [0, self.opcode.kind or 0, 0]
        for field, value in zip(self.opcode.fields, self.values, strict=True):
            registers[field.word] |= value << field.low
        return self.opcode.function << 25 | 3 << 12 | CUSTOM_3, registers[1], registers[2]

    def __str__(self) -> str:
        shown = [
            f"{field.name}={_shown(field.name, value)}"
            for field, value in zip(self.opcode.fields, self.values, strict=True)
        ]
        return " ".join((self.name, *shown))


def make(name: str, **values: int) -> Instruction:
    """The instruction of this name; other fields are 0. Raises InstructionError for what cannot be encoded."""
    opcode = BY_NAME.get(name)
    if opcode is None:
        raise InstructionError(f"the instruction must be one of {', '.join(sorted(BY_NAME))}, got {name!r}")
    unknown = [field for field in values if field not in opcode.position]
    if unknown:
        raise InstructionError(
            f"{name} has no field {unknown[0]!r}; it has: {', '.join(opcode.position) or 'none'}"
        )
    chosen = tuple(values.get(field.name, 0) for field in opcode.fields)
    for field, value in zip(opcode.fields, chosen, strict=True):
        if not 0 <= value < 1 << field.bits:
            raise InstructionError(
                f"{name}: {field.name} must be from 0 to {(1 << field.bits) - 1}, got {value}"
            )
    return Instruction(opcode, chosen)


def scale_bits(scale: float) -> int:
    """The 32 bits of a scale. It must be 0 or a normal number: what is smaller would round every product to 0."""
    (bits,) = struct.unpack("<I", struct.pack("<f", scale))
    if not np.isfinite(scale) or (bits & 0x7FFFFFFF and not bits & 0x7F800000):
        raise InstructionError(f"a scale must be 0 or a normal 32-bit float, got {scale!r}")
    return int(bits)


def scale_of(bits: int) -> np.float32:
    return np.float32(struct.unpack("<f", struct.pack("<I", bits))[0])


ONE = scale_bits(1.0)

# -- words ------------------------------------------------------------------------------------------------------------


def encode(program: Iterable[Instruction]) -> np.ndarray:
    """One row of three 64-bit words for each instruction."""
    rows = [instruction.words() for instruction in program]
    return np.array(rows, dtype=np.uint64).reshape(len(rows), 3)


def text(program: Sequence[Instruction]) -> str:
    """One line for each instruction."""
    return "\n".join(f"{at:5d}  {instruction}" for at, instruction in enumerate(program))


def _shown(name: str, value: int) -> str:
    if name == "scale":
        return f"{scale_of(value):g}"
    if name in ("local", "a", "b", "c", "d") and value > ROW_MASK:
        if value == NONE:
            return "none"
        if value < 1 << 32 and value & ACCUMULATOR:
            marks = ("+" if value & ACCUMULATE else "") + ("!" if value & FULL else "")
            return f"acc[{value & ROW_MASK}]{marks}"
    return str(value)


# -- loops ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Convolution:
    """The parameters of a loop_conv_ws."""

    in_rows: int
    in_cols: int
    in_channels: int
    out_channels: int
    out_rows: int
    out_cols: int
    kernel_rows: int
    kernel_cols: int
    stride: int
    top: int
    left: int
    data: int
    weights: int
    bias: int
    results: int
    data_pitch: int
    data_row: int
    results_pitch: int
    results_row: int
    weights_pitch: int
    relu: int
    full: int
    scale: int

    @staticmethod
    def of(instruction: Instruction, given: dict[str, Instruction]) -> Convolution:
        image, window, operands, results, pitches = (given[name].values for name in GIVEN["loop_conv_ws"])
        relu, full, weights_pitch, scale = instruction.values
        return Convolution(
            *(*image, *window, *operands, *results, *pitches, weights_pitch, relu, full, scale),
        )

    @property
    def height(self) -> int:
        """The height of the data under all windows, padding included."""
        return (self.out_rows - 1) * self.stride + self.kernel_rows

    @property
    def width(self) -> int:
        return (self.out_cols - 1) * self.stride + self.kernel_cols

    def rows(self, dim: int) -> tuple[int, int, int]:
        """That data, weights and results take of their memories."""
        blocks, out_blocks = -(-self.in_channels // dim), -(-self.out_channels // dim)
        weights = self.kernel_rows * self.kernel_cols * blocks * out_blocks * dim
        return blocks * self.height * self.width, weights, out_blocks * self.out_rows * self.out_cols
