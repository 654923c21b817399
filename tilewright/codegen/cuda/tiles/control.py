"""The order of a program as code: operations one after the other, loops, branches, and what they carry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tilewright.codegen.cuda.tiles.assign import VIEWS, shape_of
from tilewright.codegen.cuda.tiles.dots import Dots
from tilewright.codegen.cuda.tiles.text import element_type, loop
from tilewright.codegen.cuda.tiles.values import BlockPointer, Scope, tile_type
from tilewright.tile.atomics import ATOMICS
from tilewright.tile.ir import Block, BlockPointerType, For, If, Op, Value, While
from tilewright.tile.passes.axes import AxisInfo
from tilewright.tile.passes.shared_memory import Lifespan, ProgramPart

Cell = tuple[str, str, int]  # a variable: name, type, size; a size of 0 is that of a scalar


class PrefetchHooks(Protocol):
    """Code around the iterations of a loop."""

    def begin_iteration(self) -> None: ...
    def end_iteration(self) -> list[str]: ...
    def end(self) -> None: ...


class Control(Dots):
    # -- blocks ------------------------------------------------------------------------------------------------------

    def block(self, block: Block) -> None:
        for node in block.nodes:
            if isinstance(node, Op):
                self.op = node
                self.operation(node)
            elif isinstance(node, For):
                self._for(node)
            elif isinstance(node, While):
                self._while(node)
            else:
                self._if(node)

    def operation(self, op: Op) -> None:
        name = op.name
        if name in ("print", "assert") or op in self.skipped:
            return  # assertions are checked in debug mode; programs that print are not compiled
        if name in ("store", "store_block"):
            self.store(op)
            return
        (result,) = op.results
        self.visited[op] = self.scope
        if isinstance(result.type, BlockPointerType):
            self._block_pointer(op, result)
            return
        layout = self.homes.of(result)
        if op in self.read_back:
            masks, ring = self.read_back[op]
            self.define(result, layout, self.take(tile_type(result).element, layout, masks, ring))
        elif name in ("load", "load_block"):
            self.define(result, layout, self.load(op, result, layout))
        elif name in ATOMICS:
            uniform = layout if shape_of(result) else self.homes.uniform
            self.define(result, uniform, self.atomic(op, result, uniform))
        elif name == "reduce":
            self.define(result, layout, self.reduce(op, result))
        elif name == "cumsum":
            self.define(result, layout, self.cumsum(op, result, layout))
        elif name == "sort":
            self.define(result, layout, self.sort(op, result, layout))
        elif name == "flip":
            self.define(result, layout, self.flip(op, result, layout))
        elif name == "split":
            self.define(result, layout, self.split(op, result))
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
        self.define(result, self.homes.uniform, self.computed(op, result))

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

    def cells(self, values: Sequence[Value], init: Sequence[Value] | None) -> list[list[Cell]]:
        """Variables for values that several paths define, initialised with `init`; each value is (name, type, size),
        and the size of a scalar is 0."""
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
        """The variables of a value, in another layout."""
        if isinstance(value.type, BlockPointerType):
            pointer = self.blocks[value]
            return [pointer.base, *pointer.shape, *pointer.strides, *pointer.offsets]
        return [self.get(value, self.homes.of(like))]

    def define_cells(self, values: Sequence[Value], cells: Sequence[list[Cell]]) -> None:
        for value, own in zip(values, cells, strict=True):
            names = tuple(name for name, _, _ in own)
            if isinstance(value.type, BlockPointerType):
                rank = len(value.type.block)
                self.blocks[value] = BlockPointer(
                    names[0], names[1 : 1 + rank], names[1 + rank : 1 + 2 * rank], names[1 + 2 * rank :]
                )
            else:
                self.define(value, self.homes.of(value), names[0])

    def assigned(
        self, cells: Sequence[list[Cell]], values: Sequence[Value], like: Sequence[Value]
    ) -> list[str]:
        """Assign all cells at once: values of other cells are copied before any cell is written."""
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

    def more(self, node: For, counter: str) -> str:
        """The condition for another iteration of a loop."""
        upper, step = self.scalar(node.upper), self.scalar(node.step)
        info = self.axes[node.step]
        known = info.value if isinstance(info, AxisInfo) else None
        up, down = f"{counter} < {upper}", f"{counter} > {upper}"
        return f"({step} > 0 ? {up} : {down})" if not known else up if known > 0 else down

    def _for(self, node: For) -> None:
        cells = self.cells(node.results, node.init)
        prefetch = self.prefetch(node)
        lower, step = self.scalar(node.lower), self.scalar(node.step)
        index, *params = node.body.params
        counter, name = self.name("n"), self.name()
        more = self.more(node, counter)
        with self.inside() as scope:
            if prefetch is not None:
                prefetch.begin_iteration()
            self.define(index, self.homes.uniform, name)
            self.define_cells(params, cells)
            self.block(node.body)
            assert self.pending is None, "a dot of the body starts the copies"
            tail = self.assigned(cells, node.body.yields, node.results)
            if prefetch is not None:
                tail += prefetch.end_iteration()
        kind = element_type(tile_type(index).element)
        head = [
            f"#pragma unroll 1\nfor (i64 {counter} = {lower}; {more}; {counter} += {step}) {{",
            f"  const {kind} {name} = ({kind}){counter};",
        ]
        self.region(True, [(head, scope, [*tail, "}"])])
        if prefetch is not None:
            prefetch.end()
        self.define_cells(node.results, cells)

    def prefetch(self, node: For) -> PrefetchHooks | None:
        """The prefetches of operands for later iterations; `pipeline.py` implements it."""
        return None

    def _while(self, node: While) -> None:
        cells = self.cells(node.results, node.init)
        with self.inside() as condition:
            self.define_cells(node.condition.params, cells)
            self.block(node.condition)
            more = self.scalar(node.condition.yields[0])
            with self.inside() as body:
                self.define_cells(node.body.params, cells)
                self.block(node.body)
                tail = self.assigned(cells, node.body.yields, node.results)
        parts = [(["while (true) {"], condition, [f"  if (!{more}) break;"]), ([], body, [*tail, "}"])]
        self.region(True, parts)
        self.define_cells(node.results, cells)

    def _if(self, node: If) -> None:
        cells = self.cells(node.results, None)
        condition = self.scalar(node.condition)
        parts = []
        for number, block in enumerate((node.then, node.other)):
            with self.inside() as scope:
                self.block(block)
                tail = self.assigned(cells, block.yields, node.results)
            head = [f"if ({condition}) {{"] if number == 0 else ["} else {"]
            parts.append((head, scope, tail if number == 0 else [*tail, "}"]))
        self.region(False, parts)
        self.define_cells(node.results, cells)

    def region(self, loop: bool, parts: Sequence[tuple[list[str], Scope, list[str]]]) -> None:
        made = [ProgramPart(head, scope.nodes, tail) for head, scope, tail in parts]
        self.scope.nodes.append(Lifespan(loop, made))


def _copied(cells: Sequence[tuple[str, str, int]], held: Sequence[str]) -> list[str]:
    lines = []
    for (name, _, size), source in zip(cells, held, strict=True):
        if name == source:
            continue
        lines += loop("r", size, f"{name}[r] = {source}[r];") if size else [f"{name} = {source};"]
    return lines
