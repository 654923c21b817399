"""Kernels with one mistake in their CUDA text each, checked on a GPU as the tuner checks: none that is wrong may pass.

    python -m tests.faults.gpu_mutants --mutants 1000 --seed 7 --json FILE
    python -m tests.faults.gpu_mutants --emulated --mutants 100 --templates tensor-core-attention,sketch:tensorised

The mistakes are those of `gpu_edits.py`. The text of a kernel holds all that is compiled, helpers too: a mistake that
leaves the machine code as it was is none. Mutants are compiled on all cores while the card checks others; those of a
batch are checked side by side, and one that took too long is checked again by itself.

One that passes must be equivalent: it counts as that, and not as one of the mutants, if it gives the same bits as the
original on other random inputs, whatever lies alongside its buffers: NaN, or very large numbers of either sign. It is
equivalent as well if its results are as close to the float64 oracle as the original's on twelve sets of such inputs: it
then only rounds elsewhere, as when a softmax subtracts another constant from all scores. A kernel that reads beyond a
buffer and drops what it found gives the same bits as well, and counts as equivalent: no result depends on it, and what
lies there is memory of the plan's own block. A card has no page so small that a read beyond a buffer faults there. All
of it needs a card; what judges a mutant runs in a process that it may crash or hang.

With `--emulated` no card is needed: the same mistakes are checked on an emulated GPU (`emulated_mutants.py`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from tests.faults import campaign
from tests.faults.campaign import EQUIVALENT, PASSED, PassedMutant
from tests.faults.gpu_candidates import BEST, product, source_of
from tests.faults.gpu_edits import Edit, compiled, edits, shuffled
from tests.faults.kernels import with_part
from tests.faults.killable import Killable
from tests.rewrites.helpers import array
from tests.space.checked import Inputs
from tilewright.codegen.cuda.build import SYMBOL, GpuSource, identity
from tilewright.dtypes import DType
from tilewright.errors import MeasurementError
from tilewright.graph.op import apply
from tilewright.graph.oracle import evaluate
from tilewright.graph.task import Task
from tilewright.hw.gpu import GpuMachine, detect
from tilewright.measure.building import Made
from tilewright.measure.gpu_checks import Checks
from tilewright.measure.gpu_timer import SURROUNDINGS
from tilewright.measure.kernels import packed
from tilewright.measure.runner import Runner
from tilewright.measure.single import Built, KernelRun, plan_of
from tilewright.measure.trial import TaskJob
from tilewright.space.candidates import Candidates
from tilewright.space.space import Config
from tilewright.space.template import Work

_PROGRAMS = 3  # of each task
_BATCH = 16  # mutants of one kernel that are compiled, and checked, together
_RUNNERS = 3  # side by side: most of a check is not the card's
_JUDGE_SECONDS = 30.0
_RETURNS, _RETURN_SECONDS = 8, 4.0  # how often a card that is being reset is tried again
_STRANGERS = (1000, 2000)  # seeds of the inputs on which a mutant that passed is looked at again
_MORE_STRANGERS = range(3000, 15000, 1000)  # of those on which its error is compared with the original's
_AS_EXACT = 1.25  # of the original's error, with the error of rounding a result to its type as the least
_GUARD = 4096


# -- tasks ------------------------------------------------------------------------------------------------------------


def softmax(axis: int) -> Task:
    x = Inputs()
    return x.task(apply("softmax", x(70, 90, dtype=DType.F16), axis=axis))


def normalised() -> Task:
    x = Inputs()
    scaled = apply("layer_norm", x(37, 200, dtype=DType.F16), dims=1, eps=1e-5)
    return x.task(apply("mul", scaled, x(200, constant=True, dtype=DType.F16)))


def convolution() -> Task:
    x = Inputs()
    image, edge = x(2, 9, 10, 24, dtype=DType.F16), (0, 1, 1, 0)
    image = apply("pad", image, low=edge, high=edge, interior=(0, 0, 0, 0), value=0.0)
    weight = x(3, 3, 24, 40, constant=True, dtype=DType.F16)
    plain: dict[str, Any] = {"stride": (1, 1), "dilation": (1, 1), "groups": 1, "padding": ((0, 0), (0, 0))}
    return x.task(apply("relu", apply("conv", image, weight, layout="channels_last", **plain)))


def attended() -> Task:
    x = Inputs()
    heads = [x(2, 3, 77, 40, dtype=DType.F16) for _ in range(3)]
    return x.task(apply("attention", *heads, causal=True, scale=0.16))


def summed() -> Task:
    x = Inputs()
    return x.task(apply("sum", apply("silu", x(700, 90)), axes=(0,), keepdims=False))


def moved() -> Task:
    x = Inputs()
    return x.task(apply("permute", x(70, 50, 9, dtype=DType.F16), axes=(2, 1, 0)))


TASKS: tuple[Callable[[], Task], ...] = (
    lambda: product(70, 50, 72),
    lambda: product(33, 136, 67),
    lambda: softmax(1),
    lambda: softmax(0),
    normalised,
    convolution,
    attended,
    summed,
    moved,
)


# -- mutants ----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _compilers() -> ProcessPoolExecutor:
    """Processes: a compiler may keep others of its process waiting."""
    return ProcessPoolExecutor(os.cpu_count() or 1, multiprocessing.get_context("spawn"))


def close_compilers() -> None:
    _compilers().shutdown(cancel_futures=True)
    _compilers.cache_clear()


@dataclass(frozen=True)
class FaultTarget:
    """A kernel of a task, whose mutants are tried."""

    work: Work
    config: Config

    @property
    def name(self) -> str:
        return f"{self.config}, {self.work.task.label}"

    @cached_property
    def job(self) -> TaskJob:
        return TaskJob.of(self.work, 0)

    @cached_property
    def source(self) -> GpuSource:
        return source_of(self.work, self.config)

    @cached_property
    def edits(self) -> list[Edit]:
        return edits(self.source.text)

    def _compiling(self, text: str) -> Future[bytes | None]:
        machine = self.work.machine
        assert isinstance(machine, GpuMachine)
        _, symbol = identity(self.source, machine, "fast")
        return _compilers().submit(compiled, text.replace(SYMBOL, symbol), machine.capability)

    def legal_edits(self, rng: Random, ahead: int = 2 * _BATCH) -> Iterator[int]:
        """Those that compile to other machine code, which is kept until it was tried. The next few are always being
        compiled."""
        original = self._compiling(self.source.text)
        numbers = shuffled(self.edits, rng)
        waiting: deque[tuple[int, Future[bytes | None]]] = deque()
        while True:
            for number in itertools.islice(numbers, ahead - len(waiting)):
                waiting.append((number, self._compiling(self.edits[number].made(self.source.text))))
            if not waiting:
                return
            number, future = waiting.popleft()
            code = future.result()
            if code is not None and code != original.result():
                self._codes[number] = code
                yield number

    @cached_property
    def _codes(self) -> dict[int, bytes]:
        return {}

    @cached_property
    def built(self) -> Built:
        return Built.of(Candidates.of(self.work).implementation(self.config), self.work.machine, "fast")

    def mutant(self, number: int) -> Built:
        return with_part(self.built, code=self._codes.pop(number))


def stranger(job: TaskJob, seed: int) -> list[np.ndarray]:
    """Random inputs that no check has used."""
    nodes = job.work().task.graph.inputs
    return [array(*node.shape, seed=seed + n, dtype=node.dtype) for n, node in enumerate(nodes)]


def results(job: TaskJob, built: Built, arrays: Sequence[np.ndarray], surrounding: int) -> np.ndarray:
    """What it computes, on the card, in this process, with such bytes around its buffers and in shared memory."""
    from tilewright.runtime.cuda.executor import GpuExecutor

    work, inputs = job.work(), len(built.sources)
    plan, objects = plan_of([KernelRun(built, range(inputs), 0)], work.machine, inputs=inputs, outputs=1)
    executor = GpuExecutor(plan, [], objects, guard=_GUARD)
    given = [packed(arrays[n], packing) for n, packing in zip(built.sources, built.packings, strict=True)]
    output = work.task.output
    result = np.empty(output.type.size, output.dtype.numpy)
    executor.poison(surrounding)
    Checks(0).fill_shared(surrounding)
    executor.run(given, [result])
    return result.reshape(output.shape)


def is_equivalent(job: TaskJob, original: Built, mutant: Built) -> bool:
    """By results that its check did not compare: the same bits, or as close to the oracle."""
    return _same_bits(job, original, mutant) or _equally_exact(job, original, mutant)


def _same_bits(job: TaskJob, original: Built, mutant: Built) -> bool:
    return all(
        results(job, mutant, arrays, surrounding).tobytes()
        == results(job, original, arrays, surrounding).tobytes()
        for arrays in (stranger(job, seed) for seed in _STRANGERS)
        for surrounding in SURROUNDINGS
    )


def _equally_exact(job: TaskJob, original: Built, mutant: Built) -> bool:
    graph = job.work().task.graph
    for number, seed in enumerate(_MORE_STRANGERS):
        arrays, surrounding = stranger(job, seed), SURROUNDINGS[number % len(SURROUNDINGS)]
        (exact,) = evaluate(graph, arrays, precise=True)
        found, meant = (results(job, each, arrays, surrounding) for each in (mutant, original))
        if not as_exact(found, meant, exact):
            return False
    return True


def as_exact(found: np.ndarray, meant: np.ndarray, exact: np.ndarray) -> bool:
    """Whether no element of `found` is further from `exact` than the worst of `meant`, both in units of the last place
    of `exact` in the type of the results."""
    if not np.array_equal(np.isfinite(found), np.isfinite(meant)):
        return False
    finite = np.isfinite(meant) & np.isfinite(exact)
    places = np.spacing(np.abs(exact[finite]).astype(meant.dtype)).astype(np.float64)
    off, off_meant = (
        np.abs(each[finite].astype(np.float64) - exact[finite]) / places for each in (found, meant)
    )
    return bool(off.max(initial=0) <= _AS_EXACT * max(off_meant.max(initial=0), 0.5))


def fault_targets(machine: GpuMachine, rng: Random, templates: Collection[str] = ()) -> list[FaultTarget]:
    """Each task with some of its kernels, of different templates and sketches as far as there are such; only of these
    `templates` if there are any."""
    found = []
    for make in TASKS:
        work = Work(make(), machine)
        candidates = Candidates.of(work)
        drawn = candidates.sample(rng, 60)
        firsts = {config.template: config for config in reversed(drawn)}
        single = [
            config
            for config in dict.fromkeys((*firsts.values(), *drawn))
            if len((made := candidates.implementation(config)).parts) == 1 and not made.uses_library
        ]
        kept = [config for config in single if not templates or config.template in templates]
        found.extend(FaultTarget(work, config) for config in kept[:_PROGRAMS])
    return found


class Checked:
    """The outcomes of mutants, by runners side by side. `judge`: of a job, the original and a mutant that passed."""

    def __init__(self, runners: Sequence[Runner], judge: Callable[..., tuple[bool, Any]]) -> None:
        self._runners, self._judge = runners, judge
        self._threads = ThreadPoolExecutor(len(runners))

    def __call__(self, fault_target: FaultTarget, numbers: Sequence[int]) -> list[str]:
        """Of each edit the kind of failure, EQUIVALENT, or PASSED: wrong and not noticed."""
        mutants = [fault_target.mutant(number) for number in numbers]
        shares = [range(first, len(mutants), len(self._runners)) for first in range(len(self._runners))]
        failures = [""] * len(mutants)

        def check(runner: Runner, share: range) -> None:
            for position in share:
                failures[position] = self._failure(runner, fault_target, mutants[position])

        list(self._threads.map(check, self._runners, shares))
        return [
            self._outcome(fault_target, mutant, failure)
            for mutant, failure in zip(mutants, failures, strict=True)
        ]

    def _failure(self, runner: Runner, fault_target: FaultTarget, mutant: Built) -> str:
        for _ in range(_RETURNS):
            try:
                runner.build(fault_target.job, [])  # draws the validation
                return runner.trial(
                    fault_target.job, fault_target.config, Made(mutant, 0.0), best=BEST
                ).failure
            except MeasurementError as error:  # a mutant alongside it made the driver reset the card
                lost = error
                time.sleep(_RETURN_SECONDS)
        raise lost

    def _outcome(self, fault_target: FaultTarget, mutant: Built, failure: str) -> str:
        if failure == "timeout":  # perhaps only because another kept the card to itself
            failure = self._failure(self._runners[0], fault_target, mutant)
        if failure:
            return failure
        worked, same = self._judge(fault_target.job, fault_target.built, mutant)
        return EQUIVALENT if worked and same else PASSED


def run_mutants(
    machine: GpuMachine, count: int, seed: int, templates: Collection[str] = ()
) -> list[PassedMutant]:
    """Those of `count` wrong ones that passed the check."""
    judge = Killable(is_equivalent, _JUDGE_SECONDS)
    with ExitStack() as stack:
        stack.callback(judge.close)
        stack.callback(close_compilers)
        runners = [stack.enter_context(Runner(0, device=0, builders=1)) for _ in range(_RUNNERS)]
        chosen = fault_targets(machine, Random(seed), templates)
        return campaign.run_mutants(count, seed, chosen, Checked(runners, judge), _BATCH)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mutants", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--emulated", action="store_true", help="on an emulated H200, without a card")
    parser.add_argument("--templates", default="", help="only kernels of these, separated by commas")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="of --emulated, at most about this long"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TILEWRIGHT_CACHE_DIR"] = folder  # nothing of this may stay in the cache
        began = time.monotonic()
        templates = tuple(filter(None, options.templates.split(",")))
        if options.emulated:
            from tests.faults.emulated_mutants import run_emulated_mutants

            passed = run_emulated_mutants(options.mutants, options.seed, templates, options.seconds)
        else:
            passed = run_mutants(detect(), options.mutants, options.seed, templates)
    if options.json:
        found = {
            "mutants": options.mutants,
            "seed": options.seed,
            "templates": templates,
            "emulated": options.emulated,
            "passed": list(map(asdict, passed)),
            "seconds": time.monotonic() - began,
        }
        options.json.write_text(json.dumps(found, indent=1))
    return int(bool(passed))


if __name__ == "__main__":
    sys.exit(main())
