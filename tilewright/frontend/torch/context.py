"""What a converter works with: the builder of nodes for the exported node that is being converted.

Methods leave out what does nothing (a cast to the same type, a reshape to the same shape), so that converters need no
special cases.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import numpy as np
import torch

from tilewright.dtypes import DType
from tilewright.errors import InternalError, TypeRuleError
from tilewright.frontend.torch.registry import Number, Operand, Unsupported
from tilewright.frontend.torch.types import common_dtype, from_torch_dtype, tensor_type, to_numpy
from tilewright.graph.ir import Node, TensorType, constant
from tilewright.graph.op import apply

Ints = Sequence[int]


class Context:
    """Builds the nodes of one exported node, called `name`; `value` is its exported result.

    `source` goes into every node. The name is the result's alone (`named`): what leads to it stays nameless.
    """

    def __init__(self, name: str, source: str, value: Any) -> None:
        self.name = name
        self.source = source
        self.value = value
        self._built: set[Node] = set()

    def named(self, result: Node, name: str) -> Node:
        """`result` with its name, if it was built here; a value that is only passed on keeps the name it has."""
        return replace(result, name=name) if result in self._built else result

    # -- the result that PyTorch promises ------------------------------------------------------------------------

    @property
    def type(self) -> TensorType:
        """The type of the result, of the first one where there are several."""
        value = self.value
        while isinstance(value, (tuple, list)):
            value = value[0]
        if not isinstance(value, torch.Tensor):
            raise Unsupported(f"its result is a {type(value).__name__} that depends on data, not a tensor")
        return tensor_type(value)

    @property
    def dtype(self) -> DType:
        return self.type.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.type.shape

    # -- nodes ---------------------------------------------------------------------------------------------------

    def emit(self, op: str, *inputs: Node, **attrs: Any) -> Node:
        for operand in inputs:
            if not isinstance(operand, Node):
                raise InternalError(f"{self.name}: operand {operand!r} of {op} is not a node")
        try:
            node = apply(op, *inputs, source=self.source, **attrs)
        except TypeRuleError as error:
            raise Unsupported(error.message) from None
        self._built.add(node)
        return node

    def constant(self, value: np.ndarray | torch.Tensor) -> Node:
        array = to_numpy(value) if isinstance(value, torch.Tensor) else value
        node = constant(array)
        self._built.add(node)
        return node

    def full(self, value: Number, dtype: DType, shape: Ints = ()) -> Node:
        return self.emit("full", value=number_of(value, dtype), shape=tuple(shape), dtype=dtype)

    def iota(self, shape: Ints, axis: int, dtype: DType = DType.I64) -> Node:
        return self.emit("iota", shape=tuple(shape), axis=axis, dtype=dtype)

    # -- types ---------------------------------------------------------------------------------------------------

    def foreign(self, dtype: torch.dtype | None, default: DType) -> DType:
        """The element type that an operator's `dtype` argument asks for."""
        return default if dtype is None else from_torch_dtype(dtype)

    def cast(self, x: Node, dtype: DType) -> Node:
        return x if x.dtype is dtype else self.emit("cast", x, dtype=dtype)

    def widen(self, x: Node) -> Node:
        """16-bit floats as the f32 in which they are computed."""
        return self.cast(x, x.dtype.compute)

    def operand(self, x: Operand, dtype: DType) -> Node:
        """`x` as a tensor of `dtype`: a cast, or a rank-0 constant for a number."""
        if isinstance(x, Node):
            return self.cast(x, dtype)
        return self.full(x, dtype)

    def working_dtype(self, *operands: Operand) -> DType:
        """The type to compute in: PyTorch's common type, but f32 for 16-bit floats with a number (or a rank-0 tensor of
        a wider type) that they cannot hold. PyTorch takes such a number in f32 too."""
        dtype = common_dtype(operands)
        if dtype.is_half and not all(_held(operand, dtype) for operand in operands):
            return DType.F32
        return dtype

    def arithmetic(self, op: str, *operands: Operand, dtype: DType | None = None) -> Node:
        """`op` on operands brought to their working type; the result in `dtype`, or in PyTorch's common type."""
        working = self.working_dtype(*operands)
        result = self.emit(op, *(self.operand(operand, working) for operand in operands))
        return self.cast(result, dtype or common_dtype(operands))

    def compare(self, op: str, a: Operand, b: Operand) -> Node:
        working = self.working_dtype(a, b)
        return self.emit(op, self.operand(a, working), self.operand(b, working))

    def truth(self, x: Node) -> Node:
        """Whether each element is not zero."""
        return x if x.dtype is DType.BOOL else self.emit("ne", x, self.full(0, x.dtype))

    def select(self, condition: Node, a: Operand, b: Operand, dtype: DType | None = None) -> Node:
        dtype = dtype or common_dtype((a, b))
        return self.emit("select", condition, self.operand(a, dtype), self.operand(b, dtype))

    # Shorthands for formulas.

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

    def concat(self, parts: Sequence[Node], axis: int) -> Node:
        """The parts one after the other; empty ones are left out, except the last that remains."""
        filled = [part for part in parts if part.shape[axis]] or list(parts[:1])
        return filled[0] if len(filled) == 1 else self.emit("concat", *filled, axis=axis)

    def take(self, x: Node, indices: Node | np.ndarray, axis: int) -> Node:
        if isinstance(indices, np.ndarray):
            indices = self.constant(indices)
        return self.emit("take", x, indices, axis=axis)

    # -- reductions ----------------------------------------------------------------------------------------------

    def reduce(self, op: str, x: Node, axes: Ints, keepdims: bool, **attrs: Any) -> Node:
        axes = tuple(axes)
        if not axes and op in ("sum", "mean", "amax", "amin", "prod", "any", "all"):
            return x  # of a rank-0 tensor: the reduction of one element
        return self.emit(op, x, axes=axes, keepdims=keepdims, **attrs)


