"""Pipelined loops: operands of `dot` are copied to shared memory some iterations ahead, asynchronously.

    before the loop       copies of the first stages - 1 iterations
    in each iteration     wait for its copies; barrier; copies of the iteration stages - 1 ahead; the body
    after the loop        wait for all copies

A load is copied ahead if a dot of the body is all that uses it, what it does not read is zero, its accesses are 4, 8
or 16 bytes wide, no store of the loop may change what it reads, and its addresses follow from the loop's index and from
carried values that such arithmetic computes: that part of the body runs ahead, with variables of its own. A copy goes
to a ring of slots, one for each stage. One barrier an iteration is enough: it is behind the wait for what the iteration
reads, and before copies to the slot that the iteration before has read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.codegen.cuda.tiles.assign import shape_of
from tilewright.codegen.cuda.tiles.control import Cell, Control
from tilewright.codegen.cuda.tiles.moves import vector_width
from tilewright.codegen.cuda.tiles.text import THREAD, element_type, of_bits
from tilewright.codegen.cuda.tiles.values import tile_type
from tilewright.dtypes import DType
from tilewright.tile.ir import Block, BlockPointerType, For, If, Op, Value, While, blocks_of, walk
from tilewright.tile.op import Effect
from tilewright.tile.ops import OPS
from tilewright.tile.passes.coalesce import access_elements
from tilewright.tile.passes.layouts import REPLICATED, transposed_bits
from tilewright.tile.passes.shared_memory import SharedBuffer

_COPY_BYTES = (4, 8, 16)


@dataclass(frozen=True)
class _Copied:
    """A load, and where it goes. `operands`: of dots, with the masks that they look for."""

    op: Op
    masks: tuple[int, ...]
    operands: tuple[tuple[Value, tuple[int, ...]], ...]
    width: int
    ring: SharedBuffer


class Pipelines(Control):
    def prefetch(self, node: For) -> _Prefetch | None:
        if self.stages < 2:
            return None
        loads = [
            each for each in node.body.nodes if isinstance(each, Op) and each.name in ("load", "load_block")
        ]
        copied: list[_Copied] = []
        for op in loads:
            self.op = op
            found = self._copied(op, node)
            if found is not None:
                copied.append(found)
        if not copied:
            return None
        return _Prefetch(self, node, copied)

    def _copied(self, op: Op, node: For) -> _Copied | None:
        (result,) = op.results
        layout, kind = self.homes.of(result), tile_type(result)
        if not kind.shape or not self._zero_outside(op) or self._overwritten(op, node):
            return None
        operands = self._operands(result, node.body)
        if not operands:
            return None
        own = {masks for _, masks, _ in operands}
        if len(own) != 1 or self.slice_of(node, op.operands) is None:
            return None
        (masks,) = own
        pointers, constancy = self.homes.pointers(op)
        width = access_elements(layout, kind.shape, pointers, constancy, kind.dtype.bytes)
        width = min(width, vector_width(layout, masks, kind.dtype.bytes))
        if width * kind.dtype.bytes not in _COPY_BYTES:
            return None
        size = kind.dtype.bytes * (1 << len(masks)) * self.stages
        what = f"{self.stages} stages of an operand of dot"
        ring = SharedBuffer(self.name("shared"), size, what, op.where, ring=True)
        return _Copied(op, masks, tuple((value, used) for value, _, used in operands), width, ring)

    def _operands(
        self, result: Value, body: Block
    ) -> list[tuple[Value, tuple[int, ...], tuple[int, ...]]] | None:
        """The operands of dots that a load is: each with the masks of its address by bits of the load, and by its own.
        None where something else uses the load."""
        found = []
        waiting: list[tuple[Value, dict[int, int]]] = [(result, {n: n for n in range(len(_bits(result)))})]
        while waiting:
            value, bits = waiting.pop()  # by bit of the load's number, that of the value's
            if value in self.region_uses:
                return None
            for user in self.homes.users.get(value, ()):
                if user not in body.nodes:
                    return None
                if user.name == "trans":
                    moved = transposed_bits(shape_of(value), user.settings["order"])
                    waiting.append((user.results[0], {old: moved[new] for old, new in bits.items()}))
                    continue
                if user.name != "dot" or (len(user.operands) == 3 and user.operands[2] is value):
                    return None
                for number in (0, 1):
                    if user.operands[number] is value:
                        tile = self.shared_operand(user, number)
                        if tile is None:
                            return None
                        found.append(
                            (value, tuple(tile.masks[bits[n]] for n in range(len(bits))), tile.masks)
                        )
        return found

    def _zero_outside(self, op: Op) -> bool:
        if op.name == "load_block":
            return not op.settings["check"] or op.settings["padding"] == "zero"
        return len(op.operands) < 3 or self._is_zero(op.operands[2])

    def _is_zero(self, value: Value) -> bool:
        op = self.homes.definitions.get(value)
        while op is not None and op.name in ("broadcast", "cast", "expand_dims", "reshape"):
            op = self.homes.definitions.get(op.operands[0])
        return op is not None and op.name == "constant" and op.settings["value"] == 0

    def _overwritten(self, op: Op, node: For) -> bool:
        """Whether the loop may store to what is loaded."""
        read = {each.name for each in self.origins.get(op.operands[0], ()) if tile_type(each).is_pointer}
        for each in walk(node.body):
            if isinstance(each, Op) and OPS[each.name].effect is Effect.WRITE:
                written = {p.name for p in self.origins.get(each.operands[0], ()) if tile_type(p).is_pointer}
                if not self.facts.disjoint or written & read:
                    return True
        return False

    def slice_of(self, node: For, values: Sequence[Value]) -> tuple[set[Op], list[int]] | None:
        """The operations of the body that values are computed by, and the numbers of the carried values among them;
        None where something other than index arithmetic is."""
        index, *params = node.body.params
        inside = {result for each in walk(node.body) for result in each.results}
        own = {result: each for each in node.body.nodes if isinstance(each, Op) for result in each.results}
        ops: set[Op] = set()
        carried: list[int] = []
        waiting, seen = list(values), set()
        while waiting:
            value = waiting.pop()
            if value in seen or value is index:
                continue
            seen.add(value)
            if value in params:
                carried.append(params.index(value))
                waiting.append(node.body.yields[carried[-1]])
                continue
            if value not in inside:
                continue
            op = own.get(value)
            if op is None or OPS[op.name].effect is not Effect.PURE or op.name in ("reduce", "dot"):
                return None
            # A tile of it is computed again: index arithmetic, or a step of a carried tile.
            cheap = (
                isinstance(value.type, BlockPointerType) or not shape_of(value) or self.homes.is_cheap(value)
            )
            if not cheap and op.name not in ("addptr", "add", "broadcast", "expand_dims"):
                return None
            if not cheap and isinstance(tile_type(value).element, DType) and tile_type(value).dtype.is_float:
                return None
            ops.add(op)
            waiting += op.operands
        return ops, sorted(carried)

    @property
    def region_uses(self) -> set[Value]:
        """Values that loops and branches take or yield."""
        if self._region_uses is None:
            found = set(self.program.body.yields)
            for node in walk(self.program.body):
                for block in blocks_of(node):
                    found |= set(block.yields)
                if isinstance(node, For | While):
                    found |= set(node.init)
                if isinstance(node, For):
                    found |= {node.lower, node.upper, node.step}
                if isinstance(node, If):
                    found.add(node.condition)
            self._region_uses = found
        return self._region_uses

    _region_uses: set[Value] | None = None

    # -- code --------------------------------------------------------------------------------------------------------

    def copy_ahead(self, copied: _Copied) -> None:
        """One load's copies, to the current slot of its ring."""
        op, (result,) = copied.op, copied.op.results
        layout, kind = self.homes.of(result), tile_type(result)
        pointers, masks = self._addresses(op, layout)
        thread = of_bits(THREAD, [0 if bit == REPLICATED else copied.masks[bit] for bit in layout.threads])
        register = of_bits("r", [copied.masks[bit] for bit in layout.registers])
        location = f"{self.address(copied.ring)} + ({thread} ^ {register})"
        size = copied.width * kind.dtype.bytes
        valid = f"{masks}[r]" if masks is not None else "true"
        line = f"copy_async<{size}>({location}, {pointers}[r], {valid});"
        lines = ["#pragma unroll", f"for (int r = 0; r < {layout.size}; r += {copied.width}) {line}"]
        if layout.replicated:
            lines = [f"if (({THREAD} & {layout.replicated}) == 0) {{", *lines, "}"]
        self.step(lines, reads=(self.resource(op, layout),), writes=(copied.ring,))


