"""Mappings: how a layer's loops are cut into tiles for each memory of Gemmini, in which order they run, and which of
them the PE array unrolls in space.

    L3[WIO] K48 - L2[WI] K16X - L1[O] C48 P16 C16X - L0[W] P8

reads from the outermost loop to the innermost. Loops of L3 step through tiles in DRAM, those of L2 through tiles in the
scratchpad (weights and inputs), those of L1 through tiles in the accumulator (outputs), and those of L0 run while a
weight stays in its register. `X` marks what is unrolled: K over the columns of the array, C over its rows. The notation
is that of Timeloop and DOSA. A loop's factors multiply to its extent or, where it is padded with zeros, to more.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tilewright.codesign.problem import LOOPS, C, K, N, Nests, P, Q, R, S
from tilewright.errors import MappingError
from tilewright.hw.gemmini import GemminiMachine

LEVELS = ("registers", "accumulator", "scratchpad", "DRAM")
REGISTERS, ACCUMULATOR, SCRATCHPAD, DRAM = range(4)
_KEPT = ("W", "O", "WI", "WIO")  # tensors in each level's memory, for the text

_LEVEL = re.compile(r"L([0-3])\[[WIO]*\]((?: [A-Z]\d+X?)*)")
_FACTOR = re.compile(r"([A-Z])(\d+)(X?)")

INNER_TO_OUTER = tuple(range(len(LOOPS)))


class Hardware(NamedTuple):
    """Points of the hardware space as arrays, one row for each."""

    dim: np.ndarray
    scratchpad: np.ndarray  # words of 8 bits
    accumulator: np.ndarray  # words of 32 bits, of all columns

    @classmethod
    def of(cls, machines: Iterable[GemminiMachine]) -> Hardware:
        found = list(machines)
        return cls(
            np.array([machine.dim for machine in found], float),
            np.array([machine.scratchpad_words for machine in found], float),
            np.array([machine.accumulator_words for machine in found], float),
        )

    def take(self, rows: np.ndarray | slice) -> Hardware:
        return Hardware(*(column[rows] for column in self))


@dataclass(frozen=True)
class Mappings:
    """A batch of mappings. Factors need not be integers: a search may pass through values between them."""

    factors: np.ndarray  # [batch, level, loop], in time
    rows: np.ndarray  # [batch]: C unrolled over the rows of the array
    columns: np.ndarray  # [batch]: K unrolled over its columns
    order: np.ndarray  # [batch, level, 7]: loops, outermost first

    @classmethod
    def parse(cls, texts: Sequence[str]) -> Mappings:
        """Raise MappingError if a text is not a mapping."""
        factors = np.ones((len(texts), len(LEVELS), len(LOOPS)))
        spatial = np.ones((len(texts), 2))
        order = np.empty(factors.shape, np.int8)
        known: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        for index, text in enumerate(texts):
            if text not in known:
                known[text] = _parsed(text)
            factors[index], spatial[index], order[index] = known[text]
        return cls(factors, spatial[:, 0], spatial[:, 1], order)

    def text(self, index: int) -> str:
        """The text that `parse` reads. Factors of 1 are omitted."""
        levels = []
        for level in reversed(range(len(LEVELS))):
            loops = [(LOOPS[loop], self.factors[index, level, loop]) for loop in self.order[index, level]]
            words = [f"{loop}{factor:g}" for loop, factor in loops if factor != 1]
            if level == SCRATCHPAD and self.columns[index] != 1:
                words.append(f"K{self.columns[index]:g}X")
            if level == ACCUMULATOR and self.rows[index] != 1:
                words.append(f"C{self.rows[index]:g}X")
            levels.append(" ".join((f"L{level}[{_KEPT[level]}]", *words)))
        return " - ".join(levels)

    @classmethod
    def joined(cls, batches: Iterable[Mappings]) -> Mappings:
        found = list(batches)
        names = ("factors", "rows", "columns", "order")
        return cls(*(np.concatenate([getattr(one, name) for one in found]) for name in names))

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, rows: np.ndarray | slice) -> Mappings:
        return Mappings(self.factors[rows], self.rows[rows], self.columns[rows], self.order[rows])

    def padded(self) -> np.ndarray:
        """The extents that the loops iterate over, with padding: [batch, 7]."""
        found: np.ndarray = self.factors.prod(axis=1)
        found[:, C] *= self.rows
        found[:, K] *= self.columns
        return found


def _parsed(text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(factors, [rows, columns], order) of one mapping."""
    factors, spatial = np.ones((len(LEVELS), len(LOOPS))), np.ones(2)
    order = np.empty(factors.shape, np.int8)
    seen = []
    for part in text.split(" - "):
        match = _LEVEL.fullmatch(part.strip())
        if match is None:
            raise _wrong(text, f"{part.strip()!r} is not a level")
        level, loops = int(match[1]), []
        seen.append(level)
        for name, factor, unrolled in _FACTOR.findall(match[2]):
            if name not in LOOPS or int(factor) < 1:
                raise _wrong(
                    text, f"{name}{factor} is not a loop; loops are {', '.join(LOOPS)} with a factor"
                )
            loop = LOOPS.index(name)
            if not unrolled:
                if loop in loops:
                    raise _wrong(text, f"L{level} has two loops {name}")
                loops.append(loop)
                factors[level, loop] = int(factor)
            elif (level, loop) in ((ACCUMULATOR, C), (SCRATCHPAD, K)):
                spatial[level - 1] *= int(factor)
            else:
                raise _wrong(text, f"{name}{factor}X in L{level}: the array unrolls C in L1 and K in L2")
        # A loop that is not named runs once: where it stands makes no difference.
        order[level] = [*(loop for loop in INNER_TO_OUTER if loop not in loops), *loops]
    if sorted(seen) != list(range(len(LEVELS))):
        raise _wrong(text, "it must have each of L0, L1, L2 and L3 once")
    return factors, spatial, order


