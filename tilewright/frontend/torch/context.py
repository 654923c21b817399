"""The node builder for the exported node that is being converted."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar, cast

import numpy as np
import torch

from tilewright.dtypes import DType
from tilewright.errors import InternalError
from tilewright.frontend.builder import GraphBuilder, Ints, Operand, Unsupported
from tilewright.frontend.torch.types import common_dtype, from_torch_dtype, tensor_type, to_numpy
from tilewright.graph.ir import Node, TensorType
from tilewright.graph.provenance import Provenance


class Context(GraphBuilder):
    """Builds the nodes of one exported node, called `name`; `value` is its exported result.

    The name is the result's alone (`named`): what leads to it stays nameless.
    """

    def __init__(self, name: str, source: Provenance, value: Any) -> None:
        super().__init__(source)
        self.name = name
        self.value = value
        self._built: set[Node] = set()

    def named(self, result: Node, name: str) -> Node:
        """`result` with its name, if it was built here; a value that is only passed on keeps its name."""
        return replace(result, name=name) if result in self._built else result

    # -- the exported result ---------------------------------------------------------------------------------------

    @property
    def type(self) -> TensorType:
        """The type of the result, or of the first one if there are several."""
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

    def made(self, node: Node) -> None:
        self._built.add(node)

    def stray(self, op: str, operand: Any) -> Exception:
        return InternalError(f"{self.name}: operand {operand!r} of {op} is not a node")

    def constant(self, value: np.ndarray | np.generic | torch.Tensor) -> Node:
        return super().constant(to_numpy(value) if isinstance(value, torch.Tensor) else value)

    # -- types ---------------------------------------------------------------------------------------------------

    def foreign(self, dtype: torch.dtype | None, default: DType) -> DType:
        """The element type that an operator's `dtype` argument requests."""
        return default if dtype is None else from_torch_dtype(dtype)

    def operand(self, x: Operand, dtype: DType) -> Node:
        """`x` as a tensor of `dtype`: a cast, or a rank-0 constant for a number."""
        if isinstance(x, Node):
            return self.cast(x, dtype)
        return self.full(x, dtype)

    def working_dtype(self, *operands: Operand) -> DType:
        """The type to compute in: PyTorch's common type, except f32 for 16-bit floats with a number (or a rank-0
        tensor of a wider type) that they cannot represent. PyTorch uses f32 for such a number too."""
        dtype = common_dtype(operands)
        if dtype.is_half and not all(_held(operand, dtype) for operand in operands):
            return DType.F32
        return dtype

    def arithmetic(self, op: str, *operands: Operand, dtype: DType | None = None) -> Node:
        """`op` on operands converted to their working type; the result in `dtype`, or in PyTorch's common type."""
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

    # -- reductions ----------------------------------------------------------------------------------------------

    def reduce(self, op: str, x: Node, axes: Ints, keepdims: bool, **attrs: Any) -> Node:
        axes = tuple(axes)
        if not axes and op in ("sum", "mean", "amax", "amin", "prod", "any", "all"):
            return x  # of a rank-0 tensor: the reduction of one element
        return self.emit(op, x, axes=axes, keepdims=keepdims, **attrs)


_F = TypeVar("_F", bound=Callable[..., Node])


def widened(function: _F) -> _F:
    """A converter whose formula is computed in f32 for 16-bit floats and rounded once, at its end."""

    @functools.wraps(function)
    def convert(ctx: Context, *arguments: Any, **keywords: Any) -> Node:
        wide = (ctx.widen(a) if isinstance(a, Node) else a for a in arguments)
        return ctx.cast(function(ctx, *wide, **keywords), ctx.dtype)

    return cast(_F, convert)


def _held(operand: Operand, half: DType) -> bool:
    """Whether a 16-bit float type represents this operand exactly."""
    if isinstance(operand, Node):
        return operand.dtype is half or not operand.dtype.is_float or operand.dtype.is_half
    value = float(operand)
    with np.errstate(over="ignore"):
        return math.isnan(value) or float(np.asarray(value).astype(half.numpy)) == value


def axis_of(axis: int, rank: int) -> int:
    """Normalise a dimension that may be counted from the end; rank-0 tensors count as rank 1."""
    axis = int(axis)
    return axis + max(rank, 1) if axis < 0 else axis


def axes_of(axes: int | Ints | None, rank: int) -> tuple[int, ...]:
    """The sorted axes that a `dim` argument names; None and the empty list name all of them."""
    if axes is None or (not isinstance(axes, int) and len(axes) == 0):
        return tuple(range(rank))
    listed = [axes] if isinstance(axes, int) else axes
    return tuple(sorted({axis_of(axis, rank) for axis in listed})) if rank else ()
