"""The layouts in which each operator can work: the choices of the layout pass.

A value is a stored node plus the order of its axes in storage (`orders.py`). Every operator has one or more
`LayoutChoice`s: with operands in certain orders, its result has a certain order.

- Convolutions and pools have a kernel for each layout: channels first, last, or in blocks of what the machine's
  vectors hold. A convolution whose operand has no whole blocks reads it with channels first and writes blocks.
- Elementwise operators, concat, pad, slice, reductions, ... work in any order; in blocks of an axis if they do not
  split a block.
- A permute, and many reshapes, only relabel the same storage.
- Everything else takes and gives values as the model writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tilewright.graph.ir import Node
from tilewright.graph.op import Fusion, apply, op_of
from tilewright.graph.ops import layouts
from tilewright.graph.ops.movement import reshape_segments
from tilewright.rewrites.orders import (
    AxisBlock,
    Entry,
    Order,
    axis_of,
    blocks_of,
    channels_first,
    channels_last,
    conversions,
    fits,
    identity,
    per_axis,
    positions,
    renamed,
    stored,
)
from tilewright.rewrites.shapes import Shape, inverse, is_identity, moves_nothing, reshape_to, trimmed

WITH_LAYOUT = ("conv", "max_pool", "avg_pool", "adaptive_max_pool", "adaptive_avg_pool")
_MAX_CHOICES = 5  # a graph with many permutes would have as many orders for each value


@dataclass(frozen=True)
class LayoutChoice:
    order: Order  # of the result
    operands: tuple[Order, ...]
    layout: str | None = None  # for an operator that has one


def gives_channels_last(node: Node, choice: LayoutChoice) -> bool:
    """Whether an operator with a layout produces channels-last with this choice."""
    channels = layouts.channels_of(node.shape, node.attrs["layout"])
    return choice.layout in (layouts.LAST, layouts.by(channels))


def folds(node: Node) -> bool:
    """Whether it is a constant, movement of one, or the same everywhere: it is available in any order at no cost."""
    while node.op in ("permute", "reshape"):
        node = node.inputs[0]
    return node.is_constant or node.op == "full"


# -- the choices of an operator --------------------------------------------------------------------------------------


def layout_choices_of(
    value: Node,
    offered: Sequence[Iterable[Order]],
    wanted: Iterable[Order],
    block: Callable[[int], int] = lambda channels: 0,
) -> list[LayoutChoice]:
    """The choices for computing `value`, given the possible orders of each operand and the orders that readers may
    want; `block` returns the block size for a number of channels. On a tie the first choice wins: channels-last,
    because such values come from a convolution and mostly go to one, then unchanged."""
    rank = value.type.rank

    def preference(choice: LayoutChoice) -> int:
        if rank > 2 and choice.order == channels_last(rank):
            return 0
        if value.op == "pad" and 1 in blocks_of(choice.order).values():
            return 1  # padding next to the convolution that reads it is a part of its kernel
        return 2 if is_identity(choice.order) else 3

    found = dict.fromkeys(
        choice for choice in _kind(value)(value, offered, list(wanted)) if _keeps_blocks(value, choice)
    )
    if value.op in WITH_LAYOUT:
        found |= dict.fromkeys(_in_blocks(value, block))
    return sorted(found, key=preference)[:_MAX_CHOICES] or [_as_written(value)]


_LayoutChoices = Callable[[Node, Sequence[Iterable[Order]], Sequence[Order]], Iterable[LayoutChoice]]


def _kind(value: Node) -> _LayoutChoices:
    found = _LAYOUT_CHOICES.get(value.op)
    if found is not None:
        return found
    elementwise = op_of(value.op).fusion is Fusion.ELEMENTWISE
    return _following if elementwise else lambda value, offered, wanted: [_as_written(value)]


def _as_written(value: Node) -> LayoutChoice:
    return LayoutChoice(
        identity(value.type.rank), tuple(identity(operand.type.rank) for operand in value.inputs)
    )


def _following(
    value: Node, offered: Sequence[Iterable[Order]], wanted: Sequence[Order]
) -> Iterable[LayoutChoice]:
    """Any order, with the operands in the same order. Operands of lower rank broadcast: their axes are the
    last ones."""
    rank = value.type.rank
    orders = [o for x, each in zip(value.inputs, offered, strict=True) if x.type.rank == rank for o in each]
    for order in (*orders, *wanted):
        yield LayoutChoice(order, tuple(_trailing(order, operand.type.rank) for operand in value.inputs))


def _trailing(order: Order, rank: int) -> Order:
    missing = rank_of(order) - rank
    return renamed((e for e in order if axis_of(e) >= missing), lambda axis: axis - missing)


def rank_of(order: Order) -> int:
    """The rank of the value."""
    return len(order) - len(blocks_of(order))


def _keeps_blocks(value: Node, choice: LayoutChoice) -> bool:
    """Whether everything has whole blocks, and nothing happens inside them."""
    blocks = blocks_of(choice.order) | {
        a: s for order in choice.operands for a, s in blocks_of(order).items()
    }
    if not blocks:
        return True
    if not fits(value.shape, choice.order) or not all(
        fits(x.shape, order) for x, order in zip(value.inputs, choice.operands, strict=True)
    ):
        return False
    if value.op == "concat":
        # One channel broadcasts to any block; it cannot be a part of the result.
        axis = value.attrs["axis"]
        return not any(x.shape[axis] % blocks.get(axis, 1) for x in value.inputs)
    return not any(axis in touched(value) for axis in blocks)


def touched(value: Node) -> Collection[int]:
    """The axes along which it does more than take elements, or rows of whole blocks, one by one."""
    attrs = value.attrs
    if value.op == "pad":
        amounts = (attrs["low"], attrs["high"], attrs["interior"])
        return {axis for amount in amounts for axis, many in enumerate(amount) if many}
    if value.op in ("slice", "resize"):
        (x,) = value.inputs
        changed = {axis for axis in range(x.type.rank) if x.shape[axis] != value.shape[axis]}
        return changed | {axis for axis, step in enumerate(attrs.get("steps", ())) if step != 1}
    if value.op == "flip":
        return tuple(attrs["axes"])
    return (attrs["axis"],) if value.op in _ALONG_ONE_AXIS else ()


def _broadcast_to(
    value: Node, offered: Sequence[Iterable[Order]], wanted: Sequence[Order]
) -> Iterable[LayoutChoice]:
    rank, own = value.type.rank, value.inputs[0].type.rank
    orders = [(*range(rank - own), *renamed(order, lambda axis: axis + rank - own)) for order in offered[0]]
    for order in (*orders, *wanted):
        yield LayoutChoice(order, (_trailing(order, own),))


def _along_axis(
    value: Node, offered: Sequence[Iterable[Order]], wanted: Sequence[Order]
) -> Iterable[LayoutChoice]:
    """softmax and the like. If the user put the axis last, it should stay last: contiguous rows are faster to read
    than to permute and read."""
    last = value.type.rank - 1
    for choice in _following(value, offered, wanted):
        if value.attrs["axis"] != last or choice.order[-1] == last:
            yield choice


def _reduce(
    value: Node, offered: Sequence[Iterable[Order]], wanted: Sequence[Order]
) -> Iterable[LayoutChoice]:
    if value.attrs["keepdims"]:
        return [LayoutChoice(order, (order,)) for order in (*offered[0], *wanted)]
    axes = _reduced_axes(value)
    left = [axis for axis in range(value.inputs[0].type.rank) if axis not in axes]
    slot = {axis: position for position, axis in enumerate(left)}

    def kept(order: Order) -> Order:
        return renamed((entry for entry in order if axis_of(entry) in slot), slot.__getitem__)

    return [LayoutChoice(kept(order), (order,)) for order in offered[0]]


def _reduced_axes(value: Node) -> tuple[int, ...]:
    return (value.attrs["axis"],) if "axis" in value.attrs else value.attrs["axes"]


def _trailing_norm(
    value: Node, offered: Sequence[Iterable[Order]], wanted: Sequence[Order]
) -> Iterable[LayoutChoice]:
    """layer_norm and rms_norm: any order that leaves the last axes in place."""
    parameters = tuple(identity(parameter.type.rank) for parameter in value.inputs[1:])
    begin = value.type.rank - value.attrs["dims"]
    for order in (*offered[0], *wanted):
        if order[begin:] == tuple(range(begin, value.type.rank)):
            yield LayoutChoice(order, (order, *parameters))


def _permute(
    value: Node, offered: Sequence[Iterable[Order]], wanted: Sequence[Order]
) -> Iterable[LayoutChoice]:
    axes = value.attrs["axes"]
    slot = inverse(axes)
    for order in (*offered[0], *(renamed(order, axes.__getitem__) for order in wanted)):
        yield LayoutChoice(renamed(order, slot.__getitem__), (order,))


def _reshape(
    value: Node, offered: Sequence[Iterable[Order]], wanted: Sequence[Order]
) -> Iterable[LayoutChoice]:
    (x,) = value.inputs
    back = (reshape_stored(value.shape, x.shape, order) for order in wanted if not is_identity(order))
    for order in (*offered[0], *(order for _, order in filter(None, back))):
        moved = None if is_identity(order) else reshape_stored(x.shape, value.shape, order)
        yield _as_written(value) if moved is None else LayoutChoice(moved[1], (order,))


def reshape_stored(source: Shape, target: Shape, order: Order) -> tuple[Shape, Order] | None:
    """The shape and order in storage after the value is reshaped from `source` to `target` without a permute: every
    run of axes that is reshaped separately must be contiguous and in order.

    [N, C, H, W] stored as N H W C -> [N, C, HW]: stored [N, HW, C].
    """
    if 0 in source:
        return None
    # Axes of extent 1 may be anywhere; only the others matter.
    long = [entry for entry in order if source[axis_of(entry)] != 1]
    cut = {axis for axis in blocks_of(order) if source[axis] != 1}
    runs = {sources[0]: (sources, targets) for sources, targets in reshape_segments(source, target)}
    result: list[Entry] = []
    position = 0
    while position < len(long):
        entry = long[position]
        if axis_of(entry) not in runs:
            return None
        sources, targets = runs[axis_of(entry)]
        if axis_of(entry) in cut:
            if len(sources) > 1 or len(targets) > 1:
                return None
            result += renamed([entry], lambda axis: targets[0])  # noqa: B023
        elif tuple(long[position : position + len(sources)]) != sources:
            return None
        else:
            result += targets
        position += len(sources)
    ones = [axis for axis, extent in enumerate(target) if extent == 1]
    new = _with_ones(result, ones)
    return stored(target, new), new


def _with_ones(order: list[Entry], ones: list[int]) -> Order:
    """Put axes of extent 1 after the axis that they follow in the value, so that an order stays a known one."""
    result = list(order)
    for axis in ones:
        before = [position for position, other in enumerate(result) if other == axis - 1]
        result.insert(before[0] + 1 if before else 0, axis)
    return tuple(result)


def _with_layout(
    value: Node, offered: Sequence[Iterable[Order]], wanted: Sequence[Order]
) -> Iterable[LayoutChoice]:
    """The given layout, and the other one of channels first and last."""
    rank = value.type.rank
    if value.attrs["layout"] == "channels_first":
        kept, transposed, other = identity(rank), channels_last(rank), "channels_last"
        weight = (*range(2, rank), 1, 0)  # O I spatial -> spatial I O
    else:
        kept, transposed, other = identity(rank), channels_first(rank), "channels_first"
        weight = (rank - 1, rank - 2, *range(rank - 2))
    biases = tuple(identity(1) for _ in value.inputs[2:])
    if value.op == "conv":
        yield LayoutChoice(transposed, (transposed, weight, *biases), other)
        yield LayoutChoice(kept, (kept, kept, *biases), value.attrs["layout"])
    else:
        yield LayoutChoice(transposed, (transposed,), other)
        yield LayoutChoice(kept, (kept,), value.attrs["layout"])


def _in_blocks(value: Node, block: Callable[[int], int]) -> Iterable[LayoutChoice]:
    """Blocks of channels: for the operand too, if it has whole ones; otherwise its blocks have 1 channel, which is
    channels first. Then all channels of the result may be one block, which is channels last."""
    rank, layout = value.type.rank, value.attrs["layout"]
    axis = 1 if layout == layouts.FIRST else rank - 1
    image, spatial = value.inputs[0], [n for n in range(1, rank) if n != axis]

    def by(size: int) -> Order:
        return (0, axis, *spatial, AxisBlock(axis, size))

    size, channels = block(value.shape[axis]), value.shape[axis]
    if not size or channels == size:
        return
    if value.op != "conv":
        yield LayoutChoice(by(size), (by(size),), layouts.by(size))
        return
    weight = identity(rank) if layout == layouts.LAST else (*range(2, rank), 1, 0)
    others = (weight, *(identity(1) for _ in value.inputs[2:]))
    read = block(image.shape[axis]) or 1
    yield LayoutChoice(by(size), (by(read), *others), layouts.by(size))
    if read == 1:
        yield LayoutChoice(by(channels), (by(1), *others), layouts.by(channels))


_ALONG_ONE_AXIS = ("softmax", "log_softmax", "cumsum", "argmax", "argmin")

_LAYOUT_CHOICES: Mapping[str, _LayoutChoices] = {
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


# -- an operator with a choice applied ------------------------------------------------------------------------------


def written(value: Node, choice: LayoutChoice, operands: tuple[Node, ...]) -> Node:
    """The node that holds `value` in the order of `choice`, with operands stored in its orders."""
    if value.op == "permute":
        return operands[0]
    same = all(a is b for a, b in zip(operands, value.inputs, strict=True))
    if same and is_identity(choice.order) and choice.layout == value.attrs.get("layout"):
        return value
    if choice.layout is not None:
        return _apply(value, *operands, layout=choice.layout)
    if value.op in _LAYOUT_CHOICES:
        return _in_order(value, choice, operands)
    if op_of(value.op).fusion is not Fusion.ELEMENTWISE:
        return _apply(value, *operands)
    result = _apply(value, *map(aligned_to(choice.order), operands, choice.operands))
    # If leading ones were trimmed from all operands, they must be restored.
    return reshape_to(result, stored(value.shape, choice.order))


def _apply(value: Node, *operands: Node, **changed: object) -> Node:
    attrs = {**value.attrs, **changed}
    return apply(value.op, *operands, name=value.name, source=value.source, **attrs)


def aligned_to(order: Order) -> Callable[[Node, Order], Node]:
    """Make an operand, stored in its own order, broadcast to a result stored in `order`."""

    def aligned(operand: Node, own: Order) -> Node:
        missing = rank_of(order) - rank_of(own)
        if is_identity(order):
            return operand
        if missing:
            extents = dict(zip(renamed(own, lambda axis: axis + missing), operand.shape, strict=True))
            operand = reshape_to(operand, tuple(extents.get(entry, 1) for entry in order))
        # Parameters with one value per channel become [C], a form that all layouts share.
        return reshape_to(operand, trimmed(operand.shape)) if folds(operand) else operand

    return aligned


def _in_order(value: Node, choice: LayoutChoice, operands: tuple[Node, ...]) -> Node:
    order = choice.order
    shape = stored(value.shape, order)
    if value.op == "pad":
        amounts = {name: per_axis(value.attrs[name], order) for name in ("low", "high", "interior")}
        return _apply(value, *operands, **amounts)
    if value.op == "slice":
        return _apply(value, *operands, **_sliced(value, order))
    if value.op in ("concat", "softmax", "log_softmax", "cumsum"):
        return _apply(value, *operands, axis=order.index(value.attrs["axis"]))
    if value.op == "flip":
        return _apply(value, *operands, axes=positions(value.attrs["axes"], order))
    if value.op == "reshape":
        return _apply(value, *operands, shape=shape)
    if value.op == "broadcast_to":
        return _apply(value, aligned_to(order)(operands[0], choice.operands[0]), shape=shape)
    if value.op == "resize":
        # It resamples the last axes and leaves axes that keep their extent unchanged, so it works in any order.
        changed = [d for d, extent in enumerate(shape) if operands[0].shape[d] != extent]
        return _apply(value, *operands, sizes=shape[min(changed, default=len(shape) - 1) :])
    if value.op in ("layer_norm", "rms_norm"):
        return _apply(value, *operands)
    mapped = positions(_reduced_axes(value), choice.operands[0])
    return _apply(value, *operands, **({"axis": mapped[0]} if "axis" in value.attrs else {"axes": mapped}))


def _sliced(value: Node, order: Order) -> dict[str, Shape]:
    """Axes in blocks are taken whole, with all elements of each block."""
    starts, stops, steps = (per_axis(value.attrs[name], order) for name in ("starts", "stops", "steps"))
    blocks, shape = blocks_of(order), stored(value.shape, order)
    whole = [axis_of(entry) in blocks for entry in order]
    return {
        "starts": tuple(0 if all_of else start for all_of, start in zip(whole, starts, strict=True)),
        "stops": tuple(n if all_of else stop for all_of, n, stop in zip(whole, shape, stops, strict=True)),
        "steps": tuple(1 if all_of else step for all_of, step in zip(whole, steps, strict=True)),
    }


def permuted(node: Node, have: Order, need: Order, value: Node) -> Node:
    """Convert `value`, stored in `node` in the order `have`, to the order `need`."""
    for parts, axes in conversions(value.shape, have, need):
        if not moves_nothing(parts, axes):
            node = apply("permute", reshape_to(node, parts), axes=axes, name=value.name, source=value.source)
    return reshape_to(node, stored(value.shape, need))
