"""Programs as arrays of words: made and read a field at a time, for all instructions of a kind at once.

`isa.py` has the same for one instruction; a layer has a hundred thousand.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from tilewright.errors import InstructionError
from tilewright.runtime.gemmini.isa import BY_NAME, CUSTOM_3, OPCODES, Instruction, Opcode

EMPTY = np.zeros((0, 3), np.uint64)
_NUMBER = {opcode.name: number for number, opcode in enumerate(OPCODES)}
_FIRST = {opcode.name: opcode.function << 25 | 3 << 12 | CUSTOM_3 for opcode in OPCODES}


def words(name: str, **values: np.ndarray | int) -> np.ndarray:
    """Instructions of one name as rows of words, one for each element of the fields, which broadcast; other fields are
    0. Raises InstructionError for what cannot be encoded."""
    opcode = BY_NAME[name]
    known = {field.name: field for field in opcode.fields}
    arrays = np.broadcast_arrays(*(np.asarray(value, np.int64) for value in values.values()))
    registers = np.zeros((arrays[0].size if arrays else 1, 3), np.uint64)
    registers[:, 0] = _FIRST[name]
    registers[:, 1] = opcode.kind or 0
    for field_name, array in zip(values, arrays, strict=True):
        field = known[field_name]
        flat = array.ravel()
        if flat.size and (flat.min() < 0 or flat.max() >= 1 << field.bits):
            wrong = int(flat[(flat < 0) | (flat >= 1 << field.bits)][0])
            raise InstructionError(
                f"{name}: {field.name} must be from 0 to {(1 << field.bits) - 1}, got {wrong}"
            )
        registers[:, field.word] |= flat.astype(np.uint64) << np.uint64(field.low)
    return registers


class WordTable:
    """A program's words by opcode. Raises InstructionError if a word is not an instruction's."""

    def __init__(self, found: np.ndarray) -> None:
        if found.dtype != np.uint64 or found.ndim != 2 or found.shape[1] != 3:
            raise InstructionError(
                f"a program is rows of three 64-bit words, got {found.dtype} of shape {found.shape}"
            )
        self.words = found
        self.opcodes = np.full(len(found), -1, np.int64)
        for number, opcode in enumerate(OPCODES):
            mine = found[:, 0] == np.uint64(_FIRST[opcode.name])
            if opcode.kind is not None:
                mine &= found[:, 1] & np.uint64(3) == opcode.kind
            self.opcodes[mine] = number
        if (unknown := np.flatnonzero(self.opcodes < 0)).size:
            at = int(unknown[0])
            raise InstructionError(
                f"instruction {at}: the word {int(found[at, 0]):#x} is not an instruction of Gemmini"
            )
        stray = np.flatnonzero(((found & ~_MASKS[self.opcodes]) != _KINDS[self.opcodes]).any(axis=1))
        if stray.size:
            at = int(stray[0])
            name = OPCODES[self.opcodes[at]].name
            raise InstructionError(f"instruction {at}: bits are set that {name} does not have")

    def __len__(self) -> int:
        return len(self.words)

    @cached_property
    def _positions(self) -> dict[str, np.ndarray]:
        return {opcode.name: np.flatnonzero(self.opcodes == _NUMBER[opcode.name]) for opcode in OPCODES}

    def positions(self, *names: str) -> np.ndarray:
        """The positions of instructions with these names, in order."""
        if len(names) == 1:
            return self._positions[names[0]]
        return np.sort(np.concatenate([self._positions[name] for name in names]))

    def named(self, name: str, at: np.ndarray) -> np.ndarray:
        """Whether the instructions at these positions have this name."""
        found: np.ndarray = self.opcodes[at] == _NUMBER[name]
        return found

    def fields(self, name: str, at: np.ndarray | None = None) -> dict[str, np.ndarray]:
        """The values of each field of instructions with this name's fields: of all, or of those at positions."""
        registers = self.words[self.positions(name) if at is None else at]
        return {
            field.name: (
                registers[:, field.word] >> np.uint64(field.low) & np.uint64((1 << field.bits) - 1)
            ).astype(np.int64)
            for field in BY_NAME[name].fields
        }

    def instruction(self, at: int) -> Instruction:
        opcode = OPCODES[self.opcodes[at]]
        found = self.fields(opcode.name, np.array([at]))
        return Instruction(opcode, tuple(int(values[0]) for values in found.values()))

    def instructions(self) -> list[Instruction]:
        made: list[Instruction] = [_FENCE] * len(self)
        for name, positions in self._positions.items():
            opcode = BY_NAME[name]
            columns = [column.tolist() for column in self.fields(name).values()]
            values = zip(*columns, strict=True) if columns else iter([()] * len(positions))
            for at, each in zip(positions.tolist(), values, strict=True):
                made[at] = Instruction(opcode, each)
        return made


def decode(found: np.ndarray) -> list[Instruction]:
    """The program of these words; raises InstructionError if one is invalid."""
    return WordTable(found).instructions()


def _mask(opcode: Opcode) -> tuple[list[int], list[int]]:
    """Bit masks of the opcode's fields, and the fixed value of every other bit."""
    masks, others = [0, 0, 0], [_FIRST[opcode.name], opcode.kind or 0, 0]
    for field in opcode.fields:
        masks[field.word] |= ((1 << field.bits) - 1) << field.low
    return masks, others


_MASKS, _KINDS = (np.array(each, np.uint64) for each in zip(*map(_mask, OPCODES), strict=True))
_FENCE = Instruction(BY_NAME["fence"], ())
