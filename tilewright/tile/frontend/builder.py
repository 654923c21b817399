"""Builds nodes of the tile IR: infers types by the table, and inserts the casts and broadcasts that users leave out.

Inside the front end a value is a `Value` of the IR, or any Python object: a constexpr, known while compiling.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from tilewright.dtypes import DType
from tilewright.errors import DynamicShapeError, KernelError, KernelTypeError
from tilewright.support.source import SourceLocation
from tilewright.tile.frontend.source import constexpr_key
from tilewright.tile.ir import BlockPointerType, Node, Op, Pointer, TileType, Type, Value
from tilewright.tile.op import BOOL, F32, I32, I64, check_shape
from tilewright.tile.ops import OPS, broadcast_shapes


def promote(a: DType, b: DType) -> DType:
    """The type of an operation on both: the narrowest that holds all values of each; of a float and an integer, the
    float. Raises KernelTypeError for u64 and a signed integer: no type holds both."""
    if a is b:
        return a
    if a.is_float or b.is_float:
        if not (a.is_float and b.is_float):
            return a if a.is_float else b
        return F32 if a.bytes == b.bytes else max(a, b, key=lambda each: each.bytes)
    if BOOL in (a, b):
        return b if a is BOOL else a
    if a.is_unsigned is b.is_unsigned:
        return max(a, b, key=lambda each: each.bytes)
    unsigned, signed = (a, b) if a.is_unsigned else (b, a)
    if unsigned.bytes < signed.bytes:
        return signed
    if unsigned is DType.U64:
        raise KernelTypeError(
            f"no integer type holds all numbers of {a.short} and {b.short}",
            remedy="convert one of them with .to(...), as to tl.int64 or tl.uint64",
        )
    return {DType.U8: DType.I16, DType.U16: I32, DType.U32: I64}[unsigned]


def literal_type(value: bool | int | float | np.generic) -> DType:
    """The type of a number of Python; NumPy's are taken as Python's."""
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, bool):
        return BOOL
    if isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise KernelTypeError(f"{value} does not fit into 64 bits", remedy="use a smaller number")
        return I32 if -(2**31) <= value < 2**31 else I64
    return F32


def is_number(value: object) -> bool:
    return isinstance(value, (bool, int, float, np.number, np.bool_))


def held(number: Any, dtype: DType) -> bool | int | float:
    """A number as a type holds it. A float type holds a number that is too large for it as infinite. Raises
    KernelTypeError where an integer type does not hold it."""
    number = number.item() if isinstance(number, np.generic) else number
    if dtype.is_float:
        exact = float(number)
        with np.errstate(over="ignore"):
            rounded = float(np.asarray(exact, dtype.numpy))
        return rounded if math.isinf(rounded) else exact
    if dtype is BOOL:
        return bool(number)
    if isinstance(number, float) and not math.isfinite(number):
        raise KernelTypeError(
            f"{dtype.short} does not hold {number}", remedy="use a type of floats, or a number that is finite"
        )
    info = np.iinfo(dtype.numpy)
    whole = int(number)
    if not info.min <= whole <= info.max:
        raise KernelTypeError(
            f"{whole} does not fit into {dtype.short}, which holds {info.min} to {info.max}",
            remedy="use a number in this range, or a wider type: of the other operand with .to(...), or of the tensor",
        )
    return whole


def are_same(a: Any, b: Any) -> bool:
    """Whether two objects of the front end are one value, or constexprs that are the same."""
    if a is b or isinstance(a, Value) or isinstance(b, Value):
        return a is b
    return bool(constexpr_key(a) == constexpr_key(b))


def describe(value: object) -> str:
    """A value as text for an error message."""
    if isinstance(value, Value):
        return str(value.type)
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(describe, value))})"
    return (
        f"{value!r}"
        if is_number(value) or isinstance(value, (str, DType)) or value is None
        else (f"{type(value).__name__} {getattr(value, '__name__', '')}".strip())
    )


class Builder:
    def __init__(self) -> None:
        self.where: SourceLocation | None = None
        self.nodes: list[Node] = []
        self.names: dict[Value, str] = {}  # the user's, for the printer

    @contextmanager
    def inside(self) -> Iterator[list[Node]]:
        """Nodes that are built in this context are appended to the list that it yields."""
        outer, self.nodes = self.nodes, []
        try:
            yield self.nodes
        finally:
            self.nodes = outer

    # -- operations --------------------------------------------------------------------------------------------------

    def emit(self, name: str, *operands: Value, **attrs: Any) -> Value:
        """Append an operation with one result, and return the result."""
        result = self.add(name, operands, attrs)
        assert result is not None, f"{name} has no result"
        return result

    def effect(self, name: str, *operands: Value, **attrs: Any) -> None:
        self.add(name, operands, attrs)

    def add(self, name: str, operands: Sequence[Value], attrs: dict[str, Any]) -> Value | None:
        try:
            type = OPS[name].rule([operand.type for operand in operands], attrs)
        except KernelError as error:
            raise error.at(self.where) from None
        result = None if type is None else Value(type)
        results = () if result is None else (result,)
        self.nodes.append(Op(name, tuple(operands), results, tuple(attrs.items()), self.where))
        return result

    # -- conversions -------------------------------------------------------------------------------------------------

    def constant(self, number: Any, dtype: DType | None = None) -> Value:
        dtype = literal_type(number) if dtype is None else dtype
        return self.emit("constant", value=held(number, dtype), dtype=dtype)

    def value(self, given: Any, dtype: DType | None = None) -> Value:
        """A constexpr number as an IR value; an IR value unchanged."""
        if isinstance(given, Value):
            return given
        if is_number(given):
            return self.constant(given, dtype)
        raise KernelTypeError(f"expected a tile or a number, got {describe(given)}")

    def tile(self, given: Any, what: str) -> Value:
        """Require a tile or scalar of numbers."""
        value = self.value(given)
        if not isinstance(value.type, TileType) or value.type.is_pointer:
            raise KernelTypeError(
                f"{what} takes numbers, got {value.type}",
                remedy="load through the pointer with tl.load first",
            )
        return value

    def cast(self, value: Value, dtype: DType) -> Value:
        if isinstance(value.type, TileType) and value.type.element is dtype:
            return value
        return self.emit("cast", value, dtype=dtype)

    def broadcast(self, value: Value, shape: tuple[int, ...]) -> Value:
        if isinstance(value.type, TileType) and value.type.shape == shape:
            return value
        return self.emit("broadcast", value, shape=shape)

    def alike(self, *values: Value) -> list[Value]:
        """Broadcast the values against each other."""
        shape: tuple[int, ...] = ()
        for value in values:
            shape = broadcast_shapes(shape, tile_type(value).shape)
        return [self.broadcast(value, shape) for value in values]

    def numbers(self, what: str, *given: Any) -> list[Value]:
        """The operands of an elementwise operation, converted to one type and one shape. A Python number takes the type
        of the tiles that it is combined with; a float with integers makes them f32."""
        tiles = [tile_type(self.tile(each, what)).dtype for each in given if isinstance(each, Value)]
        dtype = tiles[0] if tiles else literal_type(given[0])
        for other in tiles[1:]:
            dtype = promote(dtype, other)
        for each in given:
            if isinstance(each, Value):
                continue
            if not is_number(each):
                raise KernelTypeError(f"{what} takes tiles and numbers, got {describe(each)}")
            kind = literal_type(each)
            if kind.is_float and not dtype.is_float:
                dtype = F32
            elif dtype is BOOL or not tiles:
                dtype = promote(dtype, kind)
        values = [
            self.cast(each, dtype) if isinstance(each, Value) else self.constant(each, dtype)
            for each in given
        ]
        return self.alike(*values)

    # -- what users must give as constexpr ---------------------------------------------------------------------------

    def shape(self, given: Any, what: str = "shape") -> tuple[int, ...]:
        """A tile's shape."""
        sizes = given if isinstance(given, (tuple, list)) else (given,)
        for size in sizes:
            if isinstance(size, Value):
                name = f" `{size.name}`" if size.name else ""
                raise DynamicShapeError(
                    f"{what} must be known when the kernel is compiled, and{name} is a value of type {size.type}"
                )
            if not isinstance(size, (int, np.integer)) or isinstance(size, bool):
                raise KernelTypeError(
                    f"{what} must be of integers, got {describe(size)}",
                    remedy="pass ints, or constexpr parameters",
                )
        return check_shape(tuple(int(size) for size in sizes))

    def constexpr(self, given: Any, what: str, kind: type | tuple[type, ...]) -> Any:
        """An argument that must be known at compile time, of the given Python type."""
        given = given.item() if isinstance(given, np.generic) else given
        if (
            isinstance(given, Value)
            or not isinstance(given, kind)
            or (kind is int and isinstance(given, bool))
        ):
            names = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
            raise KernelTypeError(
                f"{what} must be a constexpr {names}, got {describe(given)}",
                remedy="pass a literal, or a parameter annotated tl.constexpr",
            )
        return given

    def condition(self, given: Any, what: str) -> Value:
        """A scalar bool; a number is compared with 0."""
        value = self.tile(given, what)
        if tile_type(value).shape:
            raise KernelTypeError(
                f"{what} takes a scalar, got a tile {value.type}",
                remedy="choose between tiles with tl.where, combine masks with & and |, or reduce with tl.max first",
            )
        return self.cast(value, BOOL)


def tile_type(value: Value) -> TileType:
    if isinstance(value.type, BlockPointerType):
        raise KernelTypeError(
            f"a block pointer {value.type} where a tile is expected",
            remedy="load through it with tl.load, and move it with tl.advance",
        )
    return value.type


def pointer_type(type: Type) -> bool:
    return isinstance(type, TileType) and isinstance(type.element, Pointer)