def _wrong(text: str, why: str) -> MappingError:
    return MappingError(
        f"{text!r} is not a mapping: {why}",
        remedy="write it as L3[WIO] K48 - L2[WI] K16X - L1[O] C48 P16 C16X - L0[W] P8",
    )


# -- loop orders ------------------------------------------------------------------------------------------------------

# From the outermost loop to the innermost. The innermost loop that runs more than once decides the traffic of a level
# (tests/codesign/test_mapping.py tries all 5,040 orders): a tensor that it does not move through stays, and of one that
# it moves through in overlapping windows only what is new is read. P, Q and N keep weights, K keeps inputs, and R, S
# and C keep outputs. Which of P and Q, and which of R, S and C, matters to the overlap alone.
DRAM_ORDERS: dict[str, tuple[int, ...]] = {
    "weights stay, windows slide along P": (R, S, C, K, N, Q, P),
    "weights stay, windows slide along Q": (R, S, C, K, N, P, Q),
    "inputs stay": (R, S, C, N, Q, P, K),
    "outputs stay, windows slide along R": (K, N, Q, P, C, S, R),
    "outputs stay, windows slide along S": (K, N, Q, P, C, R, S),
    "outputs stay": (K, N, Q, P, R, S, C),
}
# Nothing but weights has a memory below the accumulator's and the scratchpad's loops, so that they should stay.
INNER_ORDER = (R, S, C, K, N, Q, P)


def orders(dram: Sequence[int], batch: int) -> np.ndarray:
    """The loop orders [batch, level, 7], with the given order of DRAM's loops and the best order at all other
    levels."""
    one = np.array([INNER_ORDER, INNER_ORDER, INNER_ORDER, dram], np.int8)
    return np.broadcast_to(one, (batch, *one.shape)).copy()


# -- what is legal ----------------------------------------------------------------------------------------------------


class Needs(NamedTuple):
    """The smallest hardware on which mappings run."""

    dim: np.ndarray
    scratchpad: np.ndarray  # words: a tile of weights and one of inputs
    accumulator_column: np.ndarray  # words in one column of the array: a tile of outputs

    def words(self) -> Hardware:
        """The sizes as a point of the hardware space."""
        return Hardware(self.dim, self.scratchpad, self.accumulator_column * self.dim)


def needs(nests: Nests, mappings: Mappings) -> Needs:
    tile = mappings.factors[:, : SCRATCHPAD + 1].prod(axis=1)
    tile[:, C] *= mappings.rows
    tile[:, K] *= mappings.columns
    width, height = (
        (tile[:, out] - 1) * nests.stride[:, axis] + (tile[:, tap] - 1) * nests.dilation[:, axis] + 1
        for axis, (out, tap) in enumerate(((P, R), (Q, S)))
    )
    weights = tile[:, [R, S, C, K]].prod(axis=1)
    outputs = mappings.factors[:, : ACCUMULATOR + 1].prod(axis=1)[:, [P, Q, K, N]].prod(axis=1)
    return Needs(
        np.maximum(mappings.rows, mappings.columns),
        weights + width * height * tile[:, C] * tile[:, N],
        outputs,
    )


def fits(nests: Nests, mappings: Mappings, hardware: Hardware) -> np.ndarray:
    """Whether each mapping covers its layer and fits its hardware: [batch]."""
    found = np.ones(len(mappings), bool)
    for _, least, most in _limits(nests, mappings, hardware):
        found &= least <= most
    return found


def check(nests: Nests, mappings: Mappings, hardware: Hardware) -> None:
    """Raise MappingError, with the mapping and the reason, unless every mapping covers its layer and fits its
    hardware."""
    for message, least, most in _limits(nests, mappings, hardware):
        wrong = np.flatnonzero(least > most)
        if len(wrong):
            first = int(wrong[0])
            why = message.format(least=least[first], most=most[first])
            raise MappingError(f"mapping {first}, {mappings.text(first)}: {why}")


def _limits(
    nests: Nests, mappings: Mappings, hardware: Hardware
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """(error, smaller, larger): the error applies if the first array exceeds the second."""
    for loop, name in enumerate(LOOPS):
        message = f"the layer has {{least:g}} iterations of {name}, and the factors multiply to {{most:g}}"
        yield message, nests.extents[:, loop], mappings.padded()[:, loop]
    held = mappings.factors[:, REGISTERS, [R, S, C, K]].prod(axis=1)
    yield "a register holds one weight: R, S, C and K must be 1 in L0", held, np.ones(len(held))
    need = needs(nests, mappings)
    yield "it needs {least:g} rows or columns of PEs, and the array has {most:g}", need.dim, hardware.dim
    yield (
        "it needs {least:g} words of scratchpad, and there are {most:g}",
        need.scratchpad,
        hardware.scratchpad,
    )
    column = hardware.accumulator // hardware.dim
    message = "it needs {least:g} words in each column of the accumulator, and there are {most:g}"
    yield message, need.accumulator_column, column
