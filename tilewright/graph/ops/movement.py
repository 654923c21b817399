"""Operators that move elements and compute nothing.

- `reshape(shape)`: the same elements in row-major order.
- `permute(axes)`: axis d of the result is axis `axes[d]` of the operand.
- `broadcast_to(shape)`: NumPy's rule.
- `slice(starts, stops, steps)`: one entry per axis, 0 <= start <= stop <= extent, step >= 1.
- `flip(axes)`
- `pad(low, high, interior, value)`: one entry per axis, none negative; `interior` is the number of `value`s between
  two neighbouring elements, as in XLA.
- `concat(axis)` of one or more operands.
- `take(axis)` of (x, indices): x.shape[:axis] + indices.shape + x.shape[axis + 1:].
- `take_along(axis)` of (x, indices of the same rank): `torch.gather`; the result has the shape of the indices.

Indices of `take` and `take_along` are i32 or i64; negative ones count from the end. An index that is still out of
range is clamped, so that generated code never reads outside the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from tilewright import te
from tilewright.dtypes import DType
from tilewright.graph.ir import Attrs, TensorType
from tilewright.graph.op import Application, Fusion, Op, register
from tilewright.graph.ops.common import (
    broadcast_indices,
    broadcast_shapes,
    divided,
    expect,
    expect_axis,
    expect_fits,
    expect_ints,
    expect_operands,
    expect_same_dtype,
    expect_shape,
    is_int,
    label,
    scaled,
    shifted,
)

Index = tuple[te.Expr, ...]


def lower_by_index(
    name: str, index_of: Callable[[Application, tuple[te.Var, ...]], Index]
) -> Callable[[Application, Sequence[te.Tensor]], te.Tensor]:
    """A lowering that reads its one operand at `index_of(app, axes)`."""

    def lower(app: Application, inputs: Sequence[te.Tensor]) -> te.Tensor:
        (x,) = inputs
        return te.compute(
            label(app, name), app.type.shape, app.type.dtype, lambda *axes: x[index_of(app, axes)]
        )

    return lower


# -- reshape ------------------------------------------------------------------------------------------------------


def infer_reshape(inputs: Sequence[TensorType], attrs: Attrs) -> TensorType:
    expect_operands(inputs, 1)
    result = TensorType(expect_shape(attrs["shape"]), inputs[0].dtype)
    expect(
        result.size == inputs[0].size,
        f"the new shape {list(result.shape)} has {result.size} elements, the operand has {inputs[0].size}",
    )
    return result


def reshape_segments(
    from_shape: Sequence[int], to_shape: Sequence[int]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The shortest runs of axes, extents of 1 left out, that hold the same number of elements on both sides.

    [2, 3, 1, 20] -> [6, 4, 5] is (0, 1) -> (0,) and (3,) -> (1, 2): each run is reshaped by itself.
    """
    sources = [axis for axis, extent in enumerate(from_shape) if extent != 1]
    targets = [axis for axis, extent in enumerate(to_shape) if extent != 1]
    runs = []
    while sources:
        left, right = [sources.pop(0)], [targets.pop(0)]
        left_size, right_size = from_shape[left[0]], to_shape[right[0]]
        while left_size != right_size:
            if left_size < right_size:
                left.append(sources.pop(0))
                left_size *= from_shape[left[-1]]
            else:
                right.append(targets.pop(0))
                right_size *= to_shape[right[-1]]
        runs.append((tuple(left), tuple(right)))
    return runs


def reshape_indices(axes: Sequence[te.Expr], from_shape: Sequence[int], to_shape: Sequence[int]) -> Index:
    """The index in the operand of the element at `axes` of the reshaped tensor."""
    result = [te.as_index(0)] * len(from_shape)
    if 0 in from_shape:
        return tuple(result)  # the tensor is empty
    for sources, targets in reshape_segments(from_shape, to_shape):
        flat: te.Expr | None = None
        for axis in targets:
            flat = axes[axis] if flat is None else flat * to_shape[axis] + axes[axis]
        assert flat is not None
        stride = math.prod(from_shape[axis] for axis in sources)
        for axis in sources:
            stride //= from_shape[axis]
            index = divided(flat, stride)
            result[axis] = index if axis == sources[0] else index % from_shape[axis]
    return tuple(result)


