"""Derive the sketches of a task: visit stages and inputs from the output backwards, and apply the rules in order."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from tilewright import te
from tilewright.errors import SketchError
from tilewright.graph.lower import lower_graph
from tilewright.loops.schedule import Schedule
from tilewright.space.sketches.applied import AppliedSketch
from tilewright.space.sketches.rules import RULES
from tilewright.space.sketches.sketch import Rule, Sketch
from tilewright.space.template import Work

PREFIX = "sketch:"
MAX = 16  # maximum sketches of a task: rules that branch could make many


def derive(work: Work) -> tuple[AppliedSketch, ...]:
    """The sketches of a task; none if no rule handles some stage. The same task always gives the same sketches with
    the same names."""
    output, inputs = lower_graph(work.task.graph)
    if not isinstance(output, te.Compute) or 0 in output.shape:
        return ()
    start = Schedule.of(output, inputs, constants=sorted(work.task.constants))
    left = (*reversed(start.stages), *(tile.name for tile in start.nest.inputs))
    waiting = [Sketch(work, start, left)]
    finished: list[Sketch] = []
    while waiting and len(finished) < MAX:
        sketch = waiting.pop(0)
        if sketch.left:
            waiting = [*_next(sketch), *waiting]
        else:
            finished.append(sketch)
    return tuple(AppliedSketch(name, sketch) for name, sketch in zip(_names(finished), finished, strict=True))


def _next(sketch: Sketch) -> list[Sketch]:
    found: list[Sketch] = []
    for rule in RULES:
        made = _applied(rule, sketch)
        found += made
        if made and rule.alone:
            break
    return found


def _applied(rule: Rule, sketch: Sketch) -> list[Sketch]:
    """Apply one rule to a sketch, and sign its moves."""
    try:
        made = list(rule.apply(sketch))
    except Exception as error:  # a user's rule may raise anything
        raise SketchError(
            f"rule {rule.name!r} failed at {sketch.stage} of {sketch.work.task.label}: {type(error).__name__}: {error}"
        ) from error
    for each in made:
        if not isinstance(each, Sketch):
            raise SketchError(f"rule {rule.name!r} gave {each!r} for {sketch.stage}, which is not a sketch")
        if each.left == sketch.left:
            raise SketchError(
                f"rule {rule.name!r} gave a sketch in which {sketch.stage} is still to be visited"
            )
    known = len(sketch.moves)
    return [
        replace(
            each, moves=(*each.moves[:known], *(replace(move, rule=rule.name) for move in each.moves[known:]))
        )
        for each in made
    ]


def _names(sketches: list[Sketch]) -> list[str]:
    """Name sketches by the rules that shaped them; a number distinguishes those made by the same rules."""
    seen: Counter[str] = Counter()
    names = []
    for sketch in sketches:
        name = PREFIX + ("+".join(sketch.names) or "plain")
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return names
