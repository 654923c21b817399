"""Axis analysis: what is known about neighbouring elements of integer and pointer tiles, for vector widths.

Of each axis of a tile, in groups that begin at multiples of their size:

- `contiguity`: elements of a group increase by one, pointers by one element;
- `constancy`: elements of a group are equal;
- `divisor`: a power of two that divides the first element of each contiguity group; of pointers, the address in bytes.

A scalar counts as a tile with one axis of size 1. `value` is what all elements are, where it is known. Numbers wrap
around: a contiguous group may, unless the divisor is at least its size. An address that wraps around within a group is
no element of a tensor, so for memory accesses that does not matter.

    axes = analyse_axes(program, facts)
    axes[pointer].contiguity[1]

Loops are solved by iteration: a carried value is what its first value and the yielded one have in common.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tilewright.dtypes import DType
from tilewright.tile.atomics import ATOMICS
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

LARGEST = 1 << 30  # the largest divisor that is told: 0 has every divisor


@dataclass(frozen=True)
class AxisInfo:
    contiguity: tuple[int, ...]
    constancy: tuple[int, ...]
    divisor: tuple[int, ...]
    value: int | None = None
    unit: int = 1  # what a step of one changes the number by: of pointers, the bytes of an element

    def divisor_at(self, axis: int, step: int) -> int:
        """The divisor of the elements at multiples of `step` along an axis."""
        if step >= self.contiguity[axis]:
            return self.divisor[axis]
        return math.gcd(self.divisor[axis], step * self.unit)

    @property
    def everywhere(self) -> int:
        """The divisor of every element."""
        return max(self.divisor_at(axis, 1) for axis in range(len(self.divisor)))


@dataclass(frozen=True)
class BlockInfo:
    """The scalars of a block pointer, as `make_block_ptr` takes them."""

    base: AxisInfo
    shape: tuple[AxisInfo, ...]
    strides: tuple[AxisInfo, ...]
    offsets: tuple[AxisInfo, ...]


Info = AxisInfo | BlockInfo


def power_of_two_in(number: int) -> int:
    """The largest power of two that divides a number."""
    return min(number & -number, LARGEST) if number else LARGEST


def analyse_axes(program: TileProgram, facts: Facts | None = None) -> Mapping[Value, Info]:
    """The known facts about each value of a program."""
    divisors = dict(facts.divisors) if facts is not None else {}
    analysis = _Analysis()
    for param in program.params:
        assert isinstance(param.type, TileType)
        unit = param.type.dtype.bytes if param.type.is_pointer else 1
        known = math.gcd(LARGEST, divisors.get(param.name, 1))
        analysis.found[param] = AxisInfo((1,), (1,), (max(known, unit if unit > 1 else 1),), unit=unit)
    analysis.block(program.body)
    return analysis.found


def block_pointer_axes(pointer: BlockInfo, type: BlockPointerType) -> AxisInfo:
    """The facts about the addresses of a block."""
    rank, size = len(type.block), type.dtype.bytes
    contiguity, constancy, divisors = [], [], []
    # What divides the address of the block's first element, and what each step along an axis adds.
    scaled = [stride.everywhere * size for stride in pointer.strides]
    first = pointer.base.everywhere
    for axis in range(rank):
        first = math.gcd(first, min(LARGEST, scaled[axis] * pointer.offsets[axis].everywhere))
    for axis in range(rank):
        others = [min(LARGEST, scaled[a]) for a in range(rank) if a != axis]
        start = math.gcd(first, *others)
        if pointer.strides[axis].value == 1:
            contiguity.append(type.block[axis])
            divisors.append(start)
        else:
            contiguity.append(1)
            divisors.append(math.gcd(start, min(LARGEST, scaled[axis])))
        constancy.append(type.block[axis] if pointer.strides[axis].value == 0 else 1)
    return AxisInfo(tuple(contiguity), tuple(constancy), tuple(divisors), unit=size)


def block_mask_constancy(pointer: BlockInfo, axis: int, size: int) -> int:
    """The size of the groups along an axis whose elements are either all inside the tensor or all outside."""
    return math.gcd(size, pointer.shape[axis].everywhere, pointer.offsets[axis].everywhere)


def _unknown(shape: tuple[int, ...], unit: int = 1) -> AxisInfo:
    ones = (1,) * max(1, len(shape))
    return AxisInfo(ones, ones, ones, unit=unit)


def _constant(number: int) -> AxisInfo:
    return AxisInfo((1,), (1,), (power_of_two_in(number),), number)


def _join(a: Info, b: Info) -> Info:
    """The facts that hold for either of two values."""
    if isinstance(a, BlockInfo):
        assert isinstance(b, BlockInfo)
        return BlockInfo(
            _common(a.base, b.base),
            tuple(_common(x, y) for x, y in zip(a.shape, b.shape, strict=True)),
            tuple(_common(x, y) for x, y in zip(a.strides, b.strides, strict=True)),
            tuple(_common(x, y) for x, y in zip(a.offsets, b.offsets, strict=True)),
        )
    assert isinstance(b, AxisInfo)
    return _common(a, b)


def _common(a: AxisInfo, b: AxisInfo) -> AxisInfo:
    contiguity = _gcds(a.contiguity, b.contiguity)
    divisors = tuple(
        math.gcd(a.divisor_at(axis, step), b.divisor_at(axis, step)) for axis, step in enumerate(contiguity)
    )
    value = a.value if a.value == b.value else None
    return AxisInfo(contiguity, _gcds(a.constancy, b.constancy), divisors, value, a.unit)


def _gcds(*tuples: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.gcd(*each) for each in zip(*tuples, strict=True))


class _Analysis:
    def __init__(self) -> None:
        self.found: dict[Value, Info] = {}

    def tile(self, value: Value) -> AxisInfo:
        info = self.found[value]
        assert isinstance(info, AxisInfo)
        return info

    # -- control flow ------------------------------------------------------------------------------------------------

    def block(self, block: Block) -> None:
        for node in block.nodes:
            if isinstance(node, Op):
                for result in node.results:
                    self.found[result] = self.op(node)
            elif isinstance(node, For):
                lower, step = self.tile(node.lower), self.tile(node.step)
                index, *params = node.body.params
                divisor = math.gcd(lower.everywhere, step.everywhere)
                self.found[index] = AxisInfo((1,), (1,), (divisor,))
                self._loop(node, [tuple(params)])
            elif isinstance(node, While):
                self._loop(node, [node.condition.params, node.body.params])
            else:
                self._branch(node)

    def _loop(self, node: For | While, params: list[tuple[Value, ...]]) -> None:
        carried = [self.found[value] for value in node.init]
        while True:
            for group in params:
                self.found.update(zip(group, carried, strict=True))
            if isinstance(node, While):
                self.block(node.condition)
            self.block(node.body)
            yields = (self.found[value] for value in node.body.yields)
            joined = [_join(old, new) for old, new in zip(carried, yields, strict=True)]
            if joined == carried:
                break
            carried = joined
        self.found.update(zip(node.results, carried, strict=True))

    def _branch(self, node: If) -> None:
        self.block(node.then)
        self.block(node.other)
        for result, one, two in zip(node.results, node.then.yields, node.other.yields, strict=True):
            self.found[result] = _join(self.found[one], self.found[two])

    # -- operations --------------------------------------------------------------------------------------------------

    def op(self, op: Op) -> Info:
        (result,) = op.results
        if isinstance(result.type, BlockPointerType):
            return self._block_pointer(op)
        integer = result.type.is_pointer or not result.type.dtype.is_float
        if op.name in _SHAPES:
            return _SHAPES[op.name](self, op)
        if op.name == "constant":
            value = op.settings["value"]
            return _constant(int(value)) if integer else _unknown(())
        if op.name == "arange":
            start, end = op.settings["start"], op.settings["end"]
            return AxisInfo(
                (end - start,), (1,), (power_of_two_in(start),), start if end - start == 1 else None
            )
        unit = result.type.dtype.bytes if result.type.is_pointer else 1
        elementwise = op.operands and all(
            isinstance(each.type, TileType) and each.type.shape == result.type.shape for each in op.operands
        )
        if not elementwise or op.name in _OPAQUE:
            return replace(
                _unknown(result.type.shape, unit), divisor=(unit,) * max(1, len(result.type.shape))
            )
        infos = [self.tile(each) for each in op.operands]
        constancy = _gcds(*(info.constancy for info in infos))
        known = replace(_unknown(result.type.shape, unit), constancy=constancy)
        # Comparisons of floats are integers too: only constancy is known of them.
        compared = _tiles(op)[op.name == "select" :]
        numbers = all(each.is_pointer or each.dtype.is_integer for each in compared)
        if op.name in ("lt", "le") and numbers:
            return self._compare(op, known)
        if not integer or not numbers or result.type.element not in (compared[-1].element, _element(op)):
            return known
        if op.name == "cast":
            return self._cast(op, known)
        rule = _ARITHMETIC.get(op.name)
        if op.name == "addptr":
            return self._sum(infos[0], infos[1], known, infos[0].unit)
        if rule is None:
            return known
        made = rule(self, infos, known)
        indices = result.type.element in (DType.I32, DType.I64)  # of narrower types, no value is told
        return made if indices else replace(made, value=None)

    def _compare(self, op: Op, known: AxisInfo) -> AxisInfo:
        """A comparison x < y or y >= x is constant within a group if x is contiguous, y is constant, and both are
        multiples of the group's size."""
        x, y = (self.tile(each) for each in op.operands)
        if op.name == "le":
            x, y = y, x
        groups = tuple(
            max(
                old,
                math.gcd(x.contiguity[axis], x.divisor[axis], y.constancy[axis], y.divisor_at(axis, 1)),
            )
            for axis, old in enumerate(known.constancy)
        )
        return replace(known, constancy=groups)

    def _cast(self, op: Op, known: AxisInfo) -> AxisInfo:
        """A sequence that wraps around in the narrower type is not contiguous in the wider one. Groups that begin at a
        multiple of their size cannot wrap around."""
        info = self.tile(op.operands[0])
        old, new = _tiles(op)[0].dtype, op.settings["dtype"]
        if not new.is_integer:
            return known
        contiguity = info.contiguity
        if new.bytes > old.bytes:
            contiguity = _gcds(contiguity, info.divisor)
        divisors = tuple(info.divisor_at(axis, step) for axis, step in enumerate(contiguity))
        value = info.value
        if value is not None:
            bits = 8 * new.bytes
            low = 0 if new.short.startswith("u") else -(1 << (bits - 1))
            value = value if low <= value < low + (1 << bits) else None
        return AxisInfo(contiguity, info.constancy, divisors, value)

    def _sum(self, x: AxisInfo, y: AxisInfo, known: AxisInfo, scale: int = 1) -> AxisInfo:
        """The facts about x + scale * y."""
        contiguity, divisors = [], []
        for axis in range(len(known.constancy)):
            step = max(
                math.gcd(x.contiguity[axis], y.constancy[axis]),
                math.gcd(x.constancy[axis], y.contiguity[axis]),
            )
            contiguity.append(step)
            divisors.append(
                math.gcd(x.divisor_at(axis, step), min(LARGEST, y.divisor_at(axis, step) * scale))
            )
        return replace(known, contiguity=tuple(contiguity), divisor=tuple(divisors), unit=x.unit)

    def _block_pointer(self, op: Op) -> BlockInfo:
        if op.name == "advance":
            old = self.found[op.operands[0]]
            assert isinstance(old, BlockInfo)
            moved = tuple(
                _fold_sum(info, self._sum(info, by, _unknown(())), by)
                for info, by in zip(old.offsets, map(self.tile, op.operands[1:]), strict=True)
            )
            return replace(old, offsets=moved)
        base, *numbers = map(self.tile, op.operands)
        rank = len(op.settings["block"])
        return BlockInfo(base, *(tuple(numbers[i * rank : (i + 1) * rank]) for i in range(3)))

    # -- shapes ------------------------------------------------------------------------------------------------------

    def _broadcast(self, op: Op) -> AxisInfo:
        info, shape = self.tile(op.operands[0]), op.settings["shape"]
        old = _tiles(op)[0].shape
        if not shape:
            return info
        cut = len(shape) - len(old)
        parts = []
        for axis, size in enumerate(shape):
            if axis < cut or old[axis - cut] != size:
                parts.append((1, size, info.everywhere))
            else:
                parts.append(_axis(info, axis - cut))
        return _of(parts, info)

    def _expand_dims(self, op: Op) -> AxisInfo:
        info = self.tile(op.operands[0])
        rank = len(_tiles(op)[0].shape)
        parts = [_axis(info, axis) for axis in range(rank)]
        axis = op.settings["axis"] % (rank + 1)
        parts.insert(axis, (1, 1, info.everywhere))
        return _of(parts, info)

    def _trans(self, op: Op) -> AxisInfo:
        info = self.tile(op.operands[0])
        return (
            _of([_axis(info, axis) for axis in op.settings["order"]], info) if op.settings["order"] else info
        )

    def _reshape(self, op: Op) -> AxisInfo:
        info, shape = self.tile(op.operands[0]), op.settings["shape"]
        old = _tiles(op)[0].shape
        if not shape or not old:
            return _of([(1, 1, info.everywhere)] * max(1, len(shape)), info)
        last = len(old) - 1
        step = math.gcd(info.contiguity[last], shape[-1])
        inner = (step, math.gcd(info.constancy[last], shape[-1]), info.divisor_at(last, step))
        return _of([(1, 1, info.everywhere)] * (len(shape) - 1) + [inner], info)

    def _join_tiles(self, op: Op) -> AxisInfo:
        a, b = (self.tile(each) for each in op.operands)
        both = _common(a, b)
        everywhere = math.gcd(a.everywhere, b.everywhere)
        rank = len(_tiles(op)[0].shape)
        return _of([*(_axis(both, axis) for axis in range(rank)), (1, 1, everywhere)], both)

    # -- arithmetic --------------------------------------------------------------------------------------------------

    def _add(self, infos: list[AxisInfo], known: AxisInfo) -> AxisInfo:
        return _fold_sum(infos[0], self._sum(infos[0], infos[1], known), infos[1])

    def _sub(self, infos: list[AxisInfo], known: AxisInfo) -> AxisInfo:
        x, y = infos
        contiguity = _gcds(x.contiguity, y.constancy)
        divisors = tuple(
            math.gcd(x.divisor_at(axis, step), y.divisor_at(axis, step))
            for axis, step in enumerate(contiguity)
        )
        value = None if x.value is None or y.value is None else _small(x.value - y.value)
        return replace(known, contiguity=contiguity, divisor=divisors, value=value)

    def _mul(self, infos: list[AxisInfo], known: AxisInfo) -> AxisInfo:
        x, y = infos
        if x.value == 1 or y.value == 1:
            return replace(y if x.value == 1 else x, unit=1)
        value = None if x.value is None or y.value is None else _small(x.value * y.value)
        product = min(LARGEST, x.everywhere * y.everywhere)
        divisors = tuple(
            max(product, min(LARGEST, x.divisor_at(axis, 1) * y.divisor_at(axis, 1)))
            for axis in range(len(known.divisor))
        )
        return replace(known, divisor=divisors, value=value)

    def _floordiv(self, infos: list[AxisInfo], known: AxisInfo) -> AxisInfo:
        x, by = infos[0], infos[1].value
        if by == 1:
            return x
        if by is None or by <= 0:
            return known
        groups = tuple(
            max(old, math.gcd(x.contiguity[axis], x.divisor[axis], by))
            for axis, old in enumerate(known.constancy)
        )
        exact = x.everywhere // by if x.everywhere % by == 0 else 1
        return replace(known, constancy=groups, divisor=(exact,) * len(groups))

    def _mod(self, infos: list[AxisInfo], known: AxisInfo) -> AxisInfo:
        x, by = infos[0], infos[1].value
        if by is None or by <= 0:
            return known
        contiguity = tuple(
            math.gcd(x.contiguity[axis], x.divisor[axis], by) for axis in range(len(known.divisor))
        )
        divisors = tuple(
            math.gcd(x.divisor_at(axis, step), power_of_two_in(by)) for axis, step in enumerate(contiguity)
        )
        return replace(known, contiguity=contiguity, divisor=divisors)

    def _select(self, infos: list[AxisInfo], known: AxisInfo) -> AxisInfo:
        condition, *branches = infos
        both = _common(*branches)
        contiguity = _gcds(both.contiguity, condition.constancy)
        divisors = tuple(
            math.gcd(*(each.divisor_at(axis, step) for each in branches))
            for axis, step in enumerate(contiguity)
        )
        return replace(known, contiguity=contiguity, divisor=divisors, value=both.value, unit=both.unit)