register(
    Op(
        "reshape",
        infer=infer_reshape,
        oracle=lambda attrs, x: x.reshape(attrs["shape"]),
        fusion=Fusion.INJECTIVE,
        lower=lower_by_index(
            "reshape", lambda app, axes: reshape_indices(axes, app.inputs[0].shape, app.type.shape)
        ),
        attrs=("shape",),
    )
)


# -- permute, broadcast_to, slice, flip ---------------------------------------------------------------------------


def infer_permute(inputs: Sequence[TensorType], attrs: Attrs) -> TensorType:
    expect_operands(inputs, 1)
    (x,) = inputs
    axes = attrs["axes"]
    legal = isinstance(axes, tuple) and sorted(axes) == list(range(x.rank))
    expect(legal, f"axes must be a permutation of the {x.rank} axes, got {axes!r}")
    return TensorType(tuple(x.shape[axis] for axis in axes), x.dtype)


def permute_indices(app: Application, axes: tuple[te.Var, ...]) -> Index:
    order = app.attrs["axes"]
    return tuple(axes[order.index(axis)] for axis in range(len(order)))


def infer_broadcast_to(inputs: Sequence[TensorType], attrs: Attrs) -> TensorType:
    expect_operands(inputs, 1)
    (x,) = inputs
    shape = expect_shape(attrs["shape"])
    expect(
        len(shape) >= x.rank and broadcast_shapes(x.shape, shape) == shape,
        f"shape {list(x.shape)} does not broadcast to {list(shape)}",
    )
    return TensorType(shape, x.dtype)


