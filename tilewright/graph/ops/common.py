"""Helpers for operator files: type errors and index mappings.

A type rule is a list of `expect(...)` lines, each with what was expected and what came. `apply` prefixes the message
with the operator's name and its operand types.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tilewright import te
from tilewright.dtypes import DType
from tilewright.errors import TypeRuleError
from tilewright.graph.ir import TensorType
from tilewright.graph.op import Application

# -- type rules ---------------------------------------------------------------------------------------------------

# The classes of element types that operators take, each with its description for error messages.
ANY = "any type"
NUMBER = "floats or integers"
FLOAT = "floats"
INTEGER = "integers"
BITS = "integers or bool"
BOOL = "bool"

_MEMBERS: dict[str, Callable[[DType], bool]] = {
    ANY: lambda dtype: True,
    NUMBER: lambda dtype: dtype.is_float or dtype.is_integer,
    FLOAT: lambda dtype: dtype.is_float,
    INTEGER: lambda dtype: dtype.is_integer,
    BITS: lambda dtype: dtype.is_integer or dtype is DType.BOOL,
    BOOL: lambda dtype: dtype is DType.BOOL,
}


def expect(condition: bool, message: str) -> None:
    if not condition:
        raise TypeRuleError(message)


def expect_operands(inputs: Sequence[TensorType], *counts: int) -> None:
    wanted = " or ".join(map(str, counts))
    expect(len(inputs) in counts, f"takes {wanted} operand(s), got {len(inputs)}")


def expect_kind(dtype: DType, kind: str) -> None:
    expect(_MEMBERS[kind](dtype), f"takes {kind}, got {dtype.short}")


def expect_same_dtype(inputs: Sequence[TensorType]) -> DType:
    dtypes = [type.dtype for type in inputs]
    expect(len(set(dtypes)) == 1, f"operands must have one element type, got {dtypes}; insert a cast")
    return dtypes[0]


def expect_axis(axis: Any, rank: int) -> int:
    expect(is_int(axis) and 0 <= axis < rank, f"axis must be in [0, {rank}), got {axis!r}")
    return int(axis)


def expect_axes(axes: Any, rank: int) -> tuple[int, ...]:
    legal = isinstance(axes, tuple) and all(is_int(axis) and 0 <= axis < rank for axis in axes)
    legal = legal and list(axes) == sorted(set(axes))
    expect(legal, f"axes must be a sorted tuple of different axes in [0, {rank}), got {axes!r}")
    return tuple(axes)


def expect_ints(name: str, values: Any, length: int, least: int) -> tuple[int, ...]:
    """The attribute `name`: a tuple of `length` integers, none below `least`."""
    legal = isinstance(values, tuple) and len(values) == length
    legal = legal and all(is_int(value) and value >= least for value in values)
    expect(legal, f"{name} must be {length} integer(s) of at least {least}, got {values!r}")
    return tuple(values)


def expect_shape(shape: Any) -> tuple[int, ...]:
    legal = isinstance(shape, tuple) and all(is_int(extent) and extent >= 0 for extent in shape)
    expect(legal, f"shape must be a tuple of extents, got {shape!r}")
    return tuple(shape)


def expect_choice(name: str, value: Any, *choices: str) -> str:
    expect(value in choices, f"{name} must be one of {', '.join(choices)}; got {value!r}")
    return str(value)


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def fits(value: Any, dtype: DType) -> bool:
    """Whether a plain number is a value of `dtype` (floats round, nothing else does)."""
    if dtype is DType.BOOL:
        return isinstance(value, bool)
    if dtype.is_float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_int(value):
        return False
    bits, signed = 8 * dtype.bytes, not dtype.is_unsigned
    low, high = (-(1 << (bits - 1)), 1 << (bits - 1)) if signed else (0, 1 << bits)
    return low <= int(value) < high


def expect_fits(name: str, value: Any, dtype: DType) -> None:
    expect(fits(value, dtype), f"{name} must be a value of {dtype.short}, got {value!r}")


def broadcast_shapes(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """NumPy's rule: aligned at the right, an extent of 1 stretches."""
    rank = max((len(shape) for shape in shapes), default=0)
    result = [1] * rank
    for shape in shapes:
        for axis, extent in enumerate(shape, start=rank - len(shape)):
            if extent == 1 or extent == result[axis]:
                continue
            expect(
                result[axis] == 1,
                f"shapes {', '.join(str(list(s)) for s in shapes)} do not broadcast together",
            )
            result[axis] = extent
    return tuple(result)


# -- lowerings ----------------------------------------------------------------------------------------------------


def label(app: Application, default: str) -> str:
    """The name of this application's stages: the node's name, or else the operator's."""
    return app.name or default


def broadcast_indices(
    axes: Sequence[te.Expr], from_shape: Sequence[int], to_shape: Sequence[int]
) -> tuple[te.Expr, ...]:
    """The source index, in a tensor of `from_shape` that broadcasts to `to_shape`, of the element at `axes`."""
    offset = len(to_shape) - len(from_shape)
    return tuple(
        te.as_index(0) if extent == 1 else axis
        for axis, extent in zip(axes[offset:], from_shape, strict=True)
    )


def merge_axes(
    kept: Sequence[te.Expr], reduced: Sequence[te.Expr], axes: Sequence[int]
) -> tuple[te.Expr, ...]:
    """Merge `reduced`, the entries at positions `axes`, with `kept`, the other entries in order."""
    kept_left, reduced_left = iter(kept), iter(reduced)
    rank = len(kept) + len(reduced)
    return tuple(next(reduced_left if axis in axes else kept_left) for axis in range(rank))


def drop_axes(shape: Sequence[int], axes: Sequence[int]) -> tuple[int, ...]:
    return tuple(extent for axis, extent in enumerate(shape) if axis not in axes)


def scaled(index: te.Expr, factor: int) -> te.Expr:
    return index if factor == 1 else index * factor


def shifted(index: te.Expr, offset: int) -> te.Expr:
    if offset == 0:
        return index
    return index + offset if offset > 0 else index - -offset


def divided(index: te.Expr, divisor: int) -> te.Expr:
    return index if divisor == 1 else index // divisor


def remainder(index: te.Expr, divisor: int) -> te.Expr:
    return te.as_index(0) if divisor == 1 else index % divisor


def finish(
    name: str, type: TensorType, accumulated: te.Tensor, bias: Callable[..., te.Expr] | None = None
) -> te.Tensor:
    """The stage after an accumulation: add `bias(*axes)` and round to the result's type. It is omitted if there is no
    bias and the accumulator already has the result's type."""
    if bias is None and accumulated.dtype is type.dtype:
        return accumulated

    def formula(*axes: te.Var) -> te.Expr:
        return accumulated[axes] if bias is None else accumulated[axes] + bias(*axes)

    return te.compute(name, type.shape, type.dtype, formula)
