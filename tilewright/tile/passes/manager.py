"""Runs passes in order and verifies the program after each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewright.errors import VerificationError
from tilewright.tile.ir import TileProgram
from tilewright.tile.verify import verify_tile_program

Pass = Callable[[TileProgram], TileProgram]


def run_passes(program: TileProgram, passes: Sequence[Pass]) -> TileProgram:
    """The program after all passes. Raises VerificationError, naming the pass, if a pass makes an illegal program."""
    for each in passes:
        after = each(program)
        if after is program:
            continue
        try:
            verify_tile_program(after)
        except VerificationError as error:
            raise VerificationError(f"after the pass {each.__module__.rpartition('.')[2]}: {error}") from None
        program = after
    return program
