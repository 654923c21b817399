"""Assigns each tile of a program its home: the layout in which it is computed.

Loads and stores want coalesced accesses, a dot wants the layout of its instruction, a scan wants its axis in few
threads. Other operations follow: an elementwise operation computes in the layout of an operand, preferably that of a
dot's result. Index arithmetic and views have no home: they are recomputed in each layout that needs them, which costs
less than moving data. A value carried by a loop has the layout that the loop's body yields.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.codegen.cuda.tiles.contraction import Plan, plan_dot
from tilewright.dtypes import DType
from tilewright.hw.gpu import GpuMachine
from tilewright.tile.atomics import ATOMICS, mask_of
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
    blocks_of,
    operands_of,
    walk,
)
from tilewright.tile.passes.axes import (
    AxisInfo,
    BlockInfo,
    Info,
    block_mask_constancy,
    block_pointer_axes,
)
from tilewright.tile.passes.coalesce import memory_layout
from tilewright.tile.passes.layouts import (
    Layout,
    axis_bits,
    bits_of,
    broadcast_bits,
    distributed,
    joined_bits,
    reduced_bits,
    transposed_bits,
    uniform,
)

VIEWS = ("broadcast", "expand_dims", "trans", "reshape", "join")
_INDICES = ("arange", "addptr", "cast", "select", "bitcast")
_LATER = {"load", "load_block", "reduce", "cumsum", "sort", "dot", "flip", "split", *ATOMICS}
_WEAK, _LOADED, _COMPUTED, _DOT = 0, 1, 2, 3


def shape_of(value: Value) -> tuple[int, ...]:
    return value.type.block if isinstance(value.type, BlockPointerType) else value.type.shape


class Homes:
    """`home`: the layout of each tile that is not recomputed. `plans`: the plan of each dot."""

    def __init__(
        self, program: TileProgram, axes: Mapping[Value, Info], machine: GpuMachine, warps: int
    ) -> None:
        self.axes, self.machine, self.warps = axes, machine, warps
        self.definitions: dict[Value, Op] = {}
        self.home: dict[Value, Layout] = {}
        self.strength: dict[Value, int] = {}
        self.plans: dict[Op, Plan] = {}
        self._cheap: dict[Value, bool] = {}
        self.uniform = uniform(warps)
        for node in walk(program.body):
            if isinstance(node, Op):
                self.definitions.update((result, node) for result in node.results)
        self.users = _users(program)
        self.region_uses = _region_uses(program)
        self.block(program.body)
        for op in {*self.definitions.values()}:
            if op.name == "load":
                self._adopt(op.results[0])

    # -- what is computed again ---------------------------------------------------------------------------------------

    def is_cheap(self, value: Value) -> bool:
        """Whether the value is recomputed in every layout that needs it, instead of being kept in one."""
        if value not in self._cheap:
            self._cheap[value] = self._found_cheap(value)
        return self._cheap[value]

    def _found_cheap(self, value: Value) -> bool:
        if not isinstance(value.type, TileType) or not value.type.shape:
            return True  # scalars are everywhere
        op = self.definitions.get(value)
        if op is None or op.name in _LATER:
            return False
        floats = isinstance(value.type.element, DType) and value.type.dtype.is_float
        if floats and op.name not in VIEWS and op.name != "cast":
            return False
        return all(self.is_cheap(operand) for operand in op.operands)

    def default(self, value: Value) -> Layout:
        """The layout of a tile if nothing else decides it."""
        shape = shape_of(value)
        info = self.axes.get(value)
        if isinstance(value.type, TileType) and value.type.is_pointer and isinstance(info, AxisInfo):
            return memory_layout(shape, info, None, value.type.dtype.bytes, self.warps)
        return distributed(range(bits_of(shape)), 2, self.warps)

    def of(self, value: Value) -> Layout:
        """The layout in which a tile is available, or in which it is computed by default."""
        if not shape_of(value):
            return self.uniform
        return self.home.get(value) or self.default(value)

    # -- homes --------------------------------------------------------------------------------------------------------

    def set(self, value: Value, layout: Layout, strength: int) -> None:
        self.home[value], self.strength[value] = layout, strength

    def block(self, block: Block) -> None:
        for node in block.nodes:
            if isinstance(node, Op):
                for result in node.results:
                    if isinstance(result.type, TileType) and result.type.shape and not self.is_cheap(result):
                        self.set(result, *self._op(node, result))
            elif isinstance(node, For):
                self._loop(node, [node.body.params[1:]])
            elif isinstance(node, While):
                self._loop(node, [node.condition.params, node.body.params])
            else:
                self._branch(node)

    def _loop(self, node: For | While, params: list[tuple[Value, ...]]) -> None:
        known = dict(self.home), dict(self.strength)
        for block in blocks_of(node):
            self.block(block)
        chosen = [self._carried(*each) for each in zip(node.body.yields, node.init, strict=True)]
        self.home, self.strength = known
        for group in (*params, node.results):
            for value, layout in zip(group, chosen, strict=True):
                if layout is not None:
                    self.set(value, *layout)
        for block in blocks_of(node):
            self.block(block)

    def _carried(self, yielded: Value, first: Value) -> tuple[Layout, int] | None:
        if not isinstance(first.type, TileType) or not first.type.shape:
            return None
        for value in sorted((yielded, first), key=lambda each: -self.strength.get(each, -1)):
            if value in self.home:
                return self.home[value], self.strength[value]
        return self.default(first), _LOADED

    def _branch(self, node: If) -> None:
        for block in (node.then, node.other):
            self.block(block)
        for result, one, two in zip(node.results, node.then.yields, node.other.yields, strict=True):
            found = self._carried(one, two)
            if found is not None:
                self.set(result, *found)

    def _op(self, op: Op, result: Value) -> tuple[Layout, int]:
        name, value = op.name, op.operands[0]
        if name in ("load", "load_block") or name in ATOMICS:
            return self.access(op), _LOADED
        if name == "dot":
            chained = self._reaches_dot(result) or self._comes_from_dot(op.operands[0])
            plan = plan_dot(op, self.machine, self.warps, chained)
            self.plans[op] = plan
            return plan.accumulators, _DOT
        if name == "reduce":
            shape = shape_of(value)
            bits = reduced_bits(shape, op.settings["axis"] % len(shape))
            return self.of(value).mapped(bits), max(_COMPUTED, self.strength.get(value, 0))
        if name == "split":
            shape = shape_of(value)
            bits = reduced_bits(shape, len(shape) - 1)
            return self.of(value).mapped(bits), max(_COMPUTED, self.strength.get(value, 0))
        if name in ("cumsum", "sort"):
            return along(shape_of(value), op.settings["axis"], self.warps), _COMPUTED
        if name in VIEWS:
            return self._view(op, result)
        fixed = [each for each in op.operands if each in self.home]
        if not fixed:
            return self.default(result), _COMPUTED
        best = max(fixed, key=lambda each: self.strength[each])
        return self.home[best], max(_COMPUTED if self.strength[best] == _WEAK else 0, self.strength[best])

    def _view(self, op: Op, result: Value) -> tuple[Layout, int]:
        source = next((each for each in op.operands if each in self.home), op.operands[0])
        old, shape, layout = shape_of(source), shape_of(result), self.of(source)
        strength = self.strength.get(source, _WEAK)
        if op.name == "broadcast":
            bits = broadcast_bits(old, shape)
            fresh = [bit for bit in range(bits_of(shape)) if bit not in bits.values()]
            return layout.mapped(bits).extended(fresh), _WEAK
        if op.name == "trans":
            return layout.mapped(transposed_bits(old, op.settings["order"])), strength
        if op.name == "join":
            moved = layout.mapped(joined_bits(old))
            return Layout((0, *moved.registers), moved.lanes, moved.warps), strength
        return layout, strength  # the number of an element stays

    def access(self, op: Op) -> Layout:
        """The coalesced layout of an access to memory."""
        pointers, mask = self.pointers(op)
        return memory_layout(shape_of(op.operands[0]), pointers, mask, _bytes(op), self.warps)

    def pointers(self, op: Op) -> tuple[AxisInfo, tuple[int, ...] | None]:
        """The known facts about the addresses of an access, and the constancy of its mask; None if there is no mask."""
        pointer = op.operands[0]
        info = self.axes[pointer]
        if isinstance(pointer.type, BlockPointerType):
            assert isinstance(info, BlockInfo)
            check = op.settings["check"]
            sizes = pointer.type.block
            constancy = tuple(
                block_mask_constancy(info, axis, size) if axis in check else size
                for axis, size in enumerate(sizes)
            )
            return block_pointer_axes(info, pointer.type), constancy if check else None
        assert isinstance(info, AxisInfo)
        mask = mask_of(op)
        if mask is None:
            return info, None
        found = self.axes[mask]
        assert isinstance(found, AxisInfo)
        return info, found.constancy

    def _adopt(self, value: Value) -> None:
        """Load a tile that is only broadcast directly in the layout of the broadcast: several threads then load the
        same element, and no data move. On the way the tile may be converted to another type."""
        if not shape_of(value):
            return
        wanted: set[Layout] = set()
        same = {n: n for n in range(bits_of(shape_of(value)))}
        converted = {value: same}
        waiting: list[tuple[Value, dict[int, int]]] = [(value, same)]
        while waiting:
            view, bits = (
                waiting.pop()
            )  # maps each bit of the value's element index to the same bit in the view
            whole = len(bits) == bits_of(shape_of(view))  # not broadcast yet
            for user in self.users.get(view, ()):
                if user.name == "cast" and whole:
                    converted[user.results[0]] = bits
                    waiting.append((user.results[0], bits))
                    continue
                if user.name in VIEWS and user.name != "join":
                    moved = _moved(user)
                    waiting.append((user.results[0], {old: moved[new] for old, new in bits.items()}))
                    continue
                home = self.home.get(user.results[0]) if user.results else None
                if (
                    home is None
                    or whole
                    or user.name in _LATER
                    or shape_of(user.results[0]) != shape_of(view)
                ):
                    return
                wanted.add(home.mapped({new: old for old, new in bits.items()}))
        if len(wanted) == 1:
            layout = wanted.pop()
            self.home.update((each, layout.mapped(bits)) for each, bits in converted.items())

    def _comes_from_dot(self, value: Value) -> bool:
        """Whether it is computed from the result of a dot, through elementwise operations and views."""
        waiting, seen = [value], {value}
        while waiting:
            op = self.definitions.get(waiting.pop())
            if op is None or op.name in _LATER - {"dot"}:
                continue
            if op.name == "dot":
                return True
            fresh = [each for each in op.operands if each not in seen and shape_of(each)]
            seen.update(fresh)
            waiting += fresh
        return False

    def _reaches_dot(self, value: Value) -> bool:
        """Whether it is an operand of a dot, through elementwise operations and views."""
        waiting, seen = [value], {value}
        while waiting:
            for user in self.users.get(waiting.pop(), ()):
                if user.name == "dot" and any(each in seen for each in user.operands[:2]):
                    return True
                if user.name in ("dot", "reduce", "cumsum", "sort", "flip", "split"):
                    continue
                for result in user.results:
                    if result not in seen:
                        seen.add(result)
                        waiting.append(result)
        return False


def along(shape: tuple[int, ...], axis: int, warps: int) -> Layout:
    """A layout with the axis in registers and lanes (low bits in registers) and the other bits in warps and lanes."""
    bits = list(axis_bits(shape, axis % len(shape)))
    others = [bit for bit in range(bits_of(shape)) if bit not in bits]
    shared = others[max(0, len(others) - warps) :]
    others = others[: len(others) - len(shared)]
    lanes = bits[-min(len(bits), 5) :] if bits else []
    registers = bits[: len(bits) - len(lanes)]
    if len(registers) < 2 and len(others) > 0:
        registers, lanes = bits[: max(len(bits) - 3, 0)], bits[max(len(bits) - 3, 0) :]
    free = 5 - len(lanes)
    lanes = [*lanes, *others[:free]]
    return Layout(
        (*registers, *others[free:]),
        (*lanes, *(-1,) * (5 - len(lanes))),
        (*shared, *(-1,) * (warps - len(shared))),
    )


def _moved(view: Op) -> dict[int, int]:
    """Maps each bit of an operand's element index to the bit in the view's result."""
    old, shape = shape_of(view.operands[0]), shape_of(view.results[0])
    if view.name == "trans":
        return transposed_bits(old, view.settings["order"])
    if view.name == "broadcast":
        return broadcast_bits(old, shape)
    return {n: n for n in range(bits_of(old))}


def _bytes(op: Op) -> int:
    return op.operands[0].type.dtype.bytes


def _region_uses(program: TileProgram) -> set[Value]:
    """The values that loops and branches take or yield."""
    found = set(program.body.yields)
    for node in walk(program.body):
        for block in blocks_of(node):
            found.update(block.yields)
        if not isinstance(node, Op):
            found.update(operands_of(node))
    return found


def _users(program: TileProgram) -> dict[Value, list[Op]]:
    found: dict[Value, list[Op]] = {}
    for node in walk(program.body):
        if isinstance(node, Op):
            for operand in operands_of(node):
                found.setdefault(operand, []).append(node)
    return found
