"""Kernels that hang, go astray, do not start or are wrong by a little, measured on a GPU: each costs itself alone.

    python -m tests.faults.gpu_candidates --count 50 --mutants 500 --json FILE

Every fault is a candidate whose machine code is not what its config says: the text of its kernel was changed, compiled,
and put into the cache where the runner's processes find it. Everything else is as always. Each must come back as its
kind, nothing but it may be lost, and where its process had to be replaced the next one must go on within 5 seconds.

Then `mutants`: kernels with one mistake in their CUDA text each (`gpu_mutants.py`). One that passes the check must be
equivalent: it counts as that, and not as one of the mutants, if it gives the same bits as the original on two other
random inputs. All of it needs a card.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np

from tests.faults import campaign
from tests.faults.campaign import EQUIVALENT, PASSED, Survived
from tests.faults.gpu_mutants import Edit, MutableSource
from tests.faults.kernels import with_part
from tests.rewrites.helpers import array
from tests.space.checked import Inputs
from tilewright.codegen.cache import ObjectCache
from tilewright.codegen.cuda import toolchain
from tilewright.codegen.cuda.build import SYMBOL, GpuSource, identity
from tilewright.codegen.cuda.tensor import tensor_source
from tilewright.dtypes import DType
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.hw.gpu import GpuMachine, detect
from tilewright.measure.building import Made
from tilewright.measure.kernels import packed
from tilewright.measure.runner import Runner
from tilewright.measure.single import Built, Run, plan_of
from tilewright.measure.trial import TaskJob
from tilewright.runtime.plan import VendorCall
from tilewright.space.candidates import Candidates
from tilewright.space.space import Config
from tilewright.space.template import Work
from tilewright.space.templates.cuda.matmul import TensorCores
from tilewright.tune.choose import ranked

RECOVERY_SECONDS = 5.0
BEST = 1e-3  # seconds: what a hanging kernel is compared with
_PROGRAMS = 3  # of each task, for mutants
_BATCH = 16  # mutants of one kernel that are compiled together
# A hang ends by itself after this: a card that nobody can reset must not be lost to a test.
_HANG_NANOSECONDS = 30_000_000_000
_LATE = 45  # runs of a kernel after which its results were checked, and it is being timed

Alteration = Callable[[str], str]


@dataclass(frozen=True)
class Fault:
    name: str
    kind: str  # of space.outcome.FAILURES
    alter: Alteration
    on_any_card: bool = True  # or from sm_90 on


def at_head(statement: str, before: str = "") -> Alteration:
    """A statement at the beginning of the kernel, `before` in front of it."""

    def alter(text: str) -> str:
        begin = text.rindex('extern "C"')
        head = text.index("{", text.index(SYMBOL, begin)) + 1
        return text[:begin] + before + "\n" + text[begin:head] + "\n  " + statement + text[head:]

    return alter


def replaced(pattern: str, by: str) -> Alteration:
    def alter(text: str) -> str:
        changed, count = re.subn(pattern, by, text)
        assert count, pattern
        return changed

    return alter


def result_times(factor: str) -> Alteration:
    """All results in half precision are off by a factor, an expression of `x`."""
    return replaced(
        r'"cvt\.rn\.f16\.f32 %0, %1;" : "=h"\(y\.bits\) : "f"\(x\)',
        f'"cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x * ({factor}))',
    )


_CLOCK = '__device__ u64 now() { u64 t; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)); return t; }\n'
_SPIN = f"for (const u64 begin = now(); now() - begin < {_HANG_NANOSECONDS}ull;) ;"
# With what the kernel asks for besides, more than a block can have; older cards' compilers refuse it.
_ALL_SHARED = "__shared__ volatile char more[227 << 10]; more[threadIdx.x] = 1;"
_FIRST = "blockIdx.x == 0 && threadIdx.x == 0"

FAULTS = (
    Fault("hangs", "timeout", at_head(f"if (blockIdx.x == 0) {_SPIN}", _CLOCK)),
    Fault("wrong by 0.4%", "wrong", result_times("1.004f")),
    Fault(
        "writes far away",
        "illegal",
        at_head(f"if ({_FIRST}) *reinterpret_cast<volatile int*>(1ull << 44) = 1;"),
    ),
    Fault(
        "takes all shared memory for itself",
        "build",
        at_head(_ALL_SHARED),
        on_any_card=False,
    ),
    Fault(
        "writes between two words",
        "illegal",
        at_head(
            f"if ({_FIRST}) *reinterpret_cast<volatile int*>(reinterpret_cast<char*>(pair) + 1) = 1;",
            "__device__ int pair[2];",
        ),
    ),
    Fault(
        "starts with too many threads", "build", replaced(r"__launch_bounds__\(\d+", "__launch_bounds__(32")
    ),
    Fault(
        "hangs once it is timed",
        "timeout",
        at_head(
            f"if ({_FIRST} && atomicAdd(&runs, 1) >= {_LATE}) {_SPIN}",
            _CLOCK + "__device__ int runs;",
        ),
    ),
    Fault("wrong at its end", "wrong", result_times("blockIdx.x == gridDim.x - 1 ? 1.1f : 1.0f")),
    Fault(
        "reads far away",
        "illegal",
        at_head(f"if ({_FIRST}) (void)*reinterpret_cast<volatile int*>(1ull << 44);"),
    ),
    Fault("leaves results out", "wrong", at_head("if (blockIdx.x < 8) return;")),
    Fault("traps", "crash", at_head(f'if ({_FIRST}) asm volatile("trap;");')),
    Fault("is of another name", "build", replaced(SYMBOL, "somebody_else")),
)


# -- faults -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Injected:
    fault: Fault
    task: Task
    victim: Config
    others: tuple[Config, ...]  # sound ones
    source: GpuSource


def product(rows: int, columns: int = 512, depth: int = 512) -> Task:
    x = Inputs()
    node = apply("matmul", x(rows, depth, dtype=DType.F16), x(depth, columns, constant=True, dtype=DType.F16))
    return x.task(apply("relu", apply("add", node, x(columns, constant=True, dtype=DType.F16))))


def source_of(work: Work, config: Config) -> GpuSource:
    """Of a config that is one kernel."""
    (part,) = Candidates.of(work).implementation(config).parts
    assert not isinstance(part.body, VendorCall)
    return tensor_source(part.body)


def injected(fault: Fault, task: Task, machine: GpuMachine) -> Injected:
    """The fault in the config that the model ranks first; the next two are sound."""
    work = Work(task, machine)
    applied = TensorCores().apply(work)
    assert applied is not None
    victim, *others = (config for _, config in ranked(applied, work)[:3])
    return Injected(fault, task, victim, tuple(others), source_of(work, victim))


def compiled(each: Injected, machine: GpuMachine) -> toolchain.Compiled:
    _, symbol = identity(each.source, machine, "fast")
    text = each.fault.alter(each.source.text).replace(SYMBOL, symbol)
    return toolchain.compile_source(text, machine.capability)


def inject(each: Injected, machine: GpuMachine) -> None:
    """The wrong machine code under the right key."""
    key, _ = identity(each.source, machine, "fast")
    ObjectCache.default().put(key, msgspec.msgpack.encode(compiled(each, machine)))


def run_faults(machine: GpuMachine, count: int, first: int = 0) -> list[Survived]:
    """`count` faults, from number `first` on, all with one runner."""
    possible = [fault for fault in FAULTS if fault.on_any_card or machine.clusters]
    numbers = range(first, first + count)
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        prepared = list(
            pool.map(lambda n: injected(possible[n % len(possible)], product(512 - n), machine), numbers)
        )
        list(pool.map(lambda each: inject(each, machine), prepared))
    with Runner(0, device=0) as runner:

        def attempt(each: Injected) -> Survived:
            job = TaskJob.of(Work(each.task, machine), 0)
            runner.build(job, [each.victim, *each.others])
            (victim,) = runner.measure(job, [each.victim], best=BEST)
            failed = time.monotonic()
            (next_one,) = runner.measure(job, each.others[:1], best=BEST)
            recovery = time.monotonic() - failed
            sound = [next_one, *runner.measure(job, each.others[1:], best=BEST)]
            lost = sum(bool(measured.failure) for measured in sound)
            fault = each.fault
            return Survived(fault.name, victim.failure, fault.kind, lost, victim.message, recovery)

        return campaign.run_faults(prepared, attempt)


# -- mutants ----------------------------------------------------------------------------------------------------------


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


@dataclass(frozen=True)
class Subject:
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
    def text(self) -> MutableSource:
        return MutableSource(source_of(self.work, self.config), self.work.machine)

    @property
    def edits(self) -> list[Edit]:
        return self.text.edits

    def legal_edits(self, rng: Random) -> Iterator[int]:
        """Those that compile to other machine code, which is kept until it was tried; a few are compiled at once."""
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            numbers = self.text.shuffled(rng)
            while some := list(itertools.islice(numbers, _BATCH)):
                for number, code in zip(some, pool.map(self.text.mutant, some), strict=True):
                    if code is not None:
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

    def results(self, built: Built, seed: int) -> bytes:
        """What it computes of random inputs, on the card, in this process."""
        from tilewright.runtime.cuda.executor import GpuExecutor

        inputs = len(built.sources)
        plan, objects = plan_of([Run(built, range(inputs), 0)], self.work.machine, inputs=inputs, outputs=1)
        executor = GpuExecutor(plan, [], objects)
        nodes = self.work.task.graph.inputs
        arrays = [array(*node.shape, seed=seed + n, dtype=node.dtype) for n, node in enumerate(nodes)]
        given = [packed(arrays[n], packing) for n, packing in zip(built.sources, built.packings, strict=True)]
        output = self.work.task.output
        result = np.empty(output.type.size, output.dtype.numpy)
        executor.run(given, [result])
        return result.tobytes()

    def is_equivalent(self, mutant: Built) -> bool:
        """By the bits of two results that it was not asked for in its check."""
        return all(self.results(mutant, seed) == self.results(self.built, seed) for seed in (1000, 2000))


def subjects(machine: GpuMachine, rng: Random) -> list[Subject]:
    """Each task with some of its kernels, of different templates and sketches as far as there are such."""
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
        found.extend(Subject(work, config) for config in single[:_PROGRAMS])
    return found


def outcomes_of(runner: Runner, subject: Subject, numbers: Sequence[int]) -> list[str]:
    """Of each edit the kind of failure, EQUIVALENT, or PASSED: wrong and not noticed."""
    runner.build(subject.job, [])  # draws the exam
    found: list[str] = []
    for number in numbers:
        mutant = subject.mutant(number)
        measured = runner.trial(subject.job, subject.config, Made(mutant, 0.0), best=BEST)
        if measured.failure:
            found.append(measured.failure)
        else:
            found.append(EQUIVALENT if subject.is_equivalent(mutant) else PASSED)
    return found


def run_mutants(machine: GpuMachine, count: int, seed: int) -> int:
    """How many of `count` wrong ones passed the check."""
    with Runner(0, device=0, builders=1) as runner:
        return campaign.run_mutants(
            count,
            seed,
            subjects(machine, Random(seed)),
            lambda subject, numbers: outcomes_of(runner, subject, numbers),
            _BATCH,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=50, help="faults")
    parser.add_argument("--mutants", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TILEWRIGHT_CACHE_DIR"] = folder  # nothing of this may stay in the cache
        machine, began = detect(), time.monotonic()
        outcomes = run_faults(machine, options.count)
        seconds = time.monotonic() - began
        print(campaign.report(outcomes, seconds))
        passed = run_mutants(machine, options.mutants, options.seed) if options.mutants else 0
    if options.json:
        found = {
            "outcomes": [asdict(outcome) for outcome in outcomes],
            "seconds": seconds,
            "mutants": options.mutants,
            "passed": passed,
        }
        options.json.write_text(json.dumps(found, indent=1))
    late = any(outcome.recovery > RECOVERY_SECONDS for outcome in outcomes)
    sys.exit(0 if all(outcome.is_right for outcome in outcomes) and not late and not passed else 1)


if __name__ == "__main__":
    main()