def infer_slice(inputs: Sequence[TensorType], attrs: Attrs) -> TensorType:
    expect_operands(inputs, 1)
    (x,) = inputs
    starts = expect_ints("starts", attrs["starts"], x.rank, 0)
    stops = expect_ints("stops", attrs["stops"], x.rank, 0)
    steps = expect_ints("steps", attrs["steps"], x.rank, 1)
    expect(
        all(start <= stop <= extent for start, stop, extent in zip(starts, stops, x.shape, strict=True)),
        f"start <= stop <= extent must hold on every axis, got starts {starts}, stops {stops}",
    )
    return TensorType(
        tuple(-(-(stop - start) // step) for start, stop, step in zip(starts, stops, steps, strict=True)),
        x.dtype,
    )


def slice_indices(app: Application, axes: tuple[te.Var, ...]) -> Index:
    starts, steps = app.attrs["starts"], app.attrs["steps"]
    return tuple(
        shifted(scaled(axis, step), start) for axis, start, step in zip(axes, starts, steps, strict=True)
    )


def slices(attrs: Attrs) -> tuple[slice, ...]:
    return tuple(
        slice(*bounds) for bounds in zip(attrs["starts"], attrs["stops"], attrs["steps"], strict=True)
    )


def infer_flip(inputs: Sequence[TensorType], attrs: Attrs) -> TensorType:
    expect_operands(inputs, 1)
    (x,) = inputs
    axes = attrs["axes"]
    legal = isinstance(axes, tuple) and all(is_int(axis) and 0 <= axis < x.rank for axis in axes)
    expect(
        legal and len(set(axes)) == len(axes), f"axes must be different axes in [0, {x.rank}), got {axes!r}"
    )
    return x


def flip_indices(app: Application, axes: tuple[te.Var, ...]) -> Index:
    flipped = app.attrs["axes"]
    return tuple(axis.extent - 1 - axis if d in flipped else axis for d, axis in enumerate(axes))


register(
    Op(
        "permute",
        infer=infer_permute,
        oracle=lambda attrs, x: x.transpose(attrs["axes"]),
        fusion=Fusion.INJECTIVE,
        lower=lower_by_index("permute", permute_indices),
        attrs=("axes",),
    )
)
register(
    Op(
        "broadcast_to",
        infer=infer_broadcast_to,
        oracle=lambda attrs, x: np.broadcast_to(x, attrs["shape"]),
        fusion=Fusion.INJECTIVE,
        lower=lower_by_index(
            "broadcast_to", lambda app, axes: broadcast_indices(axes, app.inputs[0].shape, app.type.shape)
        ),
        attrs=("shape",),
    )
)
register(
    Op(
        "slice",
        infer=infer_slice,
        oracle=lambda attrs, x: x[slices(attrs)],
        fusion=Fusion.INJECTIVE,
        lower=lower_by_index("slice", slice_indices),
        attrs=("starts", "stops", "steps"),
    )
)
register(
    Op(
        "flip",
        infer=infer_flip,
        oracle=lambda attrs, x: np.flip(x, attrs["axes"]),
        fusion=Fusion.INJECTIVE,
        lower=lower_by_index("flip", flip_indices),
        attrs=("axes",),
    )
)


# -- pad ----------------------------------------------------------------------------------------------------------


def infer_pad(inputs: Sequence[TensorType], attrs: Attrs) -> TensorType:
    expect_operands(inputs, 1)
    (x,) = inputs
    low, high, interior = (expect_ints(name, attrs[name], x.rank, 0) for name in ("low", "high", "interior"))
    expect_fits("value", attrs["value"], x.dtype)
    shape = tuple(
        lo + spread(n, gap) + hi for lo, n, gap, hi in zip(low, x.shape, interior, high, strict=True)
    )
    return TensorType(shape, x.dtype)


def spread(extent: int, gap: int) -> int:
    """The length of `extent` elements with `gap` others between any two."""
    return extent + gap * (extent - 1) if extent else 0


def pad(attrs: Attrs, x: np.ndarray) -> np.ndarray:
    low, high, interior = attrs["low"], attrs["high"], attrs["interior"]
    rooms = [spread(n, gap) for n, gap in zip(x.shape, interior, strict=True)]
    result = np.full(
        [lo + room + hi for lo, room, hi in zip(low, rooms, high, strict=True)], attrs["value"], x.dtype
    )
    result[
        tuple(slice(lo, lo + room, gap + 1) for lo, room, gap in zip(low, rooms, interior, strict=True))
    ] = x
    return result


def lower_pad(app: Application, inputs: Sequence[te.Tensor]) -> te.Tensor:
    (x,) = inputs
    low, high, interior = app.attrs["low"], app.attrs["high"], app.attrs["interior"]
    dtype = app.type.dtype
    value = te.const(app.attrs["value"], dtype.compute)

    def element(*axes: te.Var) -> te.Expr:
        if 0 in x.shape:
            return value
        hits: list[te.Expr] = []
        indices: list[te.Expr] = []
        for axis, extent, lo, hi, gap in zip(axes, x.shape, low, high, interior, strict=True):
            if extent == 1:  # there is only one element
                hits += [te.call("eq", axis, lo)] if lo or hi else []
                indices.append(te.as_index(0))
                continue
            position = shifted(axis, -lo)
            if lo:
                hits.append(te.call("le", 0, position))
            if hi:
                hits.append(te.call("lt", position, spread(extent, gap)))
            if gap:
                hits.append(te.call("eq", position % (gap + 1), 0))
            indices.append(divided(position, gap + 1))
        inside = te.all_of(hits)
        return x[indices] if inside is None else te.select(inside, x[indices], value)

    return te.compute(label(app, "pad"), app.type.shape, dtype, element)


register(
    Op(
        "pad",
        infer=infer_pad,
        oracle=pad,
        fusion=Fusion.INJECTIVE,
        lower=lower_pad,
        attrs=("low", "high", "interior", "value"),
    )
)


# -- concat -------------------------------------------------------------------------------------------------------


def infer_concat(inputs: Sequence[TensorType], attrs: Attrs) -> TensorType:
    expect(len(inputs) >= 1, "takes at least 1 operand, got none")
    dtype = expect_same_dtype(inputs)
    first = inputs[0]
    axis = expect_axis(attrs["axis"], first.rank)
    rest = [type.shape[:axis] + type.shape[axis + 1 :] for type in inputs]
    expect(
        all(type.rank == first.rank for type in inputs) and len(set(rest)) == 1,
        f"operands must have equal extents on every axis but {axis}",
    )
    total = sum(type.shape[axis] for type in inputs)
    return TensorType((*first.shape[:axis], total, *first.shape[axis + 1 :]), dtype)


def lower_concat(app: Application, inputs: Sequence[te.Tensor]) -> te.Tensor:
    axis = app.attrs["axis"]
    parts: list[tuple[int, te.Tensor]] = []  # the start of each operand; empty ones are omitted
    offset = 0
    for tensor in inputs:
        if tensor.shape[axis]:
            parts.append((offset, tensor))
        offset += tensor.shape[axis]

    def element(*axes: te.Var) -> te.Expr:
        def part(number: int) -> te.Expr:
            begin, tensor = parts[number]
            value = tensor[(*axes[:axis], shifted(axes[axis], -begin), *axes[axis + 1 :])]
            if number + 1 == len(parts):
                return value
            return te.select(te.call("lt", axes[axis], parts[number + 1][0]), value, part(number + 1))

        return part(0) if parts else te.const(0, app.type.dtype.compute)

    return te.compute(label(app, "concat"), app.type.shape, app.type.dtype, element)


register(
    Op(
        "concat",
        infer=infer_concat,
        oracle=lambda attrs, *arrays: np.concatenate(arrays, attrs["axis"]),
        fusion=Fusion.INJECTIVE,
        lower=lower_concat,
        attrs=("axis",),
    )
)


# -- take, take_along ---------------------------------------------------------------------------------------------


def infer_take(inputs: Sequence[TensorType], attrs: Attrs) -> TensorType:
    expect_operands(inputs, 2)
    x, indices = inputs
    axis = expect_axis(attrs["axis"], x.rank)
    expect_indices(indices, x.shape[axis])
    return TensorType(x.shape[:axis] + indices.shape + x.shape[axis + 1 :], x.dtype)


def expect_indices(indices: TensorType, extent: int) -> None:
    expect(indices.dtype in (DType.I64, DType.I32), f"indices must be i64 or i32, got {indices.dtype.short}")
    expect(extent > 0 or indices.size == 0, "cannot take elements from an axis that has none")


def infer_take_along(inputs: Sequence[TensorType], attrs: Attrs) -> TensorType:
    expect_operands(inputs, 2)
    x, indices = inputs
    axis = expect_axis(attrs["axis"], x.rank)
    expect_indices(indices, x.shape[axis])
    fitting = indices.rank == x.rank and all(
        here <= there for d, (here, there) in enumerate(zip(indices.shape, x.shape, strict=True)) if d != axis
    )
    expect(
        fitting,
        f"indices must have x's rank and at most its extents on every axis but {axis}, got {list(indices.shape)}",
    )
    return TensorType(indices.shape, x.dtype)


def wrap(indices: np.ndarray, extent: int) -> np.ndarray:
    wide = indices.astype(np.int64)
    return np.clip(np.where(wide < 0, wide + extent, wide), 0, max(extent - 1, 0))


def wrapped(index: te.Expr, extent: int) -> te.Expr:
    wide = te.cast(index, DType.I64)
    counted = te.select(te.call("lt", wide, 0), wide + extent, wide)
    return te.call("min", te.call("max", counted, 0), extent - 1)


def lower_take(app: Application, inputs: Sequence[te.Tensor]) -> te.Tensor:
    x, indices = inputs
    axis = app.attrs["axis"]
    after = axis + len(indices.shape)

    def element(*axes: te.Var) -> te.Expr:
        index = wrapped(indices[axes[axis:after]], x.shape[axis])
        return x[(*axes[:axis], index, *axes[after:])]

    return te.compute(label(app, "take"), app.type.shape, app.type.dtype, element)


def take_along(attrs: Attrs, x: np.ndarray, indices: np.ndarray) -> np.ndarray:
    axis = attrs["axis"]
    grid = list(np.ogrid[tuple(slice(extent) for extent in indices.shape)])
    grid[axis] = wrap(indices, x.shape[axis])
    return x[tuple(grid)]


def lower_take_along(app: Application, inputs: Sequence[te.Tensor]) -> te.Tensor:
    x, indices = inputs
    axis = app.attrs["axis"]

    def element(*axes: te.Var) -> te.Expr:
        return x[(*axes[:axis], wrapped(indices[axes], x.shape[axis]), *axes[axis + 1 :])]

    return te.compute(label(app, "take_along"), app.type.shape, app.type.dtype, element)


register(
    Op(
        "take",
        infer=infer_take,
        oracle=lambda attrs, x, indices: np.take(x, wrap(indices, x.shape[attrs["axis"]]), attrs["axis"]),
        fusion=Fusion.INJECTIVE,
        lower=lower_take,
        attrs=("axis",),
    )
)
register(
    Op(
        "take_along",
        infer=infer_take_along,
        oracle=take_along,
        fusion=Fusion.INJECTIVE,
        lower=lower_take_along,
        attrs=("axis",),
    )
)
