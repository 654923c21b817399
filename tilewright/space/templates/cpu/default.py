"""The default program as a template: one config, no knobs. It computes any task that has a formula."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.loops.default import default_program
from tilewright.loops.formula import Formula
from tilewright.loops.ir import Program
from tilewright.space.space import Config, Space
from tilewright.space.template import Applied, CpuWork, Terms
from tilewright.space.templates.default import NAME


class Default:
    name = NAME

    def apply(self, work: CpuWork) -> Applied | None:
        return None if work.formula is None else AppliedDefault(work, work.formula)


@dataclass(frozen=True)
class AppliedDefault:
    work: CpuWork
    formula: Formula

    @property
    def space(self) -> Space:
        return Space(NAME, (), lambda values: True)

    def terms(self, config: Config) -> Terms | None:
        return None

    def program(self, config: Config) -> Program:
        return default_program(self.formula, self.work.machine)
