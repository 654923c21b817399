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
from tilewright.codegen.cuda.tiles.assign import VIEWS, shape_of
from tilewright.codegen.cuda.tiles.dots import Dots
from tilewright.codegen.cuda.tiles.text import THREAD, element_type, loop
from tilewright.codegen.cuda.tiles.values import BlockPointer, Scope, tile_type
from tilewright.errors import SharedMemoryError
from tilewright.hw.gpu import GpuMachine
from tilewright.tile.executors import Facts
from tilewright.tile.ir import (
    Block,
    BlockPointerType,
    For,
    If,
    Op,
    TileProgram,
    TileType,
    Value,
    While,
)
from tilewright.tile.passes.axes import AxisInfo
from tilewright.tile.passes.barriers import steps_behind_barriers
from tilewright.tile.passes.layouts import Layout
from tilewright.tile.passes.shared_memory import (
    CodeNode,
    GlobalAccess,
    Part,
    Region,
    Resource,
    SharedBuffer,
    Step,
    allocate,
    live_together,
)

SYMBOL = "KERNEL_NAME"


@dataclass(frozen=True)
class TileSource:
    """A kernel in which SYMBOL stands for its name. `headers` come before it, once for all kernels of a text."""

    name: str
    headers: str
    kernel: str
    threads: int
    shared_bytes: int
    conversions: tuple[str, ...]  # types of the tiles that change their layout through shared memory
    barriers: int

    @property
    def text(self) -> str:
        return f"{self.headers}\n{self.kernel}"


def emit_tile_program(program: TileProgram, facts: Facts, machine: GpuMachine, warps: int) -> TileSource:
    """SharedMemoryError, at the user's line, where tiles need more shared memory than a block may have."""
    return _Emitter(program, facts, machine, warps.bit_length() - 1).source()


def headers() -> str:
    return "\n".join(included(name) for name in ("prelude.cuh", "tiles/tiles.cuh"))


