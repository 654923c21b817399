"""Config -> Program: a config as it was remembered, or sent to another process, made a program again."""

from __future__ import annotations

from tilewright.errors import InternalError
from tilewright.loops.default import default_program
from tilewright.loops.ir import Program
from tilewright.loops.verify import verify_program
from tilewright.space.space import Config
from tilewright.space.template import Applied, Work
from tilewright.space.templates.cpu import TEMPLATES


def program_for(work: Work, config: Config | None) -> Program:
    """The verified program of a config; None: the default one. InternalError where there is no such program."""
    if config is None:
        if work.formula is None:
            raise InternalError(f"{work.task.label} has no default program")
        program = default_program(work.formula, work.machine)
    else:
        program = _applied(work, config).program(config)
    verify_program(program)
    return program


def is_legal(work: Work, config: Config | None) -> bool:
    """Whether the config is one of its template's for this work. It may come from another version's memory."""
    if config is None:
        return work.formula is not None
    try:
        space = _applied(work, config).space
    except InternalError:
        return False
    choices = {knob.name: knob.choices for knob in space.knobs}
    values = dict(config.values)
    return (
        choices.keys() == values.keys()
        and all(values[name] in choices[name] for name in choices)
        and space.legal(values)
    )


def _applied(work: Work, config: Config) -> Applied:
    for template in TEMPLATES:
        if template.name == config.template and (applied := template.apply(work)) is not None:
            return applied
    raise InternalError(f"no template called {config.template!r} computes {work.task.label}")
