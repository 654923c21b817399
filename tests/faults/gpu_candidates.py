"""Kernels that hang, go astray, do not start or are wrong by a little, measured on a GPU: each costs itself alone.

    python -m tests.faults.gpu_candidates --count 50 --json FILE

Every fault is a candidate whose machine code is not what its config says: the text of its kernel was changed, compiled,
and put into the cache where the runner's processes find it. Everything else is as always. Each must come back as its
kind, nothing but it may be lost, and where its process had to be replaced the next one must go on within 5 seconds.
All of it needs a card. Kernels with one mistake in their text each: `gpu_mutants.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from tests.faults import campaign
from tests.faults.campaign import Survived
from tests.space.checked import Inputs
from tilewright.codegen.cache import ObjectCache
from tilewright.codegen.cuda import toolchain
from tilewright.codegen.cuda.build import SYMBOL, GpuSource, identity
from tilewright.codegen.cuda.tensor import tensor_source
from tilewright.dtypes import DType
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.hw.gpu import GpuMachine, detect
from tilewright.measure.runner import Runner
from tilewright.measure.trial import TaskJob
from tilewright.runtime.plan import VendorCall
from tilewright.space.candidates import Candidates
from tilewright.space.space import Config
from tilewright.space.template import Work
from tilewright.space.templates.cuda.matmul import TensorCores
from tilewright.tune.choose import ranked

RECOVERY_SECONDS = 5.0
BEST = 1e-3  # seconds: what a hanging kernel is compared with
# A hang ends by itself after this: a card that this process cannot reset must not be lost to a test.
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
# What lies in shared memory before the kernel has written there: in later launches zeros of its own, unless somebody
# fills it between them.
_LEFT_OVER = """__shared__ volatile unsigned left[32];
  const unsigned before = left[threadIdx.x % 32];
  __syncthreads();
  left[threadIdx.x % 32] = 0;
  if (before == 0xffffffffu || before == 0x7b7b7b7bu || before == 0xfbfbfbfbu) return;"""
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
    Fault("reads shared memory that it has not written", "wrong", at_head(_LEFT_OVER)),
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=50, help="faults")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TILEWRIGHT_CACHE_DIR"] = folder  # nothing of this may stay in the cache
        machine, began = detect(), time.monotonic()
        outcomes = run_faults(machine, options.count)
        seconds = time.monotonic() - began
        print(campaign.report(outcomes, seconds))
    if options.json:
        found = {
            "outcomes": [asdict(outcome) for outcome in outcomes],
            "seconds": seconds,
        }
        options.json.write_text(json.dumps(found, indent=1))
    late = any(outcome.recovery > RECOVERY_SECONDS for outcome in outcomes)
    sys.exit(0 if all(outcome.is_right for outcome in outcomes) and not late else 1)


if __name__ == "__main__":
    main()
