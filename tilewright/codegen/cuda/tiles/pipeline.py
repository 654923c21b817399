"""Pipelined loops: operands of `dot` are copied to shared memory some iterations ahead, asynchronously.

    before the loop       copies of the first stages - 1 iterations
    in each iteration     wait for its copies; barrier; copies of the iteration stages - 1 ahead; the body
    after the loop        wait for all copies

A load is copied ahead if what it does not read is zero, its accesses are 4, 8 or 16 bytes wide, no store of the loop
may change what it reads, and its addresses follow from the loop's index and from carried values that such arithmetic
computes: that part of the body runs ahead, with variables of its own. A copy goes to a ring of slots, one for each
stage: where dots of the body are all that uses the load, as their operand; where an operand is computed from it, such
that each thread reads back what it has copied. One barrier an iteration is enough: it is behind the wait for what the
iteration reads, and before copies to the slot that the iteration before has read. Where a warpgroup multiplies, the
copies are started beside its multiplications.

`loops/passes/load_and_use.py` asks the same of loop programs: does each iteration fill and then use it, asynchronously,
and independently of the iteration before? Its rules are about buffers, and a tile program has none before layouts give
them: what is filled is a value in registers, a pointer may reach any element, so `origins` stand for the written
buffers, and `slice_of` for the loads that depend on the loop. Therefore the conditions are shared, and the analysis is
not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeGuard

from tilewright.codegen.cuda.tiles.assign import shape_of
from tilewright.codegen.cuda.tiles.bulk_pipeline import BulkPrefetch
from tilewright.codegen.cuda.tiles.contraction import WarpgroupPlan
from tilewright.codegen.cuda.tiles.control import Control
from tilewright.codegen.cuda.tiles.moves import vector_width
from tilewright.codegen.cuda.tiles.prefetch import Copied, LoopPrefetch
from tilewright.codegen.cuda.tiles.tensor_maps import BulkCopies, BulkCopy
from tilewright.codegen.cuda.tiles.text import THREAD, of_bits
from tilewright.codegen.cuda.tiles.values import tile_type
from tilewright.codegen.cuda.tiles.warpgroups import ATOM_BYTES
from tilewright.dtypes import DType
from tilewright.tile.atomics import ATOMICS
from tilewright.tile.ir import Block, BlockPointerType, For, Op, Value, walk
from tilewright.tile.op import Effect
from tilewright.tile.ops import OPS
from tilewright.tile.passes.coalesce import access_elements
from tilewright.tile.passes.layouts import REPLICATED, Layout, transposed_bits
from tilewright.tile.passes.shared_memory import SharedBuffer

_COPY_BYTES = (4, 8, 16)
_RESERVED_BYTES = 4096  # of shared memory, for barriers and what else a loop may need
_GATHER = ("load", "reduce", "cumsum", "sort", *ATOMICS)


class Pipelines(Control):
    def prefetch(self, node: For) -> LoopPrefetch | None:
        if self.stages < 2:
            return None
        loads = [
            each for each in node.body.nodes if isinstance(each, Op) and each.name in ("load", "load_block")
        ]
        copied: list[Copied] = []
        for op in loads:
            self.op = op
            found = self._copied(op, node)
            if found is not None:
                copied.append(found)
        if not copied:
            return None
        multiplies = [each for each in node.body.nodes if self._by_warpgroup(each)]
        bulk = self._bulk(copied, node)
        if bulk is not None:
            running = self._left_running(multiplies, node, copied)
            if running is not None:
                copied = self._with_one_more_slot(copied)
            return BulkPrefetch(self, node, copied, multiplies, bulk, running)
        return LoopPrefetch(self, node, copied, multiplies)

    def _with_one_more_slot(self, copied: list[Copied]) -> list[Copied]:
        """Add a slot for the iteration whose multiplications are still running, if it fits."""
        more = [each.slot_bytes * (each.slots + 1) for each in copied]
        if sum(more) > self.machine.shared_block - _RESERVED_BYTES:
            return copied
        return [
            replace(each, ring=replace(each.ring, bytes=size), slots=each.slots + 1)
            for each, size in zip(copied, more, strict=True)
        ]

    def _by_warpgroup(self, node: object) -> TypeGuard[Op]:
        return isinstance(node, Op) and isinstance(self.homes.plans.get(node), WarpgroupPlan)

    def _bulk(self, copied: Sequence[Copied], node: For) -> list[BulkCopy] | None:
        """The bulk copies of all loads of a loop for dots of warpgroups; None if one load cannot be a bulk copy."""
        if not self.bulk_copies:
            self.unbulked[node] = "tensor maps are disabled"
            return None
        known = BulkCopies(self.program, self.axes, self.machine)
        found = []
        for each in copied:
            users = [user for value, _ in each.operands for user in self.homes.users[value]]
            dots = bool(users) and all(self._by_warpgroup(user) or user.name == "trans" for user in users)
            plan = known.plan(each.op, each.masks) if dots else "warpgroups do not multiply it"
            if isinstance(plan, str):
                self.unbulked[node] = plan
                return None
            found.append(plan)
        return found

    def _left_running(self, multiplies: Sequence[Op], node: For, copied: Sequence[Copied]) -> Op | None:
        """The only dot of a body if it accumulates into a carried value, all its operands are in rings, and nothing
        else in the body reads its sums."""
        dots = [each for each in walk(node.body) if isinstance(each, Op) and each.name == "dot"]
        if len(dots) != 1 or list(multiplies) != dots or len(dots[0].operands) < 3:
            return None
        (dot,) = dots
        in_rings = {value for each in copied for value, _ in each.operands}
        if not in_rings.issuperset(dot.operands[:2]):
            return None
        start, (result,) = dot.operands[2], dot.results
        params = node.body.params[1:]
        if start not in params or self.homes.users.get(result) or len(self.homes.users[start]) > 1:
            return None
        number = params.index(start)
        yields = [n for n, value in enumerate(node.body.yields) if value is result]
        same = self.homes.of(start) == self.homes.of(result)
        return dot if yields == [number] and start not in self.homes.region_uses and same else None

    def _copied(self, op: Op, node: For) -> Copied | None:
        (result,) = op.results
        layout, kind = self.homes.of(result), tile_type(result)
        if not kind.shape or not self._zero_outside(op) or self._overwritten(op, node):
            return None
        operands = self._operands(result, node.body) or []
        own = {masks for _, masks, _ in operands}
        if len(own) > 1 or self.slice_of(node, op.operands) is None:
            return None
        if own:
            (masks,) = own
        elif self._feeds_dot(result, node.body):
            masks = _read_back(layout, kind.dtype.bytes)
        else:
            return None
        pointers, constancy = self.homes.pointers(op)
        width = access_elements(layout, kind.shape, pointers, constancy, kind.dtype.bytes)
        width = min(width, vector_width(layout, masks, kind.dtype.bytes))
        if width * kind.dtype.bytes not in _COPY_BYTES:
            return None
        size = kind.dtype.bytes * (1 << len(masks)) * self.stages
        what = f"{self.stages} stages of an operand of dot"
        ring = SharedBuffer(self.name("shared"), size, what, op.where, ring=True, alignment=ATOM_BYTES)
        used = tuple((value, each) for value, _, each in operands)
        return Copied(op, masks, used, width, ring, self.stages)

    def _operands(
        self, result: Value, body: Block
    ) -> list[tuple[Value, tuple[int, ...], tuple[int, ...]]] | None:
        """The dot operands that a load is used as, each with its address masks by bits of the load and by its own bits.
        None if the load has another use."""
        found = []
        waiting: list[tuple[Value, dict[int, int]]] = [(result, {n: n for n in range(len(_bits(result)))})]
        while waiting:
            value, bits = waiting.pop()  # by bit of the load's number, that of the value's
            if value in self.homes.region_uses:
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

    def _feeds_dot(self, result: Value, body: Block) -> bool:
        """Whether an operand of a dot in the body is computed elementwise from it."""
        waiting, seen = [result], {result}
        while waiting:
            for user in self.homes.users.get(waiting.pop(), ()):
                if user not in body.nodes:
                    continue
                if user.name == "dot":
                    return any(each in seen for each in user.operands[:2])
                fresh = [each for each in user.results if each not in seen and user.name not in _GATHER]
                seen.update(fresh)
                waiting += fresh
        return False

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
        """Whether the loop may store to the loaded memory."""
        read = {each.name for each in self.origins.get(op.operands[0], ()) if tile_type(each).is_pointer}
        for each in walk(node.body):
            if isinstance(each, Op) and OPS[each.name].effect is Effect.WRITE:
                written = {p.name for p in self.origins.get(each.operands[0], ()) if tile_type(p).is_pointer}
                if not self.facts.disjoint or written & read:
                    return True
        return False

    def slice_of(self, node: For, values: Sequence[Value]) -> tuple[set[Op], list[int]] | None:
        """The operations of the body that compute these values, and the indices of the carried values among them; None
        if one is not index arithmetic."""
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

    # -- code --------------------------------------------------------------------------------------------------------

    def copy_ahead(self, copied: Copied) -> None:
        """Issue one load's copies to the current slot of its ring."""
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


def _read_back(layout: Layout, size: int) -> tuple[int, ...]:
    """Address masks such that the registers of one access are contiguous, and those of neighbouring threads follow."""
    vector = [bit for n, bit in enumerate(layout.registers) if size << n < max(_COPY_BYTES)]
    threads = [bit for bit in layout.threads if bit != REPLICATED]
    order = [*vector, *threads, *(bit for bit in layout.registers if bit not in vector)]
    position = {bit: n for n, bit in enumerate(order)}
    return tuple(size << position[bit] for bit in range(len(order)))


def _bits(value: Value) -> range:
    count = 1
    for size in shape_of(value):
        count *= size
    return range(count.bit_length() - 1)
