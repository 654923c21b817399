"""Assign a layout to every operator of a graph, minimising the time of kernels and permutes together.

The graph is traversed once, producers first. After each node there is a frontier: the values that later nodes still
read. A state says in which orders each of them is stored, and only the cheapest path to each state is kept:

    cost(state after n) = min over states before n, choices of n:
        cost(state before n) + kernel of n with this choice + permutes of operands that are not stored in its orders

The first reader that needs a permute pays for it; the value is then stored in both orders for all others. A state is
also dropped if another one reaches the same orders at less cost by permutes alone.

There is always a state. If the oracle knows no kernel for an operator in any choice (an infinite time), no choice is
excluded: states are compared by the number of such operators, then by cost.

This is exact as long as no frontier has more than `BEAM` states: on chains, where it is the usual dynamic programme,
on residual blocks, and on trees of moderate width. With more states, only the cheapest are kept, which is a
heuristic; then the assignments with all layouts channels-last, and with all unchanged, are solved too, and the best
wins.

Kernel times are first estimated by a cheap upper bound. The exact time is computed only for alternatives to the
chosen layout: a lower time for the chosen one would not change the choice.

The cost model is a heuristic in any case: an operator is timed with its padding but without its epilogue, and a
permute next to elementwise work costs what it adds to that. A permute before a reduction costs the additional time of
the fused kernel, and at least its own time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tilewright.graph.ir import Graph, Node, TensorType, input_node
from tilewright.graph.op import Fusion, op_of
from tilewright.graph.ops.layouts import spatial_axes
from tilewright.rewrites.fold_permute import absorbs
from tilewright.rewrites.layout_choices import (
    WITH_LAYOUT,
    LayoutChoice,
    folds,
    gives_channels_last,
    layout_choices_of,
    permuted,
    touched,
    written,
)
from tilewright.rewrites.oracle import CostOracle
from tilewright.rewrites.orders import Order, conversions, identity, stored
from tilewright.rewrites.partition import partition
from tilewright.rewrites.shapes import moves_nothing

BEAM = 256
_COMPARED = 8  # cheaper states that a state is compared with before it is kept
_SEPARATE_BORDER = (
    2e-6  # minimum seconds for padding that no other kernel includes: padding in another order is separate
)
_WANTED = 4  # orders considered per value from its readers

# Operators whose time depends on the order, besides those that have a layout.
_IN_ANY_ORDER = frozenset(
    [
        *("concat", "resize", "softmax", "log_softmax", "cumsum", "layer_norm", "rms_norm"),
        *("sum", "mean", "amax", "amin", "prod", "any", "all", "var", "argmax", "argmin"),
    ]
)


@dataclass(frozen=True)
class Assignment:
    choices: Mapping[Node, LayoutChoice]
    rivals: Sequence[tuple[Node, LayoutChoice]]  # the alternatives
    total: float
    exact: bool
    unknown: int = 0  # operators without a known kernel; their times are not in `total`


def assign(graph: Graph, oracle: CostOracle) -> tuple[Assignment, Costs]:
    """The best assignment found, never worse than all layouts channels-last or all unchanged, and the costs it is
    based on."""
    costs = Costs(graph, oracle)
    best = solve(graph, costs)
    while rivals := [rival for rival in best.rivals if not costs.knows(*rival)]:
        for rival in rivals:
            costs.learn(*rival)
        best = solve(graph, costs)
    if not best.exact:
        for choice in best.choices.items():
            costs.learn(*choice)
        best = solve(graph, costs)
        last = solve(graph, costs, gives_channels_last)
        kept = solve(graph, costs, lambda node, choice: choice.layout == node.attrs["layout"])
        best = min(best, last, kept, key=lambda each: (each.unknown, each.total))
    return best, costs


# -- costs ----------------------------------------------------------------------------------------------------------


class Costs:
    """Cached times of operators for each of their choices, and of permutes."""

    def __init__(self, graph: Graph, oracle: CostOracle) -> None:
        self.oracle = oracle
        self.users = graph.users()
        self.outputs = frozenset(graph.outputs)
        self.readers = {node: len(set(users)) + (node in self.outputs) for node, users in self.users.items()}
        self._in_epilogue = _in_epilogue(graph)
        self._kernels: dict[object, tuple[float, bool]] = {}
        self._moves: dict[object, float] = {}

    def kernel(self, value: Node, choice: LayoutChoice) -> float:
        """Seconds of the operator alone, or an upper bound; 0 if they are the same in all orders."""
        return self._kernel(value, choice)[0]

    def knows(self, value: Node, choice: LayoutChoice) -> bool:
        """Whether this is the exact time of the best kernel."""
        return self._kernel(value, choice)[1]

    def learn(self, value: Node, choice: LayoutChoice) -> None:
        if not self.knows(value, choice):
            calls = partition(_alone(value, choice)).calls
            self._kernels[_kernel_key(value, choice)] = sum(self.oracle.seconds(c.task) for c in calls), True

    def _kernel(self, value: Node, choice: LayoutChoice) -> tuple[float, bool]:
        if value.op not in WITH_LAYOUT and value.op not in _IN_ANY_ORDER:
            return 0.0, True
        key = _kernel_key(value, choice)
        if key not in self._kernels:
            found = [self.oracle.upper_bound(call.task) for call in partition(_alone(value, choice)).calls]
            self._kernels[key] = sum(seconds for seconds, _ in found), all(best for _, best in found)
        return self._kernels[key]

    def permute_seconds(self, value: Node, have: Order, need: Order, reader: Node | None = None) -> float:
        """Seconds to convert `value` from one order to another for `reader`."""
        if have == need or folds(value):
            return 0.0
        *before, (shape, axes) = conversions(value.shape, have, need)
        seconds = sum(self._permute(TensorType(each, value.dtype), by, alone=True) for each, by in before)
        if moves_nothing(shape, axes):
            readers = self.users[value] if reader is None else [reader]
            return seconds + (_SEPARATE_BORDER if any(_border_of(each) is value for each in readers) else 0.0)
        if reader is not None and absorbs(reader, axes, shape, self.users, self.outputs):
            return seconds
        alone = reader is None or not self._rides_along(value, reader)
        moved = seconds + self._permute(TensorType(shape, value.dtype), axes, alone=alone)
        reduction = None if reader is None or self.readers[value] > 1 else self._reduction_of(reader, value)
        if reduction is None:
            return moved
        choices = (
            choice for choice in layout_choices_of(reduction, [[need]], ()) if choice.operands == (need,)
        )
        joined = (
            self._joined(value, have, reduction, choice) - self.kernel(reduction, choice)
            for choice in choices
        )
        return max([moved, *joined])

    def _reduction_of(self, reader: Node, value: Node) -> Node | None:
        """The reduction that fusion merges with a permute of `value`: one that reads it, directly or through
        elementwise work."""
        node = reader
        while op_of(node.op).fusion is Fusion.ELEMENTWISE and node.shape == value.shape:
            if self.readers[node] != 1 or node in self.outputs:
                return None
            (node,) = set(self.users[node])
        reduces = node.op in _IN_ANY_ORDER and op_of(node.op).fusion is Fusion.REDUCTION
        return node if reduces and len(node.inputs) == 1 and node.inputs[0].shape == value.shape else None

    def _joined(self, value: Node, have: Order, reader: Node, choice: LayoutChoice) -> float:
        """Seconds of that kernel, which reads along a non-contiguous axis; 0 if unknown."""
        key = have, _kernel_key(reader, choice)
        if key not in self._moves:
            # The type that is reduced: `value` may be the mask of a select.
            given = input_node(0, TensorType(stored(value.shape, have), reader.inputs[0].dtype))
            moved = permuted(given, have, choice.operands[0], value)
            calls = partition(Graph((given,), (written(reader, choice, (moved,)),))).calls
            found = sum(self.oracle.seconds(call.task) for call in calls)
            self._moves[key] = found if len(calls) == 1 and math.isfinite(found) else 0.0
        return self._moves[key]

    def _permute(self, type: TensorType, axes: tuple[int, ...], *, alone: bool) -> float:
        if moves_nothing(type.shape, axes):
            return 0.0
        key = (type, axes, alone)
        if key not in self._moves:
            self._moves[key] = self.oracle.permute_seconds(type, axes, alone=alone)
        return self._moves[key]

    def _rides_along(self, value: Node, reader: Node) -> bool:
        """Whether the permute is fused into a kernel that reads or writes `value` anyway."""
        return self.readers[value] == 1 and (self._loose(value) or self._loose(reader))

    def _loose(self, node: Node) -> bool:
        """Whether it is elementwise and not part of a contraction's or reduction's kernel."""
        elementwise = not node.is_input and op_of(node.op).fusion is Fusion.ELEMENTWISE
        return elementwise and node not in self._in_epilogue


def _kernel_key(value: Node, choice: LayoutChoice) -> object:
    border = _border_of(value)
    return (
        *(value.op, tuple(value.attrs.items()), choice),
        *((operand.type, folds(operand)) for operand in value.inputs),
        *((border.inputs[0].type, tuple(border.attrs.items())) if border is not None else ()),
    )


def _border_of(value: Node) -> Node | None:
    """The padding of the image that a windowed operator reads. A pad that adds channels does not count: it cannot be
    done in blocks of channels."""
    if value.op not in WITH_LAYOUT or value.inputs[0].op != "pad":
        return None
    border = value.inputs[0]
    image = spatial_axes(border.type.rank, value.attrs["layout"])
    return border if all(axis in image for axis in touched(border)) else None


def _in_epilogue(graph: Graph) -> set[Node]:
    """Contractions, reductions, and the elementwise nodes of the same shape after them."""
    found: set[Node] = set()
    for node in graph.nodes():
        if node.is_input or node.is_constant:
            continue
        kind = op_of(node.op).fusion
        after = any(operand in found and operand.shape == node.shape for operand in node.inputs)
        if kind in (Fusion.COMPLEX, Fusion.REDUCTION) or (kind is Fusion.ELEMENTWISE and after):
            found.add(node)
    return found


def _alone(value: Node, choice: LayoutChoice) -> Graph:
    """`value` with one of its choices as a separate graph, with the padding of its first operand."""
    border = _border_of(value)
    inputs: list[Node] = []

    def stand_in(operand: Node, order: Order) -> Node:
        type = TensorType(stored(operand.shape, order), operand.dtype)
        if folds(operand):
            nothing = np.broadcast_to(np.zeros((), type.dtype.numpy), type.shape)
            return Node("constant", (), type, data=nothing)
        inputs.append(input_node(len(inputs), type))
        return inputs[-1]

    operands = list(map(stand_in, value.inputs, choice.operands))
    if border is not None:
        order = choice.operands[0]
        inputs.remove(operands[0])
        inputs.insert(0, input_node(0, TensorType(stored(border.inputs[0].shape, order), border.dtype)))
        operands[0] = written(border, LayoutChoice(order, (order,)), (inputs[0],))
    return Graph(tuple(inputs), (written(value, choice, tuple(operands)),))


# -- the traversal --------------------------------------------------------------------------------------------------

Orders = tuple[Order, ...]  # in which a value is stored, sorted


@dataclass(frozen=True)
class _State:
    there: tuple[Orders, ...]  # for each value of the frontier
    cost: float
    unknown: int = 0  # operators so far whose choice has no known kernel; their time is not in `cost`
    choice: tuple[Node, LayoutChoice] | None = None
    before: _State | None = field(default=None, repr=False)

    @property
    def rank(self) -> tuple[int, float]:
        """Smaller is better."""
        return self.unknown, self.cost


def solve(
    graph: Graph, costs: Costs, allowed: Callable[[Node, LayoutChoice], bool] = lambda node, choice: True
) -> Assignment:
    """The cheapest assignment in which every operator with a layout takes one of its `allowed` choices."""
    nodes = [node for node in graph.nodes() if not folds(node)]
    last_reader = {operand: node for node in nodes for operand in node.inputs}
    candidates = _candidates(graph, nodes, costs.oracle, allowed)
    frontier: list[Node] = []
    states = [_State((), 0.0)]
    exact = True
    for node in nodes:
        if node.is_input:
            if node in last_reader:
                frontier.append(node)
                start: Orders = (identity(node.type.rank),)
                states = [replace(state, there=(*state.there, start)) for state in states]
            continue
        kept = [n for n, value in enumerate(frontier) if last_reader[value] is not node]
        stays = node in last_reader
        reached: dict[tuple[Orders, ...], _State] = {}
        for state in states:
            for choice in candidates[node]:
                there, cost = _moved(node, choice, state, frontier, costs)
                seconds = costs.kernel(node, choice)
                known = math.isfinite(seconds)
                cost, unknown = cost + (seconds if known else 0.0), state.unknown + (not known)
                own: Orders = (choice.order,)
                if node in costs.outputs:
                    plain = identity(node.type.rank)
                    cost += costs.permute_seconds(node, choice.order, plain)
                    own = _with(own, plain)
                after = (*(there[n] for n in kept), *([own] if stays else []))
                if after not in reached or (unknown, cost) < reached[after].rank:
                    reached[after] = _State(after, cost, unknown, (node, choice), state)
        frontier = [*(frontier[n] for n in kept), *([node] if stays else [])]
        states = _undominated(reached.values(), frontier, costs)
        exact = exact and len(states) <= BEAM
        states = states[:BEAM]
    best = min(states, key=lambda state: state.rank)
    choices = _choices(best)
    rivals = [(node, choice) for node in choices for choice in candidates[node] if choice != choices[node]]
    return Assignment(choices, rivals, best.cost, exact, best.unknown)


def _moved(
    node: Node, choice: LayoutChoice, state: _State, frontier: Sequence[Node], costs: Costs
) -> tuple[list[Orders], float]:
    """(stored orders, total cost) once the operands of `node` are in the orders of `choice`."""
    cost, there = state.cost, list(state.there)
    for operand, order in zip(node.inputs, choice.operands, strict=True):
        if folds(operand):
            continue
        at = frontier.index(operand)
        if order not in there[at]:
            cost += min(costs.permute_seconds(operand, have, order, node) for have in there[at])
            there[at] = _with(there[at], order)
    return there, cost


def _with(orders: Orders, order: Order) -> Orders:
    return tuple(sorted({*orders, order}, key=str))


def _undominated(states: Iterable[_State], frontier: Sequence[Node], costs: Costs) -> list[_State]:
    """The cheapest states first, without those that a cheaper state reaches by permutes at no more cost. Only states
    with the fewest operators without a kernel are kept, and at least one of them."""
    kept: list[_State] = []
    found = sorted(states, key=lambda each: each.rank)
    for state in found:
        if state.unknown > found[0].unknown:
            break
        if not any(_reaches(cheaper, state, frontier, costs) for cheaper in kept[:_COMPARED]):
            kept.append(state)
    return kept


def _reaches(cheaper: _State, state: _State, frontier: Sequence[Node], costs: Costs) -> bool:
    """Whether `cheaper` reaches the orders of `state` by permutes at no more cost. No permute is timed once those
    before it cost too much: most states differ by less than one permute."""
    left = state.cost - cheaper.cost
    for value, here, there in zip(frontier, cheaper.there, state.there, strict=True):
        for order in there:
            if order in here:
                continue
            left -= min(costs.permute_seconds(value, have, order) for have in here)
            if left < 0:
                return False
    return left >= 0


def _choices(state: _State) -> dict[Node, LayoutChoice]:
    found: dict[Node, LayoutChoice] = {}
    while state.before is not None:
        assert state.choice is not None
        found[state.choice[0]] = state.choice[1]
        state = state.before
    return found


def _candidates(
    graph: Graph, nodes: Sequence[Node], oracle: CostOracle, allowed: Callable[[Node, LayoutChoice], bool]
) -> Mapping[Node, Sequence[LayoutChoice]]:
    """The choices worth trying: with operands in the orders they may have, or the result in the orders that readers
    may want."""
    outputs = frozenset(graph.outputs)
    wanted: dict[Node, dict[Order, None]] = {node: {} for node in nodes}

    def choices(node: Node, offered: Sequence[Collection[Order]]) -> list[LayoutChoice]:
        found = layout_choices_of(
            node, offered, wanted[node], lambda channels: oracle.block(channels, node.dtype)
        )
        return [choice for choice in found if choice.layout is None or allowed(node, choice)] or found

    for node in reversed(nodes):
        if node in outputs:
            wanted[node][identity(node.type.rank)] = None
        if node.is_input:
            continue
        for choice in choices(node, [()] * len(node.inputs)):
            for operand, order in zip(node.inputs, choice.operands, strict=True):
                if operand in wanted and len(wanted[operand]) < _WANTED:
                    wanted[operand][order] = None

    offered: dict[Node, Collection[Order]] = {}
    result: dict[Node, Sequence[LayoutChoice]] = {}
    for node in nodes:
        if node.is_input:
            offered[node] = (identity(node.type.rank),)
            continue
        result[node] = choices(node, [offered.get(operand, ()) for operand in node.inputs])
        offered[node] = tuple(dict.fromkeys(choice.order for choice in result[node]))
    return result
