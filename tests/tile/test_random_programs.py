"""Random tile programs are legal, have a text, and compute what NumPy computes."""

from __future__ import annotations

import numpy as np
import pytest

from tests.tile.generator import generate
from tests.tile.random_programs import check
from tilewright.tile.interpret import interpret
from tilewright.tile.ir import For, If, Op, walk
from tilewright.tile.kernel import tensor_argument
from tilewright.tile.verify import verify_tile_program

SEEDS = range(200)


@pytest.mark.parametrize("first", range(0, len(SEEDS), 25))
def test_random_programs(first: int) -> None:
    for seed in SEEDS[first : first + 25]:
        made = generate(seed)
        verify_tile_program(made.program)
        text = str(made.program)
        assert "%undefined" not in text and text == str(generate(seed).program), seed
        tensors = [tensor_argument(name, array) for name, array in made.arrays.items()]
        interpret(made.program, (1, 1, 1), tensors, {}, debug=True, unwritten=list(made.wanted))
        for name, wanted in made.wanted.items():
            np.testing.assert_array_equal(made.arrays[name], wanted, err_msg=f"seed {seed}\n{text}")


@pytest.mark.parametrize("first", range(0, len(SEEDS), 25))
def test_compiled_random_programs(first: int) -> None:
    for seed in SEEDS[first : first + 25]:
        check(seed)


def test_the_generator_reaches_every_kind_of_node() -> None:
    seen: set[str] = set()
    for seed in SEEDS:
        for node in walk(generate(seed).program.body):
            seen.add(node.name if isinstance(node, Op) else type(node).__name__)
    assert {
        For.__name__,
        If.__name__,
        "dot",
        "reduce",
        "select",
        "join",
        "sort",
        "cumsum",
        "trans",
        "cast",
    } <= seen
