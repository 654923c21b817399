"""The code of a task for display: the loops or the tile program, and the hottest part of the machine code."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tilewright.codegen.llvm import generator, toolchain
from tilewright.errors import TilewrightError
from tilewright.loops.ir import Program
from tilewright.loops.text import print_program
from tilewright.space.candidates import Candidates
from tilewright.space.implementation import Implementation
from tilewright.space.space import Config
from tilewright.space.template import Work
from tilewright.space.tile_operator import TileCall
from tilewright.tile.text import print_tile_program
from tilewright.tune.choose import choose

_LOOP_LINES, _ASSEMBLY_LINES = 160, 90
_ARITHMETIC = re.compile(
    r"^\s+v?(p?f?n?m?(add|sub|mul|max|min|dp)|div|sqrt|perm|exp)\w*\s.*[xyz]mm|^\s+f?m(la|ul|add)"
)


@dataclass(frozen=True)
class Code:
    config: str
    loops: str  # the program: of loops, or a tile program
    assembly: str  # its innermost loop; "" if not requested
    runs: bool  # whether the model runs exactly this code


def code_of(work: Work, wanted: Sequence[Config], symbol: str = "", *, assembly: bool = True) -> Code | None:
    """The code of the kernel with this symbol, made by one of the configs or chosen without measuring; without a
    symbol, of the first legal config."""
    first: tuple[Config, Program | TileCall] | None = None
    for config, kernel in _kernels(work, wanted):
        runs = symbol == f"tw_{generator.key(kernel, work.machine, work.numerics)}"
        if runs:
            return _shown(work, config, kernel, assembly, runs=True)
        first = first or (config, kernel)
        if not symbol:
            break
    return None if first is None else _shown(work, *first, assembly, runs=False)


def _kernels(work: Work, wanted: Sequence[Config]) -> Iterator[tuple[Config, Program | TileCall]]:
    for config, implementation in _implementations(work, wanted):
        for part in implementation.parts:
            if isinstance(part.body, (Program, TileCall)):
                yield config, part.body


def _implementations(work: Work, wanted: Sequence[Config]) -> Iterator[tuple[Config, Implementation]]:
    candidates = Candidates.of(work)
    for config in wanted:
        if candidates.is_legal(config):
            yield config, candidates.implementation(config)
    try:
        choice = choose(work)
    except TilewrightError:
        return
    yield choice.config, choice.implementation


def _shown(work: Work, config: Config, kernel: Program | TileCall, assembly: bool, *, runs: bool) -> Code:
    source = generator.source(kernel, work.machine, work.numerics) if assembly else ""
    text = hot_loop(toolchain.assembly(source, work.machine)) if assembly else ""
    loops = print_program(kernel) if isinstance(kernel, Program) else print_tile_program(kernel.program)
    return Code(str(config), clipped(loops, _LOOP_LINES), text, runs)


def hot_loop(assembly: str) -> str:
    """The block between two labels with the most vector arithmetic: the innermost loop."""
    blocks: list[list[str]] = [[]]
    for line in assembly.splitlines():
        if re.match(r"[.\w]+:", line):
            blocks.append([])
        elif re.match(r"\s*[.#]", line) or not line.strip():
            continue
        blocks[-1].append(line.split("#")[0].rstrip())
    best = max(blocks, key=lambda block: sum(bool(_ARITHMETIC.match(line)) for line in block))
    return clipped("\n".join(best), _ASSEMBLY_LINES)


def clipped(text: str, lines: int) -> str:
    all_lines = text.splitlines()
    if len(all_lines) <= lines:
        return text
    return "\n".join([*all_lines[:lines], f"... {len(all_lines) - lines} more lines"])
