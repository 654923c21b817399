"""The config of a task without any measurement: the least predicted time over all templates that apply.

Sketches take no part, nor does the default program where there is a template. Of ten tasks the model would have taken a
sketch of three (a depthwise convolution, a layer norm, a sum over rows) and been wrong each time, by 7 to 20%; nowhere
was one faster than what is chosen here. What they are good for, measuring finds.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from tilewright.cost import cpu
from tilewright.cost.program import terms_of
from tilewright.errors import SpaceError
from tilewright.loops.default import default_program
from tilewright.loops.ir import Program
from tilewright.loops.verify import verify_program
from tilewright.runtime.plan import PREDICTED, Origin
from tilewright.space.space import Config
from tilewright.space.template import Applied, Work
from tilewright.space.templates.cpu import TEMPLATES
from tilewright.space.templates.cpu.default import DEFAULT


@dataclass(frozen=True)
class Choice:
    program: Program
    config: Config
    predicted: float | None  # seconds
    origin: Origin = PREDICTED  # where it came from


def choose(work: Work) -> Choice:
    """The program that the analytical model expects to be fastest."""
    best = best_of(work)
    if best is None:
        if work.formula is None:
            raise SpaceError(f"no template computes {work.task.label}, and it has no default program")
        program, config, predicted = default_program(work.formula, work.machine), DEFAULT, None
        origin = Origin("default")
    else:
        predicted, config, applied = best
        program = applied.program(config)
        origin = PREDICTED
    verify_program(program)
    return Choice(program, config, predicted, origin)


def best_of(work: Work) -> tuple[float, Config, Applied] | None:
    """(predicted seconds, config, template): the least over all templates; None where none applies."""
    best: tuple[float, Config, Applied] | None = None
    for template in TEMPLATES:
        applied = template.apply(work)
        if applied is None:
            continue
        found = descend(applied, work)
        if found is not None and (best is None or found[0] < best[0]):
            best = (*found, applied)
    return best


def descend(applied: Applied, work: Work) -> tuple[float, Config] | None:
    """(predicted seconds, config): from the first legal config on, each group of knobs in turn set to its best until
    none moves."""
    space = applied.space
    start = next(iter(space.configs()), None)
    if start is None:
        return None
    best = (_predicted(applied, start, work), start)
    groups = space.groups()
    settled = 0  # groups that nothing has moved since they were last set
    for group in itertools.cycle(groups):
        if settled == len(groups):
            break
        settled += 1
        names = [knob.name for knob in group]
        base = dict(best[1].values)
        for combination in itertools.product(*(knob.choices for knob in group)):
            values = {**base, **dict(zip(names, combination, strict=True))}
            if not space.legal(values):
                continue
            config = Config.of(space.template, values)
            seconds = _predicted(applied, config, work)
            if seconds < best[0]:
                best, settled = (seconds, config), 1
    return best


def _predicted(applied: Applied, config: Config, work: Work) -> float:
    terms = applied.terms(config) or terms_of(applied.program(config), work.machine)
    return cpu.seconds(terms, work.machine)
