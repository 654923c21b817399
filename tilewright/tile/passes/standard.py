"""The passes that every code generator runs first, in this order. Debug mode runs the program as it was written."""

from __future__ import annotations

from tilewright.tile.ir import TileProgram
from tilewright.tile.passes.common_subexpressions import common_subexpressions
from tilewright.tile.passes.dead_code import dead_code
from tilewright.tile.passes.hoist import hoist
from tilewright.tile.passes.manager import Pass, run_passes
from tilewright.tile.passes.peephole import peephole

STANDARD: tuple[Pass, ...] = (
    peephole,  # first: it makes more expressions equal
    common_subexpressions,  # before hoisting, which would move both
    hoist,
    common_subexpressions,  # what left two loops may be equal now
    dead_code,  # last: it removes what the others have left without a user
)


def simplified(program: TileProgram) -> TileProgram:
    return run_passes(program, STANDARD)
