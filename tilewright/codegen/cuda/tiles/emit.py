"""Tile programs to CUDA C++: one kernel, a block of threads for each program instance.

    axes (contiguity) -> homes (layouts) -> steps (lines of code, and what they access) -> shared memory -> barriers

It does not go through the loop IR, for the reason that the head of `codegen/llvm/tiles/emit.py` gives. Operations run
in the order of the program. Scalars are the same in all threads, so that control flow is too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.codegen.cuda.emit import included
from tilewright.codegen.cuda.tiles.contraction import described
from tilewright.codegen.cuda.tiles.pipeline import Pipelines
from tilewright.codegen.cuda.tiles.tensor_maps import TensorMap
from tilewright.codegen.cuda.tiles.text import THREAD, element_type
from tilewright.codegen.cuda.tiles.values import tile_type
from tilewright.errors import SharedMemoryError
from tilewright.hw.gpu import GpuMachine
from tilewright.tile.executors import Facts
from tilewright.tile.ir import (
    TileProgram,
    TileType,
)
from tilewright.tile.passes.barriers import steps_after_barriers
from tilewright.tile.passes.layouts import Layout
from tilewright.tile.passes.shared_memory import (
    CodeNode,
    GlobalAccess,
    ProgramStep,
    Resource,
    SharedBuffer,
    allocate,
    live_together,
)

SYMBOL = "KERNEL_NAME"


@dataclass(frozen=True)
class TileSource:
    """The text of a kernel, in which SYMBOL stands for its name. `headers` precede all kernels of a translation unit,
    once."""

    name: str
    headers: str
    kernel: str
    threads: int
    shared_bytes: int
    conversions: tuple[str, ...]  # types of the tiles that change their layout through shared memory
    barriers: int
    dots: tuple[str, ...] = ()  # the instruction of each, and why it is not a warpgroup's
    maps: tuple[TensorMap, ...] = ()  # parameters behind those of the program
    unbulked: tuple[str, ...] = ()  # why the copy engine does not bring the loads of pipelined loops

    @property
    def text(self) -> str:
        return f"{self.headers}\n{self.kernel}"


def emit_tile_program(
    program: TileProgram,
    facts: Facts,
    machine: GpuMachine,
    warps: int,
    stages: int = 1,
    *,
    bulk_copies: bool = True,
    grid: tuple[int, int, int] | None = None,
) -> TileSource:
    """The CUDA text of a tile program. Raises SharedMemoryError, at the user's line, if tiles need more shared memory
    than a block may have. `bulk_copies`: False if the launch cannot encode tensor maps. `grid`: the grid, if it is
    known and has one axis."""
    return _Emitter(program, facts, machine, warps.bit_length() - 1, stages, bulk_copies, grid).source()


def headers() -> str:
    return "\n".join(included(name) for name in ("prelude.cuh", "copy_engine.cuh", "tiles/tiles.cuh"))


class _Emitter(Pipelines):
    def source(self) -> TileSource:
        params = []
        for param in self.program.params:
            name = self.name("p")
            params.append(f"{element_type(tile_type(param).element)} {name}")
            self.define(param, self.homes.uniform, name)
        self.block(self.program.body)
        params += [f"const __grid_constant__ TensorMap map{number}" for number in range(len(self.maps))]
        nodes = self.scope.nodes
        offsets, total = allocate(nodes)
        self._check_shared(nodes, offsets, total)
        guarded = steps_after_barriers(nodes, lambda a, b: self._conflict(a, b, offsets))
        lines = [
            f'extern "C" __global__ void __launch_bounds__({self.threads}) {SYMBOL}({", ".join(params)}) {{',
            f"  const int {THREAD} = threadIdx.x;",
        ]
        if offsets:
            lines.append("  extern __shared__ __align__(1024) unsigned char shared[];")
            lines.append("  const unsigned smem = shared_address(shared);")
        if self.maps:
            maps = " ".join(f"prefetch_map(map{number});" for number in range(len(self.maps)))
            lines.append(f"  if ({THREAD} == 0) {{ {maps} }}")
        if self.uses_warp:
            lines.append(f"  const int warp = __shfl_sync(0xffffffffu, {THREAD} >> 5, 0);")
        _Text(lines, guarded).nodes(nodes, 1)
        text = "\n".join([*lines, "}", ""])
        numbers = {buffer.name: str(offset) for buffer, offset in offsets.items()}
        text = re.sub(r"@(\w+)@", lambda found: numbers[found[1]], text)
        functions = "".join(f"{each}\n" for each in self.functions.values())
        return TileSource(
            self.program.name,
            headers(),
            functions + text,
            self.threads,
            total,
            tuple(self.conversions),
            len(guarded),
            tuple(described(plan) for plan in self.homes.plans.values()),
            tuple(self.maps),
            tuple(self.unbulked.values()),
        )

    def _check_shared(self, nodes: Sequence[CodeNode], offsets: dict[SharedBuffer, int], total: int) -> None:
        limit = self.machine.shared_block
        if total <= limit:
            return
        together = live_together(nodes, offsets)
        parts = ", ".join(f"{each.bytes} bytes for {each.what}" for each in together[:3])
        raise SharedMemoryError(
            f"the tiles of kernel {self.program.name} need {total} bytes of shared memory ({parts});"
            f" {self.machine.name} has {limit} for a block",
            where=together[0].where,
        )

    def _conflict(self, a: Resource, b: Resource, offsets: dict[SharedBuffer, int]) -> bool:
        if a is b and isinstance(a, SharedBuffer) and a.ring:
            return False
        if isinstance(a, SharedBuffer) and isinstance(b, SharedBuffer):
            return offsets[a] < offsets[b] + b.bytes and offsets[b] < offsets[a] + a.bytes
        if not isinstance(a, GlobalAccess) or not isinstance(b, GlobalAccess):
            return False
        if a.key is not None and a.key == b.key:
            return False  # each thread comes back to its own
        return not self.facts.disjoint or bool(a.tensors & b.tensors)


class _Text:
    def __init__(self, lines: list[str], guarded: set[ProgramStep]) -> None:
        self.lines, self.guarded = lines, guarded

    def nodes(self, nodes: Sequence[CodeNode], depth: int) -> None:
        pad = "  " * depth
        for node in nodes:
            if isinstance(node, ProgramStep):
                if node in self.guarded:
                    self.lines.append(f"{pad}__syncthreads();")
                self.lines += [each if each.startswith("#") else f"{pad}{each}" for each in node.lines]
                continue
            for part in node.parts:
                self.lines += [f"{pad}{each}" for each in part.head]
                self.nodes(part.nodes, depth + 1)
                self.lines += [f"{pad}  {each}" if each != "}" else f"{pad}}}" for each in part.tail]


__all__ = ["SYMBOL", "Layout", "TileSource", "TileType", "emit_tile_program", "headers"]
