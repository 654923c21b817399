"""simplify: cancel algebra and movement with small rules until none applies.

The rules are plain functions in `simplify_elementwise.py` and `simplify_movement.py`, listed per operator: a rule
takes a node whose operands are already simplified and returns a better node, or None. Every rule preserves the value
(NaN and infinities included; the sign of a zero may change), except those marked as fast, which may round
differently.

There is no rule for x * 0: it is NaN where x is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tilewright.graph.ir import Graph, Node, rebuild
from tilewright.rewrites import simplify_elementwise, simplify_movement
from tilewright.rewrites.base import Pass
from tilewright.rewrites.simplify_rules import Rule, Simplifier
from tilewright.support.trace import Event, Trace

_ROUNDS = 20


def _rules() -> Mapping[str, Sequence[Rule]]:
    """The rules by operator, in the order in which they are tried."""
    return {**simplify_elementwise.RULES, **simplify_movement.RULES}


def rule_names() -> list[str]:
    """The names of all rules, as the trace counts them."""
    listed = (*_rules().values(), simplify_elementwise.ANY_ELEMENTWISE)
    return sorted({rule.__name__ for rules in listed for rule in rules})


@dataclass(frozen=True)
class Simplify(Pass):
    name = "simplify"

    fast: bool = True  # also use rules that may round differently: division by a constant as a multiplication

    def run(self, graph: Graph) -> Graph:
        with Trace.off().span(self.name) as span:
            return self.traced(graph, span)

    def traced(self, graph: Graph, span: Event) -> Graph:
        rules = _rules()
        taken: Counter[str] = Counter()
        span.note(rules=taken)
        for _ in range(_ROUNDS):
            new = self._round(graph, rules, taken)
            if all(a is b for a, b in zip(new.outputs, graph.outputs, strict=True)):
                break
            graph = new
        return graph

    def _round(self, graph: Graph, rules: Mapping[str, Sequence[Rule]], taken: Counter[str]) -> Graph:
        before = {node: len(users) for node, users in graph.users().items()}
        for node in graph.outputs:
            before[node] += 1
        build = Simplifier(rules, simplify_elementwise.ANY_ELEMENTWISE, self.fast)

        def rule(node: Node, operands: tuple[Node, ...]) -> Node | None:
            if node.is_constant:
                build.uses[node] = before[node]
                return None
            same = all(a is b for a, b in zip(operands, node.inputs, strict=True))
            start = node if same else replace(node, inputs=operands)
            result = build.simplify(start)
            if result is not start and not result.name and not result.is_input:
                result = replace(result, name=node.name, source=node.source)
            # A node that was already in the graph gains the uses of the one it replaces.
            build.uses[result] = build.uses.get(result, 0) + before[node]
            return result

        for node in graph.inputs:
            build.uses[node] = before[node]
        result = rebuild(graph, rule)
        taken.update(build.taken)
        return result
