"""An accelerator's kernel in a plan: an encoded program with what lies where in its DRAM, run by the simulator.

    magic | length of the header | header as JSON | words

The simulated DRAM is the kernel's own. A step copies its arguments there, runs the program, once for each image of a
batch, and copies the results back.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from functools import cached_property

import msgspec
import numpy as np

from tilewright.errors import CodegenError, TilewrightError
from tilewright.runtime.gemmini.bias import encoded, stored_bytes
from tilewright.runtime.gemmini.functional import Functional
from tilewright.runtime.gemmini.isa import Instruction
from tilewright.runtime.gemmini.verify import verify_table
from tilewright.runtime.gemmini.words import WordTable

KIND = "gemmini"  # what the triple of such a plan's target begins with
_MAGIC = b"TWGEMMI1"
_LENGTH = struct.Struct("<Q")
_WORDS = 3 * 8  # bytes of an instruction


class Region(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The bytes of an argument in DRAM. `per_image`: each image of a batch has its own. `bias_rows`: of bytes, as
    which a 32-bit bias is stored; 0: an argument is stored as it is."""

    start: int
    bytes: int
    per_image: bool
    bias_rows: int = 0

    @property
    def stored(self) -> int:
        return stored_bytes(self.bytes // 4, self.bias_rows) if self.bias_rows else self.bytes

    def in_dram(self, argument: np.ndarray) -> np.ndarray:
        return encoded(argument.view(np.int32), self.bias_rows) if self.bias_rows else argument


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dim: int
    scratchpad_rows: int
    accumulator_rows: int
    dram_bytes: int
    images: int
    arguments: tuple[Region, ...]
    result: Region
    instructions: int  # of all images; cycles too, as the cycle-level simulator counts them
    cycles: int
    decisions: str = ""  # tiles and buffers, for people


def packed(header: Header, words: np.ndarray) -> bytes:
    described = msgspec.json.encode(header)
    return _MAGIC + _LENGTH.pack(len(described)) + described + words.tobytes()


def is_accelerated(code: bytes) -> bool:
    return code.startswith(_MAGIC)


class AcceleratorKernel:
    """Raise CodegenError if the code is invalid, or its regions do not lie in its DRAM."""

    def __init__(self, code: bytes, symbol: str) -> None:
        self.symbol = symbol
        self.code = code
        begin = len(_MAGIC) + _LENGTH.size
        if not is_accelerated(code) or len(code) < begin:
            raise CodegenError(f"{symbol[:80]!r} is not a program for Gemmini")
        (length,) = _LENGTH.unpack_from(code, len(_MAGIC))
        words = code[begin + length :]
        try:
            self.header = msgspec.json.decode(code[begin : begin + length], type=Header)
        except msgspec.DecodeError as error:
            raise CodegenError(f"the program {symbol[:80]!r} has a broken header: {error}") from None
        if len(words) % _WORDS:
            raise CodegenError(f"the program {symbol[:80]!r} does not end with an instruction")
        self._words = np.frombuffer(words, np.uint64).reshape(-1, 3)
        for region in (*self.header.arguments, self.header.result):
            least = min(region.start, region.bytes, region.bias_rows)
            if least < 0 or region.start + region.stored > self.header.dram_bytes:
                raise CodegenError(f"the program {symbol[:80]!r} has an operand outside its DRAM")
            if region.bias_rows and region.bytes % 4:
                raise CodegenError(f"the program {symbol[:80]!r} has a bias that is no 32-bit numbers")
        if min(self.header.dim, self.header.scratchpad_rows, self.header.accumulator_rows) < 1:
            raise CodegenError(f"the program {symbol[:80]!r} is for an impossible machine")

    @cached_property
    def _table(self) -> WordTable:
        """Verified."""
        found = WordTable(self._words)
        verify_table(found, self.header)  # the machine that a program depends on
        return found

    @cached_property
    def program(self) -> list[Instruction]:
        return self._table.instructions()

    def check(self) -> None:
        """Raise CodegenError if the machine cannot execute it."""
        try:
            assert self._table is not None
        except TilewrightError as error:
            raise CodegenError(f"the program {self.symbol[:80]!r}: {error}") from None

    def sizes(self) -> list[int]:
        """Bytes of all arguments, the result last, over all images."""
        header = self.header
        return [
            region.bytes * (header.images if region.per_image else 1)
            for region in (*header.arguments, header.result)
        ]

    def run(self, addresses: Sequence[int]) -> None:
        """`addresses`: of the arguments, the result last."""
        header = self.header
        arrays = [
            np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
            for address, size in zip(addresses, self.sizes(), strict=True)
        ]
        dram = np.zeros(header.dram_bytes, np.uint8)
        for image in range(header.images):
            for array, region in zip(arrays, header.arguments, strict=False):
                if region.per_image or image == 0:
                    first = image * region.bytes if region.per_image else 0
                    argument = array[first : first + region.bytes]
                    dram[region.start : region.start + region.stored] = region.in_dram(argument)
            Functional(header, dram).execute(self.program)
            found = dram[header.result.start : header.result.start + header.result.bytes]
            arrays[-1][image * found.size : (image + 1) * found.size] = found


def well_formed(code: bytes, symbol: str) -> None:
    AcceleratorKernel(code, symbol).check()
