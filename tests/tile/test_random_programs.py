"""Random tile programs are legal, have a text, and compute what NumPy computes."""

from __future__ import annotations

import pytest

from tests.tile.generator import generate
from tests.tile.random_programs import check
from tilewright.tile.atomics import ATOMICS
from tilewright.tile.ir import For, If, Op, While, walk
from tilewright.tile.verify import verify_tile_program

SEEDS = range(200)


@pytest.mark.parametrize("first", range(0, len(SEEDS), 25))
def test_random_programs(first: int) -> None:
    for seed in SEEDS[first : first + 25]:
        made = generate(seed)
        verify_tile_program(made.program)
        text = str(made.program)
        assert "%undefined" not in text and text == str(generate(seed).program), seed
        made.interpret()
        made.check(made.arrays, f"seed {seed}")


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
        *(each.__name__ for each in (For, If, While)),
        *ATOMICS,
        "load_block",
        "store_block",
        "advance",
        "program_id",
        "num_programs",
        "load",
        "store",
        "dot",
        "reduce",
        "select",
        "join",
        "sort",
        "cumsum",
        "trans",
        "cast",
        "exp",
        "div",
    } <= seen
    assert any(
        isinstance(node, Op) and node.settings.get("precision") == "tf32"
        for seed in SEEDS
        for node in walk(generate(seed).program.body)
    )
