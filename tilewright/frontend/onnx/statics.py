"""Values that must be known at import: shapes, axes, loop bounds.

The oracle evaluates the part of the graph that computes them. If it needs an input of the model, that input is pinned
to its example value if the caller allows it (`examples`), and recorded in `pinned`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tilewright.frontend.onnx.registry import NotStatic
from tilewright.graph.ir import Node
from tilewright.graph.oracle import evaluate_node, evaluation_cost
from tilewright.support.budget import Budget


class Statics:
    """Evaluates nodes whose value does not depend on a call, with a cache."""

    def __init__(self, budget: Budget, examples: Mapping[Node, np.ndarray] | None = None) -> None:
        self.budget = budget
        self.examples = dict(examples or {})
        self.pinned: set[Node] = set()
        self._known: dict[Node, np.ndarray] = {}
        self._static: dict[Node, bool] = {}  # whether a value depends on no input

    def inputs_of(self, node: Node) -> set[Node]:
        """The model's inputs that `node` depends on."""
        if self.is_static(node):
            return set()
        found: set[Node] = set()
        seen, waiting = {node}, [node]
        while waiting:
            current = waiting.pop()
            if current.is_input:
                found.add(current)
            fresh = {operand for operand in current.inputs if not self._static[operand]} - seen
            seen |= fresh
            waiting += fresh
        self.budget.work(len(seen), "finding the inputs that decide a shape")
        return found

    def is_static(self, node: Node) -> bool:
        for current in self._unvisited(node, self._static):
            self._static[current] = not current.is_input and all(self._static[o] for o in current.inputs)
        return self._static[node]

    def can_know(self, node: Node) -> bool:
        """Whether `value` can succeed: every input that it depends on may be pinned."""
        return all(entry in self.examples for entry in self.inputs_of(node))

    def value(self, node: Node, *, pin: bool = True) -> np.ndarray:
        """The value of `node`; NotStatic if it depends on inputs, unless those may be pinned."""
        needed = self.inputs_of(node)
        missing = [entry for entry in needed if not pin or entry not in self.examples]
        if missing:
            names = ", ".join(sorted(repr(entry.name) for entry in missing))
            raise NotStatic(f"it needs a value when the model is compiled that depends on the input {names}")
        for current in self._unvisited(node, self._known):
            self._known[current] = self._evaluated(current)
        self.pinned |= needed
        return self._known[node]

    def _evaluated(self, node: Node) -> np.ndarray:
        if node.is_input:
            return self.examples[node]
        if node.data is not None:
            return node.data
        what = f"{node.source or node.op}: a value that decides shapes, of type {node.type!r},"
        operations, peak = evaluation_cost(node)
        self.budget.fits(peak, what)
        self.budget.work(operations, what)
        self.budget.hold(node.type.bytes, what)
        return evaluate_node(node, [self._known[operand] for operand in node.inputs], precise=False)

    def _unvisited(self, root: Node, done: Mapping[Node, object]) -> list[Node]:
        """The nodes below `root` that are not done, producers first."""
        order: list[Node] = []
        seen: set[Node] = set()
        stack: list[tuple[Node, bool]] = [(root, False)]
        while stack:
            node, ready = stack.pop()
            if ready:
                order.append(node)
            elif node not in seen and node not in done:
                seen.add(node)
                stack.append((node, True))
                stack.extend((operand, False) for operand in node.inputs)
        return order
