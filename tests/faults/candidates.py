"""Candidates that crash, hang, eat memory, write where they must not or are wrong by a little: all are caught.

    python -m tests.faults.candidates --count 100 --mutants 1000

First `count` faults, in what builds and in what runs, each of a known kind: every one must come back as that kind, and
a good candidate measured after it must be as good as ever. Then programs with one mistake each, no two alike: one that
passes the check must be equivalent. It counts as that, and not as one of the `mutants`, if it is right on the inputs of
forty other validations too, and differs from the original by rounding alone: not at all, or not in double precision.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random

import numpy as np

from tests.faults import campaign, templates
from tests.faults.campaign import EQUIVALENT, PASSED, PassedMutant, Survived
from tests.faults.kernels import KERNEL_FAULTS, harmful
from tests.faults.mutants import Edit, edits, shuffled, widened
from tests.space.checked import Inputs
from tilewright.errors import VerificationError
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.hw import host
from tilewright.loops.interpret import interpret_program
from tilewright.loops.ir import Program
from tilewright.loops.verify import verify_program
from tilewright.measure.building import Made
from tilewright.measure.measurement import Measurement
from tilewright.measure.runner import Runner
from tilewright.measure.single import SingleKernel
from tilewright.measure.trial import TaskJob
from tilewright.measure.validation import CheckCase, WrongResult, make_validation
from tilewright.space.candidates import Candidates
from tilewright.space.space import Config
from tilewright.space.template import Work
from tilewright.tune.choose import Choice, choose

BEST = 1e-3  # seconds: what a hanging kernel is compared with
BUILD_SECONDS = 2.0
MEMORY = 1 << 30
_STRANGERS = range(1000, 1040)  # seeds of the inputs on which a mutant that passed is looked at again
_PROGRAMS = 4  # of each task
_BATCH = 16  # mutants of one program that are built together
# Of what an element may be off: mutants that differ by less are the same program, rounded otherwise.
_SAME, _SAME_IN_DOUBLE = 0.02, 1e-4


# -- tasks ------------------------------------------------------------------------------------------------------------


def product(m: int = 5, n: int = 18, k: int = 9) -> Task:
    x = Inputs()
    node = apply("matmul", x(m, k), x(k, n, constant=True))
    return x.task(apply("relu", apply("add", node, x(n, constant=True))))


def softmax(rows: int = 5, columns: int = 21) -> Task:
    x = Inputs()
    return x.task(apply("softmax", x(rows, columns), axis=1))


def normalised(rows: int = 4, columns: int = 19) -> Task:
    x = Inputs()
    return x.task(
        apply(
            "layer_norm",
            x(rows, columns),
            x(columns, constant=True),
            x(columns, constant=True),
            dims=1,
            eps=1e-5,
        )
    )


def elementwise(rows: int = 6, columns: int = 23) -> Task:
    x = Inputs()
    a, b = x(rows, columns), x(rows, columns)
    return x.task(apply("tanh", apply("sub", apply("mul", a, b), a)))


def convolution(size: int = 6, channels: int = 3, outputs: int = 5) -> Task:
    x = Inputs()
    around = {"low": (0, 1, 1, 0), "high": (0, 1, 1, 0), "interior": (0, 0, 0, 0), "value": 0.0}
    image = apply("pad", x(1, size, size, channels), **around)
    weights = x(3, 3, channels, outputs, constant=True)
    plain = {"stride": (1, 1), "dilation": (1, 1), "groups": 1, "padding": ((0, 0), (0, 0))}
    return x.task(apply("conv", image, weights, layout="channels_last", **plain))


def summed(rows: int = 23, columns: int = 10) -> Task:
    x = Inputs()
    return x.task(apply("sum", apply("silu", x(rows, columns)), axes=(0,), keepdims=False))


def attended(length: int = 6, width: int = 16) -> Task:
    x = Inputs()
    shape = (1, 2, length, width)
    return x.task(apply("attention", x(*shape), x(*shape), x(*shape), causal=False, scale=width**-0.5))


_WITH_DEFAULT = (
    product,
    softmax,
    normalised,
    elementwise,
    convolution,
    summed,
)  # what build faults start from
TASKS = (*_WITH_DEFAULT, attended)


# -- faults -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    stage: str  # "build" or "run"
    name: str
    expected: str


FAULTS = [
    *(Fault("build", name, kind) for name, kind in templates.BUILD_FAULTS.items() if kind),
    *(Fault("run", name, kind) for name, kind in KERNEL_FAULTS.items()),
]


def runner_for_faults() -> Runner:
    return Runner(
        2, builders=2, modules=("tests.faults.registered",), memory=MEMORY, build_seconds=BUILD_SECONDS
    )


def inject(runner: Runner, job: TaskJob, sound: Choice, fault: Fault, rng: Random) -> Measurement:
    if fault.stage == "build":
        (measured,) = runner.measure(job, [templates.config(fault.name)], best=BEST)
        return measured
    runner.build(job, [sound.config])  # draws the validation
    made = Made(harmful(sound.program, fault.name, rng), 0.0)
    return runner.trial(job, sound.config, made, best=BEST)


def survived(runner: Runner, job: TaskJob, sound: Choice) -> bool:
    (measured,) = runner.measure(job, [sound.config], best=BEST)
    return measured.failure == "" and bool(measured.times)


def run_faults(count: int, seed: int) -> int:
    """How many were not caught, not typed as they should be, or not survived."""
    rng = Random(seed)
    begin = time.monotonic()
    with runner_for_faults() as runner:

        def attempt(fault: Fault) -> Survived:
            job = TaskJob.of(Work(rng.choice(_WITH_DEFAULT)(), host()), 2)
            sound = choose(job.work())
            measured = inject(runner, job, sound, fault, rng)
            failed = time.monotonic()
            lost = int(not survived(runner, job, sound))
            name = f"{fault.stage}: {fault.name}"
            recovery = time.monotonic() - failed
            return Survived(name, measured.failure, fault.expected, lost, measured.message, recovery)

        outcomes = campaign.run_faults(itertools.islice(itertools.cycle(FAULTS), count), attempt)
    print(campaign.report(outcomes, time.monotonic() - begin))
    return sum(not outcome.is_right for outcome in outcomes)


# -- mutants ----------------------------------------------------------------------------------------------------------


@dataclass
class FaultTarget:
    """A task with a program for it, whose mutants are tried."""

    job: TaskJob
    config: Config
    program: Program

    @classmethod
    def of(cls, task: Task, config: Config, threads: int = 2) -> FaultTarget:
        job = TaskJob.of(Work(task, host()), threads)
        return cls(job, config, Candidates.of(job.work()).program(config))

    @property
    def name(self) -> str:
        return f"{self.config}, {self.job.work().task.label}"

    @cached_property
    def edits(self) -> list[Edit]:
        return edits(self.program)

    def legal_edits(self, rng: Random) -> Iterator[int]:
        """Those that a verifier lets through: the others never get as far as a check."""
        for number in shuffled(self.program, rng):
            try:
                verify_program(self.edits[number].made())
            except (VerificationError, AssertionError):
                continue
            yield number

    @cached_property
    def strangers(self) -> list[list[tuple[CheckCase, list[np.ndarray], np.ndarray]]]:
        """The cases of other validations, with the inputs as the program wants them and what it makes of them."""
        task = self.job.work().task
        original = SingleKernel(self.program, host(), threads=1)
        packings = (*self.program.packings, *[None] * len(self.program.params))

        def asked(case: CheckCase) -> tuple[CheckCase, list[np.ndarray], np.ndarray]:
            inputs = [
                values.reshape(-1) if packing is None else packing.pack(values)
                for values, packing in zip(case.inputs, packings, strict=False)
            ]
            return case, inputs, original(inputs)

        return [list(map(asked, make_validation(task, "fast", seed).cases)) for seed in _STRANGERS]

    def is_equivalent(self, mutant: Program) -> bool:
        """Whether it is right as machine code on all of the strangers, of which there are many times as many as a
        candidate is asked; reads nothing outside of its buffers; and differs from the original by its rounding at most:
        not at all there, or not in double precision."""
        kernel = SingleKernel(mutant, host(), threads=1)
        results = [
            (case, kernel(inputs), original)
            for validation in self.strangers
            for case, inputs, original in validation
        ]
        try:
            for case, result, _ in results:
                case.error(result)
            for case, inputs, _ in self.strangers[0]:
                case.error(interpret_program(mutant, inputs))
        except (IndexError, WrongResult):
            return False
        return all(_is_near(*result, _SAME) for result in results) or self._is_same_in_double(mutant)

    def _is_same_in_double(self, mutant: Program) -> bool:
        wide, original = widened(mutant), widened(self.program)
        return all(
            _is_near(
                case, interpret_program(wide, inputs), interpret_program(original, inputs), _SAME_IN_DOUBLE
            )
            for validation in self.strangers[:2]
            for case, inputs, _ in validation
        )


def _is_near(case: CheckCase, result: np.ndarray, original: np.ndarray, share: float) -> bool:
    with np.errstate(all="ignore"):
        near = np.abs(result.astype(np.float64) - original) <= share * case.allowed + 1e-30
    return bool((near | (result == original) | (np.isnan(result) & np.isnan(original))).all())


def fault_targets(rng: Random) -> list[FaultTarget]:
    """Each task with some of the programs for it, of different templates and sketches as far as there are such."""
    found = []
    for make in TASKS:
        task = make()
        candidates = Candidates.of(Work(task, host()))
        drawn = candidates.sample(rng, 40)
        firsts = {config.template: config for config in reversed(drawn)}
        chosen = list(dict.fromkeys((*firsts.values(), *drawn)))[:_PROGRAMS]
        found.extend(FaultTarget.of(task, config) for config in chosen)
    return found


def outcomes_of(runner: Runner, fault_target: FaultTarget, numbers: Sequence[int]) -> list[str]:
    """Of each edit the kind of failure, "equivalent", or "passed": wrong and not noticed."""
    configs = [templates.mutated(fault_target.config, number) for number in numbers]
    found = []
    for number, measured in zip(numbers, runner.measure(fault_target.job, configs, best=BEST), strict=True):
        if measured.failure:
            found.append(measured.failure)
        else:
            same = fault_target.is_equivalent(fault_target.edits[number].made())
            found.append(EQUIVALENT if same else PASSED)
    return found


def run_mutants(count: int, seed: int) -> list[PassedMutant]:
    """Those of `count` wrong ones that passed the check."""
    with runner_for_faults() as runner:
        return campaign.run_mutants(
            count,
            seed,
            fault_targets(Random(seed)),
            lambda fault_target, numbers: outcomes_of(runner, fault_target, numbers),
            _BATCH,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=100, help="faults")
    parser.add_argument("--mutants", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    bad = run_faults(chosen.count, chosen.seed) if chosen.count else 0
    passed = run_mutants(chosen.mutants, chosen.seed) if chosen.mutants else []
    return int(bool(bad or passed))


if __name__ == "__main__":
    sys.exit(main())
