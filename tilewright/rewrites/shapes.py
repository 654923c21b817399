"""Arithmetic on shapes and permutations that several passes share. Permutations have the operator's meaning: axis d
of the result is axis `axes[d]` of the operand."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.graph.ir import Node
from tilewright.graph.op import apply
from tilewright.graph.ops.movement import reshape_segments

Shape = tuple[int, ...]


def inverse(axes: Sequence[int]) -> tuple[int, ...]:
    result = [0] * len(axes)
    for position, axis in enumerate(axes):
        result[axis] = position
    return tuple(result)


def is_identity(axes: Sequence[object]) -> bool:
    return all(axis == position for position, axis in enumerate(axes))


def reordered(values: Sequence[int], axes: Sequence[int]) -> tuple[int, ...]:
    """`values`, one per axis, after the permutation."""
    return tuple(values[axis] for axis in axes)


def moves_nothing(shape: Sequence[int], axes: Sequence[int]) -> bool:
    """Whether the permutation keeps the order of all axes longer than 1, so that it is a reshape."""
    long = [axis for axis in axes if shape[axis] != 1]
    return long == sorted(long)


def trimmed(shape: Shape) -> Shape:
    """The shape without leading ones, which broadcasting restores."""
    start = 0
    while start < len(shape) and shape[start] == 1:
        start += 1
    return shape[start:]


def reshape_to(node: Node, shape: Shape) -> Node:
    return node if node.shape == shape else apply("reshape", node, shape=shape)


def reshape_operand(operand: Node, shape: Shape, target: Shape) -> Node | None:
    """For an `operand` that broadcasts to `shape`: its reshape that broadcasts to `target` in the same way; None if
    there is none."""
    if operand.type.size == 1:
        return reshape_to(operand, ())
    if operand.op == "reshape" and operand.shape == shape and operand.inputs[0].shape == target:
        return operand.inputs[0]
    if operand.shape == shape:
        return reshape_to(operand, target)
    extents = (1,) * (len(shape) - operand.type.rank) + operand.shape
    new = [1] * len(target)
    for sources, targets in reshape_segments(shape, target):
        if all(extents[axis] == shape[axis] for axis in sources):
            for axis in targets:
                new[axis] = target[axis]
        elif not all(extents[axis] == 1 for axis in sources):
            return None
    return reshape_to(operand, trimmed(tuple(new)))
