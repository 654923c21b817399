"""layout: convolutions and pools become channels-last, and permutes move until they cancel or reach the boundary.

    permute(conv(x, w) channels_first)        ->      conv(permute(x), permute(w)) channels_last, read as it lies

Every value is kept as a stored node and the order of its axes in storage: `order[d]` is the axis of the value that is
axis d in storage. A permute costs nothing then: it gives the same storage another order. So do operators that can work
in any order (elementwise, concat, pad, slice, reductions, ...): they take their operands in one order and leave the
result in it. Only where an operator, or an output of the graph, needs a certain order is a permute written, once for
each value and order. Two permutes that undo each other are never written at all.

Where operands come in different orders, the one is taken that moves the fewest bytes. And where a permute must be
written behind an operator that made its operand larger (a pad, a resize), it is written before that instead. Moving
permutes down can still cost more than it saves, where one value has several readers that all need it as it was written.
So a graph that is left with more than it had, and more than its boundary explains, is also converted without moving
anything, and the better of the two is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tilewright.graph.ir import Graph, Node
from tilewright.graph.op import Fusion, apply, op_of
from tilewright.graph.ops.movement import reshape_segments
from tilewright.rewrites.base import Pass
from tilewright.rewrites.shapes import (
    Shape,
    inverse,
    is_identity,
    moves_nothing,
    reordered,
    reshape_to,
    trimmed,
)

Order = tuple[int, ...]


@dataclass(frozen=True)
class Layout(Pass):
    name = "layout"
    reaches = "channels-last"

    def run(self, graph: Graph) -> Graph:
        moved = _Conversion(graph).run()
        boundary = sum(node.type.bytes for node in (*graph.inputs, *graph.outputs))
        if permuted_bytes(moved) <= permuted_bytes(graph) + boundary:
            return moved
        in_place = _Conversion(graph, moves=False).run()
        return in_place if permuted_bytes(in_place) < permuted_bytes(moved) else moved


def permuted_bytes(graph: Graph) -> int:
    """How much the graph's permutes move; those of constants are folded and count nothing."""
    return sum(
        node.type.bytes
        for node in graph.nodes()
        if node.op == "permute"
        and not _folds(node)
        and not moves_nothing(node.inputs[0].shape, node.attrs["axes"])
    )


def _folds(node: Node) -> bool:
    """Whether it is a constant, or movement of one, or the same everywhere."""
    while node.op in ("permute", "reshape"):
        node = node.inputs[0]
    return node.is_constant or node.op == "full"


def identity(rank: int) -> Order:
    return tuple(range(rank))


def channels_last(rank: int) -> Order:
    return (0, *range(2, rank), 1)


@dataclass(frozen=True)
class Stored:
    """A value: the node that holds it, and which axis of the value each axis of the node is."""

    node: Node
    order: Order


_WITH_LAYOUT = ("conv", "max_pool", "avg_pool", "adaptive_max_pool", "adaptive_avg_pool")
# Operators of one operand that may give more bytes than they take.
_GROWING = ("pad", "cast", "resize", "broadcast_to")

_Handler = Callable[["_Conversion", Node], Stored]


