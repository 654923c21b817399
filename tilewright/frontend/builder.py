"""The node builder that the converters of every frontend use.

Methods omit no-ops (a cast to the same type, a reshape to the same shape), so that converters need no special cases.
Each frontend's `Context` adds what is specific to it (type promotion, knowledge of the result).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewright.dtypes import DType
from tilewright.errors import TypeRuleError
from tilewright.graph.ir import Node, constant
from tilewright.graph.op import apply
from tilewright.graph.provenance import Provenance

Ints = Sequence[int]
Number = int | float | bool
Operand = Node | int | float | bool


class Unsupported(Exception):
    """This use of an operator cannot be expressed in the graph; the message says why."""


@dataclass(frozen=True)
class Absent:
    """A result that is not computed; using it is unsupported, for this reason."""

    reason: str


class GraphBuilder(ABC):
    """Builds the nodes of one foreign node. `source` goes into every one of them."""

    def __init__(self, source: Provenance) -> None:
        self.source = source

    @abstractmethod
    def made(self, node: Node) -> None:
        """Called with every node that is built."""

    @abstractmethod
    def stray(self, op: str, operand: Any) -> Exception:
        """The error for an operand that is not a node."""

    @abstractmethod
    def arithmetic(self, op: str, *operands: Operand) -> Node:
        """`op` on operands, some of which may be numbers, converted to one type."""

    # -- nodes ---------------------------------------------------------------------------------------------------

    def emit(self, op: str, *inputs: Node, **attrs: Any) -> Node:
        for operand in inputs:
            if not isinstance(operand, Node):
                raise self.stray(op, operand)
        try:
            node = apply(op, *inputs, source=self.source, **attrs)
        except TypeRuleError as error:
            raise Unsupported(error.message) from None
        self.made(node)
        return node

    def constant(self, value: np.ndarray | np.generic) -> Node:
        node = constant(np.asarray(value))
        self.made(node)
        return node

    def full(self, value: Number, dtype: DType, shape: Ints = ()) -> Node:
        return self.emit("full", value=number_of(value, dtype), shape=tuple(map(int, shape)), dtype=dtype)

    def iota(self, shape: Ints, axis: int, dtype: DType = DType.I64) -> Node:
        return self.emit("iota", shape=tuple(shape), axis=axis, dtype=dtype)

    # -- types and arithmetic ------------------------------------------------------------------------------------

    def cast(self, x: Node, dtype: DType) -> Node:
        return x if x.dtype is dtype else self.emit("cast", x, dtype=dtype)

    def widen(self, x: Node) -> Node:
        """16-bit floats widened to f32 for arithmetic."""
        return self.cast(x, x.dtype.compute)

    def add(self, a: Operand, b: Operand) -> Node:
        return self.arithmetic("add", a, b)

    def sub(self, a: Operand, b: Operand) -> Node:
        return self.arithmetic("sub", a, b)

    def mul(self, a: Operand, b: Operand) -> Node:
        return self.arithmetic("mul", a, b)

    def div(self, a: Operand, b: Operand) -> Node:
        return self.arithmetic("div", a, b)

    # -- movement ------------------------------------------------------------------------------------------------

    def reshape(self, x: Node, shape: Ints) -> Node:
        shape = tuple(int(extent) for extent in shape)
        return x if x.shape == shape else self.emit("reshape", x, shape=shape)

    def permute(self, x: Node, axes: Ints) -> Node:
        axes = tuple(int(axis) for axis in axes)
        return x if axes == tuple(range(len(axes))) else self.emit("permute", x, axes=axes)

    def move_axis(self, x: Node, source: int, destination: int) -> Node:
        axes = [axis for axis in range(x.type.rank) if axis != source]
        axes.insert(destination, source)
        return self.permute(x, axes)

    def broadcast_to(self, x: Node, shape: Ints) -> Node:
        shape = tuple(int(extent) for extent in shape)
        return x if x.shape == shape else self.emit("broadcast_to", x, shape=shape)

    def unsqueeze(self, x: Node, axis: int) -> Node:
        return self.reshape(x, (*x.shape[:axis], 1, *x.shape[axis:]))

    def squeeze(self, x: Node, axis: int) -> Node:
        return self.reshape(x, (*x.shape[:axis], *x.shape[axis + 1 :]))

    def slice_axis(self, x: Node, axis: int, start: int, stop: int, step: int = 1) -> Node:
        """Elements start, start + step, ... below stop along `axis`; 0 <= start <= stop <= the extent."""
        if (start, stop, step) == (0, x.shape[axis], 1):
            return x
        starts, stops, steps = [0] * x.type.rank, list(x.shape), [1] * x.type.rank
        starts[axis], stops[axis], steps[axis] = start, stop, step
        return self.emit("slice", x, starts=tuple(starts), stops=tuple(stops), steps=tuple(steps))

    def index_axis(self, x: Node, axis: int, position: int) -> Node:
        """The element at `position` of an axis, which disappears."""
        return self.squeeze(self.slice_axis(x, axis, position, position + 1), axis)

    def concat(self, parts: Sequence[Node], axis: int) -> Node:
        """Concatenate the parts; empty ones are omitted, except the last remaining one."""
        filled = [part for part in parts if part.shape[axis]] or list(parts[:1])
        return filled[0] if len(filled) == 1 else self.emit("concat", *filled, axis=axis)

    def stack(self, parts: Sequence[Node], axis: int) -> Node:
        return self.concat([self.unsqueeze(part, axis) for part in parts], axis)

    def take(self, x: Node, indices: Node | np.ndarray, axis: int) -> Node:
        if isinstance(indices, np.ndarray):
            indices = self.constant(indices)
        return self.emit("take", x, indices, axis=axis)

    def pad(self, x: Node, low: Ints, high: Ints, value: Number) -> Node:
        if not any(low) and not any(high):
            return x
        zeros = (0,) * x.type.rank
        number = number_of(value, x.dtype)
        return self.emit("pad", x, low=tuple(low), high=tuple(high), interior=zeros, value=number)


def number_of(value: Number, dtype: DType) -> Number:
    """`value` as the Python number of the right kind for `dtype`."""
    if dtype is DType.BOOL:
        return bool(value)
    if dtype.is_float:
        return float(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise Unsupported(f"{value} is not an integer")
    return int(value)
