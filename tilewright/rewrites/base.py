"""The Pass protocol, and the runner that verifies and traces each pass.

A pass that only makes a model faster must never prevent its compilation. If one raises an error or returns an illegal
graph, the previous graph is used and a warning names the pass. A pass that a later stage requires (`Pass.reaches`)
still fails the compilation; with the option `strict_passes` every pass does.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from tilewright import knobs
from tilewright.errors import InternalError, TilewrightError, TilewrightWarning
from tilewright.graph.ir import Graph
from tilewright.graph.verify import verify
from tilewright.support.trace import Event, Trace

Observer = Callable[[str, Graph], None]  # receives the name of each pass and its resulting graph


@dataclass(frozen=True)
class Pass:
    """A graph in, an equivalent graph out. Options are fields; traces and errors use `name`."""

    name: ClassVar[str] = ""
    # The stage of graph/verify.py that a graph has reached after this pass; None: unchanged. A pass that reaches a
    # stage is required, all others are optional.
    reaches: ClassVar[str | None] = None

    def run(self, graph: Graph) -> Graph:
        raise NotImplementedError

    def traced(self, graph: Graph, span: Event) -> Graph:
        """Run the pass and add notes to the trace; a pass with rules notes how often each was applied."""
        return self.run(graph)


def run_passes(
    graph: Graph,
    passes: Sequence[Pass],
    trace: Trace,
    *,
    stage: str = "imported",
    observe: Observer | None = None,
) -> Graph:
    """Run the passes in order and verify each result. Passes must not change inputs, nor the number, types or order
    of outputs; that is checked too. The span of each pass says whether it `changed` the graph."""
    verify(graph, stage, after="import")
    count = len(graph.nodes())
    failed: set[str] = set()
    for each in passes:
        try:
            with trace.span(f"rewrites.{each.name}", before=count) as span:
                result = each.traced(graph, span)
                stage = each.reaches or stage
                changed = any(a is not b for a, b in zip(result.outputs, graph.outputs, strict=True))
                if changed or each.reaches is not None:
                    _check(result, graph, stage, each.name)
                    count = len(result.nodes())
                graph = result
                span.note(after=count, changed=changed)
        except Exception as error:
            if each.reaches is not None or not _may_be_skipped(error):
                raise
            _report(each, error, trace, warn=each.name not in failed)
            failed.add(each.name)
        if observe is not None:
            observe(each.name, graph)
    return graph


def _check(result: Graph, before: Graph, stage: str, name: str) -> None:
    verify(result, stage, after=name)
    if result.inputs != before.inputs:
        raise InternalError(f"the pass {name} changed the inputs of the graph")
    if [node.type for node in result.outputs] != [node.type for node in before.outputs]:
        raise InternalError(f"the pass {name} changed the types of the outputs")


def _may_be_skipped(error: Exception) -> bool:
    """Whether `error` is a bug of an optional pass, not something that the user must know."""
    users = isinstance(error, TilewrightError) and not isinstance(error, InternalError)
    return not users and not knobs.get("strict_passes")


def _report(skipped: Pass, error: Exception, trace: Trace, *, warn: bool) -> None:
    """Record one event for each failure, and one warning for each pass, because some run several times."""
    what = f"{type(error).__name__}: {error}".splitlines()[0]
    trace.mark(f"rewrites.{skipped.name}.skipped", error=what)
    if not warn:
        return
    warnings.warn(
        f"the optimising pass {skipped.name!r} failed and was skipped; the compiled model is right, but may be slower"
        f" ({what}). This is a bug in Tilewright; please report it with the model",
        TilewrightWarning,
        stacklevel=2,
    )
