"""Derive the sketches of a task: visit stages and inputs from the output backwards, and apply the rules in order."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import replace

from tilewright import te
from tilewright.errors import SketchError, TilewrightWarning
from tilewright.graph.lower import lower_graph
from tilewright.loops.schedule import Schedule
from tilewright.space.guard import GuardedApplied, left_out
from tilewright.space.sketches.applied import applied_sketch
from tilewright.space.sketches.rules import is_built_in, rules_for
from tilewright.space.sketches.sketch import Rule, Sketch
from tilewright.space.template import Applied, Work

PREFIX = "sketch:"
MAX = 16  # maximum sketches of a task: rules that branch could make many


def derive(work: Work) -> tuple[Applied, ...]:
    """The sketches of a task; none if no rule handles some stage. The same task always gives the same sketches with
    the same names. A faulty rule of a user's costs its own sketches."""
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
    named = zip(_names(finished), finished, strict=True)
    return tuple(applied for name, sketch in named if (applied := _presented(name, sketch)) is not None)


def _presented(name: str, sketch: Sketch) -> Applied | None:
    applied = applied_sketch(name, sketch)
    if not sketch.users:
        return applied
    guarded = GuardedApplied(applied, name, sketch.work)
    try:
        guarded.space  # noqa: B018
    except Exception as error:
        left_out(name, f"give a space for {sketch.work.task.label}", error)
        return None
    return guarded


def _next(sketch: Sketch) -> list[Sketch]:
    found: list[Sketch] = []
    for rule in rules_for(sketch.work.machine.kind):
        try:
            made = _applied(rule, sketch)
        except SketchError as error:
            if is_built_in(rule) and not sketch.users:
                raise
            warnings.warn(f"{error.message}; it is left out there", TilewrightWarning, stacklevel=2)
            continue
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
    users = sketch.users or not is_built_in(rule)
    return [
        replace(
            each,
            moves=(*each.moves[:known], *(replace(move, rule=rule.name) for move in each.moves[known:])),
            users=users,
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
