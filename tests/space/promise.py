"""No element beyond the promised bound: kernels of all templates and sketch rules, on inputs of every magnitude.

    python -m tests.space.promise --kernels 300 --draws 350 --jobs 2

Each kernel is held to the bound of its own template, Winograd's to that of its own tile size (`promise_bounds.py`,
which computes in float64 and shares no code with the compiler's validation). Data and weights are drawn anew each time
(`promise_tasks.py`). Kernels run

    host       as this processor is
    adder      for a core that adds alongside its FMAs (Zen 4), where paired products are offered; AVX-512 runs it
    avx2       without AVX-512, as TILEWRIGHT_CPU_FEATURES=avx2
    baseline   without AVX, as TILEWRIGHT_CPU_FEATURES=baseline
    cuda       as CUDA text on the emulated GPU: a tenth as many kernels, of at most 10 draws; with g++ only

A violation is printed with its seed. The run also fails where a template or a rule was never taken on a machine that it
is for. One CPU kernel for each takes about 70 kernels.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import numpy as np

from tests.space.checked import stored_for
from tests.space.promise_bounds import Reference, rule_of
from tests.space.promise_tasks import KINDS, drawn
from tilewright.codegen.cuda.build import source_of
from tilewright.errors import SpaceError
from tilewright.graph.task import Task
from tilewright.hw import CpuMachine, Machine, host
from tilewright.hw.gpu import H200
from tilewright.loops.ir import Program
from tilewright.measure.single import SingleKernel
from tilewright.runtime import host as runtime_host
from tilewright.space.candidates import Candidates
from tilewright.space.catalog import SKETCHED
from tilewright.space.space import Config
from tilewright.space.template import Applied, GpuWork, Work
from tilewright.space.templates.cpu import TEMPLATES
from tilewright.space.templates.cpu.fast_algebra.paired import AppliedPaired
from tilewright.space.templates.cpu.fast_algebra.row_gemm import row_gemm_of
from tilewright.space.templates.cpu.gemm import gemm_of
from tilewright.testing.emulator.run import COMPILER, Emulated

PER_TASK = 8  # kernels
EMULATED_DRAWS = 10
_COVERING = 6  # rounds through all kinds of tasks in which kernels are left out that cover nothing new
CUDA = "cuda"

ONLY_RELAXED = ("strassen", "strassen_packed", "strassen_transposed")
CPU_RULES = ("micro", "pack", "stage", "copy", "tile", "again", "rfactor", "cache", "softmax")
OTHER_RULES = ("skip", "inline", "elementwise", "rows", "tensorise")
# Their sums are in float32, in any order.
GPU_RULES = ("matmul-norm", "matrices", "blocks", "threads", "warps", "fetch", "cross")
CUDA_TAKEN = ("default", "sketch:tiled", "sketch:block-reduction")
# What some templates need of a machine.
NEEDS: Mapping[str, Callable[[CpuMachine], bool]] = {
    "paired": lambda machine: machine.vector_registers >= 32,
    "contraction_int8": lambda machine: machine.dot4_bytes > 0,
}


# -- machines ---------------------------------------------------------------------------------------------------------


def machines() -> dict[str, CpuMachine]:
    """What this processor runs."""
    here = host()
    found = {"host": here}
    if "avx512f" in here.features:
        found["adder"] = replace(here, cpu="znver4")
    if "avx512f" in here.features and "avx2" in here.features:
        found["avx2"] = _restricted(here, "avx2", vector_bytes=32)
    if "avx" in here.features:
        found["baseline"] = _restricted(here, "baseline", vector_bytes=16)
    return found


def _restricted(machine: CpuMachine, level: str, vector_bytes: int) -> CpuMachine:
    """Described as `host` describes it with fewer features."""
    features = set(machine.features) & runtime_host.LEVELS[level]
    return replace(
        machine,
        features=tuple(sorted(features)),
        absent=tuple(sorted({*machine.absent, *machine.features} - features)),
        vector_bytes=vector_bytes,
        vector_registers=16,
        has_fma="fma" in features,
    )


def machine_of(name: str) -> Machine:
    return H200 if name == CUDA else machines()[name]


def expected(name: str) -> set[str]:
    """The templates and rules that must be taken on a machine."""
    if name == CUDA:
        return set(CUDA_TAKEN)
    machine = machines()[name]
    templates = {template.name for template in TEMPLATES} - {*ONLY_RELAXED}
    missing = {each for each, has in NEEDS.items() if not has(machine)}
    return {*(templates - missing), "default", *(SKETCHED + rule for rule in CPU_RULES)}


def taken_by(name: str, template: str) -> tuple[str, ...]:
    """What a kernel of a template counts for: a sketch on a CPU for each of its rules."""
    if name == CUDA or not template.startswith(SKETCHED):
        return (template,)
    rules = template.removeprefix(SKETCHED).split("#")[0].split("+")
    return tuple(SKETCHED + rule for rule in rules)


# -- kernels ----------------------------------------------------------------------------------------------------------


def offered(task: Task, name: str) -> dict[str, Applied]:
    """What computes a task on a machine, by name; paired products also where they do not pay."""
    machine = machine_of(name)
    work = Work(task, machine) if isinstance(machine, CpuMachine) else GpuWork(task, H200, "fast")
    try:
        found = {applied.space.template: applied for applied in Candidates.of(work).applied}
    except SpaceError:  # a GPU computes some tasks in several parts only
        return {}
    refused = [template for template in found if template in ONLY_RELAXED]
    assert not refused, f"{refused} has no bound and is offered"
    if isinstance(machine, CpuMachine) and "paired" not in found and NEEDS["paired"](machine):
        gemm = gemm_of(work.formula) if isinstance(work, Work) else None
        sums = row_gemm_of(gemm)
        if sums is not None:
            applied = AppliedPaired(work, sums, max_uncertified=math.inf)
            if next(applied.space.configs(), None) is not None:
                found["paired"] = applied
    return found


class Kernel:
    """A config, built for a machine: a result of each of its inputs."""

    def __init__(self, name: str, applied: Applied, config: Config) -> None:
        self.machine, self.config, self.rule = name, config, rule_of(config)
        program = applied.program(config)
        assert isinstance(program, Program)
        self.program = program
        self.emulated: Emulated | None = None
        if name == CUDA:
            self.folder = tempfile.TemporaryDirectory()
            self.emulated = Emulated(source_of(program), Path(self.folder.name))
        else:
            machine = machine_of(name)
            assert isinstance(machine, CpuMachine)
            self.single = SingleKernel(program, machine, threads=1)

    def __call__(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        if self.emulated is not None:
            return self.emulated([arrays])[0]
        return self.single(stored_for(self.program, arrays))


# -- the run ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """Some kernels of one task: of these machines and templates."""

    kind: str
    seed: int
    kernels: tuple[tuple[str, str], ...]
    draws: int


@dataclass(frozen=True)
class Violation:
    kind: str
    seed: int
    draw: int
    machine: str
    config: str
    excess: float  # the error relative to the bound

    def __str__(self) -> str:
        where = f"{self.kind}, seed {self.seed}, draw {self.draw}, on {self.machine}"
        return f"{self.config}: {self.excess:.3g} times the bound ({where})"


@dataclass
class Result:
    taken: Counter[tuple[str, str]]
    worst: dict[str, float]  # the largest error relative to the bound, of each template
    violations: list[Violation]

    @classmethod
    def empty(cls) -> Result:
        return cls(Counter(), {}, [])

    def add(self, other: Result) -> None:
        self.taken += other.taken
        self.violations += other.violations
        for name, excess in other.worst.items():
            self.worst[name] = max(self.worst.get(name, 0.0), excess)

    def never_taken(self, names: Sequence[str]) -> list[str]:
        counted: Counter[tuple[str, str]] = Counter()
        for (name, template), count in self.taken.items():
            counted.update({(name, each): count for each in taken_by(name, template)})
        return [
            f"{each} on {name}"
            for name in names
            for each in sorted(expected(name))
            if not counted[name, each]
        ]


def planned(kernels: int, draws: int, seed: int, names: Sequence[str]) -> Iterator[Part]:
    """Kernels of random tasks, kind by kind: first what was not taken yet, then what was taken least."""
    counted = Counter({(name, each): 0 for name in names for each in expected(name)})
    left, number = kernels, 0
    while left > 0:
        kind = list(KINDS)[number % len(KINDS)]
        random = Random(seed * 1_000_003 + number)
        task = KINDS[kind](Random(seed + number))
        found = [(name, template) for name in names for template in offered(task, name)]
        random.shuffle(found)
        covers = number < _COVERING * len(KINDS) and not all(counted.values())
        chosen: list[tuple[str, str]] = []
        while found and len(chosen) < min(PER_TASK, left):
            next_one = min(found, key=lambda pair: min(counted[pair[0], each] for each in taken_by(*pair)))
            keys = [(next_one[0], each) for each in taken_by(*next_one)]
            if covers and all(counted.get(key, 1) for key in keys):
                break
            found.remove(next_one)
            chosen.append(next_one)
            counted.update(keys)
        if chosen:
            yield Part(kind, seed + number, tuple(chosen), draws)
        left -= len(chosen)
        number += 1


def run(part: Part) -> Result:
    result = Result.empty()
    task, random = KINDS[part.kind](Random(part.seed)), Random(part.seed)
    kernels: list[Kernel] = []
    for name, template in part.kernels:
        applied = offered(task, name)[template]
        config = applied.space.sample(random)
        assert config is not None
        kernels.append(Kernel(name, applied, config))
        result.taken[name, template] += 1
    for draw in range(part.draws):
        arrays = drawn(task, part.seed * 1_000_003 + draw)
        reference = Reference(task, arrays)
        for kernel in list(kernels):
            excess = beyond(kernel(arrays), reference, kernel.config)
            template = kernel.config.template.split("#")[0]
            result.worst[template] = max(result.worst.get(template, 0.0), excess)
            if not excess <= 1.0:
                where = part.kind, part.seed, draw, kernel.machine
                result.violations.append(Violation(*where, str(kernel.config), excess))
                kernels.remove(kernel)
    return result


def beyond(result: np.ndarray, reference: Reference, config: Config) -> float:
    """The largest error of an element relative to its bound."""
    allowed = reference.allowed(rule_of(config))
    error = np.abs(result.reshape(reference.result.shape).astype(np.float64) - reference.result)
    excess = error / np.maximum(allowed, np.finfo(np.float32).smallest_subnormal)
    return float(np.nan_to_num(excess, nan=np.inf).max(initial=0.0))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kernels", type=int, default=300)
    parser.add_argument("--draws", type=int, default=350)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--emulated", type=int, help="CUDA kernels; by default a tenth of --kernels")
    options = parser.parse_args(arguments)
    names = list(machines())
    emulated = options.kernels // 10 if options.emulated is None else options.emulated
    emulated = emulated if COMPILER is not None else 0
    parts = [*planned(options.kernels, options.draws, options.seed, names)]
    parts += planned(emulated, min(options.draws, EMULATED_DRAWS), options.seed, [CUDA])
    result, done = Result.empty(), 0
    with ProcessPoolExecutor(options.jobs) as pool:
        running = {pool.submit(run, part): part for part in parts}
        for future in as_completed(running):
            result.add(found := future.result())
            done += len(running[future].kernels)
            for violation in found.violations:
                print(violation, file=sys.stderr)
            print(f"{done} kernels, {len(result.violations)} beyond their bound", file=sys.stderr, flush=True)
    counted = Counter(dict.fromkeys((*names, CUDA), 0))
    for (name, _), count in result.taken.items():
        counted[name] += count
    print(", ".join(f"{name} {count}" for name, count in counted.items()), "kernels")
    for template, excess in sorted(result.worst.items()):
        of_it = sum(count for (_, each), count in result.taken.items() if each.split("#")[0] == template)
        print(f"{template:28} {of_it:4} kernels, at most {excess:.3f} of the bound")
    missing = result.never_taken([*names, *([CUDA] if emulated else [])])
    for each in missing:
        print(f"never taken: {each}")
    for violation in result.violations:
        print(violation)
    print(f"{len(result.violations)} kernels beyond their bound")
    return 1 if missing or result.violations else 0


if __name__ == "__main__":
    sys.exit(main())
