"""The order in which the axes of a value are stored.

`order[d]` is axis d of the storage: an axis of the value, or the index within the blocks of an axis; then the axis
itself is the block index. For a value [N, C, H, W]:

    (0, 1, 2, 3)                    is stored as it is written
    (0, 2, 3, 1)                    as [N, H, W, C]
    (0, 1, 2, 3, Block(1, 16))      as [N, C / 16, H, W, 16]

An axis of extent 1, along which a value broadcasts, has one block of extent 1 whatever the order says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from tilewright.rewrites.shapes import Shape, inverse, reordered


class AxisBlock(NamedTuple):
    """The index within blocks of `size` along an axis."""

    axis: int
    size: int


Entry = int | AxisBlock
Order = tuple[Entry, ...]


def identity(rank: int) -> Order:
    return tuple(range(rank))


def channels_last(rank: int) -> Order:
    """The order N spatial C of a value that is written N C spatial."""
    return (0, *range(2, rank), 1)


def channels_first(rank: int) -> Order:
    """The order N C spatial of a value that is written N spatial C."""
    return (0, rank - 1, *range(1, rank - 1))


def named(order: Order) -> str:
    """The name of the order, for traces."""
    sizes = blocks_of(order)
    if sizes:
        return f"blocks of {' and '.join(map(str, sizes.values()))}"
    if order == identity(len(order)):
        return "as written"
    return "channels last" if order == channels_last(len(order)) else "permuted"


def axis_of(entry: Entry) -> int:
    return entry.axis if isinstance(entry, AxisBlock) else entry


def blocks_of(order: Order) -> dict[int, int]:
    """The axes that are split into blocks, and their block sizes."""
    return {entry.axis: entry.size for entry in order if isinstance(entry, AxisBlock)}


def renamed(order: Iterable[Entry], name: Callable[[int], int]) -> Order:
    """The same order with renamed axes."""
    return tuple(e._replace(axis=name(e.axis)) if isinstance(e, AxisBlock) else name(e) for e in order)


def fits(shape: Sequence[int], order: Order) -> bool:
    """Whether a value of this shape has whole blocks."""
    return all(shape[axis] == 1 or shape[axis] % size == 0 for axis, size in blocks_of(order).items())


def stored(shape: Sequence[int], order: Order) -> Shape:
    """The storage shape of a value of this shape."""
    sizes = {axis: size for axis, size in blocks_of(order).items() if shape[axis] != 1}
    return tuple(
        sizes.get(entry.axis, 1) if isinstance(entry, AxisBlock) else shape[entry] // sizes.get(entry, 1)
        for entry in order
    )


def per_axis(values: Sequence[int], order: Order) -> Shape:
    """`values`, one per axis, for each storage axis; 0 for indices within blocks, which must be unaffected."""
    return tuple(0 if isinstance(entry, AxisBlock) else values[entry] for entry in order)


def positions(axes: Iterable[int], order: Order) -> tuple[int, ...]:
    """The storage axes of the value's axes."""
    wanted = set(axes)
    return tuple(position for position, entry in enumerate(order) if axis_of(entry) in wanted)


@lru_cache(maxsize=4096)
def conversions(shape: Shape, have: Order, need: Order) -> tuple[tuple[Shape, tuple[int, ...]], ...]:
    """The permutes that convert a value from one order to another, each as the shape to which the storage is reshaped
    and the permutation of these parts.

    One permute suffices if the blocks of one order consist of whole blocks of the other. Blocks of 24 and 16 do not:
    no reshape splits 48 channels for both. Such an axis is joined first.
    """
    whole = _joined(shape, have, need)
    if whole == have:
        return (_conversion(shape, have, need),)
    return _conversion(shape, have, whole), _conversion(shape, whole, need)


def _joined(shape: Shape, have: Order, need: Order) -> Order:
    """`have`, with each axis joined that the two orders split at different elements."""
    sizes = blocks_of(need)
    split = {
        axis
        for axis, size in blocks_of(have).items()
        if shape[axis] > 1 and axis in sizes and size % sizes[axis] and sizes[axis] % size
    }
    return tuple(
        entry.axis if isinstance(entry, AxisBlock) and entry.axis in split else entry
        for entry in have
        if entry not in split
    )


def _conversion(shape: Shape, have: Order, need: Order) -> tuple[Shape, tuple[int, ...]]:
    """The single permute between two orders, if the blocks of one consist of whole blocks of the other."""
    if not blocks_of(have) and not blocks_of(need):
        plain = [axis_of(entry) for entry in have]
        return reordered(shape, plain), reordered(inverse(plain), [axis_of(entry) for entry in need])
    cuts = {
        axis: sorted({1, shape[axis], *(size for o in (have, need) if (size := blocks_of(o).get(axis)))})
        for axis in range(len(shape))
    }
    before, after = (_parts(order, shape, cuts) for order in (have, need))
    return tuple(high // low for _, low, high in before), tuple(before.index(part) for part in after)


def _parts(order: Order, shape: Sequence[int], cuts: dict[int, list[int]]) -> list[tuple[int, int, int]]:
    """The parts of axes in storage order, as (axis, stride, end)."""
    sizes, found = blocks_of(order), []
    for entry in order:
        axis = axis_of(entry)
        if shape[axis] < 2:
            found += [(axis, 1, shape[axis])] if not isinstance(entry, AxisBlock) else []
            continue
        low, high = (1, entry.size) if isinstance(entry, AxisBlock) else (sizes.get(axis, 1), shape[axis])
        steps = [cut for cut in cuts[axis] if low <= cut <= high]
        found += [(axis, a, b) for a, b in zip(steps[-2::-1], steps[:0:-1], strict=True)]
    return found