def number_of(value: Number, dtype: DType) -> Number:
    """`value` as the Python number of the right kind for `dtype`, as PyTorch converts scalars."""
    if dtype is DType.BOOL:
        return bool(value)
    if dtype.is_float:
        return float(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise Unsupported(f"{value} is no integer")
    return int(value)


_F = TypeVar("_F", bound=Callable[..., Node])


def widened(function: _F) -> _F:
    """A converter whose formula is computed in f32 for 16-bit floats and rounded once, at its end."""

    @functools.wraps(function)
    def convert(ctx: Context, *arguments: Any, **keywords: Any) -> Node:
        wide = (ctx.widen(a) if isinstance(a, Node) else a for a in arguments)
        return ctx.cast(function(ctx, *wide, **keywords), ctx.dtype)

    return cast(_F, convert)


def _held(operand: Operand, half: DType) -> bool:
    """Whether a 16-bit float type holds this operand exactly."""
    if isinstance(operand, Node):
        return operand.dtype is half or not operand.dtype.is_float or operand.dtype.is_half
    value = float(operand)
    with np.errstate(over="ignore"):
        return math.isnan(value) or float(np.asarray(value).astype(half.numpy)) == value


def axis_of(axis: int, rank: int) -> int:
    """A dimension counted from either end as one counted from the start; rank-0 tensors count as rank 1."""
    axis = int(axis)
    return axis + max(rank, 1) if axis < 0 else axis


def axes_of(axes: int | Ints | None, rank: int) -> tuple[int, ...]:
    """The sorted axes that a `dim` argument names; None and the empty list name all of them."""
    if axes is None or (not isinstance(axes, int) and len(axes) == 0):
        return tuple(range(rank))
    listed = [axes] if isinstance(axes, int) else axes
    return tuple(sorted({axis_of(axis, rank) for axis in listed})) if rank else ()
