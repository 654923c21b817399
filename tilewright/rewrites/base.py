"""What a pass is, and the runner that verifies and traces each one.

A pass that only makes a model faster must never be the reason that it cannot be compiled: where one raises, or gives a
graph that is not legal, the graph of before goes on and a warning names the pass. A pass that a later stage cannot do
without (`Pass.reaches`) still fails the compilation, and with the option `strict_passes` every pass does.
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

Observer = Callable[[str, Graph], None]  # is told the name of each pass and the graph that it gave


@dataclass(frozen=True)
class Pass:
    """A graph in, an equivalent graph out. Options are fields; `name` is what traces and errors call it."""

    name: ClassVar[str] = ""
    # The stage of graph/verify.py that a graph has reached once this pass has run; None: the same as before. A pass
    # that reaches a stage is required, all others are optional.
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
    """Whether `error` is a bug of an optional pass, and not something that the user has to hear."""
    users = isinstance(error, TilewrightError) and not isinstance(error, InternalError)
    return not users and not knobs.get("strict_passes")


def _report(skipped: Pass, error: Exception, trace: Trace, *, warn: bool) -> None:
    """One event for each failure, and one warning for each pass: some run several times."""
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
