"""Config -> Program: a config as it was remembered, or sent to another process, made a program again."""

from __future__ import annotations

from tilewright.loops.ir import Program
from tilewright.space.candidates import Candidates
from tilewright.space.space import Config
from tilewright.space.template import Work
from tilewright.space.templates.cpu.default import DEFAULT


def program_for(work: Work, config: Config | None) -> Program:
    """The verified program of a config; None: the default one. InternalError where there is no such program."""
    return Candidates.of(work).program(config or DEFAULT)


def is_legal(work: Work, config: Config | None) -> bool:
    """Whether the config is one of its template's for this work. It may come from another version's memory."""
    return Candidates.of(work).is_legal(config or DEFAULT)
