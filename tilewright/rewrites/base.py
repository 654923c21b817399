"""What a pass is, and the runner that verifies and traces each one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from tilewright.graph.ir import Graph
from tilewright.graph.verify import verify
from tilewright.support.trace import Event, Trace

Observer = Callable[[str, Graph], None]  # is told the name of each pass and the graph that it gave


@dataclass(frozen=True)
class Pass:
    """A graph in, an equivalent graph out. Options are fields; `name` is what traces and errors call it."""

    name: ClassVar[str] = ""
    # The stage of graph/verify.py that a graph has reached once this pass has run; None: the same as before.
    reaches: ClassVar[str | None] = None

    def run(self, graph: Graph) -> Graph:
        raise NotImplementedError

    def traced(self, graph: Graph, span: Event) -> Graph:
        """The same, with notes of what was done: of a pass that has rules, how often each was taken."""
        return self.run(graph)


def run_passes(
    graph: Graph,
    passes: Sequence[Pass],
    trace: Trace,
    *,
    stage: str = "imported",
    observe: Observer | None = None,
) -> Graph:
    """Runs the passes in order and verifies what each one gives. Passes do not change inputs or the number, types or
    order of outputs; that too is checked. The span of each says whether it has `changed` the graph."""
    types = [node.type for node in graph.outputs]
    inputs = graph.inputs
    verify(graph, stage, after="import")
    count = len(graph.nodes())
    for each in passes:
        with trace.span(f"rewrites.{each.name}", before=count) as span:
            before = graph
            graph = each.traced(graph, span)
            stage = each.reaches or stage
            changed = any(a is not b for a, b in zip(graph.outputs, before.outputs, strict=True))
            if changed or each.reaches is not None:
                verify(graph, stage, after=each.name)
                assert graph.inputs == inputs, f"{each.name} changed the inputs"
                assert [node.type for node in graph.outputs] == types, (
                    f"{each.name} changed the outputs' types"
                )
                count = len(graph.nodes())
            span.note(after=count, changed=changed)
        if observe is not None:
            observe(each.name, graph)
    return graph
