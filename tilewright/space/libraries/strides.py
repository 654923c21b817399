"""Data movement expressed as strides, without a copy."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.graph.ir import Node
from tilewright.graph.ops.movement import reshape_segments


@dataclass(frozen=True)
class Strided:
    """The value of a node, read from the memory of `source`; all units are elements."""

    source: Node
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0


def dense(node: Node) -> Strided:
    return Strided(node, node.shape, strides_of(node.shape))


def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def strided(node: Node) -> Strided | None:
    """Follow movement operators down to their source; None if strides cannot express the result."""
    if node.op not in ("permute", "reshape", "slice", "broadcast_to"):
        return dense(node)
    under = strided(node.inputs[0])
    if under is None:
        return None
    if node.op == "permute":
        axes = node.attrs["axes"]
        strides = tuple(under.strides[axis] for axis in axes)
        return Strided(under.source, node.shape, strides, under.offset)
    if node.op == "slice":
        starts, steps = node.attrs["starts"], node.attrs["steps"]
        if min(steps) < 1:
            return None
        offset = under.offset + sum(a * s for a, s in zip(starts, under.strides, strict=True))
        strides = tuple(a * s for a, s in zip(steps, under.strides, strict=True))
        return Strided(under.source, node.shape, strides, offset)
    if node.op == "broadcast_to":
        missing = len(node.shape) - len(under.shape)
        own = (1,) * missing + under.shape
        strides = tuple(
            s if n == m else 0
            for s, n, m in zip((0,) * missing + under.strides, own, node.shape, strict=True)
        )
        return Strided(under.source, node.shape, strides, under.offset)
    return _reshaped(under, node.shape)


def _reshaped(under: Strided, shape: tuple[int, ...]) -> Strided | None:
    """Split or join axes. Axes that are joined must be contiguous."""
    strides: dict[int, int] = {}
    for sources, targets in reshape_segments(under.shape, shape):
        step = under.strides[sources[-1]]
        expected = step
        for axis in reversed(sources):
            if under.shape[axis] != 1 and under.strides[axis] != expected:
                return None
            expected *= under.shape[axis]
        for axis in reversed(targets):
            strides[axis] = step
            step *= shape[axis]
    for axis in reversed(range(len(shape))):  # axes of one element may have any stride: treat them as dense
        strides.setdefault(axis, strides[axis + 1] * shape[axis + 1] if axis + 1 in strides else 1)
    return Strided(under.source, shape, tuple(strides[axis] for axis in range(len(shape))), under.offset)
