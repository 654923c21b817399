"""Scatter operators: a tensor with the elements at given indices replaced or combined.

- `put(axis, combine)` of (x, indices of rank 1, updates): x with slice n of `updates` along `axis` written at
  `indices[n]`; the inverse of `take`.
- `put_along(axis, combine)` of (x, indices of x's rank, updates of their shape): `torch.scatter`, the inverse of
  `take_along`. The indices may be shorter than x on the other axes.

`combine` is `set` (of several updates of one element the last wins), or `add`, `mul`, `max` or `min` with the element
of x. Indices are i32 or i64; negative ones count from the end. An update that is still out of range is dropped, so
that generated code never writes outside the tensor.

Kernels do not scatter: each element of the result searches for its own updates. So the work is the size of the result
times the number of updates along the axis, and the order of a sum is fixed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tilewright import te
from tilewright.dtypes import DType
from tilewright.graph.ir import Attrs, TensorType
from tilewright.graph.op import Application, Fusion, Op, register
from tilewright.graph.ops.common import (
    NUMBER,
    expect,
    expect_axis,
    expect_choice,
    expect_kind,
    expect_operands,
    label,
)
from tilewright.graph.ops.ordering import at

COMBINE = ("set", "add", "mul", "max", "min")
_UFUNC: dict[str, Any] = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}
_KIND = {"add": "sum", "mul": "prod", "max": "max", "min": "min"}


def identity(combine: str, dtype: DType) -> float | int:
    """The neutral element of `combine`."""
    if combine in ("add", "mul"):
        return int(combine == "mul") if dtype.is_integer else float(combine == "mul")
    if dtype.is_float:
        return -math.inf if combine == "max" else math.inf
    limits = np.iinfo(dtype.numpy)
    return int(limits.min if combine == "max" else limits.max)


def expect_scatter(
    inputs: Sequence[TensorType], attrs: Attrs
) -> tuple[TensorType, TensorType, TensorType, int]:
    expect_operands(inputs, 3)
    x, indices, updates = inputs
    axis = expect_axis(attrs["axis"], x.rank)
    combine = expect_choice("combine", attrs["combine"], *COMBINE)
    expect(indices.dtype in (DType.I64, DType.I32), f"indices must be i64 or i32, got {indices.dtype.short}")
    expect(
        updates.dtype is x.dtype, f"updates must be of x's type {x.dtype.short}, got {updates.dtype.short}"
    )
    if combine != "set":
        expect_kind(x.dtype, NUMBER)
    return x, indices, updates, axis


def infer_put(inputs: Sequence[TensorType], attrs: Attrs) -> TensorType:
    x, indices, updates, axis = expect_scatter(inputs, attrs)
    expect(indices.rank == 1, f"indices must have rank 1, got {indices!r}")
    wanted = (*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])
    expect(updates.shape == wanted, f"updates must be {list(wanted)}, got {list(updates.shape)}")
    return x


def infer_put_along(inputs: Sequence[TensorType], attrs: Attrs) -> TensorType:
    x, indices, updates, axis = expect_scatter(inputs, attrs)
    fitting = indices.rank == x.rank and all(
        here <= there for d, (here, there) in enumerate(zip(indices.shape, x.shape, strict=True)) if d != axis
    )
    expect(
        fitting,
        f"indices must have x's rank and at most its extents on every axis but {axis}, got {list(indices.shape)}",
    )
    expect(
        updates.shape == indices.shape, f"updates must be {list(indices.shape)}, got {list(updates.shape)}"
    )
    return x


# -- meaning ------------------------------------------------------------------------------------------------------


def counted(indices: np.ndarray, extent: int) -> np.ndarray:
    wide = indices.astype(np.int64)
    return np.where(wide < 0, wide + extent, wide)


def put(attrs: Attrs, x: np.ndarray, indices: np.ndarray, updates: np.ndarray) -> np.ndarray:
    axis = attrs["axis"]
    shape = [-1 if d == axis else 1 for d in range(x.ndim)]
    along = np.broadcast_to(indices.reshape(shape), updates.shape)
    return put_along(attrs, x, along, updates)


def put_along(attrs: Attrs, x: np.ndarray, indices: np.ndarray, updates: np.ndarray) -> np.ndarray:
    axis, combine = attrs["axis"], attrs["combine"]
    result = x.copy()
    positions = counted(indices, x.shape[axis])
    for index in np.ndindex(indices.shape):
        position = int(positions[index])
        if 0 <= position < x.shape[axis]:
            target = (*index[:axis], position, *index[axis + 1 :])
            update = updates[index]
            result[target] = update if combine == "set" else _UFUNC[combine](result[target], update)
    return result


# -- lowering -----------------------------------------------------------------------------------------------------


def lower_scatter(
    name: str, index_of: Callable[[te.Tensor, Sequence[te.Expr], int, te.Expr], te.Expr]
) -> Callable[[Application, Sequence[te.Tensor]], te.Tensor]:
    """`index_of(indices, axes, axis, n)`: the target index of update n in the row at `axes`."""

    def lower(app: Application, inputs: Sequence[te.Tensor]) -> te.Tensor:
        x, indices, updates = inputs
        title, axis, combine = label(app, name), app.attrs["axis"], app.attrs["combine"]
        extent, count, dtype = x.shape[axis], updates.shape[axis], x.dtype.compute
        if not count or not updates.shape or 0 in updates.shape:
            return te.compute(title, app.type.shape, app.type.dtype, lambda *axes: x[axes])

        def inside(axes: Sequence[te.Expr]) -> te.Expr | None:
            """Whether the updates cover this element on the other axes; None: always."""
            short = [d for d, extent in enumerate(updates.shape) if d != axis and extent != x.shape[d]]
            return te.all_of([te.call("lt", axes[d], updates.shape[d]) for d in short])

        def hits(axes: Sequence[te.Expr], n: te.Expr) -> te.Expr:
            wide = te.cast(index_of(indices, axes, axis, n), DType.I64)
            position = te.select(te.call("lt", wide, 0), wide + extent, wide)
            covered = inside(axes)
            position = position if covered is None else te.select(covered, position, extent)
            return te.call("eq", position, axes[axis])

        def found(*axes: te.Var) -> te.Expr:
            """The updates of this element: the index of the last one, or all of them combined."""
            (n,) = te.reduce_axes([count])
            if combine == "set":
                return te.reduce_over("max", te.select(hits(axes, n), n, -1), [n])
            nothing = te.const(identity(combine, x.dtype), dtype)
            return te.reduce_over(
                _KIND[combine], te.select(hits(axes, n), updates[at(axes, axis, n)], nothing), [n]
            )

        stage = te.compute(f"{title}_updates", x.shape, DType.I64 if combine == "set" else dtype, found)

        def element(*axes: te.Var) -> te.Expr:
            if combine != "set":
                return te.call(combine, x[axes], stage[axes])
            last = stage[axes]
            update = updates[at(axes, axis, te.call("max", last, 0))]
            return te.select(te.call("le", 0, last), update, x[axes])

        return te.compute(title, app.type.shape, app.type.dtype, element)

    return lower


def work(app: Application) -> int:
    return app.type.size * app.inputs[2].shape[app.attrs["axis"]]


register(
    Op(
        "put",
        infer=infer_put,
        oracle=put,
        fusion=Fusion.REDUCTION,
        lower=lower_scatter("put", lambda indices, axes, axis, n: indices[n]),
        flops=work,
        attrs=("axis", "combine"),
    )
)
register(
    Op(
        "put_along",
        infer=infer_put_along,
        oracle=put_along,
        fusion=Fusion.REDUCTION,
        lower=lower_scatter("put_along", lambda indices, axes, axis, n: indices[at(axes, axis, n)]),
        flops=work,
        attrs=("axis", "combine"),
    )
)
