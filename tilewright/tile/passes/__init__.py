"""Passes on tile programs: one a file, each a function TileProgram -> TileProgram, checked after it has run.

    program = run_passes(program, STANDARD)            # standard.py: what every code generator runs first

A pass keeps the meaning: the interpreter gives the same before and after. It may rely on what a program leaves
undefined (a masked element without `other`, a race), and may not add effects or reorder those of one instance. A pass
returns the program itself where it changes nothing. Analyses (`axes.py`) are functions too, and change nothing.
"""

from tilewright.tile.passes.manager import Pass, run_passes

__all__ = ["Pass", "run_passes"]
