"""The conformance suites of templates and sketch rules: configs are legal, and each computes the task.

Each program runs on the validation inputs, and every element is compared with its bound: as machine code of this
processor, or, for a GPU, as CUDA C++ on an emulated one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from unittest import SkipTest

import numpy as np

from tilewright.cost.predictor import calibrated, counted
from tilewright.graph.task import Task
from tilewright.hw import CpuMachine, host
from tilewright.hw.gpu import GpuMachine
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
from tilewright.testing.emulator.run import COMPILER, results_of
from tilewright.testing.problems import elementwise, gemm, softmax_rows

_CONFIGS = {"cpu": 12, "cuda": 3}  # of each task that are run; g++ takes seconds for a kernel
_CASES = 8  # of a task's validation inputs, on an emulated GPU


class _ComputingSuite:
    """`tasks`: the tasks to test with; override it with the tasks that your template is for.

    `machine`: what to compute them on, None for this processor. For a GPU, kernels run on an emulated one: compiled by
    g++, with no other software and no card."""

    numerics = "fast"
    machine: CpuMachine | GpuMachine | None = None

    def tasks(self) -> Sequence[Task]:
        return (gemm(), softmax_rows(), elementwise())

    def applied(self, work: Work) -> Iterable[Applied]:
        raise NotImplementedError

    def _applied(self) -> list[tuple[Applied, Work]]:
        found = []
        for task in self.tasks():
            work = Work(task, self.machine or host(), self.numerics)
            found += [(applied, work) for applied in self.applied(work)]
        return found

    def test_it_applies_to_something(self) -> None:
        assert self._applied(), "it declines every task of the suite: override `tasks`"

    def test_configs_are_legal_and_come_back_from_records(self) -> None:
        for applied, work in self._applied():
            for config in _some(applied, work):
                assert config in applied.space
                assert applied.space.recalled(config) == config
                assert len(applied.space.encode(config)) == len(applied.space.encode(applied.space.default()))

    def test_a_config_has_a_cost(self) -> None:
        for applied, work in self._applied():
            predict = calibrated(work.machine, 1)
            for config in _some(applied, work):
                seconds = predict(counted(applied, config, work.machine, work.task.constants)[0])
                assert np.isfinite(seconds) and seconds > 0, config

    def test_every_config_computes_the_task(self) -> None:
        for applied, work in self._applied():
            cases = make_validation(work.task, self.numerics, seed=11).cases
            for config in _some(applied, work):
                implementation = Candidates(work, only=(applied,)).implementation(config)
                if isinstance(work.machine, GpuMachine):
                    cases = cases[:_CASES]
                    results = run_emulated(implementation, cases)
                else:
                    results = [run_on_case(implementation, work.machine, self.numerics, c) for c in cases]
                for case, result in zip(cases, results, strict=True):
                    case.error(result)  # WrongResult, with the element and the case

    def test_the_same_config_is_the_same_program(self) -> None:
        for applied, work in self._applied():
            config = _some(applied, work)[0]
            first, second = (Candidates(work, only=(applied,)).implementation(config) for _ in range(2))
            assert [str(part.body) for part in first.parts] == [str(part.body) for part in second.parts]


def _some(applied: Applied, work: Work) -> list[Config]:
    drawn = (applied.space.sample(Random(number)) for number in range(_CONFIGS[work.machine.kind]))
    return list(dict.fromkeys(config for config in drawn if config is not None))


def run_emulated(implementation: Implementation, cases: Sequence[CheckCase]) -> list[np.ndarray]:
    """The flat results on an emulated GPU."""
    if COMPILER is None:
        raise SkipTest("the emulated GPU needs g++")
    with TemporaryDirectory() as folder:
        return results_of(implementation, cases, Path(folder))


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