@dataclass
class _Conversion:
    """One walk over a graph, producers first."""

    graph: Graph
    moves: bool = True  # whether operators take their operands in whatever order they come
    stored: dict[Node, Stored] = field(default_factory=dict)
    wanted: dict[tuple[Node, Order], Node] = field(default_factory=dict)

    def run(self) -> Graph:
        nodes = self.graph.nodes()
        self.uses = {node: len(users) for node, users in self.graph.users().items()}
        for node in self.graph.outputs:
            self.uses[node] += 1
        for node in nodes:
            if node.is_input or node.is_constant:
                self.keep(node, Stored(node, identity(node.type.rank)))
            else:
                self.keep(node, self.handler(node)(self, node))
        outputs = tuple(self.want(node, identity(node.type.rank)) for node in self.graph.outputs)
        return Graph(self.graph.inputs, outputs)

    def handler(self, node: Node) -> _Handler:
        found = _HANDLERS.get(node.op)
        if not self.moves and node.op not in ("permute", *_WITH_LAYOUT):
            return _as_written
        if found is not None:
            return found
        return _elementwise if op_of(node.op).fusion is Fusion.ELEMENTWISE else _as_written

    def keep(self, value: Node, stored: Stored) -> None:
        self.stored[value] = stored
        self.wanted[value, stored.order] = stored.node

    def order(self, value: Node) -> Order:
        return self.stored[value].order

    # -- what an operand costs and how it is brought into an order

    def want(self, value: Node, order: Order) -> Node:
        """The node that holds `value` with its axes in `order`."""
        found = self.wanted.get((value, order))
        if found is None:
            found = self.hoisted(value, order) or permute(self.stored[value], order, value)
            self.wanted[value, order] = found
        return found

    def hoisted(self, value: Node, order: Order) -> Node | None:
        """`value` in `order`, made once more from its operand in that order, where the operand is smaller and nobody
        else reads the value: permuting the image costs less than permuting the padded one."""
        if value.op not in _GROWING or self.uses[value] != 1 or self.cost(value, order) == 0:
            return None
        (x,) = value.inputs
        if x.type.bytes >= value.type.bytes:
            return None
        operand = self.aligned(x, order) if value.op == "broadcast_to" else self.want(x, order)
        return _in_order(value, (operand,), order)

    def cost(self, value: Node, order: Order) -> int:
        """Bytes to move until `value` is there in `order`."""
        if (value, order) in self.wanted or _folds(value):
            return 0
        held = self.stored[value]
        axes = reordered(inverse(held.order), order)
        return 0 if moves_nothing(held.node.shape, axes) else value.type.bytes

    def aligned(self, value: Node, order: Order) -> Node:
        """`value` for an elementwise operator whose result has `order`: of lower rank, its axes are the last ones."""
        missing = len(order) - value.type.rank
        if is_identity(order):
            return self.want(value, identity(value.type.rank))
        if missing == 0:
            node = self.want(value, order)
        else:
            own = tuple(axis - missing for axis in order if axis >= missing)
            stored = self.want(value, own)
            extents = dict(zip(own, stored.shape, strict=True))
            shape = tuple(extents.get(axis - missing, 1) for axis in order)
            node = reshape_to(stored, shape)
        # Parameters of one value per channel come out as [C], the form that reads best and that all share.
        return reshape_to(node, trimmed(node.shape)) if _folds(node) else node

    def aligned_cost(self, value: Node, order: Order) -> int:
        missing = len(order) - value.type.rank
        return self.cost(value, tuple(axis - missing for axis in order if axis >= missing))

    def best_order(self, operands: tuple[Node, ...], rank: int) -> Order:
        """The order in which an operator should have its operands: that of fewest bytes; among equals channels-last,
        since whatever is channels-last comes from a convolution and mostly goes to one, then as written."""
        orders = {self.order(operand): None for operand in operands if operand.type.rank == rank}
        candidates = [*orders] or [identity(rank)]

        def preference(order: Order) -> tuple[int, int, Order]:
            cost = sum(self.aligned_cost(operand, order) for operand in operands)
            liking = 0 if rank > 2 and order == channels_last(rank) else 1 if is_identity(order) else 2
            return cost, liking, order

        return min(candidates, key=preference)


def permute(held: Stored, order: Order, value: Node) -> Node:
    axes = reordered(inverse(held.order), order)
    shape = reordered(held.node.shape, axes)
    if moves_nothing(held.node.shape, axes):
        return reshape_to(held.node, shape)
    return apply("permute", held.node, axes=axes, name=value.name, source=value.source)


def _apply(value: Node, *operands: Node, **changed: object) -> Node:
    attrs = {**value.attrs, **changed}
    return apply(value.op, *operands, name=value.name, source=value.source, **attrs)


# -- operators that work in any order -----------------------------------------------------------------------------


def _as_written(walk: _Conversion, value: Node) -> Stored:
    operands = tuple(walk.want(operand, identity(operand.type.rank)) for operand in value.inputs)
    same = all(a is b for a, b in zip(operands, value.inputs, strict=True))
    return Stored(value if same else _apply(value, *operands), identity(value.type.rank))


def _elementwise(walk: _Conversion, value: Node) -> Stored:
    rank = value.type.rank
    order = walk.best_order(value.inputs, rank)
    operands = tuple(walk.aligned(operand, order) for operand in value.inputs)
    if all(a is b for a, b in zip(operands, value.inputs, strict=True)):
        return Stored(value, order)
    result = _apply(value, *operands)
    expected = reordered(value.shape, order)
    if result.shape != expected:  # leading ones were trimmed from all operands
        result = reshape_to(result, expected)
    return Stored(result, order)


def _in_order(value: Node, operands: tuple[Node, ...], order: Order) -> Node:
    """`value` with its result in `order`, of operands in that order."""
    shape = reordered(value.shape, order)
    if value.op in ("pad", "slice"):
        names = ("low", "high", "interior") if value.op == "pad" else ("starts", "stops", "steps")
        return _apply(value, *operands, **{name: reordered(value.attrs[name], order) for name in names})
    if value.op in ("concat", "softmax", "log_softmax", "cumsum"):
        return _apply(value, *operands, axis=order.index(value.attrs["axis"]))
    if value.op == "flip":
        return _apply(value, *operands, axes=tuple(sorted(order.index(axis) for axis in value.attrs["axes"])))
    if value.op == "broadcast_to":
        return _apply(value, *operands, shape=shape)
    if value.op == "resize":
        # It resamples the last axes, and does not touch one that keeps its extent: so it works in any order.
        changed = [d for d, extent in enumerate(shape) if operands[0].shape[d] != extent]
        return _apply(value, *operands, sizes=shape[min(changed, default=len(shape) - 1) :])
    return _apply(value, *operands)


