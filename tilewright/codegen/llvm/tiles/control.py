"""Loops and branches: what they carry has a cell, which is a buffer, or a register once LLVM has promoted it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from tilewright.codegen.llvm.tiles.roots import Roots
from tilewright.codegen.llvm.tiles.values import (
    BlockPointer,
    Buffer,
    Lazy,
    Location,
    register_type,
    tile_type,
)
from tilewright.codegen.llvm.types import I64
from tilewright.dtypes import DType
from tilewright.tile.ir import (
    Block,
    BlockPointerType,
    For,
    If,
    Node,
    Op,
    Value,
    While,
)


class Control(Roots):
    instances: ir.Value  # of the whole launch, as a double

    def block(self, block: Block) -> None:
        """Emit the code of a block's nodes; the emitter implements it."""
        raise NotImplementedError

    # -- control flow ------------------------------------------------------------------------------------------------

    def _cell(self, value: Value, known: Any, fixed: bool = False) -> Any:
        """A stack location for a value that differs between paths."""
        if isinstance(known, BlockPointer):
            count = len(known.offsets)
            return known if fixed else None, [
                self.alloca(I64) for _ in range(count if fixed else 1 + 3 * count)
            ]
        kind = tile_type(value)
        return (
            self.buffer(kind.element, kind.shape) if kind.shape else self.alloca(register_type(kind.element))
        )

    def _numbers(self, pointer: BlockPointer, fixed: bool) -> list[ir.Value]:
        if fixed:
            return list(pointer.offsets)
        return [pointer.base, *pointer.shape, *pointer.strides, *pointer.offsets]

    def _put(self, cells: Sequence[Any], values: Sequence[Value]) -> None:
        """Assign all cells at once: all reads come before the first write."""
        whole = {id(cell): cell for cell in cells if isinstance(cell, Buffer)}
        lazy, copies = [], []
        for cell, value in zip(cells, values, strict=True):
            if not isinstance(cell, Buffer):
                continue
            known = self.env[value]
            if isinstance(known, Lazy):
                lazy.append((cell, value))
            elif known is not cell:
                if id(known) in whole:  # another one's cell: read before it is written
                    spare = self.buffer(cell.element, cell.shape)
                    self.materialise(value, spare)
                    copies.append((cell, spare))
                else:
                    copies.append((cell, known))
        for cell, value in lazy:
            self.prepare([value], cell.shape)
        plain = len({cell.shape for cell, _ in lazy}) <= 1 and self._elementwise_in_cells(
            [v for _, v in lazy], whole
        )
        if lazy and plain:
            shape = lazy[0][0].shape
            evaluated = self.begin([value for _, value in lazy], shape)
            for value in list(self.keeping):  # what only the block yields goes to its cell alone
                if all(user in self.done or isinstance(user, Block) for user in self.users[value]):
                    del self.keeping[value]

            def written(locations: list[Location]) -> None:
                for location in locations:
                    self.memo = {}
                    chunks = [self.at(value, location) for _, value in lazy]
                    self.kept(location)
                    for (cell, _), chunk in zip(lazy, chunks, strict=True):
                        self.write(cell, location, chunk)

            self.each([value for _, value in lazy], shape, 2, written)
            self.memo = {}
            self.finish([value for value in evaluated if value not in {v for _, v in lazy}])
        else:
            for cell, value in lazy:
                copies.append((cell, self.materialise(value)))
        for cell, source in copies:
            with self.over(cell.shape, 4) as locations:
                for location in locations:
                    self.write(cell, location, self.read(source, location))
        for cell, value in zip(cells, values, strict=True):
            if isinstance(cell, tuple):
                base, slots = cell
                for slot, number in zip(slots, self._numbers(self.env[value], base is not None), strict=True):
                    self.builder.store(number, slot)
        scalars = [
            (c, self.env[v]) for c, v in zip(cells, values, strict=True) if not isinstance(c, (Buffer, tuple))
        ]
        for cell, number in scalars:
            self.builder.store(number, cell)

    def _elementwise_in_cells(self, values: list[Value], cells: dict[int, Any]) -> bool:
        """Whether each element of these depends only on the same element of the cells."""
        for value in self.expression(values):
            op = self.env[value].op
            if op.name in ("broadcast", "trans", "expand_dims"):
                under = [o for v in self.expression(op.operands) for o in self.env[v].op.operands]
                for inner in (*op.operands, *under):
                    if id(self.env.get(inner)) in cells:
                        return False
        return True

    def _get(self, cell: Any, value: Value) -> None:
        if isinstance(cell, tuple):
            base, slots = cell
            numbers = [self.builder.load(slot, typ=I64) for slot in slots]
            assert isinstance(value.type, BlockPointerType)
            if base is not None:
                self.env[value] = BlockPointer(
                    base.base, base.shape, base.strides, tuple(numbers), value.type
                )
                return
            rank = len(value.type.block)
            parts = [tuple(numbers[1 + i * rank : 1 + (i + 1) * rank]) for i in range(3)]
            self.env[value] = BlockPointer(numbers[0], parts[0], parts[1], parts[2], value.type)
        elif isinstance(cell, Buffer):
            self.env[value] = cell
        else:
            self.env[value] = self.builder.load(cell, typ=register_type(tile_type(value).element))

    def _advances(self, body: Block, param: Value, final: Value) -> bool:
        """Whether a carried block pointer is only advanced: then its base, sizes and strides stay constant."""
        made = {node.results[0]: node for node in body.nodes if isinstance(node, Op) and node.results}
        while final is not param:
            op = made.get(final)
            if op is None or op.name != "advance":
                return False
            final = op.operands[0]
        return True

    def _carried(self, node: For | While, params: Sequence[Value]) -> list[Any]:
        cells = []
        for first, param, final in zip(node.init, params, node.body.yields, strict=True):
            known = self.env[first]
            fixed = isinstance(known, BlockPointer) and self._advances(node.body, param, final)
            cells.append(self._cell(first, known, fixed))
            if fixed:
                self.origins[param] = self.origins.get(first)
        self._put(cells, node.init)
        return cells

    def _for(self, node: For) -> None:
        builder = self.builder
        index, *params = node.body.params
        kind = tile_type(index)
        lower, upper, step = (
            self.convert(self.env[each], kind.dtype, DType.I64)
            for each in (node.lower, node.upper, node.step)
        )
        cells = self._carried(node, params)
        counter = self.alloca(I64)
        builder.store(lower, counter)
        double = ir.DoubleType()
        trips = builder.fdiv(builder.sitofp(builder.sub(upper, lower), double), builder.sitofp(step, double))
        head, body, after = (builder.append_basic_block(name) for name in ("for", "body", "end"))
        builder.branch(head)
        builder.position_at_end(head)
        now = builder.load(counter, typ=I64)
        up = builder.icmp_signed(">", step, I64(0))
        more = builder.select(up, builder.icmp_signed("<", now, upper), builder.icmp_signed(">", now, upper))
        builder.cbranch(more, body, after)
        builder.position_at_end(body)
        self.memo = {}
        self.env[index] = self.convert(now, DType.I64, kind.dtype)
        for cell, param in zip(cells, params, strict=True):
            self._get(cell, param)
        self.pending = {}
        self.trips.append(trips)
        self.block(node.body)
        self.trips.pop()
        self._put(cells, node.body.yields)
        builder.store(builder.add(now, step), counter)
        builder.branch(head)
        builder.position_at_end(after)
        self._results(cells, node)

    def _results(self, cells: Sequence[Any], node: Node) -> None:
        self.memo = {}
        for cell, result in zip(cells, node.results, strict=True):
            self._get(cell, result)

    def _while(self, node: While) -> None:
        builder = self.builder
        cells = self._carried(node, node.body.params)
        head, body, after = (builder.append_basic_block(name) for name in ("while", "body", "end"))
        builder.branch(head)
        builder.position_at_end(head)
        self.pending = {}
        for params, block in ((node.condition.params, node.condition), (node.body.params, node.body)):
            self.memo = {}
            for cell, param in zip(cells, params, strict=True):
                self._get(cell, param)
            self.block(block)
            if block is node.condition:
                builder.cbranch(self.env[block.yields[0]], body, after)
                builder.position_at_end(body)
        self._put(cells, node.body.yields)
        builder.branch(head)
        builder.position_at_end(after)
        self._results(cells, node)

    def _if(self, node: If) -> None:
        builder = self.builder
        cells: list[Any] = []
        for result in node.results:
            if isinstance(result.type, BlockPointerType):
                cells.append((None, [self.alloca(I64) for _ in range(1 + 3 * len(result.type.block))]))
            else:
                cells.append(self._cell(result, None))
        before = self.env
        with builder.if_else(self.env[node.condition]) as (then, other):
            for branch, block in ((then, node.then), (other, node.other)):
                with branch:
                    self.env, self.memo, self.pending = dict(before), {}, {}
                    self.block(block)
                    self._put(cells, block.yields)
        self.env = before
        self._results(cells, node)
