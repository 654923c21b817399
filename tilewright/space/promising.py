"""Of the configs for a piece of work those that no other does better by construction.

What a template can rule out without a time is left out; the spaces of the others are whole. Searches take the whole
spaces, which they look at here and there: this is for measuring everything."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.space.candidates import Candidates
from tilewright.space.implementation import Implementation, Kernel
from tilewright.space.space import Config, Space
from tilewright.space.template import Applied
from tilewright.space.templates.cpu.contraction import AppliedContraction
from tilewright.space.templates.cpu.paired import AppliedPaired
from tilewright.space.templates.cpu.promising import (
    PromisingContraction,
    PromisingPaired,
    PromisingStrassen,
    PromisingWinograd,
)
from tilewright.space.templates.cpu.strassen import AppliedStrassen
from tilewright.space.templates.cpu.winograd import AppliedWinograd
from tilewright.space.terms import Counted


@dataclass(frozen=True)
class Narrowed:
    """A template applied to a task, with a part of its space."""

    whole: Applied
    space: Space

    def terms(self, config: Config) -> Counted | None:
        return self.whole.terms(config)

    def program(self, config: Config) -> Kernel | Implementation:
        return self.whole.program(config)


def promising(candidates: Candidates) -> Candidates:
    return Candidates(candidates.work, only=tuple(map(_narrowed, candidates.applied)))


def _narrowed(applied: Applied) -> Applied:
    if isinstance(applied, AppliedContraction):
        return Narrowed(applied, PromisingContraction(applied).space)
    if isinstance(applied, AppliedWinograd):
        return Narrowed(applied, PromisingWinograd(applied).space)
    if isinstance(applied, AppliedStrassen):
        return Narrowed(applied, PromisingStrassen(applied).space)
    if isinstance(applied, AppliedPaired):
        return Narrowed(applied, PromisingPaired(applied).space)
    return applied
