"""Helpers for the rules of `simplify`: a builder of simplified nodes, and predicates on values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tilewright.graph.ir import Node
from tilewright.graph.op import Fusion, apply, op_of

Rule = Callable[[Node, "Simplifier"], "Node | None"]

_STEPS = 50  # more rewrites of one node than this mean that two rules undo each other


class Simplifier:
    """Makes nodes and simplifies them. `uses` counts the readers of a node, for rules that must not duplicate work; a
    new node has one reader."""

    def __init__(self, rules: Mapping[str, Sequence[Rule]], elementwise: Sequence[Rule], fast: bool) -> None:
        self._rules = rules
        self._elementwise = elementwise
        self.fast = fast
        self.uses: dict[Node, int] = {}
        self.taken: Counter[str] = Counter()  # how often each rule was applied, by name

    def __call__(self, op: str, *operands: Node, **attrs: Any) -> Node:
        return self.simplify(apply(op, *operands, **attrs))

    def simplify(self, node: Node) -> Node:
        for _ in range(_STEPS):
            better = self._step(node)
            if better is None:
                return node
            node = better
        return node

    def _step(self, node: Node) -> Node | None:
        if node.is_input or node.is_constant:
            return None
        for rule in self._rules.get(node.op, ()):
            better = rule(node, self)
            if better is not None:
                return self._took(rule, node, better)
        record = op_of(node.op)
        # An operator without a lowering (batch_norm) does not count as elementwise for the rules: it does not
        # broadcast.
        if record.fusion is Fusion.ELEMENTWISE and record.lower is not None:
            for rule in self._elementwise:
                better = rule(node, self)
                if better is not None:
                    return self._took(rule, node, better)
        return None

    def _took(self, rule: Rule, node: Node, better: Node) -> Node:
        assert better.type == node.type, f"{rule.__name__}: {node!r} became {better!r}"
        self.taken[rule.__name__] += 1
        return better

    def single_use(self, node: Node) -> bool:
        return self.uses.get(node, 1) == 1


# -- predicates ---------------------------------------------------------------------------------------------------


def scalar_array(node: Node) -> np.ndarray | None:
    """The value that all elements of `node` have, as an array of rank 0; None if unknown."""
    while node.op in ("broadcast_to", "reshape", "permute", "slice"):
        node = node.inputs[0]
    if node.is_constant and node.data is not None:
        return node.data.reshape(()) if node.type.size == 1 else None
    return np.array(node.attrs["value"], node.dtype.numpy) if node.op == "full" else None


def scalar_value(node: Node) -> int | float | bool | None:
    """The same as a Python number."""
    array = scalar_array(node)
    if array is None:
        return None
    if node.dtype.is_float:
        return float(array)
    return bool(array) if array.dtype == np.bool_ else int(array)


def is_scalar(node: Node, value: float) -> bool:
    found = scalar_value(node)
    return found is not None and not isinstance(found, bool) and found == value