class _Prefetch:
    """The code around one loop."""

    def __init__(self, emitter: Pipelines, node: For, copied: Sequence[_Copied]) -> None:
        self.emitter, self.node, self.copied = emitter, node, copied
        wanted = [operand for each in copied for operand in each.op.operands]
        found = emitter.slice_of(node, wanted)
        assert found is not None
        self.ops, self.carried = found
        self.params = [node.body.params[1 + n] for n in self.carried]
        self.cells: list[list[Cell]] = emitter.cells(self.params, [node.init[n] for n in self.carried])
        self.ahead, self.slot = emitter.name("ahead"), emitter.name("slot")
        lower = emitter.scalar(node.lower)
        # Threads may still read the slots of the loop before.
        emitter.step([f"i64 {self.ahead} = {lower};", f"int {self.slot} = 0;", "__syncthreads();"])
        with emitter.inside() as scope:
            self._issue("s")
        stages = emitter.stages
        head = [f"#pragma unroll 1\nfor (int s = 0; s < {stages - 1}; ++s) {{"]
        emitter.region(True, [(head, scope, ["}"])])

    def _issue(self, slot: str) -> None:
        """Copies of the iteration `ahead`, if there is one."""
        emitter, node = self.emitter, self.node
        index = node.body.params[0]
        for each in self.copied:
            emitter.slots[each.ring] = f"{slot} * {each.ring.bytes // emitter.stages}"
        name = emitter.name()
        with emitter.inside() as scope:
            emitter.define(index, emitter.homes.uniform, name)
            emitter.define_cells(self.params, self.cells)
            for op in node.body.nodes:
                if isinstance(op, Op) and op in self.ops:
                    emitter.operation(op)
            for each in self.copied:
                emitter.copy_ahead(each)
            yields = [node.body.yields[n] for n in self.carried]
            tail = emitter.assigned(self.cells, yields, self.params)
        kind = element_type(tile_type(index).element)
        head = [f"if ({emitter.more(node, self.ahead)}) {{", f"  const {kind} {name} = ({kind}){self.ahead};"]
        emitter.region(False, [(head, scope, [*tail, "}"])])
        step = emitter.scalar(node.step)
        emitter.step(["commit_copies();", f"{self.ahead} += {step};"])

    def begin_iteration(self) -> None:
        emitter, stages = self.emitter, self.emitter.stages
        emitter.step([f"await_copies<{stages - 2}>();", "__syncthreads();"])
        free = emitter.name("free")
        emitter.step([f"const int {free} = {self.slot} ? {self.slot} - 1 : {stages - 1};"])
        self._issue(free)
        for each in self.copied:
            emitter.slots[each.ring] = f"{self.slot} * {each.ring.bytes // stages}"
            emitter.skipped.add(each.op)
            for value, masks in each.operands:
                emitter.scope.buffers[value, masks] = each.ring

    def end_iteration(self) -> list[str]:
        return [f"{self.slot} = {self.slot} + 1 == {self.emitter.stages} ? 0 : {self.slot} + 1;"]

    def end(self) -> None:
        self.emitter.step(["await_copies<0>();"])


def _bits(value: Value) -> range:
    count = 1
    for size in shape_of(value):
        count *= size
    return range(count.bit_length() - 1)