def _tiles(op: Op) -> list[TileType]:
    types = [each.type for each in op.operands]
    assert all(isinstance(each, TileType) for each in types)
    return types  # type: ignore[return-value]


def _element(op: Op) -> object:
    """The condition on a result's element for a rule of arithmetic to hold."""
    if op.name == "cast":
        return op.settings["dtype"]
    return _tiles(op)[0].element if op.name == "addptr" else None


def _axis(info: AxisInfo, axis: int) -> tuple[int, int, int]:
    return info.contiguity[axis], info.constancy[axis], info.divisor[axis]


def _of(parts: list[tuple[int, int, int]], like: AxisInfo) -> AxisInfo:
    contiguity, constancy, divisors = zip(*parts, strict=True)
    return AxisInfo(contiguity, constancy, divisors, like.value, like.unit)


def _small(value: int) -> int | None:
    """Only facts that fit all integer types of indices are known."""
    return value if -(2**31) <= value < 2**31 else None


def _fold_sum(x: AxisInfo, summed: AxisInfo, y: AxisInfo) -> AxisInfo:
    if x.value is None or y.value is None:
        return summed
    return replace(summed, value=_small(x.value + y.value))


_OPAQUE = ("load", "bitcast", "cumsum", *ATOMICS)
_SHAPES = {
    "broadcast": _Analysis._broadcast,
    "expand_dims": _Analysis._expand_dims,
    "trans": _Analysis._trans,
    "reshape": _Analysis._reshape,
    "join": _Analysis._join_tiles,
}
_ARITHMETIC = {
    "add": _Analysis._add,
    "sub": _Analysis._sub,
    "mul": _Analysis._mul,
    "floordiv": _Analysis._floordiv,
    "mod": _Analysis._mod,
    "select": _Analysis._select,
}
