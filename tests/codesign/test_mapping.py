"""Mappings: their text, what is legal, and which loop orders are worth a try."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest

from tilewright.codesign.mapping import DRAM, DRAM_ORDERS, Hardware, Mappings, check, fits, needs, orders
from tilewright.codesign.model import Model
from tilewright.codesign.problem import LOOPS, Layer, Nests
from tilewright.errors import MappingError
from tilewright.hw.gemmini import KIB, GemminiMachine

TEXT = "L3[WIO] P28 R7 Q56 K8 - L2[WI] K4X - L1[O] K2 S7 Q2 P2 C3X - L0[W] P2"
LAYER = Layer((7, 7, 112, 112, 3, 64, 1), stride=(2, 2))
SMALL = GemminiMachine(dim=32, scratchpad=2 * KIB, accumulator=16 * KIB)


def one(text: str, machine: GemminiMachine = SMALL) -> tuple[Nests, Mappings, Hardware]:
    return Nests.of([LAYER]), Mappings.parse([text]), Hardware.of([machine])


def test_text_goes_both_ways() -> None:
    mappings = Mappings.parse([TEXT, TEXT.replace("K4X", "N1 K4X")])
    assert mappings.text(0) == mappings.text(1) == TEXT
    assert (mappings.padded() == LAYER.extents).all()
    assert [LOOPS[loop] for loop in mappings.order[0, DRAM, -4:]] == ["P", "R", "Q", "K"]


def test_what_a_mapping_needs() -> None:
    nests, mappings, _ = one(TEXT)
    need = needs(nests, mappings)
    weights, width, height = 7 * 3 * 8, (4 - 1) * 2 + 1, (2 - 1) * 2 + 7
    assert need.dim[0] == 4
    assert need.scratchpad[0] == weights + width * height * 3
    assert need.accumulator_column[0] == 2 * 2 * 4
    check(nests, mappings, need.words())
    smaller = need.words()._replace(scratchpad=need.scratchpad - 1)
    assert fits(nests, mappings, need.words()).all() and not fits(nests, mappings, smaller).any()


ROOMY = replace(SMALL, scratchpad=64 * KIB)
SCANT = replace(SMALL, scratchpad=KIB // 4)


@pytest.mark.parametrize(
    ("text", "machine", "said"),
    [
        (TEXT.replace("P28", "P27"), SMALL, "has 112 iterations of P, and the factors multiply to 108"),
        (TEXT.replace("Q56 ", "").replace("L0[W] P2", "L0[W] P2 Q56"), ROOMY, "needs 896 words in each"),
        (TEXT, SCANT, "it needs 357 words of scratchpad, and there are 256"),
        (TEXT.replace("L0[W] P2", "L0[W] P2 C2"), SMALL, "a register holds one weight"),
        (TEXT.replace("K4X", "K64X"), SMALL, "needs 64 rows or columns of PEs, and the array has 32"),
    ],
)
def test_a_layer_that_does_not_fit_says_why(text: str, machine: GemminiMachine, said: str) -> None:
    with pytest.raises(MappingError, match=said):
        check(*one(text, machine))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (TEXT.replace("L0[W] P2", "L0[W] P2P"), "'L0\\[W\\] P2P' is not a level"),
        (TEXT.replace("P28", "Z28"), "Z28 is not a loop"),
        (TEXT.replace("R7", "P7"), "L3 has two loops P"),
        (TEXT.replace("K4X", "P4X"), "the array unrolls C in L1 and K in L2"),
        (TEXT.rpartition(" - ")[0], "each of L0, L1, L2 and L3 once"),
    ],
)
def test_a_text_that_is_no_mapping_says_why(text: str, said: str) -> None:
    with pytest.raises(MappingError, match=said):
        Mappings.parse([text])


def test_padded_factors_cover_the_layer() -> None:
    check(*one(TEXT.replace("P28", "P29")))


@pytest.mark.parametrize("seed", range(12))
def test_no_other_dram_order_moves_less(seed: int) -> None:
    """All 5,040 orders against the six, with some factors of 1: fewest cycles, least energy, and least of both."""
    rng = np.random.default_rng(seed)
    factors = np.ones((4, 7))
    factors[:DRAM] = rng.choice([1, 1, 2, 3], (DRAM, 7))
    factors[0, [0, 1, 4, 5]] = 1
    factors[DRAM] = rng.choice([1, 2, 3, 5], 7)
    every = np.array(list(permutations(range(7))), np.int8)
    few = np.array(list(DRAM_ORDERS.values()), np.int8)

    def best(dram: np.ndarray) -> np.ndarray:
        batch = len(dram)
        order = orders(few[0], batch)
        order[:, DRAM] = dram
        mappings = Mappings(np.tile(factors, (batch, 1, 1)), np.full(batch, 4.0), np.full(batch, 2.0), order)
        layer = Layer((1, 1, 1, 1, 1, 1, 1), stride=(1 + seed % 2, 1))
        hardware = Hardware.of([GemminiMachine(dim=8)] * batch)
        found = Model(rounded=False).estimate(Nests.of([layer] * batch), mappings, hardware)
        return np.array([each.value.min() for each in (found.cycles, found.microjoules, found.edp)])

    assert best(few) == pytest.approx(best(every))
