"""Rules of `simplify` for movement, and for reductions and windows that only move."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilewright.graph.ir import Node
from tilewright.graph.ops.layouts import spatial_axes
from tilewright.graph.verify import MAX_CONCATENATED
from tilewright.rewrites.shapes import is_identity, moves_nothing, reordered
from tilewright.rewrites.simplify_rules import Rule, Simplifier

# -- reshape, permute, broadcast_to -------------------------------------------------------------------------------


def no_change(node: Node, build: Simplifier) -> Node | None:
    """reshape, broadcast_to, resize, adaptive pooling to its own shape -> x"""
    return node.inputs[0] if node.inputs[0].shape == node.shape else None


def reshape_reshape(node: Node, build: Simplifier) -> Node | None:
    """reshape(reshape(x)) -> reshape(x)"""
    (x,) = node.inputs
    return build("reshape", x.inputs[0], shape=node.shape) if x.op == "reshape" else None


def of_full(node: Node, build: Simplifier) -> Node | None:
    """movement of a constant value -> that value in the new shape"""
    (x,) = node.inputs
    if x.op != "full":
        return None
    return build("full", value=x.attrs["value"], shape=node.shape, dtype=node.dtype)


def permute_permute(node: Node, build: Simplifier) -> Node | None:
    """permute(permute(x)) -> permute(x)"""
    (x,) = node.inputs
    if x.op != "permute":
        return None
    return build("permute", x.inputs[0], axes=reordered(x.attrs["axes"], node.attrs["axes"]))


def permute_moves_nothing(node: Node, build: Simplifier) -> Node | None:
    """permute(x) that keeps the order, or moves only axes of extent 1 -> x, or reshape(x)"""
    (x,) = node.inputs
    if is_identity(node.attrs["axes"]):
        return x
    return build("reshape", x, shape=node.shape) if moves_nothing(x.shape, node.attrs["axes"]) else None


def broadcast_broadcast(node: Node, build: Simplifier) -> Node | None:
    """broadcast_to(broadcast_to(x)) -> broadcast_to(x); one that only adds axes of extent 1 -> reshape(x)"""
    (x,) = node.inputs
    if x.op == "broadcast_to":
        return build("broadcast_to", x.inputs[0], shape=node.shape)
    return build("reshape", x, shape=node.shape) if x.type.size == node.type.size else None


def flip_nothing(node: Node, build: Simplifier) -> Node | None:
    """flip of axes of extent 1 -> x; flip(flip(x)) of the same axes -> x"""
    (x,) = node.inputs
    if all(x.shape[axis] <= 1 for axis in node.attrs["axes"]):
        return x
    if x.op == "flip" and set(x.attrs["axes"]) == set(node.attrs["axes"]):
        return x.inputs[0]
    return None


# -- slice --------------------------------------------------------------------------------------------------------


def make_slice(
    build: Simplifier, x: Node, starts: Sequence[int], steps: Sequence[int], extents: Sequence[int]
) -> Node:
    stops = tuple(
        start + step * (extent - 1) + 1 if extent else start
        for start, step, extent in zip(starts, steps, extents, strict=True)
    )
    return build("slice", x, starts=tuple(starts), stops=stops, steps=tuple(steps))


def slice_slice(node: Node, build: Simplifier) -> Node | None:
    """slice(slice(x)) -> slice(x)"""
    (x,) = node.inputs
    if x.op != "slice":
        return None
    inner, outer = x.attrs, node.attrs
    starts = [
        a + b * step for a, b, step in zip(inner["starts"], outer["starts"], inner["steps"], strict=True)
    ]
    steps = [a * b for a, b in zip(inner["steps"], outer["steps"], strict=True)]
    # An empty slice may start after the last element that the inner one keeps.
    starts = [min(start, extent) for start, extent in zip(starts, x.inputs[0].shape, strict=True)]
    return make_slice(build, x.inputs[0], starts, steps, node.shape)


def slice_concat(node: Node, build: Simplifier) -> Node | None:
    """slice(concat(a, b, ...)) that reads only one of them -> slice of that one"""
    (x,) = node.inputs
    if x.op != "concat" or node.type.size == 0:
        return None
    axis = x.attrs["axis"]
    first = node.attrs["starts"][axis]
    last = first + node.attrs["steps"][axis] * (node.shape[axis] - 1)
    begin = 0
    for part in x.inputs:
        end = begin + part.shape[axis]
        if begin <= first and last < end:
            starts = list(node.attrs["starts"])
            starts[axis] -= begin
            return make_slice(build, part, starts, node.attrs["steps"], node.shape)
        begin = end
    return None


# -- pad, concat --------------------------------------------------------------------------------------------------


def pad_pad(node: Node, build: Simplifier) -> Node | None:
    """pad(pad(x)) with one value -> pad(x), unless the outer one has interior padding"""
    (x,) = node.inputs
    if x.op != "pad" or any(node.attrs["interior"]) or x.attrs["value"] != node.attrs["value"]:
        return None
    low, high = (
        tuple(a + b for a, b in zip(x.attrs[side], node.attrs[side], strict=True)) for side in ("low", "high")
    )
    return build(
        "pad", x.inputs[0], low=low, high=high, interior=x.attrs["interior"], value=node.attrs["value"]
    )


def concat_few(node: Node, build: Simplifier) -> Node | None:
    """concat of one -> it; empty parts are dropped"""
    axis = node.attrs["axis"]
    parts = [part for part in node.inputs if part.shape[axis]]
    if len(node.inputs) == 1:
        return node.inputs[0]
    if not parts or len(parts) == len(node.inputs):
        return None
    return build("concat", *parts, axis=axis)


def concat_concat(node: Node, build: Simplifier) -> Node | None:
    """concat(concat(a, b), c) -> concat(a, b, c), if the inner one has no other reader and one kernel takes all"""
    axis = node.attrs["axis"]

    def inner(part: Node) -> bool:
        return part.op == "concat" and part.attrs["axis"] == axis and build.single_use(part)

    if not any(inner(part) for part in node.inputs):
        return None
    parts = [chunk for part in node.inputs for chunk in (part.inputs if inner(part) else (part,))]
    return build("concat", *parts, axis=axis) if len(parts) <= MAX_CONCATENATED else None


def concat_slices(node: Node, build: Simplifier) -> Node | None:
    """concat(x[0:2], x[2:5]) -> x[0:5]"""
    axis = node.attrs["axis"]

    def continues(a: Node, b: Node) -> bool:
        if a.op != "slice" or b.op != "slice" or a.inputs[0] is not b.inputs[0]:
            return False
        others = all(
            a.attrs[key][d] == b.attrs[key][d]
            for key in ("starts", "stops", "steps")
            for d in range(node.type.rank)
            if d != axis
        )
        adjacent = a.attrs["steps"][axis] == b.attrs["steps"][axis] == 1
        return others and adjacent and a.attrs["stops"][axis] == b.attrs["starts"][axis]

    parts = [node.inputs[0]]
    for part in node.inputs[1:]:
        if continues(parts[-1], part):
            stops = list(parts[-1].attrs["stops"])
            stops[axis] = part.attrs["stops"][axis]
            attrs = parts[-1].attrs
            parts[-1] = build(
                "slice", part.inputs[0], starts=attrs["starts"], stops=tuple(stops), steps=attrs["steps"]
            )
        else:
            parts.append(part)
    return build("concat", *parts, axis=axis) if len(parts) < len(node.inputs) else None


# -- reductions and windows ---------------------------------------------------------------------------------------


def reduce_nothing(node: Node, build: Simplifier) -> Node | None:
    """a sum, mean, ... over axes of extent 1 -> reshape(x)"""
    (x,) = node.inputs
    if any(x.shape[axis] != 1 for axis in node.attrs["axes"]):
        return None
    return build("reshape", x, shape=node.shape)


def global_pool(node: Node, build: Simplifier) -> Node | None:
    """adaptive pooling to one element -> mean or amax; with an even division -> pooling with a fixed window"""
    (x,) = node.inputs
    axes, sizes = tuple(spatial_axes(x.type.rank, node.attrs["layout"])), node.attrs["sizes"]
    average = node.op == "adaptive_avg_pool"
    if all(size == 1 for size in sizes):
        return build("mean" if average else "amax", x, axes=axes, keepdims=True)
    if any(x.shape[axis] % size for axis, size in zip(axes, sizes, strict=True)):
        return None
    kernel = tuple(x.shape[axis] // size for axis, size in zip(axes, sizes, strict=True))
    none = (0,) * len(kernel)
    window = {
        "kernel": kernel,
        "stride": kernel,
        "padding": none,
        "ceil_mode": False,
        "layout": node.attrs["layout"],
    }
    if average:
        return build("avg_pool", x, **window, count_include_pad=True, divisor=None)
    return build("max_pool", x, **window, dilation=(1,) * len(kernel))


def log_of_softmax(node: Node, build: Simplifier) -> Node | None:
    """log(softmax(x)) -> log_softmax(x), which does not lose small probabilities"""
    (x,) = node.inputs
    if x.op != "softmax" or not build.single_use(x):
        return None
    return build("log_softmax", x.inputs[0], axis=x.attrs["axis"])


RULES: Mapping[str, Sequence[Rule]] = {
    "reshape": (no_change, reshape_reshape, of_full),
    "permute": (permute_moves_nothing, permute_permute, of_full),
    "broadcast_to": (no_change, broadcast_broadcast, of_full),
    "flip": (flip_nothing, of_full),
    "slice": (no_change, slice_slice, slice_concat, of_full),
    "pad": (no_change, pad_pad),
    "concat": (concat_few, concat_concat, concat_slices),
    "resize": (no_change,),
    "adaptive_avg_pool": (no_change, global_pool),
    "adaptive_max_pool": (no_change, global_pool),
    "sum": (reduce_nothing,),
    "mean": (reduce_nothing,),
    "amax": (reduce_nothing,),
    "amin": (reduce_nothing,),
    "prod": (reduce_nothing,),
    "any": (reduce_nothing,),
    "all": (reduce_nothing,),
    "log": (log_of_softmax,),
}