class _Emitter(Dots):
    def source(self) -> TileSource:
        params = []
        for param in self.program.params:
            name = self.name("p")
            params.append(f"{element_type(tile_type(param).element)} {name}")
            self.define(param, self.homes.uniform, name)
        self.block(self.program.body)
        nodes = self.scope.nodes
        offsets, total = allocate(nodes)
        self._check_shared(nodes, offsets, total)
        behind = steps_behind_barriers(nodes, lambda a, b: self._conflict(a, b, offsets))
        lines = [
            f'extern "C" __global__ void __launch_bounds__({self.threads}) {SYMBOL}({", ".join(params)}) {{',
            f"  const int {THREAD} = threadIdx.x;",
        ]
        if offsets:
            lines.append("  extern __shared__ __align__(128) unsigned char shared[];")
            lines.append("  const unsigned smem = shared_address(shared);")
        _Text(lines, behind).nodes(nodes, 1)
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
            len(behind),
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
        if isinstance(a, SharedBuffer) and isinstance(b, SharedBuffer):
            return offsets[a] < offsets[b] + b.bytes and offsets[b] < offsets[a] + a.bytes
        if not isinstance(a, GlobalAccess) or not isinstance(b, GlobalAccess):
            return False
        if a.key is not None and a.key == b.key:
            return False  # each thread comes back to its own
        return not self.facts.disjoint or bool(a.tensors & b.tensors)

    # -- blocks ------------------------------------------------------------------------------------------------------

    def block(self, block: Block) -> None:
        for node in block.nodes:
            if isinstance(node, Op):
                self.op = node
                self._op(node)
            elif isinstance(node, For):
                self._for(node)
            elif isinstance(node, While):
                self._while(node)
            else:
                self._if(node)

    def _op(self, op: Op) -> None:
        name = op.name
        if name in ("print", "assert"):
            return  # assertions are checked in debug mode; programs that print are not compiled
        if name in ("store", "store_block"):
            self.store(op)
            return
        (result,) = op.results
        if isinstance(result.type, BlockPointerType):
            self._block_pointer(op, result)
            return
        layout = self.homes.of(result)
        if name in ("load", "load_block"):
            self.define(result, layout, self.load(op, result, layout))
        elif name == "atomic_add":
            uniform = layout if shape_of(result) else self.homes.uniform
            self.define(result, uniform, self.atomic(op, result, uniform))
        elif name == "reduce":
            self.define(result, layout, self.reduce(op, result))
        elif name == "cumsum":
            self.define(result, layout, self.cumsum(op, result, layout))
        elif name == "sort":
            self.define(result, layout, self.sort(op, result, layout))
        elif name == "dot":
            self.define(result, layout, self.dot(op, result))
        elif not shape_of(result):
            self._scalar(op, result)
        elif name not in VIEWS and not self.homes.is_cheap(result):
            self.define(result, layout, self.elementwise(op, result, layout))

    def _scalar(self, op: Op, result: Value) -> None:
        if op.name in VIEWS:
            self.define(result, self.homes.uniform, self.view(op, result, self.homes.uniform))
            return
        text = self.expression(op, [self.scalar(each) for each in op.operands])
        if op.name == "constant":
            self.define(result, self.homes.uniform, text)
            return
        name = self.name()
        self.step([f"{element_type(tile_type(result).element)} const {name} = {text};"])
        self.define(result, self.homes.uniform, name)

    def _block_pointer(self, op: Op, result: Value) -> None:
        assert isinstance(result.type, BlockPointerType)
        numbers = [f"(i64)({self.scalar(each)})" for each in op.operands[1:]]
        if op.name == "advance":
            old = self.blocks[op.operands[0]]
            moved = [f"{a} + {b}" for a, b in zip(old.offsets, numbers, strict=True)]
            names = self._numbers(moved)
            self.blocks[result] = BlockPointer(old.base, old.shape, old.strides, tuple(names))
            return
        names = self._numbers(numbers)
        rank = len(result.type.block)
        parts = [tuple(names[i * rank : (i + 1) * rank]) for i in range(3)]
        self.blocks[result] = BlockPointer(self.scalar(op.operands[0]), *parts)

    def _numbers(self, texts: Sequence[str]) -> list[str]:
        names = [self.name() for _ in texts]
        self.step([f"const i64 {name} = {text};" for name, text in zip(names, texts, strict=True)])
        return names

    # -- control flow ------------------------------------------------------------------------------------------------

    def _cells(
        self, values: Sequence[Value], init: Sequence[Value] | None
    ) -> list[list[tuple[str, str, int]]]:
        """Variables for what several ways give, set to `init`: of each value (name, type, size), a size of 0 being that
        of a scalar."""
        found = []
        for n, value in enumerate(values):
            if isinstance(value.type, BlockPointerType):
                rank = len(value.type.block)
                cells = [(self.name(), f"{element_type(value.type.dtype)}*", 0)]
                cells += [(self.name(), "i64", 0) for _ in range(3 * rank)]
            else:
                layout = self.homes.of(value)
                kind = tile_type(value)
                cells = [(self.name(), element_type(kind.element), layout.size if kind.shape else 0)]
            lines = [f"{kind} {name}{f'[{size}]' if size else ''};" for name, kind, size in cells]
            if init is not None:
                lines += _copied(cells, self._held(init[n], value))
            self.step(lines)
            found.append(cells)
        return found

    def _held(self, value: Value, like: Value) -> list[str]:
        """The variables of a value, in the layout of another."""
        if isinstance(value.type, BlockPointerType):
            pointer = self.blocks[value]
            return [pointer.base, *pointer.shape, *pointer.strides, *pointer.offsets]
        return [self.get(value, self.homes.of(like))]

    def _define_cells(self, values: Sequence[Value], cells: Sequence[list[tuple[str, str, int]]]) -> None:
        for value, own in zip(values, cells, strict=True):
            names = tuple(name for name, _, _ in own)
            if isinstance(value.type, BlockPointerType):
                rank = len(value.type.block)
                self.blocks[value] = BlockPointer(
                    names[0], names[1 : 1 + rank], names[1 + rank : 1 + 2 * rank], names[1 + 2 * rank :]
                )
            else:
                self.define(value, self.homes.of(value), names[0])

    def _assigned(
        self, cells: Sequence[list[tuple[str, str, int]]], values: Sequence[Value], like: Sequence[Value]
    ) -> list[str]:
        """All at once: what is another cell's is copied before any cell is written."""
        every = {name for own in cells for name, _, _ in own}
        first: list[str] = []
        last: list[str] = []
        for own, value, target in zip(cells, values, like, strict=True):
            held = self._held(value, target)
            for n, (cell, source) in enumerate(zip(own, held, strict=True)):
                if source in every and source != cell[0]:
                    spare = self.name()
                    first.append(f"{cell[1]} {spare}{f'[{cell[2]}]' if cell[2] else ''};")
                    first += _copied([(spare, *cell[1:])], [source])
                    held[n] = spare
            last += _copied(own, held)
        return [*first, *last]

    def _for(self, node: For) -> None:
        cells = self._cells(node.results, node.init)
        lower, upper, step = (self.scalar(each) for each in (node.lower, node.upper, node.step))
        index, *params = node.body.params
        counter, name = self.name("n"), self.name()
        info = self.axes[node.step]
        known = info.value if isinstance(info, AxisInfo) else None
        up, down = f"{counter} < {upper}", f"{counter} > {upper}"
        more = f"({step} > 0 ? {up} : {down})" if not known else up if known > 0 else down
        with self.inside() as scope:
            self.define(index, self.homes.uniform, name)
            self._define_cells(params, cells)
            self.block(node.body)
            tail = self._assigned(cells, node.body.yields, node.results)
        kind = element_type(tile_type(index).element)
        head = [
            f"#pragma unroll 1\nfor (i64 {counter} = {lower}; {more}; {counter} += {step}) {{",
            f"  const {kind} {name} = ({kind}){counter};",
        ]
        self._region(True, [(head, scope, [*tail, "}"])])
        self._define_cells(node.results, cells)

    def _while(self, node: While) -> None:
        cells = self._cells(node.results, node.init)
        with self.inside() as condition:
            self._define_cells(node.condition.params, cells)
            self.block(node.condition)
            more = self.scalar(node.condition.yields[0])
            with self.inside() as body:
                self._define_cells(node.body.params, cells)
                self.block(node.body)
                tail = self._assigned(cells, node.body.yields, node.results)
        parts = [(["while (true) {"], condition, [f"  if (!{more}) break;"]), ([], body, [*tail, "}"])]
        self._region(True, parts)
        self._define_cells(node.results, cells)

    def _if(self, node: If) -> None:
        cells = self._cells(node.results, None)
        condition = self.scalar(node.condition)
        parts = []
        for number, block in enumerate((node.then, node.other)):
            with self.inside() as scope:
                self.block(block)
                tail = self._assigned(cells, block.yields, node.results)
            head = [f"if ({condition}) {{"] if number == 0 else ["} else {"]
            parts.append((head, scope, tail if number == 0 else [*tail, "}"]))
        self._region(False, parts)
        self._define_cells(node.results, cells)

    def _region(self, loop: bool, parts: Sequence[tuple[list[str], Scope, list[str]]]) -> None:
        made = [Part(head, scope.nodes, tail) for head, scope, tail in parts]
        self.scope.nodes.append(Region(loop, made))


def _copied(cells: Sequence[tuple[str, str, int]], held: Sequence[str]) -> list[str]:
    lines = []
    for (name, _, size), source in zip(cells, held, strict=True):
        if name == source:
            continue
        lines += loop("r", size, f"{name}[r] = {source}[r];") if size else [f"{name} = {source};"]
    return lines


class _Text:
    def __init__(self, lines: list[str], behind: set[Step]) -> None:
        self.lines, self.behind = lines, behind

    def nodes(self, nodes: Sequence[CodeNode], depth: int) -> None:
        pad = "  " * depth
        for node in nodes:
            if isinstance(node, Step):
                if node in self.behind:
                    self.lines.append(f"{pad}__syncthreads();")
                self.lines += [each if each.startswith("#") else f"{pad}{each}" for each in node.lines]
                continue
            for part in node.parts:
                self.lines += [f"{pad}{each}" for each in part.head]
                self.nodes(part.nodes, depth + 1)
                self.lines += [f"{pad}  {each}" if each != "}" else f"{pad}}}" for each in part.tail]


__all__ = ["SYMBOL", "Layout", "TileSource", "TileType", "emit_tile_program", "headers"]
