"""The config of a task without any measurement: the least predicted time over all templates that apply."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from tilewright.cost import cpu
from tilewright.loops.default import default_program
from tilewright.loops.ir import Program
from tilewright.loops.verify import verify_program
from tilewright.space.space import Config
from tilewright.space.template import Applied, Work
from tilewright.space.templates.cpu import TEMPLATES


@dataclass(frozen=True)
class Choice:
    program: Program
    config: Config | None  # None: the default program
    predicted: float | None  # seconds


def choose(work: Work) -> Choice:
    """The program that the analytical model expects to be fastest."""
    best: tuple[float, Config, Applied] | None = None
    for template in TEMPLATES:
        applied = template.apply(work)
        if applied is None:
            continue
        found = descend(applied, work)
        if found is not None and (best is None or found[0] < best[0]):
            best = (*found, applied)
    if best is None:
        assert work.formula is not None, f"no template computes {work.task.label}"
        program, config, predicted = default_program(work.formula, work.machine), None, None
    else:
        predicted, config, applied = best
        program = applied.program(config)
    verify_program(program)
    return Choice(program, config, predicted)


def descend(applied: Applied, work: Work) -> tuple[float, Config] | None:
    """(predicted seconds, config): from the first legal config on, each group of knobs in turn set to its best until
    none moves."""
    space = applied.space
    start = next(iter(space.configs()), None)
    if start is None:
        return None
    best = (_predicted(applied, start, work), start)
    moved = True
    while moved:
        moved = False
        for group in space.groups():
            names = [knob.name for knob in group]
            base = dict(best[1].values)
            for combination in itertools.product(*(knob.choices for knob in group)):
                values = {**base, **dict(zip(names, combination, strict=True))}
                if not space.legal(values):
                    continue
                config = Config.of(space.template, values)
                seconds = _predicted(applied, config, work)
                if seconds < best[0]:
                    best, moved = (seconds, config), True
    return best


def _predicted(applied: Applied, config: Config, work: Work) -> float:
    return cpu.seconds(applied.terms(config), work.machine)
