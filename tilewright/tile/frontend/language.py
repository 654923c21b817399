"""The functions of the tile language, as users call them: `tl.load`, `tl.dot`, ...; each builds nodes of the IR."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tilewright.dtypes import DType
from tilewright.errors import KernelShapeError, KernelSyntaxError, KernelTypeError, StaticAssertionError
from tilewright.te.scalars import SCALARS, Scalar
from tilewright.tile.frontend.builder import Builder, describe, is_number, pointer_type, tile_type
from tilewright.tile.frontend.builtin import Builtin, builtin
from tilewright.tile.ir import BlockPointerType, TileType, Value
from tilewright.tile.op import BOOL, F32, I64, check_axis
from tilewright.tile.ops import dot_type


class constexpr:
    """Annotates a parameter that is known when the kernel is compiled: `BLOCK: tl.constexpr`."""


def static_range(*bounds: int) -> range:
    """Like `range`, in a for statement: the body is compiled once for each number, which is a constexpr there."""
    return range(*bounds)


# -- the grid ---------------------------------------------------------------------------------------------------------


@builtin
def program_id(b: Builder, axis: int) -> Value:
    """The index of this program instance along an axis of the grid: an i32."""
    return b.emit("program_id", axis=b.constexpr(axis, "axis", int))


@builtin
def num_programs(b: Builder, axis: int) -> Value:
    """The number of program instances along an axis of the grid: an i32."""
    return b.emit("num_programs", axis=b.constexpr(axis, "axis", int))


# -- making tiles -----------------------------------------------------------------------------------------------------


@builtin
def arange(b: Builder, start: int, end: int) -> Value:
    """The integers from `start` up to, not including, `end` as i32; their number must be a power of two."""
    b.shape((end,) if isinstance(end, Value) else (), "the end of arange")
    b.shape((start,) if isinstance(start, Value) else (), "the start of arange")
    first, last = b.constexpr(start, "start", int), b.constexpr(end, "end", int)
    return b.emit("arange", start=first, end=last)


@builtin
def full(b: Builder, shape: Any, value: Any, dtype: DType) -> Value:
    """A tile filled with one value, which may be a scalar of the kernel."""
    sizes, kind = b.shape(shape), b.constexpr(dtype, "dtype", DType)
    if is_number(value):
        return b.broadcast(b.constant(value, kind), sizes)
    return b.broadcast(b.cast(b.tile(value, "full"), kind), sizes)


@builtin
def zeros(b: Builder, shape: Any, dtype: DType) -> Any:
    """A tile of zeros."""
    return full.apply(b, (shape, 0, dtype), {})


@builtin
def zeros_like(b: Builder, x: Any) -> Any:
    """A tile of zeros with the shape and type of another."""
    kind = tile_type(b.tile(x, "zeros_like"))
    return full.apply(b, (kind.shape, 0, kind.dtype), {})


# -- types and shapes -------------------------------------------------------------------------------------------------


@builtin
def cast(b: Builder, x: Any, dtype: DType, bitcast: bool = False) -> Value:
    """Converts to another type; floats are truncated to integers. `bitcast`: reinterprets the bits; the types must have
    the same width."""
    kind = b.constexpr(dtype, "dtype", DType)
    if is_number(x) and not bitcast:
        return b.constant(x, kind)
    value = b.tile(x, "a cast")
    return b.emit("bitcast", value, dtype=kind) if bitcast else b.cast(value, kind)


@builtin
def broadcast_to(b: Builder, x: Any, shape: Any) -> Value:
    """Broadcasts to a shape: stretches axes of size 1, and adds leading axes."""
    return b.broadcast(b.value(x), b.shape(shape))


@builtin
def broadcast(b: Builder, x: Any, y: Any) -> tuple[Value, ...]:
    """The two values, broadcast against each other."""
    return tuple(b.alike(b.value(x), b.value(y)))


@builtin
def expand_dims(b: Builder, x: Any, axis: Any) -> Value:
    """Inserts one or several axes of size 1; x[:, None] does the same."""
    value = b.value(x)
    axes = axis if isinstance(axis, (tuple, list)) else (axis,)
    rank = len(tile_type(value).shape) + len(axes)
    new_axes = sorted(check_axis(b.constexpr(each, "axis", int), rank, "new axis") for each in axes)
    if len(set(new_axes)) < len(new_axes):
        raise KernelShapeError(
            f"new axes {axes}, of which two are the same", remedy="name each new axis once"
        )
    for each in new_axes:
        value = b.emit("expand_dims", value, axis=each)
    return value


@builtin
def reshape(b: Builder, x: Any, *shape: Any) -> Value:
    """The same elements in row-major order, in another shape: reshape(x, 4, 8) or reshape(x, (4, 8))."""
    sizes = shape[0] if len(shape) == 1 else shape
    value = b.value(x)
    tile_type(value)
    return b.emit("reshape", value, shape=b.shape(sizes))


@builtin
def ravel(b: Builder, x: Any) -> Value:
    """The tile flattened in row-major order."""
    value = b.value(x)
    count = 1
    for size in tile_type(value).shape:
        count *= size
    return b.emit("reshape", value, shape=(count,))


@builtin
def trans(b: Builder, x: Any, *dims: Any) -> Value:
    """Permutes the axes; without an order, swaps the last two."""
    value = b.value(x)
    rank = len(tile_type(value).shape)
    order = dims[0] if len(dims) == 1 and isinstance(dims[0], (tuple, list)) else dims
    if not order:
        if rank < 2:
            raise KernelShapeError(f"trans of {value.type}, which has fewer than two axes")
        order = (*range(rank - 2), rank - 1, rank - 2)
    return b.emit("trans", value, order=tuple(b.constexpr(axis, "axis", int) for axis in order))


@builtin
def permute(b: Builder, x: Any, *dims: Any) -> Any:
    """Permutes the axes; all of them are given."""
    return trans.apply(b, (x, *dims), {})


@builtin
def join(b: Builder, a: Any, c: Any) -> Value:
    """Stacks two tiles along a new last axis of size 2."""
    return b.emit("join", *b.numbers("join", a, c))


@builtin
def split(b: Builder, x: Any) -> tuple[Value, Value]:
    """The two slices along the last axis, which has size 2: the inverse of `join`."""
    value = b.value(x)
    tile_type(value)
    return b.emit("split", value, index=0), b.emit("split", value, index=1)


@builtin
def cat(b: Builder, a: Any, c: Any) -> Value:
    """Concatenates two tiles of the same shape along the first axis."""
    first, second = b.numbers("cat", a, c)
    shape = tile_type(first).shape
    if not shape:
        raise KernelShapeError("cat needs tiles, got scalars", remedy="use tl.join, which makes an axis")
    rank = len(shape)
    front = b.emit("trans", b.emit("join", first, second), order=(rank, *range(rank)))
    return b.emit("reshape", front, shape=(2 * shape[0], *shape[1:]))


@builtin
def flip(b: Builder, x: Any, axis: int = -1) -> Value:
    """The elements in reverse order along an axis."""
    value = b.value(x)
    return b.emit("flip", value, axis=check_axis(b.constexpr(axis, "axis", int), len(tile_type(value).shape)))


# -- elementwise ------------------------------------------------------------------------------------------------------


@builtin
def where(b: Builder, condition: Any, x: Any, y: Any) -> Any:
    """x where the condition is true, y elsewhere; both are evaluated everywhere. x and y may be pointers."""
    chosen = b.tile(condition, "where")
    if tile_type(chosen).dtype is not BOOL:
        raise KernelTypeError(
            f"where takes a bool condition, got {chosen.type}", remedy="compare, as in x != 0"
        )
    if any(isinstance(each, Value) and pointer_type(each.type) for each in (x, y)):
        then, other = b.value(x), b.value(y)
    else:
        then, other = b.numbers("where", x, y)
    return b.emit("select", *b.alike(chosen, then, other))


def _scalar_function(scalar: Scalar) -> Builtin:
    def apply(b: Builder, operands: tuple[Any, ...]) -> Value:
        values = b.numbers(f"tl.{scalar.name}", *operands)
        kind = tile_type(values[0]).dtype
        if _only_floats(scalar) and not kind.is_float:
            values = [b.cast(value, F32) for value in values]
        return b.emit(scalar.name, *values)

    def one(b: Builder, x: Any) -> Value:
        return apply(b, (x,))

    def two(b: Builder, x: Any, y: Any) -> Value:
        return apply(b, (x, y))

    def three(b: Builder, x: Any, y: Any, z: Any) -> Value:
        return apply(b, (x, y, z))

    made = (one, two, three)[scalar.arity - 1]
    made.__doc__ = f"`{scalar.name}` of `tilewright.te`, elementwise."
    return Builtin(made, scalar.name)


_ON_INTEGERS = frozenset(
    [
        "add",
        "sub",
        "mul",
        "min",
        "max",
        "neg",
        "abs",
        "floordiv",
        "mod",
        "shl",
        "shr",
        "and",
        "or",
        "xor",
        "not",
    ]
).union(["eq", "ne", "lt", "le", "dot4"])


def _only_floats(scalar: Scalar) -> bool:
    return scalar.name not in _ON_INTEGERS


# Those that operators of Python say are not functions too; min and max are reductions here, as in Triton.
_OPERATORS = frozenset(["and", "or", "not", "min", "max"])
SCALAR_FUNCTIONS = {
    name: _scalar_function(scalar) for name, scalar in SCALARS.items() if name not in _OPERATORS
}


@builtin
def maximum(b: Builder, x: Any, y: Any) -> Value:
    """The elementwise maximum; NaN if one operand is NaN."""
    return b.emit("max", *b.numbers("maximum", x, y))


@builtin
def minimum(b: Builder, x: Any, y: Any) -> Value:
    """The elementwise minimum; NaN if one operand is NaN."""
    return b.emit("min", *b.numbers("minimum", x, y))


@builtin
def sigmoid(b: Builder, x: Any) -> Value:
    """1 / (1 + exp(-x))."""
    (value,) = b.numbers("sigmoid", x)
    weight = SCALAR_FUNCTIONS["exp"].apply(b, (b.emit("neg", value),), {})
    return b.emit("div", *b.numbers("sigmoid", 1.0, b.emit("add", *b.numbers("sigmoid", weight, 1.0))))


def _cdiv(b: Builder, x: Any, y: Any) -> Any:
    """The quotient of two integers, rounded up. It can also be called outside of kernels."""
    if is_number(x) and is_number(y):
        return -(-x // y)
    less = b.emit("sub", *b.numbers("cdiv", y, 1))
    return b.emit("floordiv", *b.numbers("cdiv", b.emit("add", *b.numbers("cdiv", x, less)), y))


cdiv = Builtin(_cdiv, "cdiv", outside=lambda x, y: -(-x // y))


def _next_power_of_2(b: Builder, n: Any) -> int:
    """The smallest power of two that is at least n, a constexpr. It can also be called outside of kernels."""
    return _power_of_2(b.constexpr(n, "n", int))


def _power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


next_power_of_2 = Builtin(_next_power_of_2, "next_power_of_2", outside=_power_of_2)


# -- along an axis ----------------------------------------------------------------------------------------------------


def _reduce(b: Builder, kind: str, x: Any, axis: int | None, keep_dims: bool) -> Value:
    value = b.tile(x, kind)
    shape = tile_type(value).shape
    if not shape:
        raise KernelShapeError(
            f"{kind} needs a tile, got a scalar", remedy="a scalar is its own sum and maximum: leave it out"
        )
    if axis is None:
        value, at = ravel.apply(b, (value,), {}), 0
    else:
        at = check_axis(b.constexpr(axis, "axis", int), len(shape))
    result = b.emit("reduce", value, kind=kind, axis=at)
    if not b.constexpr(keep_dims, "keep_dims", bool):
        return result
    kept = (1,) * len(shape) if axis is None else (*shape[:at], 1, *shape[at + 1 :])
    return b.emit("reshape", result, shape=kept)


@builtin
def sum_(b: Builder, x: Any, axis: int | None = None, keep_dims: bool = False) -> Value:
    """The sum along an axis, or of all elements. 16-bit floats are added in f32; integers under 32 bits give i32."""
    return _reduce(b, "sum", x, axis, keep_dims)


@builtin
def max_(b: Builder, x: Any, axis: int | None = None, keep_dims: bool = False) -> Value:
    """The maximum along an axis, or of all elements; NaN if one is NaN."""
    return _reduce(b, "max", x, axis, keep_dims)


@builtin
def min_(b: Builder, x: Any, axis: int | None = None, keep_dims: bool = False) -> Value:
    """The minimum along an axis, or of all elements; NaN if one is NaN."""
    return _reduce(b, "min", x, axis, keep_dims)


@builtin
def argmax(b: Builder, x: Any, axis: int | None = None, keep_dims: bool = False) -> Value:
    """The index of the maximum as i32, the first of several; a NaN counts as the maximum."""
    return _reduce(b, "argmax", x, axis, keep_dims)


@builtin
def argmin(b: Builder, x: Any, axis: int | None = None, keep_dims: bool = False) -> Value:
    """The index of the minimum as i32, the first of several; a NaN counts as the minimum."""
    return _reduce(b, "argmin", x, axis, keep_dims)


@builtin
def cumsum(b: Builder, x: Any, axis: int = 0) -> Value:
    """The inclusive cumulative sum along an axis; types are those of `sum`."""
    return b.emit("cumsum", b.tile(x, "cumsum"), axis=b.constexpr(axis, "axis", int))


@builtin
def sort(b: Builder, x: Any, axis: int = -1, descending: bool = False) -> Value:
    """Sorts along an axis; NaN is greater than all numbers."""
    down = b.constexpr(descending, "descending", bool)
    return b.emit("sort", b.tile(x, "sort"), axis=b.constexpr(axis, "axis", int), descending=down)


@builtin
def dot(
    b: Builder, x: Any, y: Any, acc: Any = None, input_precision: str = "ieee", out_dtype: DType | None = None
) -> Value:
    """Matmul of tiles, [M, K] by [K, N] or both with a batch axis in front, plus `acc`. Products of f16, bf16 and f32
    are added in f32, of f64 in f64, of i8 and u8 in i32. input_precision="tf32" rounds f32 operands to tf32 first."""
    left, right = b.tile(x, "dot"), b.tile(y, "dot")
    precision = b.constexpr(input_precision, "input_precision", str)
    operands = [left, right] if acc is None else [left, right, b.tile(acc, "dot")]
    result = b.emit("dot", *operands, precision=precision)
    if out_dtype is None:
        return result
    wanted = b.constexpr(out_dtype, "out_dtype", DType)
    if wanted not in (dot_type(tile_type(left).dtype), tile_type(left).dtype):
        raise KernelTypeError(f"out_dtype {wanted.short} of a dot of {left.type}")
    return b.cast(result, wanted)


# -- memory -----------------------------------------------------------------------------------------------------------


def _mask(b: Builder, pointer: Value, mask: Any) -> tuple[Value, Value]:
    """Pointers and mask, broadcast. The mask may have the larger shape only if the pointer is a tile."""
    value = b.tile(mask, "mask")
    if tile_type(value).dtype is not BOOL:
        raise KernelTypeError(f"a mask must be bool, got {value.type}", remedy="compare, as in offsets < n")
    if tile_type(value).shape and not tile_type(pointer).shape:
        raise KernelShapeError(
            f"a mask {value.type} for a scalar pointer",
            remedy="add the offsets to the pointer, as in ptr + offsets",
        )
    wanted, given = b.alike(pointer, value)
    return wanted, given


def _no_mask(mask: Any, other: Any) -> None:
    if mask is not None or other is not None:
        raise KernelTypeError(
            "a block pointer takes no mask and no other",
            remedy="use boundary_check=(0, 1) and padding_option",
        )


def _axes(b: Builder, axes: Any) -> tuple[int, ...]:
    return tuple(
        b.constexpr(a, "boundary_check", int) for a in (axes if isinstance(axes, (tuple, list)) else (axes,))
    )


def pointers_of(b: Builder, pointer: Any, what: str, check: Any) -> Value:
    if not isinstance(pointer, Value) or not pointer_type(pointer.type):
        raise KernelTypeError(
            f"{what} takes a pointer, got {describe(pointer)}", remedy="pass a tensor parameter plus offsets"
        )
    if check not in ((), []):
        raise KernelTypeError(
            "boundary_check is for block pointers",
            remedy="give a mask, or make a block pointer with tl.make_block_ptr",
        )
    return pointer


@builtin
def load(
    b: Builder,
    pointer: Any,
    mask: Any = None,
    other: Any = None,
    boundary_check: Any = (),
    padding_option: str = "zero",
) -> Value:
    """Loads from memory. Where `mask` is false, nothing is read, and the element is `other`, or undefined without it. A
    block pointer loads its block; elements out of bounds along the axes in `boundary_check` are 0, or NaN with
    padding_option="nan"."""
    if isinstance(pointer, Value) and isinstance(pointer.type, BlockPointerType):
        _no_mask(mask, other)
        padding = b.constexpr(padding_option, "padding_option", str)
        check = _axes(b, boundary_check)
        return b.emit("load_block", pointer, check=check, padding=padding, type=pointer.type)
    pointers = pointers_of(b, pointer, "load", boundary_check)
    if mask is None:
        if other is not None:
            raise KernelTypeError("other without a mask", remedy="give the mask, or leave other out")
        return b.emit("load", pointers, dtype=tile_type(pointers).dtype)
    pointers, given = _mask(b, pointers, mask)
    kind = tile_type(pointers)
    operands = [pointers, given]
    if other is not None:
        operands.append(b.broadcast(converted(b, other, kind.dtype), kind.shape))
    return b.emit("load", *operands, dtype=kind.dtype)


def converted(b: Builder, given: Any, dtype: DType) -> Any:
    """A value to be stored, converted to the type in memory."""
    return cast.apply(b, (given, dtype), {})


@builtin
def store(b: Builder, pointer: Any, value: Any, mask: Any = None, boundary_check: Any = ()) -> None:
    """Stores the value, converted to the type in memory and broadcast to the pointers, where `mask` is true. With a
    block pointer: where the block is in bounds along the axes in `boundary_check`."""
    if isinstance(pointer, Value) and isinstance(pointer.type, BlockPointerType):
        _no_mask(mask, None)
        block = pointer.type
        given = b.broadcast(converted(b, value, block.dtype), block.block)
        b.effect("store_block", pointer, given, check=_axes(b, boundary_check), type=block)
        return
    b.effect("store", *written(b, pointers_of(b, pointer, "store", boundary_check), value, mask))


def written(b: Builder, pointers: Value, value: Any, mask: Any) -> list[Value]:
    given = converted(b, value, tile_type(pointers).dtype)
    if tile_type(given).shape and not tile_type(pointers).shape:
        raise KernelShapeError(
            f"a tile {given.type} stored through one pointer",
            remedy="add offsets to the pointer, or reduce the tile",
        )
    pointers, given = b.alike(pointers, given)
    if mask is None:
        return [pointers, given]
    pointers, masked = _mask(b, pointers, mask)
    return [pointers, b.broadcast(given, tile_type(pointers).shape), masked]


@builtin
def atomic_add(b: Builder, pointer: Any, value: Any, mask: Any = None) -> Value:
    """Adds to memory, atomically for each element, and returns the old values, which are undefined where `mask` is
    false. Elements may have the same address: all of them are added."""
    return b.emit("atomic_add", *written(b, pointers_of(b, pointer, "atomic_add", ()), value, mask))


def _scalars(b: Builder, given: Any, what: str) -> list[Value]:
    if not isinstance(given, (tuple, list)):
        raise KernelTypeError(f"{what} must be a tuple, got {describe(given)}", remedy=f"write {what}=(a, b)")
    found = []
    for each in given:
        value = b.tile(each, what)
        if tile_type(value).shape or tile_type(value).dtype.is_float:
            raise KernelTypeError(f"{what} must be of integer scalars, got {value.type}")
        found.append(b.cast(value, I64))
    return found


@builtin
def make_block_ptr(
    b: Builder, base: Any, shape: Any, strides: Any, offsets: Any, block_shape: Any, order: Any
) -> Value:
    """A pointer to a block of a strided tensor. `base` points to the tensor's first element; `shape`, `strides` and
    `offsets` (of the block's first element) are in elements; `order` lists the axes, starting with the smallest
    stride."""
    numbers = [
        *_scalars(b, shape, "shape"), *_scalars(b, strides, "strides"), *_scalars(b, offsets, "offsets")
    ]  # fmt: skip
    if not isinstance(base, Value):
        raise KernelTypeError(f"make_block_ptr takes a pointer, got {describe(base)}")
    axes = tuple(b.constexpr(axis, "order", int) for axis in order)
    return b.emit("make_block_ptr", base, *numbers, block=b.shape(block_shape, "block_shape"), order=axes)


@builtin
def advance(b: Builder, pointer: Any, offsets: Any) -> Value:
    """The block pointer, moved by the given number of elements along each axis."""
    if not isinstance(pointer, Value):
        raise KernelTypeError(f"advance takes a block pointer, got {describe(pointer)}")
    return b.emit("advance", pointer, *_scalars(b, offsets, "offsets"))


# -- assertions and prints --------------------------------------------------------------------------------------------


@builtin
def static_assert(b: Builder, condition: Any, message: str = "") -> None:
    """Fails the compilation if the condition, a constexpr, is false."""
    if isinstance(condition, Value):
        raise KernelTypeError(
            f"static_assert takes a constexpr, got {condition.type}", remedy="use tl.device_assert for values"
        )
    if not condition:
        raise StaticAssertionError(f"static assertion failed{': ' if message else ''}{message}")


@builtin
def static_print(b: Builder, *values: Any) -> None:
    """Prints constexprs, and the types of values, at compile time."""
    print(*(each if isinstance(each, str) else describe(each) for each in values))


@builtin
def device_print(b: Builder, prefix: str, *values: Any) -> None:
    """Prints values when the kernel runs, with the index of the program instance."""
    operands = _tiles(b, values)
    b.effect("print", *operands, prefix=b.constexpr(prefix, "prefix", str))


def _tiles(b: Builder, values: Iterable[Any]) -> list[Value]:
    return [b.tile(each, "device_print") for each in values]


@builtin
def device_assert(b: Builder, condition: Any, message: str = "") -> None:
    """Fails the launch, in debug mode, if the condition is false for an element."""
    b.effect("assert", b.tile(condition, "device_assert"), message=b.constexpr(message, "message", str))


# -- methods and attributes of values ---------------------------------------------------------------------------------

METHODS: dict[str, Builtin] = {
    "to": cast, "sum": sum_, "max": max_, "min": min_, "argmax": argmax, "argmin": argmin, "cumsum": cumsum,
    "sort": sort, "reshape": reshape, "trans": trans, "permute": permute, "expand_dims": expand_dims,
    "broadcast_to": broadcast_to, "ravel": ravel,
}  # fmt: skip


def attribute(b: Builder, value: Value, name: str) -> Any:
    """The attribute `shape`, `dtype` or `T` of a value; None for other names."""
    if isinstance(value.type, TileType) and name == "T":
        return trans.apply(b, (value,), {})
    if name == "shape":
        return value.type.shape if isinstance(value.type, TileType) else value.type.block
    if name == "dtype":
        return value.type.element if isinstance(value.type, TileType) else value.type.dtype
    if name == "type":
        raise KernelSyntaxError("a value has no attribute `type`", remedy="use .dtype and .shape")
    return None
