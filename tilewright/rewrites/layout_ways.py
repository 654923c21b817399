"""The orders in which operators can work: what the layout pass chooses among.

A value is kept as a stored node and the order of its axes in storage: `order[d]` is the axis of the value that is axis
d in storage. Every operator has one or more `Way`s: its operands in certain orders give its result in a certain one.

- Convolutions and pools have a kernel for each layout.
- Elementwise operators, concat, pad, slice, reductions, ... work in any order.
- A permute, and many a reshape, only gives the same storage another order.
- Everything else takes and gives values as the model writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tilewright.graph.ir import Node
from tilewright.graph.op import Fusion, apply, op_of
from tilewright.graph.ops.movement import reshape_segments
from tilewright.rewrites.shapes import Shape, inverse, is_identity, reordered, reshape_to, trimmed

Order = tuple[int, ...]

WITH_LAYOUT = ("conv", "max_pool", "avg_pool", "adaptive_max_pool", "adaptive_avg_pool")
_MOST_WAYS = 5  # a graph that permutes in many ways would have as many orders for each value


def identity(rank: int) -> Order:
    return tuple(range(rank))


def channels_last(rank: int) -> Order:
    """Of a value that is written N C spatial, stored N spatial C."""
    return (0, *range(2, rank), 1)


def channels_first(rank: int) -> Order:
    """Of a value that is written N spatial C, stored N C spatial."""
    return (0, rank - 1, *range(1, rank - 1))


@dataclass(frozen=True)
class Way:
    order: Order  # of the result
    operands: tuple[Order, ...]
    layout: str | None = None  # of an operator that has one


def folds(node: Node) -> bool:
    """Whether it is a constant, or movement of one, or the same everywhere: it is there in any order for nothing."""
    while node.op in ("permute", "reshape"):
        node = node.inputs[0]
    return node.is_constant or node.op == "full"


# -- the ways of an operator ----------------------------------------------------------------------------------------


def ways_of(value: Node, offered: Sequence[Iterable[Order]], wanted: Iterable[Order]) -> list[Way]:
    """The ways to compute `value`, for each operand the orders in which it might come, and the orders in which readers
    might want the result. Among ways of equal cost the first is best: channels-last, since what is channels-last comes
    from a convolution and mostly goes to one, then as written."""
    rank = value.type.rank

    def preference(way: Way) -> int:
        return 0 if rank > 2 and way.order == channels_last(rank) else 1 if is_identity(way.order) else 2

    found = dict.fromkeys(_kind(value)(value, offered, list(wanted)))
    return sorted(found, key=preference)[:_MOST_WAYS] or [_as_written(value)]


_Ways = Callable[[Node, Sequence[Iterable[Order]], Sequence[Order]], Iterable[Way]]


def _kind(value: Node) -> _Ways:
    found = _WAYS.get(value.op)
    if found is not None:
        return found
    elementwise = op_of(value.op).fusion is Fusion.ELEMENTWISE
    return _following if elementwise else lambda value, offered, wanted: [_as_written(value)]


def _as_written(value: Node) -> Way:
    return Way(identity(value.type.rank), tuple(identity(operand.type.rank) for operand in value.inputs))


def _following(value: Node, offered: Sequence[Iterable[Order]], wanted: Sequence[Order]) -> Iterable[Way]:
    """Any order, the operands in the same. Those of lower rank broadcast: their axes are the last ones."""
    rank = value.type.rank
    orders = [o for x, each in zip(value.inputs, offered, strict=True) if x.type.rank == rank for o in each]
    for order in (*orders, *wanted):
        yield Way(order, tuple(_trailing(order, operand.type.rank) for operand in value.inputs))


def _trailing(order: Order, rank: int) -> Order:
    missing = len(order) - rank
    return tuple(axis - missing for axis in order if axis >= missing)


def _broadcast_to(value: Node, offered: Sequence[Iterable[Order]], wanted: Sequence[Order]) -> Iterable[Way]:
    rank, own = value.type.rank, value.inputs[0].type.rank
    orders = [(*range(rank - own), *(axis + rank - own for axis in order)) for order in offered[0]]
    for order in (*orders, *wanted):
        yield Way(order, (_trailing(order, own),))


def _along_axis(value: Node, offered: Sequence[Iterable[Order]], wanted: Sequence[Order]) -> Iterable[Way]:
    """softmax and the like. If the user put the axis last, it should stay last: rows that lie together are faster to
    read than to permute and read."""
    last = value.type.rank - 1
    for way in _following(value, offered, wanted):
        if value.attrs["axis"] != last or way.order[-1] == last:
            yield way


def _reduce(value: Node, offered: Sequence[Iterable[Order]], wanted: Sequence[Order]) -> Iterable[Way]:
    if value.attrs["keepdims"]:
        return [Way(order, (order,)) for order in (*offered[0], *wanted)]
    axes = _reduced_axes(value)
    left = [axis for axis in range(value.inputs[0].type.rank) if axis not in axes]
    place = {axis: position for position, axis in enumerate(left)}
    return [Way(tuple(place[axis] for axis in order if axis in place), (order,)) for order in offered[0]]


def _reduced_axes(value: Node) -> tuple[int, ...]:
    return (value.attrs["axis"],) if "axis" in value.attrs else value.attrs["axes"]


def _trailing_norm(value: Node, offered: Sequence[Iterable[Order]], wanted: Sequence[Order]) -> Iterable[Way]:
    """layer_norm and rms_norm: any order that leaves the last axes in place."""
    parameters = tuple(identity(parameter.type.rank) for parameter in value.inputs[1:])
    begin = value.type.rank - value.attrs["dims"]
    for order in (*offered[0], *wanted):
        if order[begin:] == tuple(range(begin, value.type.rank)):
            yield Way(order, (order, *parameters))


def _permute(value: Node, offered: Sequence[Iterable[Order]], wanted: Sequence[Order]) -> Iterable[Way]:
    axes = value.attrs["axes"]
    place = inverse(axes)
    for order in (*offered[0], *(reordered(axes, order) for order in wanted)):
        yield Way(reordered(place, order), (order,))


def _reshape(value: Node, offered: Sequence[Iterable[Order]], wanted: Sequence[Order]) -> Iterable[Way]:
    (x,) = value.inputs
    back = (reshape_stored(value.shape, x.shape, order) for order in wanted if not is_identity(order))
    for order in (*offered[0], *(order for _, order in filter(None, back))):
        moved = None if is_identity(order) else reshape_stored(x.shape, value.shape, order)
        yield _as_written(value) if moved is None else Way(moved[1], (order,))


def reshape_stored(source: Shape, target: Shape, order: Order) -> tuple[Shape, Order] | None:
    """The shape and order in storage after the value is reshaped from `source` to `target`, where that needs no
    permute: every run of axes that is reshaped by itself must lie together and in order.

    [N, C, H, W] stored as N H W C -> [N, C, HW]: stored [N, HW, C].
    """
    if 0 in source:
        return None
    # Axes of extent 1 may stand anywhere; only the others decide.
    stored = [axis for axis in order if source[axis] != 1]
    runs = {sources[0]: (sources, targets) for sources, targets in reshape_segments(source, target)}
    result: list[int] = []
    position = 0
    while position < len(stored):
        if stored[position] not in runs:
            return None
        sources, targets = runs[stored[position]]
        if tuple(stored[position : position + len(sources)]) != sources:
            return None
        result += targets
        position += len(sources)
    ones = [axis for axis, extent in enumerate(target) if extent == 1]
    new = _with_ones(result, ones)
    return reordered(target, new), new


def _with_ones(order: list[int], ones: list[int]) -> Order:
    """Puts axes of extent 1 behind the axis that they follow in the value, so that an order stays a known one."""
    result = list(order)
    for axis in ones:
        before = [position for position, other in enumerate(result) if other == axis - 1]
        result.insert(before[0] + 1 if before else 0, axis)
    return tuple(result)


def _with_layout(value: Node, offered: Sequence[Iterable[Order]], wanted: Sequence[Order]) -> Iterable[Way]:
    """As it came, and with the channels at the other end."""
    rank = value.type.rank
    if value.attrs["layout"] == "channels_first":
        kept, turned, other = identity(rank), channels_last(rank), "channels_last"
        weight = (*range(2, rank), 1, 0)  # O I spatial -> spatial I O
    else:
        kept, turned, other = identity(rank), channels_first(rank), "channels_first"
        weight = (rank - 1, rank - 2, *range(rank - 2))
    biases = tuple(identity(1) for _ in value.inputs[2:])
    if value.op == "conv":
        yield Way(turned, (turned, weight, *biases), other)
        yield Way(kept, (kept, kept, *biases), value.attrs["layout"])
    else:
        yield Way(turned, (turned,), other)
        yield Way(kept, (kept,), value.attrs["layout"])


_WAYS: Mapping[str, _Ways] = {
    "permute": _permute,
    "reshape": _reshape,
    "broadcast_to": _broadcast_to,
    **dict.fromkeys(WITH_LAYOUT, _with_layout),
    **dict.fromkeys(("layer_norm", "rms_norm"), _trailing_norm),
    **dict.fromkeys(("pad", "slice", "flip", "concat", "resize"), _following),
    **dict.fromkeys(("softmax", "log_softmax", "cumsum"), _along_axis),
    **dict.fromkeys(
        ("sum", "mean", "amax", "amin", "prod", "any", "all", "var", "argmax", "argmin"), _reduce
    ),
}


# -- the operator in one of its ways --------------------------------------------------------------------------------


def written(value: Node, way: Way, operands: tuple[Node, ...]) -> Node:
    """The node that holds `value` in the order of `way`, of operands that are stored as it says."""
    if value.op == "permute":
        return operands[0]
    same = all(a is b for a, b in zip(operands, value.inputs, strict=True))
    if same and is_identity(way.order) and way.layout == value.attrs.get("layout"):
        return value
    if way.layout is not None:
        return _apply(value, *operands, layout=way.layout)
    if value.op in _WAYS:
        return _in_order(value, way, operands)
    if op_of(value.op).fusion is not Fusion.ELEMENTWISE:
        return _apply(value, *operands)
    result = _apply(value, *map(aligned_to(way.order), operands, way.operands))
    # Where leading ones were trimmed from all operands they are missing now.
    return reshape_to(result, reordered(value.shape, way.order))


def _apply(value: Node, *operands: Node, **changed: object) -> Node:
    attrs = {**value.attrs, **changed}
    return apply(value.op, *operands, name=value.name, source=value.source, **attrs)


def aligned_to(order: Order) -> Callable[[Node, Order], Node]:
    """What makes an operand, stored in its own order, broadcast to a result stored in `order`."""

    def aligned(operand: Node, own: Order) -> Node:
        missing = len(order) - len(own)
        if is_identity(order):
            return operand
        if missing:
            extents = dict(zip(own, operand.shape, strict=True))
            operand = reshape_to(operand, tuple(extents.get(axis - missing, 1) for axis in order))
        # Parameters of one value per channel come out as [C], the form that reads best and that all share.
        return reshape_to(operand, trimmed(operand.shape)) if folds(operand) else operand

    return aligned


def _in_order(value: Node, way: Way, operands: tuple[Node, ...]) -> Node:
    order = way.order
    shape = reordered(value.shape, order)
    if value.op in ("pad", "slice"):
        names = ("low", "high", "interior") if value.op == "pad" else ("starts", "stops", "steps")
        return _apply(value, *operands, **{name: reordered(value.attrs[name], order) for name in names})
    if value.op in ("concat", "softmax", "log_softmax", "cumsum"):
        return _apply(value, *operands, axis=order.index(value.attrs["axis"]))
    if value.op == "flip":
        return _apply(value, *operands, axes=tuple(sorted(order.index(axis) for axis in value.attrs["axes"])))
    if value.op == "reshape":
        return _apply(value, *operands, shape=shape)
    if value.op == "broadcast_to":
        return _apply(value, aligned_to(order)(operands[0], way.operands[0]), shape=shape)
    if value.op == "resize":
        # It resamples the last axes, and does not touch one that keeps its extent: so it works in any order.
        changed = [d for d, extent in enumerate(shape) if operands[0].shape[d] != extent]
        return _apply(value, *operands, sizes=shape[min(changed, default=len(shape) - 1) :])
    if value.op in ("layer_norm", "rms_norm"):
        return _apply(value, *operands)
    stored = way.operands[0]
    mapped = tuple(sorted(stored.index(axis) for axis in _reduced_axes(value)))
    return _apply(value, *operands, **({"axis": mapped[0]} if "axis" in value.attrs else {"axes": mapped}))