def _same_rank(walk: _Conversion, value: Node) -> Stored:
    order = walk.best_order(value.inputs, value.type.rank)
    operands = tuple(walk.want(operand, order) for operand in value.inputs)
    if is_identity(order) and all(a is b for a, b in zip(operands, value.inputs, strict=True)):
        return Stored(value, order)
    return Stored(_in_order(value, operands, order), order)


def _along_axis(walk: _Conversion, value: Node) -> Stored:
    """softmax and the like. If the user put the axis last, it should stay last: rows that lie together are faster to
    read than to permute and read."""
    rank, axis = value.type.rank, value.attrs["axis"]
    order = walk.order(value.inputs[0])
    if axis == rank - 1 and order.index(axis) != rank - 1:
        return _as_written(walk, value)
    return _same_rank(walk, value)


def _broadcast_to(walk: _Conversion, value: Node) -> Stored:
    (x,) = value.inputs
    missing = value.type.rank - x.type.rank
    order = (*range(missing), *(axis + missing for axis in walk.order(x)))
    return Stored(_in_order(value, (walk.aligned(x, order),), order), order)


def _reduce(walk: _Conversion, value: Node) -> Stored:
    (x,) = value.inputs
    single = "axis" in value.attrs  # argmax, argmin
    axes = (value.attrs["axis"],) if single else value.attrs["axes"]
    order = walk.order(x)
    mapped = tuple(sorted(order.index(axis) for axis in axes))
    result = _apply(value, walk.want(x, order), **({"axis": mapped[0]} if single else {"axes": mapped}))
    if value.attrs["keepdims"]:
        return Stored(result, order)
    left = [axis for axis in order if axis not in axes]
    ranks = {axis: position for position, axis in enumerate(sorted(left))}
    return Stored(result, tuple(ranks[axis] for axis in left))


def _trailing_norm(walk: _Conversion, value: Node) -> Stored:
    """layer_norm and rms_norm: any order that leaves the last axes in place."""
    x, *parameters = value.inputs
    rank, dims = x.type.rank, value.attrs["dims"]
    order = walk.order(x)
    if order[rank - dims :] != tuple(range(rank - dims, rank)):
        return _as_written(walk, value)
    rest = (walk.want(parameter, identity(parameter.type.rank)) for parameter in parameters)
    return Stored(_apply(value, walk.want(x, order), *rest), order)


# -- movement of the order itself ---------------------------------------------------------------------------------


def _permute(walk: _Conversion, value: Node) -> Stored:
    held = walk.stored[value.inputs[0]]
    place = inverse(value.attrs["axes"])
    return Stored(held.node, tuple(place[axis] for axis in held.order))


def _reshape(walk: _Conversion, value: Node) -> Stored:
    (x,) = value.inputs
    moved = None if is_identity(walk.order(x)) else reshape_stored(x.shape, value.shape, walk.order(x))
    if moved is None:
        return _as_written(walk, value)
    shape, order = moved
    return Stored(_apply(value, walk.stored[x].node, shape=shape), order)


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


# -- operators with a layout --------------------------------------------------------------------------------------


def _conv(walk: _Conversion, value: Node) -> Stored:
    if value.attrs["layout"] == "channels_last":
        return _as_written(walk, value)
    x, weight, *bias = value.inputs
    rank = x.type.rank
    last = channels_last(rank)
    operands = [walk.want(x, last), walk.want(weight, (*range(2, rank), 1, 0))]  # O I spatial -> spatial I O
    operands += [walk.want(b, (0,)) for b in bias]
    return Stored(_apply(value, *operands, layout="channels_last"), last)


def _pool(walk: _Conversion, value: Node) -> Stored:
    if value.attrs["layout"] == "channels_last":
        return _as_written(walk, value)
    last = channels_last(value.type.rank)
    return Stored(_apply(value, walk.want(value.inputs[0], last), layout="channels_last"), last)


_HANDLERS: Mapping[str, _Handler] = {
    "permute": _permute,
    "reshape": _reshape,
    "broadcast_to": _broadcast_to,
    **{op: _conv if op == "conv" else _pool for op in _WITH_LAYOUT},
    "layer_norm": _trailing_norm,
    "rms_norm": _trailing_norm,
    **dict.fromkeys(("pad", "slice", "flip", "concat", "resize"), _same_rank),
    **dict.fromkeys(("softmax", "log_softmax", "cumsum"), _along_axis),
    **dict.fromkeys(
        ("sum", "mean", "amax", "amin", "prod", "any", "all", "var", "argmax", "argmin"), _reduce
    ),
}
