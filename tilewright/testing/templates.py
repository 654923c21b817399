"""The conformance suites of templates and sketch rules: configs are legal, and each computes the task.

Each program runs as machine code on the validation inputs, and every element is compared with its bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random

import numpy as np

from tilewright.cost.predictor import calibrated, counted
from tilewright.graph.task import Task
from tilewright.hw import CpuMachine, host
from tilewright.measure.kernels import packed
from tilewright.measure.single import SingleKernel
from tilewright.measure.validation import CheckCase, make_validation
from tilewright.space.candidates import Candidates
from tilewright.space.guard import GuardedApplied
from tilewright.space.implementation import Implementation
from tilewright.space.sketches import register, unregister
from tilewright.space.sketches.sketch import Rule
from tilewright.space.space import Config
from tilewright.space.template import Applied, Template, Work
from tilewright.testing.problems import elementwise, gemm, softmax_rows

_CONFIGS = 12  # of each task that are run


class _ComputingSuite:
    """`tasks`: the tasks to test with; override it with the tasks that your template is for."""

    numerics = "fast"

    def tasks(self) -> Sequence[Task]:
        return (gemm(), softmax_rows(), elementwise())

    def applied(self, work: Work) -> Iterable[Applied]:
        raise NotImplementedError

    def _applied(self) -> list[tuple[Applied, Work]]:
        found = []
        for task in self.tasks():
            work = Work(task, host(), self.numerics)
            found += [(applied, work) for applied in self.applied(work)]
        return found

    def test_it_applies_to_something(self) -> None:
        assert self._applied(), "it declines every task of the suite: override `tasks`"

    def test_configs_are_legal_and_come_back_from_records(self) -> None:
        for applied, _ in self._applied():
            for config in _some(applied):
                assert config in applied.space
                assert applied.space.recalled(config) == config
                assert len(applied.space.encode(config)) == len(applied.space.encode(applied.space.default()))

    def test_a_config_has_a_cost(self) -> None:
        for applied, work in self._applied():
            predict = calibrated(work.machine, 1)
            for config in _some(applied):
                seconds = predict(counted(applied, config, work.machine, work.task.constants)[0])
                assert np.isfinite(seconds) and seconds > 0, config

    def test_every_config_computes_the_task(self) -> None:
        for applied, work in self._applied():
            validation = make_validation(work.task, self.numerics, seed=11)
            for config in _some(applied):
                implementation = Candidates(work, only=(applied,)).implementation(config)
                for case in validation.cases:
                    result = run_on_case(implementation, work.machine, self.numerics, case)
                    case.error(result)  # WrongResult, with the element and the case

    def test_the_same_config_is_the_same_program(self) -> None:
        for applied, work in self._applied():
            config = _some(applied)[0]
            first, second = (Candidates(work, only=(applied,)).program(config) for _ in range(2))
            assert str(first) == str(second)


def _some(applied: Applied) -> list[Config]:
    drawn = (applied.space.sample(Random(number)) for number in range(_CONFIGS))
    return list(dict.fromkeys(config for config in drawn if config is not None))


def run_on_case(
    implementation: Implementation, machine: CpuMachine, numerics: str, case: CheckCase
) -> np.ndarray:
    """The flat result on this machine's CPU."""
    kernel = SingleKernel(implementation.program, machine, numerics=numerics, threads=1)
    built = kernel.built
    return kernel(
        [
            np.ascontiguousarray(packed(case.input(source), packing))
            for source, packing in zip(built.sources, built.packings, strict=True)
        ]
    )


class TemplateSuite(_ComputingSuite):
    """Inherit it, and name your template."""

    template: Template

    def applied(self, work: Work) -> Iterable[Applied]:
        found = self.template.apply(work)
        return [] if found is None else [found]

    def test_its_space_bears_its_name(self) -> None:
        for applied, _ in self._applied():
            assert applied.space.template == self.template.name


class RuleSuite(_ComputingSuite):
    """Inherit it, and name your sketch rule; the suite tests the structures that it takes part in."""

    rule: Rule

    def applied(self, work: Work) -> Iterable[Applied]:
        from tilewright.space.sketches import derive

        register(self.rule)
        try:
            return [applied for applied in derive(work) if isinstance(applied, GuardedApplied)]
        finally:
            unregister(self.rule.name)
