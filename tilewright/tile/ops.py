"""The operations of the tile IR: one table, an entry each with operands, type rule and meaning in NumPy.

A rule takes the types of the operands and the attributes and gives the types of the results, or raises a
`KernelError` without a location, to which the front end adds the user's line. A meaning takes the machine that runs it
(memory, program ids), the attributes and the operands' values: arrays of the type's shape, addresses as int64, a
`BlockAddress` for a block pointer (`pointers.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tilewright.dtypes import DType
from tilewright.errors import DeviceAssertionError, KernelShapeError, KernelTypeError
from tilewright.te.scalars import SCALARS, Scalar
from tilewright.tile import atomics as _atomics  # noqa: F401  (registers its operations)
from tilewright.tile import pointers as _pointers  # noqa: F401  (as well)
from tilewright.tile.ir import TileType, Type
from tilewright.tile.op import (
    BOOL,
    F32,
    I32,
    TABLE,
    Attrs,
    Effect,
    Machine,
    Meaning,
    OpDef,
    Rule,
    check_axis,
    check_shape,
    numbers,
    op,
    same,
)

OPS = TABLE  # complete when this module is imported
PRECISIONS = ("ieee", "tf32")


# -- scalar functions of te, elementwise ------------------------------------------------------------------------------

_ANY = frozenset(["add", "sub", "mul", "min", "max", "neg", "abs"])
_COMPARE = frozenset(["eq", "ne", "lt", "le"])
_INTEGER = frozenset(["floordiv", "mod", "shl", "shr"])
_BITWISE = frozenset(["and", "or", "xor", "not"])


def _takes(name: str, dtype: DType) -> bool:
    if name in _COMPARE:
        return True
    if name in _ANY:
        return dtype is not BOOL
    if name in _INTEGER:
        return dtype.is_integer
    if name in _BITWISE:
        return not dtype.is_float
    if name == "dot4":
        return dtype is I32
    return dtype.is_float


def _scalar_rule(scalar: Scalar) -> Rule:
    def rule(types: Sequence[Type], attrs: Attrs) -> TileType:
        type = same([numbers(each, scalar.text) for each in types], scalar.text)
        if not _takes(scalar.name, type.dtype):
            wanted = [each.short for each in DType if _takes(scalar.name, each)]
            raise KernelTypeError(f"{scalar.text} takes {', '.join(wanted)}; got {type}")
        return type.of(BOOL) if scalar.predicate else type

    return rule


def _scalar_meaning(scalar: Scalar) -> Meaning:
    def meaning(machine: Machine, attrs: Attrs, *args: np.ndarray) -> np.ndarray:
        dtype = args[0].dtype
        if dtype.itemsize == 2 and dtype.kind not in "iu":  # halves are computed in f32, and rounded once
            args = tuple(each.astype(np.float32) for each in args)
        result = np.asarray(scalar.numpy(*args))
        return result.astype(np.bool_ if scalar.predicate else dtype, copy=False)

    return meaning


for _scalar in SCALARS.values():
    _names = ("a", "b", "c")[: _scalar.arity]
    OPS[_scalar.name] = OpDef(_scalar.name, _names, _scalar_rule(_scalar), _scalar_meaning(_scalar))


# -- where tiles come from --------------------------------------------------------------------------------------------


@op("constant", "", lambda types, attrs: TileType(attrs["dtype"]))
def _constant(machine: Machine, attrs: Attrs) -> np.ndarray:
    return np.asarray(attrs["value"], attrs["dtype"].numpy)


def _grid_rule(types: Sequence[Type], attrs: Attrs) -> TileType:
    if attrs["axis"] not in (0, 1, 2):
        raise KernelShapeError(
            f"axis {attrs['axis']} of the grid", remedy="a grid has the axes 0, 1 and 2: use one of them"
        )
    return TileType(I32)


@op("program_id", "", _grid_rule)
def _program_id(machine: Machine, attrs: Attrs) -> np.ndarray:
    return np.asarray(machine.program_id(attrs["axis"]), np.int32)


@op("num_programs", "", _grid_rule)
def _num_programs(machine: Machine, attrs: Attrs) -> np.ndarray:
    return np.asarray(machine.num_programs(attrs["axis"]), np.int32)


@op("arange", "", lambda types, attrs: TileType(I32, check_shape((attrs["end"] - attrs["start"],))))
def _arange(machine: Machine, attrs: Attrs) -> np.ndarray:
    return np.arange(attrs["start"], attrs["end"], dtype=np.int32)


# -- types and shapes -------------------------------------------------------------------------------------------------


@op("cast", "value", lambda types, attrs: numbers(types[0], "a cast").of(attrs["dtype"]))
def _cast(machine: Machine, attrs: Attrs, value: np.ndarray) -> np.ndarray:
    if attrs["dtype"] is BOOL:
        return np.asarray(value != 0)
    return value.astype(attrs["dtype"].numpy)


def _bitcast_rule(types: Sequence[Type], attrs: Attrs) -> TileType:
    type = numbers(types[0], "a bitcast")
    if type.dtype.bytes != attrs["dtype"].bytes:
        raise KernelTypeError(f"a bitcast from {type} to {attrs['dtype'].short}, which has another width")
    return type.of(attrs["dtype"])


@op("bitcast", "value", _bitcast_rule)
def _bitcast(machine: Machine, attrs: Attrs, value: np.ndarray) -> np.ndarray:
    return np.asarray(np.ascontiguousarray(value).view(attrs["dtype"].numpy).reshape(value.shape))


def broadcast_shapes(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """NumPy's rule: shapes are aligned at their last axes, and a size of 1 is stretched."""
    rank = max(len(a), len(b))
    left, right = (1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b
    for axis, (x, y) in enumerate(zip(left, right, strict=True)):
        if x != y and 1 not in (x, y):
            raise KernelShapeError(
                f"shapes {a} and {b} do not broadcast: {x} against {y} at axis {axis - rank}",
            )
    return tuple(max(x, y) for x, y in zip(left, right, strict=True))


def _broadcast_rule(types: Sequence[Type], attrs: Attrs) -> TileType:
    (type,) = types
    shape = check_shape(attrs["shape"])
    if not isinstance(type, TileType):
        raise KernelTypeError("a block pointer cannot be broadcast")
    if len(type.shape) > len(shape) or broadcast_shapes(type.shape, shape) != shape:
        raise KernelShapeError(f"{type} cannot be broadcast to {shape}")
    return type.shaped(shape)


@op("broadcast", "value", _broadcast_rule)
def _broadcast(machine: Machine, attrs: Attrs, value: np.ndarray) -> np.ndarray:
    return np.broadcast_to(value, attrs["shape"])


def _expand_rule(types: Sequence[TileType], attrs: Attrs) -> TileType:
    axis = check_axis(attrs["axis"], len(types[0].shape) + 1)
    return types[0].shaped((*types[0].shape[:axis], 1, *types[0].shape[axis:]))


@op("expand_dims", "value", _expand_rule)
def _expand_dims(machine: Machine, attrs: Attrs, value: np.ndarray) -> np.ndarray:
    return np.expand_dims(value, attrs["axis"])


def _reshape_rule(types: Sequence[TileType], attrs: Attrs) -> TileType:
    shape = check_shape(attrs["shape"])
    if math.prod(shape) != math.prod(types[0].shape):
        raise KernelShapeError(
            f"{types[0]} cannot be reshaped to {shape}: {math.prod(types[0].shape)} elements and"
            f" {math.prod(shape)}",
            remedy="give a shape with as many elements",
        )
    return types[0].shaped(shape)


@op("reshape", "value", _reshape_rule)
def _reshape(machine: Machine, attrs: Attrs, value: np.ndarray) -> np.ndarray:
    return value.reshape(attrs["shape"])


def _trans_rule(types: Sequence[TileType], attrs: Attrs) -> TileType:
    order, shape = attrs["order"], types[0].shape
    if sorted(order) != list(range(len(shape))):
        raise KernelShapeError(
            f"{order} is not an order of the {len(shape)} axes of {types[0]}",
            remedy="name each axis once, as in tl.trans(x, 1, 0)",
        )
    return types[0].shaped(tuple(shape[axis] for axis in order))


@op("trans", "value", _trans_rule)
def _trans(machine: Machine, attrs: Attrs, value: np.ndarray) -> np.ndarray:
    return np.transpose(value, attrs["order"])


def _join_rule(types: Sequence[TileType], attrs: Attrs) -> TileType:
    type = same(types, "join")
    return type.shaped(check_shape((*type.shape, 2)))


@op("join", "a b", _join_rule)
def _join(machine: Machine, attrs: Attrs, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.stack([a, b], axis=-1)


def _split_rule(types: Sequence[TileType], attrs: Attrs) -> TileType:
    if not types[0].shape or types[0].shape[-1] != 2:
        raise KernelShapeError(
            f"split needs a last axis of size 2, got {types[0]}",
            remedy="reshape it to (..., 2) first",
        )
    return types[0].shaped(types[0].shape[:-1])


@op("split", "value", _split_rule)
def _split(machine: Machine, attrs: Attrs, value: np.ndarray) -> np.ndarray:
    return np.asarray(value[..., attrs["index"]])


def _flip_rule(types: Sequence[TileType], attrs: Attrs) -> TileType:
    check_axis(attrs["axis"], len(types[0].shape))
    return types[0]


@op("flip", "value", _flip_rule)
def _flip(machine: Machine, attrs: Attrs, value: np.ndarray) -> np.ndarray:
    return np.flip(value, attrs["axis"])


def _select_rule(types: Sequence[TileType], attrs: Attrs) -> TileType:
    type = same(types[1:], "where")
    if types[0] != type.of(BOOL):
        raise KernelTypeError(f"where takes a condition of type {type.of(BOOL)}, got {types[0]}")
    return type


@op("select", "condition then other", _select_rule)
def _select(machine: Machine, attrs: Attrs, condition: Any, then: Any, other: Any) -> np.ndarray:
    return np.asarray(np.where(condition, then, other))


# -- along an axis ----------------------------------------------------------------------------------------------------


def sum_type(dtype: DType) -> DType:
    """The type of a sum: integers of fewer than 32 bits and bools are summed in i32."""
    return I32 if not dtype.is_float and dtype.bytes < 4 else dtype


def _reduce_rule(types: Sequence[Type], attrs: Attrs) -> TileType:
    kind = attrs["kind"]
    type = numbers(types[0], kind)
    axis = check_axis(attrs["axis"], len(type.shape))
    kept = type.shape[:axis] + type.shape[axis + 1 :]
    if kind == "sum":
        return TileType(sum_type(type.dtype), kept)
    return TileType(I32 if kind.startswith("arg") else type.dtype, kept)


_REDUCTIONS: dict[str, Callable[..., Any]] = {
    "max": np.max,
    "min": np.min,
    "argmax": np.argmax,
    "argmin": np.argmin,
}
REDUCTIONS = ("sum", *_REDUCTIONS)


@op("reduce", "value", _reduce_rule)
def _reduce(machine: Machine, attrs: Attrs, value: np.ndarray) -> np.ndarray:
    kind, axis = attrs["kind"], attrs["axis"]
    dtype = DType.of(value)
    wide = value.astype(dtype.compute.numpy)
    if kind == "sum":
        result = sum_type(dtype)
        return np.asarray(np.sum(wide, axis=axis, dtype=result.compute.numpy)).astype(result.numpy)
    found = np.asarray(_REDUCTIONS[kind](wide, axis=axis))
    return found.astype(np.int32 if kind.startswith("arg") else value.dtype)


def _scan_rule(types: Sequence[Type], attrs: Attrs) -> TileType:
    type = numbers(types[0], "cumsum")
    check_axis(attrs["axis"], len(type.shape))
    return type.of(sum_type(type.dtype))


@op("cumsum", "value", _scan_rule)
def _cumsum(machine: Machine, attrs: Attrs, value: np.ndarray) -> np.ndarray:
    result = sum_type(DType.of(value))
    return np.cumsum(value, axis=attrs["axis"], dtype=result.compute.numpy).astype(result.numpy)


def _sort_rule(types: Sequence[Type], attrs: Attrs) -> TileType:
    type = numbers(types[0], "sort")
    check_axis(attrs["axis"], len(type.shape))
    return type


@op("sort", "value", _sort_rule)
def _sort(machine: Machine, attrs: Attrs, value: np.ndarray) -> np.ndarray:
    wide = value.astype(DType.of(value).compute.numpy)
    found = np.sort(wide, axis=attrs["axis"])
    if attrs["descending"]:
        found = np.flip(found, axis=attrs["axis"])
    return found.astype(value.dtype)


# -- dot --------------------------------------------------------------------------------------------------------------


def dot_type(dtype: DType) -> DType | None:
    """The type in which products of this type are accumulated, and the type of the result."""
    if dtype in (DType.I8, DType.U8):
        return I32
    if dtype.is_float:
        return DType.F64 if dtype is DType.F64 else F32
    return None


def _dot_rule(types: Sequence[Type], attrs: Attrs) -> TileType:
    a, b = numbers(types[0], "dot"), numbers(types[1], "dot")
    into = dot_type(a.dtype)
    if into is None or a.dtype is not b.dtype:
        raise KernelTypeError(
            f"dot takes two tiles of one type out of f16, bf16, f32, f64, i8 and u8; got {a} and {b}"
        )
    if attrs["precision"] not in PRECISIONS:
        raise KernelTypeError(
            f"precision must be one of {', '.join(PRECISIONS)}, got {attrs['precision']!r}",
            remedy='use input_precision="ieee" or "tf32"',
        )
    if len(a.shape) != len(b.shape) or len(a.shape) not in (2, 3) or a.shape[:-2] != b.shape[:-2]:
        raise KernelShapeError(
            f"dot of {a} and {b}: both must have 2 axes, or 3 with the same first one",
            remedy="reshape the operands, or reduce with tl.sum(a * b, axis)",
        )
    if a.shape[-1] != b.shape[-2]:
        raise KernelShapeError(
            f"dot of {a} and {b}: K is {a.shape[-1]} in the first and {b.shape[-2]} in the second",
            remedy="make the last axis of the first operand and the last but one of the second agree; tl.trans swaps",
        )
    result = TileType(into, (*a.shape[:-1], b.shape[-1]))
    if len(types) == 3 and types[2] != result:
        raise KernelTypeError(
            f"the accumulator of dot must be {result}, got {types[2]}",
            remedy=f"start from tl.zeros({result.shape}, tl.{result.dtype.numpy.name})",
        )
    return result


def round_to_tf32(value: np.ndarray) -> np.ndarray:
    """Round to 10 bits of mantissa, to nearest, ties away from zero, as the tensor cores' conversion does."""
    bits = value.view(np.uint32)
    rounded = ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)
    return np.where(np.isfinite(value), rounded, value)


@op("dot", "a b acc?", _dot_rule)
def _dot(machine: Machine, attrs: Attrs, a: np.ndarray, b: np.ndarray, acc: Any = None) -> np.ndarray:
    dtype = DType.of(a)
    if dtype.is_integer:  # exact: |products| <= 2^16 and K <= 2^20
        result = np.matmul(a.astype(np.float64), b.astype(np.float64)).astype(np.int64).astype(np.int32)
    else:
        wide = dtype.compute.numpy
        a, b = a.astype(wide), b.astype(wide)
        if attrs["precision"] == "tf32" and dtype is F32:
            a, b = round_to_tf32(a), round_to_tf32(b)
        result = np.matmul(a, b)
    return np.asarray(result if acc is None else acc + result)


# -- for the user who debugs ------------------------------------------------------------------------------------------


@op("print", "values*", lambda types, attrs: None, Effect.OTHER)
def _print(machine: Machine, attrs: Attrs, *values: np.ndarray) -> None:
    machine.print(" ".join([attrs["prefix"], *(str(each) for each in values)]))


def _assert_rule(types: Sequence[Type], attrs: Attrs) -> None:
    if not isinstance(types[0], TileType) or types[0].element is not BOOL:
        raise KernelTypeError(f"device_assert takes a bool, got {types[0]}", remedy="compare, as in x >= 0")


@op("assert", "condition", _assert_rule, Effect.OTHER)
def _assert(machine: Machine, attrs: Attrs, condition: np.ndarray) -> None:
    if machine.debug and not np.all(condition):
        failed = "" if condition.shape == () else f" at index {tuple(map(int, np.argwhere(~condition)[0]))}"
        raise DeviceAssertionError(f"assertion failed{failed}: {attrs['message']}")
