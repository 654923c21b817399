"""The executor of tile kernels on the simulated Gemmini: `tile/executors.py` has the contract.

Loops of a program have fixed bounds and addresses, so a launch is compiled for its grid and numbers; launches with the
same ones share the program. Tensors are copied to the simulated DRAM as far as the program accesses them, and back.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from tilewright.codegen.gemmini.cycles import Cycles, simulate
from tilewright.codegen.gemmini.tiles.lower import Loops, lower, refuse
from tilewright.codegen.gemmini.tiles.select import Selected, placed, select
from tilewright.errors import KernelArgumentError, OptionError, PipelineError
from tilewright.hw.gemmini import SCRATCHPAD, GemminiMachine
from tilewright.hw.gemmini_system import machine_named
from tilewright.loops.ir import Program, local_buffers
from tilewright.loops.passes.pipeline import pipeline
from tilewright.runtime.gemmini import Functional, Instruction, verify
from tilewright.tile.executors import Facts, Launchable, Options
from tilewright.tile.ir import TileProgram, TileType

_ALIGNMENT = 64
_STAGES = 2


@dataclass(frozen=True)
class Compiled:
    """A launch as a program. `regions`: for each accessed tensor, its first byte in DRAM and which of its bytes are
    there. `stages`: the number of buffers of the loaded tiles; `reason`: why it is 1 although 2 were possible."""

    machine: GemminiMachine
    loops: Program
    program: list[Instruction]
    regions: Mapping[str, tuple[int, int, int]]
    stored: frozenset[str]
    dram_bytes: int
    stages: int
    reason: str

    @cached_property
    def cycles(self) -> Cycles:
        """The cycles that the cycle-level simulator counts."""
        return simulate(self.program, self.machine)

    def run(self, addresses: Mapping[str, int]) -> None:
        dram = np.zeros(self.dram_bytes, np.uint8)
        arrays = {
            name: np.ctypeslib.as_array((ctypes.c_uint8 * (high - low)).from_address(addresses[name] + low))
            for name, (_, low, high) in self.regions.items()
        }
        for name, array in arrays.items():
            start = self.regions[name][0]
            dram[start : start + array.size] = array
        Functional(self.machine, dram).execute(self.program)
        for name in self.stored:
            start = self.regions[name][0]
            arrays[name][:] = dram[start : start + arrays[name].size]


def compiled(
    program: TileProgram,
    grid: tuple[int, int, int],
    scalars: Mapping[str, bool | int | float],
    machine: GemminiMachine,
    stages: int | None = None,
    sizes: Mapping[str, int] | None = None,
) -> Compiled:
    """Compile a launch. Raises AcceleratorMatchError, with the user's line, if the accelerator cannot run it. `sizes`:
    bytes of each tensor, all of which are then in DRAM."""
    loops = lower(program, grid, scalars)
    pipelined, used, reason = _pipelined(loops, machine, stages)
    found = select(loops, pipelined, machine)
    regions, at = {}, _ALIGNMENT
    if sizes is not None:
        spans = {name: (0, size) for name, size in sizes.items()}
        for name, (low, high) in found.spans.items():
            if low < 0 or high > sizes[name]:
                refuse(
                    f"bytes {low} to {high} of `{name}` are accessed, which has {sizes[name]}",
                    loops.where.get(name),
                )
    else:
        spans = found.spans
    for name, (low, high) in spans.items():
        regions[name] = (at, low, high)
        at += -(-(high - low) // _ALIGNMENT) * _ALIGNMENT
    instructions = _linked(found, regions)
    verify(instructions, machine)
    return Compiled(machine, pipelined, instructions, regions, frozenset(found.stored), at, used, reason)


def _pipelined(loops: Loops, machine: GemminiMachine, stages: int | None) -> tuple[Program, int, str]:
    """The program with pipelined loads if that is legal and fits; the number of stages, and the reason if it is 1."""
    wanted = _STAGES if stages is None else stages
    tiles = [buffer.name for buffer in local_buffers(loops.program) if buffer.scope is SCRATCHPAD]
    if wanted == 1 or not tiles:
        return loops.program, 1, ""
    try:
        found = pipeline(loops.program, dict.fromkeys(tiles, wanted))
    except PipelineError as error:
        if stages is not None:
            raise
        return loops.program, 1, error.message
    _, (rows, _) = placed(loops, found, machine.dim)
    if rows > machine.scratchpad_rows and stages is None:
        return (
            loops.program,
            1,
            f"{wanted} stages take {rows} rows of a scratchpad of {machine.scratchpad_rows}",
        )
    return found, wanted, ""


def _linked(found: Selected, regions: Mapping[str, tuple[int, int, int]]) -> list[Instruction]:
    """Replace addresses of parameters by addresses in DRAM."""
    program = list(found.program)
    for at, name in found.operands.items():
        start, low, _ = regions[name]
        dram, *rest = program[at].values
        program[at] = replace(program[at], values=(dram - low + start, *rest))
    return program


class Executor:
    """`target`: "gemmini", optionally with the machine's parameters after a colon, as for `tilewright.compile`.
    `stages`: the number of buffers of the tiles that loops load; 2 if possible."""

    wants_divisors = False

    def compile(self, program: TileProgram, facts: Facts, options: Options) -> Launchable | None:
        machine, stages = _machine(options)
        if not facts.disjoint:
            raise KernelArgumentError(
                "tensors of a launch on the accelerator must not overlap", remedy="pass a copy of one of them"
            )
        return _Launches(program, machine, stages)

    def source(self, program: TileProgram, facts: Facts, options: Options) -> str:
        raise OptionError(
            "a program of the accelerator depends on the grid, which is not given here",
            remedy="use tilewright.codegen.gemmini.tiles.executor.launch(kernel, grid, ...).program",
        )


def launch(
    kernel: Any, grid: Any, /, *args: Any, target: str = "gemmini", stages: int | None = None, **kwargs: Any
) -> Compiled:
    """The loops, instructions and cycles of a launch with these arguments."""
    bound = kernel.bind(args, kwargs)
    arguments, _ = kernel.describe(bound)
    machine, _ = _machine({"target": target})
    return compiled(
        kernel.program(*args, **kwargs), kernel.grid_of(grid, bound), arguments.scalars, machine, stages
    )


def _machine(options: Options) -> tuple[GemminiMachine, int | None]:
    for name in options:
        if name not in ("target", "stages"):
            raise OptionError(
                f"a tile kernel on Gemmini has no option {name!r}", remedy="it takes target and stages"
            )
    stages = options.get("stages")
    if stages is not None and (not isinstance(stages, int) or isinstance(stages, bool) or stages < 1):
        raise OptionError(f"stages must be 1 or more, got {stages!r}")
    return machine_named(str(options["target"]).partition(":")[2]), stages


class _Launches:
    """The programs of a kernel by grid and scalar arguments."""

    def __init__(self, program: TileProgram, machine: GemminiMachine, stages: int | None) -> None:
        self._program, self._machine, self._stages = program, machine, stages
        self._known: dict[Any, Compiled] = {}

    def __call__(self, grid: tuple[int, int, int], values: Sequence[Any], /) -> None:
        addresses: dict[str, int] = {}
        scalars: dict[str, bool | int | float] = {}
        for param, value in zip(self._program.params, values, strict=True):
            assert isinstance(param.type, TileType)
            (addresses if param.type.is_pointer else scalars)[param.name] = value
        key = (grid, tuple(scalars.items()))
        if key not in self._known:
            self._known[key] = compiled(self._program, grid, scalars, self._machine, self._stages)
        self._known[key].run(addresses)
